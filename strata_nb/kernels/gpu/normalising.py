"""Divide rows by their root mean square, on a card.

A block takes one part of one row, and goes through it twice: for the sum of squares, and to write
what was asked for. The second time the row comes from the cache. Thread t of n takes up the columns
t, t + n, ... in ascending order, with one rounding each (fma); `block_sum` adds the threads. How
many threads there are follows from the width alone, and so do the bits.

Wide rows get the most threads that a block may have: a step waits for a norm twice in each layer,
and nothing else runs meanwhile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    block_x,
    block_y,
    f32,
    f32_of_i32,
    fma,
    i32,
    i64,
    load_f32,
    load_i64,
    square_root,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    MOST_REGISTERS,
    Arguments,
    GpuKernel,
    Grid,
    block_sum,
)
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES

# (the widest part, threads of its blocks): a head's norm needs no more than a warp.
_THREADS = ((128, 32), (1024, 256))
_MOST_THREADS = 1024


def threads_of(width: int) -> int:
    """Return how many threads add a part of so many values."""
    return next((threads for widest, threads in _THREADS if width <= widest), _MOST_THREADS)


def _sum_of_squares(x: Any, width: Any, thread: Any, threads: Any) -> Any:
    """Return the sum over a block's threads of the squares of `width` floats."""
    total, column = f32(0.0), thread
    while column < width:
        value = load_f32(x + 4 * column)
        total = fma(value, value, total)
        column += threads
    return block_sum(total, thread, threads // WARP)


@cache
def _rms_norm(threads: int) -> GpuKernel:
    def rms_norm(
        rows: int,
        index: int,
        x: int,
        weight: int,
        out: int,
        packed: int,
        parts: int,
        width: int,
        eps: float,
    ) -> None:
        part, row, thread = i64(block_x()), i64(block_y()), i64(thread_index())
        if row >= load_i64(rows):
            return
        source = load_i64(index + 8 * row) if index != 0 else row
        place = x + 4 * width * (source * parts + part)
        total = _sum_of_squares(place, width, thread, threads)
        divisor = square_root(total / f32_of_i32(i32(width)) + eps)
        before = part * width
        sub_blocks = (parts * width) >> 5
        out_row = out + 4 * (row * parts * width + before)
        packed_row = packed + SUB_BLOCK_BYTES * sub_blocks * row
        column = thread
        while column < width:
            value = load_f32(place + 4 * column) / divisor * load_f32(weight + 4 * column)
            if out != 0:
                store_f32(out_row + 4 * column, value)
            # Of parts that are quantised the width is a multiple of 32: whole warps come here.
            if packed != 0:
                number = (before + column) >> 5
                quantise_sub_block(value, thread & 31, packed_row, sub_blocks, number)
            column += threads

    # A block of the most threads must fit the 65,536 registers of a multiprocessor.
    registers = 64 if threads == _MOST_THREADS else MOST_REGISTERS
    return GpuKernel(f"rms_norm_{threads}", rms_norm, threads, _grid, _shared_bytes, registers)


def _grid(arguments: Arguments, most_rows: int) -> Grid:
    return arguments["parts"], most_rows, 1


def _shared_bytes(_: Arguments) -> int:
    return 4 * WARP  # of `block_sum`


def rms_norm_kernel(width: int) -> GpuKernel:
    """Return `rms_norm` of the table for parts of a width: a block for each part of each row.

    Reads 4 bytes of x, 4 of x in the cache and 4 of weight for each value, writes 4 and 1.5.
    """
    return _rms_norm(threads_of(width))
