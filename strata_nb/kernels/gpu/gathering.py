"""What surrounds the products of a batch's experts on a card: gates, and the sum of a row's.

Choices stay in the order of rows: only the products between go by expert. A thread takes a value.
"""

from __future__ import annotations

from functools import cache

from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.exponential import silu
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
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES

_THREADS = 256


def _gate(rows: int, inner: int, up: int, packed: int, outputs: int, top_k: int) -> None:
    first, thread = top_k * i64(block_y()), i64(thread_index())
    column = i64(block_x()) * _THREADS + thread
    choice = first
    if choice >= load_i64(rows) * top_k or column >= outputs:
        return
    sub_blocks = outputs >> 5
    while choice < first + top_k:
        place = 4 * (outputs * choice + column)
        value = silu(load_f32(inner + place)) * load_f32(up + place)
        store_f32(inner + place, value)
        # Of rows that are quantised the outputs are a multiple of 32: whole warps come here.
        if packed != 0:
            target = packed + SUB_BLOCK_BYTES * sub_blocks * choice
            quantise_sub_block(value, thread & 31, target, sub_blocks, column >> 5)
        choice += 1


def _gate_grid(arguments: Arguments, most_rows: int) -> Grid:
    return blocks_of(arguments["outputs"], _THREADS), most_rows, 1


@cache
def gate_kernel() -> GpuKernel:
    """Return the kernel (rows, inner, up, packed, outputs, top_k): inner = silu(inner) * up.

    inner, up float32 (rows * top_k, outputs); packed the same quantised, 0: not wanted. Reads 8
    bytes for each value, writes 4 and 1.5.
    """
    return GpuKernel("batch_gate", _gate, _THREADS, _gate_grid)


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
    return GpuKernel("batch_sum", _sum, _THREADS, _gate_grid)
