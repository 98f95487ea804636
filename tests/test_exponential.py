"""The exponential of the kernels against numpy's in float64, at its ends, and on odd numbers."""

from __future__ import annotations

import numpy as np

from strata_nb.compiling import compiled
from strata_nb.kernels.host.exponential import exp, sigmoid
from strata_nb.kernels.host.vectors import load_floats
from strata_nb.kernels.reference import Floats
from strata_nb.raw_memory import store


@compiled("void(int64,int64,int64,int64)")
def _of_all(x: int, y: int, values: int, of_sigmoid: int) -> None:
    for number in range(0, values, 16):
        found = load_floats(x + 4 * number)
        store(y + 4 * number, sigmoid(found) if of_sigmoid else exp(found))


def run(x: Floats, *, of_sigmoid: bool = False) -> Floats:
    y = np.empty_like(x)
    _of_all(x.ctypes.data, y.ctypes.data, x.size, of_sigmoid)
    return y


def test_it_is_right_to_two_units_in_the_last_place_over_its_whole_range() -> None:
    x = np.linspace(-87.3, 88.7, 1 << 16).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    units = np.abs(run(x) - exact) / np.spacing(exact.astype(np.float32))
    assert units.max() <= 2


def test_below_the_smallest_normal_number_it_fades_to_an_exact_zero() -> None:
    x = np.linspace(-104, -87.4, 1 << 12).astype(np.float32)
    assert np.abs(run(x) - np.exp(x.astype(np.float64))).max() <= 2 * 2.0**-149
    assert (run(np.full(16, -104.1, np.float32)) == 0).all()


def test_infinities_have_their_limits_and_nan_stays() -> None:
    x = np.array([-np.inf, np.inf, np.nan, 0] * 4, np.float32)
    assert run(x)[:2].tolist() == [0, np.inf]
    assert np.isnan(run(x)[2])
    assert run(x)[3] == 1
    assert run(x, of_sigmoid=True)[:2].tolist() == [0, 1]
    assert run(x, of_sigmoid=True)[3] == 0.5


def test_a_value_has_the_same_bits_in_every_lane() -> None:
    x = np.random.default_rng(0).uniform(-50, 50, 16).astype(np.float32)
    for shift in range(16):
        assert np.array_equal(np.roll(run(x), shift), run(np.roll(x, shift)))
