"""Products of attention by warpgroups, on cards of compute capability 9.0.

As `warpgroups.py` has them, with other operands. A comes in words of the lanes, sums are numbers
that a kernel has names for, and a product has ended where the instruction does: it is other
warpgroups that go on meanwhile. Of warp w of a warpgroup lane 4 * g + t has of rows 16 * w + g and
8 further of A, and of the sums, what it has of a product of a warp (`matrices.py`).

B has 64 halves side by side, in rows of 128 bytes as there; what is further on in a row lies in
another matrix behind all rows.

Words that products read in several turns of a loop are given to `keep_words` behind it. The linker
of CUDA 13.0 does not see that a product of a later turn reads them, and puts other numbers into
their registers; what another instruction reads behind the loop stays where it is. 13.1 and newer
have no need of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import Intrinsic, llvm_type
from strata_nb.kernels.gpu.intrinsics.warpgroups import ROW_BYTES, K, M, descriptor

_STEP = 16  # columns of A that an instruction multiplies


def _products(
    name: str,
    columns: int,
    steps: int,
    place: Callable[[int], int],
    *,
    apart_bytes: int,
    are_rows: bool,
) -> Intrinsic:
    """Return (sums, words, place) that adds products of A with so many columns of B to sums.

    steps      of 16 columns of A; of each a lane gives four words
    place      of a step, how far in B it begins
    are_rows   whether the rows of B in memory are those that columns of A meet; else its columns
    """
    count, words = columns // 2, 4 * steps
    sums = ", ".join(f"${number}" for number in range(count))
    first = 2 * count  # of the operands: results, and what they begin with
    lines = ["{ .reg .pred adds; .reg .b64 b; setp.eq.u32 adds, 0, 0;", "wgmma.fence.sync.aligned;"]
    for step in range(steps):
        a = ", ".join(f"${first + 4 * step + number}" for number in range(4))
        lines += [
            f"add.s64 b, ${first + words}, {place(step) >> 4};",
            f"wgmma.mma_async.sync.aligned.m{M}n{columns}k{_STEP}.f32.f16.f16 {{{sums}}}, "
            f"{{{a}}}, b, adds, 1, 1, {int(are_rows)};",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
    tied = [str(number) for number in range(count)]
    constraints = ",".join([*["=f"] * count, *tied, *"r" * words, "l", "~{memory}"])

    def emit(builder: Any, arguments: list[Any]) -> Any:
        from llvmlite import ir

        given = [builder.extract_value(arguments[0], number) for number in range(count)]
        given += [builder.extract_value(arguments[1], number) for number in range(words)]
        given.append(descriptor(builder, arguments[2], apart_bytes))
        kind = ir.FunctionType(llvm_type(f"{count}xf32"), [one.type for one in given])
        code = ir.InlineAsm(kind, "\\0A\\09".join(lines), constraints, True)
        return builder.call(code, given, attrs=("convergent",))  # all lanes together, or none

    signature = f"{count}xf32({count}xf32, {words}xi32, i64)"
    return Intrinsic(f"{name}_products_{columns}_{steps}", signature, ptx=emit)


@cache
def key_products(cells: int, length: int) -> Intrinsic:
    """Return (scores, queries, keys): scores and the products of 64 queries with so many cells."""

    def place(step: int) -> int:
        values = _STEP * step
        return ROW_BYTES * cells * (values // K) + 2 * (values % K)

    return _products("key", cells, length // _STEP, place, apart_bytes=16, are_rows=False)


@cache
def value_products(length: int, cells: int) -> Intrinsic:
    """Return (sums, weights, values): sums and 64 queries' weights times values of cells."""

    def place(step: int) -> int:
        return ROW_BYTES * _STEP * step

    apart_bytes = ROW_BYTES * cells
    return _products("value", length, cells // _STEP, place, apart_bytes=apart_bytes, are_rows=True)


@cache
def keep_words(steps: int) -> Intrinsic:
    """Return (words): reads the words of so many steps of A, and does nothing with them."""
    words = range(4 * steps)
    lines = ["{ .reg .pred p; .reg .b32 all; mov.b32 all, 0;"]
    lines += [f"xor.b32 all, all, ${number};" for number in words]
    # Whatever they are, nothing happens; what they are the linker does not know.
    lines += ["setp.eq.s32 p, all, 1; @p nanosleep.u32 0; }"]

    def emit(builder: Any, arguments: list[Any]) -> None:
        from llvmlite import ir

        given = [builder.extract_value(arguments[0], number) for number in words]
        kind = ir.FunctionType(ir.VoidType(), [one.type for one in given])
        constraints = ",".join([*"r" * len(given), "~{memory}"])
        builder.call(ir.InlineAsm(kind, "\\0A\\09".join(lines), constraints, True), given)

    return Intrinsic(f"keep_words_{steps}", f"void({4 * steps}xi32)", ptx=emit)
