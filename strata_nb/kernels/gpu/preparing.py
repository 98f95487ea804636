"""Make queries, keys and values ready for attention: norm, rotation and storing in one kernel.

A warp has a head of a row, of queries, keys or values. Heads of queries and keys go through shared
memory, because a rotated value needs another one of its head. Every step is that of the kernel that
does it alone (`normalising.py`, `rotation.py`), and so are the bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

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
from strata_nb.kernels.gpu.operations import Function, GpuKernel, blocks_of, warp_sum
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


class Heads(NamedTuple):
    """Hold device functions of a warp that brings heads to shared memory.

    load   (x, lane): a lane's values of the head at x; all loads are on their way at once
    keep   (values, place, weights, lane, eps): store them, divided by the root mean square of all
           and times weights where there are some; both are offsets in shared memory, `weights` -1
           for none
    """

    load: Function
    keep: Function


@cache
def heads_of(length: int) -> Heads:
    """Return how heads of a length are loaded and kept."""
    turns = blocks_of(length, WARP)
    squares, store = _squares(turns, length), _storer(turns, length)

    def keep(values: Any, place: int, weights: int, lane: int, eps: Any) -> None:
        divisor = f32(1.0)
        if weights >= 0:
            mean = warp_sum(squares(values, lane, f32(0.0))) / f32_of_i32(i32(length))
            divisor = square_root(mean + eps)
        store(values, lane, place, weights, divisor)

    return Heads(_loader(turns, length), keep)


@cache
def _loader(turns: int, length: int) -> Function:
    def one(x: int, column: int) -> Any:
        return (load_f32(x + 4 * min(column, length - 1)),)

    if turns == 1:
        return one
    others = _loader(turns - 1, length)

    def several(x: int, column: int) -> Any:
        return one(x, column) + others(x, column + WARP)

    return several


@cache
def _squares(turns: int, length: int) -> Function:
    def one(values: Any, column: int, total: Any) -> Any:
        return fma(values[0], values[0], total) if column < length else total

    if turns == 1:
        return one
    others = _squares(turns - 1, length)

    def several(values: Any, column: int, total: Any) -> Any:
        return others(values[1:], column + WARP, one(values, column, total))

    return several


@cache
def _storer(turns: int, length: int) -> Function:
    def one(values: Any, column: int, place: int, weights: int, divisor: Any) -> None:
        if column < length:
            value = values[0]
            if weights >= 0:
                value = value / divisor * shared_load_f32(weights + 4 * column)
            shared_store_f32(place + 4 * column, value)

    if turns == 1:
        return one
    others = _storer(turns - 1, length)

    def several(values: Any, column: int, place: int, weights: int, divisor: Any) -> None:
        one(values, column, place, weights, divisor)
        others(values[1:], column + WARP, place, weights, divisor)

    return several


@cache
def key_storer(kind: str, length: int) -> Function:
    """Return a function (x, cosines, plane, cell, lane, planes, halves): a warp rotates a key in
    shared memory and stores it as a cell."""
    store, rotated = store_of(kind, length), rotator(shared_load_f32, shared_load_f32)
    groups = blocks_of(length, STORED_TOGETHER)

    def store_key(
        x: int, cosines: int, plane: int, cell: int, lane: int, planes: int, halves: int
    ) -> None:
        group = i64(0)
        while group < groups:
            number = STORED_TOGETHER * group + lane
            low = rotated(x, cosines, number, length, planes, halves)
            high = rotated(x, cosines, number + WARP, length, planes, halves)
            store(plane, cell, group, lane, low, high)
            group += 1

    return store_key


@cache
def value_storer(kind: str, length: int) -> Function:
    """Return a function (x, plane, cell, lane): a warp stores a head of values as a cell."""
    store, groups = store_of(kind, length), blocks_of(length, STORED_TOGETHER)

    def store_value(x: int, plane: int, cell: int, lane: int) -> None:
        group = i64(0)
        while group < groups:
            number = STORED_TOGETHER * group + lane
            low = load_f32(x + 4 * min(number, length - 1))
            high = load_f32(x + 4 * min(number + WARP, length - 1))
            store(
                plane,
                cell,
                group,
                lane,
                low if number < length else f32(0.0),
                high if number + WARP < length else f32(0.0),
            )
            group += 1

    return store_value


@cache
def prepare_kernel(keys: str, values: str, key_length: int, value_length: int) -> GpuKernel:
    """Return the kernel `prepare` for a pair of `CACHE_TYPES` and lengths of heads.

    Grid (heads + 2 * kv_heads, rows), a warp each. Queries are rotated in place, keys and values
    stay as they are.
    """
    load_head, keep_head = heads_of(key_length)
    store_key = key_storer(keys, key_length)
    store_value = value_storer(values, value_length)
    rotated = rotator(shared_load_f32, shared_load_f32)
    key_plane, value_plane = plane_bytes(keys, key_length), plane_bytes(values, value_length)

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
            keep_head(load_head(x, lane), 0, _WEIGHTS if weight != 0 else -1, lane, eps)
            barrier()
            number = lane
            while number < key_length:
                value = rotated(0, _COSINES, number, key_length, planes, halves)
                store_f32(x + 4 * number, value)
                number += WARP
            return
        head -= heads
        if head < kv_heads:
            x = k + 4 * key_length * (row * kv_heads + head)
            keep_head(load_head(x, lane), 0, _WEIGHTS if weight != 0 else -1, lane, eps)
            barrier()
            store_key(0, _COSINES, block + k_offset + key_plane * head, cell, lane, planes, halves)
            return
        head -= kv_heads
        x = v + 4 * value_length * (row * kv_heads + head)
        store_value(x, block + v_offset + value_plane * head, cell, lane)

    name = f"prepare_{keys}_{values}_{key_length}_{value_length}"
    prepare.__name__ = prepare.__qualname__ = name
    return GpuKernel(
        name,
        prepare,
        WARP,
        lambda given, most_rows: (given["heads"] + 2 * given["kv_heads"], most_rows, 1),
        lambda _: _COSINES + 4 * MOST_LENGTH,
    )
