# SPDX-License-Identifier: Apache-2.0
"""The number formats of stored DeepSeek-V4 weights, and which tensor is stored in which.

`mxfp4_encode` and `fp8_encode` give the stored tensors, the `_decode` functions read them back, and
`as_stored` is the round trip that training sees. Scales are powers of two (E8M0) everywhere.
"""

from functools import cache

import torch

MXFP4_BLOCK = 32
FP8_BLOCK = 128
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half-way points between neighbours; three sit one float lower, so that ties go to the even code.
_E2M1_BOUNDS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Exactly 2**exponent as float32, from the bits: `exp2` may be one unit off."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def e8m0_bytes(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent.to(torch.int32) + 127).to(torch.uint8)


def _exponents(amax: torch.Tensor, largest: float, rounding) -> torch.Tensor:
    exponent = rounding(torch.log2(amax.clamp_min(2.0**-100) / largest)).clamp(-120, 120)
    return torch.where(amax > 0, exponent, 0)


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code 0..7 of |x|, ties to even, saturating at 6."""
    return torch.bucketize(x.abs(), _constant(_E2M1_BOUNDS, x.device), out_int32=True)


def _mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, values, exponents) per block of 32, the better of two exponents by squared error."""
    table = _constant(E2M1_VALUES, weight.device)
    blocks = weight.float().unflatten(-1, (-1, MXFP4_BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    best = None
    for rounding in (torch.ceil, torch.floor):
        exponent = _exponents(amax, 6.0, rounding)
        scale = power_of_two(exponent)
        codes = _e2m1_codes(blocks / scale)
        values = table[codes] * torch.sign(blocks) * scale
        error = (values - blocks).square().sum(-1, keepdim=True)
        if best is None:
            best = codes, values, exponent, error
        else:
            better = error < best[3]
            best = tuple(torch.where(better, new, old) for new, old in zip((codes, values, exponent, error), best))
    return best[0] | ((blocks < 0) << 3), best[1], best[2]


def mxfp4_encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., N, K] -> int8 [.., N, K/2], two codes a byte with even k in the low nibble, and E8M0 [.., N, K/32]."""
    codes, _, exponents = _mxfp4_blocks(weight)
    codes = codes.flatten(-2).to(torch.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.view(torch.int8).contiguous(), e8m0_bytes(exponents.squeeze(-1)).view(torch.float8_e8m0fnu)


def mxfp4_decode(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES))
    packed = packed.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return (table[codes.int()].unflatten(-1, (-1, MXFP4_BLOCK)) * scales.float().unsqueeze(-1)).flatten(-2)


def _fp8_grid(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., N, K] as [.., n, 128, k, 128] and the exponent of each block; 448 always fits."""
    grid = weight.float().unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    return grid, _exponents(grid.abs().amax((-3, -1), keepdim=True), 448.0, torch.ceil)


def fp8_encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> E4M3 [N, K] and E8M0 [N/128, K/128]."""
    grid, exponents = _fp8_grid(weight)
    values = (grid / power_of_two(exponents)).to(torch.float8_e4m3fn).reshape(weight.shape)
    return values, e8m0_bytes(exponents[:, 0, :, 0]).view(torch.float8_e8m0fnu)


def fp8_decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    grid, _ = _fp8_grid(values)
    return (grid * scales.float()[:, None, :, None]).reshape(values.shape)


def fp8_activations(x: torch.Tensor) -> torch.Tensor:
    """x after E4M3 with one power-of-two scale per 128 columns of each row, in x's dtype."""
    blocks = x.float().unflatten(-1, (-1, FP8_BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = power_of_two(torch.ceil(torch.log2(amax / 448.0)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def storage_of(name: str) -> str:
    """How a V4 checkpoint stores the tensor that Transformers calls `name`: mxfp4, fp8, bf16 or float32."""
    if ".experts." in name:
        return "mxfp4"
    if ".shared_experts." in name or "_proj.weight" in name:
        return "fp8"
    if name.endswith(("norm.weight", ".gate.weight", "embed_tokens.weight", "lm_head.weight")):
        return "bf16"
    return "float32"


def as_stored(weight: torch.Tensor, storage: str) -> torch.Tensor:
    """The float32 values that come back after storing `weight`; leading dimensions are separate matrices."""
    if storage == "mxfp4":
        return _mxfp4_blocks(weight)[1].flatten(-2)
    if storage == "fp8":
        grid, exponents = _fp8_grid(weight)
        scale = power_of_two(exponents)
        return ((grid / scale).to(torch.float8_e4m3fn).float() * scale).reshape(weight.shape)
    if storage == "bf16":
        return weight.bfloat16().float()
    return weight.float()
