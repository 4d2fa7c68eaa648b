"""``transformers serve`` with models that this package loads: experts as stored, MoE blocks folded.

Transformers' server asks one object, its ``ModelManager``, for models; a subclass that loads them here is put in its
place before the command starts. Nothing else of the server changes: endpoints, streaming and flags are its own.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foldmoe.integrations.transformers.loading import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.planner import FusionPolicy

_MANAGER = "transformers.cli.serving.model_manager"
_NEEDS = ("transformers", "accelerate", "fastapi", "uvicorn", "openai")


def serve(arguments: Sequence[str], policy: FusionPolicy | None = None) -> None:
    """Run ``transformers serve`` with ``arguments`` until it is stopped; ``--help`` lists them.

    Args:
        arguments: as ``transformers serve`` takes them: a folder or hub repository, ``--port``, ``--device``, ..
        policy: how every model's MoE blocks run; see :class:`foldmoe.FusionPolicy`.

    Raises:
        ValueError: a package that the server needs is not installed.
    """
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise ValueError(f"serving needs {', '.join(missing)}: pip install 'foldmoe[serve]'")
    import typer
    from transformers.cli.serve import Serve

    module: Any = import_module(_MANAGER)
    stock = module.ModelManager
    module.ModelManager = _manager(stock, policy)
    try:
        app = typer.Typer(add_completion=False)
        app.command("serve")(Serve)
        typer.main.get_command(app).main(args=list(arguments), prog_name="foldmoe serve")
    finally:
        module.ModelManager = stock


def _manager(stock: Any, policy: FusionPolicy | None) -> Any:
    """A ``ModelManager`` that loads models folded."""

    class FoldedModelManager(stock):  # type: ignore[misc]
        def _load_model(self, model_id_and_revision: str, *_: Any, gguf_file: str | None = None, **__: Any) -> Any:
            if gguf_file is not None or self.quantization is not None:
                raise ValueError(
                    f"{model_id_and_revision}: experts run as the checkpoint stores them; GGUF files and "
                    "--quantization are for 'transformers serve' itself"
                )
            return load(
                _folder(model_id_and_revision),
                policy,
                device=None if self.device == "auto" else self.device,
                **({} if self.dtype in ("auto", None) else {"dtype": self.dtype}),
            )

    return FoldedModelManager


def _folder(model: str) -> Path:
    """A local folder as it is; a hub repository (``name@revision``) downloaded, or found in the hub's cache."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    repository, _, revision = model.partition("@")
    return Path(snapshot_download(repository, revision=revision or None))
