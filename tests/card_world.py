"""A simulated card: the unmodified CUDA driver and backend over host devices.

Memory is moved by `cuda_table_of_host.HostTable`, kernels run in `gpu_simulator`. A card's memory
is host memory there, so a kernel may read whatever the host has mapped: what it may not touch is
for the tests of the kernels themselves.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import gpu_simulator
from cuda_table_of_host import FailingTable, HostTable, Launch

from strata_nb.card_backend import CardBackend
from strata_nb.driver import CudaDriver
from strata_nb.kernels.gpu.operations import GpuKernel

IMAGE = b"simulated"


class AllMemory(gpu_simulator.Memory):
    """Let a kernel use every address."""

    def __init__(self) -> None:
        super().__init__([])

    def check(self, address: int, size: int, use: str) -> tuple[Any, int]:
        if address % size:
            raise gpu_simulator.KernelFault(f"{size} bytes at {address:#x}: not aligned")
        return (ctypes.c_char * size).from_address(address), 0


class Entry(NamedTuple):
    """A kernel's machine code, which is only its name."""

    entry: str
    image: bytes = IMAGE


class Simulated:
    """Compile by remembering the kernel, and run launches of it, each as if it overlapped with the
    one in front."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}
        self._memory = AllMemory()

    def __call__(
        self, wanted: Sequence[tuple[GpuKernel, Sequence[str]]], progress: Any, say: Any
    ) -> Mapping[str, Entry]:
        for kernel, kinds in wanted:
            self.kernels[kernel.name] = self._runner(kernel, kinds)
        return {kernel.name: Entry(kernel.name) for kernel, _ in wanted}

    def _runner(self, kernel: GpuKernel, kinds: Sequence[str]) -> Any:
        layout = "@" + "".join("f" if kind == "float" else "q" for kind in kinds)

        def run(one: Launch) -> None:
            words = struct.unpack(layout, one.arguments)
            gpu_simulator.run(
                kernel.function,
                (one.grid[0], one.grid[1], one.grid[2]),
                one.block[0],
                one.shared_bytes,
                words,
                self._memory,
            )

        return run


@contextmanager
def simulated_card(**table: Any) -> Iterator[CardBackend]:
    """Give a backend on a simulated card, on which nothing may be left in the end.

    table   further arguments of `HostTable`
    """
    with failing_card(**table) as (open_card, _):
        backend = open_card()
        try:
            yield backend
        finally:
            backend.close()


@contextmanager
def failing_card(
    wrap: type[FailingTable] = FailingTable, *, is_lost: bool = False, **table: Any
) -> Iterator[tuple[Callable[[], CardBackend], FailingTable]]:
    """Give what opens a backend, once, and the table that it calls; nothing may be left.

    wrap      what stands before the simulated card, and fails
    is_lost   the card will be lost: what is on it is left to the end of the process
    """
    simulated = Simulated()
    cards = HostTable(1, kernels={IMAGE: simulated.kernels}, **table)
    failing = wrap(cards)
    driver = CudaDriver(failing)
    try:
        yield lambda: CardBackend("cuda", driver, 0, simulated, 1), failing
    finally:
        left = cards.live()
        cards.close()
    assert is_lost or left == {}
    assert cards.refused == []
