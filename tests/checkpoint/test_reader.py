"""Tensors in, tensors out: the same bits, whatever the names, in little more memory than the result takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.checkpoint import CheckpointError, Headers, MoELayer, read_headers, read_layers
from foldmoe.checkpoint.generate import write
from foldmoe.checkpoint.generate.experts import Geometry, MoERecipe, Naming, Storage, moe_tensors
from foldmoe.checkpoint.reader import TensorReader, iter_experts, read_layer
from foldmoe.checkpoint.writer import coarsen, layer_tensors
from foldmoe.formats import Format, fp8
from foldmoe.formats.cutting import regrid
from foldmoe.moe import ExpertWeights, Placement

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

READABLE = ("v4", "v4.1", "glm-fp8", "qwen", "bf16", "stacked")


def opened(folder: Path) -> tuple[Headers, tuple[MoELayer, ...]]:
    headers = read_headers(folder)
    return headers, read_layers(headers)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(found: Tensor, stored: Tensor, name: str) -> None:
    assert (found.dtype, found.shape) == (stored.dtype, stored.shape), name
    assert torch.equal(raw(found), raw(stored)), name


def assert_round_trip(headers: Headers, layer: MoELayer) -> None:
    routed, shared, _ = read_layer(headers, layer)
    found = layer_tensors(layer, routed, shared)
    assert set(found) == set(layer.block.names()) - set(layer.block.router.values())
    with TensorReader(headers) as reader:
        for name, tensor in found.items():
            assert_same_bits(tensor, reader.tensor(name), name)


@pytest.mark.parametrize("kind", READABLE)
def test_every_tensor_comes_back_bit_for_bit(kinds: dict[str, Path], kind: str) -> None:
    headers, layers = opened(kinds[kind])
    for layer in layers:
        assert_round_trip(headers, layer)


ODD = [
    # (routed storage, naming, width): widths that no scale block divides, every format, both stacked styles
    (Storage(Format.FP8_128x128), Naming(), 200),
    (Storage(Format.FP8_128x128, e8m0=True, scale="scale"), Naming(("w1", "w3", "w2"), bias="gate.bias"), 72),
    (Storage(Format.FP8_32x32), Naming(), 40),
    (Storage(Format.FP8_128x128), Naming(stacked="gate_up_proj"), 192),
    (Storage(Format.MXFP8, scale_dtype=torch.uint8), Naming(stacked="gate_up_proj"), 48),
    (Storage(Format.NVFP4, packed_dtype=torch.uint8, scale="weight_scale"), Naming(), 48),
    (Storage(Format.MXFP4, scale="weight_scale", packed_dtype=torch.uint8), Naming(stacked="w13"), 96),
    (Storage(Format.BF16), Naming(stacked="gate_up_proj"), 24),
]


def odd_checkpoint(folder: Path, storage: Storage, naming: Naming, width: int) -> tuple[Headers, MoELayer]:
    recipe = MoERecipe(Geometry(96, width, 3, 2), storage, Storage(Format.BF16), naming)
    named = moe_tensors("model.layers.0.mlp", recipe, torch.Generator().manual_seed(1))
    headers, (layer,) = opened(write(folder, {"num_experts_per_tok": 2}, named))
    return headers, layer


@pytest.mark.parametrize(("storage", "naming", "width"), ODD)
def test_odd_widths_and_every_format_come_back_too(
    tmp_path: Path, storage: Storage, naming: Naming, width: int
) -> None:
    headers, layer = odd_checkpoint(tmp_path / "x", storage, naming, width)
    assert layer.audit.problems == ()
    assert_round_trip(headers, layer)


@pytest.mark.parametrize(("storage", "naming", "width"), ODD)
def test_the_numbers_are_the_stored_ones(tmp_path: Path, storage: Storage, naming: Naming, width: int) -> None:
    headers, layer = odd_checkpoint(tmp_path / "x", storage, naming, width)
    routed, _, _ = read_layer(headers, layer)
    random = torch.Generator().manual_seed(1)
    torch.randn(3, 96, generator=random), torch.randn(3, generator=random)  # router and bias come first
    for expert in range(3):
        gate, up, down = (
            torch.randn(rows, columns, generator=random) * columns**-0.5
            for rows, columns in ((width, 96), (width, 96), (96, width))
        )
        if naming.stacked:  # a stack's blocks count from the top of gate above up
            expected = storage.quantize(torch.cat((gate, up))).dequantize()
        else:
            expected = torch.cat([storage.quantize(part).dequantize() for part in (gate, up)])
        if storage.format is not Format.NVFP4:  # its one scale a matrix is a stack's here
            assert torch.equal(routed.gate_up[expert].dequantize(), expected)
            assert torch.equal(routed.down[expert].dequantize(), storage.quantize(down).dequantize())


def test_case_80_stacked_names_hold_gate_above_up(kinds: dict[str, Path]) -> None:
    headers, layers = opened(kinds["stacked"])
    with TensorReader(headers) as reader:
        stack = reader.tensor("model.layers.0.mlp.experts.w13_weight")
        assert tuple(stack.shape) == (8, 2 * 64, 128 // 2)
        experts = dict(iter_experts(reader, layers[0], (5, 0)))
        assert list(experts) == [5, 0]
        gate, _ = experts[5].gate_and_up()
        assert_same_bits(gate.values[0], stack[5, :64], "gate rows")


@pytest.mark.parametrize("kind", ["v4", "stacked", "glm-fp8"])
@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (3, 1), (3, 2)])
def test_ranks_hold_their_part_and_together_the_whole(kinds: dict[str, Path], kind: str, ep: int, tp: int) -> None:
    headers, layers = opened(kinds[kind])
    layer = layers[-1]
    whole, whole_shared, _ = read_layer(headers, layer)
    seen = 0
    for ep_rank in range(ep):
        for tp_rank in range(tp):
            place = Placement(ep, ep_rank, tp, tp_rank)
            routed, shared, router = read_layer(headers, layer, place)
            held = place.experts(whole.num_experts)
            expected = whole[held.start : held.stop].shard(tp_rank, tp)
            assert_equal_sets(routed, expected)
            assert shared is not None
            assert whole_shared is not None
            assert_equal_sets(shared, whole_shared.shard(tp_rank, tp))
            assert router["weight"].shape[0] == whole.num_experts
            seen += routed.num_experts
    assert seen == whole.num_experts * tp


def assert_equal_sets(found: ExpertWeights, expected: ExpertWeights) -> None:
    for one, other in ((found.gate_up, expected.gate_up), (found.down, expected.down)):
        assert one.block == other.block
        for role, tensor in other.tensors().items():
            assert_same_bits(one.tensors()[role], tensor, role)


def test_a_rank_without_experts_holds_an_empty_stack(kinds: dict[str, Path]) -> None:
    headers, layers = opened(kinds["bf16"])
    routed, _, _ = read_layer(headers, layers[0], Placement(9, 8))
    assert tuple(routed.gate_up.shape) == (0, 128, 128)


def test_a_rank_writes_its_own_part(kinds: dict[str, Path]) -> None:
    headers, layers = opened(kinds["glm-fp8"])
    place = Placement(2, 1, 2, 1)
    routed, shared, _ = read_layer(headers, layers[0], place)
    found = layer_tensors(layers[0], routed, shared, placement=place)
    at = "model.layers.1.mlp.experts"
    assert f"{at}.4.gate_proj.weight" not in found
    with TensorReader(headers) as reader:
        assert_same_bits(
            found[f"{at}.7.up_proj.weight"], reader.tensor(f"{at}.7.up_proj.weight")[96:], "rows of the second rank"
        )
        assert_same_bits(
            found[f"{at}.7.down_proj.weight"],
            reader.tensor(f"{at}.7.down_proj.weight")[:, 96:],
            "columns of the second rank",
        )


@pytest.mark.parametrize(
    ("tensor", "spoil", "message"),
    [
        ("shared_experts.w2.weight", (3, 1, 0x7F), r"shared_experts.w2.weight: 1 NaN or Inf, the first at \[3, 1\]"),
        ("shared_experts.w2.weight", (5, 9, 0xFF), r"shared_experts.w2.weight: 1 NaN or Inf, the first at \[5, 9\]"),
        ("experts.7.w1.scale", (2, 6, 255), r"experts.7.w1.scale: 1 NaN or Inf, the first at \[2, 6\]"),
    ],
)
def test_case_28_a_nan_byte_is_refused_by_name_and_index(
    changed: Callable[..., Path], tensor: str, spoil: tuple[int, int, int], message: str
) -> None:
    row, column, byte = spoil

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"layers.1.ffn.{tensor}"].view(torch.uint8)[row, column] = byte

    headers, layers = opened(changed("v4", change))
    read_layer(headers, layers[0])
    with pytest.raises(ValueError, match=message):
        read_layer(headers, layers[1])


def test_a_nan_in_a_stack_names_the_expert(changed: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.experts.w2_weight_scale"].view(torch.uint8)[6, 3, 1] = 255

    headers, layers = opened(changed("stacked", change))
    with pytest.raises(ValueError, match=r"w2_weight_scale of expert 6: 1 NaN or Inf, the first at \[3, 1\]"):
        read_layer(headers, layers[0])


def test_a_shard_cut_short_after_its_header_was_read_is_named(changed: Callable[..., Path]) -> None:
    folder = changed("bf16", lambda tensors, config: None)
    headers, layers = opened(folder)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot read .*download or write it again"):
        read_layer(headers, layers[0])
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot read"):
        read_layer(headers, layers[0])


def test_weights_of_a_hub_repository_are_not_here() -> None:
    with pytest.raises(CheckpointError, match="headers only; download"):
        TensorReader(Headers("owner/name", None, {}))


def test_case_26_scales_as_bytes_or_e8m0_read_alike(kinds: dict[str, Path], changed: Callable[..., Path]) -> None:
    def to_bytes(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith(".scale") and ".ffn." in n]:
            tensors[name] = tensors[name].view(torch.uint8)

    headers, layers = opened(changed("v4", to_bytes))
    other_headers, other = opened(kinds["v4"])
    for mine, theirs in zip(read_layer(headers, layers[0])[:2], read_layer(other_headers, other[0])[:2], strict=True):
        assert torch.equal(mine.gate_up.dequantize(), theirs.gate_up.dequantize())
        assert mine.gate_up.scales.dtype == torch.uint8
        assert theirs.gate_up.scales.dtype == torch.float8_e8m0fnu
    assert_round_trip(headers, layers[0])


def test_codes_as_float4_read_like_codes_as_bytes(kinds: dict[str, Path], changed: Callable[..., Path]) -> None:
    def to_float4(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".ffn.experts." in n and n.endswith(".weight")]:
            tensors[name] = tensors[name].view(torch.float4_e2m1fn_x2)

    headers, layers = opened(changed("v4", to_float4))
    assert headers.tensors["layers.0.ffn.experts.0.w1.weight"].dtype == "F4"
    other_headers, other = opened(kinds["v4"])
    mine, theirs = read_layer(headers, layers[0]).routed, read_layer(other_headers, other[0]).routed
    assert torch.equal(mine.gate_up.dequantize(), theirs.gate_up.dequantize())
    assert_round_trip(headers, layers[0])


def test_case_43_weight_scale_inv_multiplies(changed: Callable[..., Path]) -> None:
    at = "model.layers.1.mlp.shared_experts.down_proj"

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{at}.weight"][0, 0] = 2.0
        tensors[f"{at}.weight_scale_inv"][0, 0] = 0.5

    headers, layers = opened(changed("glm-fp8", change))
    shared = read_layer(headers, layers[0]).shared
    assert shared is not None
    assert float(shared.down.dequantize()[0, 0, 0]) == 1.0


def test_coarsening_undoes_regridding_and_refuses_what_it_cannot_hold() -> None:
    tensor = fp8.quantize_block(torch.randn(192, 200))
    fine = regrid(tensor, (64, 8))
    back = coarsen(fine, (128, 128))
    assert_same_bits(back.scales, tensor.scales, "scales")  # type: ignore[arg-type]
    fine.scales[1, 0] *= 2  # type: ignore[index]
    with pytest.raises(ValueError, match="scales differ within 128x128 blocks"):
        coarsen(fine, (128, 128))
