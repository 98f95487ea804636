"""Attention over keys and values that are halves, by products of matrices (`mma_of_halves`).

A block of threads computes the heads of a K/V head, eight at most, over a run of 512 cells, so that
keys and values are read once for all of them. Each of its 8 warps takes 16 cells of every 128:

    scores    queries times keys: the rows of A are the 8 heads' queries as halves and once more
              what these leave, the columns of B are 8 cells
    weights   exp(score - the largest of the run), times 2 ** 15, again as two halves
    values    values times weights: the rows of A are 16 of the values, its columns 8 cells; the
              columns of B are the 8 heads

Lane 4 * g + t loads 16 bytes of cell g for keys, of cells 2 * t and 2 * t + 1 for values. That
these are neighbours in a cell, and not where a matrix has them, is only another order of the sum
over a key's values, which queries follow, and of the rows of the result.

In the first product a lane gets the scores of head g and cells 2 * t and 2 * t + 1. Their weights
are just what the second wants of it. At the end the warps' results are added in ascending order.

Behind the row's position a score is replaced, and the position's own cell is read instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.halves import (
    halves_of,
    loader_of_queries,
    loader_of_words,
    magnitude_of,
    power_below,
    products,
    store_query,
    sum_of_parts,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    block_x,
    block_y,
    block_z,
    blocks_z,
    f32,
    high_halves,
    i32,
    i64,
    larger_f32,
    load_4xf32,
    load_4xi32,
    load_i64,
    low_halves,
    mma_of_halves,
    prefetch,
    shared_load_f32,
    shared_load_i64,
    shared_store_f32,
    shared_store_i64,
    shuffle_xor_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function, GpuKernel, warp_max
from strata_nb.kernels.gpu.planes import plane_bytes
from strata_nb.kernels.gpu.runs import grid_of, maxima_of, room_for_runs, work_of
from strata_nb.kernels.runs import RUN_BLOCKS, RUN_CELLS

_BLOCKS = 128  # of threads: as many as large cards have multiprocessors, which take one each
WARPS = 8  # and K/V blocks of a run
_THREADS = WARPS * WARP
TILE = 8  # heads
CHUNK = 16  # cells that a warp takes at a time
_ROUND = WARPS * CHUNK  # cells that the block takes at a time
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_RUN_SHIFT = RUN_CELLS.bit_length() - 1
_MINUS_INFINITY = float("-inf")
_UNIT = float(1 << 15)  # the largest weight, so that small ones are exact halves too
_REGISTERS = 255  # one block a multiprocessor, with many loads on their way

# Shared memory, in bytes: the addresses of two runs' blocks, the largest score and the sum of the
# weights of each warp and head, what undoes the growth of the heads' queries; these as words, then
# the scores, and where these were the warps' results.
ADDRESSES = 0
_MAXIMA = ADDRESSES + 2 * 8 * RUN_BLOCKS
_TOTALS = _MAXIMA + 4 * WARPS * TILE
_SHRUNK = _TOTALS + 4 * WARPS * TILE
_QUERIES = _SHRUNK + 4 * TILE
_SCORE_BYTES = 4 * RUN_CELLS * TILE

_KEY_LENGTHS, _VALUE_LENGTHS = (32, 64, 96, 128), (64, 128)


def takes(keys: str, values: str, key_length: int, value_length: int) -> bool:
    """Return whether the kernel here is one for these."""
    sizes = key_length in _KEY_LENGTHS and value_length in _VALUE_LENGTHS
    return keys == values == "f16" and sizes


def tiles_of(group: int) -> int:
    """Return how many blocks the heads of a group need."""
    return -(-group // TILE)


# -- values ----------------------------------------------------------------------------------------


@cache
def _loader_of_cells(pieces: int) -> Function:
    """Return a function (a, b, c, d): of four cells 16 bytes, and again 128 bytes further on."""

    def once(a: int, b: int, c: int, d: int) -> Any:
        return load_4xi32(a) + load_4xi32(b) + load_4xi32(c) + load_4xi32(d)

    if pieces == 1:
        return once
    others = _loader_of_cells(pieces - 1)

    def load(a: int, b: int, c: int, d: int) -> Any:
        return once(a, b, c, d) + others(a + 128, b + 128, c + 128, d + 128)

    return load


def _tile(a: Any, b: Any, c: Any, d: Any, weights: Any, sums: Any) -> Any:
    """Return sums and two values of 16 cells times weights: a word of each of a lane's cells."""
    x, y, z, w = low_halves(a, b), high_halves(a, b), low_halves(c, d), high_halves(c, d)
    sums = mma_of_halves(x, y, z, w, weights[0], weights[2], sums[0], sums[1], sums[2], sums[3])
    return mma_of_halves(x, y, z, w, weights[1], weights[3], sums[0], sums[1], sums[2], sums[3])


def _four_tiles(x: Any, weights: Any, sums: Any) -> Any:
    first = _tile(x[0], x[4], x[8], x[12], weights, sums[:4])
    second = _tile(x[1], x[5], x[9], x[13], weights, sums[4:8])
    third = _tile(x[2], x[6], x[10], x[14], weights, sums[8:12])
    return first + second + third + _tile(x[3], x[7], x[11], x[15], weights, sums[12:16])


@cache
def _mixer(pieces: int) -> Function:
    """Return a function (words of values, weights, sums): sums and values times weights."""
    if pieces == 1:
        return _four_tiles
    others = _mixer(pieces - 1)

    def mix(x: Any, weights: Any, sums: Any) -> Any:
        return _four_tiles(x, weights, sums) + others(x[16:], weights, sums[16:])

    return mix


@cache
def _zeros(count: int) -> Function:
    """Return a function that returns so many zeros, a multiple of 4."""

    def four() -> Any:
        return f32(0.0), f32(0.0), f32(0.0), f32(0.0)

    if count == 4:
        return four
    others = _zeros(count - 4)

    def zeros() -> Any:
        return four() + others()

    return zeros


# -- results ---------------------------------------------------------------------------------------
# Number n = 16 * piece + 4 * r + c of a lane's results is of value 64 * piece + 8 * g + 2 * r +
# c // 2 and head 2 * t + c % 2. In shared memory number n of all lanes lies together, turned by so
# much that both those who write n and those who read neighbouring values of a head use all banks.


def _turn(r: Any, odd: Any) -> Any:
    place = 2 * r + odd
    return (place & 3) + 4 * (place & 4)


@cache
def _storer(count: int, n: int = 0) -> Function:
    """Return a function (place, lane, sums) that stores results n, n + 1, ... of a lane."""
    first, second = (_turn(n // 4 % 4, odd) for odd in (0, 1))

    def four(place: int, lane: int, sums: Any) -> None:
        turned = place + 128 * n + 4 * ((lane + first) & 31)
        shared_store_f32(turned, sums[0])
        shared_store_f32(turned + 128, sums[1])
        turned = place + 128 * n + 4 * ((lane + second) & 31)
        shared_store_f32(turned + 256, sums[2])
        shared_store_f32(turned + 384, sums[3])

    if count == 4:
        return four
    others = _storer(count - 4, n + 4)

    def store(place: int, lane: int, sums: Any) -> None:
        four(place, lane, sums)
        others(place, lane, sums[4:])

    return store


def _place_of(head: Any, number: Any) -> Any:
    """Return where a warp's result for a value of a head is, behind where its results begin."""
    piece, g, r, odd = number >> 6, (number >> 3) & 7, (number >> 1) & 3, number & 1
    n = 16 * piece + 4 * r + 2 * odd + (head & 1)
    return 128 * n + 4 * ((4 * g + (head >> 1) + _turn(r, odd)) & 31)


def _sum_of_warps(place: int, step: int) -> Any:
    total, warp = shared_load_f32(place), 1
    while warp < WARPS:
        total += shared_load_f32(place + step * warp)
        warp += 1
    return total


def _largest_of_warps(place: int) -> Any:
    best, warp = shared_load_f32(place), 1
    while warp < WARPS:
        best = larger_f32(best, shared_load_f32(place + 4 * TILE * warp))
        warp += 1
    return best


# -- a run -----------------------------------------------------------------------------------------


class Attending(NamedTuple):
    """Hold device functions of a block of threads that attends, for lengths of heads.

    announce    (run, line, position, warp, buffer, k_plane, v_plane): say where the run's block of
                the warp's number is, in one of two buffers of addresses, and bring what is seen of
                it nearer. One lane calls it. line is the sequence's row of the block table
    keys        (first, start, lane, last, addresses, k_plane): a lane's words of the chunk at cell
                `start` of the run that begins at `first`; of the cell `last` in place of later ones
    values      the same of values, v_plane
    keep_query  (warp, lane, query): put four values of the warp's head where `attend` finds them
                behind a barrier
    attend      (keys, values, first, start, last, addresses, k_plane, v_plane, scale, thread): the
                run whose first chunk of the warp these are. Behind it and a barrier `sum_of`,
                `total_of` and `maximum_of` of `Results` find what came of it
    """

    announce: Function
    keys: Function
    values: Function
    keep_query: Function
    attend: Function


class Results(NamedTuple):
    """Hold device functions that return a run's results from shared memory, over all warps.

    sum_of      (head, number): the sum of weight times value
    total_of    (head,): the sum of the weights
    maximum_of  (head,): the largest score
    """

    sum_of: Function
    total_of: Function
    maximum_of: Function


@cache
def results_of(key_length: int, value_length: int) -> Results:
    """Return where `attend` leaves what comes of a run."""
    results_at, result_bytes = free_bytes_at(key_length), _result_bytes(value_length)

    def sum_of(head: int, number: int) -> Any:
        return _sum_of_warps(results_at + _place_of(head, number), result_bytes)

    def total_of(head: int) -> Any:
        return _sum_of_warps(_TOTALS + 4 * head, 4 * TILE)

    def maximum_of(head: int) -> Any:
        return _largest_of_warps(_MAXIMA + 4 * head)

    return Results(sum_of, total_of, maximum_of)


@cache
def attending(key_length: int, value_length: int) -> Attending:
    """Return how a block of threads attends."""
    loads, pieces = key_length // 32, value_length // 64
    results = 16 * pieces  # of a lane
    key_words = 4 * loads
    load_queries, load_key = loader_of_queries(loads), loader_of_words(loads, 64)
    score, load_values, mix = products(loads), _loader_of_cells(pieces), _mixer(pieces)
    store_results = _storer(results)
    key_bytes, value_bytes = 2 * key_length, 2 * value_length
    result_bytes, scores_at = _result_bytes(value_length), free_bytes_at(key_length)
    no_scores, no_results = _zeros(8), _zeros(results)

    def announce(
        run: int, line: int, position: int, warp: int, buffer: int, k_plane: int, v_plane: int
    ) -> None:
        number = run * RUN_BLOCKS + warp
        block = load_i64(line + 8 * min(number, position >> _BLOCK_SHIFT))
        shared_store_i64(ADDRESSES + 8 * (RUN_BLOCKS * buffer + warp), block)
        cells = min(position + 1 - BLOCK_CELLS * number, BLOCK_CELLS)
        if cells > 0:
            prefetch(block + k_plane, i32(key_bytes * cells))
            prefetch(block + v_plane, i32(value_bytes * cells))

    def cell_of(first: int, cell: int, last: int, addresses: int, each: int) -> Any:
        """Return the address of a cell of a run, of the last one that is seen if it is behind."""
        cell = min(cell, last)
        block = shared_load_i64(addresses + 8 * ((cell - first) >> _BLOCK_SHIFT))
        return block + each * (cell & (BLOCK_CELLS - 1))

    def keys_of(first: int, start: int, lane: int, last: int, addresses: int, k_plane: int) -> Any:
        """Return the words of cells g and 8 + g of a chunk."""
        g, offset = lane >> 2, k_plane + 16 * (lane & 3)
        place = cell_of(first, start + g, last, addresses, key_bytes)
        other = cell_of(first, start + 8 + g, last, addresses, key_bytes)
        return load_key(place + offset) + load_key(other + offset)

    def values_of(
        first: int, start: int, lane: int, last: int, addresses: int, v_plane: int
    ) -> Any:
        """Return the words of cells 2 * t, 2 * t + 1 and these + 8 of a chunk."""
        cell, offset = start + 2 * (lane & 3), v_plane + 16 * (lane >> 2)
        a = cell_of(first, cell, last, addresses, value_bytes)
        b = cell_of(first, cell + 1, last, addresses, value_bytes)
        c = cell_of(first, cell + 8, last, addresses, value_bytes)
        d = cell_of(first, cell + 9, last, addresses, value_bytes)
        return load_values(a + offset, b + offset, c + offset, d + offset)

    def keep_query(warp: int, lane: int, query: Any) -> None:
        magnitude = larger_f32(magnitude_of(query[0]), magnitude_of(query[1]))
        magnitude = larger_f32(magnitude, magnitude_of(query[2]))
        magnitude = warp_max(larger_f32(magnitude, magnitude_of(query[3])))
        up, down = power_below(magnitude)
        shared_store_f32(_SHRUNK + 4 * warp, down)
        near, far = halves_of(query[0] * up, query[1] * up), halves_of(query[2] * up, query[3] * up)
        store_query(_QUERIES, warp, min(lane, key_length // 4 - 1), near, far)

    def attend(
        keys: Any,
        values: Any,
        first: int,
        start: int,
        last: int,
        addresses: int,
        k_plane: int,
        v_plane: int,
        scale: Any,
        thread: int,
    ) -> None:
        warp, lane = thread >> 5, thread & 31
        g, t = lane >> 2, lane & 3
        scale *= shared_load_f32(_SHRUNK + 4 * g)
        behind = start + (last - start + _ROUND & -_ROUND)  # of this warp's chunks
        scores = scores_at + 4 * thread

        words = load_queries(_QUERIES, lane)
        best, chunk = f32(_MINUS_INFINITY), start
        while chunk < behind:
            following = keys_of(first, chunk + _ROUND, lane, last, addresses, k_plane)
            found = score(words, keys[:key_words], keys[key_words:], no_scores())
            keys = following
            seen = last - chunk - 2 * t
            a = sum_of_parts(found[0], found[2]) * scale if seen >= 0 else f32(_MINUS_INFINITY)
            b = sum_of_parts(found[1], found[3]) * scale if seen >= 1 else f32(_MINUS_INFINITY)
            c = sum_of_parts(found[4], found[6]) * scale if seen >= 8 else f32(_MINUS_INFINITY)
            d = sum_of_parts(found[5], found[7]) * scale if seen >= 9 else f32(_MINUS_INFINITY)
            best = larger_f32(best, larger_f32(larger_f32(a, b), larger_f32(c, d)))
            shared_store_f32(scores, a)
            shared_store_f32(scores + 4 * _THREADS, b)
            shared_store_f32(scores + 8 * _THREADS, c)
            shared_store_f32(scores + 12 * _THREADS, d)
            scores += 16 * _THREADS
            chunk += _ROUND

        best = larger_f32(best, shuffle_xor_f32(best, 1))
        best = larger_f32(best, shuffle_xor_f32(best, 2))
        if t == 0:
            shared_store_f32(_MAXIMA + 4 * (TILE * warp + g), best)
        barrier()
        best = _largest_of_warps(_MAXIMA + 4 * g)
        # While all scores are -infinity, any finite number gives the weights 0.
        finite = f32(0.0) if best == f32(_MINUS_INFINITY) else best
        total, sums = f32(0.0), no_results()
        scores = scores_at + 4 * thread
        chunk = start
        while chunk < behind:
            more = values_of(first, chunk + _ROUND, lane, last, addresses, v_plane)
            a = exp(shared_load_f32(scores) - finite) * f32(_UNIT)
            b = exp(shared_load_f32(scores + 4 * _THREADS) - finite) * f32(_UNIT)
            c = exp(shared_load_f32(scores + 8 * _THREADS) - finite) * f32(_UNIT)
            d = exp(shared_load_f32(scores + 12 * _THREADS) - finite) * f32(_UNIT)
            total += (a + b) + (c + d)
            sums = mix(values, halves_of(a, b) + halves_of(c, d), sums)
            values = more
            scores += 16 * _THREADS
            chunk += _ROUND
        total += shuffle_xor_f32(total, 1)
        total += shuffle_xor_f32(total, 2)
        if t == 0:
            shared_store_f32(_TOTALS + 4 * (TILE * warp + g), total)
        barrier()  # the results lie where the scores were
        store_results(scores_at + result_bytes * warp, lane, sums)

    return Attending(announce, keys_of, values_of, keep_query, attend)


def _result_bytes(value_length: int) -> int:
    """Return how many bytes the results of a warp take."""
    return 4 * TILE * value_length


@cache
def run_writer(key_length: int, value_length: int) -> Function:
    """Return a function (work, first_head, used, run, room, thread) that brings what came of a run
    to the work space: of so many heads from a head of a row on."""
    results, value_shift = results_of(key_length, value_length), value_length.bit_length() - 1
    sum_of, total_of, maximum_of = results

    def write(work: int, first_head: int, used: int, run: int, room: int, thread: int) -> None:
        number = thread
        while number < used << value_shift:
            head, value = number >> value_shift, number & (value_length - 1)
            place = work_of(work, first_head + head, room, value_length)
            store_f32(place + 4 * (value_length * run + value), sum_of(head, value))
            number += _THREADS
        if thread < used:
            place = work_of(work, first_head + thread, room, value_length)
            place = maxima_of(place, room, value_length) + 4 * run
            store_f32(place, maximum_of(thread))
            store_f32(place + 4 * room, total_of(thread))

    return write


# -- the kernel ------------------------------------------------------------------------------------


@cache
def halves_attention_kernel(key_length: int, value_length: int, group: int) -> GpuKernel:
    """Return the kernel `attention` for halves and lengths of heads that `takes` names.

    group   heads that read the same keys and values

    Grid (tiles of heads, rows, N), 256 threads; see `runs.py` for the work space that it fills.
    Reads 2 * (key_length + value_length) bytes for each cell and K/V head.
    """
    announce, keys_of, values_of, keep_query, attend = attending(key_length, value_length)
    write = run_writer(key_length, value_length)
    key_plane, value_plane = plane_bytes("f16", key_length), plane_bytes("f16", value_length)
    tiles = tiles_of(group)

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
        _kv_heads: int,
        _key_length: int,
        _value_length: int,
        scale: Any,
    ) -> None:
        tile, row, thread = i64(block_x()), i64(block_y()), i64(thread_index())
        run, step = i64(block_z()), i64(blocks_z())
        count = load_i64(rows)
        position = load_i64(positions + 8 * row)
        sequence = load_i64(sequences + 8 * row)
        last_run = position >> _RUN_SHIFT if row < count else i64(-1)
        line = blocks + 8 * table_width * sequence
        kv_head = tile // tiles
        first_of_tile = TILE * (tile - tiles * kv_head)
        k_plane, v_plane = k_offset + key_plane * kv_head, v_offset + value_plane * kv_head
        warp, lane = thread >> 5, thread & 31
        if run <= last_run and lane == 0:
            announce(run, line, position, warp, 0, k_plane, v_plane)
        barrier()
        await_previous()
        if run > last_run:
            return
        first_head = row * heads + group * kv_head + first_of_tile
        used = min(group - first_of_tile, TILE)

        # A warp has a head, and where there are too few of something the last one again.
        place = q + 4 * key_length * (first_head + min(warp, used - 1))
        query = load_4xf32(place + 16 * min(lane, key_length // 4 - 1))
        room, buffer = room_for_runs(table_width), i64(0)
        keep_query(warp, lane, query)
        while True:
            first, addresses = run << _RUN_SHIFT, ADDRESSES + 8 * RUN_BLOCKS * buffer
            start, last = first + CHUNK * warp, min(position, first + RUN_CELLS - 1)
            keys = keys_of(first, start, lane, last, addresses, k_plane)
            values = values_of(first, start, lane, last, addresses, v_plane)
            barrier()  # queries are there, and what came of the run in front was read
            buffer = 1 - buffer
            if run + step <= last_run and lane == 0:
                announce(run + step, line, position, warp, buffer, k_plane, v_plane)
            attend(keys, values, first, start, last, addresses, k_plane, v_plane, scale, thread)
            barrier()
            write(work, first_head, used, run, room, thread)
            run += step
            if run > last_run:
                return

    name = f"attention_halves_{key_length}_{value_length}_{group}"
    return attention_kernel_of(name, attention, key_length, value_length, group)


def attention_kernel_of(
    name: str,
    attention: Function,
    key_length: int,
    value_length: int,
    group: int,
    own_bytes: int = 0,
) -> GpuKernel:
    """Return a kernel whose blocks attend, and have so many bytes of shared memory more."""
    attention.__name__ = attention.__qualname__ = name
    tiles, shared_bytes = tiles_of(group), attending_bytes(key_length, value_length) + own_bytes
    return GpuKernel(
        name,
        attention,
        _THREADS,
        lambda given, most_rows: grid_of(tiles * given["kv_heads"], given, most_rows, _BLOCKS),
        lambda _: shared_bytes,
        _REGISTERS,
    )


def free_bytes_at(key_length: int) -> int:
    """Return where shared memory begins that nobody uses before `attend`: 16 KiB."""
    return _QUERIES + 4 * TILE * key_length


def attending_bytes(key_length: int, value_length: int) -> int:
    """Return how much shared memory a block needs to attend, from 0 on."""
    return free_bytes_at(key_length) + max(_SCORE_BYTES, WARPS * _result_bytes(value_length))
