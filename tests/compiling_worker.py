"""A worker for tests, and the small functions that it compiles."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from strata_nb.compiling import Compiled, cache_folder
from strata_nb.compiling_processes import serve

COUNT = 4


def functions() -> list[Compiled]:
    """Return functions of a number that add 0, 1, ... to it, not compiled yet."""
    return [Compiled("int64(int64)", _adding(number)) for number in range(COUNT)]


def _adding(number: int) -> Callable[[int], Any]:
    def add(x: int) -> int:
        return x + number

    add.__qualname__ = f"add_{number}"
    return add


def _find(request: bytes) -> Iterator[Compiled]:
    """Do what a test asks for, at the moment when a worker would begin."""
    if request == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    if request == b"sleep":
        time.sleep(600)
    if request == b"fail":
        raise RuntimeError("as the test asks")
    yield from functions()


if __name__ == "__main__":
    serve(_find, cache_folder)
