"""What the planner asks of a backend, and the backends it may ask.

The planner knows no backend; backends register themselves when ``foldmoe.backends`` is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from foldmoe.moe.spec import ActivationPrecision, LayerSpec
    from foldmoe.planner.devices import Device
    from foldmoe.planner.plan import Rows


@runtime_checkable
class Capability(Protocol):
    """The planner's view of :class:`foldmoe.backends.base.Backend`."""

    name: ClassVar[str]
    deterministic: ClassVar[bool]

    def unavailable(self, device: Device) -> str | None: ...
    def supports(self, spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]: ...
    def packed_nbytes(self, spec: LayerSpec) -> int: ...
    def tiles(self, spec: LayerSpec, device: Device) -> str: ...
    def fold_rows(self, spec: LayerSpec, device: Device) -> tuple[Rows, ...]: ...


_REGISTRY: dict[str, Capability] = {}


def register(backend: Capability) -> None:
    """Add a backend; the order of registration is the order of preference, fastest first. Idempotent by name."""
    _REGISTRY[backend.name] = backend


def registered() -> tuple[Capability, ...]:
    """All backends, fastest first."""
    return tuple(_REGISTRY.values())


def find(name: str) -> Capability:
    """A backend by name.

    Raises:
        ValueError: naming the ones there are.
    """
    if name not in _REGISTRY:
        raise ValueError(f"no backend called {name!r}; there are: {', '.join(_REGISTRY) or 'none'}")
    return _REGISTRY[name]
