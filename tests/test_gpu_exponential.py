"""The exponential of the GPU kernels against numpy's in float64 and, to the bit, the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_simulator
import numpy as np
from test_exponential import run as host_run

from strata_nb.kernels.gpu.compile import ptx_code
from strata_nb.kernels.gpu.exponential import exp, sigmoid, silu
from strata_nb.kernels.gpu.intrinsics import i64, load_f32, store_f32, thread_index
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.reference import Floats


def kernel_of(function: Callable[[Any], Any]) -> Callable[[int, int, int], None]:
    def kernel(x: int, y: int, values: int) -> None:
        place = i64(thread_index())
        while place < values:
            store_f32(y + 4 * place, function(load_f32(x + 4 * place)))
            place += 32

    return kernel


def run(x: Floats, function: Callable[[Any], Any] = exp) -> Floats:
    y = np.empty_like(x)
    words = [x.ctypes.data, y.ctypes.data, x.size]
    memory = gpu_simulator.Memory([y], [x])
    gpu_simulator.run(kernel_of(function), (1, 1, 1), 32, 0, words, memory)
    return y


def test_it_is_right_to_two_units_in_the_last_place_over_its_whole_range() -> None:
    x = np.linspace(-87.3, 88.7, 1 << 13).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    units = np.abs(run(x) - exact) / np.spacing(exact.astype(np.float32))
    assert units.max() <= 2


def test_below_the_smallest_normal_number_it_fades_to_an_exact_zero() -> None:
    x = np.linspace(-104, -87.4, 1 << 9).astype(np.float32)
    assert np.abs(run(x) - np.exp(x.astype(np.float64))).max() <= 2 * 2.0**-149
    assert (run(np.full(16, -104.1, np.float32)) == 0).all()


def test_infinities_have_their_limits_and_nan_stays() -> None:
    x = np.array([-np.inf, np.inf, np.nan, 0], np.float32)
    assert run(x)[:2].tolist() == [0, np.inf]
    assert np.isnan(run(x)[2])
    assert run(x)[3] == 1
    assert run(x, sigmoid)[:2].tolist() == [0, 1]
    assert run(x, sigmoid)[3] == 0.5


def test_it_has_the_bits_of_the_one_of_the_host() -> None:
    x = np.random.default_rng(0).uniform(-110, 95, 1 << 12).astype(np.float32)
    assert np.array_equal(run(x), host_run(x))
    assert np.array_equal(run(x, sigmoid), host_run(x, of_sigmoid=True))


def test_nothing_of_it_is_done_in_double_precision() -> None:
    kernel = GpuKernel("silu", kernel_of(silu), 32, lambda _, __: (1, 1, 1))
    ptx = ptx_code(kernel, ["address", "address", "integer"])
    assert ".f64" not in ptx
