"""Add up the products of a row's experts on a card, for the rows of a prompt batch.

They are in the order of rows: only the products before go by expert. A thread takes a value of
float32, or four of halves, whose choices are all on their way at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.half_stages import ROWS_BY
from strata_nb.kernels.gpu.intrinsics import (
    bits_of_f32,
    block_x,
    block_y,
    f32,
    f32_of_half,
    fma,
    i64,
    load_2xi32,
    load_4xf32,
    load_f32,
    load_i64,
    store_4xi32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, Function, GpuKernel, Grid, blocks_of

_THREADS = 256


def _grid(arguments: Arguments, most_rows: int) -> Grid:
    return blocks_of(arguments["outputs"], _THREADS), most_rows, 1


def _sum(rows: int, products: int, shares: int, y: int, top_k: int, outputs: int) -> None:
    row = i64(block_y())
    column = i64(block_x()) * _THREADS + thread_index()
    if row >= load_i64(rows) or column >= outputs:
        return
    total, choice = f32(0.0), row * top_k
    last = choice + top_k
    while choice < last:
        product = load_f32(products + 4 * (outputs * choice + column))
        total = fma(load_f32(shares + 4 * choice), product, total)
        choice += 1
    place = y + 4 * (outputs * row + column)
    store_f32(place, load_f32(place) + total)


@cache
def sum_kernel() -> GpuKernel:
    """Return the kernel (rows, products, shares, y, top_k, outputs): y += shares times products.

    products float32 (rows * top_k, outputs), by ascending expert of each row, shares float32 (rows,
    top_k). Reads 4 * top_k bytes for each value, adds 4.
    """
    return GpuKernel("batch_sum", _sum, _THREADS, _grid)


_FOUR = 4  # values of a thread


def _grid_of_fours(arguments: Arguments, most_rows: int) -> Grid:
    return blocks_of(arguments["outputs"] // _FOUR, _THREADS), most_rows, 1


@cache
def _halves_of(choices: int) -> Function:
    """Return a device function: (place, share_at, apart) -> of so many choices a share, in units
    of halves, and two words of halves, with `apart` bytes from a choice to the next."""

    def one(place: int, share_at: int, apart: int) -> Any:
        return ((load_f32(share_at) * f32(1 / ROWS_BY), load_2xi32(place)),)

    if choices == 1:
        return one
    others = _halves_of(choices - 1)

    def several(place: int, share_at: int, apart: int) -> Any:
        first = one(place, share_at, apart)
        return first + others(place + apart, share_at + 4, apart)

    return several


@cache
def _added(choices: int) -> Function:
    """Return a device function that adds so many choices to four sums, one after the other."""

    def one(found: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        share, (low, high) = found[0]
        return (
            fma(share, f32_of_half(low), a),
            fma(share, f32_of_half(low >> 16), b),
            fma(share, f32_of_half(high), c),
            fma(share, f32_of_half(high >> 16), d),
        )

    if choices == 1:
        return one
    others = _added(choices - 1)

    def several(found: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        a, b, c, d = one(found, a, b, c, d)
        return others(found[1:], a, b, c, d)

    return several


@cache
def half_sum_kernel(top_k: int) -> GpuKernel:
    """Return `sum_kernel` for products that are halves, in units of `half_stages.ROWS_BY`, and
    outputs that are a multiple of four; grid (outputs / 1,024, rows). Reads 2 * top_k bytes for
    each value, adds 4.
    """
    halves_of, added = _halves_of(top_k), _added(top_k)

    def add_halves(
        rows: int, products: int, shares: int, y: int, _top_k: int, outputs: int
    ) -> None:
        row = i64(block_y())
        column = _FOUR * (i64(block_x()) * _THREADS + thread_index())
        if row >= load_i64(rows) or column >= outputs:
            return
        choice, place = row * top_k, y + 4 * (outputs * row + column)
        found = halves_of(
            products + 2 * (outputs * choice + column), shares + 4 * choice, 2 * outputs
        )
        p, q, r, s = load_4xf32(place)
        zero = f32(0.0)
        a, b, c, d = added(found, zero, zero, zero, zero)
        store_4xi32(
            place, bits_of_f32(p + a), bits_of_f32(q + b), bits_of_f32(r + c), bits_of_f32(s + d)
        )

    return GpuKernel(f"warpgroup_sum_{top_k}", add_halves, _THREADS, _grid_of_fours)
