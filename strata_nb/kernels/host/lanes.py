"""What kernels over rows need of vectors beside arithmetic: their sums, their ends, single lanes.

A sum over lanes halves them until one is left: lane i takes up lane i + 8, then i + 4, i + 2 and
i + 1. That order is part of what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types

from strata_nb.compiling import inlined, instruction
from strata_nb.kernels.host.vectors import Vector, call, only_lane, shuffler, where_less

_halves = [(shuffler(range(half)), shuffler(range(half, 2 * half))) for half in (8, 4, 2, 1)]
(low_8, high_8), (low_4, high_4), (low_2, high_2), (low_1, high_1) = _halves
across_8, across_4, across_2, across_1 = (
    shuffler([lane ^ step for lane in range(16)]) for step in (8, 4, 2, 1)
)  # each lane from that many lanes further


@inlined
def added_up(lanes: Any) -> Any:
    """Return the sum of 16 floats."""
    eight = low_8(lanes) + high_8(lanes)
    four = low_4(eight) + high_4(eight)
    two = low_2(four) + high_2(four)
    return only_lane(low_1(two) + high_1(two))


@inlined
def larger(a: Any, b: Any) -> Any:
    """Return the larger number in each lane of two vectors, a where b is NaN."""
    return where_less(a, b, b, a)


@inlined
def largest(lanes: Any) -> Any:
    """Return the largest of 16 numbers, none a NaN, as a vector of one."""
    eight = larger(low_8(lanes), high_8(lanes))
    four = larger(low_4(eight), high_4(eight))
    two = larger(low_2(four), high_2(four))
    return larger(low_1(two), high_1(two))


@instruction
def lane(_: Any, values: Any, number: Any) -> Any:
    """Return one number of a vector of floats."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        return builder.extract_element(*arguments)

    return types.float32(values, number), generate


@instruction
def piece(_: Any, values: Any, number: Any) -> Any:
    """Return 16 of 64 bytes: those of one of four rows."""
    result = Vector("u8", 16)

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        rows = builder.bitcast(arguments[0], ir.VectorType(ir.IntType(128), 4))
        return builder.bitcast(builder.extract_element(rows, arguments[1]), result.llvm)

    return result(values, number), generate


@instruction
def load_first(_: Any, vector: Any, address: Any, count: Any) -> Any:
    """Return a vector of the type of the first: `count` floats from an address, then zeros."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        _, place, number = arguments
        lanes = ir.VectorType(ir.IntType(64), vector.lanes)
        undefined, first = ir.Constant(lanes, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        count_everywhere = builder.shuffle_vector(
            builder.insert_element(undefined, number, first),
            undefined,
            ir.Constant(ir.VectorType(ir.IntType(32), vector.lanes), [0] * vector.lanes),
        )
        order = ir.Constant(lanes, list(range(vector.lanes)))
        return call(
            builder,
            f"llvm.masked.load.v{vector.lanes}f32.p0",
            vector.llvm,
            builder.inttoptr(place, vector.llvm.as_pointer()),
            ir.Constant(ir.IntType(32), 1),  # alignment
            builder.icmp_signed("<", order, count_everywhere),
            ir.Constant(vector.llvm, [0.0] * vector.lanes),
        )

    return vector(vector, types.int64, types.int64), generate
