"""Attention over keys and values of any type: a softmax that streams over blocks of 64 cells.

A block of threads computes one head of one row over a run of cells (`runs.py`), and all of it works
on each K/V block in turn:

    scores    four threads a cell: each multiplies every fourth load of its key with the query,
              ascending and fused; then their sums are added, neighbours first. Times the scale.
    weights   two warps, a cell a thread: the running maximum takes in the block's, the thread's
              running sum shrinks by exp(old - new) and gains exp(score - maximum).
    results   a thread holds four neighbouring values of the result, of every `slots`-th cell: they
              shrink and gain weight times value, fused, cells ascending.

At the end the slots are added in ascending order. Blocks of threads that need not wait for each
other read the same keys and values (the heads of a group, at the same time) and find them in the
cache of the card. Halves have a kernel of their own that reads them once (`attention_halves.py`).

All 64 cells of a block are read, because loads that need no decision can all be on their way at
once. Behind the row's position the score is replaced, and the bits of values are, so that what they
hold leaves no trace.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    block_x,
    block_y,
    block_z,
    blocks_z,
    f32,
    fma,
    i32,
    i64,
    larger_f32,
    load_f32,
    load_i64,
    shared_load_f32,
    shared_store_f32,
    shuffle_xor_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import GpuKernel, warp_max, warp_sum
from strata_nb.kernels.gpu.planes import keys_reader, plane_bytes, values_reader
from strata_nb.kernels.gpu.runs import grid_of, maxima_of, room_for_runs, work_of
from strata_nb.kernels.runs import RUN_CELLS

_BLOCKS = 512  # of threads: a large card takes some at a time on each multiprocessor
_THREADS = 256
_PARTS_SHIFT = 2
_PARTS = 1 << _PARTS_SHIFT  # threads that share a cell's key
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_RUN_SHIFT = RUN_CELLS.bit_length() - 1
_MINUS_INFINITY = float("-inf")

# Shared memory, in bytes: scores and weights of 64 cells, by how much the block shrinks what was
# before, the sums of two warps; then the query, then the results of each slot.
_SCORES = 0
_WEIGHTS = 4 * BLOCK_CELLS
_SHRINK = 8 * BLOCK_CELLS
_TOTALS = _SHRINK + 8
_QUERY = _SHRINK + 16


@cache
def attention_kernel(
    keys: str, values: str, key_length: int, value_length: int, group: int
) -> GpuKernel:
    """Return the kernel `attention` for a pair of `CACHE_TYPES` and lengths of heads.

    group   heads that read the same keys and values
    UnsupportedDevice for lengths that `planes.check_length` refuses.

    Grid (heads, rows, N), 256 threads. Reads heads x rows x cells keys and values, of which a
    group's come from memory once if its blocks run together.
    """
    reader = keys_reader(keys, key_length)
    loads, key_of, key_scales_of, add = reader.loads, reader.place_of, reader.scales_of, reader.add
    whole, rest = divmod(loads, _PARTS)
    load_bytes = 4 * reader.values  # of the query
    value_of, value_scale_of, mix = values_reader(values, value_length)
    columns = value_length // 4  # threads that share a cell's value
    slots = 1 << (min(BLOCK_CELLS, _THREADS // columns).bit_length() - 1)
    key_plane, value_plane = plane_bytes(keys, key_length), plane_bytes(values, value_length)
    results = _QUERY + 4 * key_length

    def product(plane: int, cell: int, part: int) -> Any:
        """Return query times key, the same in the four threads of a cell."""
        place, scales = key_of(plane, cell, part), key_scales_of(plane, cell)
        query = _QUERY + load_bytes * part
        total = f32(0.0)
        further = 0
        while further < _PARTS * whole:
            total = add(place, scales, query, further, total)
            further += _PARTS
        if rest > 0 and part < rest:
            total = add(place, scales, query, further, total)
        total += shuffle_xor_f32(total, 1)
        return total + shuffle_xor_f32(total, 2)

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
        row, head = i64(block_y()), i64(block_x())
        if row >= load_i64(rows):
            return
        thread = i64(thread_index())
        cell, part = thread >> _PARTS_SHIFT, thread & (_PARTS - 1)
        # Where not all threads are needed, the last do what others do, and keep it for themselves.
        slot, column = thread // columns & (slots - 1), thread % columns
        head_of_row = row * heads + head
        position = load_i64(positions + 8 * row)
        line = blocks + 8 * table_width * load_i64(sequences + 8 * row)
        k_plane = k_offset + key_plane * (head // group)
        v_plane = v_offset + value_plane * (head // group)
        room = room_for_runs(table_width)
        own_work = work_of(work, head_of_row, room, value_length)

        if thread < key_length:
            value = load_f32(q + 4 * (key_length * head_of_row + thread))
            shared_store_f32(_QUERY + 4 * thread, value)
        barrier()

        run = i64(block_z())
        while run <= position >> _RUN_SHIFT:
            start = run << _RUN_SHIFT
            last = min(position, start + RUN_CELLS - 1)
            best, total = f32(_MINUS_INFINITY), f32(0.0)
            a, b, c, d = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
            following = load_i64(line + 8 * (start >> _BLOCK_SHIFT))
            while start <= last:
                block = following
                # On its way while this block is worked on; behind the last comes the last.
                following = load_i64(line + 8 * (min(start + BLOCK_CELLS, last) >> _BLOCK_SHIFT))
                count = last + 1 - start  # cells that the row sees, if the block had so many

                score = product(block + k_plane, cell, part) * scale
                if part == 0:
                    score = score if cell < count else f32(_MINUS_INFINITY)
                    shared_store_f32(_SCORES + 4 * cell, score)
                barrier()

                if thread < BLOCK_CELLS:
                    score = shared_load_f32(_SCORES + 4 * thread)
                    before = best
                    other = shared_load_f32(_SCORES + 4 * (thread ^ WARP))
                    best = larger_f32(best, warp_max(larger_f32(score, other)))
                    # While all scores are -infinity, any finite number gives the weights 0.
                    finite = f32(0.0) if best == f32(_MINUS_INFINITY) else best
                    shrink = exp(before - finite)
                    weight = exp(score - finite)
                    total = fma(total, shrink, weight)
                    shared_store_f32(_WEIGHTS + 4 * thread, weight)
                    if thread == 0:
                        shared_store_f32(_SHRINK, shrink)
                barrier()

                shrink = shared_load_f32(_SHRINK)
                a, b, c, d = a * shrink, b * shrink, c * shrink, d * shrink
                place = value_of(block + v_plane, slot, column)
                scale_place = value_scale_of(block + v_plane, slot, column)
                weights, left = _WEIGHTS + 4 * slot, i32(count - slot)
                further = 0
                while further < BLOCK_CELLS:
                    weight = shared_load_f32(weights + 4 * further)
                    seen = further < left
                    a, b, c, d = mix(place, scale_place, further, weight, seen, a, b, c, d)
                    further += slots
                start += BLOCK_CELLS

            if thread < slots * columns:
                place = results + 4 * (value_length * slot + 4 * column)
                shared_store_f32(place, a)
                shared_store_f32(place + 4, b)
                shared_store_f32(place + 8, c)
                shared_store_f32(place + 12, d)
            if thread < BLOCK_CELLS:
                total = warp_sum(total)
                if thread % WARP == 0:
                    shared_store_f32(_TOTALS + 4 * (thread // WARP), total)
            barrier()
            if thread < value_length:
                place = results + 4 * thread
                mixed = shared_load_f32(place)
                other_slot = 1
                while other_slot < slots:
                    mixed += shared_load_f32(place + 4 * value_length * other_slot)
                    other_slot += 1
                store_f32(own_work + 4 * (value_length * run + thread), mixed)
            if thread == 0:
                place = maxima_of(own_work, room, value_length) + 4 * run
                store_f32(place, best)
                total = shared_load_f32(_TOTALS) + shared_load_f32(_TOTALS + 4)
                store_f32(place + 4 * room, total)
            run += i64(blocks_z())

    name = f"attention_{keys}_{values}_{key_length}_{value_length}_{group}"
    attention.__name__ = attention.__qualname__ = name
    return GpuKernel(
        name,
        attention,
        _THREADS,
        lambda given, most_rows: grid_of(given["heads"], given, most_rows, _BLOCKS),
        lambda _: results + 4 * value_length * slots,
    )
