"""Record what happens to memory: every driver operation and every event of a ledger, a line each.

    vmm, loading, K/V, experts  ->  RecordingDriver  ->  driver    what was called, and the answer
    ledger, experts, sequences  ->  Recorder.announce              what it was for

The recording driver stands where a driver stands and changes nothing: arguments, answers and errors
pass through. A run without a trace has none of this in its way. docs/trace.md describes the lines,
`trace_reader` reads them.

A line is written when its call has returned, and handed to the system at once, so that a process
that is killed leaves what it did. Rejected: a file that appears when it is whole, as others of this
program do; the run that one wants to look into is the one that ended badly.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from strata_nb.errors import ConfigError
from strata_nb.execution import DeviceFacts, Driver
from strata_nb.interrupts import interrupts_later
from strata_nb.vmm import Granularity

R = TypeVar("R")

FORMAT = "strata_nb trace"
VERSION = 1
Event = Mapping[str, object] | object  # a mapping with a "kind", or a dataclass that names it
Announce = Callable[[Event], None]


class _Place(NamedTuple):
    """Addresses whose owner is known."""

    address: int
    size: int
    device: int | None
    owner: str


class Recorder:
    """Write the lines of one trace; several threads may.

    say   called with one line when the file cannot be written any more, where the trace then ends;
          outside the lock, so that it may announce events itself

    No method but the making of one raises for the file: a run never ends because of its trace.
    """

    def __init__(self, path: str | os.PathLike[str], *, say: Callable[[str], object]) -> None:
        """Begin an empty file; ConfigError where that cannot be."""
        self._path = os.fspath(path)
        self._say = say
        self._lock = threading.Lock()
        self._started_ns = time.perf_counter_ns()
        self._lines = 0
        self._last_words = ""  # why the trace ended early, until it is said
        self._threads: dict[int, int] = {}  # a thread's own number -> 0, 1, ... as they appear
        self._places: dict[int, _Place] = {}
        self._device_of_handle: dict[int, int] = {}
        try:
            self._file: BinaryIO | None = open(path, "wb")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise ConfigError(
                f"--trace {self._path}: cannot be written: {error.strerror}",
                hint="name a file in a folder that exists and that you may write to",
            ) from error

    def begin(self, device: str, driver: Driver) -> None:
        """Write the first line: what is recorded, and what the devices are."""
        devices = []
        for index in range(driver.device_count):
            facts = driver.device_facts(index)
            devices.append(
                {
                    "device": index,
                    "name": facts.name,
                    "memory_bytes": facts.memory_bytes,
                    "minimum_bytes": driver.granularity(index, "minimum"),
                    "charged_bytes": driver.granularity(index, driver.chunk_granularity),
                }
            )
        with self._writing():
            self._write(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "device": device,
                    "devices": devices,
                }
            )

    def announce(self, event: Event) -> None:
        """Write an event: a mapping with a "kind", or a dataclass whose name is the kind."""
        if isinstance(event, Mapping):
            line = dict(event)
        elif is_dataclass(event) and not isinstance(event, type):
            line = {"kind": type(event).__name__.lower(), **asdict(event)}
        else:
            raise AssertionError(f"{event!r} is no event")
        kind = line.pop("kind")
        with self._writing():
            if kind in ("range", "block"):
                place = _Place(line["address"], line["size"], line["device"], line["owner"])
                self._places[place.address] = place
            self._append({"kind": kind, **line}, time.perf_counter_ns())

    def call(
        self, kind: str, fields: Mapping[str, Any], began_ns: int, answer: Mapping[str, Any]
    ) -> None:
        """Write a driver operation that began then and has just ended."""
        took_us = (time.perf_counter_ns() - began_ns) // 1000
        with self._writing():
            line = {"kind": kind, **fields, **self._whose(kind, fields, answer)}
            number = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self._append({**line, **answer, "us": took_us, "thread": number}, began_ns)

    def close(self) -> None:
        """Write the last line; may be called twice."""
        with self._writing():
            self._append({"kind": "end", "lines": self._lines + 1}, time.perf_counter_ns())
            file, self._file = self._file, None
            if file is not None:
                file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock for the block; what is to be said is said after it."""
        with self._lock:
            yield
            words, self._last_words = self._last_words, ""
        if words:
            self._say(words)

    def _whose(
        self, kind: str, fields: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return device and owner of what a call is about, where its arguments do not say them."""
        done, found = answer["outcome"] == "ok", dict[str, object]()
        handle, address = fields.get("handle"), fields.get("address", fields.get("destination", 0))
        if handle in self._device_of_handle:
            found["device"] = self._device_of_handle[handle]
        for place in self._places.values():
            if place.address <= address < place.address + place.size:
                found["owner"] = place.owner
                if place.device is not None:
                    found["device"] = place.device
        if done and kind == "create":
            self._device_of_handle[answer["result"]] = fields["device"]
        elif done and kind == "release":
            self._device_of_handle.pop(fields["handle"], None)
        elif done and kind in ("address_free", "free", "free_host", "unregister_host"):
            self._places.pop(fields["address"], None)
        return found

    def _append(self, line: Mapping[str, object], at_ns: int) -> None:
        self._write({"t_us": (at_ns - self._started_ns) // 1000, **line})

    def _write(self, line: Mapping[str, object]) -> None:
        if self._file is None:
            return
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=_plain)
        try:
            self._file.write(text.encode() + b"\n")
            self._file.flush()
            self._lines += 1
        except OSError as error:
            file, self._file = self._file, None
            with suppress(OSError):  # what is buffered cannot be written either
                file.close()
            self._last_words = (
                f"warning: the trace {self._path} ends behind line {self._lines:,}: "
                f"{error.strerror or error}"
            )


def _plain(value: object) -> object:
    """Return a numpy number, or a tuple of a driver, as JSON has it."""
    if hasattr(value, "item"):
        return value.item()
    return str(value)


class RecordingDriver:
    """Stand before a driver and record what it is asked; `execution.Driver` says what each does.

    driver   to which everything passes; closed by `close`, which is not recorded
    """

    def __init__(self, driver: Driver, recorder: Recorder) -> None:
        self.driver = driver
        self._recorder = recorder

    def _call(self, operation: Callable[..., R], **fields: Any) -> R:
        """Call an operation with the values of `fields`, in their order, and record it.

        Ctrl-C comes when the line is written: what was done and is not in the trace would make all
        lines behind it wrong.
        """
        with interrupts_later():
            return self._call_whole(operation, fields)

    def _call_whole(self, operation: Callable[..., R], fields: Mapping[str, Any]) -> R:
        began = time.perf_counter_ns()
        kind = operation.__name__
        shown = {key: value for key, value in fields.items() if not callable(value)}
        try:
            result = operation(*fields.values())
        except BaseException as error:
            answer = {"outcome": type(error).__name__, "message": str(error)}
            self._recorder.call(kind, shown, began, answer)
            raise
        answer = {"outcome": "ok"}
        if result is not None:
            answer["result"] = result  # type: ignore[assignment]
        self._recorder.call(kind, shown, began, answer)
        return result

    # Memory.

    @property
    def chunk_granularity(self) -> Granularity:
        return self.driver.chunk_granularity

    def granularity(self, device: int, kind: Granularity) -> int:
        return self.driver.granularity(device, kind)  # a fact, which the first line has

    def reserve(self, size: int) -> int:
        return self._call(self.driver.reserve, size=size)

    def address_free(self, address: int, size: int) -> None:
        self._call(self.driver.address_free, address=address, size=size)

    def create(self, size: int, device: int) -> int:
        return self._call(self.driver.create, size=size, device=device)

    def release(self, handle: int) -> None:
        self._call(self.driver.release, handle=handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call(self.driver.map, address=address, size=size, handle=handle)

    def unmap(self, address: int, size: int) -> None:
        self._call(self.driver.unmap, address=address, size=size)

    def set_access(self, address: int, size: int, devices: Sequence[int]) -> None:
        self._call(self.driver.set_access, address=address, size=size, devices=list(devices))

    def retire(self, address: int, size: int) -> None:
        self._call(self.driver.retire, address=address, size=size)

    def reinstate(self, address: int, size: int) -> None:
        self._call(self.driver.reinstate, address=address, size=size)

    def mem_info(self, device: int) -> tuple[int, int]:
        return self._call(self.driver.mem_info, device=device)

    def can_access(self, device: int, owner: int) -> bool:
        return self._call(self.driver.can_access, device=device, of=owner)

    def synchronize(self, device: int) -> None:
        self._call(self.driver.synchronize, device=device)

    # Work.

    @property
    def device_count(self) -> int:
        return self.driver.device_count

    def device_facts(self, device: int) -> DeviceFacts:
        return self.driver.device_facts(device)

    def allocate(self, size: int, device: int) -> int:
        return self._call(self.driver.allocate, size=size, device=device)

    def free(self, address: int) -> None:
        self._call(self.driver.free, address=address)

    def allocate_host(self, size: int) -> int:
        return self._call(self.driver.allocate_host, size=size)

    def free_host(self, address: int) -> None:
        self._call(self.driver.free_host, address=address)

    def register_host(self, address: int, size: int) -> None:
        self._call(self.driver.register_host, address=address, size=size)

    def unregister_host(self, address: int) -> None:
        self._call(self.driver.unregister_host, address=address)

    def stream_create(self, device: int, priority: int = 0) -> int:
        return self._call(self.driver.stream_create, device=device, priority=priority)

    def stream_destroy(self, stream: int) -> None:
        self._call(self.driver.stream_destroy, stream=stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call(self.driver.stream_synchronize, stream=stream)

    def event_create(self, device: int, timed: bool = False) -> int:
        return self._call(self.driver.event_create, device=device, timed=timed)

    def event_destroy(self, event: int) -> None:
        self._call(self.driver.event_destroy, event=event)

    def event_record(self, event: int, stream: int) -> None:
        self._call(self.driver.event_record, event=event, stream=stream)

    def event_wait(self, stream: int, event: int) -> None:
        self._call(self.driver.event_wait, stream=stream, event=event)

    def event_query(self, event: int) -> bool:
        return self._call(self.driver.event_query, event=event)

    def event_synchronize(self, event: int) -> None:
        self._call(self.driver.event_synchronize, event=event)

    def event_elapsed_s(self, start: int, end: int) -> float:
        return self._call(self.driver.event_elapsed_s, first=start, second=end)

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        self._call(
            self.driver.copy_async, destination=destination, source=source, size=size, stream=stream
        )

    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        self._call(self.driver.fill_async, address=address, value=value, size=size, stream=stream)

    def launch_host(self, stream: int, function: Callable[[], object]) -> None:
        self._call(self.driver.launch_host, stream=stream, function=function)

    def close(self) -> None:
        self.driver.close()


if TYPE_CHECKING:
    _is_a_driver: type[Driver] = RecordingDriver
