"""Bytes chosen from words: by fixed numbers, and by nibbles, as levels of quantised values are.

Both vendors have an instruction that chooses four of eight bytes, with selectors of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata_nb.kernels.gpu.intrinsics.intrinsic import (
    Emit,
    Intrinsic,
    as_tuple,
    constant,
    llvm_call,
)


class BytesOf(Intrinsic):
    """Four bytes of two words: numbers 0 to 3 are those of the first, 4 to 7 of the second."""

    def __init__(self, name: str, numbers: tuple[int, int, int, int]) -> None:
        self.numbers = numbers
        selector = sum(number << 4 * place for place, number in enumerate(numbers))
        super().__init__(
            name,
            "i32(i32, i32)",
            ptx=(f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r"),
            amdgpu=self._amd,
        )

    def _amd(self, builder: Any, arguments: list[Any]) -> Any:
        """A selector is a word of bytes here, and counts from the second argument's."""
        permute = llvm_call("llvm.amdgcn.perm", "i32(i32, i32, i32)")
        selector = sum(number << 8 * place for place, number in enumerate(self.numbers))
        first, second = arguments
        return permute(builder, [second, first, constant(selector)])


even_bytes = BytesOf("even_bytes", (0, 2, 4, 6))
odd_bytes = BytesOf("odd_bytes", (1, 3, 5, 7))
low_bytes_in_turn = BytesOf("low_bytes_in_turn", (0, 4, 1, 5))
high_bytes_in_turn = BytesOf("high_bytes_in_turn", (2, 6, 3, 7))
low_halves = BytesOf("low_halves", (0, 1, 4, 5))
high_halves = BytesOf("high_halves", (2, 3, 6, 7))


def _levels(permute: str, emit: Callable[[Any, Any, list[Any]], tuple[Any, Any]]) -> Emit:
    """Return what looks nibbles up by a vendor's instruction that permutes the bytes of two words.

    emit   of the builder, the instruction and the arguments: the two results
    """

    def whole(builder: Any, arguments: list[Any]) -> Any:
        call = llvm_call(permute, "i32(i32, i32, i32)")
        found = emit(builder, lambda *words: call(builder, list(words)), arguments)
        return as_tuple(builder, found)

    return whole


def _nvidia_levels(builder: Any, permute: Any, arguments: list[Any]) -> tuple[Any, Any]:
    """Four nibbles of a word select four bytes of eight; their highest bits then one of two.

    The selector is the lower half of a word, and the highest bit of a nibble in it repeats the sign
    of the byte instead: it is masked, and chooses between the lower and the upper eight levels.
    """
    word, a, b, c, d = arguments
    below = builder.and_(word, constant(0x77777777))
    above = builder.lshr(builder.and_(word, constant(0x88888888)), constant(1))
    choice = builder.or_(above, constant(0x32103210))
    halves = []
    for shift in (constant(0), constant(16)):
        selector = builder.lshr(below, shift)
        lower, upper = permute(a, b, selector), permute(c, d, selector)
        halves.append(permute(lower, upper, builder.lshr(choice, shift)))
    return permute(*halves, constant(0x6420)), permute(*halves, constant(0x7531))


def _amd_levels(builder: Any, permute: Any, arguments: list[Any]) -> tuple[Any, Any]:
    """Each byte of a selector chooses one byte of eight; numbers count from the second word."""
    word, a, b, c, d = arguments
    found = []
    for shift in (constant(0), constant(4)):
        nibbles = builder.lshr(word, shift)
        selector = builder.and_(nibbles, constant(0x07070707))
        above = builder.lshr(builder.and_(nibbles, constant(0x08080808)), constant(1))
        lower, upper = permute(b, a, selector), permute(d, c, selector)
        found.append(permute(upper, lower, builder.or_(above, constant(0x03020100))))
    return found[0], found[1]


# Of sixteen bytes, given as four words, those that the low nibbles of a word number, and those that
# its high nibbles number.
levels_of = Intrinsic(
    "levels_of",
    "2xi32(i32, i32, i32, i32, i32)",
    ptx=_levels("llvm.nvvm.prmt", _nvidia_levels),
    amdgpu=_levels("llvm.amdgcn.perm", _amd_levels),
)


def _amd_sign_bytes(builder: Any, arguments: list[Any]) -> Any:
    ones = builder.lshr(arguments[0], constant(7))
    ones = builder.and_(ones, constant(0x01010101))
    return builder.mul(ones, constant(255))


# -1 in each byte of a word that is negative, 0 in the others.
sign_bytes = Intrinsic(
    "sign_bytes",
    "i32(i32)",
    ptx=("prmt.b32 $0, $1, 0, 0xBA98;", "=r,r"),
    amdgpu=_amd_sign_bytes,
)


def _nvidia_level_parts(builder: Any, permute: Any, arguments: list[Any]) -> tuple[Any, Any]:
    """The highest bit of a nibble in a selector repeats the sign of the byte that the others
    choose: below 8 that is 0 in the upper part, from 8 on -1 in the lower one, so 1 is added."""
    word, a, b, c, d = arguments
    c, d = (builder.add(one, constant(0x01010101)) for one in (c, d))
    return permute(a, b, word), permute(c, d, builder.xor(word, constant(0x8888)))


def _bytes_of_nibbles(builder: Any, word: Any) -> Any:
    """Return the four low nibbles of a word as bytes."""
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F)):
        kept = builder.and_(word, constant(0xFFFF)) if shift == 8 else word
        word = builder.and_(builder.or_(kept, builder.shl(kept, constant(shift))), constant(mask))
    return word


def _amd_level_parts(builder: Any, permute: Any, arguments: list[Any]) -> tuple[Any, Any]:
    """Whole levels, and nothing to add."""
    word, *levels = arguments
    found, _ = _amd_levels(builder, permute, [_bytes_of_nibbles(builder, word), *levels])
    return found, constant(0)


def _amd_bytes_by_nibbles(builder: Any, arguments: list[Any]) -> Any:
    permute = llvm_call("llvm.amdgcn.perm", "i32(i32, i32, i32)")
    first, second, numbers = arguments
    return permute(builder, [second, first, _bytes_of_nibbles(builder, numbers)])


# Of eight bytes, given as two words, those that the four low nibbles of a third number.
bytes_by_nibbles = Intrinsic(
    "bytes_by_nibbles",
    "i32(i32, i32, i32)",
    ptx=llvm_call("llvm.nvvm.prmt", "i32(i32, i32, i32)"),
    amdgpu=_amd_bytes_by_nibbles,
)


# Two words whose bytes, added, are the levels that the four low nibbles of a word number, in their
# order; of the sixteen levels, given as four words, the first eight are below 0 and no others.
level_parts = Intrinsic(
    "level_parts",
    "2xi32(i32, i32, i32, i32, i32)",
    ptx=_levels("llvm.nvvm.prmt", _nvidia_level_parts),
    amdgpu=_levels("llvm.amdgcn.perm", _amd_level_parts),
)
