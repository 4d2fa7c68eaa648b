"""What clients ask for: workloads, read from a preset of the package or from a file of one's own.

A file is JSON: ``what`` (a line for people), optional ``seed``, and ``workloads`` (a list of objects with the fields of
:class:`Workload`) or ``sweep`` (``lengths``, pairs of input and output tokens, times ``concurrency``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

_PRESETS = resources.files("foldmoe.bench.serve") / "presets"
_TOKENS_READ_A_STEP = 256
_SWEEP = {"lengths", "concurrency", "prompts_at_least", "prompts_per_concurrency"}


@dataclass(frozen=True)
class Workload:
    """Random prompts of one length, answered to one length.

    Args:
        input_len: tokens of a prompt.
        output_len: tokens of an answer; end-of-sequence is ignored, so that every answer has exactly as many.
        concurrency: requests in flight at once.
        num_prompts: requests of one run.
    """

    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int

    @property
    def name(self) -> str:
        """``1024/128 x64``: input/output x concurrency."""
        return f"{self.input_len}/{self.output_len} x{self.concurrency}"

    @property
    def tokens(self) -> int:
        """All that are read and written."""
        return self.num_prompts * (self.input_len + self.output_len)

    @property
    def steps(self) -> float:
        """The server's, a first guess of what the workload costs: requests in flight share each step that writes, and
        one that reads takes some 256 tokens in the time of one that writes. V4-Flash's layers on an H200 read 15,000 a
        second, 220 in the time of a step that writes for 16 requests (docs/serving.md).
        """
        rounds = -(-self.num_prompts // self.concurrency)
        return rounds * self.output_len + self.num_prompts * self.input_len / _TOKENS_READ_A_STEP


@dataclass(frozen=True)
class WorkloadSet:
    """Workloads that are run one after the other on one server.

    Args:
        name: of the preset, or of the file.
        what: a line for people.
        workloads: in order; no two of the same lengths and concurrency.
        seed: of the prompts.
    """

    name: str
    what: str
    workloads: tuple[Workload, ...]
    seed: int = 42


def presets() -> tuple[str, ...]:
    """Names that :func:`load` knows."""
    return tuple(sorted(Path(entry.name).stem for entry in _PRESETS.iterdir()))


def load(name_or_path: str) -> WorkloadSet:
    """A preset by name, or a JSON file.

    Raises:
        ValueError: neither a preset nor a file; a file that is no JSON, or whose fields are not the documented ones.
    """
    path = Path(name_or_path)
    if name_or_path in presets():
        text = (_PRESETS / f"{name_or_path}.json").read_text()
    elif path.is_file():
        text = path.read_text()
    else:
        raise ValueError(f"no workloads {name_or_path!r}: neither a file nor one of {', '.join(presets())}")
    try:
        return parse(json.loads(text), path.stem)
    except (ValueError, TypeError) as error:
        raise ValueError(f"workloads {name_or_path}: {error}") from error


def parse(found: dict[str, Any], name: str) -> WorkloadSet:
    """The content of a file.

    Raises:
        ValueError: an unknown or missing field, a number that is not a positive integer, or the same workload twice.
    """
    if not isinstance(found, dict):
        raise ValueError(f"expected an object with workloads or a sweep, found a {type(found).__name__}")
    _fields(found, {"what", "seed", "workloads", "sweep"}, "the file")
    if ("workloads" in found) == ("sweep" in found):
        raise ValueError(f"expected either workloads or a sweep, found {', '.join(sorted(found)) or 'neither'}")
    workloads = _sweep(found["sweep"]) if "sweep" in found else tuple(map(_workload, found["workloads"]))
    names = [workload.name for workload in workloads]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"expected workloads that differ in lengths or concurrency, found {names}")
    return WorkloadSet(name, str(found.get("what", "")), workloads, int(found.get("seed", 42)))


def _workload(found: dict[str, Any]) -> Workload:
    names = {field.name for field in fields(Workload)}
    _fields(found, names, "a workload")
    if missing := sorted(names - set(found)):
        raise ValueError(f"a workload lacks {', '.join(missing)}: {found}")
    wrong = {key: value for key, value in found.items() if type(value) is not int or value < 1}
    if wrong:
        raise ValueError(f"expected positive integers, found {wrong}")
    return Workload(**found)


def _sweep(found: dict[str, Any]) -> tuple[Workload, ...]:
    _fields(found, _SWEEP, "a sweep")
    if missing := sorted(_SWEEP - set(found)):
        raise ValueError(f"a sweep lacks {', '.join(missing)}")
    least, per = found["prompts_at_least"], found["prompts_per_concurrency"]
    return tuple(
        _workload(
            {
                "input_len": input_len,
                "output_len": output_len,
                "concurrency": concurrency,
                "num_prompts": max(least, per * concurrency),
            }
        )
        for input_len, output_len in found["lengths"]
        for concurrency in found["concurrency"]
    )


def _fields(found: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(found) - known):
        raise ValueError(f"{where} has unknown fields {', '.join(unknown)}; known: {', '.join(sorted(known))}")
