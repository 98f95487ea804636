"""`embed` of graphics cards, bit by bit."""

from __future__ import annotations

import gpu_launches
import numpy as np
import pytest
from gpu_launches import aligned
from host_launches import UNTOUCHED, Matrix, same_bits

from strata_nb.formats import TensorType, block_layout, dequantise
from strata_nb.kernels.gpu.products import DECODERS
from strata_nb.kernels.reference import Floats
from strata_nb.packing import UNPACKED, pack

T = TensorType
VOCABULARY = 13  # a group of eight, and five
TOKENS = (0, 3, 12, 7, 8)


def embedded(
    gpu: gpu_launches.Run,
    matrix: Matrix,
    tokens: tuple[int, ...],
    drawn: tuple[int, ...] = (0,),
) -> Floats:
    vocabulary, width = matrix.weight.shape
    out = aligned(np.full((8, width), UNTOUCHED))
    gpu(
        "embed",
        {
            "rows": np.array([len(tokens)]),
            "tokens": np.array(tokens),
            "drawn": np.array(drawn),
            "weight": aligned(matrix.data),
            "x": out,
            "width": width,
            "vocabulary": vocabulary,
        },
        ["x"],
        variant=matrix.kind,
    )
    assert np.all(out[len(tokens) :] == UNTOUCHED)
    return out[: len(tokens)]


@pytest.mark.parametrize("kind", [*DECODERS, *sorted(UNPACKED)], ids=lambda kind: kind.name)
def test_rows_are_those_of_the_file_to_the_bit(gpu: gpu_launches.Run, kind: TensorType) -> None:
    width = {1: 77, 32: 96, 256: 512}[block_layout(kind).values]
    matrix = Matrix.random(kind, VOCABULARY, width)
    assert same_bits(embedded(gpu, matrix, TOKENS), matrix.weight[list(TOKENS)])


@pytest.mark.parametrize("kind", [T.Q4_K, T.F16], ids=lambda kind: kind.name)
def test_a_negative_token_stands_for_one_that_was_drawn(
    gpu: gpu_launches.Run, kind: TensorType
) -> None:
    matrix = Matrix.random(kind, VOCABULARY, 256)
    found = embedded(gpu, matrix, (-3, 5, -1, -2), drawn=(12, 7, 9))
    assert same_bits(found, matrix.weight[[9, 5, 12, 7]])


def test_a_token_that_could_not_be_drawn_reads_no_memory_of_others(gpu: gpu_launches.Run) -> None:
    matrix = Matrix.random(T.F32, VOCABULARY, 8)
    assert same_bits(embedded(gpu, matrix, (-1,), drawn=(-1,)), matrix.weight[[0]])


def test_rows_that_need_several_blocks_are_whole(gpu: gpu_launches.Run) -> None:
    matrix = Matrix.random(T.Q4_0, 3, 32 * 70)
    assert same_bits(embedded(gpu, matrix, (2,)), matrix.weight[[2]])


def test_every_exponent_of_mxfp4_is_a_power_of_two(gpu: gpu_launches.Run) -> None:
    raw = np.full((256, 17), 0x72, np.uint8)  # 6 and 1
    raw[:, 0] = np.arange(256)
    weight = dequantise(T.MXFP4, raw).reshape(8, 1024)
    matrix = Matrix(T.MXFP4, pack(T.MXFP4, raw.reshape(-1), 8, 1024), weight)
    assert same_bits(embedded(gpu, matrix, tuple(range(8))), weight)


@pytest.mark.parametrize("kind", [T.F16, T.F32], ids=lambda kind: kind.name)
def test_numbers_at_the_ends_of_a_float_stay_what_they_are(
    gpu: gpu_launches.Run, kind: TensorType
) -> None:
    dtype = {T.F16: np.float16, T.F32: np.float32}[kind]
    found = np.finfo(dtype)
    row = [found.max, -found.max, found.smallest_subnormal, np.inf, -np.inf, -0.0, 1 / 3]
    data = np.array([row], dtype)
    matrix = Matrix(kind, data.view(np.uint8).reshape(-1), data.astype(np.float32))
    assert same_bits(embedded(gpu, matrix, (0,)), matrix.weight)
