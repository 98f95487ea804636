"""Compile in several processes at once, into a folder of machine code that all of them read.

Numba holds the GIL while it compiles, so threads would gain nothing. The processes are fresh ones
that run a module of this package: not forks, because this process has threads, and not those of
multiprocessing, which run the user's program again in every child.

    task      a file that has no name: what workers are to do
    queue     a pipe with one byte a function, its number; each process, this one too, takes the
              next byte when it is done with the last function
    finished  a pipe into which a worker writes a byte for each function that it compiled; it ends
              when all workers have ended, however they did
    stdin     of a worker: a pipe that this process keeps open and never writes to; at its end, and
              so at the end of this process, the worker ends too

Nothing depends on a worker: what none of them has compiled in the end is compiled here.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Protocol

from strata_nb import cpu
from strata_nb.compiling import saving
from strata_nb.progress import Progress, Say

_PROCESS_BYTES = 400 << 20  # that a process takes, somewhat more than measured
_MOST_FUNCTIONS = 256  # numbers of a byte; further ones are compiled when they are used
_PATIENCE_S = 60.0  # without a word from any worker, before this process goes on without them
_LAST_WORDS_S = 5.0  # that a worker may take to end


class Kept(Protocol):
    """A function whose machine code is kept on disk, under a name unlike that of any other."""

    @property
    def name(self) -> str: ...

    def is_on_disk(self) -> bool: ...

    def made(self) -> object:
        """Compile it, unless it is there; ConfigError if it cannot be written to disk."""


def processes_for(functions: int, most: int) -> int:
    """Return how many processes shall compile so many functions, this one counted.

    One for each core, where it has two functions at least to earn its start, and memory.
    """
    room = cpu.available_memory_bytes() // _PROCESS_BYTES
    return max(1, min(most, cpu.physical_cores(), functions // 2, room))


def compile_together(
    functions: Sequence[Kept],
    processes: int,
    module: str,
    request: bytes,
    folder: Path,
    *,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> None:
    """Compile functions, those that take long first, in so many processes, of which this is one.

    module    of this package or of the caller, run as a worker: it calls `serve`
    request   tells the module which functions these are
    folder    where they are kept

    `say` is told of processes that could not be started, or ended before their time. ConfigError if
    the machine code cannot be written to disk. Whatever happens, the workers have ended when this
    returns or raises.
    """
    functions = functions[:_MOST_FUNCTIONS]
    done = 0

    def count(number: int) -> None:
        nonlocal done
        done += number
        if progress is not None:
            progress(done, len(functions))

    count(0)
    queue, queued = os.pipe()
    finished, report = os.pipe()
    workers: list[subprocess.Popen[bytes]] = []
    try:
        try:
            os.write(queued, bytes(range(len(functions))))
            with TemporaryFile() as task:
                pickle.dump((str(folder), [one.name for one in functions], request), task)
                task.flush()
                for _ in range(processes - 1 if sys.executable else 0):
                    workers.append(_start(module, queue, report, task))
        except OSError:
            pass  # no more processes: those that there are share the work
        finally:
            os.close(queued)
            os.close(report)  # the workers' own remain
        while number := os.read(queue, 1):
            functions[number[0]].made()
            count(1)
            if _readable(finished, 0) and (others := len(os.read(finished, len(functions)))):
                count(others)
        while done < len(functions) and _readable(finished, _PATIENCE_S):
            compiled = len(os.read(finished, len(functions)))
            if not compiled:
                break
            count(compiled)
        if done < len(functions):
            _end(workers)
        # Where all is done, a worker may still be about to begin, and is not waited for.
        statuses = [worker.poll() for worker in workers]
    finally:
        _end(workers)
        os.close(queue)
        os.close(finished)
    for one in functions:
        if not one.is_on_disk():
            one.made()
            count(1)
    failed = processes - 1 - sum(status in (None, 0) for status in statuses)
    if failed:
        say(
            f"{failed} of {processes} processes that compile did not do their part, which the "
            "others did; STRATA_NB_DEBUG=1 shows what they say"
        )


def _start(module: str, queue: int, report: int, task: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a worker; it finds modules where this process does, and nothing in the folder."""
    paths = [str(Path(path or ".").absolute()) for path in sys.path]
    files = queue, report, task.fileno()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, files)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        pass_fds=files,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=None if os.environ.get("STRATA_NB_DEBUG") == "1" else subprocess.DEVNULL,
        bufsize=0,
        process_group=0,  # Ctrl-C goes to this process, which ends the worker
    )


def _end(workers: Iterable[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.stdin is not None:
            worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _readable(pipe: int, seconds: float) -> bool:
    """Wait until a pipe has bytes or has ended."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


# -- the worker's side -----------------------------------------------------------------------------


def serve(find: Callable[[bytes], Iterable[Kept]], folder: Callable[[], Path]) -> None:
    """Be a worker: compile what the queue says.

    `find` makes the functions of a request; those with the names that are wanted must be among
    them. Where `folder` is not the parent's, there is nothing to do.
    """
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    queue, report, task = map(int, sys.argv[1:])
    expected, names, request = pickle.loads(_contents(task))
    if expected != str(folder()):
        sys.exit(f"the cache of a worker is {folder()}, not {expected}")
    functions = {one.name: one for one in find(request)}
    while number := os.read(queue, 1):
        functions[names[number[0]]].made()
        os.write(report, b".")
    os._exit(0)  # at once: the parent waits, and nothing is left to be tidied up


def _contents(file: int) -> bytes:
    """Read a file whose position this process shares with others."""
    found = b""
    while some := os.pread(file, 1 << 20, len(found)):
        found += some
    return found


def _end_with_the_parent() -> None:
    os.read(0, 1)
    with saving:  # what is being written is written to its end
        os._exit(1)
