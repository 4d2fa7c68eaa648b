"""A new checkpoint whose shared experts are MXFP4: everything else byte for byte, never half written unnoticed."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from foldmoe import load_layer, plan_checkpoint
from foldmoe.checkpoint import CheckpointError, read_headers, read_layers, shard_writer
from foldmoe.checkpoint import requantize as module
from foldmoe.checkpoint.compare import compare
from foldmoe.checkpoint.generate import write
from foldmoe.checkpoint.generate.experts import Geometry, MoERecipe, Storage, moe_tensors
from foldmoe.checkpoint.reader import read_layer
from foldmoe.checkpoint.requantize import requantize
from foldmoe.checkpoint.shard_writer import Outgoing, file_chunks, write_shard
from foldmoe.formats import Format, mxfp4
from foldmoe.moe import LayerSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    return found


@pytest.mark.parametrize("kind", ["v4", "v4.1", "stacked"])
def test_shared_experts_become_mxfp4_and_nothing_else_changes(
    kinds: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    done = requantize(kinds[kind], tmp_path / "out")
    old, new = tensors_of(kinds[kind]), tensors_of(tmp_path / "out")
    shared = {name for name in (*old, *new) if ".shared_expert" in name and "gate.weight" not in name}
    for name in set(old) - shared:
        assert old[name].dtype == new[name].dtype
        assert torch.equal(old[name].view(torch.uint8), new[name].view(torch.uint8)), name
    assert set(new) - shared == set(old) - shared
    headers, original = read_headers(tmp_path / "out"), read_headers(kinds[kind])
    assert headers.notes == ()
    layers = read_layers(headers)
    assert len(done.losses) == len(layers)
    for layer, before, loss in zip(layers, read_layers(original), done.losses, strict=True):
        assert isinstance(layer.spec, LayerSpec)
        assert layer.spec.shared is not None
        assert layer.spec.shared.format is Format.MXFP4
        _, made, _ = read_layer(headers, layer)
        _, stored, _ = read_layer(original, before)
        assert made is not None
        assert stored is not None
        error, norm = 0.0, 0.0
        for mine, theirs in ((made.gate_up, stored.gate_up), (made.down, stored.down)):
            plain = theirs.dequantize()
            assert torch.equal(mine.dequantize(), mxfp4.quantize(plain).dequantize())
            error += float((mine.dequantize() - plain).double().square().sum())
            norm += float(plain.double().square().sum())
        assert loss.rms == pytest.approx((error / norm) ** 0.5, rel=1e-6)
        assert 0.09 < loss.rms < 0.13 < loss.worst < 0.3
        assert (loss.layer, loss.before) == (layer.name, stored.format)
        assert loss.bytes_after == made.nbytes < loss.bytes_before
    for found in compare(tmp_path / "out", kinds[kind]):
        assert (found.routed, found.shared, found.problems) == ("equal", "requantised", ())


@pytest.mark.parametrize("each_alone", [False, True])
def test_scales_that_mxfp4_does_not_have_are_left_out(tmp_path: Path, each_alone: bool) -> None:
    """Each tensor alone in a shard, those of such scales have nothing left to hold."""
    block = "model.layers.0.mlp"
    recipe = MoERecipe(Geometry(), Storage(Format.MXFP4), Storage(Format.NVFP4))
    named = list(moe_tensors(block, recipe, torch.Generator().manual_seed(0)))
    projections = [name.removesuffix(".weight_scale_2") for name, _ in named if name.endswith("weight_scale_2")]
    named += [(f"{name}.input_scale", torch.tensor(0.5)) for name in projections]
    named += [(f"{block}.experts.{e}.up_proj.input_scale", torch.tensor(0.5)) for e in range(8)]
    config = {"num_experts_per_tok": 2, "num_hidden_layers": 1, "n_routed_experts": 8, "hidden_act": "silu"}
    source = write(tmp_path / "source", config, named, shards=len(named) if each_alone else 1)
    (loss,) = requantize(source, tmp_path / "out").losses
    assert loss.before is Format.NVFP4
    assert 0.05 < loss.rms < 0.2
    gone = {f"{name}.{kind}" for name in projections for kind in ("weight_scale_2", "input_scale")}
    assert len(gone) == 6
    new = tensors_of(tmp_path / "out")
    assert set(new) == {name for name, _ in named} - gone
    changed_names = {f"{name}.{kind}" for name in projections for kind in ("weight", "weight_scale_inv")}
    for name, old in named:
        if name not in gone | changed_names:
            assert torch.equal(new[name].reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8)), name
    assert read_headers(tmp_path / "out").notes == read_headers(source).notes
    (planned,) = plan_checkpoint(tmp_path / "out", device="cpu").layers
    layer = load_layer(tmp_path / "out", 0, device="cpu")
    assert planned.spec.shared is not None
    assert planned.spec.shared.format is Format.MXFP4
    assert layer.plan.digest == planned.digest
    (found,) = compare(tmp_path / "out", source)
    assert (found.routed, found.shared, found.problems) == ("equal", "requantised", ())


def test_config_says_what_was_done_and_other_files_come_along(kinds: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(kinds["v4"], source)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    for name, text in (("encoding/rules/chat.py", "pass"), ("encoding/draft.safetensors", ""), (".cache/x", "")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (source / "encoding" / "loop").symlink_to(source, target_is_directory=True)
    shards: list[str] = []
    done = requantize(source, tmp_path / "out", progress=shards.append)
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    assert config.pop("foldmoe") == {"shared_experts": "mxfp4", "requantized_from": ["fp8_128x128"]}
    assert config == json.loads((source / "config.json").read_text())
    assert (out / "tokenizer.json").exists()
    assert (out / "encoding" / "rules" / "chat.py").read_text() == "pass"
    assert not (out / "pytorch_model.bin").exists()
    assert done.left == (".cache", "encoding/draft.safetensors", "encoding/loop", "pytorch_model.bin")
    assert shards == sorted(path.name for path in out.glob("*.safetensors"))
    assert not list(out.glob(".*"))


def test_a_folder_that_holds_something_is_refused(kinds: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        requantize(kinds["v4"], tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        requantize(kinds["v4"], tmp_path / "out" / "x")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]


def test_nothing_to_do_is_an_error_that_says_why(kinds: dict[str, Path], tmp_path: Path) -> None:
    requantize(kinds["v4"], tmp_path / "once")
    with pytest.raises(CheckpointError, match=r"layers.0.ffn: the shared expert is mxfp4 already"):
        requantize(tmp_path / "once", tmp_path / "twice")
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp: not read \(not readable: .*I32"):
        requantize(kinds["kimi-int4"], tmp_path / "twice")
    assert not (tmp_path / "twice").exists()


def test_layers_without_a_shared_expert_or_in_a_foreign_format_are_kept(
    changed: Callable[..., Path], tmp_path: Path
) -> None:
    def drop(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del config["n_shared_experts"]
        for name in [n for n in tensors if "layers.1.ffn.shared" in n]:
            del tensors[name]
        for name in [n for n in tensors if "layers.2.ffn.experts" in n and n.endswith("weight")]:
            tensors[name] = tensors[name].view(torch.int32)

    done = requantize(changed("v4", drop), tmp_path / "out")
    assert done.kept[0] == "layers.1.ffn: no shared expert"
    assert done.kept[1].startswith("layers.2.ffn: not read (not readable:")
    assert [loss.layer for loss in done.losses] == ["layers.0.ffn", "layers.3.ffn", "layers.4.ffn"]


@pytest.mark.parametrize("kind", ["bf16", "qwen", "glm-fp8"])
def test_shared_experts_beside_routed_ones_of_another_format_are_not_lowered(
    kinds: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    stored = {"glm-fp8": "fp8_128x128"}.get(kind, "bf16")
    with pytest.raises(CheckpointError, match=rf"no shared expert .*: the routed experts are {stored}, not mxfp4"):
        requantize(kinds[kind], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_layers_of_mxfp4_are_lowered(changed: Callable[..., Path], tmp_path: Path) -> None:
    layer = "model.layers.1.mlp"

    def widen(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(f"{layer}.experts.")]:
            old = tensors.pop(name)
            if "scale" not in name:
                tensors[name] = torch.ones(*old.shape[:-1], old.shape[-1] * 2, dtype=torch.bfloat16)

    source = changed("stacked", widen)
    done = requantize(source, tmp_path / "out")
    assert done.kept == (f"{layer}: the routed experts are bf16, not mxfp4",)
    assert [loss.layer for loss in done.losses] == ["model.layers.0.mlp"]
    old, new = tensors_of(source), tensors_of(tmp_path / "out")
    assert all(torch.equal(new[name], old[name]) for name in old if name.startswith(layer))


def test_an_incomplete_or_damaged_checkpoint_is_refused_and_what_is_missing_listed(
    kinds: dict[str, Path], changed: Callable[..., Path], tmp_path: Path
) -> None:
    half = tmp_path / "half"
    shutil.copytree(kinds["v4"], half)
    (half / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="incomplete or damaged") as caught:
        requantize(half, tmp_path / "out")
    assert "1 of 2 shards are not there (first: number 2)" in str(caught.value)
    assert "tensors that no shard here holds" in str(caught.value)

    def lose(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("layers.3.ffn.experts.")]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"layers.3.ffn: missing: experts 0-15 of 16 under layers.3.ffn.experts"):
        requantize(changed("v4", lose), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_single_file_is_refused(changed: Callable[..., Path], tmp_path: Path) -> None:
    shard = changed("v4", lambda tensors, config: None) / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file; .* give its folder"):
        requantize(shard, tmp_path / "out")


def test_a_weight_that_overflows_is_named_with_its_layer(changed: Callable[..., Path], tmp_path: Path) -> None:
    name = "layers.3.ffn.shared_experts.w1"

    def overflow(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{name}.scale"].view(torch.uint8).fill_(254)

    with pytest.raises(CheckpointError, match=rf"layers.3.ffn: {name}.weight, .*MXFP4 holds neither NaN nor Inf"):
        requantize(changed("v4", overflow), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_hub_repository_must_be_downloaded_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "read_headers", lambda name: module.Headers(str(name), None, {}))
    with pytest.raises(CheckpointError, match="download the repository first"):
        requantize("owner/name", tmp_path / "out")


def test_too_little_space_is_found_before_anything_is_written(
    kinds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(CheckpointError, match=r"bytes are needed, 1,000 are free"):
        requantize(kinds["v4"], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("interrupt", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_an_interrupted_run_is_never_mistaken_for_a_whole_checkpoint(
    kinds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    replaced = shard_writer.os.replace

    def fail_on_second(source: Path, target: Path) -> None:
        if "model-00002" in str(target):
            raise interrupt
        replaced(source, target)

    monkeypatch.setattr(shard_writer.os, "replace", fail_on_second)
    expected = CheckpointError if isinstance(interrupt, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        requantize(kinds["v4"], tmp_path / "out")
    if isinstance(interrupt, OSError):
        assert "model-00002-of-00002.safetensors: cannot be written: the disk is full" in str(caught.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model-00001-of-00002.safetensors"]
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="interrupted run"):
        requantize(kinds["v4"], tmp_path / "out")


def outgoing(data: bytes, dtype: str = "U8", name: str = "w") -> Outgoing:
    size = {"U8": 1, "F32": 4}[dtype]
    return Outgoing(name, dtype, (len(data) // size,), lambda: [data[:1], data[1:]])


def test_a_written_shard_is_a_safetensors_file_with_aligned_tensors(tmp_path: Path) -> None:
    wide = torch.arange(3, dtype=torch.float32)
    write_shard(
        tmp_path / "x.safetensors",
        [outgoing(b"\x01\x02\x03"), outgoing(wide.numpy().tobytes(), "F32", "wide")],
        {"format": "pt"},
    )
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["wide"], wide)
    assert found["w"].tolist() == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_bytes_that_read_back_differently_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "file_chunks", lambda *place: iter([b"rot"]))
    with pytest.raises(CheckpointError, match=r"x.safetensors: w read back differently"):
        write_shard(tmp_path / "x.safetensors", [outgoing(b"abc")])
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_gives_too_few_bytes_is_an_error(tmp_path: Path) -> None:
    short = Outgoing("w", "U8", (5,), lambda: [b"abc"])
    with pytest.raises(CheckpointError, match="w gave 3 bytes, expected 5"):
        write_shard(tmp_path / "x.safetensors", [short])
    (tmp_path / "y").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="y: ends at byte 3, expected 9"):
        list(file_chunks(tmp_path / "y", 0, 9))


def test_another_error_of_the_file_system_is_shown_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x.safetensors: cannot be written: .*No such file"):
        write_shard(tmp_path / "gone" / "x.safetensors", [outgoing(b"abc")])
