"""Multiply a quantised row with a *tile* of packed weights: 256 values of a group's eight rows.

A warp takes a tile at a time. Lane l has row l % 8 of the group and two of the tile's eight
sub-blocks, l // 8 and l // 8 + 4: each load of quants covers a run of memory, what a block of 256
values shares is read once for two sub-blocks, and of the quantised row all lanes of a sub-block
read the same bytes. Reading and multiplying are two functions, so that a kernel can ask for weights
before it knows what they meet; what they share of decoding is done once for all rows that a tile
meets.

Weights are read by ordinary loads: those of memory that is constant are moved behind the wait for
the launch before, where a kernel reads weights ahead.

The number of sub-blocks of a row is part of the code: offsets become constants of instructions.
What a product costs is instructions, so the types that models use most have code of their own:

    4 bits        both nibbles of a byte stay where they are, as unsigned bytes; the sum over the
                  upper ones is 16 times too large, and exact
    group scales  are multiplied as integers: with scales of 6 or 8 bits no product of a sub-block
                  needs more than the 24 bits of a float
    levels, points    `tiles_iq.py`
    all others    decode a sub-block as `weights.py` and `grids.py` say, and use `sub_block_dot`

A lane keeps one sum, in order of tiles and of its two sub-blocks in each; `products.row_sum` adds
the four lanes of a row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    dp4a_u8,
    even_bytes,
    f32_of_half,
    f32_of_i32,
    fma,
    i32,
    load_2xi32,
    load_4xi32,
    load_i32,
    load_u16,
    shifted_down,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.products import decoder_of, sub_block_dot
from strata_nb.kernels.gpu.tile_rows import (
    APART,
    NEXT,
    TILE,
    Tile,
    dot_u8,
    high_nibbles,
    low_nibbles,
    nibble_dot,
    quants_at,
    two_scales,
    two_sums,
)
from strata_nb.kernels.gpu.tiles_iq import iq3_s, iq4_xs
from strata_nb.kernels.gpu.weights import place_of
from strata_nb.kernels.quantised_rows import HALF_SUMS
from strata_nb.packing import fields

T = TensorType


@cache
def tile_product(kind: TensorType, sub_blocks: int, table: int) -> Tile:
    """Return how tiles of a type are multiplied, in rows of so many sub-blocks.

    table   where the type's is in shared memory, if it has one (`tables.py`)

    ValueError for a type that has no kernels on a card.
    """
    if kind is T.IQ3_S:
        return iq3_s(sub_blocks, table)
    if kind in _SPECIAL:
        return _SPECIAL[kind](sub_blocks)
    return _decoded(kind, sub_blocks, table)


def _decoded(kind: TensorType, sub_blocks: int, table: int) -> Tile:
    """Return how tiles are multiplied whose sub-blocks are decoded by themselves."""
    decoder, dot = decoder_of(kind), sub_block_dot(kind)
    read_one, unpack = decoder.read, decoder.unpack
    is_whole = sub_blocks % TILE == 0

    def read(group: int, rows_in_group: int, row: int, quarter: int, tile: int) -> Any:
        first, second = TILE * tile + quarter, TILE * tile + quarter + APART
        if not is_whole:  # what is not there repeats the last
            first, second = min(first, sub_blocks - 1), min(second, sub_blocks - 1)
        ones = read_one(group, rows_in_group, row, sub_blocks, first)
        return ones, read_one(group, rows_in_group, row, sub_blocks, second)

    def add(total: Any, words: Any, x: int, quarter: int, tile: int) -> Any:
        ones, others = words
        first, second = TILE * tile + quarter, TILE * tile + quarter + APART
        if is_whole or first < sub_blocks:
            total = dot(total, unpack(ones, table), x, sub_blocks, first)
        if is_whole or second < sub_blocks:
            total = dot(total, unpack(others, table), x, sub_blocks, second)
        return total

    return Tile(read, add)


# -- Q4_K and Q5_K ---------------------------------------------------------------------------------


def _six_bits(a: int, b: int, high: int, quarter: int) -> Any:
    """Return the group scales of a lane's two sub-blocks as bytes of a word, from the three words
    of a block: the first of each pair, then the second."""
    shift = i32(4 * quarter)
    low = even_bytes(shifted_down(a, shift), shifted_down(b, shift))
    above = shifted_down(high, i32(2 * quarter)) << 4
    return i32(low & 0x0F0F0F0F | above & 0x30303030)


def _add_pair(
    total: Any,
    dots: Any,
    x: int,
    sub_blocks: int,
    quarter: int,
    tile: int,
    steps: int,
    bounds: int,
) -> Any:
    """Add two sub-blocks whose scales and minima are `bounds`, two halves, times six bits each."""
    first, second = dots
    one_sum, other_sum = two_sums(x, sub_blocks, quarter, tile)
    one_scale, other_scale = two_scales(x, sub_blocks, quarter, tile)
    product = f32_of_i32(i32(first * (steps & 63))) * one_scale
    product = fma(f32_of_i32(i32(second * (steps >> 8 & 63))), other_scale, product)
    total = fma(f32_of_half(bounds), product, total)
    least = f32_of_half(bounds >> 16)
    one_least = least * f32_of_i32(i32(steps >> 16 & 63))
    other_least = least * f32_of_i32(i32(steps >> 24 & 63))
    total = fma(-one_least, f32_of_i32(one_sum) * one_scale, total)
    return fma(-other_least, f32_of_i32(other_sum) * other_scale, total)


def _shared_words(kind: TensorType) -> Function:
    """Return a device function that reads what a block of Q4_K or Q5_K has once: four words."""
    step_place = place_of(fields(kind)["group_scales"])
    bounds_place = place_of(fields(kind)["scale+minimum"])

    def shared(group: int, rows_in_group: int, row: int, blocks: int, tile: int) -> Any:
        place = step_place(group, rows_in_group, row, blocks, 3 * tile)
        bounds = load_i32(bounds_place(group, rows_in_group, row, blocks, tile))
        a, b = load_i32(place), load_i32(place + 4 * rows_in_group)
        return a, b, load_i32(place + 8 * rows_in_group), bounds

    return shared


def _q4_k(sub_blocks: int) -> Tile:
    quants_place, shared = place_of(fields(T.Q4_K)["quants"]), _shared_words(T.Q4_K)
    blocks = sub_blocks >> 3

    def read(group: int, rows_in_group: int, row: int, quarter: int, tile: int) -> Any:
        place = quants_place(group, rows_in_group, row, blocks, TILE * tile + quarter)
        ones = load_4xi32(place)
        others = load_4xi32(place + 16 * APART * rows_in_group)
        return *ones, *others, *shared(group, rows_in_group, row, blocks, tile)

    def add(total: Any, words: Any, x: int, quarter: int, tile: int) -> Any:
        a, b, high, bounds = words[8:]
        place = quants_at(x, quarter, tile)
        dots = nibble_dot(words[:4], place), nibble_dot(words[4:8], place + NEXT)
        steps = _six_bits(a, b, high, quarter)
        return _add_pair(total, dots, x, sub_blocks, quarter, tile, steps, bounds)

    return Tile(read, add)


def _five_bit_dot(words: Any, tops: int, x: int) -> Any:
    """Return the product of 32 values of 5 bits, the fifth in `tops`, with quants at x."""
    a, b, c, d = words
    low = (
        i32(a & 0x0F0F0F0F | tops << 4 & 0x10101010),
        i32(b & 0x0F0F0F0F | tops << 3 & 0x10101010),
        i32(c & 0x0F0F0F0F | tops << 2 & 0x10101010),
        i32(d & 0x0F0F0F0F | tops << 1 & 0x10101010),
    )
    high = (
        i32(a >> 4 & 0x0F0F0F0F | tops & 0x10101010),
        i32(b >> 4 & 0x0F0F0F0F | tops >> 1 & 0x10101010),
        i32(c >> 4 & 0x0F0F0F0F | tops >> 2 & 0x10101010),
        i32(d >> 4 & 0x0F0F0F0F | tops >> 3 & 0x10101010),
    )
    return dot_u8(high, x + 16, dot_u8(low, x, 0))


def _q5_k(sub_blocks: int) -> Tile:
    low_place, high_place = place_of(fields(T.Q5_K)["low"]), place_of(fields(T.Q5_K)["high"])
    shared, blocks = _shared_words(T.Q5_K), sub_blocks >> 3

    def read(group: int, rows_in_group: int, row: int, quarter: int, tile: int) -> Any:
        low = low_place(group, rows_in_group, row, blocks, TILE * tile + quarter)
        high = high_place(group, rows_in_group, row, blocks, TILE * tile + quarter)
        ones, others = load_4xi32(low), load_4xi32(low + 16 * APART * rows_in_group)
        tops = load_i32(high), load_i32(high + 4 * APART * rows_in_group)
        return *ones, *others, *shared(group, rows_in_group, row, blocks, tile), *tops

    def add(total: Any, words: Any, x: int, quarter: int, tile: int) -> Any:
        a, b, high, bounds, top, other_top = words[8:]
        place = quants_at(x, quarter, tile)
        first = _five_bit_dot(words[:4], top, place)
        second = _five_bit_dot(words[4:8], other_top, place + NEXT)
        steps = _six_bits(a, b, high, quarter)
        return _add_pair(total, (first, second), x, sub_blocks, quarter, tile, steps, bounds)

    return Tile(read, add)


# -- Q6_K ------------------------------------------------------------------------------------------


def _six_bit_dots(low: Any, high: Any, x: int, sums: Any) -> Any:
    """Return the products of 32 values of 6 bits, less 32, with quants at x: of each half.

    low, high   words of their four low bits and of their two high ones
    sums        of the quants of each half

    Bits stay where they are in a byte: what they count for changes from one sum to the next.
    """
    h, i = high
    one_sum, other_sum = sums
    xa, xb, xc, xd = load_4xi32(x)
    lower = dp4a_u8(h & 0x03030303, xa, dp4a_u8(i & 0x03030303, xb, i32(-2 * one_sum)))
    lower = dp4a_u8(h & 0x0C0C0C0C, xc, dp4a_u8(i & 0x0C0C0C0C, xd, i32(lower << 2)))
    lower = dot_u8(low_nibbles(low), x, i32(lower << 2))
    xe, xf, xg, xh = load_4xi32(x + 16)
    upper = i32(dot_u8(high_nibbles(low), x + 16, 0) >> 2)
    upper = dp4a_u8(h & -0x3F3F3F40, xg, dp4a_u8(i & -0x3F3F3F40, xh, upper))
    upper = dp4a_u8(h & 0x30303030, xe, dp4a_u8(i & 0x30303030, xf, i32(upper >> 2)))
    return lower, i32(upper - 32 * other_sum)


def _q6_k(sub_blocks: int) -> Tile:
    low_place, high_place = place_of(fields(T.Q6_K)["low"]), place_of(fields(T.Q6_K)["high"])
    step_place = place_of(fields(T.Q6_K)["group_scales"])
    scale_place = place_of(fields(T.Q6_K)["scale"])
    blocks = sub_blocks >> 3

    def read(group: int, rows_in_group: int, row: int, quarter: int, tile: int) -> Any:
        number = TILE * tile + quarter
        low = low_place(group, rows_in_group, row, blocks, number)
        high = high_place(group, rows_in_group, row, blocks, number)
        step = step_place(group, rows_in_group, row, blocks, number)
        return (
            *load_4xi32(low),
            *load_4xi32(low + 16 * APART * rows_in_group),
            *load_2xi32(high),
            *load_2xi32(high + 8 * APART * rows_in_group),
            load_u16(step),
            load_u16(step + 2 * APART * rows_in_group),
            load_u16(scale_place(group, rows_in_group, row, blocks, tile)),
        )

    def add(total: Any, words: Any, x: int, quarter: int, tile: int) -> Any:
        step, other_step, scale = words[12:]
        place = quants_at(x, quarter, tile)
        sums = x + HALF_SUMS * sub_blocks + 8 * TILE * tile + 8 * quarter
        one_scale, other_scale = two_scales(x, sub_blocks, quarter, tile)
        first = _six_bit_dots(words[:4], words[8:10], place, load_2xi32(sums))
        second = _six_bit_dots(words[4:8], words[10:12], place + NEXT, load_2xi32(sums + 8 * APART))
        product = f32_of_i32(_with_steps(first, step)) * one_scale
        product = fma(f32_of_i32(_with_steps(second, other_step)), other_scale, product)
        return fma(f32_of_half(scale), product, total)

    return Tile(read, add)


def _with_steps(halves: Any, step: int) -> Any:
    """Return the products of the halves, times a signed byte of `step` each."""
    lower, upper = halves
    return i32(lower * i32(i32(step << 24) >> 24) + upper * i32(i32(step << 16) >> 24))


_SPECIAL = {
    T.Q4_K: _q4_k,
    T.Q5_K: _q5_k,
    T.Q6_K: _q6_k,
    T.IQ4_XS: iq4_xs,
}
