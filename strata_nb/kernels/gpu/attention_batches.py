"""Attention of a prompt batch over halves in an order of its own: faster, with other bits.

`attention_tiles.py` has the bits of windows, which takes six products of halves for what are two
here: a query is rounded to halves as the keys are that it meets, and so are weights. Scores count
from a largest one that moves on with the cells, so they are computed once.

A block of threads has 32 *pairs* a warp, of a row and one of the heads that share a K/V head, and
goes through that head's cells, a K/V block of 64 after another:

    scores    queries times keys, in powers of two: log2(e) and the scale are in the queries
    weights   2 ** (score + what was chosen for the pair), as halves
    sums      of weights, and of values times weights, in float32

What a pair's scores count from changes seldom (`attention_weights.py`), and products begin with it.
That, and every order, follows from the pair's own scores; so a row's bits are the same in a batch
of any size that this computes.

In shared memory are the block's queries, a block of keys and one of values. Values come while
scores are computed, and the next keys while weights are multiplied.

Rows of a block may be of several sequences: one after another the block goes through the cells of
each, and what does not belong to it is thrown away.

Of cells that not all rows see values may be no numbers. They become 0 before they are multiplied,
and the cell's key becomes NaN, so that rows which see the cell become NaN and no others.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.attention_fragments import (
    CHUNK,
    key_products,
    of_pairs,
    store_row,
    turned,
)
from strata_nb.kernels.gpu.attention_sets import is_no_number
from strata_nb.kernels.gpu.attention_spans import span_of
from strata_nb.kernels.gpu.attention_weights import (
    added,
    offsets_of,
    seen_ones,
    tamer,
    weigher,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_copies,
    await_previous,
    barrier,
    block_x,
    block_y,
    copy_16,
    f32,
    halves_of_f32,
    i32,
    i64,
    load_4xf32,
    load_i64,
    shared_load_4xi32,
    shared_store_4xi32,
    shared_store_i32,
    shuffle_xor_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, Function, GpuKernel, Grid, blocks_of
from strata_nb.kernels.gpu.planes import plane_bytes

WARPS = 4  # two blocks a multiprocessor: one multiplies while the other weighs
PAIRS = 32  # of a warp
_CHUNKS = BLOCK_CELLS // CHUNK
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_LOG2_E = 1 / math.log(2)
_NANS = 0x7FFF7FFF
_REGISTERS = 255


def batch_blocks(rows: int, given: Arguments, warps: int = WARPS) -> int:
    """Return how many blocks of threads so many rows have."""
    kv_heads = given["kv_heads"]
    return blocks_of(rows * (given["heads"] // kv_heads), PAIRS * warps) * kv_heads


# -- rows of shared memory -------------------------------------------------------------------------
# A thread has the same piece of 16 bytes of every so-manieth row.


@cache
def _copier(length: int, threads: int) -> Function:
    """Return a function (place, plane, thread) that sends a thread's part of a K/V block on its way.

    All 64 cells come, written or not.
    """
    pieces, pitch = length // 8, 2 * length
    between = threads // pieces

    def copy(place: int, plane: int, thread: int) -> None:
        row, piece = thread // pieces, thread & (pieces - 1)
        to, address, number = place + pitch * row + turned(row, piece), plane + 16 * thread, 0
        while number < BLOCK_CELLS // between:
            further = pitch * between * number
            copy_16(to + further, address + further)
            number += 1

    return copy


@cache
def _sifter(key_length: int, value_length: int, threads: int) -> Function:
    """Return a function (keys, values, seen, thread) for a K/V block in shared memory: where the
    values of a cell behind the first `seen` have what is no number, they become 0 and its key NaN.
    """
    pieces, pitch = value_length // 8, 2 * value_length
    between = threads // pieces

    def sift(keys: int, values: int, seen: int, thread: int) -> None:
        row, piece = thread // pieces, thread & (pieces - 1)
        while row < BLOCK_CELLS:
            if row >= seen:
                at = values + pitch * row + turned(row, piece)
                a, b, c, d = shared_load_4xi32(at)
                if is_no_number(a) or is_no_number(b) or is_no_number(c) or is_no_number(d):
                    nothing = i32(0)
                    shared_store_4xi32(at, nothing, nothing, nothing, nothing)
                    shared_store_i32(keys + 2 * key_length * row, i32(_NANS))
            row += between

    return sift


def _sum_of_quad(x: Any) -> Any:
    x += shuffle_xor_f32(x, 1)
    return x + shuffle_xor_f32(x, 2)


# -- the kernel ------------------------------------------------------------------------------------


@cache
def batch_attention_kernel(key_length: int, value_length: int, warps: int = WARPS) -> GpuKernel:
    """Return the kernel `attention` of a batch for halves and heads of 64 or 128 values.

    Grid (tiles of 32 * warps pairs, K/V heads). A block reads 2 * (key_length + value_length) bytes
    for each cell that one of its rows sees. The work space stays as it is.
    """
    pairs, threads = PAIRS * warps, WARP * warps
    key_pitch, value_pitch = 2 * key_length, 2 * value_length
    keys_at = pairs * key_pitch
    values_at = keys_at + BLOCK_CELLS * key_pitch
    shared_bytes = values_at + BLOCK_CELLS * value_pitch
    key_plane, value_plane = plane_bytes("f16", key_length), plane_bytes("f16", value_length)
    copy_keys, copy_values = _copier(key_length, threads), _copier(value_length, threads)
    sift = _sifter(key_length, value_length, threads)
    key_steps, columns = key_length // CHUNK, value_length // CHUNK
    begun, no_sums = of_pairs(_CHUNKS), of_pairs(columns)
    multiply = key_products(key_steps, key_pitch, _CHUNKS)
    only_seen, chosen, shift = seen_ones(_CHUNKS), offsets_of(_CHUNKS), added(_CHUNKS)
    tame, weigh = tamer(_CHUNKS, columns), weigher(columns, value_pitch, _CHUNKS)
    store, store_second = store_row(0, columns), store_row(1, columns)
    store_third, store_fourth = store_row(2, columns), store_row(3, columns)
    pieces = key_length // 8
    between = threads // pieces

    def store_queries(
        q: int, first: int, group: int, count: int, heads: int, kv_head: int, by: Any, thread: int
    ) -> None:
        """Leave the pairs from the first on in shared memory, as halves, times a number; those
        behind the last row have its heads."""
        pair, piece = thread // pieces, thread & (pieces - 1)
        while pair < pairs:
            row = (first + pair) // group
            head = group * kv_head + first + pair - group * row
            place = q + 4 * key_length * (heads * min(row, count - 1) + head) + 32 * piece
            a, b, c, d = load_4xf32(place)
            e, f, g, h = load_4xf32(place + 16)
            shared_store_4xi32(
                key_pitch * pair + turned(pair, piece),
                halves_of_f32(a * by, b * by),
                halves_of_f32(c * by, d * by),
                halves_of_f32(e * by, f * by),
                halves_of_f32(g * by, h * by),
            )
            pair += between

    def position_of(positions: int, row: int, begin: int, end: int) -> Any:
        """Return a row's position, -1 where the row is not among these."""
        position = i32(-1)
        if begin <= row and row < end:
            position = i32(load_i64(positions + 8 * row))
        return position

    def attention(
        rows: int,
        sequences: int,
        positions: int,
        q: int,
        blocks: int,
        out: int,
        _work: int,
        table_width: int,
        k_offset: int,
        v_offset: int,
        heads: int,
        kv_heads: int,
        _key_length: int,
        _value_length: int,
        scale: Any,
    ) -> None:
        kv_head, thread = i64(block_y()), thread_index()
        await_previous()
        # The last rows see most cells: their blocks begin first.
        count, group = load_i64(rows), heads // kv_heads
        tile = (count * group + pairs - 1) // pairs - 1 - block_x()
        if tile < 0:
            return
        first_pair = pairs * tile
        begin = first_pair // group
        stop = min((first_pair + pairs + group - 1) // group, count)
        store_queries(q, first_pair, group, count, heads, kv_head, scale * f32(_LOG2_E), thread)
        lane = thread & 31
        g, t = lane >> 2, lane & 3
        pair = first_pair + PAIRS * (thread >> 5) + g
        own = pair // group, (pair + 8) // group, (pair + 16) // group, (pair + 24) // group
        k_plane, v_plane = k_offset + key_plane * kv_head, v_offset + value_plane * kv_head

        # Which rows of the first 16 pairs, and of a chunk, a lane loads for its warp.
        r, low, high = lane & 7, (lane >> 3) & 1, lane >> 4
        queries = key_pitch * (PAIRS * (thread >> 5) + 8 * low + r) + turned(r, high)
        keys = keys_at + key_pitch * (8 * high + r) + turned(r, low)
        values = values_at + value_pitch * (8 * low + r) + turned(r, high)
        queries, keys, values = i32(queries), i32(keys), i32(values)

        while begin < stop:
            end, last, lowest = span_of(sequences, positions, begin, stop, lane)
            line = blocks + 8 * table_width * load_i64(sequences + 8 * begin)
            seen_to = (
                position_of(positions, own[0], begin, end),
                position_of(positions, own[1], begin, end),
                position_of(positions, own[2], begin, end),
                position_of(positions, own[3], begin, end),
            )
            block = load_i64(line)
            barrier()  # of the sequence before, all have multiplied all
            copy_keys(i32(keys_at), block + k_plane, thread)
            zero = f32(0.0)
            none = zero, zero, zero, zero
            offsets, totals, sums, first = none, none, no_sums(none), i32(0)
            while first <= last:
                following = load_i64(line + 8 * (min(first + BLOCK_CELLS, last) >> _BLOCK_SHIFT))
                await_copies()
                barrier()
                copy_values(i32(values_at), block + v_plane, thread)
                are_seen = first + BLOCK_CELLS - 1 <= lowest
                if not are_seen:
                    await_copies()
                    barrier()
                    sift(i32(keys_at), i32(values_at), i32(lowest - first + 1), thread)
                    barrier()
                found = multiply(queries, keys, begun(offsets))
                await_copies()
                barrier()
                if first + BLOCK_CELLS <= last:
                    copy_keys(i32(keys_at), following + k_plane, thread)
                if not are_seen:
                    seen = i32(first + 2 * t)
                    found = only_seen(
                        found,
                        (
                            i32(seen_to[0] - seen),
                            i32(seen_to[1] - seen),
                            i32(seen_to[2] - seen),
                            i32(seen_to[3] - seen),
                        ),
                    )
                if first == 0:  # which each row sees a cell of
                    offsets = chosen(found)
                    found = shift(found, offsets)
                found, offsets, totals, sums = tame(found, offsets, totals, sums)
                totals, sums = weigh(found, values, totals, sums)
                block, first = following, i32(first + BLOCK_CELLS)

            one = f32(1.0)
            a, b = one / _sum_of_quad(totals[0]), one / _sum_of_quad(totals[1])
            c, d = one / _sum_of_quad(totals[2]), one / _sum_of_quad(totals[3])
            # Eight pairs further on, of the same row, results lie so much further.
            place, eight = (
                out + 4 * value_length * (group * kv_head + pair) + 8 * t,
                32 * value_length,
            )
            of_row = 4 * value_length * (heads - group)
            if seen_to[0] >= 0:
                store(place + of_row * own[0], sums, a)
            if seen_to[1] >= 0:
                store_second(place + eight + of_row * own[1], sums, b)
            if seen_to[2] >= 0:
                store_third(place + 2 * eight + of_row * own[2], sums, c)
            if seen_to[3] >= 0:
                store_fourth(place + 3 * eight + of_row * own[3], sums, d)
            begin = end

    def grid(given: Arguments, rows: int) -> Grid:
        kv_heads = given["kv_heads"]
        return batch_blocks(rows, given, warps) // kv_heads, kv_heads, 1

    name = f"attention_batch_{key_length}_{value_length}{'' if warps == WARPS else f'_{warps}'}"
    attention.__name__ = attention.__qualname__ = name
    return GpuKernel(name, attention, threads, grid, lambda _: shared_bytes, _REGISTERS)
