"""What a warp multiplies in attention by rounded halves: 32 queries with blocks of the K/V.

Queries are *pairs* of a row and a head. A product has 16 of them in its rows, so a warp has two of
each product, and what it loads of keys and values serves both. A lane 4 * g + t has four pairs: g,
g + 8, g + 16 and g + 24. A *chunk* is 16 cells, or 16 values; of it a lane has 16 sums:

    0, 1     pair g,      columns 2 * t, 2 * t + 1        8, 9     pair g + 16
    2, 3     pair g + 8                                   10, 11   pair g + 24
    4 .. 7   the same, 8 columns further                  12 .. 15

Scores of a chunk of cells, as halves, are in just the order in which products with values want
their weights.

Tuples become registers; sums are a tuple of chunks. Functions are made for a number of chunks, and
work on the first and leave the others to the function for one less. Rows of queries, keys and
values lie in shared memory with their pieces of 16 bytes turned (`turned`): a step of 16 values is
one xor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    i32,
    mma_of_halves,
    shared_load_matrices,
    shared_load_turned,
    store_f32,
)
from strata_nb.kernels.gpu.operations import Function

CHUNK = 16
_STEP = 32  # bytes of a chunk of values
_FEW = 4


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


def _of_pairs(numbers: Any) -> Any:
    a, b, c, d = numbers
    chunk = a, a, b, b, a, a, b, b, c, c, d, d, c, c, d, d
    return chunk, chunk, chunk, chunk


@cache
def of_pairs(chunks: int) -> Function:
    """Return a function (numbers) of four numbers, one of each pair: 4 or 8 chunks of them."""
    if chunks == _FEW:
        return _of_pairs
    return lambda numbers: _of_pairs(numbers) + _of_pairs(numbers)


@cache
def of_each(one: Function, chunks: int) -> Function:
    """Return a function (sums, by): what `one` makes of each chunk and `by`."""
    if chunks == 1:
        return lambda sums, by: (one(sums[0], by),)
    others = of_each(one, chunks - 1)
    return lambda sums, by: (one(sums[0], by), *others(sums[1:], by))


# -- queries times keys ----------------------------------------------------------------------------


@cache
def _columns_of_keys(chunks: int, pitch: int) -> Function:
    """Return a function (a, place, sums): sums and the products of 16 values of so many chunks."""
    if chunks == 1:
        return lambda a, place, sums: (_products(a, shared_load_matrices(place), sums[0]),)
    others = _columns_of_keys(chunks - 1, pitch)

    def products(a: Any, place: int, sums: Any) -> Any:
        first = _products(a, shared_load_matrices(place), sums[0])
        return (first, *others(a, place + CHUNK * pitch, sums[1:]))

    return products


@cache
def _key_step(pitch: int, chunks: int) -> Function:
    """Return a function (queries, keys, sums): sums and the products of 16 values."""
    columns = _columns_of_keys(chunks, pitch)

    def multiply(queries: int, keys: int, sums: Any) -> Any:
        a = shared_load_matrices(queries) + shared_load_matrices(queries + CHUNK * pitch)
        return columns(a, keys, sums)

    return multiply


@cache
def key_products(steps: int, pitch: int, chunks: int, step: int = 0) -> Function:
    """Return a function (queries, keys, sums): sums and the products of chunks of cells.

    steps           of 16 values
    queries, keys   where a lane finds the row that it loads for a warp: of the first 16 pairs, of
                    the first chunk
    """
    multiply, further = _key_step(pitch, chunks), _STEP * step
    if step == steps - 1:
        return lambda queries, keys, sums: multiply(
            i32(queries ^ further), i32(keys ^ further), sums
        )
    others = key_products(steps, pitch, chunks, step + 1)

    def products(queries: int, keys: int, sums: Any) -> Any:
        sums = multiply(i32(queries ^ further), i32(keys ^ further), sums)
        return others(queries, keys, sums)

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
        place = i32(values ^ further) + offset
        return _products(weights, shared_load_turned(place), sums)

    if column + 1 == columns:
        return lambda weights, values, offset, sums: (one(weights, values, offset, sums[0]),)
    others = value_products(columns, column + 1)

    def products(weights: Any, values: int, offset: int, sums: Any) -> Any:
        first = one(weights, values, offset, sums[0])
        return (first, *others(weights, values, offset, sums[1:]))

    return products


@cache
def store_row(pair: int, columns: int) -> Function:
    """Return a function (place, sums, factor): stores the values of one of a lane's four pairs,
    times a factor; place is that of the lane's first."""
    first = (0, 2, 8, 10)[pair]
    second, third, fourth = first + 1, first + 4, first + 5

    def one(place: int, x: Any, factor: Any) -> None:
        store_f32(place, x[first] * factor)
        store_f32(place + 4, x[second] * factor)
        store_f32(place + 32, x[third] * factor)
        store_f32(place + 36, x[fourth] * factor)

    if columns == 1:
        return lambda place, sums, factor: one(place, sums[0], factor)
    others = store_row(pair, columns - 1)

    def all_columns(place: int, sums: Any, factor: Any) -> None:
        one(place, sums[0], factor)
        others(place + 64, sums[1:], factor)

    return all_columns
