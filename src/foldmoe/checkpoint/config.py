"""What config.json says of the MoE layers, under whatever key a family uses. Tensors come first; this fills gaps."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from foldmoe.checkpoint.shards import CheckpointError
from foldmoe.moe.activation import Activation

if TYPE_CHECKING:
    from collections.abc import Mapping

_SILU = ("silu", "swish", "swiglu")
_OAI = "swigluoai"
"""gpt-oss's: alpha 1.702 and a clamp at 7 unless config.json says otherwise, and up + 1."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about every MoE layer; None where config.json is silent.

    Args:
        hidden, layers, experts, top_k, width: sizes of the main layers.
        shared_width: of all shared experts together (checkpoints store them as one matrix).
        draft_experts, draft_top_k: of DSpark draft layers that have their own.
        expert_dtype: as written, e.g. "fp4".
        quant_method: as written, e.g. "fp8".
        weight_block: (rows, columns) a scale.
        dynamic: activations are quantised per token at run time.
        activation: of routed and shared experts.
        odd_activation: why the activation is none that is known here; None if it is.
        scoring, renormalize, groups, top_groups, routed_scale: how the router weighs experts.
    """

    hidden: int | None = None
    layers: int | None = None
    experts: int | None = None
    top_k: int | None = None
    width: int | None = None
    shared_width: int | None = None
    draft_experts: int | None = None
    draft_top_k: int | None = None
    expert_dtype: str | None = None
    quant_method: str | None = None
    weight_block: tuple[int, int] | None = None
    dynamic: bool = False
    activation: Activation = field(default_factory=Activation)
    odd_activation: str | None = None
    scoring: str | None = None
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    routed_scale: float = 1.0

    @classmethod
    def of(cls, config: Mapping[str, Any], path: str = "config.json") -> ModelFacts:
        """Read a config.json; a nested ``text_config`` wins over the keys around it.

        Args:
            path: of the file, for messages.

        Raises:
            CheckpointError: a value that is no number where one belongs, or out of its range; the message names file
                and key.
        """
        nested = config.get("text_config")
        keys = _Keys({**config, **nested} if isinstance(nested, dict) else config, path)
        found = keys.content.get("quantization_config")
        quantization = _Keys(found if isinstance(found, dict) else {}, path)
        block = quantization.content.get("weight_block_size")
        width = keys.count("moe_intermediate_size", "moe_inter_dim")
        if width is None and keys.first("num_local_experts"):
            width = keys.count("intermediate_size")
        experts = keys.count("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
        routes = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
        return cls(
            hidden=keys.count("hidden_size"),
            layers=keys.count("num_hidden_layers"),
            experts=experts,
            top_k=keys.count(*routes, least=1 if experts else 0) or None,
            width=width,
            shared_width=_shared_width(keys, width),
            draft_experts=keys.count("dspark_n_routed_experts") or None,
            draft_top_k=keys.count("dspark_num_experts_per_tok", "dspark_n_activated_experts") or None,
            expert_dtype=keys.text("expert_dtype") or quantization.text("expert_dtype"),
            quant_method=quantization.text("quant_method"),
            weight_block=(block[0], block[1]) if isinstance(block, list) and len(block) == 2 else None,
            dynamic=quantization.content.get("activation_scheme") == "dynamic",
            activation=_activation(keys),
            odd_activation=_odd_activation(keys),
            scoring=keys.text("scoring_func", "moe_router_activation_func"),
            renormalize=bool(keys.content.get("norm_topk_prob", True)),
            groups=keys.count("n_group") or 1,
            top_groups=keys.count("topk_group") or 1,
            routed_scale=keys.number("routed_scaling_factor", zero=False) or 1.0,
        )


@dataclass(frozen=True)
class _Keys:
    """A JSON object of config.json, and how its values are read: null is as good as no key."""

    content: Mapping[str, Any]
    path: str

    def first(self, *names: str) -> tuple[str, Any] | None:
        """The first of ``names`` that has a value, and the value."""
        return next(((name, self.content[name]) for name in names if self.content.get(name) is not None), None)

    def count(self, *names: str, least: int = 0) -> int | None:
        """A whole number of at least ``least``; None for a list, which holds one a layer (Hunyuan)."""
        found = self.first(*names)
        if found is None or isinstance(found[1], list):
            return None
        if type(found[1]) is not int or found[1] < least:
            raise self._wrong(found, f"a whole number of at least {least}")
        return found[1]

    def number(self, name: str, *, zero: bool = True) -> float | None:
        """A finite number that is not negative, nor zero unless it may be."""
        found = self.first(name)
        if found is None:
            return None
        if type(found[1]) not in (int, float) or not (0 < found[1] < inf or (zero and found[1] == 0)):
            raise self._wrong(found, f"a finite number {'of at least' if zero else 'above'} 0")
        return float(found[1])

    def text(self, *names: str) -> str | None:
        """A string."""
        found = self.first(*names)
        if found is not None and not isinstance(found[1], str):
            raise self._wrong(found, "text")
        return found[1] if found else None

    def _wrong(self, found: tuple[str, Any], expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {found[0]} is {found[1]!r}, expected {expected}")


def _shared_width(keys: _Keys, width: int | None) -> int | None:
    stated = keys.count("shared_expert_intermediate_size", "shared_intermediate_size")
    count = keys.count("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    if stated is not None:
        return stated * (count or 1)
    return width * count if width is not None and count else None


def _activation(keys: _Keys) -> Activation:
    limit = keys.number("swiglu_limit") or None
    if _activation_name(keys) != _OAI:
        return Activation(limit)
    return Activation(limit or 7.0, keys.number("swiglu_alpha") or 1.702, 1.0)


def _activation_name(keys: _Keys) -> Any:
    return (keys.first("hidden_act", "hidden_activation") or ("", "silu"))[1]


def _odd_activation(keys: _Keys) -> str | None:
    """An activation that is not known must never be run as if it were ``silu(gate) * up``."""
    name = _activation_name(keys)
    if name not in (*_SILU, _OAI):
        return f"config.json: the activation is {name!r}; only silu(gate) * up and swigluoai are known here"
    known = ("swiglu_limit", "swiglu_alpha") if name == _OAI else ("swiglu_limit",)
    odd = [key for key, value in keys.content.items() if key.startswith("swiglu_") and key not in known and value]
    if odd:
        listed = ", ".join(f"{key} {keys.content[key]}" for key in odd)
        return f"config.json: the activation has parameters that are not known here ({listed})"
    return None
