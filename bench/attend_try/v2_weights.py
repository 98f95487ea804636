"""The weights of attention by rounded halves: what scores become, and what sums do meanwhile.

A weight is 2 ** score, where a number of the pair's own was added to its scores: its *offset*. At
the first block that brings the largest score to 9. Weights are summed as float32 and multiplied as
halves, which go up to 2 ** 16: where a score of a chunk of 16 cells is more than 15, the offset is
made smaller, so that the largest is 9 again, and what was summed shrinks. Nobody else looks for a
largest score: that a weight is too large shows in the chunk's sum of them. What a pair does follows
from its own scores, whoever else's are too large.

Items of tuples as `attention_fragments.py` says.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from attend_try.v2_fragments import CHUNK, value_products
from strata_nb.kernels.gpu.intrinsics import (
    f32,
    halves_of_f32,
    i32,
    larger_f32,
    shuffle_xor_f32,
)
from strata_nb.kernels.gpu.intrinsics import of_any_lane, power_of_two
from strata_nb.kernels.gpu.operations import Function

_UNIT, _MOST = 9.0, 15.0  # the largest score after an offset was chosen, and until one is
_SUSPICIOUS = 0.97 * 2**15  # a sum that is less has no weight of a score above _MOST
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
        half = CHUNK // 2
        first = column(found[:4], seen[:2], 0) + column(found[4:8], seen[:2], half)
        second = column(found[8:12], seen[2:], 0) + column(found[12:16], seen[2:], half)
        return first + second

    if chunks == 1:
        return one
    others = seen_ones(chunks - 1)

    def all_chunks(found: Any, seen: Any) -> Any:
        a, b, c, d = seen
        behind = i32(a - CHUNK), i32(b - CHUNK), i32(c - CHUNK), i32(d - CHUNK)
        return one(found[:16], seen) + others(found[16:], behind)

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
        return _largest_of_two(found[:8], best[:2]) + _largest_of_two(found[8:16], best[2:])

    if chunks == 1:
        return one
    others = _largest_of(chunks - 1)

    def all_chunks(found: Any, best: Any) -> Any:
        return others(found[16:], one(found, best))

    return all_chunks


def _largest_of_quad(x: Any) -> Any:
    x = larger_f32(x, shuffle_xor_f32(x, 1))
    return larger_f32(x, shuffle_xor_f32(x, 2))


def _chosen(best: Any, most: Any) -> Any:
    """Return what brings a pair's largest score to 9 if it is more than `most`, or else 0."""
    best = _largest_of_quad(best)
    return f32(_UNIT) - best if best > most else f32(0.0)


@cache
def offsets_of(chunks: int) -> Function:
    """Return a function (found, most): by how much the offset of each pair is to change, whose
    largest score is more than `most`. All lanes of a warp take part."""
    largest = _largest_of(chunks)

    def chosen(found: Any, most: Any) -> Any:
        nothing = f32(_MINUS_INFINITY)
        best = largest(found, (nothing, nothing, nothing, nothing))
        first = _chosen(best[0], most), _chosen(best[1], most)
        return (*first, _chosen(best[2], most), _chosen(best[3], most))

    return chosen


def _two_added(x: Any, by: Any) -> Any:
    first = x[0] + by[0], x[1] + by[0], x[2] + by[1], x[3] + by[1]
    return (*first, x[4] + by[0], x[5] + by[0], x[6] + by[1], x[7] + by[1])


@cache
def added(chunks: int) -> Function:
    """Return a function (found, by): the scores of each pair and a number of its own."""

    def one(x: Any, by: Any) -> Any:
        return _two_added(x[:8], by[:2]) + _two_added(x[8:16], by[2:])

    if chunks == 1:
        return one
    others = added(chunks - 1)

    def all_chunks(x: Any, by: Any) -> Any:
        return one(x, by) + others(x[16:], by)

    return all_chunks


def _two_times(x: Any, by: Any) -> Any:
    first = x[0] * by[0], x[1] * by[0], x[2] * by[1], x[3] * by[1]
    return (*first, x[4] * by[0], x[5] * by[0], x[6] * by[1], x[7] * by[1])


@cache
def _times(chunks: int) -> Function:
    """Return a function (sums, by): the sums of each pair times a number of its own."""

    def one(x: Any, by: Any) -> Any:
        return _two_times(x[:8], by[:2]) + _two_times(x[8:16], by[2:])

    if chunks == 1:
        return one
    others = _times(chunks - 1)

    def all_chunks(x: Any, by: Any) -> Any:
        return one(x, by) + others(x[16:], by)

    return all_chunks


# -- weights ---------------------------------------------------------------------------------------


def _two_weighed(x: Any) -> Any:
    """Return the four words of two pairs' weights, and their sums."""
    a, b, c, d = power_of_two(x[0]), power_of_two(x[1]), power_of_two(x[2]), power_of_two(x[3])
    e, f, g, h = power_of_two(x[4]), power_of_two(x[5]), power_of_two(x[6]), power_of_two(x[7])
    words = halves_of_f32(a, b), halves_of_f32(c, d), halves_of_f32(e, f), halves_of_f32(g, h)
    return words, ((a + b) + (e + f), (c + d) + (g + h))


def _weighed(found: Any) -> Any:
    """Return of a chunk the words of the weights, and the sum of a lane's of each pair."""
    words, sums = _two_weighed(found[:8])
    more, others = _two_weighed(found[8:16])
    return words + more, sums + others


def _are_suspicious(sums: Any) -> Any:
    """Return whether a weight of a warp may be too large. NaN is not: it stays what it is."""
    largest = larger_f32(larger_f32(sums[0], sums[1]), larger_f32(sums[2], sums[3]))
    return of_any_lane(i32(1) if largest > f32(_SUSPICIOUS) else i32(0)) != 0


@cache
def weigher(columns: int, pitch: int, chunks: int, chunk: int = 0) -> Function:
    """Return a function (found, values, offsets, totals, sums) for chunks of cells, one after
    another: adds weights to the totals, and values times weights to the sums.

    columns   chunks of values
    pitch     bytes from the values of a cell to those of the next
    found     scores with their offsets
    values    where a lane finds the row that it loads for a warp, of the first chunk of cells

    Returns the last three.
    """
    mix, offset = value_products(columns), CHUNK * pitch * chunk
    chosen, shift, shrink = offsets_of(1), added(chunks - chunk), _times(columns)

    def further(found: Any, offsets: Any, totals: Any, sums: Any) -> Any:
        """Return all these where the offsets of some pairs have changed."""
        by = chosen(found[:16], f32(_MOST))
        a, b, c, d = (
            power_of_two(by[0]),
            power_of_two(by[1]),
            power_of_two(by[2]),
            power_of_two(by[3]),
        )
        offsets = offsets[0] + by[0], offsets[1] + by[1], offsets[2] + by[2], offsets[3] + by[3]
        totals = totals[0] * a, totals[1] * b, totals[2] * c, totals[3] * d
        return shift(found, by), offsets, totals, shrink(sums, (a, b, c, d))

    def one(found: Any, values: int, offsets: Any, totals: Any, sums: Any) -> Any:
        words, here = _weighed(found)
        if _are_suspicious(here):
            found, offsets, totals, sums = further(found, offsets, totals, sums)
            words, here = _weighed(found)
        a, b, c, d = totals
        totals = a + here[0], b + here[1], c + here[2], d + here[3]
        return found, offsets, totals, mix(words, values, i32(offset), sums)

    if chunk + 1 == chunks:

        def last(found: Any, values: int, offsets: Any, totals: Any, sums: Any) -> Any:
            _, offsets, totals, sums = one(found, values, offsets, totals, sums)
            return offsets, totals, sums

        return last
    others = weigher(columns, pitch, chunks, chunk + 1)

    def all_chunks(found: Any, values: int, offsets: Any, totals: Any, sums: Any) -> Any:
        found, offsets, totals, sums = one(found, values, offsets, totals, sums)
        return others(found[16:], values, offsets, totals, sums)

    return all_chunks
