"""Products of attention by warpgroups, on cards of compute capability 9.0.

As `warpgroups.py` has them, but sums are values of the kernel, and a product has ended where the
instruction ends: other warpgroups go on meanwhile.

A matrix of halves has 64 columns side by side, 128 bytes, and one such *panel* behind another. Lane
4 * g + t of warp w has of rows 16 * w + g and 8 further of A, and of the sums, what it has of a
product of a warp (`matrices.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import Intrinsic, llvm_type
from strata_nb.kernels.gpu.intrinsics.memory import in_shared

_ADDRESS = 0x3FFFF
_STEP = 16
_SWIZZLED = 1 << 62


def _descriptor(builder: Any, offset: Any, leading: int, stride: int) -> Any:
    from llvmlite import ir

    word, wide = ir.IntType(32), ir.IntType(64)
    place = builder.ptrtoint(in_shared(builder, offset, word), word)
    place = builder.lshr(builder.and_(place, ir.Constant(word, _ADDRESS)), ir.Constant(word, 4))
    rest = _SWIZZLED | (stride >> 4) << 32 | (leading >> 4) << 16
    return builder.or_(builder.zext(place, wide), ir.Constant(wide, rest))


def _items(builder: Any, items: Any, count: int) -> list[Any]:
    return [builder.extract_value(items, number) for number in range(count)]


def _call(builder: Any, lines: list[str], results: int, arguments: list[Any], kinds: str) -> Any:
    """Emit an assembly whose first `results` arguments are what it adds to."""
    from llvmlite import ir

    outputs = ["=f"] * results
    inputs = [str(number) for number in range(results)] + list(kinds)
    constraints = ",".join([*outputs, *inputs, "~{memory}"])
    result = llvm_type(f"{results}xf32")
    kind = ir.FunctionType(result, [one.type for one in arguments])
    code = ir.InlineAsm(kind, "\\0A\\09".join(lines), constraints, True)
    return builder.call(code, arguments, attrs=("convergent",))


@cache
def score_products(cells: int, steps: int) -> Intrinsic:
    """Return (sums, queries, keys): sums of 64 queries with so many cells, of 16 * steps values.

    queries are 4 words of each step, keys where the matrix of cells begins; its panels follow each
    other.
    """
    count = cells // 2
    panel = 128 * cells

    def emit(builder: Any, arguments: list[Any]) -> Any:
        keys = _descriptor(builder, arguments[2], 16, 1024)
        names = ", ".join(f"${number}" for number in range(count))
        first = 2 * count
        desc = f"${first + 4 * steps}"
        lines = ["{ .reg .pred p; .reg .b64 b; setp.eq.u32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
        for step in range(steps):
            a = ", ".join(f"${first + 4 * step + n}" for n in range(4))
            further = (step // 4 * panel + 32 * (step % 4)) >> 4
            lines += [
                f"add.s64 b, {desc}, {further};",
                f"wgmma.mma_async.sync.aligned.m64n{cells}k16.f32.f16.f16 {{{names}}}, "
                f"{{{a}}}, b, p, 1, 1, 0;",
            ]
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
        items = _items(builder, arguments[0], count) + _items(builder, arguments[1], 4 * steps)
        return _call(builder, lines, count, [*items, keys], "r" * 4 * steps + "l")

    kinds = f"{count}xf32({count}xf32, {4 * steps}xi32, i64)"
    return Intrinsic(f"score_products_{cells}_{steps}", kinds, ptx=emit)


@cache
def mixed_products(values: int, cells: int) -> Intrinsic:
    """Return (sums, weights, place): sums and values times weights of so many cells.

    weights are 4 words of each 16 cells, place where the matrix of cells begins.
    """
    count, steps = values // 2, cells // _STEP
    panel = 128 * cells

    def emit(builder: Any, arguments: list[Any]) -> Any:
        place = _descriptor(builder, arguments[2], panel, 1024)
        names = ", ".join(f"${number}" for number in range(count))
        first = 2 * count
        desc = f"${first + 4 * steps}"
        lines = ["{ .reg .pred p; .reg .b64 b; setp.eq.u32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
        for step in range(steps):
            a = ", ".join(f"${first + 4 * step + n}" for n in range(4))
            lines += [
                f"add.s64 b, {desc}, {(step * _STEP * 128) >> 4};",
                f"wgmma.mma_async.sync.aligned.m64n{values}k16.f32.f16.f16 {{{names}}}, "
                f"{{{a}}}, b, p, 1, 1, 1;",
            ]
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
        items = _items(builder, arguments[0], count) + _items(builder, arguments[1], 4 * steps)
        return _call(builder, lines, count, [*items, place], "r" * 4 * steps + "l")

    kinds = f"{count}xf32({count}xf32, {4 * steps}xi32, i64)"
    return Intrinsic(f"mixed_products_{values}_{cells}", kinds, ptx=emit)
