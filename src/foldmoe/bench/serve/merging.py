"""One result of several: arms that were served at the same time, each process on a GPU of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from foldmoe.bench.serve.arms import AGAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foldmoe.bench.serve.results import ServeResult

_SAME = ("serve_cmd", "client_cmd", "workloads", "warm", "repeats", "versions")


def merge(results: Mapping[str, ServeResult]) -> ServeResult:
    """All arms, servers, runs and failures of ``results`` in one.

    An arm that two of them served measures how far their GPUs differ: the second one's is kept as the arm served once
    more, which is what the noise floor is taken from, unless one of the results has a noise floor of its own.

    Args:
        results: by a name for messages, such as the file's; in the order of the merged arms.

    Raises:
        ValueError: fewer than two results, some that cannot be compared, or an arm too many times.
    """
    if len(results) < 2:
        raise ValueError(f"expected two results or more to merge, found {len(results)}")
    (first_name, merged), *others = results.items()
    merged = replace(merged, servers=[*merged.servers], runs=[*merged.runs], failures=[*merged.failures])
    for name, other in others:
        for field in _SAME:
            one, two = getattr(merged, field), getattr(other, field)
            if one != two:
                raise ValueError(f"cannot merge {name} with {first_name}: {field} is {two!r}, not {one!r}")
        _add(merged, other, name)
    return merged


def _add(merged: ServeResult, other: ServeResult, name: str) -> None:
    if twice := [arm for arm in other.arms if arm in merged.arms]:
        if len(twice) > 1 or merged.noise_arm or other.noise_arm:
            raise ValueError(
                f"{name} serves {', '.join(twice)} once more: one arm can be there twice, where no noise floor is yet"
            )
        merged.noise_of, merged.noise_arm = twice[0], twice[0] + AGAIN
    elif other.noise_arm:
        if merged.noise_arm:
            raise ValueError(f"{name} has a noise floor of its own ({other.noise_of}), as has another: merge one only")
        merged.noise_of, merged.noise_arm = other.noise_of, other.noise_arm
    merged.arms = (*merged.arms, *(arm for arm in other.arms if arm not in twice))

    def renamed(arm: str) -> str:
        return arm + AGAIN if arm in twice else arm

    merged.servers += [replace(server, arm=renamed(server.arm)) for server in other.servers]
    merged.runs += [replace(run, arm=renamed(run.arm)) for run in other.runs]
    merged.failures += [replace(failure, arm=renamed(failure.arm)) for failure in other.failures]
    merged.complete = merged.complete and other.complete
    merged.command += f"; {other.command}"
