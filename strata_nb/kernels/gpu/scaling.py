"""Scale the products that tensor cores make of sub-blocks, and add them up as a window does.

`tiles.py` multiplies and scales in two ways, and so does this, with the same roundings:

    by itself   each sub-block has a scale and perhaps a minimum, or each of its halves has:
                `products.sub_block_dot`
    in pairs    the two sub-blocks of a lane have integer scales, by which products are multiplied
                exactly, and share a float (Q4_K, Q5_K, Q6_K, IQ4_XS, IQ3_S)

An integer sum begins as the bits of 1.5 * 2 ** 23 (`BEYOND`): what comes out, read as a float, is
that much larger than the sum, and a subtraction takes the place of a conversion, which takes cards
longer. Times a small integer it is exact, and so is the difference: one fma does both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    f32,
    f32_of_bits,
    f32_of_half,
    f32_of_i32,
    fma,
    i32,
    load_i32,
    load_u16,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.products import decoder_of
from strata_nb.kernels.gpu.weights import place_of
from strata_nb.packing import fields

T = TensorType

BEYOND = 0x4B400000  # the bits of 1.5 * 2 ** 23
_SHIFT = 12_582_912.0  # that number


class Scaling(NamedTuple):
    """Say how the products of a type are scaled.

    halves       whether the first 16 and the last 16 values are multiplied apart
    in_pairs     see the head of this file
    of_weights   floats that a sub-block of an output needs, 1, 2 or 4; 0 where `record` is None
    of_rows      floats of a row's: 1 (its scale), 2 (and the sum of its quants, in pairs times the
                 scale), 4 (and the sums of their halves, and nothing)
    record       (found, group, rows_in_group, row, sub_blocks, s) -> the floats of an output; found
                 is what `Decoder.unpack` returned. None where `fragments.py` has them
    add          (total, low, high, record, row) -> total and a product; low and high are the bits
                 of its sums, of halves where they are apart. In pairs the four come twice
    """

    halves: bool
    in_pairs: bool
    of_weights: int
    of_rows: int
    record: Function | None
    add: Function


@cache
def scaling_of(kind: TensorType) -> Scaling:
    """Return how products of a type are scaled; ValueError for one without kernels on a card."""
    return _IN_PAIRS[kind](kind) if kind in _IN_PAIRS else _by_itself(kind)


def _by_itself(kind: TensorType) -> Scaling:
    form = decoder_of(kind)
    halves, minima = form.halves, form.minima

    def record(
        found: Any, _group: int, _rows_in_group: int, _row: int, _sub_blocks: int, _s: int
    ) -> Any:
        if halves and minima:
            return found[8:]
        if halves:
            return found[8:10]
        return (found[8], found[10]) if minima else (found[8],)

    def exact(bits: Any) -> Any:
        return f32_of_bits(bits) - f32(_SHIFT)

    def add(total: Any, low: Any, high: Any, record: Any, row: Any) -> Any:
        product = record[0] * exact(low)
        if halves:
            product = fma(record[1], exact(high), product)
            if minima:
                product = fma(-record[2], row[1], product)
                product = fma(-record[3], row[2], product)
        elif minima:
            product = fma(-record[1], row[1], product)
        return fma(product, row[0], total)

    of_rows = (4 if halves else 2) if minima else 1
    return Scaling(halves, False, (1 + halves) * (1 + minima), of_rows, record, add)


# -- in pairs --------------------------------------------------------------------------------------


def _times(bits: Any, step: Any) -> Any:
    """Return a sum times a small integer, both exact."""
    return fma(f32_of_bits(bits), step, f32(-_SHIFT) * step)


def _with_minima(_: TensorType) -> Scaling:
    """Of Q4_K and Q5_K: records are the scale's six bits, the minimum, the scale's half; those of
    rows a scale and the sum of the quants times it."""

    def add(
        total: Any,
        low: Any,
        _high: Any,
        record: Any,
        row: Any,
        other_low: Any,
        _other_high: Any,
        other: Any,
        other_row: Any,
    ) -> Any:
        product = _times(low, record[0]) * row[0]
        product = fma(_times(other_low, other[0]), other_row[0], product)
        total = fma(record[2], product, total)
        total = fma(-record[1], row[1], total)
        return fma(-other[1], other_row[1], total)

    return Scaling(False, True, 0, 2, None, add)


def _of_halves(_: TensorType) -> Scaling:
    """Of Q6_K: records are the scales of the halves, signed bytes, and their half."""

    def add(
        total: Any,
        low: Any,
        high: Any,
        record: Any,
        row: Any,
        other_low: Any,
        other_high: Any,
        other: Any,
        other_row: Any,
    ) -> Any:
        first = _times(low, record[0]) + _times(high, record[1])
        second = _times(other_low, other[0]) + _times(other_high, other[1])
        product = fma(second, other_row[0], first * row[0])
        return fma(record[2], product, total)

    return Scaling(True, True, 0, 1, None, add)


def _of_points(kind: TensorType) -> Scaling:
    """Of IQ4_XS and IQ3_S: records are an integer scale and its half."""
    scale_at = place_of(fields(kind)["scale"])
    is_iq3 = kind is T.IQ3_S
    names = ("group_scales", "group_scales") if is_iq3 else ("scales_low", "scales_high")
    low_at, high_at = (place_of(fields(kind)[name]) for name in names)

    def record(
        _found: Any, group: int, rows_in_group: int, row: int, sub_blocks: int, s: int
    ) -> Any:
        blocks, block, inner = sub_blocks >> 3, s >> 3, s & 7
        step = load_i32(low_at(group, rows_in_group, row, blocks, block)) >> 4 * inner & 15
        if is_iq3:
            step = 2 * step + 1
        else:
            two = load_u16(high_at(group, rows_in_group, row, blocks, block)) >> 2 * inner & 3
            step = (step | two << 4) - 32
        scale = f32_of_half(load_u16(scale_at(group, rows_in_group, row, blocks, block)))
        return f32_of_i32(i32(step)), scale

    def add(
        total: Any,
        low: Any,
        _high: Any,
        record: Any,
        row: Any,
        other_low: Any,
        _other_high: Any,
        other: Any,
        other_row: Any,
    ) -> Any:
        product = _times(low, record[0]) * row[0]
        product = fma(_times(other_low, other[0]), other_row[0], product)
        return fma(record[1], product, total)

    return Scaling(False, True, 2, 1, record, add)


_IN_PAIRS: dict[TensorType, Callable[[TensorType], Scaling]] = {
    T.Q4_K: _with_minima,
    T.Q5_K: _with_minima,
    T.Q6_K: _of_halves,
    T.IQ4_XS: _of_points,
    T.IQ3_S: _of_points,
}
