"""A table that the host changes and programs read: a device with memory of its own has a copy.

Whoever has the copy must know when it is old. Comparing the arrays before each step takes longer
than the step may, and a flag that each writer sets is forgotten one day. So the array that all can
see cannot be written, and the one way to write it counts.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


class SharedTable:
    """Hold an array and count its changes.

    array     to read; always the same object, and its memory too
    changes   that the host has made: who remembers the number knows whether its copy is old
    """

    __slots__ = ("_written", "array", "changes")

    def __init__(self, array: NDArray[Any]) -> None:
        """`array` is written through this object only from now on."""
        self._written = array
        self.array = array.view()
        self.array.flags.writeable = False
        self.changes = 0

    def __setitem__(self, place: Any, value: Any) -> None:
        self.changes += 1  # first: what Ctrl-C interrupts may have been written
        self._written[place] = value

    def receive(self) -> NDArray[Any]:
        """Return the array for whoever brings what programs wrote: no change of the host's."""
        return self._written
