"""Hugging Face Transformers: fold the MoE blocks of a model, or load a checkpoint with its experts left as stored.

The registered experts interface of Transformers sees routed experts alone, so whole blocks are swapped: every module
with ``gate``, ``experts`` and ``shared_experts`` (or ``shared_expert`` and its gate).
"""

from foldmoe.integrations.transformers.blocks import FoldedBlock
from foldmoe.integrations.transformers.folding import FoldReport, fold, unfold
from foldmoe.integrations.transformers.loading import load

__all__ = ["FoldReport", "FoldedBlock", "fold", "load", "unfold"]
