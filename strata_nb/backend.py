"""Choose the devices once: their driver, and what runs programs on them.

    Backend       what a model needs of a device: a driver, and programs prepared and run
    HostBackend   the machine itself, or small devices made of its memory

A backend's name for a device is what `--device` says: "host", or "host:1x512MiB".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, TypeVar

from strata_nb.execution import Driver
from strata_nb.host import HostDriver, parse_host_devices
from strata_nb.kernels.host import activations
from strata_nb.kernels.host.ahead import compile_ahead
from strata_nb.kernels.host.functions import WorkSpace, prepare
from strata_nb.kernels.host.threads import PreparedProgram, Threads
from strata_nb.kernels.program import Program
from strata_nb.progress import Progress
from strata_nb.tracing import Recorder, RecordingDriver

Say = Callable[[str], object]
Prepared = TypeVar("Prepared")  # a program in the form that a backend runs


class Backend(Protocol[Prepared]):
    """Run programs on one device.

    name        for people
    driver, device   what moves memory, and which of its devices runs
    has_slots   whether experts are copied to the device; else they are read where the host has them
    threads     that load, and that compute where the host computes
    warnings    for the user, one line each
    """

    @property
    def name(self) -> str: ...

    @property
    def driver(self) -> Driver: ...

    @property
    def device(self) -> int: ...

    @property
    def has_slots(self) -> bool: ...

    @property
    def threads(self) -> int: ...

    @property
    def warnings(self) -> Sequence[str]: ...

    def packed_row_bytes(self, values: int) -> int:
        """Return the bytes of a quantised row of activations."""

    def compile(self, programs: Sequence[Program], progress: Progress | None, say: Say) -> None:
        """Compile what programs launch, wherever their buffers will be: the long part of `prepare`.

        `progress` is told of (kernels done, in all), `say` of a wait.
        """

    def prepare(self, programs: Sequence[Program]) -> Sequence[Prepared]:
        """Make programs ready to run; they can be run until the backend is closed."""

    def run(self, program: Prepared, first: int = 0, last: int | None = None) -> None:
        """Run launches first .. last - 1 of a program (None: to its end) and wait for them."""

    def close(self) -> None:
        """End threads and free what is left; may be called twice."""


class HostBackend:
    """Run programs in threads of this process, on the first device that `text` describes.

    recorder   writes down what the driver is asked; it stays the caller's
    """

    device = 0

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

    def packed_row_bytes(self, values: int) -> int:
        return activations.row_bytes(values)

    def compile(self, programs: Sequence[Program], progress: Progress | None, say: Say) -> None:
        compile_ahead(programs, progress=progress, say=say)
        self._threads()  # who cannot start them hears it before a model is loaded

    def prepare(self, programs: Sequence[Program]) -> list[PreparedProgram]:
        space = WorkSpace(tuple(one for program in programs for one in program), self.threads)
        self._spaces.append(space)
        return [prepare(program, space) for program in programs]

    def run(self, program: PreparedProgram, first: int = 0, last: int | None = None) -> None:
        self._threads().run(program, first, last)

    def _threads(self) -> Threads:
        if self._compute is None:
            self._compute = Threads(self.threads)
            self._resources.callback(self._compute.close)
        return self._compute

    def close(self) -> None:
        self._resources.close()
        self._spaces.clear()
