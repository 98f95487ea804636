"""Learn the vocabulary of the stories, and write them as ids.

Usage:
  vocabulary.py [--size=N] CORPUS OUT
  vocabulary.py --help

CORPUS is the folder that corpus.py filled. OUT gets vocabulary.json (tokens in the order of their
ids, merges), train.npy, held_out.npy and new_plots.npy (uint16 ids, each story ends with token 0)
and ids.json (figures).

Options:
  --size=N  tokens [default: 6144]

The vocabulary is byte-level BPE with GPT-2's way to cut a text into words, which llama.cpp names
`gpt-2`. Token 0 ends a text.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from docopt import docopt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
BATCH = 4096  # stories
PARTS = ("train", "held_out", "new_plots")


def main() -> None:
    """Train on the stories that are not held out, then encode both."""
    arguments = docopt(str(__doc__))
    corpus, out = Path(arguments["CORPUS"]), Path(arguments["OUT"])
    out.mkdir(parents=True, exist_ok=True)
    lines = {name: (corpus / f"{name}.txt").read_text().splitlines() for name in PARTS}
    tokenizer = learn(lines["train"], int(arguments["--size"]))
    kept = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(kept["vocab"], key=kept["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in kept["merges"]]
    (out / "vocabulary.json").write_text(json.dumps({"tokens": tokens, "merges": merges}))
    figures = {"vocab": len(tokens)}
    for name in PARTS:
        ids = encode(tokenizer, lines[name])
        np.save(out / f"{name}.npy", ids)
        figures[f"{name}_tokens"] = len(ids)
    (out / "ids.json").write_text(json.dumps(figures))
    print(json.dumps(figures), flush=True)


def learn(lines: list[str], size: int) -> Tokenizer:
    """Return a tokenizer of `size` tokens: the end of text, the 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, lines: list[str]) -> np.ndarray:
    """Return the ids of all stories, uint16 (tokens,)."""
    pieces = []
    for start in range(0, len(lines), BATCH):
        found = tokenizer.encode_batch_fast(lines[start : start + BATCH])
        pieces += [np.array([*each.ids, 0], np.uint16) for each in found]
    return np.concatenate(pieces)


if __name__ == "__main__":
    main()
