"""Divide rows by their root mean square, on a card.

Parts whose values a block has in registers have a form of their own (`held_rows.py`). Of others a
block takes one part of one row. Each thread keeps its first four values in registers, which is
all of most rows, between the sum of squares and what is written. Thread t of n takes up the columns
t, t + n, ... in ascending order, with one rounding each (fma); `block_sum` adds the threads. How
many threads there are follows from the width alone, and so do the bits.

Wide rows get the most threads that a block may have: a step waits for a norm twice in each layer,
and nothing else runs meanwhile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.held_rows import held_norm_kernel, threads_that_hold
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    bits_of_f32,
    block_x,
    block_y,
    f32,
    f32_of_i32,
    fetch_f32,
    fma,
    hold,
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
_KEPT = 4  # values of a row that a thread has in registers


def threads_of(width: int) -> int:
    """Return how many threads add a part of so many values."""
    return next((threads for widest, threads in _THREADS if width <= widest), _MOST_THREADS)


@cache
def _rms_norm(threads: int, width_kept: bool) -> GpuKernel:
    def load(place: int, column: int, width: int) -> Any:
        return load_f32(place + 4 * column) if column < width else f32(0.0)

    def fetch(place: int, column: int, width: int) -> Any:
        return fetch_f32(place + 4 * column) if column < width else f32(0.0)

    def write(
        value: Any,
        column: int,
        out_row: int,
        packed_row: int,
        width: int,
        before: int,
        sub_blocks: int,
        exists: bool,
    ) -> None:
        """Write a value; of parts that are quantised the width is a multiple of 32: whole warps."""
        if exists and column < width:
            if out_row != 0:
                store_f32(out_row + 4 * (before + column), value)
            if packed_row != 0:
                number = (before + column) >> 5
                quantise_sub_block(value, column & 31, packed_row, sub_blocks, number)

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
        wa = fetch(weight, thread, width)
        wb = fetch(weight, thread + threads, width)
        wc = fetch(weight, thread + 2 * threads, width)
        wd = fetch(weight, thread + 3 * threads, width) if width_kept else f32(0.0)
        hold(bits_of_f32(wa) ^ bits_of_f32(wb) ^ bits_of_f32(wc) ^ bits_of_f32(wd))
        await_previous()
        exists = row < load_i64(rows)
        source = row
        if index != 0:
            source = load_i64(index + 8 * row) if exists else i64(0)
        before = part * width
        place = x + 4 * (source * parts * width + before)
        a = load(place, thread, width)
        b = load(place, thread + threads, width)
        c = load(place, thread + 2 * threads, width)
        d = load(place, thread + 3 * threads, width)
        total = fma(d, d, fma(c, c, fma(b, b, fma(a, a, f32(0.0)))))
        column = thread + _KEPT * threads
        while not width_kept and column < width:
            value = load_f32(place + 4 * column)
            total = fma(value, value, total)
            column += threads
        total = block_sum(total, thread, threads >> 5)
        divisor = square_root(total / f32_of_i32(i32(width)) + eps)
        sub_blocks = (parts * width) >> 5
        out_row = out + 4 * row * parts * width if out != 0 else i64(0)
        packed_row = packed + SUB_BLOCK_BYTES * sub_blocks * row if packed != 0 else i64(0)
        value = a / divisor * wa
        write(value, thread, out_row, packed_row, width, before, sub_blocks, exists)
        value = b / divisor * wb
        write(value, thread + threads, out_row, packed_row, width, before, sub_blocks, exists)
        value = c / divisor * wc
        write(value, thread + 2 * threads, out_row, packed_row, width, before, sub_blocks, exists)
        if not width_kept:  # the oldest cards have no register to keep it in
            wd = fetch(weight, thread + 3 * threads, width)
        value = d / divisor * wd
        write(value, thread + 3 * threads, out_row, packed_row, width, before, sub_blocks, exists)
        column = thread + _KEPT * threads
        while not width_kept and column < width:
            value = load_f32(place + 4 * column) / divisor * fetch_f32(weight + 4 * column)
            write(value, column, out_row, packed_row, width, before, sub_blocks, exists)
            column += threads

    # A block of the most threads must fit the 65,536 registers of a multiprocessor.
    registers = 64 if threads == _MOST_THREADS else MOST_REGISTERS
    name = f"rms_norm_{threads}" if width_kept else f"rms_norm_{threads}_wide"
    return GpuKernel(name, rms_norm, threads, _grid, _shared_bytes, registers)


def _grid(arguments: Arguments, most_rows: int) -> Grid:
    return arguments["parts"], most_rows, 1


def _shared_bytes(_: Arguments) -> int:
    return 4 * WARP  # of `block_sum`


def rms_norm_kernel(width: int) -> GpuKernel:
    """Return `rms_norm` of the table for parts of a width: a block for each part of each row.

    Reads 4 bytes of x and 4 of weight for each value, writes 4 and 1.5.
    """
    holding = threads_that_hold(width)
    if holding:
        return held_norm_kernel(holding)
    threads = threads_of(width)
    return _rms_norm(threads, width <= _KEPT * threads)
