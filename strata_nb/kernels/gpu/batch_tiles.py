"""Multiply many rows with packed weights by tensor cores, in the layout that they have.

For the types of `fragments.py`; `grouped.py` does it for all others. A block has 64 outputs and up
to 32 rows, and goes through a row tile by tile, 256 values at a time. Two stages of shared memory
take turns: while the block multiplies one tile, copies bring the next, of the weights their packed
bytes. Each warp has 16 outputs of all rows and decodes their quants as it multiplies them; what
quants are scaled by is decoded once, to floats (*records*) in shared memory.

The product of 32 bytes is exact. It is scaled as a window does it (`scaling.py`), and added in the
order in which a window adds the products of a row (`tiles.py`), whatever the batch:

    chain      of a part of the row and one of four quarters: the sub-blocks that a lane has which
               takes that quarter of every tile of the part, one after the other
    then       for the four quarters (a + b) + (c + d), and the parts in ascending order

So a row has the same bits alone and in company. A lane keeps the four chains in registers, so that
a tile is read once, and the sum of the parts in shared memory.

In Q4_K a warp takes 34 instructions for 64 values of 16 outputs and 8 rows, of which 28 scale and
add and 2 are products of matrices; what is done once for up to 32 rows adds a good half of that.
Only pieces of eight rows that there are are multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.batch_sums import (
    LANE_ROWS,
    PIECE,
    added,
    sums_bytes,
    sums_of,
    zeros,
)
from strata_nb.kernels.gpu.fragments import fragments_of
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_copies,
    barrier,
    bits_of_f32,
    copy_16,
    f32_of_i32,
    i32,
    load_f32,
    load_i32,
    load_i64,
    mma_16x8x16,
    mma_16x8x32,
    once_i32,
    once_i64,
    shared_load_4xf32,
    shared_load_f32,
    shared_load_matrices,
    shared_store_4xi32,
    shared_store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.products import row_bytes_of
from strata_nb.kernels.gpu.scaling import BEYOND, scaling_of
from strata_nb.kernels.gpu.tile_rows import APART, TILE
from strata_nb.kernels.quantised_rows import SCALES, SUB_BLOCK_BYTES, SUMS
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

_WARPS = 4
THREADS = WARP * _WARPS
OUTPUTS = 16 * _WARPS  # of a block
ROWS = LANE_ROWS  # at most, of a block
REGISTERS = 168  # three blocks a multiprocessor
SPILLS = 64  # bytes at most that newer targets keep in memory, of what is wanted once a tile
_QUARTERS = TILE // 2
_TILE_BYTES = TILE * SUB_BLOCK  # of a row's quants
_ROW_APART = _TILE_BYTES + 16  # so that eight rows' words are in different banks
_RECORD = 16  # bytes of what a pair of sub-blocks of an output is scaled by
_SCALE = 4  # bytes of what all of a tile's share


class _Places(NamedTuple):
    """Say where things are in shared memory: two stages, two sets of records, sums.

    rows, stage        in a stage, behind the weights: the rows' quants, and the end
    records            where the first set begins
    scales, of_rows    in a set, behind records of pairs of outputs, (quarter, output): scales of
                       tiles, (output), then records of rows, (quarter, row)
    row_record         bytes of a record of a row
    set_bytes, sums, end
    """

    rows: int
    stage: int
    records: int
    scales: int
    of_rows: int
    row_record: int
    set_bytes: int
    sums: int
    end: int


@cache
def _places_of(kind: TensorType) -> _Places:
    rows = OUTPUTS // GROUP_ROWS * fragments_of(kind).group_bytes
    stage = rows + ROWS * _ROW_APART
    scales = _RECORD * OUTPUTS * _QUARTERS
    of_rows = scales + _SCALE * OUTPUTS
    row_record = 2 * 4 * scaling_of(kind).of_rows
    set_bytes = of_rows + row_record * ROWS * _QUARTERS
    sums = 2 * stage + 2 * set_bytes
    end = sums + sums_bytes(THREADS)
    return _Places(rows, stage, 2 * stage, scales, of_rows, row_record, set_bytes, sums, end)


def shared_bytes_of(kind: TensorType) -> int:
    """Return the bytes of shared memory of a block."""
    return _places_of(kind).end


# -- what is multiplied ----------------------------------------------------------------------------


@cache
def _piece(kind: TensorType) -> Function:
    """Return a device function (sums, words, records, x, of_row): the sums of a piece and the
    products of a pair of sub-blocks.

    words     `Fragments.pair`
    records   of output g: of the one sub-block, of the other; of output g + 8
    x         where the lane's row of `shared_load_matrices` is
    of_row    where the records of its two rows are
    """
    scaling = scaling_of(kind)
    halves, of_rows, add = scaling.halves, scaling.of_rows, scaling.add

    def product(a: Any, b: int, c: int) -> Any:
        begin = i32(BEYOND)
        if halves:
            low = mma_16x8x16(a[0], a[1], b, begin, begin, begin, begin)
            return low, mma_16x8x16(a[2], a[3], c, begin, begin, begin, begin)
        both = mma_16x8x32(a[0], a[1], a[2], a[3], b, c, begin, begin, begin, begin)
        return both, both

    def rows_at(place: int) -> Any:
        """Return the records of the first row, of one sub-block and the other; of the second."""
        found = shared_load_4xf32(place)
        if of_rows == 1:
            return found[:1], found[1:2], found[2:3], found[3:]
        more = shared_load_4xf32(place + 16)
        return found[:2], found[2:], more[:2], more[2:]

    def piece(sums: Any, words: Any, records: Any, x: int, of_row: int) -> Any:
        upper, other_upper, lower, other_lower = records
        b, c, d, e = shared_load_matrices(x)
        low, high = product(words[0], b, c)
        more, most = product(words[1], d, e)
        first, third, second, fourth = rows_at(of_row)
        return (
            add(sums[0], low[0], high[0], upper, first, more[0], most[0], other_upper, third),
            add(sums[1], low[1], high[1], upper, second, more[1], most[1], other_upper, fourth),
            add(sums[2], low[2], high[2], lower, first, more[2], most[2], other_lower, third),
            add(sums[3], low[3], high[3], lower, second, more[3], most[3], other_lower, fourth),
        )

    return piece


@cache
def _quarter(kind: TensorType) -> Function:
    """Return a device function that adds a quarter of a tile to a chain.

    quarter(chain, number, here, place, scales, lane)

    number   of the quarter
    place    where a lane's weights, records, quants of a row and records of a row are
    scales   of two outputs' tiles
    """
    pair, piece, places = fragments_of(kind).pair, _piece(kind), _places_of(kind)
    row_record = places.row_record

    def if_there(
        sums: Any, number: int, here: int, words: Any, records: Any, x: int, of: int
    ) -> Any:
        if here > PIECE * number:
            x += _ROW_APART * PIECE * number
            sums = piece(sums, words, records, x, of + row_record * PIECE * number)
        return sums

    def quarter(chain: Any, number: int, here: int, place: Any, scales: Any, lane: int) -> Any:
        weights, steps, x, of = place
        words = pair(weights, lane, number)
        steps += _RECORD * OUTPUTS * number
        a, b, c, d = shared_load_4xf32(i32(steps))
        e, f, g, h = shared_load_4xf32(i32(steps + _RECORD * GROUP_ROWS))
        upper, lower = scales
        records = (a, b, upper), (c, d), (e, f, lower), (g, h)
        x, of = i32(x + SUB_BLOCK * number), i32(of + row_record * ROWS * number)
        return (
            piece(chain[:4], words, records, x, of)
            + if_there(chain[4:8], 1, here, words, records, x, of)
            + if_there(chain[8:12], 2, here, words, records, x, of)
            + if_there(chain[12:], 3, here, words, records, x, of)
        )

    return quarter


# -- what shared memory gets -----------------------------------------------------------------------


@cache
def _of_rows(kind: TensorType) -> tuple[Function, Function]:
    """Return device functions that read and store what a pair of sub-blocks of a row is scaled by.

    read(row, sub_blocks, quarter, tile) -> words; store(place, words)
    """
    has_sums = scaling_of(kind).of_rows == 2

    def read(row: int, sub_blocks: int, quarter: int, tile: int) -> Any:
        number = TILE * tile + quarter
        scales, sums = row + i32(SCALES * sub_blocks + 4 * number), i32(0)
        other = sums
        if has_sums:
            place = row + i32(SUMS * sub_blocks + 4 * number)
            sums, other = load_i32(place), load_i32(place + 4 * APART)
        return load_f32(scales), load_f32(scales + 4 * APART), sums, other

    def store(place: int, words: Any) -> None:
        one, other, sums, other_sums = words
        if has_sums:
            a, b = one * f32_of_i32(sums), other * f32_of_i32(other_sums)
            shared_store_4xi32(
                place, bits_of_f32(one), bits_of_f32(a), bits_of_f32(other), bits_of_f32(b)
            )
        else:
            shared_store_f32(place, one)
            shared_store_f32(place + 4, other)

    return read, store


def _copy_row(target: int, row: int, tile: int, number: int) -> None:
    """Copy every fourth 16 bytes of a tile of a row's quants, from `number` on."""
    target += 16 * number
    source = row + i32(_TILE_BYTES * tile + 16 * number)
    copy_16(target, source)
    copy_16(target + 64, source + 64)
    copy_16(target + 128, source + 128)
    copy_16(target + 192, source + 192)


# -- the product of a block ------------------------------------------------------------------------


@cache
def block_product(kind: TensorType) -> Function:
    """Return a device function: a block's 64 outputs of up to 32 rows, the same in all threads.

    multiply(first, here, sources, x, weight, values, outputs, block, parts) -> `place` of `Sums`,
    where the products are then

    first, here   the number of the block's first row, and how many there are, 1 at least
    sources       address of int64: which row of x each is; 0: those of their own number
    block         the first output
    parts         of a row, which are added up apart

    The others are those of `linear` of the table.
    """
    form, places = fragments_of(kind), _places_of(kind)
    quarter, sums = _quarter(kind), sums_of(THREADS, OUTPUTS)
    copy, read, steps_of, scale_of = form.copy, form.read, form.steps, form.scale
    read_row, store_row = _of_rows(kind)
    clear, keep = sums.clear, sums.keep
    bytes_of_row, group_bytes = row_bytes_of(kind), form.group_bytes
    rows_at, stage_bytes, records_at, scales_at, of_rows_at = places[:5]
    row_record, set_bytes, sums_at = places[5:8]

    def bring(
        stage: int,
        thread: int,
        group: int,
        rows_in_group: int,
        sub_blocks: int,
        row: int,
        has_row: bool,
        tile: int,
    ) -> None:
        """Ask for this thread's share of a tile: half of an output, and a quarter of a row."""
        target = i32(stage + group_bytes * (thread >> 4))
        blocks, in_group, s = sub_blocks >> 3, i32(thread & 7), i32(thread >> 3 & 1)
        copy(target, group, rows_in_group, in_group, blocks, tile, s)
        if has_row:
            target = i32(stage + rows_at + _ROW_APART * (thread >> 2))
            _copy_row(target, row, tile, i32(thread & 3))

    def multiply(
        first: int,
        here: int,
        sources: int,
        x: int,
        weight: int,
        values: int,
        outputs: int,
        block: int,
        parts: int,
    ) -> Any:
        thread, sub_blocks, tiles = i32(thread_index()), i32(values >> 5), i32(values >> 8)
        here, parts = i32(here), min(i32(parts), tiles)
        warp, lane = i32(thread >> 5), i32(thread & WARP - 1)
        # What this thread brings: half of an output, a quarter of a row.
        output = min(block + GROUP_ROWS * (thread >> 4), outputs - 1 & -GROUP_ROWS)
        group = once_i64(weight + output * bytes_of_row(sub_blocks))
        rows_in_group = once_i32(i32(min(outputs - output, GROUP_ROWS)))
        in_group = once_i32(i32(min(thread & GROUP_ROWS - 1, rows_in_group - 1)))
        column = i32(GROUP_ROWS * (thread >> 4) + (thread & GROUP_ROWS - 1))
        first_quarter = i32(thread >> 2 & 2)
        own, own_quarter = i32(thread >> 2), i32(thread & 3)
        has_row, number = own < here, first + min(own, here - 1)
        if sources != 0:
            number = load_i64(sources + 8 * number)
        row = x + number * sub_blocks * SUB_BLOCK_BYTES
        # What it multiplies: 16 outputs of all rows for the warp.
        g, t, matrix = i32(lane >> 2), i32(lane & 3), i32(lane >> 3)
        is_busy = block + 16 * warp < outputs
        own_weights = once_i32(i32(2 * group_bytes * warp))
        own_steps = once_i32(i32(records_at + _RECORD * (16 * warp + g)))
        own_scales = once_i32(i32(records_at + scales_at + _SCALE * (16 * warp + g)))
        of_quants = _ROW_APART * (lane & 7) + 16 * (matrix & 1) + SUB_BLOCK * APART * (matrix >> 1)
        own_x = once_i32(i32(rows_at + of_quants))
        own_rows = once_i32(i32(records_at + of_rows_at + 2 * row_record * t))

        kept = i32(sums_at + 16 * thread)
        clear(kept)
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        part, tile, stage, records = i32(0), i32(0), i32(0), i32(0)
        bring(stage, thread, group, rows_in_group, sub_blocks, row, has_row, tile)
        words = read(group, rows_in_group, in_group, sub_blocks, tile)
        of_row = read_row(row, sub_blocks, own_quarter, tile)
        while part < parts:
            number = first_quarter
            while number < first_quarter + 2:
                q, r, s, u = steps_of(words, number)
                place = i32(records_at + records + _RECORD * (column + OUTPUTS * number))
                shared_store_4xi32(
                    place, bits_of_f32(q), bits_of_f32(r), bits_of_f32(s), bits_of_f32(u)
                )
                number += 1
            if first_quarter == 0:
                place = i32(records_at + scales_at + records + _SCALE * column)
                shared_store_f32(place, scale_of(words))
            if has_row:
                place = records_at + of_rows_at + records
                store_row(i32(place + row_record * (own + ROWS * own_quarter)), of_row)
            await_copies()
            barrier()
            next_part, next_tile = part, i32(tile + parts)
            is_end = next_tile >= tiles
            if is_end:
                next_part = i32(part + 1)
                next_tile = next_part
            if next_part < parts:
                other = i32(stage_bytes - stage)
                bring(other, thread, group, rows_in_group, sub_blocks, row, has_row, next_tile)
                words = read(group, rows_in_group, in_group, sub_blocks, next_tile)
                of_row = read_row(row, sub_blocks, own_quarter, next_tile)
            if is_busy:
                at = own_scales + records
                scales = shared_load_f32(at), shared_load_f32(at + _SCALE * GROUP_ROWS)
                steps, of = own_steps + records, own_rows + records
                where = stage + own_weights, steps, stage + own_x, of
                a = quarter(a, 0, here, where, scales, lane)
                b = quarter(b, 1, here, where, scales, lane)
                c = quarter(c, 2, here, where, scales, lane)
                d = quarter(d, 3, here, where, scales, lane)
                if is_end:
                    keep(kept, added(added(a, b), added(c, d)))
                    a, b, c, d = zeros(), zeros(), zeros(), zeros()
            part, tile = next_part, next_tile
            stage, records = i32(stage_bytes - stage), i32(set_bytes - records)
        return kept, i32(16 * warp + g), i32(2 * t)

    return multiply
