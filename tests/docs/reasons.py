"""Every reason that code can give for not folding, or not folding better, collected from its source.

A reason is a string with words in it, in a function of :data:`SOURCES`. Values in it become ``…``, and that is how the
troubleshooting page writes it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "foldmoe"

SOURCES = {
    "planner/decide.py": ("plan_layer", "_about_rows", "_precision", "without_backend", "slot_obstacles"),
    "moe/spec.py": ("shard",),
    "backends/hopper/backend.py": ("_missing", "unavailable"),
    "backends/hopper/supports.py": ("reasons", "_shared_reasons", "_float_reasons", "_block_reasons"),
    "backends/hopper/pack.py": ("check_mxfp4",),
    "backends/hopper/pack_bf16.py": ("check_bf16",),
    "backends/hopper/pack_fp8.py": ("check_fp8_block",),
    "backends/triton/backend.py": ("unavailable",),
    "backends/triton/layout.py": ("matrix", "_check_span"),
    "backends/triton/limits.py": ("refusals", "_refusals"),
    "checkpoint/specs.py": ("_layer", "_precision", "_differs", "_cross_check", "_check_dtype", "_other_notes"),
    "checkpoint/config.py": ("_odd_activation",),
    "checkpoint/audit.py": ("audit", "_set", "_stacked", "_experts", "_missing", "_router"),
    "checkpoint/stored.py": ("read_set", "_matrix"),
    "formats/tensor.py": ("detect", "_expect_shape"),
    "moe/slots.py": ("to_slots", "_check", "append_shared_slot", "check_replicas", "to_physical"),
    "parallel/agree.py": ("compare", "_differences"),
    "integrations/transformers/blocks.py": ("obstacles",),
    "integrations/transformers/folding.py": ("_decide",),
    "integrations/transformers/loading.py": ("_load_blocks",),
    "integrations/transformers/twin.py": ("_routed_scale",),
    "integrations/vllm/versions.py": ("objection",),
    "integrations/vllm/refusals.py": ("of_routed", "_new_weights", "_activation", "of_runner"),
    "integrations/vllm/layers.py": ("_raw", "__init__"),
    "integrations/vllm/stored.py": ("routed_storage",),
    "integrations/vllm/shared.py": ("of", "_activation"),
}
"""Functions (and class attributes) that word reasons, by file."""

NO_REASONS = {
    "backends/torch/backend.py": ("supports", "unavailable"),  # runs everything
    "backends/base.py": ("supports", "unavailable"),  # the contract
    "planner/capability.py": ("supports", "unavailable"),  # the same
    "backends/hopper/backend.py": ("supports",),  # asks supports.py
    "backends/triton/backend.py": ("supports",),  # asks limits.py
    "checkpoint/specs.py": ("reasons",),
    "planner/checkpoint.py": ("reasons",),
    "planner/decide.py": ("_first",),  # puts a backend's name in front
    "integrations/transformers/folding.py": ("_swap",),  # asks the layer
    "integrations/transformers/twin.py": ("routed_scale",),  # asks _routed_scale
    "integrations/vllm/advice.py": ("command",),  # advice on a command line, not reasons of a layer
    "integrations/vllm/layers.py": ("_decide",),  # asks refusals.py and the planner
}
"""Functions that look like sources and word nothing themselves."""

FRAGMENTS = {
    "… or more",
    "expert ids",
    "routed experts",
    "shared expert",
    "number of routed experts",
    "the hash table (tid2eid) holds",
    "the experts' is",
    "the layer holds",
    "the routed experts' is",
    "width of the shared expert",
    "the tensors' is",
    "the routed experts have",
    "the shared expert has",
    "the routed experts are",
    "takes no",
    "FP8 values",
    "packed 4-bit values (two a byte)",
    "gate (w1, gate_proj)",
    "up (w3, up_proj)",
}
"""Parts of reasons that stand in a variable of their own."""

_ROOMS = ("planner", "backends", "integrations", "checkpoint", "moe")
_NAMES = ("supports", "reasons", "refusals", "obstacles", "unavailable")


def template(node: ast.expr) -> str | None:
    """A string, values replaced by ``…``; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    text = "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return re.sub("…{2,}", "…", text)


def collect(file: str, names: tuple[str, ...]) -> set[str]:
    """Reasons in the named functions of one file."""
    found: set[str] = set()
    tree = ast.parse((PACKAGE / file).read_text())
    wanted = [node for node in ast.walk(tree) if _name(node) in names]
    missing = set(names) - {_name(node) for node in wanted}
    assert not missing, f"{file} has no {', '.join(sorted(missing))} any more: update SOURCES"
    for node in wanted:
        found |= {text for text in _strings(node) if _worded(text)}
    return found


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return node.target.id
    return None


def _strings(node: ast.AST) -> set[str]:
    """Whole strings below a node: no docstrings, no parts of another string."""
    found: set[str] = set()
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        children.remove(node.body[0])
    for child in children:
        text = template(child) if isinstance(child, ast.expr) else None
        if text is None:
            found |= _strings(child)
        else:
            found.add(text.strip())
    return found


def _worded(text: str) -> bool:
    words = re.findall(r"(?<![\w.-])[A-Za-z]\w+(?![\w.-])", text.replace("…", " … "))
    return len(words) >= 2 or (len(words) == 1 and ": " in text)


def everything() -> dict[str, set[str]]:
    """Reasons by file, fragments left out."""
    found = {file: collect(file, names) for file, names in SOURCES.items()}
    unused = FRAGMENTS - set().union(*found.values())
    assert not unused, f"no longer in the code: {sorted(unused)}"
    return {file: reasons - FRAGMENTS for file, reasons in found.items()}


def unlisted() -> list[str]:
    """Functions that explain a refusal, by name or docstring, and that neither list names."""
    found = []
    for room in _ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            file = path.relative_to(PACKAGE).as_posix()
            known = {*SOURCES.get(file, ()), *NO_REASONS.get(file, ())}
            for node in ast.walk(ast.parse(path.read_text())):
                name = _name(node)
                if name is None or name in known:
                    continue
                explains = isinstance(node, ast.FunctionDef) or any(map(_worded, _strings(node)))
                if (name in _NAMES and explains) or _explains(node):
                    found.append(f"{file}: {name}")
    return found


def _explains(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    if re.search(r"\b[Ww]hy\b|stands against", (ast.get_docstring(node) or "").partition("\n")[0]):
        return True
    raised = [n.exc for n in ast.walk(node) if isinstance(n, ast.Raise)]
    return any(isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id == "Unsupported" for e in raised)
