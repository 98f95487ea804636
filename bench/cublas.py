"""Time products of cuBLAS in bfloat16, which a card's own kernels are measured against.

The library is that of the toolkit, called directly: nothing is installed for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
from card_graphs import REPLAYS

from strata_nb.card_backend import CardBackend

_NAMES = ("libcublas.so.13", "libcublas.so.12")
_PLAIN, _TRANSPOSED = 0, 1
_BFLOAT16, _COMPUTE_F32, _DEFAULT = 14, 68, -1


class Cublas:
    """Hold a handle of cuBLAS on a card's stream, where there is the library."""

    def __init__(self, card: CardBackend) -> None:
        self._card = card
        self._library = _library()
        self._handle = ctypes.c_void_p()
        if self._library:
            self._check("create", self._library.cublasCreate_v2(ctypes.byref(self._handle)))
            stream = ctypes.c_void_p(card._stream)
            self._check("stream", self._library.cublasSetStream_v2(self._handle, stream))

    def _check(self, what: str, status: int) -> None:
        if status:
            raise SystemExit(f"cuBLAS: {what} failed with status {status}")

    def tops(self, products: Sequence[tuple[int, int, int]]) -> float | None:
        """Return 1e12 operations a second of products one after the other; None without the
        library.

        products   rows, outputs and values: (rows, values) times (outputs, values) transposed
        """
        if self._library is None:
            return None
        operations = sum(2 * rows * outputs * values for rows, outputs, values in products)
        return 1e-12 * operations / sum(self._seconds(*one) for one in products)

    def _seconds(self, rows: int, outputs: int, values: int) -> float:
        """Return the median of REPLAYS."""
        driver, device = self._card.driver, self._card.device
        calls, stream = self._card._card, self._card._stream
        rng = np.random.default_rng(0)
        part = rng.standard_normal(1 << 16).astype(np.float32).view(np.uint32) >> 16
        with ExitStack() as made:

            def room(count: int) -> int:
                address: int = driver.allocate(2 * count, device)
                made.callback(driver.free, address)
                self._card.send(address, np.resize(part.astype(np.uint16), count))
                return address

            w, x, y = room(outputs * values), room(rows * values), room(rows * outputs)
            events = [self._card._timed_event(made) for _ in range(REPLAYS + 1)]
            for event in (None, None, *events):
                if event is not None:
                    calls.event_record(event, stream)
                self._multiply(w, x, y, rows, outputs, values)
            calls.stream_synchronize(stream)
            seconds = [calls.event_elapsed_s(*pair) for pair in pairwise(events)]
        return float(np.median(seconds))

    def _multiply(self, w: int, x: int, y: int, rows: int, outputs: int, values: int) -> None:
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        pointer, size = ctypes.c_void_p, ctypes.c_int
        status = self._library.cublasGemmEx(
            self._handle,
            _TRANSPOSED,
            _PLAIN,
            size(outputs),
            size(rows),
            size(values),
            ctypes.byref(one),
            pointer(w),
            _BFLOAT16,
            size(values),
            pointer(x),
            _BFLOAT16,
            size(values),
            ctypes.byref(zero),
            pointer(y),
            _BFLOAT16,
            size(outputs),
            _COMPUTE_F32,
            _DEFAULT,
        )
        self._check("a product", status)


def _library() -> Any:
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
