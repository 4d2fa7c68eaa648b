"""Mixture-of-Experts layers with the shared expert folded into the routed experts' launch."""

from foldmoe import settings
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.layer import FoldedMoE
from foldmoe.loading import load_layer
from foldmoe.moe import Activation, ExpertWeights, Placement
from foldmoe.planner import FusionPolicy, LayerPlan, plan_checkpoint, plan_layer
from foldmoe.reference import reference_moe
from foldmoe.runtime import kernel_cache
from foldmoe.warming import warmup

kernel_cache.follow(settings.cache_dir)

__version__ = "0.1.0.dev0"

__all__ = [
    "Activation",
    "ExpertWeights",
    "FoldedMoE",
    "Format",
    "FusionPolicy",
    "LayerPlan",
    "Placement",
    "QuantizedTensor",
    "load_layer",
    "plan_checkpoint",
    "plan_layer",
    "reference_moe",
    "warmup",
]
