"""Say what a driver can run on a device: memory to work in, copies, streams and events.

`vmm.MemoryDriver` holds the operations that move physical memory; `ExecutionDriver` holds those
that use it; a backend's driver is both. Handles and addresses are plain integers in every
backend, so that an address can be stored in a table, added to and given to a kernel without
asking who made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from strata_nb.vmm import MemoryDriver

PLAIN_UNIT_BYTES = 4096  # an allocation takes a multiple of this from its device


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Describe one device.

    index             its number in every call
    name              what a person calls it
    memory_bytes      all of its memory, used or not
    least_priority    the largest useful number for a stream of little urgency
    highest_priority  the smallest one, for the most urgent stream (as both vendors count)
    """

    index: int
    name: str
    memory_bytes: int
    least_priority: int
    highest_priority: int


class ExecutionDriver(Protocol):
    """Run work on devices.

    Work on one stream runs in order; streams run beside each other. A call that ends in `_async`
    returns before its work is done, and the memory it names must stay as it is until then.
    """

    @property
    def device_count(self) -> int: ...

    def device_facts(self, device: int) -> DeviceFacts: ...

    def allocate(self, size: int, device: int) -> int:
        """Return the address of `size` bytes on `device`, of arbitrary content."""

    def free(self, address: int) -> None:
        """Free what `allocate` returned; waits for the device's running work."""

    def allocate_host(self, size: int) -> int:
        """Return the address of `size` bytes of host memory that every device can use."""

    def free_host(self, address: int) -> None:
        """Free what `allocate_host` returned; waits for running work."""

    def register_host(self, address: int, size: int) -> None:
        """Let every device use `size` bytes of host memory that somebody else owns."""

    def unregister_host(self, address: int) -> None:
        """Take back `register_host`; waits for running work."""

    def stream_create(self, device: int, priority: int = 0) -> int:
        """Return a new stream; `priority` is clamped to what the device knows (DeviceFacts)."""

    def stream_destroy(self, stream: int) -> None:
        """Wait for the stream's work, then end it; raises what `stream_synchronize` would."""

    def stream_synchronize(self, stream: int) -> None:
        """Wait for the stream's work; raises the first error of it that was not raised yet."""

    def event_create(self, device: int) -> int: ...

    def event_destroy(self, event: int) -> None: ...

    def event_record(self, event: int, stream: int) -> None:
        """Let `event` stand for all work that is on `stream` now; replaces an earlier record."""

    def event_wait(self, stream: int, event: int) -> None:
        """Hold later work of `stream` until the work that `event` stands for now is done."""

    def event_query(self, event: int) -> bool:
        """Return whether the work that `event` stands for is done; true before the first record."""

    def event_synchronize(self, event: int) -> None:
        """Wait for the work that `event` stands for."""

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Copy `size` bytes; each address lies in one range, allocation or registered block."""

    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        """Set `size` bytes to `value` (0 to 255)."""

    def launch_host(self, stream: int, function: Callable[[], object]) -> None:
        """Call `function` on the host in the stream's order; it must not call the driver."""


class Driver(MemoryDriver, ExecutionDriver, Protocol):
    """Offer every operation of one backend; whoever opened it closes it."""

    def close(self) -> None:
        """Free everything that is left; may be called twice."""
