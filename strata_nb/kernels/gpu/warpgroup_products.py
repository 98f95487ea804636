"""Kernels of products of many rows by warpgroups, on cards of compute capability 9.0.

They take the places of those of `batch_products.py` where bits need not be those of windows; gate
and up are one kernel, whose blocks have 64 outputs of each, so that nothing goes to memory between
them but what down reads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.half_stages import halves_of_quants
from strata_nb.kernels.gpu.intrinsics import (
    block_x,
    block_y,
    i32,
    i64,
    load_4xi32,
    load_f32,
    load_i64,
    store_4xi32,
    thread_index,
)
from strata_nb.kernels.gpu.intrinsics.warpgroups import WARPGROUP, M
from strata_nb.kernels.gpu.operations import (
    Arguments,
    Function,
    GpuKernel,
    Grid,
    blocks_of,
    outputs_grid,
    weights_read,
)
from strata_nb.kernels.gpu.warpgroup_sums import store_gated, store_products, store_rows
from strata_nb.kernels.gpu.warpgroup_tiles import (
    IN_PAIRS,
    OUTPUTS,
    THREADS,
    WARPGROUPS,
    block_product,
    shared_bytes_of,
)
from strata_nb.kernels.groups import TILE_BYTES, most_tiles
from strata_nb.kernels.quantised_rows import SCALES, SUB_BLOCK_BYTES

_PIECES = 128  # that a block of `halves_kernel` makes
_REGISTERS, _REGISTERS_OF_PAIRS = 255, 128  # of a thread


def _kernel(
    name: str, kind: TensorType, rows: int, function: Function, grid: Any, reads: Any
) -> GpuKernel:
    shared_bytes = shared_bytes_of(kind, rows)
    return GpuKernel(
        f"{name}_{kind.name.lower()}_{rows}",
        function,
        THREADS,
        grid,
        lambda _: shared_bytes,
        _REGISTERS_OF_PAIRS if rows <= IN_PAIRS else _REGISTERS,
        reads,
    )


@cache
def warpgroup_linear_kernel(kind: TensorType, rows_of_block: int) -> GpuKernel:
    """Return `linear` of the table for many rows: grid (outputs, rows), by what a block has.

    x are halves, in units of `half_stages.ROWS_BY`.

    Reads the weights, and 2 bytes a value of the rows for each block's outputs.
    """
    product, store = block_product(kind, rows_of_block), store_rows(rows_of_block)

    def linear(
        rows: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        values: int,
        outputs: int,
        add: int,
    ) -> None:
        first = rows_of_block * i64(block_y())
        here = load_i64(rows) - first
        if here <= 0:
            return
        here = min(here, rows_of_block)
        block = OUTPUTS * i64(block_x())
        own = block + M * (thread_index() // WARPGROUP)
        thread = product(first, here, 0, 0, x, weight, values, outputs, own)
        store(thread, here, bias, y, outputs, block, add)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        _, outputs, _ = outputs_grid(1, arguments["outputs"], OUTPUTS)
        return outputs, blocks_of(most_rows, rows_of_block), 1

    return _kernel("warpgroup_linear", kind, rows_of_block, linear, grid, weights_read(kind))


def _tile_of(tiles: int) -> Any:
    """Return expert, first place and number of rows of a block's tile; no rows where there is no
    tile."""
    tile = i64(block_y())
    record = tiles + 8 + TILE_BYTES * tile  # there is room for as many as the grid has
    count, number, first = load_i64(tiles), load_i64(record), load_i64(record + 8)
    here = load_i64(record + 16)
    return number, first, here if tile < count else i64(0)


def _tiles_grid(each: int, rows_of_block: int) -> Any:
    def grid(arguments: Arguments, most_rows: int) -> Grid:
        _, outputs, _ = outputs_grid(1, arguments["outputs"], each)
        choices = most_rows * arguments["top_k"]
        return outputs, most_tiles(choices, arguments["experts"], rows_of_block), 1

    return grid


def _expert_reads(kind: TensorType, matrices: int) -> Any:
    def reads(arguments: Arguments, rows: int) -> int:
        chosen = min(arguments["experts"], rows * arguments["top_k"])
        return matrices * chosen * arguments["outputs"] * row_bytes(kind, arguments["values"])

    return reads


@cache
def warpgroup_expert_kernel(kind: TensorType, rows_of_block: int) -> GpuKernel:
    """Return the product of choices' rows with a matrix of their experts: blocks for each tile.

    Its arguments are those of `batch_expert` without parts; x and y are halves, in units of
    `half_stages.ROWS_BY`. Tiles have up to `rows_of_block` rows; the outputs are a multiple of 8.

    Reads the matrix of each expert that was chosen once for each of its tiles, and 2 bytes a value
    of the rows for each block's outputs; writes 2 bytes for each output of a choice.
    """
    product, store = block_product(kind, rows_of_block), store_products(rows_of_block)

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
        _experts: int,
        _top_k: int,
    ) -> None:
        number, first, here = _tile_of(tiles)
        if here <= 0:
            return
        weight = load_i64(addresses + 8 * number) + offset
        block = OUTPUTS * i64(block_x())
        own = block + M * (thread_index() // WARPGROUP)
        thread = product(first, here, sources, targets, x, weight, values, outputs, own)
        store(thread, here, y, outputs, block)

    grid, reads = _tiles_grid(OUTPUTS, rows_of_block), _expert_reads(kind, 1)
    return _kernel("warpgroup_expert", kind, rows_of_block, expert, grid, reads)


@cache
def warpgroup_gate_up_kernel(kind: TensorType, rows_of_block: int) -> GpuKernel:
    """Return gate and up of choices' rows: inner = silu(gate) * up.

    Other arguments than those of `warpgroup_expert` are `inner`, halves (rows * top_k, outputs) in
    units of `half_stages.ROWS_BY`, and where in a blob gate and up begin. The outputs are a
    multiple of 64.

    Reads both matrices as `warpgroup_expert` does, and writes 2 bytes for each output of a choice.
    """
    product, store = block_product(kind, rows_of_block), store_gated(rows_of_block)

    def gate_up(
        tiles: int,
        sources: int,
        targets: int,
        addresses: int,
        x: int,
        inner: int,
        gate_offset: int,
        up_offset: int,
        values: int,
        outputs: int,
        _experts: int,
        _top_k: int,
    ) -> None:
        number, first, here = _tile_of(tiles)
        if here <= 0:
            return
        of_own = gate_offset if thread_index() < WARPGROUP else up_offset
        weight = load_i64(addresses + 8 * number) + of_own
        block = M * i64(block_x())
        thread = product(first, here, sources, targets, x, weight, values, outputs, block)
        store(thread, here, inner, outputs, block)

    grid, reads = _tiles_grid(OUTPUTS // WARPGROUPS, rows_of_block), _expert_reads(kind, 2)
    return _kernel("warpgroup_gate_up", kind, rows_of_block, gate_up, grid, reads)


_PIECE = 16  # values of a thread


def _halves(rows: int, x: int, halves: int, values: int) -> None:
    row, sub_blocks = i64(block_y()), values >> 5
    number, pieces = i32(_PIECES * block_x() + thread_index()), i32(values >> 4)
    if row >= load_i64(rows) or number >= pieces:
        return
    source = x + row * sub_blocks * SUB_BLOCK_BYTES
    words = load_4xi32(source + _PIECE * number)
    scale = load_f32(source + SCALES * sub_blocks + 4 * (number >> 1))
    a, b, c, d, e, f, g, h = halves_of_quants((*words, scale))
    target = halves + 2 * (row * values + _PIECE * number)
    store_4xi32(target, a, b, c, d)
    store_4xi32(target + 16, e, f, g, h)


def _halves_grid(arguments: Arguments, most_rows: int) -> Grid:
    return blocks_of(arguments["values"] // _PIECE, _PIECES), most_rows, 1


@cache
def halves_kernel() -> GpuKernel:
    """Return what makes halves of quantised rows, (rows, values), in units of
    `half_stages.ROWS_BY`: a thread for 16 values. Its arguments are rows, x, halves and values.

    Reads 1.1 bytes a value and writes 2.
    """
    return GpuKernel("warpgroup_halves", _halves, _PIECES, _halves_grid)
