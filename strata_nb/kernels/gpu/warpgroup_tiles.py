"""Multiply many rows with packed weights by warpgroups (`warpgroups.py`).

A block has two warpgroups with 64 outputs each, and up to 256 rows, which both multiply. It goes
through the rows 64 values at a time. A thread brings half of an output's tile and a quarter of
some rows' tiles: it loads them two tiles ahead, as they are, and makes halves of them one tile
ahead, in one of three stages of shared memory. Meanwhile the tensor cores multiply a stage, and
have the next before they have finished:

    tile k      is multiplied
    tile k + 1  becomes halves
    tile k + 2  is loaded

A sum goes through the whole row without being scaled in between, in the card's order. So bits are
others than those of a window, and depend on nothing but the row.

Of 128 outputs and 256 rows the tensor cores take 1,024 cycles a tile; a scheduler issues some 500
instructions for it meanwhile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.half_stages import (
    HALF_ROWS,
    QUANT_ROWS,
    copy_rows,
    load_rows,
    put_rows,
    put_weights,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_copies,
    barrier,
    i32,
    i64,
    load_i64,
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
from strata_nb.kernels.quantised_rows import SCALES, SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

WARPGROUPS = 2
THREADS = WARPGROUPS * WARPGROUP
OUTPUTS = WARPGROUPS * M  # of a block
APART = OUTPUTS + 4  # floats between rows of sums, so that lanes have banks of their own
_STAGES = 3
_FEWEST = 64  # rows that are multiplied at once, at least
_WEIGHTS = ROW_BYTES * OUTPUTS  # bytes of a stage before its rows
_NEXT = K // SUB_BLOCK  # sub-blocks from a tile to the next


def _stage_bytes(rows: int) -> int:
    return _WEIGHTS + ROW_BYTES * rows


def targets_at(rows: int) -> int:
    """Return where the numbers of a block's target rows are in shared memory, behind its sums."""
    return 4 * APART * rows


def _table_at(rows: int) -> int:
    return max(_STAGES * _stage_bytes(rows), targets_at(rows) + 8 * rows)


def shared_bytes_of(kind: TensorType, rows: int) -> int:
    """Return the bytes of shared memory of a block: stages, later sums; the type's table."""
    return _table_at(rows) + table_bytes(kind)


@cache
def _along_rows(kind: TensorType, rows: int, table: int, *, halves: bool) -> Function:
    """Return a device function that multiplies tile after tile, with up to so many rows.

    along(of_weights, of_rows, sub_blocks, places); the type's table is at `table`

    of_weights   group, rows_in_group, row, s: what `Decoder.read` is given of the first tile
    of_rows      addresses of a thread's rows, from what it brings on; of quants how far their scale
                 is
    places       of what the thread brings of weights and of rows, and of A of its warpgroup
    """
    read, put = decoder_of(kind).read, put_weights(kind)
    load, put_all = load_rows(rows // QUANT_ROWS), put_rows(rows // QUANT_ROWS)
    copy = copy_rows(rows // HALF_ROWS)
    add = multiply(rows)
    stage_bytes = _stage_bytes(rows)

    def next_stage(stage: int) -> Any:
        return i32(stage + stage_bytes if stage < (_STAGES - 1) * stage_bytes else 0)

    def read_tile(of_weights: Any, sub_blocks: int, tile: int) -> Any:
        group, rows_in_group, row, s = of_weights
        return read(group, rows_in_group, row, sub_blocks, i32(s + _NEXT * tile))

    def load_tile(of_rows: Any, tile: int) -> Any:
        x, scale = of_rows
        return load(x, i32(K * tile), i32(scale + 4 * _NEXT * tile))

    def put_tile(stage: int, places: Any, weights: Any, x: Any) -> None:
        put(i32(stage + places[0]), weights, table)
        put_all(i32(stage + _WEIGHTS + places[1]), x)
        publish()

    def copy_tile(stage: int, places: Any, of_rows: Any, tile: int) -> None:
        copy(i32(stage + _WEIGHTS + places[1]), of_rows[0], i32(2 * K * tile))

    def along_quants(of_weights: Any, of_rows: Any, sub_blocks: int, places: Any) -> None:
        last = i32((sub_blocks >> 1) - 1)
        tile, stage = i32(0), i32(0)
        weights, x = read_tile(of_weights, sub_blocks, tile), load_tile(of_rows, tile)
        following = min(i32(1), last)
        next_weights = read_tile(of_weights, sub_blocks, following)
        next_x = load_tile(of_rows, following)
        put_tile(stage, places, weights, x)
        weights, x = next_weights, next_x
        barrier()
        while tile <= last:
            add(stage + places[2], stage + _WEIGHTS)
            stage = next_stage(stage)
            put_tile(stage, places, weights, x)
            following = min(i32(tile + 2), last)
            weights = read_tile(of_weights, sub_blocks, following)
            x = load_tile(of_rows, following)
            await_older_products()
            barrier()
            tile += 1

    def along_halves(of_weights: Any, of_rows: Any, sub_blocks: int, places: Any) -> None:
        last = i32((sub_blocks >> 1) - 1)
        tile, stage = i32(0), i32(0)
        copy_tile(stage, places, of_rows, tile)
        weights = read_tile(of_weights, sub_blocks, tile)
        following = read_tile(of_weights, sub_blocks, min(i32(1), last))
        put(i32(stage + places[0]), weights, table)
        weights = following
        await_copies()
        publish()
        barrier()
        while tile <= last:
            add(stage + places[2], stage + _WEIGHTS)
            stage = next_stage(stage)
            copy_tile(stage, places, of_rows, min(i32(tile + 1), last))
            put(i32(stage + places[0]), weights, table)
            weights = read_tile(of_weights, sub_blocks, min(i32(tile + 2), last))
            await_copies()
            publish()
            await_older_products()
            barrier()
            tile += 1

    return along_halves if halves else along_quants


@cache
def _along_any(kind: TensorType, rows: int, *, halves: bool) -> Function:
    """Return `along` for up to so many rows, behind their number: where there are few rows, few are
    brought and multiplied."""
    table_at, each = _table_at(rows), HALF_ROWS if halves else QUANT_ROWS
    whole = _along_rows(kind, rows, table_at, halves=halves)

    def of_all(
        here: int, of_weights: Any, x: Any, scale: int, sub_blocks: int, places: Any
    ) -> None:
        whole(of_weights, (x, scale), sub_blocks, places)

    if rows == _FEWEST:
        return of_all
    half = rows // 2
    few, fewest = half // each, _FEWEST // each
    fewer = _along_rows(kind, half, table_at, halves=halves)
    least = _along_rows(kind, _FEWEST, table_at, halves=halves)
    has_least = half > _FEWEST

    def of_some(
        here: int, of_weights: Any, x: Any, scale: int, sub_blocks: int, places: Any
    ) -> None:
        if here > half:
            whole(of_weights, (x, scale), sub_blocks, places)
        elif has_least and here <= _FEWEST:
            least(of_weights, (x[:fewest], scale), sub_blocks, places)
        else:
            fewer(of_weights, (x[:few], scale), sub_blocks, places)

    return of_some


@cache
def _rows_at(count: int, apart: int) -> Function:
    """Return a device function: addresses of so many rows, each `apart` numbers behind the other.

    rows_at(own, first, here, sources, x, size); those that are not there are the last
    """

    def one(own: int, first: int, here: int, sources: int, x: int, size: int) -> Any:
        number = first + min(own, here - 1)
        if sources != 0:
            number = load_i64(sources + 8 * number)
        return (once_i64(x + number * size),)

    if count == 1:
        return one
    others = _rows_at(count - 1, apart)

    def rows_at(own: int, first: int, here: int, sources: int, x: int, size: int) -> Any:
        more = others(own + apart, first, here, sources, x, size)
        return one(own, first, here, sources, x, size) + more

    return rows_at


@cache
def block_product(kind: TensorType, rows: int, *, halves: bool = False) -> Function:
    """Return a device function: a block's 128 outputs of up to so many rows, in shared memory.

    product(first, here, sources, targets, x, weight, values, outputs, block) -> its thread

    first, here   the number of the block's first row, and how many there are, 1 at least
    sources       address of int64: which row of x each is; 0: those of their own number
    targets       the same of rows of the results
    x             quantised rows; or `halves`, (rows, values), which are multiplied as they are
    weight        of a warpgroup's matrix, of which it has 64 outputs from `block` on; they are the
                  same in its threads
    values        of a row, a multiple of 64

    Behind it row n's sums begin at 4 * APART * n, in `half_stages.UNIT`; row n's target is at
    `targets_at` + 8 * n.
    """
    along = _along_any(kind, rows, halves=halves)
    each = HALF_ROWS if halves else QUANT_ROWS
    rows_at, shift = _rows_at(rows // each, each), 3 if halves else 2
    begin, store = begin_sums(rows), store_sums(rows, APART)
    fill = table_filler(kind, _table_at(rows), THREADS)
    bytes_of_row = row_bytes_of(kind)
    target_at = targets_at(rows)

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
        target = first + min(thread, here - 1)
        if targets != 0:
            target = load_i64(targets + 8 * target)
        # Half of an output's tile: lanes have the outputs of a group, twice, of two groups.
        column = i32(16 * warp + GROUP_ROWS * (lane >> 4))
        in_group, half = i32(lane & 7), i32(lane >> 3 & 1)
        output = min(block + (column & M - 1), outputs - 1 & -GROUP_ROWS)
        group = once_i64(weight + output * bytes_of_row(sub_blocks))
        rows_in_group = i32(min(outputs - output, GROUP_ROWS))
        row = i32(min(in_group, rows_in_group - 1))
        place = ROW_BYTES * (column + in_group) + PIECE_BYTES * (4 * half ^ in_group)
        # A piece of a row's tile, or a quarter of it, which becomes two pieces.
        own, part = i32(thread >> shift), i32(thread & (1 << shift) - 1)
        size, piece = 2 * values, part
        if not halves:
            size, piece = i64(sub_blocks * SUB_BLOCK_BYTES), i32(2 * part)
        x_rows = rows_at(own, first, here, sources, x + PIECE_BYTES * part, size)
        scale = i32(SCALES * sub_blocks + 4 * (part >> 1) - PIECE_BYTES * part)
        x_place = ROW_BYTES * own + PIECE_BYTES * (piece ^ own & 7)

        begin()
        fill(thread)
        of_weights = group, rows_in_group, row, half
        places = i32(place), i32(x_place), i32(ROW_BYTES * M * (warp >> 2))
        along(here, of_weights, x_rows, scale, sub_blocks, places)
        await_products()
        barrier()
        g, t = lane >> 2, lane & 3
        store(4 * (APART * 2 * t + 16 * warp + g))
        if thread < here:
            shared_store_i64(target_at + 8 * thread, target)
        barrier()
        return thread

    return product
