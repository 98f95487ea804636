"""Divide rows by their root mean square.

The sum of squares, to the bit: column c is squared and added to one of 32 float32 sums, number
c % 32, in ascending order and with one rounding (fma). Then sum i takes up sum i + 16, and the 16
that remain are added up as in `lanes.py`. Columns after the last multiple of 32 are added to the
result, one by one. Division and root are exact, in the order of `kernels/reference.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from strata_nb.compiling import compiled, inlined
from strata_nb.kernels.host.activations import quantise_sub_block
from strata_nb.kernels.host.lanes import added_up
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, real, share, word
from strata_nb.kernels.host.vectors import fused, load_floats, no_floats, root
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import SUB_BLOCK
from strata_nb.raw_memory import load_f32, load_i64, store


@inlined
def _mean_square(x: int, width: int) -> Any:
    """Return the mean of the squares of `width` floats."""
    whole = width // 32 * 32
    first, second = no_floats(), no_floats()
    for column in range(0, whole, 32):
        left, right = load_floats(x + 4 * column), load_floats(x + 4 * column + 64)
        first, second = fused(left, left, first), fused(right, right, second)
    total = added_up(first + second)
    for column in range(whole, width):
        value = load_f32(x + 4 * column)
        total = fused(value, value, total)
    return total / np.float32(width)


@inlined
def _write(
    x: int,
    weight: int,
    divisor: Any,
    out: int,
    packed_row: int,
    sub_blocks: int,
    number: int,
    width: int,
) -> None:
    """Write x / divisor * weight to `out`, and as sub-blocks `number` and on of a quantised row.

    Either place may be 0. All of 32 values is read before any of it is written.
    """
    whole = width // 32 * 32
    for column in range(0, whole, 32):
        here, of_weight = x + 4 * column, weight + 4 * column
        left = load_floats(here) / divisor * load_floats(of_weight)
        right = load_floats(here + 64) / divisor * load_floats(of_weight + 64)
        if out:
            store(out + 4 * column, left)
            store(out + 4 * column + 64, right)
        if packed_row:
            quantise_sub_block(left, right, packed_row, sub_blocks, number + column // SUB_BLOCK)
    for column in range(whole, width):  # there is none where rows are quantised
        value = load_f32(x + 4 * column) / divisor * load_f32(weight + 4 * column)
        store(out + 4 * column, np.float32(value))


@cache
def rms_norm_kernel() -> HostKernel:
    """Return `rms_norm` of the table; the threads share the parts of all rows."""

    @compiled(SIGNATURE)
    def rms_norm(arguments: int, thread: int, threads: int) -> None:
        index, x, weight = word(arguments, 1), word(arguments, 2), word(arguments, 3)
        out, packed = word(arguments, 4), word(arguments, 5)
        parts, width, eps = word(arguments, 6), word(arguments, 7), real(arguments, 8)
        sub_blocks = parts * width // SUB_BLOCK
        first, last = share(load_i64(word(arguments, 0)) * parts, 1, thread, threads)
        for number in range(first, last):
            row, part = number // parts, number % parts
            source = load_i64(index + 8 * row) if index else row
            place = x + 4 * width * (source * parts + part)
            divisor = root(np.float32(_mean_square(place, width) + eps))
            _write(
                place,
                weight,
                divisor,
                out + 4 * width * number if out else 0,
                packed + SUB_BLOCK_BYTES * sub_blocks * row if packed else 0,
                sub_blocks,
                part * width // SUB_BLOCK,
                width,
            )

    return HostKernel(rms_norm)
