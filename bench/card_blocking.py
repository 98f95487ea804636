"""Time each call of a card's driver while a kernel runs: which of them wait until it ends?

Usage:
  card_blocking.py [options]
  card_blocking.py --help

Options:
  --device=TEXT    as --device has it [default: cuda:0]
  --spin-ms=N      how long the kernel runs, about [default: 50]
  --rounds=N       in which each call is made once [default: 5]
  -o FILE          write the figures here, not to bench/results/card_blocking.json

A card may wait for the host within a window (for the threads that compute missed experts). Whatever
those threads wait for must then not be a call that waits for the card. So a kernel of one thread
follows a pointer for a while, a second thread makes one call, and its time is compared with what
was left of the kernel: a call that took longer than half of that waited. Calls are made on memory
that the kernel does not use, and on a stream of their own, unless named otherwise.
"""

from __future__ import annotations

import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from card_graphs import store, whole_number  # noqa: E402 - bench/ is no package

from strata_nb.addresses import memory_view  # noqa: E402
from strata_nb.driver import CudaDriver, no_such_card  # noqa: E402
from strata_nb.errors import UnsupportedDevice  # noqa: E402
from strata_nb.kernels.gpu.cubins import Cubins  # noqa: E402
from strata_nb.kernels.gpu.intrinsics import (  # noqa: E402
    await_previous,
    load_i64,
    store_i64,
    thread_index,
)
from strata_nb.kernels.gpu.operations import GpuKernel  # noqa: E402

CHUNK = 16 << 20
WAITED = 0.5  # of what was left of the kernel


def _spin(place: int, steps: int) -> None:
    await_previous()
    if thread_index() == 0:
        at, step = place, 0
        while step < steps:
            at = load_i64(at)  # its own address: each load waits for the one before it
            step += 1
        store_i64(place, at)


SPIN = GpuKernel("spin", _spin, 32, lambda _, __: (1, 1, 1))


@dataclass(frozen=True, slots=True)
class Blocked:
    """Say how long a call took while a kernel ran.

    seconds   of the call, in each round
    left      seconds that the kernel went on for when the call began, at most
    """

    name: str
    seconds: tuple[float, ...]
    left: tuple[float, ...]

    @property
    def waited(self) -> bool:
        """Whether in most rounds it took more than half of what was left of the kernel."""
        shares = [a / b for a, b in zip(self.seconds, self.left, strict=True)]
        return statistics.median(shares) > WAITED


class Spinner:
    """Keep a card busy with one thread for a time, on a stream of its own."""

    def __init__(self, driver: CudaDriver, device: int, owner: ExitStack) -> None:
        major, minor = driver.card_facts(device).capability
        made = Cubins(f"sm_{major}{minor}")([(SPIN, ("address", "integer"))], None, _no_words)
        module = driver.load_module(device, made[SPIN.name].image)
        self._driver, self._function = driver, driver.function(module, made[SPIN.name].entry)
        self.stream = driver.stream_create(device)
        self._place = driver.allocate(64, device)
        owner.callback(driver.free, self._place)
        staging = driver.allocate_host(64)
        owner.callback(driver.free_host, staging)
        _array(staging)[0] = self._place
        driver.copy_async(self._place, staging, 64, self.stream)
        driver.stream_synchronize(self.stream)
        self.steps = 1 << 16

    def start(self) -> None:
        words = struct.pack("@qq", self._place, self.steps)
        self._driver.launch(self._function, (1, 1, 1), (32, 1, 1), 0, self.stream, words)

    def wait(self) -> None:
        self._driver.stream_synchronize(self.stream)

    def last(self, seconds: float) -> None:
        """Let it run for about so long from now on."""
        for _ in range(2):  # the first is slower
            begin = time.perf_counter()
            self.start()
            self.wait()
            taken = time.perf_counter() - begin
            if taken < seconds / 2:
                self.steps = int(self.steps * seconds / taken)
        self.start()
        self.wait()


def _no_words(_: str) -> None:
    return None


def _array(address: int) -> NDArray[np.int64]:
    return memory_view(address, 64).view(np.int64)


def calls_of(
    driver: CudaDriver, device: int, spinner: Spinner, owner: ExitStack
) -> dict[str, Callable[[], Any]]:
    """Return the calls to time, by name. Each leaves something that `owner` or the next frees."""
    stream = driver.stream_create(device)
    event, of_kernel = driver.event_create(device), driver.event_create(device)
    plain = driver.allocate(CHUNK, device)
    owner.callback(driver.free, plain)
    pinned = driver.allocate_host(CHUNK)
    owner.callback(driver.free_host, pinned)
    size = max(CHUNK, driver.granularity(device, "recommended"))
    space = driver.reserve(size)
    owner.callback(driver.address_free, space, size)
    pages = np.zeros(CHUNK + 4096, np.uint8)
    owner.callback(pages.fill, 0)  # it lives as long as the calls
    host = int(pages.ctypes.data) + -int(pages.ctypes.data) % 4096
    made: list[int] = []
    allocated: list[int] = []
    of_host: list[int] = []

    def event_record_there() -> None:
        driver.event_record(of_kernel, spinner.stream)

    return {
        "mem_info": lambda: driver.mem_info(device),
        "event_record": lambda: driver.event_record(event, stream),
        "event_record behind the kernel": event_record_there,
        "event_query behind the kernel": lambda: driver.event_query(of_kernel),
        "event_wait": lambda: driver.event_wait(stream, event),
        "copy_async pinned to card": lambda: driver.copy_async(plain, pinned, CHUNK, stream),
        "copy_async behind the kernel": lambda: driver.copy_async(
            plain, pinned, 4096, spinner.stream
        ),
        "fill_async": lambda: driver.fill_async(plain, 0, CHUNK, stream),
        "launch behind the kernel": spinner.start,
        "create": lambda: made.append(driver.create(size, device)),
        "map": lambda: driver.map(space, size, made[-1]),
        "set_access": lambda: driver.set_access(space, size, [device]),
        "unmap": lambda: driver.unmap(space, size),
        "release": lambda: driver.release(made.pop()),
        "allocate": lambda: allocated.append(driver.allocate(CHUNK, device)),
        "free": lambda: driver.free(allocated.pop()),
        "allocate_host": lambda: of_host.append(driver.allocate_host(CHUNK)),
        "free_host": lambda: driver.free_host(of_host.pop()),
        "register_host": lambda: driver.register_host(host, CHUNK),
        "unregister_host": lambda: driver.unregister_host(host),
    }


def measured(driver: CudaDriver, device: int, seconds: float, rounds: int) -> list[Blocked]:
    """Return how long each call took while a kernel of so many seconds ran."""
    with ExitStack() as owner:
        spinner = Spinner(driver, device, owner)
        spinner.last(seconds)
        calls = calls_of(driver, device, spinner, owner)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(_while_it_runs(spinner, call))
        return [Blocked(name, *zip(*pairs, strict=True)) for name, pairs in taken.items()]


def _while_it_runs(spinner: Spinner, call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of a call that a second thread makes, and of the kernel from then on."""
    found: list[float] = []
    failed: list[BaseException] = []

    def second() -> None:
        begin = time.perf_counter()
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            failed.append(error)
        found.append(time.perf_counter() - begin)

    thread = threading.Thread(target=second)
    spinner.start()
    begin = time.perf_counter()
    thread.start()
    spinner.wait()
    left = time.perf_counter() - begin
    thread.join()
    if failed:
        raise failed[0]
    spinner.wait()  # for what the call put behind the kernel
    return found[0], left


def main() -> None:
    arguments = docopt(__doc__)
    kind, _, number = str(arguments["--device"]).partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise SystemExit(f"--device {arguments['--device']}: not usable; cuda or cuda:N")
    device = int(number or 0)
    seconds = whole_number(arguments, "--spin-ms") / 1e3
    rounds = whole_number(arguments, "--rounds")
    try:
        opened = CudaDriver()
    except UnsupportedDevice as error:
        raise SystemExit(f"{error}") from error
    with closing(opened) as driver:
        if device >= driver.device_count:
            raise SystemExit(f"{no_such_card(device, driver.device_count)}")
        found = measured(driver, device, seconds, rounds)
    for one in found:
        word = "waits" if one.waited else ""
        print(f"{one.name:32} {statistics.median(one.seconds) * 1e6:9.0f} us  {word}")
    figures = {
        one.name: {
            "n": len(one.seconds),
            "median_us": statistics.median(one.seconds) * 1e6,
            "most_us": max(one.seconds) * 1e6,
            "kernel_went_on_us": statistics.median(one.left) * 1e6,
            "waits": one.waited,
        }
        for one in found
    }
    store(
        "card_blocking",
        "seconds of driver calls while a kernel runs",
        arguments,
        {"spin_ms": seconds * 1e3, "calls": figures},
    )


if __name__ == "__main__":
    main()
