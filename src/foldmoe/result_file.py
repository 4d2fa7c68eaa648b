"""Result files: one JSON object each, with its kind, read back into the dataclass that wrote it."""

from __future__ import annotations

import json
import shlex
import types
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)


def save(path: Path | str, kind: str, result: DataclassInstance) -> None:
    """Write a dataclass of plain values (numbers, text, tuples, lists, dictionaries, dataclasses) as JSON.

    The file is written whole or not at all: a reader, or a crash, never sees half of it.

    Args:
        path: written over if it exists; folders that it needs are made.
        kind: what the file is, e.g. ``bench-layer``; readers go by it.
    """
    part = Path(f"{path}.part")
    part.parent.mkdir(parents=True, exist_ok=True)  # a run of an hour must not end in a missing folder
    part.write_text(json.dumps({"kind": kind, **asdict(result)}, indent=1) + "\n")
    part.replace(path)


def read(path: Path | str) -> dict[str, Any]:
    """A result file as it is, its ``kind`` included.

    Raises:
        ValueError: a file that is no JSON object with a kind.
        OSError: no such file.
    """
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no result file: it is not JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise ValueError(f"{path} is no result file: it should be a JSON object with a 'kind', e.g. bench-layer")
    return found


def load(path: Path | str, kind: str, cls: type[T], *, partial: bool = False) -> T:
    """Read what :func:`save` wrote.

    Args:
        partial: see :func:`build`.

    Raises:
        ValueError: another kind of file, or a field that is missing, unknown or of another type, by name.
    """
    found = read(path)
    if found["kind"] != kind:
        raise ValueError(f"{path} holds {found['kind']!r}; expected {kind!r}")
    return build(cls, {key: value for key, value in found.items() if key != "kind"}, str(path), partial=partial)


def build(cls: type[T], values: Mapping[str, Any], where: str, *, partial: bool = False) -> T:
    """A dataclass from what JSON makes of it.

    Args:
        cls: its fields' annotations are what is checked.
        values: by field name; a field with a default may be absent.
        where: the file, for messages.
        partial: pass over keys that are no field, for a reader that wants some of a larger object.

    Raises:
        ValueError: naming the file, the field, what was found and what was expected.
    """
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}
    if not partial and (unknown := sorted(set(values) - set(known))):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; was it written by a newer foldmoe?")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}: no {name!r}; was it written by an older foldmoe? Measure again")
    found = {name: _value(hints[name], values[name], f"{where}: {name}", partial) for name in known if name in values}
    return cls(**found)


def command(words: Sequence[str], request: DataclassInstance, usual: Mapping[str, Any] | None = None) -> str:
    """The command line that asks for what ``request`` holds, each field an option; defaults are left out.

    Args:
        words: the command.
        request: a dataclass of plain values; of a dictionary every entry is an option ``--name key=entry``.
        usual: values to leave out in place of the fields' own defaults.
    """
    found = list(words)
    for option in fields(request):
        value, name = getattr(request, option.name), f"--{option.name.replace('_', '-')}"
        if value == (usual or {}).get(option.name, option.default):
            continue
        if isinstance(value, dict):
            found += [word for key, entry in value.items() for word in (name, f"{key}={entry}")]
        elif isinstance(value, bool):
            found.append(name if value else name.replace("--", "--no-"))
        else:
            found += [name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return shlex.join(found)


def _value(hint: Any, value: Any, where: str, partial: bool) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        chosen = type(None) if value is None and type(None) in parts else next(p for p in parts if p is not type(None))
        return _value(chosen, value, where, partial)
    if origin is Literal and value in parts:
        return value
    if origin in (list, tuple) and isinstance(value, list):
        if origin is tuple and parts[-1] is not Ellipsis:
            if len(parts) != len(value):
                raise ValueError(f"{where}: {len(value)} values; expected {len(parts)}")
            pairs = enumerate(zip(parts, value, strict=True))
            return tuple(_value(part, entry, f"{where}[{i}]", partial) for i, (part, entry) in pairs)
        return origin(_value(parts[0], entry, f"{where}[{i}]", partial) for i, entry in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _value(parts[1], entry, f"{where}[{key!r}]", partial) for key, entry in value.items()}
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return build(hint, value, where, partial=partial)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = hint.__name__ if isinstance(hint, type) else str(hint)
    raise ValueError(f"{where}: {value!r:.60}; expected {wanted}")
