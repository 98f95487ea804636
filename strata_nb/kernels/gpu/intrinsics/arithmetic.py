"""Arithmetic and changes of type: of floats, halves, integers, and bytes of a word."""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import (
    Emit,
    Intrinsic,
    by_age,
    constant,
    llvm,
    llvm_call,
    llvm_type,
)


def amd_dp4a(*, signed: bool) -> Emit:
    """Multiply byte by byte in plain LLVM: a card with an instruction for it finds it itself.

    signed   whether the first bytes are
    """

    def emit(builder: Any, arguments: list[Any]) -> Any:
        ir = llvm()
        i32, i8 = ir.IntType(32), ir.IntType(8)
        widen = builder.sext if signed else builder.zext
        first, second, total = arguments
        for number in range(4):
            shift = constant(8 * number)
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
    amdgpu=amd_dp4a(signed=True),
)
# The same of unsigned bytes of a and signed ones of b.
dp4a_u8 = Intrinsic(
    "dp4a_u8",
    "i32(i32, i32, i32)",
    ptx=("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r"),
    amdgpu=amd_dp4a(signed=False),
)


def _as(kind: str) -> Emit:
    return lambda builder, arguments: builder.bitcast(arguments[0], llvm_type(kind))


def float_of_half(builder: Any, arguments: list[Any]) -> Any:
    ir = llvm()
    bits = builder.trunc(arguments[0], ir.IntType(16))
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _half_of_float(builder: Any, arguments: list[Any]) -> Any:
    ir = llvm()
    half = builder.fptrunc(arguments[0], ir.HalfType())
    return builder.zext(builder.bitcast(half, ir.IntType(16)), ir.IntType(32))


def _two_halves_of_floats(builder: Any, arguments: list[Any]) -> Any:
    first, second = (_half_of_float(builder, [one]) for one in arguments)
    return builder.or_(first, builder.shl(second, constant(16)))


def _amd_nearest(builder: Any, arguments: list[Any]) -> Any:
    rounded = llvm_call("llvm.rint.f32", "f32(f32)")(builder, arguments)
    return builder.fptosi(rounded, llvm_type("i32"))


bits_of_f32 = Intrinsic("bits_of_f32", "i32(f32)", body=_as("i32"))
f32_of_bits = Intrinsic("f32_of_bits", "f32(i32)", body=_as("f32"))
# The lower 16 bits as a half, and the half nearest to a float (ties to even; beyond: infinity).
f32_of_half = Intrinsic(
    "f32_of_half",
    "f32(i32)",
    ptx=("{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }", "=f,r"),
    amdgpu=float_of_half,
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
    amdgpu=llvm_call("llvm.fma.f32", "f32(f32, f32, f32)"),
)
# The larger of two floats, the other one where one is NaN. Python's max becomes a call of NVIDIA's.
larger_f32 = Intrinsic(
    "larger_f32",
    "f32(f32, f32)",
    ptx=("max.f32 $0, $1, $2;", "=f,f,f"),
    amdgpu=llvm_call("llvm.maxnum.f32", "f32(f32, f32)"),
)
# 2 ** x to 2 units in the last place, in hardware: its last bits differ between cards. What is
# below the least normal number is 0.
power_of_two = Intrinsic(
    "power_of_two",
    "f32(f32)",
    ptx=("ex2.approx.ftz.f32 $0, $1;", "=f,f"),
    amdgpu=llvm_call("llvm.amdgcn.exp2.f32", "f32(f32)"),
)
# Correctly rounded.
square_root = Intrinsic(
    "square_root",
    "f32(f32)",
    ptx=("sqrt.rn.f32 $0, $1;", "=f,f"),
    amdgpu=llvm_call("llvm.sqrt.f32", "f32(f32)"),
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
# The quotient of two integers that are not negative, rounded down: Python's // takes 64 bits, which
# is a function that is called.
quotient_i32 = Intrinsic(
    "quotient_i32",
    "i32(i32, i32)",
    body=lambda builder, arguments: builder.udiv(*arguments),
)
# How many bits of a word are 1.
bits_set = Intrinsic("bits_set", "i32(i32)", body=llvm_call("llvm.ctpop.i32", "i32(i32)"))
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
