"""Bring the tensors of a file, packed, to where kernels read them.

    DenseWeights    what every token needs: one allocation on a device
    HostExperts     the blobs of all experts: one arena of host memory that every device can read

    file --read--> buffer of a thread --pack--> place in the arena
                                      --pack--> staging --copy--> place on the device

The work is cut into pieces of whole groups of rows; threads take them in the order of the file,
without the GIL. They read it and do not use its mapping: the copy, which stays in the core's cache,
hardly shows, while a page that is mapped cannot be let go, and a file that is cut off would end the
process. Memory is touched first where it is packed, by all threads together.

Experts come block by block. Where a block begins and ends is known before, so that the caller can
lay out what it needs meanwhile; as soon as a block is whole it is registered with the driver, and
may be copied to slots while the next ones are read. Dense weights go through a few stagings that
the device can read: while one is copied, the others are filled.

The system keeps what was read of a file in memory, and a second start is much faster for it. Where
the file does not fit beside its packed copy, the threads let it go piece by piece (`keep_cached`,
`cache_fits`): else the system would look for victims while it loads, and might swap.

Whatever ends a load half way, an error in a thread or Ctrl-C, stops all threads after their piece
and leaves nothing allocated, registered or mapped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np

from strata_nb import cpu
from strata_nb import host_pages as pages
from strata_nb.cache.experts import HostArena
from strata_nb.errors import ConfigError, DriverError, OutOfDeviceMemory, RuleViolation
from strata_nb.execution import ExecutionDriver
from strata_nb.gguf import GGUFFile
from strata_nb.loading_layout import (
    ExpertLayout,
    PackedTensor,
    dense_layout,
    is_vector,
    round_up,
)
from strata_nb.loading_pieces import (
    LoadProgress,
    Pieces,
    Reading,
    matrix_pieces,
    vector_pieces,
)

STAGING_BYTES = 32 << 20  # of dense weights, copied by one call each
STAGINGS = 4  # that are filled or copied at a time

# -- what may be loaded ----------------------------------------------------------------------------


def check_memory(
    needs: Mapping[str, int],
    *,
    limit_bytes: int | None = None,
    available_bytes: int | None = None,
) -> list[str]:
    """Refuse what cannot fit into host memory; return warnings about what hardly will.

    needs             bytes for each thing, by its name for people
    limit_bytes       of the machine or container; None: ask the system
    available_bytes   that are free now; None: ask the system. Less than needed is a warning only:
                      some machines get more memory when it is used

    ConfigError with the sum where the needs exceed the limit.
    """
    limit = cpu.memory_limit_bytes() if limit_bytes is None else limit_bytes
    available = cpu.available_memory_bytes() if available_bytes is None else available_bytes
    needed = sum(needs.values())
    if needed > limit:
        lines = [f"{size:18,}  {name}" for name, size in needs.items() if size]
        raise ConfigError(
            "\n".join(
                [
                    "the model does not fit into host memory, in bytes:",
                    *lines,
                    f"{needed:18,}  needed",
                    f"{limit:18,}  in this machine or container",
                    f"{needed - limit:18,}  missing",
                ]
            ),
            hint=(
                "give a smaller --ctx-size"
                if max(needs, key=lambda name: needs[name]).startswith("K/V")
                else "a smaller quantisation of the model, or more memory"
            ),
        )
    if needed > available:
        return [
            f"{needed:,} bytes of host memory are needed and {available:,} are free now: "
            "loading may be slow, or the system may end this process"
        ]
    return []


def cache_fits(file: GGUFFile, needed_bytes: int, *, available_bytes: int | None = None) -> bool:
    """Return whether the system can keep the file in memory beside what is loaded from it."""
    available = cpu.available_memory_bytes() if available_bytes is None else available_bytes
    return needed_bytes + file.size_bytes <= available


# -- loading ---------------------------------------------------------------------------------------


class _Loaded:
    """Own memory: `close` may be called twice."""

    def __init__(self, resources: ExitStack) -> None:
        self._resources = resources
        self._closed = False

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn("loaded weights were never closed", ResourceWarning, stacklevel=1)
            # A driver that was closed before, or belongs to another process, has nothing of it.
            with suppress(DriverError, RuleViolation):
                self.close()

    def close(self) -> None:
        """Free the memory; no work that reads it may be running or be started."""
        self._closed = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class DenseWeights(_Loaded):
    """Own the dense weights of a model on one device: `tensors` by their names in the file."""

    def __init__(
        self,
        tensors: Mapping[str, PackedTensor],
        address: int,
        size_bytes: int,
        resources: ExitStack,
    ) -> None:
        super().__init__(resources)
        self.address = address
        self.tensors = tensors
        self.size_bytes = size_bytes


class HostExperts(_Loaded):
    """Own the blobs of all experts: `arena` says where each is, `layout` what is in it.

    What is in the arena is not there before `finish` returned.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        arena: HostArena,
        reading: Reading,
        driver: ExecutionDriver | None,
        resources: ExitStack,
    ) -> None:
        """`driver`: with which blocks are registered; None: with none."""
        super().__init__(resources)
        self.layout = layout
        self.arena = arena
        self._reading = reading
        self._driver = driver

    @property
    def read_s(self) -> float:
        """How many seconds reading and packing took, once it has finished."""
        return self._reading.read_s

    def finish(self, ready: Callable[[int, int], object] = lambda address, size: None) -> None:
        """Wait for each block of the arena in turn, and register it, if there is a driver for it.

        ready   is then called with its address and bytes, while later blocks are read

        Errors as in `load_dense`, and DriverError where memory is not registered; the arena is of
        no use after one.
        """
        for number, (offset, size) in enumerate(self.layout.blocks):
            self._reading.wait_for(number)
            address = self.arena.address + offset
            if self._driver is not None:
                # After the memory was touched: a driver would touch it all in one thread.
                self._driver.register_host(address, size)
                self._resources.callback(self._driver.unregister_host, address)
            ready(address, size)
        self._reading.close()


def load_dense(
    file: GGUFFile,
    names: Sequence[str],
    driver: ExecutionDriver,
    device: int,
    *,
    threads: int,
    keep_cached: bool,
    progress: LoadProgress,
) -> DenseWeights:
    """Load matrices and vectors into one allocation of a device.

    Each tensor begins at a multiple of 256 bytes. Matrices are packed. A vector (a tensor whose
    dimensions but the last are 1) becomes float32, of whatever type it is, since kernels take no
    other.

    FileFormatError where the file ends early or cannot be read; OutOfDeviceMemory.
    """
    offsets, size = dense_layout(file, names)
    with ExitStack() as undo:
        address = driver.allocate(size, device)
        undo.callback(driver.free, address)
        tensors = {
            name: PackedTensor(address + offset, kind, shape)
            for name, (offset, kind, shape) in offsets.items()
        }
        pieces: list[Pieces] = []
        for name, placed in tensors.items():
            tensor = file.tensors[name]
            if is_vector(tensor):
                pieces.append(vector_pieces(tensor, placed.address))
            else:
                targets = np.array([placed.address])
                pieces.append(matrix_pieces(tensor, targets, np.zeros_like(targets)))
        runs = _cut_runs(pieces)
        with ExitStack() as work:
            room = max((end - start for start, end in runs), default=0)
            stagings: list[int] = []
            for _ in range(min(STAGINGS, len(runs))):
                stagings.append(driver.allocate_host(room))
                work.callback(driver.free_host, stagings[-1])
            stream = driver.stream_create(device)
            work.callback(driver.stream_destroy, stream)
            reading = Reading(
                file,
                _staged(pieces, runs, stagings),
                len(runs),
                threads=threads,
                ahead=STAGINGS,
                keep_cached=keep_cached,
                progress=progress,
            )
            work.callback(reading.close)
            for number, (start, end) in enumerate(runs):
                reading.wait_for(number)
                driver.copy_async(start, stagings[number % STAGINGS], end - start, stream)
                driver.stream_synchronize(stream)
                reading.allow(number + 1)
        return DenseWeights(tensors, address, size, undo.pop_all())


def _cut_runs(pieces: Sequence[Pieces]) -> list[tuple[int, int]]:
    """Cut what pieces fill, in the order of their targets, into runs (start, end) that fit a
    staging; a larger piece is a run by itself."""
    runs: list[tuple[int, int]] = []
    for tensor in pieces:
        for target, end in zip(tensor.targets.tolist(), tensor.target_ends.tolist(), strict=True):
            if runs and end - runs[-1][0] <= STAGING_BYTES:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((target, end))
    return runs


def _staged(
    pieces: Sequence[Pieces], runs: Sequence[tuple[int, int]], stagings: Sequence[int]
) -> list[Pieces]:
    """Return the pieces with the run of each as its group, and its staging as their target."""
    starts = np.array([start for start, _ in runs])
    moved = np.array([stagings[number % STAGINGS] for number in range(len(runs))]) - starts
    staged: list[Pieces] = []
    for tensor in pieces:
        groups = np.searchsorted(starts, tensor.targets, side="right") - 1
        staged.append(replace(tensor, groups=groups, targets=tensor.targets + moved[groups]))
    return staged


def load_experts(
    file: GGUFFile,
    layers: Sequence[Mapping[str, str]],
    layout: ExpertLayout,
    driver: ExecutionDriver,
    *,
    threads: int,
    keep_cached: bool,
    progress: LoadProgress,
) -> HostExperts:
    """Load all experts into an arena of host memory, registered with the driver.

    `layout` is what `expert_layout` gave for `layers`. Errors as in `load_dense`, OutOfDeviceMemory
    where the system refuses the memory.
    """
    with ExitStack() as undo:
        experts = begin_experts(
            file,
            layers,
            layout,
            driver,
            threads=threads,
            keep_cached=keep_cached,
            progress=progress,
        )
        undo.callback(experts.close)
        experts.finish()
        undo.pop_all()
        return experts


def begin_experts(
    file: GGUFFile,
    layers: Sequence[Mapping[str, str]],
    layout: ExpertLayout,
    driver: ExecutionDriver | None,
    *,
    threads: int,
    keep_cached: bool,
    progress: LoadProgress,
) -> HostExperts:
    """Begin what `load_experts` does, and leave the rest to `finish` of what this returns.

    Where each blob will be is known at once.
    """
    with ExitStack() as undo:
        address = _map_arena(layout.size_bytes, undo)
        starts = [start for start, _ in layout.blocks]
        pieces: list[Pieces] = []
        for number, layer in enumerate(layers):
            offsets = layout.offsets[number]
            blocks = np.searchsorted(starts, offsets, side="right") - 1
            for part, name in layer.items():
                targets = address + offsets + layout.parts[number][part].offset
                pieces.append(matrix_pieces(file.tensors[name], targets, blocks))
        reading = Reading(
            file,
            pieces,
            len(layout.blocks),
            threads=threads,
            ahead=None,
            keep_cached=keep_cached,
            progress=progress,
        )
        undo.callback(reading.close)
        arena = HostArena(address, layout.size_bytes, layout.offsets)
        return HostExperts(layout, arena, reading, driver, undo.pop_all())


def _map_arena(size: int, undo: ExitStack) -> int:
    """Return the address of `size` bytes that begin on a large page; leave in `undo` how to end."""
    whole = size + pages.LARGE_PAGE_BYTES  # what lies before and behind is never touched
    try:
        start = pages.allocate(whole)
        undo.callback(pages.give_back, start, whole)
        address = round_up(start, pages.LARGE_PAGE_BYTES)
        pages.advise_large(address, size)
    except pages.PagesError as error:
        raise OutOfDeviceMemory(
            "map host memory for experts",
            error.errno or 0,
            error.strerror or "system call failed",
            numbers={"bytes": whole, "available": cpu.available_memory_bytes()},
            hint="end other programs, or raise the limit of this one (ulimit -v)",
        ) from error
    return address
