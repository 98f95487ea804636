"""Divide a device's memory between dense weights, reserve, K/V and expert slots; arithmetic only.

The K/V comes first, experts take what is left: without a cell nothing runs, without a slot an
expert is read in place. What does not fit is refused with the whole sum.

A limit makes a device smaller: it counts as one of so many bytes, and all that is in use on it lies
within them, whoever uses it. Who opened a context before cannot be told from other programs, so
nothing is left out that might be ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strata_nb.cache.kv_layout import BLOCK_CELLS, KVLayout
from strata_nb.cache.slots import SlotLayout
from strata_nb.errors import ConfigError
from strata_nb.vmm import MemoryDriver, choose_chunk_bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """Say what a device is to hold.

    dense_bytes     weights and buffers beside the ledger, still to be allocated
    outside_bytes   that the driver will take for modules, graphs and page tables
    reserve_bytes   that stay free for others
    kv, kv_cells    the K/V and how many cells of it are there from the start, in all sequences
    kv_most_cells   that it may ever have: addresses are reserved for them
    slots           of experts; None where none are kept (a dense model, experts read in place)
    slots_wanted    None: as many as there is room for
    loan_bytes      that a prompt may borrow beyond the slots, if nobody else needs them
    limit_bytes     that the device counts as having; None: all that it has
    """

    dense_bytes: int
    reserve_bytes: int
    kv: KVLayout
    kv_cells: int
    kv_most_cells: int
    slots: SlotLayout | None
    slots_wanted: int | None = None
    outside_bytes: int = 0
    limit_bytes: int | None = None
    loan_bytes: int = 0

    @property
    def beside_bytes(self) -> int:
        """What is taken beside the ledger."""
        return self.dense_bytes + self.outside_bytes


@dataclass(frozen=True, slots=True)
class Holdings:
    """Say how many chunks each owner has; what is left of the capacity is given back.

    experts   mapped from the beginning of the arena
    loan      mapped behind those, lent to whoever reads a prompt
    kv        mapped from the beginning of the K/V
    spare     that no address names, to be mapped next
    """

    experts: int = 0
    kv: int = 0
    loan: int = 0
    spare: int = 0

    @property
    def chunks(self) -> int:
        return self.experts + self.kv + self.loan + self.spare


@dataclass(frozen=True, slots=True)
class Plan:
    """Say how a device is cut up.

    capacity        chunks that the ledger may ever have: what is asked for, or what the device
                    beside dense weights holds, also where others have a part of it now
    start           what is mapped at the start
    in_use_bytes    of the device before anything was taken: contexts, other programs
    kv_reach        chunks that the K/V can grow to beside the floor, as others are now
    start_slots, most_slots   that there are at the start, and may ever be
    floor_chunks    of the arena that hold one slot a layer
    arena_chunks, kv_chunks   that addresses are reserved for
    loan_chunks     the same, behind the arena's, for a loan alone
    """

    needs: Needs
    chunk_bytes: int
    capacity: int
    start: Holdings
    in_use_bytes: int
    kv_reach: int
    start_slots: int
    most_slots: int
    floor_chunks: int
    arena_chunks: int
    kv_chunks: int
    loan_chunks: int = 0

    def chunks_for_blocks(self, blocks: int) -> int:
        """Return how many chunks hold the first `blocks` K/V blocks."""
        return -(-blocks * self.needs.kv.block_bytes // self.chunk_bytes)


class Memory(NamedTuple):
    """Say how much memory a device has, within a limit.

    free_bytes     below 0 where more than the limit is in use
    total_bytes    the limit, or all
    device_bytes   all
    """

    free_bytes: int
    total_bytes: int
    device_bytes: int

    @property
    def in_use_bytes(self) -> int:
        """What is in use, whoever uses it."""
        return self.total_bytes - self.free_bytes


def memory_within(driver: MemoryDriver, device: int, limit_bytes: int | None) -> Memory:
    """Look at a device's memory as if there were `limit_bytes` at most; raises DriverError."""
    free, total = driver.mem_info(device)
    beyond = 0 if limit_bytes is None else max(0, total - limit_bytes)
    return Memory(free - beyond, total - beyond, total)


def plan_device(driver: MemoryDriver, device: int, needs: Needs) -> Plan:
    """Plan for what is free on a device now; raises ConfigError where the needs do not fit.

    Chunks are sized for what the ledger can ever hold, so that a small model has small ones.
    """
    free_bytes, total_bytes, _ = memory_within(driver, device, needs.limit_bytes)
    most_bytes = needs.kv.bytes_for(needs.kv_most_cells)
    if needs.slots is not None:
        most_bytes += needs.slots.bytes_of(needs.slots.full_slots)
    ledger_bytes = min(most_bytes, free_bytes - needs.beside_bytes - needs.reserve_bytes)
    chunk_bytes = choose_chunk_bytes(driver, device, max(1, ledger_bytes))
    return plan_capacity(needs, free_bytes, total_bytes, chunk_bytes)


def plan_capacity(needs: Needs, free_bytes: int, total_bytes: int, chunk_bytes: int) -> Plan:
    """Divide `free_bytes` of a device: dense weights, reserve, K/V, and slots for the rest.

    Both sizes are within the limit, see `memory_within`.

    The floor is one expert slot a layer. ConfigError with the whole sum where the needs, or the
    floor, or the slots that were asked for do not fit.
    """

    def chunks(size: int) -> int:
        return -(-size // chunk_bytes)

    slots = needs.slots if needs.slots_wanted != 0 else None
    least = 0 if slots is None else needs.slots_wanted or slots.layers
    if slots is not None and least < slots.layers:
        raise ConfigError(
            f"{least} expert slots: a model of {slots.layers} layers needs one for each",
            hint=f"give --expert-cache auto, {slots.layers} or more, or 0 to read all in place",
        )
    kv = chunks(needs.kv.bytes_for(needs.kv_cells))
    arena = chunks(slots.bytes_of(least)) if slots is not None else 0
    room = max(0, free_bytes - needs.beside_bytes - needs.reserve_bytes) // chunk_bytes
    if kv + arena > room:
        raise _does_not_fit(needs, free_bytes, total_bytes, chunk_bytes, kv, arena, least)
    if slots is not None and needs.slots_wanted is None:
        least = slots.slots_within((room - kv) * chunk_bytes)
        arena = chunks(slots.bytes_of(least))
    most_slots, floor = 0, 0
    if slots is not None:
        most_slots = needs.slots_wanted or slots.full_slots
        floor = chunks(slots.bytes_of(slots.layers))
    kv_chunks = chunks(needs.kv.bytes_for(needs.kv_most_cells))
    arena_chunks = chunks(slots.bytes_of(most_slots)) if slots is not None else 0
    beside_dense = max(0, total_bytes - needs.beside_bytes) // chunk_bytes
    loan_chunks = chunks(needs.loan_bytes)
    return Plan(
        needs,
        chunk_bytes,
        capacity=min(beside_dense, kv_chunks + arena_chunks + loan_chunks),
        start=Holdings(experts=arena, kv=kv),
        in_use_bytes=total_bytes - free_bytes,
        kv_reach=min(kv_chunks, room - floor),
        start_slots=0 if slots is None else least,
        most_slots=most_slots,
        floor_chunks=floor,
        arena_chunks=arena_chunks,
        kv_chunks=kv_chunks,
        loan_chunks=loan_chunks,
    )


def sum_refusal(
    title: str, parts: Sequence[tuple[int, str]], there: tuple[int, str], hint: str
) -> ConfigError:
    """Make a refusal that shows a sum.

    parts   bytes that are needed, and what for
    there   bytes that there are, and which
    """
    needed, (there_bytes, _) = sum(size for size, _ in parts), there
    lines = [
        *(part for part in parts if part[0]),
        (needed, "needed"),
        there,
        (needed - there_bytes, "missing"),
    ]
    text = "\n".join(f"{size:16,}  {name}" for size, name in lines)
    return ConfigError(f"{title}, in bytes:\n{text}", hint=hint)


def _does_not_fit(
    needs: Needs,
    free_bytes: int,
    total_bytes: int,
    chunk_bytes: int,
    kv: int,
    arena: int,
    slots: int,
) -> ConfigError:
    """Make the refusal: every line of the sum, and what would make it smaller."""
    parts = [
        (needs.dense_bytes, "dense weights and buffers"),
        (needs.outside_bytes, "driver, modules and graphs"),
        (needs.reserve_bytes, "kept free for others"),
        (kv * chunk_bytes, f"K/V of {needs.kv_cells:,} cells"),
        (arena * chunk_bytes, f"{slots:,} expert slots"),
    ]
    there = (free_bytes, "free on the device")
    is_limited = needs.limit_bytes == total_bytes  # and not more than there is
    if is_limited:
        parts.insert(0, (total_bytes - free_bytes, "in use before: the context, other programs"))
        there = (total_bytes, "allowed by --vram-limit")
    needed = sum(size for size, _ in parts)
    free_bytes, _ = there
    rest = free_bytes - (needed - kv * chunk_bytes)
    blocks = rest // chunk_bytes * chunk_bytes // needs.kv.block_bytes
    unrounded = needed - (kv + arena) * chunk_bytes + needs.kv.bytes_for(needs.kv_cells)
    floor = arena
    if needs.slots is not None:
        unrounded += needs.slots.bytes_of(slots)
        floor = -(-needs.slots.bytes_of(needs.slots.layers) // chunk_bytes)
    fits_without_reserve = needs.reserve_bytes > 0 and needed - needs.reserve_bytes <= free_bytes
    if unrounded <= free_bytes and not fits_without_reserve:  # a card's chunks are as they are
        hint = f"give smaller chunks: these have {chunk_bytes:,} bytes, of which a part stays empty"
    elif blocks > 0:
        hint = f"give --ctx-size {blocks * BLOCK_CELLS} or less"
    elif floor < arena and needed - (arena - floor) * chunk_bytes <= free_bytes:
        hint = "give --expert-cache auto"
    elif fits_without_reserve:
        most = (free_bytes - needed + needs.reserve_bytes) >> 20
        hint = f"give --vram-reserve-mib {most} or less"
    else:
        mib = -(-needed // (1 << 20))
        device = f"--vram-limit {mib}MiB" if is_limited else f"a device of {mib:,} MiB"
        hint = f"{device} or more, a smaller --ctx-size, or a smaller file"
    return sum_refusal("the model does not fit", parts, there, hint)
