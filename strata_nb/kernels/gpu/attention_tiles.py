"""Attention of a prompt batch over keys and values that are halves: rows share what they read.

A block of threads has 16 *pairs* a warp, of a row and one of the heads that share a K/V head, and
goes through that head's cells run by run, with the bits of `attention_halves.py`: what a warp has
there of a run, 16 cells of every 128, is a *set* of 64 cells here, which all warps take together.

    first pass    the scores of each set, for the largest of the run
    second pass   the scores of each set again; their weights; and values times weights, which are
                  added to those of the sets before

Scores are computed twice because a run of them for so many pairs does not fit a multiprocessor.

Keys and values come through a ring of three places in shared memory, of a set each. While all
multiply what is in one, copies to the other two are on their way.

A matrix of products has the pairs in its rows: lane 4 * g + t has pairs g and g + 8. Of keys it
loads 16 bytes of cell g at a time, and of values 16 bytes of cells 2 * t and 2 * t + 1: that these
are neighbours in a cell is the same order of sums as there. Its scores are those of cells 2 * t and
2 * t + 1, just what products with values want of their weights.

Rows of a block may be of several sequences: one after another the block goes through the cells of
each, and what does not belong to it sees none of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.attention_halves import takes as takes
from strata_nb.kernels.gpu.exponential import weight_of
from strata_nb.kernels.gpu.halves import (
    halves_of,
    magnitude_of,
    power_below,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_older_copies,
    await_previous,
    barrier,
    block_x,
    block_y,
    block_z,
    blocks_z,
    copy_16,
    end_copies,
    f32,
    high_halves,
    i32,
    i64,
    larger_f32,
    load_4xf32,
    load_i64,
    low_halves,
    mma_16x8x8,
    shared_load_4xi32,
    shared_load_i32,
    shared_store_4xi32,
    shared_store_i32,
    shuffle_xor_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    Arguments,
    Function,
    GpuKernel,
    Grid,
    blocks_of,
    warp_max_i32,
)
from strata_nb.kernels.gpu.planes import plane_bytes
from strata_nb.kernels.gpu.runs import maxima_of, room_for_runs, work_of
from strata_nb.kernels.runs import RUN_CELLS, runs_of

WARPS = 8
_PAIRS = 16  # of a warp
_BLOCKS = 512  # of threads: a few for each multiprocessor of a large card, as rows differ in cells
_PLACES = 3  # of the ring
_SET = 64  # cells
_CHUNK, _ROUND = 16, 128  # a set has the same 16 cells of every 128
_SETS = RUN_CELLS // _SET
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_RUN_SHIFT = RUN_CELLS.bit_length() - 1
_HALF = 2 * _ROUND  # from the first half of a set's cells to the second
_INFINITY = float("inf")
_MINUS_INFINITY = -_INFINITY
_REGISTERS = 255
_NAN = float("nan")
_HALF_EXPONENT = 0x7C00
_MOST_CELLS = 1 << 30
_LAST_OF_SET = 3 * _ROUND + _CHUNK - 1


# -- keys ------------------------------------------------------------------------------------------
# A lane has of each 8 values of the queries four words: of pairs g and g + 8 the nearest halves,
# and of both the rest. Half a set is 4 columns of 8 cells; of each a lane has eight sums, of the
# nearest halves and of the rest.


def _add(a: Any, b: Any, x: Any, c: Any) -> Any:
    return mma_16x8x8(a, b, x, c[0], c[1], c[2], c[3])


def _key_step(a: Any, w: Any, x: Any, y: Any, z: Any, c: Any) -> Any:
    first = _add(a[0], a[1], w, c[:4]) + _add(a[2], a[3], w, c[4:8])
    second = _add(a[0], a[1], x, c[8:12]) + _add(a[2], a[3], x, c[12:16])
    third = _add(a[0], a[1], y, c[16:20]) + _add(a[2], a[3], y, c[20:24])
    return first + second + third + _add(a[0], a[1], z, c[24:28]) + _add(a[2], a[3], z, c[28:32])


@cache
def _key_products(pieces: int, pitch: int, piece: int = 0) -> Function:
    """Return a function (queries, even, odd, sums): sums and the products of half a set.

    pieces      of 32 values
    even, odd   where a lane finds the first piece, and where every other piece is as if the first
                were there
    """
    offset, is_odd = 64 * piece, piece % 2 == 1
    column = 8 * pitch

    def multiply(queries: Any, even: int, odd: int, sums: Any) -> Any:
        place = (odd if is_odd else even) + offset
        w, x = shared_load_4xi32(place), shared_load_4xi32(place + column)
        y, z = shared_load_4xi32(place + 2 * column), shared_load_4xi32(place + 3 * column)
        sums = _key_step(queries[0:4], w[0], x[0], y[0], z[0], sums)
        sums = _key_step(queries[4:8], w[1], x[1], y[1], z[1], sums)
        sums = _key_step(queries[8:12], w[2], x[2], y[2], z[2], sums)
        return _key_step(queries[12:16], w[3], x[3], y[3], z[3], sums)

    if piece + 1 == pieces:
        return multiply
    others = _key_products(pieces, pitch, piece + 1)

    def products(queries: Any, even: int, odd: int, sums: Any) -> Any:
        return others(queries[16:], even, odd, multiply(queries, even, odd, sums))

    return products


def _joined(nearest: Any, rest: Any) -> Any:
    """Return the sum of a score's two parts; of an infinite one the rest is infinite as well."""
    return nearest if magnitude_of(nearest) == f32(_INFINITY) else nearest + rest


def _judge(sums: Any, seen: Any, scales: Any, cell: int) -> Any:
    """Return the scores of a column, whose first cell is so much behind a lane's first one.

    seen    of both pairs, how far behind a lane's first cell the last one is that is seen
    scales  of both pairs
    """
    nothing = f32(_MINUS_INFINITY)
    a = _joined(sums[0], sums[4]) * scales[0] if seen[0] >= cell else nothing
    b = _joined(sums[1], sums[5]) * scales[0] if seen[0] >= cell + 1 else nothing
    c = _joined(sums[2], sums[6]) * scales[1] if seen[1] >= cell else nothing
    d = _joined(sums[3], sums[7]) * scales[1] if seen[1] >= cell + 1 else nothing
    return a, b, c, d


def _judge_half(sums: Any, seen: Any, scales: Any) -> Any:
    """Return the scores of half a set."""
    first = _judge(sums[:8], seen, scales, 0) + _judge(sums[8:16], seen, scales, 8)
    third = _judge(sums[16:24], seen, scales, _ROUND)
    return first + third + _judge(sums[24:], seen, scales, _ROUND + 8)


def _largest(found: Any, best: Any) -> Any:
    """Return the largest score of a chunk's of each pair, and of what was best."""
    first = larger_f32(larger_f32(found[0], found[1]), larger_f32(found[4], found[5]))
    second = larger_f32(larger_f32(found[2], found[3]), larger_f32(found[6], found[7]))
    return larger_f32(best[0], first), larger_f32(best[1], second)


def _largest_of_quad(x: Any) -> Any:
    x = larger_f32(x, shuffle_xor_f32(x, 1))
    return larger_f32(x, shuffle_xor_f32(x, 2))


def _finite(best: Any) -> Any:
    """Return the score from which weights count: while all are -infinity, any gives them 0."""
    return f32(0.0) if best == f32(_MINUS_INFINITY) else best


def _weigh_chunk(found: Any, best: Any, totals: Any) -> Any:
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
    words = (first[0], second[0], first[1], second[1], third[0], fourth[0], third[1], fourth[1])
    return words, (totals[0] + ((a + b) + (e + f)), totals[1] + ((c + d) + (g + h)))


def _weigh(found: Any, best: Any, totals: Any) -> Any:
    """Return the words of half a set's weights, and the sums with them."""
    first, totals = _weigh_chunk(found[:8], best, totals)
    second, totals = _weigh_chunk(found[8:], best, totals)
    return first + second, totals


# -- values ----------------------------------------------------------------------------------------
# 64 values at a time are 8 columns: value 8 * g + n of a piece is column g of the n-th. Of each a
# lane has four sums.


def _value_step(a: Any, b: Any, weights: Any, sums: Any) -> Any:
    """Return sums with two columns: a and b are words of a lane's two cells."""
    lower, upper = low_halves(a, b), high_halves(a, b)
    first = _add(weights[0], weights[1], lower, sums[:4])
    second = _add(weights[0], weights[1], upper, sums[4:])
    return _add(weights[2], weights[3], lower, first) + _add(weights[2], weights[3], upper, second)


@cache
def _value_products(pitch: int, step: int = 0) -> Function:
    """Return a function (place, weights, sums): sums and values times weights of half a set."""
    offset = 8 * pitch * step

    def eight(place: int, weights: Any, sums: Any) -> Any:
        a, b = shared_load_4xi32(place + offset), shared_load_4xi32(place + offset + pitch)
        first = _value_step(a[0], b[0], weights, sums[:8])
        second = _value_step(a[1], b[1], weights, sums[8:16])
        third = _value_step(a[2], b[2], weights, sums[16:24])
        return first + second + third + _value_step(a[3], b[3], weights, sums[24:32])

    if step == 3:
        return eight
    others = _value_products(pitch, step + 1)

    def mix(place: int, weights: Any, sums: Any) -> Any:
        return others(place, weights[4:], eight(place, weights, sums))

    return mix


def _no_sums() -> Any:
    """Return 32 zeros."""
    zero = f32(0.0)
    eight = zero, zero, zero, zero, zero, zero, zero, zero
    return eight + eight + eight + eight


def _no_weights() -> Any:
    """Return the words of half a set's weights that are 0."""
    nothing = i32(0)
    four = nothing, nothing, nothing, nothing
    return four + four + four + four


@cache
def _no_results(pieces: int) -> Function:
    """Return a function that returns the sums of nothing for so many pieces of 64 values."""
    if pieces == 1:
        return _no_sums
    others = _no_results(pieces - 1)

    def zeros() -> Any:
        return _no_sums() + others()

    return zeros


def _eight_added(a: Any, b: Any) -> Any:
    first = a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]
    return (*first, a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7])


def _added(a: Any, b: Any) -> Any:
    """Return the sums of two tuples of 32."""
    first = _eight_added(a[:8], b[:8]) + _eight_added(a[8:16], b[8:16])
    return first + _eight_added(a[16:24], b[16:24]) + _eight_added(a[24:], b[24:])


@cache
def _value_mixer(pieces: int, pitch: int, piece: int = 0) -> Function:
    """Return a function (place, first, second, has_second, sums): sums and values times weights.

    first, second   words of the weights of both halves of a set
    """
    mix = _value_products(pitch)
    here, further = 128 * piece, 128 * piece + 32 * pitch

    def one(place: int, first: Any, second: Any, has_second: Any, sums: Any) -> Any:
        found = mix(place + here, first, _no_sums())
        if has_second:
            found = mix(place + further, second, found)
        return _added(sums, found)

    if piece + 1 == pieces:
        return one
    others = _value_mixer(pieces, pitch, piece + 1)

    def all_pieces(place: int, first: Any, second: Any, has_second: Any, sums: Any) -> Any:
        return one(place, first, second, has_second, sums[:32]) + others(
            place, first, second, has_second, sums[32:]
        )

    return all_pieces


# -- queries ---------------------------------------------------------------------------------------


@cache
def _query_loader(pieces: int) -> Function:
    """Return a function (place): of each 32 values of a query the eight that a lane multiplies."""

    def eight(place: int) -> Any:
        return load_4xf32(place) + load_4xf32(place + 16)

    if pieces == 1:
        return eight
    others = _query_loader(pieces - 1)

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
def _magnitude(pieces: int) -> Function:
    """Return a function that returns the largest magnitude of so many eight floats."""
    if pieces == 1:
        return _magnitude_of_eight
    others = _magnitude(pieces - 1)

    def largest(x: Any) -> Any:
        return larger_f32(_magnitude_of_eight(x[:8]), others(x[8:]))

    return largest


def _two_words(x: Any, y: Any, ups: Any) -> Any:
    """Return the words of two neighbours in both queries."""
    first = halves_of(x[0] * ups[0], x[1] * ups[0])
    second = halves_of(y[0] * ups[1], y[1] * ups[1])
    return first[0], second[0], first[1], second[1]


@cache
def _query_words(pieces: int) -> Function:
    """Return a function (x, y, ups): the words of so many eight values of two queries."""

    def eight(x: Any, y: Any, ups: Any) -> Any:
        first = _two_words(x[:2], y[:2], ups) + _two_words(x[2:4], y[2:4], ups)
        return first + _two_words(x[4:6], y[4:6], ups) + _two_words(x[6:8], y[6:8], ups)

    if pieces == 1:
        return eight
    others = _query_words(pieces - 1)

    def words(x: Any, y: Any, ups: Any) -> Any:
        return eight(x, y, ups) + others(x[8:], y[8:], ups)

    return words


# -- results ---------------------------------------------------------------------------------------


@cache
def _storer(pieces: int) -> Function:
    """Return a function (place, sums) that stores the values of pair g, given a lane's sums; of
    pair g + 8 given these from the third on."""

    def one(place: int, x: Any) -> None:
        eight(place, x[0], x[4], x[8], x[12], x[16], x[20], x[24], x[28])
        eight(place + 32, x[1], x[5], x[9], x[13], x[17], x[21], x[25], x[29])

    def eight(place: int, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> None:
        store_f32(place, a)
        store_f32(place + 4, b)
        store_f32(place + 8, c)
        store_f32(place + 12, d)
        store_f32(place + 16, e)
        store_f32(place + 20, f)
        store_f32(place + 24, g)
        store_f32(place + 28, h)

    if pieces == 1:
        return one
    others = _storer(pieces - 1)

    def store(place: int, x: Any) -> None:
        one(place, x)
        others(place + 256, x[32:])

    return store


# -- the kernel ------------------------------------------------------------------------------------


@cache
def _copier(length: int, threads: int, *, are_keys: bool) -> Function:
    """Return a function (ring, line, plane, start, last, thread) that sends a set of cells on its
    way.

    start   its first cell
    last    the last cell that anyone sees, which stands for those behind it
    """
    units = length // 8  # of 16 bytes, of a cell
    rounds = units * _SET // threads
    pitch = 2 * length
    is_turned = pitch % 128 == 0

    def copy(ring: int, line: int, plane: int, start: int, last: int, thread: int) -> None:
        number = 0
        while number < rounds:
            one = thread + threads * number
            row = one // units
            unit = one - units * row
            cell = min(start + _ROUND * (row >> 4) + (row & (_CHUNK - 1)), last)
            block = load_i64(line + 8 * (cell >> _BLOCK_SHIFT))
            address = block + plane + 16 * (units * (cell & (BLOCK_CELLS - 1)) + unit)
            if is_turned:
                unit ^= 4 * (row & 1) if are_keys else row & 6
            copy_16(ring + pitch * row + 16 * unit, address)
            number += 1

    return copy


def _is_no_number(word: Any) -> Any:
    """Return whether one of the halves of a word is infinite or NaN."""
    lower, upper = word & _HALF_EXPONENT, word & (_HALF_EXPONENT << 16)
    return lower == _HALF_EXPONENT or upper == _HALF_EXPONENT << 16


@cache
def _sifter(length: int, threads: int, flags: int) -> Function:
    """Return a function (place, start, last, lowest, thread) for values that not all rows see.

    Where a cell behind the lowest position has what is no number, that becomes 0 in shared memory,
    so that rows before it stay what they are; and if anyone sees the cell, it is noted at `flags`,
    which has a word for each cell of a set. A thread looks at what it has copied itself.
    """
    units = length // 8
    rounds = units * _SET // threads
    pitch = 2 * length

    def sift(place: int, start: int, last: int, lowest: int, thread: int) -> None:
        number = 0
        while number < rounds:
            one = thread + threads * number
            row = one // units
            cell = start + _ROUND * (row >> 4) + (row & (_CHUNK - 1))
            if cell > lowest:
                at = place + pitch * row + 16 * ((one - units * row) ^ (row & 6))
                a, b, c, d = shared_load_4xi32(at)
                if _is_no_number(a) or _is_no_number(b) or _is_no_number(c) or _is_no_number(d):
                    nothing = i32(0)
                    shared_store_4xi32(at, nothing, nothing, nothing, nothing)
                    if cell <= last:
                        shared_store_i32(flags + 4 * row, i32(cell))
            number += 1

    return sift


@cache
def tiles_attention_kernel(key_length: int, value_length: int, warps: int = WARPS) -> GpuKernel:
    """Return the kernel `attention` of a batch for halves and lengths of heads that `takes` names.

    Grid (tiles of 16 * warps pairs, K/V heads, N); see `runs.py` for the work space that it fills.
    """
    pairs, threads = _PAIRS * warps, WARP * warps
    key_pieces, value_pieces = key_length // 32, value_length // 64
    key_pitch, value_pitch = 2 * key_length, 2 * value_length
    key_turn = 64 if key_pitch % 128 == 0 else 0
    place_bytes = _SET * max(key_pitch, value_pitch)
    ring_bytes = _PLACES * place_bytes
    key_plane, value_plane = plane_bytes("f16", key_length), plane_bytes("f16", value_length)
    copy_keys = _copier(key_length, threads, are_keys=True)
    copy_values = _copier(value_length, threads, are_keys=False)
    sift = _sifter(value_length, threads, ring_bytes)
    multiply = _key_products(key_pieces, key_pitch)
    load_query, magnitude = _query_loader(key_pieces), _magnitude(key_pieces)
    query_words = _query_words(key_pieces)
    mix, store_values = _value_mixer(value_pieces, value_pitch), _storer(value_pieces)
    no_results = _no_results(value_pieces)

    def span_of(sequences: int, positions: int, begin: int, stop: int, lane: int) -> Any:
        """Return the end of the rows from `begin` on that are of one sequence, the last cell that
        one of them sees, and the last that all see."""
        sequence = load_i64(sequences + 8 * begin)
        row, end = begin + lane, stop
        while row < end:
            if load_i64(sequences + 8 * row) != sequence:
                end = row
            row += WARP
        end = -i64(warp_max_i32(i32(-end)))
        row, last, lowest = begin + lane, i64(-1), i64(_MOST_CELLS)
        while row < end:
            position = load_i64(positions + 8 * row)
            last, lowest = max(last, position), min(lowest, position)
            row += WARP
        return end, warp_max_i32(i32(last)), i32(-warp_max_i32(i32(-lowest)))

    def clear(thread: int) -> None:
        while thread < _SET:
            shared_store_i32(ring_bytes + 4 * thread, i32(_MOST_CELLS))
            thread += threads

    def first_flagged(lane: int) -> Any:
        """Return the first cell that `sift` has noted, or one behind all."""
        found = shared_load_i32(ring_bytes + 4 * lane)
        found = min(found, shared_load_i32(ring_bytes + 4 * (lane + WARP)))
        return i32(-warp_max_i32(i32(-found)))

    def sets_of(run: int, last: int) -> Any:
        """Return how many sets of a run have cells that someone sees."""
        return i32(min(((last - (run << _RUN_SHIFT)) >> 4) + 1, _SETS))

    def feed(
        run: int,
        number: int,
        place: int,
        line: int,
        last: int,
        step: int,
        k_plane: int,
        v_plane: int,
        thread: int,
    ) -> Any:
        """Send what is wanted next on its way; return the run and the number of what follows.

        Of a run these are the keys of each set, and then of each set keys and values.
        """
        first = run << _RUN_SHIFT
        if first <= last:
            sets = sets_of(run, last)
            behind = number - sets
            if behind >= 0 and behind & 1 == 1:
                start = first + _CHUNK * (behind >> 1)
                copy_values(place, line, v_plane, start, last, thread)
            else:
                start = first + _CHUNK * (number if behind < 0 else behind >> 1)
                copy_keys(place, line, k_plane, start, last, thread)
            number = i32(number + 1)
            if number == 3 * sets:
                number, run = i32(0), i32(run + step)
        end_copies()
        return run, number

    def following(place: int) -> Any:
        return i32(place + place_bytes) if place < ring_bytes - place_bytes else i32(0)

    def before(place: int) -> Any:
        return i32(place - place_bytes) if place > 0 else i32(ring_bytes - place_bytes)

    def scores_of(queries: Any, even: int, odd: int, seen: Any, scales: Any) -> Any:
        return _judge_half(multiply(queries, even, odd, _no_sums()), seen, scales)

    def attention(
        rows: int,
        sequences: int,
        positions: int,
        q: int,
        blocks: int,
        _out: int,
        work: int,
        table_width: int,
        k_offset: int,
        v_offset: int,
        heads: int,
        kv_heads: int,
        _key_length: int,
        _value_length: int,
        scale: Any,
    ) -> None:
        tile, kv_head, thread = i64(block_x()), i64(block_y()), i64(thread_index())
        first_run, step = block_z(), blocks_z()
        await_previous()
        count, group = load_i64(rows), heads // kv_heads
        begin = pairs * tile // group
        stop = min((pairs * (tile + 1) + group - 1) // group, count)
        warp, lane = thread >> 5, thread & 31
        g, t = lane >> 2, lane & 3
        k_plane, v_plane = k_offset + key_plane * kv_head, v_offset + value_plane * kv_head

        # A lane's two pairs; where there are too few of something the last row again.
        pair = pairs * tile + _PAIRS * warp + g
        row, other_row = pair // group, (pair + 8) // group
        head = group * kv_head + pair - group * row
        other_head = group * kv_head + pair + 8 - group * other_row
        here = min(row, count - 1) * heads + head
        there = min(other_row, count - 1) * heads + other_head
        if begin >= stop:
            return
        x = load_query(q + 4 * key_length * here + 32 * t)
        y = load_query(q + 4 * key_length * there + 32 * t)
        up, down = power_below(_largest_of_quad(magnitude(x)))
        other_up, other_down = power_below(_largest_of_quad(magnitude(y)))
        queries = query_words(x, y, (up, other_up))
        scales = scale * down, scale * other_down
        room = room_for_runs(table_width)
        results = work_of(work, here, room, value_length)
        other_results = work_of(work, there, room, value_length)

        # Where a lane finds its keys and values in a place of the ring.
        turn = key_turn * (g & 1)
        keys_at = key_pitch * g + 16 * t
        values_at = 2 * value_pitch * t + 16 * (g ^ 2 * t)

        while begin < stop:
            end, last, lowest = span_of(sequences, positions, begin, stop, lane)
            line = blocks + 8 * table_width * load_i64(sequences + 8 * begin)
            position, other_position = i32(-1), i32(-1)
            if begin <= row and row < end:
                position = i32(load_i64(positions + 8 * row))
            if begin <= other_row and other_row < end:
                other_position = i32(load_i64(positions + 8 * other_row))
            last_here = warp_max_i32(i32(max(position, other_position)))
            run, number, place = first_run, i32(0), i32(0)
            barrier()
            clear(thread)
            fed, number = feed(run, number, place, line, last, step, k_plane, v_plane, thread)
            fed, number = feed(
                fed, number, i32(place_bytes), line, last, step, k_plane, v_plane, thread
            )
            while run << _RUN_SHIFT <= last:
                first = i32(run << _RUN_SHIFT)
                sets = sets_of(run, last)
                best, of_set = (f32(_MINUS_INFINITY), f32(_MINUS_INFINITY)), i32(0)
                while of_set < sets:
                    await_older_copies()
                    barrier()
                    fed, number = feed(
                        fed, number, before(place), line, last, step, k_plane, v_plane, thread
                    )
                    start = i32(first + _CHUNK * of_set)
                    ahead = i32(last_here - start)
                    even, odd = i32(place + keys_at + turn), i32(place + keys_at - turn)
                    cell, half = i32(start + 2 * t), 0
                    while half < 2 and ahead >= 0:
                        seen = i32(position - cell), i32(other_position - cell)
                        found = scores_of(queries, even, odd, seen, scales)
                        best = _largest(found[8:], _largest(found[:8], best))
                        ahead, cell = i32(ahead - _HALF), i32(cell + _HALF)
                        even, odd = i32(even + 32 * key_pitch), i32(odd + 32 * key_pitch)
                        half += 1
                    place = following(place)
                    of_set = i32(of_set + 1)
                largest = _largest_of_quad(best[0]), _largest_of_quad(best[1])
                best = _finite(largest[0]), _finite(largest[1])

                sums, totals, of_set = no_results(), (f32(0.0), f32(0.0)), i32(0)
                while of_set < sets:
                    await_older_copies()
                    barrier()
                    fed, number = feed(
                        fed, number, before(place), line, last, step, k_plane, v_plane, thread
                    )
                    start = i32(first + _CHUNK * of_set)
                    ahead = i32(last_here - start)
                    some, more = _no_weights(), _no_weights()
                    if ahead >= 0:
                        even, odd = i32(place + keys_at + turn), i32(place + keys_at - turn)
                        cell = i32(start + 2 * t)
                        seen = i32(position - cell), i32(other_position - cell)
                        found = scores_of(queries, even, odd, seen, scales)
                        some, of_these = _weigh(found, best, (f32(0.0), f32(0.0)))
                        if ahead >= _HALF:
                            even, odd = i32(even + 32 * key_pitch), i32(odd + 32 * key_pitch)
                            seen = i32(seen[0] - _HALF), i32(seen[1] - _HALF)
                            found = scores_of(queries, even, odd, seen, scales)
                            more, of_these = _weigh(found, best, of_these)
                        a = of_these[0] + shuffle_xor_f32(of_these[0], 1)
                        b = of_these[1] + shuffle_xor_f32(of_these[1], 1)
                        a += shuffle_xor_f32(a, 2)
                        b += shuffle_xor_f32(b, 2)
                        totals = totals[0] + a, totals[1] + b
                    place = following(place)
                    await_older_copies()
                    is_seen_by_all = start + _LAST_OF_SET <= lowest
                    if not is_seen_by_all:
                        sift(place, start, last, lowest, thread)
                    barrier()
                    fed, number = feed(
                        fed, number, before(place), line, last, step, k_plane, v_plane, thread
                    )
                    if not is_seen_by_all:
                        flagged, nan = first_flagged(lane), f32(_NAN)
                        totals = (
                            totals[0] if position < flagged else nan,
                            totals[1] if other_position < flagged else nan,
                        )
                    if ahead >= 0:
                        sums = mix(place + values_at, some, more, ahead >= _HALF, sums)
                    place = following(place)
                    of_set = i32(of_set + 1)

                if position >= first:
                    store_values(results + 4 * (value_length * run + 16 * t), sums)
                    if t == 0:
                        at = maxima_of(results, room, value_length) + 4 * run
                        store_f32(at, largest[0])
                        store_f32(at + 4 * room, totals[0])
                if other_position >= first:
                    store_values(other_results + 4 * (value_length * run + 16 * t), sums[2:])
                    if t == 0:
                        at = maxima_of(other_results, room, value_length) + 4 * run
                        store_f32(at, largest[1])
                        store_f32(at + 4 * room, totals[1])
                run = i32(run + step)
            begin = end

    def grid(given: Arguments, rows: int) -> Grid:
        kv_heads = given["kv_heads"]
        tiles = blocks_of(rows * (given["heads"] // kv_heads), pairs)
        runs = runs_of(given["table_width"])
        return tiles, kv_heads, max(1, min(runs, _BLOCKS // (tiles * kv_heads)))

    name = f"attention_tiles_{key_length}_{value_length}"
    name += "" if warps == WARPS else f"_{warps}"
    attention.__name__ = attention.__qualname__ = name
    return GpuKernel(
        name,
        attention,
        threads,
        grid,
        lambda _: ring_bytes + 4 * _SET,
        min(_REGISTERS, 65_536 // threads),
    )
