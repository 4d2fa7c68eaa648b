"""Which parameter of a Transformers model a checkpoint's tensor belongs to, by Transformers' own tables."""

from __future__ import annotations

from copy import deepcopy
from typing import Any


class Names:
    """Checkpoint names to the model's own.

    Args:
        model: before its blocks are swapped, which takes names out of its state dict that the tables still ask for.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._prefix = model.base_model_prefix
        self._own = model.state_dict()

    def find(self, name: str) -> tuple[str, str | None]:
        """The model's name, and the pattern of the converter that the tensor has to pass; None if it is only renamed.

        A converter with several results is found under its first. Some tables want names in :func:`ordered`.
        """
        key, pattern = self._renamed(name, self._renamings, self._converters)
        # Models that Transformers saved mix both namings: V4's table makes every ``.norm.`` a ``.kv_norm.``, and its
        # final ``model.norm.weight`` is the model's own name already.
        if key not in self._own and name in self._own:
            return self._renamed(name, [], [])
        return key, pattern

    def converter(self, pattern: str) -> Any:
        """A ``WeightConverter`` of Transformers that holds no tensors yet."""
        return deepcopy(self._by_pattern[pattern])

    def _renamed(self, name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        found: tuple[str, str | None] = rename_source_key(name, renamings, converters, self._prefix, self._own)
        return found


def ordered(names: list[str]) -> list[str]:
    """In the order in which Transformers loads: layer 2 before layer 10, on which stacking converters depend."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)
