"""Unpack the grid types IQ1, IQ2 and IQ3: indices of points instead of quants.

The same contract as `weights.py`: a decoder unpacks the 32 values of one sub-block of one row. A
point has eight coordinates of a byte, or four (IQ3), and lies in a table that is part of the code.
Signs are a bit a value, set for minus.

The points of IQ1 have coordinates -1, 0 and 1, to which an eighth is added, or from which it is
taken. Their table has a nibble for each (coordinate + 1), which makes it a quarter of what the host
has; four coordinates become four bytes of eighths by a shift and an addition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    ConstantTable,
    f32,
    f32_of_half,
    f32_of_i32,
    fetch_2xi32,
    fetch_i32,
    fetch_u8,
    fetch_u16,
    i32,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.weights import Decoder, place_of
from strata_nb.packing import fields
from strata_nb.quants import iq_grids

T = TensorType
_BLOCK_SUB_BLOCKS = 8


def _table(name: str, points: NDArray[np.int8]) -> ConstantTable:
    """Return the points as words of four coordinates; one of eight has two words."""
    words = np.ascontiguousarray(points).reshape(-1, 4).view("<i4")
    return ConstantTable(name, tuple(words[:, 0].tolist()))


def _nibbles(points: NDArray[np.int8]) -> ConstantTable:
    """Return the points of IQ1, a word each: nibble 2 * i is that of coordinate i, 2 * i + 1 of
    i + 4."""
    numbers = (points + 1).astype(np.uint8)
    words = np.ascontiguousarray(numbers[:, :4] | numbers[:, 4:] << 4).view("<i4")
    return ConstantTable("iq1", tuple(words[:, 0].tolist()))


_IQ2_XXS = _table("iq2_xxs", iq_grids.IQ2_XXS)
_IQ2_XS = _table("iq2_xs", iq_grids.IQ2_XS)
_IQ2_S = _table("iq2_s", iq_grids.IQ2_S)
_IQ3_XXS = _table("iq3_xxs", iq_grids.IQ3_XXS)
IQ3_S_POINTS = _table("iq3_s", iq_grids.IQ3_S)
_IQ1 = _nibbles(iq_grids.IQ1)


# -- what the types share --------------------------------------------------------------------------


def _piece_place(kind: TensorType, name: str) -> Function:
    """Return a function (group, rows_in_group, row, sub_blocks, s): where a field's piece is."""
    field = fields(kind)[name]
    piece = place_of(field)
    shift = (_BLOCK_SUB_BLOCKS // field.pieces).bit_length() - 1  # sub-blocks that share a piece

    def place(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        return piece(group, rows_in_group, row, sub_blocks >> 3, s >> shift)

    return place


def _negated(coordinates: Any, signs: Any) -> Any:
    """Return four coordinates (none is 0), each negated where its one of the low four bits is set.

    The product puts bit i into bit 8 * i; what it puts elsewhere is masked out.
    """
    ones = (signs & 15) * 0x204081 & 0x01010101
    return i32((coordinates ^ ones * 255) + ones)


def _even_signs(code: Any) -> Any:
    """Add to a code of seven signs the eighth, which makes the number of minus signs even."""
    folded = (code ^ code >> 4) & 15
    return code | (0x6996 >> folded & 1) << 7  # bit n of 0x6996: whether n has an odd number of 1s


def _signed_point(table: ConstantTable) -> Function:
    """Return a function (index, signs): the two words of a point of eight, negated by a byte."""

    def point(index: Any, signs: Any) -> Any:
        low, high = table(2 * index), table(2 * index + 1)
        return _negated(low, signs), _negated(high, signs >> 4)

    return point


def _half_steps(scale: Any, steps: Any, unit: Any) -> Any:
    """Return scale * (steps + 1/2) * unit, in the decoder's order."""
    return scale * (f32_of_i32(steps) + f32(0.5)) * unit


def _odd_eighths(scale: Any, steps: Any) -> Any:
    """Return scale * (2 * steps + 1) / 8, in the decoder's order."""
    return scale * f32_of_i32(i32(2 * steps + 1)) * f32(0.125)


# -- IQ2 -------------------------------------------------------------------------------------------


def _iq2_xxs() -> Function:
    kind = T.IQ2_XXS
    words_place = _piece_place(kind, "grid_and_signs")
    scale_place = _piece_place(kind, "scale")
    point = _signed_point(_IQ2_XXS)

    def decode(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        indices, signs = fetch_2xi32(words_place(group, rows_in_group, row, sub_blocks, s))
        q0, q1 = point(indices & 255, _even_signs(signs & 127))
        q2, q3 = point(indices >> 8 & 255, _even_signs(signs >> 7 & 127))
        q4, q5 = point(indices >> 16 & 255, _even_signs(signs >> 14 & 127))
        q6, q7 = point(indices >> 24 & 255, _even_signs(signs >> 21 & 127))
        d = f32_of_half(fetch_u16(scale_place(group, rows_in_group, row, sub_blocks, s)))
        scale = _half_steps(d, i32(signs >> 28 & 15), f32(0.25))
        return q0, q1, q2, q3, q4, q5, q6, q7, scale, scale, f32(0.0), f32(0.0)

    return decode


def _iq2_xs() -> Function:
    kind = T.IQ2_XS
    words_place = _piece_place(kind, "grid_and_signs")
    scale_place, steps_place = _piece_place(kind, "scale"), _piece_place(kind, "group_scales")
    point = _signed_point(_IQ2_XS)

    def decode(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        first, second = fetch_2xi32(words_place(group, rows_in_group, row, sub_blocks, s))
        q0, q1 = point(first & 511, _even_signs(first >> 9 & 127))
        q2, q3 = point(first >> 16 & 511, _even_signs(first >> 25 & 127))
        q4, q5 = point(second & 511, _even_signs(second >> 9 & 127))
        q6, q7 = point(second >> 16 & 511, _even_signs(second >> 25 & 127))
        d = f32_of_half(fetch_u16(scale_place(group, rows_in_group, row, sub_blocks, s)))
        steps = fetch_u8(steps_place(group, rows_in_group, row, sub_blocks, s))
        low = _half_steps(d, i32(steps & 15), f32(0.25))
        high = _half_steps(d, i32(steps >> 4), f32(0.25))
        return q0, q1, q2, q3, q4, q5, q6, q7, low, high, f32(0.0), f32(0.0)

    return decode


def _iq2_s() -> Function:
    kind = T.IQ2_S
    low_place, high_place = _piece_place(kind, "grid_low"), _piece_place(kind, "grid_high")
    signs_place = _piece_place(kind, "signs")
    scale_place, steps_place = _piece_place(kind, "scale"), _piece_place(kind, "group_scales")
    point = _signed_point(_IQ2_S)

    def decode(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        indices = fetch_i32(low_place(group, rows_in_group, row, sub_blocks, s))
        above = fetch_u8(high_place(group, rows_in_group, row, sub_blocks, s))
        signs = fetch_i32(signs_place(group, rows_in_group, row, sub_blocks, s))
        q0, q1 = point(indices & 255 | (above & 3) << 8, signs)
        q2, q3 = point(indices >> 8 & 255 | (above & 12) << 6, signs >> 8)
        q4, q5 = point(indices >> 16 & 255 | (above & 48) << 4, signs >> 16)
        q6, q7 = point(indices >> 24 & 255 | (above & 192) << 2, signs >> 24)
        d = f32_of_half(fetch_u16(scale_place(group, rows_in_group, row, sub_blocks, s)))
        steps = fetch_u8(steps_place(group, rows_in_group, row, sub_blocks, s))
        low = _half_steps(d, i32(steps & 15), f32(0.25))
        high = _half_steps(d, i32(steps >> 4), f32(0.25))
        return q0, q1, q2, q3, q4, q5, q6, q7, low, high, f32(0.0), f32(0.0)

    return decode


# -- IQ3 -------------------------------------------------------------------------------------------


def _iq3_xxs() -> Function:
    kind = T.IQ3_XXS
    grid_place, signs_place = _piece_place(kind, "grid"), _piece_place(kind, "signs_and_scales")
    scale_place = _piece_place(kind, "scale")
    table = _IQ3_XXS

    def decode(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        first, second = fetch_2xi32(grid_place(group, rows_in_group, row, sub_blocks, s))
        word = fetch_i32(signs_place(group, rows_in_group, row, sub_blocks, s))
        signs_0, signs_1 = _even_signs(word & 127), _even_signs(word >> 7 & 127)
        signs_2, signs_3 = _even_signs(word >> 14 & 127), _even_signs(word >> 21 & 127)
        q0 = _negated(table(first & 255), signs_0)
        q1 = _negated(table(first >> 8 & 255), signs_0 >> 4)
        q2 = _negated(table(first >> 16 & 255), signs_1)
        q3 = _negated(table(first >> 24 & 255), signs_1 >> 4)
        q4 = _negated(table(second & 255), signs_2)
        q5 = _negated(table(second >> 8 & 255), signs_2 >> 4)
        q6 = _negated(table(second >> 16 & 255), signs_3)
        q7 = _negated(table(second >> 24 & 255), signs_3 >> 4)
        d = f32_of_half(fetch_u16(scale_place(group, rows_in_group, row, sub_blocks, s)))
        scale = _half_steps(d, i32(word >> 28 & 15), f32(0.5))
        return q0, q1, q2, q3, q4, q5, q6, q7, scale, scale, f32(0.0), f32(0.0)

    return decode


def _iq3_s() -> Function:
    kind = T.IQ3_S
    low_place, high_place = _piece_place(kind, "grid_low"), _piece_place(kind, "grid_high")
    signs_place = _piece_place(kind, "signs")
    scale_place, steps_place = _piece_place(kind, "scale"), _piece_place(kind, "group_scales")
    table = IQ3_S_POINTS

    def decode(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        first, second = fetch_2xi32(low_place(group, rows_in_group, row, sub_blocks, s))
        above = fetch_u8(high_place(group, rows_in_group, row, sub_blocks, s))
        signs = fetch_i32(signs_place(group, rows_in_group, row, sub_blocks, s))
        q0 = _negated(table(first & 255 | (above & 1) << 8), signs)
        q1 = _negated(table(first >> 8 & 255 | (above & 2) << 7), signs >> 4)
        q2 = _negated(table(first >> 16 & 255 | (above & 4) << 6), signs >> 8)
        q3 = _negated(table(first >> 24 & 255 | (above & 8) << 5), signs >> 12)
        q4 = _negated(table(second & 255 | (above & 16) << 4), signs >> 16)
        q5 = _negated(table(second >> 8 & 255 | (above & 32) << 3), signs >> 20)
        q6 = _negated(table(second >> 16 & 255 | (above & 64) << 2), signs >> 24)
        q7 = _negated(table(second >> 24 & 255 | (above & 128) << 1), signs >> 28)
        d = f32_of_half(fetch_u16(scale_place(group, rows_in_group, row, sub_blocks, s)))
        steps = fetch_i32(steps_place(group, rows_in_group, row, sub_blocks, s)) >> 4 * (s & 7)
        scale = d * f32_of_i32(i32(2 * (steps & 15) + 1))
        return q0, q1, q2, q3, q4, q5, q6, q7, scale, scale, f32(0.0), f32(0.0)

    return decode


# -- IQ1 -------------------------------------------------------------------------------------------


def _shifted_point(index: Any, down: Any) -> Any:
    """Return the two words of a point of IQ1 in eighths, an eighth higher or (down 1) lower.

    A coordinate c is 8 * (c + 1) - 8 +- 1; 128 is added for a while, so that no byte borrows.
    """
    numbers = _IQ1(index)
    shift = 0x79797979 - 0x02020202 * down
    low = ((numbers & 0x03030303) << 3) + shift
    high = ((numbers >> 1) & 0x18181818) + shift
    return i32(low ^ 0x80808080), i32(high ^ 0x80808080)


def _iq1_s() -> Function:
    kind = T.IQ1_S
    low_place, word_place = _piece_place(kind, "grid_low"), _piece_place(kind, "high_and_scales")
    scale_place = _piece_place(kind, "scale")

    def decode(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        indices = fetch_i32(low_place(group, rows_in_group, row, sub_blocks, s))
        word = fetch_u16(word_place(group, rows_in_group, row, sub_blocks, s))
        down = word >> 15
        q0, q1 = _shifted_point(indices & 255 | (word & 7) << 8, down)
        q2, q3 = _shifted_point(indices >> 8 & 255 | (word >> 3 & 7) << 8, down)
        q4, q5 = _shifted_point(indices >> 16 & 255 | (word >> 6 & 7) << 8, down)
        q6, q7 = _shifted_point(indices >> 24 & 255 | (word >> 9 & 7) << 8, down)
        d = f32_of_half(fetch_u16(scale_place(group, rows_in_group, row, sub_blocks, s)))
        scale = _odd_eighths(d, word >> 12 & 7)
        return q0, q1, q2, q3, q4, q5, q6, q7, scale, scale, f32(0.0), f32(0.0)

    return decode


def _iq1_m() -> Function:
    kind = T.IQ1_M
    low_place, high_place = _piece_place(kind, "grid_low"), _piece_place(kind, "grid_high")
    scales_place = _piece_place(kind, "scales")

    def decode(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        indices = fetch_i32(low_place(group, rows_in_group, row, sub_blocks, s))
        above = fetch_u16(high_place(group, rows_in_group, row, sub_blocks, s))
        q0, q1 = _shifted_point(indices & 255 | (above & 7) << 8, above >> 3 & 1)
        q2, q3 = _shifted_point(indices >> 8 & 255 | (above >> 4 & 7) << 8, above >> 7 & 1)
        q4, q5 = _shifted_point(indices >> 16 & 255 | (above >> 8 & 7) << 8, above >> 11 & 1)
        q6, q7 = _shifted_point(indices >> 24 & 255 | (above >> 12 & 7) << 8, above >> 15 & 1)
        # Four 16-bit words: their top nibbles are the float16 of the block, each has four scales.
        ab, cd = fetch_2xi32(scales_place(group, rows_in_group, row, sub_blocks, s))
        d = f32_of_half(
            i32((ab >> 12 & 15) | (ab >> 28 & 15) << 4 | (cd >> 12 & 15) << 8 | (cd >> 28) << 12)
        )
        pair = cd if s & 4 else ab
        steps = pair >> 16 * (s >> 1 & 1) + 6 * (s & 1)
        low, high = _odd_eighths(d, steps & 7), _odd_eighths(d, steps >> 3 & 7)
        return q0, q1, q2, q3, q4, q5, q6, q7, low, high, f32(0.0), f32(0.0)

    return decode


DECODERS: dict[TensorType, Decoder] = {
    T.IQ2_XXS: Decoder(_iq2_xxs()),
    T.IQ2_XS: Decoder(_iq2_xs(), halves=True),
    T.IQ2_S: Decoder(_iq2_s(), halves=True),
    T.IQ3_XXS: Decoder(_iq3_xxs()),
    T.IQ3_S: Decoder(_iq3_s()),
    T.IQ1_S: Decoder(_iq1_s()),
    T.IQ1_M: Decoder(_iq1_m(), halves=True),
}
