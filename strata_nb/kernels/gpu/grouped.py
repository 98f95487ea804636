"""Multiply many rows with packed weights by tensor cores, bytes with bytes.

A block has 64 outputs and up to 64 rows. It decodes a few sub-blocks of the outputs at a time to
bytes and scales in shared memory, puts the rows' bytes beside them, and multiplies both. So a
weight is read and decoded once for 64 rows. Two halves of shared memory take turns: while some
warps still multiply, others bring what is next. A warp has 16 outputs and 32 rows.

The product of 32 bytes is exact. It is scaled as a window does it (`scaling.py`), and added in the
order in which a window adds the products of a row (`tiles.py`), whatever the batch:

    chain      of a part of the row and one of four quarters: the sub-blocks that a lane has which
               takes that quarter of every tile of the part, one after the other
    then       for the four quarters (a + b) + (c + d), and the parts in ascending order

So a row has the same bits alone and in company.

A lane finishes a chain before it begins the next, and keeps three sums of each of its products in
registers; the fourth, which changes least, is in shared memory.

Rows may be all those of a step, or those of an expert's tile (`kernels/groups.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.batch_sums import (
    LANE_ROWS,
    PIECE,
    added,
    sums_bytes,
    sums_of,
    zeros,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    f32_of_i32,
    i32,
    load_2xi32,
    load_4xi32,
    load_f32,
    load_i32,
    load_i64,
    mma_16x8x16,
    mma_16x8x32,
    shared_load_2xf32,
    shared_load_2xi32,
    shared_load_4xf32,
    shared_load_f32,
    shared_store_4xi32,
    shared_store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import MOST_REGISTERS, Function
from strata_nb.kernels.gpu.products import decoder_of, row_bytes_of
from strata_nb.kernels.gpu.scaling import BEYOND, Scaling, scaling_of
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.kernels.gpu.tile_rows import APART, TILE
from strata_nb.kernels.groups import TILE_ROWS
from strata_nb.kernels.quantised_rows import HALF_SUMS, SCALES, SUB_BLOCK_BYTES, SUMS
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

OUTPUTS = 64  # of a block
ROWS = TILE_ROWS  # at most, of a block
_WARPS = 8
THREADS = WARP * _WARPS
_HELD = 4  # sub-blocks in each half of shared memory
QUARTERS = 4  # of a tile, which lanes of a window take
_MANY_REGISTERS = 168  # one block a multiprocessor
_HIGHEST_BITS = -0x7F7F7F80  # of the bytes of a word

# A half of shared memory: bytes of weights and of rows (sub-blocks, 64, 32), then records of floats
# of both (sub-blocks, 64, floats). The eight words of a sub-block lie as 0 4 1 5 2 6 3 7: the two
# that a lane needs are neighbours.
_BYTES = SUB_BLOCK * OUTPUTS  # of a sub-block
_OF_ROWS = _HELD * _BYTES
_RECORDS = 2 * _OF_ROWS


def shared_bytes_of(kind: TensorType) -> int:
    """Return the bytes of shared memory of a block: both halves, sums, the type's table."""
    return 2 * _half_bytes(scaling_of(kind)) + sums_bytes(THREADS) + table_bytes(kind)


def _half_bytes(scaling: Scaling) -> int:
    return _RECORDS + 4 * OUTPUTS * _HELD * (scaling.of_weights + scaling.of_rows)


@cache
def _piece(scaling: Scaling) -> Function:
    """Return a device function (sums, weights, x, floats): sums of a piece and its products.

    weights   what `_sub_blocks` loads of them
    x         where the lane's words of the rows are
    floats    where the records of its two rows are
    """
    halves, of_rows, add = scaling.halves, scaling.of_rows, scaling.add
    apart = 4 * ROWS * of_rows  # from a sub-block's records of rows to the next one's

    def product(a: Any, x: int) -> Any:
        b, c = shared_load_2xi32(x)
        begin = i32(BEYOND)
        if halves:
            low = mma_16x8x16(a[0], a[1], b, begin, begin, begin, begin)
            return low, mma_16x8x16(a[2], a[3], c, begin, begin, begin, begin)
        both = mma_16x8x32(a[0], a[1], a[2], a[3], b, c, begin, begin, begin, begin)
        return both, both

    def rows_at(place: int) -> Any:
        if of_rows == 1:
            first, second = shared_load_2xf32(place)
            return (first,), (second,)
        if of_rows == 2:
            found = shared_load_4xf32(place)
            return found[:2], found[2:]
        return shared_load_4xf32(place), shared_load_4xf32(place + 16)

    def piece(sums: Any, weights: Any, x: int, floats: int) -> Any:
        a, upper, lower = weights
        low, high = product(a, x)
        first, second = rows_at(floats)
        return (
            add(sums[0], low[0], high[0], upper, first),
            add(sums[1], low[1], high[1], upper, second),
            add(sums[2], low[2], high[2], lower, first),
            add(sums[3], low[3], high[3], lower, second),
        )

    def pair(sums: Any, weights: Any, x: int, floats: int) -> Any:
        a, upper, lower, c, other_upper, other_lower = weights
        low, high = product(a, x)
        more, most = product(c, x + _BYTES)
        first, second = rows_at(floats)
        third, fourth = rows_at(floats + apart)
        return (
            add(sums[0], low[0], high[0], upper, first, more[0], most[0], other_upper, third),
            add(sums[1], low[1], high[1], upper, second, more[1], most[1], other_upper, fourth),
            add(sums[2], low[2], high[2], lower, first, more[2], most[2], other_lower, third),
            add(sums[3], low[3], high[3], lower, second, more[3], most[3], other_lower, fourth),
        )

    return pair if scaling.in_pairs else piece


@cache
def _pieces(scaling: Scaling, count: int) -> Function:
    """Return `_piece` of so many pieces."""
    piece, step = _piece(scaling), 4 * PIECE * scaling.of_rows
    if count == 1:
        return piece
    others = _pieces(scaling, count - 1)

    def pieces(sums: Any, weights: Any, x: int, floats: int) -> Any:
        return piece(sums[:4], weights, x, floats) + others(
            sums[4:], weights, x + SUB_BLOCK * PIECE, floats + step
        )

    return pieces


@cache
def _sub_blocks(scaling: Scaling) -> Function:
    """Return a device function that adds the products of a sub-block, or of a pair, to sums.

    add(sums, weights, of_weights, x, of_rows): where in shared memory the lane's words and records
    are
    """
    pieces, floats = _pieces(scaling, LANE_ROWS // PIECE), scaling.of_weights
    in_pairs, apart = scaling.in_pairs, 4 * OUTPUTS * floats

    def record_at(place: int) -> Any:
        if floats == 1:
            return (shared_load_f32(place),)
        return shared_load_2xf32(place) if floats == 2 else shared_load_4xf32(place)

    def loaded(words: int, records: int) -> Any:
        """Return the lane's four words, and the records of its two outputs."""
        a, c = shared_load_2xi32(words)
        b, d = shared_load_2xi32(words + SUB_BLOCK * GROUP_ROWS)
        return (a, b, c, d), record_at(records), record_at(records + 4 * floats * GROUP_ROWS)

    def add(sums: Any, weights: int, of_weights: int, x: int, of_rows: int) -> Any:
        held = loaded(weights, of_weights)
        if in_pairs:
            return pieces(sums, held + loaded(weights + _BYTES, of_weights + apart), x, of_rows)
        return pieces(sums, held, x, of_rows)

    return add


# -- what shared memory gets -----------------------------------------------------------------------


@cache
def _bringer(kind: TensorType) -> Function:
    """Return a device function that brings a sub-block of an output and of a row.

    bring(half, place, group, rows_in_group, row, x, sub_blocks, s, table)

    half    of shared memory, place: of 4 * 64, of both the output and the row
    group, rows_in_group, row   of the output, as `Decoder.read` has them
    x       the quantised row
    table   where the type's is
    """
    form, scaling = decoder_of(kind), scaling_of(kind)
    read, unpack, offset = form.read, form.unpack, form.offset
    of_weights, of_rows, record_of = scaling.of_weights, scaling.of_rows, scaling.record
    if record_of is None:
        raise ValueError(f"{kind.name} is multiplied by tiles (batch_tiles.py)")
    offsets = offset * 0x01010101

    def less(word: Any) -> Any:
        """Take the offset off the bytes of a word, none of which lends to another."""
        return i32((i32(word) | _HIGHEST_BITS) - offsets ^ _HIGHEST_BITS) if offset else i32(word)

    def bring(
        half: int,
        place: int,
        group: int,
        rows_in_group: int,
        row: int,
        x: int,
        sub_blocks: int,
        s: int,
        table: int,
    ) -> None:
        # A row is smaller than 2 GiB: offsets of 32 bits take fewer registers.
        quants = x + i32(SUB_BLOCK * s)
        xa, xb, xc, xd = load_4xi32(quants)
        xe, xf, xg, xh = load_4xi32(quants + 16)
        x_scale = load_f32(x + i32(SCALES * sub_blocks + 4 * s))
        x_sum = other_sum = i32(0)
        if of_rows == 4:
            x_sum, other_sum = load_2xi32(x + i32(HALF_SUMS * sub_blocks + 8 * s))
        elif of_rows == 2:
            x_sum = load_i32(x + i32(SUMS * sub_blocks + 4 * s))
        found = unpack(read(group, rows_in_group, row, sub_blocks, s), table)
        a, b, c, d, e, f, g, h = found[:8]
        record = record_of(found, group, rows_in_group, row, sub_blocks, s)
        words = half + SUB_BLOCK * place
        shared_store_4xi32(words, less(a), less(e), less(b), less(f))
        shared_store_4xi32(words + 16, less(c), less(g), less(d), less(h))
        shared_store_4xi32(words + _OF_ROWS, xa, xe, xb, xf)
        shared_store_4xi32(words + _OF_ROWS + 16, xc, xg, xd, xh)
        target = half + _RECORDS + 4 * of_weights * place
        shared_store_f32(target, record[0])
        if of_weights > 1:
            shared_store_f32(target + 4, record[1])
        if of_weights > 2:
            shared_store_f32(target + 8, record[2])
            shared_store_f32(target + 12, record[3])
        target = half + _RECORDS + 4 * OUTPUTS * _HELD * of_weights + 4 * of_rows * place
        shared_store_f32(target, x_scale)
        if of_rows > 1:
            shared_store_f32(target + 4, f32_of_i32(x_sum))
        if of_rows > 2:
            shared_store_f32(target + 8, f32_of_i32(other_sum))

    return bring


# -- the product of a block ------------------------------------------------------------------------


@cache
def block_product(kind: TensorType) -> Function:
    """Return a device function: a block's 64 outputs of up to 64 rows, the same in all threads.

    multiply(first, here, sources, x, weight, values, outputs, block, parts) -> `place` of `Sums`,
    where the products are then

    first, here   the number of the block's first row, and how many there are, 1 at least
    sources       address of int64: which row of x each is; 0: those of their own number
    block         the first output
    parts         of a row, which are added up apart

    The others are those of `linear` of the table.
    """
    scaling = scaling_of(kind)
    bring, add_products = _bringer(kind), _sub_blocks(scaling)
    of_weights, of_rows = scaling.of_weights, scaling.of_rows
    at_once = 2 if scaling.in_pairs else 1
    half_bytes = _half_bytes(scaling)
    table = 2 * half_bytes + sums_bytes(THREADS)
    sums = sums_of(THREADS, OUTPUTS)
    clear, keep = sums.clear, sums.keep
    fill = table_filler(kind, table, THREADS)
    bytes_of_row = row_bytes_of(kind)

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
        thread, sub_blocks, parts = thread_index(), i32(values >> 5), i32(parts)
        here = i32(here)
        warp, lane = i32(thread >> 5), i32(thread & WARP - 1)
        # What this thread brings: a sub-block of an output and of a row, as lanes of a decoder.
        in_group, held = i32(lane & GROUP_ROWS - 1), i32(lane >> 3)
        output = min(block + GROUP_ROWS * warp, outputs - 1 & -GROUP_ROWS)
        rows_in_group = i32(min(outputs - output, GROUP_ROWS))
        group = weight + output * bytes_of_row(sub_blocks)
        in_group_there = i32(min(in_group, rows_in_group - 1))
        own = first + min(GROUP_ROWS * warp + in_group, here - 1)
        if sources != 0:
            own = load_i64(sources + 8 * own)
        of_row = x + own * sub_blocks * SUB_BLOCK_BYTES
        place = i32(OUTPUTS * held + GROUP_ROWS * warp + in_group)
        # What it multiplies: 16 outputs of 32 rows for the warp.
        g, t = i32(lane >> 2), i32(lane & 3)
        own_output, own_row = i32(16 * (warp & 3) + g), i32(LANE_ROWS * (warp >> 2))
        words = i32(SUB_BLOCK * own_output + 8 * t)
        row_words = i32(_OF_ROWS + SUB_BLOCK * (own_row + g) + 8 * t)
        records = i32(_RECORDS + 4 * of_weights * own_output)
        row_records = i32(
            _RECORDS + 4 * OUTPUTS * _HELD * of_weights + 4 * of_rows * (own_row + 2 * t)
        )

        kept = i32(2 * half_bytes + 16 * thread)
        clear(kept)
        fill(thread)
        chain, pair, other = zeros(), zeros(), zeros()
        c, s, half = i32(0), i32(0), i32(0)
        step = i32(2 * TILE * parts)  # of a chain from two of its tiles to the next two
        own_step = i32((step >> 1) * (held >> 1) + APART * (held & 1))
        at = i32(min(own_step, sub_blocks - 1))
        bring(half, place, group, rows_in_group, in_group_there, of_row, sub_blocks, at, table)
        barrier()
        while c < QUARTERS * parts:
            if own_row < here:
                number, at = 0, s
                while number < _HELD and at < sub_blocks:
                    chain = add_products(
                        chain,
                        half + words + _BYTES * number,
                        half + records + 4 * of_weights * OUTPUTS * number,
                        half + row_words + _BYTES * number,
                        half + row_records + 4 * of_rows * ROWS * number,
                    )
                    number += at_once
                    at = i32(s + (step >> 1) * (number >> 1) + APART * (number & 1))
                if s + step >= sub_blocks:
                    quarter = c & QUARTERS - 1
                    if quarter == 0:
                        pair = chain
                    elif quarter == 1:
                        pair = added(pair, chain)
                    elif quarter == 2:
                        other = chain
                    else:
                        keep(kept, added(pair, added(other, chain)))
                    chain = zeros()
            next_chain, next_s = c, i32(s + step)
            if next_s >= sub_blocks:
                next_chain = i32(c + 1)
                next_s = i32(TILE * (next_chain >> 2) + (next_chain & QUARTERS - 1))
            if next_chain < QUARTERS * parts:
                at = i32(min(next_s + own_step, sub_blocks - 1))
                bring(
                    i32(half_bytes - half),
                    place,
                    group,
                    rows_in_group,
                    in_group_there,
                    of_row,
                    sub_blocks,
                    at,
                    table,
                )
            barrier()
            c, s, half = next_chain, next_s, i32(half_bytes - half)

        return kept, own_output, i32(own_row + 2 * t)

    return multiply


def spills_of(kind: TensorType) -> int:
    """Return the most bytes of registers that a thread keeps in memory: what two sub-blocks need
    together leaves no register for what is wanted once in a stage."""
    return 64 if scaling_of(kind).in_pairs else 8


def registers_of(kind: TensorType) -> int:
    """Return the most registers of a thread: where halves have minima too, 128 are not enough."""
    form = decoder_of(kind)
    return _MANY_REGISTERS if form.halves and form.minima else MOST_REGISTERS
