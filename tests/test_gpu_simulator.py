"""The simulator that runs GPU kernels without a card."""

from __future__ import annotations

import gpu_simulator
import numpy as np
import pytest
from gpu_simulator import KernelFault, Memory

from strata_nb.kernels.gpu.intrinsics import (
    barrier,
    block_x,
    f32_of_i32,
    fetch_f32,
    i64,
    load_f32,
    shared_load_f32,
    shared_store_f32,
    shuffle_xor_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import warp_sum


def run(kernel: object, *arrays: np.ndarray, threads: int = 32, read: object = ()) -> None:
    words = [array.ctypes.data for array in arrays]
    gpu_simulator.run(kernel, (1, 1, 1), threads, 512, words, Memory(arrays, read))  # type: ignore[arg-type]


def test_a_warp_sums_its_lanes() -> None:
    def kernel(x: int, y: int) -> None:
        lane = i64(thread_index())
        store_f32(y + 4 * lane, warp_sum(load_f32(x + 4 * lane)))

    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(kernel, x, y)
    assert np.all(y == x.sum())


def test_a_barrier_shows_every_thread_what_the_others_wrote() -> None:
    def kernel(y: int) -> None:
        thread = i64(thread_index())
        shared_store_f32(4 * thread, f32_of_i32(thread_index()))
        barrier()
        store_f32(y + 4 * thread, shared_load_f32(4 * (63 - thread)))

    y = np.zeros(64, np.float32)
    run(kernel, y, threads=64)
    assert np.array_equal(y, np.arange(63, -1, -1))


@pytest.mark.parametrize("writer", [0, 1])
def test_a_barrier_that_lacks_shows_in_one_of_two_blocks(writer: int) -> None:
    def kernel(y: int) -> None:
        warp = i64(thread_index() >> 5)
        if warp == writer:
            shared_store_f32(0, f32_of_i32(1))
        else:
            store_f32(y + 4 * i64(block_x()), shared_load_f32(0))

    y = np.zeros(2, np.float32)
    gpu_simulator.run(kernel, (2, 1, 1), 64, 4, [y.ctypes.data], Memory([y]))
    assert sorted(y == 1) == [False, True]


def test_an_address_outside_the_arrays_is_a_fault() -> None:
    def kernel(y: int) -> None:
        store_f32(y + 4 * i64(thread_index()), f32_of_i32(0))

    with pytest.raises(KernelFault, match="behind"):
        run(kernel, np.zeros(31, np.float32))


def test_a_write_to_what_is_only_read_is_a_fault() -> None:
    def kernel(x: int) -> None:
        store_f32(x, f32_of_i32(0))

    x = np.zeros(1, np.float32)
    with pytest.raises(KernelFault, match="read only"):
        gpu_simulator.run(kernel, (1, 1, 1), 32, 0, [x.ctypes.data], Memory([], [x]))


def test_a_fetch_of_what_the_kernel_writes_is_a_fault() -> None:
    def kernel(x: int) -> None:
        store_f32(x, fetch_f32(x))

    with pytest.raises(KernelFault, match="a fetch of an array that is written"):
        run(kernel, np.zeros(1, np.float32))


def test_a_shuffle_that_some_lanes_miss_is_a_fault() -> None:
    def kernel(y: int) -> None:
        if thread_index() < 16:
            store_f32(y, shuffle_xor_f32(f32_of_i32(1), 1))

    with pytest.raises(KernelFault, match="16 of 32 lanes"):
        run(kernel, np.zeros(1, np.float32))


def test_a_barrier_that_a_warp_misses_is_a_fault() -> None:
    def kernel(_: int) -> None:
        if thread_index() < 32:
            barrier()

    with pytest.raises(KernelFault, match="32 of 64 threads"):
        run(kernel, np.zeros(1, np.float32), threads=64)


def test_a_double_in_place_of_a_float_is_a_fault() -> None:
    def kernel(y: int) -> None:
        store_f32(y, 0.5)

    with pytest.raises(KernelFault, match="not a float32"):
        run(kernel, np.zeros(1, np.float32))
