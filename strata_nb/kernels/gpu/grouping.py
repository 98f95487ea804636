"""Sort a batch's choices by expert on a card, and cut them into tiles: two kernels.

`kernels/groups.py` says what they write. Both have a block for each expert, which goes through all
choices: a batch has few enough of them that this takes less time than a sort in several launches
would. Choices of an expert stay in order; nothing depends on which block is faster.

    count   how many choices an expert has
    group   members, sources and tiles; each block adds up the counts of those before it
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    block_x,
    i32,
    i64,
    load_i64,
    shared_load_i32,
    shared_store_i32,
    store_i64,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid, warp_sum_i32
from strata_nb.kernels.groups import TILE_BYTES, TILE_ROWS

_THREADS = 256
_WARPS = _THREADS // WARP

# Shared memory: sums of each warp, of three kinds; how many choices each thread found.
_KIND = 4 * _WARPS
_FOUND = 3 * _KIND


def _store_sum(kind: int, thread: Any, count: Any) -> None:
    """Put a warp's sum of a count into shared memory."""
    total = warp_sum_i32(i32(count))
    if thread & WARP - 1 == 0:
        shared_store_i32(_KIND * kind + 4 * (thread >> 5), total)


def _sum_of_warps(kind: int, warps: int) -> Any:
    """Return the sum over so many warps, behind a barrier."""
    total, warp = i64(0), 0
    while warp < warps:
        total += shared_load_i32(_KIND * kind + 4 * warp)
        warp += 1
    return total


def _four(chosen: int, choice: int, step: int, last: int) -> Any:
    """Return four choices at once, of which the loads wait for each other otherwise: those behind
    the last are the last again."""
    return (
        load_i64(chosen + 8 * choice),
        load_i64(chosen + 8 * min(choice + step, last)),
        load_i64(chosen + 8 * min(choice + 2 * step, last)),
        load_i64(chosen + 8 * min(choice + 3 * step, last)),
    )


def _hits(four: Any, choice: int, step: int, end: int, expert: int) -> Any:
    """Return how many of four choices that there are, below `end`, are of an expert."""
    a, b, c, d = four
    found = 1 if a == expert else 0
    found += 1 if b == expert and choice + step < end else 0
    found += 1 if c == expert and choice + 2 * step < end else 0
    return found + (1 if d == expert and choice + 3 * step < end else 0)


def _count(rows: int, chosen: int, counts: int, experts: int, top_k: int) -> None:
    expert, thread = i64(block_x()), i64(thread_index())
    choices = load_i64(rows) * top_k
    found, choice = i64(0), thread
    while choice < choices:
        four = _four(chosen, choice, _THREADS, choices - 1)
        found += _hits(four, choice, _THREADS, choices, expert)
        choice += 4 * _THREADS
    _store_sum(0, thread, found)
    barrier()
    if thread == 0:
        store_i64(counts + 8 * expert, _sum_of_warps(0, _WARPS))


def _grid(arguments: Arguments, _: int) -> Grid:
    return arguments["experts"], 1, 1


@cache
def count_kernel() -> GpuKernel:
    """Return `count`: (rows, chosen, counts, experts, top_k), grid (experts)."""
    return GpuKernel("batch_count", _count, _THREADS, _grid, lambda _: _KIND)


@cache
def group_kernel(top_k: int, tile_rows: int = TILE_ROWS) -> GpuKernel:
    """Return `group` for so many choices of a row and of a tile, grid (experts).

    Its arguments are rows, chosen, counts, members, sources, tiles, experts and top_k. A tile has
    `TILE_ROWS` choices at least.
    """

    def group(
        rows: int,
        chosen: int,
        counts: int,
        members: int,
        sources: int,
        tiles: int,
        experts: int,
        _top_k: int,
    ) -> None:
        expert, thread = i64(block_x()), i64(thread_index())
        choices = load_i64(rows) * top_k
        # What is before this expert, in members and in tiles.
        before, tiles_before, other = i64(0), i64(0), thread
        while other < expert:
            count = load_i64(counts + 8 * other)
            before += count
            tiles_before += i32(count + tile_rows - 1) // tile_rows
            other += _THREADS
        # A thread has a run of choices.
        each = choices + _THREADS - 1 >> 8
        first, last = min(each * thread, choices), min(each * (thread + 1), choices)
        found, choice = i64(0), first
        while choice < last:
            found += _hits(_four(chosen, choice, 1, last - 1), choice, 1, last, expert)
            choice += 4
        shared_store_i32(_FOUND + 4 * thread, i32(found))
        _store_sum(0, thread, before)
        _store_sum(1, thread, tiles_before)
        _store_sum(2, thread, found)
        barrier()
        start, first_tile = _sum_of_warps(0, _WARPS), _sum_of_warps(1, _WARPS)
        count = _sum_of_warps(2, _WARPS)
        place, other = start + _sum_of_warps(2, thread >> 5), thread & -WARP
        while other < thread:
            place += shared_load_i32(_FOUND + 4 * other)
            other += 1
        choice = first
        while choice < last and found > 0:
            a, b, c, d = _four(chosen, choice, 1, last - 1)
            number = 0
            while number < 4:
                one = a if number == 0 else b if number == 1 else c if number == 2 else d
                if one == expert and choice < last:
                    store_i64(members + 8 * place, choice)
                    store_i64(sources + 8 * place, i64(i32(choice) // top_k))
                    place += 1
                    found -= 1
                number += 1
                choice += 1
        own_tiles = i64(i32(count + tile_rows - 1) // tile_rows)
        tile = thread
        while tile < own_tiles:
            record = tiles + 8 + TILE_BYTES * (first_tile + tile)
            store_i64(record, expert)
            store_i64(record + 8, start + tile_rows * tile)
            store_i64(record + 16, min(count - tile_rows * tile, tile_rows))
            tile += _THREADS
        if expert == experts - 1 and thread == 0:
            store_i64(tiles, first_tile + own_tiles)

    return GpuKernel(
        f"batch_group_{top_k}_{tile_rows}",
        group,
        _THREADS,
        _grid,
        lambda _: _FOUND + 4 * _THREADS,
    )
