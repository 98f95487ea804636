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

if TYPE_CHECKING:
    from strata_nb.cache.slots import SlotLayout


def choose_moves(heat: Sequence[float], kept: int, layout: SlotLayout) -> dict[int, int]:
    """Return slot -> slot: who moves before the slots from `kept` on are lost.

    heat   of the expert in each slot, -inf where there is none

    The hottest lost expert goes to the coldest kept slot of its class, and so on while it is hotter
    than who is there. Equal heat moves nobody, so that as few bytes as possible are copied.
    """
    moves: dict[int, int] = {}
    for size_class in range(len(layout.classes)):
        slots = [n for n in range(len(heat)) if layout.class_of_slot(n) == size_class]
        lost = sorted((n for n in slots if n >= kept), key=lambda n: -heat[n])
        cold = sorted((n for n in slots if n < kept), key=lambda n: heat[n])
        for source, target in zip(lost, cold, strict=False):
            if heat[source] <= heat[target]:
                break
            moves[source] = target
    return moves
