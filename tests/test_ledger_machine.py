"""Ask a ledger for anything in any order, beside sequences, other programs and faults.

After every step tables, accounts, the driver's own books, every expert's bytes and every cell are
compared with what they must be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cache_world import KV, SEQUENCES, UNIT, World, read_rows, rows_of, write_rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata_nb.cache.accounts import Change
from strata_nb.cache.experts import Tier
from strata_nb.errors import ConfigError, DriverError, OutOfDeviceMemory

FAULTS = ("create", "release", "map", "unmap", "set_access", "synchronize", "copy_async")
FAULTS += ("stream_synchronize", "mem_info")


class Requests(RuleBasedStateMachine):
    """Hold one ledger, and remember what each cell and each change must be."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(chunks=34, kv_cells=128, kv_most_cells=512, loan_bytes=3 * UNIT)
        self.ledger = self.world.open()
        self.heard: list[Change] = []
        self.ledger.announce = self.heard.append
        self.cells: dict[int, list[int]] = {}
        self.taken: list[int] = []
        self.numbers = itertools.count(1)
        self.faults = False

    # What the device's users do.

    @rule(seed=st.integers(0, 9))
    def use_experts(self, seed: int) -> None:
        arena = self.ledger.experts
        arena.use += np.random.default_rng(seed).integers(0, 5, arena.use.shape)
        self.attempt(lambda: arena.fill(arena.hottest(self.ledger.heat())))

    @rule(seed=st.integers(0, 9))
    def a_policy_says_what_experts_are_worth(self, seed: int) -> None:
        heat = np.random.default_rng(seed).integers(-3, 4, self.ledger.experts.use.shape)
        self.ledger.heat = lambda: heat.astype(np.float64)

    @rule(chunks=st.integers(1, 6))
    def another_program_takes_memory(self, chunks: int) -> None:
        try:
            self.taken.append(self.world.driver.allocate(chunks * UNIT, 0))
        except DriverError:
            return

    @precondition(lambda self: self.taken)
    @rule()
    def another_program_ends(self) -> None:
        self.world.driver.free(self.taken.pop())

    @precondition(lambda self: len(self.cells) < SEQUENCES)
    @rule()
    def open_sequence(self) -> None:
        self.cells[self.ledger.kv.open_sequence()] = []

    @precondition(lambda self: self.cells)
    @rule(number=st.integers(0, 3), count=st.sampled_from([1, 5, 64, 100]))
    def write_cells(self, number: int, count: int) -> None:
        sequence = sorted(self.cells)[number % len(self.cells)]
        kv, length = self.ledger.kv, len(self.cells[sequence])
        numbers = list(itertools.islice(self.numbers, count))
        try:
            kv.extend(sequence, count)
        except (ConfigError, DriverError):
            return
        write_rows(kv, sequence, 0, "k", length, rows_of(numbers, "k", 0))
        kv.advance(sequence, count)
        self.cells[sequence] += numbers

    @precondition(lambda self: 0 < len(self.cells) < SEQUENCES)
    @rule(number=st.integers(0, 3))
    def fork(self, number: int) -> None:
        sequence = sorted(self.cells)[number % len(self.cells)]
        made = self.ledger.kv.fork(sequence, len(self.cells[sequence]))
        self.cells[made] = list(self.cells[sequence])

    @precondition(lambda self: self.cells)
    @rule(number=st.integers(0, 3))
    def close_sequence(self, number: int) -> None:
        sequence = sorted(self.cells)[number % len(self.cells)]
        self.ledger.kv.close_sequence(sequence)
        del self.cells[sequence]

    # Requests.

    @rule(blocks=st.integers(0, 9), more=st.integers(0, 3))
    def grow_kv(self, blocks: int, more: int) -> None:
        with self.the_coldest_leave():
            if self.attempt(lambda: self.ledger.grow_kv(blocks, blocks + more)):
                assert self.ledger.kv.usable_blocks >= min(blocks, 8)

    @rule(blocks=st.integers(0, 9))
    def grow_kv_beside(self, blocks: int) -> None:
        slots, calls = self.ledger.experts.usable_slots, self.world.driver.faults.calls
        waited = calls["synchronize"] + calls["stream_synchronize"]
        self.attempt(lambda: self.ledger.grow_kv_beside(blocks))
        assert self.ledger.experts.usable_slots == slots
        assert calls["synchronize"] + calls["stream_synchronize"] == waited

    @rule(blocks=st.integers(0, 9), enough=st.integers(0, 9))
    def grow_kv_by_little(self, blocks: int, enough: int) -> None:
        with self.the_coldest_leave():
            self.attempt(lambda: self.ledger.grow_kv(blocks, blocks + 3, enough))

    @rule(blocks=st.integers(0, 9))
    def trim_kv(self, blocks: int) -> None:
        self.attempt(lambda: self.ledger.trim_kv(blocks))

    @rule(chunks=st.integers(0, 20))
    def set_reserve(self, chunks: int) -> None:
        ledger = self.ledger
        if not self.attempt(lambda: ledger.set_reserve(chunks * UNIT)) or self.faults:
            return
        held = ledger.holdings()
        enough = self.world.driver.mem_info(0)[0] >= chunks * UNIT
        arena_at_floor = held.loan or held.experts <= ledger.plan.floor_chunks
        assert enough or (arena_at_floor and not held.spare)

    @rule(chunks=st.integers(0, 5))
    def prepare(self, chunks: int) -> None:
        self.attempt(lambda: self.ledger.prepare(chunks))

    @rule(chunks=st.integers(1, 6))
    def lend(self, chunks: int) -> None:
        with self.the_coldest_leave():
            self.attempt(lambda: self.ledger.lend(chunks))

    @rule()
    def end_loan(self) -> None:
        self.attempt(self.ledger.end_loan)

    @rule(chunks=st.integers(0, 19))
    def attach(self, chunks: int) -> None:
        self.attempt(lambda: self.ledger.attach(chunks))

    @rule()
    def detach(self) -> None:
        self.attempt(self.ledger.detach)

    @rule(operation=st.sampled_from(FAULTS), nth=st.integers(1, 5), forever=st.booleans())
    def let_a_call_fail(self, operation: str, nth: int, forever: bool) -> None:
        self.world.driver.faults.plan(operation, nth, forever=forever)
        self.faults = True

    @precondition(lambda self: self.faults)
    @rule()
    def lift_faults(self) -> None:
        self.world.driver.faults.lift()
        self.faults = False

    def attempt(self, call: Callable[[], object]) -> bool:
        """Do what may fail; returns whether it did not. Without faults only room may be missing."""
        said = len(self.world.said)
        free = self.free_without_faults()
        try:
            call()
        except OutOfDeviceMemory:
            return False
        except DriverError:
            assert self.faults
            return False
        assert self.faults or len(self.world.said) == said
        after = self.free_without_faults()
        assert after >= min(free, self.ledger.reserve_bytes)  # what was to stay free has stayed
        return True

    def free_without_faults(self) -> int:
        used = self.world.driver.account(0).charged_bytes
        return self.world.budget_bytes - used

    @contextmanager
    def the_coldest_leave(self) -> Iterator[None]:
        """Check that of each size those that stay are the hottest of those that were there."""
        arena = self.ledger.experts
        before, heat = arena.expert_tier == Tier.SLOT, self.ledger.heat()
        yield
        after = arena.expert_tier == Tier.SLOT
        if self.faults:
            return
        sizes = np.array(arena.layout.class_of_layer)
        for size_class in range(len(arena.layout.classes)):
            layers = sizes == size_class
            was, stayed = (np.sort(heat[layers][held[layers]]) for held in (before, after))
            assert np.array_equal(stayed, was[len(was) - len(stayed) :])
            slots = range(arena.usable_slots)
            room = sum(arena.layout.class_of_slot(slot) == size_class for slot in slots)
            assert len(stayed) == min(len(was), room)

    @invariant()
    def everything_reads_back_and_adds_up(self) -> None:
        self.world.check()
        for sequence, numbers in self.cells.items():
            stored = read_rows(self.ledger.kv, sequence, 0, "k", 0, len(numbers))
            assert all(map(np.array_equal, stored, rows_of(numbers, "k", 0)))
        if self.heard:
            assert self.heard[-1].after == self.ledger.holdings()
        kv_bytes = self.ledger.holdings().kv * UNIT
        assert self.ledger.kv.usable_blocks == kv_bytes // KV.block_bytes

    def teardown(self) -> None:
        for address in self.taken:
            self.world.driver.free(address)
        self.world.end()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=40, stateful_step_count=40, derandomize=True)


@pytest.mark.slow
class TestRequestsLong(Requests.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=600, stateful_step_count=60)
