"""Files to write: tried before a long run, not after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from foldmoe.cli.files import writable
from foldmoe.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path


def test_folders_are_made_and_nothing_is_left_behind(tmp_path: Path) -> None:
    writable("--out", tmp_path / "new" / "sub" / "r.json")
    assert list((tmp_path / "new" / "sub").iterdir()) == []
    writable("--out", None)


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "layer"],
        ["bench", "parallel"],
        ["eval", "--device", "cpu"],
        ["report", "none.json"],
    ],
)
def test_what_cannot_be_written_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    for ran in ("foldmoe.bench.layer.run", "foldmoe.bench.parallel.launch.run", "foldmoe.cli.eval.run"):
        monkeypatch.setattr(ran, lambda *_, **__: pytest.fail("ran"))
    (tmp_path / "file").write_text("")
    for out, said in (
        (tmp_path, f"--out takes a file to write, found the folder {tmp_path}"),
        (tmp_path / "file" / "r.json", f"--out {tmp_path / 'file' / 'r.json'} cannot be written: "),
    ):
        done = CliRunner().invoke(app, [*command, "--out", str(out)])
        assert done.exit_code == 2, done.output
        assert said in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not tmp_path.with_name(f"{tmp_path.name}.part").exists()
