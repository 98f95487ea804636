"""Multiply one row with up to three weights in one launch: what most steps are made of.

A block has a group of eight outputs, and its warps share the group's sub-blocks, four each in turn;
at the end their sums are added in ascending order. Those are the sums of `linear.py`, in the same
order, so a row has the same bits alone and in company.

What decides the speed of a single row is how long it waits. So weights are asked for before the
launch in front has ended: the first four sub-blocks of each lane, which of most rows is all, into
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
    hold,
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
from strata_nb.kernels.gpu.products import (
    WARP_SUB_BLOCKS,
    decoder_of,
    row_bytes_of,
    row_sum,
    sub_block_dot,
)
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

MOST_WEIGHTS = 3
_HELD = 4  # sub-blocks that a lane has in registers
_MOST_WARPS = 16


def warps_of(values: int) -> int:
    """Return how many warps share a group of rows of so many values: the sum's order depends on
    it."""
    warps = 1
    while warps < _MOST_WARPS and SUB_BLOCK * WARP_SUB_BLOCKS * _HELD * warps < values:
        warps *= 2
    return warps


@cache
def _group_of(kind: TensorType, warps: int, is_whole: bool) -> Function:
    """Return a function (rows, x, weight, bias, y, values, outputs, add, number): one group.

    is_whole   all groups have eight rows, and a lane's sub-blocks are exactly those that it holds:
               nothing has to be decided, and all loads of the row are on their way at once
    """
    read, unpack = decoder_of(kind).read, decoder_of(kind).unpack
    dot, bytes_of_row = sub_block_dot(kind), row_bytes_of(kind)
    step = WARP_SUB_BLOCKS * warps  # sub-blocks that a block takes at a time
    whole, table = _HELD * step, _sums_bytes(warps)
    fill = table_filler(kind, table, WARP * warps)

    def group_of(
        rows: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        values: int,
        outputs: int,
        add: int,
        number: int,
    ) -> None:
        thread, first = i64(thread_index()), GROUP_ROWS * number
        sub_blocks = whole if is_whole else values >> 5
        warp, lane = thread >> 5, thread & WARP - 1
        rows_in_group = GROUP_ROWS if is_whole else min(outputs - first, GROUP_ROWS)
        group = weight + first * bytes_of_row(sub_blocks)
        row = lane & GROUP_ROWS - 1 if is_whole else min(lane & GROUP_ROWS - 1, rows_in_group - 1)
        s, last = WARP_SUB_BLOCKS * warp + (lane >> 3), sub_blocks - 1
        if not is_whole and thread == 0 and sub_blocks > _HELD * step:
            size: int = i32(rows_in_group * bytes_of_row(sub_blocks) & -16)
            prefetch(group & -16, size)
        t, u, v = s + step, s + 2 * step, s + 3 * step
        if not is_whole:  # what is not there repeats the last
            t, u, v = min(t, last), min(u, last), min(v, last)
        ones = read(group, rows_in_group, row, sub_blocks, s if is_whole else min(s, last))
        others = read(group, rows_in_group, row, sub_blocks, t)
        thirds = read(group, rows_in_group, row, sub_blocks, u)
        fourths = read(group, rows_in_group, row, sub_blocks, v)
        output = first + min(thread, rows_in_group - 1)
        before = fetch_f32(bias + 4 * output) if bias != 0 else f32(0.0)
        fill(thread)
        a, b = unpack(ones, table), unpack(others, table)
        c, d = unpack(thirds, table), unpack(fourths, table)
        hold(i32(a[0] ^ b[0] ^ c[0] ^ d[0]))
        await_previous()
        place = y + 4 * output
        there = load_f32(place) if add != 0 else f32(0.0)
        count = load_i64(rows)
        total = f32(0.0)
        total = dot(total, a, x, sub_blocks, s) if is_whole or s < sub_blocks else total
        s += step
        total = dot(total, b, x, sub_blocks, s) if is_whole or s < sub_blocks else total
        s += step
        total = dot(total, c, x, sub_blocks, s) if is_whole or s < sub_blocks else total
        s += step
        total = dot(total, d, x, sub_blocks, s) if is_whole or s < sub_blocks else total
        s += step
        while not is_whole and s < sub_blocks:
            ones = read(group, rows_in_group, row, sub_blocks, s)
            others = read(group, rows_in_group, row, sub_blocks, min(s + step, last))
            total = dot(total, unpack(ones, table), x, sub_blocks, s)
            s += step
            total = dot(total, unpack(others, table), x, sub_blocks, s) if s < sub_blocks else total
            s += step
        total = row_sum(total)
        if lane < GROUP_ROWS:
            shared_store_f32(4 * (GROUP_ROWS * warp + lane), total)
        barrier()
        if thread < rows_in_group and count > 0:
            total, other = shared_load_f32(4 * thread), 1
            while other < warps:
                total += shared_load_f32(4 * (thread + GROUP_ROWS * other))
                other += 1
            if bias != 0:
                total += before
            if add != 0:
                total += there
            store_f32(place, total)

    return group_of


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
    warps = warps_of(values)
    is_held = values == _HELD * WARP_SUB_BLOCKS * SUB_BLOCK * warps
    return _of_warps(kinds, warps, is_held and all(count % GROUP_ROWS == 0 for count in outputs))


@cache
def _of_warps(kinds: tuple[TensorType, ...], warps: int, is_whole: bool) -> GpuKernel:
    # Weights of the same type share their code: a card waits for code as well.
    types = tuple(dict.fromkeys(kinds))
    type_count = len(types)
    groups_of = [_group_of(kind, warps, is_whole) for kind in types]
    first_of, second_of, third_of = (groups_of * MOST_WEIGHTS)[:MOST_WEIGHTS]
    second_type, third_type = (types.index(kinds[min(n, len(kinds) - 1)]) for n in (1, 2))

    def group_of(
        of_type: int,
        rows: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        values: int,
        outputs: int,
        add: int,
        number: int,
    ) -> None:
        if of_type == 0 or type_count == 1:
            first_of(rows, x, weight, bias, y, values, outputs, add, number)
        elif of_type == 1 or type_count == 2:
            second_of(rows, x, weight, bias, y, values, outputs, add, number)
        else:
            third_of(rows, x, weight, bias, y, values, outputs, add, number)

    def one(
        rows: int,
        x: int,
        values: int,
        add: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
    ) -> None:
        number = i64(block_x())
        first_of(rows, x, weight, bias, y, values, outputs, add, number)

    def two(
        rows: int,
        x: int,
        values: int,
        add: int,
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
        group_of(of_type, rows, x, weight, bias, y, values, outputs, add, number)

    def three(
        rows: int,
        x: int,
        values: int,
        add: int,
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
        group_of(of_type, rows, x, weight, bias, y, values, outputs, add, number)

    function: Any = (one, two, three)[len(kinds) - 1]
    form = f"{warps}w" if is_whole else f"{warps}"
    name = "_".join(["one_row", form, *(kind.name.lower() for kind in kinds)])
    shared_bytes = _sums_bytes(warps) + max(map(table_bytes, types))
    # Small blocks all have room at once; a single warp needs more for the grid types.
    registers = 104 if warps == 1 else 96 if warps <= 4 else MOST_REGISTERS
    return GpuKernel(
        name, function, WARP * warps, _grid, lambda _: shared_bytes, registers, _reads(kinds)
    )
