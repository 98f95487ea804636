"""Keep the sums of a block of many rows in shared memory, and store what becomes of them.

A warp of tensor cores has 16 outputs of 32 rows, in four *pieces* of eight rows. Lane 4 * g + t has
four sums of each: of outputs g and g + 8 and rows 2 * t and 2 * t + 1, in the order

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

PIECE = 8  # rows that an instruction multiplies
PIECES = 4  # of a lane
LANE_ROWS = PIECE * PIECES
_FOUR = 16  # bytes of a piece's sums
_AT_ONCE = 8  # sub-blocks that a warp quantises
_SHIFT = SUB_BLOCK.bit_length() - 1


def zeros() -> Any:
    """Return a lane's sums before anything is added."""
    zero = f32(0.0)
    four = zero, zero, zero, zero
    return four + four + four + four


def _four_added(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def added(a: Any, b: Any) -> Any:
    """Return the sums of a lane's sums of two kinds."""
    return (
        _four_added(a[:4], b[:4])
        + _four_added(a[4:8], b[4:8])
        + _four_added(a[8:12], b[8:12])
        + _four_added(a[12:], b[12:])
    )


def sums_bytes(threads: int) -> int:
    """Return the bytes of shared memory for the sums of so many threads."""
    return _FOUR * PIECES * threads


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
def sums_of(threads: int, outputs_of_block: int) -> Sums:
    """Return the functions for blocks of so many threads and outputs."""
    apart = _FOUR * threads
    # Rows of gated values lie apart so that the lanes of a warp have banks of their own.
    row_floats = outputs_of_block + 4
    sub_blocks_of_block = outputs_of_block // SUB_BLOCK
    warps = threads // WARP

    def clear(kept: int) -> None:
        piece = 0
        while piece < PIECES:
            shared_store_4xi32(kept + apart * piece, 0, 0, 0, 0)
            piece += 1

    def keep_four(kept: int, sums: Any) -> None:
        a, b, c, d = _four_added(shared_load_4xf32(kept), sums)
        shared_store_4xi32(kept, bits_of_f32(a), bits_of_f32(b), bits_of_f32(c), bits_of_f32(d))

    def keep(kept: int, sums: Any) -> None:
        keep_four(kept, sums[:4])
        keep_four(kept + apart, sums[4:8])
        keep_four(kept + 2 * apart, sums[8:12])
        keep_four(kept + 3 * apart, sums[12:])

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
        output, end = block + own_output, number + LANE_ROWS
        other = output + GROUP_ROWS
        while number < end:
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
            number += PIECE

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
        end = number + LANE_ROWS
        barrier()  # nobody multiplies what is in shared memory any more
        while number < end:
            a, b, c, d = shared_load_4xf32(kept)
            value = 4 * (row_floats * number + own_output)
            shared_store_f32(value, a)
            shared_store_f32(value + 4 * row_floats, b)
            shared_store_f32(value + 4 * GROUP_ROWS, c)
            shared_store_f32(value + 4 * (row_floats + GROUP_ROWS), d)
            kept += apart
            number += PIECE
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

    return Sums(clear, keep, store, gate)
