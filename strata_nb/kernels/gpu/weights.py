"""Decode sub-blocks of packed rows (`packing.py`): what GPU kernels know of each quantised type.

A lane reads one sub-block of one row, 32 values, in the loads that the packed layout makes wide:
every piece of a field begins at a multiple of its own width, in a last group of fewer rows as well.
A type is described by a `Decoder`, which has two device functions

    read(group, rows_in_group, row, sub_blocks, s) -> words
    unpack(words, table) -> q0, .. q7, scale_low, scale_high, minimum_low, minimum_high

    group           address of a group; a multiple of 16, in MXFP4 of 8
    rows_in_group   8, or what the tensor's last group has
    row             of the group
    sub_blocks      of a row
    s               which of them
    table           where the type's table is in shared memory, if it has one (`tables.py`)

What `read` returns is all that is needed of memory, as it is there. Word q_w holds quants 4 * w ..
4 * w + 3, signed bytes in the order of the values. The others are floats, low for values 0 to 15,
high for 16 to 31:

    value i = scale * (quant i - offset) - minimum

rounded after each step, that is to the bit what `formats.dequantise` gives. The offset is left out
of the quants because a product needs it once for all 32: it has the sum of what they meet.

Decoding is written in shifts and masks of 32-bit words: Python's literals make them 64 bits wide,
which LLVM takes back because nothing but the lower half is used.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    ConstantTable,
    f32,
    f32_of_bits,
    f32_of_half,
    f32_of_i32,
    i32,
    levels_of,
    load_2xi32,
    load_4xi32,
    load_i32,
    load_u8,
    load_u16,
    shifted_down,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.packing import Field, fields
from strata_nb.quants.decoders import FP4_LEVELS, IQ4_LEVELS

T = TensorType


class Decoder(NamedTuple):
    """Say how a type's sub-blocks are read.

    read     see the head of this file
    unpack   see the head of this file
    offset   what is taken off every quant
    halves   whether the first 16 and the last 16 values differ in scale or minimum
    minima   whether there are minima; without them `unpack` returns zeros in their place
    table    what `unpack` looks up in shared memory
    """

    read: Function
    unpack: Function
    offset: int = 0
    halves: bool = False
    minima: bool = False
    table: ConstantTable | None = None


def place_of(field: Field) -> Function:
    """Return a device function: the address of a piece of a row, by its number in that row.

    place(group, rows_in_group, row, blocks, number); blocks are those of a row.
    """
    before, width = field.before, field.width

    def place(group: int, rows_in_group: int, row: int, blocks: int, number: int) -> int:
        # A group is smaller than 2 GiB: 32 bits are half the instructions of 64.
        offset: int = i32(before * blocks * rows_in_group + (number * rows_in_group + row) * width)
        return group + offset

    return place


def places(kind: TensorType) -> list[Function]:
    """Return `place_of` each field of a type, in their order."""
    return [place_of(field) for field in fields(kind).values()]


# -- bits to bytes ---------------------------------------------------------------------------------


def _nibbles(words: Any) -> Any:
    """Return the eight words of quants that four words of 4 bits a value hold."""
    a, b, c, d = words
    return (
        a & 0x0F0F0F0F,
        b & 0x0F0F0F0F,
        c & 0x0F0F0F0F,
        d & 0x0F0F0F0F,
        a >> 4 & 0x0F0F0F0F,
        b >> 4 & 0x0F0F0F0F,
        c >> 4 & 0x0F0F0F0F,
        d >> 4 & 0x0F0F0F0F,
    )


def _pairs(words: Any) -> Any:
    """Return the eight words of quants that two words of 2 bits a value hold."""
    a, b = words
    return (
        a & 0x03030303,
        b & 0x03030303,
        a >> 2 & 0x03030303,
        b >> 2 & 0x03030303,
        a >> 4 & 0x03030303,
        b >> 4 & 0x03030303,
        a >> 6 & 0x03030303,
        b >> 6 & 0x03030303,
    )


def _joined(low: Any, high: Any, bits: int) -> Any:
    """Return eight words: `low`, with the bytes of `high` above their lowest `bits` bits."""
    a, b, c, d, e, f, g, h = low
    s, t, u, v, w, x, y, z = high
    return (
        a | s << bits,
        b | t << bits,
        c | u << bits,
        d | v << bits,
        e | w << bits,
        f | x << bits,
        g | y << bits,
        h | z << bits,
    )


def _singles(word: Any) -> Any:
    """Return eight words of bytes 0 or 1 from a word of 1 bit a value."""
    return (
        word & 0x01010101,
        word >> 1 & 0x01010101,
        word >> 2 & 0x01010101,
        word >> 3 & 0x01010101,
        word >> 4 & 0x01010101,
        word >> 5 & 0x01010101,
        word >> 6 & 0x01010101,
        word >> 7 & 0x01010101,
    )


def _no_minima() -> Any:
    return f32(0.0), f32(0.0)


# -- one scale for 32 values -----------------------------------------------------------------------


def _q4_0() -> Decoder:
    quants, scales = places(T.Q4_0)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        words = load_4xi32(quants(group, rows_in_group, row, sub_blocks, s))
        return *words, load_u16(scales(group, rows_in_group, row, sub_blocks, s))

    def unpack(words: Any, _table: int) -> Any:
        scale = f32_of_half(words[4])
        return *_nibbles(words[:4]), scale, scale, *_no_minima()

    return Decoder(read, unpack, 8)


def _q4_1() -> Decoder:
    quants, bounds = places(T.Q4_1)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        words = load_4xi32(quants(group, rows_in_group, row, sub_blocks, s))
        return *words, load_i32(bounds(group, rows_in_group, row, sub_blocks, s))

    def unpack(words: Any, _table: int) -> Any:
        scale, minimum = _two_halves(words[4])
        return *_nibbles(words[:4]), scale, scale, -minimum, -minimum

    return Decoder(read, unpack, minima=True)


def _q5_0() -> Decoder:
    low, high, scales = places(T.Q5_0)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        return (
            *load_4xi32(low(group, rows_in_group, row, sub_blocks, s)),
            load_i32(high(group, rows_in_group, row, sub_blocks, s)),
            load_u16(scales(group, rows_in_group, row, sub_blocks, s)),
        )

    def unpack(words: Any, _table: int) -> Any:
        scale = f32_of_half(words[5])
        return *_fives(words), scale, scale, *_no_minima()

    return Decoder(read, unpack, 16)


def _q5_1() -> Decoder:
    low, high, bounds = places(T.Q5_1)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        return (
            *load_4xi32(low(group, rows_in_group, row, sub_blocks, s)),
            load_i32(high(group, rows_in_group, row, sub_blocks, s)),
            load_i32(bounds(group, rows_in_group, row, sub_blocks, s)),
        )

    def unpack(words: Any, _table: int) -> Any:
        scale, minimum = _two_halves(words[5])
        return *_fives(words), scale, scale, -minimum, -minimum

    return Decoder(read, unpack, minima=True)


def _q8_0() -> Decoder:
    quants, scales = places(T.Q8_0)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        return (
            *load_4xi32(quants(group, rows_in_group, row, sub_blocks, 2 * s)),
            *load_4xi32(quants(group, rows_in_group, row, sub_blocks, 2 * s + 1)),
            load_u16(scales(group, rows_in_group, row, sub_blocks, s)),
        )

    def unpack(words: Any, _table: int) -> Any:
        scale = f32_of_half(words[8])
        return *words[:8], scale, scale, *_no_minima()

    return Decoder(read, unpack)


# -- blocks of 256 values --------------------------------------------------------------------------


def _q2_k() -> Decoder:
    quants, steps, bounds = places(T.Q2_K)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        blocks, block = sub_blocks >> 3, s >> 3
        return (
            *load_2xi32(quants(group, rows_in_group, row, blocks, s)),
            load_u16(steps(group, rows_in_group, row, blocks, s)),
            load_i32(bounds(group, rows_in_group, row, blocks, block)),
        )

    def unpack(words: Any, _table: int) -> Any:
        step = words[2]
        scale, minimum = _two_halves(words[3])
        return (
            *_pairs(words[:2]),
            scale * f32_of_i32(step & 15),
            scale * f32_of_i32(step >> 8 & 15),
            minimum * f32_of_i32(step >> 4 & 15),
            minimum * f32_of_i32(step >> 12 & 15),
        )

    return Decoder(read, unpack, halves=True, minima=True)


def _q3_k() -> Decoder:
    low, high, steps, scales = places(T.Q3_K)
    read_steps = _read_steps(steps)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        blocks, block = sub_blocks >> 3, s >> 3
        return (
            *load_2xi32(low(group, rows_in_group, row, blocks, s)),
            load_i32(high(group, rows_in_group, row, blocks, s)),
            load_u16(scales(group, rows_in_group, row, blocks, block)),
            *read_steps(group, rows_in_group, row, blocks, s),
        )

    def unpack(words: Any, _table: int) -> Any:
        scale = f32_of_half(words[3])
        one, other = _six_bits(words[4:])
        return (
            *_joined(_pairs(words[:2]), _singles(words[2]), 2),
            scale * f32_of_i32(one - 32),
            scale * f32_of_i32(other - 32),
            *_no_minima(),
        )

    return Decoder(read, unpack, 4, halves=True)


def _q4_k() -> Decoder:
    quants, steps, bounds = places(T.Q4_K)
    read_steps = _read_steps(steps)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        blocks, block = sub_blocks >> 3, s >> 3
        return (
            *load_4xi32(quants(group, rows_in_group, row, blocks, s)),
            load_i32(bounds(group, rows_in_group, row, blocks, block)),
            *read_steps(group, rows_in_group, row, blocks, s),
        )

    def unpack(words: Any, _table: int) -> Any:
        scale, minimum = _two_steps(words[4], words[5:])
        return *_nibbles(words[:4]), scale, scale, minimum, minimum

    return Decoder(read, unpack, minima=True)


def _q5_k() -> Decoder:
    low, high, steps, bounds = places(T.Q5_K)
    read_steps = _read_steps(steps)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        blocks, block = sub_blocks >> 3, s >> 3
        return (
            *load_4xi32(low(group, rows_in_group, row, blocks, s)),
            load_i32(high(group, rows_in_group, row, blocks, s)),
            load_i32(bounds(group, rows_in_group, row, blocks, block)),
            *read_steps(group, rows_in_group, row, blocks, s),
        )

    def unpack(words: Any, _table: int) -> Any:
        scale, minimum = _two_steps(words[5], words[6:])
        return *_fives(words), scale, scale, minimum, minimum

    return Decoder(read, unpack, minima=True)


def _q6_k() -> Decoder:
    low, high, steps, scales = places(T.Q6_K)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        blocks = sub_blocks >> 3
        return (
            *load_4xi32(low(group, rows_in_group, row, blocks, s)),
            *load_2xi32(high(group, rows_in_group, row, blocks, s)),
            load_u16(steps(group, rows_in_group, row, blocks, s)),
            load_u16(scales(group, rows_in_group, row, blocks, s >> 3)),
        )

    def unpack(words: Any, _table: int) -> Any:
        step, scale = words[6], f32_of_half(words[7])
        return (
            *_joined(_nibbles(words[:4]), _pairs(words[4:6]), 4),
            scale * f32_of_i32(i32(step << 24) >> 24),
            scale * f32_of_i32(i32(step << 16) >> 24),
            *_no_minima(),
        )

    return Decoder(read, unpack, 32, halves=True)


def _two_halves(word: int) -> Any:
    """Return the lower and the upper 16 bits of a word, each a half, as floats."""
    return f32_of_half(word), f32_of_half(word >> 16)


def _fives(words: Any) -> Any:
    """Return the eight words of quants that four words of 4 bits a value and one of 1 bit hold."""
    return _joined(_nibbles(words[:4]), _singles(words[4]), 4)


def _read_steps(words: Function) -> Function:
    """Return a device function that loads what `_six_bits` takes of sub-block s.

    words   the address of one of the three words of each block that hold group scales
    """

    def read(group: int, rows_in_group: int, row: int, blocks: int, s: int) -> Any:
        first = 3 * (s >> 3)
        return (
            load_i32(words(group, rows_in_group, row, blocks, first)),
            load_i32(words(group, rows_in_group, row, blocks, first + 1)),
            load_i32(words(group, rows_in_group, row, blocks, first + 2)),
            i32(s & 7),
        )

    return read


def _six_bits(words: Any) -> Any:
    """Return the pair of group scales of a sub-block, of six bits each, as `_read_steps` found
    them."""
    a, b, high, inner = words
    four, two = i32(4 * inner), i32(2 * inner)
    one = shifted_down(a, four) & 15 | (shifted_down(high, two) & 3) << 4
    other = shifted_down(b, four) & 15 | (shifted_down(high, i32(16 + two)) & 3) << 4
    return one, other


def _two_steps(bounds: int, words: Any) -> Any:
    """Return scale and minimum of a sub-block of Q4_K or Q5_K."""
    scale, minimum = _two_halves(bounds)
    one, other = _six_bits(words)
    return scale * f32_of_i32(one), minimum * f32_of_i32(other)


# -- 4-bit quants that number sixteen levels -------------------------------------------------------


def _levels(levels: tuple[int, ...]) -> Function:
    """Return a device function: the eight words of levels that four words of 4 bits number."""
    t, u, v, w = struct.unpack("<4i", struct.pack("16b", *levels))

    def look_up(words: Any) -> Any:
        a, b, c, d = words
        a_low, a_high = levels_of(a, t, u, v, w)
        b_low, b_high = levels_of(b, t, u, v, w)
        c_low, c_high = levels_of(c, t, u, v, w)
        d_low, d_high = levels_of(d, t, u, v, w)
        return a_low, b_low, c_low, d_low, a_high, b_high, c_high, d_high

    return look_up


def _iq4_nl() -> Decoder:
    quants, scales = places(T.IQ4_NL)
    look_up = _levels(IQ4_LEVELS)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        words = load_4xi32(quants(group, rows_in_group, row, sub_blocks, s))
        return *words, load_u16(scales(group, rows_in_group, row, sub_blocks, s))

    def unpack(words: Any, _table: int) -> Any:
        scale = f32_of_half(words[4])
        return *look_up(words[:4]), scale, scale, *_no_minima()

    return Decoder(read, unpack)


def _iq4_xs() -> Decoder:
    quants, steps_low, steps_high, scales = places(T.IQ4_XS)
    look_up = _levels(IQ4_LEVELS)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        blocks, block = sub_blocks >> 3, s >> 3
        return (
            *load_4xi32(quants(group, rows_in_group, row, blocks, s)),
            load_i32(steps_low(group, rows_in_group, row, blocks, block)),
            load_u16(steps_high(group, rows_in_group, row, blocks, block)),
            load_u16(scales(group, rows_in_group, row, blocks, block)),
            i32(s & 7),
        )

    def unpack(words: Any, _table: int) -> Any:
        low, high, d, inner = words[4:]
        four, two = shifted_down(low, i32(4 * inner)), shifted_down(high, i32(2 * inner))
        steps = (four & 15 | (two & 3) << 4) - 32
        scale = f32_of_half(d) * f32_of_i32(steps)
        return *look_up(words[:4]), scale, scale, *_no_minima()

    return Decoder(read, unpack)


def _mxfp4() -> Decoder:
    quants, exponents = places(T.MXFP4)
    look_up = _levels(FP4_LEVELS)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, s: int) -> Any:
        # Eight bytes at a time: with an odd number of sub-blocks every other group begins there.
        place = quants(group, rows_in_group, row, sub_blocks, s)
        exponent = load_u8(exponents(group, rows_in_group, row, sub_blocks, s))
        return *load_2xi32(place), *load_2xi32(place + 8), exponent

    def unpack(words: Any, _table: int) -> Any:
        scale = _half_power(words[4])
        return *look_up(words[:4]), scale, scale, *_no_minima()

    return Decoder(read, unpack)


def _half_power(exponent: int) -> Any:
    """Return 2 ** (exponent - 128), exponent 0 .. 255: halved, because the levels are doubled."""
    return f32_of_bits(exponent - 1 << 23 if exponent > 1 else 1 << 21 + exponent)


DECODERS: dict[TensorType, Decoder] = {
    T.Q4_0: _q4_0(),
    T.Q4_1: _q4_1(),
    T.Q5_0: _q5_0(),
    T.Q5_1: _q5_1(),
    T.Q8_0: _q8_0(),
    T.Q2_K: _q2_k(),
    T.Q3_K: _q3_k(),
    T.Q4_K: _q4_k(),
    T.Q5_K: _q5_k(),
    T.Q6_K: _q6_k(),
    T.IQ4_NL: _iq4_nl(),
    T.IQ4_XS: _iq4_xs(),
    T.MXFP4: _mxfp4(),
}
