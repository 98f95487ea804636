"""Attention of a prompt batch over halves by warpgroups, on cards of compute capability 9.0.

It computes what `attention_batches.py` does, rounds the same numbers and chooses offsets the same
way (`attention_weights.py`). Products read keys and values from shared memory by themselves, and
take half the time. A block has two warpgroups of 64 pairs. A step begins with a barrier:

    the first     queries with the keys of this K/V block, weighs them, weights with its values
    the second    weighs the block before, weights with its values, queries with the keys of this

so that while one weighs, the other multiplies. In shared memory are keys of two K/V blocks and
values of three: behind the barrier the next block's are sent on their way, to where the block
before had its keys.

Heads of 64 take half the registers, and two blocks fit a multiprocessor. Those are at different
points anyway, so both warpgroups do what the first does, and values of two K/V blocks are enough.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.attention_blocks import copier, sifter
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
    weights_of,
)
from strata_nb.kernels.gpu.intrinsics import (
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
    load_f32,
    load_i64,
    of_any_lane,
    quotient_i32,
    thread_index,
)
from strata_nb.kernels.gpu.intrinsics.attending import keep_words, key_products, value_products
from strata_nb.kernels.gpu.intrinsics.warpgroups import (
    PIECE_BYTES,
    ROW_BYTES,
    WARPGROUP,
    nearly_divided,
    publish,
)
from strata_nb.kernels.gpu.operations import Arguments, Function, GpuKernel, Grid, blocks_of
from strata_nb.kernels.gpu.planes import plane_bytes

GROUPS = 2  # warpgroups
PAIRS = 64  # of a warpgroup
_CHUNKS = BLOCK_CELLS // CHUNK
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_LOG2_E = 1 / math.log(2)
_REGISTERS, _REGISTERS_OF_TWO = 255, 128
_PANEL_BYTES = ROW_BYTES * BLOCK_CELLS


def _place_of(row: Any, piece: Any) -> Any:
    """Return where a piece of a cell lies: as the instruction wants it, 64 halves side by side."""
    in_row = PIECE_BYTES * ((piece & 7) ^ (row & 7))
    return _PANEL_BYTES * (piece >> 3) + ROW_BYTES * row + in_row


def _two(place: int, by: Any) -> Any:
    """Return two floats times a number, as a word of halves."""
    return halves_of_f32(load_f32(place) * by, load_f32(place + 4) * by)


@cache
def _query_loader(steps: int) -> Function:
    """Return a function (x, y, by): of two queries times a number the words of each 16 values."""

    def step(x: int, y: int, by: Any) -> Any:
        return _two(x, by), _two(y, by), _two(x + 32, by), _two(y + 32, by)

    if steps == 1:
        return step
    others = _query_loader(steps - 1)
    return lambda x, y, by: step(x, y, by) + others(x + 64, y + 64, by)


@cache
def warpgroup_attention_kernel(key_length: int, value_length: int) -> GpuKernel:
    """Return the kernel `attention` of a batch for halves and heads of 64 or 128 values.

    Grid (tiles of 128 pairs, K/V heads). A block reads 2 * (key_length + value_length) bytes for
    each cell that one of its rows sees. The work space stays as it is.
    """
    pairs, threads = PAIRS * GROUPS, WARPGROUP * GROUPS
    pairs_shift = pairs.bit_length() - 1
    key_bytes, value_bytes = BLOCK_CELLS * 2 * key_length, BLOCK_CELLS * 2 * value_length
    is_alone = key_length + value_length > 2 * 64  # on its multiprocessor
    apart = BLOCK_CELLS if is_alone else 0  # cells that the second warpgroup is behind the first
    values_at = 2 * key_bytes
    shared_bytes = values_at + (3 if is_alone else 2) * value_bytes
    key_plane, value_plane = plane_bytes("f16", key_length), plane_bytes("f16", value_length)
    copy_keys = copier(key_length, threads, _place_of)
    copy_values = copier(value_length, threads, _place_of)
    sift = sifter(value_length, threads, _place_of)
    columns = value_length // CHUNK
    load_queries = _query_loader(key_length // CHUNK)
    multiply = key_products(BLOCK_CELLS, key_length)
    mix = value_products(value_length, BLOCK_CELLS)
    keep_queries = keep_words(key_length // CHUNK)
    begun, no_sums = of_pairs(_CHUNKS), of_pairs(columns)
    only_seen, largest, begin_with = seen_ones(_CHUNKS), largest_of(_CHUNKS), beginner(_CHUNKS)
    tame, weigh = tamer(_CHUNKS, columns), weights_of(_CHUNKS)
    store, store_second = storer(columns, 0), storer(columns, 2)

    def following(values: Any) -> Any:
        """Return the place of values behind one of the two or three."""
        return i32(values + value_bytes) if values < shared_bytes - value_bytes else i32(values_at)

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
        lane, behind = thread & 31, apart * (thread // WARPGROUP)
        g, t = lane >> 2, lane & 3
        pair = i32(first_pair + 16 * (thread >> 5) + g)
        row, other_row = quotient_i32(pair, group), quotient_i32(i32(pair + 8), group)
        here = head_of_pair(pair, row, group, kv_head, heads, count)
        there = head_of_pair(pair + 8, other_row, group, kv_head, heads, count)
        x, y = q + 4 * key_length * here + 8 * t, q + 4 * key_length * there + 8 * t
        queries = load_queries(x, y, scale * f32(_LOG2_E))
        k_plane, v_plane = k_offset + key_plane * kv_head, v_offset + value_plane * kv_head

        while begin < stop:
            end, last, lowest = span_of(sequences, positions, begin, stop, lane)
            line = blocks + 8 * table_width * load_i64(sequences + 8 * begin)
            position = position_of(positions, row, begin, end)
            other_position = position_of(positions, other_row, begin, end)
            block = load_i64(line)
            barrier()  # of the sequence before, all have multiplied all
            copy_keys(i32(0), block + k_plane, thread)
            copy_values(i32(values_at), block + v_plane, thread)
            block = load_i64(line + 8 * (min(BLOCK_CELLS, last) >> _BLOCK_SHIFT))
            zero = f32(0.0)
            offsets, totals, sums = (zero, zero), (zero, zero), no_sums(zero, zero)
            found = begun(zero, zero)
            first, keys = i32(0), i32(0)
            values, before = i32(values_at), i32(values_at)  # of this block, of the one before
            while first <= last + apart:
                await_copies()
                publish()
                barrier()
                if first + BLOCK_CELLS <= last:
                    copy_keys(i32(key_bytes - keys), block + k_plane, thread)
                    copy_values(following(values), block + v_plane, thread)
                    ahead = min(first + 2 * BLOCK_CELLS, last) >> _BLOCK_SHIFT
                    block = load_i64(line + 8 * ahead)
                if first <= last and first + BLOCK_CELLS - 1 > lowest:
                    sift(keys, values, i32(lowest - first + 1), thread)
                    publish()
                    barrier()
                is_there = not is_alone or first <= last  # or the second's last step
                if behind == 0 and is_there:
                    found = multiply(begun(offsets[0], offsets[1]), queries, keys)
                own = first - behind
                if not is_alone or (own >= 0 and own <= last):
                    if own + BLOCK_CELLS - 1 > lowest:
                        cell = own + 2 * t
                        found = only_seen(found, i32(position - cell), i32(other_position - cell))
                    if own == 0:  # of which each row sees a cell
                        found, offsets = begin_with(found)
                    best = largest(found)
                    is_above = larger_f32(best[0], best[1]) > f32(MOST)
                    if of_any_lane(i32(1) if is_above else i32(0)) != 0:
                        found, offsets, totals, sums = tame(found, best, offsets, totals, sums)
                    weights, totals = weigh(found, totals)
                    sums = mix(sums, weights, values if behind == 0 else before)
                if behind > 0 and is_there:
                    found = multiply(begun(offsets[0], offsets[1]), queries, keys)
                keys, before, values = i32(key_bytes - keys), values, following(values)
                first = i32(first + BLOCK_CELLS)
            keep_queries(queries)

            a, b = sum_of_quad(totals[0]), sum_of_quad(totals[1])
            a, b = nearly_divided(f32(1.0), a), nearly_divided(f32(1.0), b)
            if position >= 0:
                store(out + 4 * value_length * here + 8 * t, sums, a)
            if other_position >= 0:
                store_second(out + 4 * value_length * there + 8 * t, sums, b)
            begin = end

    def grid(given: Arguments, rows: int) -> Grid:
        kv_heads = given["kv_heads"]
        return blocks_of(rows * (given["heads"] // kv_heads), pairs), kv_heads, 1

    name = f"attention_warpgroups_{key_length}_{value_length}"
    attention.__name__ = attention.__qualname__ = name
    registers = _REGISTERS if is_alone else _REGISTERS_OF_TWO
    return GpuKernel(name, attention, threads, grid, lambda _: shared_bytes, registers)
