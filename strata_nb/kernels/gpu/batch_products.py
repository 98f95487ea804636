"""Kernels of products of many rows (`grouped.py`): of all rows of a step, and of each expert's.

An expert's product is computed by tiles of its choices (`kernels/groups.py`). Blocks of a tile
and other outputs follow each other; then come those of the expert's next tile, which find its
matrix in the card's cache.
"""

from __future__ import annotations

from functools import cache

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.grouped import (
    OUTPUTS,
    ROWS,
    THREADS,
    block_product,
    registers_of,
    shared_bytes_of,
    spills_of,
)
from strata_nb.kernels.gpu.intrinsics import block_x, block_y, i64, load_i64
from strata_nb.kernels.gpu.operations import (
    Arguments,
    GpuKernel,
    Grid,
    blocks_of,
    outputs_grid,
    weights_read,
)
from strata_nb.kernels.groups import TILE_BYTES, most_tiles


@cache
def batch_linear_kernel(kind: TensorType) -> GpuKernel:
    """Return `linear` of the table for many rows: grid (outputs / 64, rows / 64).

    A further argument, parts, says how many sums of its own a row has: `one_row.warps_of`.

    Reads the weights, and 1.5 bytes a value of the rows for each 64 outputs.
    """
    multiply = block_product(kind)

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

    shared_bytes = shared_bytes_of(kind)
    return GpuKernel(
        f"batch_linear_{kind.name.lower()}",
        linear,
        THREADS,
        grid,
        lambda _: shared_bytes,
        registers_of(kind),
        weights_read(kind),
        spills_of(kind),
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
    multiply = block_product(kind)

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
        weight = load_i64(addresses + 8 * number) + offset
        block = OUTPUTS * i64(block_x())
        multiply(first, here, sources, targets, x, weight, 0, y, values, outputs, block, parts, 0)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        _, outputs, _ = outputs_grid(1, arguments["outputs"], OUTPUTS)
        tiles = most_tiles(most_rows * arguments["top_k"], arguments["experts"])
        return outputs, tiles, 1

    def reads(arguments: Arguments, rows: int) -> int:
        chosen = min(arguments["experts"], rows * arguments["top_k"])
        return chosen * arguments["outputs"] * row_bytes(kind, arguments["values"])

    shared_bytes = shared_bytes_of(kind)
    return GpuKernel(
        f"batch_expert_{kind.name.lower()}",
        expert,
        THREADS,
        grid,
        lambda _: shared_bytes,
        registers_of(kind),
        reads,
        spills_of(kind),
    )
