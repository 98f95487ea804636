"""Find the rows of a tile that are of one sequence, and what they see of its cells.

Attention of a prompt batch computes *pairs* of a row and one of the heads that share a K/V head:
pair n of a K/V head is of row n // group. A tile has neighbouring pairs.
"""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics import WARP, i32, i64, load_i64, quotient_i32
from strata_nb.kernels.gpu.operations import warp_max_i32

MOST_CELLS = 1 << 30


def rows_of_pairs(first: Any, pairs: int, group: Any, count: Any) -> Any:
    """Return the first row of so many pairs from one on, and the row behind the last, of `count`
    rows."""
    stop = quotient_i32(i32(first + pairs + group - 1), group)
    return i64(quotient_i32(first, group)), min(i64(stop), count)


def head_of_pair(pair: Any, row: Any, group: Any, kv_head: Any, heads: Any, count: Any) -> Any:
    """Return the number of a pair's head of its row among all heads of all rows; a pair behind the
    last of `count` rows has the last one's."""
    return heads * min(i64(row), count - 1) + group * kv_head + pair - group * row


def position_of(positions: int, row: Any, begin: int, end: int) -> Any:
    """Return a row's position, -1 where it is not among rows begin .. end - 1."""
    position = i32(-1)
    if begin <= row and row < end:
        position = i32(load_i64(positions + 8 * row))
    return position


def span_of(sequences: int, positions: int, begin: int, stop: int, lane: int) -> Any:
    """Return the end of the rows from `begin` on that are of one sequence, the last cell that one
    of them sees, and the last that all see; the same in all lanes of a warp."""
    sequence = load_i64(sequences + 8 * begin)
    row, end = begin + lane, stop
    while row < end:
        if load_i64(sequences + 8 * row) != sequence:
            end = row
        row += WARP
    end = -i64(warp_max_i32(i32(-end)))
    row, last, lowest = begin + lane, i64(-1), i64(MOST_CELLS)
    while row < end:
        position = load_i64(positions + 8 * row)
        last, lowest = max(last, position), min(lowest, position)
        row += WARP
    return end, warp_max_i32(i32(last)), i32(-warp_max_i32(i32(-lowest)))
