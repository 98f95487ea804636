"""Scores, weights and sums of attention of a prompt batch over halves, as a lane has them.

Queries are *pairs* of a row and a head. Of a matrix of products with 16 pairs in its rows lane
4 * g + t has pairs g and g + 8. A *chunk* is 16 columns, of cells or of values. Of it a lane has
eight numbers:

    0, 1     pair g,     columns 2 * t and 2 * t + 1
    2, 3     pair g + 8
    4 .. 7   the same, 8 columns further

Scores of a chunk of cells, as halves, are in just the order in which products with values want
their weights.

A weight is 2 ** score, where a number of the pair's own was added to its scores: its *offset*. At
the first block of cells that brings the largest score to 9. Weights are summed as float32 and
multiplied as halves, which go up to 2 ** 16: where a score of a block is more than 15, the offset
is made smaller, so that the block's largest is 9, and what was summed shrinks. That is seldom: a
warp asks only whether one of its lanes has such a score. What a pair does then follows from its own
scores, whoever else's are too large.

Tuples become registers. Functions are made for a number of chunks; they work on the first and leave
the others to the function for one less.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    f32,
    halves_of_f32,
    i32,
    larger_f32,
    power_of_two,
    shuffle_xor_f32,
    store_f32,
)
from strata_nb.kernels.gpu.operations import Function

CHUNK = 16
MOST = 15.0  # of a score with its offset; more ask for another offset
_UNIT = 9.0  # of the largest score when an offset is chosen
_MINUS_INFINITY = float("-inf")


def _of_pairs(a: Any, b: Any) -> Any:
    return a, a, b, b, a, a, b, b


@cache
def of_pairs(chunks: int) -> Function:
    """Return a function (a, b): chunks, a power of two of them, of a number of each pair."""
    if chunks == 1:
        return _of_pairs
    half = of_pairs(chunks // 2)
    return lambda a, b: half(a, b) + half(a, b)


@cache
def of_each(one: Function, chunks: int) -> Function:
    """Return a function (x, a, b): what `one` makes of each chunk and two numbers, of the pairs."""
    if chunks == 1:
        return one
    others = of_each(one, chunks - 1)
    return lambda x, a, b: one(x[:8], a, b) + others(x[8:], a, b)


def added(x: Any, a: Any, b: Any) -> Any:
    """Return a chunk and a number of each pair."""
    return x[0] + a, x[1] + a, x[2] + b, x[3] + b, x[4] + a, x[5] + a, x[6] + b, x[7] + b


def times(x: Any, a: Any, b: Any) -> Any:
    """Return a chunk times a number of each pair."""
    return x[0] * a, x[1] * a, x[2] * b, x[3] * b, x[4] * a, x[5] * a, x[6] * b, x[7] * b


# -- scores ----------------------------------------------------------------------------------------


def _seen_ones(x: Any, seen: Any, other: Any) -> Any:
    nothing, half = f32(_MINUS_INFINITY), CHUNK // 2
    return (
        x[0] if seen >= 0 else nothing,
        x[1] if seen >= 1 else nothing,
        x[2] if other >= 0 else nothing,
        x[3] if other >= 1 else nothing,
        x[4] if seen >= half else nothing,
        x[5] if seen >= half + 1 else nothing,
        x[6] if other >= half else nothing,
        x[7] if other >= half + 1 else nothing,
    )


@cache
def seen_ones(chunks: int) -> Function:
    """Return a function (x, seen, other): the scores, -infinity where a pair does not see the cell.

    seen, other   of both pairs, how far behind a lane's first cell the last one is that it sees
    """
    if chunks == 1:
        return _seen_ones
    others = seen_ones(chunks - 1)

    def all_chunks(x: Any, seen: Any, other: Any) -> Any:
        return _seen_ones(x[:8], seen, other) + others(x[8:], i32(seen - CHUNK), i32(other - CHUNK))

    return all_chunks


def _largest_of(x: Any, a: Any, b: Any) -> Any:
    c = larger_f32(larger_f32(x[0], x[1]), larger_f32(x[4], x[5]))
    d = larger_f32(larger_f32(x[2], x[3]), larger_f32(x[6], x[7]))
    return larger_f32(a, c), larger_f32(b, d)


@cache
def _largest_of_all(chunks: int) -> Function:
    if chunks == 1:
        return _largest_of
    others = _largest_of_all(chunks - 1)

    def largest(x: Any, a: Any, b: Any) -> Any:
        c, d = _largest_of(x[:8], a, b)
        return others(x[8:], c, d)

    return largest


@cache
def largest_of(chunks: int) -> Function:
    """Return a function (x): the largest of a lane's scores of each pair. Of NaN others count."""
    largest = _largest_of_all(chunks)
    return lambda x: largest(x, f32(_MINUS_INFINITY), f32(_MINUS_INFINITY))


def _largest_of_quad(x: Any) -> Any:
    x = larger_f32(x, shuffle_xor_f32(x, 1))
    return larger_f32(x, shuffle_xor_f32(x, 2))


def chosen(best: Any, most: Any) -> Any:
    """Return what brings a pair's largest score to 9 if it is more than `most`, or else 0. All
    lanes of a warp take part; best is the largest of the lane's."""
    best = _largest_of_quad(best)
    return f32(_UNIT) - best if best > most else f32(0.0)


@cache
def beginner(chunks: int) -> Function:
    """Return a function (x): the scores of a first block, and the offsets that they now have. All
    lanes of a warp take part."""
    largest, shift = largest_of(chunks), of_each(added, chunks)

    def begin(x: Any) -> Any:
        a, b = largest(x)
        a, b = chosen(a, f32(_MINUS_INFINITY)), chosen(b, f32(_MINUS_INFINITY))
        return shift(x, a, b), (a, b)

    return begin


@cache
def tamer(chunks: int, columns: int) -> Function:
    """Return a function (x, best, offsets, totals, sums): all these, but best, with other offsets
    for pairs that have a score above 15. All lanes of a warp take part.

    best      the largest of a lane's scores of each pair
    columns   chunks of values
    """
    shift, shrink = of_each(added, chunks), of_each(times, columns)

    def tame(x: Any, best: Any, offsets: Any, totals: Any, sums: Any) -> Any:
        a, b = chosen(best[0], f32(MOST)), chosen(best[1], f32(MOST))
        c, d = power_of_two(a), power_of_two(b)
        offsets = offsets[0] + a, offsets[1] + b
        totals = totals[0] * c, totals[1] * d
        return shift(x, a, b), offsets, totals, shrink(sums, c, d)

    return tame


# -- weights and results ---------------------------------------------------------------------------


def weighed(x: Any, totals: Any) -> Any:
    """Return the four words of a chunk's weights as halves, and totals with the weights."""
    a, b, c, d = power_of_two(x[0]), power_of_two(x[1]), power_of_two(x[2]), power_of_two(x[3])
    e, f, g, h = power_of_two(x[4]), power_of_two(x[5]), power_of_two(x[6]), power_of_two(x[7])
    words = halves_of_f32(a, b), halves_of_f32(c, d), halves_of_f32(e, f), halves_of_f32(g, h)
    return words, (totals[0] + ((a + b) + (e + f)), totals[1] + ((c + d) + (g + h)))


@cache
def weights_of(chunks: int) -> Function:
    """Return a function (x, totals): the words of chunks' weights, and totals with the weights."""
    if chunks == 1:
        return weighed
    others = weights_of(chunks - 1)

    def all_chunks(x: Any, totals: Any) -> Any:
        words, totals = weighed(x[:8], totals)
        more, totals = others(x[8:], totals)
        return words + more, totals

    return all_chunks


def sum_of_quad(total: Any) -> Any:
    """Return the sum of a pair's weights, of those of a lane. All lanes of a warp take part."""
    total += shuffle_xor_f32(total, 1)
    return total + shuffle_xor_f32(total, 2)


@cache
def storer(columns: int, first: int) -> Function:
    """Return a function (place, sums, factor): stores the values of a pair times a factor.

    first   0 for pair g, 2 for pair g + 8
    place   of the first value that the lane has
    """
    second, third, fourth = first + 1, first + 4, first + 5

    def one(place: int, x: Any, factor: Any) -> None:
        store_f32(place, x[first] * factor)
        store_f32(place + 4, x[second] * factor)
        store_f32(place + 32, x[third] * factor)
        store_f32(place + 36, x[fourth] * factor)

    if columns == 1:
        return one
    others = storer(columns - 1, first)

    def store(place: int, x: Any, factor: Any) -> None:
        one(place, x[:8], factor)
        others(place + 64, x[8:], factor)

    return store
