"""Fold one layer by hand: MXFP4 routed experts, an FP8 shared expert of another width, checked against float64."""

import torch

from foldmoe import Activation, ExpertWeights, FoldedMoE, Format, FusionPolicy, reference_moe
from foldmoe.formats import fp8, mxfp4
from foldmoe.reference import relative_error

hidden, wide, shared_wide, experts, top_k, tokens = 256, 128, 96, 8, 2, 16
routed = ExpertWeights(
    mxfp4.quantize(torch.randn(experts, 2 * wide, hidden) / hidden**0.5),
    mxfp4.quantize(torch.randn(experts, hidden, wide) / wide**0.5),
)
shared = ExpertWeights(
    fp8.quantize_block(torch.randn(1, 2 * shared_wide, hidden) / hidden**0.5, Format.FP8_32x32),
    fp8.quantize_block(torch.randn(1, hidden, shared_wide) / shared_wide**0.5, Format.FP8_32x32),
)
act = Activation(limit=10.0)
moe = FoldedMoE(routed, shared, activation=act, policy=FusionPolicy("native"), top_k=top_k)
x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
weights, ids = torch.rand(tokens, experts).topk(top_k)
y = moe(x, ids, weights)
truth = reference_moe(x, ids, weights, routed, shared, activation=act, activations=moe.plan.activations)
print(moe.plan)
print(f"relative error {relative_error(y, truth):.1e}, {moe.memory()['weights']:,} bytes held")
