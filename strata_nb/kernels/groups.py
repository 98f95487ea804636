"""How choices of experts are grouped on devices that read each row where it is.

The choices of a batch, row * top_k + k, are sorted by expert, and those of an expert are cut into
*tiles*: what one block of threads multiplies. All of it is int64:

    sources   (choices,)      the row of each choice, in the order of `members` of the table
    counts    (experts,)      how many choices an expert has
    tiles     (1 + 3 * most)  how many there are; of each its expert, its first place in `members`,
                              and how many choices it has

This is what `gathered` of the table has room for on such a device.
"""

from __future__ import annotations

from typing import NamedTuple

TILE_ROWS = 64  # choices of a tile, at most, unless a kernel takes larger ones
_WORD = 8
_TILE_WORDS = 3
TILE_BYTES = _WORD * _TILE_WORDS


class Groups(NamedTuple):
    """Say where the parts are, as addresses or offsets, and where they end."""

    sources: int
    counts: int
    tiles: int
    end: int


def most_tiles(choices: int, experts: int, rows: int = TILE_ROWS) -> int:
    """Return how many tiles, of so many rows, so many choices have at most."""
    return choices // rows + min(choices, experts)


def groups_at(address: int, choices: int, experts: int) -> Groups:
    """Return the places for so many choices, one behind the other."""
    counts = address + _WORD * choices
    tiles = counts + _WORD * experts
    return Groups(address, counts, tiles, tiles + _WORD + TILE_BYTES * most_tiles(choices, experts))
