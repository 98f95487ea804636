"""The story model in PyTorch: the same formulas as `strata_nb/models/qwen3moe.py`, for training.

Every expert is computed for every token and most are multiplied by zero: with experts this narrow
that is three large products a layer, and faster than sorting tokens by expert. A network with one
expert has no router: the dense model that the mixture is compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Say how large the network is; `inner` is the width of one expert."""

    vocab: int
    layers: int = 8
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    inner: int = 96
    context: int = 512
    rope_base: float = 10000.0
    eps: float = 1e-6


Weights = dict[str, Any]  # name as in the GGUF file, without ".weight": float32 tensor


def initial_weights(shape: Shape, seed: int, device: str) -> Weights:
    """Return random weights: matrices (outputs, inputs), those of experts (experts, ..., ...)."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*sizes: int, scale: float = 1.0) -> Any:
        std = scale / math.sqrt(sizes[-1])
        return torch.randn(*sizes, generator=generator) * std

    w: Weights = {
        "token_embd": torch.randn(shape.vocab, shape.width, generator=generator) * 0.02,
        "output_norm": torch.ones(shape.width),
    }
    back = 1 / math.sqrt(2 * shape.layers)  # of what is added to the stream
    q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = (shape.experts, shape.inner, shape.width)
    for layer in range(shape.layers):
        w |= {
            f"blk.{layer}.attn_norm": torch.ones(shape.width),
            f"blk.{layer}.attn_q": matrix(q_dim, shape.width),
            f"blk.{layer}.attn_k": matrix(kv_dim, shape.width),
            f"blk.{layer}.attn_v": matrix(kv_dim, shape.width),
            f"blk.{layer}.attn_q_norm": torch.ones(shape.head_dim),
            f"blk.{layer}.attn_k_norm": torch.ones(shape.head_dim),
            f"blk.{layer}.attn_output": matrix(shape.width, q_dim, scale=back),
            f"blk.{layer}.ffn_norm": torch.ones(shape.width),
            f"blk.{layer}.ffn_gate_inp": matrix(shape.experts, shape.width, scale=0.5),
            f"blk.{layer}.ffn_gate_exps": matrix(*inner),
            f"blk.{layer}.ffn_up_exps": matrix(*inner),
            f"blk.{layer}.ffn_down_exps": matrix(
                shape.experts, shape.width, shape.inner, scale=back / 2
            ),
        }
    return {name: value.to(device).requires_grad_() for name, value in w.items()}


def rope_table(shape: Shape, rows: int, device: str) -> tuple[Any, Any]:
    """Return cosine and sine, float32 (rows, head_dim / 2)."""
    powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(rows)[:, None] * shape.rope_base**-powers
    return angles.cos().float().to(device), angles.sin().float().to(device)


def forward(shape: Shape, w: Weights, ids: Any, table: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    """Read ids (sequences, rows): hidden rows before the head, and two losses of the routers.

    The first is the load-balancing loss of Fedus et al. 2021 (https://arxiv.org/abs/2101.03961),
    1.0 where all experts are used alike, the second the z-loss of Zoph et al. 2022
    (https://arxiv.org/abs/2202.08906); both are means over layers.
    """
    x = functional.embedding(ids, w["token_embd"])
    balance = z = torch.zeros((), device=x.device)
    for layer in range(shape.layers):
        x = x + _attention(shape, w, f"blk.{layer}", x, table)
        added, of_balance, of_z = _experts(shape, w, f"blk.{layer}", x)
        x = x + added
        balance, z = balance + of_balance / shape.layers, z + of_z / shape.layers
    return functional.rms_norm(x, (shape.width,), w["output_norm"], shape.eps), balance, z


def losses(shape: Shape, w: Weights, ids: Any, table: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    """Return the mean loss of predicting each next token, in nats, and those of the routers."""
    hidden, balance, z = forward(shape, w, ids[:, :-1], table)
    logits = functional.linear(hidden, w["token_embd"]).float()
    wanted = ids[:, 1:].flatten()
    return functional.cross_entropy(logits.flatten(0, 1), wanted), balance, z


def _attention(shape: Shape, w: Weights, block: str, x: Any, table: tuple[Any, Any]) -> Any:
    count, rows, _ = x.shape
    h = functional.rms_norm(x, (shape.width,), w[f"{block}.attn_norm"], shape.eps)

    def heads(part: str, number: int) -> Any:
        flat = functional.linear(h, w[f"{block}.attn_{part}"])
        return flat.view(count, rows, number, shape.head_dim)

    def turned(part: str, number: int) -> Any:
        rows_of = heads(part, number)
        norm = w[f"{block}.attn_{part}_norm"]
        rows_of = functional.rms_norm(rows_of, (shape.head_dim,), norm, shape.eps).float()
        cosine, sine = (side[:rows, None] for side in table)
        first, second = rows_of.chunk(2, -1)
        both = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat(both, -1).transpose(1, 2)

    values = heads("v", shape.kv_heads).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(
        turned("q", shape.heads).to(values.dtype),
        turned("k", shape.kv_heads).to(values.dtype),
        values,
        is_causal=True,
        enable_gqa=True,
    )
    return functional.linear(mixed.transpose(1, 2).flatten(2), w[f"{block}.attn_output"])


def _experts(shape: Shape, w: Weights, block: str, x: Any) -> tuple[Any, Any, Any]:
    h = functional.rms_norm(x, (shape.width,), w[f"{block}.ffn_norm"], shape.eps)
    gate = functional.linear(h, w[f"{block}.ffn_gate_exps"].flatten(0, 1))
    up = functional.linear(h, w[f"{block}.ffn_up_exps"].flatten(0, 1))
    inner = functional.silu(gate) * up
    balance = z = torch.zeros((), device=x.device)
    if shape.experts > 1:
        logits = _router(h, w[f"{block}.ffn_gate_inp"])
        shares = logits.softmax(-1)
        best, chosen = shares.topk(shape.top_k, -1)
        used = torch.zeros_like(shares).scatter(-1, chosen, 1.0)
        best = best / best.sum(-1, keepdim=True)
        weight = torch.zeros_like(shares).scatter(-1, chosen, best)
        inner = inner.unflatten(-1, (shape.experts, shape.inner)) * weight[..., None].to(
            inner.dtype
        )
        inner = inner.flatten(-2)
        routes = used.flatten(0, 1).mean(0) / shape.top_k
        balance = shape.experts * (routes * shares.flatten(0, 1).mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
    # (experts, width, inner) as one matrix (width, experts x inner)
    down = w[f"{block}.ffn_down_exps"].transpose(0, 1).flatten(1)
    return functional.linear(inner, down), balance, z


def _router(h: Any, matrix: Any) -> Any:
    """Return router logits in float32, whatever the products around are computed in."""
    with torch.autocast(h.device.type, enabled=False):
        return functional.linear(h.float(), matrix.float())
