"""Multiply many rows with packed weights by tensor cores, tile after tile.

draft
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.fragments import fragments_of
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_copies,
    barrier,
    bits_of_f32,
    copy_16,
    f32,
    f32_of_i32,
    fetch_f32,
    i32,
    load_f32,
    load_i32,
    load_i64,
    mma_16x8x16,
    mma_16x8x32,
    shared_load_2xf32,
    shared_load_4xf32,
    shared_load_f32,
    shared_load_matrices,
    shared_store_4xi32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.products import row_bytes_of
from strata_nb.kernels.gpu.scaling import BEYOND, scaling_of
from strata_nb.kernels.gpu.tile_rows import APART, TILE
from strata_nb.kernels.quantised_rows import SCALES, SUB_BLOCK_BYTES, SUMS
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

import os
_WARPS = int(os.environ.get("VARIANT_WARPS", "4"))
OUTPUTS = 16 * _WARPS
ROWS = 32
THREADS = WARP * _WARPS
_GROUPS = OUTPUTS // GROUP_ROWS
_PIECE = 8
_PIECES = ROWS // _PIECE
_SUMS = 4 * _PIECES
_SUM_APART = 16 * THREADS
_QUARTERS = TILE // 2
_ROW_BYTES = TILE * SUB_BLOCK + 16  # so that eight rows are in eight different banks


def _zeros() -> Any:
    zero = f32(0.0)
    four = zero, zero, zero, zero
    return four + four + four + four


def _four_added(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _added(a: Any, b: Any) -> Any:
    return (
        _four_added(a[:4], b[:4])
        + _four_added(a[4:8], b[4:8])
        + _four_added(a[8:12], b[8:12])
        + _four_added(a[12:], b[12:])
    )


def _keep_four(place: int, sums: Any) -> None:
    a, b, c, d = shared_load_4xf32(place)
    shared_store_4xi32(
        place, bits_of_f32(a + sums[0]), bits_of_f32(b + sums[1]), bits_of_f32(c + sums[2]),
        bits_of_f32(d + sums[3]),
    )


def _keep(place: int, sums: Any) -> None:
    _keep_four(place, sums[:4])
    _keep_four(place + _SUM_APART, sums[4:8])
    _keep_four(place + 2 * _SUM_APART, sums[8:12])
    _keep_four(place + 3 * _SUM_APART, sums[12:])


class Places:
    """Offsets of shared memory."""

    def __init__(self, kind: TensorType) -> None:
        scaling, form = scaling_of(kind), fragments_of(kind)
        self.weights = _GROUPS * form.group_bytes
        self.rows = ROWS * _ROW_BYTES
        self.stage = self.weights + self.rows
        self.steps_at = 2 * self.stage
        self.steps = 16 * OUTPUTS * _QUARTERS
        self.bounds = 8 * OUTPUTS
        self.of_row = 8 * scaling.of_rows
        self.row_records = self.of_row * ROWS * _QUARTERS
        self.records = self.steps + self.bounds + self.row_records
        self.sums_at = self.steps_at + 2 * self.records
        self.end = self.sums_at + _SUM_APART * _PIECES


@cache
def places_of(kind: TensorType) -> Places:
    return Places(kind)


def shared_bytes_of(kind: TensorType) -> int:
    return places_of(kind).end


@cache
def _piece(kind: TensorType) -> Function:
    """(sums, a, c, upper, lower, x, records)."""
    scaling = scaling_of(kind)
    halves, of_rows, add = scaling.halves, scaling.of_rows, scaling.add

    def product(a: Any, b: Any, c: Any) -> Any:
        begin = i32(BEYOND)
        if halves:
            low = mma_16x8x16(a[0], a[1], b, begin, begin, begin, begin)
            return low, mma_16x8x16(a[2], a[3], c, begin, begin, begin, begin)
        both = mma_16x8x32(a[0], a[1], a[2], a[3], b, c, begin, begin, begin, begin)
        return both, both

    def rows_at(place: int) -> Any:
        found = shared_load_4xf32(place)
        if of_rows == 1:
            return found[:1], found[1:2], found[2:3], found[3:]
        other = shared_load_4xf32(place + 16)
        return found[:2], found[2:], other[:2], other[2:]

    def piece(sums: Any, words: Any, records: Any, x: int, of_row: int) -> Any:
        a, c = words
        upper, other_upper, lower, other_lower = records
        b = shared_load_matrices(x)
        low, high = product(a, b[0], b[1])
        more, most = product(c, b[2], b[3])
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
    form, places = fragments_of(kind), places_of(kind)
    pair, piece = form.pair, _piece(kind)
    steps_apart = 16 * OUTPUTS
    rows_apart = places.of_row * ROWS
    piece_bytes, piece_records = _PIECE * _ROW_BYTES, _PIECE * places.of_row

    def maybe(sums: Any, number: int, here: int, words: Any, records: Any, x: int, of: int) -> Any:
        if here > _PIECE * number:
            sums = piece(sums, words, records, x + piece_bytes * number, of + piece_records * number)
        return sums

    def quarter(
        sums: Any,
        number: int,
        here: int,
        weights: int,
        lane: int,
        steps: int,
        bounds: Any,
        x: int,
        of_rows: int,
    ) -> Any:
        words = pair(weights, lane, number)
        a, b, c, d = shared_load_4xf32(i32(steps + steps_apart * number))
        e, f, g, h = shared_load_4xf32(i32(steps + steps_apart * number + 16 * GROUP_ROWS))
        u, v, w, z = bounds
        records = (a, b, u, v), (c, d), (e, f, w, z), (g, h)
        x = i32(x + SUB_BLOCK * number)
        of = i32(of_rows + rows_apart * number)
        return (
            piece(sums[:4], words, records, x, of)
            + maybe(sums[4:8], 1, here, words, records, x, of)
            + maybe(sums[8:12], 2, here, words, records, x, of)
            + maybe(sums[12:], 3, here, words, records, x, of)
        )

    return quarter


@cache
def block_product(kind: TensorType) -> Function:
    form, scaling, places = fragments_of(kind), scaling_of(kind), places_of(kind)
    quarter = _quarter(kind)
    copy, read, steps_of, bounds_of = form.copy, form.read, form.steps, form.bounds
    group_bytes, of_rows = form.group_bytes, scaling.of_rows
    bytes_of_row = row_bytes_of(kind)
    stage_bytes, weights_bytes = places.stage, places.weights
    steps_at, records_bytes, sums_at = places.steps_at, places.records, places.sums_at
    bounds_start, rows_start = places.steps, places.steps + places.bounds
    of_row_bytes = places.of_row

    def store_one(
        total: Any,
        number: int,
        first: int,
        here: int,
        targets: int,
        bias: int,
        y: int,
        outputs: int,
        output: int,
        add: int,
    ) -> None:
        if number < here and output < outputs:
            row = first + number
            if targets != 0:
                row = load_i64(targets + 8 * row)
            if bias != 0:
                total += fetch_f32(bias + 4 * output)
            place = y + 4 * (row * outputs + output)
            if add != 0:
                total += load_f32(place)
            store_f32(place, total)

    def bring_tile(
        stage: int, thread: int, group: int, rows_in_group: int, sub_blocks: int, row: int,
        has_row: int, tile: int,
    ) -> None:
        in_group, s = i32(thread & 7), i32(thread >> 3 & 1)
        target = i32(stage + group_bytes * (thread >> 4))
        copy(target, group, rows_in_group, in_group, sub_blocks >> 3, tile, s)
        if has_row != 0:
            which, t = i32(thread >> 2), i32(thread & 3)
            target = i32(stage + weights_bytes + _ROW_BYTES * which + 16 * t)
            source = row + i32(TILE * SUB_BLOCK * tile + 16 * t)
            copy_16(target, source)
            copy_16(target + 64, source + 64)
            copy_16(target + 128, source + 128)
            copy_16(target + 192, source + 192)

    def read_row(row: int, has_row: int, sub_blocks: int, q: int, tile: int) -> Any:
        """The scales of a row's pair, and sums."""
        if has_row == 0:
            return f32(0.0), f32(0.0), i32(0), i32(0)
        place = row + i32(SCALES * sub_blocks + 4 * TILE * tile + 4 * q)
        if of_rows == 1:
            return load_f32(place), load_f32(place + 4 * APART), i32(0), i32(0)
        sums = row + i32(SUMS * sub_blocks + 4 * TILE * tile + 4 * q)
        return (
            load_f32(place), load_f32(place + 4 * APART),
            load_i32(sums), load_i32(sums + 4 * APART),
        )

    def multiply(
        first: int,
        here: int,
        sources: int,
        targets: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        values: int,
        outputs: int,
        block: int,
        parts: int,
        add: int,
    ) -> None:
        thread, sub_blocks, tiles = i32(thread_index()), i32(values >> 5), i32(values >> 8)
        here = i32(here)
        parts = min(i32(parts), tiles)
        warp, lane = i32(thread >> 5), i32(thread & WARP - 1)
        g, t = i32(lane >> 2), i32(lane & 3)
        # what this thread brings
        which = i32(thread >> 2)
        has_row = i32(1) if which < here else i32(0)
        own = first + min(which, here - 1)
        if sources != 0:
            own = load_i64(sources + 8 * own)
        row = x + own * sub_blocks * SUB_BLOCK_BYTES
        output = min(block + GROUP_ROWS * (thread >> 4), outputs - 1 & -GROUP_ROWS)
        group = weight + output * bytes_of_row(sub_blocks)
        rows_in_group = i32(min(outputs - output, GROUP_ROWS))
        in_group = i32(min(thread & GROUP_ROWS - 1, rows_in_group - 1))
        upper = i32(thread >> 3 & 1)  # which half of quarters
        column = i32(GROUP_ROWS * (thread >> 4) + (thread & GROUP_ROWS - 1))
        # where it finds what it multiplies
        own_weights = i32(2 * group_bytes * warp)
        own_steps = i32(steps_at + 16 * (16 * warp + g))
        own_bounds = i32(steps_at + bounds_start + 8 * (16 * warp + g))
        m = lane >> 3
        own_x = i32(
            weights_bytes + _ROW_BYTES * (lane & 7) + 16 * (m & 1) + SUB_BLOCK * APART * (m >> 1)
        )
        own_rows = i32(steps_at + rows_start + 2 * of_row_bytes * t)
        kept, number = i32(sums_at + 16 * thread), 0
        while number < _PIECES:
            shared_store_4xi32(kept + _SUM_APART * number, 0, 0, 0, 0)
            number += 1
        one, two, three, four = _zeros(), _zeros(), _zeros(), _zeros()
        part, tile, stage, records = i32(0), i32(0), i32(0), i32(0)
        is_busy = block + 16 * warp < outputs
        bring_tile(stage, thread, group, rows_in_group, sub_blocks, row, has_row, tile)
        words = read(group, rows_in_group, in_group, sub_blocks, tile)
        of_row = read_row(row, has_row, sub_blocks, t, tile)
        while part < parts:
            # records
            quarters, end = i32(2 * upper), i32(2 * upper + 2)
            while quarters < end:
                a, b, c, d = steps_of(words, quarters)
                shared_store_4xi32(
                    i32(steps_at + records + 16 * (column + OUTPUTS * quarters)),
                    bits_of_f32(a), bits_of_f32(b), bits_of_f32(c), bits_of_f32(d),
                )
                quarters += 1
            if upper == 0:
                a, b = bounds_of(words)
                place = i32(steps_at + bounds_start + records + 8 * column)
                shared_store_f32(place, a)
                shared_store_f32(place + 4, b)
            if has_row != 0:
                place = i32(steps_at + rows_start + records + of_row_bytes * (which + ROWS * t))
                if of_rows == 1:
                    shared_store_f32(place, of_row[0])
                    shared_store_f32(place + 4, of_row[1])
                else:
                    shared_store_4xi32(
                        place,
                        bits_of_f32(of_row[0]), bits_of_f32(f32_of_i32(of_row[2])),
                        bits_of_f32(of_row[1]), bits_of_f32(f32_of_i32(of_row[3])),
                    )
            await_copies()
            barrier()
            is_end, next_part, next_tile = False, part, i32(tile + parts)
            if next_tile >= tiles:
                is_end, next_part = True, i32(part + 1)
                next_tile = next_part
            if next_part < parts:
                bring_tile(
                    i32(stage_bytes - stage), thread, group, rows_in_group, sub_blocks, row,
                    has_row, next_tile,
                )
                words = read(group, rows_in_group, in_group, sub_blocks, next_tile)
                of_row = read_row(row, has_row, sub_blocks, t, next_tile)
            if is_busy:
                u, v = shared_load_2xf32(own_bounds + records)
                w, z = shared_load_2xf32(own_bounds + records + 8 * GROUP_ROWS)
                bounds = u, v, w, z
                steps, rows = own_steps + records, own_rows + records
                weights, own = stage + own_weights, stage + own_x
                one = quarter(one, 0, here, weights, lane, steps, bounds, own, rows)
                two = quarter(two, 1, here, weights, lane, steps, bounds, own, rows)
                three = quarter(three, 2, here, weights, lane, steps, bounds, own, rows)
                four = quarter(four, 3, here, weights, lane, steps, bounds, own, rows)
                if is_end:
                    _keep(kept, _added(_added(one, two), _added(three, four)))
                    one, two, three, four = _zeros(), _zeros(), _zeros(), _zeros()
            part, tile = next_part, next_tile
            stage, records = i32(stage_bytes - stage), i32(records_bytes - records)

        output, number, piece = block + 16 * warp + g, 2 * t, 0
        while piece < _PIECES:
            a, b, c, d = shared_load_4xf32(kept)
            store_one(a, number, first, here, targets, bias, y, outputs, output, add)
            store_one(b, number + 1, first, here, targets, bias, y, outputs, output, add)
            other = output + GROUP_ROWS
            store_one(c, number, first, here, targets, bias, y, outputs, other, add)
            store_one(d, number + 1, first, here, targets, bias, y, outputs, other, add)
            kept += _SUM_APART
            number += _PIECE
            piece += 1

    return multiply
