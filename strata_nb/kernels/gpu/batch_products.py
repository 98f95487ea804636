"""Kernels of products of many rows (`grouped.py`): of all rows of a step, and of each expert's.

An expert's product is computed by tiles of its choices (`kernels/groups.py`). Blocks of a tile
and other outputs follow each other; then come those of the expert's next tile, which find its
matrix in the card's cache.
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu import grouped, staged
from strata_nb.kernels.gpu.fragments import FRAGMENTS
from strata_nb.kernels.gpu.intrinsics import block_x, block_y, i64, load_i64
from strata_nb.kernels.gpu.operations import (
    Arguments,
    Function,
    GpuKernel,
    Grid,
    blocks_of,
    outputs_grid,
    weights_read,
)
from strata_nb.kernels.groups import TILE_BYTES, TILE_ROWS, most_tiles


class _Form(NamedTuple):
    multiply: Function
    outputs: int
    rows: int
    threads: int
    shared_bytes: int
    registers: int
    spills: int


@cache
def _form(kind: TensorType) -> _Form:
    if kind in FRAGMENTS:
        return _Form(
            staged.block_product(kind), staged.OUTPUTS, staged.ROWS, staged.THREADS,
            staged.shared_bytes_of(kind), int(os.environ.get("VARIANT_REGISTERS", "128")), 0,
        )
    return _Form(
        grouped.block_product(kind), grouped.OUTPUTS, grouped.ROWS, grouped.THREADS,
        grouped.shared_bytes_of(kind), grouped.registers_of(kind), grouped.spills_of(kind),
    )


@cache
def batch_linear_kernel(kind: TensorType) -> GpuKernel:
    """Return `linear` of the table for many rows: grid (outputs / 64, rows / 64).

    A further argument, parts, says how many sums of its own a row has: `one_row.warps_of`.

    Reads the weights, and 1.5 bytes a value of the rows for each 64 outputs.
    """
    form = _form(kind)
    multiply = form.multiply
    OUTPUTS, ROWS = form.outputs, form.rows

    def linear(
        rows: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        values: int,
        outputs: int,
        add: int,
        parts: int,
    ) -> None:
        first = ROWS * i64(block_y())
        here = load_i64(rows) - first
        if here <= 0:
            return
        here = min(here, ROWS)
        block = OUTPUTS * i64(block_x())
        multiply(first, here, 0, 0, x, weight, bias, y, values, outputs, block, parts, add)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        _, outputs, _ = outputs_grid(1, arguments["outputs"], OUTPUTS)
        return outputs, blocks_of(most_rows, ROWS), 1

    shared_bytes = form.shared_bytes
    return GpuKernel(
        f"batch_linear_{kind.name.lower()}",
        linear,
        form.threads,
        grid,
        lambda _: shared_bytes,
        form.registers,
        weights_read(kind),
        form.spills,
    )


@cache
def batch_expert_kernel(kind: TensorType) -> GpuKernel:
    """Return the product of choices' rows with a matrix of their experts: a block for each tile.

    Its grid is (outputs / 64, tiles), and its arguments are tiles, sources and targets
    (`kernels/groups.py`), addresses int64 (experts,) of blobs, in which the matrix begins at
    `offset`, x, y, values, outputs, parts (as above), experts and top_k. For place i of `members`,
    y[targets[i]] = x[sources[i]] times the matrix.

    Reads the matrix of each expert that was chosen once for each of its tiles, most of it from the
    card's cache, and 1.5 bytes a value of the rows for each 64 outputs.
    """
    form = _form(kind)
    multiply = form.multiply
    OUTPUTS, ROWS = form.outputs, form.rows
    SHARES = TILE_ROWS // ROWS

    def expert(
        tiles: int,
        sources: int,
        targets: int,
        addresses: int,
        x: int,
        y: int,
        offset: int,
        values: int,
        outputs: int,
        parts: int,
        _experts: int,
        _top_k: int,
    ) -> None:
        tile = i64(block_y())
        if tile >= load_i64(tiles):
            return
        record = tiles + 8 + TILE_BYTES * tile
        number, first, here = load_i64(record), load_i64(record + 8), load_i64(record + 16)
        share = i64(block_x()) % SHARES
        first, here = first + ROWS * share, here - ROWS * share
        if here <= 0:
            return
        here = min(here, ROWS)
        weight = load_i64(addresses + 8 * number) + offset
        block = OUTPUTS * (i64(block_x()) // SHARES)
        multiply(first, here, sources, targets, x, weight, 0, y, values, outputs, block, parts, 0)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        _, outputs, _ = outputs_grid(1, arguments["outputs"], OUTPUTS)
        tiles = most_tiles(most_rows * arguments["top_k"], arguments["experts"])
        return SHARES * outputs, tiles, 1

    def reads(arguments: Arguments, rows: int) -> int:
        chosen = min(arguments["experts"], rows * arguments["top_k"])
        return chosen * arguments["outputs"] * row_bytes(kind, arguments["values"])

    shared_bytes = form.shared_bytes
    return GpuKernel(
        f"batch_expert_{kind.name.lower()}",
        expert,
        form.threads,
        grid,
        lambda _: shared_bytes,
        form.registers,
        reads,
        form.spills,
    )
