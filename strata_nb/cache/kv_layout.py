"""Lay out a block of the K/V: 64 cells of every attention layer; arithmetic only.

    block   [attention layer][K | V][kv head] plane
    plane   [64 cells][head length] values, then, for int8, [64 cells][groups] float16 scales

One head's keys lie together, and every plane begins at a multiple of 64 bytes from the block's
beginning, so that a kernel which serves one head reads one run of memory. This is the only place
that knows where a cell is; sizes and offsets are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from strata_nb.errors import ConfigError

BLOCK_CELLS = 64

Part = Literal["k", "v"]

VALUE_TYPES: dict[str, type[np.generic]] = {"f16": np.float16, "int8": np.int8}
SCALE_TYPE = np.float16


def blocks_for(cells: int) -> int:
    """Return how many blocks hold the first `cells` cells of a sequence."""
    return -(-cells // BLOCK_CELLS)


@dataclass(frozen=True, slots=True)
class HeadPlane:
    """Lay out one head's keys or values of one block; all sizes are bytes, multiples of 64.

    cache_type    "f16", or "int8" with a float16 scale for each group of values
    length        values of the head
    scale_group   values that share a scale; the last group of a head may be shorter
    """

    cache_type: str
    length: int
    scale_group: int

    def __post_init__(self) -> None:
        if self.cache_type not in VALUE_TYPES:
            raise ConfigError(
                f"a K/V cache of type {self.cache_type}: not stored in blocks",
                hint="one of: " + ", ".join(VALUE_TYPES),
            )

    @property
    def value_type(self) -> np.dtype[np.generic]:
        return np.dtype(VALUE_TYPES[self.cache_type])

    @property
    def groups(self) -> int:
        """Scales of one cell; none where the values are floats themselves."""
        return -(-self.length // self.scale_group) if self.cache_type == "int8" else 0

    @property
    def scales_offset(self) -> int:
        return BLOCK_CELLS * self.length * self.value_type.itemsize

    @property
    def size_bytes(self) -> int:
        return self.scales_offset + BLOCK_CELLS * self.groups * np.dtype(SCALE_TYPE).itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Lay out one block: for each attention layer all heads' keys, then all heads' values.

    layers     with attention, on this device
    kv_heads   of each layer
    key, value the plane of one head
    """

    layers: int
    kv_heads: int
    key: HeadPlane
    value: HeadPlane

    def plane(self, part: Part) -> HeadPlane:
        return self.key if part == "k" else self.value

    @property
    def layer_bytes(self) -> int:
        return self.kv_heads * (self.key.size_bytes + self.value.size_bytes)

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def part_offset(self, layer: int, part: Part) -> int:
        """Return where head 0 of a part begins in a block; head h is h planes further."""
        values_behind = self.kv_heads * self.key.size_bytes if part == "v" else 0
        return layer * self.layer_bytes + values_behind

    def bytes_for(self, cells: int) -> int:
        """Return the bytes of the blocks that `cells` cells of one sequence need."""
        return blocks_for(cells) * self.block_bytes
