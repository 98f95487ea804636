"""A table of CUDA's driver functions made of host devices, and one that fails on request.

`HostTable` stands where the library stands, below the unmodified driver: each function is a real C
function pointer of the real prototype, so that arguments, structures and results cross the same
boundary as on a card. Behind it is a `HostDriver`, which really moves pages and checks the rules.
What a card adds (contexts of threads, kernels, graphs) is modelled here.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from strata_nb import cuda_table as cuda
from strata_nb.cuda_table import PROTOTYPES, CudaTable
from strata_nb.errors import DriverError, RuleViolation
from strata_nb.host import HostDriver
from strata_nb.host_memory import HostDevice

UNIT = 2 << 20
USUAL_SHARED_BYTES = 48 << 10  # of a block, of a kernel that asked for nothing
INVALID_CONTEXT = 201
ILLEGAL_STATE = 401
NOT_FOUND = 500
CAPTURE_UNSUPPORTED = 900
NAMES = {
    0: "CUDA_SUCCESS",
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    401: "CUDA_ERROR_ILLEGAL_STATE",
    500: "CUDA_ERROR_NOT_FOUND",
    600: "CUDA_ERROR_NOT_READY",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    999: "CUDA_ERROR_UNKNOWN",
}
ATTRIBUTES = {
    cuda.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: 1,
    cuda.UNIFIED_ADDRESSING: 1,
    cuda.COMPUTE_CAPABILITY_MAJOR: 9,
    cuda.COMPUTE_CAPABILITY_MINOR: 0,
    cuda.MULTIPROCESSOR_COUNT: 132,
    cuda.WARP_SIZE: 32,
    cuda.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
    cuda.INTEGRATED: 0,
}
FUNCTION_ATTRIBUTES = {cuda.NUM_REGS: 40, cuda.LOCAL_SIZE_BYTES: 0, cuda.SHARED_SIZE_BYTES: 512}

Kernel = Callable[["Launch"], object]


@dataclass(frozen=True)
class Launch:
    """What a kernel is called with."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    arguments: bytes


@dataclass
class Broken(Exception):
    """A call that a card would answer with this status."""

    status: int


@dataclass
class _Graph:
    works: list[Callable[[], object]] = field(default_factory=list)


class HostTable:
    """The functions of `PROTOTYPES` over host devices.

    kernels      image -> name -> what runs for it
    refused      the rules that callers broke, which they see as CUDA_ERROR_INVALID_VALUE
    calls        how often each function was called
    overlapping  launches that may begin before the one in front has ended
    """

    def __init__(
        self,
        devices: int = 3,
        *,
        budget_bytes: int = 32 * UNIT,
        minimum_bytes: int = UNIT,
        paths: Sequence[tuple[int, int]] = ((1, 0), (0, 1)),
        kernels: Mapping[bytes, Mapping[str, Kernel]] | None = None,
        version: int = 13000,
        attributes: Mapping[int, int] | None = None,
        host_offset: int = 0,
    ) -> None:
        facts = HostDevice(budget_bytes, minimum_bytes, max(minimum_bytes, UNIT))
        self.host = HostDriver([facts] * devices, paths=paths)
        # A card is not told what was retired, and unmaps whatever work still runs.
        self.host._memory._require_drained = lambda *_: None  # type: ignore[method-assign]
        self.calls: Counter[str] = Counter()
        self.refused: list[RuleViolation] = []
        self.overlapping = 0
        self._devices = devices
        self._version = version
        self._attributes = {**ATTRIBUTES, **(attributes or {})}
        self._host_offset = host_offset
        self._kernels = kernels or {}
        self._thread = threading.local()
        self._numbers = itertools.count(0x1000, 0x10)
        self._retained: Counter[int] = Counter()
        self._modules: dict[int, Mapping[str, Kernel]] = {}
        self._functions: dict[int, Kernel] = {}
        self._most_shared: dict[int, int] = {}  # function -> bytes, where it asked for more
        self._graphs: dict[int, _Graph] = {}
        self._executables: dict[int, _Graph] = {}
        self._captures: dict[int, _Graph] = {}  # stream -> what it has recorded
        self._texts = {code: c_char_p(name.encode()) for code, name in NAMES.items()}
        self._callbacks: list[object] = []  # ctypes frees a callback that nobody holds

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Make a C function of a method, as the library's loader would find it."""
        if name not in PROTOTYPES:
            raise AttributeError(name)
        arguments = PROTOTYPES[name].arguments
        # ctypes gives a callback a copy of a char*; an address is what C has.
        raw = [_raw(each) for each in arguments]
        callback = ctypes.CFUNCTYPE(c_int, *raw)(partial(self._answer, name))
        self._callbacks.append(callback)
        address = ctypes.cast(callback, c_void_p).value
        assert address is not None
        function: Callable[..., int] = ctypes.CFUNCTYPE(c_int, *arguments)(address)
        setattr(self, name, function)
        return function

    def live(self) -> dict[str, int]:
        """Return what exists, contexts and all."""
        counts = {
            **self.host.live(),
            "contexts": self._retained.total(),
            "modules": len(self._modules),
            "graphs": len(self._graphs),
            "executables": len(self._executables),
        }
        return {kind: count for kind, count in counts.items() if count}

    def close(self) -> None:
        self.host.close()

    def _answer(self, name: str, *arguments: Any) -> int:
        self.calls[name] += 1
        try:
            getattr(self, f"_{name}")(*arguments)
        except Broken as broken:
            return broken.status
        except DriverError as error:
            return error.code
        except RuleViolation as violation:
            self.refused.append(violation)
            return cuda.INVALID_VALUE
        return cuda.SUCCESS

    # Devices and contexts.

    def _cuInit(self, flags: int) -> None:
        if self._devices == 0:
            raise Broken(cuda.NO_DEVICE)

    def _cuDriverGetVersion(self, version: Any) -> None:
        version[0] = self._version

    def _cuGetErrorName(self, error: int, text: Any) -> None:
        if error not in self._texts:
            raise Broken(cuda.INVALID_VALUE)
        text[0] = self._texts[error]

    def _cuDeviceGetCount(self, count: Any) -> None:
        count[0] = self._devices

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        device[0] = self._known(ordinal)

    def _cuDeviceGetName(self, text: int, size: int, device: int) -> None:
        _put_text(text, size, f"NVIDIA Pretend {self._known(device)}")

    def _cuDeviceGetPCIBusId(self, text: int, size: int, device: int) -> None:
        _put_text(text, size, f"0000:{self._known(device) + 1:02X}:00.0")

    def _cuDeviceTotalMem(self, size: Any, device: int) -> None:
        size[0] = self.host.mem_info(self._known(device))[1]

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        self._known(device)
        value[0] = self._attributes[attribute]

    def _cuDeviceCanAccessPeer(self, yes: Any, device: int, owner: int) -> None:
        yes[0] = self.host.can_access(device, owner)

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        self.host.synchronize(self._known(device))  # makes the host device's context
        self._retained[device] += 1
        context[0] = 0xC0 + device

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        if not self._retained[device]:
            raise Broken(INVALID_CONTEXT)
        self._retained[device] -= 1

    def _cuCtxSetCurrent(self, context: int | None) -> None:
        self._thread.device = None if context is None else context - 0xC0

    def _cuCtxSynchronize(self) -> None:
        if self._captures:
            raise Broken(CAPTURE_UNSUPPORTED)
        self.host.synchronize(self._current())

    def _cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> None:
        facts = self.host.device_facts(self._current())
        least[0], greatest[0] = facts.least_priority, facts.highest_priority

    # Memory.

    def _cuMemGetAllocationGranularity(self, size: Any, memory: Any, flag: int) -> None:
        kind = "recommended" if flag == cuda.GRANULARITY_RECOMMENDED else "minimum"
        size[0] = self.host.granularity(self._owner(memory), kind)  # type: ignore[arg-type]

    def _cuMemAddressReserve(
        self, address: Any, size: int, alignment: int, wanted: int, flags: int
    ) -> None:
        assert (alignment, wanted, flags) == (0, 0, 0)
        address[0] = self.host.reserve(size)

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        self.host.address_free(address, size)

    def _cuMemCreate(self, handle: Any, size: int, memory: Any, flags: int) -> None:
        handle[0] = self.host.create(size, self._owner(memory))

    def _cuMemRelease(self, handle: int) -> None:
        self.host.release(handle)

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert (offset, flags) == (0, 0)
        self.host.map(address, size, handle)

    def _cuMemUnmap(self, address: int, size: int) -> None:
        self.host.unmap(address, size)

    def _cuMemSetAccess(self, address: int, size: int, rights: Any, count: int) -> None:
        given = rights[:count]
        assert {(right.location.type, right.flags) for right in given} == {(1, 3)}
        devices = [right.location.id for right in given]
        if any(not self._retained[device] for device in devices):
            raise Broken(cuda.INVALID_DEVICE)
        self.host.set_access(address, size, devices)

    def _cuMemGetInfo(self, free: Any, total: Any) -> None:
        free[0], total[0] = self.host.mem_info(self._current())

    def _cuMemAlloc(self, address: Any, size: int) -> None:
        address[0] = self.host.allocate(size, self._current())

    def _cuMemFree(self, address: int) -> None:
        self._require_idle(self._current())
        self.host.free(address)

    def _cuMemHostAlloc(self, address: Any, size: int, flags: int) -> None:
        assert flags == 3
        self._current()
        address[0] = self.host.allocate_host(size)

    def _cuMemFreeHost(self, address: int) -> None:
        self._current()
        self._require_idle()
        self.host.free_host(address)

    def _cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        assert flags == 3
        self._current()
        self.host.register_host(address, size)

    def _cuMemHostUnregister(self, address: int) -> None:
        self._current()
        self._require_idle()
        self.host.unregister_host(address)

    def _cuMemHostGetDevicePointer(self, seen: Any, address: int, flags: int) -> None:
        seen[0] = address + self._host_offset

    # Streams and events.

    def _cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> None:
        assert flags == cuda.STREAM_NON_BLOCKING
        facts = self.host.device_facts(self._current())
        if not facts.highest_priority <= priority <= facts.least_priority:
            raise Broken(cuda.INVALID_VALUE)
        stream[0] = self.host.stream_create(self._current(), priority)

    def _cuStreamDestroy(self, stream: int) -> None:
        self.host.stream_destroy(stream)

    def _cuStreamSynchronize(self, stream: int) -> None:
        if stream in self._captures:
            raise Broken(CAPTURE_UNSUPPORTED)
        self.host.stream_synchronize(stream)

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self.host.event_wait(stream, event)

    def _cuEventCreate(self, event: Any, flags: int) -> None:
        assert flags in (cuda.EVENT_DEFAULT, cuda.EVENT_DISABLE_TIMING)
        timed = flags == cuda.EVENT_DEFAULT
        event[0] = self.host.event_create(self._current(), timed)

    def _cuEventDestroy(self, event: int) -> None:
        self.host.event_destroy(event)

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self.host.event_record(event, stream)

    def _cuEventQuery(self, event: int) -> None:
        if not self.host.event_query(event):
            raise Broken(cuda.NOT_READY)

    def _cuEventSynchronize(self, event: int) -> None:
        self.host.event_synchronize(event)

    def _cuEventElapsedTime(self, milliseconds: Any, start: int, end: int) -> None:
        try:
            seconds = self.host.event_elapsed_s(start, end)
        except DriverError as error:  # not timed, or not done yet
            raise Broken(cuda.NOT_READY) from error
        milliseconds[0] = 1000 * seconds

    # Work.

    def _cuMemcpyAsync(self, destination: int, source: int, size: int, stream: int) -> None:
        self._submit(stream, partial(self.host.copy_async, destination, source, size))

    def _cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> None:
        self._submit(stream, partial(self.host.fill_async, address, value, size))

    def _cuLaunchHostFunc(self, stream: int, function: int, work: object) -> None:
        called = cuda.HostFunction(function)
        self.host.launch_host(stream, lambda: called(work))

    def _cuLaunchKernelEx(self, asked: Any, function: int, parameters: Any, extra: Any) -> None:
        config = asked[0]
        assert not parameters
        for number in range(config.numAttrs):
            assert config.attrs[number].id == cuda.PROGRAMMATIC_STREAM_SERIALIZATION
            self.overlapping += config.attrs[number].value
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        shared, stream = config.sharedMemBytes, config.hStream
        if shared > self._most_shared.get(function, USUAL_SHARED_BYTES):
            raise Broken(cuda.INVALID_VALUE)
        launch = Launch(grid, block, shared, _packed(extra))
        run = partial(self._functions[function], launch)
        self._submit(stream, lambda on: self.host.launch_host(on, run))

    def _submit(self, stream: int, work: Callable[[int], object]) -> None:
        """Give a stream work, which is called with the stream it shall run on, now or later."""
        if stream in self._captures:
            self._captures[stream].works.append(work)  # type: ignore[arg-type]
        else:
            work(stream)

    # Modules.

    def _cuModuleLoadDataEx(
        self, module: Any, image: int, count: int, options: Any, values: Any
    ) -> None:
        assert options[:count] == [5, 6]
        found = self._kernels.get(ctypes.string_at(image))
        if found is None:
            _put_text(values[0], values[1], "ptxas fatal: what is that?")
            raise Broken(cuda.INVALID_VALUE)
        module[0] = next(self._numbers)
        self._modules[module[0]] = found

    def _cuModuleUnload(self, module: int) -> None:
        del self._modules[module]

    def _cuModuleGetFunction(self, function: Any, module: int, name: int) -> None:
        kernel = self._modules[module].get(ctypes.string_at(name).decode())
        if kernel is None:
            raise Broken(NOT_FOUND)
        function[0] = next(self._numbers)
        self._functions[function[0]] = kernel

    def _cuFuncGetAttribute(self, value: Any, attribute: int, function: int) -> None:
        assert function in self._functions
        value[0] = FUNCTION_ATTRIBUTES[attribute]

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        assert attribute == cuda.MAX_DYNAMIC_SHARED_SIZE_BYTES
        if value > ATTRIBUTES[cuda.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN]:
            raise Broken(cuda.INVALID_VALUE)
        self._most_shared[function] = value

    # Graphs.

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> None:
        assert mode == cuda.STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._captures[stream] = _Graph()

    def _cuStreamEndCapture(self, stream: int, graph: Any) -> None:
        if stream not in self._captures:
            raise Broken(ILLEGAL_STATE)
        graph[0] = next(self._numbers)
        self._graphs[graph[0]] = self._captures.pop(stream)

    def _cuGraphInstantiateWithFlags(self, executable: Any, graph: int, flags: int) -> None:
        executable[0] = next(self._numbers)
        self._executables[executable[0]] = _Graph(list(self._graphs[graph].works))

    def _cuGraphLaunch(self, executable: int, stream: int) -> None:
        for work in self._executables[executable].works:
            work(stream)  # type: ignore[call-arg]

    def _cuGraphDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    def _cuGraphExecDestroy(self, executable: int) -> None:
        del self._executables[executable]

    # What they share.

    def _known(self, device: int) -> int:
        if not 0 <= device < self._devices:
            raise Broken(cuda.INVALID_DEVICE)
        return device

    def _owner(self, memory: Any) -> int:
        asked = memory[0]
        assert (asked.type, asked.requestedHandleTypes, asked.location.type) == (1, 0, 1)
        return self._known(asked.location.id)

    def _require_idle(self, device: int | None = None) -> None:
        """Refuse to free what running work may use: the library is not known to wait for it."""
        streams = self.host._streams
        busy = [
            stream
            for stream in streams.unfinished(streams.positions())
            if device is None or streams.device_of(stream) == device
        ]
        if busy:
            raise RuleViolation(7, f"memory is freed while streams {busy} run")

    def _current(self) -> int:
        """Return the device of this thread's context, as the library would find it."""
        device: int | None = getattr(self._thread, "device", None)
        if device is None or not self._retained[device]:
            raise Broken(INVALID_CONTEXT)
        return device


class FailingTable:
    """A table that answers for the real one where it is told to, before that is called.

    calls   how often each function was called, those that failed among them
    """

    def __init__(self, table: CudaTable) -> None:
        self.calls: Counter[str] = Counter()
        self._table = table
        self._plans: dict[str, tuple[int, int, bool]] = {}  # first call, status, forever

    def plan(self, name: str, nth: int = 1, *, status: int = 999, forever: bool = False) -> None:
        """Let the n-th call of a function from now on fail, with those after it if `forever`."""
        if name not in PROTOTYPES or nth < 1:
            raise ValueError(f"no {nth}. call of {name!r}")
        self._plans[name] = (self.calls[name] + nth, status, forever)

    def lift(self) -> None:
        self._plans.clear()

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self._table, name)

        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            first, status, forever = self._plans.get(name, (0, 0, False))
            if first and (self.calls[name] == first or (forever and self.calls[name] > first)):
                return status
            return int(function(*arguments))

        return call


def _raw(argument: Any) -> Any:
    is_text_or_function = argument in (c_char_p, cuda.HostFunction)
    return c_void_p if is_text_or_function else argument


def _put_text(address: int, size: int, text: str) -> None:
    data = text.encode() + b"\0"
    assert len(data) <= size
    ctypes.memmove(address, data, len(data))


def _packed(extra: Any) -> bytes:
    """Return the arguments of a launch from its CU_LAUNCH_PARAM list."""
    if not extra:
        return b""
    assert (extra[0], extra[2], extra[4] or 0) == (1, 2, 0)
    size = c_size_t.from_address(extra[3]).value
    return ctypes.string_at(extra[1], size)
