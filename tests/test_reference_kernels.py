"""The numpy reference against its formulas in float64, and against numbers known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from strata_nb.formats import cache_type
from strata_nb.kernels import reference
from strata_nb.kernels.reference import Floats, RopeStyle


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x = np.array([[3.0, 4.0]], np.float32)  # mean square 12.5
    weight = np.array([1.0, 2.0], np.float32)
    wanted = [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]]
    np.testing.assert_allclose(reference.rms_norm(x, weight, 1e-12), wanted, rtol=1e-6)


def test_rms_norm_adds_eps_under_the_root() -> None:
    x = np.zeros((1, 4), np.float32)
    np.testing.assert_array_equal(reference.rms_norm(x, np.ones(4, np.float32), 1e-6), x)
    small = np.full((1, 4), 1e-3, np.float32)
    wanted = 1e-3 / math.sqrt(1e-6 + 1e-6)
    normed = reference.rms_norm(small, np.ones(4, np.float32), 1e-6)
    np.testing.assert_allclose(normed, wanted, rtol=1e-6)


def test_matmul_multiplies_by_the_transposed_weight() -> None:
    x, weight = normal(5, 7), normal(3, 7, seed=1)
    np.testing.assert_allclose(reference.matmul(x, weight), x @ weight.T, rtol=1e-6)
    assert reference.matmul(x, weight).dtype == np.float32


@pytest.mark.parametrize("style", ["pairs", "halves"])
def test_rope_multiplies_by_a_complex_phase(style: RopeStyle) -> None:
    rows, heads, length, dims, base = 6, 2, 12, 8, 10000.0
    x = normal(rows, heads, length)
    positions = np.arange(3, 3 + rows)
    table = reference.rope_table(positions, reference.rope_frequencies(dims, base))
    rotated = reference.rope_rotate(x, *table, style)
    for plane in range(dims // 2):
        a, b = (2 * plane, 2 * plane + 1) if style == "pairs" else (plane, plane + dims // 2)
        phase = np.exp(1j * positions * base ** (-2 * plane / dims))
        wanted = (x[..., a] + 1j * x[..., b].astype(np.float64)) * phase[:, None]
        np.testing.assert_allclose(rotated[..., a], wanted.real, atol=1e-6)
        np.testing.assert_allclose(rotated[..., b], wanted.imag, atol=1e-6)
    np.testing.assert_array_equal(rotated[..., dims:], x[..., dims:])  # partial rotation


def test_rope_styles_differ_only_in_the_order_of_a_heads_values() -> None:
    x = normal(4, 2, 8)
    table = reference.rope_table(np.arange(4), reference.rope_frequencies(8, 10000.0))
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # pairs to halves
    pairs = reference.rope_rotate(x, *table, "pairs")
    halves = reference.rope_rotate(x[..., order], *table, "halves")
    np.testing.assert_allclose(pairs[..., order], halves, atol=1e-6)
    assert np.abs(reference.rope_rotate(x, *table, "halves") - pairs).max() > 0.1


def test_rope_scale_divides_positions_and_factors_divide_frequencies() -> None:
    plain = reference.rope_frequencies(8, 500.0)
    np.testing.assert_allclose(reference.rope_frequencies(8, 500.0, scale=4.0), plain / 4)
    factors = np.array([1, 2, 4, 8], np.float32)
    np.testing.assert_allclose(
        reference.rope_frequencies(8, 500.0, factors=factors), plain / [1, 2, 4, 8]
    )
    np.testing.assert_allclose(plain, [500.0 ** (-i / 4) for i in range(4)])


def test_softmax_survives_large_values_and_gives_minus_infinity_nothing() -> None:
    x = np.array([[1e4, 1e4 - 1, -np.inf]], np.float32)
    result = reference.softmax(x)
    np.testing.assert_allclose(result[0, :2], [1 / (1 + math.exp(-1)), 1 / (1 + math.e)], rtol=1e-6)
    assert result[0, 2] == 0


def test_sigmoid_and_silu_are_right_at_both_ends() -> None:
    x = np.array([-200, -1, 0, 1, 200], np.float32)
    wanted = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(reference.sigmoid(x), wanted, rtol=1e-6, atol=1e-37)
    up = np.array([2, 3, 4, 5, 6], np.float32)
    np.testing.assert_allclose(reference.silu_gate(x, up), x * wanted * up, rtol=1e-6, atol=1e-30)


def plain_attention(
    queries: Floats, keys: Floats, values: Floats, positions: np.ndarray, scale: float
) -> np.ndarray:
    """Attend row by row and head by head, in float64."""
    rows, heads, _ = queries.shape
    group = heads // len(keys)
    result = np.empty((rows, heads, values.shape[-1]))
    for row, position in enumerate(positions):
        for head in range(heads):
            k = keys[head // group, : position + 1].astype(np.float64)
            v = values[head // group, : position + 1].astype(np.float64)
            scores = k @ queries[row, head] * scale
            weights = np.exp(scores - scores.max())
            result[row, head] = weights @ v / weights.sum()
    return result


@pytest.mark.parametrize(("rows", "first"), [(1, 0), (1, 57), (5, 0), (32, 3), (33, 0), (100, 40)])
def test_attention_is_the_causal_softmax_of_grouped_heads(rows: int, first: int) -> None:
    positions = np.arange(first, first + rows)
    queries = normal(rows, 6, 16)
    keys, values = normal(2, first + rows, 16, seed=1), normal(2, first + rows, 8, seed=2)
    result = reference.attention(queries, keys, values, positions, 0.25)
    assert result.shape == (rows, 6, 8)
    wanted = plain_attention(queries, keys, values, positions, 0.25)
    np.testing.assert_allclose(result, wanted, atol=2e-6)


def test_attention_never_touches_what_is_masked() -> None:
    rows, first = 70, 9
    positions = np.arange(first, first + rows)
    queries, keys, values = normal(rows, 4, 8), normal(2, 100, 8, seed=1), normal(2, 100, 8, seed=2)
    clean = reference.attention(queries, keys, values, positions, 1.0)
    for cell, poison in ((40, np.nan), (50, np.inf), (79, -np.inf), (99, np.nan)):
        keys[:, cell], values[:, cell] = poison, poison
    with np.errstate(invalid="ignore"):
        dirty = reference.attention(queries, keys, values, positions, 1.0)
    before = positions < 40
    np.testing.assert_allclose(dirty[before], clean[before], atol=1e-6)
    assert np.isnan(dirty[~before]).all()


def test_router_takes_the_largest_and_equal_ones_by_lower_id() -> None:
    logits = np.array([[0, 2, 1, 2, 2], [5, 5, 5, 5, 5]], np.float32)
    chosen, shares = reference.router_top_k(logits, 3, renormalise=True)
    np.testing.assert_array_equal(chosen, [[1, 3, 4], [0, 1, 2]])
    np.testing.assert_allclose(shares, np.full((2, 3), 1 / 3), rtol=1e-6)


def test_router_shares_are_of_all_experts_unless_renormalised() -> None:
    logits = normal(4, 8)
    every = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    chosen, shares = reference.router_top_k(logits, 2, renormalise=False)
    wanted = np.take_along_axis(every, chosen, axis=-1)
    np.testing.assert_allclose(shares, wanted, rtol=1e-5)
    _, renormalised = reference.router_top_k(logits, 2, renormalise=True)
    np.testing.assert_allclose(renormalised.sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(renormalised, wanted / wanted.sum(axis=-1)[:, None], rtol=1e-5)


def test_mixture_sums_the_chosen_experts_and_asks_for_each_once() -> None:
    gates, ups, downs = normal(5, 6, 4), normal(5, 6, 4, seed=1), normal(5, 4, 6, seed=2)
    x = normal(7, 4, seed=3)
    chosen, shares = reference.router_top_k(normal(7, 5, seed=4), 2, renormalise=False)
    asked = []

    def expert(number: int) -> tuple[Floats, Floats, Floats]:
        asked.append(number)
        return gates[number], ups[number], downs[number]

    result = reference.expert_mixture(x, chosen, shares, expert)
    assert asked == sorted(set(chosen.ravel().tolist()))
    for row in range(7):
        wanted = np.zeros(4)
        for number, share in zip(chosen[row], shares[row], strict=True):
            gate, up = gates[number] @ x[row], ups[number] @ x[row]
            wanted += share * (downs[number] @ (gate / (1 + np.exp(-gate)) * up))
        np.testing.assert_allclose(result[row], wanted, atol=1e-5)


@pytest.mark.parametrize(("length", "groups"), [(64, 1), (128, 2), (80, 2), (16, 1)])
def test_int8_keys_are_within_half_a_step_of_each_groups_scale(length: int, groups: int) -> None:
    x = normal(3, 5, length)
    x[..., length // 2 :] *= 100  # a group must not pay for another
    integers, scales = reference.quantise_kv(x)
    assert scales.shape == (3, 5, groups)
    layout = cache_type("int8")
    assert (integers.dtype, scales.dtype) == (layout.dtype, layout.scale_dtype)
    assert integers.nbytes + scales.nbytes == 3 * 5 * layout.head_bytes(length)
    back = reference.dequantise_kv(integers, scales)
    for group in range(groups):
        part = slice(64 * group, min(length, 64 * (group + 1)))
        step = np.abs(x[..., part]).max(axis=-1, keepdims=True) / 127
        assert np.all(np.abs(back[..., part] - x[..., part]) <= 0.6 * step)


def test_int8_keys_of_zero_are_zero_and_of_too_large_values_are_not_finite() -> None:
    zeros = np.zeros((1, 64), np.float32)
    np.testing.assert_array_equal(reference.dequantise_kv(*reference.quantise_kv(zeros)), zeros)
    for bad in (1e9, np.inf, np.nan):
        x = normal(1, 64)
        x[0, 5] = bad
        assert not np.isfinite(reference.dequantise_kv(*reference.quantise_kv(x))).all()


def test_int8_scale_is_the_largest_magnitude_over_127_as_float16() -> None:
    x = np.linspace(-2.0, 1.0, 64, dtype=np.float32)[None]
    integers, scales = reference.quantise_kv(x)
    assert scales[0, 0] == np.float16(2.0 / 127)
    wanted = np.clip(np.rint(x / np.float32(scales[0, 0])), -127, 127)
    np.testing.assert_array_equal(integers, wanted)
