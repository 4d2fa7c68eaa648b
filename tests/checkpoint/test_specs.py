"""Headers and config.json to layer facts: tensors win, and what disagrees is said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe import FusionPolicy, load_layer
from foldmoe.checkpoint import CheckpointError, OpaqueLayer, find_layer, read_headers, read_layers
from foldmoe.checkpoint.generate import write
from foldmoe.formats import Format
from foldmoe.moe import Activation, LayerSpec
from tests.support.sparse import v4_layer, write_header

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


def specs(folder: Path) -> dict[str, LayerSpec | OpaqueLayer]:
    return {layer.name: layer.spec for layer in read_layers(read_headers(folder))}


def readable(folder: Path, name: str) -> LayerSpec:
    spec = specs(folder)[name]
    assert isinstance(spec, LayerSpec), spec
    return spec


def opaque(folder: Path, name: str) -> OpaqueLayer:
    spec = specs(folder)[name]
    assert isinstance(spec, OpaqueLayer), spec
    return spec


FOUND = {
    "v4": ("layers.0.ffn", "16x128 mxfp4", "1x128 fp8_128x128 e8m0", 4, "fp8", Activation(10.0)),
    "v4.1": ("layers.1.ffn", "8x288 mxfp4", "1x288 fp8_32x32 e8m0", 3, "fp8", Activation(10.0)),
    "glm-fp8": ("model.layers.1.mlp", "10x192 fp8_128x128 f32", "1x192 fp8_128x128 f32", 2, "fp8", Activation()),
    "qwen": ("model.layers.0.mlp", "8x64 bf16", "1x96 bf16", 2, "bf16", Activation()),
    "bf16": ("model.layers.1.mlp", "8x64 bf16", "1x64 bf16", 2, "bf16", Activation()),
    "stacked": ("model.layers.0.mlp", "8x64 mxfp4", "1x64 bf16", 2, "bf16", Activation()),
}


@pytest.mark.parametrize("kind", FOUND)
def test_every_family_gives_its_facts(kinds: dict[str, Path], kind: str) -> None:
    name, routed, shared, top_k, activations, activation = FOUND[kind]
    spec = readable(kinds[kind], name)
    assert (str(spec.routed), str(spec.shared)) == (routed, shared)
    assert (spec.top_k, spec.activations, spec.activation, spec.shared_activation) == (
        top_k, activations, activation, activation,
    )  # fmt: skip
    assert spec.shared_gate is (kind == "qwen")
    config_notes = [note for note in spec.notes if "config.json" in note]
    assert config_notes == ([] if kind != "stacked" else config_notes[:1])


@pytest.mark.parametrize("kind", FOUND)
def test_the_spec_counts_the_bytes_that_a_loaded_layer_holds(kinds: dict[str, Path], kind: str) -> None:
    headers = read_headers(kinds[kind])
    for layer in read_layers(headers):
        assert isinstance(layer.spec, LayerSpec)
        experts = set(layer.block.names()) - set(layer.block.router.values())
        held = load_layer(kinds[kind], layer.name, policy=FusionPolicy(backend="torch"), device="cpu").unpack()
        assert layer.spec.nbytes == sum(weights.nbytes for weights in held if weights)
        stored = sum(headers.tensors[name].nbytes for name in experts)
        # Width 192 of 128-row blocks: 3 rows of scales for gate and for up once they are stacked, 2 each in the file.
        finer = 2 * (3 - 2) * 2 * 4 * (layer.spec.routed.count + 1) if kind == "glm-fp8" else 0
        assert layer.spec.nbytes == stored + finer


def test_drafts_are_told_apart_and_have_their_own_experts(kinds: dict[str, Path]) -> None:
    draft = readable(kinds["v4.1"], "mtp.0.ffn")
    assert (draft.draft, draft.routed.count, draft.top_k) == (True, 4, 2)
    assert not any("config.json" in note for note in draft.notes)
    assert any("image tokens" in note for note in readable(kinds["v4.1"], "layers.0.ffn").notes)
    glm = specs(kinds["glm-fp8"])
    assert [spec.draft for spec in glm.values()] == [False, False, True]
    assert "model.layers.0.mlp" not in glm  # dense


def test_case_42_routed_format_from_tensors_not_config(changed: Callable[..., Path]) -> None:
    def only_fp8(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del config["expert_dtype"]

    spec = readable(changed("v4", only_fp8, "a"), "layers.0.ffn")
    assert spec.routed.format is Format.MXFP4
    assert any("quant_method is fp8, the routed experts are mxfp4" in note for note in spec.notes)

    def wrong(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["expert_dtype"] = "fp8"

    spec = readable(changed("v4", wrong, "b"), "layers.0.ffn")
    assert spec.routed.format is Format.MXFP4
    assert any("expert_dtype is fp8, the routed experts are fp4" in note for note in spec.notes)


def test_case_82_packed_width_is_twice_the_columns(kinds: dict[str, Path]) -> None:
    headers = read_headers(kinds["v4"])
    w1 = headers.tensors["layers.0.ffn.experts.0.w1.weight"]
    assert (w1.dtype, w1.shape) == ("I8", (128, 128))
    spec = readable(kinds["v4"], "layers.0.ffn")
    assert (spec.hidden, spec.routed.width) == (256, 128)


def test_case_41_a_layer_of_another_shared_format_is_decided_alone(changed: Callable[..., Path]) -> None:
    def mix(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for matrix in ("w1", "w2", "w3"):
            at = f"layers.2.ffn.shared_experts.{matrix}"
            del tensors[f"{at}.scale"]
            tensors[f"{at}.weight"] = tensors[f"{at}.weight"].to(torch.bfloat16)

    folder = changed("v4", mix)
    formats = [spec.shared.format for spec in specs(folder).values() if isinstance(spec, LayerSpec) and spec.shared]
    assert formats == [Format.FP8_128x128] * 2 + [Format.BF16] + [Format.FP8_128x128] * 2
    mixed = readable(folder, "layers.2.ffn")
    assert mixed.activations == "bf16"
    assert any("part of the layer is bf16" in note for note in mixed.notes)


@pytest.mark.parametrize("experts", [1, 3, 160, 384])
def test_case_23_any_number_of_experts_plans_by_facts(tmp_path: Path, experts: int) -> None:
    write_header(tmp_path / "model.safetensors", v4_layer("layers.0.ffn", 128, 128, experts, 128))
    (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 1, "n_routed_experts": experts}))
    assert readable(tmp_path, "layers.0.ffn").routed.count == experts


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("hidden_size", 128, "hidden_size is 128, the experts' is 256"),
        ("n_routed_experts", 8, "number of routed experts is 8, the layer holds 16"),
        ("moe_intermediate_size", 256, "moe_intermediate_size is 256, the routed experts' is 128"),
        ("n_shared_experts", 2, "width of the shared expert is 256, the tensors' is 128"),
    ],
)
def test_a_config_that_disagrees_is_a_note_and_the_tensors_decide(
    changed: Callable[..., Path], key: str, value: int, note: str
) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config[key] = value

    spec = readable(changed("v4", change), "layers.1.ffn")
    assert (spec.hidden, spec.routed.count, spec.routed.width) == (256, 16, 128)
    assert any(note in found for found in spec.notes), spec.notes


def test_the_hash_table_decides_how_many_experts_a_token_gets(changed: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["num_experts_per_tok"] = 3
        config["quantization_config"]["weight_block_size"] = [32, 32]

    folder = changed("v4", change)
    hashed = readable(folder, "layers.0.ffn")
    assert hashed.top_k == 4
    assert any("num_experts_per_tok is 3, the hash table (tid2eid) holds 4" in note for note in hashed.notes)
    assert any("weight_block_size is (32, 32), the shared expert has (128, 128)" in note for note in hashed.notes)
    assert readable(folder, "layers.1.ffn").top_k == 3


def test_case_44_a_limit_of_zero_or_none_is_no_limit(changed: Callable[..., Path]) -> None:
    for name, limit in (("a", None), ("b", 0.0)):
        folder = changed("v4", lambda tensors, config, limit=limit: config.update(swiglu_limit=limit), name)
        assert readable(folder, "layers.0.ffn").activation == Activation(None)


def test_an_activation_that_is_not_known_is_never_run_as_silu(
    kinds: dict[str, Path], changed: Callable[..., Path]
) -> None:
    name = "language_model.model.layers.0.block_sparse_moe"
    assert readable(kinds["minimax-mxfp8"], name).activation == Activation(7.0, 1.702, 1.0)

    def gelu(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["text_config"]["hidden_act"] = "gelu"

    assert "'gelu'" in opaque(changed("minimax-mxfp8", gelu, "c"), name).reasons[0]

    def alpha(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["text_config"]["hidden_act"] = "silu"

    assert "swiglu_alpha 1.702" in opaque(changed("minimax-mxfp8", alpha, "a"), name).reasons[0]

    def plain(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["text_config"] |= {"hidden_act": "silu", "swiglu_alpha": None}

    spec = readable(changed("minimax-mxfp8", plain, "b"), name)
    assert (str(spec.routed), str(spec.shared)) == ("8x96 mxfp8 e8m0", "1x96 mxfp8 e8m0")
    assert (spec.activation, spec.activations, spec.notes) == (Activation(7.0), "fp8", ())


def test_a_format_that_is_not_read_names_tensor_and_dtype(kinds: dict[str, Path]) -> None:
    layer = opaque(kinds["kimi-int4"], "model.layers.1.mlp")
    first = layer.reasons[0]
    assert "model.layers.1.mlp.experts.0.gate_proj.weight_packed I32 [64, 16]" in first
    assert "int32" in first
    headers = read_headers(kinds["kimi-int4"])
    assert layer.nbytes == sum(h.nbytes for name, h in headers.tensors.items() if "gate.weight" not in name)


def test_without_a_config_the_facts_that_tensors_cannot_tell_are_missed(
    kinds: dict[str, Path], changed: Callable[..., Path]
) -> None:
    def nothing(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config.clear()

    folder = changed("v4", nothing)
    assert readable(folder, "layers.0.ffn").top_k == 4  # the hash table says it
    assert any("no quantization_config" in note for note in readable(folder, "layers.0.ffn").notes)
    assert "num_experts_per_tok" in opaque(folder, "layers.1.ffn").reasons[0]


def test_more_routes_than_experts_cannot_be(changed: Callable[..., Path]) -> None:
    folder = changed("bf16", lambda tensors, config: config.update(num_experts_per_tok=9))
    assert "9 experts a token, but the layer has 8" in opaque(folder, "model.layers.1.mlp").reasons[0]


def test_case_52_a_shared_expert_of_another_hidden_size_is_caught_at_planning(changed: Callable[..., Path]) -> None:
    def clash(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for matrix, shape in (("gate_proj", (64, 64)), ("up_proj", (64, 64)), ("down_proj", (64, 64))):
            tensors[f"model.layers.1.mlp.shared_experts.{matrix}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)

    (reason,) = opaque(changed("bf16", clash), "model.layers.1.mlp").reasons
    assert "routed experts have hidden size 128" in reason
    assert "the shared expert 64" in reason


def test_a_layer_without_a_router_is_planned_with_a_note(changed: Callable[..., Path]) -> None:
    folder = changed("bf16", lambda tensors, config: tensors.pop("model.layers.1.mlp.gate.weight"))
    assert "the layer has no router (gate.weight)" in readable(folder, "model.layers.1.mlp").notes


def test_case_75_experts_stated_but_none_named_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {"n_routed_experts": 8}, [("model.norm.weight", torch.ones(4))])
    with pytest.raises(CheckpointError, match=r"states 8 routed experts, but no tensor's name is an expert's .*norm"):
        read_layers(read_headers(folder))
    (folder / "config.json").write_text(json.dumps({}))
    assert read_layers(read_headers(folder)) == ()


def test_layers_are_found_by_name_and_number(kinds: dict[str, Path]) -> None:
    layers = read_layers(read_headers(kinds["v4.1"]))
    assert find_layer(layers, "mtp.0.ffn").name == "mtp.0.ffn"
    assert find_layer(layers, 0).name == "layers.0.ffn"
    with pytest.raises(CheckpointError, match=r"no MoE layer 7; there are: layers.0.ffn"):
        find_layer(layers, 7)


def test_drafts_need_no_shared_expert_and_static_scales_are_named(changed: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("mtp.0.ffn.shared_experts.")]:
            del tensors[name]
        for expert in range(8):
            tensors[f"layers.0.ffn.experts.{expert}.w1.input_scale"] = torch.ones(())

    folder = changed("v4.1", change)
    assert readable(folder, "mtp.0.ffn").shared is None
    assert any("input_scale" in note for note in readable(folder, "layers.0.ffn").notes)
