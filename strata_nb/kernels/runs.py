"""Runs of cells: what attention of a backend with many processors computes apart and then combines.

A run begins at a multiple of its length, and so what a row becomes does not depend on who computes
which run.
"""

from __future__ import annotations

from strata_nb.formats import BLOCK_CELLS

RUN_BLOCKS = 8  # K/V blocks
RUN_CELLS = RUN_BLOCKS * BLOCK_CELLS


def runs_of(blocks: int) -> int:
    """Return how many runs so many K/V blocks have room for."""
    return -(-blocks // RUN_BLOCKS)


def work_floats(blocks: int, value_length: int) -> int:
    """Return how many floats of work space a head of a row needs for so many K/V blocks.

    For each run its values, not yet divided, the largest score and the sum of the weights.
    """
    return runs_of(blocks) * (value_length + 2)
