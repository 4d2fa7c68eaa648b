# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of tiny-v4: every word of the grammar is one token, every digit is one token, bytes for the rest.

A byte-level BPE without merges: `ignore_merges` takes a whole piece where the vocabulary has it, and any
other text falls apart into bytes. So every text comes back exactly, and 512 entries are enough.
"""

import json
import random
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from foldmoe.evaluate import items

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
SPECIAL = (BOS, EOS, PAD)
BOS_ID, EOS_ID, PAD_ID = range(3)
VOCABULARY_SIZE = 512


def grammar_pieces(samples: int = 4000) -> list[str]:
    """Every piece that the grammar makes, in alphabetical order."""
    rng, seen = random.Random(0), Counter()
    for _ in range(samples):
        for item in (items.needle(rng, 64), items.arithmetic(rng)):
            seen.update(items.PIECE.findall(item.prompt + item.solution))
    return sorted(piece for piece in seen if len(piece.encode()) > 1)


def build_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(part for part, _ in to_byte_level.pre_tokenize_str(piece)) for piece in grammar_pieces()]
    entries = [*SPECIAL, *alphabet, *words]
    if len(entries) > VOCABULARY_SIZE:
        raise ValueError(f"the grammar needs {len(entries)} vocabulary entries, there are {VOCABULARY_SIZE}")
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(items.PIECE.pattern), "isolated"), to_byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def piece_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The grammar's pieces, one-byte pieces too, with their ids: a quick encoder for grammar texts."""
    pieces = grammar_pieces() + [chr(code) for code in range(32, 127)] + ["\n"]
    return {piece: tokenizer.encode(piece, add_special_tokens=False).ids[0] for piece in pieces}


def save_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
                "add_bos_token": True, "add_eos_token": False, "padding_side": "left", "model_max_length": 512,
                "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
