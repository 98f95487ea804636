"""How fast a device's memory can be read: what the speed of a decode step is measured against."""

from __future__ import annotations

from typing import NamedTuple


class PlainRead(NamedTuple):
    """Hold what reading a buffer once took.

    size_bytes   of the buffer, more than caches hold
    seconds      of each pass over it
    """

    size_bytes: int
    seconds: tuple[float, ...]

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second of the fastest pass: a limit is what is never exceeded."""
        return self.size_bytes / min(self.seconds)
