"""SIMD vectors as values of Numba's language, so that a kernel reads like its formula.

Numba knows scalars and arrays. This file teaches it vectors of any element and length, `Vector`,
with operators and a few functions; everything becomes straight LLVM code without a call. Three are
everywhere in the kernels:

    BYTES      64 x uint8      quants of four rows, 16 values each: a *piece* of each row
    INTEGERS   16 x int32      sums of products, four lanes a piece
    FLOATS     16 x float32    the same, scaled

LLVM splits a vector that the machine lacks into ones that it has, so one source serves AVX-512,
AVX2, SSE and NEON. What it has no fast portable form for is in `instructions.py`.

Rejected: loops over arrays that LLVM vectorises. A draft reached 2.6 GB/s of weights where the same
product through vectors reached 19.7.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from strata_nb.compiling import instruction

_ELEMENTS: dict[str, ir.Type] = {
    "u1": ir.IntType(1),
    "u8": ir.IntType(8),
    "u16": ir.IntType(16),
    "i32": ir.IntType(32),
    "u64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
}


class Vector(types.Type):
    """Say the element and the lanes of an LLVM vector; equal ones are one type to Numba."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"Vector({element}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        """Return the LLVM type."""
        return ir.VectorType(_ELEMENTS[self.element], self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


BYTES = Vector("u8", 64)
INTEGERS = Vector("i32", 16)
FLOATS = Vector("f32", 16)


# -- operators -----------------------------------------------------------------------------------


def _splat(builder: Any, scalar: Any, vector: Vector) -> Any:
    """Return a vector whose lanes all hold the scalar, an integer of any width or a float."""
    element = _ELEMENTS[vector.element]
    if isinstance(element, ir.IntType) and scalar.type != element:
        wider = scalar.type.width < element.width
        scalar = builder.zext(scalar, element) if wider else builder.trunc(scalar, element)
    first = builder.insert_element(
        ir.Constant(vector.llvm, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(
        first,
        ir.Constant(vector.llvm, ir.Undefined),
        ir.Constant(ir.VectorType(ir.IntType(32), vector.lanes), [0] * vector.lanes),
    )


def _operator(symbol: Any, integer: str, floating: str | None = None) -> None:
    """Give vectors an operator, lane by lane; the right side may be a scalar for all lanes."""

    class Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, arguments: Sequence[Any], _: Any) -> Any:
            left, right = arguments
            if not isinstance(left, Vector):
                return None
            if isinstance(right, Vector) and right != left:
                return None
            if not isinstance(right, Vector | types.Integer | types.Float):
                return None
            return signature(left, left, right)

    infer_global(symbol)(Template)

    def lower(_: Any, builder: Any, typed: Any, values: Sequence[Any]) -> Any:
        left, right = values
        if not isinstance(typed.args[1], Vector):
            right = _splat(builder, right, typed.args[0])
        name = floating if typed.args[0].element == "f32" else integer
        if name is None:
            raise AssertionError(f"{symbol} of {typed.args[0]}")
        return getattr(builder, name)(left, right)

    for right in (Vector, types.Integer, types.Float):
        lower_builtin(symbol, Vector, right)(lower)


_operator(operator.and_, "and_")
_operator(operator.or_, "or_")
_operator(operator.xor, "xor")
_operator(operator.lshift, "shl")
_operator(operator.rshift, "lshr")  # of bits: zeros move in
_operator(operator.add, "add", "fadd")
_operator(operator.sub, "sub", "fsub")
_operator(operator.mul, "mul", "fmul")
_operator(operator.truediv, "sdiv", "fdiv")


# -- memory --------------------------------------------------------------------------------------


def _load(builder: Any, address: Any, loaded: ir.Type) -> Any:
    value = builder.load(builder.inttoptr(address, loaded.as_pointer()))
    value.align = 1
    return value


def shuffled(builder: Any, value: Any, lanes: Sequence[int]) -> Any:
    lanes = list(lanes)
    return builder.shuffle_vector(
        value,
        ir.Constant(value.type, ir.Undefined),
        ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes),
    )


def loader(vector: Vector) -> Callable[..., Any]:
    """Return a function (address) that loads such a vector; no alignment is needed."""

    @instruction
    def load(_: Any, address: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            return _load(builder, arguments[0], vector.llvm)

        return vector(types.int64), generate

    return load


load_bytes = loader(BYTES)
load_integers = loader(INTEGERS)
load_floats = loader(FLOATS)


def repeater(vector: Vector, scalar: str, count: int) -> Callable[..., Any]:
    """Return a function (address) that loads `count` scalars and repeats them to fill a vector."""
    element = _ELEMENTS[scalar]

    @instruction
    def repeat(_: Any, address: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            value = _load(builder, arguments[0], ir.VectorType(element, count))
            return shuffled(builder, value, [lane % count for lane in range(vector.lanes)])

        return vector(types.int64), generate

    return repeat


repeat_piece = repeater(BYTES, "u8", 16)
repeat_two_integers = repeater(INTEGERS, "i32", 2)
repeat_two_floats = repeater(FLOATS, "f32", 2)
repeat_one_float = repeater(FLOATS, "f32", 1)


# -- lanes ---------------------------------------------------------------------------------------


def shuffler(lanes: Sequence[int]) -> Callable[..., Any]:
    """Return a function (vector) that picks these lanes of a vector, in this order."""
    picked = tuple(lanes)

    @instruction
    def shuffle(_: Any, value: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            return shuffled(builder, arguments[0], picked)

        return Vector(value.element, len(picked))(value), generate

    return shuffle


def constant(vector: Vector, lanes: Sequence[int | float]) -> Callable[..., Any]:
    """Return a function () with these lanes as its value."""
    filled = list(lanes)

    @instruction
    def value(_: Any) -> Any:
        def generate(*_: Any) -> Any:
            return ir.Constant(vector.llvm, filled)

        return vector(), generate

    return value


no_integers = constant(INTEGERS, [0] * 16)
no_floats = constant(FLOATS, [0.0] * 16)


@instruction
def join(_: Any, low: Any, high: Any) -> Any:
    """Return one vector with the lanes of `low`, then those of `high`, which has as many."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        lanes = ir.Constant(
            ir.VectorType(ir.IntType(32), 2 * low.lanes), list(range(2 * low.lanes))
        )
        return builder.shuffle_vector(arguments[0], arguments[1], lanes)

    return Vector(low.element, 2 * low.lanes)(low, high), generate


def recast(vector: Vector) -> Callable[..., Any]:
    """Return a function that sees the bits of another vector as this type."""

    @instruction
    def cast(_: Any, value: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            return builder.bitcast(arguments[0], vector.llvm)

        return vector(value), generate

    return cast


as_bytes = recast(BYTES)


def converter(element: str, operation: str) -> Callable[..., Any]:
    """Return a function that converts each lane to `element` by an LLVM instruction."""

    @instruction
    def convert(_: Any, value: Any) -> Any:
        result = Vector(element, value.lanes)

        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            return getattr(builder, operation)(arguments[0], result.llvm)

        return result(value), generate

    return convert


widen_unsigned = converter("i32", "zext")
widen_signed = converter("i32", "sext")
narrow_to_bytes = converter("u8", "trunc")
floats_of = converter("f32", "sitofp")
truncated = converter("i32", "fptosi")  # of floats within the range of i32; no others


@instruction
def only_lane(_: Any, value: Any) -> Any:
    """Return the number in a vector of one float."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        return builder.extract_element(arguments[0], ir.Constant(ir.IntType(32), 0))

    return types.float32(value), generate


# -- arithmetic ----------------------------------------------------------------------------------


def call(builder: Any, name: str, result: ir.Type, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), list(arguments))


@instruction
def fused(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c with one rounding: of vectors of floats, or of float32 numbers."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        lanes = f"v{a.lanes}" if isinstance(a, Vector) else ""
        return call(builder, f"llvm.fma.{lanes}f32", arguments[0].type, *arguments)

    return a(a, b, c), generate


def rounding(name: str) -> Callable[..., Any]:
    """Return a function of a vector of floats, or of one float32, by an exact LLVM operation."""

    @instruction
    def function(_: Any, value: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            lanes = f"v{value.lanes}" if isinstance(value, Vector) else ""
            return call(builder, f"llvm.{name}.{lanes}f32", arguments[0].type, *arguments)

        return value(value), generate

    return function


nearest = rounding("rint")  # ties to even
root = rounding("sqrt")
magnitudes = rounding("fabs")


def _choice(predicate: str) -> Callable[..., Any]:
    """Return a function (a, b, then, otherwise) that chooses lane by lane: a PREDICATE b.

    a and b are two vectors of floats, or of integers (compared as signed ones).
    """

    @instruction
    def choose(_: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            left, right, first, second = arguments
            floats = a.element == "f32"
            compare = builder.fcmp_ordered if floats else builder.icmp_signed
            return builder.select(compare(predicate, left, right), first, second)

        return then(a, b, then, otherwise), generate

    return choose


where_less = _choice("<")
where_equal = _choice("==")


@instruction
def all_lanes(_: Any, vector: Any, value: Any) -> Any:
    """Return a vector of the type of the first whose lanes all hold a number."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        return _splat(builder, arguments[1], vector)

    return vector(vector, value), generate


@instruction
def count_ones(_: Any, value: Any) -> Any:
    """Return how many bits are set in each byte."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        return call(builder, f"llvm.ctpop.v{value.lanes}i8", value.llvm, arguments[0])

    return value(value), generate


@instruction
def negate_where(_: Any, values: Any, bits: Any) -> Any:
    """Return 64 bytes, negated where the bit of the same number is set in `bits` (8 bytes)."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        mask = builder.bitcast(arguments[1], ir.VectorType(ir.IntType(1), 64))
        negated = builder.sub(ir.Constant(BYTES.llvm, [0] * 64), arguments[0])
        return builder.select(mask, negated, arguments[0])

    return BYTES(values, bits), generate


@instruction
def gather_u32(_: Any, table: Any, indices: Any) -> Any:
    """Return 16 words of 32 bits from a table's address, as 64 bytes; indices are i32."""
    return BYTES(types.int64, indices), _gather(32)


@instruction
def gather_u64(_: Any, table: Any, indices: Any) -> Any:
    """Return 8 words of 64 bits from a table's address, as 64 bytes; indices are i32."""
    return BYTES(types.int64, indices), _gather(64)


def _gather(bits: int) -> Callable[..., Any]:
    """Look words up one by one: the gather of most machines is no faster, of some much slower."""

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        table, indices = arguments
        word = ir.IntType(bits)
        lanes = 512 // bits
        result = ir.Constant(ir.VectorType(word, lanes), ir.Undefined)
        for lane in range(lanes):
            number = ir.Constant(ir.IntType(32), lane)
            index = builder.zext(builder.extract_element(indices, number), ir.IntType(64))
            offset = builder.mul(index, ir.Constant(ir.IntType(64), bits // 8))
            found = _load(builder, builder.add(table, offset), word)
            result = builder.insert_element(result, found, number)
        return builder.bitcast(result, BYTES.llvm)

    return generate
