"""Read a plane of the K/V on a card: the keys or values of one head in a block of 64 cells.

Words of 32 bits come from memory, four at once where a cell's bytes allow it, and become one, two
or four float32 each. A float16 number is a float32 without rounding. An integer of int8 is too, so
the scale of its group is multiplied once: into the sum over a load of keys, into the weight of
values.

Lengths of heads are multiples of 4, so that no load crosses the end of a cell.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.errors import UnsupportedDevice
from strata_nb.formats import BLOCK_CELLS, CACHE_TYPES
from strata_nb.kernels.gpu.intrinsics import (
    f32,
    f32_of_bits,
    f32_of_half,
    f32_of_i32,
    fma,
    i32,
    load_2xi32,
    load_4xi32,
    load_i32,
    load_u16,
    shared_load_f32,
)
from strata_nb.kernels.gpu.operations import Function

MOST_LENGTH = 256  # of a head
_GROUP = CACHE_TYPES["int8"].group  # values that share a scale, where there are scales


def check_length(length: int) -> None:
    """Raise UnsupportedDevice unless a card can read heads of so many values."""
    if length % 4 or not 0 < length <= MOST_LENGTH:
        raise UnsupportedDevice(
            f"heads of {length} values: on a card they have a multiple of 4, {MOST_LENGTH} at most",
            hint="--device host runs this model",
        )


def plane_bytes(kind: str, length: int) -> int:
    """Return how many bytes a plane has."""
    return BLOCK_CELLS * CACHE_TYPES[kind].head_bytes(length)


def _byte(word: Any, number: int) -> Any:
    """Return byte `number` of a word, signed, as a float."""
    return f32_of_i32(i32(i32(word << (24 - 8 * number)) >> 24))


# -- scales ----------------------------------------------------------------------------------------


@cache
def _scale_places(kind: str, length: int) -> Function:
    """Return a function (plane, cell) that returns where the scales of a cell begin."""
    described = CACHE_TYPES[kind]
    groups = described.groups(length)
    offset = BLOCK_CELLS * length * described.dtype.itemsize

    def scales_of(plane: int, cell: int) -> Any:
        return plane + offset + 2 * groups * cell

    return scales_of


def _scale(place: int) -> Any:
    return f32_of_half(load_u16(place))


# -- keys ------------------------------------------------------------------------------------------
# What a word of keys adds to a sum: q is the offset of its first value's partner in shared memory.


def _add_f32(word: Any, q: int, total: Any) -> Any:
    return fma(shared_load_f32(q), f32_of_bits(word), total)


def _add_f16(word: Any, q: int, total: Any) -> Any:
    total = fma(shared_load_f32(q), f32_of_half(word), total)
    return fma(shared_load_f32(q + 4), f32_of_half(i32(word >> 16)), total)


def _add_int8(word: Any, q: int, total: Any) -> Any:
    total = fma(shared_load_f32(q), _byte(word, 0), total)
    total = fma(shared_load_f32(q + 4), _byte(word, 1), total)
    total = fma(shared_load_f32(q + 8), _byte(word, 2), total)
    return fma(shared_load_f32(q + 12), _byte(word, 3), total)


_ADDS = {"f32": _add_f32, "f16": _add_f16, "int8": _add_int8}


@cache
def _load_adder(kind: str, width: int) -> Function:
    """Return a function (place, q, total) that adds the products of a load of `width` bytes."""
    add = _ADDS[kind]
    step = 16 // CACHE_TYPES[kind].dtype.itemsize  # bytes of q to a word of keys

    def of_four(place: int, q: int, total: Any) -> Any:
        a, b, c, d = load_4xi32(place)
        total = add(a, q, total)
        total = add(b, q + step, total)
        total = add(c, q + 2 * step, total)
        return add(d, q + 3 * step, total)

    def of_two(place: int, q: int, total: Any) -> Any:
        a, b = load_2xi32(place)
        return add(b, q + step, add(a, q, total))

    def of_one(place: int, q: int, total: Any) -> Any:
        return add(load_i32(place), q, total)

    return {16: of_four, 8: of_two, 4: of_one}[width]


class Keys(NamedTuple):
    """Multiply a query with keys, a load at a time.

    loads      of a key
    values     of a load
    place_of   (plane, cell, load) -> the address of a load
    scales_of  (plane, cell) -> the address of a cell's scales; of nothing where there are none
    add        (place, scales, q, further, total) -> total and the products of the load that is
               `further` loads, a multiple of 4, behind one of a cell's first four; place and q are
               those of that one, q the offset of its partner in shared memory
    """

    loads: int
    values: int
    place_of: Function
    scales_of: Function
    add: Function


@cache
def keys_reader(kind: str, length: int) -> Keys:
    """Return how to multiply with keys of a type of `CACHE_TYPES`, of heads of so many values."""
    check_length(length)
    described = CACHE_TYPES[kind]
    size = described.dtype.itemsize
    cell_bytes = length * size
    width = next(width for width in (16, 8, 4) if cell_bytes % width == 0)
    values = width // size
    products = _load_adder(kind, width)
    shift = (_GROUP // values).bit_length() - 1  # four loads never lie in two groups

    def place_of(plane: int, cell: int, load: int) -> Any:
        return plane + cell_bytes * cell + width * load

    def add(place: int, _scales: int, q: int, further: int, total: Any) -> Any:
        return products(place + width * further, q + 4 * values * further, total)

    def add_scaled(place: int, scales: int, q: int, further: int, total: Any) -> Any:
        found = products(place + width * further, q + 4 * values * further, f32(0.0))
        return fma(found, _scale(scales + 2 * (further >> shift)), total)

    chosen = add if described.scale_dtype is None else add_scaled
    return Keys(cell_bytes // width, values, place_of, _scale_places(kind, length), chosen)


# -- values ----------------------------------------------------------------------------------------
# Four values of a cell as floats. Where a row does not see the cell, bits that may be anything
# become 0, which is the number 0 in all three types.


def _four_f32(place: int, seen: bool) -> Any:
    a, b, c, d = load_4xi32(place)
    return (
        f32_of_bits(a if seen else i32(0)),
        f32_of_bits(b if seen else i32(0)),
        f32_of_bits(c if seen else i32(0)),
        f32_of_bits(d if seen else i32(0)),
    )


def _four_f16(place: int, seen: bool) -> Any:
    a, b = load_2xi32(place)
    a = a if seen else i32(0)
    b = b if seen else i32(0)
    high_a, high_b = i32(a >> 16), i32(b >> 16)
    return f32_of_half(a), f32_of_half(high_a), f32_of_half(b), f32_of_half(high_b)


def _four_int8(place: int, seen: bool) -> Any:
    word = load_i32(place)
    word = word if seen else i32(0)
    return _byte(word, 0), _byte(word, 1), _byte(word, 2), _byte(word, 3)


_FOURS = {"f32": _four_f32, "f16": _four_f16, "int8": _four_int8}


class Values(NamedTuple):
    """Add values times weights, four of a cell at a time.

    place_of  (plane, cell, column) -> the address of values 4 * column .. 4 * column + 3
    scale_of  (plane, cell, column) -> the address of their scale; of nothing where there is none
    mix       (place, scale, further, weight, seen, a, b, c, d) -> the sums a, b, c, d with weight
              times the values of the cell that is `further` cells behind that of place and scale;
              as they are where it is not seen
    """

    place_of: Function
    scale_of: Function
    mix: Function


@cache
def values_reader(kind: str, length: int) -> Values:
    """Return how to add values of a type of `CACHE_TYPES`, of heads of so many values."""
    check_length(length)
    described = CACHE_TYPES[kind]
    size = described.dtype.itemsize
    cell_bytes, cell_scales = length * size, 2 * described.groups(length)
    four, scales_of = _FOURS[kind], _scale_places(kind, length)
    shift = (_GROUP // 4).bit_length() - 1

    def place_of(plane: int, cell: int, column: int) -> Any:
        return plane + cell_bytes * cell + 4 * size * column

    def scale_of(plane: int, cell: int, column: int) -> Any:
        return scales_of(plane, cell) + 2 * (column >> shift)

    def mix(
        place: int,
        _scale_place: int,
        further: int,
        weight: Any,
        seen: bool,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
    ) -> Any:
        e, f, g, h = four(place + cell_bytes * further, seen)
        return fma(weight, e, a), fma(weight, f, b), fma(weight, g, c), fma(weight, h, d)

    def mix_scaled(
        place: int,
        scale_place: int,
        further: int,
        weight: Any,
        seen: bool,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
    ) -> Any:
        scale = _scale(scale_place + cell_scales * further)
        weight *= scale if seen else f32(0.0)
        return mix(place, scale_place, further, weight, seen, a, b, c, d)

    return Values(place_of, scale_of, mix if described.scale_dtype is None else mix_scaled)
