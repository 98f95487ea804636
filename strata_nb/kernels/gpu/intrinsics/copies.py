"""Copies of memory into shared memory that go on beside the thread that asked for them.

Of 16, 8 or 4 bytes that nothing writes: to an offset, from an address, both multiples of the size.
They are there behind `await_copies`, of other threads behind a barrier too. A thread waits for all
that it asked for; or, with `await_older_copies`, for all groups, which `end_copies` ends, but the
last one. Cards before 8.0 copy at once.
"""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import (
    Emit,
    Intrinsic,
    by_age,
    escaped,
    llvm,
    llvm_type,
    nothing,
    since,
)
from strata_nb.kernels.gpu.intrinsics.memory import in_global, in_shared


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
        ir = llvm()
        offset, address = arguments
        place = builder.ptrtoint(in_shared(builder, offset, llvm_type("i32")), llvm_type("i32"))
        kind = ir.FunctionType(ir.VoidType(), [place.type, address.type])
        builder.call(ir.InlineAsm(kind, escaped(text), constraints, True), [place, address])

    return emit


def _amd_copy(size: int) -> Emit:
    def emit(builder: Any, arguments: list[Any]) -> None:
        offset, address = arguments
        kind = llvm().VectorType(llvm_type("i32"), size // 4)
        found = builder.load(in_global(builder, address, kind), align=size)
        builder.store(found, in_shared(builder, offset, kind), align=size)

    return emit


def _copy(size: int) -> Intrinsic:
    return Intrinsic(
        f"copy_{size}", "void(i64, i64)", ptx=_nvidia_copy(size), amdgpu=_amd_copy(size)
    )


copy_16, copy_8, copy_4 = _copy(16), _copy(8), _copy(4)
await_copies = Intrinsic(
    "await_copies", "void()", ptx=since(80, "cp.async.wait_all;", ""), amdgpu=nothing
)
end_copies = Intrinsic(
    "end_copies", "void()", ptx=since(80, "cp.async.commit_group;", ""), amdgpu=nothing
)
await_older_copies = Intrinsic(
    "await_older_copies", "void()", ptx=since(80, "cp.async.wait_group 1;", ""), amdgpu=nothing
)
