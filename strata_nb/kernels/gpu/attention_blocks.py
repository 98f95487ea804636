"""K/V blocks of halves in shared memory, for a block of threads to multiply.

A thread has the same piece of 16 bytes of every so-manieth cell. Where a piece lies is what those
say who multiply: a function (row, piece) for which eight rows further on is as far for every piece.
"""

from __future__ import annotations

from functools import cache

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.attention_sets import is_no_number
from strata_nb.kernels.gpu.intrinsics import (
    copy_16,
    i32,
    shared_load_4xi32,
    shared_store_4xi32,
    shared_store_i32,
)
from strata_nb.kernels.gpu.operations import Function

_NANS = 0x7FFF7FFF


@cache
def copier(length: int, threads: int, place_of: Function) -> Function:
    """Return a function (place, plane, thread) that sends a thread's part of the keys or values of
    a K/V block on its way. All 64 cells come, written or not.
    """
    pieces, pitch = length // 8, 2 * length
    between = threads // pieces

    def copy(place: int, plane: int, thread: int) -> None:
        row, piece = thread // pieces, thread & (pieces - 1)
        to, address, further = place + place_of(row, piece), plane + 16 * thread, 0
        while further < BLOCK_CELLS:
            copy_16(to + place_of(further, 0), address + pitch * further)
            further += between

    return copy


@cache
def sifter(length: int, threads: int, place_of: Function) -> Function:
    """Return a function (keys, values, seen, thread) for a K/V block that not all rows see.

    Values that are no numbers would leave a trace in rows that do not see them: 0 times NaN is NaN.
    Where a cell behind the first `seen` has such values, they become 0, and its key NaN, so that
    rows which see the cell become NaN, and no others.
    """
    pieces = length // 8
    between = threads // pieces

    def sift(keys: int, values: int, seen: int, thread: int) -> None:
        row, piece = thread // pieces, thread & (pieces - 1)
        while row < BLOCK_CELLS:
            if row >= seen:
                at = values + place_of(row, piece)
                a, b, c, d = shared_load_4xi32(at)
                if is_no_number(a) or is_no_number(b) or is_no_number(c) or is_no_number(d):
                    nothing = i32(0)
                    shared_store_4xi32(at, nothing, nothing, nothing, nothing)
                    shared_store_i32(keys + place_of(row, 0), i32(_NANS))
            row += between

    return sift
