"""Residency: a policy for each size class, on a device with real slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from cache_world import BLOBS, EXPERTS, UNIT, World, has_free_slots, overwrite, owner_of

from strata_nb.cache.experts import Tier
from strata_nb.cache.policy import (
    ANY_LEAD,
    Counts,
    Heat,
    Insertion,
    LeastRecent,
    Mask,
    Moves,
    Policy,
    Ranks,
    exchanges,
    static,
)
from strata_nb.cache.residency import Residency
from strata_nb.errors import DeviceLost

LAYERS = len(BLOBS)
NO_RANKS: Ranks = np.full((LAYERS, EXPERTS), -1, np.int32)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(slots=2 * LAYERS)
    world.open()
    yield world
    world.check()
    world.end()


class Told:
    """Note what a policy is told, and answer with the moves that are next."""

    fetches = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.told: list[tuple[npt.NDArray[np.integer], int, Mask, int]] = []
        self.noted: list[int] = []  # tokens of steps behind which it is not asked
        self.noted_uses: list[npt.NDArray[np.integer]] = []
        self.prompts: list[tuple[npt.NDArray[np.integer], int]] = []  # used, slots
        self.next = Moves([], [])
        self.worth = np.zeros(ranks.shape)

    def note(self, used: Counts, rows: int) -> None:
        self.noted.append(rows)
        self.noted_uses.append(used)

    def after(self, used: Counts, rows: int, resident: Mask, slots: int) -> Moves:
        self.told.append((used, rows, resident, slots))
        moves, self.next = self.next, Moves([], [])
        return moves

    def behind_prompt(self, used: Counts, resident: Mask, slots: int) -> Moves:
        self.prompts.append((used, slots))
        moves, self.next = self.next, Moves([], [])
        return moves

    def heat(self) -> Heat:
        return self.worth.copy()


def residency_of(
    world: World, ranks: Ranks = NO_RANKS, *, device_fills: bool = False
) -> tuple[Residency, list[Told]]:
    assert world.ledger is not None
    made: list[Told] = []

    def make(ranks: Ranks) -> Told:
        made.append(Told(ranks))
        return made[-1]

    experts, say = world.ledger.experts, world.said.append
    return Residency(experts, ranks, make, say=say, device_fills=device_fills), made


def test_a_policy_knows_the_layers_of_its_size_and_nothing_else(world: World) -> None:
    assert world.ledger is not None
    arena = world.ledger.experts
    arena.use[:] = 9  # before
    ranks = np.arange(LAYERS * EXPERTS, dtype=np.int32).reshape(LAYERS, EXPERTS)
    residency, (small, large) = residency_of(world, ranks)
    assert small.ranks.tolist() == ranks[[0, 2]].tolist()
    assert large.ranks.tolist() == ranks[[1]].tolist()
    arena.fill([(0, 1), (1, 2), (2, 3)])
    arena.use[2, 3] += 4
    arena.use[1, 0] += 1
    residency.after(5)
    used, rows, resident, slots = small.told[0]
    assert used.tolist() == [[0, 0, 0, 0], [0, 0, 0, 4]]
    assert resident.tolist() == [[False, True, False, False], [False, False, False, True]]
    assert (rows, slots) == (5, 4)
    used, rows, resident, slots = large.told[0]
    assert used.tolist() == [[1, 0, 0, 0]]
    assert resident.tolist() == [[False, False, True, False]]
    assert (rows, slots) == (5, 2)
    residency.after(1)
    assert not small.told[1][0].any()


def test_steps_that_were_passed_over_are_told_together_with_the_next_one(world: World) -> None:
    assert world.ledger is not None
    arena = world.ledger.experts
    residency, (small, _) = residency_of(world)
    for rows in (1, 4):
        arena.use[0, 1] += rows
        residency.pass_over(rows)
    assert small.told == []
    arena.use[0, 1] += 2
    residency.after(2)
    used, rows, *_ = small.told[0]
    assert (used[0, 1], rows) == (7, 7)
    arena.use[0, 1] += 1
    residency.after(1)
    used, rows, *_ = small.told[1]
    assert (used[0, 1], rows) == (1, 1)


def test_whoever_asks_for_the_heat_hears_of_steps_that_were_passed_over(world: World) -> None:
    assert world.ledger is not None
    residency, (small, large) = residency_of(world)
    residency.heat()
    assert small.told == []
    world.ledger.experts.use[0, 1] += 3
    residency.pass_over(3)
    residency.heat()
    residency.heat()
    assert [told[1] for told in (*small.told, *large.told)] == [3, 3]


def test_what_is_decided_moves_nothing_until_it_is_carried_out(world: World) -> None:
    assert world.ledger is not None
    arena = world.ledger.experts
    arena.fill([(0, 1)])
    residency, (small, _) = residency_of(world)
    small.next = Moves([(0, 1)], [(1, 2)])
    moves = residency.decide(1)
    assert moves == Moves([(0, 1)], [(2, 2)])
    assert np.argwhere(arena.expert_tier == Tier.SLOT).tolist() == [[0, 1]]
    residency.carry_out(moves)
    assert np.argwhere(arena.expert_tier == Tier.SLOT).tolist() == [[2, 2]]
    world.check()


def test_behind_prompt_batches_the_host_fills_slots_that_a_device_fills_in_windows(
    world: World,
) -> None:
    assert world.ledger is not None
    arena = world.ledger.experts
    residency, (small, _) = residency_of(world, device_fills=True)
    small.next = Moves([], [(1, 2)])
    residency.after(1)
    assert (small.noted, small.told, small.prompts) == ([1], [], [])
    residency.after(500, routes_of(6))
    assert len(small.prompts) == 1
    assert np.argwhere(arena.expert_tier == Tier.SLOT).tolist() == [[2, 2]]


def routes_of(rows: int) -> npt.NDArray[np.int64]:
    """Return choices (rows, layers, 1): a row's are its number, in each layer one more."""
    return (np.arange(rows)[:, None, None] + np.arange(LAYERS)[:, None]) % EXPERTS


def test_policies_are_told_of_the_last_rows_of_a_prompt_batch_by_themselves(world: World) -> None:
    assert world.ledger is not None
    residency, (small, large) = residency_of(world)
    latest = routes_of(6)
    world.ledger.experts.use[:] += 9
    residency.after(40, latest)
    assert small.noted == large.noted == [34, 4, 2]
    assert small.noted_uses[1].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert small.noted_uses[2].tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]  # layers 0 and 2
    assert large.noted_uses[2].tolist() == [[0, 1, 1, 0]]
    (used, slots), *_ = small.prompts
    assert used.tolist() == [[9] * EXPERTS] * 2
    assert sum(small.noted_uses).tolist() == used.tolist()
    assert slots == 4
    residency.after(6, latest)  # none but the last rows
    assert small.noted[3:] == [4, 2]


def test_a_step_that_is_repeated_counts_once(world: World) -> None:
    assert world.ledger is not None
    residency, (small, _) = residency_of(world)
    for _ in range(3):  # of which two failed behind the routers
        world.ledger.experts.use[0] += [2, 1, 1, 0]
    residency.after(2)
    assert small.told[0][0][0].tolist() == [2, 2, 2, 0]


def test_who_leaves_is_read_in_place_and_who_comes_from_a_slot(world: World) -> None:
    assert world.ledger is not None
    arena = world.ledger.experts
    residency, (small, large) = residency_of(world)
    arena.fill([(0, 0), (0, 1), (2, 0), (2, 1), (1, 0), (1, 1)])
    assert not has_free_slots(arena)
    small.next = Moves([(0, 0), (1, 1)], [(1, 3), (1, 2)])
    large.next = Moves([(0, 1)], [(0, 3)])
    residency.after(1)
    for expert in [(0, 0), (2, 1), (1, 1)]:
        assert arena.expert_tier[expert] == Tier.IN_PLACE
    there = [(0, 1), (2, 0), (2, 3), (2, 2), (1, 0), (1, 3)]
    assert {owner_of(arena, slot) for slot in range(6)} == set(there)
    for layer, expert in there:
        overwrite(world.host.address + int(world.host.offsets[layer, expert]), 16)
        assert np.array_equal(world.named_blob(layer, expert), world.blob(layer, expert))
    for layer, expert in there:
        world.host_blob(layer, expert)[:] = world.blob(layer, expert)
    assert residency.inserted == 3
    assert residency.inserted_bytes == 2 * BLOBS[0] + BLOBS[1]


def test_a_copy_that_fails_leaves_slots_free_that_the_next_step_fills(world: World) -> None:
    assert world.ledger is not None
    arena = world.ledger.experts
    residency, (small, _) = residency_of(world)
    arena.fill([(0, 0), (0, 1), (2, 0), (2, 1), (1, 0), (1, 1)])
    small.next = Moves([(0, 0)], [(1, 3)])
    world.driver.faults.plan("copy_async", 1)
    residency.after(1)
    world.check()
    assert arena.resident == 5
    assert has_free_slots(arena)
    assert (residency.inserted, residency.inserted_bytes) == (0, 0)
    small.next = Moves([], [(1, 3)])
    residency.after(1)
    assert arena.resident == 6
    assert residency.inserted == 1


def test_copies_that_fail_are_one_line_until_one_succeeds(world: World) -> None:
    residency, (small, _) = residency_of(world)
    for fails in (True, True, False, True):
        world.driver.faults.plan(
            "copy_async", forever=fails
        ) if fails else world.driver.faults.lift()
        small.next = Moves([], [(0, 0), (0, 1)])
        if fails and residency.inserted:
            small.next = Moves([(0, 0)], [(0, 2)])
        residency.after(1)
    world.driver.faults.lift()
    assert residency.inserted == 2
    assert len(world.said) == 2
    for line in world.said:
        assert line.startswith("experts are read in place, a copy to a slot failed: copy_async")


def test_a_device_that_is_lost_while_experts_come_is_an_error() -> None:
    world = World(slots=2 * LAYERS)
    world.open()
    residency, (small, _) = residency_of(world)
    small.next = Moves([], [(0, 0)])
    world.driver.faults.plan("stream_synchronize", lost=True)
    with pytest.raises(DeviceLost):
        residency.after(1)
    world.driver.close()


def test_only_experts_that_found_a_slot_are_counted(world: World) -> None:
    residency, (small, _) = residency_of(world)
    small.next = Moves([], [(0, number) for number in range(EXPERTS)] + [(1, 0)])
    residency.after(1)
    assert residency.inserted == 4
    assert residency.inserted_bytes == 4 * BLOBS[0]
    small.next = Moves([], [(0, 0), (1, 1)])
    residency.after(1)
    assert (residency.inserted, residency.inserted_bytes) == (4, 4 * BLOBS[0])


def test_slots_are_counted_as_the_ledger_leaves_them(world: World) -> None:
    assert world.ledger is not None
    ledger, arena = world.ledger, world.ledger.experts
    residency, (small, large) = residency_of(world)
    seen = set()
    for chunks in range(ledger.plan.start.experts, -1, -1):
        ledger.carry_out(replace(ledger.holdings(), experts=chunks, spare=0))
        residency.after(1)
        sizes = [arena.layout.slot_bytes(slot) for slot in range(arena.usable_slots)]
        assert small.told[-1][3] == sizes.count(min(arena.layout.classes))
        assert large.told[-1][3] == sizes.count(max(arena.layout.classes))
        seen.add(len(sizes))
    assert seen == set(range(7))


# Heat, for the ledger.


def test_the_policy_says_who_is_colder_then_use_then_the_profile(world: World) -> None:
    assert world.ledger is not None
    arena = world.ledger.experts
    residency, (small, large) = residency_of(world)
    small.worth[:] = [[7, 5, 5, 5], [-9, 5, 5, 8]]  # layers 0 and 2
    large.worth[:] = [[0.25, 0, 0, 0]]
    arena.use[0] = [0, 3, 4, 4]
    arena.use[2] = [9, 4, 4, 0]
    arena.use[1] = [0, 0, 0, 1]
    arena.prior[2] = [0.9, 0.5, 0.0, 0.0]
    arena.prior[1] = [0.0, 0.5, 0.9, 0.0]
    heat = residency.heat()
    assert heat[[0, 2]].tolist() == [[4, 1, 2, 2], [0, 3, 2, 5]]
    assert heat[1].tolist() == [3, 0, 1, 2]


def last_used(ranks: Ranks) -> LeastRecent:
    return LeastRecent(*ranks.shape)


def test_slots_are_lost_and_come_back_in_the_order_of_the_policy(world: World) -> None:
    assert world.ledger is not None
    ledger, arena = world.ledger, world.ledger.experts
    residency = Residency(arena, NO_RANKS, last_used, say=world.said.append)
    ledger.heat = residency.heat
    for used, times in (
        ((0, 2), 5),
        ((0, 0), 3),
        ((2, 0), 2),
        ((0, 1), 1),
        ((2, 1), 1),
        ((1, 2), 5),
        ((1, 0), 2),
        ((1, 1), 1),
    ):
        for _ in range(times):
            arena.use[used] += 1
            residency.after(1)
    assert arena.resident == arena.usable_slots == 6
    there, reserve = arena.expert_tier == Tier.SLOT, ledger.reserve_bytes
    ledger.set_reserve(100 * UNIT)  # a slot of each layer is left
    assert np.argwhere(arena.expert_tier == Tier.SLOT).tolist() == [[0, 1], [1, 1], [2, 1]]
    ledger.set_reserve(reserve)  # (0, 2) and (1, 2) were used most often, and longest ago
    assert np.array_equal(arena.expert_tier == Tier.SLOT, there)


@pytest.mark.parametrize("make", [static, last_used, Insertion])
def test_who_leaves_first_when_slots_are_lost_is_who_the_policy_lets_leave_next(
    make: Callable[[Ranks], Policy],
) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        world = World(slots=2 * LAYERS, blobs=(BLOBS[0],) * LAYERS)
        ledger = world.open()
        arena = ledger.experts
        residency = Residency(arena, NO_RANKS, make, say=world.said.append)
        for _ in range(30):
            arena.use += rng.random((LAYERS, EXPERTS)) ** 4 > 0.5
            residency.after(1)
        heat, there = residency.heat(), arena.expert_tier == Tier.SLOT
        moves = exchanges(
            heat,
            there,
            ~there & (heat == heat[~there].max()),
            np.zeros_like(there),
            6,
            floor=0,
            margin=ANY_LEAD,
        )
        ledger.heat = residency.heat
        left = there
        while np.array_equal(left, there):
            ledger.carry_out(replace(ledger.holdings(), experts=ledger.holdings().experts - 1))
            left = arena.expert_tier == Tier.SLOT
        gone = heat[there & ~left]
        assert heat[moves.evicted[0]] == gone.min()
        assert gone.max() <= heat[left].min()
        world.check()
        world.end()


@pytest.mark.parametrize("make", [static, Insertion])
def test_policies_and_the_ledger_agree_whatever_happens(world: World, make: type) -> None:
    assert world.ledger is not None
    ledger, arena = world.ledger, world.ledger.experts
    residency = Residency(arena, NO_RANKS, make, say=world.said.append)
    ledger.heat = residency.heat
    rng = np.random.default_rng(0)
    for step in range(200):
        rows = int(rng.integers(1, 12))
        arena.use += (rng.random((LAYERS, EXPERTS)) ** 4 * (rows + 1)).astype(np.int64)
        residency.after(rows)
        if step % 9 == 0:
            chunks = int(rng.integers(0, ledger.plan.start.experts + 1))
            ledger.carry_out(replace(ledger.holdings(), experts=chunks))
        world.check()
    assert residency.inserted > 20
