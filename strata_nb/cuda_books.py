"""Write down what a driver made and nobody has freed."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint64, c_void_p
from typing import Any, TypeVar

from strata_nb.errors import RuleViolation

T = TypeVar("T")


class Book(dict[int, T]):
    """Hold things of one kind: a handle or an address, and what must be known to free it.

    kind   what they are called, in the plural
    free   a method of the driver (given as a function: books do not keep drivers alive) that frees
           the thing with a key and crosses it out; returns an error that waited for somebody

    A line is written after the driver made the thing, and crossed out after it was freed, so that a
    call that fails changes nothing here either.
    """

    def __init__(self, kind: str, free: Callable[[Any, int], BaseException | None]) -> None:
        super().__init__()
        self.kind = kind
        self.free = free

    def enter(self, made: c_void_p | c_uint64, line: T) -> int:
        """Write down what the driver made, and return its handle or address."""
        assert made.value is not None  # noqa: S101 - the driver said success
        self[made.value] = line
        return made.value

    def find(self, key: int, rule: int = 9) -> T:
        """Return the line of a thing; raises RuleViolation where it was never made, or is freed."""
        if key not in self:
            raise RuleViolation(rule, f"{key:#x} is none of the {len(self)} {self.kind}")
        return self[key]
