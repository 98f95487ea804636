"""Quantise activations to bytes: what a product with packed weights reads.

Each 32 values of a row share a float32 scale, their largest magnitude over 127. A quantised row is
one run of memory (`row_bytes`), S sub-blocks of 32 values each:

    32 * S bytes    the quants, int8, -127 .. 127
     4 * S bytes    the scales, float32
     4 * S bytes    the sum of the quants of each sub-block, int32
     8 * S bytes    the sums of its two halves, int32

The sums take a constant out of a product: sum((w - c) * x) = sum(w * x) - c * sum(x).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strata_nb.compiling import compiled, inlined
from strata_nb.packing import SUB_BLOCK
from strata_nb.raw_memory import load_f32, load_u32, store

_SMALLEST = np.float32(2.0**-100)  # below it 127 / magnitude overflows; the values count as 0
_INFINITE = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_HALF = SUB_BLOCK // 2


def row_bytes(values: int) -> int:
    """Return the bytes of a quantised row."""
    return values + values // SUB_BLOCK * 16


@inlined
def _round(place: int, quants: int, inverse: float) -> Any:
    """Write 16 values, times `inverse`, as bytes; return their sum."""
    total = np.int32(0)
    for i in range(_HALF):
        rounded = np.int32(np.rint(load_f32(place + 4 * i) * inverse))
        store(quants + i, np.int8(rounded))
        total += rounded
    return total


@compiled("void(int64,int64,int64,int64,int64)")
def quantise_rows(source: int, target: int, values: int, first: int, last: int) -> None:
    """Quantise rows first .. last - 1 of float32 (rows, values) to rows of `row_bytes`.

    A sub-block with a value that is not finite gets the scale NaN, so that every product with it
    shows the fault. Rounding is to nearest, ties to even.
    """
    sub_blocks = values // SUB_BLOCK
    for row in range(first, last):
        target_row = target + row * (values + sub_blocks * 16)
        for number in range(sub_blocks):
            place = source + (row * values + number * SUB_BLOCK) * 4
            quants = target_row + number * SUB_BLOCK
            scale_place = target_row + values + 4 * number
            bits = np.uint32(0)  # of the largest magnitude; as integers NaN > infinity > the rest
            for i in range(SUB_BLOCK):
                bits = max(bits, np.uint32(load_u32(place + 4 * i) & _MAGNITUDE))
            store(scale_place, bits)
            largest = load_f32(scale_place)
            scale, inverse = np.float32(0), np.float32(0)
            if bits >= _INFINITE:
                scale = np.float32(np.nan)
            elif largest >= _SMALLEST:
                scale = largest / np.float32(127)
                inverse = np.float32(127) / largest
            first_sum, second_sum = np.int32(0), np.int32(0)
            if inverse > 0:
                first_sum = _round(place, quants, inverse)
                second_sum = _round(place + 4 * _HALF, quants + _HALF, inverse)
            else:
                for i in range(SUB_BLOCK):
                    store(quants + i, np.int8(0))
            store(scale_place, scale)
            store(scale_place + 4 * sub_blocks, np.int32(first_sum + second_sum))
            halves = target_row + values + 8 * sub_blocks + 8 * number
            store(halves, np.int32(first_sum))
            store(halves + 4, np.int32(second_sum))
