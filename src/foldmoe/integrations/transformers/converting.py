"""Tensors that Transformers converts as it loads: q, k and v kernels made one, or one matrix split into four."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from foldmoe.integrations.transformers.naming import Names


class Conversions:
    """Tensors gathered by the parameter they make, then converted by Transformers' own code.

    Args:
        model: the model to load; its parameters' shapes say where to split.
        names: its naming.
    """

    def __init__(self, model: Any, names: Names) -> None:
        self._model = model
        self._names = names
        self._converters: dict[str, Any] = {}
        self._sources: dict[str, list[str]] = {}

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        """(first parameter made, checkpoint names it is made from) of every conversion."""
        yield from self._sources.items()

    def add(self, name: str, tensor: Tensor, key: str, pattern: str) -> None:
        """Gather a tensor of any shape and dtype; ``key`` and ``pattern`` as :meth:`Names.find` gives them."""
        if key not in self._converters:
            self._converters[key] = self._names.converter(pattern)
        self._converters[key].add_tensor(key, name, pattern, tensor)
        self._sources.setdefault(key, []).append(name)

    def convert(self, key: str) -> dict[str, Tensor]:
        """Parameters by name, in the dtypes that were gathered; what was gathered for ``key`` is let go.

        Raises:
            Exception: whatever Transformers or torch raise for tensors that do not fit together.
        """
        made = self._converters.pop(key).convert(key, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
