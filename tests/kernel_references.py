"""The plain numpy form of every kernel of the table, for tests: what it makes of whole arrays.

Formulas that the judge needs too are those of `kernels/reference.py`; the rest is what the table's
comments say, spelled out. Arrays are float32 and int64, rows first. Quantised rows are bytes
(`quantised`); whoever compares products with them takes the values that they stand for
(`values_of`). `numpy_backend.py` runs whole programs with these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_nb import sampling
from strata_nb.errors import StrataError
from strata_nb.formats import CACHE_TYPES, TensorType, dequantise
from strata_nb.kernels import reference
from strata_nb.kernels.reference import Floats, Integers
from strata_nb.sampling import Choice

Bytes = NDArray[np.uint8]


def embed(kind: TensorType, weight: Bytes, tokens: Integers, width: int) -> Floats:
    """Return the rows of a weight as the file has it."""
    rows: Floats = dequantise(kind, weight).reshape(-1, width)[tokens]
    return rows


def rms_norm(x: Floats, weight: Floats, eps: float, parts: int = 1) -> Floats:
    """Return each of the parts of each row normed."""
    apart = x.reshape(len(x) * parts, -1)
    return reference.rms_norm(apart, weight, eps).reshape(x.shape)


def quantised(x: Floats) -> Bytes:
    """Return rows (rows, values) as the head of `quantised_rows.py` says."""
    rows = len(x)
    groups = x.reshape(rows, -1, 32)
    largest = np.abs(groups).max(axis=2)
    usable = np.isfinite(largest) & (largest >= np.float32(2.0**-100))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scales = np.where(usable, largest / np.float32(127), np.float32(0))
        inverse = np.where(usable, np.float32(127) / largest, np.float32(0))
        scales[~np.isfinite(largest)] = np.nan
        found = np.where(usable[..., None], np.rint(groups * inverse[..., None]), 0)
    quants = found.astype(np.int8)
    sums = quants.astype(np.int32)
    parts = (
        quants.reshape(rows, -1).view(np.uint8),
        scales.astype(np.float32).view(np.uint8),
        sums.sum(axis=2, dtype=np.int32).view(np.uint8),
        np.ascontiguousarray(sums.reshape(rows, -1, 16).sum(axis=2, dtype=np.int32)).view(np.uint8),
    )
    return np.concatenate(parts, axis=1)


def values_of(packed: Bytes, values: int) -> Floats:
    """Return what quantised rows of so many values stand for: quants times scales."""
    quants = packed[:, :values].view(np.int8).astype(np.float32)
    scales = packed[:, values : values + values // 32 * 4].copy().view(np.float32)
    return quants * np.repeat(scales, 32, axis=1)


def linear(
    x: Floats, weight: Floats, bias: Floats | None = None, y: Floats | None = None
) -> Floats:
    """Return y + (x @ weight.T + bias); without y that alone."""
    product = reference.matmul(x, weight)
    if bias is not None:
        product = product + bias
    return product if y is None else y + product


def rope(x: Floats, positions: Integers, table: Floats, style: reference.RopeStyle) -> Floats:
    """Return x (rows, heads, length) rotated; table (positions, 2, planes)."""
    return reference.rope_rotate(x, table[positions, 0], table[positions, 1], style)


def kv_append(
    k: Floats, positions: Integers, table: Floats, style: reference.RopeStyle, cache_type: str
) -> list[NDArray[Any]]:
    """Return the rotated keys as they are stored: values, and for int8 the scales of each cell."""
    return stored(rope(k, positions, table, style), cache_type)


def stored(x: Floats, cache_type: str) -> list[NDArray[Any]]:
    """Return heads (rows, heads, length) as a cache of a type stores them."""
    if cache_type == "int8":
        return list(reference.quantise_kv(x))
    return [x.astype(CACHE_TYPES[cache_type].dtype)]


def router_top_k(
    logits: Floats, top_k: int, *, renormalise: bool, forced: Integers | None = None
) -> tuple[Integers, Floats]:
    """Return the choices in ascending order of expert, and their shares."""
    chosen, shares = reference.router_top_k(logits, top_k, renormalise=renormalise, forced=forced)
    order = np.argsort(chosen, axis=1)
    return np.take_along_axis(chosen, order, axis=1), np.take_along_axis(shares, order, axis=1)


def expert_group(chosen: Integers, experts: int) -> tuple[Integers, Integers, Integers]:
    """Return starts, members and places of choices (rows, top_k)."""
    flat = chosen.ravel()
    starts = np.searchsorted(np.sort(flat), np.arange(experts + 1))
    members = np.argsort(flat, kind="stable")
    return starts, members, np.argsort(members)


def expert_gather(x: NDArray[Any], members: Integers, top_k: int) -> NDArray[Any]:
    """Return the rows of x in the order of members."""
    return x[members // top_k]


def expert_gate_up(gathered: Floats, starts: Integers, gate: Floats, up: Floats) -> Floats:
    """Return silu(gate @ x) * (up @ x) of each member; gate, up (experts, outputs, values)."""
    inner = np.empty((len(gathered), gate.shape[1]), np.float32)
    for expert, (first, last) in enumerate(pairwise(starts)):
        x = gathered[first:last]
        inner[first:last] = reference.silu_gate(
            reference.matmul(x, gate[expert]), reference.matmul(x, up[expert])
        )
    return inner


def expert_down(
    inner: Floats, starts: Integers, places: Integers, shares: Floats, down: Floats, y: Floats
) -> Floats:
    """Return y + the sum of each row's products times their shares; down (experts, outputs,
    values)."""
    products = np.empty((len(inner), down.shape[1]), np.float32)
    for expert, (first, last) in enumerate(pairwise(starts)):
        products[first:last] = reference.matmul(inner[first:last], down[expert])
    rows, top_k = shares.shape
    chosen = products[places].reshape(rows, top_k, -1)
    total: Floats = y + (chosen * shares[..., None]).sum(axis=1)
    return total


def gated_add(gate: Floats, x: Floats, y: Floats) -> Floats:
    """Return y + sigmoid(gate) * x; gate (rows, 1)."""
    return y + reference.sigmoid(gate) * x


def sample(logits: Floats, choices: Sequence[Choice]) -> Integers:
    """Return the tokens that are drawn, -1 where none can be."""
    chosen = np.full(len(logits), -1)
    for row, choice in enumerate(choices):
        with suppress(StrataError):
            chosen[row] = sampling.sample(logits[row], *choice)
    return chosen


REFERENCES: dict[str, Callable[..., Any]] = {
    "embed": embed,
    "rms_norm": rms_norm,
    "quantise": quantised,
    "linear": linear,
    "rope": rope,
    "kv_append": kv_append,
    "attention": reference.attention,
    "silu_mul": reference.silu_gate,
    "router_top_k": router_top_k,
    "expert_group": expert_group,
    "expert_gather": expert_gather,
    "expert_gate_up": expert_gate_up,
    "expert_down": expert_down,
    "gated_add": gated_add,
    "sample": sample,
}
