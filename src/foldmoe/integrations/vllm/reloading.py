"""What a running server may be asked to do with its weights, refused before vLLM touches one.

Folded layers are packed once, and their weights are no parameters of the model any more.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

INSTEAD = "start the server anew with the new weights, or start it with FOLDMOE_FOLD=stock, which leaves this to vLLM"
"""Ends every message about it."""

WORKER = "vllm.v1.worker.gpu_worker"
"""Module of vLLM's ``Worker``; its worker on CPUs is a subclass of it."""

_SAVING = "what is saved would lack their experts; start the server with FOLDMOE_FOLD=stock to save it"

REFUSED = {
    "reload_weights": f"packed layers take no new weights; {INSTEAD}",
    "save_sharded_state": _SAVING,
    "save_tensorized_model": _SAVING,
}
"""Methods of it, and what stands against each."""

_MARK = "_foldmoe"


def guard() -> None:
    """Have ``Worker`` refuse these once layers fold; any number of calls count as one.

    vLLM's reload first puts every parameter of the model on the meta device and then loads: an error of one layer's
    comes too late to go on serving. Nothing happens in a process that has no worker.
    """
    worker = getattr(sys.modules.get(WORKER), "Worker", None)
    for name in REFUSED:
        stock = getattr(worker, name, None)
        if stock is not None and not hasattr(stock, _MARK):
            setattr(worker, name, _refusing(stock, name))


def _refusing(stock: Any, name: str) -> Any:
    @wraps(stock)
    def refuse(self: Any, *arguments: Any, **named: Any) -> Any:
        from foldmoe.integrations.vllm import plugin

        if plans := plugin.record().plans:
            raise RuntimeError(
                f"{name} is refused and nothing was changed: foldmoe packed {len(plans)} layers, the first "
                f"{plans[0].layer}, and {REFUSED[name]}"
            )
        return stock(self, *arguments, **named)

    setattr(refuse, _MARK, True)
    return refuse
