"""The numpy reference: what every kernel must compute, in float32 and in the plainest form.

Arrays are float32 and rows come first: `x` is (rows, columns), a weight is (columns out, columns
in) as it lies in the file, keys and values are (K/V heads, cells, head length). Nothing here knows
a file, a model or a state. The speed is whatever numpy and its BLAS give; where a faster form
would hide the formula, the formula stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from strata_nb.formats import CACHE_TYPES

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
RopeStyle = Literal["pairs", "halves"]

ATTENTION_BLOCK = 32  # rows that read the K/V cells before them in one product

_INT8 = CACHE_TYPES["int8"]


def matmul(x: Floats, weight: Floats) -> Floats:
    """Multiply rows (n, columns in) by a weight (columns out, columns in): (n, columns out)."""
    return x @ weight.T


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Divide each row of x (..., n) by its root mean square and scale by weight (n,).

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, with eps inside the root.
    """
    mean_square: Floats = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def rope_frequencies(
    rope_dims: int, base: float, scale: float = 1.0, factors: Floats | None = None
) -> npt.NDArray[np.float64]:
    """Return the angle per position of each of the rope_dims / 2 planes, in radians.

    scale     positions are divided by it (linear scaling, 1 is none)
    factors   (rope_dims / 2,) divide each plane's frequency (the tensor rope_freqs.weight)
    Su et al. 2021, https://arxiv.org/abs/2104.09864: base ** (-2 i / rope_dims).
    """
    exponents = np.arange(0, rope_dims, 2, dtype=np.float64) / rope_dims
    frequencies = base**-exponents / scale
    return frequencies if factors is None else frequencies / factors.astype(np.float64)


def rope_table(positions: Integers, frequencies: npt.NDArray[np.float64]) -> tuple[Floats, Floats]:
    """Return cosine and sine (rows, planes) of positions (rows,) times frequencies (planes,).

    Angles are formed in float64: in float32 a position of 8,000 leaves only three decimal places.
    """
    angles = positions.astype(np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope_rotate(x: Floats, cosine: Floats, sine: Floats, style: RopeStyle) -> Floats:
    """Rotate the first 2 x planes values of every head of x (rows, heads, head length).

    cosine, sine   (rows, planes)
    style          which two values span a plane: "pairs" takes neighbours (2i, 2i + 1), "halves"
                   takes (i, i + planes), as GPT-NeoX does
    The values behind the first 2 x planes pass unchanged.
    """
    planes = cosine.shape[-1]
    if style == "pairs":
        first, second = slice(0, 2 * planes, 2), slice(1, 2 * planes, 2)
    else:
        first, second = slice(0, planes), slice(planes, 2 * planes)
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cosine - x[..., second] * sine
    rotated[..., second] = x[..., first] * sine + x[..., second] * cosine
    return rotated


def softmax(x: Floats) -> Floats:
    """Return exp(x) over its sum along the last axis; a value of -inf becomes an exact zero."""
    raised: Floats = np.exp(x - np.max(x, axis=-1, keepdims=True))
    total: Floats = np.sum(raised, axis=-1, keepdims=True)
    return raised / total


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp may reach infinity, whose reciprocal is the right zero
        result: Floats = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


def silu_gate(gate: Floats, up: Floats) -> Floats:
    """Return gate x sigmoid(gate) x up, element by element (SwiGLU, https://arxiv.org/abs/2002.05202)."""
    return gate * sigmoid(gate) * up


def attention(
    queries: Floats, keys: Floats, values: Floats, positions: Integers, scale: float
) -> Floats:
    """Let each row attend to the cells 0 .. its own position: (rows, heads, value length).

    queries     (rows, heads, key length); heads is a multiple of the K/V heads, and query head h
                reads K/V head h // (heads / K/V heads)
    keys        (K/V heads, cells, key length)
    values      (K/V heads, cells, value length)
    positions   (rows,) ascending, each smaller than cells
    scale       of the products before the softmax

    A cell beyond a row's position is selected away and never multiplied, not even by zero: it may
    hold anything, NaN included, without a trace in the result.
    """
    rows, heads, key_length = queries.shape
    kv_heads, _, value_length = values.shape
    group = heads // kv_heads
    result = np.empty((rows, heads, value_length), np.float32)
    for start in range(0, rows, ATTENTION_BLOCK):
        at = positions[start : start + ATTENTION_BLOCK]
        block = len(at)
        seen_by_all, seen_by_any = int(at[0]) + 1, int(at[-1]) + 1
        # (K/V heads, group x block, length): all query heads of a K/V head read it in one product
        split = queries[start : start + block].reshape(block, kv_heads, group, key_length)
        q = split.transpose(1, 2, 0, 3).reshape(kv_heads, group * block, key_length)
        with np.errstate(invalid="ignore", over="ignore"):  # of cells that are selected away
            products = q @ keys[:, :seen_by_any].transpose(0, 2, 1) * np.float32(scale)
        scores = products.reshape(kv_heads, group, block, seen_by_any)
        sees = np.arange(seen_by_any) <= at[:, None]
        weights = softmax(np.where(sees, scores, np.float32(-np.inf)))
        shared = weights[..., :seen_by_all].reshape(kv_heads, group * block, seen_by_all)
        mixed = (shared @ values[:, :seen_by_all]).reshape(kv_heads, group, block, value_length)
        for cell in range(seen_by_all, seen_by_any):
            first = int(np.searchsorted(at, cell))  # the first row of the block that sees the cell
            mixed[:, :, first:] += (
                weights[:, :, first:, cell, None] * values[:, None, None, cell, :]
            )
        result[start : start + block] = mixed.transpose(2, 0, 1, 3).reshape(block, heads, -1)
    return result


def router_top_k(
    logits: Floats, k: int, *, renormalise: bool, forced: Integers | None = None
) -> tuple[Integers, Floats]:
    """Choose k experts a row from logits (rows, experts): ids and shares, both (rows, k).

    The k largest are taken, largest first, equal ones by lower id. A share is the expert's softmax
    over all experts; with `renormalise` the shares of a row are divided by their sum. `forced`
    (rows, k) are the ids that are chosen in place of the largest.
    """
    chosen = forced
    if chosen is None:
        chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    shares = np.take_along_axis(softmax(logits), chosen, axis=-1)
    if renormalise:
        shares = shares / np.sum(shares, axis=-1, keepdims=True)
    return chosen, shares


def expert_mixture(
    x: Floats,
    chosen: Integers,
    shares: Floats,
    expert: Callable[[int], tuple[Floats, Floats, Floats]],
) -> Floats:
    """Sum the chosen experts' outputs, weighted by their shares: (rows, width).

    x        (rows, width)
    chosen   (rows, k), different ids within a row
    shares   (rows, k)
    expert   returns gate (expert width, width), up (expert width, width), down (width, expert
             width) of an id; it is asked once for each id that occurs, in ascending order, which is
             also the order of summation
    """
    result = np.zeros_like(x)
    for number in np.unique(chosen):
        rows, places = np.nonzero(chosen == number)
        gate, up, down = expert(int(number))
        inner = silu_gate(matmul(x[rows], gate), matmul(x[rows], up))
        result[rows] += matmul(inner, down) * shares[rows, places, None]
    return result


def quantise_kv(x: Floats) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Quantise heads x (..., head length) to int8 with a float16 scale per group of values.

    Returns the integers (..., head length), within -127 .. 127, and the scales (..., groups); the
    groups are those of the cache type int8.
    scale = largest magnitude / 127 rounded to float16; integer = x / that scale, to nearest even.
    A magnitude above 127 x 65504, or one that is not finite, gives a scale that is not finite, so
    that it shows as NaN in what is read back instead of passing as a large number.
    """
    starts = np.arange(0, x.shape[-1], _INT8.group)
    largest = np.maximum.reduceat(np.abs(x), starts, axis=-1)
    with np.errstate(over="ignore", under="ignore"):
        scales = (largest / np.float32(127)).astype(np.float16)
    spread = _spread_scales(scales, x.shape[-1])
    usable = (spread > 0) & np.isfinite(spread)
    quotient = np.divide(x, spread, out=np.zeros_like(x), where=usable)
    return np.clip(np.rint(quotient), -127, 127).astype(np.int8), scales


def dequantise_kv(integers: npt.NDArray[np.int8], scales: npt.NDArray[np.float16]) -> Floats:
    """Return what `quantise_kv` stored: integers (..., head length) times their group's scale."""
    with np.errstate(invalid="ignore"):  # 0 x infinity: a value that could not be stored
        return integers.astype(np.float32) * _spread_scales(scales, integers.shape[-1])


def _spread_scales(scales: npt.NDArray[np.float16], head_length: int) -> Floats:
    """Repeat each group's scale for its values: (..., groups) to (..., head length)."""
    return np.repeat(scales.astype(np.float32), _INT8.group, axis=-1)[..., :head_length]
