"""Who a lane is, and what lanes do together: barriers, shuffles and votes."""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import (
    WARP,
    Emit,
    Intrinsic,
    by_age,
    constant,
    escaped,
    llvm,
    llvm_call,
    llvm_function,
    llvm_type,
)

# -- who a lane is ---------------------------------------------------------------------------------


def _number(name: str, most: int) -> Emit:
    """Return what calls a function of LLVM that returns a number from 0 to `most`: knowing that,
    LLVM computes with it in 32 bits."""
    call = llvm_call(name, "i32()")

    def emit(builder: Any, arguments: list[Any]) -> Any:
        found = call(builder, arguments)
        limits = [constant(limit) for limit in (0, most + 1)]
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
    ir = llvm()
    kind = ir.FunctionType(ir.IntType(8).as_pointer(4), [])
    name = "llvm.amdgcn.dispatch.ptr"
    packet = llvm_function(builder, name, kind)
    place = builder.gep(builder.call(packet, []), [constant(_GRID_Z, 64)])
    return builder.load(builder.bitcast(place, ir.IntType(32).as_pointer(4)), align=4)


# How many blocks the grid has in z.
blocks_z = Intrinsic(
    "blocks_z",
    "i32()",
    ptx=llvm_call("llvm.nvvm.read.ptx.sreg.nctaid.z", "i32()"),
    amdgpu=_amd_blocks_z,
)


# -- lanes together --------------------------------------------------------------------------------


def _amd_barrier(builder: Any, _: list[Any]) -> None:
    builder.fence("release", targetscope="workgroup")
    llvm_call("llvm.amdgcn.s.barrier", "void()")(builder, [])
    builder.fence("acquire", targetscope="workgroup")


# All threads of the block wait for each other, and see what the others wrote.
barrier = Intrinsic(
    "barrier",
    "void()",
    ptx=llvm_call("llvm.nvvm.barrier0", "void()"),
    amdgpu=_amd_barrier,
)


_BUTTERFLY = 3  # the mode of a shuffle in which lanes name each other by an xor


def _nvidia_shuffle(builder: Any, arguments: list[Any]) -> Any:
    ir = llvm()
    i32 = ir.IntType(32)
    value, other = arguments
    floats = value.type == ir.FloatType()
    bits = builder.bitcast(value, i32) if floats else value
    kind = ir.FunctionType(ir.LiteralStructType([i32, ir.IntType(1)]), [i32] * 5)
    name = "llvm.nvvm.shfl.sync.i32"
    found = llvm_function(builder, name, kind)
    all_lanes, mode, last = (constant(word) for word in (-1, _BUTTERFLY, WARP - 1))
    moved = builder.extract_value(builder.call(found, [all_lanes, mode, bits, other, last]), 0)
    return builder.bitcast(moved, value.type) if floats else moved


def amd_lane(builder: Any) -> Any:
    """Return the number of a lane among those that run together."""
    low = llvm_call("llvm.amdgcn.mbcnt.lo", "i32(i32, i32)")
    high = llvm_call("llvm.amdgcn.mbcnt.hi", "i32(i32, i32)")
    all_lanes, zero = constant(-1), constant(0)
    return high(builder, [all_lanes, low(builder, [all_lanes, zero])])


def amd_word_of(builder: Any, word: Any, lane: Any, further: int) -> Any:
    """Return a word of the lane that is so much further than another."""
    source = builder.add(lane, constant(further))
    address = builder.shl(source, constant(2))
    return llvm_call("llvm.amdgcn.ds.bpermute", "i32(i32, i32)")(builder, [address, word])


def _amd_shuffle(builder: Any, arguments: list[Any]) -> Any:
    ir = llvm()
    i32 = ir.IntType(32)
    value, other = arguments
    floats = value.type == ir.FloatType()
    bits = builder.bitcast(value, i32) if floats else value
    lane = amd_lane(builder)
    within = builder.and_(lane, constant(WARP - 1))
    first = builder.sub(lane, within)  # of this warp: some cards run 64 lanes together
    moved = amd_word_of(builder, bits, builder.add(first, builder.xor(within, other)), 0)
    return builder.bitcast(moved, value.type) if floats else moved


# The value of the lane whose number is this one's xor the second argument. All 32 lanes take part.
shuffle_xor_f32 = Intrinsic(
    "shuffle_xor_f32", "f32(f32, i32)", ptx=_nvidia_shuffle, amdgpu=_amd_shuffle
)
shuffle_xor_i32 = Intrinsic(
    "shuffle_xor_i32", "i32(i32, i32)", ptx=_nvidia_shuffle, amdgpu=_amd_shuffle
)


def _nvidia_any(builder: Any, arguments: list[Any]) -> Any:
    is_so = builder.icmp_unsigned("!=", arguments[0], constant(0))
    vote = llvm_call("llvm.nvvm.vote.any.sync", "i1(i32, i1)")
    return builder.zext(vote(builder, [constant(-1), is_so]), llvm_type("i32"))


def _amd_any(builder: Any, arguments: list[Any]) -> Any:
    (found,) = arguments
    for distance in (16, 8, 4, 2, 1):
        found = builder.or_(found, _amd_shuffle(builder, [found, constant(distance)]))
    return found


# 0 where the argument is 0 in all lanes of a warp, and else another number in all of them. All 32
# lanes take part.
of_any_lane = Intrinsic("of_any_lane", "i32(i32)", ptx=_nvidia_any, amdgpu=_amd_any)


def _nvidia_lanes(builder: Any, arguments: list[Any]) -> Any:
    is_so = builder.icmp_unsigned("!=", arguments[0], constant(0))
    vote = llvm_call("llvm.nvvm.vote.ballot.sync", "i32(i32, i1)")
    return vote(builder, [constant(-1), is_so])


def _amd_lanes(builder: Any, arguments: list[Any]) -> Any:
    is_so = builder.icmp_unsigned("!=", arguments[0], constant(0))
    own = builder.shl(constant(1), builder.and_(amd_lane(builder), constant(WARP - 1)))
    return _amd_any(builder, [builder.select(is_so, own, constant(0))])


# A word with bit n set where lane n of a warp has an argument other than 0. All 32 lanes take part.
lanes_where = Intrinsic("lanes_where", "i32(i32)", ptx=_nvidia_lanes, amdgpu=_amd_lanes)


def _amd_largest(builder: Any, arguments: list[Any]) -> Any:
    (found,) = arguments
    for distance in (16, 8, 4, 2, 1):
        other = _amd_shuffle(builder, [found, constant(distance)])
        found = builder.select(builder.icmp_signed(">", found, other), found, other)
    return found


_STEP = "{{ .reg .b32 other; shfl.sync.bfly.b32 other, $0, {}, 31, -1; max.s32 $0, $0, other; }}"


def _nvidia_largest(builder: Any, arguments: list[Any]) -> Any:
    ir = llvm()
    steps = ["mov.b32 $0, $1;", *(_STEP.format(distance) for distance in (16, 8, 4, 2, 1))]
    text, constraints = by_age(80, "redux.sync.max.s32 $0, $1, -1;", steps, "=&r,r,~{memory}")
    kind = ir.FunctionType(llvm_type("i32"), [llvm_type("i32")])
    code = ir.InlineAsm(kind, escaped(text), constraints, True)
    return builder.call(code, arguments, attrs=("convergent",))  # all lanes together, or none


# The largest of the integers that the lanes of a warp have. All 32 lanes take part.
largest_of_lanes = Intrinsic(
    "largest_of_lanes", "i32(i32)", ptx=_nvidia_largest, amdgpu=_amd_largest
)
