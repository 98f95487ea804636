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
    f32,
    halves_of_f32,
    i32,
    larger_f32,
    mma_of_halves,
    shared_load_matrices,
    store_f32,
)
from strata_nb.kernels.gpu.intrinsics import power_of_two, shared_load_turned
from strata_nb.kernels.gpu.operations import Function

CHUNK = 16
_STEP = 32  # bytes of a chunk of values
_MINUS_INFINITY = float("-inf")


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
def zeros(chunks: int) -> Function:
    """Return a function that returns the sums of nothing, of so many chunks."""

    def of_one() -> Any:
        zero = f32(0.0)
        four = zero, zero, zero, zero
        return four + four + four + four

    if chunks == 1:
        return of_one
    others = zeros(chunks - 1)

    def of_all() -> Any:
        return of_one() + others()

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


# -- scores to weights -----------------------------------------------------------------------------


@cache
def seen_ones(chunks: int, chunk: int = 0) -> Function:
    """Return a function (found, seen): the scores, -infinity where a pair does not see the cell.

    seen   of the four pairs, how far behind a lane's first cell the last one is that it sees
    """

    def column(found: Any, seen: Any, cell: int) -> Any:
        nothing = f32(_MINUS_INFINITY)
        a = found[0] if seen[0] >= cell else nothing
        b = found[1] if seen[0] >= cell + 1 else nothing
        c = found[2] if seen[1] >= cell else nothing
        d = found[3] if seen[1] >= cell + 1 else nothing
        return a, b, c, d

    cell, further = CHUNK * chunk, CHUNK * chunk + CHUNK // 2

    def one(found: Any, seen: Any) -> Any:
        first = column(found[:4], seen[:2], cell) + column(found[4:8], seen[:2], further)
        second = column(found[8:12], seen[2:], cell) + column(found[12:16], seen[2:], further)
        return first + second

    if chunk + 1 == chunks:
        return one
    others = seen_ones(chunks, chunk + 1)

    def all_chunks(found: Any, seen: Any) -> Any:
        return one(found[:16], seen) + others(found[16:], seen)

    return all_chunks


def _largest_of_two(x: Any, best: Any) -> Any:
    first = larger_f32(larger_f32(x[0], x[1]), larger_f32(x[4], x[5]))
    second = larger_f32(larger_f32(x[2], x[3]), larger_f32(x[6], x[7]))
    return larger_f32(best[0], first), larger_f32(best[1], second)


@cache
def largest_of(chunks: int) -> Function:
    """Return a function (found, best): the largest of a lane's scores of each pair, and of best."""

    def one(found: Any, best: Any) -> Any:
        return _largest_of_two(found[:8], best[:2]) + _largest_of_two(found[8:16], best[2:])

    if chunks == 1:
        return one
    others = largest_of(chunks - 1)

    def all_chunks(found: Any, best: Any) -> Any:
        return others(found[16:], one(found, best))

    return all_chunks


def _weigh_two(x: Any, offsets: Any, totals: Any) -> Any:
    """Return the four words of two pairs' weights, and their totals."""
    a, b = power_of_two(x[0] + offsets[0]), power_of_two(x[1] + offsets[0])
    c, d = power_of_two(x[2] + offsets[1]), power_of_two(x[3] + offsets[1])
    e, f = power_of_two(x[4] + offsets[0]), power_of_two(x[5] + offsets[0])
    g, h = power_of_two(x[6] + offsets[1]), power_of_two(x[7] + offsets[1])
    words = halves_of_f32(a, b), halves_of_f32(c, d), halves_of_f32(e, f), halves_of_f32(g, h)
    return words, (totals[0] + ((a + b) + (e + f)), totals[1] + ((c + d) + (g + h)))


@cache
def weigh(chunks: int) -> Function:
    """Return a function (found, offsets, totals): eight words a chunk, the halves nearest to
    2 ** (score + offset); and totals with these weights."""

    def one(found: Any, offsets: Any, totals: Any) -> Any:
        words, first = _weigh_two(found[:8], offsets[:2], totals[:2])
        more, second = _weigh_two(found[8:16], offsets[2:], totals[2:])
        return words + more, first + second

    if chunks == 1:
        return one
    others = weigh(chunks - 1)

    def all_chunks(found: Any, offsets: Any, totals: Any) -> Any:
        words, totals = one(found, offsets, totals)
        more, totals = others(found[16:], offsets, totals)
        return words + more, totals

    return all_chunks


# -- weights times values --------------------------------------------------------------------------


@cache
def _columns_of_values(columns: int, offset: int, column: int = 0) -> Function:
    """Return a function (a, place, sums): sums and so many chunks of values times weights.

    offset   of the chunk of cells
    """
    further = _STEP * column

    def one(a: Any, place: int, sums: Any) -> Any:
        return _products(a, shared_load_turned(i32(place ^ further) + offset), sums)

    if column + 1 == columns:
        return one
    others = _columns_of_values(columns, offset, column + 1)

    def all_columns(a: Any, place: int, sums: Any) -> Any:
        return one(a, place, sums[:16]) + others(a, place, sums[16:])

    return all_columns


@cache
def value_products(columns: int, pitch: int, chunks: int, chunk: int = 0) -> Function:
    """Return a function (weights, values, sums): sums and the products of chunks of cells.

    columns   chunks of values
    values    where a lane finds the row that it loads for a warp, of the first chunk of cells
    """
    one = _columns_of_values(columns, CHUNK * pitch * chunk)
    if chunk + 1 == chunks:
        return one
    others = value_products(columns, pitch, chunks, chunk + 1)

    def products(weights: Any, values: int, sums: Any) -> Any:
        return others(weights[8:], values, one(weights[:8], values, sums))

    return products


def _times_two(x: Any, by: Any) -> Any:
    first = x[0] * by[0], x[1] * by[0], x[2] * by[1], x[3] * by[1]
    return (*first, x[4] * by[0], x[5] * by[0], x[6] * by[1], x[7] * by[1])


@cache
def times(chunks: int) -> Function:
    """Return a function (sums, factors): the sums of each pair times its factor."""

    def one(x: Any, by: Any) -> Any:
        return _times_two(x[:8], by[:2]) + _times_two(x[8:16], by[2:])

    if chunks == 1:
        return one
    others = times(chunks - 1)

    def all_chunks(x: Any, by: Any) -> Any:
        return one(x, by) + others(x[16:], by)

    return all_chunks


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
