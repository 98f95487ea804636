"""Lay out what a host plans for a window: which missed experts a device may give slots of its own.

For each layer a record, one behind the other. What is done with it says `cache/filling.py`.

    window    number of the window, one more than that of the window before
    offered   how many of `slots` are there: addresses of slots that nobody has
    listed    how many experts `order` lists
    cpu_share   of the missed of a single row, in parts of SHARE_UNITS, that goes to the CPU
    gain      of each expert: what it would be worth if it were used now; -infinity for one that
              wants no slot
    heat      of each expert: what it is worth as it is
    order     of each expert: its place among those that may leave, coldest first, of which `listed`
              are below MOST_LISTED; NOT_LISTED for all others
"""

from __future__ import annotations

import numpy as np

# Slots, of a layer: as many as two tokens of most models use. What a window was offered nobody else
# is offered while it runs: more would leave too few for the window that begins meanwhile.
MOST_OFFERED = 16
MOST_LISTED = 64  # experts, of a layer
NOT_LISTED = 1 << 30
SHARE_BITS = 16
SHARE_UNITS = 1 << SHARE_BITS  # that are the whole

# Bytes from a record's beginning; `gain`, `heat` and `order` have four for each expert.
WINDOW, OFFERED, LISTED, CPU_SHARE, SLOTS = 0, 8, 16, 24, 32
COLUMNS = SLOTS + 8 * MOST_OFFERED

# Windows before this one whose experts stay in their slots: of these a plan knows nothing, because
# it is made while the window before runs.
STAYS = 1


def plan_type(experts: int) -> np.dtype[np.void]:
    """Return the layout of a layer's record."""
    return np.dtype(
        [
            ("window", np.int64),
            ("offered", np.int64),
            ("listed", np.int64),
            ("cpu_share", np.int64),
            ("slots", np.int64, MOST_OFFERED),
            ("gain", np.float32, (experts,)),
            ("heat", np.float32, (experts,)),
            ("order", np.int32, (experts,)),
        ],
        align=True,
    )
