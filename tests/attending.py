"""Run attention of a card over a K/V in plain arrays, and what the reference makes of the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gpu_launches import Run, aligned
from kv_store import Floats, Store

from strata_nb.kernels import reference
from strata_nb.kernels.runs import work_bytes

SCALE = 0.25
UNTOUCHED = np.float32(7e33)
UNUSED = [1 << 40, 1 << 40]  # what rows that a step does not have are left with


def attend(
    gpu: Run, kv: Store, q: Floats, sequences: Sequence[int], positions: Sequence[int]
) -> Floats:
    """Return what rows attend to; the grid has room for two rows more, which stay untouched."""
    rows, heads, _ = q.shape
    out = aligned(np.full((rows + 2, heads, kv.lengths[1]), UNTOUCHED))
    work = work_bytes(rows + 2, heads, kv.table.shape[1], kv.lengths[1])
    values = {
        **kv.arguments(),
        "rows": aligned(np.array([rows])),
        "sequences": aligned(np.array([*sequences, *UNUSED])),
        "positions": aligned(np.array([*positions, *UNUSED])),
        "q": aligned(q),
        "out": out,
        "work": aligned(np.full(work, 0xFF, np.uint8)),  # of floats: NaN
        "heads": heads,
        "kv_heads": kv.kv_heads,
        "scale": SCALE,
    }
    written = ["out", "work"]
    gpu("attention", values, written, variant=kv.kinds, most_rows=rows + 2, tables=[kv.memory])
    assert np.all(out[rows:] == UNTOUCHED)
    return out[:rows]


def expected(kv: Store, q: Floats, sequence: int, positions: Sequence[int]) -> Floats:
    """Return what the reference makes of rows of one sequence; positions ascend."""
    cells = max(positions) + 1
    keys, values = kv.read("k", sequence, cells), kv.read("v", sequence, cells)
    return reference.attention(q, keys, values, np.array(positions), SCALE)


def close(found: Floats, wanted: Floats) -> bool:
    return np.allclose(found, wanted, rtol=2e-5, atol=5e-6)


def rows_are_close(
    kv: Store, found: Floats, q: Floats, sequences: Sequence[int], positions: Sequence[int]
) -> bool:
    return all(
        close(found[row : row + 1], expected(kv, q[row : row + 1], sequence, [position]))
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True))
    )
