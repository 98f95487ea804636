"""What a warp multiplies in attention of a prompt batch: 16 queries with cells of keys and values.

A matrix of products has the queries in its rows, which are *pairs* of a row and a head: lane
4 * g + t has pairs g and g + 8. A *chunk* is 16 cells that are neighbours, two columns of products
with keys. Of keys a lane loads 16 bytes of cell g at a time, of values 8 bytes of cells 2 * t and
2 * t + 1: that these are neighbours in a cell is the order of sums of `attention_halves.py`. Scores
are of cells 2 * t and 2 * t + 1, just what products with values want of their weights.

Tuples become registers; functions are made for a length, and work on the first items and leave the
others to the next shorter one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.attention_sets import ROUND
from strata_nb.kernels.gpu.exponential import weight_of
from strata_nb.kernels.gpu.halves import halves_of, magnitude_of, sum_of_parts
from strata_nb.kernels.gpu.intrinsics import (
    f32,
    high_halves,
    i32,
    larger_f32,
    load_4xf32,
    low_halves,
    mma_of_halves,
    shared_load_2xi32,
    shared_load_4xi32,
    shuffle_xor_f32,
)
from strata_nb.kernels.gpu.operations import Function

_MINUS_INFINITY = float("-inf")


# -- keys ------------------------------------------------------------------------------------------
# A lane has of each 16 values of the queries eight words: as A has them of the nearest halves, and
# of the rest. Half a set is 4 columns of 8 cells; of each a lane has eight sums, of the
# nearest halves and of the rest.


def _add(a: Any, x: Any, y: Any, c: Any) -> Any:
    return mma_of_halves(a[0], a[1], a[2], a[3], x, y, c[0], c[1], c[2], c[3])


def _key_step(a: Any, x: Any, y: Any, c: Any) -> Any:
    """Return the sums of a column and the products of 16 values."""
    return _add(a[:4], x, y, c[:4]) + _add(a[4:], x, y, c[4:])


def _key_steps(a: Any, x: Any, y: Any, c: Any) -> Any:
    return _key_step(a, x[0], x[1], c[:8]) + _key_step(a, y[0], y[1], c[8:])


@cache
def key_products(pieces: int, pitch: int, piece: int = 0) -> Function:
    """Return a function (queries, even, odd, sums): sums and the products of a chunk.

    pieces      of 32 values
    even, odd   where a lane finds the first piece, and where every other piece is as if the first
                were there
    """
    offset, is_odd = 64 * piece, piece % 2 == 1

    def multiply(queries: Any, even: int, odd: int, sums: Any) -> Any:
        place = (odd if is_odd else even) + offset
        x, y = shared_load_4xi32(place), shared_load_4xi32(place + 8 * pitch)
        sums = _key_steps(queries[:8], x[:2], y[:2], sums)
        return _key_steps(queries[8:16], x[2:], y[2:], sums)

    if piece + 1 == pieces:
        return multiply
    others = key_products(pieces, pitch, piece + 1)

    def products(queries: Any, even: int, odd: int, sums: Any) -> Any:
        return others(queries[16:], even, odd, multiply(queries, even, odd, sums))

    return products


def _joined_column(sums: Any) -> Any:
    first = sum_of_parts(sums[0], sums[4]), sum_of_parts(sums[1], sums[5])
    return (*first, sum_of_parts(sums[2], sums[6]), sum_of_parts(sums[3], sums[7]))


def joined(sums: Any) -> Any:
    """Return the scores of a chunk, not yet scaled: of each column two of both pairs."""
    return _joined_column(sums[:8]) + _joined_column(sums[8:])


def scaled(found: Any, scales: Any) -> Any:
    """Return the scores of a chunk times the scales of both pairs."""
    first = found[0] * scales[0], found[1] * scales[0], found[2] * scales[1], found[3] * scales[1]
    second = found[4] * scales[0], found[5] * scales[0], found[6] * scales[1], found[7] * scales[1]
    return first + second


def _seen_column(found: Any, seen: Any, cell: int) -> Any:
    nothing = f32(_MINUS_INFINITY)
    a = found[0] if seen[0] >= cell else nothing
    b = found[1] if seen[0] >= cell + 1 else nothing
    c = found[2] if seen[1] >= cell else nothing
    d = found[3] if seen[1] >= cell + 1 else nothing
    return a, b, c, d


def seen_ones(found: Any, seen: Any) -> Any:
    """Return the scores of a chunk, -infinity in place of those of cells that nobody sees.

    seen   of both pairs, how far behind a lane's first cell the last one is that is seen
    """
    return _seen_column(found[:4], seen, 0) + _seen_column(found[4:], seen, 8)


def largest_of(found: Any, best: Any) -> Any:
    """Return the largest score of a chunk's of each pair, and of what was best."""
    first = larger_f32(larger_f32(found[0], found[1]), larger_f32(found[4], found[5]))
    second = larger_f32(larger_f32(found[2], found[3]), larger_f32(found[6], found[7]))
    return larger_f32(best[0], first), larger_f32(best[1], second)


def largest_of_quad(x: Any) -> Any:
    x = larger_f32(x, shuffle_xor_f32(x, 1))
    return larger_f32(x, shuffle_xor_f32(x, 2))


def finite_of(best: Any) -> Any:
    """Return the score from which weights count: while all are -infinity, any gives them 0."""
    return f32(0.0) if best == f32(_MINUS_INFINITY) else best


def weigh(found: Any, best: Any, totals: Any) -> Any:
    """Return the eight words of a chunk's weights as halves, and the sums with them."""
    a, b = weight_of(found[0] - best[0]), weight_of(found[1] - best[0])
    c, d = weight_of(found[2] - best[1]), weight_of(found[3] - best[1])
    e, f = weight_of(found[4] - best[0]), weight_of(found[5] - best[0])
    g, h = weight_of(found[6] - best[1]), weight_of(found[7] - best[1])
    first, second, third, fourth = (
        halves_of(a, b),
        halves_of(c, d),
        halves_of(e, f),
        halves_of(g, h),
    )
    words = (first[0], second[0], third[0], fourth[0], first[1], second[1], third[1], fourth[1])
    return words, (totals[0] + ((a + b) + (e + f)), totals[1] + ((c + d) + (g + h)))


# -- values ----------------------------------------------------------------------------------------
# 32 values at a time are 4 columns: value 4 * g + n of a piece is column g of the n-th. Of each a
# lane has four sums.


def _value_step(x: Any, y: Any, weights: Any, sums: Any) -> Any:
    """Return the sums of a column and the products of a chunk."""
    return _add(weights[4:], x, y, _add(weights[:4], x, y, sums))


def _value_steps(a: Any, b: Any, c: Any, d: Any, weights: Any, sums: Any) -> Any:
    """Return the sums of two columns: a word of each of a lane's four cells."""
    first = _value_step(low_halves(a, b), low_halves(c, d), weights, sums[:4])
    return first + _value_step(high_halves(a, b), high_halves(c, d), weights, sums[4:])


def _chunk_products(place: int, pitch: int, weights: Any, sums: Any) -> Any:
    """Return sums and values times weights of 16 cells."""
    a, b = shared_load_2xi32(place), shared_load_2xi32(place + pitch)
    c, d = shared_load_2xi32(place + 8 * pitch), shared_load_2xi32(place + 9 * pitch)
    first = _value_steps(a[0], b[0], c[0], d[0], weights, sums[:8])
    return first + _value_steps(a[1], b[1], c[1], d[1], weights, sums[8:])


def no_sums() -> Any:
    """Return 16 zeros."""
    zero = f32(0.0)
    four = zero, zero, zero, zero
    return four + four + four + four


def no_weights() -> Any:
    """Return the words of a chunk's weights that are 0."""
    nothing = i32(0)
    four = nothing, nothing, nothing, nothing
    return four + four


@cache
def no_results(pieces: int) -> Function:
    """Return a function that returns the sums of nothing for so many pieces of 32 values."""
    if pieces == 1:
        return no_sums
    others = no_results(pieces - 1)

    def zeros() -> Any:
        return no_sums() + others()

    return zeros


def _eight_added(a: Any, b: Any) -> Any:
    first = a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]
    return (*first, a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7])


@cache
def value_products(pieces: int, pitch: int, piece: int = 0) -> Function:
    """Return a function (even, odd, weights, ahead, sums): sums and values times weights of a set.

    pieces      of 32 values
    even, odd   where a lane finds the first piece and the second, and every other one behind them
    weights     four tuples of words, of each chunk
    ahead       how far the last cell that someone sees is behind the set's first one
    """
    offset, is_odd = 128 * (piece // 2), piece % 2 == 1

    def one(even: int, odd: int, weights: Any, ahead: int, sums: Any) -> Any:
        place = (odd if is_odd else even) + offset
        found = _chunk_products(place, pitch, weights[0], no_sums())
        if ahead >= ROUND:
            found = _chunk_products(place + 16 * pitch, pitch, weights[1], found)
        if ahead >= 2 * ROUND:
            found = _chunk_products(place + 32 * pitch, pitch, weights[2], found)
        if ahead >= 3 * ROUND:
            found = _chunk_products(place + 48 * pitch, pitch, weights[3], found)
        return _eight_added(sums[:8], found[:8]) + _eight_added(sums[8:], found[8:])

    if piece + 1 == pieces:
        return one
    others = value_products(pieces, pitch, piece + 1)

    def all_pieces(even: int, odd: int, weights: Any, ahead: int, sums: Any) -> Any:
        first = one(even, odd, weights, ahead, sums[:16])
        return first + others(even, odd, weights, ahead, sums[16:])

    return all_pieces


# -- queries ---------------------------------------------------------------------------------------


@cache
def query_loader(pieces: int) -> Function:
    """Return a function (place): of each 32 values of a query the eight that a lane multiplies."""

    def eight(place: int) -> Any:
        return load_4xf32(place) + load_4xf32(place + 16)

    if pieces == 1:
        return eight
    others = query_loader(pieces - 1)

    def load(place: int) -> Any:
        return eight(place) + others(place + 128)

    return load


def _magnitude_of_eight(x: Any) -> Any:
    a = larger_f32(magnitude_of(x[0]), magnitude_of(x[1]))
    b = larger_f32(magnitude_of(x[2]), magnitude_of(x[3]))
    c = larger_f32(magnitude_of(x[4]), magnitude_of(x[5]))
    d = larger_f32(magnitude_of(x[6]), magnitude_of(x[7]))
    return larger_f32(larger_f32(a, b), larger_f32(c, d))


@cache
def query_magnitude(pieces: int) -> Function:
    """Return a function that returns the largest magnitude of so many eight floats."""
    if pieces == 1:
        return _magnitude_of_eight
    others = query_magnitude(pieces - 1)

    def largest(x: Any) -> Any:
        return larger_f32(_magnitude_of_eight(x[:8]), others(x[8:]))

    return largest


def _sixteen(x: Any, y: Any, ups: Any) -> Any:
    """Return the words of four values of a lane, of both queries."""
    a, b = halves_of(x[0] * ups[0], x[1] * ups[0]), halves_of(y[0] * ups[1], y[1] * ups[1])
    c, d = halves_of(x[2] * ups[0], x[3] * ups[0]), halves_of(y[2] * ups[1], y[3] * ups[1])
    return a[0], b[0], c[0], d[0], a[1], b[1], c[1], d[1]


@cache
def query_words(pieces: int) -> Function:
    """Return a function (x, y, ups): the words of so many eight values of two queries."""

    def eight(x: Any, y: Any, ups: Any) -> Any:
        return _sixteen(x[:4], y[:4], ups) + _sixteen(x[4:8], y[4:8], ups)

    if pieces == 1:
        return eight
    others = query_words(pieces - 1)

    def words(x: Any, y: Any, ups: Any) -> Any:
        return eight(x, y, ups) + others(x[8:], y[8:], ups)

    return words
