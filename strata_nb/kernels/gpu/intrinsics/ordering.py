"""What happens before what: launches that overlap, loads that stay in front, blocks, the host."""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import (
    Intrinsic,
    as_tuple,
    constant,
    llvm_call,
    llvm_type,
    nothing,
    since,
)
from strata_nb.kernels.gpu.intrinsics.memory import in_global

# -- launches that overlap -------------------------------------------------------------------------
#
# A card may start a kernel while the one before it still runs. Every kernel waits here for all that
# was launched before, and lets the next one start: behind the wait, so that of three kernels in a
# row the first has ended before the third begins. Before the wait a kernel may read what was
# written two launches ago or earlier, and weights.

AWAIT_PREVIOUS, _ORDERED = since(90, "griddepcontrol.wait; griddepcontrol.launch_dependents;", "")
await_previous = Intrinsic(
    "await_previous", "void()", ptx=(AWAIT_PREVIOUS, _ORDERED), amdgpu=nothing
)

# Wait until a word that was loaded is there. Without it a compiler may move loads that stand before
# `await_previous` behind it: they would be right there, and late.
hold = Intrinsic(
    "hold",
    "void(i32)",
    ptx=since(90, "{ .reg .pred p; setp.eq.s32 p, $0, 1; @p nanosleep.u32 0; }", "r"),
    amdgpu=nothing,
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
keep = Intrinsic("keep", "void()", ptx=since(90, "bar.warp.sync -1;", ""), amdgpu=nothing)

# Ask for bytes to be brought into the card's cache: address and size are multiples of 16. It
# changes nothing but the time that loads of them take.
prefetch = Intrinsic(
    "prefetch",
    "void(i64, i32)",
    ptx=since(90, "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r"),
    amdgpu=nothing,
)


# -- blocks of a launch ----------------------------------------------------------------------------


def _amd_arrive(builder: Any, arguments: list[Any]) -> Any:
    place = in_global(builder, arguments[0], arguments[1].type)
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


def _amd_posted(builder: Any, arguments: list[Any]) -> Any:
    word = llvm_type("i64")
    places = [arguments[0], builder.add(arguments[0], constant(8, 64))]
    found = [in_global(builder, place, word) for place in places]
    return as_tuple(builder, [builder.load_atomic(place, "monotonic", 8) for place in found])


def _amd_post(builder: Any, arguments: list[Any]) -> None:
    place = in_global(builder, arguments[0], llvm_type("i64"))
    builder.store_atomic(arguments[1], place, "monotonic", 8)


# A word that another launch looks for while this one runs: it is there as a whole, and says nothing
# of what else was written. It is looked for with its neighbour, from a multiple of 16 on.
post_i64 = Intrinsic(
    "post_i64",
    "void(i64, i64)",
    ptx=("st.relaxed.gpu.global.s64 [$0], $1;", "l,l,~{memory}"),
    amdgpu=_amd_post,
)
posted_2xi64 = Intrinsic(
    "posted_2xi64",
    "2xi64(i64)",
    ptx=("ld.relaxed.gpu.global.v2.s64 {$0, $1}, [$2];", "=l,=l,l,~{memory}"),
    amdgpu=_amd_posted,
)


# -- with the host ---------------------------------------------------------------------------------
#
# Host and card exchange words of memory that both have mapped. Who has written all that a word
# stands for stores it; who has loaded it sees all that. Behind a barrier that holds for the whole
# block, before the store and after the load.


def _amd_load_system(builder: Any, arguments: list[Any]) -> Any:
    place = in_global(builder, arguments[0], llvm_type("i64"))
    return builder.load_atomic(place, "acquire", 8)


def _amd_store_system(builder: Any, arguments: list[Any]) -> None:
    place = in_global(builder, arguments[0], llvm_type("i64"))
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
    message = constant(_AMD_REAL_TIME)
    ticks = llvm_call("llvm.amdgcn.s.sendmsg.rtn.i64", "i64(i32)")(builder, [message])
    return builder.mul(ticks, constant(_AMD_TICK_NS, 64))


# A time, the same for the whole card, that moves on in steps of a microsecond or less.
nanoseconds = Intrinsic(
    "nanoseconds",
    "i64()",
    ptx=("mov.u64 $0, %globaltimer;", "=l,~{memory}"),
    amdgpu=_amd_nanoseconds,
)
