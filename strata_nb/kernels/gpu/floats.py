"""Read weights without blocks: F32, F16 and BF16, one value or eight at a time.

A row of such a type lies as in the file, so its values are aligned to no more than their own size,
unless the row is a multiple of eight of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    f32_of_bits,
    f32_of_half,
    fetch_4xf32,
    fetch_4xi32,
    fetch_f32,
    fetch_u16,
    i32,
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
