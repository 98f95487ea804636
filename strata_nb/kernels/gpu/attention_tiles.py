"""Attention of a prompt batch over keys and values that are halves: rows share what they read.

A block of threads has 16 *pairs* a warp, of a row and one of the heads that share a K/V head, and
goes through that head's cells, which all its warps take together, with the bits of
`attention_halves.py`: what a warp has there of a run is a *set* of 64 cells here.

    first pass    the scores of each set, for the largest of each run
    second pass   the scores of each set again; their weights; and values times weights, which are
                  added to those of the run's sets before

Scores are computed twice because those of a run for so many pairs fit no multiprocessor.

Of many rows a block makes both passes through all runs, and joins them as `combining.py` does: what
the runs so far give lies in the place of the result. Few rows would leave a card idle: there a
block makes both passes through every N-th run, each by itself, and leaves what it finds in the work
space to `combining.py`.

Keys and values come through a ring of three places in shared memory, of a set each. While all
multiply what is in one, copies to the other two are on their way.

Rows of a block may be of several sequences: one after another the block goes through the cells of
each, and what does not belong to it sees none of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.attention_products import (
    finite_of,
    joined,
    key_products,
    largest_of,
    largest_of_quad,
    no_results,
    no_sums,
    no_weights,
    query_loader,
    query_magnitude,
    query_words,
    scaled,
    seen_ones,
    value_products,
    weigh,
)
from strata_nb.kernels.gpu.attention_results import mixer_of_runs, quotient, store_of_run
from strata_nb.kernels.gpu.attention_sets import (
    CHUNK,
    LAST_OF_SET,
    ROUND,
    SET,
    SETS,
    copier,
    sifter,
    turn_of_keys,
    turn_of_values,
)
from strata_nb.kernels.gpu.attention_spans import MOST_CELLS, span_of
from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.halves import power_below
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_older_copies,
    await_previous,
    barrier,
    block_x,
    block_y,
    block_z,
    blocks_z,
    end_copies,
    f32,
    i32,
    i64,
    larger_f32,
    load_f32,
    load_i64,
    shared_load_i32,
    shared_store_i32,
    shuffle_xor_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    Arguments,
    GpuKernel,
    Grid,
    blocks_of,
    warp_max_i32,
)
from strata_nb.kernels.gpu.planes import plane_bytes
from strata_nb.kernels.gpu.runs import maxima_of, room_for_runs, work_of
from strata_nb.kernels.runs import RUN_CELLS, runs_of

WARPS = 4  # two blocks a multiprocessor: one multiplies while the other weighs
PAIRS = 16  # of a warp
_BLOCKS = 512  # of threads where each has some of the runs: a few for each multiprocessor
_PLACES = 3  # of the ring
_RUN_SHIFT = RUN_CELLS.bit_length() - 1
_MINUS_INFINITY, _NAN = float("-inf"), float("nan")
_REGISTERS = 255
_SPILLS = 1024  # on old targets: queries that wait for the last chunk, what a run needs at its ends


def takes(key_length: int, value_length: int) -> bool:
    """Return whether the kernel here is one for halves and heads of these lengths."""
    return {key_length, value_length} <= {64, 128}


def blocks_for(rows: int, given: Arguments, warps: int = WARPS) -> int:
    """Return how many blocks of threads so many rows have, each with all runs of its pairs."""
    kv_heads = given["kv_heads"]
    return blocks_of(rows * (given["heads"] // kv_heads), PAIRS * warps) * kv_heads


def maxima_bytes(rows: int, given: Arguments) -> int:
    """Return how much of the work space blocks need that have all runs of their pairs."""
    return 4 * rows * given["heads"] * runs_of(given["table_width"])


@cache
def tiles_attention_kernel(
    key_length: int, value_length: int, warps: int = WARPS, *, is_whole: bool
) -> GpuKernel:
    """Return the kernel `attention` of a batch for halves and lengths of heads that `takes` names.

    is_whole   whether a block has all runs of its pairs and writes their results; else `combine`
               does, and `runs.py` says what is in the work space. Of whole rows that has the
               largest score of each run: float32 (rows, heads, runs)

    Grid (tiles of 16 * warps pairs, K/V heads, N). A block reads 4 * key_length + 2 * value_length
    bytes for each cell that one of its rows sees.
    """
    pairs, threads = PAIRS * warps, WARP * warps
    key_pieces, value_pieces = key_length // 32, value_length // 32
    key_pitch, value_pitch = 2 * key_length, 2 * value_length
    key_turn = 64 if key_pitch % 128 == 0 else 0
    place_bytes = SET * max(key_pitch, value_pitch)
    ring_bytes = _PLACES * place_bytes
    key_plane, value_plane = plane_bytes("f16", key_length), plane_bytes("f16", value_length)
    copy_keys, copy_values = copier(key_length, threads), copier(value_length, threads)
    key_units, value_units = key_length // 8, value_length // 8
    are_alike = key_length == value_length
    sift = sifter(value_length, threads, ring_bytes)
    multiply, mix = key_products(key_pieces, key_pitch), value_products(value_pieces, value_pitch)
    load_query, magnitude = query_loader(key_pieces), query_magnitude(key_pieces)
    words_of_queries, no_values = query_words(key_pieces), no_results(value_pieces)
    store_run, mix_run = store_of_run(value_pieces), mixer_of_runs(value_pieces)
    divide = quotient(value_pieces)

    def clear(thread: int) -> None:
        while thread < SET:
            shared_store_i32(ring_bytes + 4 * thread, i32(MOST_CELLS))
            thread += threads

    def first_noted(lane: int) -> Any:
        """Return the first cell that `sift` has noted, or one behind all."""
        found = shared_load_i32(ring_bytes + 4 * lane)
        found = min(found, shared_load_i32(ring_bytes + 4 * (lane + WARP)))
        return i32(-warp_max_i32(i32(-found)))

    def sets_of(run: int, last: int) -> Any:
        """Return how many sets of a run have cells that someone sees."""
        return i32(min(((last - (run << _RUN_SHIFT)) >> 4) + 1, SETS))

    def end_of(start: int, last: int) -> Any:
        """Return the run behind those that a block goes through from one on."""
        return i32((last >> _RUN_SHIFT) + 1) if is_whole else i32(start + 1)

    def after(start: int, last: int, step: int) -> Any:
        """Return the run from which a block goes on behind these."""
        return end_of(start, last) if is_whole else i32(start + step)

    def feed(
        ahead: Any,
        place: int,
        line: int,
        last: int,
        step: int,
        planes: Any,
        thread: int,
    ) -> Any:
        """Send what is wanted next on its way to a place; return what comes behind that.

        ahead   the run from which passes begin, the run, the number of what is wanted of it, and
                whether that is of the second pass: keys and values of each set in turn
        """
        start, run, number, is_second = ahead
        if start << _RUN_SHIFT <= last:
            sets, cell = sets_of(run, last), i32(run << _RUN_SHIFT)
            cell = i32(cell + CHUNK * (number >> is_second))
            are_values = is_second & number
            row, unit = thread // key_units, thread & (key_units - 1)
            turned = unit ^ turn_of_keys(row) if key_turn else unit
            if are_values == 1:
                row, unit = thread // value_units, thread & (value_units - 1)
                turned = unit ^ turn_of_values(row)
            if are_alike:
                to = place + key_pitch * row + 16 * turned
                plane = planes[1] if are_values == 1 else planes[0]
                copy_keys(to, 16 * unit, line, plane, cell, last, row)
            elif are_values == 1:
                to = place + value_pitch * row + 16 * turned
                copy_values(to, 16 * unit, line, planes[1], cell, last, row)
            else:
                to = place + key_pitch * row + 16 * turned
                copy_keys(to, 16 * unit, line, planes[0], cell, last, row)
            number = i32(number + 1)
            if number == sets << is_second:
                number, run = i32(0), i32(run + 1)
                if run == end_of(start, last):
                    if is_second == 1:
                        start = after(start, last, step)
                    run, is_second = start, i32(1 - is_second)
        end_copies()
        return start, run, number, is_second

    def following(place: int) -> Any:
        return i32(place + place_bytes) if place < ring_bytes - place_bytes else i32(0)

    def before(place: int) -> Any:
        return i32(place - place_bytes) if place > 0 else i32(ring_bytes - place_bytes)

    def scores_of(queries: Any, place: int, turn: int, seen: Any, are_seen: Any) -> Any:
        """Return the scores of a chunk, not yet scaled."""
        found = joined(multiply(queries, place + turn, place - turn, no_sums()))
        return found if are_seen else seen_ones(found, seen)

    def weights_of(
        queries: Any,
        place: int,
        turn: int,
        seen: Any,
        are_seen: Any,
        scales: Any,
        finite: Any,
        totals: Any,
    ) -> Any:
        """Return the words of a chunk's weights, and totals with them."""
        found = scores_of(queries, place, turn, seen, are_seen)
        return weigh(scaled(found, scales), finite, totals)

    def further(seen: Any, rounds: int) -> Any:
        return i32(seen[0] - ROUND * rounds), i32(seen[1] - ROUND * rounds)

    def maximum_of(place: int, position: int, first: int) -> Any:
        """Return the largest score of a run that begins with a cell, of a pair that may see it."""
        return load_f32(place) if position >= first else f32(_MINUS_INFINITY)

    def attention(
        rows: int,
        sequences: int,
        positions: int,
        q: int,
        blocks: int,
        out: int,
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
        kv_head, thread = i64(block_y()), i64(thread_index())
        first_run, step = block_z(), blocks_z()
        await_previous()
        # The last rows see most cells: their blocks begin first.
        count, group = load_i64(rows), heads // kv_heads
        tile = (count * group + pairs - 1) // pairs - 1 - block_x()
        if tile < 0:
            return
        begin = pairs * tile // group
        stop = min((pairs * (tile + 1) + group - 1) // group, count)
        lane = thread & 31
        g, t = lane >> 2, lane & 3
        planes = k_offset + key_plane * kv_head, v_offset + value_plane * kv_head

        # A lane's two pairs; those behind the last row have its heads.
        pair = pairs * tile + PAIRS * (thread >> 5) + g
        row, other_row = pair // group, (pair + 8) // group
        here = min(row, count - 1) * heads + group * kv_head + pair - group * row
        there = min(other_row, count - 1) * heads + group * kv_head + pair + 8 - group * other_row
        x = load_query(q + 4 * key_length * here + 32 * t)
        y = load_query(q + 4 * key_length * there + 32 * t)
        up, down = power_below(largest_of_quad(magnitude(x)))
        other_up, other_down = power_below(largest_of_quad(magnitude(y)))
        queries = words_of_queries(x, y, (up, other_up))
        scales = scale * down, scale * other_down
        room = room_for_runs(table_width)
        if is_whole:
            maxima, other_maxima = work + 4 * room * here, work + 4 * room * there
        else:
            maxima = maxima_of(work_of(work, here, room, value_length), room, value_length)
            other_maxima = maxima_of(work_of(work, there, room, value_length), room, value_length)

        # Where a lane finds its keys and values in a place of the ring.
        turn = key_turn * (g & 1)
        keys_at = key_pitch * g + 16 * t
        value_turn = 64 if t < 2 else -64
        values_at = 2 * value_pitch * t + 16 * ((g >> 1) ^ 2 * t) + 8 * (g & 1)

        while begin < stop:
            end, last, lowest = span_of(sequences, positions, begin, stop, lane)
            line = blocks + 8 * table_width * load_i64(sequences + 8 * begin)
            position, other_position = i32(-1), i32(-1)
            if begin <= row and row < end:
                position = i32(load_i64(positions + 8 * row))
            if begin <= other_row and other_row < end:
                other_position = i32(load_i64(positions + 8 * other_row))
            last_here = warp_max_i32(i32(max(position, other_position)))
            lowest_here = i32(-warp_max_i32(i32(-min(position, other_position))))
            start, place = first_run, i32(0)
            fed = start, start, i32(0), i32(0)
            barrier()
            clear(thread)
            fed = feed(fed, place, line, last, step, planes, thread)
            fed = feed(fed, following(place), line, last, step, planes, thread)
            highest = f32(_MINUS_INFINITY), f32(_MINUS_INFINITY)
            sum_of_runs = f32(0.0), f32(0.0)

            while start << _RUN_SHIFT <= last:
                behind, run = end_of(start, last), start
                while run < behind:
                    first, of_set = i32(run << _RUN_SHIFT), i32(0)
                    best = f32(_MINUS_INFINITY), f32(_MINUS_INFINITY)
                    while of_set < sets_of(run, last):
                        await_older_copies()
                        barrier()
                        fed = feed(fed, before(place), line, last, step, planes, thread)
                        cell = i32(first + CHUNK * of_set)
                        keys, behind_set = i32(place + keys_at), cell + 4 * ROUND
                        while cell < behind_set and cell <= last_here:
                            seen = i32(position - cell - 2 * t), i32(other_position - cell - 2 * t)
                            are_seen = cell + CHUNK - 1 <= lowest_here
                            found = scores_of(queries, keys, turn, seen, are_seen)
                            best = largest_of(found, best)
                            cell, keys = i32(cell + ROUND), i32(keys + CHUNK * key_pitch)
                        place = following(place)
                        of_set = i32(of_set + 1)
                    best = largest_of_quad(best[0]), largest_of_quad(best[1])
                    best = best[0] * scales[0], best[1] * scales[1]
                    highest = larger_f32(highest[0], best[0]), larger_f32(highest[1], best[1])
                    if t == 0 and position >= first:
                        store_f32(maxima + 4 * run, best[0])
                    if t == 0 and other_position >= first:
                        store_f32(other_maxima + 4 * run, best[1])
                    run = i32(run + 1)
                barrier()

                run = start
                while run < behind:
                    first, of_set = i32(run << _RUN_SHIFT), i32(0)
                    best = (
                        maximum_of(maxima + 4 * run, position, first),
                        maximum_of(other_maxima + 4 * run, other_position, first),
                    )
                    finite = finite_of(best[0]), finite_of(best[1])
                    sums, totals, nothing = no_values(), (f32(0.0), f32(0.0)), no_weights()
                    while of_set < sets_of(run, last):
                        await_older_copies()
                        barrier()
                        fed = feed(fed, before(place), line, last, step, planes, thread)
                        cell = i32(first + CHUNK * of_set)
                        ahead, all_seen = i32(last_here - cell), i32(lowest_here - cell)
                        some, more, third, fourth = nothing, nothing, nothing, nothing
                        if ahead >= 0:
                            keys = i32(place + keys_at)
                            seen = i32(position - cell - 2 * t), i32(other_position - cell - 2 * t)
                            of_these = f32(0.0), f32(0.0)
                            some, of_these = weights_of(
                                queries,
                                keys,
                                turn,
                                seen,
                                all_seen >= CHUNK - 1,
                                scales,
                                finite,
                                of_these,
                            )
                            if ahead >= ROUND:
                                more, of_these = weights_of(
                                    queries,
                                    keys + CHUNK * key_pitch,
                                    turn,
                                    further(seen, 1),
                                    all_seen >= ROUND + CHUNK - 1,
                                    scales,
                                    finite,
                                    of_these,
                                )
                            if ahead >= 2 * ROUND:
                                third, of_these = weights_of(
                                    queries,
                                    keys + 2 * CHUNK * key_pitch,
                                    turn,
                                    further(seen, 2),
                                    all_seen >= 2 * ROUND + CHUNK - 1,
                                    scales,
                                    finite,
                                    of_these,
                                )
                            if ahead >= 3 * ROUND:
                                fourth, of_these = weights_of(
                                    queries,
                                    keys + 3 * CHUNK * key_pitch,
                                    turn,
                                    further(seen, 3),
                                    all_seen >= 3 * ROUND + CHUNK - 1,
                                    scales,
                                    finite,
                                    of_these,
                                )
                            a = of_these[0] + shuffle_xor_f32(of_these[0], 1)
                            b = of_these[1] + shuffle_xor_f32(of_these[1], 1)
                            a += shuffle_xor_f32(a, 2)
                            b += shuffle_xor_f32(b, 2)
                            totals = totals[0] + a, totals[1] + b
                        place = following(place)
                        await_older_copies()
                        are_seen_by_all = cell + LAST_OF_SET <= lowest
                        if not are_seen_by_all:
                            sift(place, cell, last, lowest, thread)
                        barrier()
                        fed = feed(fed, before(place), line, last, step, planes, thread)
                        if not are_seen_by_all:
                            noted, nan = first_noted(lane), f32(_NAN)
                            totals = (
                                totals[0] if position < noted else nan,
                                totals[1] if other_position < noted else nan,
                            )
                        if ahead >= 0:
                            weights = some, more, third, fourth
                            even = i32(place + values_at)
                            sums = mix(even, even + value_turn, weights, ahead, sums)
                        place = following(place)
                        of_set = i32(of_set + 1)

                    if is_whole:
                        a = exp(best[0] - finite_of(highest[0]))
                        b = exp(best[1] - finite_of(highest[1]))
                        if position >= first:
                            mix_run(out + 4 * value_length * here + 32 * t, a, sums, run)
                        if other_position >= first:
                            mix_run(out + 4 * value_length * there + 32 * t, b, sums[2:], run)
                        sum_of_runs = sum_of_runs[0] + a * totals[0], sum_of_runs[1] + b * totals[1]
                    else:
                        if position >= first:
                            values = work_of(work, here, room, value_length) + 32 * t
                            store_run(values + 4 * value_length * run, sums)
                            if t == 0:
                                store_f32(maxima + 4 * (room + run), totals[0])
                        if other_position >= first:
                            values = work_of(work, there, room, value_length) + 32 * t
                            store_run(values + 4 * value_length * run, sums[2:])
                            if t == 0:
                                store_f32(other_maxima + 4 * (room + run), totals[1])
                    run = i32(run + 1)
                start = after(start, last, step)

            if is_whole:
                if position >= 0:
                    divide(out + 4 * value_length * here + 32 * t, sum_of_runs[0])
                if other_position >= 0:
                    divide(out + 4 * value_length * there + 32 * t, sum_of_runs[1])
            begin = end

    def grid(given: Arguments, rows: int) -> Grid:
        blocks = blocks_for(rows, given, warps)
        runs = 1 if is_whole else runs_of(given["table_width"])
        kv_heads = given["kv_heads"]
        return blocks // kv_heads, kv_heads, max(1, min(runs, _BLOCKS // blocks))

    name = f"attention_{'tiles' if is_whole else 'tiles_by_runs'}_{key_length}_{value_length}"
    name += "" if warps == WARPS else f"_{warps}"
    attention.__name__ = attention.__qualname__ = name
    shared_bytes = ring_bytes + 4 * SET
    return GpuKernel(
        name, attention, threads, grid, lambda _: shared_bytes, _REGISTERS, spills=_SPILLS
    )
