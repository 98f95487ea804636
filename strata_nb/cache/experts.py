"""Keep as many experts on a device as there is memory for, and say where each one is.

    host arena    every expert's blob, in memory that the device can read
    slots         copies of some of them on the device

    expert_address[layer, expert]   where kernels read the blob: its slot, or its place in the arena
    expert_tier[layer, expert]      who that is: `Tier`

A kernel reads through the same pointer in both cases, so where an expert is cannot change a result.
An expert that has no slot is not an error: it is read in place, over the link.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from strata_nb.cache.moves import choose_moves
from strata_nb.cache.slots import BLOB_ALIGNMENT, SlotLayout
from strata_nb.errors import RuleViolation
from strata_nb.execution import ExecutionDriver
from strata_nb.shared_tables import SharedTable
from strata_nb.tracing import Announce

NOBODY = -1
NOWHERE = -1

Copy = Callable[[int, int, int, int], object]  # to, from, bytes, stream: as `copy_async` has them


class Tier(IntEnum):
    """Say who computes an expert's rows, and from where."""

    SLOT = 0  # this device, from its own memory
    IN_PLACE = 1  # this device, reading host memory


@dataclass(frozen=True)
class HostArena:
    """Say where every expert's blob lies in host memory that the device can read.

    address      of the first byte
    size_bytes   of the arena
    offsets      int64 (layers, experts), of each blob, multiples of 256
    """

    address: int
    size_bytes: int
    offsets: npt.NDArray[np.int64]


class ExpertArena:
    """Own the slots of one device and the tables that kernels read.

    expert_address, expert_tier   int64 and uint8 (layers, experts): where each expert is. The
              arrays stay the same objects, written through `addresses` and `tiers` alone,
              which count their changes
    use       int64 (layers, experts): how often each was chosen
    prior     float64 (layers, experts), 0 to less than 1: an order among those used equally often
    tally     int64 (2,): choices that found a slot (hits), and that did not (misses)
    filled    how many experts the device has brought to slots itself, in the window that missed
              them (`filling.py`)

    A slot is free, or holds one expert, or is *draining*: its expert left, and work that began
    before may still read it. The caller says when that has ended (`reclaim`); before, nothing is
    written to it [7]. No driver call but `fill`, `begin_fill` and `move`, which copy. What comes
    into a slot or leaves one is announced (docs/trace.md).
    """

    def __init__(
        self,
        layout: SlotLayout,
        host: HostArena,
        *,
        max_slots: int,
        driver: ExecutionDriver,
        stream: int,
        announce: Announce | None = None,
        copy: Copy | None = None,
    ) -> None:
        """`copy`: what `copy_from_host` does where the driver cannot read the host arena."""
        if np.any((host.address + host.offsets) % BLOB_ALIGNMENT):
            raise RuleViolation(16, f"the host arena has blobs not aligned to {BLOB_ALIGNMENT}")
        self.layout = layout
        self.addresses = SharedTable(host.address + host.offsets)
        self.tiers = SharedTable(np.full(host.offsets.shape, Tier.IN_PLACE, np.uint8))
        self.expert_address, self.expert_tier = self.addresses.array, self.tiers.array
        self.use = np.zeros(host.offsets.shape, np.int64)
        self.prior = np.zeros(host.offsets.shape)
        self.tally = np.zeros(2, np.int64)
        self.filled = 0
        self.usable_slots = 0
        self._complete = -1, False  # as of so many changes of the tiers
        self._host = host
        self._in_place = self.expert_address.copy()
        self._owner = np.full(max_slots, NOBODY, np.int64)  # slot -> layer * experts + expert
        self._free: list[list[int]] = [[] for _ in layout.classes]  # a heap for each size class
        self._draining: set[int] = set()
        self._base = 0
        self._slot_addresses = self.layout.offsets(np.arange(max_slots))
        self._driver = driver
        self._stream = stream
        self._copy = copy
        self._announce = announce

    # For the ledger.

    def place(self, base: int) -> None:
        """Take the first address of the reservation; nothing of it is usable yet."""
        self._base = base
        self._slot_addresses = base + self.layout.offsets(np.arange(len(self._owner)))

    def resize(self, usable_bytes: int) -> None:
        """Use the slots that lie whole in the first `usable_bytes`, and name no other.

        Experts of slots that are lost are read in place from now on.
        """
        usable = min(len(self._owner), self.layout.slots_within(usable_bytes))
        lost = np.arange(usable, self.usable_slots)
        self._evict(lost[self._owner[lost] != NOBODY])
        for slot in range(self.usable_slots, usable):
            if slot not in self._draining:
                self._free[self.layout.class_of_slot(slot)].append(slot)
        if usable != self.usable_slots:
            self._free = [[slot for slot in free if slot < usable] for free in self._free]
            for free in self._free:
                heapq.heapify(free)
        self.usable_slots = usable

    def heat(self) -> npt.NDArray[np.float64]:
        """Return how much each expert (layers, experts) is worth where no policy says it."""
        return self.use + self.prior

    def hottest(self, heat: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
        """Return the experts without a slot: who was used or ranked, hottest first, then the rest.

        Those that were neither follow in the order of layer and number: a slot that is free is of
        no use to anybody.
        """
        away = self.expert_tier == Tier.IN_PLACE
        known = away & (self.heat() > 0)
        order = np.argsort(np.where(known, -heat, np.inf), axis=None, kind="stable")
        order = order[away.ravel()[order]]
        layers, experts = np.divmod(order, max(1, self.layout.experts))
        return list(zip(layers.tolist(), experts.tolist(), strict=True))

    def moves_into(self, usable_bytes: int, heat: npt.NDArray[np.float64]) -> dict[int, int]:
        """Return which experts should move (slot: slot) before only `usable_bytes` stay.

        heat   of each expert (layers, experts)
        """
        kept = min(len(self._owner), self.layout.slots_within(usable_bytes))
        owner = self._owner[: self.usable_slots]
        if kept >= len(owner):
            return {}
        of_slot = np.append(heat.ravel(), -np.inf)[owner]  # the last is nobody's
        return choose_moves(of_slot, kept, self.layout)

    def make_way(self, moves: Mapping[int, int]) -> None:
        """Evict the experts in the slots that others will move to; those slots are draining."""
        targets = np.array(list(moves.values()), np.int64)
        self._evict(targets[self._owner[targets] != NOBODY])

    def move(self, moves: Mapping[int, int]) -> None:
        """Copy experts from slot to free slot, wait, and let the tables name the copies.

        The slots that they left are draining. On DriverError all are where they were.
        """
        free = [set(slots) for slots in self._free]
        for source, target in moves.items():
            if target not in free[self.layout.class_of_slot(source)] or self._owner[source] < 0:
                raise RuleViolation(7, f"from slot {source} to slot {target}, which is not free")
            size = self.layout.blob_bytes[self._expert_in(source)[0]]
            self._driver.copy_async(
                self._base + self.layout.offset(target),
                self._base + self.layout.offset(source),
                size,
                self._stream,
            )
        if not moves:
            return
        self._driver.stream_synchronize(self._stream)
        sources, targets = (np.array(list(ends), np.int64) for ends in (moves, moves.values()))
        numbers = self._owner[sources]
        taken = set(targets.tolist())
        self._free = [[slot for slot in slots if slot not in taken] for slots in self._free]
        for slots in self._free:
            heapq.heapify(slots)
        self._owner[targets], self._owner[sources] = numbers, NOBODY
        self._draining.update(sources.tolist())
        self.addresses[self._where(numbers)] = self._base + self.layout.offsets(targets)
        self._tell("move", numbers, targets)

    def reclaim(self) -> None:
        """Free the draining slots: all work that began before now has ended."""
        for slot in self._draining:
            if slot < self.usable_slots:
                heapq.heappush(self._free[self.layout.class_of_slot(slot)], slot)
        self._draining.clear()

    # Residency.

    @property
    def resident(self) -> int:
        """How many experts have a slot."""
        return int(np.count_nonzero(self._owner != NOBODY))

    @property
    def is_complete(self) -> bool:
        """Whether every expert has a slot; counted again only where tiers have changed."""
        changes, complete = self._complete
        if changes != self.tiers.changes:
            changes = self.tiers.changes
            complete = bool(np.all(self.expert_tier == Tier.SLOT))
            self._complete = changes, complete
        return complete

    def fill(self, order: Iterable[tuple[int, int]]) -> int:
        """Give experts (layer, number) free slots of their size, in this order.

        Returns how many were brought in. Experts that have a slot, or find none, are passed over.
        The order is that of a profile, or of first use. All or nothing: on DriverError none of
        them is resident and their slots are free.
        """
        filling = self.begin_fill(order)
        filling.copy(self._host.address, self._host.size_bytes)
        return filling.finish()

    def begin_fill(self, order: Iterable[tuple[int, int]]) -> Filling:
        """Choose slots as `fill` does, for blobs that are not all in the host arena yet.

        Before it is finished nothing else may bring experts in, and no slot may be lost.
        """
        pairs = np.array(list(order), np.int64).reshape(-1, 2)
        numbers, first = np.unique(pairs @ [self.layout.experts, 1], return_index=True)
        numbers = numbers[np.argsort(first)]
        numbers = numbers[self.expert_tier.ravel()[numbers] != Tier.SLOT]
        classes = self.layout.classes_of_layers(numbers // max(1, self.layout.experts))
        slots = np.full(len(numbers), NOWHERE, np.int64)
        for size_class, free in enumerate(self._free):
            coming = np.flatnonzero(classes == size_class)[: len(free)]
            slots[coming] = sorted(free)[: len(coming)]  # the lowest slot comes first
        placed = slots != NOWHERE
        return Filling(self, numbers[placed], slots[placed])

    def copy_from_host(self, target: int, source: int, size: int, stream: int) -> None:
        """Begin to copy from the host arena, with the arguments of the driver's `copy_async`."""
        (self._copy or self._driver.copy_async)(target, source, size, stream)

    def evict(self, layer: int, expert: int) -> int:
        """Let the tables name the host's copy again; returns the slot, which is draining."""
        if self.expert_tier[layer, expert] != Tier.SLOT:
            raise RuleViolation(9, f"expert {expert} of layer {layer} has no slot")
        slots = np.flatnonzero(self._owner == layer * self.layout.experts + expert)
        self._evict(slots)
        return int(slots[0])

    def _evict(self, slots: npt.NDArray[np.int64]) -> None:
        """Let the tables name the host's copies of the experts in these slots."""
        if not len(slots):
            return
        numbers = self._owner[slots]
        places = self._where(numbers)
        self.addresses[places] = self._in_place[places]
        self.tiers[places] = Tier.IN_PLACE
        self._owner[slots] = NOBODY
        self._draining.update(slots.tolist())
        self._tell("evict", numbers, slots)

    def check_integrity(self, covers: Callable[[int, int], bool]) -> None:
        """Raise RuleViolation unless every address in the table is right.

        covers   whether an address and a size lie in memory that tables may name
        """
        slot_of = {int(owner): slot for slot, owner in enumerate(self._owner) if owner != NOBODY}
        if len(slot_of) != self.resident:
            raise RuleViolation(3, f"an expert has two slots: {self._owner.tolist()}")
        for layer, expert in np.ndindex(self.expert_address.shape):
            where = f"expert {expert} of layer {layer}"
            address, size = int(self.expert_address[layer, expert]), self.layout.blob_bytes[layer]
            slot = slot_of.pop(layer * self.layout.experts + expert, None)
            if (slot is None) != (self.expert_tier[layer, expert] == Tier.IN_PLACE):
                raise RuleViolation(
                    16, f"{where}: tier {self.expert_tier[layer, expert]}, slot {slot}"
                )
            if slot is None:
                end = address + size - self._host.address
                if (
                    address != self._in_place[layer, expert]
                    or not size <= end <= self._host.size_bytes
                ):
                    raise RuleViolation(
                        16, f"{where}: {address:#x} is not its place in the host arena"
                    )
            elif (
                slot >= self.usable_slots
                or address != self._base + self.layout.offset(slot)
                or size > self.layout.slot_bytes(slot)
                or not covers(address, size)
            ):
                raise RuleViolation(16, f"{where}: {address:#x} is not slot {slot}, or not usable")
        if slot_of:
            raise RuleViolation(9, f"slots of no expert: {slot_of}")
        idle = [*self._draining, *(slot for free in self._free for slot in free)]
        held = np.flatnonzero(self._owner != NOBODY).tolist()
        below = sorted(slot for slot in [*idle, *held] if slot < self.usable_slots)
        if below != list(range(self.usable_slots)) or len(set(idle)) != len(idle):
            raise RuleViolation(9, f"{self.usable_slots} slots: held {held}, idle {idle}")

    # Where the device decides who comes (`filling.py`).

    @property
    def homes(self) -> npt.NDArray[np.int64]:
        """Return where each expert (layers, experts) is in host memory; not to be written."""
        return self._in_place

    def free_slots(self, passed: Collection[int] = ()) -> list[npt.NDArray[np.int64]]:
        """Return addresses of free slots for each layer, none of those in `passed`.

        A slot is for the layer that it has its size from, and so for one layer only. No layer at
        all where none is free.
        """
        if not any(self._free):
            return []
        slots = np.array(sorted(slot for free in self._free for slot in free), np.int64)
        addresses, layers = self._slot_addresses[slots], slots % self.layout.layers
        if passed:
            kept = ~np.isin(addresses, list(passed))
            addresses, layers = addresses[kept], layers[kept]
        order = np.argsort(layers, kind="stable")
        ends = np.cumsum(np.bincount(layers, minlength=self.layout.layers))
        return np.split(addresses[order], ends[:-1])

    def adopt(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Take over where experts (layers, experts) are, as the device has decided.

        Returns who came. The tables say so without a change being counted: the device has it.
        Raises RuleViolation for an address that is neither an expert's home nor a slot to use, or
        that two experts have; nothing has changed then.
        """
        came = np.zeros(addresses.shape, bool)
        numbers = np.flatnonzero(addresses != self.expert_address)
        if not len(numbers):
            return came
        old, new, homes = (
            table.ravel()[numbers] for table in (self.expert_address, addresses, self._in_place)
        )
        coming = new != homes
        left = np.searchsorted(self._slot_addresses, old[old != homes])
        slots = np.searchsorted(self._slot_addresses, new[coming])
        taken, free_again = set(slots.tolist()), set(left.tolist())
        may_take = [slot for slot in taken if self._may_take(slot, free_again)]
        if len(may_take) < len(slots) or np.any(self._slot_addresses[slots] != new[coming]):
            wrong = [f"{address:#x}" for address in new[coming].tolist()]
            raise RuleViolation(16, f"a device named slots, of which some cannot be used: {wrong}")
        before = self._owner[left]
        self._owner[left] = NOBODY
        self._owner[slots] = numbers[coming]
        self._set_free(free_again, taken)
        self._complete = -1, False
        self.addresses.receive().ravel()[numbers] = new
        self.tiers.receive().ravel()[numbers] = np.where(coming, Tier.SLOT, Tier.IN_PLACE)
        self._tell("evict", before, left, by="kernel")
        self._tell("fill", numbers[coming], slots, by="kernel")
        self.filled += len(slots)
        came.ravel()[numbers[coming]] = True
        return came

    def _may_take(self, slot: int, left: Collection[int]) -> bool:
        """Return whether an expert may come to a slot, once experts have left some."""
        is_usable = slot < self.usable_slots and slot not in self._draining
        return is_usable and (self._owner[slot] == NOBODY or slot in left)

    def _set_free(self, left: set[int], taken: set[int]) -> None:
        """Note that experts left slots, and then others took some."""
        for slot in left - taken:
            heapq.heappush(self._free[self.layout.class_of_slot(slot)], slot)
        if taken - left:
            self._free = [[slot for slot in free if slot not in taken] for free in self._free]
            for free in self._free:
                heapq.heapify(free)

    def forget(self) -> None:
        """Let every expert be read in host memory: nobody knows what is in the slots."""
        self._evict(np.flatnonzero(self._owner != NOBODY))
        self.addresses[:] = self._in_place
        self.tiers[:] = Tier.IN_PLACE
        self.reclaim()

    def _expert_in(self, slot: int) -> tuple[int, int]:
        layer, expert = divmod(int(self._owner[slot]), self.layout.experts)
        return layer, expert

    def _where(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        """Return where the tables have these experts: layers, and numbers in them."""
        return np.divmod(numbers, self.layout.experts)

    def _copy_in(self, numbers: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Begin to copy blobs to slots, which must still be free."""
        self._require_free(slots)
        places = self._where(numbers)
        sources, targets = self._in_place[places], self._base + self.layout.offsets(slots)
        copy, stream, sizes = self.copy_from_host, self._stream, self.layout.blob_bytes
        of_each = zip(targets.tolist(), sources.tolist(), places[0].tolist(), strict=True)
        for target, source, layer in of_each:
            copy(target, source, sizes[layer], stream)

    def _require_free(self, slots: npt.NDArray[np.int64]) -> None:
        held = slots[(self._owner[slots] != NOBODY) | (slots >= self.usable_slots)].tolist()
        held += self._draining.intersection(slots.tolist())
        if held:
            raise RuleViolation(7, f"slots {held} were taken or lost while experts came into them")

    def _name(self, numbers: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Wait for the copies, then let the tables name them: publication comes last.

        Whatever ends this half way, an error or Ctrl-C, leaves none of the experts resident and
        their slots free.
        """
        self._driver.stream_synchronize(self._stream)
        self._require_free(slots)
        places, taken, free_before = self._where(numbers), set(slots.tolist()), self._free
        free_after = [[slot for slot in free if slot not in taken] for free in free_before]
        for free in free_after:
            heapq.heapify(free)
        try:
            self._free = free_after
            self._owner[slots] = numbers
            self.addresses[places] = self._base + self.layout.offsets(slots)
            self.tiers[places] = Tier.SLOT
        except BaseException:
            self.tiers[places] = Tier.IN_PLACE
            self.addresses[places] = self._in_place[places]
            self._owner[slots] = NOBODY
            self._free = free_before
            raise
        self._tell("fill", numbers, slots)

    def _tell(
        self,
        kind: str,
        numbers: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        **more: object,
    ) -> None:
        """Announce what became of slots."""
        if self._announce is None:
            return
        for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
            layer, expert = divmod(number, self.layout.experts)
            self._announce(
                {
                    "kind": kind,
                    "layer": layer,
                    "expert": expert,
                    "slot": slot,
                    "address": self._base + self.layout.offset(slot),
                    "size": self.layout.blob_bytes[layer],
                    **more,
                }
            )


class Filling:
    """Bring experts into slots as their blobs come: `ExpertArena.begin_fill` makes it.

    Copies are only begun until `finish`, which waits for all of them and publishes them. Before
    it, and after an error, none of the experts is resident and their slots are free.
    """

    def __init__(
        self, arena: ExpertArena, numbers: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> None:
        """`numbers` are layer * experts + expert; slots[n] is for numbers[n]."""
        self._arena = arena
        sources = arena.expert_address.ravel()[numbers]
        order = np.argsort(sources, kind="stable")  # in which the blobs come
        self._sources, self._numbers, self._slots = sources[order], numbers[order], slots[order]
        self._begun = 0  # copies

    def copy(self, address: int, size: int) -> None:
        """Begin to copy the blobs that lie up to the end of these bytes of the host arena.

        The device can read them by now; the bytes of a later call lie behind these.
        """
        first, end = self._begun, int(np.searchsorted(self._sources, address + size))
        self._begun = max(first, end)
        self._arena._copy_in(self._numbers[first:end], self._slots[first:end])

    def finish(self) -> int:
        """Wait for the copies and let the tables name them; returns how many experts came."""
        count = len(self._numbers)
        if self._begun < count:
            raise AssertionError(f"{count - self._begun} blobs were never there")
        if count:
            self._arena._name(self._numbers, self._slots)
        return count
