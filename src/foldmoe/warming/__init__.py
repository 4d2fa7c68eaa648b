"""Before the first request: compile every kernel that a plan needs, in parallel; run each layer once."""

from foldmoe.warming.layers import warmup
from foldmoe.warming.processes import Report, compile_ahead, compile_beside
from foldmoe.warming.variants import Calls, sizes

__all__ = ["Calls", "Report", "compile_ahead", "compile_beside", "sizes", "warmup"]
