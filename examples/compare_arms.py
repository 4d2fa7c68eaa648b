"""Time three arms of one MoE layer on one GPU: serial, a second stream, folded. The shape is DeepSeek-V4-Flash's.

python examples/compare_arms.py --tokens 1,32 --backend hopper    # 7 GB of GPU memory; any shape of the bench command
"""

import argparse
from itertools import groupby

import torch

from foldmoe.bench.layer import OWN_ARMS, Request, run


def main() -> None:
    parser = argparse.ArgumentParser(description="Serial, dual-stream and folded over the same weights.")
    parser.add_argument("--shape", default="A")
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is visible to torch; on a CPU there is no second stream to compare with")
    tokens = tuple(int(part) for part in asked.tokens.split(","))
    result = run(Request(asked.shape, tokens, tuple(OWN_ARMS), backend=asked.backend, rounds=asked.rounds))
    print(f"{result.what}: {result.spec}")
    for count, rows in groupby(result.rows, key=lambda row: row.tokens):
        arms = list(rows)
        best = min(arms, key=lambda row: row.seconds)
        for row in arms:
            behind = row.seconds / best.seconds - 1
            # A lead that is inside the noise of either arm is a tie.
            word = "fastest" if row is best else "tie" if behind <= max(row.noise, best.noise) else f"+{behind:.1%}"
            print(f"{count:>6} tokens  {row.arm:<22} {row.seconds * 1e6:9.1f} us  {word:<8} error {row.error:.1e}")


if __name__ == "__main__":
    main()
