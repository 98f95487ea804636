"""Sets of cells of the K/V, brought to shared memory for a block of threads to multiply.

A *set* is what a warp has of a run in `attention_halves.py`: 16 cells of every 128, 64 in all. In
shared memory its cells lie one behind the other. Their pieces of 16 bytes are turned, so that those
who read a piece of neighbouring cells of keys, or of every other cell of values, use all banks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.intrinsics import (
    copy_16,
    i32,
    load_i64,
    shared_load_4xi32,
    shared_store_4xi32,
    shared_store_i32,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.runs import RUN_CELLS

SET = 64  # cells
CHUNK, ROUND = 16, 128  # a set has the same 16 cells of every 128
SETS = RUN_CELLS // SET  # of a run
LAST_OF_SET = 3 * ROUND + CHUNK - 1  # from its first cell to its last

_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_ROUND_BLOCKS = ROUND // BLOCK_CELLS
_HALF_EXPONENT = 0x7C00


@cache
def copier(length: int, threads: int) -> Function:
    """Return a function (place, part, line, plane, start, last, row) that sends a thread's part of
    a set on its way.

    threads   of the block: so many that each has the same pieces of every eighth cell, or of fewer
    place     where the thread's first piece goes
    part      bytes from the beginning of a cell to the piece
    start     the first cell of the set
    last      the last cell that anyone sees, which stands for those behind it
    row       the thread's first cell in the set
    """
    pitch = 2 * length
    between = 8 * threads // length  # cells of a thread
    each = CHUNK // between

    def chunk(place: int, address: int) -> None:
        number = 0
        while number < each:
            further = pitch * between * number
            copy_16(place + further, address + further)
            number += 1

    def copy(place: int, part: int, line: int, plane: int, start: int, last: int, row: int) -> None:
        if start + LAST_OF_SET <= last:
            # A chunk of 16 cells lies in one block. All four are asked for at once.
            number = line + 8 * (start >> _BLOCK_SHIFT)
            a, b = load_i64(number), load_i64(number + 8 * _ROUND_BLOCKS)
            c, d = load_i64(number + 16 * _ROUND_BLOCKS), load_i64(number + 24 * _ROUND_BLOCKS)
            offset = plane + part + pitch * ((start & (BLOCK_CELLS - 1)) + row)
            chunk(place, a + offset)
            chunk(place + pitch * CHUNK, b + offset)
            chunk(place + 2 * pitch * CHUNK, c + offset)
            chunk(place + 3 * pitch * CHUNK, d + offset)
        else:
            while row < SET:
                cell = min(start + ROUND * (row >> 4) + (row & (CHUNK - 1)), last)
                block = load_i64(line + 8 * (cell >> _BLOCK_SHIFT))
                copy_16(place, block + plane + part + pitch * (cell & (BLOCK_CELLS - 1)))
                row += between
                place += pitch * between

    return copy


def turn_of_keys(row: Any) -> Any:
    """Return by which xor the pieces of a cell of keys are turned, where 128 bytes divide it."""
    return 4 * (row & 1)


def turn_of_values(row: Any) -> Any:
    """Return by which xor the pieces of a cell of values are turned."""
    return row & 6


def is_no_number(word: Any) -> Any:
    """Return whether one of the halves of a word is infinite or NaN."""
    lower, upper = word & _HALF_EXPONENT, word & (_HALF_EXPONENT << 16)
    return lower == _HALF_EXPONENT or upper == _HALF_EXPONENT << 16


@cache
def sifter(length: int, threads: int, flags: int) -> Function:
    """Return a function (place, start, last, lowest, thread) for values that not all rows see.

    Where a cell behind the lowest position has what is no number, that becomes 0 in shared memory,
    so that rows before it stay what they are; and if anyone sees the cell, it is noted at `flags`,
    which has a word for each cell of a set. A thread looks at what it has copied itself.
    """
    units = length // 8
    rounds = units * SET // threads
    pitch = 2 * length

    def sift(place: int, start: int, last: int, lowest: int, thread: int) -> None:
        number = 0
        while number < rounds:
            one = thread + threads * number
            row = one // units
            cell = start + ROUND * (row >> 4) + (row & (CHUNK - 1))
            if cell > lowest:
                at = place + pitch * row + 16 * ((one - units * row) ^ turn_of_values(row))
                a, b, c, d = shared_load_4xi32(at)
                if is_no_number(a) or is_no_number(b) or is_no_number(c) or is_no_number(d):
                    nothing = i32(0)
                    shared_store_4xi32(at, nothing, nothing, nothing, nothing)
                    if cell <= last:
                        shared_store_i32(flags + 4 * row, i32(cell))
            number += 1

    return sift
