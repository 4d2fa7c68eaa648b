"""What the device code does with packed bytes, thread by thread, in plain integer arithmetic."""

import torch

from foldmoe.backends.hopper import pack

MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def dequantise_mxfp4(codes, scales):
    """Stored bytes to float64, independent of the product's own decoder."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    sign = 1.0 - 2.0 * (nibbles >> 3).double()
    value = MAGNITUDES[nibbles & 7] * sign
    return value * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


def e4m3(byte):
    """E4M3 bits to float64."""
    return byte.to(torch.uint8).view(torch.float8_e4m3fn).double()


def upcast(word, offset):
    """The kernel's ``_UPCAST``: a word of eight codes and an exponent offset to eight E4M3 bytes ``[..., 8]``."""
    return select(word, offset * 0x08080800 + 0x14100800, offset * 0x08080808 + 0x24201C18)


def select(word, low, high):
    """What its instructions make of a word and the two halves of the table of magnitudes."""
    low, high = low & 0xFFFFFFFF, high & 0xFFFFFFFF
    table = torch.stack([low >> (8 * i) & 255 for i in range(4)] + [high >> (8 * i) & 255 for i in range(4)], -1)
    out = []
    for n in range(8):
        magnitude = torch.gather(table, -1, (word >> (4 * n) & 7)[..., None])[..., 0]
        source = 8 * (n % 4) + (7 if n < 4 else 3)
        out.append(magnitude | (word >> source & 1) << 7)
    return torch.stack(out, -1)


def decode_units(packed, expert):
    """One expert's packed rows as the tensor core sees them: operand registers of every thread, times references."""
    blocks, steps = packed.blocks, packed.steps
    units = packed.codes.view(-1, blocks, steps, 4, 4096)[expert]
    offsets = packed.offsets.view(-1, blocks, steps, 4, 256)[expert].long()
    references = packed.references.view(-1, blocks * 256)[expert].double()
    dense = torch.full((blocks, 4, 64, steps, 128), float("nan"), dtype=torch.float64)
    thread = torch.arange(128)
    warp, lane = thread // 32, thread % 32
    g, t = lane // 4, lane % 4
    order = pack.column_order()
    for v in range(2):  # a thread's two 16-byte loads: v * 2048 + thread * 16
        load = units[..., v * 2048 : (v + 1) * 2048].reshape(blocks, steps, 4, 128, 16).contiguous()
        words = load.view(torch.int32).long() & 0xFFFFFFFF  # b kb wg thread (s, h)
        for s in range(2):
            for h in range(2):
                offset = offsets[..., warp * 64 + g * 8 + t * 2 + h]
                values = e4m3(upcast(words[..., s * 2 + h], offset))  # b kb wg thread 8
                row = warp * 16 + h * 8 + g
                for n in range(8):
                    # operand registers: positions t * 4 .. +3 of the first 16 of this 32, then of the second
                    column = order[(v * 2 + s) * 32 + n // 4 * 16 + t * 4 + n % 4]
                    dense[:, :, row, :, column] = values[..., n].permute(3, 0, 2, 1)
    return dense.view(blocks * 256, steps * 128) * references[:, None]


def decode_fp8(packed, expert):
    """One expert's FP8 matrix as the kernel multiplies it: rows times the scale of their 8 rows and column group."""
    tiles = packed.values.double().view(-1, packed.blocks, packed.steps, 4, 8, 8, 128)[expert]
    scales = packed.scales.double().view(-1, packed.blocks, packed.steps, 4, packed.groups, 8)[expert]
    wide = scales.permute(0, 1, 2, 4, 3).repeat_interleave(128 // packed.groups, -1)
    dense = tiles * wide[:, :, :, :, None, :]
    return dense.permute(0, 2, 3, 4, 1, 5).reshape(packed.blocks * 256, packed.steps * 128)
