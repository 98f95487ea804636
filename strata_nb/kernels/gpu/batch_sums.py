"""Keep the sums of a block of many rows in shared memory, and store what becomes of them.

A warp of tensor cores has one or two *strips* of 16 outputs and 32 rows in four *pieces* of eight.
Lane 4 * g + t has four sums of each piece and strip, the strips of a piece behind each other: of
outputs g and g + 8 and rows 2 * t and 2 * t + 1, in the order

    (g, 2 t)   (g, 2 t + 1)   (g + 8, 2 t)   (g + 8, 2 t + 1)

They change rarely, as parts of a row end, and lie in shared memory, four of a thread side by side.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.kernels.gpu.activations import quantise_quarter
from strata_nb.kernels.gpu.exponential import silu
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    bits_of_f32,
    f32,
    fetch_f32,
    load_4xf32,
    load_f32,
    load_i64,
    shared_load_4xf32,
    shared_store_4xi32,
    shared_store_f32,
    store_4xi32,
    store_f32,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

STRIP = 16  # outputs that an instruction multiplies
PIECE = 8  # rows that it does
PIECES = 4  # of a lane
LANE_ROWS = PIECE * PIECES
_FOUR = 16  # bytes of a piece's sums
_AT_ONCE = 8  # sub-blocks that a warp quantises
_SHIFT = SUB_BLOCK.bit_length() - 1


def _four_added(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@cache
def zeros_of(strips: int) -> Function:
    """Return a device function: a lane's sums of so many strips before anything is added."""
    return _zeros(PIECES * strips)


@cache
def _zeros(fours: int) -> Function:
    def four() -> Any:
        zero = f32(0.0)
        return zero, zero, zero, zero

    if fours == 1:
        return four
    half = _zeros(fours // 2)

    def zeros() -> Any:
        return half() + half()

    return zeros


@cache
def adder_of(strips: int) -> Function:
    """Return a device function: the sums of a lane's sums of two kinds."""
    return _adder(PIECES * strips)


@cache
def _adder(fours: int) -> Function:
    if fours == 1:
        return _four_added
    half, count = _adder(fours // 2), 2 * fours

    def added(a: Any, b: Any) -> Any:
        return half(a[:count], b[:count]) + half(a[count:], b[count:])

    return added


def sums_bytes(threads: int, strips: int = 1) -> int:
    """Return the bytes of shared memory for the sums of so many threads."""
    return _FOUR * PIECES * strips * threads


class Sums(NamedTuple):
    """Hold device functions of a block's sums, of which a thread's begin at `kept`.

    clear   (kept): make them 0
    keep    (kept, sums): add a lane's sums
    store   (place, first, here, targets, bias, y, outputs, block, add): store them as `linear` of
            the table has them
    gate    (place, first, here, targets, inner, packed, outputs, block, thread): store
            silu(inner) * sums in place of inner, and quantised as well. The outputs are a multiple
            of 32, and all threads take part; shared memory from 0 on is lost.

    place         kept, the lane's first output in the block, and its first row
    first, here   the number of the block's first row, and how many there are
    targets       address of int64: which row of y or inner each is; 0: that of its own number
    block         the first output
    """

    clear: Function
    keep: Function
    store: Function
    gate: Function


@cache
def _keeper(threads: int, fours: int) -> Function:
    """Return a device function (kept, sums) that adds so many fours of sums."""
    apart = _FOUR * threads

    def keep_four(kept: int, sums: Any) -> None:
        a, b, c, d = _four_added(shared_load_4xf32(kept), sums)
        shared_store_4xi32(kept, bits_of_f32(a), bits_of_f32(b), bits_of_f32(c), bits_of_f32(d))

    if fours == 1:
        return keep_four
    half, count = _keeper(threads, fours // 2), 2 * fours

    def keep(kept: int, sums: Any) -> None:
        half(kept, sums[:count])
        half(kept + fours // 2 * apart, sums[count:])

    return keep


@cache
def sums_of(threads: int, outputs_of_block: int, strips: int = 1) -> Sums:
    """Return the functions for blocks of so many threads and outputs."""
    apart = _FOUR * threads
    fours = PIECES * strips
    # Rows of gated values lie apart so that the lanes of a warp have banks of their own.
    row_floats = outputs_of_block + 4
    sub_blocks_of_block = outputs_of_block // SUB_BLOCK
    warps = threads // WARP

    def clear(kept: int) -> None:
        piece = 0
        while piece < fours:
            shared_store_4xi32(kept + apart * piece, 0, 0, 0, 0)
            piece += 1

    def store_one(
        total: Any, row: int, targets: int, bias: int, y: int, outputs: int, output: int, add: int
    ) -> None:
        if targets != 0:
            row = load_i64(targets + 8 * row)
        if bias != 0:
            total += fetch_f32(bias + 4 * output)
        place = y + 4 * (row * outputs + output)
        if add != 0:
            total += load_f32(place)
        store_f32(place, total)

    def store(
        place: Any,
        first: int,
        here: int,
        targets: int,
        bias: int,
        y: int,
        outputs: int,
        block: int,
        add: int,
    ) -> None:
        kept, own_output, number = place
        end, strip = number + LANE_ROWS, 0
        while number < end:
            output = block + own_output + STRIP * strip
            other = output + GROUP_ROWS
            a, b, c, d = shared_load_4xf32(kept)
            row = first + number
            if number < here and output < outputs:
                store_one(a, row, targets, bias, y, outputs, output, add)
            if number + 1 < here and output < outputs:
                store_one(b, row + 1, targets, bias, y, outputs, output, add)
            if number < here and other < outputs:
                store_one(c, row, targets, bias, y, outputs, other, add)
            if number + 1 < here and other < outputs:
                store_one(d, row + 1, targets, bias, y, outputs, other, add)
            kept += apart
            strip += 1
            if strip == strips:
                strip, number = 0, number + PIECE

    def gated(x: Any, up: Any) -> Any:
        return silu(x[0]) * up[0], silu(x[1]) * up[1], silu(x[2]) * up[2], silu(x[3]) * up[3]

    def store_four(place: int, x: Any) -> None:
        a, b, c, d = bits_of_f32(x[0]), bits_of_f32(x[1]), bits_of_f32(x[2]), bits_of_f32(x[3])
        store_4xi32(place, a, b, c, d)

    def gate(
        place: Any,
        first: int,
        here: int,
        targets: int,
        inner: int,
        packed: int,
        outputs: int,
        block: int,
        thread: int,
    ) -> None:
        kept, own_output, number = place
        end, strip = number + LANE_ROWS, 0
        barrier()  # nobody multiplies what is in shared memory any more
        while number < end:
            a, b, c, d = shared_load_4xf32(kept)
            value = 4 * (row_floats * number + own_output + STRIP * strip)
            shared_store_f32(value, a)
            shared_store_f32(value + 4 * row_floats, b)
            shared_store_f32(value + 4 * GROUP_ROWS, c)
            shared_store_f32(value + 4 * (row_floats + GROUP_ROWS), d)
            kept += apart
            strip += 1
            if strip == strips:
                strip, number = 0, number + PIECE
        barrier()
        # Four lanes have a sub-block of a row, eight values each.
        lane, number = thread & WARP - 1, _AT_ONCE * (thread >> 5)
        last = sub_blocks_of_block * here - 1
        while number <= last:
            own = min(number + (lane >> 2), last)
            row, column = own // sub_blocks_of_block, SUB_BLOCK * (own % sub_blocks_of_block)
            column += 8 * (lane & 3)
            output = block + column
            is_there = number + (lane >> 2) <= last and output < outputs
            choice = load_i64(targets + 8 * (first + row))
            value_at = inner + 4 * (outputs * choice + min(output, outputs - 8))
            value = 4 * (row_floats * row + column)
            a = gated(load_4xf32(value_at), shared_load_4xf32(value))
            b = gated(load_4xf32(value_at + 16), shared_load_4xf32(value + 16))
            if is_there:
                store_four(value_at, a)
                store_four(value_at + 16, b)
            target = packed + SUB_BLOCK_BYTES * (outputs >> _SHIFT) * choice
            quantise_quarter(a + b, lane, target, outputs >> _SHIFT, output >> _SHIFT, is_there)
            number += _AT_ONCE * warps

    return Sums(clear, _keeper(threads, fours), store, gate)
