"""Generated checkpoints: the same bytes for the same seed, and real enough for real engines."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe.checkpoint import read_headers, read_layers
from foldmoe.checkpoint.generate import KINDS, generate
from foldmoe.checkpoint.generate.deepseek_v4 import Size
from foldmoe.checkpoint.reader import read_layer

if TYPE_CHECKING:
    from pathlib import Path


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.iterdir()))).hexdigest()


@pytest.mark.parametrize("kind", ["v4.1", "bf16", "kimi-int4"])
def test_the_seed_decides_every_byte(kinds: dict[str, Path], tmp_path: Path, kind: str) -> None:
    assert digest(generate(kind, tmp_path / "same")) == digest(kinds[kind])
    assert digest(generate(kind, tmp_path / "other", seed=1)) != digest(kinds[kind])


def test_unknown_kinds_and_used_folders_are_refused(kinds: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown kind 'v5'; there are: v4, v4\.1"):
        generate("v5", tmp_path)
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        generate("bf16", kinds["bf16"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "kimi-int4"])
def test_weights_keep_the_variance_of_what_they_multiply(kinds: dict[str, Path], kind: str) -> None:
    headers = read_headers(kinds[kind])
    routed, shared, _ = read_layer(headers, read_layers(headers)[0])
    assert shared is not None
    for matrix in (routed.gate_up, routed.down, shared.gate_up, shared.down):
        plain = matrix.dequantize()
        x = torch.randn(plain.shape[-1], 256)
        assert float((plain @ x).std()) == pytest.approx(1.0, abs=0.1)


def test_v4_has_every_tensor_that_transformers_expects(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip("this version of Transformers has no DeepSeek-V4")
    from foldmoe.integrations.transformers.loading import load

    size = Size(vocabulary=64, hidden=128, layers=2, heads=2, experts=4, top_k=2)
    folder = generate("v4", tmp_path / "v4", size=size)
    model = load(folder, quiet=True)  # raises for any tensor that is missing or unexpected
    assert model.config.num_hidden_layers == 2
    assert model.config.mlp_layer_types == ["hash_moe", "moe"]
    logits = model(torch.arange(9)[None]).logits.float()
    assert torch.isfinite(logits).all()
    assert 0.3 < float(logits.std()) < 3


def test_v4_config_has_the_published_keys(kinds: dict[str, Path]) -> None:
    config = json.loads((kinds["v4"] / "config.json").read_text())
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["activation_scheme"] == "dynamic"
    assert config["compress_ratios"] == [0] * config["num_hidden_layers"]
