"""Norm and quantise a row whose values are all in registers, sixteen in a row to each thread.

    loaded    4 x 4 values
    normed    times their weights, over the root mean square
    quants    of half a sub-block; two neighbours are a sub-block

Sums add a thread's sixteen in ascending order with one rounding each (fma), then those of a warp by
`warp_sum`, then the warps in ascending order. So a row has the same bits whichever kernel does it:
the norm that stands alone, or a product that norms its row first, in every block anew, because that
takes less time than to wait for a kernel that does it once.

A row has 512 values for each warp, which are 1, 2, 4, 8 or 16: `warps_that_hold`.
"""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    barrier,
    bits_of_f32,
    dp4a,
    f32,
    f32_of_bits,
    f32_of_i32,
    fetch_4xf32,
    fma,
    i32,
    i64,
    load_4xf32,
    nearest_i32,
    shared_load_f32,
    shared_store_f32,
    shared_store_i32,
    shuffle_xor_i32,
    square_root,
    store_f32,
    store_i32,
)
from strata_nb.kernels.gpu.operations import warp_sum
from strata_nb.kernels.quantised_rows import HALF_SUMS, SCALES, SMALLEST, SUMS

HELD = 16  # values of a thread
WARP_VALUES = 32 * HELD
_MOST_WARPS = 16
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_ONES = 0x01010101


def warps_that_hold(width: int) -> int:
    """Return how many warps hold a row of a width, 0 where none of the numbers above does."""
    warps = width // WARP_VALUES
    fits = width == warps * WARP_VALUES and 0 < warps <= _MOST_WARPS and not warps & (warps - 1)
    return warps if fits else 0


def fetch_held(place: int, thread: int) -> Any:
    """Return the sixteen weights of a thread."""
    own = place + 4 * HELD * thread
    return (
        *fetch_4xf32(own),
        *fetch_4xf32(own + 16),
        *fetch_4xf32(own + 32),
        *fetch_4xf32(own + 48),
    )


def load_held(place: int, thread: int) -> Any:
    """Return the sixteen values of a thread."""
    own = place + 4 * HELD * thread
    return *load_4xf32(own), *load_4xf32(own + 16), *load_4xf32(own + 32), *load_4xf32(own + 48)


def squares_of(values: Any) -> Any:
    """Return the sum of the squares of a warp's values."""
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = values  # noqa: E741 - sixteen
    total = fma(d, d, fma(c, c, fma(b, b, fma(a, a, f32(0.0)))))
    total = fma(h, h, fma(g, g, fma(f, f, fma(e, e, total))))
    total = fma(l, l, fma(k, k, fma(j, j, fma(i, i, total))))
    return warp_sum(fma(p, p, fma(o, o, fma(n, n, fma(m, m, total)))))


def divisor_of(squares: Any, thread: int, warps: int, width: int, eps: Any, sums: int) -> Any:
    """Return one over the root mean square of a row; all threads of the block take part.

    squares   what `squares_of` gave; of threads beyond those that hold the row it does not count
    sums      where in shared memory there is room for a float of each warp
    """
    if thread & 31 == 0 and thread >> 5 < warps:
        shared_store_f32(sums + 4 * (thread >> 5), squares)
    barrier()
    total, other = shared_load_f32(sums), 1
    while other < warps:
        total += shared_load_f32(sums + 4 * other)
        other += 1
    return f32(1.0) / square_root(total / f32_of_i32(i32(width)) + eps)


def scaled(values: Any, factor: Any, weights: Any) -> Any:
    """Return sixteen values times a factor times their weights."""
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = values  # noqa: E741
    wa, wb, wc, wd, we, wf, wg, wh, wi, wj, wk, wl, wm, wn, wo, wp = weights
    return (
        a * factor * wa,
        b * factor * wb,
        c * factor * wc,
        d * factor * wd,
        e * factor * we,
        f * factor * wf,
        g * factor * wg,
        h * factor * wh,
        i * factor * wi,
        j * factor * wj,
        k * factor * wk,
        l * factor * wl,
        m * factor * wm,
        n * factor * wn,
        o * factor * wo,
        p * factor * wp,
    )


def store_held(values: Any, place: int, thread: int) -> None:
    """Write sixteen values to a row of floats."""
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = values  # noqa: E741
    own = place + 4 * HELD * thread
    _store_four(own, a, b, c, d)
    _store_four(own + 16, e, f, g, h)
    _store_four(own + 32, i, j, k, l)
    _store_four(own + 48, m, n, o, p)


def _store_four(place: int, a: Any, b: Any, c: Any, d: Any) -> None:
    store_f32(place, a)
    store_f32(place + 4, b)
    store_f32(place + 8, c)
    store_f32(place + 12, d)


def share_held(values: Any, place: int, thread: int) -> None:
    """Write sixteen values to a row of floats in shared memory."""
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = values  # noqa: E741
    own = place + 4 * HELD * thread
    _share_four(own, a, b, c, d)
    _share_four(own + 16, e, f, g, h)
    _share_four(own + 32, i, j, k, l)
    _share_four(own + 48, m, n, o, p)


def _share_four(place: int, a: Any, b: Any, c: Any, d: Any) -> None:
    shared_store_f32(place, a)
    shared_store_f32(place + 4, b)
    shared_store_f32(place + 8, c)
    shared_store_f32(place + 12, d)


# -- quantised rows --------------------------------------------------------------------------------


def _magnitude(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return the bits of the largest magnitude of four: NaN > infinity > all others."""
    first = max(bits_of_f32(a) & _MAGNITUDE, bits_of_f32(b) & _MAGNITUDE)
    return max(first, bits_of_f32(c) & _MAGNITUDE, bits_of_f32(d) & _MAGNITUDE)


def _word(a: Any, b: Any, c: Any, d: Any, factor: Any) -> Any:
    """Return four quants as the bytes of a word."""
    low = nearest_i32(a * factor) & 255 | (nearest_i32(b * factor) & 255) << 8
    return i32(low | (nearest_i32(c * factor) & 255) << 16 | nearest_i32(d * factor) << 24)


def quants_of(values: Any) -> Any:
    """Return what a quantised row has of sixteen values: four words of quants, the scale, the sum
    of the quants, and that of the whole sub-block.

    As `activations.quantise_sub_block`; whole warps take part.
    """
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = values  # noqa: E741
    bits = max(
        _magnitude(a, b, c, d),
        _magnitude(e, f, g, h),
        _magnitude(i, j, k, l),
        _magnitude(m, n, o, p),
    )
    bits = max(i32(bits), shuffle_xor_i32(i32(bits), 1))
    magnitude = f32_of_bits(i32(bits))
    scale = f32(0.0)
    first = second = third = fourth = i32(0)
    if bits >= _INFINITY:
        scale = f32_of_bits(_NAN)
    elif magnitude >= f32(SMALLEST):
        scale = magnitude / f32(127.0)
        factor = f32(127.0) / magnitude
        first, second = _word(a, b, c, d, factor), _word(e, f, g, h, factor)
        third, fourth = _word(i, j, k, l, factor), _word(m, n, o, p, factor)
    half = dp4a(first, _ONES, dp4a(second, _ONES, dp4a(third, _ONES, dp4a(fourth, _ONES, 0))))
    return first, second, third, fourth, scale, half, i32(half + shuffle_xor_i32(half, 1))


def store_quants(quants: Any, row: int, thread: int, sub_blocks: int) -> None:
    """Write what `quants_of` gave to a quantised row."""
    first, second, third, fourth, scale, half, whole = quants
    own = row + HELD * thread
    store_i32(own, first)
    store_i32(own + 4, second)
    store_i32(own + 8, third)
    store_i32(own + 12, fourth)
    store_i32(row + HALF_SUMS * sub_blocks + 4 * thread, half)
    if thread & 1 == 0:
        number = i64(thread) >> 1
        store_f32(row + SCALES * sub_blocks + 4 * number, scale)
        store_i32(row + SUMS * sub_blocks + 4 * number, whole)


def share_quants(quants: Any, row: int, thread: int, sub_blocks: int) -> None:
    """Write what `quants_of` gave to a quantised row in shared memory."""
    first, second, third, fourth, scale, half, whole = quants
    own = row + HELD * thread
    shared_store_i32(own, first)
    shared_store_i32(own + 4, second)
    shared_store_i32(own + 8, third)
    shared_store_i32(own + 12, fourth)
    shared_store_i32(row + HALF_SUMS * sub_blocks + 4 * thread, half)
    if thread & 1 == 0:
        number = i64(thread) >> 1
        shared_store_f32(row + SCALES * sub_blocks + 4 * number, scale)
        shared_store_i32(row + SUMS * sub_blocks + 4 * number, whole)
