"""Stands in for ``vllm bench serve``: really sends the requests, and writes the same result file.

An option that ``vllm bench serve`` does not have is refused, as it would refuse it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

options = argparse.ArgumentParser(allow_abbrev=False)
TEXTS = ("dataset-name", "random-range-ratio", "random-prefix-len", "request-rate", "temperature", "percentile-metrics")
for flag in (*TEXTS, "metric-percentiles", "host", "result-dir", "result-filename"):
    options.add_argument(f"--{flag}", required=True)
NUMBERS = ("num-warmups", "port", "seed", "random-input-len", "random-output-len", "max-concurrency", "num-prompts")
for flag in NUMBERS:
    options.add_argument(f"--{flag}", type=int, required=True)
for flag in ("ignore-eos", "save-result", "save-detailed", "fail", "no-file", "sleep"):
    options.add_argument(f"--{flag}", action="store_true")
asked = options.parse_args()
WARM_SEED = 43


def request(index: int) -> dict[str, object]:
    body = {
        "index": index,
        "tokens": asked.random_output_len,
        "seed": asked.seed,
        "warm": asked.seed == WARM_SEED,
    }
    url = f"http://{asked.host}:{asked.port}/v1/completions"
    start = time.perf_counter()
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, json.dumps(body).encode()), timeout=100) as answer:
            found = json.loads(answer.read())
    except OSError as error:
        return {"text": "", "tokens": 0, "ttft": 0.0, "itl": [], "error": f"Traceback\n{error}"}
    took = time.perf_counter() - start
    rest = max(found["tokens"] - 1, 1)
    return {**found, "ttft": took / 2, "itl": [took / 2 / rest] * rest, "error": ""}


if asked.sleep:
    time.sleep(60)
if asked.fail:
    sys.exit("ValueError: no tokenizer here")
begun = time.perf_counter()
with ThreadPoolExecutor(asked.max_concurrency) as pool:
    answers = list(pool.map(request, range(asked.num_prompts)))
duration = time.perf_counter() - begun
good = [answer for answer in answers if not answer["error"]]
result: dict[str, object] = {
    "duration": duration,
    "completed": len(good),
    "failed": len(answers) - len(good),
    "output_throughput": sum(answer["tokens"] for answer in good) / duration,
    "output_lens": [answer["tokens"] for answer in answers],
    "ttfts": [answer["ttft"] for answer in answers],
    "itls": [answer["itl"] for answer in answers],
    "generated_texts": [answer["text"] for answer in answers],
    "errors": [answer["error"] for answer in answers],
}
values = {
    "ttft": [answer["ttft"] for answer in good],
    "tpot": [statistics.mean(answer["itl"]) for answer in good],
    "itl": [gap for answer in good for gap in answer["itl"]],
    "e2el": [answer["ttft"] + sum(answer["itl"]) for answer in good],
}
for name, numbers in values.items():
    ordered = sorted(numbers) or [float("nan")]
    result[f"mean_{name}_ms"] = statistics.mean(ordered) * 1e3
    result[f"median_{name}_ms"] = statistics.median(ordered) * 1e3
    for percentile in (50, 95, 99):
        result[f"p{percentile}_{name}_ms"] = ordered[int(percentile / 100 * (len(ordered) - 1))] * 1e3
if not asked.no_file:
    (Path(asked.result_dir) / asked.result_filename).write_text(json.dumps(result))
