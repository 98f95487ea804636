"""Random quantised blocks with a stated spread, for test models and kernels.

All fields of a block are random bits, so that a decoder has to read each of them rightly; only the
scale of the block is set, to a random number around the one that gives the standard deviation asked
for. What that is for a type is measured on the first blocks instead of derived: the formats say how
to decode (`strata_nb.formats`), and a second set of constants here could contradict them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_nb.formats import TensorType, block_layout, block_record, dequantise

FLOATS = {TensorType.F32: np.float32, TensorType.F16: np.float16, TensorType.F64: np.float64}
MEASURED_BLOCKS = 4096

# minimum / scale that centres the values on zero: half the largest quant, with its sign in the type
CENTRES = {
    TensorType.Q4_1: -7.5,
    TensorType.Q5_1: -15.5,
    TensorType.Q2_K: 1.5,
    TensorType.Q4_K: 7.5,
    TensorType.Q5_K: 15.5,
}


def random_blocks(
    kind: TensorType, blocks: int, std: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Return the bytes of `blocks` blocks of finite values with mean 0 and about this deviation.

    Float types are normally distributed. Any type that can be dequantised will do.
    """
    if kind in FLOATS:
        values = (std * rng.standard_normal(blocks)).astype(FLOATS[kind])
        return values.view(np.uint8)
    if kind == TensorType.BF16:
        bits = (std * rng.standard_normal(blocks)).astype(np.float32).view(np.uint32)
        return ((bits + 0x8000) >> 16).astype(np.uint16).view(np.uint8)
    raw = _random_bytes(blocks * block_layout(kind).size_bytes, rng)
    records = raw.view(block_record(kind))
    if kind == TensorType.Q8_0:
        np.maximum(records["quants"], -127, out=records["quants"])  # no quantiser writes -128
    spread = rng.uniform(0.5, 1.5, blocks).astype(np.float32)
    if kind not in CENTRES:
        spread *= rng.choice(np.array([-1, 1], np.float32), blocks)
    _set_scales(kind, records, spread)
    sample = dequantise(kind, raw[: MEASURED_BLOCKS * block_layout(kind).size_bytes])
    _set_scales(kind, records, spread * np.float32(std / sample.std(dtype=np.float64)))
    return raw


def _random_bytes(count: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    words = rng.integers(0, 2**64, -(-count // 8), dtype=np.uint64)
    return words.view(np.uint8)[:count]


def _set_scales(kind: TensorType, records: NDArray[Any], scales: NDArray[np.float32]) -> None:
    """Write the scale of each block, and the minimum that centres the values."""
    if kind == TensorType.MXFP4:
        # A power of two without a sign; 128 is the exponent of 1, as the format halves it.
        records["exponent"] = 128 + np.round(np.log2(np.abs(scales)))
    elif kind == TensorType.IQ1_M:
        bits = scales.astype(np.float16).view(np.uint16)[:, None]
        nibbles = bits >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        records["scales"] = records["scales"] & 0x0FFF | nibbles << 12
    else:
        records["scale"] = scales
        if kind in CENTRES:
            records["minimum"] = scales * np.float32(CENTRES[kind])
