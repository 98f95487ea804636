"""Read and multiply by weights without blocks, F32, F16 and BF16: a value or eight at a time.

A row of such a type lies as in the file, so its values are aligned to no more than their own size,
unless the row is a multiple of eight of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    f32,
    f32_of_bits,
    f32_of_half,
    fetch_4xf32,
    fetch_4xi32,
    fetch_f32,
    fetch_u16,
    fma,
    i32,
    load_4xf32,
    load_f32,
)
from strata_nb.kernels.gpu.operations import Function

EIGHT = 8  # values that `FloatReader.eight` reads


class FloatReader(NamedTuple):
    """Hold device functions that read a type as float32.

    size_bytes   of a value
    one          of the address of a value: that value
    eight        of the address of eight, a multiple of 16: a tuple of them
    """

    size_bytes: int
    one: Function
    eight: Function


def _eight_f32(place: int) -> Any:
    return *fetch_4xf32(place), *fetch_4xf32(place + 16)


def _one_f16(place: int) -> Any:
    return f32_of_half(fetch_u16(place))


def _eight_f16(place: int) -> Any:
    a, b, c, d = fetch_4xi32(place)
    return (
        f32_of_half(a),
        f32_of_half(a >> 16),
        f32_of_half(b),
        f32_of_half(b >> 16),
        f32_of_half(c),
        f32_of_half(c >> 16),
        f32_of_half(d),
        f32_of_half(d >> 16),
    )


def _one_bf16(place: int) -> Any:
    """BF16 is the upper half of a float32."""
    return f32_of_bits(i32(fetch_u16(place) << 16))


def _eight_bf16(place: int) -> Any:
    a, b, c, d = fetch_4xi32(place)
    return (
        f32_of_bits(i32(a << 16)),
        f32_of_bits(a & -65536),
        f32_of_bits(i32(b << 16)),
        f32_of_bits(b & -65536),
        f32_of_bits(i32(c << 16)),
        f32_of_bits(c & -65536),
        f32_of_bits(i32(d << 16)),
        f32_of_bits(d & -65536),
    )


FLOATS: dict[TensorType, FloatReader] = {
    TensorType.F32: FloatReader(4, fetch_f32, _eight_f32),
    TensorType.F16: FloatReader(2, _one_f16, _eight_f16),
    TensorType.BF16: FloatReader(2, _one_bf16, _eight_bf16),
}


@cache
def lane_product(kind: TensorType, in_eights: bool) -> Function:
    """Return a device function: what a lane of a warp has of a product of two rows.

    product(weights, x, values, lane) -> float. With rows of whole eights lane l takes the values
    8 * l .. + 7 of each 256, else value l of each 32.
    """
    size, one, eight = FLOATS[kind]

    def by_eights(weights: int, x: int, values: int, lane: int) -> Any:
        total, value = f32(0.0), EIGHT * lane
        while value < values:
            a, b, c, d, e, f, g, h = eight(weights + size * value)
            xa, xb, xc, xd = load_4xf32(x + 4 * value)
            xe, xf, xg, xh = load_4xf32(x + 4 * value + 16)
            total = fma(d, xd, fma(c, xc, fma(b, xb, fma(a, xa, total))))
            total = fma(h, xh, fma(g, xg, fma(f, xf, fma(e, xe, total))))
            value += EIGHT * WARP
        return total

    def by_ones(weights: int, x: int, values: int, lane: int) -> Any:
        total, value = f32(0.0), lane
        while value < values:
            total = fma(one(weights + size * value), load_f32(x + 4 * value), total)
            value += WARP
        return total

    return by_eights if in_eights else by_ones
