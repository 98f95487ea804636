"""Multiply many rows of halves with packed weights by warpgroups (`intrinsics/warpgroups.py`).

A block has two warpgroups with 64 outputs each, and up to 320 rows, which both multiply. It goes
through the rows 64 values at a time. A thread brings half of an output's tile, as it is, and makes
halves of it in shared memory; of the rows, which are halves already, it copies a few pieces. The
tensor cores multiply a tile meanwhile, and have the next before they have finished:

    tile k      is multiplied
    tile k + 1  is put into shared memory, of weights
    tile k + 2  is copied to shared memory, of rows
    tile k + 3  is loaded, of weights

A sum goes through the whole row without being scaled in between, in the card's order. So bits are
others than those of a window, and depend on nothing but the row.

Of 128 outputs and 256 rows the tensor cores take 1,024 cycles a tile; a scheduler issues some 450
instructions for it meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.half_stages import ROWS_AT_ONCE, TURNED, copy_rows, put_weights
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_copies,
    await_older_copies,
    barrier,
    end_copies,
    i32,
    i64,
    load_i64,
    once_i32,
    once_i64,
    shared_store_i64,
    thread_index,
)
from strata_nb.kernels.gpu.intrinsics.warpgroups import (
    PIECE_BYTES,
    ROW_BYTES,
    WARPGROUP,
    K,
    M,
    await_older_products,
    await_products,
    begin_sums,
    multiply,
    publish,
    store_sums,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.products import decoder_of, row_bytes_of
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

WARPGROUPS = 2
THREADS = WARPGROUPS * WARPGROUP
OUTPUTS = WARPGROUPS * M  # of a block
APART = OUTPUTS + 4  # floats between rows of sums, so that lanes have banks of their own
SIZES = (64, 128, 256, 320)  # rows that are multiplied at once: the next that is enough
IN_PAIRS = 128  # rows: of blocks with so many or fewer a multiprocessor runs two
_NEXT = K // SUB_BLOCK  # sub-blocks from a tile to the next
# Shared memory: tiles of weights, and of rows, each of which take turns.
_WEIGHTS = ROW_BYTES * OUTPUTS
_LAST_WEIGHTS = 2 * _WEIGHTS
_ROWS_AT = 3 * _WEIGHTS
_TILES_OF_ROWS = 4


def targets_at(rows: int) -> int:
    """Return where the numbers of a block's target rows are in shared memory, behind its sums."""
    return 4 * APART * rows


def _table_at(rows: int) -> int:
    return max(_ROWS_AT + _TILES_OF_ROWS * ROW_BYTES * rows, targets_at(rows) + 8 * rows)


def shared_bytes_of(kind: TensorType, rows: int) -> int:
    """Return the bytes of shared memory of a block: tiles, later sums; the type's table."""
    return _table_at(rows) + table_bytes(kind)


@cache
def _behind(size: int) -> Function:
    """Return a device function (at, distance): so much further in a ring of so many bytes."""

    def masked(at: int, distance: int) -> Any:
        return i32(at + distance & size - 1)

    def compared(at: int, distance: int) -> Any:
        at = i32(at + distance)
        return at if at < size else i32(at - size)

    return masked if size & size - 1 == 0 else compared  # a register less, which 128 rows need


@cache
def _along_rows(kind: TensorType, rows: int, table: int) -> Function:
    """Return a device function that multiplies tile after tile, with up to so many rows.

    along(of_weights, x, sub_blocks, places); the type's table is at `table`

    of_weights   group, rows_in_group, row, s: what `Decoder.read` is given of the first tile
    x            addresses of a thread's pieces of the first tile
    places       of what the thread brings of weights and of rows, and of A of its warpgroup
    """
    read, put = decoder_of(kind).read, put_weights(kind)
    copy, add = copy_rows(rows // ROWS_AT_ONCE), multiply(rows)
    step = ROW_BYTES * rows
    behind = _behind(_TILES_OF_ROWS * step)

    def read_tile(of_weights: Any, sub_blocks: int, tile: int, last: int) -> Any:
        group, rows_in_group, row, s = of_weights
        return read(group, rows_in_group, row, sub_blocks, i32(s + _NEXT * min(tile, last)))

    def copy_tile(at: int, x: Any, tile: int, last: int) -> None:
        if tile <= last:
            copy(at, x, i32(ROW_BYTES * tile))
        end_copies()

    def along(of_weights: Any, x: Any, sub_blocks: int, places: Any) -> None:
        place, x_place, a = places
        x_place = i32(_ROWS_AT + x_place)
        last, turn = i32((sub_blocks >> 1) - 1), once_i32(i32(TURNED))
        copy_tile(x_place, x, i32(0), last)
        copy_tile(i32(x_place + step), x, i32(1), last)
        first = read_tile(of_weights, sub_blocks, i32(0), last)
        weights = read_tile(of_weights, sub_blocks, i32(1), last)
        following = read_tile(of_weights, sub_blocks, i32(2), last)
        put(place, first, table, turn)
        await_older_copies()
        publish()
        barrier()
        tile, at, x_at = i32(0), i32(0), i32(0)
        while tile <= last:
            add(at + a, _ROWS_AT + x_at)
            copy_tile(i32(x_place + behind(x_at, 2 * step)), x, i32(tile + 2), last)
            at = i32(at + _WEIGHTS if at < _LAST_WEIGHTS else 0)
            put(i32(at + place), weights, table, turn)
            await_older_copies()
            publish()
            weights = following
            following = read_tile(of_weights, sub_blocks, i32(tile + 3), last)
            await_older_products()
            barrier()
            x_at = behind(x_at, step)
            tile += 1
        await_copies()
        await_products()

    return along


@cache
def _along_any(kind: TensorType, rows: int) -> Function:
    """Return `along` for up to so many rows, behind their number: where there are few rows, few are
    brought and multiplied."""
    return _along_some(kind, [size for size in SIZES if size <= rows], _table_at(rows))


def _along_some(kind: TensorType, sizes: Sequence[int], table: int) -> Function:
    """Return `along` for the largest size or less."""
    *smaller, most = sizes
    whole = _along_rows(kind, most, table)

    def of_most(here: int, of_weights: Any, x: Any, sub_blocks: int, places: Any) -> None:
        whole(of_weights, x, sub_blocks, places)

    if not smaller:
        return of_most
    fewer, of_fewer = _along_some(kind, smaller, table), smaller[-1]
    copied = of_fewer // ROWS_AT_ONCE

    def of_some(here: int, of_weights: Any, x: Any, sub_blocks: int, places: Any) -> None:
        if here > of_fewer:
            whole(of_weights, x, sub_blocks, places)
        else:
            fewer(here, of_weights, x[:copied], sub_blocks, places)

    return of_some


@cache
def _rows_at(count: int) -> Function:
    """Return a device function: addresses of so many rows, `ROWS_AT_ONCE` apart.

    rows_at(own, first, here, sources, x, values); those that are not there are the last
    """

    def one(own: int, first: int, here: int, sources: int, x: int, values: int) -> Any:
        number = first + min(own, here - 1)
        if sources != 0:
            number = load_i64(sources + 8 * number)
        return (once_i64(x + 2 * values * number),)

    if count == 1:
        return one
    others = _rows_at(count - 1)

    def rows_at(own: int, first: int, here: int, sources: int, x: int, values: int) -> Any:
        more = others(own + ROWS_AT_ONCE, first, here, sources, x, values)
        return one(own, first, here, sources, x, values) + more

    return rows_at


def target_of(first: int, here: int, targets: int, number: int) -> Any:
    """Return which row of the results one of a block's rows is; of those behind the last the
    last."""
    target = first + min(number, here - 1)
    return i32(load_i64(targets + 8 * target) if targets != 0 else target)  # kept in a register


@cache
def block_product(kind: TensorType, rows: int) -> Function:
    """Return a device function: a block's 128 outputs of up to so many rows, in shared memory.

    product(first, here, sources, targets, x, weight, values, outputs, block) -> its thread

    first, here   the number of the block's first row, and how many there are, 1 at least
    sources       address of int64: which row of x each is; 0: those of their own number
    targets       the same of rows of the results
    x             halves (rows, values) in units of `half_stages.ROWS_BY`
    weight        of a warpgroup's matrix, of which it has 64 outputs from `block` on; they are the
                  same in its threads
    values        of a row, a multiple of 64

    Behind it row n's sums begin at 4 * APART * n, in `half_stages.UNIT`; row n's target is at
    `targets_at` + 8 * n.
    """
    along, rows_at = _along_any(kind, rows), _rows_at(rows // ROWS_AT_ONCE)
    begin, store = begin_sums(rows), store_sums(rows, APART)
    fill = table_filler(kind, _table_at(rows), THREADS)
    bytes_of_row = row_bytes_of(kind)
    target_at, has_others = targets_at(rows), rows > THREADS

    def product(
        first: int,
        here: int,
        sources: int,
        targets: int,
        x: int,
        weight: int,
        values: int,
        outputs: int,
        block: int,
    ) -> Any:
        thread, sub_blocks = i32(thread_index()), i32(values >> 5)
        warp, lane = i32(thread >> 5), i32(thread & WARP - 1)
        target = target_of(first, here, targets, thread)
        other = target_of(first, here, targets, thread + THREADS) if has_others else target
        # Half of an output's tile: lanes have the outputs of a group, twice, of two groups.
        column = i32(16 * warp + GROUP_ROWS * (lane >> 4))
        in_group, half = i32(lane & 7), i32(lane >> 3 & 1)
        output = min(block + (column & M - 1), outputs - 1 & -GROUP_ROWS)
        group = once_i64(weight + output * bytes_of_row(sub_blocks))
        rows_in_group = i32(min(outputs - output, GROUP_ROWS))
        row = i32(min(in_group, rows_in_group - 1))
        place = ROW_BYTES * (column + in_group) + PIECE_BYTES * (4 * half ^ in_group)
        # A piece of some rows' tiles: eight lanes have a row.
        own, piece = i32(thread >> 3), i32(thread & 7)
        x_rows = rows_at(own, first, here, sources, x + PIECE_BYTES * piece, values)
        x_place = ROW_BYTES * own + PIECE_BYTES * (piece ^ own & 7)

        begin()
        fill(thread)
        of_weights = group, rows_in_group, row, half
        # Once: what they are made of would stay in registers, which 128 rows of Q8_0 have not.
        a = ROW_BYTES * M * (warp >> 2)
        places = once_i32(i32(place)), once_i32(i32(x_place)), once_i32(i32(a))
        along(here, of_weights, x_rows, sub_blocks, places)
        barrier()
        g, t = lane >> 2, lane & 3
        store(4 * (APART * 2 * t + 16 * warp + g))
        if thread < here:
            shared_store_i64(target_at + 8 * thread, i64(target))
        if has_others and thread + THREADS < here:
            shared_store_i64(target_at + 8 * (thread + THREADS), i64(other))
        barrier()
        return thread

    return product
