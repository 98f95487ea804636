"""What a warp multiplies in attention of a prompt batch over halves: 32 pairs with a K/V block.

A product has 16 pairs in its rows, so a warp has two of each: what it loads of keys and values
serves both. Numbers of a lane are as `attention_weights.py` has them, once for the *lower* 16 pairs
and once for the *upper*.

Rows of queries, keys and values lie in shared memory with their pieces of 16 bytes turned
(`turned`): a step of 16 values is one xor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.attention_weights import CHUNK, weighed
from strata_nb.kernels.gpu.intrinsics import (
    i32,
    mma_of_halves,
    shared_load_matrices,
    shared_load_turned,
)
from strata_nb.kernels.gpu.operations import Function

_STEP = 32  # bytes of a chunk of values


@cache
def turned(length: int) -> Function:
    """Return a function (row, piece): where a piece of 16 bytes of a row of so many halves lies.

    Eight rows' same piece is in all banks.
    """
    return lambda row, piece: 2 * length * row + 16 * (piece ^ (row & 7))


def _products(a: Any, x: Any, c: Any) -> Any:
    """Return a chunk's sums and the products of 16 pairs with its columns."""
    first = mma_of_halves(a[0], a[1], a[2], a[3], x[0], x[1], c[0], c[1], c[2], c[3])
    return first + mma_of_halves(a[0], a[1], a[2], a[3], x[2], x[3], c[4], c[5], c[6], c[7])


# -- queries times keys ----------------------------------------------------------------------------


@cache
def _cells(chunks: int, pitch: int) -> Function:
    """Return a function (a, b, place, lower, upper): both sums and the products of 16 values of
    queries, a and b, with chunks of cells."""

    def one(a: Any, b: Any, place: int, lower: Any, upper: Any) -> Any:
        x = shared_load_matrices(place)
        return _products(a, x, lower), _products(b, x, upper)

    if chunks == 1:
        return one
    others = _cells(chunks - 1, pitch)

    def products(a: Any, b: Any, place: int, lower: Any, upper: Any) -> Any:
        c, d = one(a, b, place, lower[:8], upper[:8])
        e, f = others(a, b, place + CHUNK * pitch, lower[8:], upper[8:])
        return c + e, d + f

    return products


@cache
def key_products(steps: int, pitch: int, chunks: int, step: int = 0) -> Function:
    """Return a function (queries, keys, lower, upper): both sums and the products with cells.

    steps           of 16 values
    pitch           bytes from a row to the next
    queries, keys   where a lane finds the row that it loads for a warp: of the lower pairs, of the
                    first chunk of cells
    """
    cells, further = _cells(chunks, pitch), _STEP * step

    def one(queries: int, keys: int, lower: Any, upper: Any) -> Any:
        place = i32(queries ^ further)
        a, b = shared_load_matrices(place), shared_load_matrices(place + CHUNK * pitch)
        return cells(a, b, i32(keys ^ further), lower, upper)

    if step + 1 == steps:
        return one
    others = key_products(steps, pitch, chunks, step + 1)

    def products(queries: int, keys: int, lower: Any, upper: Any) -> Any:
        lower, upper = one(queries, keys, lower, upper)
        return others(queries, keys, lower, upper)

    return products


# -- weights times values --------------------------------------------------------------------------


@cache
def _values(columns: int, column: int = 0) -> Function:
    """Return a function (a, b, values, offset, lower, upper): both sums and the products of a chunk
    of cells, whose weights are a and b, with chunks of values."""
    further = _STEP * column

    def one(a: Any, b: Any, values: int, offset: int, lower: Any, upper: Any) -> Any:
        x = shared_load_turned(i32(values ^ further) + offset)
        return _products(a, x, lower), _products(b, x, upper)

    if column + 1 == columns:
        return one
    others = _values(columns, column + 1)

    def products(a: Any, b: Any, values: int, offset: int, lower: Any, upper: Any) -> Any:
        c, d = one(a, b, values, offset, lower[:8], upper[:8])
        e, f = others(a, b, values, offset, lower[8:], upper[8:])
        return c + e, d + f

    return products


@cache
def mixer(columns: int, pitch: int, chunks: int, chunk: int = 0) -> Function:
    """Return a function (x, y, values, totals, lower, upper) for chunks of cells, one by one: adds
    the weights of scores x and y to both totals, values times weights to both sums, and returns
    these.

    columns   chunks of values
    pitch     bytes from the values of a cell to those of the next
    values    where a lane finds the row that it loads for a warp, of the first chunk of cells
    """
    multiply, offset = _values(columns), CHUNK * pitch * chunk

    def one(x: Any, y: Any, values: int, totals: Any, lower: Any, upper: Any) -> Any:
        a, first = weighed(x, totals[0])
        b, second = weighed(y, totals[1])
        lower, upper = multiply(a, b, values, i32(offset), lower, upper)
        return (first, second), lower, upper

    if chunk + 1 == chunks:
        return one
    others = mixer(columns, pitch, chunks, chunk + 1)

    def mix(x: Any, y: Any, values: int, totals: Any, lower: Any, upper: Any) -> Any:
        totals, lower, upper = one(x[:8], y[:8], values, totals, lower, upper)
        return others(x[8:], y[8:], values, totals, lower, upper)

    return mix
