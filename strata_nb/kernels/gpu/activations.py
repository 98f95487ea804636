"""Quantise activations to bytes on a card: rows as `kernels/quantised_rows.py` lays them out.

Four lanes quantise a sub-block, each eight of its 32 values. `quantise_sub_block` and
`quantise_quarter` are for every kernel whose result is wanted in this form as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    bits_of_f32,
    block_x,
    block_y,
    f32,
    f32_of_bits,
    i32,
    i64,
    load_4xf32,
    load_i64,
    nearest_i32,
    shuffle_xor_i32,
    store_2xi32,
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
_QUARTERED = _THREADS // 4  # sub-blocks of a block of threads

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
    # As `_scale_of` has it; written out, norms of wide rows fit their registers on old cards.
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


def _scale_of(bits: Any) -> Any:
    """Return the scale of a sub-block whose largest magnitude has these bits, and what turns its
    values into quants; without quants 0."""
    magnitude = f32_of_bits(bits)
    if bits >= _INFINITY:
        return f32_of_bits(_NAN), f32(0.0)
    if magnitude >= f32(SMALLEST):
        return magnitude / f32(127.0), f32(127.0) / magnitude
    return f32(0.0), f32(0.0)


def _largest(x: Any) -> Any:
    a, b, c, d = x
    ab = max(i32(bits_of_f32(a) & _MAGNITUDE), i32(bits_of_f32(b) & _MAGNITUDE))
    return max(ab, max(i32(bits_of_f32(c) & _MAGNITUDE), i32(bits_of_f32(d) & _MAGNITUDE)))


def _four_quants(x: Any, factor: Any) -> Any:
    """Return the word of four quants, and their sum."""
    if factor == f32(0.0):
        return i32(0), i32(0)
    a, b, c, d = x
    a, b = nearest_i32(a * factor), nearest_i32(b * factor)
    c, d = nearest_i32(c * factor), nearest_i32(d * factor)
    word = i32(a & 255 | (b & 255) << 8 | (c & 255) << 16 | d << 24)
    return word, i32(i32(a + b) + i32(c + d))


def quantise_quarter(
    x: Any, lane: Any, target_row: Any, sub_blocks: Any, number: Any, is_wanted: Any
) -> None:
    """Quantise what four lanes have of a sub-block each, as `quantise_sub_block` does it.

    x           eight float32: values 32 * number + 8 * (lane % 4) .. of the row
    lane        0 .. 31, of the warp; all 32 take part
    is_wanted   whether anything is written, the same in these four
    """
    bits = max(_largest(x[:4]), _largest(x[4:]))
    bits = max(bits, shuffle_xor_i32(bits, 1))
    bits = max(bits, shuffle_xor_i32(bits, 2))
    scale, factor = _scale_of(bits)
    (first, one_sum), (second, other_sum) = _four_quants(x[:4], factor), _four_quants(x[4:], factor)
    half = i32(one_sum + other_sum)
    half = i32(half + shuffle_xor_i32(half, 1))
    whole = i32(half + shuffle_xor_i32(half, 2))
    quarter = lane & 3
    if is_wanted:
        place = target_row + SUB_BLOCK * number + 8 * quarter
        store_2xi32(place, first, second)
        if quarter == 0:
            store_f32(target_row + SCALES * sub_blocks + 4 * number, scale)
            store_i32(target_row + SUMS * sub_blocks + 4 * number, whole)
        if quarter & 1 == 0:
            store_i32(target_row + HALF_SUMS * sub_blocks + 8 * number + 2 * quarter, half)


def _quantise(rows: int, x: int, packed: int, times: int, values: int) -> None:
    row, sub_blocks = i64(block_y()), values >> 5
    thread = i64(thread_index())
    number = i64(block_x()) * _QUARTERED + (thread >> 2)
    if row >= load_i64(rows) * times:
        return
    is_wanted = number < sub_blocks
    number = min(number, sub_blocks - 1)
    place = x + 4 * (values * row + SUB_BLOCK * number + 8 * (thread & 3))
    eight = *load_4xf32(place), *load_4xf32(place + 16)
    target_row = packed + SUB_BLOCK_BYTES * sub_blocks * row
    quantise_quarter(eight, thread & 31, target_row, sub_blocks, number, is_wanted)


def _grid(arguments: Arguments, most_rows: int) -> Grid:
    sub_blocks = arguments["values"] // SUB_BLOCK
    return blocks_of(sub_blocks, _QUARTERED), most_rows * arguments["times"], 1


@cache
def quantise_kernel() -> GpuKernel:
    """Return `quantise` of the table: four lanes for each sub-block, a grid row for each row.

    Moves 4 bytes of x and 1.5 of the result for each value.
    """
    return GpuKernel("quantise", _quantise, _THREADS, _grid)
