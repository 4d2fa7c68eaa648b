"""What ``foldmoe doctor`` says about vLLM: is the plugin active, and what would a ``vllm serve`` command fold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foldmoe.checkpoint import read_headers
from foldmoe.integrations.vllm import plugin, versions
from foldmoe.integrations.vllm.refusals import EXCHANGES
from foldmoe.planner import plan_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.planner import FusionPolicy


@dataclass(frozen=True)
class Advice:
    """One line: what was looked at, what was found, and what to do.

    Args:
        broken: vLLM is here, and its servers would run as if foldmoe were not.
    """

    subject: str
    found: str
    ok: bool
    what_to_do: str = ""
    broken: bool = False


def plugin_state() -> Advice:
    """Whether a vLLM server of this environment would fold; vLLM only logs a plugin that does not load."""
    version = versions.installed()
    found, why = "not active", versions.objection(version)
    if why is None and plugin.active() is None:
        why = "its entry point is missing: install foldmoe again"
    allowed = os.environ.get("VLLM_PLUGINS")
    if why is None and allowed is not None and plugin.ENTRY_POINT not in allowed.split(","):
        why = f"VLLM_PLUGINS={allowed} leaves out {plugin.ENTRY_POINT}"
    if why is None:
        try:
            plugin.register()
            plugin.record()
        except Exception as error:  # whatever it is, a server would run without the plugin
            found, why = "does not load", f"{type(error).__name__}: {error}"
    if why is not None:
        return Advice("vLLM plugin", found, False, why, broken=version is not None)
    return Advice("vLLM plugin", f"active, vLLM {version}", True, "FOLDMOE_FOLD=stock turns it off")


_BACK_TO_VLLM = {
    "--enable-eplb": "expert load balancing moves experts at run time: layers stay with vLLM",
    "--enable-lora": "LoRA attaches to vLLM's own experts: layers stay with vLLM",
    "--enable-dbo": "dual-batch overlap: layers stay with vLLM",
    "--enable-elastic-ep": "elastic expert parallelism: layers stay with vLLM",
    "--enable-sleep-mode": "sleep mode drops weights or loads them again: layers stay with vLLM",
    "--weight-transfer-config": "weights sent to a running server: layers stay with vLLM",
    "--cpu-offload-gb": "offloaded weights: layers stay with vLLM",
    "--offload-group-size": "offloaded weights: layers stay with vLLM",
    "--ubatch-size": "microbatches: layers stay with vLLM",
    "--prefill-context-parallel-size": "prefill context parallelism: layers stay with vLLM",
    "-pcp": "prefill context parallelism: layers stay with vLLM",
}

_OFF = {
    "--cpu-offload-gb": ("0",),
    "--offload-group-size": ("0",),
    "--ubatch-size": ("0", "1"),
    "--prefill-context-parallel-size": ("1",),
    "-pcp": ("1",),
}

_PERHAPS = {
    ("--dtype", "float16"): "layers stay with vLLM where a routed scaling factor is not 1: use bfloat16",
    ("--dtype", "half"): "layers stay with vLLM where a routed scaling factor is not 1: use bfloat16",
    ("--quantization", "fp8"): "a bf16 checkpoint that vLLM quantises while it loads stays with vLLM: leave it out",
    ("-q", "fp8"): "a bf16 checkpoint that vLLM quantises while it loads stays with vLLM: leave it out",
}


def command(words: Sequence[str], policy: FusionPolicy) -> list[Advice]:
    """What stands against folding in a ``vllm serve`` command, and the plan of its checkpoint if that lies here.

    Args:
        words: the command line, split.
        policy: from the environment.

    Raises:
        ValueError: not a ``vllm serve`` command.
    """
    if [Path(word).name for word in words[:2]] != ["vllm", "serve"]:
        raise ValueError(f"expected a command that starts with 'vllm serve', found {' '.join(words[:2])!r}")
    flags = _flags(words[2:])
    tp = _number(flags, "--tensor-parallel-size", "-tp")
    dp = _number(flags, "--data-parallel-size", "-dp")
    ep = "--enable-expert-parallel" in flags or "-ep" in flags
    found = [
        Advice(flag, flags[flag] or "on", False, f"{why}; leave it out")
        for flag, why in _BACK_TO_VLLM.items()
        if flag in flags and flags[flag] not in _OFF.get(flag, ())
    ]
    found += [Advice(flag, value, False, why) for (flag, value), why in _PERHAPS.items() if flags.get(flag) == value]
    found += _parallel(flags, tp, dp, ep)
    model = words[2] if len(words) > 2 and not words[2].startswith("-") else flags.get("--model", "")
    found += _kernels(flags, model)
    found = found or [Advice("command", "nothing in its flags stands against folding", True)]
    if not model:
        what_to_do = "name it right behind 'vllm serve', before the flags"
        found.append(Advice("checkpoint", "no model was named", False, what_to_do))
    elif Path(model).is_dir():
        whole, split = (tp * dp, 1) if ep else (1, tp * dp)
        plan = plan_checkpoint(model, policy=policy, ep_size=whole, tp_size=split)
        unfolded = next((row.reasons[-1] for row in plan.rows if not row.folded and row.reasons), "")
        found.append(Advice("checkpoint", plan.summary, not unfolded, unfolded))
    else:
        ask = f"'foldmoe plan {model}' reads a hub repository and says what folds"
        found.append(Advice("checkpoint", f"was not read: no folder {model} here", False, ask))
    return found


def _parallel(flags: dict[str, str], tp: int, dp: int, ep: bool) -> list[Advice]:
    found = []
    if tp > 1 and dp > 1 and ep:
        found.append(
            Advice(
                "--tensor-parallel-size",
                f"{tp} with data parallelism {dp}",
                False,
                "vLLM then splits sequences over ranks and layers stay with it: use one of the two",
            )
        )
    backend = flags.get("--all2all-backend", EXCHANGES[0])
    if dp > 1 and backend not in EXCHANGES:
        found.append(
            Advice("--all2all-backend", backend, False, f"layers stay with vLLM: use --all2all-backend {EXCHANGES[0]}")
        )
    if flags.get("--expert-placement-strategy", "linear") != "linear":
        found.append(Advice("--expert-placement-strategy", "round_robin", False, "layers stay with vLLM: use linear"))
    return found


def _kernels(flags: dict[str, str], model: str) -> list[Advice]:
    found = []
    if backend := flags.get("--moe-backend"):
        mega = "mega_moe" in backend
        why = "runs on sm_100 alone and bypasses this plugin" if mega else "does not reach folded layers"
        found.append(Advice("--moe-backend", backend, not mega, f"{why}; leave it out"))
    if _is_v41(model) and "--attention-backend" not in flags:
        needed = "on Hopper add --attention-backend FLASHMLA_SPARSE_DSV41"
        found.append(Advice("--attention-backend", "not given", False, needed))
    return found


def _is_v41(model: str) -> bool:
    if model and Path(model).is_dir():
        return str(read_headers(model).config.get("model_type", "")).startswith("deepseek_v41")
    return "V4.1" in model


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Flag to its value, "" for a switch; both ``--flag value`` and ``--flag=value``."""
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        if word.startswith("-"):
            name, _, value = word.partition("=")
            following = words[number + 1] if number + 1 < len(words) else "-"
            found[name.replace("_", "-")] = value or ("" if following.startswith("-") else following)
    return found


def _number(flags: dict[str, str], *names: str) -> int:
    stated = next((flags[name] for name in names if flags.get(name)), "1")
    if not stated.isdigit() or int(stated) < 1:
        raise ValueError(f"{names[0]} must be a positive number, found {stated!r}")
    return int(stated)
