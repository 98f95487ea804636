"""Find the rows of a tile that are of one sequence, and what they see of its cells."""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.intrinsics import WARP, i32, i64, load_i64
from strata_nb.kernels.gpu.operations import warp_max_i32

MOST_CELLS = 1 << 30


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
