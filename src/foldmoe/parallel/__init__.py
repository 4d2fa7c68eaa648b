"""Expert parallelism: dispatch and combine around a local folded layer, the shared part once a token, at home."""

from foldmoe.parallel.agree import PlanMismatchError, agree
from foldmoe.parallel.local import Tokens
from foldmoe.parallel.moe import ExpertParallelMoE
from foldmoe.parallel.remap import remap
from foldmoe.parallel.scheme import Scheme
from foldmoe.parallel.simulate import VirtualRanks, simulate
from foldmoe.parallel.transport import DistributedTransport, GroupError, Transport

__all__ = [
    "DistributedTransport",
    "ExpertParallelMoE",
    "GroupError",
    "PlanMismatchError",
    "Scheme",
    "Tokens",
    "Transport",
    "VirtualRanks",
    "agree",
    "remap",
    "simulate",
]
