"""Join the runs of attention: the second of its two kernels on a card, or the end of the first.

A block of threads has a head of a row, a thread one value of it:

    weight of a run = exp(its maximum - the largest of all)
    value           = sum of weight * values of the run / sum of weight * sum of the run

fused, runs ascending. What multiplies quantised rows next gets its row from here as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.held_rows import HELD, write_four
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    block_x,
    block_y,
    f32,
    f32_of_bits,
    fma,
    i64,
    larger_f32,
    load_2xi32,
    load_f32,
    load_i64,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, Function, GpuKernel, blocks_of, warp_max
from strata_nb.kernels.gpu.runs import maxima_of, room_for_runs, work_of
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.kernels.runs import RUN_CELLS, runs_of

ARGUMENTS = (
    ("rows", "address"),
    ("positions", "address"),
    ("work", "address"),
    ("out", "address"),
    ("packed", "address"),
    ("table_width", "integer"),
    ("heads", "integer"),
)
"""Of the kernel, by name and kind. packed: the quantised rows, 0: not wanted."""

_RUN_SHIFT = RUN_CELLS.bit_length() - 1
_AT_ONCE = 8  # runs whose values are on their way together
_MINUS_INFINITY = float("-inf")


def _four_of(place: int, left: int, step: int) -> Any:
    """Return a float of four runs, of the last one in place of those behind it.

    left   runs from the first of the four on, 1 at least
    step   bytes from a run to the next
    """
    a, b = load_f32(place), load_f32(place + step * min(left - 1, 1))
    return (
        a,
        b,
        load_f32(place + step * min(left - 1, 2)),
        load_f32(place + step * min(left - 1, 3)),
    )


def _eight_of(place: int, left: int, step: int) -> Any:
    second = max(min(left - 1, 4), 0)
    return _four_of(place, left, step) + _four_of(place + step * second, left - second, step)


def _joined(values: Any, weights: int, total: Any) -> Any:
    """Return total and eight values times their weights, which begin at an offset."""
    total = fma(shared_load_f32(weights), values[0], total)
    total = fma(shared_load_f32(weights + 4), values[1], total)
    total = fma(shared_load_f32(weights + 8), values[2], total)
    total = fma(shared_load_f32(weights + 12), values[3], total)
    total = fma(shared_load_f32(weights + 16), values[4], total)
    total = fma(shared_load_f32(weights + 20), values[5], total)
    total = fma(shared_load_f32(weights + 24), values[6], total)
    return fma(shared_load_f32(weights + 28), values[7], total)


def of_one_run(found: Any, weighed: Any, largest: Any) -> Any:
    """Return what `combine` makes of a single run: of a value, the sum of the weights, and the
    largest score."""
    weight = exp(largest - (f32(0.0) if largest == f32(_MINUS_INFINITY) else largest))
    mixed = fma(weight, found, f32(0.0))
    return fma(f32(0.0), found, mixed) / (f32(0.0) + weight * weighed)


# -- four values of a head in each thread ----------------------------------------------------------


@cache
def _fours_of(runs: int) -> Function:
    """Return a function (place, left, step): four values of so many runs, of the last one in place
    of those behind it; `left` and `step` are those of `_four_of`."""

    def last(place: int, left: int, step: int) -> Any:
        of_run = place + step * min(left - 1, runs - 1)
        a, b = load_2xi32(of_run)  # work space of a head begins at any multiple of 8
        c, d = load_2xi32(of_run + 8)
        return f32_of_bits(a), f32_of_bits(b), f32_of_bits(c), f32_of_bits(d)

    if runs == 1:
        return last
    others = _fours_of(runs - 1)

    def several(place: int, left: int, step: int) -> Any:
        return others(place, left, step) + last(place, left, step)

    return several


@cache
def _fours_joined(runs: int) -> Function:
    """Return a function (values, weights, totals): what `_joined` returns, of four values."""

    def one(values: Any, weights: int, totals: Any) -> Any:
        a, b, c, d = totals
        weight = shared_load_f32(weights)
        return (
            fma(weight, values[0], a),
            fma(weight, values[1], b),
            fma(weight, values[2], c),
            fma(weight, values[3], d),
        )

    if runs == 1:
        return one
    others = _fours_joined(runs - 1)

    def several(values: Any, weights: int, totals: Any) -> Any:
        return others(values[4:], weights + 4, one(values, weights, totals))

    return several


@cache
def joiner(value_length: int) -> Function:
    """Return a device function that joins the runs of a row's heads, in one block of threads.

    join(work, first_head, used, runs, room, weights, out, packed, heads, thread): `used` heads from
    first_head on, one for each warp of the block at most. All threads take part; shared memory from
    `weights` on is its own, 8 * (runs + 8) bytes for each head.
    """
    step = 4 * value_length
    threads_of_head = value_length // HELD
    head_shift = threads_of_head.bit_length() - 1
    load, joined = _fours_of(_AT_ONCE), _fours_joined(_AT_ONCE)

    def weigh(maxima: int, sums: int, runs: int, weights: int, lane: int) -> None:
        """Write the weights of a head's runs, and behind them what its sums count for."""
        best, run = f32(_MINUS_INFINITY), lane
        while run < runs:
            best = larger_f32(best, load_f32(maxima + 4 * run))
            run += WARP
        best = warp_max(best)
        finite = f32(0.0) if best == f32(_MINUS_INFINITY) else best
        run = lane
        while run < runs:
            weight = exp(load_f32(maxima + 4 * run) - finite)
            shared_store_f32(weights + 4 * run, weight)
            weighed = weight * load_f32(sums + 4 * run)
            shared_store_f32(weights + 4 * (runs + _AT_ONCE + run), weighed)
            run += WARP
        if lane < _AT_ONCE:
            shared_store_f32(weights + 4 * (runs + lane), f32(0.0))

    def join(
        work: int,
        first_head: int,
        used: int,
        runs: int,
        room: int,
        weights: int,
        out: int,
        packed: int,
        heads: int,
        thread: int,
    ) -> None:
        of_head, warp = 8 * (runs + _AT_ONCE), thread >> 5
        if warp < used:
            maxima = maxima_of(
                work_of(work, first_head + warp, room, value_length), room, value_length
            )
            weigh(maxima, maxima + 4 * room, runs, weights + of_head * warp, thread & WARP - 1)
        barrier()
        # Threads that have no values repeat the last sub-block, whose eight threads go together.
        limit = used << head_shift
        four = thread if thread < limit else limit - 8 + (thread & 7)
        head, within = four >> head_shift, four & threads_of_head - 1
        place = work_of(work, first_head + head, room, value_length) + 4 * HELD * within
        own = weights + of_head * head
        total, run = f32(0.0), i64(0)
        while run < runs:
            total += shared_load_f32(own + 4 * (runs + _AT_ONCE + run))
            run += 1
        mixed, run = (f32(0.0), f32(0.0), f32(0.0), f32(0.0)), i64(0)
        while run < runs:
            found = load(place + step * run, runs - run, step)
            mixed = joined(found, own + 4 * run, mixed)
            run += _AT_ONCE
        a, b, c, d = mixed
        values = a / total, b / total, c / total, d / total
        number = threads_of_head * (first_head + head) + within
        write_four(values, number, out, packed, (value_length * heads) >> 5)

    return join


# -- the kernel ------------------------------------------------------------------------------------


@cache
def combine_kernel(value_length: int) -> GpuKernel:
    """Return the kernel `combine` for a length of heads: grid (heads, rows), a thread a value.

    Quantised rows are for lengths that are multiples of 32. Reads 4 * (value_length + 2) bytes a
    run, writes 4 and 1.5 a value.
    """
    step = 4 * value_length  # bytes from a run to the next
    threads = WARP * blocks_of(value_length, WARP)

    def combine(
        rows: int, positions: int, work: int, out: int, packed: int, table_width: int, heads: int
    ) -> None:
        head, row, thread = i64(block_x()), i64(block_y()), i64(thread_index())
        count, position = load_i64(rows), load_i64(positions + 8 * row)
        await_previous()
        if row >= count:
            return
        runs, room = (position >> _RUN_SHIFT) + 1, room_for_runs(table_width)
        values = work_of(work, row * heads + head, room, value_length)
        maxima = maxima_of(values, room, value_length)
        sums = maxima + 4 * room

        # All that needs no decision is on its way at once.
        place = values + 4 * min(thread, value_length - 1)
        found = _eight_of(place, runs, step)
        run, best = thread, f32(_MINUS_INFINITY)
        largest = load_f32(maxima + 4 * min(run, runs - 1))
        weighed = load_f32(sums + 4 * min(run, runs - 1))
        lane = thread & (WARP - 1)
        while lane < runs:
            best = larger_f32(best, load_f32(maxima + 4 * lane))
            lane += WARP
        best = warp_max(best)
        finite = f32(0.0) if best == f32(_MINUS_INFINITY) else best
        while run < runs:
            weight = exp(largest - finite)
            shared_store_f32(4 * run, weight)
            shared_store_f32(4 * (room + _AT_ONCE + run), weight * weighed)
            run += threads
            largest = load_f32(maxima + 4 * min(run, runs - 1))
            weighed = load_f32(sums + 4 * min(run, runs - 1))
        if thread < _AT_ONCE:  # behind the last run, whose values are read in place of others
            shared_store_f32(4 * (runs + thread), f32(0.0))
        barrier()

        total, run = f32(0.0), i64(0)
        while run < runs:
            total += shared_load_f32(4 * (room + _AT_ONCE + run))
            run += 1
        mixed, run = f32(0.0), i64(0)
        while run < runs:
            mixed = _joined(found, 4 * run, mixed)
            run += _AT_ONCE
            following = min(run, runs - 1)
            found = _eight_of(place + step * following, runs - following, step)
        value = mixed / total
        before = value_length * head
        if thread < value_length:
            store_f32(out + 4 * (value_length * heads * row + before + thread), value)
        if packed != 0:
            sub_blocks = (value_length * heads) >> 5
            packed_row = packed + SUB_BLOCK_BYTES * sub_blocks * row
            quantise_sub_block(value, thread & 31, packed_row, sub_blocks, (before + thread) >> 5)

    def shared_bytes(given: Arguments) -> int:
        return 8 * (runs_of(given["table_width"]) + _AT_ONCE)

    name = f"combine_{value_length}"
    combine.__name__ = combine.__qualname__ = name
    return GpuKernel(
        name, combine, threads, lambda given, rows: (given["heads"], rows, 1), shared_bytes
    )
