"""Multiply values by gates on a card: SwiGLU, and the gate of an expert that every row uses.

A thread takes one value; where the result is quantised, a warp takes a sub-block.
"""

from __future__ import annotations

from functools import cache

from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.exponential import sigmoid
from strata_nb.kernels.gpu.intrinsics import (
    block_x,
    block_y,
    i64,
    load_f32,
    load_i64,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import GpuKernel, blocks_of
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES

_THREADS = 256


def _silu_mul(rows: int, gate: int, up: int, out: int, packed: int, values: int) -> None:
    row, thread = i64(block_y()), i64(thread_index())
    column = i64(block_x()) * _THREADS + thread
    if row >= load_i64(rows) or column >= values:
        return
    place = 4 * (values * row + column)
    factor = load_f32(gate + place)
    value = factor * sigmoid(factor) * load_f32(up + place)
    if out != 0:
        store_f32(out + place, value)
    # Of rows that are quantised the values are a multiple of 32: whole warps come here.
    if packed != 0:
        sub_blocks = values >> 5
        packed_row = packed + SUB_BLOCK_BYTES * sub_blocks * row
        quantise_sub_block(value, thread & 31, packed_row, sub_blocks, column >> 5)


def _gated_add(rows: int, gate: int, x: int, y: int, width: int) -> None:
    row = i64(block_y())
    column = i64(block_x()) * _THREADS + thread_index()
    if row >= load_i64(rows) or column >= width:
        return
    place = 4 * (width * row + column)
    factor = sigmoid(load_f32(gate + 4 * row))
    store_f32(y + place, load_f32(y + place) + factor * load_f32(x + place))


@cache
def silu_mul_kernel() -> GpuKernel:
    """Return `silu_mul` of the table. Reads 8 bytes for each value, writes 4 and 1.5."""
    return GpuKernel(
        "silu_mul",
        _silu_mul,
        _THREADS,
        lambda arguments, most_rows: (blocks_of(arguments["values"], _THREADS), most_rows, 1),
    )


@cache
def gated_add_kernel() -> GpuKernel:
    """Return `gated_add` of the table. Reads 8 bytes for each value, writes 4."""
    return GpuKernel(
        "gated_add",
        _gated_add,
        _THREADS,
        lambda arguments, most_rows: (blocks_of(arguments["width"], _THREADS), most_rows, 1),
    )
