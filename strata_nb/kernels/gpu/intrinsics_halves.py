"""Name three more instructions, which attention of a prompt batch uses.

As `intrinsics.py` has them.
"""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    Intrinsic,
    _amd_lane,
    _amd_shuffle,
    _amd_word_of,
    _call,
    _ir,
    _shared,
    llvm_type,
)


def _nvidia_turned(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    place = builder.ptrtoint(_shared(builder, arguments[0], llvm_type("i32")), llvm_type("i32"))
    kind = ir.FunctionType(llvm_type("4xi32"), [place.type])
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    code = ir.InlineAsm(kind, text, "=r,=r,=r,=r,r,~{memory}", True)
    return builder.call(code, [place], attrs=("convergent",))  # all lanes together, or none


def _amd_turned(builder: Any, arguments: list[Any]) -> Any:
    """Load the halves of column g in rows 2 * t and 2 * t + 1 of each block."""
    ir = _ir()
    word, half, wide = llvm_type("i32"), ir.IntType(16), llvm_type("i64")

    def constant(value: int) -> Any:
        return ir.Constant(word, value)

    lane = _amd_lane(builder)
    first = builder.and_(lane, constant(-WARP))
    row = builder.add(first, builder.shl(builder.and_(lane, constant(3)), constant(1)))
    column = builder.and_(builder.lshr(lane, constant(1)), constant(14))
    offset = builder.trunc(arguments[0], word)
    found = ir.Constant(llvm_type("4xi32"), ir.Undefined)
    for number in range(4):
        halves = []
        for which in (0, 1):
            place = builder.add(_amd_word_of(builder, offset, row, 8 * number + which), column)
            one = builder.load(_shared(builder, builder.sext(place, wide), half), align=2)
            halves.append(builder.zext(one, word))
        pair = builder.or_(halves[0], builder.shl(halves[1], constant(16)))
        found = builder.insert_value(found, pair, number)
    return found


# Four blocks of eight rows of 16 bytes as `shared_load_matrices` has them, each turned: lane
# 4 * g + t gets half g of rows 2 * t and 2 * t + 1, which are its words of B above.
shared_load_turned = Intrinsic(
    "shared_load_turned", "4xi32(i64)", ptx=_nvidia_turned, amdgpu=_amd_turned
)

# 2 ** x to 2 units in the last place, in hardware: its last bits differ between cards. What is
# below the least normal number is 0.
power_of_two = Intrinsic(
    "power_of_two",
    "f32(f32)",
    ptx=("ex2.approx.ftz.f32 $0, $1;", "=f,f"),
    amdgpu=_call("llvm.amdgcn.exp2.f32", "f32(f32)"),
)


def _nvidia_any(builder: Any, arguments: list[Any]) -> Any:
    ir = _ir()
    word, bit = llvm_type("i32"), ir.IntType(1)
    is_so = builder.icmp_unsigned("!=", arguments[0], ir.Constant(word, 0))
    vote = _call("llvm.nvvm.vote.any.sync", "i1(i32, i1)")
    return builder.zext(vote(builder, [ir.Constant(word, -1), is_so]), word)


def _amd_any(builder: Any, arguments: list[Any]) -> Any:
    (found,) = arguments
    for distance in (16, 8, 4, 2, 1):
        other = _amd_shuffle(builder, [found, _ir().Constant(llvm_type("i32"), distance)])
        found = builder.or_(found, other)
    return found


# 0 where the argument is 0 in all lanes of a warp, something else in all of them where it is not.
# All 32 lanes take part.
of_any_lane = Intrinsic("of_any_lane", "i32(i32)", ptx=_nvidia_any, amdgpu=_amd_any)
