"""The two published deployments of a folded shared expert, as server and client commands, with Hopper variants.

Sources: DeepSeek-V4.1-Flash on 8 GPUs with tensor and expert parallelism and an FP8 KV cache (the native fold), and
DeepSeek-V4-Pro with data and expert parallelism (the slot fold, whose shared expert was lowered to MXFP4; here it stays
as stored unless FOLDMOE_FOLD=slot FOLDMOE_ALLOW_REQUANTIZE=1). Clients have the flags of the native fold's table.
"""

from __future__ import annotations

from dataclasses import dataclass

CLIENT = (
    "vllm bench serve --model {model} --dataset-name random --random-input-len {input} --random-output-len {output} "
    "--random-range-ratio 0 --random-prefix-len 0 --max-concurrency {concurrency} --num-prompts {prompts} "
    "--request-rate inf --ignore-eos --temperature 0 --seed 42 --num-warmups 2 "
    "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,95,99 --save-result --save-detailed"
)

FIVE = ((128, 256, 1, 8), (1024, 128, 1, 8), (1024, 128, 64, 128), (8192, 32, 16, 32), (8192, 1024, 16, 100))
"""(input, output, concurrency, prompts) of the native fold's table."""

SWEEP = tuple((size, 1024, n, max(16, 4 * n)) for size in (1024, 8192) for n in (1, 2, 4, 8, 16, 32, 64, 128))
"""The slot fold's sweep."""


@dataclass(frozen=True)
class Deployment:
    """One way to serve a model.

    Args:
        model: repository.
        server: command on the hardware that it was published for.
        hopper: the same on Hopper.
        loads: (input, output, concurrency, prompts).
    """

    model: str
    server: str
    hopper: str
    loads: tuple[tuple[int, int, int, int], ...]

    def lines(self) -> list[str]:
        """All commands, ready to be pasted."""
        clients = [
            CLIENT.format(model=self.model, input=i, output=o, concurrency=c, prompts=p) for i, o, c, p in self.loads
        ]
        return [
            "# server",
            f"FOLDMOE_FOLD=native {self.server}",
            "# server on Hopper",
            f"FOLDMOE_FOLD=native {self.hopper}",
            "# client, one load a line",
            *clients,
        ]


_TP = (
    "vllm serve deepseek-ai/DeepSeek-V4.1-Flash --tensor-parallel-size 8 --enable-expert-parallel --kv-cache-dtype fp8"
)
_DP = (
    "vllm serve deepseek-ai/DeepSeek-V4-Pro --data-parallel-size 8 --enable-expert-parallel "
    "--all2all-backend allgather_reducescatter"
)

DEPLOYMENTS = {
    "tp8-ep": Deployment(
        "deepseek-ai/DeepSeek-V4.1-Flash", _TP, f"{_TP} --attention-backend FLASHMLA_SPARSE_DSV41", FIVE
    ),
    "dp8-ep": Deployment("deepseek-ai/DeepSeek-V4-Pro", _DP, f"{_DP} --kv-cache-dtype fp8", SWEEP),
}
