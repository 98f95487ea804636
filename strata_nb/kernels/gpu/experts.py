"""The chosen experts of all rows on a card: what `expert_gate_up` and `expert_down` have in common.

Both are bound by memory and short. Of an expert without a slot nothing is asked for ahead: host
memory is read once, by who uses it. One that comes to a slot is brought there by all blocks, each
what it reads (`filling.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.binding import with_loads
from strata_nb.kernels.gpu.filling import ADDRESS, COMES, IN_HOST_MEMORY
from strata_nb.kernels.gpu.intrinsics import i32, prefetch
from strata_nb.kernels.gpu.operations import Arguments, Function
from strata_nb.kernels.gpu.products import row_bytes_of
from strata_nb.kernels.gpu.tile_rows import Tile
from strata_nb.kernels.gpu.tiles import tile_product
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

FLOAT_WARPS = 8  # of a block of floats


def reads_of(*kinds: TensorType) -> Callable[[Arguments, int], int]:
    """Return what says how many bytes of matrices a launch reads, of which each choice has one of
    each type."""

    def reads(arguments: Arguments, rows: int) -> int:
        each = sum(row_bytes(kind, arguments["values"]) for kind in kinds)
        return rows * arguments["top_k"] * arguments["outputs"] * each

    return reads


@cache
def asker(kind: TensorType, sub_blocks: int, is_whole: bool) -> Function:
    """Return a device function that asks for rows of a weight in a slot: ask(blob, place, rows).

    blob   a word of `blobs`
    place  of the first row, which begins a group, in the blob
    """
    row_bytes = row_bytes_of(kind)(sub_blocks)
    is_aligned = is_whole and in_sixteens(row_bytes)

    def ask(blob: int, place: int, rows: int) -> None:
        if is_aligned and blob & (IN_HOST_MEMORY | COMES) == 0:
            prefetch((blob & ADDRESS) + place, i32(rows * row_bytes))

    return ask


def tile_of(kind: TensorType, sub_blocks: int, table: int) -> Tile:
    """Return how tiles of a type are multiplied that a block may have written itself."""
    return Tile(*map(with_loads, tile_product(kind, sub_blocks, table)))


def in_sixteens(row_bytes: int) -> bool:
    """Return whether groups of rows of so many bytes begin at multiples of 16."""
    return GROUP_ROWS * row_bytes % 16 == 0


def of_shape(name: str, sub_blocks: int, is_whole: bool) -> str:
    """Return the name of a kernel of packed weights, for rows of so many sub-blocks."""
    return f"{name}_{SUB_BLOCK * sub_blocks}{'' if is_whole else '_odd'}".lower()


def float_name(name: str, in_eights: bool) -> str:
    """Return the name of a kernel of floats."""
    return name.lower() if in_eights else f"{name.lower()}_odd"
