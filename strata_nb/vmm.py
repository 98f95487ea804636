"""Move physical memory under addresses that never change.

    range A   | a b c d e . . . |     reservation: addresses, fixed for the life of the range
    range B   | f g . . . . . . |     chunk (a letter): physical memory, all of one size per device
    spare       h i                   chunks that no address names

A range maps chunks as a prefix of its reservation. Growing it maps spare or new chunks behind the
prefix; shrinking it unmaps from the end and leaves the chunks spare, so that memory moves from
one range to another by `a.retire(n)`, draining, `a.shrink()`, `b.grow(n)`, without asking the
system for anything. A chunk is a driver's handle, a plain integer.

This is the only code that maps memory; it knows no vendor. Numbers in brackets, like [3], are the
rules of docs/vmm.md. Nothing here waits for a device and nothing here takes a lock: one thread
changes the memory of a device [17], and only it knows when nobody reads a chunk any more [7].
Rejected: a range that creates and releases its own chunks (moving memory then costs a round trip
through the system, which another program may win), and chunk objects that free themselves (the
order of unmap and release is the whole difficulty and should be in sight).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar

from strata_nb.errors import DeviceLost, DriverError, OutOfDeviceMemory, RuleViolation

P = ParamSpec("P")
R = TypeVar("R")
Granularity = Literal["minimum", "recommended"]

TARGET_CHUNKS = 300  # of a device: enough to move memory finely, few enough to move it quickly
MAX_CHUNK_BYTES = 64 << 20


class MemoryDriver(Protocol):
    """Do what every driver can do with physical memory and addresses.

    Sizes and addresses are bytes. A failed call raises DriverError and has changed nothing.
    """

    @property
    def chunk_granularity(self) -> Granularity:
        """The granularity that memory is really charged in: sizes of chunks follow it [10]."""

    def granularity(self, device: int, kind: Granularity) -> int:
        """Return what the size of a chunk on `device` must be, or had better be, a multiple of."""

    def reserve(self, size: int) -> int:
        """Return the first of `size` addresses that nothing else uses, without memory."""

    def address_free(self, address: int, size: int) -> None:
        """Give back a whole reservation, on which nothing is mapped."""

    def create(self, size: int, device: int) -> int:
        """Return the handle of `size` bytes of memory on `device`, of arbitrary content."""

    def release(self, handle: int) -> None:
        """Give the memory of an unmapped handle back to the system."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Put a handle's whole memory at an address of a reservation, without access."""

    def unmap(self, address: int, size: int) -> None:
        """Take one handle's memory from its address; does not wait for work that still reads it."""

    def set_access(self, address: int, size: int, devices: Sequence[int]) -> None:
        """Let `devices` read and write the whole mapped range; fails whole if one has no path."""

    def retire(self, address: int, size: int) -> None:
        """Note that no table names these mapped bytes any more: work enqueued from now on does not
        touch them. Never fails; a driver that does not check rules does nothing."""

    def reinstate(self, address: int, size: int) -> None:
        """Take back `retire`: tables name these bytes again. Never fails."""

    def mem_info(self, device: int) -> tuple[int, int]:
        """Return the free and the total bytes of `device`; makes its context if it has none."""

    def can_access(self, device: int, owner: int) -> bool:
        """Return whether `device` is said to have a path to memory of `owner`."""

    def synchronize(self, device: int) -> None:
        """Wait for all work of `device`; makes its context if it has none."""


@dataclass(frozen=True, slots=True)
class Account:
    """Count a pool's chunks: capacity = mapped + spare + stuck, at every step [9]."""

    capacity: int
    mapped: int
    spare: int
    stuck: int


def choose_chunk_bytes(driver: MemoryDriver, device: int, ledger_bytes: int) -> int:
    """Return the one chunk size for `ledger_bytes` of memory on `device` [10].

    It is the power of two that cuts the memory into the number of chunks nearest to 300 (212 to
    424), but not over 64 MiB and not under the granularity that the device charges memory in.
    """
    if ledger_bytes <= 0:
        raise RuleViolation(10, f"a ledger of {ledger_bytes:,} bytes has no chunks")
    nearest = 1 << max(0, round(math.log2(ledger_bytes / TARGET_CHUNKS)))
    return max(min(nearest, MAX_CHUNK_BYTES), _granularity(driver, device))


def _granularity(driver: MemoryDriver, device: int) -> int:
    return driver.granularity(device, driver.chunk_granularity)


class ChunkPool:
    """Own the physical memory of one device, in chunks of one size, and the ranges that map it.

    device, chunk_bytes   fixed at creation: every chunk lives there and has that size [2]
    say                   called with one line whenever the result is less than what was asked for;
                          it must not call the pool, which may be in the middle of a change

    Nothing is created until `prepare` or a range's `grow`. Closing the pool closes its ranges.
    """

    def __init__(
        self, driver: MemoryDriver, device: int, chunk_bytes: int, *, say: Callable[[str], None]
    ) -> None:
        granularity = _granularity(driver, device)
        if chunk_bytes <= 0 or chunk_bytes % granularity:
            message = f"chunks of {chunk_bytes:,} bytes on device {device}, unit {granularity:,}"
            raise RuleViolation(10, message)
        driver.mem_info(device)  # makes the context, which must exist before the first map [6]
        self.driver = driver
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.say = say
        self.ranges: list[Range] = []
        self._capacity = 0
        self._spare: list[int] = []
        self._unreleased: set[int] = set()  # handles whose release failed: stuck
        self._lost: DeviceLost | None = None

    def open_range(self, chunks: int, *, also_for: Sequence[int] = ()) -> Range:
        """Reserve addresses for `chunks` chunks and return the range; nothing is mapped yet.

        also_for: devices beside the owner that shall read and write the range. One without a path
        is left out, and said; a path that exists must have been proved by the caller [5].
        """
        devices = [self.device]
        for device in dict.fromkeys(also_for):
            if device == self.device:
                continue
            if self._call(self.driver.can_access, device, self.device):
                devices.append(device)
            else:
                self.say(f"device {device} has no path to device {self.device}: not given access")
        range_ = Range(self, chunks, tuple(devices))
        self.ranges.append(range_)
        return range_

    def prepare(self, count: int) -> None:
        """Create chunks until `count` are spare, or leave everything as it was.

        Raises DriverError; OutOfDeviceMemory where the device has no room.
        """
        created: list[int] = []
        try:
            while len(self._spare) + len(created) < count:
                created.append(self._call(self.driver.create, self.chunk_bytes, self.device))
                self._capacity += 1
        except BaseException:
            for handle in reversed(created):
                self._release(handle)
            raise
        self._spare += created

    def give_back(self, count: int) -> int:
        """Release up to `count` spare chunks to the system; returns how many it really took.

        A chunk that cannot be released is stuck, and said.
        """
        handles = [self._spare.pop() for _ in range(min(count, len(self._spare)))]
        errors = list(filter(None, map(self._release, handles)))
        if self._lost is not None:
            raise self._lost
        return len(handles) - len(errors)

    def account(self) -> Account:
        """Return the number of chunks by what has become of them."""
        return Account(
            capacity=self._capacity,
            mapped=sum(range_.mapped_chunks for range_ in self.ranges),
            spare=len(self._spare),
            stuck=len(self._unreleased) + sum(range_.stuck_chunks for range_ in self.ranges),
        )

    def check_integrity(self) -> None:
        """Raise RuleViolation unless every chunk is in exactly one place."""
        account = self.account()
        if account.capacity != account.mapped + account.spare + account.stuck:
            raise RuleViolation(9, f"device {self.device}: {account} does not add up")
        handles = [*self._spare, *self._unreleased]
        for range_ in self.ranges:
            range_.check_integrity()
            handles += range_.handles()
        if len(set(handles)) != len(handles):
            raise RuleViolation(3, f"device {self.device}: a chunk is in two places: {handles}")

    def close(self) -> None:
        """Close the ranges and release every chunk; again, to retry what failed.

        The caller has drained what could still read the ranges [7]. Does everything that can be
        done, then raises the first error. On a lost device it only closes the books [15].
        """
        errors: list[DriverError] = []
        was_lost = self._lost is not None
        for range_ in list(self.ranges):
            try:
                range_.close()
            except DriverError as error:
                errors.append(error)
        handles = [*self._spare, *self._unreleased]
        self._spare.clear()
        errors += filter(None, map(self._release, handles))
        if self._lost is not None:
            self._capacity -= len(self._unreleased)
            self._unreleased.clear()
        if errors and not was_lost:
            errors[0].add_note(f"closing device {self.device}: {len(errors)} calls failed")
            raise errors[0]

    # What ranges use.

    def _take(self, count: int) -> list[int]:
        """Hand out `count` chunks, spare ones first [12], or raise and change nothing."""
        self.prepare(count)
        return [self._spare.pop() for _ in range(count)]

    def _put(self, handle: int) -> None:
        """Take an unmapped chunk back as spare."""
        self._spare.append(handle)

    def _release(self, handle: int) -> DriverError | None:
        """Release a chunk or let it be stuck; returns the error."""
        error = self._attempt(self.driver.release, handle)
        if error is None:
            self._unreleased.discard(handle)
            self._capacity -= 1
        elif handle not in self._unreleased:
            self._unreleased.add(handle)
            self._say_stuck(error)
        return error

    def _say_stuck(self, error: DriverError) -> None:
        if self._lost is None:
            self.say(f"{self.chunk_bytes:,} bytes cannot be used any more: {error.message}")

    def _call(self, operation: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the driver, unless the device was lost: then nothing is called any more [15]."""
        if self._lost is not None:
            raise self._lost
        try:
            return operation(*args, **kwargs)
        except DeviceLost as error:
            self._lost = error
            raise

    def _attempt(
        self, operation: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> DriverError | None:
        """Call the driver where a failure must not end the clean-up; returns the error."""
        try:
            self._call(operation, *args, **kwargs)
        except DriverError as error:
            return error
        return None


class Range:
    """Hold one reservation and the chunks mapped at its beginning; made by `ChunkPool.open_range`.

    base       the first address; addresses stay what they are until `close`
    devices    who may read and write what is mapped: the owner first. Others can be lost, once,
               and that is said [5]

    Positions count chunks from `base`. A chunk whose unmap failed stays at its position, stuck: the
    range cannot grow to it or past it any more [9].
    """

    def __init__(self, pool: ChunkPool, chunks: int, devices: tuple[int, ...]) -> None:
        if chunks <= 0:
            raise RuleViolation(1, f"a range of {chunks} chunks")
        self.pool = pool
        self.devices = devices
        self.reserved_chunks = chunks
        self.base = pool._call(pool.driver.reserve, chunks * pool.chunk_bytes)
        self.retired_chunks = 0  # how many at the end of the prefix no table names any more
        self._mapped: list[int] = []
        self._stuck: dict[int, int] = {}  # position -> handle: unmap failed
        self._closed = False

    @property
    def mapped_chunks(self) -> int:
        return len(self._mapped)

    @property
    def stuck_chunks(self) -> int:
        return len(self._stuck)

    @property
    def limit_chunks(self) -> int:
        """How far the range can grow: its reservation, or its first stuck chunk."""
        return min(self._stuck, default=self.reserved_chunks)

    def covers(self, address: int, size: int) -> bool:
        """Return whether `size` bytes at `address` are mapped, accessible and not retired [16]."""
        usable_bytes = (self.mapped_chunks - self.retired_chunks) * self.pool.chunk_bytes
        return self.base <= address and address + size <= self.base + usable_bytes

    def grow(self, count: int) -> None:
        """Map `count` chunks behind the prefix, with access set; their content is arbitrary [14].

        All or nothing: on DriverError the prefix is as before and the chunks are spare, or stuck
        where not even the unmap worked. The caller publishes the new chunks to tables afterwards.
        """
        self._check_open()
        if self.retired_chunks:
            raise RuleViolation(7, f"grow with {self.retired_chunks} retired chunks still mapped")
        if count == 0:
            return
        first = self.mapped_chunks
        if count < 0 or first + count > self.limit_chunks:
            raise OutOfDeviceMemory(
                "grow",
                0,
                "the range is full",
                device=self.pool.device,
                numbers={"mapped": first, "wanted": count, "limit": self.limit_chunks},
            )
        handles = self.pool._take(count)
        placed = 0
        try:
            for handle in handles:
                driver, address = self.pool.driver, self._address(first + placed)
                self.pool._call(driver.map, address, self.pool.chunk_bytes, handle)
                placed += 1
            self._grant(first, count)
        except BaseException:
            for position in reversed(range(first, first + placed)):
                self._unmap(position, handles[position - first])
            for handle in handles[placed:]:
                self.pool._put(handle)
            raise
        self._mapped += handles

    def retire(self, count: int) -> None:
        """Note that tables no longer name the last `count` chunks that were still in use.

        The caller has published that already. Work enqueued from now on does not touch them; once
        all earlier work has ended, `shrink` may unmap them [7].
        """
        self._check_open()
        if not 0 <= count <= self.mapped_chunks - self.retired_chunks:
            raise RuleViolation(7, f"retire {count} of {self.mapped_chunks - self.retired_chunks}")
        self.retired_chunks += count
        if count:
            first = self.mapped_chunks - self.retired_chunks
            self.pool.driver.retire(self._address(first), count * self.pool.chunk_bytes)

    def reinstate(self) -> None:
        """Take back every `retire` since the last `shrink`; contents are whole."""
        self._check_open()
        if self.retired_chunks:
            address = self._address(self.mapped_chunks - self.retired_chunks)
            size = self.retired_chunks * self.pool.chunk_bytes
            self.retired_chunks = 0
            self.pool.driver.reinstate(address, size)

    def shrink(self) -> int:
        """Unmap the retired chunks, one by one, last first; returns how many became spare.

        Does not wait: the caller drained the work from before `retire` [7]. A chunk that cannot be
        unmapped is stuck, and said. Raises only DeviceLost.
        """
        self._check_open()
        recovered = 0
        while self.retired_chunks:
            position = self.mapped_chunks - 1
            if self._unmap(position, self._mapped[position]) is None:
                recovered += 1
            del self._mapped[position]
            self.retired_chunks -= 1
        if self.pool._lost is not None:
            raise self.pool._lost
        return recovered

    def handles(self) -> list[int]:
        """Return the handles that this range holds, mapped in order of position, then stuck."""
        return [*self._mapped, *self._stuck.values()]

    def check_integrity(self) -> None:
        """Raise RuleViolation unless the counts of chunks can be true together."""
        mapped, limit = self.mapped_chunks, self.limit_chunks
        counts = (0, self.retired_chunks, mapped, limit, self.reserved_chunks)
        if list(counts) != sorted(counts):
            names = "retired, mapped, limit, reserved"
            raise RuleViolation(16, f"range at {self.base:#x}: {names} are {counts[1:]}")
        if self.devices[0] != self.pool.device:
            raise RuleViolation(2, f"range at {self.base:#x}: owner {self.devices[0]}")

    def close(self) -> None:
        """Unmap everything and free the reservation; again, to retry what failed.

        The chunks become spare. The caller has drained what could still read them [7]. Raises
        DriverError where something could not be unmapped or freed; it then stays counted.
        """
        if self._closed:
            return
        try:
            if self.pool._lost is None:
                self._unmap_all()
                size = self.reserved_chunks * self.pool.chunk_bytes  # exact, and once [1]
                self.pool._call(self.pool.driver.address_free, self.base, size)
        except DeviceLost:
            self._close_books()
            raise
        self._close_books()

    def _unmap_all(self) -> None:
        self.retire(self.mapped_chunks - self.retired_chunks)
        self.shrink()
        stuck = list(self._stuck.items())
        for error in [self._unmap(position, handle) for position, handle in stuck]:
            if error is not None:
                raise error

    def _close_books(self) -> None:
        self._closed = True
        self.pool._capacity -= len(self.handles())  # none, unless the device is lost [15]
        self.retired_chunks = 0
        self._mapped.clear()
        self._stuck.clear()
        self.pool.ranges.remove(self)

    def _grant(self, first: int, count: int) -> None:
        """Set access for a newly mapped run, which counts as mapped only after this [4].

        Some devices refuse access to the end of a reservation but grant it for all that is mapped
        [11]; some paths that are said to exist are refused, and then the owner goes on alone [5].
        """
        owner_only = self.devices[:1]
        failure: DriverError | None = None
        for devices in dict.fromkeys((self.devices, owner_only)):
            for start in dict.fromkeys((first, 0)):
                size = (first + count - start) * self.pool.chunk_bytes
                grant = self.pool.driver.set_access
                error = self.pool._attempt(grant, self._address(start), size, devices)
                if error is None:
                    if failure is not None and devices != self.devices:
                        self._drop_peers(failure)
                    return
                failure = failure or error
        if failure is not None:
            raise failure

    def _drop_peers(self, reason: DriverError) -> None:
        peers = ", ".join(map(str, self.devices[1:]))
        self.devices = self.devices[:1]
        self.pool.say(f"device {peers}: no access to device {self.pool.device}: {reason.message}")

    def _unmap(self, position: int, handle: int) -> DriverError | None:
        """Unmap one chunk: it becomes spare, or stuck at its position; returns the error."""
        address = self._address(position)
        error = self.pool._attempt(self.pool.driver.unmap, address, self.pool.chunk_bytes)
        if error is None:
            self._stuck.pop(position, None)
            self.pool._put(handle)
        elif position not in self._stuck:
            self._stuck[position] = handle
            self.pool._say_stuck(error)
        return error

    def _address(self, position: int) -> int:
        return self.base + position * self.pool.chunk_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise RuleViolation(1, f"range at {self.base:#x} is closed")
