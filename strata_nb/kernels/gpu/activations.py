"""Quantise activations to bytes on a card: rows as `kernels/quantised_rows.py` lays them out.

A warp quantises a sub-block, each lane one of its 32 values. `quantise_sub_block` is for every
kernel whose result is wanted in this form as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    bits_of_f32,
    block_x,
    block_y,
    f32,
    f32_of_bits,
    i32,
    i64,
    load_f32,
    load_i64,
    nearest_i32,
    shuffle_xor_i32,
    store_f32,
    store_i8,
    store_i32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid, blocks_of, warp_max_i32
from strata_nb.kernels.quantised_rows import (
    HALF_SUMS,
    SCALES,
    SMALLEST,
    SUB_BLOCK_BYTES,
    SUMS,
)
from strata_nb.packing import SUB_BLOCK

_THREADS = 256
_WARPS = _THREADS // WARP

# Magnitudes are compared as their bits, where NaN > infinity > all others.
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_INFINITY = 0x7F800000
_NAN = 0x7FC00000


def quantise_sub_block(x: Any, lane: Any, target_row: Any, sub_blocks: Any, number: Any) -> None:
    """Quantise 32 values, one in each lane of a warp, as sub-block `number` of a row.

    x            float32: value 32 * number + lane of the row
    lane         0 .. 31, of the warp; all 32 take part
    target_row   address of the quantised row
    sub_blocks   how many it has
    """
    bits = warp_max_i32(i32(bits_of_f32(x) & _MAGNITUDE))
    magnitude = f32_of_bits(bits)
    scale = f32(0.0)
    quant = i32(0)
    if bits >= _INFINITY:
        scale = f32_of_bits(_NAN)
    elif magnitude >= f32(SMALLEST):
        scale = magnitude / f32(127.0)
        quant = nearest_i32(x * (f32(127.0) / magnitude))
    half = i32(quant + shuffle_xor_i32(quant, 8))
    half = i32(half + shuffle_xor_i32(half, 4))
    half = i32(half + shuffle_xor_i32(half, 2))
    half = i32(half + shuffle_xor_i32(half, 1))
    whole = i32(half + shuffle_xor_i32(half, 16))
    store_i8(target_row + SUB_BLOCK * number + lane, quant)
    if lane == 0:
        store_f32(target_row + SCALES * sub_blocks + 4 * number, scale)
        store_i32(target_row + SUMS * sub_blocks + 4 * number, whole)
    if lane & 15 == 0:
        store_i32(target_row + HALF_SUMS * sub_blocks + 8 * number + (lane >> 2), half)


def _quantise(rows: int, x: int, packed: int, times: int, values: int) -> None:
    row, sub_blocks = i64(block_y()), values >> 5
    number = i64(block_x()) * _WARPS + (thread_index() >> 5)
    if row >= load_i64(rows) * times or number >= sub_blocks:
        return
    lane = i64(thread_index() & 31)
    value = load_f32(x + 4 * (values * row + SUB_BLOCK * number + lane))
    target_row = packed + SUB_BLOCK_BYTES * sub_blocks * row
    quantise_sub_block(value, lane, target_row, sub_blocks, number)


def _grid(arguments: Arguments, most_rows: int) -> Grid:
    sub_blocks = arguments["values"] // SUB_BLOCK
    return blocks_of(sub_blocks, _WARPS), most_rows * arguments["times"], 1


@cache
def quantise_kernel() -> GpuKernel:
    """Return `quantise` of the table: a warp for each sub-block, a grid row for each row.

    Moves 4 bytes of x and 1.5 of the result for each value.
    """
    return GpuKernel("quantise", _quantise, _THREADS, _grid)
