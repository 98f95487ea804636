"""`qwen3`: dense Qwen3, which normalises each head of queries and keys before the rotation.

Yang et al. 2025, https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

import numpy as np

from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import (
    Floats,
    Integers,
    attention,
    rms_norm,
    rope_frequencies,
    rope_rotate,
    rope_table,
    silu_gate,
)
from strata_nb.models.description import Description
from strata_nb.models.emitting import Emitter
from strata_nb.models.keys import Keys
from strata_nb.models.state import ReferenceState
from strata_nb.models.tensors import Expected
from strata_nb.models.weights import Weights

# A dense file may state these as 0; anything else would be an architecture of another name.
_EXPERT_KEYS = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
)


def describe(file: GGUFFile) -> Description:
    """Read the metadata; FileFormatError for what is not understood."""
    keys = Keys(file)
    for key in _EXPERT_KEYS:
        keys.per_layer(key, 0, low=0, high=0)
    return keys.finish(rope_style="halves", ff_width=keys.per_layer("feed_forward_length"))


def expected_tensors(model: Description) -> Expected:
    """List the tensors that `forward` reads."""
    expected = Expected(model)
    expected.attention()
    expected.in_every_layer("attn_q_norm.weight", model.key_length)  # one norm for all heads
    expected.in_every_layer("attn_k_norm.weight", model.key_length)
    expected.feed_forward()
    return expected


def forward(
    model: Description, w: Weights, state: ReferenceState, ids: Integers, wanted: slice
) -> Floats:
    """Read the tokens `ids` (rows,) behind the state's cells: logits (wanted rows, vocab)."""
    rows = len(ids)
    positions = state.length + np.arange(rows)
    frequencies = rope_frequencies(model.rope_dims, model.rope_base, model.rope_scale)
    cosine, sine = rope_table(positions, frequencies)
    x = w.rows("token_embd.weight", ids)
    for layer in range(model.layers):
        blk = f"blk.{layer}"

        h = rms_norm(x, w.vector(f"{blk}.attn_norm.weight"), model.eps)
        q = w.linear(h, f"{blk}.attn_q").reshape(rows, model.heads, model.key_length)
        k = w.linear(h, f"{blk}.attn_k").reshape(rows, model.kv_heads, model.key_length)
        v = w.linear(h, f"{blk}.attn_v").reshape(rows, model.kv_heads, model.value_length)
        q = rms_norm(q, w.vector(f"{blk}.attn_q_norm.weight"), model.eps)  # each head by itself
        k = rms_norm(k, w.vector(f"{blk}.attn_k_norm.weight"), model.eps)
        q = rope_rotate(q, cosine, sine, model.rope_style)
        k = rope_rotate(k, cosine, sine, model.rope_style)
        keys, values = state.append(layer, k, v)
        mixed = attention(q, keys, values, positions, model.key_length**-0.5)
        x = x + w.linear(mixed.reshape(rows, -1), f"{blk}.attn_output")

        h = rms_norm(x, w.vector(f"{blk}.ffn_norm.weight"), model.eps)
        inner = silu_gate(w.linear(h, f"{blk}.ffn_gate"), w.linear(h, f"{blk}.ffn_up"))
        x = x + w.linear(inner, f"{blk}.ffn_down")
    x = rms_norm(x[wanted], w.vector("output_norm.weight"), model.eps)
    return w.linear(x, "token_embd" if model.tied_head else "output")


def emit(model: Description, emitter: Emitter) -> None:
    """Write the program of `forward`."""
    emitter.embed()
    for layer in range(model.layers):
        emitter.attention(layer, norms="heads")
        emitter.feed_forward(layer)
