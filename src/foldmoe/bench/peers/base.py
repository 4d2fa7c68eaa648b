"""What a peer is: another library's kernels, made into a whole layer so that they can be timed beside ours.

A peer runs the routed experts, the shared expert and their sum: every kernel that a user of that library pays for.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from importlib import metadata
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from foldmoe.bench import oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec

ARMS = ("serial", "dual-stream")
"""Where a peer's shared expert can run."""

ONE_MORE = ("folded",)
"""The arm of a peer whose launch takes the shared expert as one more routed expert."""


class PeerLayer(ABC):
    """One layer in a peer's own weight layout."""

    @abstractmethod
    def routed(self, batch: Batch) -> Tensor:
        """The routed experts, in whatever form :meth:`combine` takes."""

    @abstractmethod
    def shared(self, batch: Batch) -> Tensor:
        """The shared expert, ``[M, H]``."""

    def combine(self, batch: Batch, routed: Tensor, shared: Tensor) -> Tensor:
        """``[M, H]`` in x's dtype; adds ``[M, H]`` and ``[M, H]`` unless overridden."""
        return routed + shared


class Peer(ABC):
    """A library whose kernels can run a layer.

    Attributes:
        name: on the command line.
        package: what to install, as pip takes it.
        tolerance: largest relative error against the oracle on unquantised activations.
        arms: :data:`ARMS`, or :data:`ONE_MORE`.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    tolerance: ClassVar[float]
    arms: ClassVar[tuple[str, ...]] = ARMS

    @abstractmethod
    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        """Why this peer cannot run ``spec`` on ``device``; empty if it can. Imports nothing of the peer's."""

    @abstractmethod
    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        """The layer in the peer's layout, compiled for these numbers of rows. The weights given are not changed."""


def installed(package: str) -> str | None:
    """Why ``NAME`` or ``NAME==VERSION`` is not what is installed here, or None."""
    match = re.fullmatch(r"([\w.-]+)(?:==([\w.]+))?", package)
    assert match, package
    name, wanted = match.groups()
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed: pip install {package}"
    if wanted and found.split("+")[0] != wanted:
        return f"written for {package}, found {found}: its weight layout may differ"
    return None


def hopper(device: torch.device) -> str | None:
    """Why ``device`` is no sm_90 GPU, or None."""
    if device.type != "cuda":
        return f"needs a Hopper GPU, asked for {device.type}"
    found = torch.cuda.get_device_capability(device)
    return None if found == (9, 0) else f"needs a Hopper GPU (sm_90), found sm_{found[0]}{found[1]}"


def step(layer: PeerLayer, arm: str, device: torch.device) -> Callable[[Batch], Tensor]:
    """The whole layer as one of a peer's arms."""
    if arm != "dual-stream":
        return lambda batch: layer.combine(batch, layer.routed(batch), layer.shared(batch))
    side = torch.cuda.Stream(device)

    def dual(batch: Batch) -> Tensor:
        main = torch.cuda.current_stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            shared = layer.shared(batch)
        routed = layer.routed(batch)
        main.wait_stream(side)
        shared.record_stream(main)
        return layer.combine(batch, routed, shared)

    return dual


def check(peer: Peer, y: Tensor, batch: Batch, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights) -> float:
    """Relative error of ``y`` against the float64 oracle on unquantised activations, over a few rows.

    Peers round activations by rules of their own, so that no oracle which rounds fits them all.

    Raises:
        ValueError: an error over the peer's tolerance: such a row is not timed.
    """
    error = oracle.error(y, batch, spec, (routed, shared), "bf16")
    if not error <= peer.tolerance:
        raise ValueError(
            f"{peer.name} is wrong at {len(batch.x)} tokens: relative error {error:.2g} against the float64 oracle, "
            f"at most {peer.tolerance:g} expected; not timed"
        )
    return error
