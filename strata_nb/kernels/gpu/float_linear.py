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
from strata_nb.kernels.gpu.held_rows import (
    divisor_of,
    fetch_held,
    load_held,
    quants_of,
    scaled,
    share_held,
    squares_of,
    store_held,
    store_quants,
    warps_that_hold,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    bits_of_f32,
    block_x,
    block_y,
    f32,
    fetch_f32,
    fma,
    hold,
    i32,
    i64,
    load_4xf32,
    load_f32,
    load_i64,
    prefetch,
    shared_load_4xf32,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    Arguments,
    GpuKernel,
    Grid,
    outputs_grid,
    warp_sum,
    weights_read,
)
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES

_WARPS = 8
_PART = 512  # values


def float_linear_kernel(kind: TensorType, values: int) -> GpuKernel:
    """Return `linear` of the table for a type of `FLOATS` and rows of so many values.

    Its grid is (rows, outputs / 8 * parts), of 256 threads.
    """
    if values % EIGHT:
        return _by_ones(kind)
    return _by_eights(kind, _parts_of(values), 0)


def _parts_of(values: int) -> int:
    parts = 1
    while parts < _WARPS and _PART * parts < values:
        parts *= 2
    return parts


def _finish(total: Any, there: Any, before: Any, place: int, bias: int, add: int) -> None:
    """Write a product, with its bias and what is there, where the launch asks for them."""
    if bias != 0:
        total += before
    if add != 0:
        total += there
    store_f32(place, total)


def can_norm(values: int) -> bool:
    """Return whether a launch can norm rows of so many values before it multiplies them."""
    return 0 < warps_that_hold(values) <= _WARPS


def normed_linear_kernel(kind: TensorType, values: int) -> GpuKernel:
    """Return a kernel that norms rows before it multiplies them, as `can_norm` allows.

    Its arguments are those of `linear`, x being what is normed, and norm_weight, out, packed and
    eps, as in `rms_norm` of the table. The first block of a row writes the normed row as well.
    Every block reads the row, and the weights of the norm.
    """
    return _by_eights(kind, _parts_of(values), values)


@cache
def _by_eights(kind: TensorType, parts: int, normed_values: int) -> GpuKernel:
    """Return a kernel for rows of whole eights.

    normed_values   of rows that are normed first, 0 where rows are multiplied as they are
    """
    size, _, eight = FLOATS[kind]
    each, step = _WARPS // parts, EIGHT * WARP * parts
    is_normed, holding = normed_values > 0, warps_that_hold(normed_values)
    row_at = 8 * _WARPS  # in shared memory, behind sums of two kinds

    def add_eight(weights: Any, x: int, total: Any) -> Any:
        a, b, c, d, e, f, g, h = weights
        xa, xb, xc, xd = shared_load_4xf32(x) if is_normed else load_4xf32(x)
        xe, xf, xg, xh = shared_load_4xf32(x + 16) if is_normed else load_4xf32(x + 16)
        total = fma(d, xd, fma(c, xc, fma(b, xb, fma(a, xa, total))))
        return fma(h, xh, fma(g, xg, fma(f, xf, fma(e, xe, total))))

    def normed_row(
        x: int, weight: int, out: int, packed: int, eps: Any, thread: int, stores: bool
    ) -> None:
        """Norm a row into shared memory; threads beyond those that hold it repeat the last."""
        own = min(thread, WARP * holding - 1)
        if thread == 0:
            prefetch(weight, i32(4 * normed_values))
        await_previous()
        held, weights = load_held(x, own), fetch_held(weight, own)
        divisor = divisor_of(squares_of(held), thread, holding, normed_values, eps, 4 * _WARPS)
        held = scaled(held, divisor, weights)
        if thread == own:
            share_held(held, row_at, thread)
            if stores and out != 0:
                store_held(held, out, thread)
            if stores and packed != 0:
                store_quants(quants_of(held), packed, thread, normed_values >> 5)
        barrier()

    def product(
        rows: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        values: int,
        outputs: int,
        add: int,
        norm_weight: int,
        out: int,
        packed: int,
        eps: Any,
    ) -> None:
        row, thread = i64(block_x()), i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        own, part = warp // parts, warp % parts
        output = min(each * i64(block_y()) + own, outputs - 1)
        weights = weight + size * output * values
        value, last = EIGHT * (lane + WARP * part), values - EIGHT
        first = eight(weights + size * min(value, last))
        second = eight(weights + size * min(value + step, last))
        before = fetch_f32(bias + 4 * output) if bias != 0 else f32(0.0)
        hold(bits_of_f32(first[0]) ^ bits_of_f32(second[0]))
        of_row = x + 4 * row * values
        if is_normed:
            row_out = out + 4 * row * values if out != 0 else i64(0)
            row_packed = packed + SUB_BLOCK_BYTES * (values >> 5) * row if packed != 0 else i64(0)
            stores = block_y() == 0
            normed_row(of_row, norm_weight, row_out, row_packed, eps, thread, stores)
            of_row = i64(row_at)
        else:
            await_previous()
        exists = row < load_i64(rows)
        place = y + 4 * (row * outputs + output)
        total, there = f32(0.0), f32(0.0)
        if add != 0 and lane == 0:
            there = load_f32(place)
        if value < values:
            total = add_eight(first, of_row + 4 * value, total)
        value += step
        if value < values:
            total = add_eight(second, of_row + 4 * value, total)
        value += step
        while value < values:
            total = add_eight(eight(weights + size * value), of_row + 4 * value, total)
            value += step
        total = warp_sum(total)
        if parts > 1:
            if lane == 0:
                shared_store_f32(4 * warp, total)
            barrier()
        if lane == 0 and part == 0 and exists and each * i64(block_y()) + own < outputs:
            other = 1
            while other < parts:
                total += shared_load_f32(4 * (warp + other))
                other += 1
            _finish(total, there, before, place, bias, add)

    def linear(
        rows: int, x: int, weight: int, bias: int, y: int, values: int, outputs: int, add: int
    ) -> None:
        nothing = i64(0)
        product(rows, x, weight, bias, y, values, outputs, add, nothing, nothing, nothing, f32(0.0))

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return outputs_grid(most_rows, arguments["outputs"], each)

    name = f"{'normed_' if is_normed else ''}linear_{kind.name}_{parts}".lower()
    shared_bytes = row_at + 4 * normed_values
    return GpuKernel(
        name,
        product if is_normed else linear,
        _WARPS * WARP,
        grid,
        lambda _: shared_bytes,
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
        output = _WARPS * i64(block_y()) + (thread >> 5)
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
        return outputs_grid(most_rows, arguments["outputs"], _WARPS)

    return GpuKernel(
        f"linear_{kind.name}_odd".lower(), linear, _WARPS * WARP, grid, reads=weights_read(kind)
    )
