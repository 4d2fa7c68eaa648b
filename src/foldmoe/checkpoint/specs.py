"""Headers and config.json to one ``LayerSpec`` a MoE layer. Tensors win; a config that disagrees becomes a note."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from foldmoe.checkpoint.audit import Audit, audit
from foldmoe.checkpoint.config import ModelFacts
from foldmoe.checkpoint.families import Block, collect
from foldmoe.checkpoint.shards import BITS, CheckpointError
from foldmoe.formats.tensor import Format
from foldmoe.moe.spec import ActivationPrecision, ExpertSpec, LayerSpec

if TYPE_CHECKING:
    from foldmoe.checkpoint.headers import Headers
    from foldmoe.checkpoint.stored import StoredSet


@dataclass(frozen=True)
class OpaqueLayer:
    """A MoE layer that is not read here, so that the engine keeps it.

    Args:
        name: as in the checkpoint.
        reasons: what stands in the way, naming tensors and dtypes.
        nbytes: stored bytes of the whole layer, router left out.
        draft: an MTP or DSpark layer.
        damage: those of the reasons that are no matter of format: tensors or facts that are missing or do not fit.
    """

    name: str
    reasons: tuple[str, ...]
    nbytes: int
    draft: bool = False
    damage: tuple[str, ...] = ()


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer of a checkpoint: its names, what they hold and the facts for planning.

    Args:
        block: names by role.
        audit: formats and sizes as stored, and everything that does not belong.
        spec: for the planner; an :class:`OpaqueLayer` where the tensors cannot be read.
    """

    block: Block
    audit: Audit
    spec: LayerSpec | OpaqueLayer

    @property
    def name(self) -> str:
        return self.block.name


_READ: WeakKeyDictionary[Headers, tuple[MoELayer, ...]] = WeakKeyDictionary()
"""Loading layer by layer asks again and again."""


def read_layers(headers: Headers) -> tuple[MoELayer, ...]:
    """All MoE layers, main ones first, then drafts; dense layers are skipped.

    Raises:
        CheckpointError: config.json states routed experts but no tensor's name is one, or a value in it is no number
            where one belongs.
    """
    if headers in _READ:
        return _READ[headers]
    facts = ModelFacts.of(headers.config, headers.config_path)
    blocks = collect(headers.tensors)
    if not blocks and facts.experts:
        some = ", ".join(sorted(headers.tensors)[:3])
        raise CheckpointError(
            f"{headers.source}: config.json states {facts.experts} routed experts, but no tensor's name is an expert's "
            f"(names found: {some}, ...)"
        )
    _READ[headers] = tuple(_layer(block, headers, facts) for block in blocks)
    return _READ[headers]


def find_layer(layers: tuple[MoELayer, ...], layer: str | int) -> MoELayer:
    """A layer by name (``model.layers.3.mlp``) or, for main layers, by number.

    Raises:
        CheckpointError: naming the layers there are.
    """
    for found in layers:
        if found.name == layer or (found.block.index == layer and not found.block.in_draft):
            return found
    raise CheckpointError(f"no MoE layer {layer!r}; there are: {', '.join(found.name for found in layers)}")


def _layer(block: Block, headers: Headers, facts: ModelFacts) -> MoELayer:
    draft = block.in_draft or (facts.layers is not None and block.index >= facts.layers)
    experts, top_k = facts.experts, facts.top_k
    if block.in_draft:
        experts, top_k = facts.draft_experts or experts, facts.draft_top_k or top_k
    table = block.router.get("table")
    if table is not None and len(headers.tensors[table].shape) == 2:
        table_k = headers.tensors[table].shape[1]
        mismatch = _differs("num_experts_per_tok", top_k, table_k, "the hash table (tid2eid) holds")
        top_k = table_k
    else:
        mismatch = []
    stated_shared = None if draft or facts.shared_width is None else facts.shared_width > 0
    found = audit(block, headers.tensors, experts=experts, shared=stated_shared)
    foreign = found.foreign
    reasons = list(found.problems)
    if facts.odd_activation:
        reasons.append(facts.odd_activation)
        foreign |= {facts.odd_activation}
    if top_k is None:
        reasons.append("config.json does not say how many experts a token gets (num_experts_per_tok)")
    elif found.routed and top_k > found.count:
        reasons.append(f"config.json: {top_k} experts a token, but the layer has {found.count}")
    if reasons or found.routed is None or top_k is None:
        nbytes = sum(headers.tensors[name].nbytes for name in block.names() if name not in block.router.values())
        damage = tuple(reason for reason in reasons if reason not in foreign)
        return MoELayer(block, found, OpaqueLayer(block.name, tuple(reasons), nbytes, draft, damage))
    precision, about_precision = _precision(found, facts)
    spec = LayerSpec(
        block.name,
        found.routed.hidden,
        top_k,
        _expert_spec(found.routed, found.count, headers),
        _expert_spec(found.shared, 1, headers) if found.shared else None,
        facts.activation,
        facts.activation,
        activations=precision,
        shared_gate="shared_gate" in block.router,
        draft=draft,
        notes=(*mismatch, *_cross_check(found.routed, found, facts, experts), *about_precision, *_other_notes(block)),
    )
    return MoELayer(block, found, spec)


def _expert_spec(stored: StoredSet, count: int, headers: Headers) -> ExpertSpec:
    plain = headers.tensors[stored.down.scales or stored.down.values].dtype
    bits = BITS[plain]
    return ExpertSpec(
        count,
        stored.width,
        stored.format,
        # As loaded: a block of rows that would reach over the boundary of gate and up is cut there.
        (gcd(stored.format.block[0], stored.width), stored.format.block[1]),
        e8m0_scales=stored.down.e8m0_scales,
        float_bytes=bits // 8 if bits > 8 else 0,
        float16=stored.format is Format.BF16 and plain == "F16",
    )


def _precision(found: Audit, facts: ModelFacts) -> tuple[ActivationPrecision, list[str]]:
    """fp8 only where the checkpoint declares dynamic FP8 activations and all weights of the layer are quantised."""
    sets = [s for s in (found.routed, found.shared) if s is not None]
    quantised = [s.format is not Format.BF16 for s in sets]
    if not facts.dynamic or not any(quantised):
        return "bf16", []
    if all(quantised):
        return "fp8", []
    return "bf16", ["config.json: activation_scheme dynamic, but part of the layer is bf16; activations stay bf16"]


def _differs(key: str, stated: object, found: object, where: str) -> list[str]:
    if stated is None or stated == found:
        return []
    return [f"config.json: {key} is {stated}, {where} {found}; the tensors decide"]


def _cross_check(routed: StoredSet, found: Audit, facts: ModelFacts, experts: int | None) -> list[str]:
    notes = _differs("hidden_size", facts.hidden, routed.hidden, "the experts' is")
    notes += _differs("number of routed experts", experts, found.count, "the layer holds")
    notes += _differs("moe_intermediate_size", facts.width, routed.width, "the routed experts' is")
    if found.shared:
        notes += _differs("width of the shared expert", facts.shared_width, found.shared.width, "the tensors' is")
    notes += _check_dtype(routed, facts)
    for who, stored in (("the routed experts have", routed), ("the shared expert has", found.shared)):
        if stored and stored.format.fp8:
            notes += _differs("weight_block_size", facts.weight_block, stored.format.block, who)
    return notes


def _check_dtype(routed: StoredSet, facts: ModelFacts) -> list[str]:
    """``expert_dtype``, or the global ``quant_method`` where that is all there is, against the routed tensors."""
    kind = "fp4" if routed.format.packed else "fp8" if routed.format.fp8 else "bf16"
    if facts.expert_dtype is not None:
        return (
            _differs("expert_dtype", facts.expert_dtype.lower(), kind, "the routed experts are")
            if (facts.expert_dtype.lower() not in (kind, routed.format.value))
            else []
        )
    if facts.quant_method == "fp8" and kind != "fp8":
        return [f"config.json: quant_method is fp8, the routed experts are {routed.format.value}; the tensors decide"]
    if facts.quant_method is None and kind != "bf16":
        return [f"config.json has no quantization_config, the routed experts are {routed.format.value}"]
    return []


def _other_notes(block: Block) -> list[str]:
    notes = [] if "weight" in block.router else ["the layer has no router (gate.weight)"]
    slots = (*next(iter(block.experts.values()), {}), *block.stacked, *block.shared)
    if any(slot.kind == "input_scale" for slot in slots):
        notes.append("static activation scales (input_scale) are not used here")
    if "image_bias" in block.router:
        notes.append("a second gate bias for image tokens: routing is the engine's")
    return notes
