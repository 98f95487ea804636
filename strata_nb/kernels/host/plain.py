"""Multiply rows of float32 activations by weights of F32, F16 or BF16: routers, and float models.

    y[row, output] = sum over the columns of x[row, column] * w[output, column]

To the bit, for any number of rows and any split of the outputs: column c is added to one of 32
float32 sums, number c % 32, in ascending order and with one rounding (fma). Then sum i takes up sum
i + 16, i + 8, i + 4, i + 2, i + 1, halving their number each time. Columns after the last multiple
of 32 are added to what remains, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from strata_nb.compiling import compiled, helper, inlined
from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.host.generated import define, fill_in
from strata_nb.kernels.host.instructions import floats_of_halves
from strata_nb.kernels.host.lanes import added_up
from strata_nb.kernels.host.steps import SIGNATURE
from strata_nb.kernels.host.vectors import (
    Vector,
    fused,
    loader,
    no_floats,
    only_lane,
    recast,
    widen_unsigned,
)
from strata_nb.raw_memory import load_f32, prefetch, store

ROWS_AT_ONCE = 4
_AHEAD = 4096  # bytes between what is read and what is asked for

_load_floats = loader(Vector("f32", 16))


def reader(kind: TensorType, lanes: int) -> Callable[..., Any]:
    """Return a function (address) that loads that many weights as a vector of float32."""
    if kind is TensorType.F32:
        return loader(Vector("f32", lanes))
    load, as_floats = loader(Vector("u16", lanes)), recast(Vector("f32", lanes))

    @inlined
    def halves(place: int) -> Any:
        return floats_of_halves(load(place))

    @inlined
    def upper_halves(place: int) -> Any:
        return as_floats(widen_unsigned(load(place)) << 16)

    return halves if kind is TensorType.F16 else upper_halves


_ROWS_TEXT = """
def {name}(weights, x, stride, y, outputs, values, adds):
{each}    x{r} = x + {r} * stride
{each}    first{r} = no_floats()
{each}    second{r} = no_floats()
    whole = values // 32 * 32
    for column in range(0, whole, 32):
        place = weights + {size} * column
        for line in range(0, {size} * 32, 64):
            prefetch(place + ahead + line)
        left = read(place)
        right = read(place + {size} * 16)
{each}        first{r} = fused(left, load_floats(x{r} + 4 * column), first{r})
{each}        second{r} = fused(right, load_floats(x{r} + 4 * column + 64), second{r})
{each}    total{r} = added_up(first{r} + second{r})
    for column in range(whole, values):
        weight = only_lane(read_one(weights + {size} * column))
{each}        total{r} = fused(weight, load_f32(x{r} + 4 * column), total{r})
{each}    place{r} = y + 4 * outputs * {r}
{each}    total{r} = load_f32(place{r}) + total{r} if adds else total{r}
{each}    store(place{r}, np.float32(total{r}))
"""


@cache
def plain_kernel(kind: TensorType) -> Callable[..., None]:
    """Return the kernel of a type in `UNPACKED`.

    (weights, x, y, rows, values, outputs, first, last, adds, work)

    weights       address of the tensor (outputs, values), as in the file
    x             address of float32 (rows, values)
    y             address of float32 (rows, outputs)
    first, last   outputs to compute
    adds          1: results are added to what is in y, 0: they replace it
    work          not used
    """
    size = block_layout(kind).size_bytes
    some_rows, one_row = (_rows_function(kind, rows) for rows in (ROWS_AT_ONCE, 1))

    def plain(
        weights: int,
        x: int,
        y: int,
        rows: int,
        values: int,
        outputs: int,
        first: int,
        last: int,
        adds: int,
        _: int,
    ) -> None:
        stride = 4 * values
        for output in range(first, last):
            place = weights + output * values * size
            row = 0
            while row < rows:
                here = y + 4 * (row * outputs + output)
                if rows - row >= ROWS_AT_ONCE:
                    some_rows(place, x + row * stride, stride, here, outputs, values, adds)
                    row += ROWS_AT_ONCE
                else:
                    one_row(place, x + row * stride, stride, here, outputs, values, adds)
                    row += 1

    plain.__name__ = plain.__qualname__ = f"plain_{kind.name.lower()}"
    return compiled(SIGNATURE)(plain)


def _rows_function(kind: TensorType, rows: int) -> Callable[..., None]:
    names = {
        "np": np,
        "ahead": _AHEAD,
        "read": reader(kind, 16),
        "read_one": reader(kind, 1),
        "load_floats": _load_floats,
        "no_floats": no_floats,
        "prefetch": prefetch,
        "fused": fused,
        "added_up": added_up,
        "only_lane": only_lane,
        "load_f32": load_f32,
        "store": store,
    }
    source = fill_in(_ROWS_TEXT, rows, name="some_rows", size=block_layout(kind).size_bytes)
    return helper(define(source, "some_rows", names, __name__))
