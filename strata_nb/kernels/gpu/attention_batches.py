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
from strata_nb.kernels.gpu.attention_blocks import copier, sifter
from strata_nb.kernels.gpu.attention_fragments import key_products, mixer, turned
from strata_nb.kernels.gpu.attention_spans import (
    head_of_pair,
    position_of,
    rows_of_pairs,
    span_of,
)
from strata_nb.kernels.gpu.attention_weights import (
    CHUNK,
    MOST,
    beginner,
    largest_of,
    of_pairs,
    seen_ones,
    storer,
    sum_of_quad,
    tamer,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_copies,
    await_previous,
    barrier,
    block_x,
    block_y,
    f32,
    halves_of_f32,
    i32,
    i64,
    larger_f32,
    load_4xf32,
    load_i64,
    of_any_lane,
    quotient_i32,
    shared_store_4xi32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid, blocks_of
from strata_nb.kernels.gpu.planes import plane_bytes

WARPS = 4  # two blocks a multiprocessor: one multiplies while the other weighs
PAIRS = 32  # of a warp
_CHUNKS = BLOCK_CELLS // CHUNK
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_LOG2_E = 1 / math.log(2)
_REGISTERS = 255
_SPILLS = 1536  # before 9.0, where sums of matrices lie in registers as they come


def batch_blocks(rows: int, given: Arguments, warps: int = WARPS) -> int:
    """Return how many blocks of threads so many rows have."""
    kv_heads = given["kv_heads"]
    return blocks_of(rows * (given["heads"] // kv_heads), PAIRS * warps) * kv_heads


@cache
def batch_attention_kernel(key_length: int, value_length: int, warps: int = WARPS) -> GpuKernel:
    """Return the kernel `attention` of a batch for halves and heads of 64 or 128 values.

    Grid (tiles of 32 * warps pairs, K/V heads). A block reads 2 * (key_length + value_length) bytes
    for each cell that one of its rows sees. The work space stays as it is.
    """
    pairs, threads = PAIRS * warps, WARP * warps
    pairs_shift = pairs.bit_length() - 1
    key_pitch, value_pitch = 2 * key_length, 2 * value_length
    keys_at = pairs * key_pitch
    values_at = keys_at + BLOCK_CELLS * key_pitch
    shared_bytes = values_at + BLOCK_CELLS * value_pitch
    key_plane, value_plane = plane_bytes("f16", key_length), plane_bytes("f16", value_length)
    key_place, value_place = turned(key_length), turned(value_length)
    copy_keys = copier(key_length, threads, key_place)
    copy_values = copier(value_length, threads, value_place)
    sift = sifter(value_length, threads, value_place)
    columns = value_length // CHUNK
    begun, no_sums = of_pairs(_CHUNKS), of_pairs(columns)
    multiply = key_products(key_length // CHUNK, key_pitch, _CHUNKS)
    only_seen, largest, begin_with = seen_ones(_CHUNKS), largest_of(_CHUNKS), beginner(_CHUNKS)
    tame, mix = tamer(_CHUNKS, columns), mixer(columns, value_pitch, _CHUNKS)
    store, store_second = storer(columns, 0), storer(columns, 2)
    pieces = key_length // 8
    between = threads // pieces

    def store_queries(
        q: int, first: int, group: Any, count: int, heads: int, kv_head: int, by: Any, thread: int
    ) -> None:
        """Leave the pairs from the first on in shared memory, as halves, times a number."""
        pair, piece = thread // pieces, thread & (pieces - 1)
        while pair < pairs:
            own = i32(first + pair)
            head = head_of_pair(own, quotient_i32(own, group), group, kv_head, heads, count)
            place = q + 4 * key_length * head + 32 * piece
            a, b, c, d = load_4xf32(place)
            e, f, g, h = load_4xf32(place + 16)
            shared_store_4xi32(
                key_place(pair, piece),
                halves_of_f32(a * by, b * by),
                halves_of_f32(c * by, d * by),
                halves_of_f32(e * by, f * by),
                halves_of_f32(g * by, h * by),
            )
            pair += between

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
        count, group = load_i64(rows), quotient_i32(i32(heads), i32(kv_heads))
        tile = ((count * group + pairs - 1) >> pairs_shift) - 1 - block_x()
        if tile < 0:
            return
        first_pair = i32(pairs * tile)
        begin, stop = rows_of_pairs(first_pair, pairs, group, count)
        store_queries(q, first_pair, group, count, heads, kv_head, scale * f32(_LOG2_E), thread)
        lane, own = thread & 31, PAIRS * (thread >> 5)
        g, t = lane >> 2, lane & 3
        pair = i32(first_pair + own + g)
        row = (
            quotient_i32(pair, group),
            quotient_i32(i32(pair + 8), group),
            quotient_i32(i32(pair + 16), group),
            quotient_i32(i32(pair + 24), group),
        )
        k_plane, v_plane = k_offset + key_plane * kv_head, v_offset + value_plane * kv_head

        # Which rows of the first 16 pairs, and of a chunk, a lane loads for its warp.
        r, low, high = lane & 7, (lane >> 3) & 1, lane >> 4
        queries = i32(key_place(own + 8 * low + r, high))
        keys = i32(keys_at + key_place(8 * high + r, low))
        values = i32(values_at + value_place(8 * low + r, high))

        while begin < stop:
            end, last, lowest = span_of(sequences, positions, begin, stop, lane)
            line = blocks + 8 * table_width * load_i64(sequences + 8 * begin)
            position = (
                position_of(positions, row[0], begin, end),
                position_of(positions, row[1], begin, end),
                position_of(positions, row[2], begin, end),
                position_of(positions, row[3], begin, end),
            )
            block = load_i64(line)
            barrier()  # of the sequence before, all have multiplied all
            copy_keys(i32(keys_at), block + k_plane, thread)
            zero = f32(0.0)
            none = zero, zero
            some, others, totals = none, none, (none, none)  # offsets
            lower, upper, first = no_sums(zero, zero), no_sums(zero, zero), i32(0)
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
                x, y = multiply(queries, keys, begun(some[0], some[1]), begun(others[0], others[1]))
                await_copies()
                barrier()
                if first + BLOCK_CELLS <= last:
                    copy_keys(i32(keys_at), following + k_plane, thread)
                if not are_seen:
                    cell = first + 2 * t
                    x = only_seen(x, i32(position[0] - cell), i32(position[1] - cell))
                    y = only_seen(y, i32(position[2] - cell), i32(position[3] - cell))
                if first == 0:  # of which each row sees a cell
                    x, some = begin_with(x)
                    y, others = begin_with(y)
                best, other_best = largest(x), largest(y)
                most = larger_f32(best[0], best[1])
                most = larger_f32(most, larger_f32(other_best[0], other_best[1]))
                if of_any_lane(i32(1) if most > f32(MOST) else i32(0)) != 0:
                    total, other_total = totals
                    x, some, total, lower = tame(x, best, some, total, lower)
                    y, others, other_total, upper = tame(y, other_best, others, other_total, upper)
                    totals = total, other_total
                totals, lower, upper = mix(x, y, values, totals, lower, upper)
                block, first = following, i32(first + BLOCK_CELLS)

            total, other_total = totals
            one = f32(1.0)
            a, b = one / sum_of_quad(total[0]), one / sum_of_quad(total[1])
            c, d = one / sum_of_quad(other_total[0]), one / sum_of_quad(other_total[1])
            # From a pair to the one eight further on of the same row, and from row to row.
            eight, of_row = 32 * value_length, 4 * value_length * (heads - group)
            place = out + 4 * value_length * (group * kv_head + pair) + 8 * t
            if position[0] >= 0:
                store(place + of_row * row[0], lower, a)
            if position[1] >= 0:
                store_second(place + eight + of_row * row[1], lower, b)
            if position[2] >= 0:
                store(place + 2 * eight + of_row * row[2], upper, c)
            if position[3] >= 0:
                store_second(place + 3 * eight + of_row * row[3], upper, d)
            begin = end

    def grid(given: Arguments, rows: int) -> Grid:
        kv_heads = given["kv_heads"]
        return batch_blocks(rows, given, warps) // kv_heads, kv_heads, 1

    name = f"attention_batch_{key_length}_{value_length}{'' if warps == WARPS else f'_{warps}'}"
    attention.__name__ = attention.__qualname__ = name
    return GpuKernel(
        name, attention, threads, grid, lambda _: shared_bytes, _REGISTERS, spills=_SPILLS
    )
