"""Rotate queries and keys by their positions, and store keys and values in the K/V.

A head is worked on sixteen values at a time where its planes allow that, else value by value; the
bits are those of `reference.rope_rotate`, `quantise_kv` and numpy's float16 in either case. Nothing
needs work space: a rotated value depends on two values, so it is computed where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from strata_nb.compiling import compiled, helper, inlined
from strata_nb.formats import BLOCK_CELLS, CACHE_TYPES
from strata_nb.kernels.host.instructions import floats_of_halves, halves_of_floats
from strata_nb.kernels.host.lanes import across_1, across_2, across_4, across_8, larger
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, share, word
from strata_nb.kernels.host.vectors import (
    FLOATS,
    INTEGERS,
    Vector,
    all_lanes,
    constant,
    load_floats,
    loader,
    narrow_to_bytes,
    nearest,
    no_floats,
    no_integers,
    only_lane,
    recast,
    shuffler,
    truncated,
    where_less,
)
from strata_nb.raw_memory import load_f32, load_i64, store

_LANES = 16
_GROUP = CACHE_TYPES["int8"].group
_MAGNITUDE = 0x7FFFFFFF
_LIMIT, _INFINITY = np.float32(127), np.float32(np.inf)
_as_integers, _as_floats = recast(INTEGERS), recast(FLOATS)
_load_eight = loader(Vector("f32", 8))
_doubled = shuffler([lane // 2 for lane in range(_LANES)])
_neighbours = shuffler([lane ^ 1 for lane in range(_LANES)])
_first_lane = shuffler([0])
_signs_of_even = constant(INTEGERS, [-(2**31), 0] * 8)


# -- rotation --------------------------------------------------------------------------------------


@inlined
def _rotated(x: int, cosines: int, first: int, planes: int, halves: int) -> Any:
    """Return values first .. first + 15 of a head, rotated.

    x         address of the head
    cosines   address of float32 (2, planes): cosines, then sines
    first     a multiple of 16; so is `planes` where halves is 1, else of 8
    """
    here = load_floats(x + 4 * first)
    sines = cosines + 4 * planes
    if first >= 2 * planes:
        return here
    if halves == 0:
        cosine = _doubled(_load_eight(cosines + 2 * first))
        sine = _doubled(_load_eight(sines + 2 * first))
        sine = _as_floats(_as_integers(sine) ^ _signs_of_even())
        return here * cosine + _neighbours(here) * sine
    if first < planes:
        other = load_floats(x + 4 * (first + planes))
        cosine, sine = load_floats(cosines + 4 * first), load_floats(sines + 4 * first)
        return here * cosine - other * sine
    plane = first - planes
    other = load_floats(x + 4 * plane)
    cosine, sine = load_floats(cosines + 4 * plane), load_floats(sines + 4 * plane)
    return other * sine + here * cosine


@inlined
def _rotated_value(x: int, cosines: int, number: int, planes: int, halves: int) -> Any:
    """Return one value of a head, rotated."""
    here = load_f32(x + 4 * number)
    if number >= 2 * planes:
        return here
    plane = number % planes if halves else number // 2
    is_second = number >= planes if halves else number % 2 == 1
    distance = planes if halves else 1
    cosine, sine = load_f32(cosines + 4 * plane), load_f32(cosines + 4 * (planes + plane))
    if is_second:
        return load_f32(x + 4 * (number - distance)) * sine + here * cosine
    return here * cosine - load_f32(x + 4 * (number + distance)) * sine


@inlined
def _by_sixteen(planes: int, halves: int) -> Any:
    """Say whether no sixteen values of a head lie on both sides of a border."""
    return planes % (_LANES if halves else _LANES // 2) == 0


@cache
def rope_kernel() -> HostKernel:
    """Return the kernel `rope`."""
    return HostKernel(_rope)


@compiled(SIGNATURE)
def _rope(arguments: int, thread: int, threads: int) -> None:
    rows, heads = load_i64(word(arguments, 0)), word(arguments, 4)
    positions, table, x = word(arguments, 1), word(arguments, 2), word(arguments, 3)
    length, planes, halves = word(arguments, 5), word(arguments, 6), word(arguments, 7)
    first, last = share(rows * heads, 1, thread, threads)
    distance, planes_a_step = (planes, _LANES) if halves else (1, _LANES // 2)
    for unit in range(first, last):
        head = x + 4 * length * unit
        cosines = table + 8 * planes * load_i64(positions + 8 * (unit // heads))
        if _by_sixteen(planes, halves):
            for plane in range(0, planes, planes_a_step):
                if halves:
                    low = _rotated(head, cosines, plane, planes, halves)
                    high = _rotated(head, cosines, plane + planes, planes, halves)
                    store(head + 4 * plane, low)
                    store(head + 4 * (plane + planes), high)
                else:
                    store(head + 8 * plane, _rotated(head, cosines, 2 * plane, planes, halves))
        else:
            for plane in range(planes):
                number = plane if halves else 2 * plane
                one = _rotated_value(head, cosines, number, planes, halves)
                other = _rotated_value(head, cosines, number + distance, planes, halves)
                store(head + 4 * number, one)
                store(head + 4 * (number + distance), other)


# -- storing ---------------------------------------------------------------------------------------
# A function of each type: (plane, cell, x, cosines, length, planes, halves) stores a head, rotated,
# as a cell of a plane (`cache/kv_layout.py`).


@helper
def _store_f32(
    plane: int, cell: int, x: int, cosines: int, length: int, planes: int, halves: int
) -> None:
    place = plane + 4 * length * cell
    whole = length // _LANES * _LANES if _by_sixteen(planes, halves) else 0
    for first in range(0, whole, _LANES):
        store(place + 4 * first, _rotated(x, cosines, first, planes, halves))
    for number in range(whole, length):
        store(place + 4 * number, _rotated_value(x, cosines, number, planes, halves))


@helper
def _store_f16(
    plane: int, cell: int, x: int, cosines: int, length: int, planes: int, halves: int
) -> None:
    place = plane + 2 * length * cell
    whole = length // _LANES * _LANES if _by_sixteen(planes, halves) else 0
    for first in range(0, whole, _LANES):
        store(place + 2 * first, halves_of_floats(_rotated(x, cosines, first, planes, halves)))
    for number in range(whole, length):
        value = _rotated_value(x, cosines, number, planes, halves)
        store(place + 2 * number, _first_lane(halves_of_floats(all_lanes(no_floats(), value))))


@inlined
def _magnitude(values: Any) -> Any:
    """Return magnitudes as integers, in whose order NaN > infinity > the rest."""
    return _as_integers(values) & _MAGNITUDE


@inlined
def _quantised(values: Any, scale: float) -> Any:
    """Return 16 values over the scale as bytes, to nearest, ties to even, within -127 .. 127."""
    limit = all_lanes(values, _LIMIT)
    found = nearest(values / scale)
    found = where_less(limit, found, limit, found)
    limit = all_lanes(values, -_LIMIT)
    return narrow_to_bytes(truncated(where_less(found, limit, limit, found)))


@helper
def _store_int8(
    plane: int, cell: int, x: int, cosines: int, length: int, planes: int, halves: int
) -> None:
    place = plane + length * cell
    groups = (length + _GROUP - 1) // _GROUP
    scales = plane + BLOCK_CELLS * length + 2 * groups * cell
    by_sixteen = _by_sixteen(planes, halves)
    for group in range(groups):
        start, end = _GROUP * group, min(_GROUP * group + _GROUP, length)
        whole = end - (end - start) % _LANES if by_sixteen else start
        bits = no_integers()
        for first in range(start, whole, _LANES):
            bits = larger(bits, _magnitude(_rotated(x, cosines, first, planes, halves)))
        for number in range(whole, end):
            value = _rotated_value(x, cosines, number, planes, halves)
            bits = larger(bits, _magnitude(all_lanes(no_floats(), value)))
        bits = larger(bits, across_8(bits))
        bits = larger(bits, across_4(bits))
        bits = larger(bits, across_2(bits))
        bits = larger(bits, across_1(bits))
        half = halves_of_floats(_as_floats(bits) / _LIMIT)
        store(scales + 2 * group, _first_lane(half))
        scale = only_lane(floats_of_halves(half))
        if not 0 < scale < _INFINITY:  # nothing to keep, or a scale that shows as NaN when read
            for number in range(start, end):
                store(place + number, np.uint8(0))
            continue
        for first in range(start, whole, _LANES):
            values = _rotated(x, cosines, first, planes, halves)
            store(place + first, _quantised(values, scale))
        for number in range(whole, end):
            value = _rotated_value(x, cosines, number, planes, halves)
            store(place + number, _first_lane(_quantised(all_lanes(no_floats(), value), scale)))


_STORES = {"f32": _store_f32, "f16": _store_f16, "int8": _store_int8}


def _plane_bytes(kind: str) -> Callable[..., Any]:
    """Return a function (length) that says how many bytes a plane has."""
    described = CACHE_TYPES[kind]
    size, group = described.dtype.itemsize, described.group
    scale = 0 if described.scale_dtype is None else described.scale_dtype.itemsize

    @inlined
    def plane_bytes(length: int) -> Any:
        return BLOCK_CELLS * (length * size + (length + group - 1) // group * scale)

    return plane_bytes


@cache
def kv_append_kernel(keys: str, values: str) -> HostKernel:
    """Return the kernel `kv_append` for a pair of `CACHE_TYPES`."""
    store_key, store_value = _STORES[keys], _STORES[values]
    key_plane, value_plane = _plane_bytes(keys), _plane_bytes(values)

    def kv_append(arguments: int, thread: int, threads: int) -> None:
        rows, heads = load_i64(word(arguments, 0)), word(arguments, 10)
        sequences, positions, table = word(arguments, 1), word(arguments, 2), word(arguments, 3)
        k, v = word(arguments, 4), word(arguments, 5)
        blocks, table_width = word(arguments, 6), word(arguments, 7)
        k_offset, v_offset = word(arguments, 8), word(arguments, 9)
        key_length, value_length = word(arguments, 11), word(arguments, 12)
        planes, halves = word(arguments, 13), word(arguments, 14)
        first, last = share(rows * heads, 1, thread, threads)
        for unit in range(first, last):
            row, head = unit // heads, unit % heads
            position = load_i64(positions + 8 * row)
            line = blocks + 8 * table_width * load_i64(sequences + 8 * row)
            block = load_i64(line + 8 * (position // BLOCK_CELLS))
            cell = position % BLOCK_CELLS
            plane = block + k_offset + head * key_plane(key_length)
            cosines = table + 8 * planes * position
            store_key(plane, cell, k + 4 * key_length * unit, cosines, key_length, planes, halves)
            plane = block + v_offset + head * value_plane(value_length)
            store_value(plane, cell, v + 4 * value_length * unit, 0, value_length, 0, 0)

    kv_append.__name__ = kv_append.__qualname__ = f"kv_append_{keys}_{values}"
    return HostKernel(compiled(SIGNATURE)(kv_append))
