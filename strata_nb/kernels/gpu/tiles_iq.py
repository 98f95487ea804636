"""Multiply tiles of the types whose quants number levels or points: IQ4_XS and IQ3_S.

Both look bytes up, and looking up is most of their work.

    IQ4_XS   A card's instruction that permutes bytes looks up four of eight levels. Sixteen levels
             are two tables, of which each gives a part: the parts are not joined to bytes, but
             multiplied one after the other. What is looked up has the nibbles' order, so the row's
             quants are brought into it, which all weights of a tile share.
    IQ3_S    Points are looked up in shared memory (`tables.py`).
"""

from __future__ import annotations

import struct
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.grids import iq3_s_quants
from strata_nb.kernels.gpu.intrinsics import (
    dp4a,
    f32_of_half,
    f32_of_i32,
    fma,
    high_bytes_in_turn,
    i32,
    level_parts,
    load_2xi32,
    load_4xi32,
    load_i32,
    load_u8,
    load_u16,
    low_bytes_in_turn,
    shifted_down,
)
from strata_nb.kernels.gpu.tile_rows import APART, NEXT, TILE, Tile, quants_at, two_scales
from strata_nb.kernels.gpu.weights import place_of
from strata_nb.packing import fields
from strata_nb.quants.decoders import IQ4_LEVELS

T = TensorType

# -- IQ4_XS ----------------------------------------------------------------------------------------

_LEVELS = struct.unpack("<4i", struct.pack("16b", *IQ4_LEVELS))


def _level_dot(words: Any, x: int) -> Any:
    """Return the product of 32 levels, numbered by four words of 4 bits, with quants at x."""
    a, b, c, d = words
    xa, xb, xc, xd = load_4xi32(x)
    xe, xf, xg, xh = load_4xi32(x + 16)
    total = _add_levels(a, xa, xe, i32(0))
    total = _add_levels(b, xb, xf, total)
    total = _add_levels(c, xc, xg, total)
    return _add_levels(d, xd, xh, total)


def _add_levels(word: int, low: int, high: int, total: int) -> Any:
    """Add the levels of eight nibbles times quants: of the low nibbles, of the high ones."""
    t, u, v, w = _LEVELS
    below, others = level_parts(word, t, u, v, w)
    in_turn = low_bytes_in_turn(low, high)
    total = dp4a(below, in_turn, dp4a(others, in_turn, total))
    below, others = level_parts(i32(word >> 16), t, u, v, w)
    in_turn = high_bytes_in_turn(low, high)
    return dp4a(below, in_turn, dp4a(others, in_turn, total))


def iq4_xs(sub_blocks: int) -> Tile:
    quants, steps_low, steps_high, scale = map(place_of, fields(T.IQ4_XS).values())
    blocks = sub_blocks >> 3

    def read(group: int, rows_in_group: int, row: int, quarter: int, tile: int) -> Any:
        place = quants(group, rows_in_group, row, blocks, TILE * tile + quarter)
        return (
            *load_4xi32(place),
            *load_4xi32(place + 16 * APART * rows_in_group),
            load_i32(steps_low(group, rows_in_group, row, blocks, tile)),
            load_u16(steps_high(group, rows_in_group, row, blocks, tile)),
            load_u16(scale(group, rows_in_group, row, blocks, tile)),
        )

    def add(total: Any, words: Any, x: int, quarter: int, tile: int) -> Any:
        low, high, scale = words[8:]
        place = quants_at(x, quarter, tile)
        low = shifted_down(low, i32(4 * quarter))
        high = shifted_down(high, i32(2 * quarter))
        one_step = i32((low & 15 | (high & 3) << 4) - 32)
        other_step = i32((low >> 16 & 15 | (high >> 8 & 3) << 4) - 32)
        one_scale, other_scale = two_scales(x, sub_blocks, quarter, tile)
        first, second = _level_dot(words[:4], place), _level_dot(words[4:8], place + NEXT)
        product = f32_of_i32(i32(first * one_step)) * one_scale
        product = fma(f32_of_i32(i32(second * other_step)), other_scale, product)
        return fma(f32_of_half(scale), product, total)

    return Tile(read, add)


# -- IQ3_S -----------------------------------------------------------------------------------------


def _point_dot(numbers: Any, above: int, signs: int, x: int, table: int) -> Any:
    """Return the product of eight points, numbered by bytes of two words and bits of `above`, with
    quants at x; signs has a bit for each of the 32 values."""
    first, second = numbers
    a, b, c, d, e, f, g, h = iq3_s_quants(first, second, above, signs, table)
    xa, xb, xc, xd = load_4xi32(x)
    xe, xf, xg, xh = load_4xi32(x + 16)
    total = dp4a(d, xd, dp4a(c, xc, dp4a(b, xb, dp4a(a, xa, 0))))
    return dp4a(h, xh, dp4a(g, xg, dp4a(f, xf, dp4a(e, xe, total))))


def iq3_s(sub_blocks: int, table: int) -> Tile:
    low, signs, steps, scale, high = map(place_of, fields(T.IQ3_S).values())
    blocks = sub_blocks >> 3

    def read(group: int, rows_in_group: int, row: int, quarter: int, tile: int) -> Any:
        number = TILE * tile + quarter
        of_low = low(group, rows_in_group, row, blocks, number)
        of_signs = signs(group, rows_in_group, row, blocks, number)
        of_high = high(group, rows_in_group, row, blocks, number)
        return (
            *load_2xi32(of_low),
            *load_2xi32(of_low + 8 * APART * rows_in_group),
            load_i32(of_signs),
            load_i32(of_signs + 4 * APART * rows_in_group),
            load_u8(of_high),
            load_u8(of_high + APART * rows_in_group),
            load_i32(steps(group, rows_in_group, row, blocks, tile)),
            load_u16(scale(group, rows_in_group, row, blocks, tile)),
        )

    def add(total: Any, words: Any, x: int, quarter: int, tile: int) -> Any:
        one_signs, other_signs, one_above, other_above, steps, scale = words[4:]
        place = quants_at(x, quarter, tile)
        first = _point_dot(words[:2], one_above, one_signs, place, table)
        place += NEXT
        second = _point_dot(words[2:4], other_above, other_signs, place, table)
        steps = shifted_down(steps, i32(4 * quarter))
        one_step, other_step = i32(2 * (steps & 15) + 1), i32(2 * (steps >> 16 & 15) + 1)
        one_scale, other_scale = two_scales(x, sub_blocks, quarter, tile)
        product = f32_of_i32(i32(first * one_step)) * one_scale
        product = fma(f32_of_i32(i32(second * other_step)), other_scale, product)
        return fma(f32_of_half(scale), product, total)

    return Tile(read, add)
