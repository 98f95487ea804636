"""Read the host's memory and do nothing with it: the limit of every decode step.

Nothing is computed but a sum, so no loop over the same bytes can be faster by much.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from strata_nb.compiling import compiled
from strata_nb.kernels.host.vectors import load_integers, no_integers
from strata_nb.raw_memory import prefetch, store

STEP_BYTES = 256
PASSES = 5  # over the memory; the first ones may find a processor that sleeps
SUM_BYTES = 64
AHEAD_BYTES = 8192


@compiled("void(int64,int64,int64)")
def read(place: int, size: int, result: int) -> None:
    """Read memory, 256 bytes at a time; the sum keeps the compiler from leaving it out.

    It asks for memory ahead, as the kernels do: without that it is no limit.
    """
    first, second, third, fourth = no_integers(), no_integers(), no_integers(), no_integers()
    for offset in range(0, size - 255, 256):
        for line in range(0, 256, 64):
            prefetch(place + offset + AHEAD_BYTES + line)
        first = first + load_integers(place + offset)
        second = second + load_integers(place + offset + 64)
        third = third + load_integers(place + offset + 128)
        fourth = fourth + load_integers(place + offset + 192)
    store(result, (first + second) + (third + fourth))


def read_passes(memory: NDArray[np.uint8], threads: int, passes: int = PASSES) -> list[float]:
    """Return the seconds of each pass in which `threads` threads together read `memory` once."""
    sums = np.empty((threads, SUM_BYTES), np.uint8)
    steps = memory.size // STEP_BYTES

    def part(thread: int, threads: int) -> None:
        first, last = (steps * number // threads * STEP_BYTES for number in (thread, thread + 1))
        read(memory.ctypes.data + first, last - first, sums[thread].ctypes.data)

    return [seconds(part, threads) for _ in range(passes)]


def seconds(work: Callable[[int, int], None], threads: int) -> float:
    """Return the seconds that the threads need together; each calls `work(thread, threads)`."""
    workers = [
        threading.Thread(target=work, args=(number, threads)) for number in range(1, threads)
    ]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    work(0, threads)
    for worker in workers:
        worker.join()
    return time.perf_counter() - start
