"""Norm and quantise a row whose values are all in registers, four in a row to each thread.

Sums add a thread's four in ascending order with one rounding each (fma), then those of a warp by
`warp_sum`, then the warps by `block_sum`. A warp has four sub-blocks, eight threads each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    bits_of_f32,
    block_x,
    block_y,
    dp4a,
    f32,
    f32_of_bits,
    f32_of_i32,
    fetch_4xf32,
    fma,
    hold,
    i32,
    i64,
    load_4xf32,
    load_i64,
    nearest_i32,
    shuffle_xor_i32,
    square_root,
    store_f32,
    store_i32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid, block_sum
from strata_nb.kernels.quantised_rows import (
    HALF_SUMS,
    SCALES,
    SMALLEST,
    SUB_BLOCK_BYTES,
    SUMS,
)

HELD = 4  # values of a thread
_MOST_THREADS = 1024
_REGISTERS = 64  # of a thread where a block has the most of them
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_ONES = 0x01010101


def threads_that_hold(width: int) -> int:
    """Return how many threads hold a row of a width, 0 where no block of whole warps does."""
    threads = width // HELD
    fits = width % (HELD * WARP) == 0 and 0 < threads <= _MOST_THREADS
    return threads if fits else 0


def _magnitude(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return the bits of the largest magnitude of a sub-block: NaN > infinity > all others."""
    first = max(bits_of_f32(a) & _MAGNITUDE, bits_of_f32(b) & _MAGNITUDE)
    bits = i32(max(first, bits_of_f32(c) & _MAGNITUDE, bits_of_f32(d) & _MAGNITUDE))
    bits = i32(max(bits, shuffle_xor_i32(bits, 1)))
    bits = i32(max(bits, shuffle_xor_i32(bits, 2)))
    return i32(max(bits, shuffle_xor_i32(bits, 4)))


def _quantise(a: Any, b: Any, c: Any, d: Any, thread: Any, row: Any, sub_blocks: Any) -> None:
    """Write a thread's values 4 * thread .. + 3 to a quantised row, as
    `activations.quantise_sub_block` does; whole warps take part."""
    bits = _magnitude(a, b, c, d)
    magnitude, scale, word = f32_of_bits(bits), f32(0.0), i32(0)
    if bits >= _INFINITY:
        scale = f32_of_bits(_NAN)
    elif magnitude >= f32(SMALLEST):
        scale = magnitude / f32(127.0)
        factor = f32(127.0) / magnitude
        low = nearest_i32(a * factor) & 255 | (nearest_i32(b * factor) & 255) << 8
        word = i32(low | (nearest_i32(c * factor) & 255) << 16 | nearest_i32(d * factor) << 24)
    half = dp4a(word, _ONES, 0)
    half = i32(half + shuffle_xor_i32(half, 1))
    half = i32(half + shuffle_xor_i32(half, 2))
    whole = i32(half + shuffle_xor_i32(half, 4))
    number = thread >> 3
    store_i32(row + HELD * thread, word)
    if thread & 3 == 0:
        store_i32(row + HALF_SUMS * sub_blocks + thread, half)
    if thread & 7 == 0:
        store_f32(row + SCALES * sub_blocks + 4 * number, scale)
        store_i32(row + SUMS * sub_blocks + 4 * number, whole)


@cache
def held_norm_kernel(threads: int) -> GpuKernel:
    """Return `rms_norm` of the table for parts that so many threads hold.

    The weights are there before the launch in front has ended.
    """

    def rms_norm(
        rows: int,
        index: int,
        x: int,
        weight: int,
        out: int,
        packed: int,
        parts: int,
        width: int,
        eps: float,
    ) -> None:
        part, row, thread = i64(block_x()), i64(block_y()), i64(thread_index())
        wa, wb, wc, wd = fetch_4xf32(weight + 4 * HELD * thread)
        hold(bits_of_f32(wa))
        await_previous()
        exists = row < load_i64(rows)
        source = row
        if index != 0:
            source = load_i64(index + 8 * row) if exists else i64(0)
        before = part * width
        a, b, c, d = load_4xf32(x + 4 * (source * parts * width + before + HELD * thread))
        total = fma(d, d, fma(c, c, fma(b, b, fma(a, a, f32(0.0)))))
        total = block_sum(total, thread, threads >> 5)
        factor = f32(1.0) / square_root(total / f32_of_i32(i32(width)) + eps)
        a, b, c, d = a * factor * wa, b * factor * wb, c * factor * wc, d * factor * wd
        if not exists:
            return
        if out != 0:
            place = out + 4 * (row * parts * width + before + HELD * thread)
            store_f32(place, a)
            store_f32(place + 4, b)
            store_f32(place + 8, c)
            store_f32(place + 12, d)
        if packed != 0:
            sub_blocks = (parts * width) >> 5
            row_of = packed + SUB_BLOCK_BYTES * sub_blocks * row
            _quantise(a, b, c, d, thread + (before >> 2), row_of, sub_blocks)

    return GpuKernel(
        f"rms_norm_held_{threads}", rms_norm, threads, _grid, lambda _: 4 * WARP, _REGISTERS
    )


def _grid(arguments: Arguments, most_rows: int) -> Grid:
    return arguments["parts"], most_rows, 1
