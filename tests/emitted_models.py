"""Small models of every architecture, of several types of weights, for tests of their programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from make_model import make_model
from model_shapes import ModelShape, Rule
from rewrite_gguf import rewrite

from strata_nb.device_sizes import ROPE_FACTORS
from strata_nb.formats import TensorType
from strata_nb.gguf import GGUFFile

T = TensorType
MAX_ROWS = 40  # of a step: more than a head takes at a time


def shape(architecture: str, experts: int = 0, **sizes: int) -> ModelShape:
    sizes = {"dim": 64, "ff": 32, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 261} | sizes
    return ModelShape(architecture, experts=experts, top_k=2 if experts else 0, **sizes)


SHAPES = {
    "llama": shape("llama", ff=96),
    "llama tied": ModelShape(
        "llama", experts=0, top_k=0, dim=64, ff=96, head_dim=32, vocab=261, tied_head=True
    ),
    "mixtral": shape("llama", 5),
    "qwen2moe": shape("qwen2moe", 5, shared_ff=96, head_dim=16),
    "qwen3": shape("qwen3", ff=96),
    "qwen3moe": shape("qwen3moe", 5),
    "olmoe": shape("olmoe", 5, kv_heads=4, head_dim=16),
}
BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
RULES: dict[str, list[Rule]] = {
    "float32": [("*", T.F32)],
    "packed": [("*", T.Q4_0)],
    "mixed": [
        ("output.weight", T.Q8_0),
        ("token_embd*", T.F16),
        ("*attn_v*", T.F16),
        ("*.0.ffn_down*", T.BF16),
        ("*ffn_up*", T.Q8_0),
        ("*shexp*", T.F32),
        ("*", T.Q4_0),
    ],
}
CASES = [(name, types) for name in (*SHAPES, "llama with biases") for types in RULES]


def make(folder: Path, name: str, types: str) -> Path:
    """Write a model; the one with biases also divides its rotary frequencies."""
    path = folder / "model.gguf"
    if name in SHAPES:
        make_model(path, SHAPES[name], rules=RULES[types])
        return path
    plain = folder / "plain.gguf"
    make_model(plain, SHAPES["llama"], rules=RULES[types])
    with GGUFFile.open(plain) as file:
        added = {
            f"blk.{layer}.{part}.bias": np.ones(
                file.tensors[f"blk.{layer}.{part}.weight"].shape[0], np.float32
            )
            for layer in range(2)
            for part in BIASED
        }
    added[ROPE_FACTORS] = np.full(16, 2, np.float32)
    rewrite(plain, path, keys={}, tensors=added)
    return path
