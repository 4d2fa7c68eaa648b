"""New weights for a running server: refused before vLLM touches a parameter, since folded layers are packed once."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

INSTEAD = "start the server anew with the new weights, or start it with FOLDMOE_FOLD=stock, which leaves this to vLLM"
"""Ends every message about it."""

WORKER = "vllm.v1.worker.gpu_worker"
"""Module of vLLM's ``Worker``; its worker on CPUs is a subclass of it."""

_MARK = "_foldmoe"


def guard() -> None:
    """Have ``Worker.reload_weights`` refuse once layers fold; any number of calls count as one.

    vLLM's reload first puts every parameter of the model on the meta device and then loads: an error of one layer's
    comes too late to go on serving. Nothing happens in a process that has no worker.
    """
    worker = getattr(sys.modules.get(WORKER), "Worker", None)
    if worker is None or hasattr(worker.reload_weights, _MARK):
        return
    stock = worker.reload_weights

    @wraps(stock)
    def reload_weights(self: Any, *arguments: Any, **named: Any) -> Any:
        from foldmoe.integrations.vllm import plugin

        if plans := plugin.record().plans:
            raise RuntimeError(
                f"reload_weights is refused and nothing was changed: foldmoe packed {len(plans)} layers, the first "
                f"{plans[0].layer}, and packed layers take no new weights; {INSTEAD}"
            )
        return stock(self, *arguments, **named)

    setattr(reload_weights, _MARK, True)
    worker.reload_weights = reload_weights
