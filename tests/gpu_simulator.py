"""Run a GPU kernel without a card: every lane of every block, in Python.

A lane is a greenlet that runs until it must wait for others: at a barrier for its block, at a
shuffle for its warp. What a card would do silently wrong is an error here:

    an address outside the arrays that were named, or a write to one that is read only
    a `fetch_...`, which may see old bytes, of an array that the kernel writes
    a `fetch_...` of what the launch in front wrote, or a `load_...` before `await_previous`
    a write before `await_previous`, or a thread that ends without it
    a `load_...` of what another block of the launch wrote, unless all have arrived
    lanes of a warp that reach different shuffles, or threads that miss a barrier
    a value of a wrong type: a float that is no float32, an integer out of its range

Integers are Python's, floats are numpy's float32. Shared memory begins as 0xFF. Of two blocks that
are neighbours one runs its warps from the first to the last, the other from the last to the first:
where a barrier lacks, one of them goes wrong.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import cache
from typing import Any

import gpu_warpgroups
import numpy as np
from greenlet import getcurrent, greenlet

from strata_nb.kernels.gpu.binding import Binder
from strata_nb.kernels.gpu.intrinsics import WARP, BytesOf, ConstantTable, Intrinsic

_FORMATS = {"i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "i64": "q", "f32": "f"}
# Of what an argument must be: its type, where it matters, and the least and the limit of integers.
_EXPECTED: dict[str, tuple[type | None, int, int]] = {
    "i32": (int, -(1 << 31), 1 << 31),
    "i64": (int, -(1 << 63), 1 << 63),
    "f32": (np.float32, 0, 0),
    "f64": (None, 0, 0),
}
_IN_WORDS = {int: "an integer", np.float32: "a float32", tuple: "several numbers"}


def _expected(kind: str) -> tuple[type | None, int, int]:
    """Return what an argument of a type must be; several numbers are a tuple."""
    return _EXPECTED.get(kind, (tuple, 0, 0))


_NOWHERE = 0, 0, False, b""


Block = tuple[int, int, int]


class KernelFault(AssertionError):
    """Report what a card would have done wrong without a word."""


class Memory:
    """Hold the arrays that a kernel may use; it may write those in `written`.

    Launches that share one follow each other, and may overlap: it knows which wrote what.

    others     plays others of the system: called before a word is loaded that they may write, and
               behind the store of one that they may read
    released, acquired   words that were stored and loaded as others of the system may see them
    clock_ns   moves on by `tick_ns` whenever a kernel asks for the time
    """

    others: Callable[[], None] = staticmethod(lambda: None)
    clock_ns, tick_ns = 10**15, 1000

    def __init__(self, written: Sequence[Any], read: Sequence[Any] = ()) -> None:
        blocks = [(array.ctypes.data, array.nbytes, True) for array in written]
        blocks += [(array.ctypes.data, array.nbytes, False) for array in read]
        self._blocks = [
            (start, length, writable, (ctypes.c_char * length).from_address(start))
            for start, length, writable in sorted(blocks)
        ]
        self._starts = [start for start, *_ in self._blocks]
        self._kept = (*written, *read)
        self._launch = 0
        self.released, self.acquired = set[int](), set[int]()
        # Of every four bytes the last that wrote them: a launch, and its block.
        self._writers: dict[int, tuple[int, Block]] = {}

    def begin_launch(self) -> None:
        self._launch += 1

    def note_write(self, address: int, size: int, block: Block) -> None:
        for word in range(address >> 2, (address + size + 3) >> 2):
            self._writers[word] = self._launch, block

    def writer_of(self, address: int, size: int, block: Block) -> str:
        """Return who may be writing what a block reads: launch "in front", block "beside", ""."""
        found = ""
        if not self._writers:
            return found
        writers = self._writers
        for word in range(address >> 2, (address + size + 3) >> 2):
            if word not in writers:
                continue
            launch, writer = writers[word]
            if launch == self._launch and writer != block:
                return "beside"
            if launch == self._launch - 1:
                found = "in front"
        return found

    def check(self, address: int, size: int, use: str) -> tuple[Any, int]:
        """Return where an address lies: the bytes of an array, and its place in them.

        KernelFault unless memory may be used so: "load", "fetch", "store" or
        "prefetch".
        """
        number = bisect_right(self._starts, address) - 1
        start, length, writable, bytes_ = self._blocks[number] if number >= 0 else _NOWHERE
        if number < 0 or address + size > start + length:
            raise KernelFault(f"{size} bytes at {address:#x}: {address - start - length:,} behind")
        if use == "store" and not writable:
            raise KernelFault(f"a write to an array that is read only, at {address - start:,}")
        if use == "fetch" and writable:
            raise KernelFault(f"a fetch of an array that is written, at {address - start:,}")
        return bytes_, address - start


class _Lane(greenlet):
    """A thread of a block: its number, where its block is in the grid, and their shared memory."""

    thread: int
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared: bytearray
    has_waited: bool  # for the launch in front
    copies: list[list[Callable[[], None]]]  # groups on their way to shared memory
    sees_all: list[bool]  # that other blocks wrote: one, that changes, of all lanes of a block
    products: Any  # of its warpgroup
    multiplied: gpu_warpgroups.Words
    unpublished: dict[int, list[tuple[int, int]]] | None  # that lanes of the block wrote since


def run(
    kernel: Callable[..., Any],
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    arguments: Sequence[Any],
    memory: Memory,
) -> None:
    """Run a kernel over a grid of blocks; a float argument is a float32."""
    names: set[str] = set()

    def meaning(intrinsic: Intrinsic) -> Callable[..., Any]:
        names.add(intrinsic.name)
        return _meaning(intrinsic, memory)

    bound = Binder(meaning).bind(kernel)
    waits_at_its_entry = "await_previous" not in names
    memory.begin_launch()
    words = [np.float32(one) if isinstance(one, float) else one for one in arguments]
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    shared = bytearray(b"\xff" * shared_bytes)
                    sees_all, unpublished = [False], dict[int, list[tuple[int, int]]]()
                    publishes = "publish" in names
                    lanes = [_Lane(bound) for _ in range(threads)]
                    for thread, lane in enumerate(lanes):
                        lane.gr_context = copy_context()  # in which the errstate holds
                        lane.thread, lane.block, lane.grid = thread, (x, y, z), grid
                        lane.shared, lane.copies, lane.multiplied = shared, [[]], {}
                        lane.unpublished = unpublished if publishes else None
                        lane.has_waited, lane.sees_all = waits_at_its_entry, sees_all
                    _run_block(lanes, words, backwards=(x + y + z) % 2 == 1)


def _run_block(lanes: list[_Lane], words: Sequence[Any], *, backwards: bool) -> None:
    """Run the lanes of one block to their end, warp by warp between barriers.

    backwards   the last warp first
    """
    firsts = range(0, len(lanes), WARP)
    answers: dict[_Lane, Any] = {}
    started: set[_Lane] = set()
    while True:
        waiting = 0
        for first in reversed(firsts) if backwards else firsts:
            waiting += _run_warp(lanes[first : first + WARP], words, answers, started)
        if not waiting:
            break
        if waiting != len(lanes):
            raise KernelFault(f"{waiting} of {len(lanes)} threads are at a barrier, others ended")
    forgotten = sum(not gpu_warpgroups.are_kept(lane.multiplied) for lane in lanes)
    if forgotten:
        raise KernelFault(f"{forgotten} threads multiply words again, without `keep_words` behind")
    early = sum(not lane.has_waited for lane in lanes)
    if early:  # the next launch could begin while the one in front still runs
        raise KernelFault(f"{early} of {len(lanes)} threads ended before `await_previous`")


def _run_warp(
    warp: list[_Lane],
    words: Sequence[Any],
    answers: dict[_Lane, Any],
    started: set[_Lane],
) -> int:
    """Run a warp to the next barrier; return how many of its lanes wait there."""
    while True:
        parked: dict[_Lane, tuple[str, Any, int]] = {}
        for lane in warp:
            if lane.dead:
                continue
            if lane in started:
                parting = lane.switch(answers.pop(lane, None))
            else:
                started.add(lane)
                parting = lane.switch(*words)
            if not lane.dead:
                parked[lane] = parting
        kinds = {kind for kind, _, _ in parked.values()}
        if not parked:
            return 0
        if kinds == {"barrier"}:
            return len(parked)
        if len(kinds) > 1 or len(parked) != len(warp):
            raise KernelFault(f"{len(parked)} of {len(warp)} lanes of a warp meet at {kinds}")
        values = [parked[lane][1] for lane in warp]
        if kinds <= set(_PRODUCTS):
            (kind,) = kinds
            answers.update(zip(warp, _PRODUCTS[kind](values), strict=True))
            continue
        for lane in warp:
            source = parked[lane][2] % WARP
            if source >= len(warp):
                raise KernelFault(f"a shuffle from lane {source} of {len(warp)}")
            answers[lane] = values[source]


def _product(words: Sequence[tuple[Any, ...]]) -> list[tuple[np.float32, ...]]:
    """Return what each lane gets of C + A @ B: A (16, 16), B (16, 8), C (16, 8), see matrices.py.

    words   of each lane: four of A, two of B, four floats of C
    """
    lanes = np.array([one[:6] for one in words], np.int32).view(np.float16)
    lanes = lanes.astype(np.float32).reshape(8, 4, 6, 2)  # (g, t, word, half)
    a = lanes[:, :, :4].reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
    b = lanes[:, :, 4:].transpose(2, 1, 3, 0).reshape(16, 8)
    total = np.array([one[6:] for one in words], np.float32).reshape(8, 4, 2, 2)
    total = total.transpose(2, 0, 1, 3).reshape(16, 8).copy()
    for k in range(16):
        total += a[:, k, None] * b[k]
    found = total.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP, 4)
    return [tuple(one) for one in found]


def _product_of_bytes(words: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return what each lane gets of C + A @ B of bytes: see matrices.py.

    words   of each lane: of A two for each 16 columns, of B one, four of C
    """
    halves = (len(words[0]) - 4) // 3
    lanes = np.array([one[:-4] for one in words], np.int32).view(np.int8)
    lanes = lanes.astype(np.int32).reshape(8, 4, 3 * halves, 4)  # (g, t, word, byte)
    total = np.array([one[-4:] for one in words], np.int64).reshape(8, 4, 2, 2)
    total = total.transpose(2, 0, 1, 3).reshape(16, 8).copy()
    for half in range(halves):
        rows = [lanes[:, :, 2 * half + which] for which in (0, 1)]
        a = np.concatenate(rows).reshape(16, 16)
        total += a @ lanes[:, :, 2 * halves + half].reshape(8, 16).T
    found = total.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP, 4)
    return [tuple(one) for one in found.tolist()]


def _matrices(words: Sequence[tuple[bytearray, int]]) -> list[tuple[int, ...]]:
    """Return the words that each lane gets of four blocks of rows in shared memory.

    words   of each lane: shared memory, and where its row is
    """
    rows = [struct.unpack_from("<4i", *one) for one in words]
    return [
        tuple(rows[8 * number + (lane >> 2)][lane & 3] for number in range(4))
        for lane in range(WARP)
    ]


def _turned(words: Sequence[tuple[bytearray, int]]) -> list[tuple[int, ...]]:
    """Return the words that each lane gets of the same blocks, each turned."""
    rows = np.array([struct.unpack_from("<8h", *one) for one in words], np.int16)
    blocks = np.ascontiguousarray(rows.reshape(4, 8, 8).transpose(0, 2, 1)).view(np.int32)
    return [tuple(blocks[:, lane >> 2, lane & 3].tolist()) for lane in range(WARP)]


def _all_the_same(words: Sequence[tuple[int, int]]) -> list[None]:
    if len(set(words)) != 1:
        raise KernelFault(f"a warp multiplies {len(set(words))} pairs of matrices at once")
    return [None] * len(words)


# What lanes do together: of the words of each, what each gets.
_PRODUCTS: dict[str, Callable[[Sequence[Any]], list[Any]]] = {
    "shared_load_matrices": _matrices,
    "shared_load_turned": _turned,
    "largest_of_lanes": lambda words: [max(one[0] for one in words)] * len(words),
    "of_any_lane": lambda words: [int(any(one[0] for one in words))] * len(words),
    "lanes_where": lambda words: (
        [_low_word(sum((one[0] != 0) << lane for lane, one in enumerate(words)))] * len(words)
    ),
    "mma_of_halves": _product,
    "mma_16x8x16": _product_of_bytes,
    "mma_16x8x32": _product_of_bytes,
    gpu_warpgroups.MULTIPLY: _all_the_same,
    gpu_warpgroups.ATTEND: lambda given: gpu_warpgroups.attended(given, KernelFault),
}


def _meaning(intrinsic: Intrinsic, memory: Memory) -> Callable[..., Any]:
    """Return what an intrinsic does in Python, with its types checked."""
    if isinstance(intrinsic, ConstantTable):
        does = _lookup(intrinsic)
    elif isinstance(intrinsic, BytesOf):
        does = _permutation(intrinsic)
    else:
        does = _does(intrinsic.name, memory)

    def fault(*arguments: Any) -> KernelFault:
        for value, (kind, low, high) in zip(
            arguments, map(_expected, intrinsic.arguments), strict=True
        ):
            if kind is not None and value.__class__ is not kind:
                return KernelFault(f"{intrinsic!r} with {value!r}, not {_IN_WORDS[kind]}")
            if kind is int and not low <= value < high:
                return KernelFault(f"{intrinsic!r} with {value:,}: not in {low:,} to {high - 1:,}")
        raise AssertionError(f"{intrinsic!r} was called as it should be")

    return _guard(intrinsic.name, intrinsic.arguments)(does, fault)


@cache
def _guard(name: str, kinds: tuple[str, ...]) -> Callable[..., Callable[..., Any]]:
    """Return what puts a look at types and ranges in front of what an intrinsic does.

    It is written out for each signature: a third of the time is spent there.
    """
    names = [f"a{number}" for number in range(len(kinds))]
    looks = []
    for argument, word in zip(names, kinds, strict=True):
        kind, low, high = _expected(word)
        if kind is not None:
            looks.append(f"{argument}.__class__ is {kind.__name__}")
        if kind is int:
            looks.append(f"{low} <= {argument} < {high}")
    given = ", ".join(names)
    scope: dict[str, Any] = {"float32": np.float32}
    exec(
        f"def guard(does, fault):\n"
        f"    def {name}({given}):\n"
        f"        if {' and '.join(looks) or True}:\n"
        f"            return does({given})\n"
        f"        raise fault({given})\n"
        f"    return {name}",
        scope,
    )
    found: Callable[..., Callable[..., Any]] = scope["guard"]
    return found


def _lookup(table: ConstantTable) -> Callable[..., Any]:
    def look_up(index: int) -> int:
        if not 0 <= index < len(table.words):
            raise KernelFault(f"word {index} of {table.name}, which has {len(table.words)}")
        return table.words[index]

    return look_up


def _permutation(chosen: BytesOf) -> Callable[..., Any]:
    def permute(a: int, b: int) -> int:
        given = struct.pack("<2i", a, b)
        return int.from_bytes(bytes(given[n] for n in chosen.numbers), "little", signed=True)

    return permute


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def _low_word(value: int) -> int:
    return ((value + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


_BYTES = [*range(128), *range(-128, 0)]  # signed, by what they are without a sign


def _bytes_of(value: int) -> list[int]:
    return [_BYTES[value >> shift & 255] for shift in (0, 8, 16, 24)]


_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _half(bits: int) -> np.float32:
    return _HALVES[bits & 0xFFFF]


def _nearest(x: np.float32) -> int:
    if not abs(x) < 2**31:
        raise KernelFault(f"nearest_i32 of {x}, which no i32 holds")
    return int(np.rint(x))


def _truncated(x: np.float32) -> int:
    if not abs(x) < 2**63:
        raise KernelFault(f"truncated_i64 of {x}, which no i64 holds")
    return int(x)


def _shifted_down(word: int, bits: int) -> int:
    if not 0 <= bits < 32:
        raise KernelFault(f"shifted_down by {bits} bits, which no word is")
    return _signed((word & 0xFFFFFFFF) >> bits, 32)


def _levels_of(word: int, *levels: int) -> tuple[int, int]:
    table = struct.pack("<4i", *levels)
    nibbles = [(byte & 15, byte >> 4 & 15) for byte in _bytes_of(word)]
    low, high = (bytes(table[one] for one in half) for half in zip(*nibbles, strict=True))
    return int.from_bytes(low, "little", signed=True), int.from_bytes(high, "little", signed=True)


def _level_parts(word: int, *levels: int) -> tuple[int, int]:
    table = struct.pack("<4i", *levels)
    nibbles = [word >> 4 * number & 15 for number in range(4)]
    below = bytes(table[one] if one < 8 else 0xFF for one in nibbles)
    others = bytes(0 if one < 8 else table[one] + 1 for one in nibbles)
    return int.from_bytes(below, "little", signed=True), int.from_bytes(others, "little")


def _bytes_by_nibbles(a: int, b: int, numbers: int) -> int:
    given, nibbles = struct.pack("<2i", a, b), [numbers >> 4 * place & 15 for place in range(4)]
    if max(nibbles) > 7:
        raise KernelFault(f"bytes_by_nibbles with {numbers:#x}: there are eight bytes")
    return int.from_bytes(bytes(given[one] for one in nibbles), "little", signed=True)


_PLAIN: dict[str, Callable[..., Any]] = {
    "dp4a": lambda a, b, c: _low_word(
        c
        + _BYTES[a & 255] * _BYTES[b & 255]
        + _BYTES[a >> 8 & 255] * _BYTES[b >> 8 & 255]
        + _BYTES[a >> 16 & 255] * _BYTES[b >> 16 & 255]
        + _BYTES[a >> 24 & 255] * _BYTES[b >> 24 & 255]
    ),
    "dp4a_u8": lambda a, b, c: _low_word(
        c
        + (a & 255) * _BYTES[b & 255]
        + (a >> 8 & 255) * _BYTES[b >> 8 & 255]
        + (a >> 16 & 255) * _BYTES[b >> 16 & 255]
        + (a >> 24 & 255) * _BYTES[b >> 24 & 255]
    ),
    "level_parts": _level_parts,
    "sign_bytes": lambda word: int.from_bytes(
        bytes(255 if one < 0 else 0 for one in _bytes_of(word)), "little", signed=True
    ),
    "bytes_by_nibbles": _bytes_by_nibbles,
    "levels_of": _levels_of,
    "bits_of_f32": lambda x: int(np.float32(x).view(np.int32)),
    "f32_of_bits": lambda bits: np.array(bits, np.int32).view(np.float32)[()],
    "f32_of_half": _half,
    "halves_of_f32": lambda x, y: int(np.array([x, y], np.float16).view(np.int32)[0]),
    "half_of_f32": lambda x: int(np.float16(x).view(np.uint16)),
    "nearest_i32": _nearest,
    "truncated_i64": _truncated,
    # The product of two float32 is exact in float64; its sum is rounded to 53 bits and then to 24.
    "fma": lambda a, b, c: np.float32(float(a) * float(b) + float(c)),
    "larger_f32": np.fmax,
    "square_root": np.sqrt,
    "power_of_two": np.exp2,
    "i32": _low_word,
    "i64": lambda x: x,
    "once_i32": lambda x: x,
    "once_i64": lambda x: x,
    "as_one": lambda address: address,
    "quotient_i32": lambda a, b: a // b,
    "shifted_down": _shifted_down,
    "bits_set": lambda word: (word & 0xFFFFFFFF).bit_count(),
    "f32_of_i32": np.float32,
    "f32": np.float32,
}


def _does(name: str, memory: Memory) -> Callable[..., Any]:
    if name in _PLAIN:
        return _PLAIN[name]
    if of_warpgroups := gpu_warpgroups.meaning(name, KernelFault):
        return of_warpgroups

    places: dict[str, Callable[[], int]] = {
        "thread_index": lambda: getcurrent().thread,
        "block_x": lambda: getcurrent().block[0],
        "block_y": lambda: getcurrent().block[1],
        "block_z": lambda: getcurrent().block[2],
        "blocks_z": lambda: getcurrent().grid[2],
    }
    if name in places:
        return places[name]
    if name == "await_previous":

        def await_previous() -> None:  # launches follow each other here
            getcurrent().has_waited = True

        return await_previous
    if name == "end_copies":
        return lambda: getcurrent().copies.append([])
    if name in ("await_copies", "await_older_copies"):
        leaves = (
            2 if name == "await_older_copies" else 0
        )  # the last that was ended, and the open one

        def await_copies() -> None:
            lane = getcurrent()
            groups = [[], *lane.copies]
            ready, lane.copies = (
                groups[: len(groups) - leaves],
                groups[len(groups) - leaves :] or [[]],
            )
            for put in (put for group in ready for put in group):
                put()

        return await_copies
    if name == "hold":
        return lambda _: None
    if name == "keep":
        return lambda: None
    if name == "prefetch":

        def prefetch(address: int, size: int) -> None:
            if address % 16 or size % 16 or size <= 0:
                raise KernelFault(f"a prefetch of {size} bytes at {address:#x}: not in sixteens")
            for place in (address, address + size - 16):
                memory.check(place, 16, "prefetch")  # old bytes do no harm: nothing reads them

        return prefetch
    if name == "arrive":
        store = _access("store_i32", memory)

        def arrive(place: int, last: int) -> int:
            memory.check(place, 4, "store")
            found = ctypes.c_int32.from_address(place).value
            if not 0 <= found <= last:
                raise KernelFault(f"{found} of {last} others arrived: the word was not 0")
            store(place, 0 if found == last else found + 1)
            getcurrent().sees_all[0] = found == last
            return found

        return arrive
    if name == "nanoseconds":

        def nanoseconds() -> int:
            memory.clock_ns += memory.tick_ns
            return memory.clock_ns

        return nanoseconds
    if name == "load_system_i64":

        def load_system(place: int) -> int:  # it may be of what somebody writes now
            memory.others()
            memory.acquired.add(place)
            if place % 8:
                raise KernelFault(f"8 bytes at {place:#x}: not aligned")
            word: int = struct.unpack_from("<q", *memory.check(place, 8, "load"))[0]
            return word

        return load_system
    if name == "store_system_i64":
        store = _access("store_i64", memory)

        def store_system(place: int, value: int) -> None:  # others may look at once
            store(place, value)
            memory.released.add(place)
            memory.others()

        return store_system
    if name == "post_i64":
        return _access("store_i64", memory)
    if name == "posted_2xi64":  # what the launch in front posts: it has ended here

        def posted(place: int) -> tuple[int, ...]:
            if place % 16:
                raise KernelFault(f"16 bytes at {place:#x}: not aligned")
            return struct.unpack_from("<2q", *memory.check(place, 16, "load"))

        return posted
    if name == "barrier":
        return lambda: getcurrent().parent.switch(("barrier", None, 0))
    if name in ("shared_load_matrices", "shared_load_turned"):

        def load_matrices(place: int) -> Any:
            lane = getcurrent()
            if not 0 <= place <= len(lane.shared) - 16 or place % 16:
                raise KernelFault(f"{name} at {place} of {len(lane.shared)} shared bytes")
            return lane.parent.switch((name, (lane.shared, place), 0))

        return load_matrices
    if name.startswith("copy_"):
        size = int(name.removeprefix("copy_"))
        words = "4xi32" if size == 16 else "2xi32" if size == 8 else "i32"
        load, store_shared = (
            _access(f"load_{words}", memory),
            _access(f"shared_store_{words}", memory),
        )

        def copy(place: int, address: int) -> None:  # at once, or as late as may be
            found, lane = load(address), getcurrent()
            values = found if size > 4 else (found,)
            if lane.thread % 2:
                store_shared(place, *values)
            else:
                lane.copies[-1].append(lambda: store_shared(place, *values))

        return copy
    if name in _PRODUCTS:
        return lambda *words: getcurrent().parent.switch((name, words, 0))
    if name.startswith("shuffle_xor_"):

        def shuffle(value: Any, mask: int) -> Any:
            lane = getcurrent()
            return lane.parent.switch((name, value, lane.thread % WARP ^ mask))

        return shuffle
    return _access(name, memory)


def _access(name: str, memory: Memory) -> Callable[..., Any]:
    """Return a load, a store or an addition, of shared memory or by address."""
    words = name.split("_")
    shared = words[0] == "shared"
    kind, stored = words[-2], words[-1]
    count, _, element = stored.rpartition("x")
    number = int(count or 1)
    layout = struct.Struct("<" + _FORMATS[element] * number)
    size = layout.size

    def bytes_at(place: int) -> tuple[Any, int]:
        if not shared:
            if place % size:
                raise KernelFault(f"{size} bytes at {place:#x}: not aligned")
            return memory.check(place, size, kind)
        block = getcurrent().shared
        if not 0 <= place <= len(block) - size or place % size:
            raise KernelFault(f"{name} at {place} of {len(block)} shared bytes")
        return block, place

    def check_writer(place: int) -> None:
        lane = getcurrent()
        writer = memory.writer_of(place, size, lane.block)
        if not writer:
            return
        if writer == "in front" and kind == "fetch":
            raise KernelFault(f"{name} of what the launch in front wrote, at {place:#x}")
        if writer == "in front" and not lane.has_waited:
            raise KernelFault(f"{name} of what the launch in front may write, at {place:#x}")
        if writer == "beside" and kind != "add" and not lane.sees_all[0]:
            raise KernelFault(f"{name} of what another block writes, at {place:#x}")

    def load(place: int) -> Any:
        if not shared:
            check_writer(place)
        found = layout.unpack_from(*bytes_at(place))
        if number > 1:
            return tuple(map(np.float32, found)) if element == "f32" else found
        return np.float32(found[0]) if element == "f32" else found[0]

    def store(place: int, *values: Any) -> None:
        target, offset = bytes_at(place)
        if not shared:
            if not getcurrent().has_waited:
                raise KernelFault(f"{name} before `await_previous`, at {place:#x}")
            memory.note_write(place, size, getcurrent().block)
        else:
            lane = getcurrent()
            if lane.unpublished is not None:
                lane.unpublished.setdefault(lane.thread, []).append((place, place + size))
        if size < 4 * number and element != "f32":  # lower parts of words; others were looked at
            values = tuple(_signed(value, 8 * size // number) for value in values)
        layout.pack_into(target, offset, *values)

    def add(place: int, value: Any) -> None:
        store(place, load(place) + value)

    return {"store": store, "load": load, "fetch": load, "add": add}[kind]
