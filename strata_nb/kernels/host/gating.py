"""Multiply values by gates: SwiGLU, and the gate of an expert that every row uses.

Each value depends on its own inputs alone and every lane computes the same, so that rows may be cut
anywhere between the threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from strata_nb.compiling import compiled, inlined
from strata_nb.kernels.host.activations import quantise_sub_block
from strata_nb.kernels.host.exponential import sigmoid
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, share, word
from strata_nb.kernels.host.products import load_some, store_some
from strata_nb.kernels.host.vectors import all_lanes, load_floats, no_floats
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import SUB_BLOCK
from strata_nb.raw_memory import load_f32, load_i64, store

_LANES = 16


@inlined
def _gated(gate: Any, up: Any) -> Any:
    return gate * sigmoid(gate) * up


@inlined
def gate_sub_blocks(
    gate: int, up: int, out: int, packed_row: int, sub_blocks: int, first: int, last: int
) -> None:
    """Gate and quantise sub-blocks first .. last - 1 of one row; out may be 0."""
    for number in range(first, last):
        place = 4 * SUB_BLOCK * number
        left = _gated(load_floats(gate + place), load_floats(up + place))
        right = _gated(load_floats(gate + place + 64), load_floats(up + place + 64))
        if out:
            store(out + place, left)
            store(out + place + 64, right)
        quantise_sub_block(left, right, packed_row, sub_blocks, number)


@inlined
def gate_values(gate: int, up: int, out: int, first: int, last: int) -> None:
    """Gate values first .. last - 1."""
    for start in range(first, last, _LANES):
        place, count = 4 * start, last - start
        result = _gated(load_some(gate + place, count), load_some(up + place, count))
        store_some(out + place, result, count)


@cache
def silu_mul_kernel() -> HostKernel:
    """Return `silu_mul` of the table; the threads share the values of all rows."""

    @compiled(SIGNATURE)
    def silu_mul(arguments: int, thread: int, threads: int) -> None:
        rows, values = load_i64(word(arguments, 0)), word(arguments, 5)
        gate, up = word(arguments, 1), word(arguments, 2)
        out, packed = word(arguments, 3), word(arguments, 4)
        if not packed:
            first, last = share(rows * values, _LANES, thread, threads)
            gate_values(gate, up, out, first, last)
            return
        sub_blocks = values // SUB_BLOCK
        first, last = share(rows * sub_blocks, 1, thread, threads)
        while first < last:
            row = first // sub_blocks
            start, end = row * sub_blocks, min(last, (row + 1) * sub_blocks)
            before = 4 * values * row
            gate_sub_blocks(
                gate + before,
                up + before,
                out + before if out else 0,
                packed + SUB_BLOCK_BYTES * start,
                sub_blocks,
                first - start,
                end - start,
            )
            first = end

    return HostKernel(silu_mul)


@inlined
def _add_values(factor: Any, x: int, y: int, first: int, last: int) -> None:
    """Add factor times x to y, values first .. last - 1 of a row."""
    for start in range(first, last, _LANES):
        place, count = 4 * start, last - start
        added = factor * load_some(x + place, count)
        store_some(y + place, load_some(y + place, count) + added, count)


@cache
def gated_add_kernel() -> HostKernel:
    """Return `gated_add` of the table; the threads share the values of all rows."""

    @compiled(SIGNATURE)
    def gated_add(arguments: int, thread: int, threads: int) -> None:
        rows, width = load_i64(word(arguments, 0)), word(arguments, 4)
        gate, x, y = word(arguments, 1), word(arguments, 2), word(arguments, 3)
        first, last = share(rows * width, _LANES, thread, threads)
        while first < last:
            row = first // width
            start, end = row * width, min(last, (row + 1) * width)
            factor = sigmoid(all_lanes(no_floats(), np.float32(load_f32(gate + 4 * row))))
            before = 4 * start
            _add_values(factor, x + before, y + before, first - start, end - start)
            first = end

    return HostKernel(gated_add)
