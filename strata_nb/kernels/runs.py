"""Runs of cells: what attention of a backend with many processors computes apart and then combines.

A run begins at a multiple of its length, and so what a row becomes does not depend on who computes
which run.
"""

from __future__ import annotations

from strata_nb.formats import BLOCK_CELLS

RUN_BLOCKS = 8  # K/V blocks
RUN_CELLS = RUN_BLOCKS * BLOCK_CELLS
SLICE_BYTES = 64 << 20  # of work space that there is for a batch
_LEAST_ROWS = 8  # for which there is room in any case


def runs_of(blocks: int) -> int:
    """Return how many runs so many K/V blocks have room for."""
    return -(-blocks // RUN_BLOCKS)


def work_floats(blocks: int, value_length: int) -> int:
    """Return how many floats of work space a head of a row needs for so many K/V blocks.

    For each run its values, not yet divided, the largest score and the sum of the weights.
    """
    return runs_of(blocks) * (value_length + 2)


def slice_rows(rows: int, heads: int, blocks: int, value_length: int) -> int:
    """Return for how many of the rows of a step there is work space at a time."""
    of_row = 4 * heads * work_floats(blocks, value_length)
    return min(rows, max(_LEAST_ROWS, SLICE_BYTES // of_row))


def work_bytes(rows: int, heads: int, blocks: int, value_length: int) -> int:
    """Return the bytes of work space for so many rows: of a slice, and a word for each slice."""
    at_a_time = slice_rows(rows, heads, blocks, value_length)
    each = 4 * heads * work_floats(blocks, value_length)
    return -(-at_a_time * each // 8) * 8 + 8 * -(-rows // at_a_time)
