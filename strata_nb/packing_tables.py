"""What packing does to the blocks of a type, as tables: `packing.py` writes them, and
`packing_moves.py` makes instructions of them."""

from __future__ import annotations

from typing import NamedTuple


class PieceMove(NamedTuple):
    """Say where a piece of a block is: its place among the pieces of a group is that of its row.

    offset      in the file's block, as it is after the swaps
    width       bytes: 1, 2, 4, 8 or 16
    before      bytes of one block of one row in the fields before this one
    per_block   pieces of its field in a block, of which this is `number`
    """

    offset: int
    width: int
    before: int
    per_block: int
    number: int


class Swap(NamedTuple):
    """Exchange bits of two words of a block: `mask` of the second, `shift` places higher of the
    first.

    first, second   offsets of the words
    mask            of 32 bits, repeated in a word of 64
    width           bytes of a word: 4 or 8
    """

    first: int
    second: int
    shift: int
    mask: int
    width: int


class Moves(NamedTuple):
    """Say how blocks of a type are packed: swaps, then bits, then pieces.

    block_bytes   of a block
    pieces        cover the block, each byte once
    swaps         in this order; those that follow each other with the next words are independent
    bits_offset   of a field of whole 32-bit words whose bits move, and of its bits in packed order:
    bits          the number of the file's bit; empty where no bits move
    """

    block_bytes: int
    pieces: tuple[PieceMove, ...]
    swaps: tuple[Swap, ...]
    bits_offset: int
    bits: tuple[int, ...]
