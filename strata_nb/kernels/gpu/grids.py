"""Unpack the grid types IQ1, IQ2 and IQ3: indices of points instead of quants.

The same contract as `weights.py`. A point has eight coordinates of a byte, or four (IQ3), and lies
in a table. Signs are a bit a value, set for minus. What costs time is looking up and turning signs,
so each family has its own way, which takes few instructions:

    IQ2    Coordinates are three levels. A word numbers the eight of a point, a nibble each: a sign
           is one more bit of the nibble, and an instruction that permutes bytes looks up four.
    IQ3_S  Coordinates are odd. q ^ 255 is -q - 1, even, so a bit makes it -q.
    IQ3_XXS  Coordinates are bytes that are negated as any.
    IQ1    Coordinates are -1, 0 and 1, to which an eighth is added, or from which it is taken. A
           word numbers the eight of a point (coordinate + 1), a nibble each; four become four bytes
           of eighths by a shift and an addition.

The tables of IQ2 and IQ3 are in shared memory, where the lanes of a warp look up different words in
few cycles: a kernel puts the one of its type there (`tables.py`). Those of IQ1 are larger than
what a block reads of its weights, and stay a part of the code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    ConstantTable,
    bytes_by_nibbles,
    f32,
    f32_of_half,
    f32_of_i32,
    high_bytes_in_turn,
    i32,
    load_2xi32,
    load_i32,
    load_u8,
    load_u16,
    low_bytes_in_turn,
    odd_bytes,
    shared_load_i32,
    sign_bytes,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.weights import Decoder, place_of
from strata_nb.packing import fields
from strata_nb.quants import iq_grids

T = TensorType
_BLOCK_SUB_BLOCKS = 8
_ONES = 0x01010101


def _words(name: str, points: NDArray[np.int8]) -> ConstantTable:
    """Return points of four coordinates, a word each."""
    words = np.ascontiguousarray(points).view("<i4")
    return ConstantTable(name, tuple(words[:, 0].tolist()))


def _nibbles(name: str, numbers: NDArray[Any], places: tuple[int, ...]) -> ConstantTable:
    """Return points of eight coordinates, a word each: number i of a point is nibble places[i]."""
    shifted = numbers.astype(np.uint32) << 4 * np.array(places, np.uint32)
    words = np.bitwise_or.reduce(shifted, axis=1).view(np.int32)
    return ConstantTable(name, tuple(words.tolist()))


def _levels(name: str, points: NDArray[np.int8]) -> ConstantTable:
    """Return the points of an IQ2, by the numbers of their levels."""
    return _nibbles(name, np.searchsorted(_LEVELS, points), (0, 1, 2, 3, 4, 5, 6, 7))


_LEVELS = np.array([8, 25, 43, 0], np.int8)  # of IQ2; the last makes a word full
_PLUS, _MINUS = (int(one.view("<i4")[0]) for one in (_LEVELS, -_LEVELS))
_IQ2_XXS = _levels("iq2_xxs", iq_grids.IQ2_XXS)
_IQ2_XS = _levels("iq2_xs", iq_grids.IQ2_XS)
_IQ2_S = _levels("iq2_s", iq_grids.IQ2_S)
_IQ3_XXS = _words("iq3_xxs", iq_grids.IQ3_XXS)
IQ3_S_POINTS = _words("iq3_s", iq_grids.IQ3_S)
_IQ1 = _nibbles("iq1", iq_grids.IQ1 + 1, (0, 2, 4, 6, 1, 3, 5, 7))


# -- what the types share --------------------------------------------------------------------------


def _piece_place(kind: TensorType, name: str) -> Function:
    """Return a function (group, rows_in_group, row, sub_blocks, s): where a field's piece is."""
    field = fields(kind)[name]
    piece = place_of(field)
    shift = (_BLOCK_SUB_BLOCKS // field.pieces).bit_length() - 1  # sub-blocks that share a piece

    def place(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        return piece(group, rows_in_group, row, sub_blocks >> 3, s >> shift)

    return place


def _offsets(pair: int) -> Any:
    """Return where the words are, in a table, that the lower and the upper 16 bits number."""
    bytes_of = i32(pair << 2)
    return bytes_of & 0xFFFF, bytes_of >> 16


def _spread(bits: Any) -> Any:
    """Return a word that has bit i of four in bit 8 * i.

    The product puts it there; what it puts elsewhere is masked out.
    """
    return i32(bits * 0x204081 & _ONES)


def _signs_of(codes: int) -> Any:
    """Return 32 signs, a byte for each of four bytes of seven: the eighth makes the number of minus
    signs even."""
    folded = codes ^ codes >> 4
    folded ^= folded >> 2
    folded ^= folded >> 1
    return i32(codes | (folded & _ONES) << 7)


def _sevens(word: int) -> Any:
    """Return four numbers of seven bits as bytes."""
    low = word & 0x7F | word << 1 & 0x7F00
    return i32(low | word << 2 & 0x7F0000 | word << 3 & 0x7F000000)


def _half_steps(scale: Any, steps: Any, unit: Any) -> Any:
    """Return scale * (steps + 1/2) * unit, in the decoder's order."""
    return scale * (f32_of_i32(steps) + f32(0.5)) * unit


def _odd_eighths(scale: Any, steps: Any) -> Any:
    """Return scale * (2 * steps + 1) / 8, in the decoder's order."""
    return scale * f32_of_i32(i32(2 * steps + 1)) * f32(0.125)


# -- IQ2 -------------------------------------------------------------------------------------------


def _eight(place: int, signs: int) -> Any:
    """Return the two words of a point at a place of shared memory, negated by a byte of signs.

    Products part signs in fours, in twos, and one by one, into bit 2 of their nibbles.
    """
    pairs = (signs * 0x1001 & 0x000F000F) * 0x41 & 0x03030303
    numbers = i32(shared_load_i32(place) ^ pairs * 0x24 & 0x44444444)
    low = bytes_by_nibbles(_PLUS, _MINUS, numbers)
    return low, bytes_by_nibbles(_PLUS, _MINUS, i32(numbers >> 16))


def _points_of_eight(offsets: Any, signs: int, table: int) -> Any:
    """Return the eight words of four points, by their offsets in the table and 32 signs."""
    a, b, c, d = offsets
    return (
        *_eight(table + a, signs & 255),
        *_eight(table + b, signs >> 8 & 255),
        *_eight(table + c, signs >> 16 & 255),
        *_eight(table + d, signs >> 24 & 255),
    )


def _two_steps(scale: int, steps: int) -> Any:
    """Return the scales of the lower and the upper half of a sub-block, and no minima."""
    d = f32_of_half(scale)
    low = _half_steps(d, i32(steps & 15), f32(0.25))
    return low, _half_steps(d, i32(steps >> 4), f32(0.25)), f32(0.0), f32(0.0)


def _iq2_xxs() -> Decoder:
    words_place = _piece_place(T.IQ2_XXS, "grid_and_signs")
    scale_place = _piece_place(T.IQ2_XXS, "scale")

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        words = load_2xi32(words_place(group, rows_in_group, row, sub_blocks, s))
        return *words, load_u16(scale_place(group, rows_in_group, row, sub_blocks, s))

    def unpack(words: Any, table: int) -> Any:
        points, codes, d = words
        offsets = (points << 2 & 1020, points >> 6 & 1020, points >> 14 & 1020, points >> 22 & 1020)
        quants = _points_of_eight(offsets, _signs_of(_sevens(codes)), table)
        scale = _half_steps(f32_of_half(d), i32(codes >> 28 & 15), f32(0.25))
        return *quants, scale, scale, f32(0.0), f32(0.0)

    return Decoder(read, unpack, table=_IQ2_XXS)


def _iq2_xs() -> Decoder:
    words_place = _piece_place(T.IQ2_XS, "grid_and_signs")
    scale_place = _piece_place(T.IQ2_XS, "scale")
    steps_place = _piece_place(T.IQ2_XS, "group_scales")

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        words = load_2xi32(words_place(group, rows_in_group, row, sub_blocks, s))
        scale = load_u16(scale_place(group, rows_in_group, row, sub_blocks, s))
        return *words, scale, load_u8(steps_place(group, rows_in_group, row, sub_blocks, s))

    def unpack(words: Any, table: int) -> Any:
        first, second, scale, steps = words
        # A point is numbered by nine bits of sixteen, its signs are in the others.
        offsets = (*_offsets(i32(first & 0x01FF01FF)), *_offsets(i32(second & 0x01FF01FF)))
        signs = _signs_of(i32(odd_bytes(first, second) >> 1 & 0x7F7F7F7F))
        return *_points_of_eight(offsets, signs, table), *_two_steps(scale, steps)

    return Decoder(read, unpack, halves=True, table=_IQ2_XS)


def _iq2_s() -> Decoder:
    low_place = _piece_place(T.IQ2_S, "grid_low")
    high_place = _piece_place(T.IQ2_S, "grid_high")
    signs_place = _piece_place(T.IQ2_S, "signs")
    scale_place = _piece_place(T.IQ2_S, "scale")
    steps_place = _piece_place(T.IQ2_S, "group_scales")

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        return (
            load_i32(low_place(group, rows_in_group, row, sub_blocks, s)),
            load_u8(high_place(group, rows_in_group, row, sub_blocks, s)),
            load_i32(signs_place(group, rows_in_group, row, sub_blocks, s)),
            load_u16(scale_place(group, rows_in_group, row, sub_blocks, s)),
            load_u8(steps_place(group, rows_in_group, row, sub_blocks, s)),
        )

    def unpack(words: Any, table: int) -> Any:
        low, high, signs, scale, steps = words
        # Two bits for each point: of the first and the third, of the others, a byte each.
        above = (high & 0x33) * 0x1001 & 0x00030003 | (high & 0xCC) * 0x40040 & 0x03000300
        above = i32(above)
        first, second = low_bytes_in_turn(low, above), high_bytes_in_turn(low, above)
        quants = _points_of_eight((*_offsets(first), *_offsets(second)), signs, table)
        return *quants, *_two_steps(scale, steps)

    return Decoder(read, unpack, halves=True, table=_IQ2_S)


# -- IQ3 -------------------------------------------------------------------------------------------


def _negated(place: int, signs: int) -> Any:
    """Return the four coordinates at a place of shared memory (none is 0), each negated where its
    one of the low four bits is set."""
    ones = _spread(signs & 15)
    return i32((shared_load_i32(place) ^ ones * 255) + ones)


def _iq3_xxs() -> Decoder:
    grid_place = _piece_place(T.IQ3_XXS, "grid")
    signs_place = _piece_place(T.IQ3_XXS, "signs_and_scales")
    scale_place = _piece_place(T.IQ3_XXS, "scale")

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        points = load_2xi32(grid_place(group, rows_in_group, row, sub_blocks, s))
        codes = load_i32(signs_place(group, rows_in_group, row, sub_blocks, s))
        return *points, codes, load_u16(scale_place(group, rows_in_group, row, sub_blocks, s))

    def unpack(words: Any, table: int) -> Any:
        first, second, codes, d = words
        signs = _signs_of(_sevens(codes))
        scale = _half_steps(f32_of_half(d), i32(codes >> 28 & 15), f32(0.5))
        return (
            _negated(table + (first << 2 & 1020), signs),
            _negated(table + (first >> 6 & 1020), i32(signs >> 4)),
            _negated(table + (first >> 14 & 1020), i32(signs >> 8)),
            _negated(table + (first >> 22 & 1020), i32(signs >> 12)),
            _negated(table + (second << 2 & 1020), i32(signs >> 16)),
            _negated(table + (second >> 6 & 1020), i32(signs >> 20)),
            _negated(table + (second >> 14 & 1020), i32(signs >> 24)),
            _negated(table + (second >> 22 & 1020), i32(signs >> 28)),
            scale,
            scale,
            f32(0.0),
            f32(0.0),
        )

    return Decoder(read, unpack, table=_IQ3_XXS)


def _odd(place: int, signs: int) -> Any:
    """Return the four odd coordinates at a place of shared memory, negated where the byte of
    `signs` is below 0."""
    return i32((shared_load_i32(place) ^ sign_bytes(signs)) | _ONES)


def _eight_odd(numbers: int, above: int, signs: int, table: int) -> Any:
    """Return four words of coordinates: numbers are bytes, with a ninth bit each in `above`; signs
    are the low sixteen bits.

    Products put sign i of four into the highest bit of byte i, from either half of a byte.
    """
    a, b = _offsets(low_bytes_in_turn(numbers, above))
    c, d = _offsets(high_bytes_in_turn(numbers, above))
    upper = signs >> 8
    return (
        _odd(table + a, i32((signs & 15) * 0x10204080)),
        _odd(table + b, i32((signs & 240) * 0x01020408)),
        _odd(table + c, i32((upper & 15) * 0x10204080)),
        _odd(table + d, i32((upper & 240) * 0x01020408)),
    )


def iq3_s_quants(first: int, second: int, above: int, signs: int, table: int) -> Any:
    """Return the eight words of quants of a sub-block of IQ3_S, by its words and byte `above`."""
    lower = _eight_odd(first, _spread(above & 15), signs, table)
    return *lower, *_eight_odd(second, _spread(above >> 4), i32(signs >> 16), table)


def _iq3_s() -> Decoder:
    low_place = _piece_place(T.IQ3_S, "grid_low")
    high_place = _piece_place(T.IQ3_S, "grid_high")
    signs_place = _piece_place(T.IQ3_S, "signs")
    scale_place = _piece_place(T.IQ3_S, "scale")
    steps_place = _piece_place(T.IQ3_S, "group_scales")

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        steps = load_i32(steps_place(group, rows_in_group, row, sub_blocks, s)) & 0xFFFFFFFF
        return (
            *load_2xi32(low_place(group, rows_in_group, row, sub_blocks, s)),
            load_u8(high_place(group, rows_in_group, row, sub_blocks, s)),
            load_i32(signs_place(group, rows_in_group, row, sub_blocks, s)),
            load_u16(scale_place(group, rows_in_group, row, sub_blocks, s)),
            i32(steps >> 4 * (s & 7)),
        )

    def unpack(words: Any, table: int) -> Any:
        first, second, above, signs, d, steps = words
        quants = iq3_s_quants(first, second, above, signs, table)
        scale = f32_of_half(d) * f32_of_i32(i32(2 * (steps & 15) + 1))
        return *quants, scale, scale, f32(0.0), f32(0.0)

    return Decoder(read, unpack, table=IQ3_S_POINTS)


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


def _iq1_s() -> Decoder:
    kind = T.IQ1_S
    low_place, word_place = _piece_place(kind, "grid_low"), _piece_place(kind, "high_and_scales")
    scale_place = _piece_place(kind, "scale")

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        return (
            load_i32(low_place(group, rows_in_group, row, sub_blocks, s)),
            load_u16(word_place(group, rows_in_group, row, sub_blocks, s)),
            load_u16(scale_place(group, rows_in_group, row, sub_blocks, s)),
        )

    def unpack(words: Any, _table: int) -> Any:
        indices, word, d = words
        down = word >> 15
        q0, q1 = _shifted_point(indices & 255 | (word & 7) << 8, down)
        q2, q3 = _shifted_point(indices >> 8 & 255 | (word >> 3 & 7) << 8, down)
        q4, q5 = _shifted_point(indices >> 16 & 255 | (word >> 6 & 7) << 8, down)
        q6, q7 = _shifted_point(indices >> 24 & 255 | (word >> 9 & 7) << 8, down)
        scale = _odd_eighths(f32_of_half(d), word >> 12 & 7)
        return q0, q1, q2, q3, q4, q5, q6, q7, scale, scale, f32(0.0), f32(0.0)

    return Decoder(read, unpack)


def _iq1_m() -> Decoder:
    kind = T.IQ1_M
    low_place, high_place = _piece_place(kind, "grid_low"), _piece_place(kind, "grid_high")
    scales_place = _piece_place(kind, "scales")

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        return (
            load_i32(low_place(group, rows_in_group, row, sub_blocks, s)),
            load_u16(high_place(group, rows_in_group, row, sub_blocks, s)),
            *load_2xi32(scales_place(group, rows_in_group, row, sub_blocks, s)),
            i32(s),
        )

    def unpack(words: Any, _table: int) -> Any:
        indices, above, ab, cd, s = words
        q0, q1 = _shifted_point(indices & 255 | (above & 7) << 8, above >> 3 & 1)
        q2, q3 = _shifted_point(indices >> 8 & 255 | (above >> 4 & 7) << 8, above >> 7 & 1)
        q4, q5 = _shifted_point(indices >> 16 & 255 | (above >> 8 & 7) << 8, above >> 11 & 1)
        q6, q7 = _shifted_point(indices >> 24 & 255 | (above >> 12 & 7) << 8, above >> 15 & 1)
        # Four 16-bit words: their top nibbles are the float16 of the block, each has four scales.
        d = f32_of_half(
            i32((ab >> 12 & 15) | (ab >> 28 & 15) << 4 | (cd >> 12 & 15) << 8 | (cd >> 28) << 12)
        )
        pair = cd if s & 4 else ab
        steps = pair >> 16 * (s >> 1 & 1) + 6 * (s & 1)
        low, high = _odd_eighths(d, steps & 7), _odd_eighths(d, steps >> 3 & 7)
        return q0, q1, q2, q3, q4, q5, q6, q7, low, high, f32(0.0), f32(0.0)

    return Decoder(read, unpack, halves=True)


DECODERS: dict[TensorType, Decoder] = {
    T.IQ2_XXS: _iq2_xxs(),
    T.IQ2_XS: _iq2_xs(),
    T.IQ2_S: _iq2_s(),
    T.IQ3_XXS: _iq3_xxs(),
    T.IQ3_S: _iq3_s(),
    T.IQ1_S: _iq1_s(),
    T.IQ1_M: _iq1_m(),
}
