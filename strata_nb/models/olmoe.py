"""`olmoe`: OLMoE, which normalises whole rows of queries and keys and leaves the router's shares.

Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060.
"""

from __future__ import annotations

import numpy as np

from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import (
    Floats,
    Integers,
    attention,
    expert_mixture,
    rms_norm,
    rope_frequencies,
    rope_rotate,
    rope_table,
    router_top_k,
)
from strata_nb.models.description import Description
from strata_nb.models.emitting import Emitter
from strata_nb.models.keys import Keys
from strata_nb.models.state import ReferenceState
from strata_nb.models.tensors import Expected
from strata_nb.models.weights import Weights


def describe(file: GGUFFile) -> Description:
    """Read the metadata; FileFormatError for what is not understood."""
    keys = Keys(file)
    experts = keys.experts(required=True)
    keys.shared_experts(0)
    keys.require("expert_weights_norm", False, "shares that are made to add up to 1")
    keys.count("expert_shared_feed_forward_length", 0, low=0, high=0)
    width = keys.per_layer("feed_forward_length")
    return keys.finish(
        rope_style="halves",
        experts=experts,
        expert_width=keys.inner_width("expert_feed_forward_length", width),
    )


def expected_tensors(model: Description) -> Expected:
    """List the tensors that `forward` reads."""
    expected = Expected(model)
    expected.attention()
    expected.in_every_layer("attn_q_norm.weight", model.heads * model.key_length)
    expected.in_every_layer("attn_k_norm.weight", model.kv_heads * model.key_length)
    expected.experts()
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
        q = rms_norm(w.linear(h, f"{blk}.attn_q"), w.vector(f"{blk}.attn_q_norm.weight"), model.eps)
        k = rms_norm(w.linear(h, f"{blk}.attn_k"), w.vector(f"{blk}.attn_k_norm.weight"), model.eps)
        v = w.linear(h, f"{blk}.attn_v").reshape(rows, model.kv_heads, model.value_length)
        q = q.reshape(rows, model.heads, model.key_length)
        k = k.reshape(rows, model.kv_heads, model.key_length)
        q = rope_rotate(q, cosine, sine, model.rope_style)
        k = rope_rotate(k, cosine, sine, model.rope_style)
        keys, values = state.append(layer, k, v)
        mixed = attention(q, keys, values, positions, model.key_length**-0.5)
        x = x + w.linear(mixed.reshape(rows, -1), f"{blk}.attn_output")

        h = rms_norm(x, w.vector(f"{blk}.ffn_norm.weight"), model.eps)
        router = w.linear(h, f"{blk}.ffn_gate_inp")
        forced = state.forced(layer, rows)
        chosen, shares = router_top_k(router, model.top_k, renormalise=False, forced=forced)
        x = x + expert_mixture(h, chosen, shares, w.experts_of(layer))
    x = rms_norm(x[wanted], w.vector("output_norm.weight"), model.eps)
    return w.linear(x, "token_embd" if model.tied_head else "output")


def emit(model: Description, emitter: Emitter) -> None:
    """Write the program of `forward`."""
    emitter.embed()
    for layer in range(model.layers):
        emitter.attention(layer, norms="rows")
        emitter.experts(layer, renormalise=False)
