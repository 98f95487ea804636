"""A device that draws tokens and does nothing until somebody waits for it, made of host kernels.

A card works while the host goes on: what the host changes too early, a window in flight sees. Here
everything that a backend is given stands in a queue until somebody waits, so that each such mistake
changes tokens in every run, and not once in a hundred. Tables are copies, written by what is sent;
slots and K/V blocks are the driver's memory, as on a card.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_nb.addresses import memory_view
from strata_nb.backend import HostBackend
from strata_nb.errors import StrataError
from strata_nb.kernels.choices import CHOICE, WHOLE
from strata_nb.kernels.program import Launch, Program
from strata_nb.kernels.table import KERNELS
from strata_nb.options import Sampling
from strata_nb.progress import Progress, Say
from strata_nb.sampling import sample
from strata_nb.shared_tables import SharedTable


class Drawing(NamedTuple):
    """A program: what the host's kernels do of it, and the launches that they lack."""

    prepared: Any
    embed: dict[str, int] | None
    sample: dict[str, int] | None


class _Shared:
    def __init__(self, table: SharedTable, is_written: bool) -> None:
        self.table, self.is_written, self.sent = table, is_written, -1
        self.copy = table.array.copy()


class Flight:
    def __init__(self) -> None:
        self.words = np.empty(0, np.int64)
        self.has_ended = False


class DrawingBackend(HostBackend):
    """Queue what is asked for.

    begun      windows so far; most_in_flight of them at a time
    """

    chooses_tokens = True

    def __init__(self, text: str, threads: int = 1, *_: Any) -> None:
        super().__init__(text, threads)
        self.begun, self.most_in_flight = 0, 0
        self._in_flight = 0
        self._has_run = False
        self._queue: deque[Callable[[], None]] = deque()
        self._tables: list[_Shared] = []

    # Programs.

    def compile(
        self,
        programs: Sequence[Program],
        progress: Progress | None,
        say: Say,
        *,
        batches: Sequence[Program] = (),
        batch_rows: int = 0,
    ) -> None:
        super().compile([_of_the_host(one) for one in (*programs, *batches)], progress, say)

    def prepare(
        self, programs: Sequence[Program], *, batch_rows: int = 0, cuts: Sequence[int] = ()
    ) -> list[Any]:
        prepared = super().prepare([_of_the_host(one) for one in programs])
        return [
            Drawing(made, _arguments(program, "embed"), _arguments(program, "sample"))
            for made, program in zip(prepared, programs, strict=True)
        ]

    def run(self, program: Any, rows: int, first: int = 0, last: int | None = None) -> None:
        for one in self._tables:
            if one.sent != one.table.changes:
                one.sent = one.table.changes
                self._send_later(one.copy.ctypes.data, one.table.array)
        self._has_run = True
        self._queue.append(lambda: self._execute(program, rows, first, last))

    def _execute(self, program: Drawing, rows: int, first: int, last: int | None) -> None:
        if program.embed is not None and first == 0:
            tokens = memory_view(program.embed["tokens"], 8 * rows).view(np.int64)
            drawn = memory_view(program.embed["drawn"], 8 * rows).view(np.int64)
            tokens[:] = [max(0, drawn[-1 - t]) if t < 0 else t for t in tokens.tolist()]
        super().run(program.prepared, rows, first, last)
        if program.sample is not None:
            _draw(program.sample, rows)

    def wait(self) -> None:
        self._do()
        self._in_flight = 0
        if self._has_run:
            for one in self._tables:
                if one.is_written:
                    one.table.receive()[...] = one.copy
        self._has_run = False

    def _do(self, until: Callable[[], bool] = lambda: False) -> None:
        while self._queue and not until():
            self._queue.popleft()()

    # Memory.

    def share(self, table: SharedTable, *, is_written: bool = False) -> int:
        self._tables.append(_Shared(table, is_written))
        return int(self._tables[-1].copy.ctypes.data)

    def send(self, address: int, array: NDArray[Any]) -> None:
        self._send_later(address, array)

    def _send_later(self, address: int, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
        self._queue.append(lambda: _write(address, data))

    def fetch(self, address: int, array: NDArray[Any]) -> None:
        self._do()
        super().fetch(address, array)

    # Windows.

    def flights(self, sent_bytes: int, fetched_bytes: int) -> DrawingBackend:  # type: ignore[override]
        return self

    def begin(
        self,
        program: Any,
        rows: int,
        sent: Sequence[tuple[int, NDArray[np.uint8]]],
        fetched: Sequence[tuple[int, int]],
    ) -> Flight:
        for address, data in sent:
            self._send_later(address, data)
        self.run(program, rows)
        flight = Flight()

        def end() -> None:
            parts = [memory_view(place, size).copy().view(np.int64) for place, size in fetched]
            flight.words = np.concatenate(parts)
            flight.has_ended = True

        self._queue.append(end)
        self.begun += 1
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        assert self._in_flight <= 2
        return flight

    def land(self, flight: Flight) -> NDArray[np.int64]:
        self._do(until=lambda: flight.has_ended)
        self._in_flight -= 1
        return flight.words


def _write(address: int, data: NDArray[np.uint8]) -> None:
    memory_view(address, data.nbytes)[:] = data


def _of_the_host(program: Program) -> Program:
    return tuple(one for one in program if one.kernel != "sample")


def _arguments(program: Program, kernel: str) -> dict[str, int] | None:
    found: list[Launch] = [one for one in program if one.kernel == kernel]
    if not found:
        return None
    names = [argument.name for argument in KERNELS[kernel].arguments]
    return dict(zip(names, found[0].arguments, strict=True))


def _draw(words: dict[str, int], rows: int) -> None:
    """Draw tokens as a card does, by their records."""
    size = words["vocabulary"]
    logits = memory_view(words["logits"], 4 * rows * size).view(np.float32).reshape(rows, size)
    records = memory_view(words["choices"], CHOICE.itemsize * rows).view(CHOICE)
    chosen = memory_view(words["chosen"], 8 * rows).view(np.int64)
    for row, record in enumerate(records):
        sampling = Sampling(
            temperature=float(record["temperature"]),
            top_k=int(record["top_k"]),
            top_p=float(record["top_p"] / WHOLE),
            min_p=math.exp(record["least"]),
            repeat_penalty=float(record["repeat_penalty"]),
            presence_penalty=float(record["presence_penalty"]),
            frequency_penalty=float(record["frequency_penalty"]),
            repeat_last_n=-1,
        )
        recent = record["recent"][: record["recent_count"]]
        history = np.repeat(recent[:, 0], recent[:, 1]).tolist()
        banned = record["banned"][: record["banned_count"]].tolist()
        chosen[row] = -1
        with suppress(StrataError):
            random = float(record["random"] / WHOLE)
            chosen[row] = sample(logits[row], history, sampling, random, banned)
