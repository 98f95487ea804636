"""Unpack packed weights in registers: what a sub-block of eight rows is, as vectors.

For each type two functions, which become part of the kernels (`matmul.py`):

    quants(group, sub_blocks, s)   the 32 values of sub-block s of eight rows as unsigned bytes:
                                   (rows 0-3, values 0-15), (rows 0-3, values 16-31),
                                   (rows 4-7, values 0-15), (rows 4-7, values 16-31)
    scales(group, sub_blocks, step) the scales, and the minima where the type has them, of a step

`group` is the address of a group of eight rows, `sub_blocks` how many a row has. A *step* covers
two *units*, a unit the values that share a scale: a step is two sub-blocks (unit 32), or the two
halves of one (unit 16). Scales come in the order of a kernel's lanes, `_lane_order`.

    weight = scale * (quant - 2 ** bias) - minimum

A bias makes signed quants unsigned, as the product of bytes wants them. The grid types
(`grids.py`) follow the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from strata_nb.compiling import inlined
from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.host.instructions import floats_of_halves, look_up
from strata_nb.kernels.host.vectors import (
    INTEGERS,
    Vector,
    as_bytes,
    constant,
    floats_of,
    join,
    load_bytes,
    loader,
    recast,
    shuffler,
    widen_signed,
    widen_unsigned,
)
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, fields
from strata_nb.quants import decoders

Function = Callable[..., Any]


class Arithmetic(NamedTuple):
    """What a product with a type needs to know beside its quants and scales.

    unit          values that share a scale: 32, or 16
    bias          the exponent of two of what was added to the quants; None for nothing
    narrow        whether quants stay below 128
    has_minima    whether `scales` returns (scales, minima to subtract) or scales alone
    whole_steps   whether a row always holds whole steps
    """

    unit: int
    bias: int | None
    narrow: bool
    has_minima: bool
    whole_steps: bool


class HostWeights(NamedTuple):
    """How the kernels read a type; `last_scales` is for a step without its second sub-block."""

    arithmetic: Arithmetic
    quants: Function
    scales: Function
    last_scales: Function


def start_factor(kind: TensorType, name: str) -> int:
    """Return what, times the sub-blocks of a row, is the offset of a field in its group."""
    per_block = block_layout(kind).values // SUB_BLOCK
    return fields(kind)[name].before * GROUP_ROWS // per_block


def _lane_order(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return which element goes to each of the 16 lanes.

    first, second   element of each of the eight rows for the first and the second unit
    Lanes 4r .. 4r + 3 are: row r first unit, row r second, row r + 4 first, row r + 4 second.
    """
    return [unit[row] for low in range(4) for row in (low, low + 4) for unit in (first, second)]


_ROWS = range(8)
in_lanes = shuffler(_lane_order(_ROWS, range(8, 16)))  # of [unit][row]
halves_in_lanes = shuffler(_lane_order(range(0, 16, 2), range(1, 16, 2)))  # of [row][unit]
rows_in_lanes = shuffler(_lane_order(_ROWS, _ROWS))  # of [row], the same for both units
_first_of_pairs = shuffler(_lane_order(range(0, 16, 2), range(16, 32, 2)))  # of [unit][row][2]
_second_of_pairs = shuffler(_lane_order(range(1, 16, 2), range(17, 32, 2)))
_first_of_row = shuffler(_lane_order(range(0, 16, 2), range(0, 16, 2)))  # of [row][2]
_second_of_row = shuffler(_lane_order(range(1, 16, 2), range(1, 16, 2)))

_load_8_halves = loader(Vector("u16", 8))
_load_16_halves = loader(Vector("u16", 16))
_load_32_halves = loader(Vector("u16", 32))
_load_8_words = loader(Vector("i32", 8))
_load_4_words = loader(Vector("i32", 4))
_load_4_long = loader(Vector("u64", 4))
load_16_bytes = loader(Vector("u8", 16))
_load_8_bytes = loader(Vector("u8", 8))
_no_halves = constant(Vector("u16", 8), [0] * 8)
_no_halves_16 = constant(Vector("u16", 16), [0] * 16)
_no_bytes = constant(Vector("u8", 8), [0] * 8)
_as_floats = recast(Vector("f32", 16))


# -- quants ----------------------------------------------------------------------------------------


def _nibbles(kind: TensorType, name: str) -> Function:
    factor = start_factor(kind, name)

    @inlined
    def quants(group: int, sub_blocks: int, s: int) -> Any:
        place = group + factor * sub_blocks + 128 * s
        upper, lower = load_bytes(place), load_bytes(place + 64)
        return upper & 15, upper >> 4, lower & 15, lower >> 4

    return quants


_each_four_times = shuffler([lane // 4 for lane in range(16)])
_to_bit_4_left = constant(INTEGERS, [4, 3, 2, 1] * 4)
_by_word = constant(INTEGERS, [0, 1, 2, 3] * 4)
_by_word_and_4 = constant(INTEGERS, [4, 5, 6, 7] * 4)


@inlined
def _fifth_bits(place: int) -> Any:
    """Return bit 4 of the quants of four rows (4 bytes each): values 0-15, 16-31."""
    words = _each_four_times(_load_4_words(place))
    return (
        as_bytes(words << _to_bit_4_left()) & 16,
        as_bytes(words >> _by_word()) & 16,
    )


@inlined
def _third_bits(place: int) -> Any:
    """Return bit 2 of the quants of four rows (4 bytes each): values 0-15, 16-31."""
    words = _each_four_times(_load_4_words(place))
    return (
        (as_bytes(words >> _by_word()) & 1) << 2,
        (as_bytes(words >> _by_word_and_4()) & 1) << 2,
    )


_each_twice = shuffler([lane // 2 for lane in range(8)])
_LONG = Vector("u64", 8)
_to_bits_4_left = constant(_LONG, [4, 2] * 4)
_by_long = constant(_LONG, [0, 2] * 4)
_by_long_and_4 = constant(_LONG, [4, 6] * 4)


@inlined
def _two_bits(place: int) -> Any:
    """Return the lowest two bits of the quants of four rows (8 bytes each)."""
    words = _each_twice(_load_4_long(place))
    return as_bytes(words >> _by_long()) & 3, as_bytes(words >> _by_long_and_4()) & 3


@inlined
def _fifth_and_sixth_bits(place: int) -> Any:
    """Return bits 4 and 5 of the quants of four rows (8 bytes each)."""
    words = _each_twice(_load_4_long(place))
    return as_bytes(words << _to_bits_4_left()) & 48, as_bytes(words >> _by_long()) & 48


def _with_high(kind: TensorType, low: Function, row_bytes: int, high: Function) -> Function:
    """Return quants whose low bits one function finds and whose high bits another, by four rows."""
    factor = start_factor(kind, "high")

    @inlined
    def quants(group: int, sub_blocks: int, s: int) -> Any:
        a, b, c, d = low(group, sub_blocks, s)
        place = group + factor * sub_blocks + 8 * row_bytes * s
        high_a, high_b = high(place)
        high_c, high_d = high(place + 4 * row_bytes)
        return a | high_a, b | high_b, c | high_c, d | high_d

    return quants


def _crumbs(kind: TensorType, name: str) -> Function:
    factor = start_factor(kind, name)

    @inlined
    def quants(group: int, sub_blocks: int, s: int) -> Any:
        place = group + factor * sub_blocks + 64 * s
        a, b = _two_bits(place)
        c, d = _two_bits(place + 32)
        return a, b, c, d

    return quants


def _whole_bytes() -> Function:
    @inlined
    def quants(group: int, _: int, s: int) -> Any:
        place = group + 256 * s
        return (
            load_bytes(place) ^ 128,
            load_bytes(place + 128) ^ 128,
            load_bytes(place + 64) ^ 128,
            load_bytes(place + 192) ^ 128,
        )

    return quants


def _levels(nibbles: Function, levels: Sequence[int], bias: int) -> Function:
    """Return the levels that nibbles number, with 2 ** bias added."""
    replace = look_up([level + (1 << bias) for level in levels])

    @inlined
    def quants(group: int, sub_blocks: int, s: int) -> Any:
        a, b, c, d = nibbles(group, sub_blocks, s)
        return replace(a), replace(b), replace(c), replace(d)

    return quants


# -- scales ----------------------------------------------------------------------------------------


def _half_scales(kind: TensorType) -> tuple[Function, Function]:
    factor = start_factor(kind, "scale")

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        return floats_of_halves(in_lanes(_load_16_halves(group + factor * sub_blocks + 32 * step)))

    @inlined
    def last(group: int, sub_blocks: int, step: int) -> Any:
        found = _load_8_halves(group + factor * sub_blocks + 32 * step)
        return floats_of_halves(in_lanes(join(found, _no_halves())))

    return scales, last


_NEGATE = 1 << 15


def _half_scales_and_minima(kind: TensorType) -> tuple[Function, Function]:
    """Return the scales of Q4_1 and Q5_1, whose minimum is added."""
    factor = start_factor(kind, "scale+minimum")

    @inlined
    def split(found: Any) -> Any:
        negated = _second_of_pairs(found) ^ _NEGATE
        return floats_of_halves(_first_of_pairs(found)), floats_of_halves(negated)

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        return split(_load_32_halves(group + factor * sub_blocks + 64 * step))

    @inlined
    def last(group: int, sub_blocks: int, step: int) -> Any:
        found = _load_16_halves(group + factor * sub_blocks + 64 * step)
        return split(join(found, _no_halves_16()))

    return scales, last


def block_scale(kind: TensorType) -> Function:
    """Return a function (group, sub_blocks, block) for the float16 scales of eight blocks."""
    factor = start_factor(kind, "scale")

    @inlined
    def scale(group: int, sub_blocks: int, block: int) -> Any:
        found = _load_8_halves(group + factor * sub_blocks + 16 * block)
        return floats_of_halves(rows_in_lanes(found))

    return scale


def _block_scale_and_minimum(kind: TensorType) -> Function:
    factor = start_factor(kind, "scale+minimum")

    @inlined
    def pair(group: int, sub_blocks: int, block: int) -> Any:
        found = _load_16_halves(group + factor * sub_blocks + 32 * block)
        return floats_of_halves(_first_of_row(found)), floats_of_halves(_second_of_row(found))

    return pair


_nibble_of_unit = constant(INTEGERS, [0, 4] * 8)
_high_of_unit = constant(INTEGERS, [0, 2] * 8)
_high_of_half = constant(INTEGERS, [0, 16] * 8)


def _six_bit_scales_and_minima(kind: TensorType) -> Function:
    """Return the scales and minima of Q4_K and Q5_K; a step is two of eight sub-blocks."""
    factor = start_factor(kind, "group_scales")
    of_block = _block_scale_and_minimum(kind)

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        block, quarter = step >> 2, step & 3
        place = group + factor * sub_blocks + 96 * block
        high = rows_in_lanes(_load_8_words(place + 64)) >> (_high_of_unit() + 4 * quarter)
        nibble = _nibble_of_unit() + 8 * quarter
        steps = (rows_in_lanes(_load_8_words(place)) >> nibble) & 15 | (high & 3) << 4
        minima = (rows_in_lanes(_load_8_words(place + 32)) >> nibble) & 15 | (high >> 12) & 48
        scale, minimum = of_block(group, sub_blocks, block)
        return scale * floats_of(steps), minimum * floats_of(minima)

    return scales


def _six_bit_scales(kind: TensorType) -> Function:
    """Return the scales of Q3_K; a step is one sub-block, its units are halves."""
    factor = start_factor(kind, "group_scales")
    of_block = block_scale(kind)

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        block, number = step >> 3, step & 7
        place = group + factor * sub_blocks + 96 * block
        low = in_lanes(join(_load_8_words(place), _load_8_words(place + 32))) >> 4 * number
        high = rows_in_lanes(_load_8_words(place + 64)) >> (_high_of_half() + 2 * number)
        steps = (low & 15 | (high & 3) << 4) - 32
        return of_block(group, sub_blocks, block) * floats_of(steps)

    return scales


def _byte_scales(kind: TensorType) -> Function:
    """Return the scales of Q6_K: a signed byte for each half of a sub-block."""
    factor = start_factor(kind, "group_scales")
    of_block = block_scale(kind)

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        steps = widen_signed(
            halves_in_lanes(load_16_bytes(group + factor * sub_blocks + 16 * step))
        )
        return of_block(group, sub_blocks, step >> 3) * floats_of(steps)

    return scales


def _nibble_scales_and_minima(kind: TensorType) -> Function:
    """Return the scales and minima of Q2_K: the nibbles of a byte for each half of a sub-block."""
    factor = start_factor(kind, "group_scales")
    of_block = _block_scale_and_minimum(kind)

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        found = halves_in_lanes(load_16_bytes(group + factor * sub_blocks + 16 * step))
        both = widen_unsigned(found)
        scale, minimum = of_block(group, sub_blocks, step >> 3)
        return scale * floats_of(both & 15), minimum * floats_of(both >> 4)

    return scales


def _two_part_scales(kind: TensorType) -> Function:
    """Return the scales of IQ4_XS: four bits in one field, two in another."""
    low_factor, high_factor = start_factor(kind, "scales_low"), start_factor(kind, "scales_high")
    of_block = block_scale(kind)

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        block, quarter = step >> 2, step & 3
        low = rows_in_lanes(_load_8_words(group + low_factor * sub_blocks + 32 * block))
        found = _load_8_halves(group + high_factor * sub_blocks + 16 * block)
        high = rows_in_lanes(widen_unsigned(found)) >> (_high_of_unit() + 4 * quarter)
        steps = ((low >> (_nibble_of_unit() + 8 * quarter)) & 15 | (high & 3) << 4) - 32
        return of_block(group, sub_blocks, block) * floats_of(steps)

    return scales


def _powers_of_two(kind: TensorType) -> tuple[Function, Function]:
    """Return the scales of MXFP4, 2 ** (exponent - 128), which may be subnormal.

    They are made of two factors of about half the exponent, because no float32 has a mantissa of
    one at an exponent of -128 or less.
    """
    factor = start_factor(kind, "exponent")

    @inlined
    def power(found: Any) -> Any:
        exponents = widen_unsigned(in_lanes(found))
        half = exponents >> 1
        return _as_floats((half + 63) << 23) * _as_floats((exponents - half + 63) << 23)

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        return power(load_16_bytes(group + factor * sub_blocks + 16 * step))

    @inlined
    def last(group: int, sub_blocks: int, step: int) -> Any:
        return power(join(_load_8_bytes(group + factor * sub_blocks + 16 * step), _no_bytes()))

    return scales, last


# -- the types -------------------------------------------------------------------------------------


def _of_32(kind: TensorType, bias: int, quants: Function) -> HostWeights:
    """Return a type whose blocks have 32 values and a scale."""
    scales = _powers_of_two(kind) if kind is TensorType.MXFP4 else _half_scales(kind)
    return HostWeights(Arithmetic(32, bias, bias != 7, False, False), quants, *scales)


def _of_32_with_minimum(kind: TensorType, quants: Function) -> HostWeights:
    scales = _half_scales_and_minima(kind)
    return HostWeights(Arithmetic(32, None, True, True, False), quants, *scales)


def of_block(unit: int, bias: int | None, quants: Function, scales: Function) -> HostWeights:
    """Return a type whose blocks have 256 values; it has minima if it has no bias."""
    arithmetic = Arithmetic(unit, bias, bias != 7, bias is None, True)
    return HostWeights(arithmetic, quants, scales, scales)


def describe(kind: TensorType) -> HostWeights | None:
    """Return how the kernels read a type of this file; None for another."""
    t = TensorType
    match kind:
        case t.Q4_0:
            return _of_32(kind, 3, _nibbles(kind, "quants"))
        case t.Q5_0:
            return _of_32(kind, 4, _with_high(kind, _nibbles(kind, "low"), 4, _fifth_bits))
        case t.Q8_0:
            return _of_32(kind, 7, _whole_bytes())
        case t.IQ4_NL:
            levels = _levels(_nibbles(kind, "quants"), decoders.IQ4_LEVELS, 7)
            return _of_32(kind, 7, levels)
        case t.MXFP4:
            return _of_32(kind, 4, _levels(_nibbles(kind, "quants"), decoders.FP4_LEVELS, 4))
        case t.Q4_1:
            return _of_32_with_minimum(kind, _nibbles(kind, "quants"))
        case t.Q5_1:
            five = _with_high(kind, _nibbles(kind, "low"), 4, _fifth_bits)
            return _of_32_with_minimum(kind, five)
        case t.Q2_K:
            return of_block(16, None, _crumbs(kind, "quants"), _nibble_scales_and_minima(kind))
        case t.Q3_K:
            three = _with_high(kind, _crumbs(kind, "low"), 4, _third_bits)
            return of_block(16, 2, three, _six_bit_scales(kind))
        case t.Q4_K:
            scales_and_minima = _six_bit_scales_and_minima(kind)
            return of_block(32, None, _nibbles(kind, "quants"), scales_and_minima)
        case t.Q5_K:
            five = _with_high(kind, _nibbles(kind, "low"), 4, _fifth_bits)
            return of_block(32, None, five, _six_bit_scales_and_minima(kind))
        case t.Q6_K:
            six = _with_high(kind, _nibbles(kind, "low"), 8, _fifth_and_sixth_bits)
            return of_block(16, 5, six, _byte_scales(kind))
        case t.IQ4_XS:
            levels = _levels(_nibbles(kind, "quants"), decoders.IQ4_LEVELS, 7)
            return of_block(32, 7, levels, _two_part_scales(kind))
    return None
