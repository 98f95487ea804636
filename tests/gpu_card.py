"""Run launches of the table's kernels on a real card, with the interface of `gpu_launches`.

Every array goes to a place of its own in the card's memory, between guard bytes that are looked at
afterwards, and addresses that arrays hold are translated. Arrays that may not be written are
compared with what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gpu_launches import of_card
from numpy.typing import NDArray

from strata_nb.addresses import memory_view
from strata_nb.card_backend import USUAL_SHARED_BYTES
from strata_nb.driver import CudaDriver
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.cubins import Cubins
from strata_nb.kernels.gpu.intrinsics.warpgroups import WITH_WARPGROUPS

GUARD = 256  # bytes before and behind each array
PATTERN = 0xA5


class _Copy(NamedTuple):
    """Hold an array of the host, and where it is in the block that goes to the card."""

    array: NDArray[Any]
    offset: int
    is_written: bool


class Card:
    """Hold the first card, and the kernels that were loaded so far."""

    def __init__(self) -> None:
        self.driver = CudaDriver()
        major, minor = self.driver.card_facts(0).capability
        self.has_warpgroups = (major, minor) == WITH_WARPGROUPS
        self._cubins = Cubins(f"sm_{major}{minor}")
        self._functions: dict[str, int] = {}
        self._stream = self.driver.stream_create(0)

    def close(self) -> None:
        self.driver.close()

    def run(
        self,
        kernel: str,
        values: dict[str, Any],
        written: Sequence[str],
        *,
        variant: Any = None,
        most_rows: int = 8,
        tables: Sequence[NDArray[Any]] = (),
        written_tables: Sequence[NDArray[Any]] = (),
    ) -> None:
        """Run one launch as `gpu_launches.simulated` does."""
        named = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        arrays = [(array, name in written) for name, array in named.items()]
        arrays += [(array, False) for array in tables] + [(array, True) for array in written_tables]
        copies, end = [], GUARD
        for array, is_written in arrays:
            copies.append(_Copy(array, end, is_written))
            end += -(-array.nbytes // 256) * 256 + GUARD
        block = self.driver.allocate(end, 0)
        staging = self.driver.allocate_host(end)
        try:
            places = {id(one.array): block + one.offset for one in copies}
            words = {
                name: places[id(value)] if isinstance(value, np.ndarray) else value
                for name, value in values.items()
            }
            before = np.full(end, PATTERN, np.uint8)
            for one in copies:
                data = _translated(one.array, copies, block)
                before[one.offset : one.offset + data.nbytes] = data.reshape(-1).view(np.uint8)
            one = of_card(kernel, words, variant, most_rows)
            after = self._launch(one, most_rows, block, staging, before)
        finally:
            self.driver.free_host(staging)
            self.driver.free(block)
        _check_and_take(kernel, copies, before, after)

    def _launch(
        self,
        launches: Sequence[CardLaunch],
        most_rows: int,
        block: int,
        staging: int,
        before: NDArray[np.uint8],
    ) -> NDArray[np.uint8]:
        driver, size = self.driver, len(before)
        view = memory_view(staging, size)
        view[:] = before
        driver.copy_async(block, staging, size, self._stream)
        for found in launches:
            function = self._function(found)
            if found.shared_bytes > USUAL_SHARED_BYTES:
                driver.set_dynamic_shared_bytes(function, found.shared_bytes)
            driver.launch(
                function,
                found.grid(most_rows),
                (found.kernel.threads, 1, 1),
                found.shared_bytes,
                self._stream,
                found.packed,
                overlaps=True,
            )
        driver.copy_async(staging, block, size, self._stream)
        driver.stream_synchronize(self._stream)
        return view.copy()

    def _function(self, one: CardLaunch) -> int:
        name = one.kernel.name
        if name not in self._functions:
            made = self._cubins([(one.kernel, one.kinds)], None, lambda _: None)[name]
            module = self.driver.load_module(0, made.image)
            self._functions[name] = self.driver.function(module, made.entry)
        return self._functions[name]


def _translated(array: NDArray[Any], copies: Sequence[_Copy], block: int) -> NDArray[Any]:
    """Return an array in which addresses of the other arrays are those on the card."""
    data = np.ascontiguousarray(array)
    if array.dtype != np.int64:
        return data
    data = data.copy()
    for one in copies:
        start = one.array.ctypes.data
        inside = (array >= start) & (array < start + max(1, one.array.nbytes))
        data[inside] += block + one.offset - start
    return data


def _check_and_take(
    kernel: str, copies: Sequence[_Copy], before: NDArray[np.uint8], after: NDArray[np.uint8]
) -> None:
    """Check guard bytes and what is only read; put what was written into the host's arrays."""
    untouched = np.ones(len(before), bool)
    for one in copies:
        if one.is_written:
            untouched[one.offset : one.offset + one.array.nbytes] = False
    wrong = np.flatnonzero(untouched & (before != after))
    assert not wrong.size, f"{kernel} wrote {wrong.size} bytes that are not its own, at {wrong[0]}"
    for one in copies:
        if one.is_written:
            data = after[one.offset : one.offset + one.array.nbytes]
            one.array[...] = data.view(one.array.dtype).reshape(one.array.shape)
