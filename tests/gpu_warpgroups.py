"""What `kernels/gpu/warpgroups.py` does, for `gpu_simulator.py`: products of warpgroups.

A warpgroup reads its matrices as late as it may, behind its wait, or as early, every other one: who
writes too soon what it still reads goes wrong with one of them. What has not been published before
a product begins is an error. So are words that several products read and `keep_words` does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from greenlet import getcurrent
from numpy.typing import NDArray

from strata_nb.kernels.gpu.attention_weights import CHUNK
from strata_nb.kernels.gpu.intrinsics import WARP
from strata_nb.kernels.gpu.intrinsics.warpgroups import (
    BOUNDARY,
    PIECE_BYTES,
    ROW_BYTES,
    WARPGROUP,
    K,
    M,
)

MULTIPLY, ATTEND = "multiply", "attend"  # at which the lanes of a warp meet

# By their identity the words that a lane's products read, once for each product, until they are
# kept.
Words = dict[int, list[Any]]


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
    if found := re.fullmatch(r"(key|value)_products_(\d+)_(\d+)", name):
        columns, depth = int(found[2]), CHUNK * int(found[3])
        if found[1] == "key":
            return _attend(columns, depth, fault, are_keys=True)
        return _attend(depth, columns, fault, are_keys=False)
    if name.startswith("keep_words_"):

        def keep(words: Any) -> None:
            getcurrent().multiplied.pop(id(words), None)

        return keep
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
            lane.unpublished.pop(lane.thread, None)

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


def _overlap(written: Sequence[tuple[int, int]], matrix: range) -> bool:
    return any(begin < matrix.stop and matrix.start < end for begin, end in written)


def _attend(
    cells: int, length: int, fault: type[Exception], *, are_keys: bool
) -> Callable[..., Any]:
    """Return products with the keys or values of so many cells, of heads of a length."""
    panel_bytes = cells * ROW_BYTES

    def multiply(sums: Any, words: Any, place: int) -> Any:
        lane = getcurrent()
        lane.multiplied.setdefault(id(words), []).append(words)
        panels = range(place, place + length // K * panel_bytes, panel_bytes)
        if place % BOUNDARY or panels.stop > len(lane.shared):
            raise fault(f"a matrix at {place} of {len(lane.shared)} shared bytes")

        def matrix() -> NDArray[np.float32]:
            written = [one for one in lane.unpublished.values() if _overlap(one, panels)]
            if written:
                raise fault(f"a product of what {len(written)} threads did not publish")
            found = np.hstack([_matrix(lane.shared, panel, cells) for panel in panels])
            return found.T if are_keys else found

        return lane.parent.switch((ATTEND, (sums, words, place, matrix), 0))

    return multiply


def are_kept(multiplied: Words) -> bool:
    """Return whether no words are left that several products read."""
    return all(len(products) == 1 for products in multiplied.values())


def attended(given: Sequence[Any], fault: type[Exception]) -> list[tuple[np.float32, ...]]:
    """Return what each lane gets of C + A @ B: see `kernels/gpu/intrinsics/attending.py`.

    given   of each lane: numbers of C, words of A, where B is, and what reads it
    """
    if len({place for _, _, place, _ in given}) != 1:
        raise fault("the lanes of a warp multiply several matrices at once")
    matrix = given[0][3]()
    words = np.array([one[1] for one in given], np.int32).view(np.float16).astype(np.float32)
    # (g, t, step, half of the columns, half of the rows, column) to rows and columns
    a = words.reshape(8, 4, -1, 2, 2, 2).transpose(4, 0, 2, 3, 1, 5).reshape(16, -1)
    total = np.array([one[0] for one in given], np.float32).reshape(8, 4, -1, 2, 2)
    total = total.transpose(3, 0, 2, 1, 4).reshape(16, -1).copy()
    with np.errstate(all="ignore"):
        for column, row in zip(a.T, matrix, strict=True):
            total += column[:, None] * row
    found = total.reshape(2, 8, -1, 4, 2).transpose(1, 3, 2, 0, 4).reshape(WARP, -1)
    return [tuple(one) for one in found]


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
