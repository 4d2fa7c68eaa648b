"""Does a layer have exactly the tensors it should have? Missing, unexpected, of another shape: all in one list."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from foldmoe.checkpoint.shards import CheckpointError, ForeignFormatError
from foldmoe.checkpoint.stored import StoredSet, read_set

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foldmoe.checkpoint.families import Block, Slot
    from foldmoe.checkpoint.shards import TensorHeader


@dataclass(frozen=True)
class _Lines:
    """Problems as they are found."""

    all: list[str] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)

    def strange(self, *lines: str) -> None:
        self.all.extend(lines)
        self.foreign.update(lines)


@dataclass(frozen=True)
class Audit:
    """What a layer's names and headers say.

    Args:
        routed, shared: facts of the two sets; ``routed`` is None only if there are problems.
        count: routed experts.
        problems: everything that does not belong, one line each.
        foreign: those of them that speak of a format that is not read here, and not of damage.
    """

    routed: StoredSet | None
    shared: StoredSet | None
    count: int
    problems: tuple[str, ...]
    foreign: frozenset[str] = frozenset()

    def require(self, layer: str) -> StoredSet:
        """The routed facts.

        Raises:
            CheckpointError: one error that lists all problems.
        """
        if self.problems or self.routed is None:
            listed = "\n  ".join(self.problems)
            raise CheckpointError(f"{layer}: {len(self.problems)} problems with this layer's tensors:\n  {listed}")
        return self.routed


def audit(
    block: Block, tensors: Mapping[str, TensorHeader], *, experts: int | None = None, shared: bool | None = None
) -> Audit:
    """Check one layer against its own router and the majority of its own experts.

    Args:
        experts: number of experts that config.json states; the router's rows are asked first.
        shared: whether config.json states a shared expert.
    """
    lines = _Lines([f"unexpected: {name} {tensors[name]} fits no role of an expert" for name in sorted(block.strange)])
    problems = lines.all
    expected = _expected(block, tensors, experts)
    routed: StoredSet | None = None
    count = len(block.experts)
    if block.stacked and block.experts:
        problems.append(f"unexpected: {min(block.stacked.values())} stacks experts that are also stored one by one")
    if block.stacked and not block.experts:
        routed = _set(block.stacked, tensors, lines, stacked=True)
        count = _stacked(block, tensors, expected, problems)
    elif block.experts:
        template = _experts(block, tensors, expected, problems)
        routed = _set(block.experts[template], tensors, lines)
    elif expected and not block.strange:
        problems.append(_missing(block, list(range(expected)), expected))
    else:
        problems.append(f"missing: no tensor under {block.name}.experts is an expert's projection; expected {expected}")
    shared_set = _set(block.shared, tensors, lines) if block.shared else None
    if shared and not block.shared:
        problems.append(f"missing: config.json states a shared expert, {block.name} has no tensor of one")
    if routed and shared_set and routed.hidden != shared_set.hidden:
        problems.append(
            f"wrong shape: routed experts have hidden size {routed.hidden} ({routed.down.values}), the shared expert "
            f"{shared_set.hidden} ({shared_set.down.values})"
        )
    if routed:
        problems += _router(block, tensors, count if expected is None else expected, routed.hidden)
    return Audit(routed, shared_set, count, tuple(problems), frozenset(lines.foreign))


def _router(block: Block, tensors: Mapping[str, TensorHeader], experts: int, hidden: int) -> list[str]:
    """Router tensors that cannot choose among ``experts``; a vector may be stored with dimensions of one around it."""
    problems = []
    wanted = {
        "weight": [experts, hidden], "bias": [experts], "image_bias": [experts], "shared_gate": [hidden]
    }  # fmt: skip
    for role, name in block.router.items():
        header = tensors[name]
        if role == "table":
            if len(header.shape) != 2 or header.dtype not in ("I32", "I64"):
                problems.append(f"wrong shape: {name} {header}, expected I64 [vocabulary, experts a token]")
        elif list(header.shape) != wanted[role] and (len(wanted[role]) > 1 or prod(header.shape) != wanted[role][0]):
            problems.append(f"wrong shape: {name} {header}, expected {wanted[role]}")
    return problems


def _expected(block: Block, tensors: Mapping[str, TensorHeader], stated: int | None) -> int | None:
    router = block.router.get("weight")
    if router is not None and len(tensors[router].shape) == 2:
        return tensors[router].shape[0]
    return stated


def _set(
    slots: Mapping[Slot, str], tensors: Mapping[str, TensorHeader], lines: _Lines, *, stacked: bool = False
) -> StoredSet | None:
    found: StoredSet | None = None
    unknown = {slot: name for slot, name in slots.items() if not slot.known}
    try:
        found = read_set(slots, tensors, stacked=stacked)
    except CheckpointError as error:
        # Where a suffix is not known, that is why a projection seems to lack its values or scales.
        add = lines.strange if unknown or isinstance(error, ForeignFormatError) else lines.all.append
        add(f"not readable: {error}")
    lines.strange(
        *(f"unexpected: {name} {tensors[name]} ({slot.kind[1:]!r}) is not known here" for slot, name in unknown.items())
    )
    return found


def _stacked(block: Block, tensors: Mapping[str, TensorHeader], expected: int | None, problems: list[str]) -> int:
    """Experts in the stacks, which must agree with each other and with the router."""
    counts = {name: tensors[name].shape[0] if tensors[name].shape else 0 for name in block.stacked.values()}
    count = Counter(counts.values()).most_common(1)[0][0]
    wanted = count if expected is None else expected
    problems += [
        f"wrong shape: {name} {tensors[name]} stacks {found} experts, expected {wanted}"
        for name, found in counts.items()
        if found != wanted
    ]
    return count


def _experts(block: Block, tensors: Mapping[str, TensorHeader], expected: int | None, problems: list[str]) -> int:
    """Compare all experts with the most common one; returns that one's id."""
    # Spelling counts: an expert that says gate_proj among experts that say w1 is one that no loader would find.
    spelled = {e: _leaves(block, e, names) for e, names in block.experts.items()}
    common = Counter(frozenset(leaves) for leaves in spelled.values()).most_common(1)[0][0]
    shapes = Counter(
        tuple((leaf, *_kind(tensors[leaves[leaf]])) for leaf in sorted(common & leaves.keys()))
        for leaves in spelled.values()
    ).most_common(1)[0][0]
    usual = {leaf: (dtype, shape) for leaf, dtype, shape in shapes}
    template = None
    for expert, leaves in spelled.items():
        at = f"{block.name}.experts.{expert}"
        problems += [f"missing: {at}.{leaf}" for leaf in sorted(common - leaves.keys())]
        problems += [f"unexpected: {leaves[leaf]} {tensors[leaves[leaf]]}" for leaf in sorted(leaves.keys() - common)]
        wrong = [
            f"wrong shape: {name} {tensors[name]}, expected {usual[leaf][0]} {list(usual[leaf][1])}"
            for leaf, name in leaves.items()
            if leaf in usual and _kind(tensors[name]) != usual[leaf]
        ]
        problems += wrong
        if template is None and not wrong and leaves.keys() == common:
            template = expert
    wanted = expected if expected is not None else max(block.experts) + 1
    absent = [e for e in range(wanted) if e not in block.experts]
    beyond = sorted(e for e in block.experts if e >= wanted)
    if absent:
        problems.append(_missing(block, absent, wanted))
    if beyond:
        problems.append(f"unexpected: experts {_ranges(beyond)} under {block.name}.experts, the router knows {wanted}")
    return template if template is not None else next(iter(block.experts))


def _missing(block: Block, absent: list[int], wanted: int) -> str:
    return f"missing: experts {_ranges(absent)} of {wanted} under {block.name}.experts"


def _kind(header: TensorHeader) -> tuple[str, tuple[int, ...]]:
    return header.dtype, header.shape


def _leaves(block: Block, expert: int, names: Mapping[Slot, str]) -> dict[str, str]:
    start = len(f"{block.name}.experts.{expert}.")
    return {name[start:]: name for name in names.values()}


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 7]`` as "0-2, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
