"""What to do with a layer, and why: decided from facts alone, before any weight is read."""

from foldmoe.planner.decide import plan_layer
from foldmoe.planner.plan import LayerPlan
from foldmoe.planner.policy import FusionPolicy

__all__ = ["FusionPolicy", "LayerPlan", "plan_layer"]
