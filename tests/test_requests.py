"""Requests to a ledger: what is planned, who must leave, and that any may follow any other."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from cache_world import (
    BLOBS,
    CONTEXT,
    EXPERTS,
    KV,
    UNIT,
    World,
    ledger_of,
    owner_of,
    read_rows,
    rows_of,
    slots_at_start,
    write_rows,
)
from driver_contract import held_stream
from hypothesis import given
from hypothesis import strategies as st

from strata_nb.addresses import memory_view
from strata_nb.cache import requests
from strata_nb.cache.accounts import Change
from strata_nb.cache.capacity import Ledger
from strata_nb.cache.moves import choose_moves
from strata_nb.cache.plan import Holdings, Needs, plan_capacity
from strata_nb.cache.requests import Situation
from strata_nb.cache.slots import SlotLayout
from strata_nb.errors import DeviceLost, DriverError, OutOfDeviceMemory

ALL = list(np.ndindex(len(BLOBS), EXPERTS))
LAYOUT = SlotLayout(BLOBS, EXPERTS)
NEEDS = Needs(UNIT, UNIT, KV, 128, 640, LAYOUT, loan_bytes=4 * UNIT)
PLAN = plan_capacity(NEEDS, 40 * UNIT, 100 * UNIT, UNIT)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(chunks=34, kv_cells=128, kv_most_cells=640)  # all experts have slots at first
    made.open()
    yield made
    made.driver.faults.lift()
    made.check()
    made.end()


def free_bytes(world: World) -> int:
    return world.driver.mem_info(0)[0]


def warm(ledger: Ledger, seed: int = 0) -> None:
    """Let every expert be used some times, no two equally often, and fill the slots by chance."""
    rng = np.random.default_rng(seed)
    ledger.experts.use[...] = rng.permutation(len(ALL)).reshape(ledger.experts.use.shape) + 1
    ledger.experts.fill([ALL[n] for n in rng.permutation(len(ALL))])


def residents(ledger: Ledger) -> set[tuple[int, int]]:
    owners = (owner_of(ledger.experts, slot) for slot in range(ledger.experts.usable_slots))
    return {owner for owner in owners if owner is not None}


def write_cells(ledger: Ledger, numbers: list[int]) -> int:
    sequence = ledger.kv.open_sequence()
    ledger.kv.extend(sequence, len(numbers))
    write_rows(ledger.kv, sequence, 1, "v", 0, rows_of(numbers, "v", 1))
    ledger.kv.advance(sequence, len(numbers))
    return sequence


def holds(ledger: Ledger, sequence: int, numbers: list[int]) -> bool:
    read = read_rows(ledger.kv, sequence, 1, "v", 0, len(numbers))
    return all(map(np.array_equal, read, rows_of(numbers, "v", 1)))


# Plans.


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    loan = draw(st.sampled_from([0, 0, 2, 7]))
    most = PLAN.arena_chunks + PLAN.loan_chunks
    held = Holdings(
        experts=draw(st.integers(0, min(PLAN.arena_chunks, most - loan))),
        kv=draw(st.integers(0, PLAN.kv_chunks)),
        loan=loan,
        spare=draw(st.integers(0, 5)),
    )
    live = draw(st.integers(0, held.kv * UNIT // KV.block_bytes))
    kv_limit = draw(st.sampled_from([PLAN.kv_chunks, held.kv]))
    arena_limit = draw(st.sampled_from([most, held.experts + loan]))
    obtainable, owed = draw(st.sampled_from([(20, 0), (3, 0), (0, 0), (0, 4)]))
    return Situation(0, PLAN, held, obtainable, owed, live, kv_limit, arena_limit)


REQUESTS: dict[str, Callable[[Situation, int], Holdings]] = {
    "grow_kv": lambda now, n: requests.grow_kv(now, n, n + 3),
    "grow_kv_beside": requests.grow_kv_beside,
    "trim_kv": requests.trim_kv,
    "give_back": requests.give_back,
    "take_back": lambda now, n: requests.take_back(now),
    "prepare": requests.prepare,
    "lend": requests.lend,
    "end_loan": lambda now, n: requests.end_loan(now),
    "attach": requests.attach,
    "detach": lambda now, n: requests.detach(now),
}


@given(situations(), st.sampled_from(list(REQUESTS)), st.integers(0, 30))
def test_a_plan_keeps_the_rules_whatever_was_before(now: Situation, name: str, count: int) -> None:
    try:
        wanted = REQUESTS[name](now, count)
    except OutOfDeviceMemory:
        assert name in ("grow_kv", "lend", "attach", "detach")
        return
    held = now.held
    assert min(wanted.experts, wanted.kv, wanted.loan, wanted.spare) >= 0
    assert wanted.chunks - held.chunks <= now.obtainable
    assert wanted.kv <= max(held.kv, min(PLAN.kv_chunks, now.kv_limit))
    assert wanted.kv >= min(held.kv, PLAN.chunks_for_blocks(now.live_blocks))
    assert wanted.experts + wanted.loan <= max(now.arena_limit, held.experts + held.loan)
    assert wanted.experts <= PLAN.arena_chunks
    if name != "detach":
        assert wanted.experts >= min(held.experts, PLAN.floor_chunks)
    if held.loan and name != "end_loan":
        assert (wanted.experts, wanted.loan) == (held.experts, held.loan)
    if name == "give_back":
        given = held.chunks - wanted.chunks
        enough = given == count
        nothing_more = not wanted.spare and (
            held.loan or wanted.experts <= PLAN.floor_chunks or wanted.kv == held.kv
        )
        assert enough or (given < count and nothing_more)
    if name == "grow_kv":
        assert wanted.kv >= PLAN.chunks_for_blocks(count)
    if name == "grow_kv_beside":
        assert (wanted.experts, wanted.loan) == (held.experts, held.loan)
        assert held.kv <= wanted.kv <= max(held.kv, PLAN.chunks_for_blocks(count))
    if name in ("prepare", "take_back", "attach", "end_loan"):
        assert wanted.kv == held.kv
    if name == "trim_kv":
        given_up = held.kv - wanted.kv
        assert held.chunks - wanted.chunks >= min(given_up, now.owed)


def test_what_nobody_uses_is_lent_first_and_goes_back_to_the_system() -> None:
    held = Holdings(experts=PLAN.arena_chunks, kv=2)
    now = Situation(0, PLAN, held, 3, 0, 0, PLAN.kv_chunks, PLAN.arena_chunks + PLAN.loan_chunks)
    assert now.lendable == 3 + PLAN.arena_chunks - PLAN.floor_chunks
    assert requests.lend(now, 2) == replace(held, loan=2)
    lent = requests.lend(now, 5)
    assert lent == replace(held, experts=held.experts - 2, loan=5)
    assert requests.end_loan(replace(now, held=lent)) == held
    no_room = replace(now, arena_limit=PLAN.arena_chunks)  # for a chunk that nobody uses
    assert requests.lend(no_room, 2) == replace(held, experts=held.experts - 2, loan=2)


def test_growth_takes_spare_memory_first_then_the_systems_then_experts() -> None:
    held = Holdings(experts=15, kv=13, spare=2)
    now = Situation(0, PLAN, held, 3, 0, 2, PLAN.kv_chunks, PLAN.arena_chunks)
    steps = [requests.grow_kv(now, blocks, blocks) for blocks in (2, 3, 4)]
    assert [step.kv - held.kv for step in steps] == [0, 6, 12]
    assert [step.spare for step in steps] == [2, 0, 0]
    assert [step.experts for step in steps] == [15, 14, 8]
    assert requests.grow_kv(now, 3, 10) == Holdings(experts=PLAN.floor_chunks, kv=28)
    with pytest.raises(OutOfDeviceMemory, match="needed") as refused:
        requests.grow_kv(now, 5, 5)
    assert refused.value.numbers["needed"] == PLAN.chunks_for_blocks(5) * UNIT
    assert refused.value.numbers["possible"] == 28 * UNIT


def test_experts_give_for_what_is_enough_and_no_more() -> None:
    held = Holdings(experts=15, kv=13, spare=2)
    now = Situation(0, PLAN, held, 3, 0, 2, PLAN.kv_chunks, PLAN.arena_chunks)
    assert requests.grow_kv(now, 2, 4) == Holdings(experts=8, kv=25)
    assert requests.grow_kv(now, 2, 4, 3) == Holdings(experts=14, kv=19)
    assert requests.grow_kv(now, 2, 4, 2) == Holdings(experts=15, kv=18)  # what nobody gives
    assert requests.grow_kv(now, 3, 4, 2) == Holdings(experts=14, kv=19)  # the least is needed
    assert requests.grow_kv(now, 2, 2, 9) == Holdings(experts=15, kv=13, spare=2)


def test_growth_beside_windows_takes_spare_memory_then_the_systems_and_no_other() -> None:
    held = Holdings(experts=15, kv=13, spare=2)
    now = Situation(0, PLAN, held, 3, 0, 2, PLAN.kv_chunks, PLAN.arena_chunks)
    assert requests.grow_kv_beside(now, 2) == held
    assert requests.grow_kv_beside(now, 3) == Holdings(experts=15, kv=18)
    assert requests.grow_kv_beside(replace(now, obtainable=9), 3) == Holdings(experts=15, kv=19)
    assert requests.grow_kv_beside(replace(now, kv_limit=14), 3).kv == 14


def test_growth_beside_windows_waits_for_nothing_and_unmaps_nothing() -> None:
    world = World(chunks=66, kv_cells=128, kv_most_cells=640)  # room beside all experts
    ledger = world.open()
    warm(ledger)
    sequence = write_cells(ledger, list(range(100)))
    experts = residents(ledger)
    calls = world.driver.faults.calls
    ledger.heat = lambda: pytest.fail("a millisecond for nothing")
    with held_stream(world.driver):
        calls.clear()
        change = ledger.grow_kv_beside(4)
        assert ledger.kv.usable_blocks == 4
        assert not calls.keys() & {"synchronize", "stream_synchronize", "copy_async", "unmap"}
        world.driver.faults.plan("set_access", forever=True)
        with pytest.raises(DriverError):
            ledger.grow_kv_beside(5)
        world.driver.faults.lift()
        assert not calls.keys() & {"synchronize", "stream_synchronize", "copy_async"}
    assert (change.request, change.filled, change.moved) == ("grow_kv", 0, 0)
    assert ledger.growths == 1
    assert residents(ledger) == experts
    assert holds(ledger, sequence, list(range(100)))
    world.check()
    world.end()


def test_experts_give_what_the_system_promised_and_has_not() -> None:
    world = World(chunks=40, kv_cells=128, kv_most_cells=640)  # room for a block beside all experts
    ledger = world.open()
    warm(ledger)
    world.driver.faults.plan("create", forever=True)
    slots = ledger.experts.usable_slots
    change = ledger.grow_kv(3, 3)
    assert ledger.kv.usable_blocks == 3
    assert change.slots < slots
    world.check()
    with pytest.raises(OutOfDeviceMemory, match="not enough memory, needed"):
        ledger.grow_kv(5, 5)
    world.end()


# Who leaves.


@given(st.data())
def test_exactly_the_coldest_of_each_size_leave(data: st.DataObject) -> None:
    usable = data.draw(st.integers(1, LAYOUT.full_slots))
    kept = data.draw(st.integers(0, usable))
    heat = data.draw(
        st.lists(
            st.integers(-1, 9).map(lambda n: n if n >= 0 else -np.inf),
            min_size=usable,
            max_size=usable,
        )
    )
    moves = choose_moves(heat, kept, LAYOUT)
    assert len(set(moves.values())) == len(moves)
    after = heat[:kept]
    for source, target in moves.items():
        assert target < kept <= source
        assert LAYOUT.class_of_slot(source) == LAYOUT.class_of_slot(target)
        after[target] = heat[source]
    for size_class in range(len(LAYOUT.classes)):
        every = sorted(heat[n] for n in range(usable) if LAYOUT.class_of_slot(n) == size_class)
        stay = sorted(after[n] for n in range(kept) if LAYOUT.class_of_slot(n) == size_class)
        assert stay == every[len(every) - len(stay) :]


def test_experts_move_across_layers_of_one_size_and_never_to_another_size(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    before = residents(ledger)
    slots = ledger.experts.usable_slots
    addresses = {owner: int(ledger.experts.expert_address[owner]) for owner in before}
    change = ledger.grow_kv(3, 3)
    assert change.slots_before == slots > change.slots == ledger.experts.usable_slots
    after = residents(ledger)
    assert after < before
    for size_class in range(2):
        layers = [n for n, number in enumerate(LAYOUT.class_of_layer) if number == size_class]
        was = sorted(ledger.experts.use[e] for e in before if e[0] in layers)
        now = sorted(ledger.experts.use[e] for e in after if e[0] in layers)
        assert now == was[len(was) - len(now) :]
    moved = [e for e in after if ledger.experts.expert_address[e] != addresses[e]]
    assert change.moved == len(moved) > 0
    world.check()


def test_hot_experts_are_copied_on_the_device_and_not_from_the_host(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    for layer, expert in ALL:  # a copy from the host would show
        world.host_blob(layer, expert)[:] = 0
    assert ledger.grow_kv(3, 3).moved > 0
    for owner in residents(ledger):
        assert np.array_equal(world.named_blob(*owner), world.blob(*owner))
    for layer, expert in ALL:
        world.host_blob(layer, expert)[:] = world.blob(layer, expert)


@pytest.mark.parametrize("operation", ["copy_async", "stream_synchronize", "synchronize"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_move_that_fails_leaves_every_expert_readable(
    world: World, operation: str, nth: int
) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    before = ledger.holdings()
    world.driver.faults.plan(operation, nth)
    with suppress(DriverError):
        ledger.grow_kv(3, 3)
        before = ledger.holdings()
    assert ledger.holdings() == before
    world.check()
    world.driver.faults.lift()
    ledger.grow_kv(3, 3)


# K/V.


def test_a_trim_moves_live_blocks_below_the_new_end_and_experts_come_back(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    ledger.grow_kv(4, 4)
    slots = ledger.experts.usable_slots
    early = write_cells(ledger, list(range(64)))
    late = write_cells(ledger, list(range(300, 300 + 130)))
    assert ledger.kv.usable_blocks == 4
    ledger.kv.close_sequence(early)
    table = ledger.kv.table.copy()
    change = ledger.trim_kv(1)  # three are live: those stay
    assert ledger.kv.usable_blocks == 3
    assert change.filled > 0
    assert ledger.experts.usable_slots > slots
    assert not np.array_equal(table, ledger.kv.table)
    assert holds(ledger, late, list(range(300, 430)))
    world.check()


def test_blocks_that_sequences_share_stay_shared_when_they_move(world: World) -> None:
    ledger = ledger_of(world)
    ledger.grow_kv(4, 4)
    first = write_cells(ledger, list(range(128)))
    shared = write_cells(ledger, list(range(200, 328)))
    fork = ledger.kv.fork(shared, 128)
    ledger.kv.close_sequence(first)
    ledger.trim_kv(2)
    assert ledger.kv.live_blocks == ledger.kv.usable_blocks == 2
    assert np.array_equal(ledger.kv.table[shared], ledger.kv.table[fork])
    assert holds(ledger, fork, list(range(200, 328)))


@pytest.mark.parametrize("operation", ["copy_async", "stream_synchronize"])
def test_a_trim_whose_copies_fail_changes_nothing(world: World, operation: str) -> None:
    ledger = ledger_of(world)
    ledger.grow_kv(4, 4)
    early = write_cells(ledger, list(range(64)))
    late = write_cells(ledger, list(range(200, 360)))
    ledger.kv.close_sequence(early)
    before, table = ledger.holdings(), ledger.kv.table.copy()
    world.driver.faults.plan(operation)
    with pytest.raises(DriverError, match=operation):
        ledger.trim_kv(1)
    assert ledger.holdings() == before
    assert np.array_equal(table, ledger.kv.table)
    assert holds(ledger, late, list(range(200, 360)))


def test_a_dense_model_grows_from_what_the_device_has_and_stops_at_the_reserve() -> None:
    world = World(chunks=40, kv_cells=64, kv_most_cells=640, blobs=())
    ledger = world.open()
    ledger.prepare(7)
    assert ledger.holdings().spare == 7
    calls = world.driver.faults.calls
    created = calls["create"]
    ledger.grow_kv(2, 2)
    assert calls["create"] == created  # it only maps
    change = ledger.grow_kv(3, 100)
    assert free_bytes(world) == ledger.reserve_bytes
    assert ledger.kv.usable_blocks == 39 * UNIT // KV.block_bytes
    with pytest.raises(OutOfDeviceMemory, match="grow the K/V on device 0: there is not enough"):
        ledger.grow_kv(ledger.kv.usable_blocks + 1, 100)
    assert ledger.holdings() == change.after
    world.end()


# The device's other users.


def test_a_reserve_is_really_free_and_goes_back_to_experts(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    before, resident = ledger.holdings(), residents(ledger)
    change = ledger.set_reserve(8 * UNIT)
    assert free_bytes(world) >= 8 * UNIT
    assert change.before == before
    assert change.slots < change.slots_before
    world.check()
    change = ledger.set_reserve(UNIT)
    assert ledger.holdings() == before
    assert change.filled == change.slots - change.slots_before > 0
    assert len(residents(ledger)) == len(resident)
    world.check()


def test_experts_that_nobody_ever_used_come_back_with_the_memory(world: World) -> None:
    ledger = ledger_of(world)
    ledger.experts.fill(np.ndindex(len(BLOBS), EXPERTS))
    everybody = residents(ledger)
    assert len(everybody) == len(BLOBS) * EXPERTS
    ledger.experts.use[2, 3] = 1
    ledger.set_reserve(9 * UNIT)
    assert (2, 3) in residents(ledger) < everybody
    assert ledger.set_reserve(UNIT).filled > 0
    assert residents(ledger) == everybody


def test_without_a_reserve_experts_get_all_that_the_device_has() -> None:
    world = World(chunks=30, kv_cells=128, kv_most_cells=640)
    ledger = world.open()
    warm(ledger)
    slots = ledger.experts.usable_slots
    change = ledger.set_reserve(0)
    assert ledger.holdings().chunks == ledger.plan.capacity == 29  # one is for dense weights
    assert change.filled == change.slots - slots > 0
    world.end()


def test_the_floor_stays_when_more_is_asked_for(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    ledger.grow_kv(3, 3)
    change = ledger.set_reserve(1000 * UNIT)
    assert ledger.holdings() == Holdings(ledger.plan.floor_chunks, ledger.plan.start.kv)
    assert change.slots == LAYOUT.layers
    assert free_bytes(world) < 1000 * UNIT
    ledger.set_reserve(UNIT)


def test_a_reserve_holds_against_later_growth(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    ledger.set_reserve(6 * UNIT)
    ledger.grow_kv(3, 3)
    assert free_bytes(world) >= 6 * UNIT
    ledger.trim_kv(2)
    assert free_bytes(world) >= 6 * UNIT


def test_what_a_trim_frees_goes_to_others_first_where_they_lack_it(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    ledger.grow_kv(4, 4)
    sequence = write_cells(ledger, list(range(250)))
    ledger.set_reserve(14 * UNIT)
    slots = ledger.experts.usable_slots
    assert free_bytes(world) < 14 * UNIT  # four blocks are live
    ledger.kv.close_sequence(sequence)
    ledger.trim_kv(2)
    assert free_bytes(world) >= 14 * UNIT
    assert ledger.experts.usable_slots >= slots


def test_memory_that_others_take_meanwhile_is_made_up_for(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    info, taken = world.driver.mem_info, []

    def take_some(device: int) -> tuple[int, int]:
        if len(taken) < 3:
            with suppress(OutOfDeviceMemory):
                taken.append(world.driver.allocate(UNIT, 0))
        return info(device)

    world.driver.mem_info = take_some  # type: ignore[method-assign]
    ledger.set_reserve(5 * UNIT)
    world.driver.mem_info = info  # type: ignore[method-assign]
    assert free_bytes(world) >= 5 * UNIT
    for address in taken:
        world.driver.free(address)


def test_what_is_lent_stays_where_it_is_until_it_is_returned(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    lent = ledger.lend(3)
    with pytest.raises(OutOfDeviceMemory, match="lend memory"):
        ledger.lend(1)
    with pytest.raises(OutOfDeviceMemory, match="grow the K/V"):
        ledger.grow_kv(5, 5)
    with pytest.raises(OutOfDeviceMemory, match="detach"):
        ledger.detach()
    ledger.set_reserve(9 * UNIT)
    ledger.set_reserve(0)
    assert ledger.loan() == lent
    assert ledger.end_loan().filled > 0
    ledger.set_reserve(UNIT)


def test_a_helping_device_is_attached_and_detached() -> None:
    world = World(chunks=40, kv_cells=0, kv_most_cells=0)
    ledger = world.open()
    ledger.detach()
    assert ledger.holdings().chunks == 0
    warm(ledger)
    assert ledger.experts.resident == 0
    with pytest.raises(OutOfDeviceMemory, match="attach a peer"):
        ledger.attach(ledger.plan.floor_chunks - 1)
    change = ledger.attach(9)
    assert change.after.experts == 9
    assert change.filled == change.slots
    world.check()
    world.end()


# Pairs, faults, interrupts, announcements.

PAIRS: dict[str, Callable[[Ledger], object]] = {
    "the K/V grows": lambda ledger: ledger.grow_kv(3, 4),
    "the K/V grows beside windows": lambda ledger: ledger.grow_kv_beside(4),
    "the K/V is trimmed": lambda ledger: ledger.trim_kv(2),
    "memory is given back": lambda ledger: ledger.set_reserve(6 * UNIT),
    "memory is taken back": lambda ledger: ledger.set_reserve(UNIT),
    "chunks are prepared": lambda ledger: ledger.prepare(3),
    "a loan begins": lambda ledger: ledger.lend(2),
    "a loan ends": lambda ledger: ledger.end_loan(),
    "a peer is attached": lambda ledger: ledger.attach(9),
    "a peer is detached": lambda ledger: ledger.detach(),
}


@pytest.mark.parametrize("first", PAIRS)
@pytest.mark.parametrize("second", PAIRS)
def test_any_request_may_follow_any_other(world: World, first: str, second: str) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    sequence = write_cells(ledger, list(range(100)))
    for name in (first, second):
        with suppress(OutOfDeviceMemory):
            PAIRS[name](ledger)
        world.check()
        assert holds(ledger, sequence, list(range(100)))
    ledger.prepare(0)
    for name in ("a loan ends", "memory is taken back", "the K/V is trimmed"):
        PAIRS[name](ledger)
    ledger.attach(100)
    assert ledger.experts.usable_slots >= slots_at_start(ledger.plan)
    assert world.said == []


OPERATIONS = ("mem_info", "create", "release", "map", "unmap", "set_access", "synchronize")
OPERATIONS += ("copy_async", "stream_synchronize")


@pytest.mark.parametrize("undoing_fails", [False, True], ids=["undone", "not undone"])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_call_fails_requests_leave_tables_and_accounts_right(
    operation: str, forever: bool, undoing_fails: bool
) -> None:
    for nth in itertools.count(1):
        world = World(chunks=40, kv_cells=128, kv_most_cells=640)
        ledger = world.open()
        warm(ledger)
        sequence = write_cells(ledger, list(range(100)))
        for clean_up in ("unmap", "release") if undoing_fails else ():
            world.driver.faults.plan(clean_up, forever=True)
        world.driver.faults.calls.clear()
        world.driver.faults.plan(operation, nth, forever=forever)
        for request in PAIRS.values():
            with suppress(DriverError):
                request(ledger)
            world.check()
            assert holds(ledger, sequence, list(range(100)))
        reached = world.driver.faults.calls[operation] >= nth
        world.end()
        if not reached:
            break
    assert nth > 1 or undoing_fails


@contextmanager
def interrupted_at(world: World, operation: str) -> Iterator[None]:
    """Let Ctrl-C come at every call of an operation."""
    call = getattr(world.driver, operation)

    def interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return call(*arguments)

    setattr(world.driver, operation, interrupted)
    try:
        yield
    finally:
        setattr(world.driver, operation, call)


@pytest.mark.parametrize("operation", ["synchronize", "unmap", "map", "set_access"])
def test_an_interrupt_comes_when_a_change_is_whole(world: World, operation: str) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    with interrupted_at(world, operation), pytest.raises(KeyboardInterrupt):
        ledger.grow_kv(3, 3)
    assert ledger.kv.usable_blocks == 3
    world.check()
    ledger.trim_kv(2)


def test_a_change_that_ctrl_c_came_into_is_announced_as_done(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    heard: list[Change] = []
    ledger.announce = heard.append
    with interrupted_at(world, "synchronize"), pytest.raises(KeyboardInterrupt):
        ledger.grow_kv(3, 3)
    assert [(change.after.kv, change.error) for change in heard] == [(ledger.holdings().kv, "")]
    assert ledger.kv.usable_blocks == 3


def test_a_reserve_that_ctrl_c_came_into_is_the_earlier_one(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    earlier = ledger.reserve_bytes
    with interrupted_at(world, "mem_info"), pytest.raises(KeyboardInterrupt):
        ledger.set_reserve(6 * UNIT)
    assert ledger.reserve_bytes == earlier
    world.check()
    ledger.set_reserve(6 * UNIT)
    assert free_bytes(world) >= 6 * UNIT
    ledger.set_reserve(earlier)


def test_every_request_is_announced_once_with_what_it_did(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    heard: list[Change] = []
    ledger.announce = heard.append
    before = ledger.holdings()
    done = ledger.grow_kv(3, 3)
    assert heard == [done]
    assert (done.before, done.after, done.error) == (before, ledger.holdings(), "")
    world.driver.faults.plan("map")
    with pytest.raises(DriverError):
        ledger.grow_kv(4, 4)
    assert heard[1].before == heard[1].after == done.after
    assert "failed on request" in heard[1].error
    with pytest.raises(OutOfDeviceMemory):
        ledger.grow_kv(CONTEXT, CONTEXT)
    assert "not enough memory" in heard[2].error


def test_a_lost_device_refuses_every_request_without_a_call(world: World) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    world.driver.faults.plan("synchronize", lost=True)
    with pytest.raises(DeviceLost):
        ledger.grow_kv(3, 3)
    calls = sum(world.driver.faults.calls.values())
    for request in PAIRS.values():
        with pytest.raises(DeviceLost):
            request(ledger)
    assert sum(world.driver.faults.calls.values()) == calls
    with suppress(DeviceLost):
        ledger.close()
    world.driver.close()
    world.ledger = None
    world.driver = World().driver


def test_a_slot_is_not_written_while_older_work_may_read_the_expert_that_left(
    world: World,
) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    named = {owner: int(ledger.experts.expert_address[owner]) for owner in residents(ledger)}
    synchronize, checked = world.driver.synchronize, []

    def read_as_older_work_does(device: int) -> None:
        if not checked:  # the first drain comes before anything is copied
            for owner, address in named.items():
                blob = memory_view(address, BLOBS[owner[0]])
                assert np.array_equal(blob, world.blob(*owner))
        checked.append(device)
        synchronize(device)

    world.driver.synchronize = read_as_older_work_does  # type: ignore[method-assign]
    assert ledger.grow_kv(3, 3).moved > 0
    assert len(checked) == 2
    world.driver.synchronize = synchronize  # type: ignore[method-assign]


def test_slots_that_experts_moved_out_of_are_not_written_before_a_drain_succeeded(
    world: World,
) -> None:
    ledger = ledger_of(world)
    warm(ledger)
    world.driver.faults.plan("synchronize", 2)  # the one after the moves
    with pytest.raises(DriverError, match="synchronize"):
        ledger.grow_kv(3, 3)
    assert ledger.experts.resident < ledger.experts.usable_slots
    assert ledger.experts.fill(ALL) == 0
    ledger.grow_kv(3, 3)
