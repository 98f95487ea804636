"""Multiply few rows of quantised activations by packed weights: decoding.

A group of weights is unpacked once for every four rows of activations, but only the first time
comes from memory: a group fits in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from strata_nb.compiling import compiled, helper
from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.host.generated import define, fill_in
from strata_nb.kernels.host.products import accumulator, finish
from strata_nb.kernels.host.steps import SIGNATURE, host_weights, steps_of, widener
from strata_nb.kernels.host.vectors import no_floats
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

ROWS_AT_ONCE = 4

_ROWS_TEXT = """
def {name}(group, x, stride, y, outputs, members, sub_blocks, adds):
{each}    x{r} = x + {r} * stride
{each}    total{r} = no_floats()
    for step in range(sub_blocks // {sub_blocks_a_step}):
        quants = step_quants(group, sub_blocks, step)
        scale, minimum = step_scales(group, sub_blocks, step)
{each}        total{r} = accumulate(total{r}, quants, scale, minimum, x{r}, sub_blocks, step)
    if {has_last} and sub_blocks & 1:
        step = sub_blocks // 2
        quants = last_quants(group, sub_blocks, step)
        scale, minimum = last_scales(group, sub_blocks, step)
{each}        total{r} = accumulate_last(total{r}, quants, scale, minimum, x{r}, sub_blocks, step)
{each}    finish(y + 4 * outputs * {r}, total{r}, members, adds)
"""


@cache
def window_kernel(kind: TensorType) -> Callable[..., None]:
    """Return the kernel of a packed type, for few rows of activations.

    (weights, activations, y, rows, sub_blocks, outputs, first, last, adds, work)

    weights       address of the packed tensor (outputs, 32 * sub_blocks)
    activations   address of `rows` quantised rows (`quantised_rows.py`)
    y             address of float32 (rows, outputs)
    first, last   outputs to compute; first is a multiple of 8, and last too or it is `outputs`
    adds          1: results are added to what is in y, 0: they replace it
    work          address of a thread's `prompt.work_bytes`
    """
    layout = block_layout(kind)
    block_sub_blocks, block_bytes = layout.values // SUB_BLOCK, layout.size_bytes
    widen = widener(kind)
    some_rows, one_row = (_rows_function(kind, rows) for rows in (ROWS_AT_ONCE, 1))

    def window(
        weights: int,
        activations: int,
        y: int,
        rows: int,
        sub_blocks: int,
        outputs: int,
        first: int,
        last: int,
        adds: int,
        work: int,
    ) -> None:
        stride = SUB_BLOCK_BYTES * sub_blocks
        for start in range(first, last, GROUP_ROWS):
            group = weights + start * (sub_blocks // block_sub_blocks * block_bytes)
            members = min(GROUP_ROWS, outputs - start)
            if members < GROUP_ROWS:
                widen(group, members, sub_blocks, work)
                group = work
            row = 0
            while row < rows:
                x = activations + row * stride
                place = y + 4 * (row * outputs + start)
                if rows - row >= ROWS_AT_ONCE:
                    some_rows(group, x, stride, place, outputs, members, sub_blocks, adds)
                    row += ROWS_AT_ONCE
                else:
                    one_row(group, x, stride, place, outputs, members, sub_blocks, adds)
                    row += 1

    window.__name__ = window.__qualname__ = f"window_{kind.name.lower()}"
    return compiled(SIGNATURE)(window)


def _rows_function(kind: TensorType, rows: int) -> Callable[..., Any]:
    """Return a function of one group and `rows` rows of activations."""
    arithmetic, steps = host_weights(kind).arithmetic, steps_of(kind)
    source = fill_in(
        _ROWS_TEXT,
        rows,
        name="some_rows",
        sub_blocks_a_step=2 if arithmetic.unit == SUB_BLOCK else 1,
        has_last=not arithmetic.whole_steps,
    )
    names = {
        "no_floats": no_floats,
        "finish": finish,
        "step_quants": steps.quants,
        "step_scales": steps.scales,
        "last_quants": steps.last_quants,
        "last_scales": steps.last_scales,
        "accumulate": accumulator(arithmetic, lone=False),
        "accumulate_last": accumulator(arithmetic, lone=True),
    }
    return helper(define(source, "some_rows", names, __name__))
