"""The decoders of the grid types on a card, against `formats.dequantise`."""

from __future__ import annotations

from collections.abc import Callable

import gpu_simulator
import numpy as np
import pytest
from gpu_launches import aligned
from host_launches import Matrix, same_bits

from strata_nb.formats import TensorType, block_layout, row_bytes
from strata_nb.kernels.gpu.compile import link, ptx_code
from strata_nb.kernels.gpu.grids import DECODERS
from strata_nb.kernels.gpu.intrinsics import f32_of_i32, i32, i64, store_f32, thread_index
from strata_nb.kernels.gpu.weights import Decoder
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

kinds = pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
Kernel = Callable[[int, int, int, int, int], None]


def kernel_of(decoder: Decoder) -> Kernel:
    """Return a kernel that writes the values of one group, a sub-block of a row a thread.

    y is float32 (rows, sub_blocks, 32); a thread that has none leaves.
    """
    decode = decoder.decode

    def write(place: int, word: int, scale: float) -> None:
        store_f32(place, f32_of_i32(i32(word << 24) >> 24) * scale)
        store_f32(place + 4, f32_of_i32(i32(word << 16) >> 24) * scale)
        store_f32(place + 8, f32_of_i32(i32(word << 8) >> 24) * scale)
        store_f32(place + 12, f32_of_i32(word >> 24) * scale)

    def kernel(group: int, y: int, rows: int, sub_blocks: int, first: int) -> None:
        thread = i64(thread_index())
        row, s = thread & 7, first + (thread >> 3)
        if row < rows and s < sub_blocks:
            q0, q1, q2, q3, q4, q5, q6, q7, low, high, _, _ = decode(
                group, rows, row, sub_blocks, s
            )
            place = y + 128 * (row * sub_blocks + s)
            write(place, q0, low)
            write(place + 16, q1, low)
            write(place + 32, q2, low)
            write(place + 48, q3, low)
            write(place + 64, q4, high)
            write(place + 80, q5, high)
            write(place + 96, q6, high)
            write(place + 112, q7, high)

    return kernel


def values_of(matrix: Matrix) -> np.ndarray:
    """Return the values of a matrix, group by group, as the decoder has them."""
    rows, values = matrix.weight.shape
    sub_blocks = values // SUB_BLOCK
    data = aligned(matrix.data)
    y = np.full((rows, values), np.float32(np.nan))
    memory = gpu_simulator.Memory([y], [data])
    decoder = DECODERS[matrix.kind]
    assert (decoder.offset, decoder.minima) == (0, False)
    row_size = row_bytes(matrix.kind, values)
    for first_row in range(0, rows, GROUP_ROWS):
        words = [data.ctypes.data + first_row * row_size, y.ctypes.data + 4 * first_row * values]
        words += [min(GROUP_ROWS, rows - first_row), sub_blocks]
        for first in range(0, sub_blocks, 4):
            gpu_simulator.run(kernel_of(decoder), (1, 1, 1), 32, 0, [*words, first], memory)
    return y


@kinds
@pytest.mark.parametrize("shape", [(8, 512), (11, 256), (1, 768)], ids=str)
def test_the_values_of_a_matrix_are_those_of_its_file(
    kind: TensorType, shape: tuple[int, int]
) -> None:
    matrix = Matrix.random(kind, *shape, seed=shape[0])
    assert same_bits(values_of(matrix), matrix.weight)


@kinds
def test_only_a_type_with_two_scales_a_sub_block_says_so(kind: TensorType) -> None:
    layout, sixteens = block_layout(kind), (TensorType.IQ2_XS, TensorType.IQ2_S, TensorType.IQ1_M)
    assert layout.values == 8 * SUB_BLOCK
    assert DECODERS[kind].halves == (kind in sixteens)


@kinds
def test_they_compile_to_code_in_single_precision_without_spills(kind: TensorType) -> None:
    ptx = ptx_code(kernel_of(DECODERS[kind]), ["address", "address", *["integer"] * 3], 32)
    assert ".f64" not in ptx
    found = link(ptx, "sm_90")
    assert found.spill_bytes == 0
    assert found.registers <= 40
