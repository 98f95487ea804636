"""Copy from memory that no driver knows to a device: through a few blocks that it can read.

    anywhere in this process --CPU--> a place of the staging --device--> where it belongs

While a device reads one place the CPU, in one thread, fills the others, so that the slower of both
says how long a copy takes. Nothing is registered but the staging.
"""

from __future__ import annotations

from contextlib import ExitStack

from strata_nb.addresses import memory_view
from strata_nb.execution import ExecutionDriver
from strata_nb.interrupts import interrupts_later

PLACES = 4
PLACE_BYTES = 4 << 20


class StagedCopies:
    """Own the staging of one device: `copy` has the arguments of the driver's `copy_async`."""

    def __init__(self, driver: ExecutionDriver, device: int) -> None:
        self._driver = driver
        self._turn = 0
        with ExitStack() as undo:
            self._staging = driver.allocate_host(PLACES * PLACE_BYTES)
            undo.callback(driver.free_host, self._staging)
            self._read: list[int] = []  # of each place, the event behind its last copy
            for _ in range(PLACES):
                self._read.append(driver.event_create(device))
                undo.callback(driver.event_destroy, self._read[-1])
            self._resources = undo.pop_all()

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Begin to copy; the source may change at once. Waits while all places are in use."""
        for start in range(0, size, PLACE_BYTES):
            part = min(PLACE_BYTES, size - start)
            place, read = self._staging + PLACE_BYTES * self._turn, self._read[self._turn]
            self._turn = (self._turn + 1) % PLACES
            self._driver.event_synchronize(read)
            memory_view(place, part)[:] = memory_view(source + start, part)
            with interrupts_later():  # a copy without its event would be written over
                self._driver.copy_async(destination + start, place, part, stream)
                self._driver.event_record(read, stream)

    def close(self) -> None:
        """Free the staging, whose copies have ended; may be called twice."""
        self._resources.close()
