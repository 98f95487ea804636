"""Lay out a block of the K/V: 64 cells of every attention layer; arithmetic only.

    block   [attention layer][K | V][kv head] plane
    plane   [64 cells][head length] values, then, for int8, [64 cells][groups] float16 scales

One head's keys lie together, and every plane begins at a multiple of 64 bytes from the block's
beginning, so that a kernel which serves one head reads one run of memory. This is the only place
that knows where a cell is; sizes and offsets are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from strata_nb.formats import BLOCK_CELLS as BLOCK_CELLS
from strata_nb.formats import cache_type

Part = Literal["k", "v"]


def blocks_for(cells: int) -> int:
    """Return how many blocks hold the first `cells` cells of a sequence."""
    return -(-cells // BLOCK_CELLS)


@dataclass(frozen=True, slots=True)
class HeadPlane:
    """Lay out one head's keys or values of one block; all sizes are bytes, multiples of 64.

    cache_type   a row of `formats.CACHE_TYPES`; ConfigError for another name
    length       values of the head
    """

    cache_type: str
    length: int

    def __post_init__(self) -> None:
        cache_type(self.cache_type)

    @property
    def value_type(self) -> np.dtype[Any]:
        return cache_type(self.cache_type).dtype

    @property
    def scale_type(self) -> np.dtype[Any]:
        """Of a scale; of the values where there are no scales."""
        kind = cache_type(self.cache_type)
        return kind.dtype if kind.scale_dtype is None else kind.scale_dtype

    @property
    def groups(self) -> int:
        """Scales of one cell; none where the values are floats themselves."""
        kind = cache_type(self.cache_type)
        return 0 if kind.scale_dtype is None else kind.groups(self.length)

    @property
    def scales_offset(self) -> int:
        return BLOCK_CELLS * self.length * self.value_type.itemsize

    @property
    def size_bytes(self) -> int:
        return BLOCK_CELLS * cache_type(self.cache_type).head_bytes(self.length)


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
