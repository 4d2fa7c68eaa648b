"""Files that commands write."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile


def writable(option: str, path: Path | None) -> None:
    """Make the folders of a file that is to be written, and try that it can be: before a long run, not after it.

    Args:
        option: that names the file.
        path: None, where no file was asked for.

    Raises:
        ValueError: naming the option and the file: a folder, or a place that cannot be written to.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} takes a file to write, found the folder {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            return  # such as /dev/stdout
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror or error}") from error
