"""A device whose batches run in a stream of the driver, beside copies of other streams, as a card's
do: whoever does not wait for the other one finds the wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from filling_backend import FillingBackend


class _Stream:
    """Be a queue whose work begins at once, in order, in a stream."""

    def __init__(self, driver: Any, stream: int) -> None:
        self._driver, self.stream = driver, stream

    def append(self, work: Callable[[], None]) -> None:
        self._driver.launch_host(self.stream, work)


class StreamingBackend(FillingBackend):
    """Read prompts in batches of up to 64 rows; what is asked for is work of `stream`."""

    most_rows, batches_apart = 64, True

    def __init__(self, text: str, threads: int = 1, *given: Any) -> None:
        super().__init__(text, threads, *given)
        self.stream = self.driver.stream_create(0)
        self._resources.callback(self.driver.stream_destroy, self.stream)
        self._queue = _Stream(self.driver, self.stream)  # type: ignore[assignment]

    def _do(self, until: Callable[[], bool] = lambda: False) -> None:
        self.driver.stream_synchronize(self.stream)

    def record_event(self, event: int) -> None:
        self.driver.event_record(event, self.stream)

    def await_event(self, event: int) -> None:
        self.driver.event_wait(self.stream, event)
