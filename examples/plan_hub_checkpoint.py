"""Plan a checkpoint that is not here: headers of a Hugging Face repository (or of a local folder), no weight read.

python examples/plan_hub_checkpoint.py deepseek-ai/DeepSeek-V3 --ep 8 --device h200    # needs foldmoe[hub]
"""

import argparse

from foldmoe import FusionPolicy, plan_checkpoint
from foldmoe.checkpoint import CheckpointError


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan a checkpoint from its headers.")
    parser.add_argument("source", help="a repository on the hub, a folder, or a .safetensors file")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the routed experts")
    parser.add_argument("--device", default="h200", help="h200, h100, b200, mi355x, cpu, ...")
    asked = parser.parse_args()
    try:
        plan = plan_checkpoint(asked.source, policy=FusionPolicy(), ep_size=asked.ep, device=asked.device)
    except (CheckpointError, ImportError, OSError) as error:
        raise SystemExit(f"{asked.source} cannot be planned: {error}") from error
    print(plan.summary)
    for row in plan.rows:
        print(f"{row.layer}: {row.strategy} on {row.backend}, {row.extra_bytes:+,} B")
        for reason in row.reasons:
            print(f"    {reason}")


if __name__ == "__main__":
    main()
