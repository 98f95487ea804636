"""`qwen2moe`: Qwen1.5-MoE and Qwen2-MoE, whose layers add a shared expert behind a sigmoid gate.

https://qwenlm.github.io/blog/qwen-moe/; Yang et al. 2024, https://arxiv.org/abs/2407.10671.
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
    sigmoid,
    silu_gate,
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
    keys.shared_experts(1)
    keys.require("expert_weights_norm", False, "shares that are made to add up to 1")
    width = keys.per_layer("feed_forward_length", 0, low=0)
    # Where the file does not give these two, they follow from the dense width, as in llama.cpp.
    expert_width = keys.inner_width("expert_feed_forward_length", width // experts.top_k)
    shared_width = keys.inner_width("expert_shared_feed_forward_length", width)
    return keys.finish(
        rope_style="halves",
        experts=experts,
        expert_width=expert_width,
        shared_width=shared_width,
    )


def expected_tensors(model: Description) -> Expected:
    """List the tensors that `forward` reads."""
    expected = Expected(model)
    expected.attention()
    expected.experts()
    expected.in_every_layer("ffn_gate_inp_shexp.weight", model.width)
    expected.in_every_layer("ffn_gate_shexp.weight", model.shared_width, model.width)
    expected.in_every_layer("ffn_up_shexp.weight", model.shared_width, model.width)
    expected.in_every_layer("ffn_down_shexp.weight", model.width, model.shared_width)
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
        q = rope_rotate(q, cosine, sine, model.rope_style)
        k = rope_rotate(k, cosine, sine, model.rope_style)
        keys, values = state.append(layer, k, v)
        mixed = attention(q, keys, values, positions, model.key_length**-0.5)
        x = x + w.linear(mixed.reshape(rows, -1), f"{blk}.attn_output")

        h = rms_norm(x, w.vector(f"{blk}.ffn_norm.weight"), model.eps)
        router = w.linear(h, f"{blk}.ffn_gate_inp")
        forced = state.forced(layer, rows)
        chosen, shares = router_top_k(router, model.top_k, renormalise=False, forced=forced)
        routed = expert_mixture(h, chosen, shares, w.experts_of(layer))
        inner = silu_gate(w.linear(h, f"{blk}.ffn_gate_shexp"), w.linear(h, f"{blk}.ffn_up_shexp"))
        shared = w.linear(inner, f"{blk}.ffn_down_shexp")
        x = x + routed + sigmoid(w.linear(h, f"{blk}.ffn_gate_inp_shexp")) * shared
    x = rms_norm(x[wanted], w.vector("output_norm.weight"), model.eps)
    return w.linear(x, "token_embd" if model.tied_head else "output")


def emit(model: Description, emitter: Emitter) -> None:
    """Write the program of `forward`."""
    emitter.embed()
    for layer in range(model.layers):
        emitter.attention(layer)
        emitter.experts(layer, renormalise=False, shared=True)
