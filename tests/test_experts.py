"""Experts in slots and in host memory: sizes, tables, what may be written when."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cache_world import BLOBS, EXPERTS, World, ledger_of, overwrite, owner_of
from driver_contract import held_stream

from strata_nb.addresses import memory_view
from strata_nb.cache.experts import ExpertArena, HostArena, Tier
from strata_nb.cache.slots import BLOB_ALIGNMENT, SlotLayout, slot_budget
from strata_nb.errors import ConfigError, DriverError, RuleViolation
from strata_nb.options import expert_cache_size
from strata_nb.shared_tables import SharedTable

ALL = list(np.ndindex(len(BLOBS), EXPERTS))


@pytest.fixture
def world() -> Iterator[World]:
    """A device with 7 of 12 slots: two rounds and the first slot of the third."""
    made = World(slots=7)
    made.open()
    yield made
    made.check()
    made.end()


def arena_of(world: World) -> ExpertArena:
    return ledger_of(world).experts


# Slots.


def test_slots_follow_each_other_aligned_and_every_round_serves_every_layer() -> None:
    layout = SlotLayout((5000, 9000, 5000, 512), 3)
    end = 0
    for slot in range(layout.full_slots):
        layer = slot % 4
        assert layout.offset(slot) == end
        assert end % BLOB_ALIGNMENT == 0
        assert 0 <= layout.slot_bytes(slot) - layout.blob_bytes[layer] < BLOB_ALIGNMENT
        assert layout.class_of_slot(slot) == layout.class_of_layer[layer]
        end += layout.slot_bytes(slot)
        assert layout.bytes_of(slot + 1) == end
    assert layout.classes == [512, 5120, 9216]


def test_the_slots_of_a_prefix_are_those_that_lie_in_it_whole() -> None:
    layout = SlotLayout((5000, 9000, 512), 3)
    for arena_bytes in range(0, layout.bytes_of(9) + 10_000, 256):
        slots = layout.slots_within(arena_bytes)
        assert layout.bytes_of(slots) <= arena_bytes
        assert slots == 9 or layout.bytes_of(slots + 1) > arena_bytes
    assert SlotLayout((), 0).slots_within(1 << 40) == 0
    assert SlotLayout((), 0).bytes_of(0) == 0


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("auto", None),
        ("0", 0),
        ("5", 5),
        ("13", 12),
        ("50%", 6),
        ("12.5%", 1),
        ("100%", 12),
        ("1GiB", 12),
        ("0.015625MiB", 2),
    ],
)
def test_the_size_of_the_cache_is_slots_a_share_or_bytes(text: str, slots: int | None) -> None:
    assert slot_budget(expert_cache_size(text), SlotLayout(BLOBS, EXPERTS)) == slots


@pytest.mark.parametrize(
    "text", ["", "some", "-1", "1.5", "101%", "nan%", "5 GiB", "1GB", "٣", "1e3", "0x10"]
)
def test_another_size_of_the_cache_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--expert-cache") as refused:
        expert_cache_size(text)
    assert "N%" in refused.value.hint


# Residency.


def test_without_a_slot_an_expert_is_read_in_place(world: World) -> None:
    arena = arena_of(world)
    assert arena.resident == 0
    assert (arena.expert_tier == Tier.IN_PLACE).all()
    assert np.array_equal(arena.expert_address, world.host.address + world.host.offsets)
    assert arena.expert_address.dtype == np.int64
    assert arena.expert_tier.dtype == np.uint8


def test_experts_are_brought_in_in_the_order_given_while_their_size_has_slots(
    world: World,
) -> None:
    arena = arena_of(world)
    tables = arena.expert_address, arena.expert_tier
    order = [(2, 3), (2, 2), (1, 0), (2, 1), (2, 3), (2, 0), (1, 2), (1, 3), (0, 0), (0, 1)]
    assert arena.fill(order) == 7
    # 5 slots of layers 0 and 2, whose experts are of one size, and 2 of layer 1.
    resident = {(2, 3), (2, 2), (2, 1), (2, 0), (0, 0), (1, 0), (1, 2)}
    assert set(zip(*map(np.ndarray.tolist, np.nonzero(arena.expert_tier == 0)), strict=True)) == (
        resident
    )
    assert {owner_of(arena, slot) for slot in range(7)} == resident
    assert arena.fill(ALL) == 0
    assert tables[0] is arena.expert_address
    assert tables[1] is arena.expert_tier


def test_who_was_used_or_ranked_comes_first_and_then_everybody_else(world: World) -> None:
    arena = arena_of(world)
    arena.use[2, 3], arena.use[0, 1] = 5, 9
    arena.prior[1, 2] = 0.5
    known = [(0, 1), (2, 3), (1, 2)]
    assert arena.hottest(arena.heat()) == known + [who for who in ALL if who not in known]
    heat = np.zeros(arena.use.shape)  # a policy's
    heat[1, 2], heat[0, 0] = 1.0, 2.0
    assert arena.hottest(heat)[:4] == [(1, 2), (0, 1), (2, 3), (0, 0)]
    arena.fill(known)
    assert arena.hottest(heat) == [who for who in ALL if who not in known]
    assert arena.fill(arena.hottest(heat)) == 4  # a slot that is free is of no use
    assert arena.resident == 7


def test_slots_are_real_and_nobody_reads_the_host_for_what_is_in_one(world: World) -> None:
    arena = arena_of(world)
    arena.fill(ALL)
    for layer, expert in ALL:
        resident = arena.expert_tier[layer, expert] == Tier.SLOT
        where = "slot" if resident else "host"
        overwrite(world.host_blob(layer, expert).ctypes.data, BLOBS[layer])
        intact = np.array_equal(world.named_blob(layer, expert), world.blob(layer, expert))
        assert intact == (where == "slot")
        world.host_blob(layer, expert)[:] = world.blob(layer, expert)
    for layer, expert in ALL:
        if arena.expert_tier[layer, expert] == Tier.SLOT:
            overwrite(int(arena.expert_address[layer, expert]), BLOBS[layer])
            assert (world.named_blob(layer, expert) == 0xFF).all()
            arena.evict(layer, expert)
            assert np.array_equal(world.named_blob(layer, expert), world.blob(layer, expert))


def test_an_expert_is_evicted_and_another_takes_its_slot_after_draining(world: World) -> None:
    arena = arena_of(world)
    arena.fill(ALL)
    slot = arena.evict(1, 0)
    assert owner_of(arena, slot) is None
    assert arena.fill([(1, 3)]) == 0
    world.check()
    arena.reclaim()
    assert arena.fill([(1, 3)]) == 1
    assert owner_of(arena, slot) == (1, 3)
    assert arena.resident == 7


def test_only_an_expert_in_a_slot_is_evicted(world: World) -> None:
    arena = arena_of(world)
    arena.fill([(0, 0)])
    with pytest.raises(RuleViolation, match="rule 9"):
        arena.evict(0, 1)


def test_slots_that_are_lost_return_their_experts_to_the_host(world: World) -> None:
    arena = arena_of(world)
    arena.fill(ALL)
    layout = arena.layout
    in_last = [owner_of(arena, slot) for slot in (4, 5, 6)]
    arena.resize(layout.bytes_of(4))
    assert arena.usable_slots == 4
    assert arena.resident == 4
    for expert in in_last:
        assert expert is not None
        assert arena.expert_tier[expert] == Tier.IN_PLACE
    world.check()
    # They come back, but work from before may still read them: nothing is written yet.
    arena.resize(layout.bytes_of(7))
    assert arena.fill(ALL) == 0
    world.check()
    arena.reclaim()
    assert arena.fill(ALL) == 3


def test_free_slots_that_are_lost_are_not_given_out(world: World) -> None:
    arena = arena_of(world)
    arena.resize(arena.layout.bytes_of(3))
    assert arena.fill(ALL) == 3
    arena.resize(arena.layout.bytes_of(12))
    assert arena.usable_slots == 7
    assert arena.fill(ALL) == 4


@pytest.mark.parametrize("operation", ["copy_async", "stream_synchronize"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_fill_that_fails_leaves_every_expert_in_place(
    world: World, operation: str, nth: int
) -> None:
    arena = arena_of(world)
    world.driver.faults.plan(operation, nth if operation == "copy_async" else 1)
    with pytest.raises(DriverError, match="on request"):
        arena.fill(ALL)
    assert arena.resident == 0
    world.check()
    assert arena.fill(ALL) == 7


def blobs_up_to(world: World, expert: tuple[int, int]) -> tuple[int, int]:
    """Return address and bytes of the beginning of the host arena, up to this expert's end."""
    end = int(world.host.offsets[expert]) + BLOBS[expert[0]]
    return world.host.address, end


def test_experts_come_as_their_blobs_do_and_are_named_when_all_are_there(world: World) -> None:
    arena = arena_of(world)
    order = [(2, 1), (0, 3), (0, 0), (1, 2), (1, 0)]
    assert world.host.offsets[0, 3] < world.host.offsets[1, 0] < world.host.offsets[2, 1]
    filling = arena.begin_fill(order)
    blob = memory_view(world.host.address + int(world.host.offsets[2, 1]), BLOBS[2])
    wanted = blob.copy()
    blob[:] = 0xFF  # not there yet
    filling.copy(*blobs_up_to(world, (1, 3)))
    world.driver.stream_synchronize(world.stream)
    assert (arena.expert_tier == Tier.IN_PLACE).all()
    blob[:] = wanted
    filling.copy(*blobs_up_to(world, (2, EXPERTS - 1)))
    assert filling.finish() == 5
    assert arena.resident == 5
    world.check()  # the bytes too
    slots = np.argsort([arena.expert_address[expert] for expert in order[1:3]])
    assert slots.tolist() == [0, 1]  # of one size: the first of the order has the lower slot


@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_filling_that_fails_half_way_leaves_every_expert_in_place(world: World, nth: int) -> None:
    arena = arena_of(world)
    filling = arena.begin_fill(ALL[::2])
    world.driver.faults.plan("copy_async", nth)
    parts = [blobs_up_to(world, (layer, EXPERTS - 1)) for layer in range(len(BLOBS))]
    with pytest.raises(DriverError, match="on request"):
        deque(itertools.starmap(filling.copy, parts))
    assert arena.resident == 0
    world.check()
    assert arena.fill(ALL) == 7


@pytest.mark.parametrize("copied", [False, True])
def test_a_filling_whose_slots_are_lost_is_refused(world: World, copied: bool) -> None:
    arena = arena_of(world)
    filling = arena.begin_fill(ALL)
    if copied:
        filling.copy(world.host.address, world.host.size_bytes)
    arena.resize(0)
    last = filling.finish if copied else lambda: filling.copy(0, 1 << 62)
    with pytest.raises(RuleViolation, match="rule 7"):
        last()
    arena.resize(arena.layout.bytes_of(7))
    assert arena.resident == 0


def test_a_filling_writes_to_no_slot_that_another_expert_got(world: World) -> None:
    arena = arena_of(world)
    filling = arena.begin_fill([(0, 0)])
    arena.fill([(0, 1)])
    with pytest.raises(RuleViolation, match="rule 7"):
        filling.copy(world.host.address, world.host.size_bytes)
    assert arena.resident == 1
    world.check()


class InterruptedTable(SharedTable):
    """A table whose n-th write is interrupted, as by Ctrl-C."""

    left = 0

    def __setitem__(self, place: object, value: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        super().__setitem__(place, value)


@pytest.mark.parametrize("name", ["addresses", "tiers"])
def test_a_filling_that_is_interrupted_while_it_names_experts_names_none(
    world: World, name: str
) -> None:
    arena = arena_of(world)
    table = getattr(arena, name)
    interrupted = InterruptedTable(table.receive())
    interrupted.left = 1
    setattr(arena, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        arena.fill([(0, 1), (1, 1), (2, 2)])
    setattr(arena, name, table)
    assert arena.resident == 0
    world.check()
    assert arena.fill(ALL) == 7
    world.check()


def test_an_arena_is_complete_when_every_expert_has_a_slot(world: World) -> None:
    arena = arena_of(world)
    assert not arena.is_complete
    arena.fill(ALL)
    assert not arena.is_complete  # there are fewer slots than experts
    true = arena.expert_tier.copy()
    arena.tiers[:] = Tier.SLOT
    assert arena.is_complete
    arena.tiers[:] = true
    assert not arena.is_complete


def test_without_slots_everything_is_read_in_place() -> None:
    world = World(slots=0)
    ledger = world.open()
    assert ledger.experts.fill(ALL) == 0
    assert ledger.describe().slots == 0
    world.check()
    world.end()


def test_what_a_device_decided_is_taken_over_and_no_change_of_the_hosts(world: World) -> None:
    arena = arena_of(world)
    arena.fill([(0, 0), (0, 1)])
    slot, other = arena.expert_address[0, :2].tolist()
    changes, addresses = arena.addresses.changes, arena.expert_address.copy()
    free = arena.free_slots()[1][0]
    addresses[0, :3] = slot, arena.homes[0, 1], other  # 2 came for 1
    addresses[1, 2] = free
    came = arena.adopt(addresses)
    assert np.argwhere(came).tolist() == [[0, 2], [1, 2]]
    assert np.array_equal(arena.expert_address, addresses)
    assert arena.addresses.changes == changes
    assert (arena.resident, arena.filled) == (3, 2)
    assert free not in np.concatenate(arena.free_slots())
    ledger_of(world).check_integrity()
    addresses[1, 2] = arena.homes[1, 2]  # and nobody came
    assert not arena.adopt(addresses).any()
    assert free in np.concatenate(arena.free_slots())
    ledger_of(world).check_integrity()
    arena.forget()
    assert arena.resident == 0
    assert arena.addresses.changes > changes


def test_slots_that_a_device_must_not_name_are_refused(world: World) -> None:
    arena = arena_of(world)
    arena.fill([(0, 0), (0, 1)])
    before = arena.expert_address.copy()
    held, home = int(before[0, 0]), int(arena.homes[0, 2])
    lost = held + arena.layout.offset(9) - arena.layout.offset(0)  # behind the last of 7
    for address in (held, held + 256, lost, home + 256):
        addresses = before.copy()
        addresses[0, 2] = address
        with pytest.raises(RuleViolation, match="cannot be used"):
            arena.adopt(addresses)
        assert np.array_equal(arena.expert_address, before)
    slot = arena.evict(0, 1)  # which is draining: a window before may read it
    addresses = arena.expert_address.copy()
    addresses[0, 2] = held + arena.layout.offset(slot) - arena.layout.offset(0)
    with pytest.raises(RuleViolation, match="cannot be used"):
        arena.adopt(addresses)
    arena.reclaim()


def test_blobs_that_are_not_aligned_are_refused(world: World) -> None:
    offsets = world.host.offsets + 16
    host = HostArena(world.host.address, world.host.size_bytes, offsets)
    with pytest.raises(RuleViolation, match="rule 16"):
        ExpertArena(
            SlotLayout(BLOBS, EXPERTS), host, max_slots=0, driver=world.driver, stream=world.stream
        )


# check_integrity


def name_another_slot(arena: ExpertArena) -> None:
    arena.addresses[2, 0] = arena.expert_address[2, 0] + 256


def name_another_place_of_the_host(arena: ExpertArena) -> None:
    arena.addresses[2, 3] = arena.expert_address[2, 2]


def set_a_tier_that_is_not_true(arena: ExpertArena) -> None:
    arena.tiers[2, 3] = Tier.SLOT


def name_one_slot_twice(arena: ExpertArena) -> None:
    arena.addresses[0, 1], arena.tiers[0, 1] = arena.expert_address[2, 0], Tier.SLOT


def book_two_slots_for_one_expert(arena: ExpertArena) -> None:
    arena._owner[0] = arena._owner[2]
    arena._free[0].remove(0)


def book_an_expert_that_left(arena: ExpertArena) -> None:
    arena.addresses[2, 0] = arena._in_place[2, 0]
    arena.tiers[2, 0] = Tier.IN_PLACE


def book_an_expert_that_is_not_there(arena: ExpertArena) -> None:
    arena._owner[3] = len(BLOBS) * EXPERTS
    arena._free[0].remove(3)


def lose_slots_that_are_held(arena: ExpertArena) -> None:
    arena._free = [[], []]
    arena.usable_slots = 1
    arena._draining = {0}


def free_a_slot_that_is_held(arena: ExpertArena) -> None:
    arena._free[0].append(2)


def forget_a_free_slot(arena: ExpertArena) -> None:
    arena._free[0].pop()


def forget_the_end_of_the_host_arena(arena: ExpertArena) -> None:
    object.__setattr__(arena._host, "size_bytes", arena._host.size_bytes - 4000)


@pytest.mark.parametrize(
    "damage",
    [
        name_another_slot,
        name_another_place_of_the_host,
        set_a_tier_that_is_not_true,
        name_one_slot_twice,
        book_two_slots_for_one_expert,
        book_an_expert_that_left,
        book_an_expert_that_is_not_there,
        lose_slots_that_are_held,
        free_a_slot_that_is_held,
        forget_a_free_slot,
        forget_the_end_of_the_host_arena,
    ],
)
def test_tables_that_are_wrong_are_found(damage: Callable[[ExpertArena], None]) -> None:
    world = World(slots=7)
    ledger = world.open()
    ledger.experts.fill([(0, 0), (2, 0), (1, 1)])  # in the slots 0, 2 and 1
    ledger.experts.evict(0, 0)
    ledger.experts.reclaim()
    ledger.check_integrity()
    damage(ledger.experts)
    with pytest.raises(RuleViolation):
        ledger.check_integrity()
    world.driver.close()


def test_a_slot_without_memory_is_found(world: World) -> None:
    ledger = ledger_of(world)
    ledger.experts.fill(ALL)
    ledger._chunks.ranges["experts"].retire(1)
    with pytest.raises(RuleViolation, match="rule 16"):
        ledger.check_integrity()
    ledger._chunks.ranges["experts"].reinstate()


def test_a_slot_is_published_after_its_copy_has_landed(world: World) -> None:
    arena = arena_of(world)
    seen: list[int] = []
    world.driver.launch_host(world.stream, lambda: seen.append(arena.resident))
    original = world.driver.copy_async

    def copy_async(destination: int, source: int, size: int, stream: int) -> None:
        original(destination, source, size, stream)
        world.driver.launch_host(world.stream, lambda: seen.append(arena.resident))

    world.driver.copy_async = copy_async  # type: ignore[method-assign]
    arena.fill(ALL[:3])
    assert seen == [0, 0, 0, 0]
    assert arena.resident == 3


def test_a_slot_is_not_written_while_older_work_may_read_it(world: World) -> None:
    arena = arena_of(world)
    arena.fill(ALL)
    with held_stream(world.driver) as (_, end):
        slot = arena.evict(1, 0)
        assert arena.fill([(1, 3)]) == 0
        end()
    arena.reclaim()
    assert arena.fill([(1, 3)]) == 1
    assert owner_of(arena, slot) == (1, 3)
