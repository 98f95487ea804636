"""The K/V of one sequence, kept in the type that was asked for and grown by doubling."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from strata_nb.errors import ConfigError
from strata_nb.formats import CacheType, cache_type
from strata_nb.kernels.reference import Floats, Integers, dequantise_kv, quantise_kv
from strata_nb.models.description import Description

FIRST_CELLS = 64

Cell = TypeVar("Cell", bound=np.generic)


class ReferenceState:
    """Hold keys and values of the cells 0 .. length - 1, for every layer.

    `append` writes behind `length` and leaves it alone; `advance` then counts the new cells for all
    layers at once. So a forward that is interrupted changes nothing that a later one could see.
    """

    def __init__(
        self,
        model: Description,
        ctx_size: int,
        type_k: str,
        type_v: str,
        routes: npt.NDArray[np.int16] | None = None,
    ) -> None:
        """`routes` (layers, ctx_size, top_k): the experts that each position uses."""
        model.check_context(ctx_size)
        self._routes = routes
        k, v, heads = cache_type(type_k), cache_type(type_v), model.kv_heads
        self.ctx_size = ctx_size
        self.length = 0
        self._keys = [_store(k, heads, model.key_length) for _ in range(model.layers)]
        self._values = [_store(v, heads, model.value_length) for _ in range(model.layers)]

    def append(self, layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        """Write the keys and values of new rows, both (rows, K/V heads, head length);
        they must fit into the context.

        Returns those of all cells up to the last new one, as they read back from the cache:
        (K/V heads, cells, head length). Valid until the next `append` to the same layer.
        """
        return (
            self._keys[layer].write(self.length, keys.transpose(1, 0, 2), self.ctx_size),
            self._values[layer].write(self.length, values.transpose(1, 0, 2), self.ctx_size),
        )

    def forced(self, layer: int, rows: int) -> Integers | None:
        """Return the experts (rows, top_k) that new rows use in a layer; None: the router's."""
        if self._routes is None:
            return None
        return self._routes[layer, self.length : self.length + rows].astype(np.int64)

    def advance(self, cells: int) -> None:
        """Count cells that have been appended to every layer."""
        self.length += cells

    def rewind(self, length: int) -> None:
        """Keep the first `length` cells and forget the others."""
        if not 0 <= length <= self.length:
            raise ConfigError(
                f"cannot rewind to {length}: the K/V holds {self.length} cells",
                hint=f"a length from 0 to {self.length}",
            )
        self.length = length


class _Store(Protocol):
    def write(self, at: int, heads: Floats, limit: int) -> Floats: ...


class _FloatStore:
    """Cells as float32 or float16, (K/V heads, cells, head length)."""

    def __init__(self, layout: CacheType, kv_heads: int, head_length: int) -> None:
        self._cells = np.empty((kv_heads, 0, head_length), layout.dtype)

    def write(self, at: int, heads: Floats, limit: int) -> Floats:
        end = at + heads.shape[1]
        self._cells = _grown(self._cells, end, limit)
        with np.errstate(over="ignore"):  # beyond float16's range: infinity, which shows
            self._cells[:, at:end] = heads
        return self._cells[:, :end].astype(np.float32, copy=False)


class _Int8Store:
    """Cells as int8 with a float16 scale per group of values."""

    def __init__(self, layout: CacheType, kv_heads: int, head_length: int) -> None:
        self._integers = np.empty((kv_heads, 0, head_length), layout.dtype)
        self._scales = np.empty((kv_heads, 0, layout.groups(head_length)), layout.scale_dtype)

    def write(self, at: int, heads: Floats, limit: int) -> Floats:
        end = at + heads.shape[1]
        self._integers = _grown(self._integers, end, limit)
        self._scales = _grown(self._scales, end, limit)
        self._integers[:, at:end], self._scales[:, at:end] = quantise_kv(heads)
        return dequantise_kv(self._integers[:, :end], self._scales[:, :end])


def _store(layout: CacheType, kv_heads: int, head_length: int) -> _Store:
    store = _FloatStore if layout.scale_dtype is None else _Int8Store
    return store(layout, kv_heads, head_length)


def _grown(cells: npt.NDArray[Cell], end: int, limit: int) -> npt.NDArray[Cell]:
    """Return `cells` (K/V heads, cells, n) with room for `end` of them, at most `limit`."""
    room = cells.shape[1]
    if end <= room:
        return cells
    wanted = min(limit, max(end, 2 * room, FIRST_CELLS))
    larger = np.empty((cells.shape[0], wanted, cells.shape[2]), cells.dtype)
    larger[:, :room] = cells
    return larger
