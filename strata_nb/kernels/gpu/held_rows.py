"""Norm and quantise a row whose values are all in registers, four in a row to each thread.

The kernel is `rms_norm` of the table; `row_norm` is for kernels whose blocks norm a row as well.

Sums add a thread's four in ascending order with one rounding each (fma), then those of a warp by
`warp_sum`, then the warps by `block_sum`. A warp has four sub-blocks, eight threads each.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    Intrinsic,
    await_previous,
    barrier,
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
    shared_load_f32,
    shared_store_f32,
    shuffle_xor_i32,
    square_root,
    store_f32,
    store_i32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    Arguments,
    Function,
    GpuKernel,
    Grid,
    block_sum,
    blocks_of,
    warp_sum,
)
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
    """Return how many threads hold a row of a width, 0 where no block of whole warps does, or a
    warp alone: heads are normed in another order, whoever norms them."""
    threads = width // HELD
    fits = width % (HELD * WARP) == 0 and WARP < threads <= _MOST_THREADS
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


def _squares(x: Any) -> Any:
    a, b, c, d = x
    return fma(d, d, fma(c, c, fma(b, b, fma(a, a, f32(0.0)))))


def factor_of(total: Any, width: Any, eps: Any) -> Any:
    """Return what a row of a width is multiplied by, of the sum of its squares."""
    return f32(1.0) / square_root(total / f32_of_i32(i32(width)) + eps)


def _times(x: Any, factor: Any, weights: Any) -> Any:
    a, b, c, d = x
    wa, wb, wc, wd = weights
    return a * factor * wa, b * factor * wb, c * factor * wc, d * factor * wd


def write_four(x: Any, thread: Any, out: Any, packed: Any, sub_blocks: Any) -> None:
    """Write a thread's four values of a row to `out` and, quantised, to `packed`; 0: not wanted."""
    a, b, c, d = x
    if out != 0:
        place = out + 4 * HELD * thread
        store_f32(place, a)
        store_f32(place + 4, b)
        store_f32(place + 8, c)
        store_f32(place + 12, d)
    if packed != 0:
        _quantise(a, b, c, d, thread, packed, sub_blocks)


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
        weights = fetch_4xf32(weight + 4 * HELD * thread)
        hold(bits_of_f32(weights[0]))
        await_previous()
        exists = row < load_i64(rows)
        source = row
        if index != 0:
            source = load_i64(index + 8 * row) if exists else i64(0)
        before = part * width
        four = load_4xf32(x + 4 * (source * parts * width + before + HELD * thread))
        total = block_sum(_squares(four), thread, threads >> 5)
        four = _times(four, factor_of(total, width, eps), weights)
        if not exists:
            return
        sub_blocks = (parts * width) >> 5
        out_row = out + 4 * row * parts * width if out != 0 else i64(0)
        packed_row = packed + SUB_BLOCK_BYTES * sub_blocks * row if packed != 0 else i64(0)
        write_four(four, thread + (before >> 2), out_row, packed_row, sub_blocks)

    return GpuKernel(
        f"rms_norm_held_{threads}", rms_norm, threads, _grid, lambda _: 4 * WARP, _REGISTERS
    )


def _grid(arguments: Arguments, most_rows: int) -> Grid:
    return arguments["parts"], most_rows, 1


# -- a row in fewer threads ------------------------------------------------------------------------
#
# Thread t of n has the fours of threads t, t + n, ... of those that would hold the row, and the
# same sums.

_MOST_PIECES = 4  # fours of a thread


class RowNorm(NamedTuple):
    """Hold device functions that norm a row in a block of threads, which all take part.

    ask     (weight, thread): what a thread needs of the weights; in front of a wait it is asked for
            there, and nobody waits for it
    norm    (x, weights, thread, eps, sums): a thread's values of the row at x, normed. sums is the
            offset of 4 * WARP bytes of shared memory
    each    (values, thread, first, second): calls `act` of `row_norm` for each four of them
    """

    ask: Function
    norm: Function
    each: Function


def may_norm(width: int, threads: int) -> bool:
    """Return whether a block of so many threads can norm a row of a width: `row_norm`."""
    return 0 < threads_that_hold(width) <= _MOST_PIECES * threads


@cache
def row_norm(width: int, threads: int, act: Function) -> RowNorm:
    """Return how a block of threads norms a row of a width, with the bits of `rms_norm`.

    act   (four values, number of their four in the row, first, second); whole warps call it
    """
    held = threads_that_hold(width)
    pieces = blocks_of(held, threads)
    load = _fours(load_4xf32, pieces, threads, held - 1)
    store_sums = _each(_store_sum, pieces, threads, held)
    normed = _normed(pieces)

    def norm(x: int, weights: Any, thread: int, eps: Any, sums: int) -> Any:
        values = load(x, thread)
        store_sums(values, thread, sums, 0)
        barrier()
        lane = thread & WARP - 1
        total = warp_sum(shared_load_f32(sums + 4 * lane) if lane < held >> 5 else f32(0.0))
        return normed(values, factor_of(total, width, eps), weights)

    return RowNorm(load, norm, _each(act, pieces, threads, held))


def _store_sum(four: Any, number: Any, sums: Any, _: Any) -> None:
    total = warp_sum(_squares(four))
    if number & WARP - 1 == 0:
        shared_store_f32(sums + 4 * (number >> 5), total)


@cache
def _fours(load: Intrinsic, pieces: int, step: int, last: int) -> Function:
    """Return what loads a thread's fours, the last of the row in place of those behind it."""

    def one(place: int, number: int) -> Any:
        return load(place + 4 * HELD * min(number, last))

    if pieces == 1:
        return one
    others = _fours(load, pieces - 1, step, last)

    def several(place: int, number: int) -> Any:
        return one(place, number) + others(place, number + step)

    return several


@cache
def _each(act: Function, pieces: int, step: int, held: int) -> Function:
    """Return what calls `act` for a thread's fours that are within the row."""

    def one(values: Any, number: int, first: int, second: int) -> None:
        if number < held:
            act(values[:4], number, first, second)

    if pieces == 1:
        return one
    others = _each(act, pieces - 1, step, held)

    def several(values: Any, number: int, first: int, second: int) -> None:
        one(values, number, first, second)
        others(values[4:], number + step, first, second)

    return several


@cache
def _normed(pieces: int) -> Function:
    if pieces == 1:
        return _times
    others = _normed(pieces - 1)

    def normed(values: Any, factor: Any, weights: Any) -> Any:
        return _times(values[:4], factor, weights[:4]) + others(values[4:], factor, weights[4:])

    return normed
