"""Racecheck's report, sorted into hazards that are known and others."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="NOT CHECKED: the Hopper kernels need triton (pip install foldmoe[gpu])")
from foldmoe.runtime.offline import standing_in
from tests.hopper import dispatch, sanitized

BLOCK = """\
========= Error: Race reported between Write access at folded_moe+0xec00 in {}:{}
=========     and Read access at folded_moe+0x510 in {}:{} [112 hazards]
=========     and Read access at folded_moe+0x3fe0 in {}:{} [96 hazards]
========= \n"""


def line(file: str, text: str, after: str = "") -> int:
    """Number of the first line with ``text`` in a kernel file, behind one with ``after``."""
    lines = (Path(sanitized.KERNELS) / file).read_text().splitlines()
    start = next(i for i, found in enumerate(lines) if after in found)
    return next(i for i, found in enumerate(lines[start:], start + 1) if text in found)


def block(write: tuple[str, int], *reads: tuple[str, int]) -> str:
    return BLOCK.format(*write, *reads[0], *reads[-1])


STORE = ("tickets.py", line("tickets.py", ".store(", "def hand_out"))
LOAD = ("tickets.py", line("tickets.py", ".load(", "def receive"))
TOLD = ("epilogue.py", line("epilogue.py", "amax_bufs", "def finish_up"))
DISPATCH = ("folded.py", line("folded.py", "gl.warp_specialize("))


def test_places_are_functions_of_the_launch():
    assert sanitized.place(*STORE) == "tickets.hand_out"
    assert sanitized.place(*LOAD) == "tickets.receive"
    assert sanitized.place("elsewhere.py", 7) == "elsewhere.py:7"
    assert sanitized.place("folded.py", 1) == "folded.py:1"


def test_hazards_are_counted_by_kind():
    known, others = sanitized.hazards("noise\n" + 2 * block(DISPATCH, DISPATCH))
    assert not others
    assert dict(known) == {"Triton's dispatch of warps": 2}


@pytest.mark.parametrize(
    "said",
    [
        block(STORE, STORE),
        block(TOLD, TOLD),
        block(STORE, LOAD),
        block(DISPATCH, DISPATCH, TOLD),  # one of its reads is another's
        block(("products.py", 140), DISPATCH),
        block(("products.py", 140), DISPATCH).replace("Error", "Warning"),
        block(("triton.py", 3), ("triton.py", 4)),
        block(DISPATCH, DISPATCH).replace(f" in folded.py:{DISPATCH[1]} [96", " [96"),  # no line information
        "========= Error: Race reported between Write access at folded_moe+0x1\n========= \n",
    ],
)
def test_another_hazard_is_kept_whole(said: str):
    known, others = sanitized.hazards(block(DISPATCH, DISPATCH) + said)
    assert others == [said.removesuffix("========= \n")]
    assert sum(known.values()) == 1


@pytest.mark.parametrize("between", [0, 1, 2])
def test_dispatch_writes_and_reads_its_word_between_barriers_of_all(between: int):
    with standing_in("cuda", "sm_90"):
        out = torch.zeros(dispatch.CTAS * dispatch.ROLES, dtype=torch.int32)
        kernel = dispatch.dispatched.warmup(out, between, grid=(1,), num_warps=4)
    words = [line.split()[0] for line in kernel.asm["ptx"].splitlines() if line.strip()]
    kinds = {"barrier.sync": "B", "st.shared": "W", "ld.shared": "R"}
    steps = "".join(kinds.get(".".join(word.split(".")[:2]), "") for word in words)
    assert kernel.metadata.shared < 64, "the kernel shares nothing but the word and an mbarrier"
    assert re.fullmatch("W+BB+W+BB+RB+", steps)


def test_a_wrong_layer_is_told_with_its_place():
    want = torch.ones(4, 8)
    wrong = want.clone()
    wrong[2, 3:5] = torch.nan
    calls = iter([wrong, want])
    line, where = sanitized.told("hopper bf16-bf16 bf16 4", lambda: next(calls), want).splitlines()
    assert line == "hopper bf16-bf16 bf16 4 inf wrong"
    assert where == "  2 of 32 values (2 NaN), the first at [[2, 3], [2, 4]]; once more: 0.0e+00"
    assert sanitized.told("a", lambda: want * 1.001, want) == "a 1.0e-03 right"


def test_nothing_reported_is_nothing():
    assert sanitized.hazards("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n") == ({}, [])


RAN = "".join(
    f"{backend} {pair} {kind} {tokens} 4.0e-03 right\n"
    for backend, pairs in (("hopper", sanitized.PAIRS), ("triton", [sanitized.TRITON_PAIR]))
    for pair, kind in pairs
    for tokens in sanitized.TOKENS
)
ENDED = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"


@pytest.mark.parametrize(
    ("tool", "said", "ran", "code"),
    [
        ("racecheck", block(DISPATCH, DISPATCH) + ENDED, RAN, 0),
        ("racecheck", block(STORE, STORE) + ENDED, RAN, 1),
        ("racecheck", block(DISPATCH, DISPATCH), RAN, 1),  # it ended early
        ("racecheck", ENDED, RAN, 1),  # a hazard that was not understood
        ("racecheck", block(DISPATCH, DISPATCH) + ENDED, RAN[:40], 1),
        (
            "racecheck",
            block(DISPATCH, DISPATCH) + ENDED,
            RAN.replace("4.0e-03 right", "inf wrong\n  2 of 768 values", 1),
            1,
        ),
        ("racecheck", "", "", 1),
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", RAN[: RAN.index("triton")], 1),
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", RAN, 0),
        ("memcheck", "========= ERROR SUMMARY: 7 errors\n", RAN, 1),
    ],
)
def test_the_command_fails_on_anything_else_and_where_layers_did_not_run(
    tool: str,
    said: str,
    ran: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "said").write_text(said)
    (tmp_path / "ran").write_text(ran)
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/said\ncat {tmp_path}/ran >&2\n')
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert sanitized.main(tool) == code
    asked = (tmp_path / "asked").read_text()
    assert f"--tool {tool} " in asked
    assert ("kns=folded_moe" in asked) == (tool == "racecheck")  # memcheck watches every kernel
    printed = capsys.readouterr().out
    assert ("Race reported" in printed) == (block(STORE, STORE) in said)
    assert "layers ran" in printed
    assert (ran in printed) == (ran != RAN)  # what there is of a run that stopped
