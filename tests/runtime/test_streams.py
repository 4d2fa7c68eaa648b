"""Work on a second stream is joined again whatever happens, and layers share that stream."""

from __future__ import annotations

import pytest
import torch

from foldmoe.runtime import streams


class Stream:
    """Records what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_the_main_stream_goes_on_after_the_side_one() -> None:
    log: list[str] = []
    with streams.beside(Stream("main", log), Stream("side", log)):  # type: ignore[arg-type]
        log.append("work")
    assert log == ["side waits for main", "work", "main waits for side"]


def test_an_error_leaves_no_stream_apart() -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError, match="compiled during"), streams.beside(Stream("main", log), Stream("side", log)):  # type: ignore[arg-type]
        raise RuntimeError("would be compiled during a CUDA graph capture")
    assert log[-1] == "main waits for side"


def test_one_stream_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or f"stream of {device}")
    streams.side_stream.cache_clear()
    try:
        found = {streams.side_stream(torch.device("cuda", i)) for i in (0, 1, 0, 0)}
    finally:
        streams.side_stream.cache_clear()
    assert len(made) == len(found) == 2
