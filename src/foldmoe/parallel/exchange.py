"""Which exchange carries a scheme, and what stands in for one that the group cannot have."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foldmoe.parallel.gather import AllGather
from foldmoe.parallel.mailbox import Unavailable, open_mailboxes
from foldmoe.parallel.scatter import AllToAll

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.parallel.one_sided import OneSided
    from foldmoe.parallel.scheme import Scheme
    from foldmoe.parallel.transport import Transport

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
    exchange: AllGather | AllToAll | OneSided
    fallback: str | None = None


def choose(scheme: Scheme, transport: Transport, strays: Tensor, name: str) -> Chosen:
    """The exchange of a scheme; every rank must call this, and every rank gets the same.

    Args:
        scheme: agreed on.
        transport: the group.
        strays: one int64 element that counts ids out of range, where the exchange does that.
        name: the layer's.
    """
    if scheme.dispatch == "all_to_all":
        return Chosen(scheme, AllToAll(scheme))
    if scheme.dispatch == "all_gather":
        return Chosen(scheme, AllGather(scheme))
    try:
        mailboxes = open_mailboxes(transport, scheme.mailbox_bytes)
    except Unavailable as error:
        log.warning("%s: all-gather instead of symmetric memory: %s", name, error)
        scheme = replace(scheme, dispatch="all_gather")
        return Chosen(scheme, AllGather(scheme), str(error))
    from foldmoe.parallel.one_sided import OneSided  # needs Triton

    return Chosen(scheme, OneSided(scheme, mailboxes, strays))
