"""Say what a driver can run on a device: memory to work in, copies, streams and events.

`vmm.MemoryDriver` holds the operations that move physical memory; `ExecutionDriver` holds those
that use it; a backend's driver is both. `ProgramDriver` is what drivers of cards have beside
them: kernels and graphs. Handles and addresses are plain integers in every
backend, so that an address can be stored in a table, added to and given to a kernel without
asking who made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from strata_nb.vmm import MemoryDriver

if TYPE_CHECKING:
    from typing_extensions import Buffer

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

    def event_create(self, device: int, timed: bool = False) -> int:
        """Return a new event; `timed`: it also keeps the time at which its work was done."""

    def event_destroy(self, event: int) -> None: ...

    def event_record(self, event: int, stream: int) -> None:
        """Let `event` stand for all work that is on `stream` now; replaces an earlier record."""

    def event_wait(self, stream: int, event: int) -> None:
        """Hold later work of `stream` until the work that `event` stands for now is done."""

    def event_query(self, event: int) -> bool:
        """Return whether the work that `event` stands for is done; true before the first record."""

    def event_synchronize(self, event: int) -> None:
        """Wait for the work that `event` stands for."""

    def event_elapsed_s(self, start: int, end: int) -> float:
        """Return the seconds between two timed events, whose work is done; else DriverError."""

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Copy `size` bytes; each address lies in one range, allocation or registered block."""

    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        """Set `size` bytes to `value` (0 to 255)."""

    def launch_host(self, stream: int, function: Callable[[], object]) -> None:
        """Call `function` on the host in the stream's order; it must not call the driver.

        A function that waits for one of another stream may wait for ever: a driver may run the
        functions of all streams one after another.
        """


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """Say what the compiler gave a kernel: a thread's registers and bytes of local memory (spills
    and arrays), and a block's bytes of shared memory of fixed size."""

    registers: int
    local_bytes: int
    shared_bytes: int


Dimensions = tuple[int, int, int]  # x, y, z


class ProgramDriver(Protocol):
    """Run compiled kernels, and whole sequences of them as graphs.

    Drivers of cards have this beside the rest; a host device runs its kernels in threads.
    """

    def load_module(self, device: int, image: bytes) -> int:
        """Return a module of compiled code, or of code that the driver compiles now."""

    def unload_module(self, module: int) -> None:
        """End a module and its functions; no work that uses them may be left."""

    def function(self, module: int, name: str) -> int:
        """Return a kernel of a module; valid until the module is unloaded."""

    def function_facts(self, function: int) -> FunctionFacts: ...

    def set_dynamic_shared_bytes(self, function: int, size: int) -> None:
        """Allow launches of a kernel to ask for up to `size` bytes of shared memory a block."""

    def launch(
        self,
        function: int,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        stream: int,
        arguments: Buffer,
        *,
        overlaps: bool = False,
    ) -> None:
        """Run a kernel on a stream: `grid` blocks of `block` threads.

        arguments: the bytes of all arguments in order, each aligned as C aligns it, which
        `struct.pack("@...", ...)` does. They are copied before this returns.

        overlaps: the kernel may begin before the one in front of it has ended, on cards that can do
        that; it waits by itself, in its code, before it uses what others write.
        """

    def capture_begin(self, stream: int) -> None:
        """Let work of this stream, and of those that wait for its events, become a graph instead
        of running, until `capture_end`. Meanwhile this thread takes and frees no memory."""

    def capture_end(self, stream: int) -> int:
        """Return the graph of the work since `capture_begin`."""

    def graph_instantiate(self, graph: int, device: int) -> int:
        """Return an executable made of a graph, which may then be destroyed."""

    def graph_launch(self, executable: int, stream: int) -> None:
        """Run all work of an executable on a stream; launches of one executable do not overlap."""

    def graph_destroy(self, graph: int) -> None: ...

    def executable_destroy(self, executable: int) -> None: ...


class Driver(MemoryDriver, ExecutionDriver, Protocol):
    """Offer every operation of one backend; whoever opened it closes it."""

    def close(self) -> None:
        """Free everything that is left; may be called twice."""
