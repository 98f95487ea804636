"""Multiply many rows with weights of floats: the router of a prompt batch.

A warp has four outputs of four rows, or parts of their sums, so that what it reads of the card's
cache is used four times. Sums have the order of `float_linear.py`, and so the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.float_linear import WARPS, add_eight, parts_of
from strata_nb.kernels.gpu.floats import EIGHT, FLOATS
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    block_x,
    block_y,
    f32,
    fetch_f32,
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
    blocks_of,
    outputs_grid,
    warp_sum,
    weights_read,
)

_EACH = 4  # outputs of a warp, and rows
_SUMS = _EACH * _EACH


def batch_float_kernel(kind: TensorType, values: int) -> GpuKernel:
    """Return `linear` of the table for a type of `FLOATS` and rows of so many values, whole eights.

    Its grid is (rows / 4, outputs / 32 * parts), of 256 threads.
    """
    return _of_parts(kind, parts_of(values))


def _four(sums: Any, weights: Any, low: Any, high: Any) -> Any:
    """Return four outputs' sums of a row, with eight values more."""
    a, b, c, d = weights
    return (
        add_eight(sums[0], a, low, high),
        add_eight(sums[1], b, low, high),
        add_eight(sums[2], c, low, high),
        add_eight(sums[3], d, low, high),
    )


def _store_sums(place: int, lane: int, sums: Any) -> None:
    """Store the sums over a warp's lanes of four values, one behind the other."""
    a, b, c, d = warp_sum(sums[0]), warp_sum(sums[1]), warp_sum(sums[2]), warp_sum(sums[3])
    if lane == 0:
        shared_store_f32(place, a)
        shared_store_f32(place + 4, b)
        shared_store_f32(place + 8, c)
        shared_store_f32(place + 12, d)


@cache
def _of_parts(kind: TensorType, parts: int) -> GpuKernel:
    size, _, eight = FLOATS[kind]
    outputs_of_block = _EACH * (WARPS // parts)
    step = EIGHT * WARP * parts

    def linear(
        rows: int, x: int, weight: int, bias: int, y: int, values: int, outputs: int, add: int
    ) -> None:
        row, thread = _EACH * i64(block_x()), i64(thread_index())
        here = load_i64(rows) - row
        if here <= 0:
            return
        warp, lane = thread >> 5, thread & WARP - 1
        first, last = outputs_of_block * i64(block_y()), outputs - 1
        output = first + _EACH * (warp // parts)
        a = weight + size * values * min(output, last)
        b = weight + size * values * min(output + 1, last)
        c = weight + size * values * min(output + 2, last)
        d = weight + size * values * min(output + 3, last)
        x += 4 * values * row
        xb = x + 4 * values * min(here - 1, 1)
        xc = x + 4 * values * min(here - 1, 2)
        xd = x + 4 * values * min(here - 1, 3)
        zero = f32(0.0)
        ones = others = thirds = fourths = (zero, zero, zero, zero)
        value = EIGHT * (lane + WARP * (warp % parts))
        while value < values:
            at, of_row = size * value, 4 * value
            weights = eight(a + at), eight(b + at), eight(c + at), eight(d + at)
            ones = _four(ones, weights, load_4xf32(x + of_row), load_4xf32(x + of_row + 16))
            others = _four(others, weights, load_4xf32(xb + of_row), load_4xf32(xb + of_row + 16))
            thirds = _four(thirds, weights, load_4xf32(xc + of_row), load_4xf32(xc + of_row + 16))
            fourths = _four(fourths, weights, load_4xf32(xd + of_row), load_4xf32(xd + of_row + 16))
            value += step
        place = 4 * _SUMS * warp
        _store_sums(place, lane, ones)
        _store_sums(place + 16, lane, others)
        _store_sums(place + 32, lane, thirds)
        _store_sums(place + 48, lane, fourths)
        barrier()
        # A thread for each sum: of a row and an output of the block.
        number, column = thread // outputs_of_block, thread % outputs_of_block
        output = first + column
        if number < min(here, _EACH) and output < outputs:
            place = 4 * (_SUMS * parts * (column // _EACH) + _EACH * number + column % _EACH)
            total, part = shared_load_f32(place), 1
            while part < parts:
                total += shared_load_f32(place + 4 * _SUMS * part)
                part += 1
            if bias != 0:
                total += fetch_f32(bias + 4 * output)
            target = y + 4 * ((row + number) * outputs + output)
            if add != 0:
                total += load_f32(target)
            store_f32(target, total)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return outputs_grid(blocks_of(most_rows, _EACH), arguments["outputs"], outputs_of_block)

    return GpuKernel(
        f"batch_linear_{kind.name}_{parts}".lower(),
        linear,
        WARPS * WARP,
        grid,
        lambda _: 4 * _SUMS * WARPS,
        reads=weights_read(kind),
    )
