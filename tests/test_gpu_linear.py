"""`linear` of graphics cards: every type of weights, rows and outputs that fill no block."""

from __future__ import annotations

from typing import Any

import gpu_launches
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import aligned
from host_launches import UNTOUCHED, Matrix, as_read, normal, same_bits
from numpy.typing import NDArray

from strata_nb.errors import UnsupportedDevice
from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.gpu import batches, operations
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.linear import linear_kernel
from strata_nb.kernels.gpu.products import DECODERS
from strata_nb.kernels.reference import Floats
from strata_nb.packing import PACKED, UNPACKED, pack

T = TensorType
KINDS = [*DECODERS, *sorted(UNPACKED)]
MOST_ROWS = 7
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def width_of(kind: TensorType) -> int:
    """Return values of a row that are an odd number of blocks, and more than a warp takes."""
    return {1: 44, 32: 160, 256: 256}[block_layout(kind).values]


def buffer_of(x: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return a buffer of so many rows, behind those of x without a meaning."""
    buffer = np.full((rows, *x.shape[1:]), 0x7F, x.dtype)
    buffer[: len(x)] = x
    return aligned(buffer)


def linear(
    gpu: gpu_launches.Run,
    matrix: Matrix,
    x: Floats,
    *,
    bias: Floats | None = None,
    y: Floats | None = None,
    most_rows: int = MOST_ROWS,
) -> Floats:
    """Return rows times a matrix, added to y where it is given; x is quantised if need be."""
    (rows, values), outputs = x.shape, len(matrix.weight)
    out = np.full((most_rows, outputs), UNTOUCHED)
    if y is not None:
        out[:rows] = y
    out = aligned(out)
    gpu(
        "linear",
        {
            "rows": np.array([rows]),
            "x": buffer_of(plain.quantised(x) if matrix.kind in PACKED else x, most_rows),
            "weight": aligned(matrix.data),
            "bias": 0 if bias is None else aligned(bias),
            "y": out,
            "values": values,
            "outputs": outputs,
            "add": int(y is not None),
        },
        ["y"],
        variant=matrix.kind,
        most_rows=most_rows,
    )
    assert np.all(out[rows:] == UNTOUCHED)
    return out[:rows]


def close(found: Floats, x: Floats, weight: Floats, expected: Floats) -> bool:
    """Return whether rounding explains what keeps products apart.

    Some 2 ** -24 for each of the sums that add up to a product, which partly cancel.
    """
    bound = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T + np.abs(expected)
    return bool(np.all(np.abs(found - expected) <= 1e-6 * bound))


@every_kind
@pytest.mark.parametrize(
    ("rows", "outputs"), [(2, 11), (1, 1)], ids=["a group and three", "one output"]
)
def test_linear_is_that_of_numpy(
    gpu: gpu_launches.Run, kind: TensorType, rows: int, outputs: int
) -> None:
    values = width_of(kind)
    matrix, x = Matrix.random(kind, outputs, values), normal(rows, values, seed=1)
    found = linear(gpu, matrix, x)
    read = as_read(kind, x).astype(np.float64)
    assert close(found, read, matrix.weight, plain.linear(read, matrix.weight))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (T.Q8_0, 34 * 32),
        (T.Q6_K, 5 * 256),
        (T.MXFP4, 32),
        (T.F32, 264),
        (T.F16, 264),
        (T.BF16, 264),
        (T.F32, 2),
        (T.BF16, 33),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_rows_of_any_length_are_multiplied(
    gpu: gpu_launches.Run, kind: TensorType, values: int
) -> None:
    matrix, x = Matrix.random(kind, 17, values), normal(1, values, seed=1)
    read = as_read(kind, x).astype(np.float64)
    expected = plain.linear(read, matrix.weight)
    assert close(linear(gpu, matrix, x), read, matrix.weight, expected)


@pytest.mark.parametrize(
    ("kind", "values", "outputs"),
    [
        *((kind, width_of(kind), 11) for kind in DECODERS),
        (T.Q8_0, 512, 9),  # a lane holds all that it has of the row
        (T.Q8_0, 1024, 8),  # by two warps
        (T.Q8_0, 256 * 33, 3),  # more than lanes hold
        (T.Q4_K, 2048, 8),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_step_of_one_row_has_the_bits_of_one_of_several(
    gpu: gpu_launches.Run, kind: TensorType, values: int, outputs: int
) -> None:
    matrix, x = Matrix.random(kind, outputs, values), normal(1, values, seed=1)
    bias, before = normal(outputs, seed=2), normal(1, outputs, seed=3)
    for given in ({}, {"bias": bias, "y": before}):
        alone = linear(gpu, matrix, x, most_rows=1, **given)
        assert same_bits(alone, linear(gpu, matrix, x, **given)), list(given)


@pytest.mark.parametrize("kind", [T.Q4_0, T.F32, T.F16], ids=lambda kind: kind.name)
def test_a_bias_is_added_and_the_whole_to_what_is_there(
    gpu: gpu_launches.Run, kind: TensorType
) -> None:
    values, outputs = 32, 11
    matrix, x = Matrix.random(kind, outputs, values), normal(2, values, seed=1)
    bias, before = normal(outputs, seed=2), normal(2, outputs, seed=3)
    read = as_read(kind, x).astype(np.float64)
    for given in ({"bias": bias}, {"y": before}, {"bias": bias, "y": before}):
        expected = plain.linear(read, matrix.weight, **given)
        found = linear(gpu, matrix, x, **given)
        assert close(found, read, matrix.weight, expected), list(given)


@pytest.mark.parametrize("kind", [T.Q4_K, T.Q3_K, T.IQ3_S, T.BF16], ids=lambda kind: kind.name)
def test_the_product_of_a_row_does_not_depend_on_its_company(
    gpu: gpu_launches.Run, kind: TensorType
) -> None:
    values = {1: 72, 256: 1280}[block_layout(kind).values]
    matrix, x = Matrix.random(kind, 3, values), normal(5, values, seed=1)
    x[1, 3] = np.nan
    together = linear(gpu, matrix, x)
    assert np.isnan(together[1]).all()
    assert np.isfinite(np.delete(together, 1, axis=0)).all()
    for first, last in ((0, 1), (2, 4), (3, 4), (4, 5)):
        alone = linear(gpu, matrix, x[first:last])
        assert same_bits(alone, together[first:last]), (first, last)


@pytest.mark.parametrize(
    ("kind", "values", "rows", "outputs"),
    [
        (T.F32, 264, 66, 3),  # chains of one turn and of two
        (T.F16, 264, 3, 66),
        (T.BF16, 56, 9, 2),  # most lanes have nothing
        pytest.param(T.F32, 1024, 9, 5, marks=pytest.mark.slow),  # two parts, two whole turns
        pytest.param(T.BF16, 2304, 10, 2, marks=pytest.mark.slow),  # eight parts
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_very_many_rows_have_the_bits_of_each_alone(
    gpu: gpu_launches.Run,
    monkeypatch: pytest.MonkeyPatch,
    kind: TensorType,
    values: int,
    rows: int,
    outputs: int,
) -> None:
    monkeypatch.setattr(batches, "SIDE", 1)
    monkeypatch.setattr(batches, "MANY_SUMS", 1)
    matrix, x = Matrix.random(kind, outputs, values), normal(rows, values, seed=1)
    x[0, 0], x[1, values - 1] = -0.0, np.inf
    bias, before = normal(outputs, seed=2), normal(rows, outputs, seed=3)
    together = linear(gpu, matrix, x, bias=bias, y=before, most_rows=rows + 2)
    for row in (0, 1, rows - 1):
        own = slice(row, row + 1)
        alone = linear(gpu, matrix, x[own], bias=bias, y=before[own], most_rows=1)
        assert same_bits(alone, together[own]), row


@pytest.mark.parametrize(
    ("rows", "outputs", "values", "name"),
    [
        (4096, 128, 2048, "batch_linear_tiles_f32_2048"),
        (1024, 128, 2048, "batch_linear_f32_4"),
        (9, 32_000, 2048, "batch_linear_f32_4"),  # seven rows of eight would be nobody's
        (4096, 128, 2049, "linear_f32_odd"),
    ],
)
def test_very_many_rows_have_a_kernel_of_their_own(
    rows: int, outputs: int, values: int, name: str
) -> None:
    linear = gpu_launches.shaped("linear", T.F32, outputs=outputs, values=values)
    (found,) = card_launches((linear,), rows)
    assert found.kernel.name == name


def test_a_matrix_of_extreme_quants_does_not_overflow(gpu: gpu_launches.Run) -> None:
    values = 64
    raw = np.zeros((8, values // 32, 34), np.uint8)
    raw[:, :, 1], raw[:, :, 2:] = 0x3C, 0x80  # scale 1, quants -128
    weight = np.full((8, values), np.float32(-128))
    matrix = Matrix(T.Q8_0, pack(T.Q8_0, raw.reshape(-1), 8, values), weight)
    x = np.full((1, values), np.float32(127))
    assert np.all(linear(gpu, matrix, x) == np.float32(-128 * 127 * values))


def test_more_outputs_than_a_grid_has_blocks_are_refused() -> None:
    grid = linear_kernel(T.Q8_0, 32).grid
    assert grid({"outputs": 524_280}, 1) == (1, 65_535, 1)
    with pytest.raises(
        UnsupportedDevice, match="524,281 outputs: on a card it has 524,280 at most"
    ):
        grid({"outputs": 524_281}, 1)


@pytest.mark.parametrize("values", [72, 33])
def test_a_head_of_floats_may_have_more(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    assert linear_kernel(T.F16, 4096).grid({"outputs": 151_936}, 2) == (2, 65_535, 3)
    matrix, x = Matrix.random(T.F16, 35, values), normal(1, values, seed=1)
    wide = linear(gpu_launches.simulated, matrix, x, most_rows=1)
    # A card would run the code that it has, of more blocks.
    monkeypatch.setattr(operations, "MOST_BLOCKS", 3)
    assert linear_kernel(T.F16, values).grid({"outputs": 35}, 1) == (1, 3, 2)
    assert same_bits(linear(gpu_launches.simulated, matrix, x, most_rows=1), wide)


def test_a_type_without_kernels_on_a_card_is_refused() -> None:
    with pytest.raises(ValueError, match="TQ1_0 have no kernels"):
        linear_kernel(T.TQ1_0, 256)
