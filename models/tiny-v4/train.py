# SPDX-License-Identifier: Apache-2.0
"""Trains tiny-v4, exports it in the stored V4 format and scores it.

    python train.py --out FOLDER --minutes 10          the model itself, on one GPU
    python train.py --out FOLDER --smoke               ten steps through every phase, export and scores
    python train.py --out FOLDER --preset rehearsal    a smaller model on easier texts, for a CPU

The step count is calibrated once from the measured step time; everything after that, texts, rates and
phases, depends on (seed, steps) only. `--steps` repeats a run on other hardware.
"""

import argparse
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from data import Curriculum, TrainingBatches, held_out_batch, training_loader
from export import export
from model import TrainingForward, choice_biases, make_config, make_model
from sinkhorn import sinkhorn, sinkhorn_backward
from trainer import Trainer
from transformers import AutoTokenizer

import evaluate

QUANTISED_FROM = 0.6  # the last 40 % of the steps see stored weights and FP8 activations
WARM_UP = 100  # steps
PRESETS = {
    "full": dict(geometry={}, curriculum=Curriculum(), rows=64),
    "rehearsal": dict(
        geometry=dict(hidden_size=128, moe_intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
                      head_dim=128, n_routed_experts=8, num_experts_per_tok=4, sliding_window=128),
        curriculum=Curriculum(row_length=128, limit=9), rows=8)}


class Clock:
    def __init__(self):
        self.start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        print(f"[{self.seconds():6.1f}s] {text}", flush=True)


def rate_at(step: int, progress: float) -> float:
    """Share of the peak rates: a warm-up, then a cosine down to nothing."""
    return min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def check_forward(model, device) -> float:
    """Largest difference of the training forward from Transformers' own, float32; checks Sinkhorn's gradient too."""
    tokens = torch.randint(3, 400, (2, 48), generator=torch.Generator().manual_seed(0)).to(device)
    ours, _ = TrainingForward(model.config, device, compiled=False)(
        dict(model.named_parameters()), choice_biases(model, tokens), tokens, torch.zeros_like(tokens),
        torch.ones(2, 2, device=device), torch.tensor(False, device=device))
    difference = (ours - model(input_ids=tokens).logits).abs().max().item()
    if not difference < 1e-2:
        raise RuntimeError(f"the training forward differs from Transformers' by {difference}")
    matrix, gradient = torch.rand(100, 4, 4) + torch.eye(4), torch.randn(100, 4, 4)
    expected = sinkhorn_backward(matrix, sinkhorn(matrix, 20, 1e-6), gradient, 20)
    matrix, gradient = matrix.to(device), gradient.to(device)
    found = sinkhorn_backward(matrix, sinkhorn(matrix, 20, 1e-6), gradient, 20).cpu()
    if not (found - expected).abs().max() < 1e-4:
        raise RuntimeError("the Sinkhorn gradient differs between this device and the CPU")
    return difference


def measured_step(config, device, compiled: bool, batches: TrainingBatches, count: int) -> float:
    """Seconds a step takes, over both phases; the trainer made for it is thrown away."""
    trainer, batch, total = Trainer(make_model(config, 0), device, compiled=compiled), batches[0], 0.0
    for quantised, share in ((False, QUANTISED_FROM), (True, 1 - QUANTISED_FROM)):
        trainer.set_quantised(quantised)
        for _ in range(2):
            trainer.step(batch, 0.1)
        trainer.losses()  # waits for the device
        start = time.monotonic()
        for _ in range(count):
            trainer.step(batch, 0.1)
        trainer.losses()
        total += share * (time.monotonic() - start) / count
    return total


def step_time(config, device, compiled: bool, batches, count: int, clock: Clock) -> tuple[float, bool]:
    """The step time and whether the forward is compiled; an eager run beats no run."""
    if compiled:
        try:
            return measured_step(config, device, True, batches, count), True
        except Exception as error:  # whatever the compiler raises
            clock.say(f"compilation failed, going on without: {type(error).__name__}: {str(error)[:300]}")
    return measured_step(config, device, False, batches, count), False


def train(trainer: Trainer, loader, steps: int, deadline: float, held_out, rows: int, out: Path, clock: Clock) -> None:
    began, said, scored, done_at_said = clock.seconds(), clock.seconds(), clock.seconds(), 0
    tokens = rows * held_out["tokens"].shape[1]
    for step, batch in enumerate(loader):
        # Should the machine turn slower than it was measured, the schedule follows the clock and still ends well.
        late = (clock.seconds() - began) / max(1e-9, deadline - began) - 0.03
        progress = max(step / steps, late)
        if progress >= 1.0:
            clock.say(f"out of time at step {step} of {steps}")
            break
        if progress >= QUANTISED_FROM and not trainer.quantised_phase:
            clock.say(f"step {step}: from here on weights as stored and FP8 activations")
            trainer.set_quantised(True)
        trainer.step(batch, rate_at(step, progress))
        last = step + 1 == steps
        if last or clock.seconds() - said > 20:
            losses = " ".join(f"{kind} {loss:.3f}" for kind, loss in trainer.losses().items())
            speed = (step + 1 - done_at_said) * tokens / (clock.seconds() - said)
            clock.say(f"step {step + 1}/{steps} {losses} busiest {trainer.balance():.2f} {speed / 1e3:.0f}k tokens/s")
            said, done_at_said = clock.seconds(), step + 1
        if last or clock.seconds() - scored > 60:
            found = trainer.accuracies(held_out, rows)
            clock.say("teacher-forced " + " ".join(f"{task} {share:.1%}" for task, share in found.items()))
            torch.save(trainer.model.state_dict(), out / "masters.pt")
            scored = clock.seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint; masters.pt beside it")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything up to the final scores")
    parser.add_argument("--steps", type=int, help="instead of calibrating")
    parser.add_argument("--preset", choices=PRESETS, default="full")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, help="rows of a batch")
    parser.add_argument("--limit", type=int, help="largest number in the word problems")
    parser.add_argument("--items", type=int, default=200, help="items of each task in the final scores")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="auto: on a GPU")
    asked, clock = parser.parse_args(), Clock()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    preset = PRESETS[asked.preset]
    curriculum, rows = preset["curriculum"], asked.rows or preset["rows"]
    if asked.limit:
        curriculum = replace(curriculum, limit=asked.limit)
    config = make_config(**preset["geometry"])
    compiled = asked.compile == "on" or (asked.compile == "auto" and device == "cuda")
    items = 8 if asked.smoke else asked.items
    work = asked.out.parent / (asked.out.name + "-work")
    work.mkdir(parents=True, exist_ok=True)

    model = make_model(config, asked.seed)
    clock.say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {device}; the training forward "
              f"is within {check_forward(model.to(device), device):.1e} of Transformers'")
    torch.set_float32_matmul_precision("high")  # only now: TF32 rounding would blur the check
    sample = TrainingBatches(curriculum, rows, 1, asked.seed)
    seconds, compiled = step_time(config, device, compiled, sample, 2 if asked.smoke else 8, clock)
    clock.say(f"{seconds * 1e3:.1f} ms a step, {rows * curriculum.row_length} tokens, compiled: {compiled}")
    # The final decoding takes about 40 s on a GPU.
    deadline = asked.minutes * 60 - (45 if device == "cuda" else 0)
    steps = 10 if asked.smoke else asked.steps or int(0.97 * (deadline - clock.seconds() - 5) / seconds)

    workers = max(0, min(12, (os.cpu_count() or 1) - 3)) if device == "cuda" else 0
    loader = training_loader(TrainingBatches(curriculum, rows, steps, asked.seed), workers, pin=device == "cuda")
    held_out = held_out_batch(curriculum, items, seed=1)
    trainer = Trainer(model, device, compiled=compiled)
    clock.say(f"{steps} steps, {workers} data workers")
    train(trainer, loader, steps, math.inf if asked.steps or asked.smoke else deadline, held_out, rows, work, clock)

    torch.set_float32_matmul_precision("highest")
    model.eval()
    model.config._experts_implementation = "eager"
    clock.say(f"exported {export(model, asked.out) / 1e6:.2f} MB to {asked.out}")
    tasks = evaluate.evaluation_items(items, curriculum.row_length, curriculum.limit)
    batch = items if device == "cuda" else 50
    table = {"masters, unquantised": evaluate.score(model, AutoTokenizer.from_pretrained(str(asked.out)), tasks, batch)}
    table |= evaluate.score_stored(asked.out, tasks, evaluate.VARIANTS, device, batch)
    evaluate.print_table(table, items)
    facts = {"seed": asked.seed, "steps": steps, "rows": rows, "preset": asked.preset, "limit": curriculum.limit,
             "items": items, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
             "torch": torch.__version__, "seconds": round(clock.seconds()), "scores": table}
    (work / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
    clock.say("done")


if __name__ == "__main__":
    main()
