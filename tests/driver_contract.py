"""What every driver must do, written once: host, CUDA and HIP run these tests unchanged.

A test module inherits the classes below and gives them a fixture `case`. Nothing here knows a
vendor, injects a fault or expects a rule to be checked that only the host backend checks.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from strata_nb.errors import DriverError, OutOfDeviceMemory
from strata_nb.execution import Driver
from strata_nb.vmm import ChunkPool, Range, choose_chunk_bytes

PATIENCE_S = 20  # a test that waits this long has failed


@dataclass(frozen=True)
class DriverCase:
    """One driver to test.

    chunk_bytes        a size of chunks that its devices charge exactly
    refusal            what it raises for a call that can never be right
    with_path          (device, owner): the device can use the owner's memory; None: no such pair
    without_path       (device, owner): it cannot; None: no such pair
    kept_bytes         of a device, which the driver keeps of the first request that is refused
    """

    driver: Driver
    chunk_bytes: int
    refusal: tuple[type[BaseException], ...]
    with_path: tuple[int, int] | None
    without_path: tuple[int, int] | None
    kept_bytes: int = 0


def pair_of(pair: tuple[int, int] | None, wanted: str) -> tuple[int, int]:
    if pair is None:
        pytest.skip(f"needs two devices {wanted}")
    return pair


@contextmanager
def stream_on(driver: Driver, device: int = 0) -> Iterator[int]:
    stream = driver.stream_create(device)
    try:
        yield stream
    finally:
        driver.stream_destroy(stream)


def write(driver: Driver, address: int, data: bytes, device: int = 0) -> None:
    """Put bytes into device memory the way a program does: through host memory and a stream."""
    staging = driver.allocate_host(len(data))
    ctypes.memmove(staging, data, len(data))
    with stream_on(driver, device) as stream:
        driver.copy_async(address, staging, len(data), stream)
    driver.free_host(staging)


def read(driver: Driver, address: int, size: int, device: int = 0) -> bytes:
    staging = driver.allocate_host(size)
    with stream_on(driver, device) as stream:
        driver.copy_async(staging, address, size, stream)
    data = ctypes.string_at(staging, size)
    driver.free_host(staging)
    return data


@contextmanager
def mapped_chunk(case: DriverCase, device: int = 0) -> Iterator[int]:
    """Yield the address of one chunk of `device`, mapped with access for its owner."""
    driver, size = case.driver, case.chunk_bytes
    driver.synchronize(device)
    address = driver.reserve(size)
    handle = driver.create(size, device)
    driver.map(address, size, handle)
    driver.set_access(address, size, [device])
    yield address
    driver.retire(address, size)
    driver.unmap(address, size)
    driver.release(handle)
    driver.address_free(address, size)


@contextmanager
def held_stream(driver: Driver, device: int = 0) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield a stream whose first work runs until the second value is called, or the block ends."""
    started, ended = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert ended.wait(PATIENCE_S)

    with stream_on(driver, device) as stream:
        driver.launch_host(stream, work)
        assert started.wait(PATIENCE_S)
        try:
            yield stream, ended.set
        finally:
            ended.set()


class MemoryContract:
    """Physical memory and addresses."""

    def test_the_granularities_are_powers_of_two_and_the_minimum_divides_the_other(
        self, case: DriverCase
    ) -> None:
        minimum = case.driver.granularity(0, "minimum")
        recommended = case.driver.granularity(0, "recommended")
        assert minimum & (minimum - 1) == 0
        assert recommended & (recommended - 1) == 0
        assert recommended % minimum == 0
        assert case.chunk_bytes % case.driver.granularity(0, case.driver.chunk_granularity) == 0

    def test_a_chunk_of_the_charged_granularity_costs_its_size_and_its_release_returns_it(
        self, case: DriverCase
    ) -> None:
        driver = case.driver
        size = driver.granularity(0, driver.chunk_granularity)
        before, total = driver.mem_info(0)
        handle = driver.create(size, 0)
        assert driver.mem_info(0) == (before - size, total)
        driver.release(handle)
        assert driver.mem_info(0) == (before, total)

    def test_a_chunk_takes_memory_of_its_own_device_only(self, case: DriverCase) -> None:
        driver = case.driver
        devices = range(driver.device_count)
        for device in devices:
            before = [driver.mem_info(each)[0] for each in devices]
            handle = driver.create(case.chunk_bytes, device)
            after = [driver.mem_info(each)[0] for each in devices]
            taken = [b - a for b, a in zip(before, after, strict=True)]
            assert taken == [case.chunk_bytes if each == device else 0 for each in devices]
            driver.release(handle)

    def test_reserved_addresses_cost_no_memory_and_do_not_overlap(self, case: DriverCase) -> None:
        driver, size = case.driver, 1024 * case.chunk_bytes
        before = driver.mem_info(0)
        first, second = driver.reserve(size), driver.reserve(size)
        assert abs(first - second) >= size
        assert driver.mem_info(0) == before
        driver.address_free(first, size)
        driver.address_free(second, size)

    def test_bytes_written_to_a_mapped_chunk_are_read_back(self, case: DriverCase) -> None:
        data = bytes(range(256)) * 16
        with mapped_chunk(case) as address:
            write(case.driver, address, data)
            write(case.driver, address + case.chunk_bytes - len(data), data[::-1])
            assert read(case.driver, address, len(data)) == data
            assert read(case.driver, address + case.chunk_bytes - len(data), 256) == data[:-257:-1]

    def test_a_chunk_can_be_unmapped_here_and_mapped_there(self, case: DriverCase) -> None:
        driver, size = case.driver, case.chunk_bytes
        driver.synchronize(0)
        places = [driver.reserve(4 * size), driver.reserve(4 * size)]
        handle = driver.create(size, 0)
        for round_, place in enumerate(places * 2):
            driver.map(place, size, handle)
            driver.set_access(place, size, [0])
            write(driver, place, bytes([round_]) * 64)
            assert read(driver, place, 64) == bytes([round_]) * 64
            driver.retire(place, size)
            driver.unmap(place, size)
        driver.release(handle)
        for place in places:
            driver.address_free(place, 4 * size)

    def test_access_can_be_set_over_several_chunks_at_once(self, case: DriverCase) -> None:
        driver, size = case.driver, case.chunk_bytes
        driver.synchronize(0)
        base = driver.reserve(3 * size)
        handles = [driver.create(size, 0) for _ in range(3)]
        for position, handle in enumerate(handles):
            driver.map(base + position * size, size, handle)
        driver.set_access(base, 3 * size, [0])
        write(driver, base + size - 8, b"0123456789abcdef")
        assert read(driver, base + size - 8, 16) == b"0123456789abcdef"
        driver.retire(base, 3 * size)
        for position, handle in enumerate(handles):
            driver.unmap(base + position * size, size)
            driver.release(handle)
        driver.address_free(base, 3 * size)

    def test_more_memory_than_the_device_has_is_refused_with_the_numbers(
        self, case: DriverCase
    ) -> None:
        driver = case.driver
        _, total = driver.mem_info(0)
        size = (total // case.chunk_bytes + 1) * case.chunk_bytes
        with pytest.raises(OutOfDeviceMemory) as refused:
            driver.create(size, 0)
        assert isinstance(refused.value, MemoryError)
        assert (refused.value.call, refused.value.device) == ("create", 0)
        assert refused.value.numbers["size"] == size
        assert f"{size:,}" in str(refused.value)

    def test_a_device_that_does_not_exist_is_refused(self, case: DriverCase) -> None:
        with pytest.raises(DriverError):
            case.driver.mem_info(case.driver.device_count)

    def test_a_size_that_the_granularity_does_not_divide_is_refused(self, case: DriverCase) -> None:
        with pytest.raises(case.refusal):
            case.driver.create(case.driver.granularity(0, "minimum") // 2, 0)

    def test_a_part_of_a_reservation_cannot_be_freed(self, case: DriverCase) -> None:
        driver, size = case.driver, case.chunk_bytes
        base = driver.reserve(4 * size)
        for address, part in ((base, 2 * size), (base + 2 * size, 2 * size)):
            with pytest.raises(case.refusal):
                driver.address_free(address, part)
        driver.address_free(base, 4 * size)

    def test_two_chunks_cannot_be_mapped_at_one_address(self, case: DriverCase) -> None:
        driver, size = case.driver, case.chunk_bytes
        with mapped_chunk(case) as address:
            handle = driver.create(size, 0)
            with pytest.raises(case.refusal):
                driver.map(address, size, handle)
            driver.release(handle)

    def test_another_device_reads_and_writes_a_chunk_that_it_has_a_path_to(
        self, case: DriverCase
    ) -> None:
        device, owner = pair_of(case.with_path, "with a path")
        driver = case.driver
        assert driver.can_access(device, owner)
        with mapped_chunk(case, owner) as address:
            driver.set_access(address, case.chunk_bytes, [owner, device])
            write(driver, address, b"from the other device", device)
            assert read(driver, address, 21, owner) == b"from the other device"
            assert read(driver, address, 21, device) == b"from the other device"

    def test_access_for_a_device_without_a_path_fails_whole_and_the_owner_alone_succeeds(
        self, case: DriverCase
    ) -> None:
        device, owner = pair_of(case.without_path, "without a path")
        driver, size = case.driver, case.chunk_bytes
        assert not driver.can_access(device, owner)
        driver.synchronize(owner)
        base = driver.reserve(size)
        handle = driver.create(size, owner)
        driver.map(base, size, handle)
        with pytest.raises(DriverError):
            driver.set_access(base, size, [owner, device])
        driver.set_access(base, size, [owner])
        write(driver, base, b"owner", owner)
        assert read(driver, base, 5, owner) == b"owner"
        driver.retire(base, size)
        driver.unmap(base, size)
        driver.release(handle)
        driver.address_free(base, size)

    def test_memory_can_be_moved_while_work_that_does_not_use_it_runs(
        self, case: DriverCase
    ) -> None:
        driver, size = case.driver, case.chunk_bytes
        driver.synchronize(0)
        here, there = driver.reserve(size), driver.reserve(size)
        handle = driver.create(size, 0)
        driver.map(here, size, handle)
        driver.set_access(here, size, [0])
        driver.retire(here, size)
        with held_stream(driver):
            driver.unmap(here, size)
            driver.map(there, size, handle)
            driver.set_access(there, size, [0])
        driver.retire(there, size)
        driver.unmap(there, size)
        driver.release(handle)
        driver.address_free(here, size)
        driver.address_free(there, size)


class ExecutionContract:
    """Plain memory, streams and events."""

    def test_every_device_says_what_it_is(self, case: DriverCase) -> None:
        for device in range(case.driver.device_count):
            facts = case.driver.device_facts(device)
            assert facts.index == device
            assert facts.name
            assert facts.memory_bytes == case.driver.mem_info(device)[1]
            assert facts.highest_priority <= 0 <= facts.least_priority

    def test_plain_memory_is_charged_and_returned(self, case: DriverCase) -> None:
        driver = case.driver
        before, _ = driver.mem_info(0)
        address = driver.allocate(4 * case.chunk_bytes, 0)
        assert before - driver.mem_info(0)[0] >= 4 * case.chunk_bytes
        write(driver, address, b"plain")
        assert read(driver, address, 5) == b"plain"
        driver.free(address)
        assert driver.mem_info(0)[0] == before

    def test_plain_memory_beyond_the_device_is_refused(self, case: DriverCase) -> None:
        free, total = case.driver.mem_info(0)
        for _ in range(2):
            with pytest.raises(OutOfDeviceMemory):
                case.driver.allocate(total + 1, 0)
            assert case.driver.mem_info(0) == (free - case.kept_bytes, total)

    def test_host_memory_costs_no_device_memory(self, case: DriverCase) -> None:
        driver = case.driver
        before = driver.mem_info(0)
        address = driver.allocate_host(case.chunk_bytes)
        assert driver.mem_info(0) == before
        driver.free_host(address)

    def test_registered_host_memory_can_be_copied_from(self, case: DriverCase) -> None:
        driver = case.driver
        owned = ctypes.create_string_buffer(b"somebody's", 4096)
        source = ctypes.addressof(owned)
        driver.register_host(source, 4096)
        with mapped_chunk(case) as address:
            with stream_on(driver) as stream:
                driver.copy_async(address, source, 10, stream)
            assert read(driver, address, 10) == b"somebody's"
        driver.unregister_host(source)

    def test_work_of_one_stream_runs_in_order(self, case: DriverCase) -> None:
        seen: list[int] = []
        with stream_on(case.driver) as stream:
            for number in range(100):
                case.driver.launch_host(stream, partial(seen.append, number))
        assert seen == list(range(100))

    def test_fills_and_copies_of_one_stream_run_in_order(self, case: DriverCase) -> None:
        driver = case.driver
        with mapped_chunk(case) as address:
            with stream_on(driver) as stream:
                driver.fill_async(address, 0x11, 64, stream)
                driver.copy_async(address + 64, address, 64, stream)
                driver.fill_async(address, 0x22, 64, stream)
            assert read(driver, address, 128) == b"\x22" * 64 + b"\x11" * 64

    def test_streams_run_beside_each_other(self, case: DriverCase) -> None:
        driver = case.driver  # a card's driver calls the host in one thread for all streams
        event = driver.event_create(0)
        with mapped_chunk(case) as address, held_stream(driver) as (held, end):
            driver.event_record(event, held)
            with stream_on(driver) as free:
                driver.fill_async(address, 0x77, 64, free)
                driver.stream_synchronize(free)
            assert not driver.event_query(event)
            end()
            driver.event_synchronize(event)
        driver.event_destroy(event)

    def test_an_event_is_done_when_the_work_before_it_is(self, case: DriverCase) -> None:
        driver = case.driver
        event = driver.event_create(0)
        assert driver.event_query(event)
        with held_stream(driver) as (stream, end):
            driver.event_record(event, stream)
            assert not driver.event_query(event)
            end()
            driver.event_synchronize(event)
            assert driver.event_query(event)
        driver.event_destroy(event)

    def test_timed_events_say_how_long_work_took_between_them(self, case: DriverCase) -> None:
        driver = case.driver
        start, end = driver.event_create(0, timed=True), driver.event_create(0, timed=True)
        with stream_on(driver) as stream:
            driver.event_record(start, stream)
            driver.launch_host(stream, lambda: time.sleep(0.02))
            driver.event_record(end, stream)
            driver.event_synchronize(end)
            long = driver.event_elapsed_s(start, end)
            driver.event_record(start, stream)
            driver.event_record(end, stream)
            driver.event_synchronize(end)
        assert long >= 0.02
        assert 0 <= driver.event_elapsed_s(start, end) < long
        for event in (start, end):
            driver.event_destroy(event)

    def test_a_time_between_events_is_refused_unless_both_are_timed_and_done(
        self, case: DriverCase
    ) -> None:
        driver = case.driver
        start, end, plain = (driver.event_create(0, timed) for timed in (True, True, False))
        with held_stream(driver) as (stream, finish):
            with stream_on(driver) as free:
                driver.event_record(start, free)
                driver.event_record(plain, free)
            driver.event_record(end, stream)
            with pytest.raises(DriverError):
                driver.event_elapsed_s(start, end)
            finish()
            driver.event_synchronize(end)
        with pytest.raises(DriverError):
            driver.event_elapsed_s(start, plain)
        assert driver.event_elapsed_s(start, end) > 0
        for event in (start, end, plain):
            driver.event_destroy(event)

    def test_a_stream_that_waits_for_an_event_runs_after_it(self, case: DriverCase) -> None:
        driver = case.driver
        seen: list[str] = []
        event = driver.event_create(0)
        with stream_on(driver) as second, held_stream(driver) as (first, end):
            driver.launch_host(first, lambda: seen.append("first"))
            driver.event_record(event, first)
            driver.event_wait(second, event)
            driver.launch_host(second, lambda: seen.append("second"))
            end()
        assert seen == ["first", "second"]
        driver.event_destroy(event)

    def test_a_wait_stands_for_the_record_before_it_not_for_a_later_one(
        self, case: DriverCase
    ) -> None:
        driver = case.driver
        event = driver.event_create(0)
        with (
            held_stream(driver) as (held, _),
            stream_on(driver) as free,
            stream_on(driver) as waits,
        ):
            driver.event_record(event, free)
            driver.event_wait(waits, event)
            driver.event_record(event, held)
            driver.stream_synchronize(waits)
            assert not driver.event_query(event)
        driver.event_destroy(event)

    def test_synchronizing_a_device_waits_for_all_its_streams(self, case: DriverCase) -> None:
        driver = case.driver
        seen: list[int] = []
        with stream_on(driver) as first, stream_on(driver) as second:
            for stream in (first, second):
                driver.launch_host(stream, lambda: seen.append(1))
            driver.synchronize(0)
            assert len(seen) == 2

    def test_any_priority_is_accepted(self, case: DriverCase) -> None:
        for priority in (-100, 0, 100):
            stream = case.driver.stream_create(0, priority)
            case.driver.stream_destroy(stream)


class RangeContract:
    """Ranges over a driver: what the memory manager promises on every backend."""

    def pool(self, case: DriverCase, device: int = 0, said: list[str] | None = None) -> ChunkPool:
        say = (said if said is not None else []).append
        return ChunkPool(case.driver, device, case.chunk_bytes, say=say)

    def test_the_chunk_size_is_one_that_the_device_charges_exactly(self, case: DriverCase) -> None:
        driver = case.driver
        size = choose_chunk_bytes(driver, 0, 1)
        assert size == driver.granularity(0, driver.chunk_granularity)
        before, _ = driver.mem_info(0)
        pool = ChunkPool(driver, 0, size, say=print)
        pool.prepare(8)
        assert before - driver.mem_info(0)[0] == 8 * size
        pool.close()
        assert driver.mem_info(0)[0] == before

    def test_growing_maps_a_prefix_and_keeps_what_is_there(self, case: DriverCase) -> None:
        pool = self.pool(case)
        range_ = pool.open_range(8)
        base = range_.base
        for count in (1, 2, 5):
            start = range_.mapped_chunks
            range_.grow(count)
            for position in range(start, start + count):
                mark(case, range_, position)
            pool.check_integrity()
        assert range_.base == base
        assert [marked(case, range_, position) for position in range(8)] == list(range(8))
        pool.close()

    def test_shrinking_returns_the_chunks_and_keeps_the_rest(self, case: DriverCase) -> None:
        pool = self.pool(case)
        range_ = pool.open_range(8)
        range_.grow(8)
        for position in range(8):
            mark(case, range_, position)
        range_.retire(5)
        case.driver.synchronize(0)
        assert range_.shrink() == 5
        assert pool.account().spare == 5
        assert [marked(case, range_, position) for position in range(3)] == [0, 1, 2]
        pool.close()

    def test_memory_moves_between_ranges_without_asking_the_system(self, case: DriverCase) -> None:
        pool = self.pool(case)
        first, second = pool.open_range(6), pool.open_range(6)
        first.grow(6)
        for position in range(6):
            mark(case, first, position)
        free = case.driver.mem_info(0)
        for there in range(1, 5):
            first.retire(1)
            case.driver.synchronize(0)
            assert first.shrink() == 1
            second.grow(1)
            mark(case, second, there - 1)
            pool.check_integrity()
        assert case.driver.mem_info(0) == free
        assert [marked(case, first, position) for position in range(2)] == [0, 1]
        assert [marked(case, second, position) for position in range(4)] == [0, 1, 2, 3]
        pool.close()

    def test_each_pool_takes_from_its_own_device(self, case: DriverCase) -> None:
        driver = case.driver
        for device in range(driver.device_count):
            before = [driver.mem_info(each)[0] for each in range(driver.device_count)]
            pool = self.pool(case, device)
            range_ = pool.open_range(4)
            range_.grow(3)
            mark(case, range_, 2)
            assert marked(case, range_, 2) == 2
            after = [driver.mem_info(each)[0] for each in range(driver.device_count)]
            size = 3 * case.chunk_bytes
            wanted = [b - size if each == device else b for each, b in enumerate(before)]
            assert after == wanted
            pool.close()

    def test_a_device_with_a_path_uses_a_range_of_another(self, case: DriverCase) -> None:
        device, owner = pair_of(case.with_path, "with a path")
        said: list[str] = []
        pool = self.pool(case, owner, said)
        range_ = pool.open_range(2, also_for=[device])
        range_.grow(1)
        range_.grow(1)
        assert range_.devices == (owner, device)
        write(case.driver, range_.base + case.chunk_bytes - 4, b"across a chunk", device)
        assert read(case.driver, range_.base + case.chunk_bytes - 4, 14, owner) == b"across a chunk"
        assert said == []
        pool.close()

    def test_a_device_without_a_path_is_left_out_and_that_is_said(self, case: DriverCase) -> None:
        device, owner = pair_of(case.without_path, "without a path")
        said: list[str] = []
        pool = self.pool(case, owner, said)
        range_ = pool.open_range(2, also_for=[device])
        range_.grow(2)
        assert range_.devices == (owner,)
        assert len(said) == 1
        mark(case, range_, 1)
        pool.close()

    def test_a_growth_that_does_not_fit_leaves_everything_as_it_was(self, case: DriverCase) -> None:
        driver = case.driver
        free, total = driver.mem_info(0)
        pool = self.pool(case)
        range_ = pool.open_range(total // case.chunk_bytes + 16)
        range_.grow(2)
        mark(case, range_, 1)
        account = pool.account()
        with pytest.raises(OutOfDeviceMemory):
            range_.grow(total // case.chunk_bytes)
        assert pool.account() == account
        assert driver.mem_info(0)[0] == free - 2 * case.chunk_bytes
        assert marked(case, range_, 1) == 1
        pool.close()
        assert driver.mem_info(0)[0] == free

    @pytest.mark.parametrize("first", ["pool", "range"])
    def test_closing_in_any_order_and_twice_frees_everything(
        self, case: DriverCase, first: str
    ) -> None:
        before = case.driver.mem_info(0)
        pool = self.pool(case)
        range_ = pool.open_range(4)
        range_.grow(3)
        pool.prepare(2)
        steps = [pool.close, range_.close]
        for step in (steps if first == "pool" else steps[::-1]) * 2:
            step()
        assert case.driver.mem_info(0) == before
        assert pool.account().capacity == 0
        pool.check_integrity()


def mark(case: DriverCase, range_: Range, position: int) -> None:
    """Write the position at both ends of a chunk."""
    device, size = range_.pool.device, range_.pool.chunk_bytes
    for offset in (0, size - 8):
        address = range_.base + position * size + offset
        write(case.driver, address, position.to_bytes(8, "little"), device)


def marked(case: DriverCase, range_: Range, position: int) -> int:
    """Return what `mark` wrote; -1 if the ends of the chunk differ."""
    device, size = range_.pool.device, range_.pool.chunk_bytes
    first, last = (
        int.from_bytes(
            read(case.driver, range_.base + position * size + offset, 8, device), "little"
        )
        for offset in (0, size - 8)
    )
    return first if first == last else -1
