"""What tiles of all types share: how a type is described, and the row that its tiles meet."""

from __future__ import annotations

from typing import Any, NamedTuple

from strata_nb.kernels.gpu.intrinsics import dp4a_u8, i32, load_4xi32, load_f32, load_i32
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.quantised_rows import SCALES, SUMS
from strata_nb.packing import SUB_BLOCK

TILE = 8  # sub-blocks of a row
APART = TILE // 2  # between the two of a lane


class Tile(NamedTuple):
    """Hold device functions that multiply tiles of a type.

    read   (group, rows_in_group, row, quarter, tile) -> what a lane needs of a tile: a tuple
    add    (total, words, x, quarter, tile) -> total and the products with a quantised row at x

    group, rows_in_group and row are those of `Decoder.read`; quarter is l // 8 of lane l.
    """

    read: Function
    add: Function


def tiles_of(sub_blocks: int) -> int:
    """Return how many tiles a row has; of the last there may be a part."""
    return -(-sub_blocks // TILE)


# -- the quantised row -----------------------------------------------------------------------------


def quants_at(x: int, quarter: int, tile: int) -> Any:
    """Return where the quants of a lane's first sub-block are; the other's follow 128 behind."""
    return x + TILE * SUB_BLOCK * tile + SUB_BLOCK * quarter


NEXT = SUB_BLOCK * APART


def two_scales(x: int, sub_blocks: int, quarter: int, tile: int) -> Any:
    place = x + SCALES * sub_blocks + 4 * TILE * tile + 4 * quarter
    return load_f32(place), load_f32(place + 4 * APART)


def two_sums(x: int, sub_blocks: int, quarter: int, tile: int) -> Any:
    place = x + SUMS * sub_blocks + 4 * TILE * tile + 4 * quarter
    return load_i32(place), load_i32(place + 4 * APART)


def dot_u8(words: Any, x: int, total: int) -> Any:
    """Add the product of sixteen unsigned bytes with quants at x."""
    a, b, c, d = words
    xa, xb, xc, xd = load_4xi32(x)
    return dp4a_u8(d, xd, dp4a_u8(c, xc, dp4a_u8(b, xb, dp4a_u8(a, xa, total))))


def low_nibbles(words: Any) -> Any:
    """Return the low nibbles of bytes, as bytes."""
    a, b, c, d = words
    return a & 0x0F0F0F0F, b & 0x0F0F0F0F, c & 0x0F0F0F0F, d & 0x0F0F0F0F


def high_nibbles(words: Any) -> Any:
    """Return the high nibbles of bytes where they are: 16 times too large."""
    a, b, c, d = words
    return a & -0x0F0F0F10, b & -0x0F0F0F10, c & -0x0F0F0F10, d & -0x0F0F0F10


def nibble_dot(words: Any, x: int) -> Any:
    """Return the product of 32 values of 4 bits with a sub-block of quants at x."""
    upper = dot_u8(high_nibbles(words), x + 16, 0)
    return dot_u8(low_nibbles(words), x, i32(upper >> 4))
