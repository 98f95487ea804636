"""Floats as pairs of halves, for products of matrices that are nearly as exact as float32.

A float is the sum of two halves, the nearest one and what that leaves, to 22 bits; so a product
with halves is two products of halves. Functions here work on tuples that become registers; each is
made for a length, and works on the first items and leaves the others to the next shorter one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    bits_of_f32,
    f32,
    f32_of_bits,
    f32_of_half,
    halves_of_f32,
    i32,
    load_4xi32,
    mma_of_halves,
    shared_load_i32,
    shared_store_i32,
)
from strata_nb.kernels.gpu.operations import Function

_MAGNITUDE, _EXPONENT = 0x7FFFFFFF, 0x7F800000
_INFINITY = float("inf")
_MANTISSA_BITS = 23
_LEAST_EXPONENT = 15  # as float32 has them: 2 ** -112; below, floats are as good as zero
_TOP = 14  # the exponent to which the largest float is brought: a half has 15 at most


def halves_of(x: Any, y: Any) -> Any:
    """Return two floats as two words: their nearest halves, and the halves nearest to the rest."""
    nearest = halves_of_f32(x, y)
    rest, other = x - f32_of_half(nearest), y - f32_of_half(i32(nearest >> 16))
    return nearest, halves_of_f32(rest, other)


def magnitude_of(x: Any) -> Any:
    """Return a float without its sign."""
    return f32_of_bits(i32(bits_of_f32(x) & _MAGNITUDE))


def sum_of_parts(nearest: Any, rest: Any) -> Any:
    """Return the sum of a product's two parts, of the nearest halves and of the rest; of an
    infinite one the rest is infinite as well."""
    return nearest if magnitude_of(nearest) == f32(_INFINITY) else nearest + rest


def power_below(magnitude: Any) -> Any:
    """Return two powers of two: one that brings a float to 2 ** 14 .. 2 ** 15, and its inverse."""
    exponent = max((bits_of_f32(magnitude) & _EXPONENT) >> _MANTISSA_BITS, _LEAST_EXPONENT)
    up = f32_of_bits(i32((2 * 127 + _TOP - exponent) << _MANTISSA_BITS))
    return up, f32_of_bits(i32((exponent - _TOP) << _MANTISSA_BITS))


# -- tuples ----------------------------------------------------------------------------------------


@cache
def loader_of_words(times: int, step: int) -> Function:
    """Return a function (address) that loads four words, and again `step` bytes further on."""

    def four(address: int) -> Any:
        return load_4xi32(address)

    if times == 1:
        return four
    others = loader_of_words(times - 1, step)

    def load(address: int) -> Any:
        return four(address) + others(address + step)

    return load


# Queries go through shared memory, where each warp leaves the words of a head: row r has word r of
# each lane, turned by so much that those who write and those who read use all banks.


def store_query(place: int, head: int, part: int, first: Any, second: Any) -> None:
    """Store values 4 * part .. 4 * part + 3 of a head as `halves_of` has two pairs."""
    row = 4 * (2 * (part >> 3) + (part & 1))
    turned = place + 128 * row + 4 * ((4 * head + ((part >> 1) & 3) + row) & 31)
    shared_store_i32(turned, first[0])
    shared_store_i32(turned + 128, first[1])
    shared_store_i32(turned + 256, second[0])
    shared_store_i32(turned + 384, second[1])


@cache
def loader_of_queries(times: int, row: int = 0) -> Function:
    """Return a function (place, lane): a lane's 8 * times words from a row on."""

    def eight(place: int, lane: int) -> Any:
        first = place + 128 * row + 4 * ((lane + row) & 31)
        second = place + 128 * (row + 4) + 4 * ((lane + row + 4) & 31)
        a, b = shared_load_i32(first), shared_load_i32(first + 128)
        c, d = shared_load_i32(first + 256), shared_load_i32(first + 384)
        e, f = shared_load_i32(second), shared_load_i32(second + 128)
        return a, b, c, d, e, f, shared_load_i32(second + 256), shared_load_i32(second + 384)

    if times == 1:
        return eight
    others = loader_of_queries(times - 1, row + 8)

    def load(place: int, lane: int) -> Any:
        return eight(place, lane) + others(place, lane)

    return load


def _step(a: Any, x: Any, y: Any, c: Any) -> Any:
    first = mma_of_halves(a[0], a[1], a[2], a[3], x[0], x[1], c[0], c[1], c[2], c[3])
    return first + mma_of_halves(a[0], a[1], a[2], a[3], y[0], y[1], c[4], c[5], c[6], c[7])


def _two_steps(a: Any, x: Any, y: Any, c: Any) -> Any:
    return _step(a[4:], x[2:], y[2:], _step(a, x, y, c))


@cache
def products(times: int) -> Function:
    """Return a function (a, x, y, c): c and the products of a matrix with two others, which have
    32 * times rows.

    a      8 * times words: two of each step of 8
    x, y   4 * times words each
    c      eight floats: four of each product
    """
    if times == 1:
        return _two_steps
    others = products(times - 1)

    def of_all(a: Any, x: Any, y: Any, c: Any) -> Any:
        return others(a[8:], x[4:], y[4:], _two_steps(a, x, y, c))

    return of_all
