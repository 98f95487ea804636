"""A K/V in plain arrays, for tests of the kernels that read and write it on a card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gpu_launches import aligned
from numpy.typing import NDArray

from strata_nb.cache.kv_layout import BLOCK_CELLS, HeadPlane, KVLayout, Part
from strata_nb.kernels import reference

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
NAN_BYTE = 0xFF  # a float, a float16 and a scale of such bytes are all NaN
LAYER = 1  # of two: neither offset is zero


@dataclass
class Store:
    """Hold the second of two layers of some sequences, in blocks that lie in any order."""

    kinds: tuple[str, str]
    kv_heads: int
    lengths: tuple[int, int]
    sequences: int = 1
    cells: int = 128
    layout: KVLayout = field(init=False)
    memory: NDArray[np.uint8] = field(init=False)
    table: Integers = field(init=False)

    def __post_init__(self) -> None:
        key, value = (HeadPlane(*pair) for pair in zip(self.kinds, self.lengths, strict=True))
        self.layout = KVLayout(2, self.kv_heads, key, value)
        width = -(-self.cells // BLOCK_CELLS)
        count = self.sequences * width
        self.memory = aligned(np.full(count * self.layout.block_bytes, NAN_BYTE, np.uint8))
        self.order = np.random.default_rng(7).permutation(count).reshape(self.sequences, width)
        places = self.order.astype(np.int64) * self.layout.block_bytes
        self.table = aligned(self.memory.ctypes.data + places)

    def planes(self, part: Part, sequence: int, cell: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return views of a cell: values (heads, length), scales (heads, groups)."""
        plane = self.layout.plane(part)
        place = int(self.order[sequence, cell // BLOCK_CELLS]) * self.layout.block_bytes
        place += self.layout.part_offset(LAYER, part)
        heads = self.memory[place : place + self.kv_heads * plane.size_bytes]
        heads = heads.reshape(self.kv_heads, plane.size_bytes)
        values = heads[:, : plane.scales_offset].view(plane.value_type)
        values = values.reshape(self.kv_heads, BLOCK_CELLS, plane.length)[:, cell % BLOCK_CELLS]
        scales = heads[:, plane.scales_offset :].view(plane.scale_type)
        scales = scales.reshape(self.kv_heads, BLOCK_CELLS, plane.groups)[:, cell % BLOCK_CELLS]
        return values, scales

    def write(self, part: Part, sequence: int, cell: int, x: Floats) -> None:
        """Store heads (kv_heads, length) as a cell."""
        values, scales = self.planes(part, sequence, cell)
        if self.layout.plane(part).groups:
            values[:], scales[:] = reference.quantise_kv(x)
        else:
            values[:] = x

    def read_one(self, part: Part, sequence: int, cell: int) -> Floats:
        """Return a cell as (heads, length)."""
        values, scales = self.planes(part, sequence, cell)
        if self.layout.plane(part).groups:
            return reference.dequantise_kv(values, scales)
        return values.astype(np.float32)

    def read(self, part: Part, sequence: int, cells: int) -> Floats:
        """Return the first cells of a sequence as (heads, cells, length)."""
        return np.stack([self.read_one(part, sequence, cell) for cell in range(cells)], axis=1)

    def fill(self, sequence: int, cells: int, seed: int = 0) -> None:
        """Write random keys and values to the first cells of a sequence."""
        rng = np.random.default_rng(seed)
        for cell in range(cells):
            for part, length in (("k", self.lengths[0]), ("v", self.lengths[1])):
                x = rng.standard_normal((self.kv_heads, length)).astype(np.float32)
                self.write(part, sequence, cell, x)  # type: ignore[arg-type]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that `kv_append` and `attention` share."""
        return {
            "blocks": self.table,
            "table_width": self.table.shape[1],
            "k_offset": self.layout.part_offset(LAYER, "k"),
            "v_offset": self.layout.part_offset(LAYER, "v"),
            "key_length": self.lengths[0],
            "value_length": self.lengths[1],
        }


def random_heads(rows: int, heads: int, length: int, seed: int = 1) -> Floats:
    """Return float32 (rows, heads, length)."""
    return np.random.default_rng(seed).standard_normal((rows, heads, length)).astype(np.float32)
