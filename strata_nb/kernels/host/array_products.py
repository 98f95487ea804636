"""Multiply arrays by packed weights: shapes are checked, addresses taken.

The executor of programs calls the kernels by address, from its own threads. This is the door for
everything else: tests, benchmarks, a look at one product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_nb.formats import TensorType, tensor_bytes
from strata_nb.kernels.host import activations, plain, prompt, window
from strata_nb.kernels.host.matrices import MANY_ROWS, takes_packed
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Activations(NamedTuple):
    """Quantised rows: `data` is uint8 (rows, bytes), as `quantised_rows.py` lays them out."""

    data: Bytes
    values: int

    def quants(self) -> NDArray[np.int8]:
        """Return a view of the integers (rows, values)."""
        return self.data[:, : self.values].view(np.int8)

    def scales(self) -> Floats:
        """Return a view of the scales (rows, sub-blocks)."""
        return self.data[:, self.values : self.values + self.values // SUB_BLOCK * 4].view("<f4")


def quantise(x: Floats) -> Activations:
    """Quantise float32 (rows, values); ValueError unless rows are whole sub-blocks of 32."""
    rows, values = x.shape
    if x.dtype != np.float32 or not x.flags.c_contiguous or values % SUB_BLOCK:
        raise ValueError(
            f"rows {x.shape} of {x.dtype} are not contiguous float32 in sub-blocks of {SUB_BLOCK}"
        )
    data = np.empty((rows, row_bytes(values)), np.uint8)
    activations.quantise_rows(x.ctypes.data, data.ctypes.data, values, 0, rows)
    return Activations(data, values)


def multiply(
    kind: TensorType,
    weights: Bytes,
    x: Activations | Floats,
    y: Floats,
    first: int = 0,
    last: int | None = None,
    *,
    as_prompt: bool | None = None,
    adds: bool = False,
) -> None:
    """Fill columns first .. last - 1 of y (rows, outputs) with x @ weights.T.

    weights     a tensor (outputs, values): packed, or as in the file for F32, F16 and BF16
    x           quantised rows for packed weights, float32 (rows, values) for the others
    as_prompt   which of the two kernels; None lets the number of rows decide. The bits are the same
    adds        add to what is in y

    ValueError for a type without a kernel or shapes that do not fit.
    """
    rows, outputs = y.shape
    last = outputs if last is None else last
    values = x.values if isinstance(x, Activations) else x.shape[1]
    data = x.data if isinstance(x, Activations) else x
    needs_quantised = takes_packed(kind)
    if needs_quantised != isinstance(x, Activations) or len(data) != rows:
        raise ValueError(f"{len(data)} rows of {data.dtype} do not fit {kind.name} and {rows} rows")
    for name, array in (("weights", weights), ("x", data), ("y", y)):
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous")
    if weights.dtype != np.uint8 or weights.size != tensor_bytes(kind, (outputs, values)):
        raise ValueError(
            f"{weights.size} elements of {weights.dtype} are not a {kind.name} tensor "
            f"({outputs}, {values})"
        )
    if y.dtype != np.float32 or data.dtype != (np.uint8 if needs_quantised else np.float32):
        raise ValueError(f"x is {data.dtype} and y {y.dtype}")
    if not 0 <= first <= last <= outputs:
        raise ValueError(f"outputs {first} to {last} are not within {outputs}")
    places = (weights.ctypes.data, data.ctypes.data, y.ctypes.data)
    if not needs_quantised:
        plain.plain_kernel(kind)(*places, rows, values, outputs, first, last, adds, 0)
        return
    if first % GROUP_ROWS or (last % GROUP_ROWS and last != outputs):
        raise ValueError(f"outputs {first} to {last} are not whole groups of {GROUP_ROWS}")
    if as_prompt is None:
        as_prompt = rows >= MANY_ROWS
    kernel = prompt.prompt_kernel(kind) if as_prompt else window.window_kernel(kind)
    work = np.empty(prompt.work_bytes(kind, values), np.uint8)
    kernel(*places, rows, values // SUB_BLOCK, outputs, first, last, adds, work.ctypes.data)
