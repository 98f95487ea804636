"""Make one HTML page of a trace, which needs no network and no other file.

The page is `trace_page.html` with the trace in it, in the form that it draws: what a line did to a
chunk is a *step* (where the chunk is behind it, and in which state), what it did to a number is a
point of a *series*. So the page rebuilds nothing: it goes through steps forwards or backwards. Of
100,000 lines it draws those that can be seen.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from importlib.resources import files
from typing import Any

from strata_nb.trace_checker import TITLES, Checker, Violation
from strata_nb.trace_memory import Chunk, Memory, Reservation
from strata_nb.trace_reader import Line, Trace

# States of a chunk; the page has the same list.
ABSENT, SPARE, NO_ACCESS, USABLE, RETIRED, STUCK = range(6)
# Events that end what the calls and events before them were for.
_ENDING = {"account", "block", "change", "end", "fill", "move", "range", "sequence", "step"}
_STEP_NUMBERS = ("kv_cells", "free_cells", "slots", "resident", "hits", "misses")
_PLACEHOLDER = "/*TRACE*/null"


def trace_page(trace: Trace, name: str) -> str:
    """Return the page of a trace; `name` is its title."""
    template = files("strata_nb").joinpath("trace_page.html").read_text(encoding="utf-8")
    text = json.dumps(page_data(trace, name), ensure_ascii=False, separators=(",", ":"))
    head, tail = template.split(_PLACEHOLDER)
    return head + text.replace("<", "\\u003c") + tail  # nothing in it ends the script


def page_data(trace: Trace, name: str) -> dict[str, Any]:
    """Return what the page draws, in columns."""
    drawing = _Drawing(trace)
    for index, line in enumerate(trace.lines):
        drawing.add(index, line)
    return {
        "name": name,
        "device": trace.device,
        "started": trace.started,
        "whole": trace.whole,
        **drawing.columns(),
    }


class _Drawing:
    """Collect the columns; an index counts the lines behind the header."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._checker = Checker(trace)
        self._violations: list[Violation] = []
        self._kinds: dict[str, int] = {}
        self._lines: dict[str, list[Any]] = defaultdict(list)
        self._groups: list[int] = []  # the last index of each group
        self._lanes: list[dict[str, Any]] = []
        self._lane_of: dict[int, int] = {}  # base address -> lane, while it is reserved
        self._steps: dict[str, list[int]] = defaultdict(list)
        self._places = [0] * len(trace.devices)
        self._series: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        self._experts: dict[str, list[int]] = defaultdict(list)
        self._chunk_bytes = [0] * len(trace.devices)
        self._holders: dict[int, str] = {}  # handle -> whose chunk it is
        self._held: Counter[str] = Counter()  # bytes, by the name of a series

    def add(self, index: int, line: Line) -> None:
        memory = self._checker.memory
        text = _text(line, memory, len(self._trace.devices))
        gone = memory.chunks.get(line["handle"]) if line.kind == "release" else None
        moved = self._touched(line, memory) if line.kind == "unmap" else []
        self._violations += self._checker.check(line)
        self._lines["t"].append(line.t_us)
        self._lines["kind"].append(self._kinds.setdefault(line.kind, len(self._kinds)))
        self._lines["state"].append(0 if line.outcome is None else 1 if line.ok else 2)
        self._lines["us"].append(line.fields.get("us", 0) if line.outcome is not None else 0)
        self._lines["text"].append(text)
        self._group(index, line)
        self._lane(index, line)
        if gone is not None and line.ok:
            self._step(index, gone, None)
        for chunk in moved or self._touched(line, memory):
            self._step(index, chunk, memory)
        self._numbers(index, line, memory)

    def _group(self, index: int, line: Line) -> None:
        """End a group with an event, and with all that follow it at once; each step has its own."""
        ends = line.outcome is None and line.kind in _ENDING
        after_step = index > 0 and self._trace.lines[index - 1].kind == "step"
        if ends and self._groups and self._groups[-1] == index - 1 and not after_step:
            self._groups[-1] = index
        elif ends:
            self._groups.append(index)

    def _lane(self, index: int, line: Line) -> None:
        if line.kind == "range":
            device, address = line["device"], line["address"]
            self._chunk_bytes[device] = line["chunk_bytes"]
            self._lane_of[address] = len(self._lanes)
            self._lanes.append(
                {
                    "device": device,
                    "owner": line["owner"],
                    "address": f"{address:#x}",
                    "cells": -(-line["size"] // max(1, line["chunk_bytes"])),
                    "from": index,
                    "to": len(self._trace.lines),
                }
            )
        elif line.kind == "address_free" and line.ok and line["address"] in self._lane_of:
            self._lanes[self._lane_of.pop(line["address"])]["to"] = index

    def _touched(self, line: Line, memory: Memory) -> list[Chunk]:
        """Return the chunks whose place or state a call has changed, or may have."""
        kind = line.kind
        if kind == "create" and line.ok:
            return [memory.chunks[line["result"]]]
        changing = ("map", "unmap", "set_access", "retire", "reinstate")
        if kind in changing and (line.ok or kind == "unmap"):
            mappings = memory.mappings(line["address"], line["size"]) or ()
            return [mapping.chunk for mapping in mappings]
        return []

    def _step(self, index: int, chunk: Chunk, memory: Memory | None) -> None:
        """Note where a chunk is now; without memory it is gone."""
        lane, position, state, holder = -1, 0, ABSENT, ""
        if memory is not None:
            state, found, holder = SPARE, None, "spare"
            if chunk.address is not None:
                found = memory.reservation(chunk.address)
            if found is not None and chunk.address is not None:
                state, holder = _state(found, chunk.address), found.owner or "other"
                lane = self._lane_of.get(found.address, -1)
                position = (chunk.address - found.address) // chunk.size
        self._places[chunk.device] = max(self._places[chunk.device], chunk.place + 1)
        for name, value in (
            ("line", index),
            ("device", chunk.device),
            ("place", chunk.place),
            ("handle", chunk.handle),
            ("lane", lane),
            ("position", position),
            ("state", state),
        ):
            self._steps[name].append(value)
        before = self._holders.pop(chunk.handle, "")
        if holder:
            self._holders[chunk.handle] = holder
        for owner, size in ((before, -chunk.size), (holder, chunk.size)):
            if owner and before != holder:
                name = f"{chunk.device}.{owner}"
                self._held[name] += size
                self._point(name, index, self._held[name])

    def _point(self, name: str, index: int, value: int) -> None:
        indices, values = self._series[name]
        if not values or values[-1] != value:
            indices.append(index)
            values.append(value)

    def _numbers(self, index: int, line: Line, memory: Memory) -> None:
        kind = line.kind
        if kind in ("allocate", "free", "block"):
            for device in range(len(self._trace.devices)):
                for owner in ("weights", "buffers", ""):
                    held = [
                        block.size
                        for block in memory.blocks.values()
                        if block.device == device and block.owner == owner
                    ]
                    self._point(f"{device}.{owner or 'other'}", index, sum(held))
        elif kind == "mem_info" and line.ok:
            self._point(f"{line['device']}.free", index, line["result"][0])
        elif kind == "publish":
            self._point(f"{line['device']}.published.{line['owner']}", index, line["size"])
        elif kind == "account":
            for name in ("loan", "given_back", "stuck", "capacity"):
                self._point(f"{line['device']}.{name}", index, line[name])
        elif kind == "step":
            for name in _STEP_NUMBERS:
                self._point(f"{line['device']}.{name}", index, line[name])
        elif kind in ("fill", "move", "evict"):
            found = memory.reservation(line["address"])
            lane = -1 if found is None else self._lane_of.get(found.address, -1)
            offset = 0 if found is None else line["address"] - found.address
            for name, value in (
                ("line", index),
                ("lane", lane),
                ("layer", line["layer"]),
                ("expert", line["expert"]),
                ("offset", offset),
                ("size", 0 if kind == "evict" else line["size"]),
            ):
                self._experts[name].append(value)

    def columns(self) -> dict[str, Any]:
        devices = [
            {
                "name": facts.name,
                "memory_bytes": facts.memory_bytes,
                "chunk_bytes": self._chunk_bytes[number],
                "places": self._places[number],
            }
            for number, facts in enumerate(self._trace.devices)
        ]
        return {
            "devices": devices,
            "kinds": list(self._kinds),
            "lines": self._lines,
            "groups": self._groups,
            "lanes": self._lanes,
            "steps": self._steps,
            "series": self._series,
            "experts": self._experts,
            "rules": len(TITLES),
            "violations": [
                {"line": found.line - 2, "text": str(found)} for found in self._violations[:100]
            ],
        }


def _state(found: Reservation, address: int) -> int:
    if address in found.stuck:
        return STUCK
    if address in found.retired:
        return RETIRED
    return USABLE if found.mappings[address].devices else NO_ACCESS


def _text(line: Line, memory: Memory, devices: int) -> str:
    """Return a line for people, but for its kind; addresses as places of their owners."""
    parts, fields = [], dict(line.fields)
    for name in ("us", "thread", "owner", "message", "error", "device" if devices == 1 else ""):
        fields.pop(name, None)
    if line.kind in ("range", "block", "publish"):
        parts.append(str(line["owner"]))
    if line.kind in ("fill", "move", "evict"):
        parts.append(f"expert {fields.pop('layer')}.{fields.pop('expert')}")
    if line.kind == "create" and line.ok:
        parts.append(f"chunk {fields.pop('result')}")
    for name, value in fields.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, dict):
            inside = " ".join(f"{key} {count}" for key, count in value.items() if count)
            parts.append(f"{name} {inside or 'nothing'}")
        elif not number:  # also a size or an address of a line that is not known
            parts.append(f"= {value}" if name == "result" else f"{name} {value}")
        elif name in ("address", "destination", "source"):
            parts.append(f"{'' if name == 'address' else name + ' '}{_place(value, memory)}")
        elif name == "result" and line.kind in ("reserve", "allocate", "allocate_host"):
            parts.append(f"at {value:#x}")
        elif name == "result":
            parts.append(f"= {value}")
        elif name == "size":
            parts.append(f"{value:,} bytes")
        elif name == "handle":
            parts.append(f"chunk {value}")
        else:
            parts.append(f"{name} {value:,}")
    trouble = line.fields.get("message") or line.fields.get("error")
    return ", ".join([*parts, str(trouble)] if trouble else parts)


def _place(address: int, memory: Memory) -> str:
    found = memory.reservation(address) or memory.block(address)
    if found is None or not found.owner:
        return f"{address:#x}"
    if isinstance(found, Reservation) and found.chunk_bytes:
        chunk, rest = divmod(address - found.address, found.chunk_bytes)
        return f"{found.owner}[{chunk}]" + (f"+{rest:#x}" if rest else "")
    return f"{found.owner}+{address - found.address:#x}"
