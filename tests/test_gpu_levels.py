"""What either vendor makes of other instructions to look bytes up, computed step by step.

The simulator knows what the whole does; here the code that a card runs is carried out on integers,
with the instruction that it is made of as the vendor's manual describes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_simulator
import numpy as np
import pytest

from strata_nb.kernels.gpu.intrinsics import bytes_of_words
from strata_nb.quants.decoders import IQ4_LEVELS


class Builder:
    """Carries out at once what it is asked to emit, on words of 32 bits."""

    def and_(self, a: Any, b: Any) -> int:
        return _word(a) & _word(b)

    def or_(self, a: Any, b: Any) -> int:
        return _word(a) | _word(b)

    def xor(self, a: Any, b: Any) -> int:
        return _word(a) ^ _word(b)

    def add(self, a: Any, b: Any) -> int:
        return _word(a) + _word(b) & 0xFFFFFFFF

    def mul(self, a: Any, b: Any) -> int:
        return _word(a) * _word(b) & 0xFFFFFFFF

    def shl(self, a: Any, b: Any) -> int:
        return _word(a) << _word(b) & 0xFFFFFFFF

    def lshr(self, a: Any, b: Any) -> int:
        return _word(a) >> _word(b)


def _word(value: Any) -> int:
    return int(getattr(value, "constant", value)) & 0xFFFFFFFF


def prmt(a: Any, b: Any, selector: Any) -> int:
    """PTX ISA, prmt.b32: four nibbles select bytes, 0 to 3 of a; a high bit repeats the sign."""
    pool, found = _word(a) | _word(b) << 32, 0
    for number in range(4):
        nibble = _word(selector) >> 4 * number & 15
        byte = pool >> 8 * (nibble & 7) & 255
        if nibble & 8:
            byte = 255 * (byte >> 7)
        found |= byte << 8 * number
    return found


def v_perm_b32(a: Any, b: Any, selector: Any) -> int:
    """RDNA ISA, V_PERM_B32: four bytes select bytes, b's are 0 to 3; from 8 on they mean others."""
    pool, found = _word(a) << 32 | _word(b), 0
    for number in range(4):
        byte = _word(selector) >> 8 * number & 255
        assert byte < 8
        found |= (pool >> 8 * byte & 255) << 8 * number
    return found


@pytest.mark.parametrize(
    ("emit", "permute"),
    [(bytes_of_words._nvidia_levels, prmt), (bytes_of_words._amd_levels, v_perm_b32)],
    ids=["nvidia", "amd"],
)
def test_both_vendors_look_levels_up(
    emit: Callable[..., tuple[Any, Any]], permute: Callable[..., int]
) -> None:
    levels = np.array(IQ4_LEVELS, np.int8).view(np.int32).tolist()
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 64).tolist()
    for word in (*words, 0x76543210, -0x01234568, 0, -1):
        found = emit(Builder(), permute, [word, *levels])
        expected = gpu_simulator._levels_of(word, *levels)
        assert [_word(one) for one in found] == [_word(one) for one in expected], hex(word)


@pytest.mark.parametrize(
    ("emit", "permute"),
    [(bytes_of_words._nvidia_level_parts, prmt), (bytes_of_words._amd_level_parts, v_perm_b32)],
    ids=["nvidia", "amd"],
)
def test_the_parts_of_levels_add_up_to_them(
    emit: Callable[..., tuple[Any, Any]], permute: Callable[..., int]
) -> None:
    levels = np.array(IQ4_LEVELS, np.int8).view(np.int32).tolist()
    for word in np.random.default_rng(1).integers(-(2**31), 2**31, 64).tolist():
        expected = [IQ4_LEVELS[word >> 4 * number & 15] for number in range(4)]
        for parts in (
            emit(Builder(), permute, [word, *levels]),
            gpu_simulator._level_parts(word, *levels),
        ):
            pair = np.array([_word(one) for one in parts], np.uint32).view(np.int8).reshape(2, 4)
            assert pair.sum(axis=0, dtype=int).tolist() == expected, hex(word)


def test_a_sign_becomes_a_byte() -> None:
    for word in (0, -1, 0x7F80FF00, -0x7F7F80FF):
        bytes_of = np.array([word], np.int32).view(np.int8)
        expected = np.where(bytes_of < 0, -1, 0).astype(np.int8).view(np.int32)[0]
        assert gpu_simulator._PLAIN["sign_bytes"](word) == expected
        assert _word(bytes_of_words._amd_sign_bytes(Builder(), [word])) == _word(expected)
        assert prmt(word, 0, 0xBA98) == _word(expected)


def test_bytes_are_chosen_by_number_from_two_words() -> None:
    first, second = 0x33221100, 0x77665544
    for one in (
        bytes_of_words.even_bytes,
        bytes_of_words.odd_bytes,
        bytes_of_words.low_bytes_in_turn,
        bytes_of_words.high_bytes_in_turn,
    ):
        expected = sum(0x11 * number << 8 * place for place, number in enumerate(one.numbers))
        assert gpu_simulator._permutation(one)(first, second) == expected
        selector = int(one.ptx[0].rpartition(", ")[2].rstrip(";"))
        assert prmt(first, second, selector) == expected


def test_nibbles_number_bytes_of_two_words() -> None:
    first, second = 0x33221100, 0x77665544
    for numbers in (0x3210, 0x7654, 0x0725, 0x12340000):
        expected = sum(0x11 * (numbers >> 4 * place & 15) << 8 * place for place in range(4))
        assert gpu_simulator._PLAIN["bytes_by_nibbles"](first, second, numbers) == expected
        assert prmt(first, second, numbers) == expected
        selector = bytes_of_words._bytes_of_nibbles(Builder(), numbers)
        assert v_perm_b32(second, first, selector) == expected
