"""Multiply rows with weights of floats: a router, or a model that is not quantised.

A warp has an output of one row, or a part of its sum: rows are cut into parts of 512 values, up to
eight of them, which are added in ascending order. A lane has sixteen values of a part in registers
before the launch in front has ended, so a matrix as small as a router's is there when its row is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.floats import EIGHT, FLOATS, lane_product
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    bits_of_f32,
    block_x,
    f32,
    fetch_f32,
    fma,
    hold,
    i64,
    load_4xf32,
    load_f32,
    load_i64,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    Arguments,
    GpuKernel,
    Grid,
    high_block,
    high_grid,
    warp_sum,
    weights_read,
)

WARPS = 8
_PART = 512  # values


def float_linear_kernel(kind: TensorType, values: int) -> GpuKernel:
    """Return `linear` of the table for a type of `FLOATS` and rows of so many values.

    Its grid is (rows, outputs / 8 * parts), of 256 threads: a head has more outputs than a grid is
    wide.
    """
    return _by_ones(kind) if values % EIGHT else _by_eights(kind, parts_of(values))


def parts_of(values: int) -> int:
    """Return how many warps share the sum of a row of so many values, which are whole eights."""
    parts = 1
    while parts < WARPS and _PART * parts < values:
        parts *= 2
    return parts


def add_eight(total: Any, weights: Any, low: Any, high: Any) -> Any:
    """Add eight values, four `low` and four `high`, times weights, in ascending order."""
    a, b, c, d, e, f, g, h = weights
    xa, xb, xc, xd = low
    xe, xf, xg, xh = high
    total = fma(d, xd, fma(c, xc, fma(b, xb, fma(a, xa, total))))
    return fma(h, xh, fma(g, xg, fma(f, xf, fma(e, xe, total))))


def _finish(total: Any, there: Any, before: Any, place: int, bias: int, add: int) -> None:
    """Write a product, with its bias and what is there, where the launch asks for them."""
    if bias != 0:
        total += before
    if add != 0:
        total += there
    store_f32(place, total)


@cache
def _by_eights(kind: TensorType, parts: int) -> GpuKernel:
    size, _, eight = FLOATS[kind]
    each, step = WARPS // parts, EIGHT * WARP * parts

    def further(total: Any, weights: Any, x: int) -> Any:
        return add_eight(total, weights, load_4xf32(x), load_4xf32(x + 16))

    def linear(
        rows: int, x: int, weight: int, bias: int, y: int, values: int, outputs: int, add: int
    ) -> None:
        row, thread = i64(block_x()), i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        own, part = warp // parts, warp % parts
        number = each * high_block() + own
        output = min(number, outputs - 1)
        weights = weight + size * output * values
        value, last = EIGHT * (lane + WARP * part), values - EIGHT
        first = eight(weights + size * min(value, last))
        second = eight(weights + size * min(value + step, last))
        before = fetch_f32(bias + 4 * output) if bias != 0 else f32(0.0)
        hold(bits_of_f32(first[0]) ^ bits_of_f32(second[0]))
        await_previous()
        exists = row < load_i64(rows)
        of_row = x + 4 * row * values
        place = y + 4 * (row * outputs + output)
        total, there = f32(0.0), f32(0.0)
        if add != 0 and lane == 0:
            there = load_f32(place)
        if value < values:
            total = further(total, first, of_row + 4 * value)
        value += step
        if value < values:
            total = further(total, second, of_row + 4 * value)
        value += step
        while value < values:
            total = further(total, eight(weights + size * value), of_row + 4 * value)
            value += step
        total = warp_sum(total)
        if parts > 1:
            if lane == 0:
                shared_store_f32(4 * warp, total)
            barrier()
        if lane == 0 and part == 0 and exists and number < outputs:
            other = 1
            while other < parts:
                total += shared_load_f32(4 * (warp + other))
                other += 1
            _finish(total, there, before, place, bias, add)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return high_grid(most_rows, arguments["outputs"], each)

    return GpuKernel(
        f"linear_{kind.name}_{parts}".lower(),
        linear,
        WARPS * WARP,
        grid,
        lambda _: 4 * WARPS,
        reads=weights_read(kind),
    )


@cache
def _by_ones(kind: TensorType) -> GpuKernel:
    """Return the kernel for rows that are no whole eights: a warp has an output."""
    size, product = FLOATS[kind].size_bytes, lane_product(kind, in_eights=False)

    def linear(
        rows: int, x: int, weight: int, bias: int, y: int, values: int, outputs: int, add: int
    ) -> None:
        row, thread = i64(block_x()), i64(thread_index())
        output = WARPS * high_block() + (thread >> 5)
        if row >= load_i64(rows) or output >= outputs:
            return
        lane = thread & WARP - 1
        of_output, of_row = weight + size * output * values, x + 4 * row * values
        total = warp_sum(product(of_output, of_row, values, lane))
        if lane == 0:
            before = fetch_f32(bias + 4 * output) if bias != 0 else f32(0.0)
            place = y + 4 * (row * outputs + output)
            there = load_f32(place) if add != 0 else f32(0.0)
            _finish(total, there, before, place, bias, add)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return high_grid(most_rows, arguments["outputs"], WARPS)

    return GpuKernel(
        f"linear_{kind.name}_odd".lower(), linear, WARPS * WARP, grid, reads=weights_read(kind)
    )
