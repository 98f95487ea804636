"""What a warp multiplies in attention by rounded halves: 32 queries with blocks of the K/V.

Queries are *pairs* of a row and a head. A product has 16 of them in its rows, so a warp has two of
each product, and what it loads of keys and values serves both. A lane 4 * g + t has four pairs: g,
g + 8, g + 16 and g + 24. A *chunk* is 16 cells, or 16 values; of it a lane has 16 sums:

    0, 1     pair g,      columns 2 * t, 2 * t + 1        8, 9     pair g + 16
    2, 3     pair g + 8                                   10, 11   pair g + 24
    4 .. 7   the same, 8 columns further                  12 .. 15

Scores of a chunk of cells, as halves, are in just the order in which products with values want
their weights.

Tuples become registers; functions are made for a length, and work on the first items and leave the
others to the next shorter one. Rows of queries, keys and values lie in shared memory with their
pieces of 16 bytes turned (`turned`): a step of 16 values is one xor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    i32,
    mma_of_halves,
    shared_load_matrices,
    store_f32,
)
from strata_nb.kernels.gpu.intrinsics import shared_load_turned
from strata_nb.kernels.gpu.operations import Function

CHUNK = 16
_STEP = 32  # bytes of a chunk of values


def turned(row: Any, piece: Any) -> Any:
    """Return where in a row of shared memory a piece of 16 bytes lies.

    Eight rows' same piece is in all banks.
    """
    return 16 * (piece ^ (row & 7))


def _add(a: Any, x: Any, y: Any, c: Any) -> Any:
    return mma_of_halves(a[0], a[1], a[2], a[3], x, y, c[0], c[1], c[2], c[3])


def _products(a: Any, x: Any, c: Any) -> Any:
    """Return a chunk's 16 sums and the products of 16 columns of both halves of the pairs."""
    first = _add(a[:4], x[0], x[1], c[:4]) + _add(a[:4], x[2], x[3], c[4:8])
    return first + _add(a[4:], x[0], x[1], c[8:12]) + _add(a[4:], x[2], x[3], c[12:])


@cache
def of_pairs(chunks: int) -> Function:
    """Return a function (numbers) of four numbers, one of each pair: so many chunks of them."""

    def of_one(numbers: Any) -> Any:
        a, b, c, d = numbers
        return a, a, b, b, a, a, b, b, c, c, d, d, c, c, d, d

    if chunks == 1:
        return of_one
    others = of_pairs(chunks - 1)

    def of_all(numbers: Any) -> Any:
        return of_one(numbers) + others(numbers)

    return of_all


# -- queries times keys ----------------------------------------------------------------------------


@cache
def _columns_of_keys(chunks: int, pitch: int) -> Function:
    """Return a function (a, place, sums): sums and the products of 16 values of so many chunks."""

    def one(a: Any, place: int, sums: Any) -> Any:
        return _products(a, shared_load_matrices(place), sums)

    if chunks == 1:
        return one
    others = _columns_of_keys(chunks - 1, pitch)

    def all_chunks(a: Any, place: int, sums: Any) -> Any:
        return one(a, place, sums[:16]) + others(a, place + CHUNK * pitch, sums[16:])

    return all_chunks


@cache
def key_products(steps: int, pitch: int, chunks: int, step: int = 0) -> Function:
    """Return a function (queries, keys, sums): sums and the products of chunks of cells.

    steps           of 16 values
    queries, keys   where a lane finds the row that it loads for a warp: of the first 16 pairs, of
                    the first chunk
    """
    columns, further = _columns_of_keys(chunks, pitch), _STEP * step

    def multiply(queries: int, keys: int, sums: Any) -> Any:
        place = i32(queries ^ further)
        a = shared_load_matrices(place) + shared_load_matrices(place + CHUNK * pitch)
        return columns(a, i32(keys ^ further), sums)

    if step + 1 == steps:
        return multiply
    others = key_products(steps, pitch, chunks, step + 1)

    def products(queries: int, keys: int, sums: Any) -> Any:
        return others(queries, keys, multiply(queries, keys, sums))

    return products


# -- weights times values --------------------------------------------------------------------------


@cache
def value_products(columns: int, column: int = 0) -> Function:
    """Return a function (weights, values, offset, sums): sums and the products of a chunk of cells.

    columns          chunks of values
    values, offset   where a lane finds the row that it loads for a warp, of a multiple of eight
                     cells, and how far behind that row it is
    """
    further = _STEP * column

    def one(weights: Any, values: int, offset: int, sums: Any) -> Any:
        return _products(weights, shared_load_turned(i32(values ^ further) + offset), sums)

    if column + 1 == columns:
        return one
    others = value_products(columns, column + 1)

    def all_columns(weights: Any, values: int, offset: int, sums: Any) -> Any:
        return one(weights, values, offset, sums[:16]) + others(weights, values, offset, sums[16:])

    return all_columns


@cache
def store_row(columns: int) -> Function:
    """Return a function (place, sums, factor): stores a pair's values times a factor.

    place   of the first that the lane has
    sums    from the pair's first one on
    """

    def one(place: int, x: Any, factor: Any) -> None:
        store_f32(place, x[0] * factor)
        store_f32(place + 4, x[1] * factor)
        store_f32(place + 32, x[4] * factor)
        store_f32(place + 36, x[5] * factor)

    if columns == 1:
        return one
    others = store_row(columns - 1)

    def all_columns(place: int, x: Any, factor: Any) -> None:
        one(place, x, factor)
        others(place + 64, x[16:], factor)

    return all_columns
