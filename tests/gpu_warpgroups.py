"""What `kernels/gpu/warpgroups.py` does, for `gpu_simulator.py`: products of warpgroups.

A warpgroup reads its matrices as late as it may, behind its wait, or as early, every other one: who
writes too soon what it still reads goes wrong with one of them. What has not been published before
a product begins is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from greenlet import getcurrent
from numpy.typing import NDArray

from strata_nb.kernels.gpu.intrinsics import WARP
from strata_nb.kernels.gpu.intrinsics.warpgroups import (
    BOUNDARY,
    PIECE_BYTES,
    ROW_BYTES,
    WARPGROUP,
    K,
    M,
)

MULTIPLY = "multiply"  # at which the lanes of a warp meet


class Products:
    """Hold a lane's sums, and products that have begun, the oldest first."""

    def __init__(self, rows: int) -> None:
        self.sums = np.zeros((rows // 8, 2, 2), np.float32)  # eights of B, rows of A, rows of B
        self.begun: list[Callable[[], None]] = []


def meaning(name: str, fault: type[Exception]) -> Callable[..., Any] | None:
    """Return what an intrinsic of warpgroups does; None for others."""
    if found := re.fullmatch(r"begin_sums_(\d+)", name):
        rows = int(found[1])

        def begin() -> None:
            getcurrent().products = Products(rows)

        return begin
    if found := re.fullmatch(r"multiply_(\d+)", name):
        return _multiply(int(found[1]), fault)
    if found := re.fullmatch(r"store_sums_(\d+)_(\d+)", name):
        return _store(*map(int, found.groups()), fault)
    if name in ("await_products", "await_older_products"):
        left = 1 if name == "await_older_products" else 0

        def wait() -> None:
            begun = getcurrent().products.begun
            while len(begun) > left:
                begun.pop(0)()

        return wait
    if name == "publish":

        def publish() -> None:
            lane = getcurrent()
            lane.unpublished.discard(lane.thread)

        return publish
    return _PLAIN.get(name)


def _matrix(shared: bytearray, place: int, rows: int) -> NDArray[np.float32]:
    """Return a matrix in shared memory, its pieces in their order."""
    found = np.frombuffer(shared, np.float16, rows * K, place).reshape(rows, -1, PIECE_BYTES // 2)
    order = np.arange(ROW_BYTES // PIECE_BYTES) ^ (np.arange(rows) & 7)[:, None]
    return np.take_along_axis(found, order[:, :, None], 1).reshape(rows, K).astype(np.float32)


def _multiply(rows: int, fault: type[Exception]) -> Callable[..., Any]:
    def multiply(a: int, b: int) -> None:
        lane = getcurrent()
        lane.parent.switch((MULTIPLY, (a, b), 0))
        size = len(lane.shared)
        if a % BOUNDARY or b % BOUNDARY or max(a + M * ROW_BYTES, b + rows * ROW_BYTES) > size:
            raise fault(f"a product of matrices at {a} and {b} of {size} shared bytes")
        if lane.unpublished:
            raise fault(f"a product of what {len(lane.unpublished)} threads have not published")
        products: Products = lane.products
        first = 16 * (lane.thread % WARPGROUP // WARP) + (lane.thread % WARP >> 2)
        own = 2 * (lane.thread & 3)

        def add() -> None:
            matrix = _matrix(lane.shared, b, rows).reshape(rows // 8, 8, K)[:, own : own + 2]
            two = _matrix(lane.shared, a, M)[[first, first + 8]]
            with np.errstate(all="ignore"):
                products.sums[: rows // 8] += np.einsum("mk,enk->emn", two, matrix)

        if lane.thread // WARPGROUP % 2:
            add()
            products.begun.append(lambda: None)
        else:
            products.begun.append(add)

    return multiply


def _store(rows: int, apart: int, fault: type[Exception]) -> Callable[..., Any]:
    def store(place: int) -> None:
        lane = getcurrent()
        if lane.products.begun:
            raise fault("sums are stored before their products have ended")
        for eight, of_a, of_b in np.ndindex(rows // 8, 2, 2):
            at = place + 4 * (apart * (8 * eight + of_b) + 8 * of_a)
            lane.shared[at : at + 4] = lane.products.sums[eight, of_a, of_b].tobytes()

    return store


def _as_halves(*words: int) -> list[NDArray[np.float64]]:
    return [np.array([one], np.int32).view(np.float16).astype(np.float64) for one in words]


def _word(halves: NDArray[np.float64]) -> int:
    return int(halves.astype(np.float16).view(np.int32)[0])


def _add(a: int, b: int) -> int:
    x, y = _as_halves(a, b)
    return _word(x + y)


def _fma(a: int, b: int, c: int) -> int:
    x, y, z = _as_halves(a, b, c)  # in float64 all of it is exact
    return _word(x * y + z)


_PLAIN: dict[str, Callable[..., Any]] = {
    "add_halves": _add,
    "fma_halves": _fma,
    "nearly_divided": lambda a, b: np.float32(a / b),
}
