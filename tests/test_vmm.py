"""The memory manager on host devices: sizes, growth and its undoing, faults at every call.

What every backend must do is in driver_contract.py (RangeContract); here are faults, which only
host devices have on request, and long random runs with every account compared after each step.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from driver_contract import held_stream
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata_nb.errors import DeviceLost, DriverError, OutOfDeviceMemory, RuleViolation
from strata_nb.host import HostDriver
from strata_nb.host_memory import DeviceAccount, HostDevice
from strata_nb.vmm import Account, ChunkPool, Range, choose_chunk_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNIT = 64 * KIB
MEMORY_OPERATIONS = (
    "granularity",
    "reserve",
    "address_free",
    "create",
    "release",
    "map",
    "unmap",
    "set_access",
    "can_access",
    "mem_info",
    "synchronize",
)


class World:
    """Two host devices with a path from the second to the first, a pool on each, and their ranges.

    Every chunk that was grown holds a number of its own, so that a lost or exchanged chunk shows.
    """

    def __init__(self, chunks: int = 16, **facts: bool) -> None:
        device = HostDevice(chunks * UNIT, 4 * KIB, UNIT, **facts)
        self.driver = HostDriver([device, device], paths=[(1, 0)])
        self.said: list[str] = []
        self.pools: list[ChunkPool] = []
        self.contents: dict[Range, list[int]] = {}
        self._numbers = itertools.count(1)
        self._stream = self.driver.stream_create(0), self.driver.stream_create(1)
        self._staging = self.driver.allocate_host(8)

    def pool(self, device: int = 0) -> ChunkPool:
        made = ChunkPool(self.driver, device, UNIT, say=self.said.append)
        self.pools.append(made)
        return made

    def open(self, pool: ChunkPool, chunks: int = 8, *, peer: bool = False) -> Range:
        made = pool.open_range(chunks, also_for=[1] if peer else [])
        self.contents[made] = []
        return made

    def grow(self, range_: Range, count: int) -> None:
        before = range_.mapped_chunks
        try:
            range_.grow(count)
        except DriverError:
            assert range_.mapped_chunks == before
            raise
        for number in itertools.islice(self._numbers, count):
            self.write(range_, len(self.contents[range_]), number)
            self.contents[range_].append(number)

    def shrink(self, range_: Range) -> int:
        del self.contents[range_][len(self.contents[range_]) - range_.retired_chunks :]
        return range_.shrink()

    def move(self, source: Range, target: Range, count: int) -> None:
        source.retire(min(count, source.mapped_chunks))
        try:
            self.driver.synchronize(source.pool.device)
        except DriverError:
            source.reinstate()
            raise
        self.grow(target, self.shrink(source))

    def write(self, range_: Range, position: int, number: int) -> None:
        """Write through the last device that has access, as a program would: rules are checked."""
        ctypes.memmove(self._staging, number.to_bytes(8, "little"), 8)
        stream = self._stream[range_.devices[-1]]
        self.driver.copy_async(range_.base + position * UNIT, self._staging, 8, stream)
        self.driver.stream_synchronize(stream)

    def check(self) -> None:
        """Compare the manager's accounts with the driver's, and every chunk with what it held."""
        for pool in self.pools:
            pool.check_integrity()
            account = pool.account()
            stuck_in_ranges = sum(range_.stuck_chunks for range_ in pool.ranges)
            assert self.driver.account(pool.device) == DeviceAccount(
                account.capacity, account.mapped + stuck_in_ranges, account.capacity * UNIT
            )
            for range_ in pool.ranges:
                numbers = self.contents[range_]
                assert len(numbers) == range_.mapped_chunks
                for position, number in enumerate(numbers):
                    data = ctypes.string_at(range_.base + position * UNIT, 8)
                    assert int.from_bytes(data, "little") == number

    def close(self) -> None:
        for pool in self.pools:
            for range_ in pool.ranges:
                self.contents[range_].clear()
            pool.close()

    def live(self) -> dict[str, int]:
        """Return what exists beside the streams and the staging block of this world."""
        live = self.driver.live()
        return {kind: live[kind] for kind in live.keys() - {"streams", "events", "blocks"}}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.driver.faults.lift()
    made.check()
    made.close()
    assert made.live() == {}
    made.driver.close()


# Sizes.


@pytest.mark.parametrize(
    ("ledger_bytes", "chunk_bytes"),
    [
        (1, 64 * KIB),
        (16 * MIB, 64 * KIB),
        (64 * MIB, 256 * KIB),
        (60 * MIB, 256 * KIB),
        (256 * MIB, 1 * MIB),
        (6 * GIB, 16 * MIB),
        (8 * GIB, 32 * MIB),
        (12 * GIB, 32 * MIB),
        (18 * GIB, 64 * MIB),
        (24 * GIB, 64 * MIB),
        (80 * GIB, 64 * MIB),
        (640 * GIB, 64 * MIB),
    ],
)
def test_a_device_is_cut_into_about_three_hundred_chunks(
    ledger_bytes: int, chunk_bytes: int
) -> None:
    driver = HostDriver([HostDevice(MIB, UNIT, UNIT)])
    assert choose_chunk_bytes(driver, 0, ledger_bytes) == chunk_bytes
    if 16 * MIB <= ledger_bytes <= 24 * GIB:
        assert 212 <= ledger_bytes // chunk_bytes <= 424
    driver.close()


def test_chunks_follow_the_granularity_that_is_charged_not_the_minimum() -> None:
    coarse = HostDriver([HostDevice(64 * MIB, 4 * KIB, 2 * MIB)])
    assert choose_chunk_bytes(coarse, 0, 64 * MIB) == 2 * MIB
    pool = ChunkPool(coarse, 0, 2 * MIB, say=print)
    pool.prepare(4)
    assert coarse.mem_info(0)[0] == 56 * MIB
    with pytest.raises(RuleViolation, match="rule 10"):
        ChunkPool(coarse, 0, 64 * KIB, say=print)
    pool.close()
    coarse.close()


def test_a_ledger_without_memory_is_refused(world: World) -> None:
    with pytest.raises(RuleViolation, match="rule 10"):
        choose_chunk_bytes(world.driver, 0, 0)


# Growing, shrinking, and what callers may not do.


def test_opening_a_pool_and_a_range_takes_no_memory(world: World) -> None:
    pool = world.pool()
    world.open(pool, 1000)
    assert pool.account() == Account(0, 0, 0, 0)
    assert world.driver.account(0).charged_bytes == 0


def test_a_range_grows_from_spare_chunks_first(world: World) -> None:
    pool = world.pool()
    range_ = world.open(pool)
    pool.prepare(3)
    calls = world.driver.faults.calls
    creations = calls["create"]
    world.grow(range_, 3)
    assert calls["create"] == creations
    world.grow(range_, 1)
    assert calls["create"] == creations + 1
    assert pool.account() == Account(capacity=4, mapped=4, spare=0, stuck=0)


def test_access_is_set_once_for_a_run_of_new_chunks(world: World) -> None:
    range_ = world.open(world.pool())
    for count in (5, 3):
        before = world.driver.faults.calls["set_access"]
        world.grow(range_, count)
        assert world.driver.faults.calls["set_access"] == before + 1


def test_giving_back_returns_spare_chunks_only(world: World) -> None:
    pool = world.pool()
    range_ = world.open(pool)
    world.grow(range_, 2)
    pool.prepare(3)
    assert pool.give_back(2) == 2
    assert pool.account() == Account(capacity=3, mapped=2, spare=1, stuck=0)
    assert pool.give_back(100) == 1
    assert world.driver.account(0) == DeviceAccount(2, 2, 2 * UNIT)


def test_preparing_more_than_the_device_has_creates_nothing(world: World) -> None:
    pool = world.pool()
    pool.prepare(3)
    with pytest.raises(OutOfDeviceMemory):
        pool.prepare(17)
    assert pool.account() == Account(capacity=3, mapped=0, spare=3, stuck=0)


def test_a_range_does_not_grow_beyond_its_reservation(world: World) -> None:
    range_ = world.open(world.pool(), 4)
    world.grow(range_, 3)
    with pytest.raises(OutOfDeviceMemory, match=r"full.*mapped 3, wanted 2, limit 4"):
        world.grow(range_, 2)
    world.grow(range_, 1)


def test_covers_says_which_addresses_a_table_may_name(world: World) -> None:
    range_ = world.open(world.pool())
    assert not range_.covers(range_.base, 1)
    world.grow(range_, 3)
    assert range_.covers(range_.base, 3 * UNIT)
    assert not range_.covers(range_.base, 3 * UNIT + 1)
    assert not range_.covers(range_.base - 1, 2)
    range_.retire(1)
    assert not range_.covers(range_.base + 2 * UNIT, 1)
    assert range_.covers(range_.base + 2 * UNIT - 1, 1)
    range_.reinstate()
    assert range_.covers(range_.base, 3 * UNIT)


def test_a_reinstated_chunk_is_whole_and_in_use(world: World) -> None:
    range_ = world.open(world.pool())
    world.grow(range_, 4)
    range_.retire(1)
    range_.retire(2)
    range_.reinstate()
    assert world.shrink(range_) == 0
    world.check()
    for position, number in enumerate(world.contents[range_]):
        world.write(range_, position, number)
    assert range_.mapped_chunks == 4


def test_callers_that_break_the_order_of_a_change_are_stopped(world: World) -> None:
    range_ = world.open(world.pool())
    world.grow(range_, 4)
    with pytest.raises(RuleViolation, match="rule 7"):
        range_.retire(5)
    range_.retire(3)
    with pytest.raises(RuleViolation, match="rule 7"):
        range_.retire(2)
    with pytest.raises(RuleViolation, match="rule 7"):
        range_.grow(1)
    range_.reinstate()
    with pytest.raises(OutOfDeviceMemory):
        range_.grow(-1)
    with pytest.raises(RuleViolation, match="rule 1"):
        range_.pool.open_range(0)


def test_chunks_are_not_unmapped_before_older_work_has_ended(world: World) -> None:
    range_ = world.open(world.pool())
    world.grow(range_, 2)
    with held_stream(world.driver) as (old, end):
        range_.retire(1)
        with held_stream(world.driver, 1):
            with pytest.raises(RuleViolation, match="rule 7"):
                range_.shrink()
            assert range_.mapped_chunks == 2
            end()
            world.driver.stream_synchronize(old)
            assert world.shrink(range_) == 1  # the younger work still runs


def test_a_closed_range_refuses_everything_but_close(world: World) -> None:
    range_ = world.open(world.pool())
    world.grow(range_, 2)
    range_.close()
    range_.close()
    calls: list[Callable[[], object]] = [
        lambda: range_.grow(1),
        lambda: range_.retire(0),
        range_.reinstate,
        range_.shrink,
    ]
    for call in calls:
        with pytest.raises(RuleViolation, match="is closed"):
            call()
    assert range_.pool.account() == Account(capacity=2, mapped=0, spare=2, stuck=0)


# Devices.


def test_a_refused_path_costs_the_peer_its_access_and_is_said_once() -> None:
    world = World(refuses_peers=True)
    range_ = world.open(world.pool(), peer=True)
    assert range_.devices == (0, 1)
    for count in (1, 2, 3):
        world.grow(range_, count)
        world.check()
        assert range_.devices == (0,)
        assert len(world.said) == 1
    assert "device 1: no access to device 0" in world.said[0]
    world.close()
    world.driver.close()


def test_access_that_fails_once_for_new_chunks_is_set_for_the_whole_range(world: World) -> None:
    range_ = world.open(world.pool(), peer=True)
    world.grow(range_, 2)
    world.driver.faults.plan("set_access", 1)
    world.grow(range_, 2)
    assert range_.devices == (0, 1)
    assert world.said == []


def test_a_device_that_refuses_access_to_the_end_of_a_range_gets_it_from_the_base() -> None:
    world = World(access_from_base_only=True)
    range_ = world.open(world.pool(), peer=True)
    for count in (2, 1, 3):
        world.grow(range_, count)
        world.check()
    assert range_.devices == (0, 1)
    assert world.said == []
    world.close()
    world.driver.close()


def test_the_context_of_a_device_exists_before_its_first_map(world: World) -> None:
    range_ = world.open(world.pool(1))
    range_.grow(1)  # the driver refuses to map memory of a device without a context
    world.contents[range_] = [-1]
    range_.retire(1)
    world.shrink(range_)


# Faults.


def test_a_growth_that_fails_in_its_third_map_is_undone(world: World) -> None:
    pool = world.pool()
    range_ = world.open(pool)
    world.grow(range_, 2)
    world.driver.faults.plan("map", 3)
    with pytest.raises(DriverError, match="map: failed on request"):
        world.grow(range_, 5)
    assert pool.account() == Account(capacity=7, mapped=2, spare=5, stuck=0)
    world.check()
    world.grow(range_, 5)


def test_a_growth_without_access_is_undone(world: World) -> None:
    pool = world.pool()
    range_ = world.open(pool, peer=True)
    world.driver.faults.plan("set_access", forever=True)
    with pytest.raises(DriverError, match="set_access"):
        world.grow(range_, 2)
    assert pool.account() == Account(capacity=2, mapped=0, spare=2, stuck=0)
    assert range_.devices == (0, 1)


def test_a_growth_can_be_undone_while_other_work_runs(world: World) -> None:
    range_ = world.open(world.pool())
    with held_stream(world.driver):
        for operation, nth in (("map", 2), ("set_access", 1)):
            world.driver.faults.plan(operation, nth, forever=True)
            with pytest.raises(DriverError, match=operation):
                world.grow(range_, 3)
            world.driver.faults.lift()
            world.check()


def test_a_chunk_that_cannot_be_unmapped_is_stuck_and_ends_the_range_there(world: World) -> None:
    pool = world.pool()
    range_, other = world.open(pool), world.open(pool)
    world.grow(range_, 6)
    world.driver.faults.plan("unmap", 2)
    range_.retire(4)
    assert world.shrink(range_) == 3
    assert pool.account() == Account(capacity=6, mapped=2, spare=3, stuck=1)
    assert range_.limit_chunks == 4
    assert len(world.said) == 1
    assert "cannot be used any more" in world.said[0]
    world.grow(range_, 2)
    with pytest.raises(OutOfDeviceMemory, match="limit 4"):
        world.grow(range_, 1)
    world.grow(other, 1)
    world.check()
    range_.close()
    world.contents[range_].clear()
    assert pool.account() == Account(capacity=6, mapped=1, spare=5, stuck=0)


def test_a_chunk_that_cannot_be_released_is_stuck_until_close(world: World) -> None:
    pool = world.pool()
    pool.prepare(3)
    world.driver.faults.plan("release", 2)
    assert pool.give_back(3) == 2
    assert pool.account() == Account(capacity=1, mapped=0, spare=0, stuck=1)
    assert world.driver.account(0).chunks == 1
    assert len(world.said) == 1
    world.grow(world.open(pool), 2)
    assert pool.account() == Account(capacity=3, mapped=2, spare=0, stuck=1)


@pytest.mark.parametrize("operation", ["unmap", "release", "address_free"])
def test_close_does_what_it_can_and_raises_and_the_next_close_does_the_rest(
    world: World, operation: str
) -> None:
    pool = world.pool()
    first, second = world.open(pool), world.open(pool)
    world.grow(first, 2)
    world.grow(second, 3)
    pool.prepare(2)
    world.driver.faults.plan(operation, forever=True)
    for _ in range(2):
        with pytest.raises(DriverError, match=operation) as failed:
            world.close()
        assert "calls failed" in failed.value.__notes__[0]
        world.check()
    world.driver.faults.lift()
    world.close()
    assert world.live() == {}
    assert pool.account() == Account(0, 0, 0, 0)


def test_a_lost_device_is_not_called_again_and_the_books_close(world: World) -> None:
    pool = world.pool()
    first, second = world.open(pool), world.open(pool)
    world.grow(first, 2)
    world.driver.faults.plan("map", 2, lost=True)
    with pytest.raises(DeviceLost):
        world.grow(second, 3)
    calls = world.driver.faults.calls.copy()
    for call in (lambda: first.grow(1), lambda: pool.prepare(9), lambda: pool.open_range(1)):
        with pytest.raises(DeviceLost):
            call()
    pool.close()
    pool.close()
    assert world.driver.faults.calls == calls
    assert pool.account() == Account(0, 0, 0, 0)
    world.pools.clear()
    world.driver.close()
    assert world.driver.live() == {}
    world.driver = HostDriver([HostDevice(MIB)])


def withdraw(range_: Range) -> None:
    range_.retire(range_.mapped_chunks)


def scenario(world: World) -> Iterator[Callable[[], object]]:
    """Yield the steps of a short life: two ranges on one device, one on another, much moving.

    Each step does what is still possible when earlier ones failed.
    """
    near, far = world.pool(0), world.pool(1)
    a, b, c = world.open(near, peer=True), world.open(near), world.open(far)
    yield lambda: world.grow(a, 4)
    yield lambda: world.grow(c, 2)
    yield lambda: near.prepare(2)
    yield lambda: world.move(a, b, 2)
    yield lambda: world.grow(a, 1)
    yield lambda: near.give_back(2)
    yield lambda: withdraw(b)
    yield b.reinstate
    yield lambda: world.move(b, a, 1)
    yield world.open(near, 2).close
    yield lambda: withdraw(c)
    yield lambda: world.shrink(c)
    yield lambda: far.give_back(1)
    yield lambda: world.grow(b, 3)


def live_through(world: World) -> int:
    """Run the scenario, checking after each step whatever fails; returns the failures."""
    failures = 0
    try:
        for step in scenario(world):
            try:
                step()
            except DriverError:
                failures += 1
            world.check()
    except DriverError:  # a pool or a range could not be opened
        failures += 1
    return failures


@pytest.mark.parametrize("clean_up_fails", [False, True], ids=["undone", "not undone"])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("operation", MEMORY_OPERATIONS)
def test_whatever_call_fails_the_state_is_valid_and_nothing_lives_after_close(
    operation: str, forever: bool, clean_up_fails: bool
) -> None:
    for nth in itertools.count(1):
        world = World()
        for clean_up in ("unmap", "release") if clean_up_fails else ():
            world.driver.faults.plan(clean_up, forever=True)
        world.driver.faults.plan(operation, nth, forever=forever)
        failures = live_through(world)
        for _ in range(2):
            try:
                world.close()
            except DriverError:
                world.check()
        reached = world.driver.faults.calls[operation] >= nth
        # A chunk that stays stuck in a range makes later growth of that range fail too.
        assert forever or clean_up_fails or failures <= 1 or operation == "unmap"
        world.driver.faults.lift()
        world.close()
        world.close()
        assert world.live() == {}
        assert [pool.account() for pool in world.pools] == [Account(0, 0, 0, 0)] * len(world.pools)
        world.driver.close()
        if not reached:
            assert failures == 0 or clean_up_fails
            break
    assert nth > 1


@pytest.mark.parametrize("operation", MEMORY_OPERATIONS)
def test_wherever_the_device_is_lost_no_further_call_is_made_and_the_books_close(
    operation: str,
) -> None:
    for nth in itertools.count(1):
        world = World()
        world.driver.faults.plan(operation, nth, lost=True)
        lost = False
        try:
            for step in scenario(world):
                step()
            world.close()
        except DeviceLost:
            lost = True
        calls = sum(world.driver.faults.calls.values())
        affected = [pool for pool in world.pools if pool._lost is not None]
        for pool in affected:
            pool.close()
            assert pool.account() == Account(0, 0, 0, 0)
        assert sum(world.driver.faults.calls.values()) == calls
        world.driver.close()
        if not lost:
            break
    assert nth > 1


class MemoryManager(RuleBasedStateMachine):
    """Do anything in any order on two devices, with faults and work that runs meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(chunks=12)
        for device in (0, 1):
            self.world.pool(device)
        self.clock = itertools.count(1)
        self.running: dict[int, tuple[int, threading.Event]] = {}  # stream -> (begun, gate)
        self.retirements: dict[Range, list[int]] = {}  # when, for each retired chunk

    def pick(self, number: int) -> Range:
        ranges = [range_ for pool in self.world.pools for range_ in pool.ranges]
        return ranges[number % len(ranges)]

    def some_range(self) -> bool:
        return any(pool.ranges for pool in self.world.pools)

    def finish_work(self) -> None:
        for stream, (_, gate) in self.running.items():
            gate.set()
            self.world.driver.stream_destroy(stream)
        self.running.clear()

    def attempt(self, call: Callable[[], object]) -> None:
        with suppress(DriverError):
            call()

    @rule(device=st.integers(0, 1), chunks=st.integers(1, 10), peer=st.booleans())
    def open_range(self, device: int, chunks: int, peer: bool) -> None:
        pool = self.world.pools[device]
        if len(pool.ranges) < 4:
            self.attempt(lambda: self.world.open(pool, chunks, peer=peer))

    @precondition(some_range)
    @rule(number=st.integers(0, 7), count=st.integers(0, 6))
    def grow(self, number: int, count: int) -> None:
        range_ = self.pick(number)
        if not range_.retired_chunks:
            before = range_.mapped_chunks
            self.attempt(lambda: self.world.grow(range_, count))
            assert range_.mapped_chunks in (before, before + count)

    @precondition(some_range)
    @rule(number=st.integers(0, 7), count=st.integers(0, 6))
    def retire(self, number: int, count: int) -> None:
        range_ = self.pick(number)
        count = min(count, range_.mapped_chunks - range_.retired_chunks)
        range_.retire(count)
        self.retirements.setdefault(range_, []).extend([next(self.clock)] * count)

    @precondition(some_range)
    @rule(number=st.integers(0, 7))
    def reinstate(self, number: int) -> None:
        self.pick(number).reinstate()
        self.retirements.pop(self.pick(number), None)

    @precondition(some_range)
    @rule(number=st.integers(0, 7))
    def shrink(self, number: int) -> None:
        range_ = self.pick(number)
        newest = max(self.retirements.pop(range_, []), default=0)
        oldest = min((begun for begun, _ in self.running.values()), default=newest + 1)
        if newest > oldest:
            self.world.driver.faults.lift()  # the rule is to speak, not a planned fault
            with pytest.raises(RuleViolation, match="rule 7"):
                self.unmap_newest(range_)
            self.finish_work()
        self.world.shrink(range_)

    @staticmethod
    def unmap_newest(range_: Range) -> None:
        """Unmap the chunk that was retired last, which is the first one of those retired."""
        position = range_.mapped_chunks - range_.retired_chunks
        range_.pool.driver.unmap(range_.base + position * UNIT, UNIT)

    @rule(device=st.integers(0, 1), count=st.integers(0, 6))
    def prepare(self, device: int, count: int) -> None:
        self.attempt(lambda: self.world.pools[device].prepare(count))

    @rule(device=st.integers(0, 1), count=st.integers(0, 6))
    def give_back(self, device: int, count: int) -> None:
        pool = self.world.pools[device]
        before, stuck = pool.account().capacity, pool.account().stuck
        returned = pool.give_back(count)
        assert pool.account().capacity == before - returned
        assert pool.account().stuck >= stuck

    @precondition(some_range)
    @rule(number=st.integers(0, 7))
    def close_range(self, number: int) -> None:
        self.finish_work()
        range_ = self.pick(number)
        self.retirements.pop(range_, None)
        self.world.contents[range_].clear()
        self.attempt(range_.close)

    @rule(device=st.integers(0, 1))
    def start_work(self, device: int) -> None:
        if len(self.running) < 3:
            gate = threading.Event()
            stream = self.world.driver.stream_create(device)
            self.world.driver.launch_host(stream, gate.wait)
            self.running[stream] = next(self.clock), gate

    @rule()
    def end_work(self) -> None:
        self.finish_work()

    @rule(
        operation=st.sampled_from(MEMORY_OPERATIONS),
        nth=st.integers(1, 4),
        forever=st.booleans(),
    )
    def let_a_call_fail(self, operation: str, nth: int, forever: bool) -> None:
        self.world.driver.faults.plan(operation, nth, forever=forever)

    @rule()
    def mend(self) -> None:
        self.world.driver.faults.lift()

    @invariant()
    def accounts_and_contents_agree(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.finish_work()
        self.world.driver.faults.lift()
        self.world.close()
        assert self.world.live() == {}
        self.world.driver.close()


TestMemoryManager = MemoryManager.TestCase
TestMemoryManager.settings = settings(max_examples=100, stateful_step_count=50, derandomize=True)


class LongRun(MemoryManager):
    """The same for many more steps."""


TestLongRun = pytest.mark.slow(LongRun.TestCase)
TestLongRun.settings = settings(max_examples=2000, stateful_step_count=100)


def test_every_test_that_the_document_names_exists() -> None:
    here = Path(__file__).parent
    text = (here.parent / "docs" / "vmm.md").read_text()
    named = set(re.findall(r"`(test_\w+|Test\w+)`", text))
    sources = "".join(path.read_text() for path in here.glob("*.py"))
    assert len(named) > 10
    assert {name for name in named if not re.search(rf"\b{name}\b", sources)} == set()
