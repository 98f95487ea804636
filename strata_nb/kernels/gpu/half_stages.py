"""Put tiles of weights and of rows into shared memory as halves, for products of warpgroups.

A tile is 64 values of some outputs or rows, in the order that `warpgroups.py` asks for. Whatever a
type has for 32 values (`Decoder`) becomes halves the same way: a byte with its highest bit turned
and the exponent of 1024 over it is the half 1152 + quant, of which a sum takes 1152 and the type's
offset, exactly. One fma then gives scale * quant - minimum, rounded to a half. The rows' values are
quant * scale as well: the scale is some hundredth of a value, so it gives 64 to the quant.

A half has 11 bits; its range is what needs care. Weights are a few hundredths, and a half below
2 ** -14 has fewer bits, so they are multiplied by 64: up to 1,023 they are finite. Rows are divided
by 8: up to 524,000 they are. What is larger is infinite, and so are the sums that meet it. Sums are
8 times too large: `UNIT`.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    BytesOf,
    copy_16,
    f32,
    halves_of_f32,
    i32,
    shared_store_4xi32,
)
from strata_nb.kernels.gpu.intrinsics.warpgroups import (
    PIECE_BYTES,
    ROW_BYTES,
    add_halves,
    fma_halves,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.products import decoder_of

WEIGHTS_BY, ROWS_BY = 64.0, 0.125
UNIT = 1 / (WEIGHTS_BY * ROWS_BY)  # what sums are multiplied by
_FROM_SCALES = 64  # of rows, by which quants are divided in turn
ROWS_AT_ONCE = 32  # of which each of 256 threads brings a piece of a tile

TURNED = -0x7F7F7F80  # the highest bits of a word's bytes
_EXPONENTS = 0x64646464  # of halves of 1024
_ONE = 1152
_first_halves = BytesOf("first_halves", (0, 4, 1, 4))
_second_halves = BytesOf("second_halves", (2, 4, 3, 4))


def _twice(value: float) -> int:
    """Return a word of two halves of a number, as a signed one."""
    (bits,) = struct.unpack("<H", struct.pack("<e", value))
    return int.from_bytes(struct.pack("<2H", bits, bits), "little", signed=True)


_SHARE, _LESS = _twice(1 / _FROM_SCALES), _twice(-_ONE / _FROM_SCALES)  # both are exact


def _both(x: Any) -> Any:
    return halves_of_f32(x, x)


def _raised(word: Any, turn: int) -> Any:
    """Return two words of halves, 1152 more than the four signed quants of a word."""
    turned = i32(word ^ turn)
    return _first_halves(turned, _EXPONENTS), _second_halves(turned, _EXPONENTS)


def _four(word: Any, turn: int, less: Any, scale: Any, minus: Any) -> Any:
    """Return two words of halves of a word of four signed quants."""
    first, second = _raised(word, turn)
    first, second = add_halves(first, less), add_halves(second, less)
    return fma_halves(first, scale, minus), fma_halves(second, scale, minus)


def _store_eight(place: Any, words: Any, turn: int, less: Any, scale: Any, minus: Any) -> None:
    a, b = _four(words[0], turn, less, scale, minus)
    c, d = _four(words[1], turn, less, scale, minus)
    shared_store_4xi32(place, a, b, c, d)


@cache
def put_weights(kind: TensorType) -> Function:
    """Return a device function (place, words, table, turn) that stores 32 values of an output.

    place   of the first of their four pieces; the others lie around it, in the same 64 bytes
    words   what `Decoder.read` returned
    table   where the type's is
    turn    `TURNED`, as a number that the compiler does not know: an instruction that masks and
            turns bits has room for one constant only
    """
    form = decoder_of(kind)
    unpack, halves, minima = form.unpack, form.halves, form.minima
    less = _twice(-_ONE - form.offset)

    def put(place: int, words: Any, table: int, turn: int) -> None:
        a, b, c, d, e, f, g, h, low, high, minimum, high_minimum = unpack(words, table)
        by = f32(WEIGHTS_BY)
        scale, minus = _both(low * by), i32(0)
        if minima:
            minus = _both(-minimum * by)
        _store_eight(place, (a, b), turn, less, scale, minus)
        _store_eight(place ^ PIECE_BYTES, (c, d), turn, less, scale, minus)
        if halves:
            scale = _both(high * by)
            if minima:
                minus = _both(-high_minimum * by)
        _store_eight(place ^ 2 * PIECE_BYTES, (e, f), turn, less, scale, minus)
        _store_eight(place ^ 3 * PIECE_BYTES, (g, h), turn, less, scale, minus)

    return put


def _four_of_row(word: Any, scale: Any) -> Any:
    """Return two words of halves of a word of four quants of a row, and 64 times their scale."""
    first, second = _raised(word, TURNED)
    zero, share, less = i32(0), i32(_SHARE), i32(_LESS)
    first, second = fma_halves(first, share, less), fma_halves(second, share, less)
    return fma_halves(first, scale, zero), fma_halves(second, scale, zero)


def halves_of_quants(words: Any) -> Any:
    """Return eight words: the halves of 16 quants of a row and their scale."""
    a, b, c, d, scale = words
    by = _both(scale * f32(_FROM_SCALES * ROWS_BY))
    return _four_of_row(a, by) + _four_of_row(b, by) + _four_of_row(c, by) + _four_of_row(d, by)


@cache
def copy_rows(count: int) -> Function:
    """Return a device function (place, rows, at) that begins to copy a piece of so many rows of
    halves.

    place   of the first row's piece; rows   addresses; at   how much further the pieces are
    """
    further = ROWS_AT_ONCE * ROW_BYTES

    def one(place: int, rows: Any, at: int) -> None:
        copy_16(place, rows[0] + at)

    if count == 1:
        return one
    others = copy_rows(count - 1)

    def copy(place: int, rows: Any, at: int) -> None:
        one(place, rows, at)
        others(place + further, rows[1:], at)

    return copy
