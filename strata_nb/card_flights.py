"""Begin windows on a card and take their results later, so that two are under way at a time.

All of a window is work of one stream: copies to the card, a graph, copies back, and an event behind
them. The host waits for the event alone, and meanwhile the next window may be on its way.

    stream   | send n | graph n | fetch n | event n | send n+1 | graph n+1 | ...
    host       begin n   begin n+1          land n: uses the results while n+1 runs

Pinned memory has two parts, which windows take in turn: what a window sends and fetches stays until
the one after the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_nb.addresses import memory_view
from strata_nb.execution import ExecutionDriver


class CardFlight:
    """Hold the pinned memory of a window, and what says that it has ended."""

    __slots__ = ("event", "fetched", "fetched_address", "has_landed", "sent", "sent_address")

    def __init__(self, event: int, address: int, sent_bytes: int, fetched_bytes: int) -> None:
        self.event = event
        self.has_landed = True
        self.sent_address, self.fetched_address = address, address + sent_bytes
        self.sent = memory_view(address, sent_bytes)
        self.fetched: NDArray[np.int64] = memory_view(address + sent_bytes, fetched_bytes).view(
            np.int64
        )


class CardFlights:
    """Begin windows on one stream of a card; at most two are under way.

    run   begins a program for a number of rows, as `CardBackend.run`
    """

    def __init__(
        self,
        driver: ExecutionDriver,
        device: int,
        stream: int,
        run: Callable[[Any, int], None],
        sent_bytes: int,
        fetched_bytes: int,
    ) -> None:
        sent_bytes, fetched_bytes = (-(-size // 64) * 64 for size in (sent_bytes, fetched_bytes))
        size = sent_bytes + fetched_bytes
        base = driver.allocate_host(2 * size)
        self._driver, self._stream, self._run = driver, stream, run
        self._next, self._other = (
            CardFlight(driver.event_create(device), base + size * turn, sent_bytes, fetched_bytes)
            for turn in (0, 1)
        )

    def begin(
        self,
        program: Any,
        rows: int,
        sent: Sequence[tuple[int, NDArray[np.uint8]]],
        fetched: Sequence[tuple[int, int]],
    ) -> CardFlight:
        """Send bytes to addresses, run a program, and begin to fetch (address, bytes) behind it.

        Nothing waits. Sizes are multiples of 8 bytes.
        """
        flight, driver, stream = self._next, self._driver, self._stream
        if not flight.has_landed:  # nobody wanted to know
            driver.event_synchronize(flight.event)
        self._next, self._other = self._other, flight
        flight.has_landed = False
        place = 0
        for address, data in sent:
            flight.sent[place : place + len(data)] = data
            driver.copy_async(address, flight.sent_address + place, len(data), stream)
            place += len(data)
        self._run(program, rows)
        place = flight.fetched_address
        for source, size in fetched:
            driver.copy_async(place, source, size, stream)
            place += size
        driver.event_record(flight.event, stream)
        return flight

    def land(self, flight: CardFlight) -> NDArray[np.int64]:
        """Wait for a window; return the words that it fetched, one behind the other."""
        self._driver.event_synchronize(flight.event)
        flight.has_landed = True
        return flight.fetched
