"""Multiply quantised rows with packed weights: the part that all kernels over weights share.

A warp takes the eight rows of a group and four sub-blocks at a time, lane = row + 8 * sub-block:
each load of quants covers a run of memory, and of the quantised row all lanes of a sub-block read
the same bytes. A lane keeps one sum. Its order is that of the sub-blocks; then the four lanes of a
row meet, in an order that is fixed as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.gpu import grids, weights
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    dp4a,
    f32,
    f32_of_i32,
    fetch_2xi32,
    fetch_4xi32,
    fetch_f32,
    fetch_i32,
    fma,
    i64,
    shuffle_xor_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.weights import Decoder
from strata_nb.kernels.quantised_rows import HALF_SUMS, SCALES, SUMS
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

DECODERS = weights.DECODERS | grids.DECODERS  # of all packed types
WARP_SUB_BLOCKS = WARP // GROUP_ROWS  # that a warp takes at a time


def decoder_of(kind: TensorType) -> Decoder:
    """Return what decodes a type; ValueError for one that has no kernels on a card."""
    if kind not in DECODERS:
        raise ValueError(f"weights of type {kind.name} have no kernels on a card")
    return DECODERS[kind]


def row_bytes_of(kind: TensorType) -> Function:
    """Return a device function: the bytes of a packed row, by its number of sub-blocks."""
    layout = block_layout(kind)
    shift = (layout.values // SUB_BLOCK).bit_length() - 1  # one sub-block in a block, or eight
    size = layout.size_bytes

    def row_bytes(sub_blocks: int) -> int:
        return (sub_blocks >> shift) * size

    return row_bytes


@cache
def sub_block_product(kind: TensorType) -> Function:
    """Return a device function that adds the product of one sub-block to a sum.

    add(total, group, rows_in_group, row, x, sub_blocks, s) -> float; the arguments are those of
    `Decoder.decode`, and x is the address of a quantised row.
    """
    decode, offset, halves, minima = decoder_of(kind)

    def add(
        total: Any, group: int, rows_in_group: int, row: int, x: int, sub_blocks: int, s: int
    ) -> Any:
        a, b, c, d, e, f, g, h, scale, upper_scale, minimum, upper_minimum = decode(
            group, rows_in_group, row, sub_blocks, s
        )
        xa, xb, xc, xd = fetch_4xi32(x + 32 * s)
        xe, xf, xg, xh = fetch_4xi32(x + 32 * s + 16)
        lower = dp4a(d, xd, dp4a(c, xc, dp4a(b, xb, dp4a(a, xa, 0))))
        upper = dp4a(h, xh, dp4a(g, xg, dp4a(f, xf, dp4a(e, xe, 0))))
        if halves:
            lower_sum, upper_sum = fetch_2xi32(x + HALF_SUMS * sub_blocks + 8 * s)
            product = scale * f32_of_i32(lower - offset * lower_sum)
            product = fma(upper_scale, f32_of_i32(upper - offset * upper_sum), product)
            if minima:
                product = fma(-minimum, f32_of_i32(lower_sum), product)
                product = fma(-upper_minimum, f32_of_i32(upper_sum), product)
        else:
            x_sum = fetch_i32(x + SUMS * sub_blocks + 4 * s)
            product = scale * f32_of_i32(lower + upper - offset * x_sum)
            if minima:
                product = fma(-minimum, f32_of_i32(x_sum), product)
        return fma(product, fetch_f32(x + SCALES * sub_blocks + 4 * s), total)

    return add


@cache
def group_product(kind: TensorType) -> Function:
    """Return a device function: products of a quantised row with a group, or a part of their sums.

    product(group, rows_in_group, x, sub_blocks, part, parts) -> float

    A whole warp calls it. Lane l gets the product with row l % 8 of the group (rows that a last
    group lacks repeat its last), summed over the sub-blocks 4 * (part + n * parts) .. + 3.
    """
    add = sub_block_product(kind)

    def product(
        group: int, rows_in_group: int, x: int, sub_blocks: int, part: int, parts: int
    ) -> Any:
        lane = i64(thread_index()) & WARP - 1
        row = min(lane & GROUP_ROWS - 1, rows_in_group - 1)
        s = WARP_SUB_BLOCKS * part + (lane >> 3)
        total = f32(0.0)
        while s < sub_blocks:
            total = add(total, group, rows_in_group, row, x, sub_blocks, s)
            s += WARP_SUB_BLOCKS * parts
        total += shuffle_xor_f32(total, 8)
        return total + shuffle_xor_f32(total, 16)

    return product
