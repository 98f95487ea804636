"""Threads that run programs: barriers, sleep and waking, and their end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numpy.typing import NDArray

from strata_nb.errors import StrataError
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, share, word
from strata_nb.kernels.host.threads import PreparedProgram, Threads
from strata_nb.raw_memory import load_i64, store

Integers = NDArray[np.int64]
COUNTS = (1, 2, 3)
WIDTH = 200  # numbers that the threads share out

# Not by `compiling.compiled`, whose files on disk know the sources of the package alone: a kernel
# that was changed here would be taken from there as it was.
_kernel = numba.njit(SIGNATURE, nogil=True, error_model="numpy")
_yield_processor = types.ExternalFunction("sched_yield", types.int32())


@_kernel
def _mix(arguments: int, thread: int, threads: int) -> None:
    """target[i] = 3 * source[i + step] + i, one of the threads coming late to every launch."""
    source, target = word(arguments, 0), word(arguments, 1)
    width, step, late = word(arguments, 2), word(arguments, 3), word(arguments, 4)
    if thread == step % threads:
        number = step
        for _ in range(late):
            number = number * 6364136223846793005 + 1442695040888963407
        store(target + 8 * width, number)  # so that the loop is not left out
    first, last = share(width, 1, thread, threads)
    for place in range(first, last):
        found = load_i64(source + 8 * ((place + step) % width))
        store(target + 8 * place, 3 * found + place)


@_kernel
def _wait_for_flag(arguments: int, thread: int, _: int) -> None:
    """Let thread 0 look for a flag a limited number of times; seen = whether it found it."""
    flag, seen, times = word(arguments, 0), word(arguments, 1), word(arguments, 2)
    if thread == 0:
        for _ in range(times):
            if load_i64(flag):
                store(seen, 1)
                return
            _yield_processor()


@_kernel
def _set_flag(arguments: int, thread: int, threads: int) -> None:
    """Set the flag as the last thread."""
    if thread == threads - 1:
        store(word(arguments, 0), 1)


class Mixing:
    """A program that goes wrong if any launch reads before all of the one before it is written."""

    def __init__(self, launches: int, late: int = 3_000) -> None:
        self.launches = launches
        # one place more than the numbers, which the launches do not read
        self.buffers = np.zeros((2, WIDTH + 1), np.int64)
        self.reset()
        kernel = HostKernel(_mix)
        source, target = (at(buffer) for buffer in self.buffers)
        pairs = [(source, target), (target, source)]
        self.program = PreparedProgram(
            [(kernel, (*pairs[n % 2], WIDTH, n, late), True) for n in range(launches)]
        )

    def reset(self) -> None:
        self.buffers[:] = np.arange(WIDTH + 1)

    def found(self) -> Integers:
        return self.buffers[self.launches % 2, :WIDTH]

    def expected(self, times: int = 1) -> Integers:
        """Return what `found` must be after running that often; launches are an even number."""
        numbers = np.arange(WIDTH)
        for _ in range(times):
            for step in range(self.launches):
                numbers = 3 * np.roll(numbers, -step) + np.arange(WIDTH)
        return numbers


def at(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


@pytest.fixture(params=COUNTS)
def threads(request: pytest.FixtureRequest) -> Iterator[Threads]:
    made = Threads(request.param)
    yield made
    made.close()


@pytest.fixture
def three() -> Iterator[Threads]:
    made = Threads(3)
    yield made
    made.close()


# -- launches and barriers -------------------------------------------------------------------------


def test_a_launch_sees_all_that_those_before_it_wrote(threads: Threads) -> None:
    mixing = Mixing(300)
    threads.run(mixing.program)
    assert np.array_equal(mixing.found(), mixing.expected())


def test_the_next_run_sees_what_the_last_one_wrote(threads: Threads) -> None:
    mixing = Mixing(2)
    for _ in range(200):
        threads.run(mixing.program)
    assert np.array_equal(mixing.found(), mixing.expected(200))


def flags(waits: bool, times: int) -> tuple[PreparedProgram, Integers, Integers]:
    """Return a program in which thread 0 waits for what a thread does in the next launch."""
    flag, seen = np.zeros(1, np.int64), np.zeros(1, np.int64)
    program = PreparedProgram(
        [
            (HostKernel(_wait_for_flag), (at(flag), at(seen), times), True),
            (HostKernel(_set_flag), (at(flag),), waits),
        ]
    )
    return program, flag, seen


@pytest.mark.parametrize("count", COUNTS[1:])
def test_a_launch_that_need_not_wait_runs_beside_the_one_before_it(count: int) -> None:
    program, flag, seen = flags(waits=False, times=1_000_000)
    threads = Threads(count)
    threads.run(program)
    threads.close()
    assert (flag[0], seen[0]) == (1, 1)


@pytest.mark.parametrize("count", COUNTS[1:])
def test_a_launch_that_waits_does_not_begin_before_all_have_ended_the_last(count: int) -> None:
    program, flag, seen = flags(waits=True, times=20_000)
    threads = Threads(count)
    threads.run(program)
    threads.close()
    assert (flag[0], seen[0]) == (1, 0)


def test_launches_that_need_not_wait_are_all_done_at_the_end(threads: Threads) -> None:
    source = np.arange(WIDTH)
    targets = np.zeros((50, WIDTH + 1), np.int64)
    program = PreparedProgram(
        [
            (HostKernel(_mix), (at(source), at(target), WIDTH, step, 500), False)
            for step, target in enumerate(targets)
        ]
    )
    threads.run(program)
    for step, target in enumerate(targets):
        assert np.array_equal(target[:WIDTH], 3 * np.roll(source, -step) + source)


@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6), (0, 2, 3, 6), range(7)])
def test_parts_of_a_program_add_up_to_the_whole(threads: Threads, cuts: Sequence[int]) -> None:
    mixing = Mixing(6)
    assert len(mixing.program) == 6
    for first, last in pairwise(cuts):
        threads.run(mixing.program, first, last)
    assert np.array_equal(mixing.found(), mixing.expected())


def test_a_part_runs_the_launches_in_it_and_no_others(threads: Threads) -> None:
    mixing = Mixing(6)
    threads.run(mixing.program, 4)
    threads.run(mixing.program, 6)
    threads.run(mixing.program, 3, 3)
    numbers = np.arange(WIDTH)
    for step in (4, 5):
        numbers = 3 * np.roll(numbers, -step) + np.arange(WIDTH)
    assert np.array_equal(mixing.found(), numbers)


def test_an_empty_program_does_nothing(threads: Threads) -> None:
    threads.run(PreparedProgram([]))


def test_programs_may_be_run_from_several_python_threads(three: Threads) -> None:
    mixing = Mixing(2, late=0)

    def call() -> None:
        for _ in range(100):
            three.run(mixing.program)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert np.array_equal(mixing.found(), mixing.expected(300))


# -- sleep and waking ------------------------------------------------------------------------------


def test_thousands_of_short_runs_end(three: Threads) -> None:
    mixing = Mixing(2, late=0)
    for _ in range(5_000):
        three.run(mixing.program)
    assert np.array_equal(mixing.found(), mixing.expected(5_000))


def test_threads_that_are_not_needed_take_no_time(three: Threads) -> None:
    mixing = Mixing(2)
    three.run(mixing.program)
    used = []
    for _ in range(10):  # however long the machine needs to let them come to rest
        before = time.process_time()
        time.sleep(0.1)
        used.append(time.process_time() - before)
        if used[-1] < 0.03:
            break
    else:
        pytest.fail(f"seconds used in pauses of 0.1: {used}")


def test_threads_wake_after_any_pause(three: Threads) -> None:
    # The pauses lie around the moment at which a worker goes to sleep, where it could miss a call.
    mixing = Mixing(2, late=0)
    pauses = [*np.linspace(0, 0.012, 120), 0.1]
    for pause in pauses:
        time.sleep(pause)
        three.run(mixing.program)
    assert np.array_equal(mixing.found(), mixing.expected(len(pauses)))


# -- the end ---------------------------------------------------------------------------------------


def workers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("strata-compute-")}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("asleep", [False, True])
def test_closing_ends_the_threads_and_may_be_done_twice(count: int, asleep: bool) -> None:
    before = workers()
    mixing = Mixing(2)
    threads = Threads(count)
    assert len(workers() - before) == count - 1
    threads.run(mixing.program)
    if asleep:
        time.sleep(0.1)
    threads.close()
    assert workers() == before
    threads.close()
    with pytest.raises(StrataError, match="have ended") as caught:
        threads.run(mixing.program)
    assert caught.value.hint == "open the engine again"
    assert np.array_equal(mixing.found(), mixing.expected())


def test_threads_that_never_ran_can_be_closed() -> None:
    before = workers()
    Threads(3).close()
    assert workers() == before


def test_threads_that_nobody_holds_end_by_themselves() -> None:
    before = workers()
    mixing = Mixing(2)
    threads = Threads(3)
    threads.run(mixing.program)
    assert len(workers() - before) == 2
    del threads
    gc.collect()
    assert workers() == before


def test_a_thread_that_cannot_be_started_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = workers()
    start = threading.Thread.start

    def fails_at_the_third(self: threading.Thread) -> None:
        if self.name == "strata-compute-3":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails_at_the_third)
    with pytest.raises(StrataError, match="can't start new thread"):
        Threads(4)
    assert workers() == before


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    """Run a program that begins with this file's names."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", f"from {Path(__file__).stem} import *\n{text}"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_program_that_closes_nothing_ends_in_silence() -> None:
    done = run_script(
        "threads, mixing = Threads(3), Mixing(2)\n"
        "threads.run(mixing.program)\n"
        "print(np.array_equal(mixing.found(), mixing.expected()))\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


FORK = """
import warnings

threads, mixing = Threads(3), Mixing(2)
threads.run(mixing.program)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forks with threads
    child = os.fork()
if child == 0:
    try:
        threads.run(mixing.program)
    except StrataError as error:
        print(error, error.hint, sep="; ")
    threads.close()
    del threads
    sys.exit(7)  # as any program ends, with all that is to be done then
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
threads.run(mixing.program)
print(os.getpid(), np.array_equal(mixing.found(), mixing.expected(2)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    done = run_script(FORK)
    assert (done.returncode, done.stderr) == (0, "")
    said, status, parent = done.stdout.splitlines()
    number = parent.split()[0]
    assert said == (
        f"the compute threads belong to process {number}, this is its fork; "
        "start the child with the spawn method"
    )
    assert (status, parent) == ("7", f"{number} True")


def test_the_interpreter_ends_while_another_thread_is_in_a_run() -> None:
    # Many threads on few cores: some worker is late to read what the run is.
    for _ in range(4):
        done = run_script(
            "threads, mixing = Threads(8), Mixing(2)\n"
            "def forever():\n"
            "    try:\n"
            "        while True:\n"
            "            threads.run(mixing.program, 0, 1)\n"
            "    except StrataError:\n"
            "        pass\n"
            "threading.Thread(target=forever, daemon=True).start()\n"
            "time.sleep(0.2)\n"
        )
        assert done.returncode == 0, done.stderr
