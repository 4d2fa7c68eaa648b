"""Small layers of every pair of formats, for NVIDIA's compute-sanitizer.

compute-sanitizer --tool memcheck --kernel-name kns=folded_moe python -m tests.hopper.sanitized    # or racecheck
"""

import torch

from tests.hopper.gpu_layers import Shape, case_of, gpu_layer, run

PAIRS = (
    ("mxfp4-fp8", "fp8"),
    ("mxfp4-fp8_32", "fp8"),
    ("fp8-fp8", "fp8"),
    ("fp8_32-fp8_32", "fp8"),
    ("bf16-bf16", "bf16"),
    ("mxfp4-fp8", "fp8_token"),
)


def main() -> None:
    for pair, activations in PAIRS:
        shape = Shape(pair, 256, 192, 128, activations)
        for tokens in (3, 65):  # few and many tiles
            y = run(gpu_layer(shape), case_of(shape, tokens, "random"))
            torch.cuda.synchronize()
            print(pair, activations, tokens, f"{y.float().abs().mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
