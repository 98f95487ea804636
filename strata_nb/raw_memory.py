"""Read and write numbers at plain addresses from compiled functions.

Kernels take addresses (int64), because what they read lies in one blob with other things, in memory
that no array owns. Nothing here checks anything: the launchers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types

from strata_nb.compiling import instruction


def _reader(llvm: ir.Type, result: Any) -> Callable[..., Any]:
    """Return a function (address) that loads a number; no alignment is needed."""

    @instruction
    def load(_: Any, address: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            value = builder.load(builder.inttoptr(arguments[0], llvm.as_pointer()))
            value.align = 1
            return value

        return result(types.int64), generate

    return load


load_u8 = _reader(ir.IntType(8), types.uint8)
load_u16 = _reader(ir.IntType(16), types.uint16)
load_u32 = _reader(ir.IntType(32), types.uint32)
load_i64 = _reader(ir.IntType(64), types.int64)
load_f32 = _reader(ir.FloatType(), types.float32)


@instruction
def store(_: Any, address: Any, value: Any) -> Any:
    """Store a number or a vector in as many bytes as its type has; no alignment is needed."""

    def generate(context: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        builder.store(arguments[1], pointer).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


@instruction
def prefetch(_: Any, address: Any) -> Any:
    """Ask for the cache line of an address that will be read soon; any address is harmless."""

    def generate(context: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        reads, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(function, [pointer, reads, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _caller(llvm: ir.Type, result: Any) -> Callable[..., Any]:
    """Return a function (address, numbers) that calls a function of int64 numbers."""

    @instruction
    def call(_: Any, function: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, _typed: Any, values: Sequence[Any]) -> Any:
            kind = ir.FunctionType(llvm, [ir.IntType(64)] * arguments.count)
            words = [builder.extract_value(values[1], place) for place in range(arguments.count)]
            found = builder.call(builder.inttoptr(values[0], kind.as_pointer()), words)
            return context.get_dummy_value() if result is types.void else found

        return result(types.int64, arguments), generate

    return call


call_address = _caller(ir.VoidType(), types.void)  # a compiled function, with a tuple of numbers
call_for_number = _caller(ir.IntType(64), types.int64)  # the same, of one that returns a number


# -- words that several threads change -------------------------------------------------------------


def _atomic(generate: Callable[[Any, Any, Any], Any], arguments: int) -> Callable[..., Any]:
    """Return a function (address, numbers ...) -> int64 by what `generate` emits."""

    def emit(_: Any, builder: Any, _typed: Any, values: Sequence[Any]) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return generate(builder, pointer, values[1:])

    if arguments == 1:

        @instruction
        def of_address(_: Any, address: Any) -> Any:
            return types.int64(types.int64), emit

        return of_address

    @instruction
    def with_number(_: Any, address: Any, number: Any) -> Any:
        return types.int64(types.int64, types.int64), emit

    return with_number


def _store(builder: Any, pointer: Any, numbers: Any) -> Any:
    builder.store_atomic(numbers[0], pointer, "seq_cst", 8)
    return numbers[0]


def _changing(operation: str) -> Callable[..., Any]:
    """Return a function (address, number) that changes a word and returns what it was."""
    return _atomic(
        lambda builder, pointer, numbers: builder.atomic_rmw(
            operation, pointer, numbers[0], "seq_cst"
        ),
        2,
    )


load_atomic = _atomic(lambda builder, pointer, _: builder.load_atomic(pointer, "seq_cst", 8), 1)
store_atomic = _atomic(_store, 2)
add_atomic = _changing("add")
swap_atomic = _changing("xchg")
