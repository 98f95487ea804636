"""What differs between processors: products of bytes, tables of sixteen, float16.

`dot` has four forms, all with the same integers as a result:

    avx512_vnni   vpdpbusd on 64 bytes        avx2      vpmaddubsw or, where that could saturate,
    avx_vnni      vpdpbusd on 32 bytes                  vpmaddwd on 16-bit integers
                                              generic   LLVM's plain widening multiplication
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types

from strata_nb.compiling import instruction
from strata_nb.kernels.host.capability import PATH, Path
from strata_nb.kernels.host.vectors import BYTES, INTEGERS, Vector, call, shuffled


@instruction
def floats_of_halves(_: Any, value: Any) -> Any:
    """Return float16 numbers, held as u16, as float32, exactly; NaN stays NaN.

    In integers: exponent and mantissa move to their place in a float32, whose exponent is 112
    larger; a multiplication by 2 ** 112 adds that and makes subnormal numbers right as well.
    """

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        result = Vector("f32", value.lanes).llvm
        if PATH is not Path.GENERIC:
            halves = builder.bitcast(arguments[0], Vector("f16", value.lanes).llvm)
            return builder.fpext(halves, result)
        wide = Vector("i32", value.lanes).llvm

        def every(number: int) -> ir.Constant:
            return ir.Constant(wide, [number] * value.lanes)

        halves = builder.zext(arguments[0], wide)
        sign = builder.shl(builder.and_(halves, every(0x8000)), every(16))
        magnitude = builder.and_(halves, every(0x7FFF))
        moved = builder.shl(magnitude, every(13))
        factor = ir.Constant(result, [2.0**112] * value.lanes)
        scaled = builder.bitcast(builder.fmul(builder.bitcast(moved, result), factor), wide)
        special = builder.or_(moved, every(0x7F800000))
        is_special = builder.icmp_unsigned(">=", magnitude, every(0x7C00))
        bits = builder.or_(sign, builder.select(is_special, special, scaled))
        return builder.bitcast(bits, result)

    return Vector("f32", value.lanes)(value), generate


@instruction
def halves_of_floats(_: Any, value: Any) -> Any:
    """Return float32 numbers as float16, held as u16: to nearest, ties to even; NaN stays NaN.

    What is too large becomes infinity. In integers: the exponent of a normal number becomes smaller
    by 112 and the 13 bits that float16 lacks are rounded away, a carry moving into the exponent.
    A number below 2 ** -14 is added to 0.5, whose last place is the smallest float16, so that the
    addition rounds it.
    """

    def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        lanes = value.lanes
        result = Vector("u16", lanes).llvm
        if PATH is not Path.GENERIC:
            halves = builder.fptrunc(arguments[0], Vector("f16", lanes).llvm)
            return builder.bitcast(halves, result)
        wide, floats = Vector("i32", lanes).llvm, Vector("f32", lanes).llvm

        def every(number: int) -> ir.Constant:
            return ir.Constant(wide, [number] * lanes)

        def smaller(limit: int) -> Any:
            return builder.icmp_unsigned("<", magnitude, every(limit))

        bits = builder.bitcast(arguments[0], wide)
        magnitude = builder.and_(bits, every(0x7FFFFFFF))
        upper = builder.lshr(magnitude, every(13))
        odd = builder.and_(upper, every(1))
        rounded = builder.add(magnitude, builder.add(odd, every(0xFFF)))
        normal = builder.sub(builder.lshr(rounded, every(13)), every(112 << 10))
        half = ir.Constant(floats, [0.5] * lanes)
        sum_bits = builder.bitcast(builder.fadd(builder.bitcast(magnitude, floats), half), wide)
        small = builder.sub(sum_bits, every(0x3F000000))
        nan = builder.or_(builder.and_(upper, every(0x3FF)), every(0x7E00))
        found = builder.select(smaller(0x38800000), small, normal)
        found = builder.select(smaller(0x477FF000), found, every(0x7C00))
        found = builder.select(smaller(0x7F800001), found, nan)
        sign = builder.and_(builder.lshr(bits, every(16)), every(0x8000))
        return builder.trunc(builder.or_(found, sign), result)

    return Vector("u16", value.lanes)(value), generate


def look_up(levels: Sequence[int]) -> Callable[..., Any]:
    """Return a function that replaces each of 64 bytes (0 .. 15) by the level of that number."""
    table = [level & 255 for level in levels]

    @instruction
    def replace(_: Any, value: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            numbers = arguments[0]
            if PATH is Path.GENERIC:
                return _chosen(builder, numbers, table)
            if PATH is Path.AVX512_VNNI:
                constants = ir.Constant(BYTES.llvm, table * 4)
                name = "llvm.x86.avx512.pshuf.b.512"
                return call(builder, name, BYTES.llvm, constants, numbers)
            half = ir.VectorType(ir.IntType(8), 32)
            constants = ir.Constant(half, table * 2)
            return _by_halves(
                builder,
                BYTES.llvm,
                [numbers],
                lambda part: call(builder, "llvm.x86.avx2.pshuf.b", half, constants, part[0]),
            )

        return BYTES(BYTES), generate

    return replace


def _chosen(builder: Any, numbers: Any, table: Sequence[int]) -> Any:
    """Choose among 16 levels by the four bits of each number: 15 selections, on any machine."""
    levels = [ir.Constant(BYTES.llvm, [level] * 64) for level in table]
    for bit in range(4):
        mask = builder.icmp_unsigned(
            "!=",
            builder.and_(numbers, ir.Constant(BYTES.llvm, [1 << bit] * 64)),
            ir.Constant(BYTES.llvm, [0] * 64),
        )
        pairs = zip(levels[0::2], levels[1::2], strict=True)
        levels = [builder.select(mask, odd, even) for even, odd in pairs]
    return levels[0]


def _by_halves(
    builder: Any, result: ir.VectorType, vectors: Sequence[Any], work: Callable[[list[Any]], Any]
) -> Any:
    """Do the work on the lower and the upper half of vectors; join what comes back."""
    halves = []
    for upper in (0, 1):
        parts = []
        for vector in vectors:
            count = vector.type.count // 2
            parts.append(shuffled(builder, vector, range(upper * count, (upper + 1) * count)))
        halves.append(work(parts))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), result.count), list(range(result.count)))
    return builder.shuffle_vector(halves[0], halves[1], lanes)


@instruction
def prefetch_far(_: Any, address: Any) -> Any:
    """Ask for a cache line that is read only after much else; any address is harmless.

    It goes to the second-level cache: the first would lose it again, and the few reads that the
    first can wait for at once limit what comes from memory.
    """

    def generate(context: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        reads, second_level, data = (ir.Constant(number, value) for value in (0, 2, 1))
        builder.call(function, [pointer, reads, second_level, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# -- the product of bytes --------------------------------------------------------------------------


def _dot_vnni(builder: Any, width: int, sums: Any, unsigned: Any, signed: Any) -> Any:
    words = ir.VectorType(ir.IntType(32), width // 32)
    parts = [builder.bitcast(part, words) for part in (unsigned, signed)]
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{width}", words, sums, *parts)


def _dot_avx2(builder: Any, narrow: bool, sums: Any, unsigned: Any, signed: Any) -> Any:
    """Multiply 32 bytes; narrow ones (0 .. 127) cannot saturate the 16 bits of two products."""
    words, shorts = ir.VectorType(ir.IntType(32), 8), ir.VectorType(ir.IntType(16), 16)

    def multiply(left: Any, right: Any) -> Any:
        return call(builder, "llvm.x86.avx2.pmadd.wd", words, left, right)

    if narrow:
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, unsigned, signed)
        return builder.add(sums, multiply(pairs, ir.Constant(shorts, [1] * 16)))
    eight = ir.Constant(shorts, [8] * 16)
    low = ir.Constant(shorts, [255] * 16)
    u, s = builder.bitcast(unsigned, shorts), builder.bitcast(signed, shorts)
    even = multiply(builder.and_(u, low), builder.ashr(builder.shl(s, eight), eight))
    odd = multiply(builder.lshr(u, eight), builder.ashr(s, eight))
    return builder.add(sums, builder.add(even, odd))


def _dot_generic(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    wide = ir.VectorType(ir.IntType(32), 64)
    products = builder.mul(builder.zext(unsigned, wide), builder.sext(signed, wide))
    for step in range(4):
        sums = builder.add(sums, shuffled(builder, products, range(step, 64, 4)))
    return sums


def _dot(narrow: bool) -> Callable[..., Any]:
    @instruction
    def dot(_: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
        def generate(_: Any, builder: Any, _typed: Any, arguments: Sequence[Any]) -> Any:
            if PATH is Path.AVX512_VNNI:
                return _dot_vnni(builder, 512, *arguments)
            if PATH is Path.GENERIC:
                return _dot_generic(builder, *arguments)
            if PATH is Path.AVX_VNNI:
                return _by_halves(
                    builder,
                    INTEGERS.llvm,
                    arguments,
                    lambda parts: _dot_vnni(builder, 256, *parts),
                )
            return _by_halves(
                builder, INTEGERS.llvm, arguments, lambda parts: _dot_avx2(builder, narrow, *parts)
            )

        return INTEGERS(INTEGERS, BYTES, BYTES), generate

    return dot


dot_narrow = _dot(narrow=True)  # sums + unsigned x signed, four products a lane; unsigned <= 127
dot_wide = _dot(narrow=False)  # the same for unsigned up to 255
