"""Which exchange carries a scheme, and what stands in for one that the group cannot have."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from foldmoe.parallel.device_exchanges import DeviceAllGather, DeviceAllToAll
from foldmoe.parallel.gather import AllGather
from foldmoe.parallel.mailbox import Unavailable, open_mailboxes
from foldmoe.parallel.scatter import AllToAll

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.parallel.one_sided import OneSided
    from foldmoe.parallel.scheme import Scheme
    from foldmoe.parallel.transport import Transport

Exchange: TypeAlias = "AllGather | AllToAll | DeviceAllToAll | OneSided"

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Chosen:
    """What runs.

    Args:
        scheme: its ``dispatch`` is what runs, not always what was asked for.
        exchange: that carries it.
        fallback: why it is another strategy than was asked for; None if it is not.
    """

    scheme: Scheme
    exchange: Exchange
    fallback: str | None = None


def choose(scheme: Scheme, transport: Transport, strays: Tensor, name: str) -> Chosen:
    """The exchange of a scheme; every rank must call this, and every rank gets the same.

    Args:
        scheme: agreed on.
        transport: the group.
        strays: one int64 element that counts ids out of range, where the exchange does that.
        name: the layer's.
    """
    if scheme.dispatch != "symmetric":
        return Chosen(scheme, _collective(scheme, transport, strays))
    try:
        mailboxes = open_mailboxes(transport, scheme.mailbox_bytes)
    except Unavailable as error:
        log.warning("%s: all-gather instead of symmetric memory: %s", name, error)
        scheme = replace(scheme, dispatch="all_gather")
        return Chosen(scheme, _collective(scheme, transport, strays), str(error))
    from foldmoe.parallel.one_sided import OneSided  # needs Triton

    return Chosen(scheme, OneSided(scheme, mailboxes, strays))


def _collective(scheme: Scheme, transport: Transport, strays: Tensor) -> Exchange:
    """Kernels around the collectives where there are any, torch expressions elsewhere; the bits are the same."""
    scatters = scheme.dispatch == "all_to_all"
    if transport.device.type == "cpu" or scheme.order == "route" or find_spec("triton") is None:
        return AllToAll(scheme) if scatters else AllGather(scheme)
    from foldmoe.parallel.rows import Rows  # needs Triton

    rows = Rows(scheme, strays)
    return DeviceAllToAll(scheme, rows) if scatters else DeviceAllGather(scheme, rows)
