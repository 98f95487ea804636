"""Run programs in compiled threads that meet at barriers, without Python between the launches.

The caller is thread 0; the others are started once and wait for the next run. All go through the
launches together, each doing its share of every one:

    caller   announce | launch 0 | barrier | launch 1 | ... | barrier | return
    worker   wait     | launch 0 | barrier | launch 1 | ... | barrier | wait ...

Who waits spins for a moment, then gives its processor away again and again; a worker that was not
needed for a few milliseconds sleeps on a semaphore. Nothing holds the GIL. Python's signal handlers
run when `run` returns, so a caller that wants to be interrupted in long work runs it in parts.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata_nb.compiling import address_of, compiled, inlined
from strata_nb.errors import StrataError
from strata_nb.kernels.host.operations import Function, HostKernel
from strata_nb.kernels.host.waiting import (
    pause,
    semaphore_make,
    semaphore_post,
    semaphore_wait,
    yield_processor,
)
from strata_nb.raw_memory import (
    add_atomic,
    call_address,
    load_atomic,
    load_i64,
    store_atomic,
    swap_atomic,
)

# Words of the state, each at the beginning of a cache line of its own.
_LINE = 8  # words
_GENERATION, _ARRIVED, _PHASE, _LAUNCHES, _FIRST, _LAST, _WORKERS = range(0, 7 * _LINE, _LINE)
_WORKER_LINES = 2  # of each worker: whether it sleeps; its semaphore (32 bytes on Linux)

_SPINS = 2_000  # pauses, about 0.1 ms, before a thread that waits gives its processor away
_YIELDS = 4_000  # times that it does so before a worker sleeps: some milliseconds
_STOP = -1  # as the last launch: the workers end

_LAUNCH_WORDS = 3  # function, arguments, whether it waits


# -- the compiled threads --------------------------------------------------------------------------


@inlined
def _wait_for_change(place: int, known: int) -> None:
    """Wait until a word is not what it was."""
    spins = 0
    while load_atomic(place) == known:
        if spins < _SPINS:
            spins += 1
            pause()
        else:
            yield_processor()


@inlined
def _barrier(state: int, threads: int) -> None:
    """Wait until all threads are here; what they wrote is visible to all."""
    phase = load_atomic(state + 8 * _PHASE)
    if add_atomic(state + 8 * _ARRIVED, 1) == threads - 1:
        store_atomic(state + 8 * _ARRIVED, 0)
        store_atomic(state + 8 * _PHASE, phase + 1)
    else:
        _wait_for_change(state + 8 * _PHASE, phase)


@inlined
def _go_through(state: int, thread: int, threads: int) -> None:
    """Do this thread's share of the launches that the state names, up to the last barrier."""
    launches = load_i64(state + 8 * _LAUNCHES)
    first, last = load_i64(state + 8 * _FIRST), load_i64(state + 8 * _LAST)
    for number in range(first, last):
        place = launches + 8 * _LAUNCH_WORDS * number
        if threads > 1 and number > first and load_i64(place + 16):
            _barrier(state, threads)
        call_address(load_i64(place), (load_i64(place + 8), thread, threads))
    if threads > 1:
        _barrier(state, threads)


@compiled("void(int64,int64,int64)")
def _work(state: int, thread: int, threads: int) -> None:
    """Be a worker: take part in every run until one says stop."""
    own = state + 8 * (_WORKERS + (thread - 1) * _WORKER_LINES * _LINE)
    sleeps, semaphore = own, own + 8 * _LINE
    known = 0
    while True:
        waits = 0
        while load_atomic(state + 8 * _GENERATION) == known:
            waits += 1
            if waits < _SPINS:
                pause()
            elif waits < _SPINS + _YIELDS:
                yield_processor()
            else:
                store_atomic(sleeps, 1)
                # Who announces looks at `sleeps` after it changed the generation, so one of the
                # two sees the other; who takes the 1 back decides whether there is a post to take.
                changed = load_atomic(state + 8 * _GENERATION) != known
                if not changed or swap_atomic(sleeps, 0) == 0:
                    while semaphore_wait(semaphore) != 0:
                        pass
                waits = 0
        known += 1
        if load_i64(state + 8 * _LAST) == _STOP:
            return
        _go_through(state, thread, threads)


@inlined
def _announce(state: int, threads: int) -> None:
    add_atomic(state + 8 * _GENERATION, 1)
    for worker in range(threads - 1):
        own = state + 8 * (_WORKERS + worker * _WORKER_LINES * _LINE)
        if load_atomic(own) and swap_atomic(own, 0):
            semaphore_post(own + 8 * _LINE)


@compiled("void(int64,int64)")
def _lead(state: int, threads: int) -> None:
    """Be thread 0 of a run whose words are set, from the announcement to the last barrier."""
    if threads > 1:
        _announce(state, threads)
    _go_through(state, 0, threads)


@compiled("void(int64,int64)")
def _stop(state: int, threads: int) -> None:
    _announce(state, threads)


@compiled("void(int64,int64)")
def _make_semaphores(state: int, threads: int) -> None:
    for worker in range(threads - 1):
        semaphore_make(state + 8 * (_WORKERS + (worker * _WORKER_LINES + 1) * _LINE))


FUNCTIONS = (_make_semaphores, _work, _lead, _stop)


# -- Python's side ---------------------------------------------------------------------------------


class PreparedProgram:
    """Hold launches in the form that the threads read: functions and packed arguments."""

    def __init__(self, launches: Sequence[tuple[HostKernel, Sequence[int], bool]]) -> None:
        self._kernels = [kernel for kernel, _, _ in launches]  # whose addresses the table holds
        self._words = [
            np.array([*arguments, *kernel.words()], np.int64) for kernel, arguments, _ in launches
        ]
        self._table = np.array(
            [
                (address_of(kernel.function), words.ctypes.data, waits)
                for (kernel, _, waits), words in zip(launches, self._words, strict=True)
            ],
            np.int64,
        ).reshape(-1, _LAUNCH_WORDS)

    @property
    def address(self) -> int:
        return int(self._table.ctypes.data)

    def __len__(self) -> int:
        return len(self._table)


class Threads:
    """Own the threads that run programs; `threads` counts the caller.

    One run at a time, from any thread of the process that made them. In a forked child, where the
    workers are gone, `run` raises StrataError.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._process = os.getpid()
        self._lock = threading.Lock()
        words = _WORKERS + (threads - 1) * _WORKER_LINES * _LINE
        self._memory = np.zeros(words + _LINE, np.int64)
        skipped = -self._memory.ctypes.data % 64
        self._state = self._memory[skipped // 8 :]
        self._address = int(self._state.ctypes.data)
        _make_semaphores(self._address, threads)
        self._lead, work = _lead.made(), _work.made()
        _stop.made()  # now: who ends the threads should not have to compile
        self._workers = [
            threading.Thread(
                target=_serve,
                args=(work, self._memory, self._address, number, threads),
                name=f"strata-compute-{number}",
                daemon=True,
            )
            for number in range(1, threads)
        ]
        self._finalizer = weakref.finalize(
            self, _end, self._memory, self._workers, self._process, self._lock
        )
        try:
            for worker in self._workers:
                worker.start()
        except BaseException as error:
            self._finalizer()  # nobody else would end those that were started
            if not isinstance(error, RuntimeError):
                raise
            raise StrataError(
                f"{threads} compute threads cannot be started: {error}", hint="give a smaller -t"
            ) from error

    def run(self, program: PreparedProgram, first: int = 0, last: int | None = None) -> None:
        """Run launches first .. last - 1 of a program (None: to its end) and wait for them."""
        if os.getpid() != self._process:
            raise StrataError(
                f"the compute threads belong to process {self._process}, this is its fork",
                hint="start the child with the spawn method",
            )
        last = len(program) if last is None else last
        if first >= last:
            return
        with self._lock:
            if not self._finalizer.alive:
                raise StrataError("the compute threads have ended", hint="open the engine again")
            self._state[[_LAUNCHES, _FIRST, _LAST]] = program.address, first, last
            self._lead(self._address, self.threads)

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._finalizer()


def _serve(
    work: Function, memory: np.ndarray[Any, Any], address: int, thread: int, threads: int
) -> None:
    """Be a worker that keeps what it reads alive, whatever becomes of the rest."""
    work(address, thread, threads)
    del memory


def _end(
    memory: np.ndarray[Any, Any],
    workers: Sequence[threading.Thread],
    process: int,
    lock: threading.Lock,
) -> None:
    """End the workers when no run is going on; in a fork they are gone already.

    Also called when the interpreter ends, where another thread may be in a run.
    """
    if os.getpid() != process or not workers:
        return
    state = memory[-memory.ctypes.data % 64 // 8 :]
    with lock:
        state[_LAST] = _STOP
        _stop(int(state.ctypes.data), len(workers) + 1)
    for worker in workers:
        if worker.ident is not None:  # it was started
            worker.join()
