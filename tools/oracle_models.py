"""The models and tokens that the oracles evaluate, and what this project computes for them.

`RANDOM_MODELS` holds a maker for each architecture, and one for a llama with all that llama files
may have besides: biases, rotary factors, linear scaling, heads that do not add up to the width.
Small models of qwen3 use the embedding as the head, large ones do not: it is there in both forms.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType
from make_model import make_model
from model_shapes import LOGITS_SHAPES, ModelShape
from rewrite_gguf import rewrite

from strata_nb import models
from strata_nb.formats import TensorType
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import Floats
from strata_nb.tokenizer import Tokenizer

BATCH_ROWS = 256
RANDOM_TOKENS = 96


def make_llama_with_extras(path: str | os.PathLike[str]) -> None:
    """Write a small F32 llama with biases, rotary factors, linear scaling and long heads."""
    shape = ModelShape(
        "llama", experts=0, top_k=0, dim=48, ff=80, heads=4, kv_heads=2, head_dim=24, vocab=300
    )
    rng = np.random.default_rng(11)
    tensors = {"rope_freqs.weight": rng.uniform(1, 8, 12).astype(np.float32)}
    for layer in range(shape.layers):
        for name, size in (
            ("attn_q", 96),
            ("attn_k", 48),
            ("attn_v", 48),
            ("attn_output", 48),
            ("ffn_gate", 80),
            ("ffn_up", 80),
            ("ffn_down", 48),
        ):
            bias = 0.5 * rng.standard_normal(size)
            tensors[f"blk.{layer}.{name}.bias"] = bias.astype(np.float32)
    with tempfile.TemporaryDirectory() as directory:
        plain = Path(directory) / "plain.gguf"
        make_model(plain, shape, rules=[("*", TensorType.F32)])
        scaling = {
            "llama.rope.scaling.type": ("linear", GGUFValueType.STRING),
            "llama.rope.scaling.factor": (2.5, GGUFValueType.FLOAT32),
        }
        rewrite(plain, path, keys=scaling, tensors=tensors)


RANDOM_MODELS: dict[str, Callable[[str | os.PathLike[str]], None]] = {
    **{family: partial(make_model, shape=shape) for family, shape in LOGITS_SHAPES.items()},
    "llama_extras": make_llama_with_extras,
    "qwen3_tied": partial(make_model, shape=replace(LOGITS_SHAPES["qwen3"], tied_head=True)),
}


def text_ids(file: GGUFFile, text: str | os.PathLike[str], count: int) -> npt.NDArray[np.int64]:
    """Return the first tokens of a text file, by the model's own tokenizer."""
    ids = Tokenizer.from_gguf(file).encode(Path(text).read_text(encoding="utf-8"))
    if len(ids) < count:
        raise SystemExit(f"{text} has {len(ids)} tokens, wanted {count}")
    return np.array(ids[:count])


def random_ids(file: GGUFFile, count: int) -> npt.NDArray[np.int64]:
    """Return random tokens of a model, always the same."""
    return np.random.default_rng(0).integers(0, models.describe(file).vocab_size, count)


def float32_logits(file: GGUFFile, ids: npt.NDArray[np.int64]) -> Floats:
    """Return the logits (tokens, vocab) of this project's float32 forward."""
    model = models.open_reference(file, models.describe(file))
    state = model.new_state(len(ids))
    batches = [ids[at : at + BATCH_ROWS].tolist() for at in range(0, len(ids), BATCH_ROWS)]
    return np.concatenate([model.forward(batch, state, "all") for batch in batches])


def weights_digest(file: GGUFFile) -> str:
    """Return a digest of all tensors: figures belong to these weights and no others."""
    digest = hashlib.sha256()
    for name in file.tensors:
        digest.update(name.encode())
        digest.update(file.raw(name).tobytes())
    return digest.hexdigest()
