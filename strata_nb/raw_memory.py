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
load_u64 = _reader(ir.IntType(64), types.uint64)
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


@instruction
def call_address(_: Any, function: Any, arguments: Any) -> Any:
    """Call a compiled function of int64 numbers by its address, with a tuple of them."""

    def generate(context: Any, builder: Any, _typed: Any, values: Sequence[Any]) -> Any:
        number = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [number] * arguments.count)
        words = [builder.extract_value(values[1], place) for place in range(arguments.count)]
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), words)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate
