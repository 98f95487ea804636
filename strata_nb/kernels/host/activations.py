"""Quantise activations to bytes: rows as `kernels/quantised_rows.py` lays them out."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from strata_nb.compiling import compiled, inlined
from strata_nb.kernels.host.lanes import high_1, high_8, larger, largest, low_1, low_8
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, share, word
from strata_nb.kernels.host.vectors import (
    INTEGERS,
    Vector,
    constant,
    join,
    load_floats,
    narrow_to_bytes,
    nearest,
    only_lane,
    recast,
    shuffler,
    truncated,
)
from strata_nb.kernels.quantised_rows import (
    HALF_SUMS,
    SCALES,
    SMALLEST,
    SUB_BLOCK_BYTES,
    SUMS,
)
from strata_nb.packing import SUB_BLOCK
from strata_nb.raw_memory import load_i64, store

_SMALLEST = np.float32(SMALLEST)
_INFINITY = np.float32(np.inf)
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_HALF_BYTES = SUB_BLOCK // 2 * 4  # of float32

_as_integers = recast(INTEGERS)
_as_float = recast(Vector("f32", 1))
_no_quants = constant(Vector("u8", SUB_BLOCK), [0] * SUB_BLOCK)
_no_sums = constant(Vector("i32", 2), [0, 0])

# Of two runs that lie one behind the other, the lower and the upper half of each.
_lower_4 = shuffler([0, 1, 2, 3, 8, 9, 10, 11])
_upper_4 = shuffler([4, 5, 6, 7, 12, 13, 14, 15])
_lower_2, _upper_2 = shuffler([0, 1, 4, 5]), shuffler([2, 3, 6, 7])
_lower_1, _upper_1 = shuffler([0, 2]), shuffler([1, 3])


@inlined
def _largest_magnitude(first: Any, second: Any) -> Any:
    """Return the largest magnitude of two vectors of floats; NaN if there is one.

    Compared as integers, where NaN > infinity > all others.
    """
    bits = larger(_as_integers(first) & _MAGNITUDE, _as_integers(second) & _MAGNITUDE)
    return only_lane(_as_float(largest(bits)))


@inlined
def _two_sums(first: Any, second: Any) -> Any:
    """Return the sum of each of two vectors of 16 integers, as a vector of two."""
    both = join(low_8(first) + high_8(first), low_8(second) + high_8(second))
    four = _lower_4(both) + _upper_4(both)
    two = _lower_2(four) + _upper_2(four)
    return _lower_1(two) + _upper_1(two)


@inlined
def quantise_sub_block(
    first: Any, second: Any, target_row: int, sub_blocks: int, number: int
) -> None:
    """Quantise 32 values, two vectors of floats, as sub-block `number` of a row.

    target_row   address of the quantised row
    sub_blocks   how many it has
    """
    quants = target_row + SUB_BLOCK * number
    scales = target_row + SCALES * sub_blocks
    sums = target_row + SUMS * sub_blocks
    halves = target_row + HALF_SUMS * sub_blocks
    magnitude = _largest_magnitude(first, second)
    scale, inverse = np.float32(0), np.float32(0)
    if not magnitude < _INFINITY:
        scale = np.float32(np.nan)
    elif magnitude >= _SMALLEST:
        scale = magnitude / np.float32(127)
        inverse = np.float32(127) / magnitude
    store(scales + 4 * number, scale)
    if inverse > 0:
        a, b = truncated(nearest(first * inverse)), truncated(nearest(second * inverse))
        found = _two_sums(a, b)
        store(quants, narrow_to_bytes(join(a, b)))
        store(sums + 4 * number, low_1(found) + high_1(found))
        store(halves + 8 * number, found)
    else:
        store(quants, _no_quants())
        store(sums + 4 * number, np.int32(0))
        store(halves + 8 * number, _no_sums())


@inlined
def quantise_sub_blocks(
    source: int, target_row: int, sub_blocks: int, first: int, last: int
) -> None:
    """Quantise sub-blocks first .. last - 1 of one row.

    source       address of the row's float32 values, of its first one
    target_row   address of the quantised row
    sub_blocks   how many the whole row has
    """
    for number in range(first, last):
        place = source + 4 * SUB_BLOCK * number
        quantise_sub_block(
            load_floats(place), load_floats(place + _HALF_BYTES), target_row, sub_blocks, number
        )


@inlined
def quantise_share(
    source: int, target: int, rows: int, sub_blocks: int, thread: int, threads: int
) -> None:
    """Quantise a thread's share of all sub-blocks of float32 rows that lie one behind the other."""
    stride = SUB_BLOCK_BYTES * sub_blocks
    first, last = share(rows * sub_blocks, 1, thread, threads)
    while first < last:
        row = first // sub_blocks
        end = min(last, (row + 1) * sub_blocks)
        start = row * sub_blocks
        place = source + 4 * SUB_BLOCK * start
        quantise_sub_blocks(place, target + row * stride, sub_blocks, first - start, end - start)
        first = end


@compiled("void(int64,int64,int64,int64,int64)")
def quantise_rows(source: int, target: int, values: int, first: int, last: int) -> None:
    """Quantise rows first .. last - 1 of float32 (rows, values) to rows of `row_bytes`."""
    sub_blocks = values // SUB_BLOCK
    for row in range(first, last):
        target_row = target + row * SUB_BLOCK_BYTES * sub_blocks
        quantise_sub_blocks(source + 4 * row * values, target_row, sub_blocks, 0, sub_blocks)


@cache
def quantise_kernel() -> HostKernel:
    """Return `quantise` of the table; the threads share the sub-blocks of all rows."""

    @compiled(SIGNATURE)
    def quantise(arguments: int, thread: int, threads: int) -> None:
        rows = load_i64(word(arguments, 0)) * word(arguments, 3)
        sub_blocks = word(arguments, 4) // SUB_BLOCK
        quantise_share(word(arguments, 1), word(arguments, 2), rows, sub_blocks, thread, threads)

    return HostKernel(quantise)
