"""The K/V in blocks: where a cell is, what sequences share, and that nothing unwritten is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from cache_world import CONTEXT, KV, SEQUENCES, StoredHeads, World, read_rows, rows_of, write_rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata_nb.addresses import memory_view
from strata_nb.cache.kv import KVCache
from strata_nb.cache.kv_layout import BLOCK_CELLS, HeadPlane, KVLayout, Part, blocks_for
from strata_nb.cache.plan import Holdings
from strata_nb.errors import ConfigError, DriverError, OutOfDeviceMemory, RuleViolation
from strata_nb.kernels.reference import dequantise_kv, quantise_kv

PARTS: tuple[Part, ...] = ("k", "v")


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.open()
    yield made
    made.check()
    made.end()


def kv_of(world: World) -> KVCache:
    assert world.ledger is not None
    return world.ledger.kv


def append(kv: KVCache, sequence: int, numbers: list[int]) -> None:
    """Take one step: room, the cells of every layer, and the count."""
    first = kv.length(sequence)
    kv.extend(sequence, len(numbers))
    for layer, part in itertools.product(range(KV.layers), PARTS):
        write_rows(kv, sequence, layer, part, first, rows_of(numbers, part, layer))
    kv.advance(sequence, len(numbers))


def holds(kv: KVCache, sequence: int, numbers: list[int]) -> bool:
    """Say whether a sequence reads back as these cells, in every layer."""
    if kv.length(sequence) != len(numbers):
        return False
    for layer, part in itertools.product(range(KV.layers), PARTS):
        read = read_rows(kv, sequence, layer, part, 0, len(numbers))
        wanted = rows_of(numbers, part, layer)
        if not all(map(np.array_equal, read, wanted)):
            return False
    return True


# Layout.


@pytest.mark.parametrize(("cache_type", "bytes_a_cell"), [("f16", 2048), ("int8", 1056)])
def test_a_cell_of_two_heads_of_256_takes_what_is_published(
    cache_type: str, bytes_a_cell: int
) -> None:
    plane = HeadPlane(cache_type, 256)
    layout = KVLayout(layers=1, kv_heads=2, key=plane, value=plane)
    assert layout.block_bytes == BLOCK_CELLS * bytes_a_cell
    assert layout.bytes_for(65) == 2 * layout.block_bytes


@pytest.mark.parametrize("types", [("f16", "f16"), ("int8", "int8"), ("f16", "int8")])
@pytest.mark.parametrize("length", [8, 64, 80, 128])
def test_planes_tile_a_block_and_are_aligned(types: tuple[str, str], length: int) -> None:
    key, value = (HeadPlane(each, length) for each in types)
    layout = KVLayout(layers=3, kv_heads=2, key=key, value=value)
    end = 0
    for layer, part, head in itertools.product(range(3), PARTS, range(2)):
        plane = layout.plane(part)
        start = layout.part_offset(layer, part) + head * plane.size_bytes
        assert start == end
        assert start % 64 == 0
        assert plane.scales_offset == 64 * length * (1 if plane.cache_type == "int8" else 2)
        assert plane.groups == (-(-length // 64) if plane.cache_type == "int8" else 0)
        end = start + plane.scales_offset + 64 * plane.groups * 2
    assert end == layout.block_bytes


def test_a_type_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="q4_0") as refused:
        HeadPlane("q4_0", 64)
    assert "f16, int8" in refused.value.hint


def test_a_cell_is_where_the_layout_says(world: World) -> None:
    kv = kv_of(world)
    sequence = kv.open_sequence()
    numbers = list(range(130))
    append(kv, sequence, numbers)
    for cell, layer, head in ((0, 0, 0), (63, 1, 1), (64, 0, 1), (129, 1, 0)):
        block, row = int(kv.table[sequence, cell // 64]), cell % 64
        for part in PARTS:
            plane, wanted = KV.plane(part), rows_of([cell], part, layer)
            start = block + KV.part_offset(layer, part) + head * plane.size_bytes
            size = plane.length * plane.value_type.itemsize
            values = memory_view(start + row * size, size).view(plane.value_type)
            assert np.array_equal(values, wanted.values[0, head])
            at = start + plane.scales_offset + row * plane.groups * 2
            scales = memory_view(at, plane.groups * 2).view(np.float16)
            assert np.array_equal(scales, wanted.scales[0, head])


@pytest.mark.parametrize("length", [8, 64, 80])
def test_quantised_cells_read_back_as_the_reference_rounds_them(length: int) -> None:
    plane = HeadPlane("int8", length)
    layout = KVLayout(layers=2, kv_heads=3, key=plane, value=plane)
    memory = np.full(2 * layout.block_bytes, 0xFF, np.uint8)
    world = World(blobs=())
    kv = KVCache(layout, context=128, sequences=1, driver=world.driver, stream=world.stream)
    kv.place(memory.ctypes.data)
    kv.resize(memory.size)
    heads = np.random.default_rng(length).standard_normal((100, 3, length)).astype(np.float32)
    sequence = kv.open_sequence()
    kv.extend(sequence, 100)
    write_rows(kv, sequence, 1, "v", 0, StoredHeads(*quantise_kv(heads)))
    kv.advance(sequence, 100)
    read = read_rows(kv, sequence, 1, "v", 0, 100)
    assert np.array_equal(dequantise_kv(*read), dequantise_kv(*quantise_kv(heads)))
    assert np.array_equal(read_rows(kv, sequence, 1, "v", 60, 8).values, read.values[60:68])
    world.end()


# Sequences.


def test_sequences_keep_their_cells_apart(world: World) -> None:
    kv = kv_of(world)
    first, second = kv.open_sequence(), kv.open_sequence()
    for step in range(10):
        append(kv, first, [step * 10 + row for row in range(7)])
        append(kv, second, [1000 + step])
    assert holds(kv, first, [step * 10 + row for step in range(10) for row in range(7)])
    assert holds(kv, second, [1000 + step for step in range(10)])


def test_a_table_row_names_blocks_in_order_and_nothing_behind_them(world: World) -> None:
    kv = kv_of(world)
    table = kv.table
    sequence = kv.open_sequence()
    append(kv, sequence, list(range(129)))
    row = table[sequence]
    assert table.shape == (SEQUENCES, blocks_for(CONTEXT))
    assert np.count_nonzero(row[:3]) == len(set(row[:3].tolist())) == 3
    assert not row[3:].any()
    kv.rewind(sequence, 64)
    assert np.count_nonzero(row) == 1
    kv.close_sequence(sequence)
    assert not table.any()
    assert kv.table is table


def test_cells_without_room_are_not_counted_as_written(world: World) -> None:
    kv = kv_of(world)
    sequence = kv.open_sequence()
    kv.extend(sequence, 3)
    with pytest.raises(RuleViolation, match=r"rule 14.*4 cells written, room was for 3"):
        kv.advance(sequence, 4)
    append(kv, sequence, [1, 2, 3])
    kv.rewind(sequence, 2)
    with pytest.raises(RuleViolation, match="rule 14"):
        kv.advance(sequence, 1)


def test_there_is_room_where_no_block_has_to_be_taken(world: World) -> None:
    kv = kv_of(world)
    sequence = kv.open_sequence()
    assert not kv.has_room(sequence, 1)
    append(kv, sequence, list(range(62)))
    changes = kv.blocks.changes
    assert [kv.has_room(sequence, cells) for cells in (1, 2, 3)] == [True, True, False]
    kv.extend(sequence, 2)
    assert kv.blocks.changes == changes
    kv.extend(sequence, 3)
    assert kv.blocks.changes == changes + 1
    assert kv.has_room(sequence, 66)
    kv.rewind(sequence, 60)
    other = kv.fork(sequence, 60)
    assert not kv.has_room(sequence, 1)  # the block is another's too
    kv.close_sequence(other)
    assert kv.has_room(sequence, 1)


def test_there_is_no_room_beyond_the_context(world: World) -> None:
    kv = kv_of(world)
    sequence = kv.open_sequence()
    append(kv, sequence, list(range(CONTEXT - 1)))
    assert kv.has_room(sequence, 1)
    assert not kv.has_room(sequence, 2)


def test_a_step_that_is_not_counted_never_was(world: World) -> None:
    kv = kv_of(world)
    sequence = kv.open_sequence()
    append(kv, sequence, list(range(63)))
    kv.extend(sequence, 3)
    write_rows(kv, sequence, 0, "k", 63, rows_of([7, 7, 7], "k", 0))
    append(kv, sequence, [63])
    assert holds(kv, sequence, list(range(64)))
    kv.rewind(sequence, 64)
    assert np.count_nonzero(kv.table[sequence]) == 1


def test_a_fork_shares_blocks_and_copies_one_only_when_it_is_written(world: World) -> None:
    kv = kv_of(world)
    one = kv.open_sequence()
    append(kv, one, list(range(100)))
    free, copies = kv.free_cells, world.driver.faults.calls["copy_async"]
    two = kv.fork(one, 100)
    assert kv.free_cells == free
    assert np.array_equal(kv.table[one], kv.table[two])
    assert world.driver.faults.calls["copy_async"] == copies
    append(kv, two, [500, 501])
    assert kv.free_cells == free - BLOCK_CELLS
    assert kv.table[one, 0] == kv.table[two, 0]
    assert kv.table[one, 1] != kv.table[two, 1]
    append(kv, one, [600])
    assert world.driver.faults.calls["copy_async"] == copies + 1
    assert holds(kv, one, [*range(100), 600])
    assert holds(kv, two, [*range(100), 500, 501])
    kv.close_sequence(one)
    assert holds(kv, two, [*range(100), 500, 501])


def test_a_fork_takes_away_room_that_was_given_before(world: World) -> None:
    kv = kv_of(world)
    one = kv.open_sequence()
    append(kv, one, [1, 2, 3])
    kv.extend(one, 200)
    two = kv.fork(one, 2)
    assert np.count_nonzero(kv.table) == 2
    with pytest.raises(RuleViolation, match="rule 14"):
        kv.advance(one, 1)
    append(kv, two, [9])
    assert holds(kv, one, [1, 2, 3])
    assert holds(kv, two, [1, 2, 9])


def test_writing_into_a_shared_block_after_a_rewind_leaves_the_other_alone(world: World) -> None:
    kv = kv_of(world)
    one = kv.open_sequence()
    append(kv, one, list(range(70)))
    two = kv.fork(one, 70)
    kv.rewind(one, 10)
    append(kv, one, [800])
    assert holds(kv, one, [*range(10), 800])
    assert holds(kv, two, list(range(70)))


def test_blocks_that_run_out_are_refused_and_nothing_changes(world: World) -> None:
    kv = kv_of(world)
    one, two = kv.open_sequence(), kv.open_sequence()
    cells = kv.free_cells
    append(kv, one, list(range(200)))
    with pytest.raises(OutOfDeviceMemory, match=r"K/V is full.*cells 320, free 256"):
        kv.extend(two, cells - 200)
    assert kv.length(two) == 0
    append(kv, two, [5])
    three = kv.fork(one, 200)
    append(kv, two, [6] * (kv.free_cells + 63))
    with pytest.raises(OutOfDeviceMemory, match="cells 64, free 0"):
        kv.extend(three, 1)  # the shared block has room, but would have to be copied
    kv.close_sequence(two)
    append(kv, three, [7])
    assert holds(kv, one, list(range(200)))


def test_the_context_and_the_number_of_sequences_have_an_end(world: World) -> None:
    kv = kv_of(world)
    sequences = [kv.open_sequence() for _ in range(SEQUENCES)]
    with pytest.raises(ConfigError, match="4 sequences are open"):
        kv.open_sequence()
    append(kv, sequences[0], [3] * 20)
    with pytest.raises(ConfigError, match="context has 400"):
        kv.extend(sequences[0], CONTEXT - 19)
    with pytest.raises(ConfigError, match="cannot rewind to 21"):
        kv.rewind(sequences[0], 21)
    with pytest.raises(ConfigError, match="cannot fork at 21"):
        kv.fork(sequences[0], 21)
    kv.close_sequence(sequences[2])
    assert kv.open_sequence() == sequences[2]


@pytest.mark.parametrize("operation", ["copy_async", "stream_synchronize"])
def test_a_copy_that_fails_changes_nothing(world: World, operation: str) -> None:
    kv = kv_of(world)
    one = kv.open_sequence()
    append(kv, one, [1, 2, 3])
    two = kv.fork(one, 3)
    free = kv.free_cells
    world.driver.faults.plan(operation)
    with pytest.raises(DriverError, match="on request"):
        kv.extend(two, 1)
    assert kv.free_cells == free
    world.check()
    append(kv, two, [4])
    assert holds(kv, one, [1, 2, 3])
    assert holds(kv, two, [1, 2, 3, 4])


def test_the_end_of_the_blocks_can_be_given_up_only_when_nobody_holds_it(world: World) -> None:
    kv = kv_of(world)
    low, high = kv.open_sequence(), kv.open_sequence()
    append(kv, low, [1])
    append(kv, high, [2])
    usable = kv.usable_blocks
    with pytest.raises(RuleViolation, match="rule 16"):
        kv.resize(KV.block_bytes)
    assert kv.usable_blocks == usable
    kv.close_sequence(high)
    kv.resize(2 * KV.block_bytes - 1)
    assert kv.usable_blocks == 1
    assert kv.free_cells == 0
    kv.resize(usable * KV.block_bytes)
    assert kv.free_cells == (usable - 1) * BLOCK_CELLS


def test_low_blocks_are_given_out_first_so_that_the_end_becomes_free(world: World) -> None:
    kv = kv_of(world)
    sequences = [kv.open_sequence() for _ in range(3)]
    for sequence in sequences:
        append(kv, sequence, [1] * 65)
    lowest = kv.table[sequences[0]][:2].copy()
    for sequence in (sequences[1], sequences[0]):
        kv.close_sequence(sequence)
    again = kv.open_sequence()
    append(kv, again, [2] * 65)
    assert np.array_equal(kv.table[again][:2], lowest)


# check_integrity


def exchange_an_address(kv: KVCache) -> None:
    kv.blocks[0, 0] = kv.table[1, 1]


def leave_an_address_behind(kv: KVCache) -> None:
    kv.blocks[0, 5] = kv.table[0, 0]


def count_a_holder_too_many(kv: KVCache) -> None:
    kv._holders[kv._open[0].blocks[0]] += 1


def free_a_block_that_is_held(kv: KVCache) -> None:
    kv._free.append(kv._open[0].blocks[0])


def forget_a_free_block(kv: KVCache) -> None:
    kv._free.pop()


def give_room_in_a_shared_block(kv: KVCache) -> None:
    kv._open[0].room += 1


def count_cells_without_blocks(kv: KVCache) -> None:
    kv._open[1].length = kv._open[1].room = 129


def count_cells_without_room(kv: KVCache) -> None:
    kv._open[1].room = 0


@pytest.mark.parametrize(
    "damage",
    [
        exchange_an_address,
        leave_an_address_behind,
        count_a_holder_too_many,
        free_a_block_that_is_held,
        forget_a_free_block,
        give_room_in_a_shared_block,
        count_cells_without_blocks,
        count_cells_without_room,
    ],
)
def test_a_table_that_is_wrong_is_found(damage: Callable[[KVCache], None]) -> None:
    world = World()
    ledger = world.open()
    for length in (100, 100):
        append(ledger.kv, ledger.kv.open_sequence(), [1] * length)
    ledger.kv.fork(0, 90)
    ledger.check_integrity()
    damage(ledger.kv)
    with pytest.raises(RuleViolation):
        ledger.check_integrity()
    world.driver.close()


def test_a_block_without_memory_is_found(world: World) -> None:
    kv = kv_of(world)
    assert world.ledger is not None
    append(kv, kv.open_sequence(), [1] * 400)
    append(kv, kv.open_sequence(), [1] * 64)
    range_ = world.ledger._chunks.ranges["kv"]
    range_.retire(1)
    with pytest.raises(RuleViolation, match="rule 16"):
        world.ledger.check_integrity()
    range_.reinstate()


class Sequences(RuleBasedStateMachine):
    """Do anything with sequences in any order, while the K/V grows and shrinks and copies fail."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.ledger = self.world.open()
        self.kv = self.ledger.kv
        self.cells: dict[int, list[int]] = {}
        self.numbers = itertools.count(1)

    def pick(self, number: int) -> int:
        return sorted(self.cells)[number % len(self.cells)]

    def some(self) -> bool:
        return bool(self.cells)

    def forkable(self) -> bool:
        return 0 < len(self.cells) < SEQUENCES

    @precondition(lambda self: len(self.cells) < SEQUENCES)
    @rule()
    def open(self) -> None:
        self.cells[self.kv.open_sequence()] = []

    @precondition(some)
    @rule(number=st.integers(0, 3), count=st.sampled_from([0, 1, 2, 5, 63, 64, 65, 130]))
    def extend(self, number: int, count: int) -> None:
        sequence = self.pick(number)
        numbers = list(itertools.islice(self.numbers, count))
        try:
            append(self.kv, sequence, numbers)
        except (ConfigError, DriverError):
            return
        self.cells[sequence] += numbers

    @precondition(some)
    @rule(number=st.integers(0, 3), count=st.integers(0, 70))
    def begin_a_step_that_is_forgotten(self, number: int, count: int) -> None:
        sequence = self.pick(number)
        try:
            self.kv.extend(sequence, count)
        except (ConfigError, DriverError):
            return
        first = self.kv.length(sequence)
        write_rows(self.kv, sequence, 0, "k", first, rows_of([0] * count, "k", 0))

    @precondition(some)
    @rule(number=st.integers(0, 3), share=st.floats(0, 1))
    def rewind(self, number: int, share: float) -> None:
        sequence = self.pick(number)
        length = int(len(self.cells[sequence]) * share)
        self.kv.rewind(sequence, length)
        del self.cells[sequence][length:]

    @precondition(forkable)
    @rule(number=st.integers(0, 3), share=st.sampled_from([0.0, 0.4, 1.0]))
    def fork(self, number: int, share: float) -> None:
        sequence = self.pick(number)
        length = int(len(self.cells[sequence]) * share)
        self.cells[self.kv.fork(sequence, length)] = self.cells[sequence][:length]

    @precondition(some)
    @rule(number=st.integers(0, 3))
    def close(self, number: int) -> None:
        sequence = self.pick(number)
        self.kv.close_sequence(sequence)
        del self.cells[sequence]

    @rule(kv=st.integers(0, 63), experts=st.integers(0, 19))
    def move_memory(self, kv: int, experts: int) -> None:
        plan = self.ledger.plan
        kv, experts = min(kv, plan.kv_chunks), min(experts, plan.arena_chunks)
        held = [held for entry in self.kv.table for held in entry.tolist() if held]
        kv_base = self.ledger._chunks.ranges["kv"].base
        end = max((address + KV.block_bytes - kv_base for address in held), default=0)
        kv = max(kv, -(-end // plan.chunk_bytes))
        if kv + experts <= plan.capacity:
            with suppress(DriverError):
                self.ledger.carry_out(Holdings(experts=experts, kv=kv))
                self.ledger.experts.fill(np.ndindex(3, 4))

    @rule(
        operation=st.sampled_from(["copy_async", "stream_synchronize", "map", "set_access"]),
        nth=st.integers(1, 3),
    )
    def let_a_call_fail(self, operation: str, nth: int) -> None:
        self.world.driver.faults.lift()
        self.world.driver.faults.plan(operation, nth)

    @invariant()
    def everything_reads_back_and_adds_up(self) -> None:
        self.world.check()
        for sequence, numbers in self.cells.items():
            assert holds(self.kv, sequence, numbers)

    def teardown(self) -> None:
        self.world.end()


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=25, stateful_step_count=30, derandomize=True)
