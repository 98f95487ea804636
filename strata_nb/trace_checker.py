"""Check the rules of docs/vmm.md on a recorded trace, and on nothing else.

It shares no code with what made the trace: from the lines alone it rebuilds who had which memory
(`trace_memory`), and asks at every line whether that was allowed. So it finds what the checks of a
driver cannot see, such as memory that is retired while a table still names it, and it checks traces
of drivers that check nothing themselves.

Which rule is checked at which line stands in docs/trace.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata_nb.trace_memory import Block, Mapping, Memory, Reservation
from strata_nb.trace_reader import Line, Trace

MAX_CHUNK_BYTES = 64 << 20
LOST = "DeviceLost"
BROKEN = "RuleViolation"
MOST_SHOWN = 100  # a damaged account is wrong at every line behind

TITLES = {
    1: "one range, one reservation",
    2: "a chunk lives on the device of its range",
    3: "a chunk is mapped at one address",
    4: "access before use",
    5: "the owner has access, another device only over a path",
    6: "the context exists before the first map",
    7: "publish less, drain, unmap",
    8: "released only when nothing maps it",
    9: "the account adds up, and nothing is left",
    10: "one chunk size per device",
    11: "chunk by chunk, and no copy over two ranges",
    12: "spare chunks before new ones",
    14: "a chunk that changes hands holds arbitrary bytes",
    15: "a lost device is called no more",
    16: "tables name mapped, accessible memory",
    17: "one thread changes the memory of a device",
}
# Calls that change the memory of a device.
_CHANGES = {"create", "release", "map", "unmap", "set_access", "address_free"}


@dataclass(frozen=True, slots=True)
class Violation:
    """Say which rule was broken, at which line of the file, and how, with the numbers."""

    rule: int
    line: int
    message: str

    def __str__(self) -> str:
        title = TITLES.get(self.rule, "unknown")
        return f"rule {self.rule} ({title}), line {self.line:,}: {self.message}"


def check_trace(trace: Trace) -> list[Violation]:
    """Return the broken rules in order of their lines, the first 100; none for a good trace."""
    checker = Checker(trace)
    found: list[Violation] = []
    for line in trace.lines:
        found += checker.check(line)
        if len(found) >= MOST_SHOWN:
            return found[:MOST_SHOWN]
    return found


class Checker:
    """Follow a trace line by line: `memory` is what there is behind the last one."""

    def __init__(self, trace: Trace) -> None:
        self.memory = Memory()
        self._devices = trace.devices
        self._chunk_bytes: dict[int, int] = {}
        self._lost: dict[int, int] = {}  # device -> line
        self._latest: dict[int, tuple[int, int, int]] = {}  # device -> end, thread, line
        self._change: dict[int, tuple[int, int]] = {}  # device -> chunks created, released in it

    def check(self, line: Line) -> list[Violation]:
        """Return what a line breaks, and let it happen."""
        found = [Violation(rule, line.number, message) for rule, message in self._broken(line)]
        self.memory.apply(line)
        return found

    def _broken(self, line: Line) -> Iterator[tuple[int, str]]:
        if not line.known:
            return
        if line.outcome is not None:
            device = self._device_of(line)
            if line.kind in _CHANGES and device is not None:
                yield from self._check_caller(line, device)
            if line.outcome == BROKEN:
                rule, _, message = str(line.fields.get("message", "")).partition(": ")
                number = rule.removeprefix("rule ")
                yield int(number) if number.isdecimal() else 0, f"the driver says: {message}"
            if line.outcome == LOST and device is not None:
                self._lost.setdefault(device, line.number)
            if not line.ok:
                return
        check = getattr(self, f"_check_{line.kind}", None)
        if check is not None:
            yield from check(line)

    def _device_of(self, line: Line) -> int | None:
        """Return whose memory a call changes, as far as the lines before say it."""
        if line.kind in ("create", "synchronize", "mem_info", "allocate"):
            return int(line["device"])
        if "handle" in line.fields:
            chunk = self.memory.chunks.get(line["handle"])
            return None if chunk is None else chunk.device
        if "address" in line.fields:
            found = self.memory.reservation(line["address"])
            return None if found is None else found.device
        return 0 if len(self._devices) == 1 else None

    def _check_caller(self, line: Line, device: int) -> Iterator[tuple[int, str]]:
        if (lost_at := self._lost.get(device)) is not None:
            yield 15, f"{line.kind} on device {device}, which was lost at line {lost_at:,}"
        thread, took_us = line.fields.get("thread"), line.fields.get("us")
        if not isinstance(thread, int) or not isinstance(took_us, int):
            return
        end, other, at = self._latest.get(device, (0, thread, 0))
        if thread != other and line.t_us < end:
            yield (
                17,
                f"{line.kind} on device {device} by thread {thread} began at {line.t_us:,} us, "
                f"while thread {other} was in the call of line {at:,} until {end:,} us",
            )
        self._latest[device] = max((end, other, at), (line.t_us + took_us, thread, line.number))

    # Addresses and chunks.

    def _check_reserve(self, line: Line) -> Iterator[tuple[int, str]]:
        start, end = line["result"], line["result"] + line["size"]
        others: list[Reservation | Block] = [*self.memory.reservations.values()]
        for other in [*others, *self.memory.blocks.values()]:
            if start < other.address + other.size and other.address < end:
                yield (
                    1,
                    f"reserved {line['size']:,} bytes at {start:#x}, where {other.size:,} bytes "
                    f"from {other.address:#x} are in use",
                )

    def _check_address_free(self, line: Line) -> Iterator[tuple[int, str]]:
        found = self.memory.reservations.get(line["address"])
        if found is None:
            yield 1, f"freed {line['address']:#x}, where no reservation begins"
            return
        if found.size != line["size"]:
            yield 1, f"freed {line['size']:,} of {found.size:,} bytes reserved at {_at(found)}"
        if found.mappings:
            yield 1, f"freed {_at(found)} with {len(found.mappings)} chunks mapped"
        if found.published:
            yield 16, f"freed {_at(found)} while tables may name {found.published:,} bytes of it"

    def _check_create(self, line: Line) -> Iterator[tuple[int, str]]:
        device, size = line["device"], line["size"]
        facts, usual = self._devices[device], self._chunk_bytes.setdefault(device, size)
        if size != usual:
            yield 10, f"a chunk of {size:,} bytes on device {device}, others have {usual:,}"
        if size <= 0 or size & (size - 1) or size > MAX_CHUNK_BYTES:
            yield 10, f"a chunk of {size:,} bytes: no power of two up to {MAX_CHUNK_BYTES:,}"
        elif size % facts.minimum_bytes:
            yield 10, f"a chunk of {size:,} bytes on a device of units of {facts.minimum_bytes:,}"
        if line["result"] in self.memory.chunks:
            yield 3, f"chunk {line['result']} was created, and exists already"
        taken = self.memory.taken[device] + size
        if taken > facts.memory_bytes:
            yield 9, f"device {device} of {facts.memory_bytes:,} bytes gave {taken:,}"
        created, released = self._change.get(device, (0, 0))
        self._change[device] = (created + 1, released)

    def _check_release(self, line: Line) -> Iterator[tuple[int, str]]:
        chunk = self.memory.chunks.get(line["handle"])
        if chunk is None:
            yield 9, f"released chunk {line['handle']}, which does not exist"
            return
        if chunk.address is not None:
            yield 8, f"released chunk {chunk.handle} while it is mapped at {chunk.address:#x}"
        created, released = self._change.get(chunk.device, (0, 0))
        self._change[chunk.device] = (created, released + 1)

    def _check_map(self, line: Line) -> Iterator[tuple[int, str]]:
        address, handle = line["address"], line["handle"]
        chunk, found = self.memory.chunks.get(handle), self.memory.reservation(address)
        if chunk is None:
            yield 9, f"mapped chunk {handle}, which does not exist"
            return
        if line["size"] != chunk.size:
            yield 11, f"mapped {line['size']:,} of chunk {handle}'s {chunk.size:,} bytes"
        if chunk.address is not None:
            yield 3, f"mapped chunk {handle} at {address:#x}, it is mapped at {chunk.address:#x}"
        if chunk.device not in self.memory.contexts:
            yield 6, f"mapped chunk {handle} of device {chunk.device}, which has no context yet"
        if found is None or address + chunk.size > found.address + found.size:
            yield 1, f"mapped {chunk.size:,} bytes at {address:#x}, outside every reservation"
            return
        other = found.overlapping(address, chunk.size)
        if other is not None:
            yield 3, f"mapped chunk {handle} at {address:#x} over chunk {other.chunk.handle}"
        if found.device is None:
            return
        if found.device != chunk.device:
            yield (
                2,
                f"mapped chunk {handle} of device {chunk.device} into the {found.owner} of "
                f"device {found.device}",
            )
        if found.retired:
            yield 7, f"the {found.owner} grew with retired chunks still mapped"
        expected = found.address + found.prefix * found.chunk_bytes
        if address != expected and address not in found.mappings:
            yield (
                16,
                f"mapped {address:#x}, the prefix of the {found.owner} of device {found.device} "
                f"goes on at {expected:#x} behind {found.prefix} chunks",
            )

    def _check_unmap(self, line: Line) -> Iterator[tuple[int, str]]:
        address, found = line["address"], self.memory.reservation(line["address"])
        mapping = None if found is None else found.mappings.get(address)
        if found is None or mapping is None:
            yield 9, f"unmapped {address:#x}, where no chunk begins"
            return
        chunk = mapping.chunk
        if line["size"] != chunk.size:
            yield 11, f"unmapped {line['size']:,} of chunk {chunk.handle}'s {chunk.size:,} bytes"
        if address < found.address + found.published:
            yield (
                7,
                f"unmapped chunk {chunk.handle} at {address:#x}, tables may name the first "
                f"{found.published:,} bytes of the {found.owner} up to "
                f"{found.address + found.published:#x}",
            )
        elif mapping.devices and mapping.retired is None:
            yield 7, f"unmapped chunk {chunk.handle} at {address:#x}, which was not retired"
        if mapping.devices:
            retired = mapping.retired
            positions = self.memory.positions() if retired is None else retired
            for number, left in self.memory.unfinished(positions).items():
                last = self.memory.streams[number].last_line
                yield (
                    7,
                    f"unmapped chunk {chunk.handle} at {address:#x}, for {left} pieces of work of "
                    f"stream {number}, up to that of line {last:,}, nobody has waited",
                )
        if found.device is None or address in found.stuck:
            return
        last_address = found.address + (found.prefix - 1) * found.chunk_bytes
        if address != last_address:
            yield (
                16,
                f"unmapped {address:#x} from the middle of the {found.owner}, whose last chunk is "
                f"at {last_address:#x}: what is mapped is a prefix",
            )

    def _check_set_access(self, line: Line) -> Iterator[tuple[int, str]]:
        address, size = line["address"], line["size"]
        mappings = self.memory.mappings(address, size)
        if not mappings:
            yield 4, f"access to {size:,} bytes at {address:#x}, where not all is mapped"
            return
        covered = sum(mapping.chunk.size for mapping in mappings)
        if mappings[0].chunk.address != address or covered != size:
            yield 11, f"access to {size:,} bytes at {address:#x}: no whole chunks"
        for owner in sorted({mapping.chunk.device for mapping in mappings}):
            if owner not in line["devices"]:
                yield 5, f"access for devices {line['devices']} to memory of device {owner} alone"
            for device in line["devices"]:
                if (device, owner) in self.memory.no_path:
                    yield 5, f"access for device {device}, which has no path to device {owner}"

    def _check_retire(self, line: Line) -> Iterator[tuple[int, str]]:
        found = self.memory.reservation(line["address"])
        if found is None or not self.memory.mappings(line["address"], line["size"]):
            yield 16, f"retired {line['size']:,} bytes at {line['address']:#x}, not all mapped"
        elif line["address"] < found.address + found.published:
            yield (
                7,
                f"retired {line['address']:#x}, while tables may name the {found.owner} up to "
                f"{found.address + found.published:#x}",
            )

    def _check_mem_info(self, line: Line) -> Iterator[tuple[int, str]]:
        free, total = line["result"]
        held = self.memory.taken[line["device"]]
        if not 0 <= free <= total or total - free < held:
            yield (
                9,
                f"device {line['device']} says that {total - free:,} of {total:,} bytes are "
                f"taken, the trace holds {held:,}",
            )

    # Plain memory and work.

    def _check_free(self, line: Line) -> Iterator[tuple[int, str]]:
        if line["address"] not in self.memory.blocks:
            yield 9, f"{line.kind} of {line['address']:#x}, where nothing begins"

    _check_free_host = _check_free
    _check_unregister_host = _check_free

    def _check_copy_async(self, line: Line) -> Iterator[tuple[int, str]]:
        yield from self._check_work(line, line["destination"])
        yield from self._check_work(line, line["source"])

    def _check_fill_async(self, line: Line) -> Iterator[tuple[int, str]]:
        yield from self._check_work(line, line["address"])

    def _check_work(self, line: Line, address: int) -> Iterator[tuple[int, str]]:
        """Check that work on a stream's device may use these bytes."""
        size, stream = line["size"], self.memory.streams.get(line["stream"])
        what = f"{line.kind} of {size:,} bytes at {address:#x}"
        if stream is None:
            yield 9, f"{what} on stream {line['stream']}, which does not exist"
            return
        found = self.memory.reservation(address)
        if found is None:
            block = self.memory.block(address)
            if block is None or address + size > block.address + block.size:
                yield 16, f"{what}: no memory that a device may use"
            elif block.device is not None and (stream.device, block.device) in self.memory.no_path:
                yield 5, f"{what} by device {stream.device}: no path to device {block.device}"
            return
        if address + size > found.address + found.size:
            yield 11, f"{what}: the range ends at {found.address + found.size:#x}"
            return
        mappings = self.memory.mappings(address, size)
        if mappings is None:
            yield 16, f"{what}: not all of it is mapped"
            return
        for mapping in mappings:
            if stream.device not in mapping.devices:
                yield 4, f"{what}: device {stream.device} has no access to {_chunk(mapping)}"
            elif mapping.retired is not None:
                yield 7, f"{what}: {_chunk(mapping)} was retired at line {mapping.retired_at:,}"

    # Events of a ledger.

    def _check_range(self, line: Line) -> Iterator[tuple[int, str]]:
        found = self.memory.reservations.get(line["address"])
        if found is None or found.size != line["size"]:
            size = 0 if found is None else found.size
            yield 1, f"a range of {line['size']:,} bytes at {line['address']:#x}, reserved {size:,}"

    def _check_block(self, line: Line) -> Iterator[tuple[int, str]]:
        found = self.memory.block(line["address"])
        end = line["address"] + line["size"]
        if found is None or end > found.address + found.size or found.device != line["device"]:
            yield (
                16,
                f"{line['owner']}: {line['size']:,} bytes at {line['address']:#x} are no memory",
            )

    def _check_publish(self, line: Line) -> Iterator[tuple[int, str]]:
        size, found = line["size"], self.memory.reservations.get(line["address"])
        what = f"tables may name {size:,} bytes of the {line['owner']} of device {line['device']}"
        if size == 0:
            return
        mappings = None if found is None else self.memory.mappings(line["address"], size)
        if mappings is None:
            mapped = 0 if found is None else found.prefix * found.chunk_bytes
            yield 16, f"{what}, {mapped:,} are mapped"
            return
        for mapping in mappings:
            if line["device"] not in mapping.devices:
                yield 4, f"{what}: no access to {_chunk(mapping)}"
            elif mapping.retired is not None:
                yield 7, f"{what}: {_chunk(mapping)} was retired at line {mapping.retired_at:,}"

    def _check_fill(self, line: Line) -> Iterator[tuple[int, str]]:
        expert = (line["layer"], line["expert"])
        if expert in self.memory.residents:
            slot, _ = self.memory.residents[expert]
            yield 3, f"{_expert(line)} came into slot {line['slot']}, it has slot {slot}"
        yield from self._check_slot(line)

    def _check_move(self, line: Line) -> Iterator[tuple[int, str]]:
        if (line["layer"], line["expert"]) not in self.memory.residents:
            yield 16, f"{_expert(line)} moved to slot {line['slot']}, it had none"
        yield from self._check_slot(line)

    def _check_evict(self, line: Line) -> Iterator[tuple[int, str]]:
        slot, _ = self.memory.residents.get((line["layer"], line["expert"]), (None, 0))
        if slot != line["slot"]:
            yield 16, f"{_expert(line)} left slot {line['slot']}, it has {_slot(slot)}"

    def _check_slot(self, line: Line) -> Iterator[tuple[int, str]]:
        """Check that an expert's slot is free, is memory, and holds what was copied there."""
        address, size, slot = line["address"], line["size"], line["slot"]
        layer, expert = self.memory.expert_in.get(slot, (line["layer"], line["expert"]))
        if (layer, expert) != (line["layer"], line["expert"]):
            yield 3, f"{_expert(line)} in slot {slot}, which holds {layer}.{expert}"
        found = self.memory.reservation(address)
        if found is None or address + size > found.address + found.published:
            usable = 0 if found is None else found.published
            yield 16, f"{_expert(line)} in slot {slot} at {address:#x}, {usable:,} bytes are usable"
            return
        mappings = self.memory.mappings(address, size) or ()
        mapped_at = max((mapping.mapped_at for mapping in mappings), default=0)
        copy = self.memory.copies.get(address)
        if line.fields.get("by") == "kernel":  # whose copies are no calls of the driver
            return
        if copy is None or copy.line < mapped_at or copy.size < size:
            yield (
                14,
                f"{_expert(line)} in slot {slot}: its {size:,} bytes at {address:#x} were not "
                f"copied there since the memory was mapped at line {mapped_at:,}",
            )
        elif self.memory.unfinished({copy.stream: copy.position}):
            yield 7, f"{_expert(line)}: nobody has waited for its copy of line {copy.line:,}"

    def _check_account(self, line: Line) -> Iterator[tuple[int, str]]:
        device = line["device"]
        created, released = self._change.pop(device, (0, 0))
        if device in self._lost:
            return
        owned = {name: line[name] for name in ("experts", "kv", "loan", "spare", "stuck")}
        if sum(owned.values()) + line["given_back"] != line["capacity"]:
            text = ", ".join(f"{name} {count}" for name, count in owned.items())
            yield 9, f"{text}, given back {line['given_back']}: not {line['capacity']} chunks"
        live = [chunk for chunk in self.memory.chunks.values() if chunk.device == device]
        mapped = {
            owner: sum(found.prefix for found in self.memory.of_owner(device, owner))
            for owner in ("experts", "kv")
        }
        compared = [
            ("chunks", len(live), sum(owned.values())),
            ("mapped for experts and loan", mapped["experts"], owned["experts"] + owned["loan"]),
            ("mapped for K/V", mapped["kv"], owned["kv"]),
        ]
        for what, there, said in compared:
            if there != said:
                yield 9, f"device {device}: {there} {what}, the account says {said}"
        if created and released and not line["error"]:
            yield 12, f"a change created {created} chunks and released {released}"

    def _check_step(self, line: Line) -> Iterator[tuple[int, str]]:
        if line["resident"] != len(self.memory.residents):
            there = len(self.memory.residents)
            yield 9, f"{line['resident']} experts are resident, the trace has {there} in slots"
        if not 0 <= line["free_cells"] <= line["kv_cells"]:
            yield 9, f"{line['free_cells']:,} of {line['kv_cells']:,} K/V cells are free"

    def _check_end(self, line: Line) -> Iterator[tuple[int, str]]:
        if self._lost:
            return
        memory = self.memory
        left = {
            "chunks": len(memory.chunks),
            "mappings": sum(len(found.mappings) for found in memory.reservations.values()),
            "reservations": len(memory.reservations),
            "blocks": len(memory.blocks),
            "streams": len(memory.streams),
            "events": len(memory.events),
        }
        counts = ", ".join(f"{count:,} {what}" for what, count in left.items() if count)
        if counts:
            yield 9, f"left at the end: {counts}"


def _at(found: Reservation) -> str:
    return f"{found.address:#x} ({found.owner or 'of no owner'})"


def _chunk(mapping: Mapping) -> str:
    chunk = mapping.chunk
    return f"chunk {chunk.handle} at {chunk.address:#x}"


def _expert(line: Line) -> str:
    return f"expert {line['layer']}.{line['expert']}"


def _slot(slot: int | None) -> str:
    return "none" if slot is None else f"slot {slot}"
