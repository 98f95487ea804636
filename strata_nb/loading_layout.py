"""Where the tensors of a file will be once they are loaded, packed; nothing is read.

Matrices and vectors that every token needs lie one behind the other on a device. The blobs of all
experts lie in an arena of host memory, cut into blocks that are registered by one call each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb import host_pages as pages
from strata_nb.cache.slots import BLOB_ALIGNMENT
from strata_nb.formats import TensorType, row_bytes
from strata_nb.gguf import GGUFFile, TensorInfo
from strata_nb.loading_pieces import FLOAT_BYTES

ALIGNMENT = BLOB_ALIGNMENT  # bytes; of each tensor on the device and each part of a blob
BLOCK_BYTES = 1 << 30  # of the arena, registered by one call each


class PackedTensor(NamedTuple):
    """Say where a tensor is: a matrix (outputs, values), packed, or a vector (values,), float32."""

    address: int
    kind: TensorType
    shape: tuple[int, ...]


class ExpertPart(NamedTuple):
    """Say where in the blobs of a layer a matrix (outputs, values) is, packed."""

    offset: int
    kind: TensorType
    shape: tuple[int, int]


@dataclass(frozen=True)
class ExpertLayout:
    """Say how the experts of a file lie in host memory.

    experts      of each layer
    blob_bytes   of one expert of each layer, a multiple of 256
    parts        of each layer: its matrices by the caller's names
    offsets      int64 (layers, experts): of each blob in the arena
    blocks       (offset, bytes) of what is registered by one call: whole blobs, and no page twice
    size_bytes   of the arena
    """

    experts: int
    blob_bytes: tuple[int, ...]
    parts: tuple[dict[str, ExpertPart], ...]
    offsets: npt.NDArray[np.int64]
    blocks: tuple[tuple[int, int], ...]
    size_bytes: int


def expert_layout(
    file: GGUFFile, layers: Sequence[Mapping[str, str]], *, block_bytes: int = BLOCK_BYTES
) -> ExpertLayout:
    """Lay out the experts of a file; nothing is read.

    layers        for each layer with experts: by the name of a part (gate, up, down), the tensor
                  (experts, outputs, values) that holds this part of all its experts
    block_bytes   what a block of the arena should not exceed; a larger blob is a block by itself
    """
    counts = {file.tensors[name].shape[0] for layer in layers for name in layer.values()}
    if len(counts) != 1:  # `models.describe` checked them
        raise AssertionError(f"stacks of {sorted(counts)} experts")
    (experts,) = counts
    parts: list[dict[str, ExpertPart]] = []
    blob_bytes: list[int] = []
    for layer in layers:
        parts.append({})
        size = 0
        for part, name in layer.items():
            tensor = file.tensors[name]
            _, outputs, values = tensor.shape
            parts[-1][part] = ExpertPart(size, tensor.type, (outputs, values))
            size += round_up(outputs * row_bytes(tensor.type, values), ALIGNMENT)
        blob_bytes.append(size)
    offsets, blocks = _cut_arena(blob_bytes, experts, block_bytes)
    size_bytes = sum(blocks[-1])
    return ExpertLayout(
        experts, tuple(blob_bytes), tuple(parts), offsets, tuple(blocks), size_bytes
    )


def dense_layout(file: GGUFFile, names: Iterable[str]) -> tuple[dict[str, PackedTensor], int]:
    """Return tensors as `load_dense` will place them, from address 0 on, and the bytes of all."""
    placed: dict[str, PackedTensor] = {}
    end = 0
    for name in names:
        tensor = file.tensors[name]
        kind: TensorType
        shape: tuple[int, ...]
        if is_vector(tensor):
            kind, shape = TensorType.F32, (prod(tensor.shape),)
            size = FLOAT_BYTES * shape[0]
        else:
            kind, shape, size = tensor.type, tensor.shape, tensor.size_bytes
            if len(shape) != 2:  # `models.describe` checked it
                raise AssertionError(f"{name} {shape} is no matrix")
        placed[name] = PackedTensor(end, kind, shape)
        end += round_up(size, ALIGNMENT)
    return placed, end


def _cut_arena(
    blob_bytes: Sequence[int], experts: int, block_bytes: int
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]]]:
    """Return offsets (layers, experts) of blobs one behind the other, and blocks (offset, bytes).

    A block begins on a page of its own: drivers refuse to register a page twice.
    """
    offsets = np.empty((len(blob_bytes), experts), np.int64)
    blocks: list[tuple[int, int]] = []
    start = end = 0
    for layer, size in enumerate(blob_bytes):
        for expert in range(experts):
            if end > start and end + size - start > block_bytes:
                blocks.append((start, end - start))
                start = end = round_up(end, pages.PAGE_BYTES)
            offsets[layer, expert] = end
            end += size
    return offsets, [*blocks, (start, end - start)]


def is_vector(tensor: TensorInfo) -> bool:
    """Return whether all dimensions but the last are 1, as some writers of norms have it."""
    return prod(tensor.shape[:-1]) == 1


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
