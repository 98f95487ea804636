"""What a template may spend: steps, processor time, and the sizes of the values that it builds.

A step is about as much work as one turn of an empty loop. Work on a value is paid before it is
done and by its size: 512 bytes of text are a step, and so is an item of a list. What is in the
items is counted as often as it is in there: a list that holds another one twice is printed with
both.
"""

from __future__ import annotations

import operator
import re
import string
import time
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sized, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

MAX_STEPS = 2_000_000  # about a second; looking back from each of 1,000 messages takes 500,000
MAX_SECONDS = 5.0  # of this thread's processor time
MAX_SIZE = 1 << 22  # characters of a text, items of a list: a million tokens in one value
MAX_BITS = 1 << 14  # of an integer
MAX_DEPTH = 100  # of values in values; Python's hash of a nested tuple has no limit but the stack
BYTES_PER_STEP = 512  # copying them takes 0.05 us, changing their case up to 5 us
WIDEST = 4  # bytes of a character, unless all of a text is ASCII
COMPARISONS_PER_STEP = 1024  # of characters

_STEPS_PER_LOOK = 64  # asking for the time takes as long as several steps
_LONG_WIDTH = re.compile(r"[0-9]{4}|[*{]")  # in a format: four digits, or a width from elsewhere
_PERCENT = re.compile(
    r"%(\([^)]*\))?([-+ #0]*(?:\*|[0-9]*)(?:\.(?:\*|[0-9]*))?)[hlL]?.?", re.DOTALL
)


class Steps:
    """Hold what a render may still spend. Every method raises SecurityError if it is too little."""

    def __init__(self, limit: int = MAX_STEPS, seconds: float = MAX_SECONDS) -> None:
        self._limit = limit
        self._left = limit
        self._look_below = limit
        self._seconds = seconds
        self._end = time.thread_time() + seconds

    def take(self, steps: int) -> None:
        """Take some steps, and look at the clock now and then."""
        self._left -= max(steps, 0)
        if self._left < self._look_below:
            self._look()

    def walk(self, *values: Any) -> int:
        """Pay for a look at every part of the values; returns their size in bytes."""
        # What exceeds this by one costs a step more than there is.
        limit = (self._left + 1) * BYTES_PER_STEP - 1
        size = _size(values, limit)
        self.take(size // BYTES_PER_STEP)
        return size

    def walk_items(self, value: Any) -> None:
        """Pay for a look at each item of a value, but not into it; of a text, each character."""
        self.take(length(value))

    def copy(self, value: Any) -> None:
        """Pay for a copy of a text or a list."""
        self.take(_bytes(value) // BYTES_PER_STEP if isinstance(value, str) else length(value))

    def compare(self, text: str, others: Iterable[Any]) -> None:
        """Pay for comparing each character of a text with each one of other texts."""
        characters = sum(len(other) for other in others if isinstance(other, str))
        self.take(len(text) * characters // COMPARISONS_PER_STEP)

    def build(self, size: int, unit: str, what: str) -> None:
        """Pay for a text of `size` characters or a list of `size` items that `what` will build."""
        size = operator.index(size)
        if size > MAX_SIZE:
            raise SecurityError(f"`{what}` would build {size:,} {unit}, more than {MAX_SIZE:,}")
        self.take(size * WIDEST // BYTES_PER_STEP if unit == "characters" else size)

    def _look(self) -> None:
        if self._left < 0:
            raise SecurityError(f"stopped after {self._limit:,} steps: it would not end")
        if time.thread_time() > self._end:
            raise SecurityError(f"stopped after {self._seconds} seconds: it would not end")
        self._look_below = max(self._left - _STEPS_PER_LOOK, 0)


class Counted:
    """Yield the items of an iterator, a step each.

    A class, since Python frees a chain of any length of these without recursion, unlike generators.
    """

    def __init__(self, steps: Steps, items: Iterator[Any]) -> None:
        self._steps = steps
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._steps.take(1)
        return next(self._items)


def check_result(value: object, what: str) -> None:
    """Refuse a value that turned out larger than the values that it was made from promised."""
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_SIZE:
        unit = "characters" if isinstance(value, str) else "items"
        raise SecurityError(f"`{what}` built {len(value):,} {unit}, more than {MAX_SIZE:,}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise SecurityError(f"an integer of {value.bit_length():,} bits, more than {MAX_BITS:,}")


def percent_size(text: str, size: int) -> int:
    """Return how many characters `text % values` has at most, for values of `size` bytes."""
    found = [(match[1] or "", match[2]) for match in _PERCENT.finditer(text)]
    if any("(" in key[1:] for key, _ in found):
        raise SecurityError("a name in a format may have no ( in it")
    return _formatted_size(text, [spec for _, spec in found], size)


def format_size(text: str, size: int) -> int:
    """Return how many characters `text.format(values)` has at most, for values of `size` bytes."""
    fields = [spec for _, field, spec, _ in string.Formatter().parse(text) if field is not None]
    return _formatted_size(text, [spec or "" for spec in fields], size)


def _formatted_size(text: str, specs: list[str], size: int) -> int:
    if any(map(_LONG_WIDTH.search, specs)):
        raise SecurityError("a width in a format is a number of at most three digits")
    return len(text) + len(specs) * (size + 2 * 999)  # a width and a precision


def _size(values: Iterable[Any], limit: int) -> int:
    """Return the number of bytes in values, an item counting as 512.

    What exceeds `limit` only has to exceed it. Raises SecurityError for a value that is itself too
    large or too deep.
    """
    size = 0
    waiting: list[tuple[int, Any]] = [(0, value) for value in values]
    while waiting and size <= limit:
        depth, value = waiting.pop()
        if isinstance(value, str):
            check_result(value, "a template")
            size += _bytes(value)
        elif value is None or isinstance(value, (bool, float)):
            size += 8
        elif isinstance(value, int):
            check_result(value, "a template")
            size += 8 + value.bit_length() // 3
        elif isinstance(value, (Mapping, list, tuple, AbstractSet, ItemsView, ValuesView)):
            size += (1 + len(value)) * BYTES_PER_STEP
            if depth == MAX_DEPTH:
                raise SecurityError(f"values nested more than {MAX_DEPTH} deep")
            if size <= limit:
                inside = value.items() if isinstance(value, Mapping) else value
                waiting += [(depth + 1, item) for item in inside]
        elif isinstance(value, range):
            size += len(value) * BYTES_PER_STEP
        elif isinstance(value, LoopContext):
            raise SecurityError("`loop` is no list")
        elif isinstance(value, Namespace):
            waiting.append((depth, value._Namespace__attrs))
        else:
            size += len(repr(value))
    return size


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text) * WIDEST


def length(value: Any) -> int:
    """Return how many items a value has, 0 if that is unknown."""
    if isinstance(value, LoopContext):
        raise SecurityError("`loop` is no list")
    return len(value) if isinstance(value, Sized) else 0
