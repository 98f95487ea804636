"""Run everything on the machine's own memory and threads: the backend for a computer without a
card.

Not a mock but a third backend beside CUDA and HIP: chunks are real pages that are really mapped
and unmapped, an address without a chunk really faults, streams are threads, released memory is
free for other programs. What it adds is what no card does: it names the rule that was broken
(host_memory.py), keeps accounts that a test can compare, and fails any call on request
(`Faults`).

    host_pages.py    the system calls
    host_memory.py   budgets, chunks, reservations and the rules
    host_streams.py  threads and events
    host.py          the driver: the operations of `execution.Driver`, device texts, faults
"""

from __future__ import annotations

import errno
import functools
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from strata_nb import cpu
from strata_nb import host_pages as pages
from strata_nb.errors import (
    ConfigError,
    DeviceLost,
    DriverError,
    OutOfDeviceMemory,
    RuleViolation,
)
from strata_nb.execution import DeviceFacts
from strata_nb.host_memory import (
    OUT_OF_MEMORY,
    SMALL_UNIT_BYTES,
    DeviceAccount,
    HostDevice,
    HostMemory,
)
from strata_nb.host_streams import LEAST_PRIORITY, HostStreams
from strata_nb.vmm import MAX_CHUNK_BYTES, Granularity

P = ParamSpec("P")
R = TypeVar("R")

MAX_CHUNKS = 50_000  # each is a mapping of its own, and Linux allows a process 65,530
MAX_DEVICES = 16
MACHINE_UNIT_BYTES = 2 << 20  # of the device that is the whole machine: as on a card

_NOT_INITIALISED = 3  # the codes of both vendors
_LAUNCH_FAILED = 719
_INJECTED = 999
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_DEVICES = re.compile(r"host:(\d+)x(\d+)(KiB|MiB|GiB)(?:@(\d+)(KiB|MiB|GiB))?", re.ASCII)


def parse_host_devices(text: str) -> tuple[HostDevice, ...]:
    """Return the devices that a text like these describes; raises ConfigError.

    host                     one device, the machine's memory
    host:2x64MiB             two devices with a budget of 64 MiB each
    host:2x64MiB@256KiB      the same, in chunks of 256 KiB or a multiple
    """
    if text == "host":
        unit = MACHINE_UNIT_BYTES
        return (HostDevice(cpu.memory_limit_bytes() // unit * unit, unit, unit),)
    match = _DEVICES.fullmatch(text)
    if match is None:
        raise _refuse(text, "not understood")
    count, budget = int(match[1]), int(match[2]) * _UNITS[match[3]]
    unit = int(match[4]) * _UNITS[match[5]] if match[4] else SMALL_UNIT_BYTES
    if not 1 <= count <= MAX_DEVICES:
        raise _refuse(text, f"{count} devices, possible are 1 to {MAX_DEVICES}")
    if not pages.PAGE_BYTES <= unit <= MAX_CHUNK_BYTES or unit & (unit - 1):
        raise _refuse(text, f"a chunk of {unit:,} bytes is no power of two from 4 KiB to 64 MiB")
    if budget < unit:
        raise _refuse(text, f"{budget:,} bytes hold no chunk of {unit:,} bytes")
    if match[4] and count * (budget // unit) > MAX_CHUNKS:
        raise _refuse(text, f"{count * (budget // unit):,} chunks, possible are {MAX_CHUNKS:,}")
    return (HostDevice(budget, unit, unit),) * count


class Faults:
    """Decide which calls of a driver fail; nothing fails until `plan` is called.

    calls   how often each operation was called
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._plans: dict[str, _Plan] = {}
        self._lost = False

    def plan(
        self, operation: str, nth: int = 1, *, forever: bool = False, lost: bool = False
    ) -> None:
        """Let the n-th call from now on fail, with everything after it if `forever`.

        lost: the error is one that the device does not recover from.
        """
        if operation not in OPERATIONS or nth < 1:
            raise ValueError(f"no {nth}. call of {operation!r} among {sorted(OPERATIONS)}")
        self._plans[operation] = _Plan(nth, forever, lost)

    def lift(self) -> None:
        """Let nothing fail any more; a lost device stays lost."""
        self._plans.clear()

    def visit(self, operation: str) -> None:
        """Count a call, and raise if it is to fail."""
        self.calls[operation] += 1
        if self._lost:
            raise DeviceLost(operation, _LAUNCH_FAILED, "the device was lost")
        plan = self._plans.get(operation)
        if plan is None:
            return
        plan.left -= 1
        if plan.left > 0 or (plan.left < 0 and not plan.forever):
            return
        if plan.lost:
            self._lost = True
            raise DeviceLost(operation, _LAUNCH_FAILED, "the device is lost, on request")
        if operation in ("create", "allocate", "allocate_host"):
            raise OutOfDeviceMemory(operation, OUT_OF_MEMORY, "out of memory, on request")
        raise DriverError(operation, _INJECTED, "failed on request")


@dataclass(slots=True)
class _Plan:
    left: int
    forever: bool
    lost: bool


_MEMORY_HINT = "a smaller --ctx-size or model, or a higher limit (ulimit -v, the container's)"


def _operation(
    method: Callable[Concatenate[HostDriver, P], R],
) -> Callable[Concatenate[HostDriver, P], R]:
    """Make a method an operation: it may be refused or fail on request before it does anything."""
    name = method.__name__
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]

    @functools.wraps(method)
    def call(driver: HostDriver, /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver.check_caller(name)
        driver.faults.visit(name)
        try:
            return method(driver, *args, **kwargs)
        except pages.PagesError as error:
            out_of_memory = error.errno in (errno.ENOMEM, errno.ENOSPC)
            kind = OutOfDeviceMemory if out_of_memory else DriverError
            raise kind(
                name,
                error.errno or 0,
                error.strerror or "system call failed",
                numbers={
                    key: value
                    for key, value in zip(names, args, strict=False)
                    if isinstance(value, int)
                },
                hint=_MEMORY_HINT if out_of_memory else "",
            ) from error

    return call


class HostDriver:
    """Be the driver of host devices; `execution.Driver` says what each operation does.

    devices      what each device is
    paths        (device, owner) pairs: which device can use whose memory; None: every pair
    max_chunks   of all devices together
    faults       which calls are to fail

    Everything is freed by `close`, also what callers forgot. In a forked child, where the threads
    are gone and the memory is shared with the parent, every operation raises DeviceLost and
    `close` does nothing.
    """

    chunk_granularity: Granularity = "recommended"

    def __init__(
        self,
        devices: Sequence[HostDevice],
        *,
        paths: Collection[tuple[int, int]] | None = None,
        max_chunks: int = MAX_CHUNKS,
    ) -> None:
        everywhere = [(a, b) for a in range(len(devices)) for b in range(len(devices))]
        self.faults = Faults()
        self._process = os.getpid()
        self._device_count = len(devices)
        self._streams = HostStreams()
        self._memory = HostMemory(
            devices,
            frozenset(everywhere if paths is None else paths),
            self._streams,
            max_chunks,
        )
        self._closed = False

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._process == os.getpid():
            warnings.warn("a host driver was never closed", ResourceWarning, stacklevel=1)
            self.close()

    def close(self) -> None:
        """Finish all work and free everything; raises the first error that no one has seen yet."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        error = self._streams.close()
        self._memory.close()
        if error is not None:
            raise error

    def live(self) -> dict[str, int]:
        """Return how much of each kind exists; empty when nothing does."""
        counts = {**self._memory.live(), **self._streams.live()}
        return {kind: count for kind, count in counts.items() if count}

    def account(self, device: int) -> DeviceAccount:
        """Return what a device holds, from the driver's own books."""
        return self._memory.account(device)

    def check_caller(self, operation: str) -> None:
        """Raise unless this process and thread may call the driver now."""
        if self._process != os.getpid():
            raise DeviceLost(
                operation,
                _NOT_INITIALISED,
                f"opened by process {self._process}, used in its fork {os.getpid()}",
                hint="start the child with the spawn method",
            )
        if self._closed:
            raise RuleViolation(9, f"{operation}: the driver is closed")
        if self._streams.is_stream_thread():
            raise RuleViolation(17, f"{operation}: called by work of a stream")

    # Memory.

    @_operation
    def granularity(self, device: int, kind: Granularity) -> int:
        facts = self._memory.facts(device)
        return facts.minimum_bytes if kind == "minimum" else facts.recommended_bytes

    @_operation
    def reserve(self, size: int) -> int:
        return self._memory.reserve(size)

    @_operation
    def address_free(self, address: int, size: int) -> None:
        self._memory.address_free(address, size)

    @_operation
    def create(self, size: int, device: int) -> int:
        return self._memory.create(size, device)

    @_operation
    def release(self, handle: int) -> None:
        self._memory.release(handle)

    @_operation
    def map(self, address: int, size: int, handle: int) -> None:
        self._memory.map(address, size, handle)

    @_operation
    def unmap(self, address: int, size: int) -> None:
        self._memory.unmap(address, size)

    @_operation
    def set_access(self, address: int, size: int, devices: Sequence[int]) -> None:
        self._memory.set_access(address, size, devices)

    def retire(self, address: int, size: int) -> None:
        self._memory.retire(address, size)

    def reinstate(self, address: int, size: int) -> None:
        self._memory.reinstate(address, size)

    @_operation
    def mem_info(self, device: int) -> tuple[int, int]:
        self._memory.make_context(device)
        return self._memory.mem_info(device)

    @_operation
    def can_access(self, device: int, owner: int) -> bool:
        return self._memory.can_access(device, owner)

    @_operation
    def synchronize(self, device: int) -> None:
        self._memory.make_context(device)
        self._streams.synchronize_device(device)

    # Work.

    @property
    def device_count(self) -> int:
        return self._device_count

    @_operation
    def device_facts(self, device: int) -> DeviceFacts:
        memory_bytes = self._memory.facts(device).budget_bytes
        return DeviceFacts(device, f"host device {device}", memory_bytes, LEAST_PRIORITY, 0)

    @_operation
    def allocate(self, size: int, device: int) -> int:
        self._memory.make_context(device)
        return self._memory.allocate(size, device)

    @_operation
    def free(self, address: int) -> None:
        self._streams.drain(self._memory.block_device(address))
        self._memory.free(address, of_host=False)

    @_operation
    def allocate_host(self, size: int) -> int:
        return self._memory.allocate(size, None)

    @_operation
    def free_host(self, address: int) -> None:
        self._streams.drain()
        self._memory.free(address, of_host=True)

    @_operation
    def register_host(self, address: int, size: int) -> None:
        self._memory.register(address, size)

    @_operation
    def unregister_host(self, address: int) -> None:
        self._streams.drain()
        self._memory.unregister(address)

    @_operation
    def stream_create(self, device: int, priority: int = 0) -> int:
        self._memory.make_context(device)
        return self._streams.create(device, priority)

    @_operation
    def stream_destroy(self, stream: int) -> None:
        self._streams.destroy(stream)

    @_operation
    def stream_synchronize(self, stream: int) -> None:
        self._streams.synchronize(stream)

    @_operation
    def event_create(self, device: int, timed: bool = False) -> int:
        self._memory.make_context(device)
        return self._streams.create_event(timed)

    @_operation
    def event_destroy(self, event: int) -> None:
        self._streams.destroy_event(event)

    @_operation
    def event_record(self, event: int, stream: int) -> None:
        self._streams.record(event, stream)

    @_operation
    def event_wait(self, stream: int, event: int) -> None:
        self._streams.hold(stream, event)

    @_operation
    def event_query(self, event: int) -> bool:
        return self._streams.event_done(event)

    @_operation
    def event_synchronize(self, event: int) -> None:
        self._streams.event_synchronize(event)

    @_operation
    def event_elapsed_s(self, start: int, end: int) -> float:
        return self._streams.elapsed_s(start, end)

    @_operation
    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        device = self._streams.device_of(stream)
        self._memory.check_work(destination, size, device)
        self._memory.check_work(source, size, device)
        if not self._memory.drops_write(destination, device):
            self._streams.submit(stream, lambda: pages.copy(destination, source, size))

    @_operation
    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        device = self._streams.device_of(stream)
        self._memory.check_work(address, size, device)
        if not self._memory.drops_write(address, device):
            self._streams.submit(stream, lambda: pages.fill(address, value, size))

    @_operation
    def launch_host(self, stream: int, function: Callable[[], object]) -> None:
        self._streams.submit(stream, function)


# The names that `Faults.plan` knows; `retire` and `reinstate` are notes and never fail.
OPERATIONS = frozenset(
    name for name, value in vars(HostDriver).items() if hasattr(value, "__wrapped__")
)

if TYPE_CHECKING:
    from strata_nb.execution import Driver

    _is_a_driver: type[Driver] = HostDriver


def _refuse(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--device {text}: {reason}", hint="give --device host, host:2x64MiB or host:2x64MiB@256KiB"
    )
