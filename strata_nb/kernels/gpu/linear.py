"""Multiply rows with a weight: one block for eight outputs of a few rows.

Packed weights: a block has a group of eight outputs and up to four rows. Its warps share the
sub-blocks of the group, so that a matrix of few outputs still keeps a card busy, and add their sums
in shared memory. Floats: a warp has an output of one row, and its lanes share the values.

Blocks of the same outputs and other rows follow each other: what the first of them reads, the
others find in the card's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from strata_nb.errors import UnsupportedDevice
from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.floats import EIGHT, FLOATS, lane_product
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    block_x,
    block_y,
    fetch_f32,
    i64,
    load_f32,
    load_i64,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid, blocks_of, warp_sum
from strata_nb.kernels.gpu.products import (
    ROWS_AT_ONCE,
    group_product,
    group_products,
    row_bytes_of,
)
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, UNPACKED

WARPS = 8  # of a block; of floats each has one of the block's eight outputs
THREADS = WARPS * WARP
SHARED_BYTES = 4 * WARPS * ROWS_AT_ONCE * GROUP_ROWS  # the sums of each warp
MOST_BLOCKS = 65_535  # of a grid in every direction but the first


def linear_kernel(kind: TensorType, values: int) -> GpuKernel:
    """Return `linear` of the table for a type and rows of so many values.

    ValueError for a type that has no kernels on a card.
    """
    return _plain(kind, values % EIGHT == 0) if kind in UNPACKED else _packed(kind)


def _finish(total: Any, row: int, output: int, bias: int, y: int, outputs: int, add: int) -> None:
    """Write one product, with its bias and what is there, where the launch asks for them."""
    if bias != 0:
        total += fetch_f32(bias + 4 * output)
    place = y + 4 * (row * outputs + output)
    if add != 0:
        total += load_f32(place)
    store_f32(place, total)


def _grid(parts: int, outputs: int) -> Grid:
    """Return a grid of blocks of eight outputs, each for so many parts of the rows.

    UnsupportedDevice for more of them than a grid has.
    """
    blocks = blocks_of(outputs, GROUP_ROWS)
    if blocks > MOST_BLOCKS:
        raise UnsupportedDevice(
            f"a matrix of {outputs:,} outputs: on a card it has {GROUP_ROWS * MOST_BLOCKS:,} at "
            "most",
            hint="--device host runs this model",
        )
    return parts, blocks, 1


def _reads(kind: TensorType) -> Callable[[Arguments, int], int]:
    """Return what says how many bytes of weights a launch reads."""
    return lambda arguments, _: arguments["outputs"] * row_bytes(kind, arguments["values"])


@cache
def _packed(kind: TensorType) -> GpuKernel:
    """Return the kernel for packed weights, whose grid is (rows / 4, outputs / 8).

    A block reads its group once, and its rows once.
    """
    product, products = group_product(kind), group_products(kind)
    bytes_of_row = row_bytes_of(kind)

    def linear(
        rows: int, x: int, weight: int, bias: int, y: int, values: int, outputs: int, add: int
    ) -> None:
        first_row, first = ROWS_AT_ONCE * i64(block_x()), GROUP_ROWS * i64(block_y())
        rows_here = load_i64(rows) - first_row
        if rows_here <= 0:
            return
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        sub_blocks, rows_in_group = values >> 5, min(outputs - first, GROUP_ROWS)
        group = weight + first * bytes_of_row(sub_blocks)
        x += first_row * sub_blocks * SUB_BLOCK_BYTES
        place = 4 * (WARP * warp + lane)  # of row 0; those of the others follow every 8 lanes
        if rows_here == 1:
            a = product(group, rows_in_group, x, sub_blocks, warp, WARPS)
            if lane < GROUP_ROWS:
                shared_store_f32(place, a)
        else:
            a, b, c, d = products(group, rows_in_group, x, rows_here, sub_blocks, warp, WARPS)
            if lane < GROUP_ROWS:
                shared_store_f32(place, a)
                shared_store_f32(place + 4 * GROUP_ROWS, b)
                shared_store_f32(place + 8 * GROUP_ROWS, c)
                shared_store_f32(place + 12 * GROUP_ROWS, d)
        barrier()
        row, output = thread >> 3, thread & GROUP_ROWS - 1
        if row < min(rows_here, ROWS_AT_ONCE) and output < rows_in_group:
            total, other = shared_load_f32(4 * thread), 1
            while other < WARPS:
                total += shared_load_f32(4 * (thread + WARP * other))
                other += 1
            _finish(total, first_row + row, first + output, bias, y, outputs, add)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return _grid(blocks_of(most_rows, ROWS_AT_ONCE), arguments["outputs"])

    return GpuKernel(
        f"linear_{kind.name.lower()}",
        linear,
        THREADS,
        grid,
        lambda _: SHARED_BYTES,
        reads=_reads(kind),
    )


def _by_warps(arguments: Arguments, most_rows: int) -> Grid:
    return _grid(most_rows, arguments["outputs"])


@cache
def _plain(kind: TensorType, in_eights: bool) -> GpuKernel:
    """Return the kernel of floats; in_eights: rows are whole eights (`floats.lane_product`).

    Its grid is (rows, outputs / 8): a warp has an output.
    """
    size, product = FLOATS[kind].size_bytes, lane_product(kind, in_eights)

    def linear(
        rows: int, x: int, weight: int, bias: int, y: int, values: int, outputs: int, add: int
    ) -> None:
        row, thread = i64(block_x()), i64(thread_index())
        output = WARPS * i64(block_y()) + (thread >> 5)
        if row >= load_i64(rows) or output >= outputs:
            return
        lane = thread & WARP - 1
        of_output, of_row = weight + size * output * values, x + 4 * row * values
        total = warp_sum(product(of_output, of_row, values, lane))
        if lane == 0:
            _finish(total, row, output, bias, y, outputs, add)

    name = f"linear_{kind.name}" if in_eights else f"linear_{kind.name}_odd"
    return GpuKernel(name.lower(), linear, THREADS, _by_warps, reads=_reads(kind))
