"""Decoders of the tensor types: one function a type, plain numpy over many blocks at once.

A decoder takes the records of some blocks (their fields: `formats.py`) and fills `out`, float32
(blocks, values). All follow the same steps: unpack small integers, join their low and high bits,
multiply by the scale of their group. Integers stay in bytes, eight of which move as one 64-bit
word; they become float32 only in `out`, where the operations keep the order of ggml's, because the
results have to agree with it bit by bit.

Group scales and minima are products of small integers and the block's float16 numbers; each decoder
shows how they are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_nb.quants import iq_grids

Blocks = NDArray[np.void]  # (blocks,) records
Bytes = NDArray[np.uint8]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]
Decoder = Callable[[Blocks, Float32], None]


# -- parts that the decoders share ---------------------------------------------------------------


def _unpack(packed: Bytes, bits: int, run: int) -> Bytes:
    """Take integers of `bits` bits out of (blocks, bytes); return (blocks, bytes * 8 // bits).

    The bytes come in runs of `run`. The lowest bits of all bytes of a run hold its first `run`
    integers, the next bits the following `run`, and so on.
    """
    blocks, width = packed.shape
    # No integer crosses a byte: eight of them shift as one word, and the mask drops what moved in.
    word = np.dtype(np.uint64 if run % 8 == 0 else np.uint8)
    words = np.ascontiguousarray(packed).view(word).reshape(blocks, width // run, -1)
    mask = word.type(int.from_bytes([2**bits - 1] * word.itemsize, "little"))
    fields = np.empty((blocks, width // run, 8 // bits, words.shape[-1]), word)
    for i in range(8 // bits):
        fields[:, :, i] = (words >> word.type(i * bits)) & mask
    return fields.view(np.uint8).reshape(blocks, -1)


def _join(low: Bytes, high: Bytes, low_bits: int) -> Bytes:
    """Return integers whose lowest `low_bits` bits are in `low`, the others in `high`."""
    return low | high << np.uint8(low_bits)


def _signed(integers: Bytes, offset: int) -> Int8:
    """Return integers - offset; the subtraction wraps to the bytes of the signed numbers."""
    return (integers - np.uint8(offset)).view(np.int8)


def _bit_slices(words: NDArray[Any], bits: int, count: int) -> NDArray[Any]:
    """Return the lowest `count` slices of `bits` bits of each word (blocks, n): (blocks, n, count).

    Unlike the integers of `_unpack` they may cross bytes.
    """
    shifts = np.arange(0, bits * count, bits, dtype=words.dtype)
    slices: NDArray[Any] = words[:, :, None] >> shifts & words.dtype.type(2**bits - 1)
    return slices


def _column(field: NDArray[Any]) -> Float32:
    """Return a field with one number a block as a float32 column (blocks, 1)."""
    return field.astype(np.float32)[:, None]


def _write(out: Float32, quants: Bytes | Int8, scales: Float32) -> None:
    """Fill out (blocks, values) with quants, each times the scale of its group (blocks, groups)."""
    out[...] = quants
    groups = out.reshape(*scales.shape, -1)
    groups *= scales[:, :, None]


def _subtract(out: Float32, minima: Float32) -> None:
    """Subtract from out (blocks, values) the minimum of each group (blocks, groups)."""
    groups = out.reshape(*minima.shape, -1)
    groups -= minima[:, :, None]


# -- floating-point types ------------------------------------------------------------------------


def plain(blocks: Blocks, out: Float32) -> None:
    """Decode F32, F16 and F64."""
    out[:, 0] = blocks["value"]


def bf16(blocks: Blocks, out: Float32) -> None:
    """Decode BF16: the upper half of a float32."""
    out.view(np.uint32)[:, 0] = blocks["high_half"].astype(np.uint32) << np.uint32(16)


# -- one scale for 32 values ---------------------------------------------------------------------


def q4_0(blocks: Blocks, out: Float32) -> None:
    """Decode Q4_0."""
    quants = _unpack(blocks["quants"], 4, run=16)
    _write(out, _signed(quants, 8), _column(blocks["scale"]))


def q4_1(blocks: Blocks, out: Float32) -> None:
    """Decode Q4_1."""
    _write(out, _unpack(blocks["quants"], 4, run=16), _column(blocks["scale"]))
    out += _column(blocks["minimum"])


def _five_bits(blocks: Blocks) -> Bytes:
    """Return the quants of Q5_0 and Q5_1; their top bits are bits 0 to 31 of one field."""
    top = np.unpackbits(np.ascontiguousarray(blocks["high"]), axis=1, bitorder="little")
    return _join(_unpack(blocks["low"], 4, run=16), top, 4)


def q5_0(blocks: Blocks, out: Float32) -> None:
    """Decode Q5_0."""
    _write(out, _signed(_five_bits(blocks), 16), _column(blocks["scale"]))


def q5_1(blocks: Blocks, out: Float32) -> None:
    """Decode Q5_1."""
    _write(out, _five_bits(blocks), _column(blocks["scale"]))
    out += _column(blocks["minimum"])


def q8_0(blocks: Blocks, out: Float32) -> None:
    """Decode Q8_0."""
    _write(out, blocks["quants"], _column(blocks["scale"]))


# -- K-quants: 256 values in groups of 16 or 32 ----------------------------------------------------


def q2_k(blocks: Blocks, out: Float32) -> None:
    """Decode Q2_K: 16 groups; a byte holds a group's scale (low) and minimum (high nibble)."""
    packed = blocks["group_scales"]
    _write(out, _unpack(blocks["quants"], 2, run=32), _column(blocks["scale"]) * (packed & 15))
    _subtract(out, _column(blocks["minimum"]) * (packed >> 4))


def q3_k(blocks: Blocks, out: Float32) -> None:
    """Decode Q3_K: 16 groups; scales have their low nibbles in 8 bytes, their top bits in 4."""
    packed = blocks["group_scales"]
    steps = _join(_unpack(packed[:, :8], 4, run=8), _unpack(packed[:, 8:], 2, run=4), 4)
    quants = _join(_unpack(blocks["low"], 2, run=32), _unpack(blocks["high"], 1, run=32), 2)
    _write(out, _signed(quants, 4), _column(blocks["scale"]) * _signed(steps, 32))


def _scales_and_minima(blocks: Blocks) -> tuple[Float32, Float32]:
    """Return the scales and the minima (blocks, 8) of the groups of Q4_K and Q5_K.

    Groups 0 to 3 have their six bits at the bottom of bytes 0 to 3 (scales) and 4 to 7 (minima).
    Groups 4 to 7 have four bits in the nibbles of bytes 8 to 11, low for scales and high for
    minima, and their upper two bits at the top of the same bytes 0 to 7.
    """
    first, last = blocks["group_scales"][:, :8], blocks["group_scales"][:, 8:]
    early = first & np.uint8(63)
    late = _join(_unpack(last, 4, run=4), first >> np.uint8(6), 4)
    scales = np.concatenate([early[:, :4], late[:, :4]], axis=1)
    minima = np.concatenate([early[:, 4:], late[:, 4:]], axis=1)
    return _column(blocks["scale"]) * scales, _column(blocks["minimum"]) * minima


def q4_k(blocks: Blocks, out: Float32) -> None:
    """Decode Q4_K."""
    scales, minima = _scales_and_minima(blocks)
    _write(out, _unpack(blocks["quants"], 4, run=32), scales)
    _subtract(out, minima)


def q5_k(blocks: Blocks, out: Float32) -> None:
    """Decode Q5_K."""
    scales, minima = _scales_and_minima(blocks)
    quants = _join(_unpack(blocks["low"], 4, run=32), _unpack(blocks["high"], 1, run=32), 4)
    _write(out, quants, scales)
    _subtract(out, minima)


def q6_k(blocks: Blocks, out: Float32) -> None:
    """Decode Q6_K: 16 groups with a signed byte each as scale."""
    quants = _join(_unpack(blocks["low"], 4, run=64), _unpack(blocks["high"], 2, run=32), 4)
    _write(out, _signed(quants, 32), _column(blocks["scale"]) * blocks["group_scales"])


# -- 4-bit quants that number sixteen levels -------------------------------------------------------

# Source: ggml (MIT licence, the ggml authors), `kvalues_iq4nl`.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of FP4 (OCP Microscaling Formats 1.0: a sign, two bits of exponent, one of
# mantissa), which makes them whole numbers.
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _levels(packed: Bytes, levels: tuple[int, ...]) -> Int8:
    """Return the levels that the nibbles of `packed` number, 32 for each run of 16 bytes."""
    quants = _unpack(packed, 4, run=16)
    table = bytes(level & 255 for level in levels).ljust(256, b"\0")
    return np.frombuffer(quants.tobytes().translate(table), np.int8).reshape(quants.shape)


def iq4_nl(blocks: Blocks, out: Float32) -> None:
    """Decode IQ4_NL: one scale for 32 values."""
    _write(out, _levels(blocks["quants"], IQ4_LEVELS), _column(blocks["scale"]))


def iq4_xs(blocks: Blocks, out: Float32) -> None:
    """Decode IQ4_XS: eight groups with scales of 4 low and 2 high bits."""
    steps = _join(
        _unpack(blocks["scales_low"], 4, run=1), _unpack(blocks["scales_high"], 2, run=1), 4
    )
    scales = _column(blocks["scale"]) * _signed(steps, 32)
    _write(out, _levels(blocks["quants"], IQ4_LEVELS), scales)


def mxfp4(blocks: Blocks, out: Float32) -> None:
    """Decode MXFP4: one power of two for 32 values."""
    # The exponent is biased by 127; the one more halves the scale, because the levels are doubled.
    exponents = blocks["exponent"].astype(np.int32)[:, None] - 128
    _write(out, _levels(blocks["quants"], FP4_LEVELS), np.ldexp(np.float32(1), exponents))


# -- IQ1, IQ2, IQ3: an index picks the magnitudes of eight (IQ3: four) values from a grid ----------


def _as_words(points: NDArray[np.int8]) -> NDArray[Any]:
    """Return each row of bytes as one integer of its width, so that a point moves as one number."""
    return points.view(f"u{points.shape[1]}")[:, 0]


def _sign_masks() -> Int8:
    """Return the eight bits of every byte, lowest first, as 0 or -1: (256, 8)."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    return -np.unpackbits(every, axis=1, bitorder="little").view(np.int8)


_SIGNS = _as_words(_sign_masks())  # by a byte of signs
# By a 7-bit code: the eighth sign makes the number of minus signs even.
_EVEN_SIGNS = _SIGNS[[code | code.bit_count() % 2 << 7 for code in range(128)]]
_IQ2_XXS = _as_words(iq_grids.IQ2_XXS)
_IQ2_XS = _as_words(iq_grids.IQ2_XS)
_IQ2_S = _as_words(iq_grids.IQ2_S)
_IQ3_XXS = _as_words(iq_grids.IQ3_XXS)
_IQ3_S = _as_words(iq_grids.IQ3_S)
_EIGHTH = np.float32(1 / 8)
# In eighths: a value of IQ1 is a coordinate (-1, 0 or 1) shifted by 1/8 up or, with bit 11, down.
_IQ1 = _as_words(np.concatenate([iq_grids.IQ1 * 8 + 1, iq_grids.IQ1 * 8 - 1]))


def _with_signs(magnitudes: NDArray[Any], signs: NDArray[Any]) -> Int8:
    """Return (blocks, values): the coordinates, negated where the mask is -1.

    x ^ -1 is -x - 1, and subtracting the mask adds the missing 1; a mask of 0 changes nothing.
    """
    masks = signs.view(np.int8)
    return (magnitudes.view(np.int8) ^ masks) - masks


def _indices(low: Bytes, high: Bytes, high_bits: int) -> NDArray[np.uint16]:
    """Return grid indices: the eight bits of `low` and, above them, integers packed in `high`."""
    return low | _unpack(high, high_bits, run=1).astype(np.uint16) << np.uint16(8)


def _half_steps(blocks: Blocks, steps: NDArray[Any], unit: float) -> Float32:
    """Return the scales (blocks, groups): block scale * (steps + 1/2) * unit."""
    halves = steps.astype(np.float32) + np.float32(0.5)
    return _column(blocks["scale"]) * halves * np.float32(unit)


def _packed_signs(words: NDArray[Any]) -> NDArray[Any]:
    """Return the masks of the four 7-bit codes in each word (blocks, n): (blocks, 4 * n)."""
    masks: NDArray[Any] = _EVEN_SIGNS[_bit_slices(words, 7, 4)]
    return masks.reshape(len(words), -1)


def iq2_xxs(blocks: Blocks, out: Float32) -> None:
    """Decode IQ2_XXS: for 32 values a word of 4 indices, and one of 4 sign codes and a scale."""
    words = blocks["grid_and_signs"]
    indices, signs = np.ascontiguousarray(words[:, 0::2]).view(np.uint8), words[:, 1::2]
    quants = _with_signs(_IQ2_XXS[indices], _packed_signs(signs))
    _write(out, quants, _half_steps(blocks, signs >> 28, 0.25))


def iq2_xs(blocks: Blocks, out: Float32) -> None:
    """Decode IQ2_XS: for 8 values a word of a 9-bit index and a sign code; 16 groups."""
    words = blocks["grid_and_signs"]
    quants = _with_signs(_IQ2_XS[words & 511], _EVEN_SIGNS[words >> 9])
    _write(out, quants, _half_steps(blocks, _unpack(blocks["group_scales"], 4, run=1), 0.25))


def iq2_s(blocks: Blocks, out: Float32) -> None:
    """Decode IQ2_S: for 8 values a 10-bit index and a byte of signs; 16 groups."""
    indices = _indices(blocks["grid_low"], blocks["grid_high"], 2)
    quants = _with_signs(_IQ2_S[indices], _SIGNS[blocks["signs"]])
    _write(out, quants, _half_steps(blocks, _unpack(blocks["group_scales"], 4, run=1), 0.25))


def iq3_xxs(blocks: Blocks, out: Float32) -> None:
    """Decode IQ3_XXS: for 32 values 8 indices, and a word of 4 sign codes and a scale."""
    words = blocks["signs_and_scales"]
    quants = _with_signs(_IQ3_XXS[blocks["grid"]], _packed_signs(words))
    _write(out, quants, _half_steps(blocks, words >> 28, 0.5))


def iq3_s(blocks: Blocks, out: Float32) -> None:
    """Decode IQ3_S: for 4 values a 9-bit index, for 8 a byte of signs; 8 groups."""
    indices = _indices(blocks["grid_low"], blocks["grid_high"], 1)
    quants = _with_signs(_IQ3_S[indices], _SIGNS[blocks["signs"]])
    steps = 2 * _unpack(blocks["group_scales"], 4, run=1) + 1
    _write(out, quants, _column(blocks["scale"]) * steps)


def iq1_s(blocks: Blocks, out: Float32) -> None:
    """Decode IQ1_S: for 32 values a word of 4 x 3 index bits, a scale, and the shift's sign."""
    words = blocks["high_and_scales"]
    high = _bit_slices(words, 3, 4) | (words >> 15 << 3)[:, :, None]
    indices = blocks["grid_low"] | high.reshape(len(blocks), -1) << 8
    steps = 2 * (words >> 12 & 7) + 1
    _write(out, _IQ1[indices].view(np.int8), _column(blocks["scale"]) * steps * _EIGHTH)


def iq1_m(blocks: Blocks, out: Float32) -> None:
    """Decode IQ1_M: for 8 values 3 index bits and the shift's sign; 16 groups.

    The four words of scales hold 4 x 3 bits each; their top nibbles make the block's float16.
    """
    words = blocks["scales"]
    nibbles = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    scale = np.bitwise_or.reduce(nibbles, axis=1).view(np.float16)
    steps = 2 * _bit_slices(words, 3, 4).reshape(len(blocks), -1) + 1
    indices = _indices(blocks["grid_low"], blocks["grid_high"], 4)
    _write(out, _IQ1[indices].view(np.int8), _column(scale) * steps * _EIGHTH)
