"""Make queries, keys and values ready for attention: norm, rotation and storing in one kernel.

A warp has a head of a row, of queries, keys or values. Heads of queries and keys go through shared
memory, because a rotated value needs another one of its head. Every step is that of the kernel that
does it alone (`normalising.py`, `rotation.py`), and so are the bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    block_x,
    block_y,
    f32,
    f32_of_i32,
    fetch_f32,
    fma,
    i32,
    i64,
    load_f32,
    load_i64,
    shared_load_f32,
    shared_store_f32,
    square_root,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.normalising import threads_of
from strata_nb.kernels.gpu.operations import GpuKernel, warp_sum
from strata_nb.kernels.gpu.planes import MOST_LENGTH, plane_bytes
from strata_nb.kernels.gpu.rotation import STORED_TOGETHER, rotator, store_of

ARGUMENTS = (
    ("rows", "address"),
    ("sequences", "address"),
    ("positions", "address"),
    ("table", "address"),
    ("q", "address"),
    ("k", "address"),
    ("v", "address"),
    ("q_weight", "address"),
    ("k_weight", "address"),
    ("blocks", "address"),
    ("table_width", "integer"),
    ("k_offset", "integer"),
    ("v_offset", "integer"),
    ("heads", "integer"),
    ("kv_heads", "integer"),
    ("planes", "integer"),
    ("halves", "integer"),
    ("eps", "float"),
)
"""Of the kernel, by name and kind: those of `rope` and `kv_append`, and the weights of the norms of
queries and keys, 0 for none."""

_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1

# Shared memory, in bytes: the values of a head, its weights, cosines, then sines.
_WEIGHTS = 4 * MOST_LENGTH
_COSINES = 8 * MOST_LENGTH


def normed_by_a_warp(length: int) -> bool:
    """Return whether `rms_norm` adds a head of so many values in the order of this kernel."""
    return threads_of(length) == WARP


@cache
def prepare_kernel(keys: str, values: str, key_length: int, value_length: int) -> GpuKernel:
    """Return the kernel `prepare` for a pair of `CACHE_TYPES` and lengths of heads.

    Grid (heads + 2 * kv_heads, rows), a warp each. Queries are rotated in place, keys and values
    stay as they are.
    """
    store_key, store_value = store_of(keys, key_length), store_of(values, value_length)
    rotated = rotator(shared_load_f32, shared_load_f32)
    key_plane, value_plane = plane_bytes(keys, key_length), plane_bytes(values, value_length)

    def load_head(x: int, weight: int, lane: int, eps: Any) -> None:
        """Bring a head to shared memory, divided by its root mean square where it has weights."""
        total, column = f32(0.0), lane
        while column < key_length:
            value = load_f32(x + 4 * column)
            shared_store_f32(4 * column, value)
            total = fma(value, value, total)
            column += WARP
        if weight != 0:
            divisor = square_root(warp_sum(total) / f32_of_i32(i32(key_length)) + eps)
            column = lane
            while column < key_length:
                value = shared_load_f32(4 * column) / divisor
                shared_store_f32(4 * column, value * shared_load_f32(_WEIGHTS + 4 * column))
                column += WARP
        barrier()

    def prepare(
        rows: int,
        sequences: int,
        positions: int,
        table: int,
        q: int,
        k: int,
        v: int,
        q_weight: int,
        k_weight: int,
        blocks: int,
        table_width: int,
        k_offset: int,
        v_offset: int,
        heads: int,
        kv_heads: int,
        planes: int,
        halves: int,
        eps: Any,
    ) -> None:
        head, row, lane = i64(block_x()), i64(block_y()), i64(thread_index())
        count, position = load_i64(rows), load_i64(positions + 8 * row)
        sequence = load_i64(sequences + 8 * row)
        if row >= count:
            await_previous()
            return
        line = blocks + 8 * table_width * sequence
        block = load_i64(line + 8 * (position >> _BLOCK_SHIFT))
        cell = position & (BLOCK_CELLS - 1)
        weight = q_weight if head < heads else k_weight
        if head < heads + kv_heads:
            column = lane
            while column < 2 * planes:
                angle = fetch_f32(table + 4 * (2 * planes * position + column))
                shared_store_f32(_COSINES + 4 * column, angle)
                column += WARP
            if weight != 0:
                column = lane
                while column < key_length:
                    shared_store_f32(_WEIGHTS + 4 * column, fetch_f32(weight + 4 * column))
                    column += WARP
        await_previous()
        if head < heads:
            x = q + 4 * key_length * (row * heads + head)
            load_head(x, weight, lane, eps)
            number = lane
            while number < key_length:
                value = rotated(0, _COSINES, number, key_length, planes, halves)
                store_f32(x + 4 * number, value)
                number += WARP
            return
        head -= heads
        group = i64(0)
        if head < kv_heads:
            load_head(k + 4 * key_length * (row * kv_heads + head), weight, lane, eps)
            plane = block + k_offset + key_plane * head
            while group * STORED_TOGETHER < key_length:
                number = STORED_TOGETHER * group + lane
                low = rotated(0, _COSINES, number, key_length, planes, halves)
                high = rotated(0, _COSINES, number + WARP, key_length, planes, halves)
                store_key(plane, cell, group, lane, low, high)
                group += 1
            return
        head -= kv_heads
        plane = block + v_offset + value_plane * head
        x = v + 4 * value_length * (row * kv_heads + head)
        while group * STORED_TOGETHER < value_length:
            number = STORED_TOGETHER * group + lane
            low = load_f32(x + 4 * number) if number < value_length else f32(0.0)
            number += WARP
            high = load_f32(x + 4 * number) if number < value_length else f32(0.0)
            store_value(plane, cell, group, lane, low, high)
            group += 1

    name = f"prepare_{keys}_{values}_{key_length}_{value_length}"
    prepare.__name__ = prepare.__qualname__ = name
    return GpuKernel(
        name,
        prepare,
        WARP,
        lambda given, most_rows: (given["heads"] + 2 * given["kv_heads"], most_rows, 1),
        lambda _: _COSINES + 4 * MOST_LENGTH,
    )
