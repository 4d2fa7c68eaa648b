"""A folder for `vllm serve FOLDER --load-format foldmoe_random`: DeepSeek-V4-Flash's sizes, without its weights.

python examples/v4_flash_folder.py FOLDER --layers 34    # as many layers as one H200 holds; needs transformers
"""

import argparse
import json
from pathlib import Path
from typing import Any

from foldmoe.checkpoint.generate.deepseek_v4 import Size, config

FLASH = {
    "vocabulary": 129280, "hidden": 4096, "width": 2048, "heads": 64, "q_rank": 1024, "o_groups": 8, "o_rank": 1024,
    "experts": 256, "top_k": 6, "hash_layers": 3, "window": 128, "positions": 1 << 20,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}


def flash(layers: int) -> dict[str, Any]:
    """config.json of the first ``layers``: two attend within their window, then ratios of 4 and 128 take turns."""
    ratios = [0, 0, *[4, 128] * 21][:layers]
    return {
        **config(Size(layers=layers, **FLASH)),
        "compress_ratios": ratios,
        "rope_scaling": YARN,
        "index_n_heads": 64,
    }


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One word a token, ``w3`` to ``w129279``: a prompt of random tokens is read back as the same tokens.

    Special tokens have long names, as DeepSeek's have: vLLM refuses a prompt of more characters than
    ``--max-model-len`` tokens have if each is the longest, and does not count the spaces between words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"bos_token": "<|begin_of_sentence|>", "eos_token": "<|end_of_sentence|>", "unk_token": "<unk>"}
    words = {word: number for number, word in enumerate([*known.values(), *(f"w{i}" for i in range(3, vocabulary))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=known["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepSeek-V4-Flash's config.json and a tokenizer, without weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=34, help="1 to 43; one H200 holds 34 and their KV cache")
    asked = parser.parse_args()
    if not 1 <= asked.layers <= 43:
        raise SystemExit(f"--layers is 1 to 43, as V4-Flash has them; found {asked.layers}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    found = flash(asked.layers)
    (asked.folder / "config.json").write_text(json.dumps(found, indent=2) + "\n")
    write_tokenizer(asked.folder, found["vocab_size"])
    print(f"{asked.folder}: {asked.layers} layers of DeepSeek-V4-Flash, a tokenizer of {found['vocab_size']} words")


if __name__ == "__main__":
    main()
