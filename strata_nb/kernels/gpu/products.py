"""Multiply quantised rows with packed weights: the part that all kernels over weights share.

A warp takes the eight rows of a group and four sub-blocks at a time, lane = row + 8 * sub-block:
each load of quants covers a run of memory, and of the quantised row all lanes of a sub-block read
the same bytes. A lane keeps one sum. Its order is that of the sub-blocks; then the four lanes of a
row meet, in an order that is fixed as well.

More than half of the instructions of a product decode the weight. Rows of a step share that, four
at a time; one row alone has two sub-blocks on their way instead, because then it is waiting for
memory that takes the time.
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
    fma,
    i64,
    load_2xi32,
    load_4xi32,
    load_f32,
    load_i32,
    shuffle_xor_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.weights import Decoder
from strata_nb.kernels.quantised_rows import HALF_SUMS, SCALES, SUB_BLOCK_BYTES, SUMS
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

DECODERS = weights.DECODERS | grids.DECODERS  # of all packed types
ROWS_AT_ONCE = 4  # that `group_products` takes
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
def sub_block_dot(kind: TensorType) -> Function:
    """Return a device function that adds the product of one sub-block to a sum.

    dot(total, decoded, x, sub_blocks, s) -> float; decoded is what `Decoder.unpack` returned for
    sub-block s, x is the address of a quantised row of so many sub-blocks.
    """
    decoder = decoder_of(kind)
    offset, halves, minima = decoder.offset, decoder.halves, decoder.minima

    def dot(total: Any, decoded: Any, x: int, sub_blocks: int, s: int) -> Any:
        a, b, c, d, e, f, g, h, scale, upper_scale, minimum, upper_minimum = decoded
        xa, xb, xc, xd = load_4xi32(x + SUB_BLOCK * s)
        xe, xf, xg, xh = load_4xi32(x + SUB_BLOCK * s + 16)
        lower = dp4a(d, xd, dp4a(c, xc, dp4a(b, xb, dp4a(a, xa, 0))))
        upper = dp4a(h, xh, dp4a(g, xg, dp4a(f, xf, dp4a(e, xe, 0))))
        if halves:
            lower_sum, upper_sum = load_2xi32(x + HALF_SUMS * sub_blocks + 8 * s)
            product = scale * f32_of_i32(lower - offset * lower_sum)
            product = fma(upper_scale, f32_of_i32(upper - offset * upper_sum), product)
            if minima:
                product = fma(-minimum, f32_of_i32(lower_sum), product)
                product = fma(-upper_minimum, f32_of_i32(upper_sum), product)
        else:
            x_sum = load_i32(x + SUMS * sub_blocks + 4 * s)
            product = scale * f32_of_i32(lower + upper - offset * x_sum)
            if minima:
                product = fma(-minimum, f32_of_i32(x_sum), product)
        return fma(product, load_f32(x + SCALES * sub_blocks + 4 * s), total)

    return dot


def row_sum(x: Any) -> Any:
    """Return the sum over the four lanes that have the same row of a group."""
    x += shuffle_xor_f32(x, 8)
    return x + shuffle_xor_f32(x, 16)


@cache
def group_product(kind: TensorType, table: int) -> Function:
    """Return a device function: products of a quantised row with a group, or a part of their sums.

    product(group, rows_in_group, x, sub_blocks, part, parts) -> float

    table   where the type's is in shared memory, if it has one

    A whole warp calls it. Lane l gets the product with row l % 8 of the group (rows that a last
    group lacks repeat its last), summed over the sub-blocks 4 * (part + n * parts) .. + 3.
    """
    read, unpack, dot = decoder_of(kind).read, decoder_of(kind).unpack, sub_block_dot(kind)

    def product(
        group: int, rows_in_group: int, x: int, sub_blocks: int, part: int, parts: int
    ) -> Any:
        lane = i64(thread_index() & WARP - 1)
        row = min(lane & GROUP_ROWS - 1, rows_in_group - 1)
        s, step = WARP_SUB_BLOCKS * part + (lane >> 3), WARP_SUB_BLOCKS * parts
        total = f32(0.0)
        while s + step < sub_blocks:
            ones = read(group, rows_in_group, row, sub_blocks, s)
            others = read(group, rows_in_group, row, sub_blocks, s + step)
            total = dot(total, unpack(ones, table), x, sub_blocks, s)
            total = dot(total, unpack(others, table), x, sub_blocks, s + step)
            s += 2 * step
        if s < sub_blocks:
            ones = read(group, rows_in_group, row, sub_blocks, s)
            total = dot(total, unpack(ones, table), x, sub_blocks, s)
        return row_sum(total)

    return product


@cache
def group_products(kind: TensorType, table: int) -> Function:
    """Return a device function: `group_product` of up to four rows, which decodes a weight once.

    products(group, rows_in_group, x, rows, sub_blocks, part, parts) -> four floats

    rows    at x, at least one; the results of rows that are not there are those of the last
    table   as `group_product` has it

    What it gives for a row has the bits of `group_product`.
    """
    read, unpack, dot = decoder_of(kind).read, decoder_of(kind).unpack, sub_block_dot(kind)

    def products(
        group: int, rows_in_group: int, x: int, rows: int, sub_blocks: int, part: int, parts: int
    ) -> Any:
        lane = i64(thread_index() & WARP - 1)
        row = min(lane & GROUP_ROWS - 1, rows_in_group - 1)
        s = WARP_SUB_BLOCKS * part + (lane >> 3)
        row_bytes = SUB_BLOCK_BYTES * sub_blocks
        xb = x + row_bytes * min(rows - 1, 1)
        xc = x + row_bytes * min(rows - 1, 2)
        xd = x + row_bytes * min(rows - 1, 3)
        a = b = c = d = f32(0.0)
        while s < sub_blocks:
            decoded = unpack(read(group, rows_in_group, row, sub_blocks, s), table)
            a = dot(a, decoded, x, sub_blocks, s)
            b = dot(b, decoded, xb, sub_blocks, s)
            c = dot(c, decoded, xc, sub_blocks, s)
            d = dot(d, decoded, xd, sub_blocks, s)
            s += WARP_SUB_BLOCKS * parts
        return row_sum(a), row_sum(b), row_sum(c), row_sum(d)

    return products
