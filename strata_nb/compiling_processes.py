"""Compile functions in several processes at once, into the cache on disk that all of them read.

Numba holds the GIL while it compiles, so threads would gain nothing. The processes are fresh ones
that run a module of this package: not forks, because this process has threads, and not those of
multiprocessing, which run the user's program again in every child.

    queue     a pipe with one byte a function, its number; each process, this one too, takes the
              next byte when it is done with the last function
    finished  a pipe into which a worker writes a byte for each function that it compiled; it ends
              when all workers have ended, however they did
    stdin     of a worker: what it is to do. This process keeps it open and never writes to it
              again; at its end, and so at the end of this process, the worker ends too

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
from contextlib import suppress
from pathlib import Path

from strata_nb.compiling import Compiled, cache_folder, saving
from strata_nb.progress import Progress

MOST_PROCESSES = 8  # the longest function takes an eighth of the time of all
_MOST_FUNCTIONS = 256  # numbers of a byte; further ones are compiled when they are used
_PATIENCE_S = 60.0  # without a word from any worker, before this process goes on without them
_LAST_WORDS_S = 5.0  # that a worker may take to end


def compile_together(
    functions: Sequence[Compiled],
    processes: int,
    module: str,
    request: bytes,
    progress: Progress | None = None,
) -> int:
    """Compile functions, those that take long first, in so many processes, of which this is one.

    module    of this package or of the caller, run as a worker: it calls `serve`
    request   tells the module which functions these are

    Returns how many of the other processes could not be started or ended before their time.
    ConfigError if the machine code cannot be written to disk. Whatever happens, the workers have
    ended when this returns or raises.
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
            task = pickle.dumps((str(cache_folder()), [one.name for one in functions], request))
            for _ in range(processes - 1 if sys.executable else 0):
                workers.append(_start(module, queue, report, task))
        except OSError:
            pass  # no more processes, or none that listens: those that there are share the work
        finally:
            os.close(queued)
            os.close(report)  # the workers' own remain
        while number := os.read(queue, 1):
            functions[number[0]].made()
            count(1)
            if _readable(finished, 0):
                count(len(os.read(finished, len(functions))))
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
    return processes - 1 - sum(status in (None, 0) for status in statuses)


def _start(module: str, queue: int, report: int, task: bytes) -> subprocess.Popen[bytes]:
    """Start a worker; it finds modules where this process does, and nothing in the folder."""
    paths = [str(Path(path or ".").absolute()) for path in sys.path]
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(queue), str(report)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        pass_fds=(queue, report),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=None if os.environ.get("STRATA_NB_DEBUG") == "1" else subprocess.DEVNULL,
        bufsize=0,
        process_group=0,  # Ctrl-C goes to this process, which ends the worker
    )
    if worker.stdin is None:  # it was asked for
        raise AssertionError("a worker without a pipe")
    with suppress(BrokenPipeError):  # it has ended, and is waited for like the others
        worker.stdin.write(len(task).to_bytes(4, "little") + task)
    return worker


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


def serve(find: Callable[[bytes], Iterable[Compiled]]) -> None:
    """Be a worker: compile what the queue says.

    `find` makes the functions of a request; those with the names that are wanted must be among
    them. Where the cache is not the parent's, there is nothing to do.
    """
    queue, report = int(sys.argv[1]), int(sys.argv[2])
    task = _read(int.from_bytes(_read(4), "little"))
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    folder, names, request = pickle.loads(task)
    if folder != str(cache_folder()):
        sys.exit(f"the cache of a worker is {cache_folder()}, not {folder}")
    functions = {one.name: one for one in find(request)}
    while number := os.read(queue, 1):
        functions[names[number[0]]].made()
        os.write(report, b".")
    os._exit(0)  # at once: the parent waits, and nothing is left to be tidied up


def _read(size: int) -> bytes:
    """Read so many bytes of stdin and none behind them; SystemExit where it ends before."""
    found = b""
    while len(found) < size:
        some = os.read(0, size - len(found))
        if not some:
            sys.exit("the parent ended")
        found += some
    return found


def _end_with_the_parent() -> None:
    os.read(0, 1)
    with saving:  # what is being written is written to its end
        os._exit(1)
