"""Rebuild from a trace's lines what memory a device has, where it is mapped and for whom.

It believes the trace: a call that returned has done what it says, also where that breaks a rule.
`trace_checker` asks it whether a rule was broken; `inspect` draws it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from strata_nb.trace_reader import Line


@dataclass(slots=True)
class Chunk:
    """Physical memory: `place` is the lowest number that no other chunk of the device had then."""

    handle: int
    device: int
    size: int
    place: int
    address: int | None = None


@dataclass(slots=True)
class Mapping:
    """A chunk at an address.

    devices   that have access
    retired   for each stream how much work it had when no table named the chunk any more
    mapped_at, retired_at   lines
    """

    chunk: Chunk
    mapped_at: int
    devices: set[int] = field(default_factory=set)
    retired: dict[int, int] | None = None
    retired_at: int = 0


@dataclass(slots=True)
class Reservation:
    """Addresses; owner, device and chunk_bytes are known once a ledger has said them.

    published   bytes from the beginning that tables may name
    mappings    by address; of `stuck` ones an unmap failed, `retired` ones no table names, and no
                address is both
    """

    address: int
    size: int
    owner: str = ""
    device: int | None = None
    chunk_bytes: int = 0
    published: int = 0
    mappings: dict[int, Mapping] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)

    @property
    def prefix(self) -> int:
        """How many chunks are mapped, those left out that are stuck."""
        return len(self.mappings) - len(self.stuck)

    def overlapping(self, address: int, size: int) -> Mapping | None:
        """Return what is mapped at any of these bytes."""
        unit, candidates = self.chunk_bytes, list(self.mappings)
        if unit:
            first = address - (address - self.address) % unit
            candidates = [at for at in range(first, address + size, unit) if at in self.mappings]
        for at in candidates:
            if at < address + size and address < at + self.mappings[at].chunk.size:
                return self.mappings[at]
        return None


@dataclass(slots=True)
class Block:
    """Plain memory of a device, or of the host (device None)."""

    address: int
    size: int
    device: int | None
    owner: str = ""


@dataclass(slots=True)
class Stream:
    """Count pieces of work: `drained` of the `submitted` ones were waited for."""

    device: int
    submitted: int = 0
    drained: int = 0
    last_line: int = 0  # that submitted any


@dataclass(slots=True)
class Copy:
    """The latest copy to an address."""

    size: int
    stream: int
    position: int
    line: int


class Memory:
    """Hold what exists behind the lines that were applied."""

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self.reservations: dict[int, Reservation] = {}
        self.blocks: dict[int, Block] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, tuple[int, int] | None] = {}  # stream and position
        self.copies: dict[int, Copy] = {}  # by destination
        self.taken: Counter[int] = Counter()  # device -> bytes of chunks and blocks
        self.contexts: set[int] = set()
        self.no_path: set[tuple[int, int]] = set()  # (device, owner)
        self.residents: dict[tuple[int, int], tuple[int, int]] = {}  # expert -> slot, address
        self.expert_in: dict[int, tuple[int, int]] = {}  # slot -> expert
        self._free_places: dict[int, list[int]] = {}  # device -> a heap, below its `_places`
        self._places: Counter[int] = Counter()

    def apply(self, line: Line) -> None:
        """Change what a line says; a call that failed changes nothing but that it is known."""
        if not line.known:
            return
        if line.outcome is not None and not line.ok:
            found = self.reservation(line["address"]) if line.kind == "unmap" else None
            if found is not None and line["address"] in found.mappings:
                found.stuck.add(line["address"])
                found.retired.discard(line["address"])  # no part of the prefix any more
            return
        change = getattr(self, f"_{line.kind}", None)
        if change is not None:
            change(line)

    # What is where.

    def reservation(self, address: int) -> Reservation | None:
        for found in self.reservations.values():
            if found.address <= address < found.address + found.size:
                return found
        return None

    def block(self, address: int) -> Block | None:
        for found in self.blocks.values():
            if found.address <= address < found.address + found.size:
                return found
        return None

    def mappings(self, address: int, size: int) -> list[Mapping] | None:
        """Return what is mapped at all of these bytes, in order; None where there is a gap."""
        found = self.reservation(address)
        if found is None:
            return None
        start = address
        if found.chunk_bytes:
            start = address - (address - found.address) % found.chunk_bytes
        elif start not in found.mappings:
            start = max((at for at in found.mappings if at <= address), default=address)
        mappings = []
        while start < address + size:
            mapping = found.mappings.get(start)
            if mapping is None:
                return None
            mappings.append(mapping)
            start += mapping.chunk.size
        return mappings

    def of_owner(self, device: int, owner: str) -> list[Reservation]:
        return [
            found
            for found in self.reservations.values()
            if found.device == device and found.owner == owner
        ]

    def unfinished(self, positions: dict[int, int]) -> dict[int, int]:
        """Return the streams that have more work from before `positions` than was waited for."""
        return {
            number: position - stream.drained
            for number, position in positions.items()
            if (stream := self.streams.get(number)) is not None and stream.drained < position
        }

    def positions(self) -> dict[int, int]:
        return {number: stream.submitted for number, stream in self.streams.items()}

    # Addresses and chunks.

    def _reserve(self, line: Line) -> None:
        self.reservations[line["result"]] = Reservation(line["result"], line["size"])

    def _address_free(self, line: Line) -> None:
        self.reservations.pop(line["address"], None)

    def _create(self, line: Line) -> None:
        device, free = line["device"], self._free_places.setdefault(line["device"], [])
        if free:
            place = heapq.heappop(free)
        else:
            place = self._places[device]
            self._places[device] += 1
        self.chunks[line["result"]] = Chunk(line["result"], device, line["size"], place)
        self.taken[device] += line["size"]

    def _release(self, line: Line) -> None:
        chunk = self.chunks.pop(line["handle"], None)
        if chunk is not None:
            heapq.heappush(self._free_places.setdefault(chunk.device, []), chunk.place)
            self.taken[chunk.device] -= chunk.size

    def _map(self, line: Line) -> None:
        chunk, found = self.chunks.get(line["handle"]), self.reservation(line["address"])
        if chunk is not None and found is not None:
            chunk.address = line["address"]
            found.mappings[line["address"]] = Mapping(chunk, line.number)

    def _unmap(self, line: Line) -> None:
        found = self.reservation(line["address"])
        mapping = None if found is None else found.mappings.pop(line["address"], None)
        if found is not None and mapping is not None:
            mapping.chunk.address = None
            found.stuck.discard(line["address"])
            found.retired.discard(line["address"])

    def _set_access(self, line: Line) -> None:
        for mapping in self.mappings(line["address"], line["size"]) or ():
            mapping.devices.update(line["devices"])

    def _retire(self, line: Line) -> None:
        for mapping in self.mappings(line["address"], line["size"]) or ():
            mapping.retired, mapping.retired_at = self.positions(), line.number
            if (found := self.reservation(line["address"])) and mapping.chunk.address is not None:
                found.retired.add(mapping.chunk.address)

    def _reinstate(self, line: Line) -> None:
        for mapping in self.mappings(line["address"], line["size"]) or ():
            mapping.retired = None
            if (found := self.reservation(line["address"])) and mapping.chunk.address is not None:
                found.retired.discard(mapping.chunk.address)

    def _mem_info(self, line: Line) -> None:
        self.contexts.add(line["device"])

    def _can_access(self, line: Line) -> None:
        pair = (line["device"], line["of"])
        (self.no_path.discard if line["result"] else self.no_path.add)(pair)

    # Plain memory.

    def _allocate(self, line: Line) -> None:
        self.contexts.add(line["device"])
        self.blocks[line["result"]] = Block(line["result"], line["size"], line["device"])
        self.taken[line["device"]] += line["size"]

    def _allocate_host(self, line: Line) -> None:
        self.blocks[line["result"]] = Block(line["result"], line["size"], None)

    def _register_host(self, line: Line) -> None:
        self.blocks[line["address"]] = Block(line["address"], line["size"], None)

    def _free(self, line: Line) -> None:
        block = self.blocks.pop(line["address"], None)
        if block is not None and block.device is not None:
            self.taken[block.device] -= block.size
            self._drain_device(block.device)

    def _free_host(self, line: Line) -> None:
        self.blocks.pop(line["address"], None)
        for stream in self.streams.values():
            stream.drained = stream.submitted

    _unregister_host = _free_host

    # Work.

    def _stream_create(self, line: Line) -> None:
        self.contexts.add(line["device"])
        self.streams[line["result"]] = Stream(line["device"])

    def _stream_destroy(self, line: Line) -> None:
        self.streams.pop(line["stream"], None)

    def _stream_synchronize(self, line: Line) -> None:
        if (stream := self.streams.get(line["stream"])) is not None:
            stream.drained = stream.submitted

    def _synchronize(self, line: Line) -> None:
        self.contexts.add(line["device"])
        self._drain_device(line["device"])

    def _drain_device(self, device: int) -> None:
        for stream in self.streams.values():
            if stream.device == device:
                stream.drained = stream.submitted

    def _event_create(self, line: Line) -> None:
        self.contexts.add(line["device"])
        self.events[line["result"]] = None

    def _event_destroy(self, line: Line) -> None:
        self.events.pop(line["event"], None)

    def _event_record(self, line: Line) -> None:
        if (stream := self.streams.get(line["stream"])) is not None:
            self.events[line["event"]] = (line["stream"], stream.submitted)

    def _event_synchronize(self, line: Line) -> None:
        if (recorded := self.events.get(line["event"])) is not None:
            number, position = recorded
            if (stream := self.streams.get(number)) is not None:
                stream.drained = max(stream.drained, position)

    def _event_query(self, line: Line) -> None:
        if line["result"]:
            self._event_synchronize(line)

    def _copy_async(self, line: Line) -> None:
        self._launch_host(line)
        if (stream := self.streams.get(line["stream"])) is not None:
            self.copies[line["destination"]] = Copy(
                line["size"], line["stream"], stream.submitted, line.number
            )

    def _launch_host(self, line: Line) -> None:
        if (stream := self.streams.get(line["stream"])) is not None:
            stream.submitted += 1
            stream.last_line = line.number

    _fill_async = _launch_host

    # Events of a ledger.

    def _range(self, line: Line) -> None:
        if (found := self.reservations.get(line["address"])) is not None:
            found.owner, found.device = line["owner"], line["device"]
            found.chunk_bytes = line["chunk_bytes"]

    def _block(self, line: Line) -> None:
        if (found := self.block(line["address"])) is not None:
            found.owner = line["owner"]

    def _publish(self, line: Line) -> None:
        if (found := self.reservations.get(line["address"])) is not None:
            found.published = line["size"]

    def _fill(self, line: Line) -> None:
        self._evict(line)
        self.residents[line["layer"], line["expert"]] = (line["slot"], line["address"])
        self.expert_in[line["slot"]] = (line["layer"], line["expert"])

    _move = _fill

    def _evict(self, line: Line) -> None:
        slot, _ = self.residents.pop((line["layer"], line["expert"]), (-1, 0))
        self.expert_in.pop(slot, None)
