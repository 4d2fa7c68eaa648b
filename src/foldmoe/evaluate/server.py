"""What a running OpenAI-compatible server says about itself."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from urllib.request import urlopen

_PATIENCE = 10  # seconds


def describe(arm: str, url: str) -> dict[str, str]:
    """URL, model name and, where the server tells, version.

    Raises:
        ValueError: nobody answers there, or not as such a server does.
    """
    base = url.rstrip("/")
    try:
        models = _get(f"{base}/models")["data"]
        model = str(models[0]["id"])
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"arm {arm}: {base}/models gave no model name ({error}); expected the base URL of an OpenAI-compatible "
            "server, such as http://localhost:8000/v1"
        ) from error
    found = {"url": base, "model": model}
    with suppress(OSError, KeyError, TypeError, ValueError):  # only vLLM has this route
        found["version"] = str(_get(f"{base.removesuffix('/v1')}/version")["version"])
    return found


def _get(url: str) -> Any:
    with urlopen(url, timeout=_PATIENCE) as reply:
        return json.load(reply)
