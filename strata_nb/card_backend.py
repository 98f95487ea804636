"""Run programs on a graphics card: captured graphs for numbers of rows.

    prepare   load the kernels; for 1 to 8 rows, and for batches of some sizes, capture the
              program's launches as a graph, or as several where it may be cut
    run       send the tables that the host changed, launch the graphs; nothing waits
    wait      bring back what programs count
    flights   windows whose results are taken while the next one runs (card_flights.py)

Graphs are captured once. What changes under them lies in memory that they name: the step's record
and the tables. The host has these tables too and changes its own copies; the card's are written
before a run. Everything is work of one stream, so a run sees what was sent before it.

    host     record, tables --pinned staging--> card     before a run
    card     counts, logits --pinned staging--> host     when they are asked for

Rejected: tables in pinned memory that kernels read over the link (a kernel that looks up an address
waits for the link, at every layer).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata_nb.addresses import memory_view
from strata_nb.card_flights import CardFlights
from strata_nb.card_profile import WindowProfile, profile_window
from strata_nb.driver import OUTSIDE_BYTES, RESERVE_BYTES
from strata_nb.errors import DriverError, StrataError, UnsupportedDevice
from strata_nb.execution import Driver, ProgramDriver
from strata_nb.kernels import mailbox
from strata_nb.kernels.gpu.batches import WINDOW_ROWS
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.gpu.pooled import PoolPlaces
from strata_nb.kernels.gpu.reading import STRETCH_BYTES, SUMS_BYTES, plain_read_launch
from strata_nb.kernels.gpu.warpgroup_launches import BYTES_OF_HALVES
from strata_nb.kernels.pool_state import WORDS
from strata_nb.kernels.program import Program
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.plain_read import PlainRead
from strata_nb.progress import Progress, Say
from strata_nb.shared_tables import SharedTable
from strata_nb.tracing import Recorder, RecordingDriver

MOST_ROWS = 4096  # of a step; a longer prompt is a chain of steps
# Of a prompt batch: missed experts cross the link once for each, but its buffers take the place of
# experts. Those of Qwen3-30B-A3B take 430 MiB for 2,048 rows, twice as much for 4,096.
USUAL_ROWS = 2048
LARGE_CARD_BYTES = 32 << 30  # from which on a batch has the most rows
_SMALL_BATCH = 32  # rows, of the smallest graph of batches
STAGING_BYTES = 4 << 20  # of pinned memory, each way
USUAL_SHARED_BYTES = 48 << 10  # that a block gets without being asked
REPLAYS = 31  # of each graph that is timed: a median of them counts
PLAIN_READ_BYTES = 4 << 30  # that are read to measure the card's memory, or what is free of them
PLAIN_READ_LEAST = 256 << 20  # several times what the caches of a card hold
PLAIN_READ_LEAVES = 64 << 20  # free, for others
PLAIN_READ_PASSES = 10


class CardDriver(Driver, ProgramDriver, Protocol):
    """Move memory and run kernels."""


class Machine(Protocol):
    """Hold a kernel's machine code: `entry` is its name in `image`."""

    @property
    def entry(self) -> str: ...

    @property
    def image(self) -> bytes: ...


Wanted = tuple[GpuKernel, Sequence[str]]  # a kernel, and the kinds of its arguments
Compile = Callable[[Sequence[Wanted], Progress | None, Say], Mapping[str, Machine]]
"""Return machine code by names of kernels."""


@dataclass
class _Shared:
    """Hold a table of the host, where the card has it, and whether programs write it.

    sent   as of so many changes the card has it
    """

    table: SharedTable
    address: int
    is_written: bool
    sent: int = -1


class CardProgram:
    """Hold the graphs of a program: of each of its pieces, in order, one for some numbers of rows.

    graphs   by the most rows that they are for, ascending
    ends     of the pieces, in launches of the program
    """

    def __init__(self, graphs: Mapping[int, Sequence[int]], ends: Sequence[int]) -> None:
        self._sizes, self._graphs = list(graphs), list(graphs.values())
        self._places = {end: number for number, end in enumerate([0, *ends])}

    def graphs(self, rows: int, first: int = 0, last: int | None = None) -> Sequence[int]:
        """Return the graphs of launches first .. last - 1 for so many rows."""
        if first not in self._places or (last is not None and last not in self._places):
            raise AssertionError(f"launches {first} to {last} are no pieces: {[*self._places]}")
        end = None if last is None else self._places[last]
        return self._graphs[bisect_left(self._sizes, rows)][self._places[first] : end]


def _sizes(batch_rows: int) -> Sequence[int]:
    """Return for which numbers of rows there is a graph: windows, or batches of up to so many.

    A batch may have any size. What a graph has too much for it leaves at once, but takes time.
    """
    if not batch_rows:
        return range(1, WINDOW_ROWS + 1)
    sizes = [batch_rows]
    while sizes[0] > _SMALL_BATCH:
        sizes.insert(0, max(_SMALL_BATCH, sizes[0] // 4))
    return sizes


class CardBackend:
    """Run programs on one card.

    text       what the device is called
    driver     of the card, already open; closed by `close`
    compiler   makes machine code for this card
    recorder   writes down what the driver is asked; it stays the caller's
    has_warpgroups   whether the card has their products (`kernels/gpu/warpgroup_tiles.py`)
    """

    same_bits = False
    overlaps = True  # kernels begin while the one in front of them ends, on cards that can
    has_slots, of_host, most_rows = True, False, MOST_ROWS
    chooses_tokens = attends_in_runs = batches_apart = fills = pools = True
    gathers_rows = False
    outside_bytes, reserve_bytes = OUTSIDE_BYTES, RESERVE_BYTES

    def __init__(
        self,
        text: str,
        driver: CardDriver,
        device: int,
        compiler: Compile,
        threads: int,
        recorder: Recorder | None = None,
        *,
        has_warpgroups: bool = False,
    ) -> None:
        self.name, self.device, self.threads = text, device, threads
        self.has_warpgroups = has_warpgroups
        self.warnings: list[str] = []
        self._card = driver
        self._compiler = compiler
        self._machine: dict[str, Machine] = {}
        self._functions: dict[str, int] = {}
        self._most_shared: dict[str, int] = {}  # bytes that a kernel's blocks may have
        self._shared: list[_Shared] = []
        self._has_run = False  # since the last `wait`
        self._pool: PoolPlaces | None = None
        self.driver: Driver = driver
        try:
            if recorder is not None:
                recorder.begin(text, driver)
                self.driver = RecordingDriver(driver, recorder)
            driver.mem_info(device)  # makes the context
            self._stream = driver.stream_create(device)
            self._staging = _Staging(driver, self._stream)
        except BaseException:
            driver.close()
            raise

    def usual_rows(self, limit_bytes: int | None) -> int:
        memory_bytes = self.driver.mem_info(self.device)[1]
        most = min(memory_bytes, limit_bytes or memory_bytes)
        return MOST_ROWS if most >= LARGE_CARD_BYTES else USUAL_ROWS

    def packed_row_bytes(self, values: int) -> int:
        return row_bytes(values)

    @property
    def bytes_beside(self) -> int:
        return BYTES_OF_HALVES if self._by_warpgroups else 0

    # Programs.

    def launches(self, program: Program, rows: int) -> Sequence[CardLaunch]:
        """Return what this card launches, in order, for a program of so many rows."""
        return card_launches(
            program,
            rows,
            self._pool,
            same_bits=self.same_bits,
            warpgroups=self._by_warpgroups,
        )

    @property
    def _by_warpgroups(self) -> bool:
        """Whether batches are multiplied by them."""
        return self.has_warpgroups and not self.same_bits

    def open_pool(self, width: int, idle_bytes: int) -> PoolPlaces:
        box_bytes, state_bytes = mailbox.box_bytes(width), -(-8 * WORDS // 256) * 256
        box = self._card.allocate_host(box_bytes)
        memory_view(box, box_bytes)[:] = 0
        state = self._card.allocate(state_bytes + idle_bytes, self.device)
        self.send(state, np.zeros(state_bytes + idle_bytes, np.uint8))
        self._pool = PoolPlaces(box, state, state + state_bytes)
        return self._pool

    def compile(
        self,
        programs: Sequence[Program],
        progress: Progress | None,
        say: Say,
        *,
        batches: Sequence[Program] = (),
        batch_rows: int = 0,
    ) -> None:
        wanted: dict[str, Wanted] = {}
        sizes = [(program, _sizes(0)) for program in programs]
        sizes += [(program, _sizes(batch_rows)) for program in batches]
        for program, numbers in sizes:
            for rows in numbers:
                for one in self.launches(program, rows):
                    one.grid(rows)  # refused before a model is loaded
                    if one.kernel.name not in self._machine:
                        wanted[one.kernel.name] = (one.kernel, one.kinds)
        try:
            self._machine.update(self._compiler(list(wanted.values()), progress, say))
        except ImportError as error:  # so Numba says that NVIDIA's compiler is not there
            raise UnsupportedDevice(
                f"kernels for {self.name} cannot be compiled: {error}",
                hint="pip install 'strata-nb[cuda]', or use --device host",
            ) from error

    def prepare(
        self, programs: Sequence[Program], *, batch_rows: int = 0, cuts: Sequence[int] = ()
    ) -> list[CardProgram]:
        windows, batches = ((), programs) if batch_rows else (programs, ())
        self.compile(windows, None, lambda _: None, batches=batches, batch_rows=batch_rows)
        return [self._prepare(program, _sizes(batch_rows), cuts) for program in programs]

    def _prepare(self, program: Program, sizes: Sequence[int], cuts: Sequence[int]) -> CardProgram:
        ends = sorted({*cuts, len(program)})
        pieces = [program[first:end] for first, end in pairwise([0, *ends])]
        graphs = {rows: [self._graph(piece, rows) for piece in pieces] for rows in sizes}
        return CardProgram(graphs, ends)

    def _graph(self, piece: Program, rows: int) -> int:
        """Return an executable graph of a piece of a program."""
        launches = self.launches(piece, rows)
        for one in launches:
            self._load(one.kernel, one.shared_bytes)
        return self._instantiated(launches, rows)

    def _instantiated(self, launches: Sequence[CardLaunch], rows: int) -> int:
        """Return an executable graph of launches, whose kernels are loaded."""
        graph = self._captured(launches, rows)
        try:
            return self._card.graph_instantiate(graph, self.device)
        finally:
            self._card.graph_destroy(graph)

    def _captured(self, launches: Sequence[CardLaunch], rows: int) -> int:
        """Return a graph of launches for so many rows."""
        try:
            self._card.capture_begin(self._stream)
            for one in launches:
                self._launch(one, rows)
            return self._card.capture_end(self._stream)
        except BaseException:
            with suppress(DriverError):  # after a launch that failed there may be no graph
                self._card.graph_destroy(self._card.capture_end(self._stream))
            raise

    def _load(self, kernel: GpuKernel, shared_bytes: int) -> None:
        """Load a kernel, unless it is loaded, and let it have so much shared memory, or more."""
        if kernel.name not in self._functions:
            machine = self._machine[kernel.name]
            module = self._card.load_module(self.device, machine.image)
            self._functions[kernel.name] = self._card.function(module, machine.entry)
            self._most_shared[kernel.name] = USUAL_SHARED_BYTES
        if shared_bytes > self._most_shared[kernel.name]:
            self._card.set_dynamic_shared_bytes(self._functions[kernel.name], shared_bytes)
            self._most_shared[kernel.name] = shared_bytes

    def _launch(self, one: CardLaunch, rows: int) -> None:
        self._card.launch(
            self._functions[one.kernel.name],
            one.grid(rows),
            (one.kernel.threads, 1, 1),
            one.shared_bytes,
            self._stream,
            one.packed,
            overlaps=self.overlaps,
        )

    def run(self, program: CardProgram, rows: int, first: int = 0, last: int | None = None) -> None:
        self._send_tables()
        self._has_run = True
        for graph in program.graphs(rows, first, last):
            self._card.graph_launch(graph, self._stream)

    def record_event(self, event: int) -> None:
        self._card.event_record(event, self._stream)

    def await_event(self, event: int) -> None:
        self._card.event_wait(self._stream, event)

    def _send_tables(self) -> None:
        """Bring the tables that the host changed to the card."""
        for one in self._shared:
            changes = one.table.changes
            if one.sent != changes:
                self._staging.send(one.address, one.table.array)
                one.sent = changes

    def wait(self) -> None:
        self._card.stream_synchronize(self._stream)
        if not self._has_run:
            return  # the card may not have the tables yet, and has counted nothing
        for one in self._shared:
            if one.is_written:
                self._staging.fetch(one.address, one.table.receive())
        self._has_run = False

    # Measuring.

    def plain_read(self) -> PlainRead:
        free_bytes, _ = self.driver.mem_info(self.device)
        most = min(PLAIN_READ_BYTES, free_bytes - PLAIN_READ_LEAVES)
        stretches = most // (STRETCH_BYTES + SUMS_BYTES)
        if stretches * STRETCH_BYTES < PLAIN_READ_LEAST:
            raise StrataError(
                f"{free_bytes:,} bytes of {self.name} are free, and more than "
                f"{PLAIN_READ_LEAST + PLAIN_READ_LEAVES:,} are needed to read past its caches",
                hint="a larger --vram-reserve-mib leaves more",
            )
        with ExitStack() as made:
            buffer = self.driver.allocate(stretches * STRETCH_BYTES, self.device)
            made.callback(self.driver.free, buffer)
            sums = self.driver.allocate(stretches * SUMS_BYTES, self.device)
            made.callback(self.driver.free, sums)
            one = plain_read_launch(buffer, sums, stretches)
            self._machine.update(self._compiler([(one.kernel, one.kinds)], None, lambda _: None))
            self._load(one.kernel, one.shared_bytes)
            self._launch(one, 1)  # the first run is slower: its pages are not known to the card
            # No wait in between: a card that waits for the host would be measured with its wait.
            events = [self._timed_event(made) for _ in range(PLAIN_READ_PASSES + 1)]
            self._card.event_record(events[0], self._stream)
            for event in events[1:]:
                self._launch(one, 1)
                self._card.event_record(event, self._stream)
            self._card.stream_synchronize(self._stream)
            return PlainRead(
                stretches * STRETCH_BYTES,
                tuple(self._card.event_elapsed_s(*pair) for pair in pairwise(events)),
            )

    def profile(
        self,
        programs: Sequence[Program],
        rows: int,
        kv_layer_bytes: int,
        replays: int | None = None,
    ) -> WindowProfile:
        """Measure graphs of parts of the programs, each behind a graph of all of them.

        replays   of each, of which the median counts; None: REPLAYS

        That leaves the rows and the caches of the card as a step does, and keeps the card busy
        until the part is there. The programs run again and again, with what the last step had sent;
        what they count is put back.
        """
        launches = [one for program in programs for one in self.launches(program, rows)]
        self.wait()
        self._send_tables()
        try:
            with ExitStack() as made:
                whole = self._executable(launches, rows, made)
                start, end = self._timed_event(made), self._timed_event(made)

                def seconds(some: Sequence[CardLaunch]) -> float:
                    with ExitStack() as part:
                        executable = self._executable(some, rows, part)
                        return median(
                            self._replay(whole, executable, start, end)
                            for _ in range(replays or REPLAYS)
                        )

                return profile_window(launches, rows, kv_layer_bytes, seconds)
        finally:
            for one in self._shared:
                if one.is_written:
                    self._staging.send(one.address, one.table.array)
            self._card.stream_synchronize(self._stream)

    def _replay(self, before: int, executable: int, start: int, end: int) -> float:
        """Return the seconds of an executable behind another one."""
        self._card.graph_launch(before, self._stream)
        self._card.event_record(start, self._stream)
        self._card.graph_launch(executable, self._stream)
        self._card.event_record(end, self._stream)
        self._card.event_synchronize(end)
        return self._card.event_elapsed_s(start, end)

    def _executable(self, launches: Sequence[CardLaunch], rows: int, owner: ExitStack) -> int:
        """Return an executable graph of launches, which ends with its owner."""
        executable = self._instantiated(launches, rows)
        owner.callback(self._card.executable_destroy, executable)
        return executable

    def _timed_event(self, owner: ExitStack) -> int:
        event = self._card.event_create(self.device, timed=True)
        owner.callback(self._card.event_destroy, event)
        return event

    # What host and card exchange.

    def share(self, table: SharedTable, *, is_written: bool = False) -> int:
        address: int = self._card.allocate(max(1, table.array.nbytes), self.device)
        self._shared.append(_Shared(table, address, is_written))
        return address

    def send(self, address: int, array: NDArray[Any]) -> None:
        self._staging.send(address, array)

    def fetch(self, address: int, array: NDArray[Any]) -> None:
        self._staging.fetch(address, array)

    def flights(self, sent_bytes: int, fetched_bytes: int) -> CardFlights:
        return CardFlights(
            self._card, self.device, self._stream, self.run, sent_bytes, fetched_bytes
        )

    def close(self) -> None:
        """Close the driver: it waits, then frees all that was made here in the order that holds."""
        self._shared.clear()
        self._card.close()


class _Staging:
    """Copy arrays through pinned memory, so that a copy neither waits nor reads the array late."""

    def __init__(self, driver: CardDriver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._address = driver.allocate_host(2 * STAGING_BYTES)
        self._used = 0

    def send(self, address: int, array: NDArray[Any]) -> None:
        """Begin to copy an array to the card; a part of the staging is not used again before a
        wait."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(data), STAGING_BYTES):
            part = data[start : start + STAGING_BYTES]
            if self._used + len(part) > STAGING_BYTES:
                self._driver.stream_synchronize(self._stream)
                self._used = 0
            place = self._address + self._used
            memory_view(place, len(part))[:] = part
            self._driver.copy_async(address + start, place, len(part), self._stream)
            self._used += -(-len(part) // 64) * 64

    def fetch(self, address: int, array: NDArray[Any]) -> None:
        """Copy to an array what the card has, after all work that was given before."""
        if not array.flags.c_contiguous:
            raise AssertionError("only what lies in one piece can be filled")
        data = array.reshape(-1).view(np.uint8)
        place = self._address + STAGING_BYTES
        for start in range(0, len(data), STAGING_BYTES):
            part = data[start : start + STAGING_BYTES]
            self._driver.copy_async(place, address + start, len(part), self._stream)
            self._driver.stream_synchronize(self._stream)
            self._used = 0
            part[:] = memory_view(place, len(part))
