"""Add up the products of a row's experts on a card, for the rows of a prompt batch.

They are in the order of rows: only the products before go by expert. A thread takes a value.
"""

from __future__ import annotations

from functools import cache

from strata_nb.kernels.gpu.intrinsics import (
    block_x,
    block_y,
    f32,
    fma,
    i64,
    load_f32,
    load_i64,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid, blocks_of

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
