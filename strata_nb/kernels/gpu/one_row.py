"""Multiply one row with up to three weights in one launch: what most steps are made of.

A block has a group of eight outputs, and its warps share the group's tiles (`tiles.py`), one each
in turn; at the end their sums are added in ascending order. Those are the sums of `linear.py`, in
the same order, so a row has the same bits alone and in company.

What decides the speed of a single row is how long it waits. So weights are asked for before the
launch in front has ended: the first two tiles of each warp, which of most rows is all, into
registers, of longer rows the rest into the card's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    block_x,
    f32,
    fetch_f32,
    i32,
    i64,
    load_f32,
    load_i64,
    prefetch,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    MOST_REGISTERS,
    Arguments,
    Function,
    GpuKernel,
    Grid,
    blocks_of,
)
from strata_nb.kernels.gpu.products import row_bytes_of, row_sum
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.kernels.gpu.tile_rows import TILE, tiles_of
from strata_nb.kernels.gpu.tiles import tile_product
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

MOST_WEIGHTS = 3
_HELD = 2  # tiles that a warp has in registers
_MOST_WARPS = 16
_IN_PAIRS = 32_768  # outputs of which halves as many blocks still are many more than a card runs


def warps_of(values: int) -> int:
    """Return how many warps share a group of rows of so many values: the sum's order depends on
    it."""
    warps = 1
    while warps < _MOST_WARPS and SUB_BLOCK * TILE * _HELD * warps < values:
        warps *= 2
    return warps


@cache
def _group_of(kind: TensorType, sub_blocks: int, in_eights: bool) -> Function:
    """Return a function (rows, x, weight, bias, y, outputs, plus, number): one group.

    in_eights   every group has eight rows
    """
    warps, tiles = warps_of(SUB_BLOCK * sub_blocks), tiles_of(sub_blocks)
    table = _sums_bytes(warps)
    read, add = tile_product(kind, sub_blocks, table)
    fill = table_filler(kind, table, WARP * warps)
    row_bytes = row_bytes_of(kind)(sub_blocks)
    are_held = tiles == _HELD * warps  # by all warps: all loads of the row are on their way at once
    has_more = tiles > _HELD * warps

    def group_of(
        rows: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
        plus: int,
        number: int,
    ) -> None:
        thread, first = i64(thread_index()), GROUP_ROWS * number
        tile, lane = thread >> 5, thread & WARP - 1
        rows_in_group = GROUP_ROWS if in_eights else min(outputs - first, GROUP_ROWS)
        row = lane & GROUP_ROWS - 1
        row, quarter = row if in_eights else min(row, rows_in_group - 1), lane >> 3
        group = weight + first * row_bytes
        if has_more and thread == 0:
            prefetch(group & -16, i32(rows_in_group * row_bytes & -16))
        other = tile + warps if are_held else min(tile + warps, tiles - 1)
        ones = read(group, rows_in_group, row, quarter, tile)
        others = read(group, rows_in_group, row, quarter, other)
        output = first + min(thread, rows_in_group - 1)
        before = fetch_f32(bias + 4 * output) if bias != 0 else f32(0.0)
        fill(thread)
        await_previous()
        place = y + 4 * output
        there = load_f32(place) if plus != 0 else f32(0.0)
        count = load_i64(rows)
        total = add(f32(0.0), ones, x, quarter, tile)
        if are_held or tile + warps < tiles:
            total = add(total, others, x, quarter, other)
        if has_more:
            tile += _HELD * warps
            while tile < tiles:
                other = min(tile + warps, tiles - 1)
                ones = read(group, rows_in_group, row, quarter, tile)
                others = read(group, rows_in_group, row, quarter, other)
                total = add(total, ones, x, quarter, tile)
                if tile + warps < tiles:
                    total = add(total, others, x, quarter, other)
                tile += _HELD * warps
        total = row_sum(total)
        if lane < GROUP_ROWS:
            shared_store_f32(4 * (GROUP_ROWS * (thread >> 5) + lane), total)
        barrier()
        if thread < rows_in_group and count > 0:
            total, warp = shared_load_f32(4 * thread), 1
            while warp < warps:
                total += shared_load_f32(4 * (thread + GROUP_ROWS * warp))
                warp += 1
            if bias != 0:
                total += before
            if plus != 0:
                total += there
            store_f32(place, total)

    return group_of


@cache
def _pair_of(kind: TensorType, sub_blocks: int) -> Function:
    """Return a function as `_group_of` does: two groups, the second of them twice if it is the
    last. A table is put into shared memory once for both, and the row is read once."""
    warps = warps_of(SUB_BLOCK * sub_blocks)
    sums_bytes = _sums_bytes(warps)
    table = 2 * sums_bytes
    read, add = tile_product(kind, sub_blocks, table)
    fill = table_filler(kind, table, WARP * warps)
    row_bytes = row_bytes_of(kind)(sub_blocks)

    def pair_of(
        rows: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
        plus: int,
        number: int,
    ) -> None:
        thread, first = i64(thread_index()), 2 * GROUP_ROWS * number
        second = min(first + GROUP_ROWS, outputs - GROUP_ROWS)
        tile, lane = thread >> 5, thread & WARP - 1
        row, quarter, other = lane & GROUP_ROWS - 1, lane >> 3, tile + warps
        group, next_group = weight + first * row_bytes, weight + second * row_bytes
        ones = read(group, GROUP_ROWS, row, quarter, tile)
        next_ones = read(next_group, GROUP_ROWS, row, quarter, tile)
        others = read(group, GROUP_ROWS, row, quarter, other)
        next_others = read(next_group, GROUP_ROWS, row, quarter, other)
        output = (first if thread < GROUP_ROWS else second) + (thread & GROUP_ROWS - 1)
        before = fetch_f32(bias + 4 * output) if bias != 0 else f32(0.0)
        fill(thread)
        await_previous()
        place = y + 4 * output
        there = load_f32(place) if plus != 0 else f32(0.0)
        count = load_i64(rows)
        total = add(f32(0.0), ones, x, quarter, tile)
        next_total = add(f32(0.0), next_ones, x, quarter, tile)
        total = row_sum(add(total, others, x, quarter, other))
        next_total = row_sum(add(next_total, next_others, x, quarter, other))
        if lane < GROUP_ROWS:
            at = 4 * (GROUP_ROWS * tile + lane)
            shared_store_f32(at, total)
            shared_store_f32(at + sums_bytes, next_total)
        barrier()
        if thread < 2 * GROUP_ROWS and count > 0:
            at = 4 * (thread & GROUP_ROWS - 1) + sums_bytes * (thread >> 3)
            total, warp = shared_load_f32(at), 1
            while warp < warps:
                total += shared_load_f32(at + 4 * GROUP_ROWS * warp)
                warp += 1
            if bias != 0:
                total += before
            if plus != 0:
                total += there
            store_f32(place, total)

    return pair_of


def _sums_bytes(warps: int) -> int:
    """Return how many bytes of shared memory the sums of the warps take; a table follows them."""
    return 4 * GROUP_ROWS * warps


def _groups(arguments: Arguments, suffix: str) -> int:
    return blocks_of(arguments[f"outputs{suffix}"], GROUP_ROWS)


def _grid(arguments: Arguments, _: int) -> Grid:
    return sum(_groups(arguments, name[7:]) for name in arguments if name[:7] == "outputs"), 1, 1


def _reads(kinds: tuple[TensorType, ...]) -> Callable[[Arguments, int], int]:
    """Return what says how many bytes of weights a launch reads."""

    def reads(arguments: Arguments, _: int) -> int:
        outputs = [arguments[name] for name in arguments if name[:7] == "outputs"]
        each = zip(kinds, outputs, strict=True)
        return sum(count * row_bytes(kind, arguments["values"]) for kind, count in each)

    return reads


def one_row_kernel(kinds: tuple[TensorType, ...], values: int, outputs: Sequence[int]) -> GpuKernel:
    """Return the kernel for one to three packed weights of these types, and rows of so many values.

    outputs   of each weight

    Its arguments are rows, x, values, add, and for each weight weight, bias, y and outputs, the
    second's and third's with a number behind the name: as in `linear` of the table. A block for
    eight outputs. Reads each weight once, and the row, 1.5 bytes a value, once for each block.
    """
    in_eights = all(count % GROUP_ROWS == 0 for count in outputs)
    if len(kinds) == 1 and in_eights and outputs[0] >= _IN_PAIRS and _has_pairs(kinds[0], values):
        return _of_pairs(kinds[0], values // SUB_BLOCK)
    return _of_shape(kinds, values // SUB_BLOCK, in_eights)


def _has_pairs(kind: TensorType, values: int) -> bool:
    """Return whether blocks have two groups each: if they share a table, and all tiles are held."""
    return table_bytes(kind) > 0 and tiles_of(values // SUB_BLOCK) == _HELD * warps_of(values)


@cache
def _of_pairs(kind: TensorType, sub_blocks: int) -> GpuKernel:
    pair_of, values = _pair_of(kind, sub_blocks), SUB_BLOCK * sub_blocks
    warps = warps_of(values)

    def one(
        rows: int,
        x: int,
        _values: int,
        plus: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
    ) -> None:
        pair_of(rows, x, weight, bias, y, outputs, plus, i64(block_x()))

    shared_bytes = 2 * _sums_bytes(warps) + table_bytes(kind)
    return GpuKernel(
        f"one_row_{kind.name.lower()}_{values}_pairs",
        one,
        WARP * warps,
        lambda arguments, _: (blocks_of(arguments["outputs"], 2 * GROUP_ROWS), 1, 1),
        lambda _: shared_bytes,
        reads=_reads((kind,)),
    )


@cache
def _of_shape(kinds: tuple[TensorType, ...], sub_blocks: int, in_eights: bool) -> GpuKernel:
    # Weights of the same type share their code: a card waits for code as well.
    types = tuple(dict.fromkeys(kinds))
    type_count = len(types)
    groups_of = [_group_of(kind, sub_blocks, in_eights) for kind in types]
    first_of, second_of, third_of = (groups_of * MOST_WEIGHTS)[:MOST_WEIGHTS]
    second_type, third_type = (types.index(kinds[min(n, len(kinds) - 1)]) for n in (1, 2))

    def group_of(
        of_type: int,
        rows: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
        plus: int,
        number: int,
    ) -> None:
        if of_type == 0 or type_count == 1:
            first_of(rows, x, weight, bias, y, outputs, plus, number)
        elif of_type == 1 or type_count == 2:
            second_of(rows, x, weight, bias, y, outputs, plus, number)
        else:
            third_of(rows, x, weight, bias, y, outputs, plus, number)

    def one(
        rows: int,
        x: int,
        _values: int,
        plus: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
    ) -> None:
        number = i64(block_x())
        first_of(rows, x, weight, bias, y, outputs, plus, number)

    def two(
        rows: int,
        x: int,
        _values: int,
        plus: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
        weight2: int,
        bias2: int,
        y2: int,
        outputs2: int,
    ) -> None:
        number, of_type = i64(block_x()), 0
        groups = outputs + GROUP_ROWS - 1 >> 3
        if number >= groups:
            weight, bias, y, outputs = weight2, bias2, y2, outputs2
            of_type, number = second_type, number - groups
        group_of(of_type, rows, x, weight, bias, y, outputs, plus, number)

    def three(
        rows: int,
        x: int,
        _values: int,
        plus: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
        weight2: int,
        bias2: int,
        y2: int,
        outputs2: int,
        weight3: int,
        bias3: int,
        y3: int,
        outputs3: int,
    ) -> None:
        number, of_type = i64(block_x()), 0
        groups, groups2 = outputs + GROUP_ROWS - 1 >> 3, outputs2 + GROUP_ROWS - 1 >> 3
        if number >= groups + groups2:
            weight, bias, y, outputs = weight3, bias3, y3, outputs3
            of_type, number = third_type, number - groups - groups2
        elif number >= groups:
            weight, bias, y, outputs = weight2, bias2, y2, outputs2
            of_type, number = second_type, number - groups
        group_of(of_type, rows, x, weight, bias, y, outputs, plus, number)

    function: Any = (one, two, three)[len(kinds) - 1]
    warps = warps_of(SUB_BLOCK * sub_blocks)
    shape = f"{SUB_BLOCK * sub_blocks}" if in_eights else f"{SUB_BLOCK * sub_blocks}_odd"
    name = "_".join(["one_row", *(kind.name.lower() for kind in kinds), shape])
    shared_bytes = _sums_bytes(warps) + max(map(table_bytes, types))
    # Small blocks all have room at once; a single warp needs more for the grid types.
    registers = 104 if warps == 1 else 96 if warps <= 4 else MOST_REGISTERS
    return GpuKernel(
        name, function, WARP * warps, _grid, lambda _: shared_bytes, registers, _reads(kinds)
    )
