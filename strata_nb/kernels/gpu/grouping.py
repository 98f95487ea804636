"""Sort a batch's choices by expert on a card, and cut them into tiles: two kernels.

`kernels/groups.py` says what they write. Both have a block for each expert, which goes through all
choices: a batch has few enough of them that this takes less time than a sort in several launches
would. Lanes of a warp read choices that follow each other, and vote on which are of the expert: the
votes of lower lanes and earlier warps say where a choice goes. So choices of an expert stay in
order; nothing depends on which block is faster.

    count   how many choices an expert has
    group   members, sources and tiles; each block adds up the counts of those before it
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    bits_set,
    block_x,
    i32,
    i64,
    lanes_where,
    load_i64,
    quotient_i32,
    shared_load_i32,
    shared_store_i32,
    shifted_down,
    store_i64,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, Function, GpuKernel, Grid, warp_sum_i32
from strata_nb.kernels.groups import TILE_BYTES, TILE_ROWS

_COUNTING = 256  # threads of `count`
_THREADS = 512  # of `group`
_WARPS = _THREADS // WARP
_OF_WARP = 8 * WARP  # choices of a warp at a time
_OF_BLOCK = _WARPS * _OF_WARP

# Shared memory: sums of each warp, of three kinds.
_KIND = 4 * _WARPS


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


def _four(chosen: int, choice: int, choices: int) -> Any:
    """Return four choices of a thread of `count`, of which the loads wait for each other otherwise:
    those behind the last are the last again."""
    last = choices - 1
    return (
        load_i64(chosen + 8 * choice),
        load_i64(chosen + 8 * min(choice + _COUNTING, last)),
        load_i64(chosen + 8 * min(choice + 2 * _COUNTING, last)),
        load_i64(chosen + 8 * min(choice + 3 * _COUNTING, last)),
    )


def _hits(four: Any, choice: int, choices: int, expert: int) -> Any:
    """Return how many of four choices that there are, are of an expert."""
    a, b, c, d = four
    found = 1 if a == expert else 0
    found += 1 if b == expert and choice + _COUNTING < choices else 0
    found += 1 if c == expert and choice + 2 * _COUNTING < choices else 0
    return found + (1 if d == expert and choice + 3 * _COUNTING < choices else 0)


def _count(rows: int, chosen: int, counts: int, experts: int, top_k: int) -> None:
    expert, thread = i64(block_x()), i64(thread_index())
    choices = load_i64(rows) * top_k
    found, choice = i64(0), thread
    while choice < choices:
        found += _hits(_four(chosen, choice, choices), choice, choices, expert)
        choice += 4 * _COUNTING
    _store_sum(0, thread, found)
    barrier()
    if thread == 0:
        store_i64(counts + 8 * expert, _sum_of_warps(0, _COUNTING // WARP))


def _grid(arguments: Arguments, _: int) -> Grid:
    return arguments["experts"], 1, 1


@cache
def count_kernel() -> GpuKernel:
    """Return `count`: (rows, chosen, counts, experts, top_k), grid (experts)."""
    return GpuKernel("batch_count", _count, _COUNTING, _grid, lambda _: _KIND)


def _eight(chosen: int, choice: int, choices: int) -> Any:
    """Return eight choices of a thread, 32 apart; those behind the last are the last again."""
    last = choices - 1
    return (
        load_i64(chosen + 8 * min(choice, last)),
        load_i64(chosen + 8 * min(choice + WARP, last)),
        load_i64(chosen + 8 * min(choice + 2 * WARP, last)),
        load_i64(chosen + 8 * min(choice + 3 * WARP, last)),
        load_i64(chosen + 8 * min(choice + 4 * WARP, last)),
        load_i64(chosen + 8 * min(choice + 5 * WARP, last)),
        load_i64(chosen + 8 * min(choice + 6 * WARP, last)),
        load_i64(chosen + 8 * min(choice + 7 * WARP, last)),
    )


def _lanes_with(one: Any, expert: int, choice: int, choices: int) -> Any:
    """Return which lanes of a warp have a choice that there is, of an expert."""
    return lanes_where(i32(1) if one == expert and choice < choices else i32(0))


def _lanes_with_eight(chosen: int, choice: int, choices: int, expert: int) -> Any:
    """Return eight words: which lanes' choices are of an expert, of the first, the second ..."""
    a, b, c, d, e, f, g, h = _eight(chosen, choice, choices)
    return (
        _lanes_with(a, expert, choice, choices),
        _lanes_with(b, expert, choice + WARP, choices),
        _lanes_with(c, expert, choice + 2 * WARP, choices),
        _lanes_with(d, expert, choice + 3 * WARP, choices),
        _lanes_with(e, expert, choice + 4 * WARP, choices),
        _lanes_with(f, expert, choice + 5 * WARP, choices),
        _lanes_with(g, expert, choice + 6 * WARP, choices),
        _lanes_with(h, expert, choice + 7 * WARP, choices),
    )


def _found(lanes: Any) -> Any:
    """Return how many bits eight words have."""
    a, b, c, d, e, f, g, h = lanes
    low = bits_set(a) + bits_set(b) + bits_set(c) + bits_set(d)
    return low + bits_set(e) + bits_set(f) + bits_set(g) + bits_set(h)


@cache
def _storer(top_k: int, number: int) -> Function:
    """Return a function (lanes, choice, place, members, sources, below, lane): store what a lane
    has of the last `number` of its eight choices, where words of lanes say so.

    lanes    a word for each of them, of the lanes that have a choice of the expert
    choice   the lane's first of them
    place    of members and of sources, where those of the warp begin
    below    has the bits of lower lanes
    """

    def one(
        lanes: Any, choice: int, place: int, members: int, sources: int, below: int, lane: int
    ) -> Any:
        word = lanes[0]
        if shifted_down(word, i32(lane)) & 1 == 1:
            target = 8 * (place + bits_set(i32(word & below)))
            store_i64(members + target, choice)
            store_i64(sources + target, i64(quotient_i32(i32(choice), i32(top_k))))
        return place + bits_set(word)

    if number == 1:
        return one
    others = _storer(top_k, number - 1)

    def several(
        lanes: Any, choice: int, place: int, members: int, sources: int, below: int, lane: int
    ) -> Any:
        place = one(lanes, choice, place, members, sources, below, lane)
        return others(lanes[1:], choice + WARP, place, members, sources, below, lane)

    return several


@cache
def group_kernel(top_k: int, tile_rows: int = TILE_ROWS) -> GpuKernel:
    """Return `group` for so many choices of a row and of a tile, grid (experts).

    Its arguments are rows, chosen, counts, members, sources, tiles, experts and top_k. A tile has
    `TILE_ROWS` choices at least.
    """
    store = _storer(top_k, 8)

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
        count = load_i64(counts + 8 * expert)
        _store_sum(0, thread, before)
        _store_sum(1, thread, tiles_before)
        barrier()
        start, first_tile = _sum_of_warps(0, _WARPS), _sum_of_warps(1, _WARPS)
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
        warp, lane = thread >> 5, thread & WARP - 1
        below = i32((1 << lane) - 1)
        place, first = start, i64(0)
        while first < choices:
            choice = first + _OF_WARP * warp + lane
            lanes = _lanes_with_eight(chosen, choice, choices, expert)
            if lane == 0:
                shared_store_i32(2 * _KIND + 4 * warp, i32(_found(lanes)))
            barrier()
            of_warp = place + _sum_of_warps(2, warp)
            place += _sum_of_warps(2, _WARPS)
            store(lanes, choice, of_warp, members, sources, below, lane)
            first += _OF_BLOCK
            barrier()

    return GpuKernel(
        f"batch_group_{top_k}_{tile_rows}",
        group,
        _THREADS,
        _grid,
        lambda _: 3 * _KIND,
    )
