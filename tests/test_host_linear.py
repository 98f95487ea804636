"""`linear` of the host, as programs launch it: in threads, over quantised or float rows."""

from __future__ import annotations

import kernel_references as plain
import numpy as np
import pytest
from host_launches import COUNTS, ROWS, UNTOUCHED, Matrix, as_read, made, normal, run, same_bits

from strata_nb.formats import TensorType
from strata_nb.kernels.host.matrices import takes_packed
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.reference import Floats

T = TensorType


def close(found: Floats, x: Floats, weight: Floats, expected: Floats) -> bool:
    """Return whether rounding explains what keeps products apart.

    Some 2 ** -24 for each of the sums that add up to a product, which partly cancel.
    """
    bound = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T + np.abs(expected)
    return bool(np.all(np.abs(found - expected) <= 1e-6 * bound))


# Type, outputs and values: outputs that are no multiple of 8 or 16, a single one, whole panels;
# values that are no multiple of 32 for float types, odd numbers of sub-blocks for Q8_0.
LINEAR = [
    (T.F32, 37, 77),
    (T.F16, 5, 100),
    (T.BF16, 1, 64),
    (T.Q8_0, 37, 96),
    (T.Q8_0, 3, 32),
    (T.Q4_K, 53, 512),
    (T.Q6_K, 48, 256),
    (T.Q6_K, 1, 256),
]
linear_cases = pytest.mark.parametrize(
    ("kind", "outputs", "values"), LINEAR, ids=lambda value: getattr(value, "name", value)
)


def linear(
    threads: int,
    matrix: Matrix,
    x: Floats,
    *,
    bias: Floats | None = None,
    y: Floats | None = None,
) -> Floats:
    """Return rows times a matrix, added to y where it is given; x is quantised if need be."""
    (rows, values), outputs = x.shape, len(matrix.weight)
    out = np.full((rows + 1, outputs), UNTOUCHED)
    if y is not None:
        out[:-1] = y
    count = np.array([rows])
    packed = np.empty((rows, row_bytes(values)), np.uint8)
    launches = [
        made(
            "linear",
            matrix.kind,
            rows=count,
            x=packed if takes_packed(matrix.kind) else x,
            weight=matrix.data,
            bias=0 if bias is None else bias,
            y=out,
            values=values,
            outputs=outputs,
            add=int(y is not None),
        )
    ]
    if takes_packed(matrix.kind):
        quantise = made("quantise", rows=count, x=x, packed=packed, times=1, values=values)
        launches.insert(0, quantise)
    run(threads, *launches)
    assert np.all(out[-1] == UNTOUCHED)
    return out[:-1]


@linear_cases
@pytest.mark.parametrize("rows", ROWS)
def test_linear_is_that_of_numpy_on_any_number_of_threads(
    kind: TensorType, outputs: int, values: int, rows: int
) -> None:
    matrix, x = Matrix.random(kind, outputs, values), normal(rows, values, seed=1)
    found = [linear(count, matrix, x) for count in COUNTS]
    read = as_read(kind, x).astype(np.float64)
    assert close(found[0], read, matrix.weight, plain.linear(read, matrix.weight))
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])


@linear_cases
@pytest.mark.parametrize("rows", ROWS)
def test_a_bias_is_added_and_the_whole_to_what_is_there(
    kind: TensorType, outputs: int, values: int, rows: int
) -> None:
    matrix, x = Matrix.random(kind, outputs, values), normal(rows, values, seed=1)
    bias, before = normal(outputs, seed=2), normal(rows, outputs, seed=3)
    read = as_read(kind, x).astype(np.float64)
    for given in ({"bias": bias}, {"y": before}, {"bias": bias, "y": before}):
        expected = plain.linear(read, matrix.weight, **given)
        found = [linear(count, matrix, x, **given) for count in COUNTS]
        assert close(found[0], read, matrix.weight, expected), list(given)
        assert same_bits(found[1], found[0])
        assert same_bits(found[2], found[0])


@linear_cases
def test_the_product_of_a_row_does_not_depend_on_its_company(
    kind: TensorType, outputs: int, values: int
) -> None:
    matrix, x = Matrix.random(kind, outputs, values), normal(40, values, seed=1)
    x[5, 3] = np.nan
    given = {"bias": normal(outputs, seed=2), "y": normal(40, outputs, seed=3)}
    together = linear(2, matrix, x, **given)
    assert np.isnan(together[5]).all()
    assert np.isfinite(np.delete(together, 5, axis=0)).all()
    for first, last in ((0, 1), (5, 6), (11, 12), (3, 8), (4, 13), (20, 40)):
        before = given["y"][first:last]
        part = linear(1, matrix, x[first:last], bias=given["bias"], y=before)
        assert same_bits(part, together[first:last]), (first, last)


@pytest.mark.parametrize("kind", [T.F32, T.Q8_0], ids=lambda kind: kind.name)
def test_no_rows_change_nothing(kind: TensorType) -> None:
    matrix = Matrix.random(kind, 24, 64)
    found = linear(3, matrix, np.empty((0, 64), np.float32), bias=normal(24))
    assert found.shape == (0, 24)  # and the row behind them is as it was
