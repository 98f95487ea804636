"""Choose the devices once: their driver, and what runs programs on them.

    Backend       what a model needs of a device: a driver, and programs prepared and run
    HostBackend   the machine itself, or small devices made of its memory
    CardBackend   an NVIDIA card (card_backend.py), opened by card_opening.py

A backend's name for a device is what `--device` says: "host", "host:1x512MiB", "cuda:1".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from strata_nb import cpu
from strata_nb.addresses import memory_view
from strata_nb.card_opening import Record, open_card, open_first_card
from strata_nb.errors import StrataError, UnsupportedDevice
from strata_nb.execution import Driver
from strata_nb.host import HostDriver, parse_host_devices
from strata_nb.kernels.host.ahead import compile_ahead
from strata_nb.kernels.host.functions import WorkSpace, prepare
from strata_nb.kernels.host.reading import read_passes
from strata_nb.kernels.host.threads import PreparedProgram, Threads
from strata_nb.kernels.program import Program
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.options import DEFAULT_PREFILL_ROWS
from strata_nb.plain_read import PlainRead
from strata_nb.progress import Progress, Say
from strata_nb.shared_tables import SharedTable
from strata_nb.tracing import Recorder, RecordingDriver

if TYPE_CHECKING:
    from strata_nb.card_profile import WindowProfile
    from strata_nb.kernels.gpu.pooled import PoolPlaces

# That are read to measure the host's memory, more than caches hold; where memory is short, less.
PLAIN_READ_BYTES, PLAIN_READ_LEAST = 1 << 30, 128 << 20


class Flights(Protocol):
    """Begin windows on a device; at most two are under way."""

    def begin(
        self,
        program: Any,
        rows: int,
        sent: Sequence[tuple[int, NDArray[np.uint8]]],
        fetched: Sequence[tuple[int, int]],
    ) -> Any:
        """Send bytes to addresses, run a program, and begin to fetch (address, bytes) behind it.

        Returns what `land` is given. Nothing waits, and `sent` may be changed at once. Sizes are
        multiples of 8 bytes.
        """

    def land(self, flight: Any) -> NDArray[np.int64]:
        """Wait for a window; return the words that it fetched, one behind the other.

        They stay until the window after the next begins.
        """


Prepared = TypeVar("Prepared")  # a program in the form that a backend runs


class Backend(Protocol[Prepared]):
    """Run programs on one device.

    name        for people
    driver, device   what moves memory, and which of its devices runs
    has_slots   whether experts are copied to the device; else they are read where the host has them
    of_host     whether the device is made of the host's memory, so that what it holds counts there
    most_rows   of one step; None: as many as there are buffers for
    batches_apart   whether a step of more rows than a window has is another program
    gathers_rows    whether rows are brought into the order of experts, or read where they are
    overlaps    whether kernels begin while the one in front of them ends; may be turned off before
                programs are prepared
    same_bits   whether a prompt batch gives a row the bits that a window gives it; may be turned on
                before programs are prepared
    bytes_beside    what a buffer of quantised rows has behind them, for each value
    chooses_tokens  whether programs draw tokens; else the host does, from the logits
    fills       whether programs give missed experts slots (`cache/filling.py`); else the host does
    pools       whether programs can leave missed experts to the CPU (`device_pool.py`)
    attends_in_runs   whether attention needs work space for runs of cells (`kernels/runs.py`)
    outside_bytes   of the device that the ledger leaves alone: its driver needs them for itself
    reserve_bytes   of the device that stay free for others where nothing else is asked for
    threads     that load, and that compute where the host computes
    warnings    for the user, one line each
    """

    @property
    def name(self) -> str: ...

    @property
    def driver(self) -> Driver: ...

    @property
    def device(self) -> int: ...

    overlaps: bool
    same_bits: bool

    @property
    def bytes_beside(self) -> int: ...

    @property
    def has_slots(self) -> bool: ...

    @property
    def of_host(self) -> bool: ...

    @property
    def most_rows(self) -> int | None: ...

    @property
    def batches_apart(self) -> bool: ...

    @property
    def gathers_rows(self) -> bool: ...

    @property
    def chooses_tokens(self) -> bool: ...

    @property
    def fills(self) -> bool: ...

    @property
    def pools(self) -> bool: ...

    @property
    def attends_in_runs(self) -> bool: ...

    @property
    def outside_bytes(self) -> int: ...

    @property
    def reserve_bytes(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def warnings(self) -> Sequence[str]: ...

    def usual_rows(self, limit_bytes: int | None) -> int:
        """Return how many rows a prompt batch has, where nobody says it.

        limit_bytes   that the device counts as having; None: all of its memory
        """

    def packed_row_bytes(self, values: int) -> int:
        """Return the bytes of a quantised row of activations."""

    def open_pool(self, width: int, idle_bytes: int) -> PoolPlaces:
        """Let programs leave missed experts of a single row to the CPU; return what they share.

        For all programs that are compiled and prepared afterwards; only where `pools` is true.

        width        of the rows that experts read and give
        idle_bytes   of eight rows of the largest down
        """

    def compile(
        self,
        programs: Sequence[Program],
        progress: Progress | None,
        say: Say,
        *,
        batches: Sequence[Program] = (),
        batch_rows: int = 0,
    ) -> None:
        """Compile what programs launch, wherever their buffers will be: the long part of `prepare`.

        batches      programs of prompt batches, where these are programs apart
        batch_rows   most rows of those

        `progress` is told of (kernels done, in all), `say` of a wait.
        """

    def prepare(
        self, programs: Sequence[Program], *, batch_rows: int = 0, cuts: Sequence[int] = ()
    ) -> Sequence[Prepared]:
        """Make programs ready to run; they can be run until the backend is closed.

        batch_rows   most rows of steps that are prompt batches, where these are programs apart; 0:
                     windows, and where they are the same all steps
        cuts         launches behind which a run may end, and another one begin
        """

    def share(self, table: SharedTable, *, is_written: bool = False) -> int:
        """Return where programs find a table of the host, for as long as the backend is open.

        A run sees what the host wrote into it before. `is_written`: programs write it too, and what
        they wrote is there after `wait`; the host writes it only when nothing runs, after a `wait`.
        """

    def send(self, address: int, array: NDArray[Any]) -> None:
        """Bring an array to an address of the device, for later runs; it may be changed at once."""

    def fetch(self, address: int, array: NDArray[Any]) -> None:
        """Fill an array from an address of the device, with what earlier runs left there."""

    def run(self, program: Prepared, rows: int, first: int = 0, last: int | None = None) -> None:
        """Begin to run launches first .. last - 1 of a program (None: to its end).

        rows   that the step has, as its record says too
        """

    def record_event(self, event: int) -> None:
        """Let an event of the driver stand for all runs so far."""

    def await_event(self, event: int) -> None:
        """Hold later runs until the work that an event of the driver stands for is done."""

    def wait(self) -> None:
        """Wait until every run has ended."""

    def plain_read(self) -> PlainRead:
        """Measure how fast the device's memory can be read; StrataError where that cannot be."""

    def profile(self, programs: Sequence[Program], rows: int, kv_layer_bytes: int) -> WindowProfile:
        """Measure where the time goes of programs that follow each other, as the last step did.

        Nothing of it stays. UnsupportedDevice where programs are no graphs.

        kv_layer_bytes   of K/V that attention reads in a layer
        """

    def flights(self, sent_bytes: int, fetched_bytes: int) -> Flights | None:
        """Return what begins windows and takes their results later; None where a run has ended
        when it returns.

        sent_bytes, fetched_bytes   the most that a window sends and fetches
        """

    def close(self) -> None:
        """End threads and free what is left; may be called twice."""


class HostBackend:
    """Run programs in threads of this process, on the first device that `text` describes.

    recorder   writes down what the driver is asked; it stays the caller's
    """

    device = 0
    of_host, most_rows = True, None
    chooses_tokens = attends_in_runs = batches_apart = fills = pools = False
    gathers_rows = True
    outside_bytes = reserve_bytes = 0
    overlaps, same_bits = False, True
    bytes_beside = 0

    def __init__(self, text: str, threads: int, recorder: Recorder | None = None) -> None:
        devices = parse_host_devices(text)
        self.name = text
        self.has_slots = text != "host"
        self.threads = threads
        self.warnings = (
            [f"{len(devices) - 1} of {len(devices)} devices are idle: a model runs on the first"]
            if len(devices) > 1
            else []
        )
        self._spaces: list[WorkSpace] = []
        self._compute: Threads | None = None  # started late: they run compiled functions
        self._resources = ExitStack()
        self.driver: Driver = HostDriver(devices)
        self._resources.callback(self.driver.close)
        if recorder is not None:
            recorder.begin(text, self.driver)
            self.driver = RecordingDriver(self.driver, recorder)

    def usual_rows(self, limit_bytes: int | None) -> int:
        return DEFAULT_PREFILL_ROWS

    def packed_row_bytes(self, values: int) -> int:
        return row_bytes(values)

    def open_pool(self, width: int, idle_bytes: int) -> PoolPlaces:
        raise AssertionError("the host computes all experts itself")

    def compile(
        self,
        programs: Sequence[Program],
        progress: Progress | None,
        say: Say,
        *,
        batches: Sequence[Program] = (),
        batch_rows: int = 0,
    ) -> None:
        compile_ahead([*programs, *batches], progress=progress, say=say)
        self._threads()  # who cannot start them hears it before a model is loaded

    def prepare(
        self, programs: Sequence[Program], *, batch_rows: int = 0, cuts: Sequence[int] = ()
    ) -> list[PreparedProgram]:
        space = WorkSpace(tuple(one for program in programs for one in program), self.threads)
        self._spaces.append(space)
        return [prepare(program, space) for program in programs]

    def share(self, table: SharedTable, *, is_written: bool = False) -> int:
        return int(table.array.ctypes.data)

    def send(self, address: int, array: NDArray[Any]) -> None:
        memory_view(address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)

    def fetch(self, address: int, array: NDArray[Any]) -> None:
        array.reshape(-1).view(np.uint8)[:] = memory_view(address, array.nbytes)

    def run(
        self, program: PreparedProgram, rows: int, first: int = 0, last: int | None = None
    ) -> None:
        self._threads().run(program, first, last)

    def record_event(self, event: int) -> None:
        """Do nothing: a run has ended when it returns, and so has what no record was made of."""

    def await_event(self, event: int) -> None:
        self.driver.event_synchronize(event)

    def wait(self) -> None:
        """Do nothing: a run has ended when it returns."""

    def plain_read(self) -> PlainRead:
        available = cpu.available_memory_bytes()
        size = min(PLAIN_READ_BYTES, available // 4)
        if size < PLAIN_READ_LEAST:
            raise StrataError(
                f"{available:,} bytes of memory are available: a quarter of them is read, which "
                f"must be {PLAIN_READ_LEAST:,} at least, more than caches hold",
                hint="end other programs",
            )
        return PlainRead(size, tuple(read_passes(np.ones(size, np.uint8), self.threads)))

    def profile(self, programs: Sequence[Program], rows: int, kv_layer_bytes: int) -> WindowProfile:
        raise UnsupportedDevice(
            f"the device {self.name} runs programs in threads, and has no graphs to look into",
            hint="--device cuda has",
        )

    def flights(self, sent_bytes: int, fetched_bytes: int) -> None:
        """Return none: a run has ended when it returns."""

    def _threads(self) -> Threads:
        if self._compute is None:
            self._compute = Threads(self.threads)
            self._resources.callback(self._compute.close)
        return self._compute

    def close(self) -> None:
        self._resources.close()
        self._spaces.clear()


def open_backend(device: str, threads: int, record: Record = lambda _: None) -> Backend[Any]:
    """Return the backend of a device as `--device` names it, unless that is "auto".

    UnsupportedDevice where there is no such card, or nothing to compile kernels for it.

    record   called with the device's name: returns what writes down what its driver is asked
    """
    if not device.startswith("cuda"):
        return HostBackend(device, threads, record(device))
    return open_card(device, threads, record)


def choose_backend(threads: int, record: Record = lambda _: None) -> tuple[Backend[Any], str]:
    """Return the backend of the first card that can be used, or else of the host, and why it is."""
    card, reason = open_first_card(threads, record)
    return card or HostBackend("host", threads, record("host")), reason
