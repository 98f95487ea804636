"""The products of the host, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from random_blocks import random_blocks

from strata_nb.formats import TensorType, block_layout, block_record, dequantise, row_bytes
from strata_nb.kernels.host.array_products import Activations, multiply, quantise
from strata_nb.packing import PACKED, UNPACKED, pack

T = TensorType
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
TYPES = sorted(PACKED)
names = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
plain_names = pytest.mark.parametrize("kind", sorted(UNPACKED), ids=lambda kind: kind.name)


def shapes(kind: TensorType) -> list[tuple[int, int, int]]:
    """Return rows, outputs, values: whole groups, a last group of fewer rows, an odd row."""
    if block_layout(kind).values == 32:
        return [(1, 16, 64), (5, 11, 96), (9, 24, 32), (3, 7, 544)]
    return [(1, 16, 256), (5, 11, 512), (9, 24, 256), (3, 7, 1280)]


def whole_number_blocks(kind: TensorType, count: int, rng: np.random.Generator) -> Bytes:
    """Return random blocks whose scale is 1 and whose minimum is 2, so that values are exact."""
    raw = rng.integers(0, 256, count * block_layout(kind).size_bytes, dtype=np.uint8)
    blocks = raw.view(block_record(kind))
    if kind is T.MXFP4:
        blocks["exponent"] = 128
    elif kind is T.IQ1_M:
        one = np.float16(1).view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        blocks["scales"] = blocks["scales"] & 0x0FFF | one << 12
    else:
        blocks["scale"] = 1
        if "minimum" in (blocks.dtype.names or ()):
            blocks["minimum"] = 2
    return raw


def whole_number_rows(rows: int, values: int, rng: np.random.Generator) -> Floats:
    """Return small whole numbers, one of 32 being 127, so that every scale is exactly 1."""
    x = rng.integers(-9, 10, (rows, values)).astype(np.float32)
    x[:, ::32] = rng.choice(np.array([-127, 127], np.float32), (rows, values // 32))
    return x


def product(kind: TensorType, weights: Bytes, x: Activations, outputs: int, **how: bool) -> Floats:
    y = np.full((len(x.data), outputs), np.float32(7e33))
    multiply(kind, weights, x, y, **how)
    return y


# -- quantising ------------------------------------------------------------------------------------


def test_quantised_rows_are_the_nearest_multiples_of_the_scale() -> None:
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    found = quantise(x)
    groups = x.reshape(5, 3, 32)
    largest = np.abs(groups).max(axis=2)
    assert np.array_equal(found.scales(), largest / np.float32(127))
    expected = np.rint(groups * (np.float32(127) / largest)[..., None])
    assert np.array_equal(found.quants().reshape(groups.shape), expected)
    back = found.quants().reshape(groups.shape) * found.scales()[..., None]
    assert np.all(np.abs(back - groups) <= largest[..., None] / 253)


def test_quantised_rows_carry_the_sums_of_their_quants() -> None:
    x = np.random.default_rng(1).standard_normal((3, 160)).astype(np.float32)
    found = quantise(x)
    sums = found.data[:, 160 + 5 * 4 :].copy().view("<i4")
    quants = found.quants().astype(np.int32)
    assert np.array_equal(sums[:, :5], quants.reshape(3, 5, 32).sum(axis=2))
    assert np.array_equal(sums[:, 5:], quants.reshape(3, 10, 16).sum(axis=2))


def test_the_error_of_quantising_is_half_a_percent_of_normal_values() -> None:
    x = np.random.default_rng(2).standard_normal((64, 4096)).astype(np.float32)
    found = quantise(x)
    back = found.quants().reshape(64, -1, 32) * found.scales()[..., None]
    assert 0.004 < np.sqrt(np.mean((back.reshape(x.shape) - x) ** 2)) < 0.006


def test_zeros_and_values_too_small_to_scale_become_zero() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 40] = 1e-38
    found = quantise(x)
    assert not found.quants().any()
    assert not found.scales().any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_shows_in_every_product_of_its_row(bad: float) -> None:
    rng = np.random.default_rng(3)
    raw = random_blocks(T.Q4_K, 8 * 2, 0.02, rng)
    x = rng.standard_normal((2, 512)).astype(np.float32)
    x[1, 300] = bad
    y = product(T.Q4_K, pack(T.Q4_K, raw, 8, 512), quantise(x), 8)
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()


# -- packed weights --------------------------------------------------------------------------------


@names
def test_products_of_whole_numbers_are_exact(kind: TensorType) -> None:
    # Scales are 1 and every sum stays below 2 ** 24 eighths: float32 has no error to hide behind,
    # so that the integer products have to be right to the last bit.
    rng = np.random.default_rng(int(kind))
    for rows, outputs, values in shapes(kind):
        raw = whole_number_blocks(kind, outputs * values // block_layout(kind).values, rng)
        x = whole_number_rows(rows, values, rng)
        exact = x.astype(np.float64) @ dequantise(kind, raw).reshape(outputs, values).T
        weights = pack(kind, raw, outputs, values)
        for as_prompt in (False, True):
            y = product(kind, weights, quantise(x), outputs, as_prompt=as_prompt)
            assert np.array_equal(y, exact), (rows, outputs, values, as_prompt)


@names
def test_products_are_those_of_numpy(kind: TensorType) -> None:
    rng = np.random.default_rng(int(kind))
    for rows, outputs, values in shapes(kind):
        raw = random_blocks(kind, outputs * values // block_layout(kind).values, 0.02, rng)
        x = quantise(rng.standard_normal((rows, values)).astype(np.float32))
        scales = np.repeat(x.scales(), 32, axis=1).astype(np.float64)
        rows_back = x.quants() * scales
        w = dequantise(kind, raw).reshape(outputs, values).astype(np.float64)
        y = product(kind, pack(kind, raw, outputs, values), x, outputs)
        # 2 ** -24 for each of about values / 32 roundings, which partly cancel; minima add terms
        # of the size of the largest quant.
        bound = np.abs(rows_back) @ np.abs(w).T
        assert np.all(np.abs(y - rows_back @ w.T) <= 1e-6 * bound)


@names
def test_the_bits_of_a_row_do_not_depend_on_its_company(kind: TensorType) -> None:
    rng = np.random.default_rng(int(kind))
    outputs, values = 29, 3 * max(64, block_layout(kind).values) + block_layout(kind).values % 64
    raw = random_blocks(kind, outputs * values // block_layout(kind).values, 0.02, rng)
    weights = pack(kind, raw, outputs, values)
    x = quantise(rng.standard_normal((33, values)).astype(np.float32))
    alone = np.concatenate(
        [product(kind, weights, Activations(x.data[n : n + 1], values), outputs) for n in range(33)]
    )
    for rows in (2, 3, 4, 5, 8, 9, 33):
        for as_prompt in (False, True):
            few = Activations(x.data[:rows], values)
            together = product(kind, weights, few, outputs, as_prompt=as_prompt)
            assert np.array_equal(together, alone[:rows]), (rows, as_prompt)


@pytest.mark.parametrize("as_prompt", [False, True])
def test_outputs_may_be_computed_in_parts(as_prompt: bool) -> None:
    rng = np.random.default_rng(5)
    raw = random_blocks(T.Q6_K, 43 * 2, 0.02, rng)
    weights = pack(T.Q6_K, raw, 43, 512)
    x = quantise(rng.standard_normal((6, 512)).astype(np.float32))
    whole = product(T.Q6_K, weights, x, 43, as_prompt=as_prompt)
    parts = np.full((6, 43), np.float32(np.inf))
    for first, last in ((16, 24), (24, 43), (0, 16)):
        multiply(T.Q6_K, weights, x, parts, first, last, as_prompt=as_prompt)
    assert np.array_equal(parts, whole)


def test_what_does_not_fit_is_refused() -> None:
    rng = np.random.default_rng(6)
    weights = pack(T.Q4_K, random_blocks(T.Q4_K, 16, 0.02, rng), 16, 256)
    x = quantise(rng.standard_normal((2, 256)).astype(np.float32))
    y = np.empty((2, 16), np.float32)
    with pytest.raises(ValueError, match="not whole groups of 8"):
        multiply(T.Q4_K, weights, x, y, 4, 16)
    with pytest.raises(ValueError, match="not a Q4_K tensor \\(24, 256\\)"):
        multiply(T.Q4_K, weights, x, np.empty((2, 24), np.float32))
    with pytest.raises(ValueError, match="outputs 0 to 24 are not within 16"):
        multiply(T.Q4_K, weights, x, y, 0, 24)
    with pytest.raises(ValueError, match="2 rows"):
        multiply(T.Q4_K, weights, x, np.empty((3, 16), np.float32))
    with pytest.raises(ValueError, match="sub-blocks of 32"):
        quantise(np.zeros((1, 40), np.float32))


# -- float weights ---------------------------------------------------------------------------------


def plain_product(kind: TensorType, weights: Bytes, x: Floats, outputs: int) -> Floats:
    y = np.full((len(x), outputs), np.float32(7e33))
    multiply(kind, weights, x, y)
    return y


@plain_names
@pytest.mark.parametrize(("rows", "outputs", "values"), [(1, 8, 64), (6, 5, 77), (3, 1, 16)])
def test_plain_products_are_those_of_numpy(
    kind: TensorType, rows: int, outputs: int, values: int
) -> None:
    rng = np.random.default_rng(values)
    raw = random_blocks(kind, outputs * values, 0.02, rng)
    x = rng.standard_normal((rows, values)).astype(np.float32)
    w = dequantise(kind, raw).reshape(outputs, values).astype(np.float64)
    y = plain_product(kind, raw, x, outputs)
    assert raw.size == outputs * row_bytes(kind, values)
    assert np.all(np.abs(y - x @ w.T) <= 3e-7 * (np.abs(x) @ np.abs(w).T))


@plain_names
def test_the_bits_of_a_plain_row_do_not_depend_on_its_company(kind: TensorType) -> None:
    rng = np.random.default_rng(7)
    raw = random_blocks(kind, 9 * 100, 0.02, rng)
    x = rng.standard_normal((9, 100)).astype(np.float32)
    alone = np.concatenate([plain_product(kind, raw, x[n : n + 1], 9) for n in range(9)])
    for rows in (2, 4, 5, 9):
        assert np.array_equal(plain_product(kind, raw, x[:rows], 9), alone[:rows])
    part = np.full((9, 9), np.float32(np.inf))
    multiply(kind, raw, x, part, 3, 7)
    assert np.array_equal(part[:, 3:7], alone[:, 3:7])
