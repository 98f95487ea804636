"""Keep the memory of host devices: budgets, chunks, reservations, allocations, and the rules.

A device is a budget of bytes and a file without a path. A chunk is a piece of that file: creating
it gives the piece its memory, mapping puts the piece at an address, releasing punches a hole.
Pieces are never placed twice, so the file only has an end to remember; a hole costs nothing.

Everything that would kill the process on a card, or worse, give a wrong answer, raises
RuleViolation here with the number of the rule in docs/vmm.md. What a driver would answer with a
status (no memory, no path) raises DriverError. A call that raises has changed nothing.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from strata_nb import host_pages as pages
from strata_nb.errors import DriverError, OutOfDeviceMemory, RuleViolation
from strata_nb.host_streams import HostStreams, Positions

OUT_OF_MEMORY = 2
INVALID_VALUE = 1
INVALID_DEVICE = 101  # the code of both vendors
SMALL_UNIT_BYTES = 64 << 10  # cuts a device of 16 MiB into 256 chunks
GARBAGE = 0xFF  # what memory holds when it is handed over: NaN in every float format [14]


@dataclass(frozen=True, slots=True)
class HostDevice:
    """Say what one host device is.

    budget_bytes             its memory, for chunks and plain allocations together
    minimum_bytes            what the size of a chunk must be a multiple of
    recommended_bytes        what a chunk is charged in; on some cards far more than the minimum
    access_from_base_only    refuse access to the end of a reservation, as some cards do [11]
    refuses_peers            say that paths to its memory exist, and refuse access over them [5]
    drops_peer_writes        give access over paths to its memory, and lose what is written there
    """

    budget_bytes: int
    minimum_bytes: int = SMALL_UNIT_BYTES
    recommended_bytes: int = SMALL_UNIT_BYTES
    access_from_base_only: bool = False
    refuses_peers: bool = False
    drops_peer_writes: bool = False

    def __post_init__(self) -> None:
        unit, charged = self.minimum_bytes, self.recommended_bytes
        if unit <= 0 or unit % pages.PAGE_BYTES or charged % unit or self.budget_bytes < charged:
            raise RuleViolation(10, f"{self} cannot be cut into chunks")


@dataclass(frozen=True, slots=True)
class DeviceAccount:
    """Count what a host device holds; `charged_bytes` is what is missing from its free memory."""

    chunks: int
    mapped_chunks: int
    charged_bytes: int


@dataclass(slots=True)
class _Device:
    facts: HostDevice
    file: int
    end: int = 0  # of the file
    charged: int = 0
    has_context: bool = False


@dataclass(slots=True)
class _Chunk:
    device: int
    size: int
    offset: int
    charge: int
    address: int | None = None


@dataclass(slots=True)
class _Mapping:
    size: int
    chunk: _Chunk
    devices: set[int] = field(default_factory=set)  # who may read and write
    retired: Positions | None = None  # where the streams were when no table named it any more


@dataclass(slots=True)
class _Reservation:
    size: int
    mappings: dict[int, _Mapping] = field(default_factory=dict)  # by address
    starts: list[int] = field(default_factory=list)  # their addresses, sorted


@dataclass(slots=True)
class _Block:
    """A plain allocation of a device, or host memory (device None), ours or registered."""

    size: int
    device: int | None
    owned: bool
    charge: int = 0


class HostMemory:
    """Carry out the host's memory operations; `vmm.MemoryDriver` says what each does."""

    def __init__(
        self,
        devices: Sequence[HostDevice],
        paths: frozenset[tuple[int, int]],
        streams: HostStreams,
        max_chunks: int,
    ) -> None:
        self._streams = streams
        self._paths = paths
        self._max_chunks = max_chunks
        self._lock = threading.Lock()  # guards the books; nothing waits under it [17]
        self._handles = itertools.count(1)
        self._chunks: dict[int, _Chunk] = {}
        self._reservations: dict[int, _Reservation] = {}
        self._blocks: dict[int, _Block] = {}
        self._devices = [
            _Device(facts, pages.open_memory_file(f"strata-device-{index}"))
            for index, facts in enumerate(devices)
        ]

    # Queries.

    def facts(self, device: int) -> HostDevice:
        return self._device(device).facts

    def mem_info(self, device: int) -> tuple[int, int]:
        found = self._device(device)
        return found.facts.budget_bytes - found.charged, found.facts.budget_bytes

    def can_access(self, device: int, owner: int) -> bool:
        self._device(device), self._device(owner)
        return device == owner or (device, owner) in self._paths

    def make_context(self, device: int) -> None:
        self._device(device).has_context = True

    def account(self, device: int) -> DeviceAccount:
        with self._lock:
            chunks = [chunk for chunk in self._chunks.values() if chunk.device == device]
            mapped = sum(chunk.address is not None for chunk in chunks)
            return DeviceAccount(len(chunks), mapped, self._device(device).charged)

    def live(self) -> dict[str, int]:
        with self._lock:
            return {
                "chunks": len(self._chunks),
                "mappings": sum(len(found.mappings) for found in self._reservations.values()),
                "reservations": len(self._reservations),
                "blocks": len(self._blocks),
            }

    # Addresses and chunks.

    def reserve(self, size: int) -> int:
        _require(size > 0 and size % pages.PAGE_BYTES == 0, 10, f"reserve {size:,} bytes")
        address = pages.reserve(size)
        with self._lock:
            self._reservations[address] = _Reservation(size)
        return address

    def address_free(self, address: int, size: int) -> None:
        with self._lock:
            found = self._reservations.get(address)
            if found is None:
                raise RuleViolation(1, f"no reservation begins at {address:#x}")
            _require(size == found.size, 1, f"free {size:,} of {found.size:,} reserved bytes")
            _require(not found.mappings, 1, f"chunks are mapped behind {address:#x}")
            pages.give_back(address, size)
            del self._reservations[address]

    def create(self, size: int, device: int) -> int:
        owner = self._device(device)
        unit = owner.facts.minimum_bytes
        _require(size > 0 and size % unit == 0, 10, f"create {size:,} bytes in units of {unit:,}")
        charge = _round_up(size, owner.facts.recommended_bytes)
        with self._lock:
            if len(self._chunks) >= self._max_chunks:
                raise OutOfDeviceMemory(
                    "create",
                    OUT_OF_MEMORY,
                    "the system cannot map more chunks",
                    device=device,
                    numbers={"chunks": len(self._chunks), "size": size},
                    hint="use larger chunks",
                )
            self._check_budget("create", device, size, charge)
            pages.fill_hole(owner.file, owner.end, size)
            handle = next(self._handles)
            self._chunks[handle] = _Chunk(device, size, owner.end, charge)
            owner.end += size
            owner.charged += charge
        return handle

    def release(self, handle: int) -> None:
        with self._lock:
            chunk = self._chunk(handle)
            _require(chunk.address is None, 8, f"release chunk {handle} while it is mapped")
            owner = self._device(chunk.device)
            pages.punch_hole(owner.file, chunk.offset, chunk.size)
            owner.charged -= chunk.charge
            del self._chunks[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        with self._lock:
            chunk = self._chunk(handle)
            _require(size == chunk.size, 10, f"map {size:,} of a chunk's {chunk.size:,} bytes")
            _require(
                chunk.address is None, 3, f"chunk {handle} is mapped at {chunk.address or 0:#x}"
            )
            owner = self._device(chunk.device)
            _require(owner.has_context, 6, f"device {chunk.device} has no context yet")
            base, found = self._reservation(address, size)
            unit = owner.facts.minimum_bytes
            _require((address - base) % unit == 0, 10, f"map at offset {address - base:,}")
            _require(not _overlaps(found, address, size), 3, f"{address:#x} is mapped already")
            try:
                pages.place(address, size, owner.file, chunk.offset)
                pages.fill(address, GARBAGE, size)
                pages.protect(address, size, usable=False)
            except pages.PagesError:
                pages.vacate(address, size)
                raise
            chunk.address = address
            found.mappings[address] = _Mapping(size, chunk)
            insort(found.starts, address)

    def unmap(self, address: int, size: int) -> None:
        with self._lock:
            _, found = self._reservation(address, size)
            mapping = found.mappings.get(address)
            if mapping is None:
                raise RuleViolation(9, f"no chunk begins at {address:#x}")
            _require(
                size == mapping.size, 11, f"unmap {size:,} bytes, a chunk has {mapping.size:,}"
            )
            self._require_drained(address, mapping)
            pages.vacate(address, size)
            mapping.chunk.address = None
            del found.mappings[address]
            found.starts.remove(address)

    def set_access(self, address: int, size: int, devices: Sequence[int]) -> None:
        with self._lock:
            base, _ = self._reservation(address, size)
            mappings = self._whole_mappings(address, size)
            for owner in {mapping.chunk.device for mapping in mappings}:
                self._check_access(owner, devices, {"address": address, "size": size})
                if self._device(owner).facts.access_from_base_only and address != base:
                    numbers = {"address": address, "base address": base}
                    name = "invalid value"
                    raise DriverError(
                        "set_access", INVALID_VALUE, name, device=owner, numbers=numbers
                    )
            pages.protect(address, size, usable=True)
            for mapping in mappings:
                mapping.devices.update(devices)

    def retire(self, address: int, size: int) -> None:
        with self._lock:
            for mapping in self._whole_mappings(address, size):
                mapping.retired = self._streams.positions()

    def reinstate(self, address: int, size: int) -> None:
        with self._lock:
            for mapping in self._whole_mappings(address, size):
                mapping.retired = None

    # Plain memory.

    def allocate(self, size: int, device: int | None) -> int:
        """Return plain memory of a device, charged in pages, or of the host (None), not charged."""
        _require(size > 0, 10, f"allocate {size:,} bytes")
        whole = _round_up(size, pages.PAGE_BYTES)
        with self._lock:
            charge = 0
            if device is not None:
                charge = whole
                self._check_budget("allocate", device, size, charge)
            address = pages.allocate(whole)
            pages.fill(address, GARBAGE, whole)
            self._blocks[address] = _Block(size, device, True, charge)
            if device is not None:
                self._device(device).charged += charge
        return address

    def free(self, address: int, *, of_host: bool) -> None:
        """Free plain memory; the caller has drained the streams."""
        with self._lock:
            block = self._blocks.get(address)
            if block is None or not block.owned or (block.device is None) != of_host:
                raise RuleViolation(9, f"nothing was allocated at {address:#x}")
            pages.give_back(address, _round_up(block.size, pages.PAGE_BYTES))
            del self._blocks[address]
            if block.device is not None:
                self._device(block.device).charged -= block.charge

    def block_device(self, address: int) -> int | None:
        """Return the device of the allocation that begins at an address, or None."""
        with self._lock:
            block = self._blocks.get(address)
            return block.device if block else None

    def register(self, address: int, size: int) -> None:
        with self._lock:
            _require(size > 0, 10, f"register {size:,} bytes")
            _require(address not in self._blocks, 9, f"{address:#x} is registered already")
            self._blocks[address] = _Block(size, None, False)

    def unregister(self, address: int) -> None:
        with self._lock:
            block = self._blocks.get(address)
            if block is None or block.owned:
                raise RuleViolation(9, f"nothing is registered at {address:#x}")
            del self._blocks[address]

    def check_work(self, address: int, size: int, device: int) -> None:
        """Raise RuleViolation unless work enqueued on `device` may use all of these bytes [16]."""
        where = f"device {device}: {size:,} bytes at {address:#x}"
        _require(size > 0, 16, where)
        with self._lock:
            for base, reservation in self._reservations.items():
                if base <= address < base + reservation.size:
                    _require(address + size <= base + reservation.size, 11, f"{where}: two ranges")
                    _check_mapped(reservation, address, size, device, where)
                    return
            for base, block in self._blocks.items():
                if base <= address and address + size <= base + block.size:
                    owner = device if block.device is None else block.device
                    _require(self.can_access(device, owner), 5, f"{where}: no path to {owner}")
                    return
        raise RuleViolation(16, f"{where}: no memory that a device may use")

    def drops_write(self, address: int, device: int) -> bool:
        """Return whether what `device` writes to these bytes is lost on the way."""
        with self._lock:
            for base, reservation in self._reservations.items():
                if base <= address < base + reservation.size:
                    index = bisect_right(reservation.starts, address) - 1
                    mapping = reservation.mappings[reservation.starts[index]]
                    owner = mapping.chunk.device
                    return owner != device and self._device(owner).facts.drops_peer_writes
        return False

    def close(self) -> None:
        """Give everything back to the system; may be called twice."""
        with self._lock:
            for address, reservation in self._reservations.items():
                pages.give_back(address, reservation.size)
            for address, block in self._blocks.items():
                if block.owned:
                    pages.give_back(address, _round_up(block.size, pages.PAGE_BYTES))
            for device in self._devices:
                pages.close_file(device.file)
            for table in (self._reservations, self._blocks, self._chunks):
                table.clear()
            self._devices.clear()

    # What the operations share.

    def _device(self, device: int) -> _Device:
        if not 0 <= device < len(self._devices):
            raise DriverError("device", INVALID_DEVICE, "no such device", device=device)
        return self._devices[device]

    def _chunk(self, handle: int) -> _Chunk:
        if handle not in self._chunks:
            raise RuleViolation(9, f"chunk {handle} does not exist, or was released")
        return self._chunks[handle]

    def _reservation(self, address: int, size: int) -> tuple[int, _Reservation]:
        for base, found in self._reservations.items():
            if base <= address and address + size <= base + found.size:
                return base, found
        raise RuleViolation(1, f"{size:,} bytes at {address:#x} are in no reservation")

    def _whole_mappings(self, address: int, size: int) -> list[_Mapping]:
        _, found = self._reservation(address, size)
        mappings, at = [], address
        while at < address + size:
            _require(at in found.mappings, 4, f"no chunk begins at {at:#x}")
            mappings.append(found.mappings[at])
            at += found.mappings[at].size
        _require(at == address + size, 11, f"{size:,} bytes end inside a chunk")
        return mappings

    def _check_budget(self, call: str, device: int, size: int, charge: int) -> None:
        free, total = self.mem_info(device)
        if charge > free:
            numbers = {"size": size, "charged": charge, "free": free, "total": total}
            raise OutOfDeviceMemory(
                call, OUT_OF_MEMORY, "out of memory", device=device, numbers=numbers
            )

    def _check_access(self, owner: int, devices: Sequence[int], numbers: dict[str, int]) -> None:
        for device in devices:
            refused = device != owner and self._device(owner).facts.refuses_peers
            if refused or not self.can_access(device, owner):
                name = f"device {device} has no path"
                raise DriverError("set_access", INVALID_DEVICE, name, device=owner, numbers=numbers)

    def _require_drained(self, address: int, mapping: _Mapping) -> None:
        if mapping.retired is not None:
            positions = mapping.retired
        elif mapping.devices:
            positions = self._streams.positions()  # never retired: any work may still use it
        else:
            positions = {}  # nobody ever had access
        busy = self._streams.unfinished(positions)
        _require(not busy, 7, f"unmap {address:#x} while streams {busy} may still use it")


def _check_mapped(
    reservation: _Reservation, address: int, size: int, device: int, where: str
) -> None:
    at = address
    while at < address + size:
        index = bisect_right(reservation.starts, at) - 1
        start = reservation.starts[index] if index >= 0 else -1
        mapping = reservation.mappings.get(start)
        if mapping is None or at >= start + mapping.size:
            raise RuleViolation(16, f"{where}: nothing is mapped at {at:#x}")
        _require(device in mapping.devices, 4, f"{where}: no access at {start:#x}")
        _require(mapping.retired is None, 7, f"{where}: {start:#x} was retired")
        at = start + mapping.size


def _overlaps(reservation: _Reservation, address: int, size: int) -> bool:
    index = bisect_right(reservation.starts, address + size - 1) - 1
    if index < 0:
        return False
    start = reservation.starts[index]
    return start + reservation.mappings[start].size > address


def _require(holds: bool, rule: int, message: str) -> None:
    if not holds:
        raise RuleViolation(rule, message)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
