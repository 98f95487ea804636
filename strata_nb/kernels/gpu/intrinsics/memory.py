"""Loads and stores, of memory by address and of shared memory by offset; tables in the code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import (
    Emit,
    Intrinsic,
    as_tuple,
    constant,
    llvm,
    llvm_function,
    llvm_type,
)

_GLOBAL, _SHARED = 1, 3  # address spaces, the same on both vendors
SHARED_NAME = "strata_shared"


def in_global(builder: Any, address: Any, kind: Any) -> Any:
    """Return a pointer to a value of a kind at an address."""
    return builder.inttoptr(address, kind.as_pointer(_GLOBAL))


def in_shared(builder: Any, offset: Any, kind: Any) -> Any:
    """Return a pointer to a value of a kind at an offset in shared memory."""
    ir = llvm()
    module = builder.module
    block = module.globals.get(SHARED_NAME)
    if block is None:
        block = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), SHARED_NAME, _SHARED)
        block.linkage = "external"
        block.align = 16
    # In 64 bits: constants of an offset become part of the instructions that use it.
    place = builder.gep(block, [constant(0, 64), offset], inbounds=True)
    return builder.bitcast(place, kind.as_pointer(_SHARED))


def _amd_as_one(builder: Any, arguments: list[Any]) -> Any:
    """Say that the address may be another one, as far as LLVM is to know."""
    ir = llvm()
    kind = ir.IntType(8).as_pointer()
    name = "llvm.launder.invariant.group.p0"
    found = llvm_function(builder, name, ir.FunctionType(kind, [kind]))
    pointer = builder.inttoptr(arguments[0], kind)
    return builder.ptrtoint(builder.call(found, [pointer]), arguments[0].type)


def _load(stored: str, result: str, place: Callable[..., Any], *, fixed: bool) -> Emit:
    """Return what loads one value, widened with zeros to its result.

    place   makes a pointer of the argument
    fixed   nothing writes it while the kernel runs
    """

    def emit(builder: Any, arguments: list[Any]) -> Any:
        kind = llvm_type(stored)
        align = (32 if stored == "f32" else int(stored[1:])) // 8
        value = builder.load(place(builder, arguments[0], kind), align=align)
        if fixed:
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value if stored == result else builder.zext(value, llvm_type(result))

    return emit


def _load_vector(
    count: int, element: str, place: Callable[..., Any] = in_global, *, fixed: bool = True
) -> Emit:
    """Return what loads several neighbours at once; `place` and `fixed` as `_load` has them."""

    def emit(builder: Any, arguments: list[Any]) -> Any:
        ir = llvm()
        vector = ir.VectorType(llvm_type(element), count)
        value = builder.load(place(builder, arguments[0], vector), align=4 * count)
        if fixed:
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
        lanes = [builder.extract_element(value, constant(number)) for number in range(count)]
        return as_tuple(builder, lanes)

    return emit


def _store_vector(count: int, element: str, place: Callable[..., Any] = in_global) -> Emit:
    """Return what stores several neighbours at once; `place` as `_load` has it."""

    def emit(builder: Any, arguments: list[Any]) -> None:
        ir = llvm()
        address, *lanes = arguments
        kind = ir.VectorType(llvm_type(element), count)
        vector = ir.Constant(kind, ir.Undefined)
        for number, lane in enumerate(lanes):
            vector = builder.insert_element(vector, lane, constant(number))
        builder.store(vector, place(builder, address, kind), align=4 * count)

    return emit


def _store(stored: str, place: Callable[..., Any]) -> Emit:
    def emit(builder: Any, arguments: list[Any]) -> None:
        kind = llvm_type(stored)
        value = arguments[1]
        if value.type != kind:
            value = builder.trunc(value, kind)
        align = (32 if stored == "f32" else int(stored[1:])) // 8
        builder.store(value, place(builder, arguments[0], kind), align=align)

    return emit


# The same address, whose parts a compiler does not see. AMD's keeps each sum of some of them that a
# loop does not change in registers of its own; NVIDIA's computes them again.
as_one = Intrinsic(
    "as_one", "i64(i64)", ptx=lambda builder, arguments: arguments[0], amdgpu=_amd_as_one
)

# Of memory that a kernel may also write. Addresses are multiples of the size.
load_f32 = Intrinsic("load_f32", "f32(i64)", body=_load("f32", "f32", in_global, fixed=False))
load_i64 = Intrinsic("load_i64", "i64(i64)", body=_load("i64", "i64", in_global, fixed=False))
load_i32 = Intrinsic("load_i32", "i32(i64)", body=_load("i32", "i32", in_global, fixed=False))
load_u16 = Intrinsic("load_u16", "i32(i64)", body=_load("i16", "i32", in_global, fixed=False))
load_u8 = Intrinsic("load_u8", "i32(i64)", body=_load("i8", "i32", in_global, fixed=False))
load_2xi32 = Intrinsic("load_2xi32", "2xi32(i64)", body=_load_vector(2, "i32", fixed=False))
load_4xi32 = Intrinsic("load_4xi32", "4xi32(i64)", body=_load_vector(4, "i32", fixed=False))
load_4xf32 = Intrinsic("load_4xf32", "4xf32(i64)", body=_load_vector(4, "f32", fixed=False))

# Of memory that nothing writes while the kernel runs, such as weights. What the launch in front
# writes is none of it: it may still run when this kernel begins.
fetch_f32 = Intrinsic("fetch_f32", "f32(i64)", body=_load("f32", "f32", in_global, fixed=True))
fetch_i32 = Intrinsic("fetch_i32", "i32(i64)", body=_load("i32", "i32", in_global, fixed=True))
fetch_u16 = Intrinsic("fetch_u16", "i32(i64)", body=_load("i16", "i32", in_global, fixed=True))
fetch_u8 = Intrinsic("fetch_u8", "i32(i64)", body=_load("i8", "i32", in_global, fixed=True))
fetch_2xi32 = Intrinsic("fetch_2xi32", "2xi32(i64)", body=_load_vector(2, "i32"))
fetch_4xi32 = Intrinsic("fetch_4xi32", "4xi32(i64)", body=_load_vector(4, "i32"))
fetch_4xf32 = Intrinsic("fetch_4xf32", "4xf32(i64)", body=_load_vector(4, "f32"))

store_f32 = Intrinsic("store_f32", "void(i64, f32)", body=_store("f32", in_global))
store_i64 = Intrinsic("store_i64", "void(i64, i64)", body=_store("i64", in_global))
store_i32 = Intrinsic("store_i32", "void(i64, i32)", body=_store("i32", in_global))
store_i16 = Intrinsic("store_i16", "void(i64, i32)", body=_store("i16", in_global))
store_i8 = Intrinsic("store_i8", "void(i64, i32)", body=_store("i8", in_global))
store_2xi32 = Intrinsic("store_2xi32", "void(i64, i32, i32)", body=_store_vector(2, "i32"))
store_4xi32 = Intrinsic(
    "store_4xi32", "void(i64, i32, i32, i32, i32)", body=_store_vector(4, "i32")
)

shared_load_f32 = Intrinsic(
    "shared_load_f32", "f32(i64)", body=_load("f32", "f32", in_shared, fixed=False)
)
shared_load_i32 = Intrinsic(
    "shared_load_i32", "i32(i64)", body=_load("i32", "i32", in_shared, fixed=False)
)
shared_load_i64 = Intrinsic(
    "shared_load_i64", "i64(i64)", body=_load("i64", "i64", in_shared, fixed=False)
)
shared_load_2xi32 = Intrinsic(
    "shared_load_2xi32", "2xi32(i64)", body=_load_vector(2, "i32", in_shared, fixed=False)
)
shared_load_2xf32 = Intrinsic(
    "shared_load_2xf32", "2xf32(i64)", body=_load_vector(2, "f32", in_shared, fixed=False)
)
shared_load_4xi32 = Intrinsic(
    "shared_load_4xi32", "4xi32(i64)", body=_load_vector(4, "i32", in_shared, fixed=False)
)
shared_load_4xf32 = Intrinsic(
    "shared_load_4xf32", "4xf32(i64)", body=_load_vector(4, "f32", in_shared, fixed=False)
)
shared_store_f32 = Intrinsic("shared_store_f32", "void(i64, f32)", body=_store("f32", in_shared))
shared_store_i32 = Intrinsic("shared_store_i32", "void(i64, i32)", body=_store("i32", in_shared))
shared_store_i64 = Intrinsic("shared_store_i64", "void(i64, i64)", body=_store("i64", in_shared))
shared_store_4xi32 = Intrinsic(
    "shared_store_4xi32", "void(i64, i32, i32, i32, i32)", body=_store_vector(4, "i32", in_shared)
)


def _global_add(builder: Any, arguments: list[Any]) -> None:
    place = in_global(builder, arguments[0], arguments[1].type)
    builder.atomic_rmw("add", place, arguments[1], "monotonic")


# Adds to what is there, whoever adds beside it: later launches see the sum.
add_i64 = Intrinsic("add_i64", "void(i64, i64)", body=_global_add)


def _shared_add(builder: Any, arguments: list[Any]) -> None:
    place = in_shared(builder, arguments[0], arguments[1].type)
    builder.atomic_rmw("add", place, arguments[1], "monotonic")


# Adds to what is there, whoever adds beside it; a barrier shows the sum.
shared_add_i64 = Intrinsic("shared_add_i64", "void(i64, i64)", body=_shared_add)


class ConstantTable(Intrinsic):
    """A table of 32-bit words that is part of a kernel's code: called with an index, a word.

    words   int32, signed, as a tuple
    """

    def __init__(self, name: str, words: tuple[int, ...]) -> None:
        self.words = words
        super().__init__(name, "i32(i64)", body=self._emit)

    def _emit(self, builder: Any, arguments: list[Any]) -> Any:
        ir = llvm()
        word, module = ir.IntType(32), builder.module
        name = f"strata_table_{self.name}"
        table = module.globals.get(name)
        if table is None:
            kind = ir.ArrayType(word, len(self.words))
            table = ir.GlobalVariable(module, kind, name, _GLOBAL)
            table.initializer = ir.Constant(kind, [constant(one) for one in self.words])
            table.global_constant, table.linkage, table.align = True, "internal", 16
        place = builder.gep(table, [constant(0, 64), arguments[0]], inbounds=True)
        return builder.load(place, align=4)
