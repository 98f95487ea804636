"""Block layouts of the tensor types of GGUF and dequantising in numpy; the types of a K/V cache.

A tensor is a sequence of rows, a row a sequence of *blocks*; a block holds a fixed number of values
in a fixed number of bytes. A block of Q4_K, for example, holds 256 values, eight groups of 32. Each
group has a scale and a minimum of 6 bits; the block has a float16 factor for each of the two:

    byte  0       2       4                    16                                         144
          +-------+-------+--------------------+--------------------------------------------+
          | f16   | f16   | 12 bytes: 8 scales | 128 bytes: 256 quants of 4 bits; 32 bytes  |
          | scale | mini- | and 8 minima of    | hold group 2i in their low nibbles, group  |
          |       | mum   | 6 bits, interlaced | 2i+1 in their high nibbles, and so on      |
          +-------+-------+--------------------+--------------------------------------------+

    value = (scale * group scale) * quant - (minimum * group minimum)

`_FORMATS` is the only place that knows a layout. A numpy record describes the bytes of a block, so
its size follows from its fields and cannot contradict them; kernels and tools take fields from
`block_record`. Layouts, and the order of the float32 operations, are those of ggml: the results
agree with it bit by bit.

To add a type: its number in `TensorType`, its row in `_FORMATS`, its function in
`quants/decoders.py`.
`CACHE_TYPES` is likewise the only place that knows how a K/V cache stores a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from strata_nb.errors import ConfigError
from strata_nb.quants import decoders
from strata_nb.quants.decoders import Bytes, Decoder, Float32

# Values decoded at a time: bounds the temporaries, and keeps them in a core's cache.
PIECE_VALUES = 2**17

BLOCK_CELLS = 64  # of a block of a K/V cache: one token's keys and values are a cell


class TensorType(IntEnum):
    """Name every tensor type that a GGUF file holds or once held, by its number in ggml."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q4_2 = 4
    Q4_3 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    Q4_0_4_4 = 31
    Q4_0_4_8 = 32
    Q4_0_8_8 = 33
    TQ1_0 = 34
    TQ2_0 = 35
    IQ4_NL_4_4 = 36
    IQ4_NL_4_8 = 37
    IQ4_NL_8_8 = 38
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


class BlockLayout(NamedTuple):
    """Say how many values a block holds and how many bytes it takes."""

    values: int
    size_bytes: int


class _Format(NamedTuple):
    values: int
    record: np.dtype[np.void]
    decode: Decoder | None


def _format(values: int, fields: str, decode: Decoder | None = None) -> _Format:
    """Describe a block: its values, `name:numpy type` of each field in order, and its decoder."""
    pairs = [field.split(":") for field in fields.split()]
    return _Format(values, np.dtype([(name, np.dtype(code)) for name, code in pairs]), decode)


# Names: `scale` and `minimum` belong to the block, `group_scales` to its groups; `quants` are the
# integers, or `low` and `high` where their bits lie in two places; `grid` are indices of points.
_FORMATS: dict[TensorType, _Format] = {
    TensorType.F32: _format(1, "value:<f4", decoders.plain),
    TensorType.F16: _format(1, "value:<f2", decoders.plain),
    TensorType.BF16: _format(1, "high_half:<u2", decoders.bf16),
    TensorType.F64: _format(1, "value:<f8", decoders.plain),
    TensorType.I8: _format(1, "value:<i1"),
    TensorType.I16: _format(1, "value:<i2"),
    TensorType.I32: _format(1, "value:<i4"),
    TensorType.I64: _format(1, "value:<i8"),
    TensorType.Q1_0: _format(128, "scale:<f2 quants:16u1"),
    TensorType.Q2_0: _format(64, "scale:<f2 quants:16u1"),
    TensorType.Q4_0: _format(32, "scale:<f2 quants:16u1", decoders.q4_0),
    TensorType.Q4_1: _format(32, "scale:<f2 minimum:<f2 quants:16u1", decoders.q4_1),
    TensorType.Q5_0: _format(32, "scale:<f2 high:4u1 low:16u1", decoders.q5_0),
    TensorType.Q5_1: _format(32, "scale:<f2 minimum:<f2 high:4u1 low:16u1", decoders.q5_1),
    TensorType.Q8_0: _format(32, "scale:<f2 quants:32i1", decoders.q8_0),
    TensorType.Q8_1: _format(32, "scale:<f2 scaled_sum:<f2 quants:32i1"),
    TensorType.Q2_K: _format(
        256, "group_scales:16u1 quants:64u1 scale:<f2 minimum:<f2", decoders.q2_k
    ),
    TensorType.Q3_K: _format(256, "high:32u1 low:64u1 group_scales:12u1 scale:<f2", decoders.q3_k),
    TensorType.Q4_K: _format(
        256, "scale:<f2 minimum:<f2 group_scales:12u1 quants:128u1", decoders.q4_k
    ),
    TensorType.Q5_K: _format(
        256, "scale:<f2 minimum:<f2 group_scales:12u1 high:32u1 low:128u1", decoders.q5_k
    ),
    TensorType.Q6_K: _format(256, "low:128u1 high:64u1 group_scales:16i1 scale:<f2", decoders.q6_k),
    TensorType.Q8_K: _format(256, "scale:<f4 quants:256i1 group_sums:16<i2"),
    TensorType.IQ1_S: _format(256, "scale:<f2 grid_low:32u1 high_and_scales:8<u2", decoders.iq1_s),
    TensorType.IQ1_M: _format(256, "grid_low:32u1 grid_high:16u1 scales:4<u2", decoders.iq1_m),
    TensorType.IQ2_XXS: _format(256, "scale:<f2 grid_and_signs:16<u4", decoders.iq2_xxs),
    TensorType.IQ2_XS: _format(
        256, "scale:<f2 grid_and_signs:32<u2 group_scales:8u1", decoders.iq2_xs
    ),
    TensorType.IQ2_S: _format(
        256, "scale:<f2 grid_low:32u1 signs:32u1 grid_high:8u1 group_scales:8u1", decoders.iq2_s
    ),
    TensorType.IQ3_XXS: _format(256, "scale:<f2 grid:64u1 signs_and_scales:8<u4", decoders.iq3_xxs),
    TensorType.IQ3_S: _format(
        256, "scale:<f2 grid_low:64u1 grid_high:8u1 signs:32u1 group_scales:4u1", decoders.iq3_s
    ),
    TensorType.IQ4_NL: _format(32, "scale:<f2 quants:16u1", decoders.iq4_nl),
    TensorType.IQ4_XS: _format(
        256, "scale:<f2 scales_high:2u1 scales_low:4u1 quants:128u1", decoders.iq4_xs
    ),
    TensorType.TQ1_0: _format(256, "fives:48u1 fours:4u1 scale:<f2"),
    TensorType.TQ2_0: _format(256, "quants:64u1 scale:<f2"),
    TensorType.MXFP4: _format(32, "exponent:u1 quants:16u1", decoders.mxfp4),
    TensorType.NVFP4: _format(64, "group_scales:4u1 quants:32u1"),
}

REMOVED = frozenset(TensorType) - frozenset(_FORMATS)  # types that ggml gave up, layout and all
DEQUANTISABLE = frozenset(kind for kind, format_ in _FORMATS.items() if format_.decode is not None)


def block_record(kind: TensorType) -> np.dtype[np.void]:
    """Return the fields of a block as a numpy record; ValueError for a type in `REMOVED`."""
    if kind not in _FORMATS:
        raise ValueError(f"tensor type {kind.name} ({kind.value}) was removed from the format")
    return _FORMATS[kind].record


def block_layout(kind: TensorType) -> BlockLayout:
    """Return values and bytes of a block; ValueError for a type in `REMOVED`."""
    record = block_record(kind)
    return BlockLayout(_FORMATS[kind].values, record.itemsize)


def row_bytes(kind: TensorType, values: int) -> int:
    """Return the bytes of a row; ValueError if `values` is not a whole number of blocks."""
    layout = block_layout(kind)
    if values < 0 or values % layout.values:
        raise ValueError(
            f"a row of {values} values is not a whole number of {kind.name} blocks "
            f"({layout.values} values each)"
        )
    return values // layout.values * layout.size_bytes


def tensor_bytes(kind: TensorType, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor, exact for any size.

    `shape` is in numpy's order: the length of a row comes last (a GGUF file stores it first). ()
    is one value. ValueError if a row is not a whole number of blocks.
    """
    *outer, row = (int(length) for length in shape) if shape else (1,)
    return math.prod(outer) * row_bytes(kind, row)


def dequantise(kind: TensorType, raw: Bytes, out: Float32 | None = None) -> Float32:
    """Return the values of whole blocks as float32 (values,), in the order of the file.

    `raw` holds the bytes of the blocks, contiguous, of any shape; it is not changed. `out`, where
    given, is a contiguous float32 array of as many values and is returned; the temporaries stay
    below 4 MiB whatever the size. A scale that is not finite gives values that are not finite.
    ValueError for a type outside `DEQUANTISABLE`, bytes that are no whole number of blocks, or an
    `out` that does not fit.
    """
    layout = block_layout(kind)
    decode = _FORMATS[kind].decode
    if decode is None:
        raise ValueError(f"tensors of type {kind.name} cannot be dequantised")
    if raw.dtype != np.uint8 or not raw.flags.c_contiguous or raw.size % layout.size_bytes:
        raise ValueError(
            f"{raw.size} elements of {raw.dtype} are not contiguous whole {kind.name} blocks "
            f"({layout.size_bytes} bytes each)"
        )
    blocks = raw.reshape(-1).view(block_record(kind))
    values = blocks.size * layout.values
    if out is None:
        out = np.empty(values, np.float32)
    elif out.dtype != np.float32 or not out.flags.c_contiguous or out.shape != (values,):
        raise ValueError(
            f"out is {out.dtype} {out.shape}; contiguous float32 ({values},) is needed"
        )
    rows = out.reshape(-1, layout.values)
    step = PIECE_VALUES // layout.values
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, blocks.size, step):
            decode(blocks[start : start + step], rows[start : start + step])
    return out


class CacheType(NamedTuple):
    """Say how a K/V cache stores one head of a cell: values, and a scale for each group of them.

    The last group is shorter where `group` does not divide the length of a head.
    """

    dtype: np.dtype[Any]  # of a value
    scale_dtype: np.dtype[Any] | None = None  # None: the values are floats and need no scale
    group: int = 1  # values that share a scale

    def groups(self, length: int) -> int:
        """Return the number of groups of a head of `length` values."""
        return -(-length // self.group)

    def head_bytes(self, length: int) -> int:
        """Return the bytes of a head of `length` values, scales included."""
        scale_bytes = 0 if self.scale_dtype is None else self.scale_dtype.itemsize
        return length * self.dtype.itemsize + self.groups(length) * scale_bytes


CACHE_TYPES = {
    "f32": CacheType(np.dtype(np.float32)),
    "f16": CacheType(np.dtype(np.float16)),
    "int8": CacheType(np.dtype(np.int8), np.dtype(np.float16), 64),
}


def cache_type(name: str) -> CacheType:
    """Return the row of `CACHE_TYPES`; ConfigError for a name that is not there."""
    if name not in CACHE_TYPES:
        raise ConfigError(
            f"a K/V cache of type {name}: not known", hint="one of: " + ", ".join(CACHE_TYPES)
        )
    return CACHE_TYPES[name]
