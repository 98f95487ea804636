"""Choose which experts move when an arena loses its end; arithmetic only.

    before   | 7 . 2 9 | 1 8 |     a number is the heat of the expert in a slot, a dot a free slot
    moves        8   <-------'     the hottest of the lost slots go to free and colder kept ones
    after    | 7 8 2 9 |           whoever is left out is the coldest of its size

An expert fits a slot of its size class only, so each class is a matter of its own. Rejected:
losing whoever is in the lost slots (rounds of slots mix hot and cold), and moving only within a
layer, which keeps a cold expert of one layer where a hot one of another would fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from strata_nb.cache.slots import SlotLayout


def choose_moves(
    heat: Sequence[float] | npt.NDArray[np.float64], kept: int, layout: SlotLayout
) -> dict[int, int]:
    """Return slot -> slot: who moves before the slots from `kept` on are lost.

    heat   of the expert in each slot, -inf where there is none

    The hottest lost expert goes to the coldest kept slot of its class, and so on while it is hotter
    than who is there. Equal heat moves nobody, so that as few bytes as possible are copied.
    """
    heats = np.asarray(heat, np.float64)
    classes = layout.classes_of_slots(np.arange(len(heats)))
    moves: dict[int, int] = {}
    for size_class in range(len(layout.classes)):
        slots = np.flatnonzero(classes == size_class)
        first_lost = int(np.searchsorted(slots, kept))
        pairs = min(first_lost, len(slots) - first_lost)
        cold = _lowest(heats, slots[:first_lost], pairs)
        lost = _lowest(-heats, slots[first_lost:], pairs)
        hotter = heats[lost] > heats[cold]  # for the first of them, and no more from then on
        moves.update(zip(lost[hotter].tolist(), cold[hotter].tolist(), strict=True))
    return moves


def _lowest(
    heats: npt.NDArray[np.float64], slots: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """Return the `count` slots of the lowest heats, in order; of equal ones the first slots."""
    if 0 < count < len(slots):  # mostly a few of thousands, which are not all sorted for that
        highest = np.partition(heats[slots], count - 1)[count - 1]
        slots = slots[heats[slots] <= highest]
    return slots[np.argsort(heats[slots], kind="stable")][:count]
