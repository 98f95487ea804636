"""Be the driver of NVIDIA's cards, through the library that comes with every installation of them.

    cuda_table.py   the library's functions, structures and constants
    cuda_calls.py   contexts, threads, statuses and what they raise
    driver.py       the operations of `execution.Driver` and `execution.ProgramDriver`

Each operation is one driver function and a line in the books. The books say what is there to be
freed, and on which device, so that no caller need say it; they are right because a line is written
after the driver said yes, and crossed out after it said yes again. Rejected: the objects of
cuda-bindings (docs/decisions/0008-ctypes-driver.md), and contexts of our own, which other
libraries in the process would not share.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from strata_nb import cuda_table as cuda
from strata_nb.cuda_calls import Calls
from strata_nb.cuda_table import CudaTable, LibraryTable
from strata_nb.errors import DeviceLost, DriverError, RuleViolation, StrataError, UnsupportedDevice
from strata_nb.execution import DeviceFacts, Dimensions, FunctionFacts
from strata_nb.vmm import Granularity

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from strata_nb.execution import Driver, ProgramDriver

T = TypeVar("T")

# Some cards take multiples of 4 KiB and charge 2 MiB for each.
SMALLEST_CHUNK_BYTES = 2 << 20
_TEXT_BYTES = 256
_LOG_BYTES = 8192


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Describe a card to those who compile for it.

    memory_bytes         all of its memory
    capability           compute capability: (9, 0)
    shared_block_bytes   shared memory that a block can have if it asks for it
    bus_id               its place in the machine, as nvidia-smi shows it
    is_integrated        whether its memory is the host's
    """

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    warp_size: int
    shared_block_bytes: int
    bus_id: str
    is_integrated: bool


class _HostWork:
    """Be a function on its way through a stream: whether it is done, and what it raised."""

    __slots__ = ("done", "error", "function")

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that synchronizes
            self.error = error
        self.done = True


# What the driver calls, of no driver object: it outlives them all.
_run_host_work = cuda.HostFunction(_HostWork.run)


@dataclass(slots=True)
class _Stream:
    device: int
    works: list[_HostWork] = field(default_factory=list)  # that may not have run yet, in order
    error: BaseException | None = None  # the first of them that nobody has seen
    is_capturing: bool = False

    def sweep(self) -> None:
        """Forget functions that have run, and keep the first error."""
        while self.works and self.works[0].done:
            self.error = self.error or self.works[0].error
            del self.works[0]

    def take_error(self) -> BaseException | None:
        self.sweep()
        error, self.error = self.error, None
        return error


@dataclass(frozen=True, slots=True)
class _Mapping:
    size: int
    device: int


class CudaDriver:
    """Be the driver of all cards that this process sees; raises UnsupportedDevice without any.

    table   the functions of the driver library; None: of the one that is installed

    A card that is too old is refused when it is first used. Everything is freed by `close`, also
    what callers forgot. In a forked child every operation raises DeviceLost and `close` does
    nothing.
    """

    chunk_granularity: Granularity = "minimum"

    def __init__(self, table: CudaTable | None = None) -> None:
        self._calls = Calls(LibraryTable() if table is None else table)
        self._chunks: dict[int, int] = {}  # handle -> device
        self._reservations: dict[int, int] = {}  # address -> size
        self._mappings: dict[int, _Mapping] = {}  # by address
        self._blocks: dict[int, int] = {}  # address -> device
        self._host_blocks: dict[int, int] = {}  # address -> size
        self._registrations: dict[int, int] = {}  # address -> size
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, int] = {}  # event -> device, and so on
        self._modules: dict[int, int] = {}
        self._functions: dict[int, int] = {}  # function -> module
        self._graphs: dict[int, int] = {}
        self._executables: dict[int, int] = {}

    def __del__(self) -> None:
        calls: Calls | None = getattr(self, "_calls", None)
        if calls is not None and not calls.closed and not calls.forked:
            warnings.warn("a CUDA driver was never closed", ResourceWarning, stacklevel=1)
            self.close()

    def close(self) -> None:
        """Finish all work and free everything; raises the first error that no one has seen yet.

        Does all that can be done. What could not be freed stays in the books, for another try.
        """
        if self._calls.closed or self._calls.forked:
            return
        errors = list(self._free_everything())
        if not self.live():
            try:
                self._calls.release_contexts()
                self._calls.closed = True
            except StrataError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def live(self) -> dict[str, int]:
        """Return how much of each kind exists; empty when nothing does."""
        counts = {
            "chunks": len(self._chunks),
            "mappings": len(self._mappings),
            "reservations": len(self._reservations),
            "blocks": len(self._blocks),
            "host blocks": len(self._host_blocks),
            "registrations": len(self._registrations),
            "streams": len(self._streams),
            "events": len(self._events),
            "modules": len(self._modules),
            "graphs": len(self._graphs),
            "executables": len(self._executables),
        }
        return {kind: count for kind, count in counts.items() if count}

    def _free_everything(self) -> Iterator[BaseException]:
        """Free what is in the books, last things first; yields what was raised."""
        for device in self._calls.contexts():
            try:
                self._calls.call("close", device, "cuCtxSynchronize")
            except StrataError as error:
                yield error
        for stream in self._streams.values():
            if (unseen := stream.take_error()) is not None:
                yield unseen
        steps: tuple[tuple[dict[int, object], Callable[[int], object]], ...] = (
            (self._executables, self.executable_destroy),
            (self._graphs, self.graph_destroy),
            (self._modules, self.unload_module),
            (self._events, self.event_destroy),
            (self._streams, self.stream_destroy),
            (self._mappings, lambda address: self.unmap(address, self._mappings[address].size)),
            (self._chunks, self.release),
            (
                self._reservations,
                lambda address: self.address_free(address, self._reservations[address]),
            ),
            (self._blocks, self.free),
            (self._registrations, self.unregister_host),
            (self._host_blocks, self.free_host),
        )  # type: ignore[assignment]
        for book, free in steps:
            for key in list(book):
                try:
                    free(key)
                except DeviceLost:
                    book.pop(key, None)  # nobody can free it any more: the process's end will
                except StrataError as error:
                    yield error

    # Memory.

    def granularity(self, device: int, kind: Granularity) -> int:
        flag = cuda.GRANULARITY_MINIMUM if kind == "minimum" else cuda.GRANULARITY_RECOMMENDED
        size, memory = c_size_t(), cuda.device_memory(device)
        asked = ("cuMemGetAllocationGranularity", byref(size), byref(memory), flag)
        self._calls.call("granularity", device, *asked)
        return max(size.value, SMALLEST_CHUNK_BYTES)

    def reserve(self, size: int) -> int:
        address = c_uint64()
        asked = ("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        self._calls.call("reserve", None, *asked, numbers={"size": size})
        self._reservations[address.value] = size
        return address.value

    def address_free(self, address: int, size: int) -> None:
        reserved = _find(self._reservations, address, f"reservation at {address:#x}", rule=1)
        if size != reserved:
            raise RuleViolation(1, f"free {size:,} of {reserved:,} reserved bytes")
        numbers = {"address": address, "size": size}
        self._calls.call("address_free", None, "cuMemAddressFree", address, size, numbers=numbers)
        del self._reservations[address]

    def create(self, size: int, device: int) -> int:
        handle, memory = c_uint64(), cuda.device_memory(device)
        asked = ("cuMemCreate", byref(handle), size, byref(memory), 0)
        self._calls.call("create", device, *asked, numbers={"size": size})
        self._chunks[handle.value] = device
        return handle.value

    def release(self, handle: int) -> None:
        device = _find(self._chunks, handle, f"chunk {handle}")
        self._calls.call("release", device, "cuMemRelease", handle)
        del self._chunks[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        device = _find(self._chunks, handle, f"chunk {handle}")
        numbers = {"address": address, "size": size}
        self._calls.call("map", device, "cuMemMap", address, size, 0, handle, 0, numbers=numbers)
        self._mappings[address] = _Mapping(size, device)

    def unmap(self, address: int, size: int) -> None:
        mapping = _find(self._mappings, address, f"chunk at {address:#x}")
        if size != mapping.size:
            raise RuleViolation(11, f"unmap {size:,} bytes, a chunk has {mapping.size:,}")
        numbers = {"address": address, "size": size}
        self._calls.call("unmap", mapping.device, "cuMemUnmap", address, size, numbers=numbers)
        del self._mappings[address]

    def set_access(self, address: int, size: int, devices: Sequence[int]) -> None:
        owner = _find(self._mappings, address, f"chunk at {address:#x}", rule=4).device
        for device in devices:
            self._calls.enter("set_access", device)  # access is given to a context that exists
        rights = (cuda.AccessDesc * len(devices))(*map(cuda.read_write, devices))
        asked = ("cuMemSetAccess", address, size, rights, len(devices))
        numbers = {"address": address, "size": size, "devices": len(devices)}
        self._calls.call("set_access", owner, *asked, numbers=numbers)

    def retire(self, address: int, size: int) -> None:
        """Do nothing: the driver does not know what tables name."""

    def reinstate(self, address: int, size: int) -> None:
        """Do nothing, as `retire`."""

    def mem_info(self, device: int) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._calls.call("mem_info", device, "cuMemGetInfo", byref(free), byref(total))
        return free.value, total.value

    def can_access(self, device: int, owner: int) -> bool:
        handles = [self._calls.handle("can_access", each) for each in (device, owner)]
        yes = c_int(1)
        if device != owner:
            self._calls.call("can_access", device, "cuDeviceCanAccessPeer", byref(yes), *handles)
        return yes.value != 0

    def synchronize(self, device: int) -> None:
        self._calls.call("synchronize", device, "cuCtxSynchronize")
        for stream in list(self._streams.values()):
            if stream.device == device:
                _raise(stream.take_error())

    # Devices.

    @property
    def device_count(self) -> int:
        return self._calls.device_count

    @property
    def version(self) -> int:
        """The version of CUDA that the installed driver is for: 13000 is 13.0."""
        return self._calls.version

    def device_facts(self, device: int) -> DeviceFacts:
        least, highest = self._priorities("device_facts", device)
        name = self._text("device_facts", device, "cuDeviceGetName")
        return DeviceFacts(device, name, self.mem_info(device)[1], least, highest)

    def card_facts(self, device: int) -> CardFacts:
        """Return what a card is; makes its context if it has none."""

        def attribute(number: int) -> int:
            value = c_int()
            asked = ("cuDeviceGetAttribute", byref(value), number, handle)
            self._calls.call("card_facts", device, *asked)
            return value.value

        handle = self._calls.handle("card_facts", device)
        total = c_size_t()
        self._calls.call("card_facts", device, "cuDeviceTotalMem", byref(total), handle)
        return CardFacts(
            index=device,
            name=self._text("card_facts", device, "cuDeviceGetName"),
            memory_bytes=total.value,
            capability=(
                attribute(cuda.COMPUTE_CAPABILITY_MAJOR),
                attribute(cuda.COMPUTE_CAPABILITY_MINOR),
            ),
            multiprocessors=attribute(cuda.MULTIPROCESSOR_COUNT),
            warp_size=attribute(cuda.WARP_SIZE),
            shared_block_bytes=attribute(cuda.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            bus_id=self._text("card_facts", device, "cuDeviceGetPCIBusId"),
            is_integrated=attribute(cuda.INTEGRATED) != 0,
        )

    # Plain memory.

    def allocate(self, size: int, device: int) -> int:
        address = c_uint64()
        self._calls.call(
            "allocate", device, "cuMemAlloc", byref(address), size, numbers={"size": size}
        )
        self._blocks[address.value] = device
        return address.value

    def free(self, address: int) -> None:
        device = _find(self._blocks, address, f"allocation at {address:#x}")
        self._calls.call("free", device, "cuCtxSynchronize")
        self._calls.call("free", device, "cuMemFree", address, numbers={"address": address})
        del self._blocks[address]

    def allocate_host(self, size: int) -> int:
        home, address = self._calls.home("allocate_host"), c_void_p()
        asked = ("cuMemHostAlloc", byref(address), size, cuda.MEMHOSTALLOC_PORTABLE_DEVICEMAP)
        self._calls.call("allocate_host", home, *asked, numbers={"size": size})
        assert address.value is not None  # noqa: S101 - the driver said success
        self._host_blocks[address.value] = size
        return address.value

    def free_host(self, address: int) -> None:
        size = _find(self._host_blocks, address, f"host memory at {address:#x}")
        home = self._calls.home("free_host")
        self._drain("free_host")
        numbers = {"address": address, "size": size}
        self._calls.call("free_host", home, "cuMemFreeHost", address, numbers=numbers)
        del self._host_blocks[address]

    def register_host(self, address: int, size: int) -> None:
        home, seen = self._calls.home("register_host"), c_uint64()
        flags, numbers = cuda.MEMHOSTREGISTER_PORTABLE_DEVICEMAP, {"address": address, "size": size}
        asked = ("cuMemHostRegister", address, size, flags)
        self._calls.call("register_host", home, *asked, numbers=numbers)
        self._registrations[address] = size
        try:
            asked = ("cuMemHostGetDevicePointer", byref(seen), address, 0)  # type: ignore[assignment]
            self._calls.call("register_host", home, *asked, numbers=numbers)
            if seen.value != address:
                raise UnsupportedDevice(
                    f"device {home} sees the host's {address:#x} at {seen.value:#x}",
                    hint="use --device host",
                )
        except StrataError:
            self.unregister_host(address)
            raise

    def unregister_host(self, address: int) -> None:
        size = _find(self._registrations, address, f"registered memory at {address:#x}")
        home = self._calls.home("unregister_host")
        self._drain("unregister_host")
        numbers = {"address": address, "size": size}
        self._calls.call("unregister_host", home, "cuMemHostUnregister", address, numbers=numbers)
        del self._registrations[address]

    # Streams and events.

    def stream_create(self, device: int, priority: int = 0) -> int:
        least, highest = self._priorities("stream_create", device)
        stream, wanted = c_void_p(), min(max(priority, highest), least)
        asked = (byref(stream), cuda.STREAM_NON_BLOCKING, wanted)
        self._calls.call("stream_create", device, "cuStreamCreateWithPriority", *asked)
        return _enter(self._streams, stream, _Stream(device))

    def stream_destroy(self, stream: int) -> None:
        found = self._stream(stream)
        self._calls.call("stream_destroy", found.device, "cuStreamSynchronize", stream)
        self._calls.call("stream_destroy", found.device, "cuStreamDestroy", stream)
        del self._streams[stream]
        _raise(found.take_error())

    def stream_synchronize(self, stream: int) -> None:
        found = self._stream(stream)
        self._calls.call("stream_synchronize", found.device, "cuStreamSynchronize", stream)
        _raise(found.take_error())

    def event_create(self, device: int) -> int:
        event = c_void_p()
        asked = ("cuEventCreate", byref(event), cuda.EVENT_DISABLE_TIMING)
        self._calls.call("event_create", device, *asked)
        return _enter(self._events, event, device)

    def event_destroy(self, event: int) -> None:
        self._calls.call("event_destroy", self._event(event), "cuEventDestroy", event)
        del self._events[event]

    def event_record(self, event: int, stream: int) -> None:
        self._event(event)
        device = self._stream(stream).device
        self._calls.call("event_record", device, "cuEventRecord", event, stream)

    def event_wait(self, stream: int, event: int) -> None:
        self._event(event)
        device = self._stream(stream).device
        self._calls.call("event_wait", device, "cuStreamWaitEvent", stream, event, 0)

    def event_query(self, event: int) -> bool:
        device = self._event(event)
        status = self._calls.ask("event_query", device, "cuEventQuery", event)
        if status not in (cuda.SUCCESS, cuda.NOT_READY):
            raise self._calls.error("event_query", device, "cuEventQuery", status, {})
        return status == cuda.SUCCESS

    def event_synchronize(self, event: int) -> None:
        self._calls.call("event_synchronize", self._event(event), "cuEventSynchronize", event)

    # Work.

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        self._calls.call(
            "copy_async",
            self._stream(stream).device,
            "cuMemcpyAsync",
            destination,
            source,
            size,
            stream,
            numbers={"destination address": destination, "source address": source, "size": size},
        )

    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        numbers = {"address": address, "size": size}
        asked = ("cuMemsetD8Async", address, value, size, stream)
        self._calls.call("fill_async", self._stream(stream).device, *asked, numbers=numbers)

    def launch_host(self, stream: int, function: Callable[[], object]) -> None:
        found = self._stream(stream)
        if found.is_capturing:
            raise DriverError(
                "launch_host", 0, "a graph cannot hold functions of Python", device=found.device
            )
        found.sweep()
        work = _HostWork(function)
        found.works.append(work)  # before the call: the driver keeps only its address
        try:
            asked = ("cuLaunchHostFunc", stream, _run_host_work, work)
            self._calls.call("launch_host", found.device, *asked)
        except BaseException:
            found.works.remove(work)
            raise

    # Kernels.

    def load_module(self, device: int, image: bytes) -> int:
        module, log = c_void_p(), ctypes.create_string_buffer(_LOG_BYTES)
        options = (c_int * 2)(cuda.JIT_ERROR_LOG_BUFFER, cuda.JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
        values = (c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        asked = ("cuModuleLoadDataEx", byref(module), image, len(options), options, values)
        try:
            self._calls.call("load_module", device, *asked, numbers={"size": len(image)})
        except DriverError as error:
            if log.value:
                error.add_note(log.value.decode(errors="replace").strip())
            raise
        return _enter(self._modules, module, device)

    def unload_module(self, module: int) -> None:
        device = _find(self._modules, module, f"module {module:#x}")
        self._calls.call("unload_module", device, "cuModuleUnload", module)
        del self._modules[module]
        for function in [key for key, owner in self._functions.items() if owner == module]:
            del self._functions[function]

    def function(self, module: int, name: str) -> int:
        device = _find(self._modules, module, f"module {module:#x}")
        function = c_void_p()
        asked = ("cuModuleGetFunction", byref(function), module, name.encode())
        try:
            self._calls.call("function", device, *asked)
        except DriverError as error:
            error.add_note(f"the kernel is {name}")
            raise
        return _enter(self._functions, function, module)

    def function_facts(self, function: int) -> FunctionFacts:
        def attribute(number: int) -> int:
            value = c_int()
            asked = ("cuFuncGetAttribute", byref(value), number, function)
            self._calls.call("function_facts", device, *asked)
            return value.value

        device = self._function(function)
        return FunctionFacts(
            registers=attribute(cuda.NUM_REGS),
            local_bytes=attribute(cuda.LOCAL_SIZE_BYTES),
            shared_bytes=attribute(cuda.SHARED_SIZE_BYTES),
        )

    def set_dynamic_shared_bytes(self, function: int, size: int) -> None:
        device = self._function(function)
        asked = ("cuFuncSetAttribute", function, cuda.MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
        self._calls.call("set_dynamic_shared_bytes", device, *asked, numbers={"size": size})

    def launch(
        self,
        function: int,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        stream: int,
        arguments: Buffer,
    ) -> None:
        device = self._stream(stream).device
        packed = bytes(arguments)
        size = c_size_t(len(packed))
        extra = (c_void_p * 5)(
            cuda.LAUNCH_PARAM_BUFFER_POINTER,
            ctypes.cast(c_char_p(packed), c_void_p),
            cuda.LAUNCH_PARAM_BUFFER_SIZE,
            ctypes.addressof(size),
            cuda.LAUNCH_PARAM_END,
        )
        self._calls.call(
            "launch",
            device,
            "cuLaunchKernel",
            function,
            *grid,
            *block,
            shared_bytes,
            stream,
            None,
            extra if packed else None,
            numbers={
                "blocks": grid[0] * grid[1] * grid[2],
                "threads": block[0] * block[1] * block[2],
                "shared": shared_bytes,
                "arguments": len(packed),
            },
        )

    # Graphs.

    def capture_begin(self, stream: int) -> None:
        found = self._stream(stream)
        asked = ("cuStreamBeginCapture", stream, cuda.STREAM_CAPTURE_MODE_THREAD_LOCAL)
        self._calls.call("capture_begin", found.device, *asked)
        found.is_capturing = True

    def capture_end(self, stream: int) -> int:
        found, graph = self._stream(stream), c_void_p()
        found.is_capturing = False  # also where the driver says that the capture went wrong
        self._calls.call("capture_end", found.device, "cuStreamEndCapture", stream, byref(graph))
        return _enter(self._graphs, graph, found.device)

    def graph_instantiate(self, graph: int, device: int) -> int:
        _find(self._graphs, graph, f"graph {graph:#x}")
        executable = c_void_p()
        asked = ("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        self._calls.call("graph_instantiate", device, *asked)
        return _enter(self._executables, executable, device)

    def graph_launch(self, executable: int, stream: int) -> None:
        _find(self._executables, executable, f"executable {executable:#x}")
        device = self._stream(stream).device
        self._calls.call("graph_launch", device, "cuGraphLaunch", executable, stream)

    def graph_destroy(self, graph: int) -> None:
        device = _find(self._graphs, graph, f"graph {graph:#x}")
        self._calls.call("graph_destroy", device, "cuGraphDestroy", graph)
        del self._graphs[graph]

    def executable_destroy(self, executable: int) -> None:
        device = _find(self._executables, executable, f"executable {executable:#x}")
        self._calls.call("executable_destroy", device, "cuGraphExecDestroy", executable)
        del self._executables[executable]

    # What the operations share.

    def _stream(self, stream: int) -> _Stream:
        return _find(self._streams, stream, f"stream {stream:#x}")

    def _event(self, event: int) -> int:
        return _find(self._events, event, f"event {event:#x}")

    def _function(self, function: int) -> int:
        """Return the device of a kernel."""
        return self._modules[_find(self._functions, function, f"function {function:#x}")]

    def _drain(self, operation: str) -> None:
        """Wait for the work of every device, as all of them can use the host's memory."""
        for device in self._calls.contexts():
            self._calls.call(operation, device, "cuCtxSynchronize")

    def _priorities(self, operation: str, device: int) -> tuple[int, int]:
        least, highest = c_int(), c_int()
        asked = ("cuCtxGetStreamPriorityRange", byref(least), byref(highest))
        self._calls.call(operation, device, *asked)
        return least.value, highest.value

    def _text(self, operation: str, device: int, function: str) -> str:
        text, handle = (
            ctypes.create_string_buffer(_TEXT_BYTES),
            self._calls.handle(operation, device),
        )
        self._calls.call(operation, device, function, text, _TEXT_BYTES, handle)
        return text.value.decode(errors="replace")


if TYPE_CHECKING:
    _is_a_driver: type[Driver] = CudaDriver
    _runs_programs: type[ProgramDriver] = CudaDriver


def _find(book: dict[int, T], key: int, what: str, rule: int = 9) -> T:
    if key not in book:
        raise RuleViolation(rule, f"there is no {what}")
    return book[key]


def _enter(book: dict[int, T], made: c_void_p, line: T) -> int:
    """Write down what the driver made, and return its handle."""
    assert made.value is not None  # noqa: S101 - the driver said success
    book[made.value] = line
    return made.value


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
