"""Threads of the host that compute experts while a card computes others.

A card that misses experts reads some over its link and posts the others in a mailbox
(`kernels/mailbox.py`); threads in compiled code wait for that and answer
(`kernels/host/pool.py`). Python starts and ends them, and says when they have to be awake:

    awake()    before a window is launched: they look for posts, all processors busy
    rest()     when no window is in flight: after some milliseconds they sleep

A pool fails once and for all: by a message that nobody can have meant, a thread that ends, or a
card that gave up waiting. Then ABORT is set, no thread waits any longer, and `failure` says why.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from strata_nb import cpu
from strata_nb.addresses import memory_view
from strata_nb.compiling import address_of
from strata_nb.errors import StrataError
from strata_nb.formats import TensorType, row_bytes
from strata_nb.interrupts import interrupts_later
from strata_nb.kernels import mailbox, quantised_rows
from strata_nb.kernels.host import pool
from strata_nb.kernels.host import pool_words as at
from strata_nb.kernels.host.matrices import matrix_functions, takes_packed
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

FEWEST_PROCESSORS = 3  # one for the caller, and two for a pool that is worth its noise


def pool_threads(chosen: int | None = None) -> int:
    """Return how many threads a pool shall have: 0 where the machine has none to spare.

    One a core, for two on a core share its multipliers and the work is shared out evenly; one
    processor stays for the caller. `chosen` (`-t`) is an upper limit.
    """
    processors = cpu.usable_processors()
    if processors < FEWEST_PROCESSORS:
        return 0
    most = min(processors - 1, cpu.physical_cores())
    return most if chosen is None else min(chosen, most)


class PoolLayer(NamedTuple):
    """Say where the experts of a layer are and how they are multiplied.

    gate, up, down            types, all of them packed
    gate_offset ...           of the matrices in a blob
    width                     values of a row: of what gate and up read and down gives
    inner                     outputs of gate and up, a multiple of 32
    experts                   how many there are
    addresses                 of int64 (experts,): each blob's address in memory of the host, which
                              the pool may read as long as it lives; 0 where there is none
    """

    gate: TensorType
    up: TensorType
    down: TensorType
    gate_offset: int
    up_offset: int
    down_offset: int
    width: int
    inner: int
    experts: int
    addresses: int

    def blob_bytes(self) -> int:
        """Return the bytes of an expert that are read."""
        in_rows = row_bytes(self.gate, self.width) + row_bytes(self.up, self.width)
        return self.inner * in_rows + self.width * row_bytes(self.down, self.inner)

    def words(self) -> list[int]:
        """Return the words that the threads read; compiles the functions among them."""
        named = {
            at.GATE: address_of(matrix_functions(self.gate).few),
            at.UP: address_of(matrix_functions(self.up).few),
            at.DOWN: address_of(matrix_functions(self.down).few),
            at.GATE_OFFSET: self.gate_offset,
            at.UP_OFFSET: self.up_offset,
            at.DOWN_OFFSET: self.down_offset,
            at.OUTPUTS: self.inner,
            at.LAYER_EXPERTS: self.experts,
            at.ADDRESSES: self.addresses,
            at.BLOB_BYTES: self.blob_bytes(),
            at.DOWN_BYTES: GROUP_ROWS * row_bytes(self.down, self.inner),
        }
        return [named.get(number, 0) for number in range(at.LAYER_WORDS)]


class CpuPool:
    """Own the threads that answer the posts of a mailbox.

    box       address of `mailbox.box_bytes(width)` bytes, a multiple of `mailbox.LINE`: zeros, or
              a mailbox whose posts were all answered. It must be there until the pool is closed
    layers    with experts, in their order, all of one width
    threads   at least one; the machine should have one processor more

    The threads call no driver, allocate nothing, hold no GIL, and touch no memory for the first
    time while they work. In a forked child, where they are gone, `awake` raises StrataError.
    """

    def __init__(self, box: int, layers: Sequence[PoolLayer], threads: int) -> None:
        _check(box, layers, threads)
        self.threads = threads
        self._process = os.getpid()
        self._layers = np.array([layer.words() for layer in layers], np.int64)
        self._layer_count = len(layers)
        self._failure: str | None = None  # once it was noticed
        width, inner = layers[0].width, max(layer.inner for layer in layers)
        self._memory, self._state = _work_space(box, self._layers, width, inner, threads)
        self._address = int(self._state.ctypes.data)
        self._header = memory_view(box, mailbox.LAYER).view(np.int64)
        pool.begin(self._address)
        pool.call.made()  # now: who ends the threads should not have to compile
        serve = pool.serve.made()
        self._workers = [
            threading.Thread(
                target=_serve,
                args=(serve, (self._memory, self._layers), self._header, self._state, number),
                name=f"strata-pool-{number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        self._finalizer = weakref.finalize(
            self, _end, self._memory, self._state, self._header, self._workers, self._process
        )
        try:
            for worker in self._workers:
                worker.start()
        except BaseException as error:
            self._finalizer()  # nobody else would end those that were started
            if not isinstance(error, RuntimeError):
                raise
            raise StrataError(
                f"{threads} threads of the CPU pool cannot be started: {error}",
                hint="give a smaller -t, or --no-cpu-pool",
            ) from error

    # -- what the caller says ----------------------------------------------------------------------

    def awake(self) -> None:
        """Have the threads look for posts without a pause; a failed pool stays as it is."""
        if os.getpid() != self._process:
            raise StrataError(
                f"the CPU pool belongs to process {self._process}, this is its fork",
                hint="start the child with the spawn method",
            )
        if not self._finalizer.alive:
            raise StrataError("the CPU pool has ended", hint="open the engine again")
        pool.call(self._address, at.AWAKE)

    def rest(self) -> None:
        """Let the threads sleep soon; nothing is in flight, and nothing will be before `awake`."""
        self._state[at.AWAKE] = 0

    def close(self) -> None:
        """Have nobody wait any longer and end the threads; may be called twice.

        A post that they are at may stay unanswered. The mailbox is not touched afterwards.
        """
        with interrupts_later():  # a thread that was left behind would read what is freed
            self._look()
            self._finalizer()

    # -- what became of it -------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Say why the pool answers no more; None while it does, or if it was only closed."""
        self._look()
        return self._failure

    @property
    def posts(self) -> int:
        """Posts that were answered; exact, as the others are, while nothing is in flight."""
        return int(self._state[at.POSTS])

    @property
    def experts(self) -> int:
        """Experts that were computed for them."""
        return int(self._state[at.EXPERTS])

    @property
    def bytes(self) -> int:
        """Bytes of weights that were read for them."""
        return int(self._state[at.BYTES])

    @property
    def busy_s(self) -> float:
        """Seconds from the moment a post was seen to its answer, of all posts."""
        return float(self._state[at.BUSY_NS]) * 1e-9

    def _look(self) -> None:
        """Notice that the pool has failed, while it is open."""
        if self._failure or not self._finalizer.alive or os.getpid() != self._process:
            return
        if self._header[mailbox.ABORT // 8]:  # a thread that ends sets it
            self._failure = self._refusal() if self._state[at.FAULT] else self._end_of_posts()

    def _end_of_posts(self) -> str:
        """Say why the threads have ended, or will, that found no fault with a message."""
        post = int(self._header[mailbox.POSTED // 8])
        at_work = f"post {post:,} ({self.threads} threads)"
        if self._state[at.DIED]:
            return f"thread {self._state[at.DIED] - 1} of the CPU pool ended at {at_work}"
        if post == self._header[mailbox.ANSWERED // 8]:
            return f"the card gave up the CPU pool behind {at_work}, which was answered"
        progress = [self._word(number, at.PROGRESS) for number in range(self.threads)]
        late = [number for number, one in enumerate(progress) if one == min(progress)]
        return f"nobody waited for {at_work} any longer; {_threads(late)} came last"

    def _word(self, thread: int, which: int) -> int:
        return int(self._state[at.of_thread(thread, which)])

    def _refusal(self) -> str:
        fault, found, allowed = (int(self._state[one]) for one in (at.FAULT, at.FOUND, at.ALLOWED))
        said = {
            at.WRONG_NUMBER: f"it has this number where {allowed:,} was due",
            at.WRONG_LAYER: f"layer {found:,} of {self._layer_count}",
            at.WRONG_COUNT: f"{found:,} choices, where 1 to {allowed} can be",
            at.WRONG_EXPERT: f"expert {found:,} of {allowed}",
            at.WRONG_ORDER: f"expert {found} behind expert {allowed}",
            at.NO_BLOB: f"expert {found} of layer {allowed}, which is not in memory of the host",
        }
        post = int(self._header[mailbox.POSTED // 8])
        return f"the CPU pool cannot answer post {post:,}: {said[fault]}"


def _check(box: int, layers: Sequence[PoolLayer], threads: int) -> None:
    """Raise ValueError for what the threads could not work on."""
    if threads < 1 or not layers or box % mailbox.LINE:
        raise ValueError(f"{threads} threads, {len(layers)} layers, mailbox at {box:#x}")
    for layer in layers:
        kinds = (layer.gate, layer.up, layer.down)
        if not all(takes_packed(kind) for kind in kinds):
            raise ValueError(f"experts of {', '.join(kind.name for kind in kinds)}")
        if layer.width != layers[0].width or layer.width % SUB_BLOCK or layer.inner % SUB_BLOCK:
            raise ValueError(f"experts of {layer.width} x {layer.inner} values")


def _work_space(
    box: int, layers: np.ndarray[Any, Any], width: int, inner: int, threads: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the memory of the threads, and the words of the state at its beginning."""
    most, line = mailbox.MOST_CHOICES, mailbox.LINE
    sizes = {
        at.GATES: 4 * most * inner,
        at.UPS: 4 * most * inner,
        at.INNER: most * quantised_rows.row_bytes(inner),
        at.PRODUCTS: 4 * most * width,
        at.PARTS: 8 * most * (inner // SUB_BLOCK),
    }
    words = at.state_words(threads)
    place = -(-8 * words // line) * line
    starts = {}
    for which, size in sizes.items():
        starts[which] = place
        place += -(-size // line) * line
    memory = np.empty(place // 8 + line // 8, np.int64)
    memory[:] = 0  # written, so that it is there
    skipped = -memory.ctypes.data % line // 8
    state = memory[skipped : skipped + words]
    address = int(state.ctypes.data)
    for which, start in starts.items():
        state[which] = address + start
    state[at.BOX], state[at.ANSWER] = box, box + mailbox.answer_offset(width)
    state[at.LAYERS], state[at.LAYER_COUNT] = int(layers.ctypes.data), len(layers)
    state[at.WIDTH], state[at.THREADS] = width, threads
    return memory, state


def _serve(
    serve: Any,
    kept: tuple[np.ndarray[Any, Any], ...],
    header: np.ndarray[Any, Any],
    state: np.ndarray[Any, Any],
    thread: int,
) -> None:
    """Be a thread of the pool that keeps what it reads alive; without it nobody shall wait."""
    try:
        serve(int(state.ctypes.data), thread)
    finally:
        if not header[mailbox.ABORT // 8] and not state[at.STOP]:
            state[at.DIED] = thread + 1
        header[mailbox.ABORT // 8] = 1
        del kept


def _threads(numbers: Sequence[int]) -> str:
    """Name threads."""
    some = ", ".join(str(number) for number in numbers)
    return f"thread {some}" if len(numbers) == 1 else f"threads {some}"


def _end(
    memory: np.ndarray[Any, Any],
    state: np.ndarray[Any, Any],
    header: np.ndarray[Any, Any],
    workers: Sequence[threading.Thread],
    process: int,
) -> None:
    """End the threads, in the middle of a post if they are in one; in a fork they are gone."""
    if os.getpid() != process:
        return
    header[mailbox.ABORT // 8] = 1
    pool.call(int(state.ctypes.data), at.STOP)
    for worker in workers:
        if worker.ident is not None:  # it was started
            worker.join()
    del memory
