"""A model on a device that is open: its steps, what it says of itself, and the end of it.

`device_opening` has put everything in its place. Steps are `device_steps`; here is the lock under
which they and all that looks at memory, or moves it, take turns.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.backend import Backend
from strata_nb.cache.accounts import Change
from strata_nb.cache.kv_layout import BLOCK_CELLS
from strata_nb.cache.look import Look
from strata_nb.cache.plan import Memory
from strata_nb.cache.profile import rank_by_use, save_profile
from strata_nb.device_layout import Asked
from strata_nb.device_opening import open_device
from strata_nb.device_pool import Served
from strata_nb.errors import ConfigError, DeviceLost, UnsupportedDevice
from strata_nb.gguf import GGUFFile
from strata_nb.interrupts import interrupts_later
from strata_nb.kernels.reference import Floats
from strata_nb.link_rate import link_rate
from strata_nb.models.description import Description
from strata_nb.options import Options
from strata_nb.plain_read import PlainRead
from strata_nb.progress import Progress
from strata_nb.reports import DeviceReport, Report
from strata_nb.sampling import Choice
from strata_nb.steps import Row, closed_error
from strata_nb.tracing import Announce

if TYPE_CHECKING:
    from strata_nb.card_profile import WindowProfile


class Reserved(NamedTuple):
    """Answer a request to leave memory free: the change, the reserve, and what there is then."""

    change: Change
    reserve_bytes: int
    device: DeviceReport


class DeviceModel:
    """Run steps of a model on a backend's device; `steps.StepModel` says what each method does.

    `arena`, `kv` and `ledger` may be looked at between steps. `off` says what the device does not
    do since it was opened, and why.
    """

    def __init__(
        self,
        file: GGUFFile,
        description: Description,
        options: Options,
        ctx_size: int,
        max_rows: int,
        backend: Backend[Any],
        *,
        progress: Progress | None,
        compiling: Progress | None = None,
        say: Callable[[str], None],
        announce: Announce | None = None,
    ) -> None:
        """Load the model, or leave nothing behind but the backend, which stays the caller's."""
        self.description = description
        self.max_rows = max_rows
        self._backend = backend
        self._forgotten: deque[int] = deque()
        self._process = os.getpid()
        self._turn = threading.RLock()  # of the thread that runs a step, or changes sequences
        self._announce = announce
        asked = Asked(file, description, options, ctx_size, max_rows, backend, say, announce)
        told = None if announce is None else self._tell_step
        with ExitStack() as undo:
            found = open_device(asked, undo, progress=progress, compiling=compiling, told=told)
            self.kv, self.arena, self.ledger = found.kv, found.arena, found.ledger
            self.warnings, self.off = found.warnings, found.off
            self._given, self._programs, self._counts = found.given, found.programs, found.counts
            self._filling_places, self._pool = found.filling, found.pool
            self._elastic, self._residency = found.elastic, found.residency
            self._steps = found.steps
            self._resources: ExitStack | None = undo.pop_all()

    # Steps.

    @property
    def goes_ahead(self) -> bool:
        return self._steps.windows is not None

    def open_sequence(self) -> int:
        with self._turn:
            self._settle()
            sequence = self.kv.open_sequence()
            self._tell("sequence", sequence=sequence, state="open")
            return sequence

    def forget_sequence(self, sequence: int) -> None:
        self._forgotten.append(sequence)

    def length(self, sequence: int) -> int:
        with self._turn:
            self._opened()
            return self.kv.length(sequence)

    def rewind(self, sequence: int, length: int) -> None:
        with self._turn:
            self._opened()
            if length != self.kv.length(sequence):
                self._settle()
                self._steps.forget(sequence)
                self.kv.rewind(sequence, length)

    def make_room(self, sequence: int, cells: int, *, prompt: bool) -> None:
        with self._turn:
            self._opened()
            if self._elastic is None:
                return
            if not prompt and self.kv.has_room(sequence, cells):
                return
            self._settle()
            self._steps.return_loan()
            if prompt:
                self._elastic.before_prompt({sequence: cells})
            else:
                self._elastic.before_step({sequence: cells})

    def step(self, rows: Sequence[Row]) -> Floats:
        with self._turn:
            self._settle()
            return self._steps.step(rows)

    def choose(
        self, rows: Sequence[Row], how: Sequence[Choice], ahead: Sequence[Choice] = ()
    ) -> list[int]:
        with self._turn:
            self._opened()
            if self._forgotten:
                self._settle()
            return self._steps.choose(rows, how, ahead)

    def _tell_step(self, rows: int) -> None:
        """Announce a step, with the figures that it leaves behind."""
        hits, misses = self.arena.tally.tolist()
        kv, arena = self.kv, self.arena
        self._tell(
            "step",
            device=self._backend.device,
            rows=rows,
            kv_cells=kv.usable_blocks * BLOCK_CELLS,
            free_cells=kv.free_cells,
            slots=arena.usable_slots,
            resident=arena.resident,
            hits=hits,
            misses=misses,
            filled=arena.filled,
            streamed=self._steps.streamed[0],
            by_cpu=self._served().experts,
        )

    def _tell(self, kind: str, **fields: object) -> None:
        if self._announce is not None:
            self._announce({"kind": kind, **fields})

    def chosen(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the experts that the rows of the step begun last used: (rows, layers, top_k)."""
        self._opened()
        return self._steps.chosen(rows)

    # Measuring.

    def step_bytes(self, cells: int) -> int:
        """Return the bytes that a step of one row reads: weights, and K/V of so many cells."""
        kv_bytes = cells * self.kv.layout.block_bytes // BLOCK_CELLS
        return self.description.row_weight_bytes + kv_bytes

    def plain_read(self) -> PlainRead:
        """Measure how fast the device's memory can be read; StrataError where that cannot be."""
        with self._turn:
            self._settle()
            return self._backend.plain_read()

    def link_rate(self) -> PlainRead:
        """Measure how fast pinned memory is copied to the device; StrataError where it cannot."""
        with self._turn:
            self._settle()
            return link_rate(self._backend.driver, self._backend.device)

    def profile(self, cells: int) -> WindowProfile:
        """Measure where the time of the last step goes, whose one row sees so many cells.

        It must have given logits. ConfigError where it cannot run again; UnsupportedDevice where
        programs are no graphs.
        """
        with self._turn:
            self._settle()
            if not self._steps.reads_host and not self.arena.is_complete:
                raise UnsupportedDevice(
                    "--no-pin: a window whose experts the CPU computes cannot be looked into",
                    hint="leave it out, or give --expert-cache 100%",
                )
            if not self._steps.can_run_again:  # its cells may be nowhere, or another's
                raise ConfigError(
                    "the last step cannot be measured: it had several rows, or its session was "
                    "closed or rewound since, or had begun another one",
                    hint="read one token (Session.next_logits), and measure behind it",
                )
            self._steps.silence()
            programs = [self._programs.body, self._programs.head, self._programs.choice]
            kv_layer_bytes = cells * self.kv.layout.layer_bytes // BLOCK_CELLS
            return self._backend.profile(programs, 1, kv_layer_bytes)

    # The rest.

    def report(self) -> Report:
        with self._turn:
            self._pause()
            if self._elastic is not None:
                self._elastic.flush()  # what is said and what is reported shall agree
            return self._report()

    def _report(self) -> Report:
        ledger = self.ledger.describe()
        owners = ledger.bytes_by_owner
        memory: Memory | None = None
        if self._backend.has_slots:
            memory = self.ledger.memory()
            owners["outside"] = self.ledger.outside_bytes(memory)
        device = DeviceReport(
            self._backend.name,
            memory and memory.free_bytes,
            memory and memory.total_bytes,
            memory and memory.device_bytes,
            self.ledger.reserve_bytes,
            ledger.slots,
            ledger.resident,
            ledger.kv_cells,
            owners,
        )
        hits, misses = self.arena.tally.tolist()
        moved = self._residency
        missed_bytes = moved.missed_bytes if self._backend.has_slots else 0
        served = self._served()
        streamed, streamed_bytes = self._steps.streamed
        return Report(
            devices=(device,),
            hits=hits,
            misses=misses,
            inserted=moved.inserted,
            inserted_bytes=moved.inserted_bytes,
            missed_bytes=missed_bytes,
            link_bytes=max(0, missed_bytes - served.bytes) + moved.copied_bytes,
            filled=self.arena.filled,
            streamed=streamed,
            streamed_bytes=streamed_bytes,
            cpu_experts=served.experts,
            cpu_bytes=served.bytes,
            cpu_wait_s=served.waited_s,
        )

    def _served(self) -> Served:
        """Return what the CPU has computed of what was missed."""
        return self._pool.served() if self._pool is not None else Served(0, 0, 0.0)

    def look(self) -> Look:
        """Look at the device's chunks as they are now."""
        with self._turn:
            self._pause()
            return replace(self.ledger.look(), by_cpu=self._served().experts)

    def set_reserve(self, reserve_bytes: int | None) -> Reserved:
        """Leave so much of the device free for others; None: as much as at the start.

        The answer is of the moment when that was done, whatever others ask for at the same time.
        """
        with self._turn:
            self._settle()
            self._steps.return_loan()
            if reserve_bytes is None:
                reserve_bytes = self.ledger.plan.needs.reserve_bytes
            if self._elastic is not None:
                self._elastic.flush()
            try:
                change = self.ledger.set_reserve(reserve_bytes)
            finally:
                if self._elastic is not None:
                    self._elastic.reconsider()
            (device,) = self._report().devices
            return Reserved(change, self.ledger.reserve_bytes, device)

    def empty_slots(self) -> None:
        """Let every expert leave its slot, and forget the profile and what was used so far."""
        with self._turn:
            self._settle()
            self._steps.return_loan()
            with interrupts_later():
                self._residency.forget()
                self._counts.use[:] = 0
                self.arena.prior[:] = 0

    def save_profile(self, path: str | os.PathLike[str]) -> None:
        """Write how often experts were used, added to the order of the profile given."""
        with self._turn:
            self._settle()
            save_profile(path, rank_by_use(self.arena.use, self._given.prior))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the routes of all steps so far."""
        if self._given.trace is None:
            raise ConfigError(
                "no routing trace was kept", hint="open the engine with Options(routing_trace=...)"
            )
        self._given.trace.save(path)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a fork owns none of it
        # To the end, whatever fails or interrupts it: the backend frees next what threads of the
        # CPU pool would go on reading.
        with self._turn, interrupts_later():
            resources, self._resources = self._resources, None
            if resources is None:
                return
            with suppress(DeviceLost), resources:  # nothing of it is left, and who lost it was told
                if self._elastic is not None:
                    self._elastic.flush()
                self._steps.end()

    def _opened(self) -> None:
        if self._resources is None:
            raise closed_error()

    def _pause(self) -> None:
        """Settle for somebody who looks, and may look again behind the next token."""
        self._settle()
        self._steps.pause()

    def _settle(self) -> None:
        """Let no step be in flight, and end the sequences whose sessions are gone."""
        self._opened()
        self._steps.settle()
        while self._forgotten:
            if self.kv.is_open(self._forgotten[0]):
                self._steps.forget(self._forgotten[0])
                self.kv.close_sequence(self._forgotten[0])
                self._tell("sequence", sequence=self._forgotten[0], state="closed")
            self._forgotten.popleft()
