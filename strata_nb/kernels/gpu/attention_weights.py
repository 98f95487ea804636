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

from strata_nb.kernels.gpu.attention_fragments import CHUNK, of_each, value_products
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


def _seen_column(found: Any, seen: Any, cell: int) -> Any:
    nothing = f32(_MINUS_INFINITY)
    a = found[0] if seen[0] >= cell else nothing
    b = found[1] if seen[0] >= cell + 1 else nothing
    c = found[2] if seen[1] >= cell else nothing
    d = found[3] if seen[1] >= cell + 1 else nothing
    return a, b, c, d


def _seen_chunk(x: Any, seen: Any) -> Any:
    half = CHUNK // 2
    first = _seen_column(x[:4], seen[:2], 0) + _seen_column(x[4:8], seen[:2], half)
    return first + _seen_column(x[8:12], seen[2:], 0) + _seen_column(x[12:], seen[2:], half)


@cache
def seen_ones(chunks: int) -> Function:
    """Return a function (found, seen): the scores, -infinity where a pair does not see the cell.

    seen   of the four pairs, how far behind a lane's first cell the last one is that it sees
    """
    if chunks == 1:
        return lambda found, seen: (_seen_chunk(found[0], seen),)
    others = seen_ones(chunks - 1)

    def all_chunks(found: Any, seen: Any) -> Any:
        a, b, c, d = seen
        behind = i32(a - CHUNK), i32(b - CHUNK), i32(c - CHUNK), i32(d - CHUNK)
        return (_seen_chunk(found[0], seen), *others(found[1:], behind))

    return all_chunks


# -- offsets ---------------------------------------------------------------------------------------


def _nothing() -> Any:
    nothing = f32(_MINUS_INFINITY)
    return nothing, nothing, nothing, nothing


def _largest_of_chunk(x: Any, best: Any) -> Any:
    a = larger_f32(larger_f32(x[0], x[1]), larger_f32(x[4], x[5]))
    b = larger_f32(larger_f32(x[2], x[3]), larger_f32(x[6], x[7]))
    c = larger_f32(larger_f32(x[8], x[9]), larger_f32(x[12], x[13]))
    d = larger_f32(larger_f32(x[10], x[11]), larger_f32(x[14], x[15]))
    first = larger_f32(best[0], a), larger_f32(best[1], b)
    return (*first, larger_f32(best[2], c), larger_f32(best[3], d))


@cache
def _largest_of(chunks: int) -> Function:
    """Return a function (found, best): the largest of a lane's scores of each pair, and of best."""
    if chunks == 1:
        return lambda found, best: _largest_of_chunk(found[0], best)
    others = _largest_of(chunks - 1)
    return lambda found, best: others(found[1:], _largest_of_chunk(found[0], best))


def _largest_of_quad(x: Any) -> Any:
    x = larger_f32(x, shuffle_xor_f32(x, 1))
    return larger_f32(x, shuffle_xor_f32(x, 2))


def _chosen(best: Any, most: Any) -> Any:
    """Return what brings a pair's largest score to 9 if it is more than `most`, or else 0."""
    best = _largest_of_quad(best)
    return f32(_UNIT) - best if best > most else f32(0.0)


def _all_chosen(best: Any, most: Any) -> Any:
    first = _chosen(best[0], most), _chosen(best[1], most)
    return (*first, _chosen(best[2], most), _chosen(best[3], most))


@cache
def offsets_of(chunks: int) -> Function:
    """Return a function (found): what brings the largest score of each pair to 9, or 0 where there
    is none. All lanes of a warp take part."""
    largest = _largest_of(chunks)
    return lambda found: _all_chosen(largest(found, _nothing()), f32(_MINUS_INFINITY))


def _two_added(x: Any, by: Any) -> Any:
    first = x[0] + by[0], x[1] + by[0], x[2] + by[1], x[3] + by[1]
    return (*first, x[4] + by[0], x[5] + by[0], x[6] + by[1], x[7] + by[1])


def _added(x: Any, by: Any) -> Any:
    return _two_added(x[:8], by[:2]) + _two_added(x[8:], by[2:])


def added(chunks: int) -> Function:
    """Return a function (found, by): the scores of each pair and a number of its own."""
    return of_each(_added, chunks)


def _two_times(x: Any, by: Any) -> Any:
    first = x[0] * by[0], x[1] * by[0], x[2] * by[1], x[3] * by[1]
    return (*first, x[4] * by[0], x[5] * by[0], x[6] * by[1], x[7] * by[1])


def _times(x: Any, by: Any) -> Any:
    return _two_times(x[:8], by[:2]) + _two_times(x[8:], by[2:])


@cache
def tamer(chunks: int, columns: int) -> Function:
    """Return a function (found, offsets, totals, sums) that returns all these, with other offsets
    for pairs that have a score above 15. All lanes of a warp take part.

    columns   chunks of values
    """
    largest, shift, shrink = _largest_of(chunks), added(chunks), of_each(_times, columns)

    def tame(found: Any, offsets: Any, totals: Any, sums: Any) -> Any:
        best, most = largest(found, _nothing()), f32(_MOST)
        above = larger_f32(larger_f32(best[0], best[1]), larger_f32(best[2], best[3])) > most
        if of_any_lane(i32(1) if above else i32(0)) != 0:
            more = _all_chosen(best, most)
            e, f, g, h = more
            by = power_of_two(e), power_of_two(f), power_of_two(g), power_of_two(h)
            found, sums = shift(found, more), shrink(sums, by)
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

    def one(x: Any, values: int, totals: Any, sums: Any) -> Any:
        words, first = _two_weighed(x[:8], totals[:2])
        more, second = _two_weighed(x[8:], totals[2:])
        return first + second, mix(words + more, values, i32(offset), sums)

    if chunk + 1 == chunks:
        return lambda found, values, totals, sums: one(found[0], values, totals, sums)
    others = weigher(columns, pitch, chunks, chunk + 1)

    def all_chunks(found: Any, values: int, totals: Any, sums: Any) -> Any:
        totals, sums = one(found[0], values, totals, sums)
        return others(found[1:], values, totals, sums)

    return all_chunks
