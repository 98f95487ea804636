"""`llama`: Llama, Mistral, SmolLM, and with experts in place of the feed-forward, Mixtral.

Touvron et al. 2023, https://arxiv.org/abs/2302.13971; Jiang et al. 2024, https://arxiv.org/abs/2401.04088.
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
    experts = keys.experts(required=False)
    keys.shared_experts(0)
    keys.require("expert_weights_norm", True, "shares that do not add up to 1")
    keys.count("expert_shared_feed_forward_length", 0, low=0, high=0)
    width = keys.per_layer("feed_forward_length")
    expert_width = keys.inner_width("expert_feed_forward_length", width)
    return keys.finish(
        rope_style="pairs",
        ff_width=0 if experts.number else width,
        experts=experts,
        expert_width=expert_width if experts.number else 0,
    )


def expected_tensors(model: Description) -> Expected:
    """List the tensors that `forward` reads."""
    expected = Expected(model)
    expected.optional["rope_freqs.weight"] = (model.rope_dims // 2,)
    expected.attention()
    if model.experts:
        expected.experts()
    else:
        expected.feed_forward()
    return expected


def forward(
    model: Description, w: Weights, state: ReferenceState, ids: Integers, wanted: slice
) -> Floats:
    """Read the tokens `ids` (rows,) behind the state's cells: logits (wanted rows, vocab)."""
    rows = len(ids)
    positions = state.length + np.arange(rows)
    factors = w.vector("rope_freqs.weight") if "rope_freqs.weight" in w else None
    frequencies = rope_frequencies(model.rope_dims, model.rope_base, model.rope_scale, factors)
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
        if model.experts:
            router = w.linear(h, f"{blk}.ffn_gate_inp")
            forced = state.forced(layer, rows)
            chosen, shares = router_top_k(router, model.top_k, renormalise=True, forced=forced)
            x = x + expert_mixture(h, chosen, shares, w.experts_of(layer))
        else:
            inner = silu_gate(w.linear(h, f"{blk}.ffn_gate"), w.linear(h, f"{blk}.ffn_up"))
            x = x + w.linear(inner, f"{blk}.ffn_down")
    x = rms_norm(x[wanted], w.vector("output_norm.weight"), model.eps)
    return w.linear(x, "token_embd" if model.tied_head else "output")


def emit(model: Description, emitter: Emitter) -> None:
    """Write the program of `forward`."""
    emitter.embed()
    for layer in range(model.layers):
        emitter.attention(layer)
        if model.experts:
            emitter.experts(layer, renormalise=True)
        else:
            emitter.feed_forward(layer)
