"""What config.json says of the MoE layers, under whatever key a family uses. Tensors come first; this fills gaps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    def of(cls, config: Mapping[str, Any]) -> ModelFacts:
        """Read a config.json; a nested ``text_config`` wins over the keys around it."""
        nested = config.get("text_config")
        keys = {**config, **nested} if isinstance(nested, dict) else dict(config)
        quantization = keys.get("quantization_config")
        quantization = quantization if isinstance(quantization, dict) else {}
        block = quantization.get("weight_block_size")
        width = _count(keys, "moe_intermediate_size", "moe_inter_dim")
        if width is None and _first(keys, "num_local_experts") is not None:
            width = _count(keys, "intermediate_size")
        return cls(
            hidden=_count(keys, "hidden_size"),
            layers=_count(keys, "num_hidden_layers"),
            experts=_count(keys, "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
            top_k=_count(keys, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk"),
            width=width,
            shared_width=_shared_width(keys, width),
            draft_experts=_count(keys, "dspark_n_routed_experts") or None,
            draft_top_k=_count(keys, "dspark_num_experts_per_tok", "dspark_n_activated_experts") or None,
            expert_dtype=_first(keys, "expert_dtype") or quantization.get("expert_dtype"),
            quant_method=quantization.get("quant_method"),
            weight_block=(block[0], block[1]) if isinstance(block, list) and len(block) == 2 else None,
            dynamic=quantization.get("activation_scheme") == "dynamic",
            activation=_activation(keys),
            odd_activation=_odd_activation(keys),
            scoring=_first(keys, "scoring_func", "moe_router_activation_func"),
            renormalize=bool(keys.get("norm_topk_prob", True)),
            groups=_count(keys, "n_group") or 1,
            top_groups=_count(keys, "topk_group") or 1,
            routed_scale=float(_first(keys, "routed_scaling_factor") or 1.0),
        )


def _first(keys: Mapping[str, Any], *names: str) -> Any:
    return next((keys[name] for name in names if keys.get(name) is not None), None)


def _count(keys: Mapping[str, Any], *names: str) -> int | None:
    found = _first(keys, *names)
    return found if type(found) is int else None


def _shared_width(keys: Mapping[str, Any], width: int | None) -> int | None:
    stated = _count(keys, "shared_expert_intermediate_size", "shared_intermediate_size")
    count = _count(keys, "n_shared_experts", "num_shared_experts")
    if stated is not None:
        return stated * (count or 1)
    return width * count if width is not None and count else None


def _activation(keys: Mapping[str, Any]) -> Activation:
    limit = _first(keys, "swiglu_limit") or None
    if _activation_name(keys) != _OAI:
        return Activation(limit)
    return Activation(limit or 7.0, _first(keys, "swiglu_alpha") or 1.702, 1.0)


def _activation_name(keys: Mapping[str, Any]) -> Any:
    return _first(keys, "hidden_act", "hidden_activation") or "silu"


def _odd_activation(keys: Mapping[str, Any]) -> str | None:
    """An activation that is not known must never be run as if it were ``silu(gate) * up``."""
    name = _activation_name(keys)
    if name not in (*_SILU, _OAI):
        return f"config.json: the activation is {name!r}; only silu(gate) * up and swigluoai are known here"
    known = ("swiglu_limit", "swiglu_alpha") if name == _OAI else ("swiglu_limit",)
    odd = [key for key in keys if key.startswith("swiglu_") and key not in known and keys[key]]
    if odd:
        listed = ", ".join(f"{key} {keys[key]}" for key in odd)
        return f"config.json: the activation has parameters that are not known here ({listed})"
    return None
