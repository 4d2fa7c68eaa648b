# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn normalisation of mHC's small mixing matrices as one operator with its own gradient.

Written out, twenty iterations over [tokens, 4, 4] are some eighty kernels forward and two hundred
backward, for ten sub-layers. Here both directions are one Triton kernel each (plain torch on the CPU).
The gradient is that of the fixed point: with P = diag(r) M diag(c), rows and columns of P summing to 1,
dL/dM = P / M * (G - u 1' - 1 v'), where u + P v = (P * G) 1 and v + P' u = (P * G)' 1.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU needs none of it
    triton = None

TOKENS_PER_BLOCK = 64

if triton is not None:

    @triton.jit
    def _places(tokens, n: tl.constexpr, block: tl.constexpr):
        token = (tl.program_id(0) * block + tl.arange(0, block))[:, None, None]
        place = token * n * n + tl.arange(0, n)[None, :, None] * n + tl.arange(0, n)[None, None, :]
        return place, place < tokens * n * n

    @triton.jit
    def _forward_kernel(matrix, result, tokens, eps, iterations: tl.constexpr, n: tl.constexpr, block: tl.constexpr):
        place, inside = _places(tokens, n, block)
        p = tl.load(matrix + place, mask=inside, other=1.0)
        p = p / (tl.sum(p, axis=1)[:, None, :] + eps)
        for _ in range(iterations - 1):
            p = p / (tl.sum(p, axis=2)[:, :, None] + eps)
            p = p / (tl.sum(p, axis=1)[:, None, :] + eps)
        tl.store(result + place, p, mask=inside)

    @triton.jit
    def _backward_kernel(matrix, result, gradient, out, tokens, iterations: tl.constexpr, n: tl.constexpr,
                         block: tl.constexpr):
        place, inside = _places(tokens, n, block)
        m = tl.load(matrix + place, mask=inside, other=1.0)
        p = tl.load(result + place, mask=inside, other=0.0)
        g = tl.load(gradient + place, mask=inside, other=0.0)
        rows = tl.sum(p * g, axis=2)[:, :, None]
        columns = tl.sum(p * g, axis=1)[:, None, :]
        u = rows
        v = columns - tl.sum(p * u, axis=1)[:, None, :]
        for _ in range(iterations - 1):
            u = rows - tl.sum(p * v, axis=2)[:, :, None]
            v = columns - tl.sum(p * u, axis=1)[:, None, :]
        tl.store(out + place, p / m * (g - u - v), mask=inside)


def _grid(matrix: torch.Tensor) -> tuple[int]:
    return ((matrix.shape[0] + TOKENS_PER_BLOCK - 1) // TOKENS_PER_BLOCK,)


@torch.library.custom_op("tiny_v4::sinkhorn", mutates_args=())
def sinkhorn(matrix: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """[tokens, n, n] positive float32 -> nearly doubly stochastic, columns last, as DeepSeek-V4 does it."""
    if matrix.is_cuda:
        matrix, result = matrix.contiguous(), torch.empty_like(matrix, memory_format=torch.contiguous_format)
        _forward_kernel[_grid(matrix)](matrix, result, matrix.shape[0], eps, iterations, matrix.shape[-1],
                                       TOKENS_PER_BLOCK)
        return result
    p = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        p = p / (p.sum(-1, keepdim=True) + eps)
        p = p / (p.sum(-2, keepdim=True) + eps)
    return p


@torch.library.custom_op("tiny_v4::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(matrix: torch.Tensor, result: torch.Tensor, gradient: torch.Tensor,
                      iterations: int) -> torch.Tensor:
    if matrix.is_cuda:
        matrix, gradient = matrix.contiguous(), gradient.contiguous()
        out = torch.empty_like(matrix)
        _backward_kernel[_grid(matrix)](matrix, result, gradient, out, matrix.shape[0], iterations, matrix.shape[-1],
                                        TOKENS_PER_BLOCK)
        return out
    rows, columns = (result * gradient).sum(-1, keepdim=True), (result * gradient).sum(-2, keepdim=True)
    v = torch.zeros_like(columns)
    for _ in range(iterations):
        u = rows - (result * v).sum(-1, keepdim=True)
        v = columns - (result * u).sum(-2, keepdim=True)
    return result / matrix * (gradient - u - v)


@sinkhorn.register_fake
def _(matrix, iterations, eps):
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


@sinkhorn_backward.register_fake
def _(matrix, result, gradient, iterations):
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def _remember(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)
    ctx.iterations = inputs[1]


def _gradient(ctx, gradient):
    matrix, result = ctx.saved_tensors
    return sinkhorn_backward(matrix, result, gradient, ctx.iterations), None, None


sinkhorn.register_autograd(_gradient, setup_context=_remember)
