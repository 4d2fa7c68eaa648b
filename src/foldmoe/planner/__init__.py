"""What to do with a layer, and why: decided from facts alone, before any weight is read."""

from foldmoe.planner.checkpoint import CheckpointPlan, StockLayer, plan_checkpoint
from foldmoe.planner.decide import plan_layer
from foldmoe.planner.plan import LayerPlan
from foldmoe.planner.policy import FusionPolicy

__all__ = ["CheckpointPlan", "FusionPolicy", "LayerPlan", "StockLayer", "plan_checkpoint", "plan_layer"]
