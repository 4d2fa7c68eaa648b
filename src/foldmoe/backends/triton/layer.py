"""A packed layer and its launches: prepare, (scan, scatter), up, down, combine.

Folded, routed and shared tiles lie in the same ``up`` and ``down`` grids. Unfolded, the same kernels run over the same
weights, routed first or each set on a stream of its own, and the same combine follows: all give the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.backends.base import Call, PackedLayer
from foldmoe.backends.triton import config as configs
from foldmoe.backends.triton.layout import unpack
from foldmoe.backends.triton.rank_routes import rank_routes
from foldmoe.backends.triton.steps import Step
from foldmoe.runtime import workspace
from foldmoe.runtime.streams import beside

if TYPE_CHECKING:
    from foldmoe.backends.triton.layout import Experts
    from foldmoe.moe import Activation, ExpertWeights
    from foldmoe.moe.spec import ActivationPrecision


@cache
def machine_of(device: torch.device) -> configs.Machine:
    """What a torch device offers the kernels."""
    if device.type != "cuda":  # the interpreter; a Hopper's shared memory will do
        return configs.Machine(232448)
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        memory = 163840 if "gfx950" in facts.gcnArchName else 65536
        return configs.Machine(memory, most_stages=2)
    memory = getattr(facts, "shared_memory_per_block_optin", 101376)
    return configs.Machine(memory, most_tokens=32 if facts.major == 10 else 64)


class TritonLayer(PackedLayer):
    """Views of the stored weights, and how to run them.

    Args:
        routed, shared: packed sets.
        activation, shared_activation: clamps.
        activations: precision of x and act(.).
        config: use this config at every batch instead of choosing one; for tuning and tests.
        machine: choose configs for this GPU; None: the one that the weights are on.
    """

    _strays: Tensor

    def __init__(
        self,
        routed: Experts,
        shared: Experts | None,
        activation: Activation,
        shared_activation: Activation,
        activations: ActivationPrecision,
        config: configs.TritonConfig | None = None,
        machine: configs.Machine | None = None,
    ) -> None:
        self.routed = routed
        self.shared = shared
        self.activation = activation
        self.shared_activation = shared_activation
        self.activations = activations
        self.config = config
        self.device = routed.stored.device
        self.machine = machine or machine_of(self.device)
        self._strays = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._last: configs.TritonConfig | None = None

    def forward(self, call: Call, *, folded: bool) -> Tensor:
        y = torch.empty_like(call.x)
        self._run(call, y, routed=True, shared=True, folded=folded)
        return y

    def _rank_routes(self, call: Call, experts: range, count: int, slot: bool) -> Call:
        return rank_routes(call, experts, count, slot, self._strays)

    def forward_shared(self, call: Call) -> Tensor:
        y = torch.empty(call.x.shape, dtype=torch.float32, device=call.x.device)
        self._run(call, y, routed=False, shared=True, folded=False)
        return y

    def forward_dual(self, call: Call, stream: torch.cuda.Stream | None) -> Tensor:
        """One prepare, routed tiles on the current stream beside shared tiles on ``stream``, one combine."""
        y = torch.empty_like(call.x)
        self._run(call, y, routed=True, shared=True, folded=False, side=stream)
        return y

    def _run(
        self,
        call: Call,
        y: Tensor,
        *,
        routed: bool,
        shared: bool,
        folded: bool,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        tokens, top_k = call.topk_ids.shape
        if not tokens:
            return
        mine = self.routed if routed and top_k and self.routed.count else None
        common = self.shared if shared and not _nowhere(call) else None
        together = folded and mine is not None and common is not None
        config = self.config or configs.choose(
            mine, common, call.sized_for, top_k * self.route_share, self.machine, together=together
        )
        self._last = config
        step = Step(self, call, mine, common, config, self._strays)
        step.prepare()
        if mine is None or common is None or folded:
            if mine or common:
                step.multiply(mine, common)
        elif side is None:
            step.multiply(mine, None)
            step.multiply(None, common)
        else:
            with beside(torch.cuda.current_stream(self.device), side):
                with torch.cuda.stream(side):
                    step.multiply(None, common)
                step.multiply(mine, None)
        step.combine(y)

    def unpack(self) -> tuple[ExpertWeights, ExpertWeights | None]:
        return unpack(self.routed), unpack(self.shared) if self.shared else None

    @property
    def nbytes(self) -> int:
        return self.routed.stored.nbytes + (self.shared.stored.nbytes if self.shared else 0)

    @property
    def workspace_nbytes(self) -> int:
        return workspace.held_bytes(self.device)

    def stats(self) -> dict[str, object]:
        """``ids_out_of_range`` counts since packing (reads the device), ``config`` is the one last chosen."""
        return {"ids_out_of_range": int(self._strays.item()), "config": self._last}


def _nowhere(call: Call) -> bool:
    """No row gets the shared part, as far as the host knows; never among ranks that start the same kernels."""
    rows = call.shared_rows
    return call.most_rows is None and isinstance(rows, tuple) and rows[0] >= rows[1]
