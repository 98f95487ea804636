"""Attention by runs of cells: who computes which, and where partial results lie.

A row's cells are cut into runs (`kernels/runs.py`). A block of threads takes some heads of a row
and every N-th run, each from the beginning; what it finds goes to the work space, and `combining`
joins the runs in ascending order. So a row's bits follow from its cells alone, whoever computes
which run, and a long context fills the card.

In the work space a head of a row has, one behind the other:

    values      float32 (runs, value_length): the sum of weight times value
    maxima      float32 (runs,): the largest score, from which weights count
    sums        float32 (runs,): the sum of the weights
"""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.operations import Arguments, Grid
from strata_nb.kernels.runs import RUN_BLOCKS, runs_of


def grid_of(tiles: int, arguments: Arguments, most_rows: int, blocks: int) -> Grid:
    """Return the grid (tiles of heads, rows, N): about so many blocks of threads in all, or more if
    rows and heads need more, and no more than there are runs."""
    runs = runs_of(arguments["table_width"])
    return tiles, most_rows, max(1, min(runs, blocks // (tiles * most_rows)))


# -- in kernels ------------------------------------------------------------------------------------


def room_for_runs(table_width: Any) -> Any:
    """Return how many runs the work space has for a head of a row."""
    return (table_width + RUN_BLOCKS - 1) // RUN_BLOCKS


def work_of(work: Any, head_of_row: Any, runs: Any, value_length: Any) -> Any:
    """Return where the work space of a head of a row begins: its values."""
    return work + 4 * head_of_row * runs * (value_length + 2)


def maxima_of(values: Any, runs: Any, value_length: Any) -> Any:
    """Return where the maxima are, of where the values are; 4 * runs bytes behind them the sums."""
    return values + 4 * runs * value_length
