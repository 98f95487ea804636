"""Let policies choose, between steps, which experts are in the slots of a device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strata_nb.cache.experts import ExpertArena, Tier
from strata_nb.cache.policy import Maker, Ranks


class Residency:
    """Move experts in and out of an arena, with a policy for each of its size classes.

    inserted, inserted_bytes   experts that were copied to slots since the start, and their bytes
    """

    def __init__(self, arena: ExpertArena, ranks: Ranks, make: Maker) -> None:
        """`ranks` (layers, experts) are a profile's, -1 where it has none."""
        layout = arena.layout
        self.inserted = 0
        self.inserted_bytes = 0
        self._arena = arena
        self._counted = arena.use.copy()  # the use that policies know of
        classes = np.array(layout.class_of_layer)
        self._layers = [np.flatnonzero(classes == number) for number in range(len(layout.classes))]
        self._policies = [make(ranks[layers]) for layers in self._layers]

    def after(self, rows: int) -> None:
        """Move experts after a step of `rows` tokens; all work that read slots has ended.

        Raises DriverError where a copy fails: who left has then left, and nobody came.
        """
        arena = self._arena
        used = arena.use - self._counted
        self._counted += used
        np.minimum(used, rows, out=used)  # a step that is repeated after an error counts once
        evicted: list[tuple[int, int]] = []
        inserted: list[tuple[int, int]] = []
        for layers, policy in zip(self._layers, self._policies, strict=True):
            resident = arena.expert_tier[layers] == Tier.SLOT
            moves = policy.after(used[layers], rows, resident, self._slots(layers))
            evicted += [(int(layers[layer]), expert) for layer, expert in moves.evicted]
            inserted += [(int(layers[layer]), expert) for layer, expert in moves.inserted]
        for layer, expert in evicted:
            arena.evict(layer, expert)
        if evicted:
            arena.reclaim()
        if inserted:
            self.inserted += arena.fill(inserted)
            self.inserted_bytes += sum(arena.layout.blob_bytes[layer] for layer, _ in inserted)

    def _slots(self, layers: npt.NDArray[np.intp]) -> int:
        """Return how many slots have the size of these layers' experts."""
        rounds, rest = divmod(self._arena.usable_slots, self._arena.layout.layers)
        return rounds * len(layers) + int(np.count_nonzero(layers < rest))
