"""Products of many rows on cards: the bits of a row alone, for every way to decode a block."""

from __future__ import annotations

import gpu_launches
import numpy as np
import pytest
from host_launches import Matrix, normal, same_bits
from test_gpu_linear import linear, width_of

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.products import DECODERS
from strata_nb.kernels.reference import Floats

T = TensorType
ROWS = 9  # one more than a window has


def check(
    gpu: gpu_launches.Run, matrix: Matrix, x: Floats, *, most_rows: int, **given: Floats
) -> None:
    """Compare a batch with a window of four of its rows, the first and the last among them."""
    together = linear(gpu, matrix, x, most_rows=most_rows, **given)
    some = [0, len(x) // 2 - 1, len(x) - 2, len(x) - 1]
    of_some = {name: value[some] if name == "y" else value for name, value in given.items()}
    alone = linear(gpu, matrix, x[some], most_rows=4, **of_some)
    assert same_bits(together[some], alone)


EACH_FORM = (T.Q8_0, T.Q2_K, T.Q4_K, T.Q6_K, T.IQ3_S, T.IQ4_XS)
OTHERS = [kind for kind in DECODERS if kind not in EACH_FORM]


@pytest.mark.parametrize(
    "kind",
    [*EACH_FORM, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)],
    ids=lambda kind: kind.name,
)
def test_a_row_in_a_batch_has_the_bits_of_a_row_alone(
    gpu: gpu_launches.Run, kind: TensorType
) -> None:
    matrix, x = Matrix.random(kind, 11, width_of(kind)), normal(ROWS, width_of(kind), seed=1)
    check(gpu, matrix, x, most_rows=ROWS)


@pytest.mark.parametrize(
    ("kind", "values", "outputs", "rows"),
    [
        (T.Q8_0, 32, 1, 9),  # three of four chains are empty
        (T.Q8_0, 32 * 19, 66, 33),  # chains of different lengths, by two warps; two blocks
        (T.Q4_K, 256, 9, 70),  # more rows than a block has
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_batches_of_any_size_have_them(
    gpu: gpu_launches.Run, kind: TensorType, values: int, outputs: int, rows: int
) -> None:
    matrix, x = Matrix.random(kind, outputs, values), normal(rows, values, seed=1)
    check(gpu, matrix, x, most_rows=rows + 60)


@pytest.mark.parametrize(
    ("kind", "values", "outputs"),
    [(T.F32, 264, 5), (T.F16, 1544, 18), (T.BF16, 72, 33), (T.F32, 33, 3)],
    ids=lambda value: getattr(value, "name", value),
)
def test_weights_of_floats_give_them_too(
    gpu: gpu_launches.Run, kind: TensorType, values: int, outputs: int
) -> None:
    matrix, x = Matrix.random(kind, outputs, values), normal(10, values, seed=1)
    bias, before = normal(outputs, seed=2), normal(10, outputs, seed=3)
    check(gpu, matrix, x, most_rows=12)
    check(gpu, matrix, x, most_rows=12, bias=bias, y=before)


def test_a_bias_and_what_is_there_are_added_and_a_fault_stays_in_its_row(
    gpu: gpu_launches.Run,
) -> None:
    matrix, x = Matrix.random(T.Q5_K, 11, 256), normal(ROWS, 256, seed=1)
    x[3, 5] = np.inf
    bias, before = normal(11, seed=2), normal(ROWS, 11, seed=3)
    check(gpu, matrix, x, most_rows=ROWS, bias=bias, y=before)
    found = linear(gpu, matrix, x, most_rows=ROWS)
    assert np.isnan(found[3]).all()
    assert np.isfinite(np.delete(found, 3, axis=0)).all()


def test_extreme_quants_do_not_overflow(gpu: gpu_launches.Run) -> None:
    matrix = Matrix.random(T.Q8_0, 8, 64)
    data = matrix.data.reshape(8, -1)
    data[...] = 0x80
    matrix.data.view(np.uint16)[-16:] = 0x3C00  # scale 1, quants -128
    x = np.full((ROWS, 64), np.float32(127))
    assert np.all(linear(gpu, matrix, x, most_rows=ROWS) == np.float32(-128 * 127 * 64))
