"""The kernel that reads a card's memory: all of it, and once."""

from __future__ import annotations

import gpu_simulator
import numpy as np
import pytest
from gpu_launches import aligned

from strata_nb.kernels.gpu import reading
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.compile import ptx_code
from strata_nb.kernels.gpu.reading import STRETCH_BYTES, SUMS_BYTES, plain_read_launch

STRETCHES = 2


def run(one: CardLaunch, memory: gpu_simulator.Memory) -> None:
    words = list(one.arguments.values())
    gpu_simulator.run(one.kernel.function, one.grid(1), one.kernel.threads, 0, words, memory)


def test_every_byte_of_the_buffer_changes_a_sum() -> None:
    random = np.random.default_rng(0)
    words = random.integers(-(1 << 31), 1 << 31, (STRETCHES, STRETCH_BYTES // 4), np.int64)
    buffer = aligned(words.astype(np.int32))
    sums = aligned(np.zeros((STRETCHES, SUMS_BYTES // 4), np.int32))
    one = plain_read_launch(buffer.ctypes.data, sums.ctypes.data, STRETCHES)
    run(one, gpu_simulator.Memory([sums], [buffer]))
    # A thread has 16 bytes of every 4,096 of its stretch.
    expected = np.bitwise_xor.reduce(buffer.reshape(STRETCHES, -1, SUMS_BYTES // 4, 4), axis=(1, 3))
    assert np.array_equal(sums, expected)
    assert one.kernel.reads(one.arguments, 1) == buffer.nbytes


def test_nothing_behind_the_buffer_is_read() -> None:
    buffer = aligned(np.zeros(STRETCH_BYTES - 16, np.uint8))
    sums = aligned(np.zeros(SUMS_BYTES // 4, np.int32))
    one = plain_read_launch(buffer.ctypes.data, sums.ctypes.data, 1)
    with pytest.raises(gpu_simulator.KernelFault, match="behind"):
        run(one, gpu_simulator.Memory([sums], [buffer]))


def test_loads_are_of_sixteen_bytes_and_four_are_begun_before_one_is_used() -> None:
    one = plain_read_launch(0, 0, 1)
    code = ptx_code(one.kernel, one.kinds)
    lines = [line.split()[0] for line in code.splitlines() if line.strip()]
    loads = np.flatnonzero([word.startswith("ld.global") for word in lines])
    assert {lines[number] for number in loads} == {"ld.global.nc.v4.u32"}
    runs = np.split(loads, np.flatnonzero(np.diff(loads) > 1) + 1)
    assert all(len(run) % reading._LOADS == 0 for run in runs)
    assert runs[0].size
