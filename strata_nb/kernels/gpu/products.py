"""What all kernels over packed weights share: decoders, bytes of rows, and the product of a
sub-block."""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.gpu import grids, weights
from strata_nb.kernels.gpu.intrinsics import (
    dp4a,
    f32_of_i32,
    fma,
    load_2xi32,
    load_4xi32,
    load_f32,
    load_i32,
    shuffle_xor_f32,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.weights import Decoder
from strata_nb.kernels.quantised_rows import HALF_SUMS, SCALES, SUMS
from strata_nb.packing import SUB_BLOCK

DECODERS = weights.DECODERS | grids.DECODERS  # of all packed types


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
