"""The compiled half of `packing.py`: one mover for all types, driven by that file's tables.

A block is copied to a work space, its bits are rearranged there, and its pieces are written to
where the layout has them; unpacking does the same backwards. Work space and group stay in the
first-level cache, so that the speed is that of the instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strata_nb.compiling import compiled, inlined
from strata_nb.raw_memory import load_u8, load_u16, load_u32, load_u64, store

_SIGNATURE = f"void({','.join(['int64'] * 14)})"


@inlined
def _entry(table: int, row: int, column: int) -> Any:
    """Return an entry of a table with five columns."""
    return np.int64(load_u64(table + 8 * (5 * row + column)))


@inlined
def _copy(source: int, target: int, size: int) -> None:
    place = 0
    while size - place >= 8:
        store(target + place, load_u64(source + place))
        place += 8
    if size - place >= 4:
        store(target + place, load_u32(source + place))
        place += 4
    if size - place >= 2:
        store(target + place, load_u16(source + place))
        place += 2
    if size - place:
        store(target + place, load_u8(source + place))


@inlined
def _copy_piece(source: int, target: int, width: int) -> None:
    """Copy 1, 2, 4, 8 or 16 bytes."""
    if width == 16:
        store(target, load_u64(source))
        store(target + 8, load_u64(source + 8))
    elif width == 8:
        store(target, load_u64(source))
    elif width == 4:
        store(target, load_u32(source))
    elif width == 2:
        store(target, load_u16(source))
    else:
        store(target, load_u8(source))


@inlined
def _swap(block: int, swaps: int, number: int) -> None:
    """Exchange the bits that one row of the table of swaps says."""
    first = block + _entry(swaps, number, 0)
    second = block + _entry(swaps, number, 1)
    shift = load_u64(swaps + 8 * (5 * number + 2))
    mask = load_u64(swaps + 8 * (5 * number + 3))
    if _entry(swaps, number, 4) == 8:
        left, right = load_u64(first), load_u64(second)
        change = ((left >> shift) ^ right) & mask
        store(first, left ^ (change << shift))
        store(second, right ^ change)
    else:
        left, right = np.uint64(load_u32(first)), np.uint64(load_u32(second))
        change = ((left >> shift) ^ right) & mask
        store(first, np.uint32(left ^ (change << shift)))
        store(second, np.uint32(right ^ change))


@inlined
def _move_bits(place: int, size: int, table: int) -> None:
    """Replace 4 or 12 bytes by what their nibbles contribute according to the table."""
    low, high = np.uint64(0), np.uint64(0)
    for number in range(size):
        both = np.int64(load_u8(place + number))
        for nibble in ((2 * number, both & 15), (2 * number + 1, both >> 4)):
            entry = table + 16 * (16 * nibble[0] + nibble[1])
            low |= load_u64(entry)
            high |= load_u64(entry + 8)
    if size == 12:
        store(place, low)
        store(place + 8, np.uint32(high))
    else:
        store(place, np.uint32(low))


@compiled(_SIGNATURE)
def pack_groups(
    source: int,
    target: int,
    block: int,
    group_rows: int,
    rows: int,
    blocks: int,
    size: int,
    pieces: int,
    piece_count: int,
    swaps: int,
    swap_count: int,
    bits: int,
    bits_place: int,
    bits_size: int,
) -> None:
    """Pack rows of `blocks` blocks of `size` bytes; `block` is a work space of size + 16 bytes."""
    for first in range(0, rows, group_rows):
        members = min(group_rows, rows - first)
        group = target + first * blocks * size
        for member in range(members):
            row = source + (first + member) * blocks * size
            for number in range(blocks):
                _copy(row + number * size, block, size)
                for swap in range(swap_count):
                    _swap(block, swaps, swap)
                if bits_size:
                    _move_bits(block + bits_place, bits_size, bits)
                for piece in range(piece_count):
                    width = _entry(pieces, piece, 1)
                    before = blocks * members * _entry(pieces, piece, 2)
                    along = number * _entry(pieces, piece, 3) + _entry(pieces, piece, 4)
                    place = group + before + (along * members + member) * width
                    _copy_piece(block + _entry(pieces, piece, 0), place, width)


@compiled(_SIGNATURE)
def unpack_groups(
    source: int,
    target: int,
    block: int,
    group_rows: int,
    rows: int,
    blocks: int,
    size: int,
    pieces: int,
    piece_count: int,
    swaps: int,
    swap_count: int,
    bits: int,
    bits_place: int,
    bits_size: int,
) -> None:
    """Unpack what `pack_groups` made; `bits` is the table of the way back."""
    for first in range(0, rows, group_rows):
        members = min(group_rows, rows - first)
        group = source + first * blocks * size
        for member in range(members):
            row = target + (first + member) * blocks * size
            for number in range(blocks):
                for piece in range(piece_count):
                    width = _entry(pieces, piece, 1)
                    before = blocks * members * _entry(pieces, piece, 2)
                    along = number * _entry(pieces, piece, 3) + _entry(pieces, piece, 4)
                    place = group + before + (along * members + member) * width
                    _copy_piece(place, block + _entry(pieces, piece, 0), width)
                if bits_size:
                    _move_bits(block + bits_place, bits_size, bits)
                for swap in range(swap_count - 1, -1, -1):
                    _swap(block, swaps, swap)
                _copy(block, row + number * size, size)
