"""Tensor names to roles. Families are patterns of names, never lists of models.

| family | block | experts | shared | scales |
| --- | --- | --- | --- | --- |
| DeepSeek-V4, V4.1 | ``layers.N.ffn``; drafts ``mtp.N.ffn`` | ``E.w1/w3/w2`` | ``shared_experts.w1/..`` | ``scale`` |
| DeepSeek-V3, GLM | ``layers.N.mlp`` | ``E.gate_proj/up_proj/down_proj`` | ``shared_experts.`` | ``weight_scale_inv`` |
| Qwen | ``layers.N.mlp`` | the same | ``shared_expert.``, ``shared_expert_gate`` | ``weight_scale_inv`` |
| MiniMax | ``..block_sparse_moe`` | ``E.w1/w3/w2`` | ``shared_experts.gate_proj/..`` | ``weight_scale_inv`` |
| stacked, Transformers | any | ``gate_up_proj``, ``down_proj`` | any | ``_scale_inv`` |
| stacked, vLLM | any | ``w13_weight``, ``w2_weight`` | any | ``_weight_scale`` |

Any prefix may stand in front (``model.language_model.layers``). Gate rows precede up rows in every stacked name here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Matrix = Literal["gate", "up", "down", "gate_up"]

MATRICES: dict[str, Matrix] = {
    "w1": "gate", "w3": "up", "w2": "down", "w13": "gate_up",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up",
}  # fmt: skip

KINDS = {
    "": "values", "weight": "values", "weight_packed": "values",
    "scale": "scales", "scale_inv": "scales", "weight_scale": "scales", "weight_scale_inv": "scales",
    "weight_scale_2": "global_scale", "input_scale": "input_scale",
}  # fmt: skip
"""Suffixes and what they hold. Every scale here is a multiplier, ``weight_scale_inv`` too."""

SHARED_NAMES = ("shared_experts", "shared_expert", "shared_mlp")

ROUTER = {
    "gate.weight": "weight", "router.weight": "weight", "router.gate.weight": "weight",
    "gate.bias": "bias", "gate.e_score_correction_bias": "bias", "e_score_correction_bias": "bias",
    "expert_bias": "bias", "gate.bias_vl": "image_bias", "gate.tid2eid": "table",
    "shared_expert_gate.weight": "shared_gate",
}  # fmt: skip
"""Names under a block that choose experts and weigh them. ``image_bias`` serves image tokens (V4.1)."""

_PLACE = re.compile(r"(?:^|\.)(layers|mtp|blocks|h)\.(\d+)(?=\.|$)")
_DIGITS = re.compile(r"\d+")
_LEAF = re.compile(r"(w13|w1|w2|w3|gate_up_proj|gate_proj|up_proj|down_proj)(?:[._](.+))?")
_SHARED = rf"(?:{'|'.join(SHARED_NAMES)})\.(?P<leaf>.+)"
_ROUTER = rf"(?P<router>{'|'.join(map(re.escape, ROUTER))})"
_REST = re.compile(rf"(?P<block>.+?)\.(?:{_SHARED}|{_ROUTER})")


@dataclass(frozen=True)
class Slot:
    """Where a tensor of one expert, or of a stack, belongs.

    Args:
        matrix: which projection.
        kind: "values", "scales", "global_scale", "input_scale", or "?" and a suffix that is not known.
    """

    matrix: Matrix
    kind: str

    @property
    def known(self) -> bool:
        return not self.kind.startswith("?")


@lru_cache(maxsize=4096)
def slot_of(leaf: str) -> Slot | None:
    """The slot of a name's last part, e.g. ``w1.scale`` or ``gate_up_proj``; None if it names no projection."""
    match = _LEAF.fullmatch(leaf)
    if match is None:
        return None
    suffix = match[2] or ""
    return Slot(MATRICES[match[1]], KINDS.get(suffix, f"?{suffix}"))


@dataclass
class Block:
    """The names of one MoE layer, sorted into roles.

    Args:
        name: everything before ``.experts.``, e.g. ``model.layers.3.mlp``.
        index: layer number, or the number of the draft layer.
        experts: per-expert names, by expert id.
        stacked: names that hold all experts at once.
        shared: names of the shared expert.
        router: names by role (see ``ROUTER``).
        strange: names below ``experts.`` or the shared expert that fit no role.
    """

    name: str
    index: int
    in_draft: bool
    experts: dict[int, dict[Slot, str]] = field(default_factory=dict)
    stacked: dict[Slot, str] = field(default_factory=dict)
    shared: dict[Slot, str] = field(default_factory=dict)
    router: dict[str, str] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)

    @property
    def has_experts(self) -> bool:
        return bool(self.experts or self.stacked)

    def names(self) -> list[str]:
        """Every name of the layer."""
        found = [name for slots in self.experts.values() for name in slots.values()]
        return [*found, *self.stacked.values(), *self.shared.values(), *self.router.values(), *self.strange]


def collect(names: Iterable[str]) -> list[Block]:
    """The MoE blocks among ``names``: main layers in order, then draft layers. Dense layers are left out.

    A block whose experts are gone but whose shared expert or router is there is kept: its layer is incomplete.
    """
    blocks: dict[str, Block] = {}

    def block(name: str) -> Block:
        if name not in blocks:
            blocks[name] = Block(name, *_place(name))
        return blocks[name]

    for name in names:
        head, mark, tail = name.partition(".experts.")
        if mark:
            _add_routed(block(head), name, tail)
        elif match := _REST.fullmatch(name):
            found = block(match["block"])
            if match["router"]:
                found.router[ROUTER[match["router"]]] = name
            else:
                _add(found.shared, slot_of(match["leaf"]), name, found)
    moe = [b for b in blocks.values() if b.has_experts or (b.strange and b.router)]
    moe += _without_experts(blocks.values(), moe)
    return sorted(moe, key=lambda b: (b.in_draft, b.index, b.name))


def _without_experts(blocks: Iterable[Block], moe: list[Block]) -> list[Block]:
    """Blocks that are MoE layers by their shared expert, or by a router under a name such as the others have.

    A router alone says nothing: attention has gates too. Nor is anything missing where another block of the same layer
    holds the experts.
    """
    layers = {_layer_of(b.name) for b in moe}
    shapes = {_DIGITS.sub("#", b.name) for b in moe}
    lonely = [b for b in blocks if not b.has_experts and _layer_of(b.name) not in layers]
    return [b for b in lonely if b.shared or (b.router and _DIGITS.sub("#", b.name) in shapes)]


def _layer_of(block: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp``."""
    places = list(_PLACE.finditer(block))
    return block[: places[-1].end()] if places else block


def _place(name: str) -> tuple[int, bool]:
    """Layer number of a block, and whether it stands under a draft module."""
    places = _PLACE.findall(name)
    return (int(places[-1][1]) if places else 0), "mtp" in name.split(".")


def _add_routed(block: Block, name: str, tail: str) -> None:
    number, _, leaf = tail.partition(".")
    if number.isdecimal():
        _add(block.experts.setdefault(int(number), {}), slot_of(leaf), name, block)
    elif tail == "e_score_correction_bias":
        block.router["bias"] = name
    else:
        _add(block.stacked, slot_of(tail), name, block)


def _add(slots: dict[Slot, str], slot: Slot | None, name: str, block: Block) -> None:
    if slot is None or slot in slots:
        block.strange.append(name)
    else:
        slots[slot] = name
