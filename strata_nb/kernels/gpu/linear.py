"""Multiply rows with a packed weight: one block for eight outputs of a few rows.

A block has a group of eight outputs and up to four rows. Its warps share the tiles of the group
(`tiles.py`), so that a matrix of few outputs still keeps a card busy, and add their sums in shared
memory. A single row has a kernel of its own (`one_row.py`), weights of floats have theirs
(`float_linear.py`).

More than half of the instructions of a product decode the weight. Rows share that, four at a time.
Blocks of the same outputs and other rows follow each other: what the first of them reads, the
others find in the card's cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.float_linear import float_linear_kernel
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    block_x,
    block_y,
    f32,
    fetch_f32,
    i64,
    load_f32,
    load_i64,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.one_row import warps_of
from strata_nb.kernels.gpu.operations import (
    Arguments,
    GpuKernel,
    Grid,
    blocks_of,
    outputs_grid,
    weights_read,
)
from strata_nb.kernels.gpu.products import row_bytes_of, row_sum
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.kernels.gpu.tile_rows import tiles_of
from strata_nb.kernels.gpu.tiles import tile_product
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED

ROWS_AT_ONCE = 4  # of a block


def linear_kernel(kind: TensorType, values: int) -> GpuKernel:
    """Return `linear` of the table for a type and rows of so many values.

    ValueError for a type that has no kernels on a card.
    """
    if kind in UNPACKED:
        return float_linear_kernel(kind, values)
    return _packed(kind, warps_of(values), values // SUB_BLOCK)


def _finish(total: Any, row: int, output: int, bias: int, y: int, outputs: int, add: int) -> None:
    """Write one product, with its bias and what is there, where the launch asks for them."""
    if bias != 0:
        total += fetch_f32(bias + 4 * output)
    place = y + 4 * (row * outputs + output)
    if add != 0:
        total += load_f32(place)
    store_f32(place, total)


@cache
def _packed(kind: TensorType, warps: int, sub_blocks: int) -> GpuKernel:
    """Return the kernel for packed weights, whose grid is (rows / 4, outputs / 8).

    A block reads its group once, and its rows once.
    """
    table = 4 * WARP * warps  # behind the sums of each warp
    read, add = tile_product(kind, sub_blocks, table)
    fill = table_filler(kind, table, WARP * warps)
    group_row_bytes = row_bytes_of(kind)(sub_blocks)
    row_bytes, tiles = SUB_BLOCK_BYTES * sub_blocks, tiles_of(sub_blocks)

    def linear(
        rows: int, x: int, weight: int, bias: int, y: int, _values: int, outputs: int, plus: int
    ) -> None:
        first_row, first = ROWS_AT_ONCE * i64(block_x()), GROUP_ROWS * i64(block_y())
        rows_here = load_i64(rows) - first_row
        if rows_here <= 0:
            return
        thread = i64(thread_index())
        fill(thread)
        warp, lane = thread >> 5, thread & WARP - 1
        rows_in_group, quarter = min(outputs - first, GROUP_ROWS), lane >> 3
        of_group = min(lane & GROUP_ROWS - 1, rows_in_group - 1)
        group = weight + first * group_row_bytes
        # Rows that are not there are the last again.
        x += first_row * row_bytes
        xb = x + row_bytes * min(rows_here - 1, 1)
        xc = x + row_bytes * min(rows_here - 1, 2)
        xd = x + row_bytes * min(rows_here - 1, 3)
        a = b = c = d = f32(0.0)
        tile = warp
        while tile < tiles:
            words = read(group, rows_in_group, of_group, quarter, tile)
            a = add(a, words, x, quarter, tile)
            if rows_here > 1:
                b = add(b, words, xb, quarter, tile)
            if rows_here > 2:
                c = add(c, words, xc, quarter, tile)
                d = add(d, words, xd, quarter, tile)
            tile += warps
        a, b, c, d = row_sum(a), row_sum(b), row_sum(c), row_sum(d)
        if lane < GROUP_ROWS:
            place = 4 * (WARP * warp + lane)
            shared_store_f32(place, a)
            shared_store_f32(place + 4 * GROUP_ROWS, b)
            shared_store_f32(place + 8 * GROUP_ROWS, c)
            shared_store_f32(place + 12 * GROUP_ROWS, d)
        barrier()
        row, output = thread >> 3, thread & GROUP_ROWS - 1
        if row < min(rows_here, ROWS_AT_ONCE) and output < rows_in_group:
            total, other = shared_load_f32(4 * thread), 1
            while other < warps:
                total += shared_load_f32(4 * (thread + WARP * other))
                other += 1
            _finish(total, first_row + row, first + output, bias, y, outputs, plus)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return outputs_grid(blocks_of(most_rows, ROWS_AT_ONCE), arguments["outputs"], GROUP_ROWS)

    name = f"linear_{kind.name.lower()}_{SUB_BLOCK * sub_blocks}"
    shared_bytes = table + table_bytes(kind)
    return GpuKernel(
        name, linear, WARP * warps, grid, lambda _: shared_bytes, reads=weights_read(kind)
    )
