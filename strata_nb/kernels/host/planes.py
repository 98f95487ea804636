"""Read a plane of the K/V: the keys or values of one head in a block of 64 cells, as float32.

Only float32 comes out, whatever the type of the cache: a float16 number, or an integer times its
scale, is a float32 without rounding, so the types differ in what was stored and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from strata_nb.compiling import inlined
from strata_nb.formats import BLOCK_CELLS, CACHE_TYPES
from strata_nb.kernels.host.instructions import floats_of_halves
from strata_nb.kernels.host.vectors import (
    Vector,
    constant,
    floats_of,
    join,
    loader,
    no_floats,
    repeater,
    shuffler,
    widen_signed,
)

LANES = 16
GROUP = CACHE_TYPES["int8"].group  # values that share a scale, where there are scales


class Plane(NamedTuple):
    """Read the keys or values of one head and block, as float32.

    scale   (plane, cell, group) -> what `chunk` and `tail` need of a group of 64 values
    chunk   (plane, cell, number, scale) -> values 16 * number and on
    tail    (plane, cell, scale) -> the values behind the last whole chunk, then zeros
    """

    scale: Callable[..., Any]
    chunk: Callable[..., Any]
    tail: Callable[..., Any]


def padded(count: int) -> Callable[..., Any]:
    """Return a function that fills a vector of `count` lanes up to 16 with zeros."""
    zeros = constant(Vector("f32", count), [0.0] * count)
    lanes = shuffler([lane if lane < count else count for lane in range(LANES)])

    @inlined
    def pad(values: Any) -> Any:
        return lanes(join(values, zeros()))

    return pad


@cache
def plane_reader(kind: str, length: int) -> Plane:
    """Return how to read a plane of a type of `CACHE_TYPES`, of heads of so many values."""
    described = CACHE_TYPES[kind]
    size, groups = described.dtype.itemsize, described.groups(length)
    element = {1: "u8", 2: "u16", 4: "f32"}[size]
    whole, rest = length // LANES * LANES, length % LANES
    load, load_rest = loader(Vector(element, LANES)), loader(Vector(element, rest or 1))
    repeat_half = repeater(Vector("u16", LANES), "u16", 1)
    pad = padded(rest or 1)
    scales_offset = BLOCK_CELLS * length * size

    @inlined
    def no_scale(plane: int, cell: int, group: int) -> Any:
        return no_floats()

    @inlined
    def scale_of(plane: int, cell: int, group: int) -> Any:
        return floats_of_halves(repeat_half(plane + scales_offset + 2 * (cell * groups + group)))

    @inlined
    def as_it_is(values: Any) -> Any:
        return values

    @inlined
    def of_bytes(values: Any) -> Any:
        return floats_of(widen_signed(values))

    has_scale = described.scale_dtype is not None
    floats = {"u8": of_bytes, "u16": floats_of_halves, "f32": as_it_is}[element]

    @inlined
    def chunk(plane: int, cell: int, number: int, scale: Any) -> Any:
        values = floats(load(plane + size * (cell * length + LANES * number)))
        return values * scale if has_scale else values

    @inlined
    def tail(plane: int, cell: int, scale: Any) -> Any:
        values = pad(floats(load_rest(plane + size * (cell * length + whole))))
        return values * scale if has_scale else values

    return Plane(scale_of if has_scale else no_scale, chunk, tail)
