"""Products of matrices that a warp computes together, and how their words come from memory.

A warp multiplies A, 16 rows of 16 halves, with B, 16 rows of 8 halves, and adds the product to C,
16 rows of 8 floats. Of lane 4 * g + t, in words of two halves (the lower one first):

    A   rows g and g + 8, columns 2 * t and 2 * t + 1, then both 8 columns further: four words
    B   column g, rows 2 * t and 2 * t + 1, then 8 rows further: two words
    C   rows g and g + 8, columns 2 * t and 2 * t + 1: four floats

Products are exact; how their sums are rounded is the card's own, the same every time. Targets
before 8.0 multiply 8 columns of A at a time.
"""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics.arithmetic import amd_dp4a, float_of_half
from strata_nb.kernels.gpu.intrinsics.intrinsic import (
    WARP,
    Emit,
    Intrinsic,
    as_tuple,
    by_age,
    constant,
    escaped,
    llvm,
    llvm_call,
    llvm_type,
)
from strata_nb.kernels.gpu.intrinsics.lanes import amd_lane, amd_word_of
from strata_nb.kernels.gpu.intrinsics.memory import in_shared

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
    ir = llvm()
    kind = ir.FunctionType(llvm_type("4xf32"), [one.type for one in arguments])
    operands = ",".join(["=&f"] * 4 + ["r"] * 6 + ["f"] * 4)
    text, constraints = by_age(80, _MMA, _MMA_BEFORE, operands)
    code = ir.InlineAsm(kind, escaped(text), constraints, True)
    return builder.call(code, arguments, attrs=("convergent",))  # all lanes together, or none


def _amd_mma(builder: Any, arguments: list[Any]) -> Any:
    """Fetch the words of A and B from the lanes that have them, and multiply in plain floats."""
    a, b, sums = arguments[:4], arguments[4:6], arguments[6:]
    lane = amd_lane(builder)
    t = builder.and_(lane, constant(3))
    row = builder.sub(lane, t)  # the first lane that has this one's row
    column = builder.add(builder.and_(lane, constant(-WARP)), builder.shl(t, constant(3)))
    for half, word in ((half, word) for half in range(2) for word in range(4)):
        rows_of = [amd_word_of(builder, one, row, word) for one in a[2 * half :][:2]]
        columns_of = [amd_word_of(builder, b[half], column, at + word) for at in (0, 4)]
        for shift in (0, 16):
            rows, columns = (
                [float_of_half(builder, [builder.lshr(one, constant(shift))]) for one in pair]
                for pair in (rows_of, columns_of)
            )
            for number in range(4):
                factors = [rows[number >> 1], columns[number & 1], sums[number]]
                sums[number] = llvm_call("llvm.fma.f32", "f32(f32, f32, f32)")(builder, factors)
    return as_tuple(builder, sums)


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
        ir = llvm()
        kind = ir.FunctionType(llvm_type("4xi32"), [one.type for one in arguments])
        text, constraints = _byte_mma(columns)
        code = ir.InlineAsm(kind, escaped(text), constraints, True)
        return builder.call(code, arguments, attrs=("convergent",))  # all lanes together, or none

    return emit


def _amd_byte_mma(columns: int) -> Emit:
    """Fetch the words of A and B from the lanes that have them, and multiply byte by byte."""

    halves = columns // 16

    def multiply(builder: Any, arguments: list[Any]) -> Any:
        a, b, sums = arguments[: 2 * halves], arguments[2 * halves : 3 * halves], arguments[-4:]
        lane = amd_lane(builder)
        t = builder.and_(lane, constant(3))
        row = builder.sub(lane, t)  # the first lane that has this one's row
        column = builder.add(builder.and_(lane, constant(-WARP)), builder.shl(t, constant(3)))
        product = amd_dp4a(signed=True)
        for half in range(halves):
            for word in range(4):
                rows = [amd_word_of(builder, one, row, word) for one in a[2 * half :][:2]]
                columns_of = [amd_word_of(builder, b[half], column, at + word) for at in (0, 4)]
                for number in range(4):
                    factors = [rows[number >> 1], columns_of[number & 1], sums[number]]
                    sums[number] = product(builder, factors)
        return as_tuple(builder, sums)

    def emit(builder: Any, arguments: list[Any]) -> Any:
        # Kernels multiply in many places: this is a function of its own, so that code stays small.
        ir, module = llvm(), builder.module
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


def _nvidia_matrices(order: str) -> Emit:
    """Return what loads them; order: "", or ".trans" for turned ones."""
    text = f"ldmatrix.sync.aligned.m8n8.x4{order}.shared.b16 {{$0, $1, $2, $3}}, [$4];"

    def emit(builder: Any, arguments: list[Any]) -> Any:
        ir, word = llvm(), llvm_type("i32")
        place = builder.ptrtoint(in_shared(builder, arguments[0], word), word)
        kind = ir.FunctionType(llvm_type("4xi32"), [place.type])
        code = ir.InlineAsm(kind, text, "=r,=r,=r,=r,r,~{memory}", True)
        return builder.call(code, [place], attrs=("convergent",))  # all lanes together, or none

    return emit


def _amd_matrices(builder: Any, arguments: list[Any]) -> Any:
    word, wide = llvm_type("i32"), llvm_type("i64")
    lane = amd_lane(builder)
    first = builder.and_(lane, constant(-WARP))
    row = builder.add(first, builder.lshr(builder.and_(lane, constant(WARP - 1)), constant(2)))
    column = builder.shl(builder.and_(lane, constant(3)), constant(2))
    offset = builder.trunc(arguments[0], word)
    words = []
    for number in range(4):
        place = builder.add(amd_word_of(builder, offset, row, 8 * number), column)
        pointer = in_shared(builder, builder.sext(place, wide), word)
        words.append(builder.load(pointer, align=4))
    return as_tuple(builder, words)


shared_load_matrices = Intrinsic(
    "shared_load_matrices", "4xi32(i64)", ptx=_nvidia_matrices(""), amdgpu=_amd_matrices
)


def _amd_turned(builder: Any, arguments: list[Any]) -> Any:
    """Load the halves of column g in rows 2 * t and 2 * t + 1 of each block."""
    word, half, wide = llvm_type("i32"), llvm().IntType(16), llvm_type("i64")
    lane = amd_lane(builder)
    first = builder.and_(lane, constant(-WARP))
    row = builder.add(first, builder.shl(builder.and_(lane, constant(3)), constant(1)))
    g = builder.lshr(builder.and_(lane, constant(WARP - 1)), constant(2))
    column = builder.shl(g, constant(1))
    offset = builder.trunc(arguments[0], word)
    words = []
    for number in range(4):
        halves = []
        for which in (0, 1):
            place = builder.add(amd_word_of(builder, offset, row, 8 * number + which), column)
            pointer = in_shared(builder, builder.sext(place, wide), half)
            halves.append(builder.zext(builder.load(pointer, align=2), word))
        words.append(builder.or_(halves[0], builder.shl(halves[1], constant(16))))
    return as_tuple(builder, words)


# The same blocks, each turned: lane 4 * g + t gets half g of rows 2 * t and 2 * t + 1, which are
# its words of B where a block has the rows of B in its rows.
shared_load_turned = Intrinsic(
    "shared_load_turned", "4xi32(i64)", ptx=_nvidia_matrices(".trans"), amdgpu=_amd_turned
)
