"""The simulator that runs GPU kernels without a card."""

from __future__ import annotations

import gpu_simulator
import numpy as np
import pytest
from gpu_simulator import KernelFault, Memory

from strata_nb.kernels.gpu.intrinsics import (
    arrive,
    await_previous,
    barrier,
    bits_set,
    block_x,
    block_z,
    blocks_z,
    f32_of_i32,
    fetch_f32,
    i32,
    i64,
    lanes_where,
    largest_of_lanes,
    load_f32,
    load_i32,
    mma_16x8x16,
    mma_16x8x32,
    mma_of_halves,
    post_i64,
    shared_add_i64,
    shared_load_f32,
    shared_load_i64,
    shared_store_f32,
    shared_store_i64,
    shuffle_xor_f32,
    store_f32,
    store_i32,
    store_i64,
    thread_index,
)
from strata_nb.kernels.gpu.intrinsics.attending import keep_words, key_products
from strata_nb.kernels.gpu.intrinsics.warpgroups import publish
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


def test_a_warp_finds_its_largest_word_and_who_has_it() -> None:
    def kernel(x: int, y: int) -> None:
        lane = i64(thread_index())
        word = load_i32(x + 4 * lane)
        largest = largest_of_lanes(word)
        lanes = lanes_where(i32(1 if word == largest else 0))
        store_i32(y + 12 * lane, largest)
        store_i32(y + 12 * lane + 4, lanes)
        store_i32(y + 12 * lane + 8, bits_set(lanes))

    x, y = np.full(32, -(1 << 31), np.int32), np.zeros((32, 3), np.int32)
    x[[3, 30, 31]] = -7
    run(kernel, x, y)
    assert np.all(y == [-7, -(1 << 31) + (1 << 30) + (1 << 3), 3])


def test_a_vote_that_some_lanes_miss_is_a_fault() -> None:
    def kernel(y: int) -> None:
        lane = i64(thread_index())
        if lane < 31:
            store_i32(y + 4 * lane, lanes_where(i32(1)))

    with pytest.raises(KernelFault, match="31 of 32 lanes of a warp meet"):
        run(kernel, np.zeros(32, np.int32))


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


def test_additions_to_one_place_of_shared_memory_all_count() -> None:
    def kernel(y: int) -> None:
        thread = i64(thread_index())
        if thread == 0:
            shared_store_i64(8, i64(-5))
        barrier()
        shared_add_i64(8, thread << 40)
        barrier()
        store_i64(y + 8 * thread, shared_load_i64(8))

    y = np.zeros(64, np.int64)
    run(kernel, y, threads=64)
    assert np.all(y == (sum(range(64)) << 40) - 5)


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


@pytest.mark.parametrize(
    ("value", "message"),
    [(1 << 31, "not in -2,147,483,648 to"), (-(1 << 31) - 1, "not in"), (True, "not an integer")],
)
def test_what_no_integer_of_32_bits_holds_is_a_fault(value: int, message: str) -> None:
    def kernel(y: int) -> None:
        store_f32(y, f32_of_i32(value))

    with pytest.raises(KernelFault, match=message):
        run(kernel, np.zeros(1, np.float32))


def test_a_warp_multiplies_matrices() -> None:
    def kernel(a: int, b: int, c: int) -> None:
        lane = i64(thread_index())
        g, t = lane >> 2, lane & 3
        upper, lower, column = a + 32 * g + 4 * t, a + 32 * (g + 8) + 4 * t, b + 32 * g + 4 * t
        w, x, other = load_i32(upper), load_i32(lower), load_i32(column)
        y, z, further = load_i32(upper + 16), load_i32(lower + 16), load_i32(column + 16)
        place = c + 4 * (8 * g + 2 * t)
        sums = load_f32(place), load_f32(place + 4), load_f32(place + 256), load_f32(place + 260)
        found = mma_of_halves(w, x, y, z, other, further, sums[0], sums[1], sums[2], sums[3])
        store_f32(place, found[0])
        store_f32(place + 4, found[1])
        store_f32(place + 256, found[2])
        store_f32(place + 260, found[3])

    rng = np.random.default_rng(0)
    a, columns = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 16), (8, 16)))
    c = rng.integers(-4, 5, (16, 8)).astype(np.float32)
    wanted = c + a.astype(np.float32) @ columns.T.astype(np.float32)
    run(kernel, a, columns, c)
    assert np.array_equal(c, wanted)


@pytest.mark.parametrize("columns", [16, 32])
def test_a_warp_multiplies_matrices_of_bytes(columns: int) -> None:
    def kernel(a: int, b: int, c: int) -> None:
        lane = i64(thread_index())
        g, t = lane >> 2, lane & 3
        upper, lower = a + columns * g + 4 * t, a + columns * (g + 8) + 4 * t
        column, place = b + columns * g + 4 * t, c + 4 * (8 * g + 2 * t)
        w, x, other = load_i32(upper), load_i32(lower), load_i32(column)
        sums = load_i32(place), load_i32(place + 4), load_i32(place + 256), load_i32(place + 260)
        if columns == 16:
            found = mma_16x8x16(w, x, other, sums[0], sums[1], sums[2], sums[3])
        else:
            y, z, further = load_i32(upper + 16), load_i32(lower + 16), load_i32(column + 16)
            found = mma_16x8x32(w, x, y, z, other, further, sums[0], sums[1], sums[2], sums[3])
        store_i32(place, found[0])
        store_i32(place + 4, found[1])
        store_i32(place + 256, found[2])
        store_i32(place + 260, found[3])

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (rows, columns)).astype(np.int8) for rows in (16, 8))
    c = rng.integers(-9999, 9999, (16, 8)).astype(np.int32)
    wanted = c + a.astype(np.int32) @ b.T.astype(np.int32)
    run(kernel, a, b, c)
    assert np.array_equal(c, wanted)


def test_a_block_knows_how_many_there_are_in_z() -> None:
    def kernel(y: int) -> None:
        store_f32(y + 4 * i64(block_z()), f32_of_i32(blocks_z()))

    y = np.zeros(3, np.float32)
    gpu_simulator.run(kernel, (1, 1, 3), 32, 0, [y.ctypes.data], Memory([y]))
    assert np.all(y == 3)


def test_what_the_launch_in_front_wrote_is_read_behind_the_wait_and_never_fetched() -> None:
    def write(x: int, _: int) -> None:
        store_f32(x + 4 * i64(thread_index()), f32_of_i32(7))

    def write_elsewhere(_: int, y: int) -> None:
        store_f32(y + 4 * i64(thread_index()), f32_of_i32(7))

    def early(x: int, y: int) -> None:
        value = load_f32(x)
        await_previous()
        store_f32(y, value)

    def late(x: int, y: int) -> None:
        await_previous()
        store_f32(y, load_f32(x))

    def at_the_entry(x: int, y: int) -> None:
        store_f32(y, load_f32(x))

    def fetched(x: int, y: int) -> None:
        await_previous()
        store_f32(y, fetch_f32(x))

    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)

    def run_all(*kernels: object) -> None:
        memory = Memory([x, y])
        for kernel in kernels:
            words = [x.ctypes.data, y.ctypes.data]
            gpu_simulator.run(kernel, (1, 1, 1), 32, 0, words, memory)  # type: ignore[arg-type]

    run_all(write, late)
    run_all(write, at_the_entry)
    run_all(write, write_elsewhere, early)  # two launches ago
    with pytest.raises(KernelFault, match="load_f32 of what the launch in front may write"):
        run_all(write, early)
    with pytest.raises(KernelFault, match="fetch_f32 of what the launch in front wrote"):
        run_all(write, fetched)


def test_a_thread_waits_for_the_launch_in_front_before_it_writes_or_ends() -> None:
    def writes(x: int) -> None:
        store_f32(x + 4 * i64(thread_index()), f32_of_i32(7))
        await_previous()

    def posts(x: int) -> None:
        if thread_index() == 0:
            post_i64(x, i64(7))
        await_previous()

    def ends(x: int) -> None:
        if thread_index() < 30:
            await_previous()

    x = np.zeros(32, np.float32)
    with pytest.raises(KernelFault, match="store_f32 before `await_previous`"):
        run(writes, x)
    with pytest.raises(KernelFault, match="store_i64 before `await_previous`"):
        run(posts, x)
    with pytest.raises(KernelFault, match="2 of 32 threads ended before `await_previous`"):
        run(ends, x)


def test_what_another_block_wrote_is_read_when_all_have_arrived() -> None:
    def last_reads(x: int, y: int) -> None:
        thread = i64(thread_index())
        store_f32(x + 4 * (32 * block_x() + thread), f32_of_i32(i32(1 + thread)))
        barrier()
        if thread == 0:
            shared_store_i64(0, i64(arrive(y, 2)))
        barrier()
        if shared_load_i64(0) == 2:
            store_f32(y + 4 + 4 * thread, load_f32(x + 4 * thread))

    def all_read(x: int, y: int) -> None:
        store_f32(x + 4 * i64(block_x()), f32_of_i32(1))
        store_f32(y, load_f32(x))

    x, y = np.zeros(96, np.float32), np.zeros(33, np.float32)
    words = [x.ctypes.data, y.ctypes.data]
    gpu_simulator.run(last_reads, (3, 1, 1), 32, 8, words, Memory([x, y]))
    assert y.tolist() == list(range(33))
    with pytest.raises(KernelFault, match="another block writes"):
        gpu_simulator.run(all_read, (3, 1, 1), 32, 8, words, Memory([x, y]))


@pytest.mark.parametrize("products", [1, 2])
def test_words_of_products_in_a_loop_are_kept_behind_it(products: int) -> None:
    multiply, keep = key_products(8, 64), keep_words(4)
    begun, given = (np.float32(0),) * 4, tuple(range(16))

    def forgetting() -> None:
        await_previous()
        publish()
        sums, turn = begun, 0
        while turn < products:
            sums = multiply(sums, given, i64(0))
            turn += 1

    def keeping() -> None:
        forgetting()
        keep(given)

    def attend(kernel: object) -> None:
        gpu_simulator.run(kernel, (1, 1, 1), 128, 1024, [], Memory([]))  # type: ignore[arg-type]

    attend(keeping)
    if products == 1:
        attend(forgetting)
    else:
        with pytest.raises(KernelFault, match="128 threads multiply words again"):
            attend(forgetting)
