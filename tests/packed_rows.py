"""Read packed rows as the head of `packing.py` describes them, in plain numpy, for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_nb.formats import TensorType, block_layout
from strata_nb.packing import GROUP_ROWS, fields

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]


def field(kind: TensorType, packed: Bytes, rows: int, values: int, name: str) -> Bytes:
    """Return the pieces of a field: uint8 (rows, pieces along the row, width)."""
    blocks = values // block_layout(kind).values
    place = fields(kind)[name]
    row_size = blocks * block_layout(kind).size_bytes
    groups = []
    for first in range(0, rows, GROUP_ROWS):
        members = min(GROUP_ROWS, rows - first)
        start = first * row_size + place.start(blocks, members)
        pieces = packed[start : start + members * blocks * place.pieces * place.width]
        groups.append(pieces.reshape(-1, members, place.width).swapaxes(0, 1))
    return np.concatenate(groups)


def integers(pieces: Bytes, bits: int) -> Integers:
    """Return what pieces (rows, pieces, width) hold in integers of so many bits: (rows, values).

    Value i of a piece of w bytes lies in byte i % w, at bits `bits` * (i // w).
    """
    shifts = np.arange(0, 8, bits)[:, None]
    found = pieces[:, :, None, :].astype(np.int64) >> shifts & (1 << bits) - 1
    return found.reshape(len(pieces), -1)


def halves(pieces: Bytes) -> NDArray[np.float32]:
    """Return the float16 numbers of pieces (rows, pieces, width) as float32 (rows, numbers)."""
    found: NDArray[np.float32] = np.ascontiguousarray(pieces).view("<f2").astype(np.float32)
    return found.reshape(len(pieces), -1)


def words(pieces: Bytes) -> Integers:
    """Return the 32-bit words of pieces (rows, pieces, 4 bytes): (rows, pieces)."""
    found = np.ascontiguousarray(pieces).view("<u4").astype(np.int64)
    return found.reshape(len(pieces), -1)


def six_bit_pairs(pieces: Bytes) -> tuple[Integers, Integers]:
    """Return the first and the second of each sub-block's pair of group scales: (rows, pairs)."""
    first, second, high = words(pieces).reshape(len(pieces), -1, 3).transpose(2, 0, 1)[..., None]
    s = np.arange(8)
    firsts = first >> 4 * s & 15 | (high >> 2 * s & 3) << 4
    seconds = second >> 4 * s & 15 | (high >> 16 + 2 * s & 3) << 4
    return firsts.reshape(len(pieces), -1), seconds.reshape(len(pieces), -1)
