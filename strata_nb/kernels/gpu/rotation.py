"""Rotate queries and keys by their positions, and store keys and values in the K/V.

The bits are those of `reference.rope_rotate`, `quantise_kv` and numpy's float16: products and sums
are rounded one by one. A rotated value depends on two values, so storing computes it again instead
of keeping it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS, CACHE_TYPES
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    bits_of_f32,
    block_x,
    block_y,
    block_z,
    f32,
    f32_of_bits,
    f32_of_half,
    fetch_f32,
    half_of_f32,
    i32,
    i64,
    load_f32,
    load_i64,
    nearest_i32,
    store_f32,
    store_i8,
    store_i16,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function, GpuKernel, warp_max_i32
from strata_nb.kernels.gpu.planes import plane_bytes

_THREADS = 64
STORED_TOGETHER = CACHE_TYPES["int8"].group  # what a warp stores at a time, two values a lane
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_MAGNITUDE = 0x7FFFFFFF
_LIMIT = 127
_INFINITY = float("inf")


def second_of(x: Any, y: Any, cosine: Any, sine: Any) -> Any:
    """Return the second value of a plane after its rotation, of the first and the second."""
    return x * sine + y * cosine


def first_of(x: Any, y: Any, cosine: Any, sine: Any) -> Any:
    return x * cosine - y * sine


# -- rope ------------------------------------------------------------------------------------------


def _rope(
    rows: int,
    positions: int,
    table: int,
    x: int,
    heads: int,
    length: int,
    planes: int,
    halves: int,
) -> None:
    row = i64(block_y())
    if row >= load_i64(rows):
        return
    head = x + 4 * length * (row * heads + i64(block_x()))
    cosines = table + 8 * planes * load_i64(positions + 8 * row)
    distance = 4 * planes if halves else 4
    plane = i64(thread_index())
    while plane < planes:
        place = head + (4 * plane if halves else 8 * plane)
        cosine, sine = fetch_f32(cosines + 4 * plane), fetch_f32(cosines + 4 * (planes + plane))
        first, second = load_f32(place), load_f32(place + distance)
        store_f32(place, first_of(first, second, cosine, sine))
        store_f32(place + distance, second_of(first, second, cosine, sine))
        plane += _THREADS


@cache
def rope_kernel() -> GpuKernel:
    """Return the kernel `rope`: grid (heads, rows), 64 threads, a plane a thread and turn."""
    return GpuKernel(
        "rope", _rope, _THREADS, lambda arguments, most_rows: (arguments["heads"], most_rows, 1)
    )


# -- kv_append -------------------------------------------------------------------------------------


@cache
def rotator(load: Function, load_angle: Function) -> Function:
    """Return a function (x, cosines, number, length, planes, halves).

    It returns one value of a head, rotated, or 0 behind its end; x and cosines are the places of
    float32 for `load` and `load_angle`, the sines lie behind the cosines.
    """

    def rotated(x: int, cosines: int, number: int, length: int, planes: int, halves: int) -> Any:
        if number >= length:
            return f32(0.0)
        here = load(x + 4 * number)
        if number >= 2 * planes:
            return here
        if halves:
            is_second = number >= planes
            plane = number - planes if is_second else number
            distance = planes
        else:
            is_second = number & 1 == 1
            plane = number >> 1
            distance = 1
        cosine, sine = load_angle(cosines + 4 * plane), load_angle(cosines + 4 * (planes + plane))
        if is_second:
            return second_of(load(x + 4 * (number - distance)), here, cosine, sine)
        return first_of(here, load(x + 4 * (number + distance)), cosine, sine)

    return rotated


def _quantised(value: Any, scale: Any) -> Any:
    """Return a value over its scale, to nearest, ties to even, within -127 .. 127."""
    return max(min(nearest_i32(value / scale), _LIMIT), -_LIMIT)


@cache
def store_of(kind: str, length: int) -> Function:
    """Return a function (plane, cell, group, lane, low, high).

    A warp stores the values 64 * group .. 64 * group + 63 of a head, or those that it has, as part
    of a cell; a lane has two, 32 apart, and zeros where the head ends.
    """
    groups = CACHE_TYPES["int8"].groups(length)

    def store_floats(plane: int, cell: int, group: int, lane: int, low: Any, high: Any) -> None:
        number = STORED_TOGETHER * group + lane
        place = plane + 4 * (length * cell + number)
        if number < length:
            store_f32(place, low)
        if number + WARP < length:
            store_f32(place + 4 * WARP, high)

    def store_halves(plane: int, cell: int, group: int, lane: int, low: Any, high: Any) -> None:
        number = STORED_TOGETHER * group + lane
        place = plane + 2 * (length * cell + number)
        if number < length:
            store_i16(place, half_of_f32(low))
        if number + WARP < length:
            store_i16(place + 2 * WARP, half_of_f32(high))

    def store_bytes(plane: int, cell: int, group: int, lane: int, low: Any, high: Any) -> None:
        # As integers, magnitudes are in order, and NaN > infinity > the rest.
        bits = max(bits_of_f32(low) & _MAGNITUDE, bits_of_f32(high) & _MAGNITUDE)
        bits = warp_max_i32(i32(bits))
        half = half_of_f32(f32_of_bits(bits) / f32(127.0))
        scale = f32_of_half(half)
        # Else there is nothing to keep, or a scale that shows as NaN when read.
        usable = scale > f32(0.0) and scale < f32(_INFINITY)
        number = STORED_TOGETHER * group + lane
        place = plane + length * cell + number
        if number < length:
            store_i8(place, _quantised(low, scale) if usable else 0)
        if number + WARP < length:
            store_i8(place + WARP, _quantised(high, scale) if usable else 0)
        if lane == 0:
            store_i16(plane + BLOCK_CELLS * length + 2 * (groups * cell + group), half)

    return {"f32": store_floats, "f16": store_halves, "int8": store_bytes}[kind]


@cache
def kv_append_kernel(keys: str, values: str, key_length: int, value_length: int) -> GpuKernel:
    """Return the kernel `kv_append` for a pair of `CACHE_TYPES` and lengths of heads.

    Grid (heads, rows, 2): keys and values apart; 64 threads, of which a warp stores 64 values at a
    time.
    """
    rotated = rotator(load_f32, fetch_f32)
    store_key, store_value = store_of(keys, key_length), store_of(values, value_length)
    key_groups, value_groups = (
        -(-key_length // STORED_TOGETHER),
        -(-value_length // STORED_TOGETHER),
    )
    key_plane, value_plane = plane_bytes(keys, key_length), plane_bytes(values, value_length)

    def kv_append(
        rows: int,
        sequences: int,
        positions: int,
        table: int,
        k: int,
        v: int,
        blocks: int,
        table_width: int,
        k_offset: int,
        v_offset: int,
        heads: int,
        _key_length: int,
        _value_length: int,
        planes: int,
        halves: int,
    ) -> None:
        row, head = i64(block_y()), i64(block_x())
        if row >= load_i64(rows):
            return
        thread = i64(thread_index())
        group, lane = thread // WARP, thread % WARP
        position = load_i64(positions + 8 * row)
        line = blocks + 8 * table_width * load_i64(sequences + 8 * row)
        block = load_i64(line + 8 * (position >> _BLOCK_SHIFT))
        cell = position & (BLOCK_CELLS - 1)
        unit = row * heads + head
        if block_z() == 0:
            plane = block + k_offset + key_plane * head
            x, cosines = k + 4 * key_length * unit, table + 8 * planes * position
            while group < key_groups:
                number = STORED_TOGETHER * group + lane
                low = rotated(x, cosines, number, key_length, planes, halves)
                high = rotated(x, cosines, number + WARP, key_length, planes, halves)
                store_key(plane, cell, group, lane, low, high)
                group += _THREADS // WARP
        else:
            plane = block + v_offset + value_plane * head
            x = v + 4 * value_length * unit
            while group < value_groups:
                number = STORED_TOGETHER * group + lane
                low = load_f32(x + 4 * number) if number < value_length else f32(0.0)
                number += WARP
                high = load_f32(x + 4 * number) if number < value_length else f32(0.0)
                store_value(plane, cell, group, lane, low, high)
                group += _THREADS // WARP

    name = f"kv_append_{keys}_{values}_{key_length}_{value_length}"
    kv_append.__name__ = kv_append.__qualname__ = name
    return GpuKernel(
        name,
        kv_append,
        _THREADS,
        lambda arguments, most_rows: (arguments["heads"], most_rows, 2),
    )
