"""Kernels of products of many rows: of all rows of a step, and of each expert's.

An expert's product is computed by tiles of its choices (`kernels/groups.py`). Blocks of a tile
and other outputs follow each other; then come those of the expert's next tile, which find its
matrix in the card's cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu import batch_tiles, grouped
from strata_nb.kernels.gpu.batch_sums import Sums, sums_of
from strata_nb.kernels.gpu.fragments import FRAGMENTS
from strata_nb.kernels.gpu.intrinsics import block_x, block_y, i64, load_i64, thread_index
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


class _Product(NamedTuple):
    """Say how a block multiplies weights of a type.

    multiply        `batch_tiles.block_product`
    outputs, rows   of a block
    sums            what is done with its products

    The others are those of `GpuKernel`.
    """

    multiply: Function
    outputs: int
    rows: int
    sums: Sums
    threads: int
    shared_bytes: int
    registers: int
    spills: int

    def kernel(self, name: str, function: Function, grid: Any, reads: Any) -> GpuKernel:
        """Return a kernel that consists of it."""
        return GpuKernel(
            name,
            function,
            self.threads,
            grid,
            lambda _: self.shared_bytes,
            self.registers,
            reads,
            self.spills,
        )


@cache
def _product_of(kind: TensorType) -> _Product:
    if kind in FRAGMENTS:
        return _Product(
            batch_tiles.block_product(kind),
            batch_tiles.OUTPUTS,
            batch_tiles.ROWS,
            sums_of(batch_tiles.THREADS, batch_tiles.OUTPUTS),
            batch_tiles.THREADS,
            batch_tiles.shared_bytes_of(kind),
            batch_tiles.REGISTERS,
            batch_tiles.SPILLS,
        )
    return _Product(
        grouped.block_product(kind),
        grouped.OUTPUTS,
        grouped.ROWS,
        sums_of(grouped.THREADS, grouped.OUTPUTS),
        grouped.THREADS,
        grouped.shared_bytes_of(kind),
        grouped.registers_of(kind),
        grouped.spills_of(kind),
    )


@cache
def batch_linear_kernel(kind: TensorType) -> GpuKernel:
    """Return `linear` of the table for many rows: grid (outputs, rows), by what a block has.

    A further argument, parts, says how many sums of its own a row has: `one_row.warps_of`.

    Reads the weights, and 1.5 bytes a value of the rows for each block's outputs.
    """
    product = _product_of(kind)
    multiply, each, most, store = (
        product.multiply,
        product.outputs,
        product.rows,
        product.sums.store,
    )

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
        first = most * i64(block_y())
        here = load_i64(rows) - first
        if here <= 0:
            return
        here = min(here, most)
        block = each * i64(block_x())
        place = multiply(first, here, 0, x, weight, values, outputs, block, parts)
        store(place, first, here, 0, bias, y, outputs, block, add)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        _, outputs, _ = outputs_grid(1, arguments["outputs"], each)
        return outputs, blocks_of(most_rows, most), 1

    name = f"batch_linear_{kind.name.lower()}"
    return product.kernel(name, linear, grid, weights_read(kind))


def _block_of(tiles: int, each: int, most: int) -> Any:
    """Return expert, first place, rows and first output of a block of `each` outputs and up to
    `most` rows of a tile; without rows it has nothing to do."""
    tile, number = i64(block_y()), i64(block_x())
    shares = TILE_ROWS // most
    block, share = each * (number // shares), most * (number % shares)
    if tile >= load_i64(tiles):
        return i64(0), i64(0), i64(0), block
    record = tiles + 8 + TILE_BYTES * tile
    expert, first, here = load_i64(record), load_i64(record + 8), load_i64(record + 16)
    return expert, first + share, min(here - share, most), block


def _tiles_grid(product: _Product) -> Any:
    shares = TILE_ROWS // product.rows

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        _, outputs, _ = outputs_grid(1, arguments["outputs"], product.outputs)
        tiles = most_tiles(most_rows * arguments["top_k"], arguments["experts"])
        return shares * outputs, tiles, 1

    return grid


def _expert_reads(kind: TensorType) -> Any:
    def reads(arguments: Arguments, rows: int) -> int:
        chosen = min(arguments["experts"], rows * arguments["top_k"])
        return chosen * arguments["outputs"] * row_bytes(kind, arguments["values"])

    return reads


@cache
def batch_expert_kernel(kind: TensorType) -> GpuKernel:
    """Return the product of choices' rows with a matrix of their experts: blocks for each tile.

    Its arguments are tiles, sources and targets (`kernels/groups.py`), addresses int64 (experts,)
    of blobs, in which the matrix begins at `offset`, x, y, values, outputs, parts (as above),
    experts and top_k. For place i of `members`, y[targets[i]] = x[sources[i]] times the matrix.

    Reads the matrix of each expert that was chosen once for each of its tiles, most of it from the
    card's cache, and 1.5 bytes a value of the rows for each block's outputs.
    """
    product = _product_of(kind)
    multiply, each, most, store = (
        product.multiply,
        product.outputs,
        product.rows,
        product.sums.store,
    )

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
        number, first, here, block = _block_of(tiles, each, most)
        if here <= 0:
            return
        weight = load_i64(addresses + 8 * number) + offset
        place = multiply(first, here, sources, x, weight, values, outputs, block, parts)
        store(place, first, here, targets, 0, y, outputs, block, 0)

    name = f"batch_expert_{kind.name.lower()}"
    return product.kernel(name, expert, _tiles_grid(product), _expert_reads(kind))


@cache
def batch_up_kernel(kind: TensorType) -> GpuKernel:
    """Return `batch_expert` of up, behind that of gate: inner = silu(inner) * product.

    inner takes the place of y, float32 (rows * top_k, outputs), and `packed` gets it quantised. The
    outputs are a multiple of 32.

    Writes 5.5 bytes for each value besides what `batch_expert` moves, and reads 4.
    """
    product = _product_of(kind)
    multiply, each, most, gate = product.multiply, product.outputs, product.rows, product.sums.gate

    def up(
        tiles: int,
        sources: int,
        targets: int,
        addresses: int,
        x: int,
        inner: int,
        packed: int,
        offset: int,
        values: int,
        outputs: int,
        parts: int,
        _experts: int,
        _top_k: int,
    ) -> None:
        number, first, here, block = _block_of(tiles, each, most)
        if here <= 0:
            return
        weight = load_i64(addresses + 8 * number) + offset
        place = multiply(first, here, sources, x, weight, values, outputs, block, parts)
        thread = i64(thread_index())
        gate(place, first, here, targets, inner, packed, outputs, block, thread)

    name = f"batch_up_{kind.name.lower()}"
    return product.kernel(name, up, _tiles_grid(product), _expert_reads(kind))
