"""The weights of attention by rounded halves: what scores become, and what sums do meanwhile.

A weight is 2 ** score, where a number of the pair's own was added to its scores: its *offset*. At
the first block of cells that brings the largest score to 9. Weights are summed as float32 and
multiplied as halves, which go up to 2 ** 16: where a score of a block is more than 15, the offset
is made smaller, so that the block's largest is 9, and what was summed shrinks. That is seldom: a
warp asks only whether one of its lanes has such a score. What a pair does then follows from its own
scores, whoever else's are too large.

Items of tuples as `attention_fragments.py` says.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.attention_fragments import CHUNK, value_products
from strata_nb.kernels.gpu.intrinsics import (
    f32,
    halves_of_f32,
    i32,
    larger_f32,
    of_any_lane,
    power_of_two,
    shuffle_xor_f32,
)
from strata_nb.kernels.gpu.operations import Function

_UNIT, _MOST = 9.0, 15.0  # the largest score after an offset was chosen, and until one is
_MINUS_INFINITY = float("-inf")


@cache
def seen_ones(chunks: int) -> Function:
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

    def one(found: Any, seen: Any) -> Any:
        x, half = found[0], CHUNK // 2
        first = column(x[:4], seen[:2], 0) + column(x[4:8], seen[:2], half)
        return (first + column(x[8:12], seen[2:], 0) + column(x[12:], seen[2:], half),)

    if chunks == 1:
        return one
    others = seen_ones(chunks - 1)

    def all_chunks(found: Any, seen: Any) -> Any:
        a, b, c, d = seen
        behind = i32(a - CHUNK), i32(b - CHUNK), i32(c - CHUNK), i32(d - CHUNK)
        return one(found, seen) + others(found[1:], behind)

    return all_chunks


# -- offsets ---------------------------------------------------------------------------------------


def _largest_of_two(x: Any, best: Any) -> Any:
    first = larger_f32(larger_f32(x[0], x[1]), larger_f32(x[4], x[5]))
    second = larger_f32(larger_f32(x[2], x[3]), larger_f32(x[6], x[7]))
    return larger_f32(best[0], first), larger_f32(best[1], second)


@cache
def _largest_of(chunks: int) -> Function:
    """Return a function (found, best): the largest of a lane's scores of each pair, and of best."""

    def one(found: Any, best: Any) -> Any:
        x = found[0]
        return _largest_of_two(x[:8], best[:2]) + _largest_of_two(x[8:], best[2:])

    if chunks == 1:
        return one
    others = _largest_of(chunks - 1)

    def all_chunks(found: Any, best: Any) -> Any:
        return others(found[1:], one(found, best))

    return all_chunks


def _nothing() -> Any:
    nothing = f32(_MINUS_INFINITY)
    return nothing, nothing, nothing, nothing


def _largest_of_quad(x: Any) -> Any:
    x = larger_f32(x, shuffle_xor_f32(x, 1))
    return larger_f32(x, shuffle_xor_f32(x, 2))


def _chosen(best: Any, most: Any) -> Any:
    """Return what brings a pair's largest score to 9 if it is more than `most`, or else 0."""
    best = _largest_of_quad(best)
    return f32(_UNIT) - best if best > most else f32(0.0)


@cache
def offsets_of(chunks: int) -> Function:
    """Return a function (found): what brings the largest score of each pair to 9, or 0 where there
    is none. All lanes of a warp take part."""
    largest = _largest_of(chunks)

    def chosen(found: Any) -> Any:
        a, b, c, d = largest(found, _nothing())
        nothing = f32(_MINUS_INFINITY)
        return _chosen(a, nothing), _chosen(b, nothing), _chosen(c, nothing), _chosen(d, nothing)

    return chosen


def _two_added(x: Any, by: Any) -> Any:
    first = x[0] + by[0], x[1] + by[0], x[2] + by[1], x[3] + by[1]
    return (*first, x[4] + by[0], x[5] + by[0], x[6] + by[1], x[7] + by[1])


@cache
def added(chunks: int) -> Function:
    """Return a function (found, by): the scores of each pair and a number of its own."""

    def one(x: Any, by: Any) -> Any:
        return (_two_added(x[0][:8], by[:2]) + _two_added(x[0][8:], by[2:]),)

    if chunks == 1:
        return one
    others = added(chunks - 1)

    def all_chunks(x: Any, by: Any) -> Any:
        return one(x, by) + others(x[1:], by)

    return all_chunks


def _two_times(x: Any, by: Any) -> Any:
    first = x[0] * by[0], x[1] * by[0], x[2] * by[1], x[3] * by[1]
    return (*first, x[4] * by[0], x[5] * by[0], x[6] * by[1], x[7] * by[1])


@cache
def _times(chunks: int) -> Function:
    """Return a function (sums, by): the sums of each pair times a number of its own."""

    def one(x: Any, by: Any) -> Any:
        return (_two_times(x[0][:8], by[:2]) + _two_times(x[0][8:], by[2:]),)

    if chunks == 1:
        return one
    others = _times(chunks - 1)

    def all_chunks(x: Any, by: Any) -> Any:
        return one(x, by) + others(x[1:], by)

    return all_chunks


@cache
def tamer(chunks: int, columns: int) -> Function:
    """Return a function (found, offsets, totals, sums) that returns all these, with other offsets
    for pairs that have a score above 15. All lanes of a warp take part.

    columns   chunks of values
    """
    largest, shift, shrink = _largest_of(chunks), added(chunks), _times(columns)

    def tame(found: Any, offsets: Any, totals: Any, sums: Any) -> Any:
        best, most = largest(found, _nothing()), f32(_MOST)
        above = larger_f32(larger_f32(best[0], best[1]), larger_f32(best[2], best[3])) > most
        if of_any_lane(i32(1) if above else i32(0)) != 0:
            e, f, g, h = (
                _chosen(best[0], most),
                _chosen(best[1], most),
                _chosen(best[2], most),
                _chosen(best[3], most),
            )
            by = power_of_two(e), power_of_two(f), power_of_two(g), power_of_two(h)
            found = shift(found, (e, f, g, h))
            sums = shrink(sums, by)
            a, b, c, d = offsets
            offsets = a + e, b + f, c + g, d + h
            a, b, c, d = totals
            totals = a * by[0], b * by[1], c * by[2], d * by[3]
        return found, offsets, totals, sums

    return tame


# -- weights ---------------------------------------------------------------------------------------


def _two_weighed(x: Any, totals: Any) -> Any:
    """Return the four words of two pairs' weights, and their totals."""
    a, b, c, d = power_of_two(x[0]), power_of_two(x[1]), power_of_two(x[2]), power_of_two(x[3])
    e, f, g, h = power_of_two(x[4]), power_of_two(x[5]), power_of_two(x[6]), power_of_two(x[7])
    words = halves_of_f32(a, b), halves_of_f32(c, d), halves_of_f32(e, f), halves_of_f32(g, h)
    return words, (totals[0] + ((a + b) + (e + f)), totals[1] + ((c + d) + (g + h)))


@cache
def weigher(columns: int, pitch: int, chunks: int, chunk: int = 0) -> Function:
    """Return a function (found, values, totals, sums) for chunks of cells, one after another: adds
    weights to the totals, and values times weights to the sums, and returns both.

    columns   chunks of values
    pitch     bytes from the values of a cell to those of the next
    found     scores with their offsets, 15 at most
    values    where a lane finds the row that it loads for a warp, of the first chunk of cells
    """
    mix, offset = value_products(columns), CHUNK * pitch * chunk

    def one(found: Any, values: int, totals: Any, sums: Any) -> Any:
        words, first = _two_weighed(found[0][:8], totals[:2])
        more, second = _two_weighed(found[0][8:], totals[2:])
        return first + second, mix(words + more, values, i32(offset), sums)

    if chunk + 1 == chunks:
        return one
    others = weigher(columns, pitch, chunks, chunk + 1)

    def all_chunks(found: Any, values: int, totals: Any, sums: Any) -> Any:
        totals, sums = one(found, values, totals, sums)
        return others(found[1:], values, totals, sums)

    return all_chunks
