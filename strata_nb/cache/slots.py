"""Cut the arena of a device into slots, one for an expert; arithmetic only.

Slots lie in rounds: slot i has the size that layer i mod layers needs, so that any beginning of the
arena has room for every layer in the same proportion, and the first round is one slot a layer. An
expert can lie in any slot of its size class. Rejected: one class after the other (giving up the end
of the arena would take all of one class), and slots of the largest size for all (a third of the
bytes of a mixed file).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
BLOB_ALIGNMENT = 256  # bytes; of every blob, in the host arena and in a slot

_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


class SlotLayout:
    """Cut an arena into slots; pure arithmetic, bytes from the arena's beginning.

    blob_bytes   of one expert of each layer, packed; no layer at all for a dense model
    experts      of a layer

    A prefix of the arena holds a prefix of the slots.
    """

    def __init__(self, blob_bytes: tuple[int, ...], experts: int) -> None:
        self.blob_bytes = blob_bytes
        self.experts = experts
        self.layers = len(blob_bytes)
        self.full_slots = self.layers * experts
        sizes = [-(-size // BLOB_ALIGNMENT) * BLOB_ALIGNMENT for size in blob_bytes]
        self._ends = list(accumulate(sizes))  # of the slots of one round
        self._starts = [0, *self._ends]
        self._round_bytes = self._starts[-1]
        self.classes = sorted(set(sizes))  # sizes of slots
        self.class_of_layer = [self.classes.index(size) for size in sizes]
        self._starts_of_layers = np.array(self._starts[:-1], np.int64)
        self._classes_of_layers = np.array(self.class_of_layer, np.int64)

    def offset(self, slot: int) -> int:
        """Return where a slot begins."""
        round_, layer = divmod(slot, self.layers)
        return round_ * self._round_bytes + self._starts[layer]

    def class_of_slot(self, slot: int) -> int:
        """Return the number of a slot's size class."""
        return self.class_of_layer[slot % self.layers]

    def offsets(self, slots: Slots) -> Slots:
        """Return where each of many slots begins."""
        rounds, layers = np.divmod(slots, max(1, self.layers))
        return rounds * self._round_bytes + self._starts_of_layers[layers]

    def classes_of_slots(self, slots: Slots) -> Slots:
        """Return the number of the size class of each of many slots."""
        return self._classes_of_layers[slots % max(1, self.layers)]

    def classes_of_layers(self, layers: Slots) -> Slots:
        """Return the number of the size class of each of many layers."""
        return self._classes_of_layers[layers]

    def slot_bytes(self, slot: int) -> int:
        return self.classes[self.class_of_slot(slot)]

    def bytes_of(self, slots: int) -> int:
        """Return how long an arena of `slots` slots is."""
        return self.offset(slots) if slots else 0

    def slots_within(self, arena_bytes: int) -> int:
        """Return how many slots lie whole in the first `arena_bytes`, at most one an expert."""
        if not self.layers:
            return 0
        rounds, rest = divmod(arena_bytes, self._round_bytes)
        return min(self.full_slots, rounds * self.layers + bisect_right(self._ends, rest))


def slot_budget(size: tuple[float, str] | None, layout: SlotLayout) -> int | None:
    """Return the slots that a size asks for (`options.expert_cache_size`); None for None.

    The unit says of what: "" slots (0: none, every expert is read in place), "%" of all experts,
    "MiB" or "GiB": as many slots as lie in that. More than one slot for each expert are of no use:
    the answer is at most that.
    """
    if size is None:
        return None
    number, unit = size
    if unit == "":
        return min(int(number), layout.full_slots)
    if unit == "%":
        return int(layout.full_slots * number / 100)
    return layout.slots_within(int(number * _UNITS[unit]))
