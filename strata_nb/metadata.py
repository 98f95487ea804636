"""Read the head of a GGUF file forwards, with every step bounded, and give its keys and values.

`Cursor` is the only code that reads the head: it compares each length and count, as a Python
integer, with the bytes that are left before anything is read or allocated. `Metadata` keeps every
value as its bytes in the file and decodes it when asked: a vocabulary of 150,000 tokens and as many
merges is walked once to find where it ends (0.03 s), and decoded (0.1 s) only for who needs it.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from strata_nb.errors import FileFormatError

MAX_KEY_BYTES = 65535
# Far above any real file; they bound time and memory where the size of the file alone would not.
MAX_HEAD_BYTES = 1 << 28
MAX_KEYS = 1 << 16

DAMAGED = "the file is damaged or cut off: fetch it again"
_CONVERT = (
    "this model cannot be used as it is: fetch it again, or convert it with a newer converter"
)

D = TypeVar("D")
REQUIRED: Final[Any] = object()  # the default of a getter that was given none


class ValueType(IntEnum):
    """Name the types of values by their numbers in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.FLOAT64: np.dtype("<f8"),
    ValueType.BOOL: np.dtype("?"),
}
_BOOL = frozenset({ValueType.BOOL})
_STRING = frozenset({ValueType.STRING})
_INTEGER = frozenset(kind for kind, dtype in _DTYPES.items() if dtype.kind in "iu")
_NUMBER = frozenset(kind for kind, dtype in _DTYPES.items() if dtype.kind in "iuf")


class Metadata(Mapping[str, object]):
    """Give the keys and values of a file, by typed getters that note which keys were asked for.

    A getter raises FileFormatError, placed at the value, if the value is of another type or out of
    range, or if the key is missing and no default was given; a default is returned as it is.
    `metadata[key]` and iteration serve printing: any type, and the key does not count as read.

    Text is UTF-8. Bytes that are not (a token may be a piece of a character) become lone
    surrogates: `text.encode("utf-8", "surrogateescape")` is exactly what the file holds.
    """

    def __init__(self, path: Path, values: dict[str, Value]) -> None:
        self._path = path
        self._values = values
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        return self._values[key].decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def offset(self, key: str) -> int:
        """Return the byte at which the value of `key` starts; KeyError if there is no such key."""
        return self._values[key].offset

    def describe(self, key: str) -> str:
        """Name the stored type: "uint32", "array of string"; KeyError if there is no such key."""
        return self._values[key].describe()

    def agrees(self, key: str, other: Metadata) -> bool:
        """Say whether both hold `key` with the same type and the same bytes."""
        mine, theirs = self._values.get(key), other._values.get(key)
        return mine is not None and theirs is not None and mine.content == theirs.content

    def unread(self, prefix: str) -> list[str]:
        """Return the keys with this prefix that no getter was asked for, in the file's order."""
        return [key for key in self._values if key.startswith(prefix) and key not in self._read]

    def error(self, key: str, message: str, hint: str = "") -> FileFormatError:
        """Make (not raise) an error about a key, placed at its value if it has one."""
        value = self._values.get(key)
        offset = None if value is None else value.offset
        return FileFormatError(self._path, offset, f"{key}: {message}", hint=hint)

    def integer(
        self, key: str, default: int | D = REQUIRED, *, low: int = 0, high: int = 2**31 - 1
    ) -> int | D:
        """Return an integer of any width, from `low` to `high`, both included."""
        value = self._get(key, default, _INTEGER, f"an integer from {low} to {high}")
        if value is None:
            return default
        number = int(value.decode())
        if not low <= number <= high:
            raise self.error(key, f"{number}, wanted an integer from {low} to {high}", _CONVERT)
        return number

    def real(self, key: str, default: float | D = REQUIRED) -> float | D:
        """Return a finite number of any float or integer type."""
        value = self._get(key, default, _NUMBER, "a finite number")
        if value is None:
            return default
        number = float(value.decode())
        if not np.isfinite(number):
            raise self.error(key, f"{number}, wanted a finite number", _CONVERT)
        return number

    def boolean(self, key: str, default: bool | D = REQUIRED) -> bool | D:
        """Return a truth value."""
        value = self._get(key, default, _BOOL, "bool")
        return default if value is None else bool(value.decode())

    def text(self, key: str, default: str | D = REQUIRED) -> str | D:
        """Return a string."""
        value = self._get(key, default, _STRING, "string")
        return default if value is None else str(value.decode())

    def texts(self, key: str, default: list[str] | D = REQUIRED) -> list[str] | D:
        """Return an array of strings, as a new list, decoded at each call."""
        value = self._get(key, default, _STRING, "array of string", array=True)
        return default if value is None else list(value.decode())

    def integers(
        self, key: str, default: NDArray[np.int64] | D = REQUIRED
    ) -> NDArray[np.int64] | D:
        """Return an array of integers of any width: int64, 1-D, a copy."""
        value = self._get(key, default, _INTEGER, "array of integers", array=True)
        if value is None:
            return default
        numbers: NDArray[Any] = value.decode()
        most = np.iinfo(np.int64).max
        self._check_each(key, numbers, numbers > most, f"integers of at most {most}")
        return numbers.astype(np.int64)

    def reals(
        self, key: str, default: NDArray[np.float64] | D = REQUIRED
    ) -> NDArray[np.float64] | D:
        """Return an array of finite numbers of any float or integer type: float64, 1-D, a copy."""
        value = self._get(key, default, _NUMBER, "array of finite numbers", array=True)
        if value is None:
            return default
        numbers: NDArray[np.float64] = value.decode().astype(np.float64)
        self._check_each(key, numbers, ~np.isfinite(numbers), "finite numbers")
        return numbers

    def _get(
        self,
        key: str,
        default: object,
        kinds: frozenset[ValueType],
        wanted: str,
        *,
        array: bool = False,
    ) -> Value | None:
        """Return the value, its type checked, or None where the default is to be returned."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            if default is REQUIRED:
                raise self.error(key, f"this key is missing, wanted {wanted}", _CONVERT)
            return None
        if value.is_array != array or value.kind not in kinds:
            raise self.error(key, f"{value.describe()}, wanted {wanted}", _CONVERT)
        return value

    def _check_each(
        self, key: str, numbers: NDArray[Any], refused: NDArray[np.bool_], wanted: str
    ) -> None:
        places = np.flatnonzero(refused)
        if places.size:
            first = places[0]
            message = f"element {first} is {numbers[first]}, wanted {wanted}"
            raise self.error(key, message, _CONVERT)


class Value(NamedTuple):
    """Keep one value as its bytes in the file: without the count, if it is an array."""

    kind: ValueType  # of the elements, if it is an array
    is_array: bool
    offset: int
    raw: bytes
    bounds: array[int] | None = (
        None  # array of string: string i is raw[bounds[i] + 8 : bounds[i+1]]
    )

    @property
    def content(self) -> tuple[ValueType, bool, bytes]:
        """What makes two values equal, wherever they stand."""
        return self.kind, self.is_array, self.raw

    def describe(self) -> str:
        name = self.kind.name.lower()
        return f"array of {name}" if self.is_array else name

    def decode(self) -> Any:
        """Return int, float, bool, str, list[str], or a read-only 1-D array."""
        raw = self.raw
        if self.bounds is not None:
            return [
                str(raw[low + 8 : high], "utf-8", "surrogateescape")
                for low, high in pairwise(self.bounds)
            ]
        if self.kind is ValueType.STRING:
            return str(raw, "utf-8", "surrogateescape")
        numbers = np.frombuffer(raw, _DTYPES[self.kind])
        return numbers if self.is_array else numbers[0].item()


class Cursor:
    """Read the head of a file forwards. It holds: position <= limit <= size of the file."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.size = len(mapped)
        self.limit = min(self.size, MAX_HEAD_BYTES)
        self.position = 0

    def fail(self, offset: int, message: str, hint: str = DAMAGED) -> NoReturn:
        raise FileFormatError(self.path, offset, message, hint=hint)

    def skip(self, size_bytes: int, what: str) -> int:
        """Move over `size_bytes` and return where they start; refuse if they are not there."""
        start = self.position
        if size_bytes > self.limit - start:
            self.fail(start, f"{what} takes {size_bytes} bytes, {self.left(start)}")
        self.position = start + size_bytes
        return start

    def left(self, start: int) -> str:
        """Say how many bytes are left after `start`, for a message."""
        if self.limit < self.size:
            return f"{self.limit - start} are left of the {self.limit} that a head may have"
        return f"{self.limit - start} are left of the file's {self.size}"

    def u32(self, what: str) -> int:
        (number,) = struct.unpack_from("<I", self.mapped, self.skip(4, what))
        return int(number)

    def u64(self, what: str) -> int:
        (number,) = struct.unpack_from("<Q", self.mapped, self.skip(8, what))
        return int(number)

    def count(self, what: str, item_bytes: int, highest: int) -> int:
        """Read a number of items of at least `item_bytes` each; refuse what cannot be there."""
        start = self.position
        number = self.u64(f"the number of {what}")
        if number > highest:
            self.fail(start, f"{number} {what}, at most {highest} are possible")
        if number * item_bytes > self.limit - self.position:
            self.fail(
                start,
                f"{number} {what} take {number * item_bytes} bytes or more, "
                + self.left(self.position),
            )
        return number

    def string(self, what: str, highest: int = MAX_HEAD_BYTES) -> bytes:
        """Read a length and as many bytes."""
        start = self.position
        length = self.u64(f"the length of {what}")
        if length > min(highest, self.limit - self.position):
            most = f"at most {highest} are possible, {self.left(self.position)}"
            self.fail(start, f"{what} has {length} bytes, {most}")
        begin = self.skip(length, what)
        return self.mapped[begin : begin + length]

    def name(self, what: str, highest: int) -> str:
        """Read a string that is not empty, is UTF-8 and can be printed in a message as it is."""
        start = self.position
        raw = self.string(what, highest)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            self.fail(start + 8 + error.start, f"{what}, {raw[:80]!r}, is not UTF-8")
        if not text or not text.isprintable():
            fault = "holds characters that cannot be printed" if text else "is empty"
            self.fail(start, f"{what}, {text[:80]!r}, {fault}")
        return text


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Read `count` keys with their values; the result does not depend on the map any more."""
    values: dict[str, Value] = {}
    for number in range(count):
        start = cursor.position
        key = cursor.name(f"the name of key {number} of {count}", MAX_KEY_BYTES)
        if key in values:
            cursor.fail(start, f"{key}: this key is there twice")
        values[key] = _read_value(cursor, key)
    return Metadata(cursor.path, values)


def _read_value(cursor: Cursor, key: str) -> Value:
    kind = _read_type(cursor, key)
    start = cursor.position
    if kind is ValueType.STRING:
        return Value(kind, False, start, cursor.string(f"{key}: the string"))
    if kind is not ValueType.ARRAY:
        return Value(kind, False, start, _read_numbers(cursor, key, kind, 1))
    kind = _read_type(cursor, key)
    if kind is ValueType.ARRAY:
        # The format would allow it, no known key uses it.
        cursor.fail(start, f"{key}: an array of arrays, which no known key holds")
    item_bytes = 8 if kind is ValueType.STRING else _DTYPES[kind].itemsize
    count = cursor.count(f"elements of {key}", item_bytes, MAX_HEAD_BYTES)
    if kind is not ValueType.STRING:
        return Value(kind, True, start, _read_numbers(cursor, key, kind, count))
    begin = cursor.position
    bounds = _walk_strings(cursor, key, count)
    return Value(kind, True, start, cursor.mapped[begin : cursor.position], bounds)


def _read_type(cursor: Cursor, key: str) -> ValueType:
    start = cursor.position
    number = cursor.u32(f"{key}: the type of the value")
    if number > max(ValueType):
        cursor.fail(start, f"{key}: type of value {number}, the last known is {max(ValueType)}")
    return ValueType(number)


def _read_numbers(cursor: Cursor, key: str, kind: ValueType, count: int) -> bytes:
    size_bytes = count * _DTYPES[kind].itemsize
    start = cursor.skip(size_bytes, f"{key}: the value")
    raw = cursor.mapped[start : start + size_bytes]
    if kind is ValueType.BOOL and max(raw, default=0) > 1:
        place = next(place for place, byte in enumerate(raw) if byte > 1)
        cursor.fail(start + place, f"{key}: {raw[place]} is neither false (0) nor true (1)")
    return raw


def _walk_strings(cursor: Cursor, key: str, count: int) -> array[int]:
    """Move over `count` strings and return their bounds: the one loop that runs once per token."""
    mapped, limit = cursor.mapped, cursor.limit
    length_at = struct.Struct("<Q").unpack_from
    start = position = cursor.position
    bounds = array("Q", [0])
    append = bounds.append
    for number in range(count):
        here = position
        position += 8 + (length_at(mapped, here)[0] if here <= limit - 8 else limit)
        if position > limit:
            cursor.fail(
                here, f"{key}: string {number} of {count} runs past the end, {cursor.left(here)}"
            )
        append(position - start)
    cursor.position = position
    return bounds
