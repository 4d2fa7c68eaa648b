"""What a MoE layer is: its facts, weights, activation, routing and slots."""

from foldmoe.moe.activation import Activation
from foldmoe.moe.spec import ExpertSpec, LayerSpec, Placement
from foldmoe.moe.weights import ExpertWeights

__all__ = ["Activation", "ExpertSpec", "ExpertWeights", "LayerSpec", "Placement"]
