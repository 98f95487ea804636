"""What the kernels of a window and of a prompt read of packed weights, step by step.

A step is two units of eight rows (`weights.py`). The last step of a row of 32-value blocks may lack
its second sub-block; the last group of a tensor may lack rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from strata_nb.compiling import helper, inlined
from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.host import grids, weights
from strata_nb.kernels.host.vectors import BYTES, constant, no_floats
from strata_nb.kernels.host.weights import HostWeights
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, fields
from strata_nb.raw_memory import load_u8, prefetch, store

# (weights, activations, y, rows, size, outputs, first, last, adds, work) of every matrix kernel
SIGNATURE = "void(int64,int64,int64,int64,int64,int64,int64,int64,int64,int64)"

_no_bytes = constant(BYTES, [0] * 64)


def host_weights(kind: TensorType) -> HostWeights:
    """Return how the kernels read a type; ValueError for one without a kernel."""
    found = weights.describe(kind) or grids.describe(kind)
    if found is None:
        raise ValueError(f"there is no kernel for weights of type {kind.name}")
    return found


class Steps(NamedTuple):
    """Functions (group, sub_blocks, step) of what a step needs; scales come with minima."""

    quants: Callable[..., Any]
    scales: Callable[..., Any]
    last_quants: Callable[..., Any]
    last_scales: Callable[..., Any]


@cache
def steps_of(kind: TensorType) -> Steps:
    """Return the steps of packed weights.

    Each asks for its share of the next group as well. A group is a few kilobytes, so that memory
    answers in time, but its fields are too short for the processor to guess what follows them.
    """
    host = host_weights(kind)
    one, arithmetic = host.quants, host.arithmetic
    whole, has_minima = arithmetic.unit == SUB_BLOCK, arithmetic.has_minima
    layout = block_layout(kind)
    step_values = GROUP_ROWS * (2 * SUB_BLOCK if whole else SUB_BLOCK)
    step_bytes = -(-step_values * layout.size_bytes // layout.values)
    lines = -(-step_bytes // 64)

    @inlined
    def quants(group: int, sub_blocks: int, step: int) -> Any:
        steps = sub_blocks // 2 if whole else sub_blocks
        ahead = group + step_bytes * (steps + step)
        for line in range(lines):
            prefetch(ahead + 64 * line)
        if whole:
            return one(group, sub_blocks, 2 * step) + one(group, sub_blocks, 2 * step + 1)
        return one(group, sub_blocks, step)

    @inlined
    def last_quants(group: int, sub_blocks: int, step: int) -> Any:
        zero = _no_bytes()
        four = (zero, zero, zero, zero)
        return one(group, sub_blocks, 2 * step) + four

    def with_minima(scales: Any) -> Any:
        @inlined
        def both(group: int, sub_blocks: int, step: int) -> Any:
            return scales(group, sub_blocks, step), no_floats()

        return scales if has_minima else both

    scales, last_scales = with_minima(host.scales), with_minima(host.last_scales)
    return Steps(quants, scales, last_quants, last_scales)


@cache
def widener(kind: TensorType) -> Callable[..., Any]:
    """Return a function that copies a group of fewer than eight rows to a whole one, zeros added.

    (group, members, sub_blocks, work)
    """
    per_block = block_layout(kind).values // SUB_BLOCK
    places = tuple((field.before, field.pieces, field.width) for field in fields(kind).values())

    @helper
    def widen(group: int, members: int, sub_blocks: int, work: int) -> None:
        blocks = sub_blocks // per_block
        for before, pieces, width in places:
            source = group + before * blocks * members
            target = work + before * blocks * GROUP_ROWS
            for piece in range(pieces * blocks):
                for row in range(GROUP_ROWS):
                    for byte in range(width):
                        value = np.uint8(0)
                        if row < members:
                            value = load_u8(source + (piece * members + row) * width + byte)
                        store(target + (piece * GROUP_ROWS + row) * width + byte, value)

    return widen
