"""Products of matrices by warpgroups: instructions that cards of compute capability 9.0 alone have.

A *warpgroup* is four warps that follow each other. It multiplies A, 64 rows of 64 halves, with B,
which has some rows of 64 halves, too: sums[m][n] += sum over k of A[m][k] * B[n][k]. Both lie in
shared memory, and the instruction reads them there while the warps go on with something else.

In shared memory a row has 128 bytes, and the next one follows. Its pieces of 16 bytes are in
another order, so that eight rows' pieces of the same number are in different banks: piece p of row
r is at p ^ (r & 7). A matrix begins at a multiple of 1024 bytes.

The sums stay in registers of the warpgroup, of which kernels have no names, so that nothing moves
them while they are added to. `begin_sums` makes them 0; `store_sums` puts them into shared memory.
Products are exact, how their sums are rounded is the card's own, the same every time.

Who writes A or B calls `publish` before the barrier, or the instruction may read what was there
before. The sums and the matrices belong to it until `await_products`, or `await_older_products`,
which leaves the last `multiply` on its way.

The code is for targets with these instructions only: see `ACCELERATED`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import WARP, Intrinsic, llvm_type
from strata_nb.kernels.gpu.intrinsics.memory import in_shared

WARPGROUP = 4 * WARP
M, K = 64, 64  # of A
ROW_BYTES = 2 * K
PIECE_BYTES = 16
BOUNDARY = 1024  # of matrices

WITH_WARPGROUPS = (9, 0)  # the compute capability of cards that have them
ACCELERATED = "wgmma."  # in PTX that only such a target has, whose name then ends with an "a"
_STEP = 16  # columns that an instruction multiplies
_MOST_ROWS = 256  # of B, that it does
_REGISTER = "strata_sum"  # of PTX, and a number

# Where a matrix is, in a word of 64 bits: its address in sixteens; how far eight rows are from the
# next eight, in sixteens, from bit 32 on; and in bits 62 and 63 the order of pieces. The distance
# between matrices side by side, from bit 16 on, counts where these are columns of B, and else for
# nothing in this order.
_DESCRIPTOR = (8 * ROW_BYTES >> 4) << 32 | 1 << 62
_ADDRESS = 0x3FFFF


def _assembly(builder: Any, lines: list[str], constraints: str, arguments: list[Any]) -> None:
    from llvmlite import ir

    text = "\\0A\\09".join(lines)
    kind = ir.FunctionType(ir.VoidType(), [one.type for one in arguments])
    joined = ",".join(part for part in (constraints, "~{memory}") if part)
    code = ir.InlineAsm(kind, text, joined, True)
    builder.call(code, arguments, attrs=("convergent",))  # all lanes together, or none


def _place(builder: Any, offset: Any) -> Any:
    """Emit the address of an offset within shared memory."""
    return builder.ptrtoint(in_shared(builder, offset, llvm_type("i32")), llvm_type("i32"))


def _names(first: int, end: int) -> str:
    """Name the sums of rows of B."""
    return ", ".join(f"{_REGISTER}{number}" for number in range(first // 2, end // 2))


def descriptor(builder: Any, offset: Any, apart_bytes: int = 16) -> Any:
    """Emit the word that says where a matrix is, of an offset within shared memory.

    apart_bytes   between matrices side by side
    """
    from llvmlite import ir

    word, wide = ir.IntType(32), ir.IntType(64)
    place = builder.and_(_place(builder, offset), ir.Constant(word, _ADDRESS))
    place = builder.lshr(place, ir.Constant(word, 4))
    whole = ir.Constant(wide, _DESCRIPTOR | apart_bytes >> 4 << 16)
    return builder.or_(builder.zext(place, wide), whole)


@cache
def begin_sums(rows: int) -> Intrinsic:
    """Return what a kernel calls once, of the most rows of B: its sums are 0 from then on."""

    def emit(builder: Any, _: list[Any]) -> None:
        lines = [f".reg .f32 {_REGISTER}<{rows // 2}>;"]
        lines += [f"mov.f32 {_REGISTER}{number}, 0f00000000;" for number in range(rows // 2)]
        _assembly(builder, lines, "", [])

    return Intrinsic(f"begin_sums_{rows}", "void()", ptx=emit)


@cache
def multiply(rows: int) -> Intrinsic:
    """Return what begins to add a product: (a, b), where A of the warpgroup and B begin.

    rows   of B, a multiple of 8
    """
    parts = [(first, min(first + _MOST_ROWS, rows)) for first in range(0, rows, _MOST_ROWS)]

    def emit(builder: Any, arguments: list[Any]) -> None:
        a, b = (descriptor(builder, one) for one in arguments)
        lines = ["{ .reg .pred adds; .reg .b64 a, b; setp.eq.u32 adds, 0, 0;"]
        lines += ["wgmma.fence.sync.aligned;"]
        for step in range(K // _STEP):
            further = step * 2 * _STEP >> 4
            lines += [f"add.s64 a, $0, {further};"]
            for first, end in parts:
                lines += [
                    f"add.s64 b, $1, {further + (first * ROW_BYTES >> 4)};",
                    f"wgmma.mma_async.sync.aligned.m{M}n{end - first}k{_STEP}.f32.f16.f16 "
                    f"{{{_names(first, end)}}}, a, b, adds, 1, 1, 0, 0;",
                ]
        lines += ["wgmma.commit_group.sync.aligned; }"]
        _assembly(builder, lines, "l,l", [a, b])

    return Intrinsic(f"multiply_{rows}", "void(i64, i64)", ptx=emit)


@cache
def store_sums(rows: int, apart: int) -> Intrinsic:
    """Return what stores sums of so many rows of B: (place), where a lane's first one goes.

    Lane 4 * g + t of warp w has sums of rows 16 * w + g and 8 further of A, and of rows 2 * t and
    2 * t + 1 of every eight of B. Row n of B goes `apart` floats behind the one before; A's rows
    lie side by side.
    """

    def emit(builder: Any, arguments: list[Any]) -> None:
        lines = []
        for number in range(rows // 2):
            row, column = 8 * (number >> 2) + (number & 1), 8 * (number >> 1 & 1)
            place = 4 * (apart * row + column)
            lines.append(f"st.shared.f32 [$0+{place}], {_REGISTER}{number};")
        _assembly(builder, lines, "r", [_place(builder, arguments[0])])

    return Intrinsic(f"store_sums_{rows}_{apart}", "void(i64)", ptx=emit)


def _wait(left: int) -> Any:
    lines = [f"wgmma.wait_group.sync.aligned {left};"]
    return lambda builder, _: _assembly(builder, lines, "", [])


await_products = Intrinsic("await_products", "void()", ptx=_wait(0))
await_older_products = Intrinsic("await_older_products", "void()", ptx=_wait(1))
publish = Intrinsic(
    "publish",
    "void()",
    ptx=lambda builder, _: _assembly(builder, ["fence.proxy.async.shared::cta;"], "", []),
)

# Two halves of a word each: a + b, and a * b + c, rounded once.
add_halves = Intrinsic("add_halves", "i32(i32, i32)", ptx=("add.rn.f16x2 $0, $1, $2;", "=r,r,r"))
fma_halves = Intrinsic(
    "fma_halves",
    "i32(i32, i32, i32)",
    ptx=("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"),
)
# A quotient, at most two units in the last place off. An exact one is a function that is called,
# and in a kernel that calls any, no product goes on beside other instructions.
nearly_divided = Intrinsic(
    "nearly_divided", "f32(f32, f32)", ptx=("div.full.f32 $0, $1, $2;", "=f,f,f")
)
