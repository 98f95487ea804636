"""One step of a product: two units of eight rows of weights times one row of activations.

Sixteen lanes hold two units of eight rows: lanes 4r .. 4r + 3 are row r first unit, row r second,
row r + 4 first, row r + 4 second. Products of bytes come out as four lanes for each row and unit;
`transposed` adds the four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import types

from strata_nb.compiling import inlined, instruction
from strata_nb.kernels.host.instructions import dot_narrow, dot_wide
from strata_nb.kernels.host.lanes import load_first
from strata_nb.kernels.host.vectors import (
    FLOATS,
    INTEGERS,
    Vector,
    floats_of,
    fused,
    load_floats,
    loader,
    no_floats,
    no_integers,
    repeat_one_float,
    repeat_piece,
    repeat_two_floats,
    repeat_two_integers,
    shuffler,
)
from strata_nb.kernels.host.weights import Arithmetic
from strata_nb.kernels.quantised_rows import HALF_SUMS, SCALES, SUMS
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK
from strata_nb.raw_memory import store

FLOATS_LANES = FLOATS.lanes


def _lone(element: str, vector: Vector) -> Callable[..., Any]:
    """Return a function (address) that loads one number for the even lanes, zero for the odd."""
    scalar = ir.FloatType() if element == "f32" else ir.IntType(32)

    @instruction
    def load(_: Any, address: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            value = builder.load(builder.inttoptr(arguments[0], scalar.as_pointer()))
            value.align = 1
            number = ir.IntType(32)
            pair = builder.insert_element(
                ir.Constant(ir.VectorType(scalar, 2), [0, 0]), value, ir.Constant(number, 0)
            )
            lanes = ir.Constant(ir.VectorType(number, 16), [0, 1] * 8)
            return builder.shuffle_vector(pair, ir.Constant(pair.type, ir.Undefined), lanes)

        return vector(types.int64), generate

    return load


_lone_float = _lone("f32", FLOATS)
_lone_integer = _lone("i32", INTEGERS)


def _two_shuffled(lanes: Sequence[int]) -> Callable[..., Any]:
    """Return a function that picks lanes of two vectors, numbered through."""

    @instruction
    def shuffle(_: Any, left: Any, right: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 16), list(lanes))
            return builder.shuffle_vector(*arguments, mask)

        return left(left, right), generate

    return shuffle


def in_each_four(pattern: Sequence[int]) -> Callable[..., Any]:
    """Return a shuffle of two vectors within each four lanes; 4 .. 7 mean the second vector."""
    return _two_shuffled(
        [
            4 * (lane // 4) + pattern[lane % 4] % 4 + 16 * (pattern[lane % 4] // 4)
            for lane in range(16)
        ]
    )


low_pairs = in_each_four([0, 4, 1, 5])
high_pairs = in_each_four([2, 6, 3, 7])
low_halves = in_each_four([0, 1, 4, 5])
high_halves = in_each_four([2, 3, 6, 7])


@inlined
def transposed(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return in each four lanes the sums of four lanes of a, b, c and d."""
    ab = low_pairs(a, b) + high_pairs(a, b)
    cd = low_pairs(c, d) + high_pairs(c, d)
    return low_halves(ab, cd) + high_halves(ab, cd)


_even_lanes = shuffler([0, 4, 8, 12, 2, 6, 10, 14])
_odd_lanes = shuffler([1, 5, 9, 13, 3, 7, 11, 15])


@instruction
def store_first(_: Any, address: Any, values: Any, count: Any) -> Any:
    """Store the first `count` floats of a vector."""

    def generate(context: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        place, found, number = arguments
        for lane in range(values.lanes):
            inside = builder.icmp_signed(">", number, ir.Constant(number.type, lane))
            with builder.if_then(inside):
                here = builder.add(place, ir.Constant(place.type, 4 * lane))
                value = builder.extract_element(found, ir.Constant(ir.IntType(32), lane))
                pointer = builder.inttoptr(here, ir.FloatType().as_pointer())
                builder.store(value, pointer).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, values, types.int64), generate


@inlined
def load_some(place: int, count: int) -> Any:
    """Return 16 floats; where fewer are left, `count` and then zeros."""
    if count >= FLOATS_LANES:
        return load_floats(place)
    return load_first(no_floats(), place, count)


@inlined
def store_some(place: int, values: Any, count: int) -> None:
    """Store 16 floats, or the first `count` where that is fewer."""
    if count >= FLOATS_LANES:
        store(place, values)
    else:
        store_first(place, values, count)


_load_8_floats = loader(Vector("f32", GROUP_ROWS))


@inlined
def finish(place: int, total: Any, members: int, adds: int) -> None:
    """Store the results of the rows of a group, members of them, or add them to what is there."""
    result = _even_lanes(total) + _odd_lanes(total)
    if members == GROUP_ROWS:
        if adds:
            result = _load_8_floats(place) + result
        store(place, result)
    else:
        if adds:
            result = load_first(result, place, members) + result
        store_first(place, result, members)


# -- one step: two units of eight rows times one row of activations --------------------------------


@cache
def accumulator(kind: Arithmetic, *, lone: bool) -> Callable[..., Any]:
    """Return a function that adds a step to the sums; a lone step has only its first unit.

    (sums, quants, scales, minima, activation row, sub-blocks, step) -> sums
    """
    dot = dot_narrow if kind.narrow else dot_wide
    whole = kind.unit == SUB_BLOCK
    bias = kind.bias
    has_bias, has_minima = bias is not None, kind.has_minima
    shift = bias if bias is not None else 0
    two_integers = _lone_integer if lone else repeat_two_integers
    two_floats = (_lone_float if lone else repeat_two_floats) if whole else repeat_one_float
    scale_stride = 8 if whole else 4
    sums_start = SUMS if whole else HALF_SUMS

    @inlined
    def products(quants: Any, x: int, step: int) -> Any:
        zero = no_integers()
        if whole:
            a, b, c, d, e, f, g, h = quants
            place = x + 64 * step
            p, q = repeat_piece(place), repeat_piece(place + 16)
            r, s = repeat_piece(place + 32), repeat_piece(place + 48)
            return transposed(
                dot(dot(zero, a, p), b, q),
                dot(dot(zero, e, r), f, s),
                dot(dot(zero, c, p), d, q),
                dot(dot(zero, g, r), h, s),
            )
        a, b, c, d = quants
        p, q = repeat_piece(x + 32 * step), repeat_piece(x + 32 * step + 16)
        return transposed(dot(zero, a, p), dot(zero, b, q), dot(zero, c, p), dot(zero, d, q))

    @inlined
    def accumulate(
        total: Any, quants: Any, scale: Any, minimum: Any, x: int, sub_blocks: int, step: int
    ) -> Any:
        found = products(quants, x, step)
        factor = two_floats(x + SCALES * sub_blocks + scale_stride * step)
        if has_bias or has_minima:
            sums = two_integers(x + sums_start * sub_blocks + 8 * step)
            if has_bias:
                found = found - (sums << shift)
        total = fused(floats_of(found), scale * factor, total)
        if has_minima:
            total = fused(no_floats() - minimum, floats_of(sums) * factor, total)
        return total

    return accumulate
