"""Store the sums of a block of `warpgroup_tiles.py`, or what becomes of them.

A warp takes whole rows, whose outputs lie side by side in shared memory as in the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.half_stages import ROWS_BY, UNIT
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    bits_of_f32,
    f32,
    fetch_f32,
    halves_of_f32,
    i32,
    load_4xf32,
    load_f32,
    shared_load_4xf32,
    shared_load_i64,
    store_4xi32,
    store_f32,
)
from strata_nb.kernels.gpu.intrinsics.warpgroups import M, nearly_divided
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.warpgroup_tiles import APART, OUTPUTS, THREADS, targets_at

_WARPS = THREADS // WARP
_FLOATS = 4  # of a lane
EIGHT = 8  # halves of a lane


def _in_units(x: Any) -> Any:
    unit = f32(UNIT)
    return x[0] * unit, x[1] * unit, x[2] * unit, x[3] * unit


def _sum(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _zeros() -> Any:
    zero = f32(0.0)
    return zero, zero, zero, zero


def _silu(x: Any) -> Any:
    return nearly_divided(x, f32(1.0) + exp(-x))


@cache
def store_rows(rows: int) -> Function:
    """Return a device function (thread, here, bias, y, outputs, block, add): store a block's sums
    as `linear` of the table has them, of blocks of so many rows."""
    target_at = targets_at(rows)

    def place_of(number: int, here: int, y: int, outputs: int, output: int) -> Any:
        row = shared_load_i64(target_at + 8 * min(number, here - 1))
        return y + 4 * (row * outputs + output)

    def before(place: int, add: int) -> Any:
        return load_4xf32(place) if add != 0 else _zeros()

    def store_four(place: int, number: int, lane: int, more: Any) -> None:
        x = _sum(_in_units(shared_load_4xf32(4 * (APART * number + _FLOATS * lane))), more)
        a, b, c, d = bits_of_f32(x[0]), bits_of_f32(x[1]), bits_of_f32(x[2]), bits_of_f32(x[3])
        store_4xi32(place, a, b, c, d)

    def of_bias(bias: int, output: int, outputs: int) -> Any:
        if bias == 0:
            return _zeros()
        last = outputs - 1
        return (
            fetch_f32(bias + 4 * min(output, last)),
            fetch_f32(bias + 4 * min(output + 1, last)),
            fetch_f32(bias + 4 * min(output + 2, last)),
            fetch_f32(bias + 4 * min(output + 3, last)),
        )

    def store_one(place: int, value: Any, add: int) -> None:
        store_f32(place, value + load_f32(place) if add != 0 else value)

    def store_some(place: int, number: int, lane: int, bias: Any, add: int, left: int) -> None:
        x = _sum(_in_units(shared_load_4xf32(4 * (APART * number + _FLOATS * lane))), bias)
        store_one(place, x[0], add)
        if left > 1:
            store_one(place + 4, x[1], add)
        if left > 2:
            store_one(place + 8, x[2], add)
        if left > 3:
            store_one(place + 12, x[3], add)

    def store(
        thread: int, here: int, bias: int, y: int, outputs: int, block: int, add: int
    ) -> None:
        lane, number = i32(thread & WARP - 1), i32(thread >> 5)
        output = block + _FLOATS * lane
        if output >= outputs:
            return
        of_all = of_bias(bias, output, outputs)
        if outputs & 3 != 0:
            while number < here:
                place = place_of(number, here, y, outputs, output)
                store_some(place, number, lane, of_all, add, outputs - output)
                number += _WARPS
            return
        while number < here:
            # What is there already comes from far: four rows at once.
            p = place_of(number, here, y, outputs, output)
            q = place_of(number + _WARPS, here, y, outputs, output)
            r = place_of(number + 2 * _WARPS, here, y, outputs, output)
            s = place_of(number + 3 * _WARPS, here, y, outputs, output)
            a, b, c, d = before(p, add), before(q, add), before(r, add), before(s, add)
            store_four(p, number, lane, _sum(of_all, a))
            if number + _WARPS < here:
                store_four(q, number + _WARPS, lane, _sum(of_all, b))
            if number + 2 * _WARPS < here:
                store_four(r, number + 2 * _WARPS, lane, _sum(of_all, c))
            if number + 3 * _WARPS < here:
                store_four(s, number + 3 * _WARPS, lane, _sum(of_all, d))
            number += 4 * _WARPS

    return store


@cache
def store_products(rows: int) -> Function:
    """Return a device function (thread, here, y, outputs, block): store a block's sums as halves in
    units of `ROWS_BY`. The outputs are a multiple of `EIGHT`."""
    target_at, of_row = targets_at(rows), OUTPUTS // EIGHT

    def two(a: Any, b: Any) -> Any:
        by = f32(UNIT * ROWS_BY)
        return halves_of_f32(a * by, b * by)

    def store(thread: int, here: int, y: int, outputs: int, block: int) -> None:
        column, number = i32(EIGHT * (thread % of_row)), i32(thread // of_row)
        output = block + column
        if output >= outputs:
            return
        while number < here:
            row = shared_load_i64(target_at + 8 * number)
            place = 4 * (APART * number + column)
            a, b, c, d = shared_load_4xf32(place)
            e, f, g, h = shared_load_4xf32(place + 16)
            to = y + 2 * (row * outputs + output)
            store_4xi32(to, two(a, b), two(c, d), two(e, f), two(g, h))
            number += THREADS // of_row

    return store


@cache
def store_gated(rows: int) -> Function:
    """Return a device function (thread, here, inner, outputs, block): store silu(gate) * up of a
    block, whose warpgroups have 64 outputs of gate and of up, as halves in units of `ROWS_BY`.

    The outputs are a multiple of 64.
    """
    target_at = targets_at(rows)

    def gated(place: int) -> Any:
        x = _in_units(shared_load_4xf32(place))
        up = _in_units(shared_load_4xf32(place + 4 * M))
        by = f32(ROWS_BY)
        a, b = _silu(x[0]) * up[0] * by, _silu(x[1]) * up[1] * by
        c, d = _silu(x[2]) * up[2] * by, _silu(x[3]) * up[3] * by
        return halves_of_f32(a, b), halves_of_f32(c, d)

    def store(thread: int, here: int, inner: int, outputs: int, block: int) -> None:
        # Eight lanes have a row.
        column, number = i32(8 * (thread & 7)), i32(thread >> 3)
        while number < here:
            row = shared_load_i64(target_at + 8 * number)
            place = 4 * (APART * number + column)
            a, b = gated(place)
            c, d = gated(place + 16)
            store_4xi32(inner + 2 * (row * outputs + block + column), a, b, c, d)
            number += THREADS // 8

    return store
