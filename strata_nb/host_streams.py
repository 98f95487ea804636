"""Run work of host devices in order: a stream is a thread, an event is a place in a stream's work.

Positions are counts of pieces of work: a stream has `submitted` so many and `completed` so many. An
event is a stream and the position that it had when the event was recorded, so recording costs no
work, unless the event is timed: then looking at the clock is work of the stream. After work that
raised, later work still runs; the error waits for who synchronizes. The rule that memory may leave
its address only when work from before its retirement has ended is a comparison of such positions
too.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from strata_nb.errors import DriverError, RuleViolation

LEAST_PRIORITY = 10  # a "nice" value; 0, the process's own, is the most urgent one allowed
Positions = dict[int, int]  # stream -> pieces of work


class _Stream:
    """One thread and the work it has still to do; everything below `_changed` is guarded by it."""

    def __init__(self, device: int, priority: int) -> None:
        self.device = device
        self._changed = threading.Condition()
        self.submitted = 0
        self.completed = 0
        self._work: deque[Callable[[], object] | None] = deque()
        self._error: BaseException | None = None
        name = f"strata-host-{device}"
        self.thread = threading.Thread(target=self._run, args=(priority,), name=name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            raise DriverError(
                "stream_create",
                0,
                f"no thread can be started: {error}",
                device=device,
                hint="end other programs, or raise the limit of threads (ulimit -u, -v)",
            ) from error

    def submit(self, work: Callable[[], object] | None) -> None:
        """Append work; None ends the thread."""
        with self._changed:
            self.submitted += 1
            self._work.append(work)
            self._changed.notify_all()

    def wait(self, position: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.completed >= position)

    def take_error(self) -> BaseException | None:
        with self._changed:
            error, self._error = self._error, None
            return error

    def _run(self, priority: int) -> None:
        if priority:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that synchronizes
                self._finish(error)
            else:
                self._finish(None)
        self._finish(None)

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._work)
            return self._work.popleft()

    def _finish(self, error: BaseException | None) -> None:
        with self._changed:
            self.completed += 1
            self._error = self._error or error
            self._changed.notify_all()


@dataclass(slots=True)
class _Event:
    timed: bool = False
    stream: _Stream | None = None
    position: int = 0
    times: list[float] = field(default_factory=list)  # of the latest record: one, once it is done

    def done(self) -> bool:
        return self.stream is None or self.stream.completed >= self.position

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.wait(self.position)


class HostStreams:
    """Own the streams and events of all host devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two tables, never held while waiting
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event] = {}

    def create(self, device: int, priority: int) -> int:
        stream = _Stream(device, min(max(priority, 0), LEAST_PRIORITY))
        with self._lock:
            number = next(self._numbers)
            self._streams[number] = stream
        return number

    def destroy(self, number: int) -> None:
        """Wait for the stream's work and end its thread; raises the work's first error."""
        stream = self._stream(number)
        stream.submit(None)
        stream.thread.join()
        with self._lock:
            del self._streams[number]
        _raise(stream.take_error())

    def submit(self, number: int, work: Callable[[], object]) -> None:
        self._stream(number).submit(work)

    def device_of(self, number: int) -> int:
        return self._stream(number).device

    def synchronize(self, number: int) -> None:
        """Wait for what is on the stream now; raises its first error that was not raised yet."""
        stream = self._stream(number)
        stream.wait(stream.submitted)
        _raise(stream.take_error())

    def synchronize_device(self, device: int) -> None:
        """Wait for what is on the device's streams now; raises like `synchronize`."""
        self.drain(device)
        for stream in self._all():
            if stream.device == device:
                _raise(stream.take_error())

    def drain(self, device: int | None = None) -> None:
        """Wait for what is on the streams of one device or of all; leaves errors where they are."""
        for stream in self._all():
            if device is None or stream.device == device:
                stream.wait(stream.submitted)

    def positions(self) -> Positions:
        """Return how much work each stream has been given."""
        with self._lock:
            return {number: stream.submitted for number, stream in self._streams.items()}

    def unfinished(self, positions: Positions) -> list[int]:
        """Return the streams that have not yet come to the given positions."""
        with self._lock:
            streams = self._streams
            return [
                number
                for number, position in positions.items()
                if number in streams and streams[number].completed < position
            ]

    def create_event(self, timed: bool) -> int:
        with self._lock:
            number = next(self._numbers)
            self._events[number] = _Event(timed)
        return number

    def destroy_event(self, number: int) -> None:
        self._event(number)
        with self._lock:
            del self._events[number]

    def record(self, event: int, stream: int) -> None:
        recorded = self._event(event)
        recorded.stream = self._stream(stream)
        if recorded.timed:
            recorded.times = times = list[float]()  # an earlier record may still be under way
            recorded.stream.submit(lambda: times.append(time.perf_counter()))
        recorded.position = recorded.stream.submitted

    def hold(self, stream: int, event: int) -> None:
        recorded = self._event(event)
        snapshot = _Event(stream=recorded.stream, position=recorded.position)
        self._stream(stream).submit(snapshot.wait)

    def event_done(self, event: int) -> bool:
        return self._event(event).done()

    def event_synchronize(self, event: int) -> None:
        self._event(event).wait()

    def elapsed_s(self, start: int, end: int) -> float:
        times = [self._event(number).times for number in (start, end)]
        if not all(times):
            raise DriverError("event_elapsed_s", 0, "not timed, not recorded, or not done yet")
        return times[1][0] - times[0][0]

    def is_stream_thread(self) -> bool:
        here = threading.current_thread()
        return any(stream.thread is here for stream in self._all())

    def live(self) -> dict[str, int]:
        with self._lock:
            return {"streams": len(self._streams), "events": len(self._events)}

    def close(self) -> BaseException | None:
        """Finish all work and end all threads; returns the first error that was not raised yet."""
        streams = self._all()
        for stream in streams:
            stream.submit(None)
        for stream in streams:
            stream.thread.join()
        with self._lock:
            self._streams.clear()
            self._events.clear()
        return next((error for stream in streams if (error := stream.take_error())), None)

    def _all(self) -> list[_Stream]:
        with self._lock:
            return list(self._streams.values())

    def _stream(self, number: int) -> _Stream:
        with self._lock:
            if number not in self._streams:
                raise RuleViolation(9, f"no stream {number}")
            return self._streams[number]

    def _event(self, number: int) -> _Event:
        with self._lock:
            if number not in self._events:
                raise RuleViolation(9, f"no event {number}")
            return self._events[number]


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
