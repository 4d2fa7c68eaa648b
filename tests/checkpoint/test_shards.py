"""One file's header: read right, and refused whenever anything about it does not add up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from foldmoe.checkpoint.shards import CheckpointError, TensorHeader, parse_header, read_shard

if TYPE_CHECKING:
    from pathlib import Path


def entry(dtype: str = "U8", shape: tuple[int, ...] = (4,), start: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def write(path: Path, header: dict[str, Any] | bytes, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def test_every_dtype_of_torch_is_read_as_safetensors_writes_it(tmp_path: Path) -> None:
    byte_like = {"mxfp4": torch.float4_e2m1fn_x2, "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
    tensors = {name: torch.zeros(2, 4, dtype=torch.uint8).view(dtype) for name, dtype in byte_like.items()}
    for dtype in (torch.int8, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.float64, torch.bool):
        tensors[str(dtype)] = torch.zeros(2, 3, dtype=dtype)
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries, metadata = read_shard(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"}
    headers = {e.name: e.header for e in entries}
    assert headers["mxfp4"] == TensorHeader("F4", (2, 8), "x.safetensors")
    for name, tensor in tensors.items():
        assert headers[name].torch_dtype == tensor.dtype
        assert headers[name].stored_shape == tuple(tensor.shape)
        assert headers[name].nbytes == tensor.nbytes
    assert all(e.end - e.start == tensors[e.name].nbytes for e in entries)


@pytest.mark.parametrize("cut", [1, 7, 8, 30, -1, -3])
def test_a_truncated_shard_is_an_error_that_names_it(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model-00002-of-00003.safetensors"
    save_file({"w": torch.arange(8.0)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: truncated"):
        read_shard(path)


def test_a_length_that_begins_like_json_is_still_a_length(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"{" + b" " * (ord("{") + 256 - 2) + b"}", b"")
    assert path.read_bytes()[:1] == b"{"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="x: truncated"):
        read_shard(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 4}', r"x: JSON, no safetensors file; give the checkpoint's folder, or a .safetensors file"),
        ("\n[1, 2, 3, 4, 5, 6]", "x: JSON, no"),
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n",
            "x: a Git LFS pointer.* 'git lfs pull'",
        ),
        ("", "x: truncated"),
        ("hello, world", "x: truncated"),
    ],
)
def test_text_in_the_place_of_a_shard_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_shard(tmp_path / "x")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(), "b": entry(start=2, end=6)}, b"123456", "b starts at byte .* overlaps"),
        ({"a": entry(), "b": entry(start=5, end=9)}, b"123456789", "leaves a gap"),
        ({"a": entry()}, b"12345", "longer than its header says"),
        ({"a": entry(end=3)}, b"123", "needs 4 bytes, its range holds 3"),
        ({"a": entry("F32", (2,))}, b"1234", "needs 8 bytes, its range holds 4"),
        ({"a": entry("F9")}, b"1234", "unknown dtype 'F9'"),
        ({"a": entry(shape=(-4,), end=-4)}, b"", "no counts"),
        ({"a": entry(shape=(4.0,))}, b"1234", "no counts"),  # type: ignore[arg-type]
        ({"a": entry(start=-4, end=0)}, b"", "byte range"),
        ({"a": {**entry(), "data_offsets": ["0", "4"]}}, b"1234", "byte range"),
        ({"a": {"dtype": "U8"}}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": 3}, b"", "lacks dtype"),
        (b'{"a": {"dtype": "U8", "shape": [[1]], "data_offsets": [0, 1]}}', b"1", "lacks dtype"),
        (b"[]", b"", "expected a JSON object"),
        (b"{not json", b"", "damaged header"),
        (b"\xff\xfe{}", b"", "damaged header"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_shard(write(tmp_path / "x.safetensors", header, data))


def test_a_name_that_appears_twice_is_refused_though_json_would_keep_the_last() -> None:
    one = json.dumps(entry())
    with pytest.raises(CheckpointError, match="the name 'a' appears twice"):
        parse_header(f'{{"a": {one}, "a": {one}}}'.encode(), "x")


def test_a_header_length_beyond_the_bound_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    with pytest.raises(CheckpointError, match="more than 100,000,000 allowed"):
        read_shard(path)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.safetensors: cannot be read"):
        read_shard(tmp_path / "gone.safetensors")


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError):
        read_shard(tmp_path / "x.safetensors")
