"""Name every instruction that a GPU kernel uses and Python lacks.

Kernels are plain Python functions over 64-bit addresses and these names; they import neither Numba
nor a vendor. Who gives the names a meaning:

    compile.py                   emits LLVM code, one body for NVIDIA and one for AMD
    tests/gpu_simulator.py       runs a kernel lane by lane, in Python

so that a kernel is written once. A name stands for one body on both vendors where LLVM has a word
for it (loads, conversions); where it has none, `ptx` holds the instruction for NVIDIA and `amdgpu`
the code for AMD. A warp has 32 lanes everywhere.

Types of the signatures: i32, i64, f32, and tuples of them. Integers are signed.

Shared memory is one block of bytes, as many as the launch asks for; `shared_...` take offsets into
it, not addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

WARP = 32

Emit = Callable[[Any, list[Any]], Any]
"""Emit LLVM code with a builder for arguments, and return the result (None for a void one)."""


class Intrinsic:
    """Hold a name, its signature and what it becomes; kernels call it.

    result      type of the result: "i32", "f32", "4xi32" for a tuple of four, "void"
    arguments   types of the arguments
    body        emits code that both vendors' LLVM understands; None where the two differ
    ptx         for NVIDIA: instruction and constraints of an inline assembly, or emits code; of an
                instruction `since(90, ...)` older cards have nothing
    amdgpu      for AMD: emits code
    """

    def __init__(
        self,
        name: str,
        signature: str,
        *,
        body: Emit | None = None,
        ptx: tuple[str, str] | Emit | None = None,
        amdgpu: Emit | None = None,
    ) -> None:
        self.name = name
        result, _, rest = signature.partition("(")
        self.result = result
        self.arguments = tuple(part.strip() for part in rest.rstrip(")").split(",") if part.strip())
        self.body, self.ptx, self.amdgpu = body, ptx, amdgpu

    def __repr__(self) -> str:
        return f"{self.result} {self.name}({', '.join(self.arguments)})"

    def __call__(self, *arguments: Any) -> Any:
        """Exist for those who read types: only a compiled or simulated kernel can call it."""
        raise TypeError(f"{self!r} has a meaning in kernels only, called with {arguments}")


SINCE = "//since {}: "  # before an instruction in PTX: a comment until it is linked


def since(target: int, instruction: str, constraints: str) -> tuple[str, str]:
    """Return an instruction without a result that targets have from `target` on, such as 90.

    Nothing that reads or writes memory is moved across it.
    """
    joined = ",".join(part for part in (constraints, "~{memory}") if part)
    return SINCE.format(target) + instruction, joined


UNTIL = "//until {}: "  # before what takes its place in PTX for older targets


def by_age(target: int, newer: str, older: Sequence[str], constraints: str) -> tuple[str, str]:
    """Return an instruction that targets have from `target` on, with others in its place before.

    Both have the same operands; `older` write some of their results before they have read all.
    """
    lines = [SINCE.format(target) + newer, *(UNTIL.format(target) + one for one in older)]
    return "\n\t".join(lines), constraints


def _nothing(builder: Any, arguments: list[Any]) -> None:
    """Emit nothing."""


def _ir() -> Any:
    from llvmlite import ir  # not before something is compiled

    return ir


def llvm_type(name: str) -> Any:
    """Return the LLVM type of a type name."""
    ir = _ir()
    if name == "void":
        return ir.VoidType()
    if "x" in name:
        count, _, element = name.partition("x")
        return ir.LiteralStructType([llvm_type(element)] * int(count))
    floats = {"f32": ir.FloatType(), "f64": ir.DoubleType()}
    return floats[name] if name in floats else ir.IntType(int(name[1:]))


# -- memory ----------------------------------------------------------------------------------------

_GLOBAL, _SHARED = 1, 3  # address spaces, the same on both vendors
SHARED_NAME = "strata_shared"


def _global(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer(_GLOBAL))


def _shared(builder: Any, offset: Any, kind: Any) -> Any:
    ir = _ir()
    module = builder.module
    block = module.globals.get(SHARED_NAME)
    if block is None:
        block = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), SHARED_NAME, _SHARED)
        block.linkage = "external"
        block.align = 16
    # In 64 bits: constants of an offset become part of the instructions that use it.
    place = builder.gep(block, [ir.Constant(ir.IntType(64), 0), offset], inbounds=True)
    return builder.bitcast(place, kind.as_pointer(_SHARED))


def shared_place(builder: Any, offset: Any) -> Any:
    """Emit the address of an offset within shared memory, as instructions of PTX take it."""
    return builder.ptrtoint(_shared(builder, offset, llvm_type("i32")), llvm_type("i32"))


def _amd_as_one(builder: Any, arguments: list[Any]) -> Any:
    """Say that the address may be another one, as far as LLVM is to know."""
    ir = _ir()
    kind = ir.IntType(8).as_pointer()
    name = "llvm.launder.invariant.group.p0"
    found = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(kind, [kind]), name
    )
    pointer = builder.inttoptr(arguments[0], kind)
    return builder.ptrtoint(builder.call(found, [pointer]), arguments[0].type)


def _load(stored: str, result: str, place: Callable[..., Any], *, constant: bool) -> Emit:
    """Return what loads one value, widened with zeros to its result.

    constant   nothing writes it while the kernel runs
    """

    def emit(builder: Any, arguments: list[Any]) -> Any:
        kind = llvm_type(stored)
        align = (32 if stored == "f32" else int(stored[1:])) // 8
        value = builder.load(place(builder, arguments[0], kind), align=align)
        if constant:
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value if stored == result else builder.zext(value, llvm_type(result))

    return emit


def _load_vector(
    count: int, element: str, place: Callable[..., Any] = _global, *, constant: bool = True
) -> Emit:
    """Return what loads several neighbours at once; `place` and `constant` as `_load` has them."""

    def emit(builder: Any, arguments: list[Any]) -> Any:
        ir = _ir()
        vector = ir.VectorType(llvm_type(element), count)
        value = builder.load(place(builder, arguments[0], vector), align=4 * count)
        if constant:
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
        lanes = [
            builder.extract_element(value, ir.Constant(ir.IntType(32), n)) for n in range(count)
        ]
        found = ir.Constant(llvm_type(f"{count}x{element}"), ir.Undefined)
        for number, lane in enumerate(lanes):
            found = builder.insert_value(found, lane, number)
        return found

    return emit


def _store_vector(count: int, element: str, place: Callable[..., Any] = _global) -> Emit:
    """Return what stores several neighbours at once; `place` as `_load` has it."""

    def emit(builder: Any, arguments: list[Any]) -> None:
        ir = _ir()
        address, *lanes = arguments
        kind = ir.VectorType(llvm_type(element), count)
        vector = ir.Constant(kind, ir.Undefined)
        for number, lane in enumerate(lanes):
            vector = builder.insert_element(vector, lane, ir.Constant(ir.IntType(32), number))
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
load_f32 = Intrinsic("load_f32", "f32(i64)", body=_load("f32", "f32", _global, constant=False))
load_i64 = Intrinsic("load_i64", "i64(i64)", body=_load("i64", "i64", _global, constant=False))
load_i32 = Intrinsic("load_i32", "i32(i64)", body=_load("i32", "i32", _global, constant=False))
load_u16 = Intrinsic("load_u16", "i32(i64)", body=_load("i16", "i32", _global, constant=False))
load_u8 = Intrinsic("load_u8", "i32(i64)", body=_load("i8", "i32", _global, constant=False))
load_2xi32 = Intrinsic("load_2xi32", "2xi32(i64)", body=_load_vector(2, "i32", constant=False))
load_4xi32 = Intrinsic("load_4xi32", "4xi32(i64)", body=_load_vector(4, "i32", constant=False))
load_4xf32 = Intrinsic("load_4xf32", "4xf32(i64)", body=_load_vector(4, "f32", constant=False))

# Of memory that nothing writes while the kernel runs, such as weights. What the launch in front
# writes is none of it: it may still run when this kernel begins.
fetch_f32 = Intrinsic("fetch_f32", "f32(i64)", body=_load("f32", "f32", _global, constant=True))
fetch_i32 = Intrinsic("fetch_i32", "i32(i64)", body=_load("i32", "i32", _global, constant=True))
fetch_u16 = Intrinsic("fetch_u16", "i32(i64)", body=_load("i16", "i32", _global, constant=True))
fetch_u8 = Intrinsic("fetch_u8", "i32(i64)", body=_load("i8", "i32", _global, constant=True))
fetch_2xi32 = Intrinsic("fetch_2xi32", "2xi32(i64)", body=_load_vector(2, "i32"))
fetch_4xi32 = Intrinsic("fetch_4xi32", "4xi32(i64)", body=_load_vector(4, "i32"))
fetch_4xf32 = Intrinsic("fetch_4xf32", "4xf32(i64)", body=_load_vector(4, "f32"))

store_f32 = Intrinsic("store_f32", "void(i64, f32)", body=_store("f32", _global))
store_i64 = Intrinsic("store_i64", "void(i64, i64)", body=_store("i64", _global))
store_i32 = Intrinsic("store_i32", "void(i64, i32)", body=_store("i32", _global))
store_i16 = Intrinsic("store_i16", "void(i64, i32)", body=_store("i16", _global))
store_i8 = Intrinsic("store_i8", "void(i64, i32)", body=_store("i8", _global))
store_4xi32 = Intrinsic(
    "store_4xi32", "void(i64, i32, i32, i32, i32)", body=_store_vector(4, "i32")
)

shared_load_f32 = Intrinsic(
    "shared_load_f32", "f32(i64)", body=_load("f32", "f32", _shared, constant=False)
)
shared_load_i32 = Intrinsic(
    "shared_load_i32", "i32(i64)", body=_load("i32", "i32", _shared, constant=False)
)
shared_load_i64 = Intrinsic(
    "shared_load_i64", "i64(i64)", body=_load("i64", "i64", _shared, constant=False)
)
shared_load_2xi32 = Intrinsic(
    "shared_load_2xi32", "2xi32(i64)", body=_load_vector(2, "i32", _shared, constant=False)
)
shared_load_2xf32 = Intrinsic(
    "shared_load_2xf32", "2xf32(i64)", body=_load_vector(2, "f32", _shared, constant=False)
)
shared_load_4xi32 = Intrinsic(
    "shared_load_4xi32", "4xi32(i64)", body=_load_vector(4, "i32", _shared, constant=False)
)
shared_load_4xf32 = Intrinsic(
    "shared_load_4xf32", "4xf32(i64)", body=_load_vector(4, "f32", _shared, constant=False)
)
shared_store_f32 = Intrinsic("shared_store_f32", "void(i64, f32)", body=_store("f32", _shared))
shared_store_i32 = Intrinsic("shared_store_i32", "void(i64, i32)", body=_store("i32", _shared))
shared_store_i64 = Intrinsic("shared_store_i64", "void(i64, i64)", body=_store("i64", _shared))
shared_store_4xi32 = Intrinsic(
    "shared_store_4xi32", "void(i64, i32, i32, i32, i32)", body=_store_vector(4, "i32", _shared)
)


# Copies of 16, 8 or 4 bytes of memory that nothing writes into shared memory: to an offset, from an
# address, both multiples of the size. They are there behind `await_copies`, of other threads behind
# a barrier too. A thread waits for all that it asked for; or, with `await_older_copies`, for all
# groups, which `end_copies` ends, but the last one. Cards before 8.0 copy at once.


def _nvidia_copy(size: int) -> Emit:
    """Emit a copy that goes on beside the thread; targets before 8.0 load and store."""
    words = [f"w{number}" for number in range(size // 4)]
    vector = f".v{len(words)}" if len(words) > 1 else ""
    several = f"{{{', '.join(words)}}}" if len(words) > 1 else words[0]
    older = (
        f"{{ .reg .b32 {', '.join(words)}; ld.global{vector}.b32 {several}, [$1]; "
        f"st.shared{vector}.b32 [$0], {several}; }}"
    )
    newer = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0], [$1], {size};"
    text, constraints = by_age(80, newer, [older], "r,l,~{memory}")

    def emit(builder: Any, arguments: list[Any]) -> None:
        ir = _ir()
        offset, address = arguments
        place = builder.ptrtoint(_shared(builder, offset, llvm_type("i32")), llvm_type("i32"))
        kind = ir.FunctionType(ir.VoidType(), [place.type, address.type])
        builder.call(ir.InlineAsm(kind, _escaped(text), constraints, True), [place, address])

    return emit


def _escaped(text: str) -> str:
    """Return the text of an inline assembly of several lines as LLVM reads it."""
    return text.replace("\n", "\\0A").replace("\t", "\\09")


def _amd_copy(size: int) -> Emit:
    def emit(builder: Any, arguments: list[Any]) -> None:
        offset, address = arguments
        kind = _ir().VectorType(llvm_type("i32"), size // 4)
        found = builder.load(_global(builder, address, kind), align=size)
        builder.store(found, _shared(builder, offset, kind), align=size)

    return emit


def _copy(size: int) -> Intrinsic:
    return Intrinsic(
        f"copy_{size}", "void(i64, i64)", ptx=_nvidia_copy(size), amdgpu=_amd_copy(size)
    )


copy_16, copy_8, copy_4 = _copy(16), _copy(8), _copy(4)
await_copies = Intrinsic(
    "await_copies", "void()", ptx=since(80, "cp.async.wait_all;", ""), amdgpu=_nothing
)
end_copies = Intrinsic(
    "end_copies", "void()", ptx=since(80, "cp.async.commit_group;", ""), amdgpu=_nothing
)
await_older_copies = Intrinsic(
    "await_older_copies", "void()", ptx=since(80, "cp.async.wait_group 1;", ""), amdgpu=_nothing
)


def _global_add(builder: Any, arguments: list[Any]) -> None:
    place = _global(builder, arguments[0], arguments[1].type)
    builder.atomic_rmw("add", place, arguments[1], "monotonic")


# Adds to what is there, whoever adds beside it: later launches see the sum.
add_i64 = Intrinsic("add_i64", "void(i64, i64)", body=_global_add)


def _shared_add(builder: Any, arguments: list[Any]) -> None:
    place = _shared(builder, arguments[0], arguments[1].type)
    builder.atomic_rmw("add", place, arguments[1], "monotonic")


# Adds to what is there, whoever adds beside it; a barrier shows the sum.
shared_add_i64 = Intrinsic("shared_add_i64", "void(i64, i64)", body=_shared_add)


def _amd_arrive(builder: Any, arguments: list[Any]) -> Any:
    place = _global(builder, arguments[0], arguments[1].type)
    return builder.atomic_rmw("uinc_wrap", place, arguments[1], "acq_rel")


# Counts a block that has written its part: adds 1 to an i32, or makes it 0 where it is the second
# argument, and returns what it was. Behind a barrier one thread of each block calls it, with the
# number of the other blocks. Who gets that number is the last: behind another barrier its block
# reads what all of them wrote. And the word is 0 again.
arrive = Intrinsic(
    "arrive",
    "i32(i64, i32)",
    ptx=("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "=r,l,r,~{memory}"),
    amdgpu=_amd_arrive,
)


class ConstantTable(Intrinsic):
    """A table of 32-bit words that is part of a kernel's code: called with an index, a word.

    words   int32, signed, as a tuple
    """

    def __init__(self, name: str, words: tuple[int, ...]) -> None:
        self.words = words
        super().__init__(name, "i32(i64)", body=self._emit)

    def _emit(self, builder: Any, arguments: list[Any]) -> Any:
        ir = _ir()
        word, module = ir.IntType(32), builder.module
        name = f"strata_table_{self.name}"
        table = module.globals.get(name)
        if table is None:
            kind = ir.ArrayType(word, len(self.words))
            table = ir.GlobalVariable(module, kind, name, _GLOBAL)
            table.initializer = ir.Constant(kind, [ir.Constant(word, one) for one in self.words])
            table.global_constant, table.linkage, table.align = True, "internal", 16
        place = builder.gep(table, [ir.Constant(ir.IntType(64), 0), arguments[0]], inbounds=True)
        return builder.load(place, align=4)


# -- launches that overlap -------------------------------------------------------------------------
#
# A card may start a kernel while the one before it still runs. Every kernel waits here for all that
# was launched before, and lets the next one start: behind the wait, so that of three kernels in a
# row the first has ended before the third begins. Before the wait a kernel may read what was
# written two launches ago or earlier, and weights.

AWAIT_PREVIOUS, _ORDERED = since(90, "griddepcontrol.wait; griddepcontrol.launch_dependents;", "")
await_previous = Intrinsic(
    "await_previous", "void()", ptx=(AWAIT_PREVIOUS, _ORDERED), amdgpu=_nothing
)

# Wait until a word that was loaded is there. Without it a compiler may move loads that stand before
# `await_previous` behind it: they would be right there, and late.
hold = Intrinsic(
    "hold",
    "void(i32)",
    ptx=since(90, "{ .reg .pred p; setp.eq.s32 p, $0, 1; @p nanosleep.u32 0; }", "r"),
    amdgpu=_nothing,
)


def _same(_: Any, arguments: list[Any]) -> Any:
    return arguments[0]


# The same number, computed where this stands and once: a compiler moves it to where it is used
# otherwise, behind a wait in which there is time for it, or computes it again in each turn of a
# loop. LLVM moves no load over it.
once_i32 = Intrinsic(
    "once_i32", "i32(i32)", ptx=("mov.b32 $0, $1;", "=r,r,~{memory}"), amdgpu=_same
)
once_i64 = Intrinsic(
    "once_i64", "i64(i64)", ptx=("mov.b64 $0, $1;", "=l,l,~{memory}"), amdgpu=_same
)

# Loads in front of it stay there: without it a compiler that saves registers asks for some of them
# when others have come. All lanes of a warp meet.
keep = Intrinsic("keep", "void()", ptx=since(90, "bar.warp.sync -1;", ""), amdgpu=_nothing)

# Ask for bytes to be brought into the card's cache: address and size are multiples of 16. It
# changes nothing but the time that loads of them take.
prefetch = Intrinsic(
    "prefetch",
    "void(i64, i32)",
    ptx=since(90, "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r"),
    amdgpu=_nothing,
)


# -- with the host ---------------------------------------------------------------------------------
#
# Host and card exchange words of memory that both have mapped. Who has written all that a word
# stands for stores it; who has loaded it sees all that. Behind a barrier that holds for the whole
# block, before the store and after the load.


def _amd_load_system(builder: Any, arguments: list[Any]) -> Any:
    place = _global(builder, arguments[0], llvm_type("i64"))
    return builder.load_atomic(place, "acquire", 8)


def _amd_store_system(builder: Any, arguments: list[Any]) -> None:
    place = _global(builder, arguments[0], llvm_type("i64"))
    builder.store_atomic(arguments[1], place, "release", 8)


load_system_i64 = Intrinsic(
    "load_system_i64",
    "i64(i64)",
    ptx=("ld.acquire.sys.global.s64 $0, [$1];", "=l,l,~{memory}"),
    amdgpu=_amd_load_system,
)
store_system_i64 = Intrinsic(
    "store_system_i64",
    "void(i64, i64)",
    ptx=("st.release.sys.global.s64 [$0], $1;", "l,l,~{memory}"),
    amdgpu=_amd_store_system,
)

_AMD_REAL_TIME = 0x83  # a message that asks for the time, in ticks of 10 nanoseconds
_AMD_TICK_NS = 10


def _amd_nanoseconds(builder: Any, _: list[Any]) -> Any:
    ir = _ir()
    message = ir.Constant(ir.IntType(32), _AMD_REAL_TIME)
    ticks = _call("llvm.amdgcn.s.sendmsg.rtn.i64", "i64(i32)")(builder, [message])
    return builder.mul(ticks, ir.Constant(ir.IntType(64), _AMD_TICK_NS))


# A time, the same for the whole card, that moves on in steps of a microsecond or less.
nanoseconds = Intrinsic(
    "nanoseconds",
    "i64()",
    ptx=("mov.u64 $0, %globaltimer;", "=l,~{memory}"),
    amdgpu=_amd_nanoseconds,
)


# -- who a lane is ---------------------------------------------------------------------------------


def _call(name: str, signature: str) -> Emit:
    """Return what calls a function of LLVM by its name."""
    result, _, rest = signature.partition("(")
    kinds = [part.strip() for part in rest.rstrip(")").split(",") if part.strip()]

    def emit(builder: Any, arguments: list[Any]) -> Any:
        ir = _ir()
        kind = ir.FunctionType(llvm_type(result), [llvm_type(one) for one in kinds])
        found = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(found, arguments)

    return emit


def _number(name: str, most: int) -> Emit:
    """Return what calls a function of LLVM that returns a number from 0 to `most`: knowing that,
    LLVM computes with it in 32 bits."""
    call = _call(name, "i32()")

    def emit(builder: Any, arguments: list[Any]) -> Any:
        ir = _ir()
        found = call(builder, arguments)
        limits = [ir.Constant(ir.IntType(32), limit) for limit in (0, most + 1)]
        found.set_metadata("range", builder.module.add_metadata(limits))
        return found

    return emit


def _who(name: str, most: int, nvidia: str, amd: str) -> Intrinsic:
    ptx = _number(f"llvm.nvvm.read.ptx.sreg.{nvidia}", most)
    return Intrinsic(name, "i32()", ptx=ptx, amdgpu=_number(f"llvm.amdgcn.{amd}", most))


_LAST_THREAD, _LAST_BLOCK = 1023, 2**31 - 2
thread_index = _who("thread_index", _LAST_THREAD, "tid.x", "workitem.id.x")
block_x = _who("block_x", _LAST_BLOCK, "ctaid.x", "workgroup.id.x")
block_y = _who("block_y", _LAST_BLOCK, "ctaid.y", "workgroup.id.y")
block_z = _who("block_z", _LAST_BLOCK, "ctaid.z", "workgroup.id.z")


_GRID_Z = 20  # where the packet of a launch has it, in threads, of which a block has one


def _amd_blocks_z(builder: Any, _: list[Any]) -> Any:
    ir = _ir()
    kind = ir.FunctionType(ir.IntType(8).as_pointer(4), [])
    name = "llvm.amdgcn.dispatch.ptr"
    packet = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    place = builder.gep(builder.call(packet, []), [ir.Constant(ir.IntType(64), _GRID_Z)])
    return builder.load(builder.bitcast(place, ir.IntType(32).as_pointer(4)), align=4)


# How many blocks the grid has in z.
blocks_z = Intrinsic(
    "blocks_z",
    "i32()",
    ptx=_call("llvm.nvvm.read.ptx.sreg.nctaid.z", "i32()"),
    amdgpu=_amd_blocks_z,
)


# -- lanes together --------------------------------------------------------------------------------


def _amd_barrier(builder: Any, _: list[Any]) -> None:
    builder.fence("release", targetscope="workgroup")
    _call("llvm.amdgcn.s.barrier", "void()")(builder, [])
    builder.fence("acquire", targetscope="workgroup")


# All threads of the block wait for each other, and see what the others wrote.
barrier = Intrinsic(
    "barrier",
    "void()",
    ptx=_call("llvm.nvvm.barrier0", "void()"),
    amdgpu=_amd_barrier,
)


_BUTTERFLY = 3  # the mode of a shuffle in which lanes name each other by an xor


def _nvidia_shuffle(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    i32 = ir.IntType(32)
    value, other = arguments
    floats = value.type == ir.FloatType()
    bits = builder.bitcast(value, i32) if floats else value
    kind = ir.FunctionType(ir.LiteralStructType([i32, ir.IntType(1)]), [i32] * 5)
    name = "llvm.nvvm.shfl.sync.i32"
    found = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    all_lanes, mode, last = (ir.Constant(i32, word) for word in (-1, _BUTTERFLY, WARP - 1))
    moved = builder.extract_value(builder.call(found, [all_lanes, mode, bits, other, last]), 0)
    return builder.bitcast(moved, value.type) if floats else moved


def _amd_lane(builder: Any) -> Any:
    """Return the number of a lane among those that run together."""
    ir = _ir()
    low = _call("llvm.amdgcn.mbcnt.lo", "i32(i32, i32)")
    high = _call("llvm.amdgcn.mbcnt.hi", "i32(i32, i32)")
    all_lanes, zero = ir.Constant(ir.IntType(32), -1), ir.Constant(ir.IntType(32), 0)
    return high(builder, [all_lanes, low(builder, [all_lanes, zero])])


def _amd_word_of(builder: Any, word: Any, lane: Any, further: int) -> Any:
    """Return a word of the lane that is so much further than another."""
    ir = _ir()
    source = builder.add(lane, ir.Constant(ir.IntType(32), further))
    address = builder.shl(source, ir.Constant(ir.IntType(32), 2))
    return _call("llvm.amdgcn.ds.bpermute", "i32(i32, i32)")(builder, [address, word])


def _amd_shuffle(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    i32 = ir.IntType(32)
    value, other = arguments
    floats = value.type == ir.FloatType()
    bits = builder.bitcast(value, i32) if floats else value
    lane = _amd_lane(builder)
    within = builder.and_(lane, ir.Constant(i32, WARP - 1))
    first = builder.sub(lane, within)  # of this warp: some cards run 64 lanes together
    moved = _amd_word_of(builder, bits, builder.add(first, builder.xor(within, other)), 0)
    return builder.bitcast(moved, value.type) if floats else moved


# The value of the lane whose number is this one's xor the second argument. All 32 lanes take part.
shuffle_xor_f32 = Intrinsic(
    "shuffle_xor_f32", "f32(f32, i32)", ptx=_nvidia_shuffle, amdgpu=_amd_shuffle
)
shuffle_xor_i32 = Intrinsic(
    "shuffle_xor_i32", "i32(i32, i32)", ptx=_nvidia_shuffle, amdgpu=_amd_shuffle
)


# -- arithmetic ------------------------------------------------------------------------------------


def _amd_dp4a(*, signed: bool) -> Emit:
    """Multiply byte by byte in plain LLVM: a card with an instruction for it finds it itself.

    signed   whether the first bytes are
    """

    def emit(builder: Any, arguments: list[Any]) -> Any:
        ir = _ir()
        i32, i8 = ir.IntType(32), ir.IntType(8)
        widen = builder.sext if signed else builder.zext
        first, second, total = arguments
        for number in range(4):
            shift = ir.Constant(i32, 8 * number)
            left = widen(builder.trunc(builder.lshr(first, shift), i8), i32)
            right = builder.sext(builder.trunc(builder.lshr(second, shift), i8), i32)
            total = builder.add(total, builder.mul(left, right))
        return total

    return emit


# c + the sum of the products of the four signed bytes of a and b.
dp4a = Intrinsic(
    "dp4a",
    "i32(i32, i32, i32)",
    ptx=("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r"),
    amdgpu=_amd_dp4a(signed=True),
)
# The same of unsigned bytes of a and signed ones of b.
dp4a_u8 = Intrinsic(
    "dp4a_u8",
    "i32(i32, i32, i32)",
    ptx=("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r"),
    amdgpu=_amd_dp4a(signed=False),
)


class BytesOf(Intrinsic):
    """Four bytes of two words: numbers 0 to 3 are those of the first, 4 to 7 of the second."""

    def __init__(self, name: str, numbers: tuple[int, int, int, int]) -> None:
        self.numbers = numbers
        selector = sum(number << 4 * place for place, number in enumerate(numbers))
        super().__init__(
            name,
            "i32(i32, i32)",
            ptx=(f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r"),
            amdgpu=self._amd,
        )

    def _amd(self, builder: Any, arguments: list[Any]) -> Any:
        """A selector is a word of bytes here, and counts from the second argument's."""
        permute = _call("llvm.amdgcn.perm", "i32(i32, i32, i32)")
        selector = sum(number << 8 * place for place, number in enumerate(self.numbers))
        first, second = arguments
        return permute(builder, [second, first, _ir().Constant(llvm_type("i32"), selector)])


even_bytes = BytesOf("even_bytes", (0, 2, 4, 6))
odd_bytes = BytesOf("odd_bytes", (1, 3, 5, 7))
low_bytes_in_turn = BytesOf("low_bytes_in_turn", (0, 4, 1, 5))
high_bytes_in_turn = BytesOf("high_bytes_in_turn", (2, 6, 3, 7))
low_halves = BytesOf("low_halves", (0, 1, 4, 5))
high_halves = BytesOf("high_halves", (2, 3, 6, 7))


def _levels(permute: str, emit: Callable[[Any, Any, list[Any]], tuple[Any, Any]]) -> Emit:
    """Return what looks nibbles up by a vendor's instruction that permutes the bytes of two words.

    emit   of the builder, the instruction and the arguments: the two results
    """

    def whole(builder: Any, arguments: list[Any]) -> Any:
        ir = _ir()
        call = _call(permute, "i32(i32, i32, i32)")
        pair = ir.Constant(llvm_type("2xi32"), ir.Undefined)
        found = emit(builder, lambda *words: call(builder, list(words)), arguments)
        for number, one in enumerate(found):
            pair = builder.insert_value(pair, one, number)
        return pair

    return whole


def _nvidia_levels(builder: Any, permute: Any, arguments: list[Any]) -> tuple[Any, Any]:
    """Four nibbles of a word select four bytes of eight; their highest bits then one of two.

    The selector is the lower half of a word, and the highest bit of a nibble in it repeats the sign
    of the byte instead: it is masked, and chooses between the lower and the upper eight levels.
    """
    ir = _ir()
    word, a, b, c, d = arguments

    def constant(value: int) -> Any:
        return ir.Constant(ir.IntType(32), value)

    below = builder.and_(word, constant(0x77777777))
    above = builder.lshr(builder.and_(word, constant(0x88888888)), constant(1))
    choice = builder.or_(above, constant(0x32103210))
    halves = []
    for shift in (constant(0), constant(16)):
        selector = builder.lshr(below, shift)
        lower, upper = permute(a, b, selector), permute(c, d, selector)
        halves.append(permute(lower, upper, builder.lshr(choice, shift)))
    return permute(*halves, constant(0x6420)), permute(*halves, constant(0x7531))


def _amd_levels(builder: Any, permute: Any, arguments: list[Any]) -> tuple[Any, Any]:
    """Each byte of a selector chooses one byte of eight; numbers count from the second word."""
    ir = _ir()
    word, a, b, c, d = arguments

    def constant(value: int) -> Any:
        return ir.Constant(ir.IntType(32), value)

    found = []
    for shift in (constant(0), constant(4)):
        nibbles = builder.lshr(word, shift)
        selector = builder.and_(nibbles, constant(0x07070707))
        above = builder.lshr(builder.and_(nibbles, constant(0x08080808)), constant(1))
        lower, upper = permute(b, a, selector), permute(d, c, selector)
        found.append(permute(upper, lower, builder.or_(above, constant(0x03020100))))
    return found[0], found[1]


# Of sixteen bytes, given as four words, those that the low nibbles of a word number, and those that
# its high nibbles number.
levels_of = Intrinsic(
    "levels_of",
    "2xi32(i32, i32, i32, i32, i32)",
    ptx=_levels("llvm.nvvm.prmt", _nvidia_levels),
    amdgpu=_levels("llvm.amdgcn.perm", _amd_levels),
)


def _amd_sign_bytes(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    ones = builder.lshr(arguments[0], ir.Constant(ir.IntType(32), 7))
    ones = builder.and_(ones, ir.Constant(ir.IntType(32), 0x01010101))
    return builder.mul(ones, ir.Constant(ir.IntType(32), 255))


# -1 in each byte of a word that is negative, 0 in the others.
sign_bytes = Intrinsic(
    "sign_bytes",
    "i32(i32)",
    ptx=("prmt.b32 $0, $1, 0, 0xBA98;", "=r,r"),
    amdgpu=_amd_sign_bytes,
)


def _nvidia_level_parts(builder: Any, permute: Any, arguments: list[Any]) -> tuple[Any, Any]:
    """The highest bit of a nibble in a selector repeats the sign of the byte that the others
    choose: below 8 that is 0 in the upper part, from 8 on -1 in the lower one, so 1 is added."""
    ir = _ir()
    word, a, b, c, d = arguments

    def constant(value: int) -> Any:
        return ir.Constant(ir.IntType(32), value)

    c, d = (builder.add(one, constant(0x01010101)) for one in (c, d))
    return permute(a, b, word), permute(c, d, builder.xor(word, constant(0x8888)))


def _bytes_of_nibbles(builder: Any, word: Any) -> Any:
    """Return the four low nibbles of a word as bytes."""
    ir = _ir()

    def constant(value: int) -> Any:
        return ir.Constant(ir.IntType(32), value)

    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F)):
        kept = builder.and_(word, constant(0xFFFF)) if shift == 8 else word
        word = builder.and_(builder.or_(kept, builder.shl(kept, constant(shift))), constant(mask))
    return word


def _amd_level_parts(builder: Any, permute: Any, arguments: list[Any]) -> tuple[Any, Any]:
    """Whole levels, and nothing to add."""
    word, *levels = arguments
    found, _ = _amd_levels(builder, permute, [_bytes_of_nibbles(builder, word), *levels])
    return found, _ir().Constant(llvm_type("i32"), 0)


def _amd_bytes_by_nibbles(builder: Any, arguments: list[Any]) -> Any:
    permute = _call("llvm.amdgcn.perm", "i32(i32, i32, i32)")
    first, second, numbers = arguments
    return permute(builder, [second, first, _bytes_of_nibbles(builder, numbers)])


# Of eight bytes, given as two words, those that the four low nibbles of a third number.
bytes_by_nibbles = Intrinsic(
    "bytes_by_nibbles",
    "i32(i32, i32, i32)",
    ptx=_call("llvm.nvvm.prmt", "i32(i32, i32, i32)"),
    amdgpu=_amd_bytes_by_nibbles,
)


# Two words whose bytes, added, are the levels that the four low nibbles of a word number, in their
# order; of the sixteen levels, given as four words, the first eight are below 0 and no others.
level_parts = Intrinsic(
    "level_parts",
    "2xi32(i32, i32, i32, i32, i32)",
    ptx=_levels("llvm.nvvm.prmt", _nvidia_level_parts),
    amdgpu=_levels("llvm.amdgcn.perm", _amd_level_parts),
)


def _as(kind: str) -> Emit:
    return lambda builder, arguments: builder.bitcast(arguments[0], llvm_type(kind))


def _float_of_half(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    bits = builder.trunc(arguments[0], ir.IntType(16))
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _half_of_float(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    half = builder.fptrunc(arguments[0], ir.HalfType())
    return builder.zext(builder.bitcast(half, ir.IntType(16)), ir.IntType(32))


def _two_halves_of_floats(builder: Any, arguments: list[Any]) -> Any:
    first, second = (_half_of_float(builder, [one]) for one in arguments)
    return builder.or_(first, builder.shl(second, _ir().Constant(_ir().IntType(32), 16)))


def _amd_nearest(builder: Any, arguments: list[Any]) -> Any:
    rounded = _call("llvm.rint.f32", "f32(f32)")(builder, arguments)
    return builder.fptosi(rounded, llvm_type("i32"))


bits_of_f32 = Intrinsic("bits_of_f32", "i32(f32)", body=_as("i32"))
f32_of_bits = Intrinsic("f32_of_bits", "f32(i32)", body=_as("f32"))
# The lower 16 bits as a half, and the half nearest to a float (ties to even; beyond: infinity).
f32_of_half = Intrinsic(
    "f32_of_half",
    "f32(i32)",
    ptx=("{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }", "=f,r"),
    amdgpu=_float_of_half,
)
half_of_f32 = Intrinsic(
    "half_of_f32",
    "i32(f32)",
    ptx=("{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h; }", "=r,f"),
    amdgpu=_half_of_float,
)
# The halves nearest to two floats, as a word.
halves_of_f32 = Intrinsic(
    "halves_of_f32",
    "i32(f32, f32)",
    ptx=by_age(
        80,
        "cvt.rn.f16x2.f32 $0, $2, $1;",
        [
            "{ .reg .b16 a, b; cvt.rn.f16.f32 a, $1; cvt.rn.f16.f32 b, $2; mov.b32 $0, {a, b}; }",
        ],
        "=r,f,f",
    ),
    amdgpu=_two_halves_of_floats,
)
# The integer nearest to a float, ties to even; it must fit.
nearest_i32 = Intrinsic(
    "nearest_i32", "i32(f32)", ptx=("cvt.rni.s32.f32 $0, $1;", "=r,f"), amdgpu=_amd_nearest
)
# A float without what is behind its point; it must fit.
truncated_i64 = Intrinsic(
    "truncated_i64",
    "i64(f32)",
    body=lambda builder, arguments: builder.fptosi(arguments[0], llvm_type("i64")),
)
# a * b + c, rounded once.
fma = Intrinsic(
    "fma",
    "f32(f32, f32, f32)",
    ptx=("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"),
    amdgpu=_call("llvm.fma.f32", "f32(f32, f32, f32)"),
)
# The larger of two floats, the other one where one is NaN. Python's max becomes a call of NVIDIA's.
larger_f32 = Intrinsic(
    "larger_f32",
    "f32(f32, f32)",
    ptx=("max.f32 $0, $1, $2;", "=f,f,f"),
    amdgpu=_call("llvm.maxnum.f32", "f32(f32, f32)"),
)
# Correctly rounded.
square_root = Intrinsic(
    "square_root",
    "f32(f32)",
    ptx=("sqrt.rn.f32 $0, $1;", "=f,f"),
    amdgpu=_call("llvm.sqrt.f32", "f32(f32)"),
)


def _convert(kind: str) -> Emit:
    """Return a change of type within integers; a float becomes the integer towards zero."""

    def emit(builder: Any, arguments: list[Any]) -> Any:
        (value,) = arguments
        target = llvm_type(kind)
        if value.type.width < target.width:
            return builder.sext(value, target)
        return builder.trunc(value, target) if value.type.width > target.width else value

    return emit


# The lower 32 bits of an integer, as a signed one.
i32 = Intrinsic("i32", "i32(i64)", body=_convert("i32"))
i64 = Intrinsic("i64", "i64(i64)", body=_convert("i64"))
# A word moved down by less than 32 bits, zeros behind it: Python's >> by a variable takes 64 bits.
shifted_down = Intrinsic(
    "shifted_down",
    "i32(i32, i32)",
    body=lambda builder, arguments: builder.lshr(*arguments),
)
# The float nearest to an integer.
f32_of_i32 = Intrinsic(
    "f32_of_i32",
    "f32(i32)",
    body=lambda builder, arguments: builder.sitofp(arguments[0], llvm_type("f32")),
)
# A float constant: Python's literals are of double precision.
f32 = Intrinsic(
    "f32",
    "f32(f64)",
    body=lambda builder, arguments: builder.fptrunc(arguments[0], llvm_type("f32")),
)


# -- products of matrices --------------------------------------------------------------------------
#
# A warp multiplies A, 16 rows of 16 halves, with B, 16 rows of 8 halves, and adds the product to C,
# 16 rows of 8 floats. Of lane 4 * g + t, in words of two halves (the lower one first):
#
#     A   rows g and g + 8, columns 2 * t and 2 * t + 1, then both 8 columns further: four words
#     B   column g, rows 2 * t and 2 * t + 1, then 8 rows further: two words
#     C   rows g and g + 8, columns 2 * t and 2 * t + 1: four floats
#
# Products are exact; how their sums are rounded is the card's own, the same every time. Targets
# before 8.0 multiply 8 columns of A at a time.

_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, "
    "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
_MMA_BEFORE = [
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, "
    "{$4, $5}, {$8}, {$10, $11, $12, $13};",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, "
    "{$6, $7}, {$9}, {$0, $1, $2, $3};",
]


def _nvidia_mma(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    kind = ir.FunctionType(llvm_type("4xf32"), [one.type for one in arguments])
    operands = ",".join(["=&f"] * 4 + ["r"] * 6 + ["f"] * 4)
    text, constraints = by_age(80, _MMA, _MMA_BEFORE, operands)
    code = ir.InlineAsm(kind, _escaped(text), constraints, True)
    return builder.call(code, arguments, attrs=("convergent",))  # all lanes together, or none


def _amd_mma(builder: Any, arguments: list[Any]) -> Any:
    """Fetch the words of A and B from the lanes that have them, and multiply in plain floats."""
    ir = _ir()
    a, b, sums = arguments[:4], arguments[4:6], arguments[6:]

    def constant(value: int) -> Any:
        return ir.Constant(ir.IntType(32), value)

    lane = _amd_lane(builder)
    t = builder.and_(lane, constant(3))
    row = builder.sub(lane, t)  # the first lane that has this one's row
    column = builder.add(builder.and_(lane, constant(-WARP)), builder.shl(t, constant(3)))
    for half, word in ((half, word) for half in range(2) for word in range(4)):
        rows_of = [_amd_word_of(builder, one, row, word) for one in a[2 * half :][:2]]
        columns_of = [_amd_word_of(builder, b[half], column, at + word) for at in (0, 4)]
        for shift in (0, 16):
            rows, columns = (
                [_float_of_half(builder, [builder.lshr(one, constant(shift))]) for one in pair]
                for pair in (rows_of, columns_of)
            )
            for number in range(4):
                factors = [rows[number >> 1], columns[number & 1], sums[number]]
                sums[number] = _call("llvm.fma.f32", "f32(f32, f32, f32)")(builder, factors)
    found = ir.Constant(llvm_type("4xf32"), ir.Undefined)
    for number, one in enumerate(sums):
        found = builder.insert_value(found, one, number)
    return found


mma_of_halves = Intrinsic(
    "mma_of_halves",
    "4xf32(i32, i32, i32, i32, i32, i32, f32, f32, f32, f32)",
    ptx=_nvidia_mma,
    amdgpu=_amd_mma,
)


# The same with bytes: A has 16 rows of 32 signed bytes, B 32 rows of 8, C is int32. Of lane
# 4 * g + t, in words of four bytes (the lowest first):
#
#     A   rows g and g + 8, columns 4 * t .. 4 * t + 3, then both 16 columns further: four words
#     B   column g, rows 4 * t .. 4 * t + 3, then 16 rows further: two words
#     C   as above
#
# `mma_16x8x16` has the first half of the columns of A and rows of B. Sums are exact.


def _byte_mma(columns: int) -> tuple[str, str]:
    """Return the instruction for so many columns of A: two sums of two words each, or of one.

    Targets before 8.0 multiply 8 rows by 16 columns at a time.
    """
    halves = columns // 16
    a = [f"${4 + number}" for number in range(2 * halves)]
    b = [f"${4 + 2 * halves + number}" for number in range(halves)]
    c = [f"${4 + 3 * halves + number}" for number in range(4)]
    newer = (
        f"mma.sync.aligned.m16n8k{columns}.row.col.s32.s8.s8.s32 {{$0, $1, $2, $3}}, "
        f"{{{', '.join(a)}}}, {{{', '.join(b)}}}, {{{', '.join(c)}}};"
    )
    older = [
        f"mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {sums}, "
        f"{{{a[2 * half + row]}}}, {{{b[half]}}}, {sums if half else before};"
        for half in range(halves)
        for row, (sums, before) in enumerate(
            (("{$0, $1}", f"{{{c[0]}, {c[1]}}}"), ("{$2, $3}", f"{{{c[2]}, {c[3]}}}"))
        )
    ]
    operands = ",".join(["=&r"] * 4 + ["r"] * (3 * halves + 4))
    return by_age(80, newer, older, operands)


def _nvidia_byte_mma(columns: int) -> Emit:
    def emit(builder: Any, arguments: list[Any]) -> Any:
        ir = _ir()
        kind = ir.FunctionType(llvm_type("4xi32"), [one.type for one in arguments])
        text, constraints = _byte_mma(columns)
        code = ir.InlineAsm(kind, _escaped(text), constraints, True)
        return builder.call(code, arguments, attrs=("convergent",))  # all lanes together, or none

    return emit


def _amd_byte_mma(columns: int) -> Emit:
    """Fetch the words of A and B from the lanes that have them, and multiply byte by byte."""

    halves = columns // 16

    def multiply(builder: Any, arguments: list[Any]) -> Any:
        ir = _ir()
        a, b, sums = arguments[: 2 * halves], arguments[2 * halves : 3 * halves], arguments[-4:]

        def constant(value: int) -> Any:
            return ir.Constant(ir.IntType(32), value)

        lane = _amd_lane(builder)
        t = builder.and_(lane, constant(3))
        row = builder.sub(lane, t)  # the first lane that has this one's row
        column = builder.add(builder.and_(lane, constant(-WARP)), builder.shl(t, constant(3)))
        product = _amd_dp4a(signed=True)
        for half in range(halves):
            for word in range(4):
                rows = [_amd_word_of(builder, one, row, word) for one in a[2 * half :][:2]]
                columns_of = [_amd_word_of(builder, b[half], column, at + word) for at in (0, 4)]
                for number in range(4):
                    factors = [rows[number >> 1], columns_of[number & 1], sums[number]]
                    sums[number] = product(builder, factors)
        found = ir.Constant(llvm_type("4xi32"), ir.Undefined)
        for number, one in enumerate(sums):
            found = builder.insert_value(found, one, number)
        return found

    def emit(builder: Any, arguments: list[Any]) -> Any:
        # Kernels multiply in many places: this is a function of its own, so that code stays small.
        ir, module = _ir(), builder.module
        name = f"strata_product_{columns}"
        function = module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(llvm_type("4xi32"), [one.type for one in arguments])
            function = ir.Function(module, kind, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block())
            inner.ret(multiply(inner, list(function.args)))
        return builder.call(function, arguments)

    return emit


mma_16x8x32 = Intrinsic(
    "mma_16x8x32",
    "4xi32(i32, i32, i32, i32, i32, i32, i32, i32, i32, i32)",
    ptx=_nvidia_byte_mma(32),
    amdgpu=_amd_byte_mma(32),
)
mma_16x8x16 = Intrinsic(
    "mma_16x8x16",
    "4xi32(i32, i32, i32, i32, i32, i32, i32)",
    ptx=_nvidia_byte_mma(16),
    amdgpu=_amd_byte_mma(16),
)


# Four blocks of eight rows of 16 bytes, of which lanes give the offsets in shared memory: lane
# 8 * n + r that of row r of block n. Of each block lane 4 * g + t gets word t of row g: its words
# of A and B above.


def _nvidia_matrices(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    place = builder.ptrtoint(_shared(builder, arguments[0], llvm_type("i32")), llvm_type("i32"))
    kind = ir.FunctionType(llvm_type("4xi32"), [place.type])
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    code = ir.InlineAsm(kind, text, "=r,=r,=r,=r,r,~{memory}", True)
    return builder.call(code, [place], attrs=("convergent",))  # all lanes together, or none


def _amd_matrices(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    word, wide = llvm_type("i32"), llvm_type("i64")

    def constant(value: int) -> Any:
        return ir.Constant(word, value)

    lane = _amd_lane(builder)
    first = builder.and_(lane, constant(-WARP))
    row = builder.add(first, builder.lshr(builder.and_(lane, constant(WARP - 1)), constant(2)))
    column = builder.shl(builder.and_(lane, constant(3)), constant(2))
    offset = builder.trunc(arguments[0], word)
    found = ir.Constant(llvm_type("4xi32"), ir.Undefined)
    for number in range(4):
        place = builder.add(_amd_word_of(builder, offset, row, 8 * number), column)
        one = builder.load(_shared(builder, builder.sext(place, wide), word), align=4)
        found = builder.insert_value(found, one, number)
    return found


shared_load_matrices = Intrinsic(
    "shared_load_matrices", "4xi32(i64)", ptx=_nvidia_matrices, amdgpu=_amd_matrices
)
