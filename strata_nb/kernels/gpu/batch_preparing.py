"""Make queries, keys and values of many rows ready for attention, in registers.

`preparing.py` has what is done; here a block has a row, and its warps take one head after another.
A lane has every 32nd value of a head, and cosines and sines of a row are read once. A rotated
value's other one lies in the same lane, or beside it, so nothing goes through shared memory. The
bits are those of `preparing.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    block_x,
    f32,
    f32_of_i32,
    fetch_f32,
    fma,
    i32,
    i64,
    load_f32,
    load_i64,
    shuffle_xor_f32,
    square_root,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function, GpuKernel, warp_sum
from strata_nb.kernels.gpu.planes import plane_bytes
from strata_nb.kernels.gpu.rotation import STORED_TOGETHER, first_of, second_of, store_of

_THREADS = 256
_WARPS = _THREADS // WARP
_REGISTERS, _REGISTERS_OF_LONG = 64, 128  # of a thread
_USUAL_LENGTH = 128  # of heads; longer ones take more registers
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1


def rotates(lengths: tuple[int, int], planes: int, halves: int) -> bool:
    """Return whether there is a kernel for lengths of heads of keys and values, and a rotation."""
    whole = all(length % STORED_TOGETHER == 0 for length in lengths)
    return whole and planes > 0 and planes % (WARP if halves else WARP // 2) == 0


# -- a head in a warp: a tuple in each lane, lane l has the values at l, l + 32, ... ---------------


@cache
def _loader(load: Function, turns: int, step: int = WARP) -> Function:
    """Return a function (x): what `load` finds at x and every `step` float32 further."""

    def one(x: int) -> Any:
        return (load(x),)

    if turns == 1:
        return one
    others = _loader(load, turns - 1, step)

    def several(x: int) -> Any:
        return one(x) + others(x + 4 * step)

    return several


@cache
def _storer(turns: int) -> Function:
    """Return a function (x, values): store them there."""

    def one(x: int, values: Any) -> None:
        store_f32(x, values[0])

    if turns == 1:
        return one
    others = _storer(turns - 1)

    def several(x: int, values: Any) -> None:
        one(x, values)
        others(x + 4 * WARP, values[1:])

    return several


@cache
def _cell_storer(kind: str, length: int, groups: int) -> Function:
    """Return a function (plane, cell, values, lane): store the last `groups` groups of a head's
    values, as a part of a cell; a lane has two values of each."""
    store, group = store_of(kind, length), length // STORED_TOGETHER - groups

    def one(plane: int, cell: int, values: Any, lane: int) -> None:
        store(plane, cell, i64(group), lane, values[0], values[1])

    if groups == 1:
        return one
    others = _cell_storer(kind, length, groups - 1)

    def several(plane: int, cell: int, values: Any, lane: int) -> None:
        one(plane, cell, values, lane)
        others(plane, cell, values[2:], lane)

    return several


@cache
def _each(does: Function, turns: int) -> Function:
    """Return a function (a, b, c, same): of each turn `does` of these three's and of `same`."""

    def one(a: Any, b: Any, c: Any, same: Any) -> Any:
        return (does(a[0], b[0], c[0], same),)

    if turns == 1:
        return one
    others = _each(does, turns - 1)

    def several(a: Any, b: Any, c: Any, same: Any) -> Any:
        return one(a, b, c, same) + others(a[1:], b[1:], c[1:], same)

    return several


@cache
def _squares(turns: int) -> Function:
    """Return a function (values, total): the total and all squares, in ascending order."""

    def one(values: Any, total: Any) -> Any:
        return fma(values[0], values[0], total)

    if turns == 1:
        return one
    others = _squares(turns - 1)

    def several(values: Any, total: Any) -> Any:
        return others(values[1:], one(values, total))

    return several


def _scaled(value: Any, weight: Any, _: Any, divisor: Any) -> Any:
    return value / divisor * weight


@cache
def _norm(length: int) -> Function:
    """Return a function (values, weights, eps): a head over its root mean square, times weights."""
    turns = length // WARP
    squares, scaled = _squares(turns), _each(_scaled, turns)

    def normed(values: Any, weights: Any, eps: Any) -> Any:
        mean = warp_sum(squares(values, f32(0.0))) / f32_of_i32(i32(length))
        return scaled(values, weights, values, square_root(mean + eps))

    return normed


def _first(x: Any, y: Any, angle: Any, _: Any) -> Any:
    return first_of(x, y, angle[0], angle[1])


def _second(x: Any, y: Any, angle: Any, _: Any) -> Any:
    return second_of(x, y, angle[0], angle[1])


def _neighbour(here: Any, _: Any, angle: Any, lane: int) -> Any:
    """Rotate a value whose other one is in the next lane."""
    other = shuffle_xor_f32(here, 1)
    if lane & 1 == 1:
        return second_of(other, here, angle[0], angle[1])
    return first_of(here, other, angle[0], angle[1])


class _Rotation(NamedTuple):
    """Hold device functions that rotate.

    angles    (table, lane): a lane's cosines and sines, of a row's in a table
    rotated   (values, angles, lane): a head's values, rotated
    """

    angles: Function
    rotated: Function


@cache
def _behind(turns: int) -> Function:
    """Return a function (values): those behind the first `turns`."""
    if turns == 0:
        return lambda values: values
    further = _behind(turns - 1)
    return lambda values: further(values[1:])


@cache
def _rotation(length: int, planes: int, halves: int) -> _Rotation:
    """Return the rotation of so many planes of a head."""

    def angle(place: int) -> Any:
        return fetch_f32(place), fetch_f32(place + 4 * planes)

    def angles_of(table: int, lane: int) -> Any:
        return load(table + 4 * (lane if halves else lane >> 1))

    def halves_rotated(values: Any, angles: Any, _: int) -> Any:
        others = further(values)
        return firsts(values, others, angles, 0) + seconds(values, others, angles, 0)

    def neighbours_rotated(values: Any, angles: Any, lane: int) -> Any:
        return neighbours(values, values, angles, lane)

    def partly_rotated(values: Any, angles: Any, lane: int) -> Any:
        return wholly_rotated(values, angles, lane) + rest(values)

    turns, apart = (planes // WARP, WARP) if halves else (2 * planes // WARP, WARP // 2)
    load = _loader(angle, turns, apart)
    firsts, seconds, neighbours = (_each(one, turns) for one in (_first, _second, _neighbour))
    further, rest = _behind(turns), _behind(2 * planes // WARP)
    wholly_rotated = halves_rotated if halves else neighbours_rotated
    is_whole = 2 * planes == length
    return _Rotation(angles_of, wholly_rotated if is_whole else partly_rotated)


# -- the kernel ------------------------------------------------------------------------------------


@cache
def batch_prepare_kernel(
    kinds: tuple[str, str], lengths: tuple[int, int], planes: int, halves: int
) -> GpuKernel:
    """Return the kernel `prepare` for what `rotates`, grid (rows), of 256 threads.

    kinds     of `CACHE_TYPES`, of keys and of values
    lengths   of heads, likewise
    planes, halves   of the rotation, as `rope` of the table has them

    Reads 4 bytes of each value of q, k and v; writes 4 of q, and those of the cell.
    """
    (key_length, value_length), turns = lengths, lengths[0] // WARP
    load, store, normed = _loader(load_f32, turns), _storer(turns), _norm(key_length)
    fetch, load_value = _loader(fetch_f32, turns), _loader(load_f32, value_length // WARP)
    angles_of, rotated = _rotation(key_length, planes, halves)
    store_key, store_value = (
        _cell_storer(kind, length, length // STORED_TOGETHER)
        for kind, length in zip(kinds, lengths, strict=True)
    )
    key_plane, value_plane = map(plane_bytes, kinds, lengths)

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
        _planes: int,
        _halves: int,
        eps: Any,
    ) -> None:
        row, thread = i64(block_x()), i64(thread_index())
        if row >= load_i64(rows):
            return
        head, lane = thread // WARP, thread % WARP
        position = load_i64(positions + 8 * row)
        line = blocks + 8 * table_width * load_i64(sequences + 8 * row)
        angles = angles_of(table + 8 * planes * position, lane)
        block = load_i64(line + 8 * (position >> _BLOCK_SHIFT))
        cell = position & (BLOCK_CELLS - 1)
        while head < heads:
            x = q + 4 * (key_length * (row * heads + head) + lane)
            values = load(x)
            if q_weight != 0:
                values = normed(values, fetch(q_weight + 4 * lane), eps)
            store(x, rotated(values, angles, lane))
            head += _WARPS
        head -= heads
        while head < kv_heads:
            values = load(k + 4 * (key_length * (row * kv_heads + head) + lane))
            if k_weight != 0:
                values = normed(values, fetch(k_weight + 4 * lane), eps)
            place = block + k_offset + key_plane * head
            store_key(place, cell, rotated(values, angles, lane), lane)
            head += _WARPS
        head -= kv_heads
        while head < kv_heads:
            values = load_value(v + 4 * (value_length * (row * kv_heads + head) + lane))
            store_value(block + v_offset + value_plane * head, cell, values, lane)
            head += _WARPS

    name = "_".join(map(str, ("batch_prepare", *kinds, *lengths, planes, halves)))
    prepare.__name__ = prepare.__qualname__ = name
    return GpuKernel(
        name,
        prepare,
        _THREADS,
        lambda _, most_rows: (most_rows, 1, 1),
        registers=_REGISTERS if max(lengths) <= _USUAL_LENGTH else _REGISTERS_OF_LONG,
    )
