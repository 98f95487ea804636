"""Unpack the grid types IQ1, IQ2 and IQ3: indices of points instead of quants.

The same contract as `weights.py`. A point has four (IQ3) or eight coordinates of one byte; half a
sub-block, sixteen values of four rows, takes sixteen or eight points, looked up one by one. Signs
come as one bit a value and negate the coordinates, to which 2 ** bias is added at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_nb.compiling import inlined
from strata_nb.formats import TensorType
from strata_nb.kernels.host.instructions import floats_of_halves
from strata_nb.kernels.host.vectors import (
    INTEGERS,
    Vector,
    constant,
    count_ones,
    floats_of,
    gather_u32,
    gather_u64,
    join,
    loader,
    narrow_to_bytes,
    negate_where,
    recast,
    shuffler,
    widen_unsigned,
)
from strata_nb.kernels.host.weights import (
    Function,
    HostWeights,
    block_scale,
    in_lanes,
    load_16_bytes,
    of_block,
    rows_in_lanes,
    start_factor,
)
from strata_nb.quants import iq_grids

_BIAS = 6  # coordinates are at most 62 in magnitude

_WORDS_8 = Vector("i32", 8)
_load_4_bytes = loader(Vector("u8", 4))
_load_8_bytes = loader(Vector("u8", 8))
_load_32_bytes = loader(Vector("u8", 32))
_load_4_halves = loader(Vector("u16", 4))
_load_16_halves = loader(Vector("u16", 16))
_load_32_halves = loader(Vector("u16", 32))
_load_4_words = loader(Vector("i32", 4))
_load_8_words = loader(Vector("i32", 8))
_load_16_words = loader(INTEGERS)
_each_twice = shuffler([lane // 2 for lane in range(8)])
_each_four_times = shuffler([lane // 4 for lane in range(16)])
_odd_of_8 = shuffler(range(1, 8, 2))


def _picker(width: int, chosen: int, half: int) -> Function:
    """Return a shuffle of four rows of `width` elements: `chosen` of each, those of a half."""
    return shuffler([row * width + half * chosen + i for row in range(4) for i in range(chosen)])


def _even_signs(codes: Any) -> Any:
    """Add to codes of seven signs the eighth, which makes the number of minus signs even."""
    return codes | (count_ones(codes) << 7)


even_signs = inlined(_even_signs)


def _quants(half: Callable[[int], Function]) -> Function:
    """Return quants of eight rows, given a function for four rows of each half of a sub-block.

    half(0 or 1) returns a function (group, sub_blocks, four), where `four` numbers fours of rows:
    2 * sub-block, plus 1 for rows 4 to 7.
    """
    first, second = half(0), half(1)

    @inlined
    def quants(group: int, sub_blocks: int, s: int) -> Any:
        return (
            first(group, sub_blocks, 2 * s),
            second(group, sub_blocks, 2 * s),
            first(group, sub_blocks, 2 * s + 1),
            second(group, sub_blocks, 2 * s + 1),
        )

    return quants


def _biased(values: Any) -> Any:
    return values + (1 << _BIAS)


biased = inlined(_biased)


def _table(points: NDArray[np.int8]) -> NDArray[np.int8]:
    return np.ascontiguousarray(points)


# -- quants ----------------------------------------------------------------------------------------


def _iq2_xxs(half: int) -> Function:
    grid, factor = _table(iq_grids.IQ2_XXS), start_factor(TensorType.IQ2_XXS, "grid_and_signs")
    indices = _picker(8, 2, half)
    shifts = constant(_WORDS_8, [14 * half, 14 * half + 7] * 4)

    @inlined
    def quants(group: int, sub_blocks: int, four: int) -> Any:
        place = group + factor * sub_blocks + 32 * four
        points = gather_u64(grid.ctypes.data, widen_unsigned(indices(_load_32_bytes(place))))
        words = _each_twice(_odd_of_8(_load_8_words(place)))
        return biased(negate_where(points, even_signs(narrow_to_bytes((words >> shifts()) & 127))))

    return quants


def _iq2_xs(half: int) -> Function:
    grid, factor = _table(iq_grids.IQ2_XS), start_factor(TensorType.IQ2_XS, "grid_and_signs")
    chosen = _picker(4, 2, half)

    @inlined
    def quants(group: int, sub_blocks: int, four: int) -> Any:
        words = chosen(_load_16_halves(group + factor * sub_blocks + 32 * four))
        points = gather_u64(grid.ctypes.data, widen_unsigned(words & 511))
        return biased(negate_where(points, even_signs(narrow_to_bytes(words >> 9))))

    return quants


def _iq2_s(half: int) -> Function:
    kind = TensorType.IQ2_S
    grid, low_factor = _table(iq_grids.IQ2_S), start_factor(kind, "grid_low")
    sign_factor, high_factor = start_factor(kind, "signs"), start_factor(kind, "grid_high")
    chosen = _picker(4, 2, half)
    shifts = constant(_WORDS_8, [4 * half, 4 * half + 2] * 4)

    @inlined
    def quants(group: int, sub_blocks: int, four: int) -> Any:
        low = widen_unsigned(chosen(load_16_bytes(group + low_factor * sub_blocks + 16 * four)))
        high = widen_unsigned(_load_4_bytes(group + high_factor * sub_blocks + 4 * four))
        indices = low | ((_each_twice(high) >> shifts()) & 3) << 8
        signs = chosen(load_16_bytes(group + sign_factor * sub_blocks + 16 * four))
        return biased(negate_where(gather_u64(grid.ctypes.data, indices), signs))

    return quants


def _iq3_xxs(half: int) -> Function:
    kind = TensorType.IQ3_XXS
    grid, factor = _table(iq_grids.IQ3_XXS), start_factor(kind, "grid")
    sign_factor = start_factor(kind, "signs_and_scales")
    chosen = _picker(8, 4, half)
    shifts = constant(_WORDS_8, [14 * half, 14 * half + 7] * 4)

    @inlined
    def quants(group: int, sub_blocks: int, four: int) -> Any:
        indices = chosen(_load_32_bytes(group + factor * sub_blocks + 32 * four))
        points = gather_u32(grid.ctypes.data, widen_unsigned(indices))
        words = _each_twice(_load_4_words(group + sign_factor * sub_blocks + 16 * four))
        return biased(negate_where(points, even_signs(narrow_to_bytes((words >> shifts()) & 127))))

    return quants


def _iq3_s(half: int) -> Function:
    kind = TensorType.IQ3_S
    grid, low_factor = _table(iq_grids.IQ3_S), start_factor(kind, "grid_low")
    sign_factor, high_factor = start_factor(kind, "signs"), start_factor(kind, "grid_high")
    chosen, signs_chosen = _picker(8, 4, half), _picker(4, 2, half)
    shifts = constant(INTEGERS, [4 * half + bit for bit in range(4)] * 4)

    @inlined
    def quants(group: int, sub_blocks: int, four: int) -> Any:
        low = widen_unsigned(chosen(_load_32_bytes(group + low_factor * sub_blocks + 32 * four)))
        high = widen_unsigned(_load_4_bytes(group + high_factor * sub_blocks + 4 * four))
        indices = low | ((_each_four_times(high) >> shifts()) & 1) << 8
        signs = signs_chosen(load_16_bytes(group + sign_factor * sub_blocks + 16 * four))
        return biased(negate_where(gather_u32(grid.ctypes.data, indices), signs))

    return quants


# In eighths, as the decoder has it: a coordinate (-1, 0 or 1), shifted by 1/8 up or, with bit 11 of
# the index, down.
_IQ1 = np.concatenate([iq_grids.IQ1 * 8 + 1, iq_grids.IQ1 * 8 - 1]).astype(np.int8)


def _iq1_s(half: int) -> Function:
    kind = TensorType.IQ1_S
    grid, low_factor = _table(_IQ1), start_factor(kind, "grid_low")
    high_factor = start_factor(kind, "high_and_scales")
    chosen = _picker(4, 2, half)
    shifts = constant(_WORDS_8, [6 * half, 6 * half + 3] * 4)

    @inlined
    def quants(group: int, sub_blocks: int, four: int) -> Any:
        low = widen_unsigned(chosen(load_16_bytes(group + low_factor * sub_blocks + 16 * four)))
        words = _load_4_halves(group + high_factor * sub_blocks + 8 * four)
        high = _each_twice(widen_unsigned(words))
        indices = low | ((high >> shifts()) & 7) << 8 | (high >> 15) << 11
        return biased(gather_u64(grid.ctypes.data, indices))

    return quants


def _iq1_m(half: int) -> Function:
    kind = TensorType.IQ1_M
    grid, low_factor = _table(_IQ1), start_factor(kind, "grid_low")
    high_factor = start_factor(kind, "grid_high")
    chosen = _picker(4, 2, half)
    shifts = constant(_WORDS_8, [8 * half, 8 * half + 4] * 4)

    @inlined
    def quants(group: int, sub_blocks: int, four: int) -> Any:
        low = widen_unsigned(chosen(load_16_bytes(group + low_factor * sub_blocks + 16 * four)))
        words = _load_4_halves(group + high_factor * sub_blocks + 8 * four)
        high = _each_twice(widen_unsigned(words))
        indices = low | ((high >> shifts()) & 15) << 8
        return biased(gather_u64(grid.ctypes.data, indices))

    return quants


# -- scales ----------------------------------------------------------------------------------------


@inlined
def half_steps(steps: Any) -> Any:
    """Return steps + 1/2."""
    return floats_of(steps) + np.float32(0.5)


def _top_nibbles(kind: TensorType, unit: float) -> Function:
    """Return the scales of IQ2_XXS and IQ3_XXS: the top four bits of a word a sub-block."""
    of_block = block_scale(kind)
    in_pairs = kind is TensorType.IQ2_XXS
    factor = start_factor(kind, "grid_and_signs" if in_pairs else "signs_and_scales")
    factor_of_unit = np.float32(unit)

    @inlined
    def words(place: int, step: int) -> Any:
        if in_pairs:
            place += 128 * step
            return join(odd_words(_load_16_words(place)), odd_words(_load_16_words(place + 64)))
        return _load_16_words(place + 64 * step)

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        steps = in_lanes(words(group + factor * sub_blocks, step)) >> 28
        return of_block(group, sub_blocks, step >> 2) * half_steps(steps) * factor_of_unit

    return scales


odd_words = shuffler(range(1, 16, 2))
_nibble_of_half = constant(INTEGERS, [0, 4] * 8)


def _nibble_of_each_half(kind: TensorType) -> Function:
    """Return the scales of IQ2_XS and IQ2_S: a nibble for each half of a sub-block."""
    of_block, factor = block_scale(kind), start_factor(kind, "group_scales")

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        found = widen_unsigned(_load_8_bytes(group + factor * sub_blocks + 8 * step))
        steps = (rows_in_lanes(found) >> _nibble_of_half()) & 15
        return of_block(group, sub_blocks, step >> 3) * half_steps(steps) * np.float32(0.25)

    return scales


def _nibble_of_word(kind: TensorType) -> Function:
    """Return the scales of IQ3_S: nibble s of a word a block, of which a step takes two."""
    of_block, factor = block_scale(kind), start_factor(kind, "group_scales")

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        block, quarter = step >> 2, step & 3
        words = rows_in_lanes(_load_8_words(group + factor * sub_blocks + 32 * block))
        steps = (words >> (_nibble_of_half() + 8 * quarter)) & 15
        return of_block(group, sub_blocks, block) * floats_of((steps << 1) + 1)

    return scales


def _three_bits(kind: TensorType) -> Function:
    """Return the scales of IQ1_S: bits 12 to 14 of a 16-bit word a sub-block."""
    of_block, factor = block_scale(kind), start_factor(kind, "high_and_scales")

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        words = in_lanes(_load_16_halves(group + factor * sub_blocks + 32 * step))
        steps = widen_unsigned((words >> 12) & 7)
        eighths = floats_of((steps << 1) + 1) * np.float32(0.125)
        return of_block(group, sub_blocks, step >> 2) * eighths

    return scales


_words_of_rows = [shuffler(range(number, 32, 4)) for number in range(4)]
_three_bit_places = constant(INTEGERS, [0, 3] * 8)


def _scattered_scales(kind: TensorType) -> Function:
    """Return the scales of IQ1_M: four 16-bit words a block hold 16 scales of three bits.

    Their top nibbles are the float16 of the block.
    """
    factor = start_factor(kind, "scales")
    first, second, third, fourth = _words_of_rows

    @inlined
    def scales(group: int, sub_blocks: int, step: int) -> Any:
        block, number = step >> 3, step & 7
        place = group + factor * sub_blocks + 64 * block
        words = _load_32_halves(place)
        a, b, c, d = first(words), second(words), third(words), fourth(words)
        half = (a >> 12) | (b >> 12) << 4 | (c >> 12) << 8 | (d >> 12) << 12
        # Word number // 2 as the low 16 bits of each row's 64.
        rows = rows_in_lanes(low_words(_load_8_long(place) >> (number >> 1) * 16))
        steps = (rows >> (_three_bit_places() + (number & 1) * 6)) & 7
        eighths = floats_of((steps << 1) + 1) * np.float32(0.125)
        return floats_of_halves(rows_in_lanes(half)) * eighths

    return scales


_load_8_long = loader(Vector("u64", 8))


@inlined
def low_words(long: Any) -> Any:
    """Return the lower 32 bits of each of eight words of 64."""
    return even_words(as_16_words(long))


as_16_words = recast(INTEGERS)
even_words = shuffler(range(0, 16, 2))


# -- the types -------------------------------------------------------------------------------------


def describe(kind: TensorType) -> HostWeights | None:
    """Return how the kernels read a type of this file; None for another."""
    t = TensorType
    match kind:
        case t.IQ2_XXS:
            return of_block(32, _BIAS, _quants(_iq2_xxs), _top_nibbles(kind, 0.25))
        case t.IQ2_XS:
            return of_block(16, _BIAS, _quants(_iq2_xs), _nibble_of_each_half(kind))
        case t.IQ2_S:
            return of_block(16, _BIAS, _quants(_iq2_s), _nibble_of_each_half(kind))
        case t.IQ3_XXS:
            return of_block(32, _BIAS, _quants(_iq3_xxs), _top_nibbles(kind, 0.5))
        case t.IQ3_S:
            return of_block(32, _BIAS, _quants(_iq3_s), _nibble_of_word(kind))
        case t.IQ1_S:
            return of_block(32, _BIAS, _quants(_iq1_s), _three_bits(kind))
        case t.IQ1_M:
            return of_block(16, _BIAS, _quants(_iq1_m), _scattered_scales(kind))
    return None
