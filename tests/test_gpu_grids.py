"""The grid types on a card: to the bit what `formats.dequantise` gives for each row."""

from __future__ import annotations

import gpu_launches
import numpy as np
import pytest
from gpu_launches import aligned
from host_launches import UNTOUCHED, Bytes, Matrix, same_bits

from strata_nb.formats import TensorType, block_layout, block_record, dequantise
from strata_nb.kernels.gpu.grids import DECODERS
from strata_nb.kernels.reference import Floats
from strata_nb.packing import pack

T = TensorType
kinds = pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)


def rows_of(gpu: gpu_launches.Run, matrix: Matrix) -> Floats:
    """Return all rows of a matrix as `embed` reads them."""
    rows, values = matrix.weight.shape
    x = aligned(np.full((rows, values), UNTOUCHED))
    arguments = {
        "rows": aligned(np.array([rows])),
        "tokens": aligned(np.arange(rows)),
        "drawn": aligned(np.zeros(1, np.int64)),  # which no token here stands for
        "weight": aligned(matrix.data),
        "x": x,
        "width": values,
        "vocabulary": rows,
    }
    gpu("embed", arguments, ["x"], variant=matrix.kind, most_rows=rows)
    return x


@kinds
@pytest.mark.parametrize("shape", [(8, 512), (11, 256), (1, 768)], ids=str)
def test_rows_are_those_of_the_file(
    gpu: gpu_launches.Run, kind: TensorType, shape: tuple[int, int]
) -> None:
    matrix = Matrix.random(kind, *shape, seed=shape[0])
    assert same_bits(rows_of(gpu, matrix), matrix.weight)


def block_of(kind: TensorType, byte: int) -> Bytes:
    """Return a block whose bytes are all alike, but for its scale: 1."""
    raw = np.full(block_layout(kind).size_bytes, byte, np.uint8)
    (record,) = raw.view(block_record(kind))
    if kind is T.IQ1_M:  # the top nibbles of four words are the float16
        nibbles = int(np.float16(1).view(np.uint16)) >> np.arange(0, 16, 4) & 15
        record["scales"] = record["scales"] & 0xFFF | nibbles << 12
    else:
        record["scale"] = 1
    return raw


@kinds
@pytest.mark.parametrize("byte", [0x00, 0xFF], ids=hex)
def test_indices_signs_and_steps_reach_their_ends(
    gpu: gpu_launches.Run, kind: TensorType, byte: int
) -> None:
    raw = block_of(kind, byte)
    weight = dequantise(kind, raw).reshape(1, 256)
    assert np.isfinite(weight).all()
    matrix = Matrix(kind, pack(kind, raw, 1, 256), weight)
    assert same_bits(rows_of(gpu, matrix), weight)


@kinds
def test_only_a_type_with_two_scales_a_sub_block_says_so(kind: TensorType) -> None:
    of_sixteen = {T.IQ2_XS, T.IQ2_S, T.IQ1_M}
    assert DECODERS[kind].halves == (kind in of_sixteen)
    assert (DECODERS[kind].offset, DECODERS[kind].minima) == (0, False)
