"""Results with made-up numbers: what readers of result files are tested on."""

from __future__ import annotations

from foldmoe.bench.ceilings import Ceilings
from foldmoe.bench.result import LayerResult, Request, Row
from foldmoe.bench.serve.results import Failure, Run, Server, ServeResult
from foldmoe.bench.serve.workloads import Workload, WorkloadSet
from foldmoe.evaluate.request import Request as EvalRequest
from foldmoe.evaluate.result import ArmResult, EvalResult, LayerError, Sample, TaskResult

MICROSECONDS = {
    "hopper folded": {1: 46.0, 8: 159.0, 32: 448.0, 128: 802.0, 512: 1037.0, 2048: 1744.0},
    "hopper dual-stream": {1: 46.0, 8: 162.0, 32: 447.0, 128: 824.0, 512: 1032.0, 2048: 1759.0},
    "hopper serial": {1: 65.0, 8: 188.0, 32: 491.0, 128: 861.0, 512: 1056.0, 2048: 1832.0},
    "transformers eager": {1: 100.0, 8: 300.0, 32: 800.0},
}
FLOORS = {1: 24.0, 8: 141.0, 32: 422.0, 128: 757.0, 512: 790.0, 2048: 793.0}
"""Microseconds."""


def layer_result(
    *, times: float = 1.0, rounds: int = 20, tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 2048)
) -> LayerResult:
    """Shape A; every row 1 % noise, spread 3 %; the last arm stops at 32 tokens. ``times`` slows all."""
    request = Request("A", tokens, backend="hopper", rounds=rounds)
    rows = [
        Row(arm, count, us / 1e6, us / 1.03e6, us * 1.03e-6, 0.01, 5e-3, FLOORS[count] * times / 1e6, 3000.0, 10.0)
        for count in tokens
        for arm, known in MICROSECONDS.items()
        if (us := known.get(count, 0.0) * times)
    ]
    return LayerResult(
        request,
        "A",
        "DeepSeek-V4-Flash, one GPU",
        "H 4096, routed 256x2048 mxfp4, shared 1x2048 fp8_128x128 e8m0, top-6",
        Ceilings(4.62e12, 1.427e15, "fp8"),
        {"foldmoe": "0.1.0.dev0", "torch": "2.11.0", "triton": "3.6.0", "device": "NVIDIA H200"},
        rows,
        {"transformers": "Transformers' own experts are compared on bf16 weights"},
        request.command,
    )


_SERVED = {
    "stock-serial": 0.98,
    "serial": 1.0,
    "dual-stream": 1.03,
    "folded": 1.12,
    "slot": 1.06,
    "serial-again": 1.004,
}
"""Throughput of each arm over that of "serial"."""


def serve_result(*, repeats: int = 3) -> ServeResult:
    """Two workloads; every arm's repeats within 1 %; "slot" answers 128/256 worse than "serial"."""
    workloads = (Workload(128, 256, 1, 8), Workload(1024, 128, 64, 128))
    runs = []
    for arm, factor in _SERVED.items():
        for repeat in range(1, repeats + 1):
            for workload, base in zip(workloads, (122.6, 2853.9), strict=True):
                speed = (0.9 if arm == "slot" and workload.concurrency == 1 else factor) * (1 + (repeat - 2) * 0.005)
                metrics = {
                    "output_throughput": base * speed,
                    "mean_tpot_ms": 8.1 / speed,
                    "mean_ttft_ms": 18.6 / speed,
                    "median_itl_ms": 8.1 / speed,
                }
                count = workload.num_prompts
                texts = tuple(f"{i}" for i in range(count))
                runs.append(
                    Run(arm, repeat, workload.name, metrics, 10 / speed, count, count, texts=texts, latencies=(1.0,))
                )
    servers = [
        Server(
            arm, repeat, {"FOLDMOE_FOLD": "native"}, "folded", ("40 MoE layers: 40 folded; runs as folded",), (),
            {"vllm": "0.25.1"}, 61.0, 44 << 30, 1 << 20, 1200, "server.log",
        )
        for arm in _SERVED
        for repeat in range(1, repeats + 1)
    ]  # fmt: skip
    arms = tuple(arm for arm in _SERVED if arm != "serial-again")
    return ServeResult(
        "vllm serve model", "vllm bench serve", WorkloadSet("made-up", "two made-up workloads", workloads), arms,
        repeats, {"foldmoe": "0.1.0.dev0"}, "foldmoe bench serve --workloads made-up", "serial-again", "serial",
        servers, runs, [Failure("dual-stream", 2, "start", "port <8000> is taken")], complete=False,
    )  # fmt: skip


def eval_result(*, items: int = 200) -> EvalResult:
    """Two tasks, one of them in parts; "slot" loses a tenth of the first and its layers are over what is allowed."""
    return EvalResult(
        "tiny-v4",
        EvalRequest("tiny-v4", ("serial", "native", "slot")),
        "serial",
        tuple(_arm(arm, items, wrong) for arm, wrong in (("serial", 20), ("native", 20), ("slot", 40))),
        "foldmoe 0.1.0.dev0",
        {"torch": "2.13.0", "device": "a CPU"},
        ("made-up answers",),
    )


def _arm(arm: str, items: int, wrong: int) -> ArmResult:
    def task(misses: int, *, groups: bool) -> TaskResult:
        return TaskResult(
            tuple(
                Sample(i, f"{i}", {"exact": float(i >= misses)}, str(i >= misses), "stop", 4,
                       group=f"{256 << i % 2} tokens" if groups else "")
                for i in range(items)
            ),
            "1",
            16,
        )  # fmt: skip

    slot = arm == "slot"
    layers = (LayerError("layers.0.ffn", f"{arm} on torch", 9e-3 if slot else 1e-3, 0.1 if slot else 0.0, 6e-3),)
    return ArmResult(
        arm, f"{arm} on torch", {"arithmetic": task(wrong, groups=False), "needle": task(0, groups=True)}, layers
    )
