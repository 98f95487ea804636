"""Do CUDA's streams, events, copies, and functions of Python in a stream's order.

`execution.ExecutionDriver` says what each operation does. The driver calls a function of Python
from a thread of its own, and must not be called from there. What the function raises is kept with
its stream, for whoever waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_void_p
from dataclasses import dataclass, field

from strata_nb import cuda_table as cuda
from strata_nb.cuda_books import Book
from strata_nb.cuda_calls import Calls
from strata_nb.errors import DriverError, StrataError


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


# What the driver calls, with the work. It belongs to no driver object, so it outlives them all.
_run_host_work = cuda.HostFunction(_HostWork.run)


@dataclass(slots=True)
class _Stream:
    device: int
    works: list[_HostWork] = field(default_factory=list)  # that may not have run yet, in order
    error: BaseException | None = None  # the first of them that nobody has seen
    is_capturing: bool = False

    def sweep(self) -> None:
        """Forget functions that have run, and keep the first error."""
        done = [work for work in self.works if work.done]
        for work in done:
            self.works.remove(work)
            self.error = self.error or work.error

    def take_error(self) -> BaseException | None:
        self.sweep()
        error, self.error = self.error, None
        return error


class CudaStreams:
    """Run copies, fills and functions on streams of cards."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._streams: Book[_Stream] = Book("streams", CudaStreams._end_stream)
        self._events: Book[int] = Book("events", CudaStreams.event_destroy)  # event -> device

    def synchronize(self, device: int) -> None:
        self._calls.call("synchronize", device, "cuCtxSynchronize")
        for stream in list(self._streams.values()):
            if stream.device == device:
                _raise(stream.take_error())

    def stream_create(self, device: int, priority: int = 0) -> int:
        least, highest = self._priorities("stream_create", device)
        stream, wanted = c_void_p(), min(max(priority, highest), least)
        asked = (byref(stream), cuda.STREAM_NON_BLOCKING, wanted)
        self._calls.call("stream_create", device, "cuStreamCreateWithPriority", *asked)
        return self._streams.enter(stream, _Stream(device))

    def stream_destroy(self, stream: int) -> None:
        _raise(self._end_stream(stream))

    def stream_synchronize(self, stream: int) -> None:
        found = self._streams.find(stream)
        self._calls.call("stream_synchronize", found.device, "cuStreamSynchronize", stream)
        _raise(found.take_error())

    def event_create(self, device: int, timed: bool = False) -> int:
        event = c_void_p()
        flags = cuda.EVENT_DEFAULT if timed else cuda.EVENT_DISABLE_TIMING
        asked = ("cuEventCreate", byref(event), flags)
        self._calls.call("event_create", device, *asked)
        return self._events.enter(event, device)

    def event_destroy(self, event: int) -> None:
        self._calls.call("event_destroy", self._events.find(event), "cuEventDestroy", event)
        del self._events[event]

    def event_record(self, event: int, stream: int) -> None:
        self._events.find(event)
        device = self._streams.find(stream).device
        self._calls.call("event_record", device, "cuEventRecord", event, stream)

    def event_wait(self, stream: int, event: int) -> None:
        self._events.find(event)
        device = self._streams.find(stream).device
        self._calls.call("event_wait", device, "cuStreamWaitEvent", stream, event, 0)

    def event_query(self, event: int) -> bool:
        device = self._events.find(event)
        status = self._calls.ask("event_query", device, "cuEventQuery", event)
        if status not in (cuda.SUCCESS, cuda.NOT_READY):
            raise self._calls.error("event_query", device, "cuEventQuery", status, {})
        return status == cuda.SUCCESS

    def event_synchronize(self, event: int) -> None:
        device = self._events.find(event)
        self._calls.call("event_synchronize", device, "cuEventSynchronize", event)

    def event_elapsed_s(self, start: int, end: int) -> float:
        self._events.find(end)
        milliseconds = c_float()
        asked = ("cuEventElapsedTime", byref(milliseconds), start, end)
        self._calls.call("event_elapsed_s", self._events.find(start), *asked)
        return milliseconds.value / 1000

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        device = self._streams.find(stream).device
        numbers = {"destination address": destination, "source address": source, "size": size}
        asked = ("cuMemcpyAsync", destination, source, size, stream)
        self._calls.call("copy_async", device, *asked, numbers=numbers)

    def fill_async(self, address: int, value: int, size: int, stream: int) -> None:
        device = self._streams.find(stream).device
        numbers = {"address": address, "size": size}
        asked = ("cuMemsetD8Async", address, value, size, stream)
        self._calls.call("fill_async", device, *asked, numbers=numbers)

    def launch_host(self, stream: int, function: Callable[[], object]) -> None:
        found = self._streams.find(stream)
        if found.is_capturing:
            raise DriverError(
                "launch_host", 0, "a graph cannot hold functions of Python", device=found.device
            )
        found.sweep()
        work = _HostWork(function)
        found.works.append(work)  # before the call: the driver keeps no more than its address
        try:
            asked = ("cuLaunchHostFunc", stream, _run_host_work, work)
            self._calls.call("launch_host", found.device, *asked)
        except StrataError:  # and no other: after a Ctrl-C the driver may have its address
            found.works.remove(work)
            raise

    def _end_stream(self, stream: int) -> BaseException | None:
        """Destroy a stream after its work; returns what a function on it raised, unseen so far."""
        found = self._streams.find(stream)
        self._calls.call("stream_destroy", found.device, "cuStreamSynchronize", stream)
        self._calls.call("stream_destroy", found.device, "cuStreamDestroy", stream)
        del self._streams[stream]
        return found.take_error()

    def _priorities(self, operation: str, device: int) -> tuple[int, int]:
        """Return the least and the highest priority that streams of a device have."""
        least, highest = c_int(), c_int()
        asked = ("cuCtxGetStreamPriorityRange", byref(least), byref(highest))
        self._calls.call(operation, device, *asked)
        return least.value, highest.value


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
