"""Read a trace (docs/trace.md): lines whose fields were looked at, and nothing is believed.

What is unknown, a kind of event or a field, is kept and passed over. What is known must be whole: a
call without its size is a damaged file, not a call of size 0.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, TypeGuard

from strata_nb.errors import FileFormatError
from strata_nb.tracing import FORMAT, VERSION

# Of each call: its fields, all whole numbers but `devices`, and whether it returns a number.
CALLS: dict[str, tuple[str, ...]] = {
    "reserve": ("size",),
    "address_free": ("address", "size"),
    "create": ("size", "device"),
    "release": ("handle",),
    "map": ("address", "size", "handle"),
    "unmap": ("address", "size"),
    "set_access": ("address", "size", "devices"),
    "retire": ("address", "size"),
    "reinstate": ("address", "size"),
    "mem_info": ("device",),
    "can_access": ("device", "of"),
    "synchronize": ("device",),
    "allocate": ("size", "device"),
    "allocate_host": ("size",),
    "free": ("address",),
    "free_host": ("address",),
    "register_host": ("address", "size"),
    "unregister_host": ("address",),
    "stream_create": ("device", "priority"),
    "stream_destroy": ("stream",),
    "stream_synchronize": ("stream",),
    "event_create": ("device",),
    "event_destroy": ("event",),
    "event_synchronize": ("event",),
    "event_query": ("event",),
    "event_record": ("event", "stream"),
    "event_wait": ("stream", "event"),
    "event_elapsed_s": ("first", "second"),
    "copy_async": ("destination", "source", "size", "stream"),
    "fill_async": ("address", "value", "size", "stream"),
    "launch_host": ("stream",),
}
RETURNS = {
    "reserve": int,
    "create": int,
    "mem_info": list,
    "can_access": bool,
    "allocate": int,
    "allocate_host": int,
    "stream_create": int,
    "event_create": int,
    "event_query": bool,
    "event_elapsed_s": float,
}
EVENTS: dict[str, tuple[str, ...]] = {
    "range": ("device", "owner", "address", "size", "chunk_bytes"),
    "block": ("device", "owner", "address", "size"),
    "publish": ("device", "owner", "address", "size"),
    "account": (
        "device",
        "chunk_bytes",
        "capacity",
        "experts",
        "kv",
        "loan",
        "spare",
        "given_back",
        "stuck",
        "error",
    ),
    "change": (
        "device",
        "request",
        "before",
        "after",
        "slots_before",
        "slots",
        "resident",
        "moved",
        "filled",
        "error",
    ),
    "fill": ("layer", "expert", "slot", "address", "size"),
    "move": ("layer", "expert", "slot", "address", "size"),
    "evict": ("layer", "expert", "slot", "address", "size"),
    "sequence": ("sequence", "state"),
    "step": (
        "device",
        "rows",
        "kv_cells",
        "free_cells",
        "slots",
        "resident",
        "hits",
        "misses",
    ),
    "end": ("lines",),
}
_TEXTS = {"owner", "state", "request", "error"}
_HOLDINGS = {"before", "after"}
_OWNERS = ("experts", "kv", "loan", "spare")  # each with a number of chunks
_OK = "ok"


@dataclass(frozen=True, slots=True)
class Line:
    """Hold one line of a trace.

    number       of the line in its file, the header's is 1
    outcome      of a call: "ok" or the type of its error; None for an event
    fields       all others
    """

    number: int
    t_us: int
    kind: str
    outcome: str | None
    fields: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether this is a call that did what it was asked."""
        return self.outcome == _OK

    @property
    def known(self) -> bool:
        """Whether the fields of this kind were looked at."""
        return self.kind in CALLS or self.kind in EVENTS

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]


@dataclass(frozen=True, slots=True)
class TracedDevice:
    """Describe a device as the header does; sizes are bytes."""

    name: str
    memory_bytes: int
    minimum_bytes: int
    charged_bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Hold a trace: its header, its lines, and whether it was closed."""

    device: str
    started: str
    devices: tuple[TracedDevice, ...]
    lines: list[Line]

    @property
    def whole(self) -> bool:
        """Whether the trace has its end; else what is open in it may have been closed later."""
        return bool(self.lines) and self.lines[-1].kind == "end"


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Return a trace; a half line at its end is left out. Raises FileFormatError and OSError."""
    with open(path, "rb") as file:
        content = file.read()
    parser = _Parser(os.fspath(path))
    texts = content.split(b"\n")
    texts.pop()  # empty, or half a line
    if not texts:
        raise parser.refuse(f"no first line in {len(content):,} bytes")
    device, started, devices = parser.header(texts[0])
    lines = []
    for text in texts[1:]:
        parser.offset += len(texts[parser.number - 1]) + 1
        parser.number += 1
        lines.append(parser.line(text, len(devices)))
    for line in lines[:-1]:
        if line.kind == "end":
            raise parser.refuse(f"line {line.number:,} is the end, and there are more")
    if lines and lines[-1].kind == "end" and lines[-1]["lines"] != lines[-1].number:
        raise parser.refuse(f"{lines[-1].number:,} lines, there were {lines[-1]['lines']:,}")
    return Trace(device, started, devices, lines)


class _Parser:
    """Parse lines, knowing for errors where they are."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.offset = 0
        self.number = 1

    def refuse(self, message: str) -> FileFormatError:
        return FileFormatError(
            self._path, self.offset, message, hint="a trace is written by generate --trace FILE"
        )

    def _object(self, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
            if b"\\u" in text:
                json.dumps(found, ensure_ascii=False).encode()  # not so for half a character
        except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
            raise self.refuse(f"line {self.number:,} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise self.refuse(f"line {self.number:,} is no JSON object")
        return found

    def header(self, text: bytes) -> tuple[str, str, tuple[TracedDevice, ...]]:
        found = self._object(text)
        if found.get("format") != FORMAT:
            raise self.refuse("not a trace: its first line does not say so")
        if found.get("version") != VERSION:
            raise self.refuse(f"a trace of version {found.get('version')}, known is {VERSION}")
        devices = found.get("devices")
        if not isinstance(devices, list) or not devices:
            raise self.refuse("the first line names no devices")
        names = ("memory_bytes", "minimum_bytes", "charged_bytes")
        for device in devices:
            numbers = isinstance(device, dict) and [device.get(name) for name in names]
            if not numbers or not all(_is_whole(number) and number > 0 for number in numbers):
                raise self.refuse(f"a device without its sizes: {device}")
        return (
            str(found.get("device", "")),
            str(found.get("started", "")),
            tuple(
                TracedDevice(str(device.get("name", "")), *(device[name] for name in names))
                for device in devices
            ),
        )

    def line(self, text: bytes, devices: int) -> Line:
        found = self._object(text)
        t_us, kind = found.pop("t_us", None), found.pop("kind", None)
        if not _is_whole(t_us) or not isinstance(kind, str):
            raise self.refuse(f"line {self.number:,} has no t_us or no kind")
        outcome = found.pop("outcome", None)
        if outcome is not None and not isinstance(outcome, str):
            raise self.refuse(f"line {self.number:,}: {kind} with outcome {outcome!r}")
        if kind in (CALLS if outcome is None else EVENTS):
            why = "a call without an outcome" if outcome is None else "an event with an outcome"
            raise self.refuse(f"line {self.number:,}: {kind}, {why}")
        wanted = (EVENTS if outcome is None else CALLS).get(kind, ())
        for name in wanted:
            if not _fits(name, found.get(name), kind):
                raise self.refuse(
                    f"line {self.number:,}: {kind} with {name} {found.get(name, 'missing')!r}"
                )
        returned = found.get("result")
        if outcome == _OK and kind in RETURNS and not _is_answer(kind, returned):
            raise self.refuse(f"line {self.number:,}: {kind} with result {returned!r}")
        device = found.get("device") if wanted else None
        if device is not None and not (_is_whole(device) and 0 <= device < devices):
            raise self.refuse(f"line {self.number:,}: device {device} of {devices}")
        return Line(self.number, t_us, kind, outcome, found)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _fits(name: str, value: object, kind: str) -> bool:
    if name in _TEXTS:
        return isinstance(value, str)
    if name in _HOLDINGS:
        return isinstance(value, dict) and all(_is_whole(value.get(owner)) for owner in _OWNERS)
    if name == "devices":
        return isinstance(value, list) and all(map(_is_whole, value))
    return _is_whole(value) or (value is None and (kind, name) == ("block", "device"))


def _is_answer(kind: str, value: object) -> bool:
    if kind == "mem_info":
        return isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value))
    return isinstance(value, bool) if RETURNS[kind] is bool else _is_whole(value)
