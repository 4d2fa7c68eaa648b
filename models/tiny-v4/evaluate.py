# SPDX-License-Identifier: Apache-2.0
"""Scores of a stored tiny-v4 by greedy decoding in Transformers.

    python evaluate.py STORED_FOLDER [--items 200] [--zero-shared] [--zero-routed] [--requantize-shared mxfp4] [--all]
"""

import argparse
from pathlib import Path

import torch
from export import load_stored
from quantise import as_stored
from transformers import AutoTokenizer

from foldmoe.evaluate import items

VARIANTS = ("stored", "shared expert zeroed", "routed experts zeroed", "shared expert in MXFP4")
LONGEST_ANSWER = {"needle": 10, "arithmetic": 36}  # tokens
SEED = 2026


def evaluation_items(count: int, longest: int = 512, limit: int = 99) -> dict[str, list[items.Item]]:
    return {"needle": items.needle_items(count, SEED, shortest=longest // 2, longest=longest),
            "arithmetic": items.arithmetic_items(count, SEED, limit=limit)}


@torch.no_grad()
def change(model, variant: str) -> None:
    """Turns the model into one of VARIANTS, in place."""
    for layer in model.model.layers:
        shared = layer.mlp.shared_experts
        if variant == "shared expert zeroed":
            shared.down_proj.weight.zero_()
        elif variant == "routed experts zeroed":
            layer.mlp.experts.down_proj.zero_()
        elif variant == "shared expert in MXFP4":
            for linear in (shared.gate_proj, shared.up_proj, shared.down_proj):
                linear.weight.copy_(as_stored(linear.weight, "mxfp4"))


@torch.no_grad()
def answers(model, tokenizer, prompts: list[str], longest: int, batch: int) -> list[str]:
    """Greedy completions, in the order of the prompts; batches hold prompts of similar lengths."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    completions = [""] * len(prompts)
    for start in range(0, len(order), batch):
        chosen = order[start:start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True, padding_side="left")
        output = model.generate(input_ids=inputs.input_ids.to(model.device),
                                attention_mask=inputs.attention_mask.to(model.device),
                                do_sample=False, max_new_tokens=longest, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1]:], skip_special_tokens=True)
        for i, text in zip(chosen, texts):
            completions[i] = text
    return completions


def score(model, tokenizer, tasks: dict[str, list[items.Item]], batch: int) -> dict[str, float]:
    """The share of items solved, per task."""
    scores = {}
    for task, examples in tasks.items():
        texts = answers(model, tokenizer, [item.prompt for item in examples], LONGEST_ANSWER[task], batch)
        scores[task] = sum(item.is_solved_by(text) for item, text in zip(examples, texts)) / len(examples)
    return scores


def print_table(rows: dict[str, dict[str, float]], count: int) -> None:
    print(f"\n{'tiny-v4, ' + str(count) + ' items a task':32} {'needle':>10} {'arithmetic':>12}")
    for name, scores in rows.items():
        print(f"{name:32} {scores['needle']:>10.1%} {scores['arithmetic']:>12.1%}", flush=True)


def score_stored(folder: Path, tasks, variants, device: str, batch: int, dtype=torch.float32) -> dict:
    tokenizer, rows = AutoTokenizer.from_pretrained(str(folder)), {}
    for variant in variants:
        model = load_stored(folder, dtype)
        change(model, variant)
        rows[variant] = score(model.to(device), tokenizer, tasks, batch)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--longest", type=int, default=512, help="longest pass-key text; the shortest is half of it")
    parser.add_argument("--limit", type=int, default=99, help="largest number in the word problems")
    parser.add_argument("--zero-shared", action="store_true")
    parser.add_argument("--zero-routed", action="store_true")
    parser.add_argument("--requantize-shared", choices=("mxfp4",))
    parser.add_argument("--all", action="store_true", help="every variant")
    wanted = parser.parse_args()
    asked = (True, wanted.zero_shared, wanted.zero_routed, wanted.requantize_shared is not None)
    variants = [name for name, chosen in zip(VARIANTS, asked) if chosen or wanted.all]
    tasks = evaluation_items(wanted.items, wanted.longest, wanted.limit)
    rows = score_stored(wanted.folder, tasks, variants, wanted.device, wanted.batch, getattr(torch, wanted.dtype))
    print_table(rows, wanted.items)


if __name__ == "__main__":
    main()
