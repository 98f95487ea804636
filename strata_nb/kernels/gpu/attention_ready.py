"""Attend with a single row in one launch: `prepare`, attention of halves and what joins its runs.

    prepare, attention of halves, combine      one launch, for one row

A launch costs more time than what it does for a short context, so all that can be is done while the
launch in front still runs: the first 16 cells of each warp are on their way, keys and values. Of
those the row's own cell comes behind it: each warp of a block norms and rotates its head's query,
and the first one also the key, which with the value goes to the K/V and to shared memory, from
where it replaces what was read. Where more heads share it than a block takes, each of their blocks
stores the same bits, and waits for no other. With several rows that would not do: a row sees cells
of the rows in front, which other blocks write.

A row of a single run is joined by the block that has it. Of several runs the last block of a K/V
head's joins all: the work space has them. That is one multiprocessor for each K/V head, so where a
context has room for more runs than `_MOST_JOINED`, `combine` stays a launch.

The bits are those of `prepare`, attention and `combine` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.attention_halves import (
    ADDRESSES,
    CHUNK,
    TILE,
    WARPS,
    attending,
    attending_bytes,
    attention_kernel_of,
    free_bytes_at,
    halves_attention_kernel,
    results_of,
    run_writer,
    takes,
    tiles_of,
)
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.combining import combine_kernel, joiner, of_one_run
from strata_nb.kernels.gpu.intrinsics import (
    await_previous,
    barrier,
    block_x,
    block_z,
    blocks_z,
    fetch_f32,
    half_of_f32,
    i32,
    i64,
    load_4xf32,
    load_i64,
    shared_load_4xi32,
    shared_load_f32,
    shared_store_f32,
    shared_store_i32,
    store_f32,
    store_i32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import COUNTED, MOST_COUNTED, Function, GpuKernel, is_last
from strata_nb.kernels.gpu.planes import plane_bytes
from strata_nb.kernels.gpu.preparing import heads_of, prepare_kernel
from strata_nb.kernels.gpu.rotation import rotator
from strata_nb.kernels.gpu.runs import room_for_runs
from strata_nb.kernels.program import Launch
from strata_nb.kernels.runs import RUN_BLOCKS, RUN_CELLS, runs_of
from strata_nb.packing import SUB_BLOCK

_HALVES = ("f16", "f16")
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_RUN_SHIFT = RUN_CELLS.bit_length() - 1
_MOST_JOINED = 128  # runs: 65,536 cells
_JOINED = "_joined"
_SPILLS = 64  # bytes: on the oldest cards, where products of halves take more instructions
_SHARED = (
    *("rows", "sequences", "positions", "q", "blocks"),
    *("table_width", "k_offset", "v_offset", "heads", "kv_heads"),
)  # arguments that both launches have
_READY = (
    ("table", "address"),
    ("k", "address"),
    ("v", "address"),
    ("q_weight", "address"),
    ("k_weight", "address"),
    ("planes", "integer"),
    ("halves", "integer"),
    ("eps", "float"),
    ("packed", "address"),
)
"""Arguments behind those of attention, by name and kind: as `prepare` and `combine` have them."""


def with_ready_rows(program: Sequence[Launch | CardLaunch]) -> Iterator[Launch | CardLaunch]:
    """Yield launches of one row, with `prepare` in the attention behind it where that can be, and
    what joins its runs."""
    at = 0
    while at < len(program):
        found = _together(*program[at : at + 3]) if at + 2 < len(program) else None
        if found is None:
            yield program[at]
            at += 1
            continue
        yield found
        at += 2
        if found.kernel.name.endswith(_JOINED):
            at += 1


def _together(
    prepare: Launch | CardLaunch, attention: Launch | CardLaunch, combine: Launch | CardLaunch
) -> CardLaunch | None:
    """Return one launch for the first two or all three, None where they are something else."""
    if not isinstance(prepare, CardLaunch) or not isinstance(attention, CardLaunch):
        return None
    given, ready = attention.arguments, prepare.arguments
    lengths = given.get("key_length", 0), given.get("value_length", 0)
    if not takes(*_HALVES, *lengths):
        return None
    group = given["heads"] // given["kv_heads"]
    if prepare.kernel is not prepare_kernel(*_HALVES, *lengths):
        return None
    if attention.kernel is not halves_attention_kernel(*lengths, group):
        return None
    if any(given[name] != ready[name] for name in _SHARED):
        return None
    if not isinstance(combine, CardLaunch) or combine.kernel is not combine_kernel(lengths[1]):
        raise AssertionError(f"{attention.label}: nothing joins its runs")
    tiles = tiles_of(group) * given["kv_heads"]
    joins = runs_of(given["table_width"]) <= _MOST_JOINED and tiles <= MOST_COUNTED
    words = {**given, **ready, **combine.arguments}
    return CardLaunch(
        ready_attention_kernel(*lengths, group, joins),
        attention.label,
        {**given, **{name: words[name] for name, _ in _READY}},
        (*attention.kinds, *(kind for _, kind in _READY)),
    )


# -- the row's own cell ----------------------------------------------------------------------------


@cache
def _own_words(times: int, step: int) -> Function:
    """Return a function (place) that reads four words of shared memory, and again `step` bytes
    further on."""

    def four(place: int) -> Any:
        return shared_load_4xi32(place)

    if times == 1:
        return four
    others = _own_words(times - 1, step)

    def words(place: int) -> Any:
        return four(place) + others(place + step)

    return words


@cache
def _chooser(fours: int) -> Function:
    """Return a function (is_own, own, words): so many times four words of the one or the other."""

    def four(is_own: bool, own: Any, words: Any) -> Any:
        return (
            own[0] if is_own else words[0],
            own[1] if is_own else words[1],
            own[2] if is_own else words[2],
            own[3] if is_own else words[3],
        )

    if fours == 1:
        return four
    others = _chooser(fours - 1)

    def chosen(is_own: bool, own: Any, words: Any) -> Any:
        return four(is_own, own, words) + others(is_own, own[4:], words[4:])

    return chosen


@cache
def _replacer_of_keys(loads: int) -> Function:
    """Return a function (words, own, lane, place): a lane's words of a chunk's keys, with the key
    at a place of shared memory as its cell `own` and all behind."""
    own_words, chosen, words_of_cell = _own_words(loads, 64), _chooser(loads), 4 * loads

    def replaced(words: Any, own: int, lane: int, place: int) -> Any:
        g, mine = lane >> 2, own_words(place + 16 * (lane & 3))
        first, second = words[:words_of_cell], words[words_of_cell:]
        return chosen(g >= own, mine, first) + chosen(g + 8 >= own, mine, second)

    return replaced


@cache
def _replacer_of_values(pieces: int) -> Function:
    """Return the same for the values of a chunk."""
    chosen = _chooser(1)

    def once(words: Any, own: int, lane: int, place: int) -> Any:
        cell, mine = 2 * (lane & 3), shared_load_4xi32(place + 16 * (lane >> 2))
        first, second = (
            chosen(cell >= own, mine, words[:4]),
            chosen(cell + 1 >= own, mine, words[4:8]),
        )
        third, last = words[8:12], words[12:16]
        third, last = chosen(cell + 8 >= own, mine, third), chosen(cell + 9 >= own, mine, last)
        return first + second + third + last

    if pieces == 1:
        return once
    others = _replacer_of_values(pieces - 1)

    def replaced(words: Any, own: int, lane: int, place: int) -> Any:
        return once(words, own, lane, place) + others(words[16:], own, lane, place + 128)

    return replaced


def _half_word(low: Any, high: Any) -> Any:
    return i32(half_of_f32(low) | half_of_f32(high) << 16)


def _store_four(four: Any, lane: int, length: int, place: int, cell: int) -> None:
    """Store a lane's four values of a head as halves: to shared memory, and to a cell."""
    if 4 * lane < length:
        first, second = _half_word(four[0], four[1]), _half_word(four[2], four[3])
        shared_store_i32(place + 8 * lane, first)
        shared_store_i32(place + 8 * lane + 4, second)
        store_i32(cell + 8 * lane, first)
        store_i32(cell + 8 * lane + 4, second)


_rotated = rotator(shared_load_f32, shared_load_f32)


def _four_rotated(x: int, angles: int, lane: int, length: int, planes: int, halves: int) -> Any:
    """Return four values of a head in shared memory, rotated."""
    first = 4 * min(lane, (length >> 2) - 1)
    return (
        _rotated(x, angles, first, length, planes, halves),
        _rotated(x, angles, first + 1, length, planes, halves),
        _rotated(x, angles, first + 2, length, planes, halves),
        _rotated(x, angles, first + 3, length, planes, halves),
    )


# -- the end ---------------------------------------------------------------------------------------


@cache
def _ender(key_length: int, value_length: int) -> Function:
    """Return a function that writes the result of a row with a single run, a head a warp, as
    `combine` does: (out, packed, heads, first_head, used, warp, lane)."""
    sum_of, total_of, maximum_of = results_of(key_length, value_length)
    sub_blocks_of_head = value_length // SUB_BLOCK

    def end(
        out: int, packed: int, heads: int, first_head: int, used: int, warp: int, lane: int
    ) -> None:
        if warp >= used:
            return
        total, largest, part = total_of(warp), maximum_of(warp), 0
        first = sub_blocks_of_head * (first_head + warp)
        while part < sub_blocks_of_head:
            value = of_one_run(sum_of(warp, SUB_BLOCK * part + lane), total, largest)
            store_f32(out + 4 * (SUB_BLOCK * (first + part) + lane), value)
            if packed != 0:
                quantise_sub_block(value, lane, packed, sub_blocks_of_head * heads, first + part)
            part += 1

    return end


# -- the kernel ------------------------------------------------------------------------------------


@cache
def ready_attention_kernel(
    key_length: int, value_length: int, group: int, joins: bool
) -> GpuKernel:
    """Return `attention` of `attention_halves.py` for one row, with what `prepare` does.

    joins   and what `combine` does: it writes no work space where the row has a single run

    Shared memory, while nobody attends: normed heads of the warps, and one key; weights of queries,
    of keys; cosines, then sines. Behind all that who attends has: the row's own key and value.
    """
    announce, keys_of, values_of, keep_query, attend = attending(key_length, value_length)
    write, join = run_writer(key_length, value_length), joiner(value_length)
    end = _ender(key_length, value_length)
    load, keep = heads_of(key_length)
    replaced_keys = _replacer_of_keys(key_length // 32)
    replaced_values = _replacer_of_values(value_length // 64)
    key_plane, value_plane = plane_bytes("f16", key_length), plane_bytes("f16", value_length)
    tiles = tiles_of(group)
    heads_at = weights_at = free_bytes_at(key_length)
    own_head = heads_at + 4 * key_length * WARPS
    q_weights = own_head + 4 * key_length
    k_weights = q_weights + 4 * key_length
    angles = k_weights + 4 * key_length
    own_key = attending_bytes(key_length, value_length)
    own_value = own_key + 2 * key_length

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
        _kv_heads: int,
        _key_length: int,
        _value_length: int,
        scale: Any,
        table: int,
        k: int,
        v: int,
        q_weight: int,
        k_weight: int,
        planes: int,
        halves: int,
        eps: Any,
        packed: int,
    ) -> None:
        tile, thread = i64(block_x()), i64(thread_index())
        run, step = i64(block_z()), i64(blocks_z())
        count, position, sequence = load_i64(rows), load_i64(positions), load_i64(sequences)
        last_run = position >> _RUN_SHIFT if count > 0 else i64(-1)
        if run > last_run:
            await_previous()
            return
        line = blocks + 8 * table_width * sequence
        kv_head = tile // tiles
        first_of_tile = TILE * (tile - tiles * kv_head)
        k_plane, v_plane = k_offset + key_plane * kv_head, v_offset + value_plane * kv_head
        warp, lane = thread >> 5, thread & 31
        if lane == 0:
            announce(run, line, position, warp, 0, k_plane, v_plane)
        if thread < key_length and q_weight != 0:
            shared_store_f32(q_weights + 4 * thread, fetch_f32(q_weight + 4 * thread))
            shared_store_f32(k_weights + 4 * thread, fetch_f32(k_weight + 4 * thread))
        if thread < 2 * planes:
            angle = fetch_f32(table + 4 * (2 * planes * position + thread))
            shared_store_f32(angles + 4 * thread, angle)
        runs_behind = last_run - run
        while runs_behind > 0:
            runs_behind -= step
        is_own = runs_behind == 0  # the row's own cell is in one of the block's runs
        own_block = load_i64(line + 8 * (position >> _BLOCK_SHIFT))
        barrier()
        first, addresses, buffer = run << _RUN_SHIFT, i64(ADDRESSES), i64(0)
        start, last = first + CHUNK * warp, min(position, first + RUN_CELLS - 1)
        # Others may write the row's own cell now: in its place the one before is read.
        before = max(min(position - 1, last), first)
        keys = keys_of(first, start, lane, before, addresses, k_plane)
        values = values_of(first, start, lane, before, addresses, v_plane)
        await_previous()

        # A warp has a head, and where there are too few of something the last one again.
        first_head, used = group * kv_head + first_of_tile, min(group - first_of_tile, TILE)
        head = heads_at + 4 * key_length * warp
        query = load(q + 4 * key_length * (first_head + min(warp, used - 1)), lane)
        key = load(k + 4 * key_length * kv_head, lane)
        value = load_4xf32(v + 4 * value_length * kv_head + 16 * min(lane, value_length // 4 - 1))
        keep(query, head, q_weights if q_weight != 0 else -1, lane, eps)
        cell = position & BLOCK_CELLS - 1
        if is_own and warp == 0:
            keep(key, own_head, k_weights if k_weight != 0 else -1, lane, eps)
        if is_own and warp == 1:
            place = own_block + v_plane + 2 * value_length * cell
            _store_four(value, lane, value_length, own_value, place)
        barrier()
        keep_query(warp, lane, _four_rotated(head, angles, lane, key_length, planes, halves))
        if is_own and warp == 0:
            rotated = _four_rotated(own_head, angles, lane, key_length, planes, halves)
            place = own_block + k_plane + 2 * key_length * cell
            _store_four(rotated, lane, key_length, own_key, place)
        room = room_for_runs(table_width)
        barrier()
        own = position - start
        if run == last_run and own < CHUNK:
            keys = replaced_keys(keys, own, lane, own_key)
            values = replaced_values(values, own, lane, own_value)
        while True:
            buffer = 1 - buffer
            if run + step <= last_run and lane == 0:
                announce(run + step, line, position, warp, buffer, k_plane, v_plane)
            attend(keys, values, first, start, last, addresses, k_plane, v_plane, scale, thread)
            barrier()
            if joins and last_run == 0:
                end(out, packed, heads, first_head, used, warp, lane)
                return
            write(work, first_head, used, run, room, thread)
            run += step
            if run > last_run:
                break
            first, addresses = run << _RUN_SHIFT, ADDRESSES + 8 * RUN_BLOCKS * buffer
            start, last = first + CHUNK * warp, min(position, first + RUN_CELLS - 1)
            keys = keys_of(first, start, lane, last, addresses, k_plane)
            values = values_of(first, start, lane, last, addresses, v_plane)
            barrier()  # what came of the run was read
        if joins and is_last(rows + COUNTED + 4 * tile, min(step, last_run + 1), thread, i64(0)):
            join(work, first_head, used, last_run + 1, room, weights_at, out, packed, heads, thread)

    name = f"attention_halves_ready_{key_length}_{value_length}_{group}{_JOINED if joins else ''}"
    own_bytes = 2 * (key_length + value_length)
    made = attention_kernel_of(name, attention, key_length, value_length, group, own_bytes)
    return made._replace(spills=_SPILLS)
