"""A whole checkpoint's headers: the shards decide, whatever the index says."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from foldmoe.checkpoint import CheckpointError, read_headers

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in ((1, "a"), (2, "b")):
        save_file({name: torch.zeros(number)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_whole_folder_has_no_notes(folder: Path) -> None:
    headers = read_headers(folder)
    assert {name: h.shape for name, h in headers.tensors.items()} == {"a": (1,), "b": (2,)}
    assert headers.config == {"hidden_size": 4}
    assert headers.notes == ()


@pytest.mark.parametrize(
    ("index", "note"),
    [
        (None, "is missing; the 2 shards were read instead"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ({"a": "model-00001-of-00002.safetensors"}, "does not list 1 tensors that the shards hold (first: b)"),
        ({"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}, "names another shard"),
        ({"a": "../../etc/passwd", "b": "model-00002-of-00002.safetensors"}, "names another shard for 1 tensors"),
        (
            {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors", "gone": "x"},
            "lists 1 tensors that no shard here holds (first: gone)",
        ),
    ],
)
def test_an_index_that_is_missing_incomplete_or_stale_is_a_note(folder: Path, index: Any, note: str) -> None:
    if index is None:
        (folder / INDEX).unlink()
    else:
        (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps({"weight_map": index}))
    headers = read_headers(folder)
    assert set(headers.tensors) == {"a", "b"}
    assert any(note in found for found in headers.notes)


def test_a_shard_that_its_siblings_number_but_that_is_not_there_is_a_note(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert any("1 of 2 shards are not there (first: number 1)" in note for note in read_headers(folder).notes)


def test_what_is_missing_is_told_from_other_notes(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "config.json").unlink()
    headers = read_headers(folder)
    assert headers.absent == ("b",)
    assert len(headers.incomplete) == 2
    assert set(headers.notes) - set(headers.incomplete) == {headers.notes[0]}
    assert headers.notes[0].startswith("config.json is missing")
    assert headers.config_path == f"{folder}/config.json"


def test_a_tensor_in_two_shards_is_an_error_that_names_both(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "stray.safetensors")
    with pytest.raises(CheckpointError, match=r"a stands in two shards, model-00001.* and stray.safetensors"):
        read_headers(folder)


def test_a_single_file_and_its_config(folder: Path) -> None:
    headers = read_headers(folder / "model-00001-of-00002.safetensors")
    assert set(headers.tensors) == {"a"}
    assert headers.config == {"hidden_size": 4}
    assert headers.notes == ()


def test_a_missing_config_is_a_note_and_a_damaged_one_an_error(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert any("config.json is missing" in note for note in read_headers(folder).notes)
    for damaged, message in (("{", "no JSON"), ("[]", "no JSON object")):
        (folder / "config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=message):
            read_headers(folder)


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file in this folder"):
        read_headers(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder or file, and not a repository name"):
        read_headers(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"^~nobodyxx/foo: Could not determine home directory"):
        read_headers("~nobodyxx/foo")


def test_a_hub_repository_gives_the_same_headers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    info = SimpleNamespace(dtype="F4", shape=[2, 8])
    files = {"model.safetensors": SimpleNamespace(tensors={"w": info})}
    monkeypatch.setattr(hub, "get_safetensors_metadata", lambda name: SimpleNamespace(files_metadata=files))
    monkeypatch.setattr(hub, "hf_hub_download", lambda name, file: str(folder / file))
    headers = read_headers("owner/name")
    assert headers.root is None
    assert headers.tensors["w"].stored_shape == (2, 4)
    assert headers.config == {"hidden_size": 4}
    info.dtype = "F9"
    with pytest.raises(CheckpointError, match="unknown dtype 'F9'"):
        read_headers("owner/name")


def test_without_network_or_client_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def offline(name: str) -> None:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(hub, "get_safetensors_metadata", offline)
    with pytest.raises(CheckpointError, match=r"ConnectionError: no route to host\)\. Check the name and the network"):
        read_headers("owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'foldmoe\[hub\]'"):
        read_headers("owner/name")
