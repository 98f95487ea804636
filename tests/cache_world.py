"""A small device with everything that a ledger needs: for the tests of strata_nb.cache.

Two kinds of layers whose experts have different sizes, so that there are two size classes and slots
that straddle chunks, and K/V blocks that straddle chunks as well.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.addresses import memory_view
from strata_nb.cache.capacity import Ledger
from strata_nb.cache.experts import NOBODY, ExpertArena, HostArena
from strata_nb.cache.kv import KVCache
from strata_nb.cache.kv_layout import BLOCK_CELLS, HeadPlane, KVLayout, Part
from strata_nb.cache.plan import Needs, Plan, plan_device
from strata_nb.cache.slots import BLOB_ALIGNMENT, SlotLayout
from strata_nb.host import HostDriver
from strata_nb.host_memory import DeviceAccount, HostDevice

UNIT = 4096
BLOBS = (5000, 9000, 5000)
EXPERTS = 4
KV = KVLayout(layers=2, kv_heads=2, key=HeadPlane("f16", 8), value=HeadPlane("int8", 80))
CONTEXT = 400  # cells, not a whole number of blocks
SEQUENCES = 4


class World:
    """One device of `chunks` chunks of 4 KiB, a host arena, and a ledger that is not open yet."""

    def __init__(
        self,
        chunks: int = 66,
        *,
        kv_cells: int = 512,
        kv_most_cells: int = 640,
        slots: int | None = None,
        blobs: tuple[int, ...] = BLOBS,
        loan_bytes: int = 0,
    ) -> None:
        self.budget_bytes = chunks * UNIT
        self.driver = HostDriver([HostDevice(self.budget_bytes, UNIT, UNIT)])
        self.said: list[str] = []
        self.stream = self.driver.stream_create(0)
        self.layout = SlotLayout(blobs, EXPERTS)
        offsets, size = host_offsets(blobs, EXPERTS)
        self.host = HostArena(self.driver.allocate_host(max(size, 1)), size, offsets)
        for layer, expert in np.ndindex(offsets.shape):
            self.host_blob(layer, expert)[:] = self.blob(layer, expert)
        self.needs = Needs(
            dense_bytes=UNIT,
            reserve_bytes=UNIT,
            kv=KV,
            kv_cells=kv_cells,
            kv_most_cells=kv_most_cells,
            slots=self.layout if blobs else None,
            slots_wanted=slots,
            loan_bytes=loan_bytes,
        )
        self.ledger: Ledger | None = None

    def plan(self) -> Plan:
        return plan_device(self.driver, 0, self.needs)

    def make(self) -> Ledger:
        """Make the ledger; it takes no memory."""
        plan = self.plan()
        kv = KVCache(
            KV, context=CONTEXT, sequences=SEQUENCES, driver=self.driver, stream=self.stream
        )
        experts = ExpertArena(
            self.layout,
            self.host,
            max_slots=plan.most_slots,
            driver=self.driver,
            stream=self.stream,
        )
        self.ledger = Ledger(self.driver, 0, plan, kv, experts, say=self.said.append)
        return self.ledger

    def open(self) -> Ledger:
        ledger = self.make()
        ledger.open()
        return ledger

    def blob(self, layer: int, expert: int) -> npt.NDArray[np.uint8]:
        """Return what an expert's blob was made of."""
        return _blob_of(layer, expert, self.layout.blob_bytes[layer])

    def host_blob(self, layer: int, expert: int) -> npt.NDArray[np.uint8]:
        offset = int(self.host.offsets[layer, expert])
        return memory_view(self.host.address + offset, self.layout.blob_bytes[layer])

    def named_blob(self, layer: int, expert: int) -> npt.NDArray[np.uint8]:
        """Return the bytes at the address that the table names, as a kernel would read them."""
        assert self.ledger is not None
        address = int(self.ledger.experts.expert_address[layer, expert])
        return memory_view(address, self.layout.blob_bytes[layer])

    def check(self) -> None:
        """Compare tables, accounts, the driver's own books, and the bytes of every expert."""
        if self.ledger is None:
            return
        self.ledger.check_integrity()
        account = self.ledger.account()
        parts = account.experts + account.kv + account.loan + account.spare + account.stuck
        assert parts + account.given_back == account.capacity
        chunks = self.driver.account(0).chunks
        assert chunks == account.capacity - account.given_back
        assert chunks * self.ledger.plan.chunk_bytes <= self.budget_bytes - UNIT  # dense weights
        for layer, expert in np.ndindex(self.host.offsets.shape):
            assert np.array_equal(self.named_blob(layer, expert), self.blob(layer, expert))

    def live(self) -> dict[str, int]:
        """Return what exists beside the stream and the host arena."""
        live = self.driver.live()
        return {kind: live[kind] for kind in live.keys() - {"streams", "events", "blocks"}}

    def end(self) -> None:
        """Close twice and make sure that nothing is left."""
        self.driver.faults.lift()
        if self.ledger is not None:
            self.ledger.close()
            self.ledger.close()
            self.check()
            assert self.ledger.account().given_back == self.ledger.plan.capacity
        assert self.live() == {}
        assert self.driver.account(0) == DeviceAccount(0, 0, 0)
        self.driver.close()


@cache
def _blob_of(layer: int, expert: int, size: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng([layer, expert])
    return rng.integers(0, 250, size, np.uint8)  # nothing that is 0xFF


def overwrite(address: int, size: int) -> None:
    """Destroy bytes the way recycled memory would be."""
    ctypes.memset(address, 0xFF, size)


class StoredHeads(NamedTuple):
    """Hold cells of one layer and part as they are stored, rows first.

    values   (cells, kv heads, head length), as the cache type has them
    scales   (cells, kv heads, groups) float16; no groups where the values are floats
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[np.float16]


def write_rows(
    kv: KVCache, sequence: int, layer: int, part: Part, first: int, rows: StoredHeads
) -> None:
    """Store cells first, first + 1, ... of a layer where the table says, as a kernel would."""
    for row, (values, scales) in enumerate(zip(*rows, strict=True)):
        stored = _cell(kv, sequence, layer, part, first + row)
        stored.values[...], stored.scales[...] = values, scales


def read_rows(
    kv: KVCache, sequence: int, layer: int, part: Part, first: int, count: int
) -> StoredHeads:
    """Return a copy of `count` cells of a layer from where the table says."""
    plane, heads = kv.layout.plane(part), kv.layout.kv_heads
    values = np.empty((count, heads, plane.length), plane.value_type)
    scales = np.empty((count, heads, plane.groups), plane.scale_type)
    for row in range(count):
        values[row], scales[row] = _cell(kv, sequence, layer, part, first + row)
    return StoredHeads(values, scales)


def _cell(kv: KVCache, sequence: int, layer: int, part: Part, cell: int) -> StoredHeads:
    """Return a view of a cell: values (kv heads, head length), scales (kv heads, groups)."""
    plane, heads = kv.layout.plane(part), kv.layout.kv_heads
    index, row = divmod(cell, BLOCK_CELLS)
    block = int(kv.table[sequence, index])
    assert block, f"cell {cell} has no block"
    address = block + kv.layout.part_offset(layer, part)
    by_head = memory_view(address, heads * plane.size_bytes).reshape(heads, plane.size_bytes)
    values = by_head[:, : plane.scales_offset].view(plane.value_type)
    scales = by_head[:, plane.scales_offset :].view(plane.scale_type)
    return StoredHeads(
        values[:, row * plane.length : (row + 1) * plane.length],
        scales[:, row * plane.groups : (row + 1) * plane.groups],
    )


def rows_of(numbers: list[int], part: str, layer: int) -> StoredHeads:
    """Return cells that each number stands for, different in every layer and part."""
    plane = KV.key if part == "k" else KV.value
    values = np.empty((len(numbers), KV.kv_heads, plane.length), plane.value_type)
    scales = np.empty((len(numbers), KV.kv_heads, plane.groups), np.float16)
    for row, number in enumerate(numbers):
        values[row], scales[row] = _row_of(number, part, layer)
    return StoredHeads(values, scales)


@cache
def _row_of(number: int, part: str, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    plane = KV.key if part == "k" else KV.value
    rng = np.random.default_rng([number, layer, ord(part)])
    values = rng.integers(-127, 128, (KV.kv_heads, plane.length))
    return values, rng.random((KV.kv_heads, plane.groups))


def owner_of(arena: ExpertArena, slot: int) -> tuple[int, int] | None:
    """Return layer and number of the expert in a slot, or None."""
    number = int(arena._owner[slot])
    return None if number == NOBODY else divmod(number, arena.layout.experts)


def slots_at_start(plan: Plan) -> int:
    """Return how many expert slots a plan begins with."""
    if plan.needs.slots is None:
        return 0
    within = plan.needs.slots.slots_within(plan.start.experts * plan.chunk_bytes)
    return min(plan.most_slots, within)


def has_free_slots(arena: ExpertArena) -> bool:
    """Say whether any slot could take an expert of its size."""
    return any(arena._free)


def ledger_of(world: World) -> Ledger:
    """Return the ledger of a world that has one."""
    assert world.ledger is not None
    return world.ledger


def host_offsets(blob_bytes: tuple[int, ...], experts: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return offsets (layers, experts) of blobs one behind the other, and the size of them all."""
    sizes = np.array(blob_bytes, np.int64) + (BLOB_ALIGNMENT - 1)
    sizes = np.repeat(sizes // BLOB_ALIGNMENT * BLOB_ALIGNMENT, experts)
    ends = np.cumsum(sizes)
    return (ends - sizes).reshape(len(blob_bytes), experts), int(sizes.sum())
