"""Let policies choose, between steps, which experts are in the slots of a device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from strata_nb.cache.experts import ExpertArena, Tier
from strata_nb.cache.policy import Counts, Heat, Maker, Mask, Moves, Policy, Ranks, Worth
from strata_nb.errors import DeviceLost, DriverError
from strata_nb.interrupts import interrupts_later

Routes = npt.NDArray[np.integer]

# Rows of a prompt batch that policies are told of by themselves, and as how many windows: the
# memory of what is used together with what is some 20 tokens long (`foresight`).
LATEST_ROWS = 32
LATEST_GROUP = 4

_NOTHING = Moves([], [])


class Residency:
    """Move experts in and out of an arena, with a policy for each of its size classes.

    inserted, inserted_bytes   experts that came to slots since the start, and their bytes
    copied_bytes   of experts that were copied to slots by the host, between steps
    """

    def __init__(
        self,
        arena: ExpertArena,
        ranks: Ranks,
        make: Maker,
        *,
        say: Callable[[str], None],
        device_fills: bool = False,
    ) -> None:
        """`ranks` (layers, experts) are a profile's, -1 where it has none.

        device_fills   who is missed comes, or not, before policies hear of it (`filling.py`)
        """
        layout = arena.layout
        self.inserted = 0
        self.inserted_bytes = 0
        self.copied_bytes = self._missed_bytes = 0
        self._device_fills = device_fills
        self._came = np.zeros(arena.use.shape, bool)  # since `decide` was asked last
        self._moved = _NOTHING  # behind a step that it has not heard of
        self._blob_bytes = np.array(layout.blob_bytes, np.int64)
        self._arena = arena
        self._make = make
        self._say = say
        self._failing = False  # since the last copy: then it was said
        self._counted = arena.use.copy()  # the use that policies know of
        self._of_batches = np.zeros_like(arena.use)  # of it, behind that: bytes of it are counted
        self._unseen_rows = 0  # tokens that they do not know of
        classes = np.array(layout.class_of_layer)
        self._layers = [np.flatnonzero(classes == number) for number in range(len(layout.classes))]
        self._policies = [make(ranks[layers]) for layers in self._layers]

    def after(self, rows: int, latest: Routes | None = None) -> None:
        """Move experts after a step of `rows` tokens: `decide`, then `carry_out`."""
        self.carry_out(self.decide(rows, latest))

    def decide(self, rows: int, latest: Routes | None = None) -> Moves:
        """Tell the policies of a step of `rows` tokens; return what they want, of all layers.

        `arena.use` counts the step. Nothing moves: later steps may be running.

        latest   of a prompt batch: the experts (some, layers, top_k) that its last rows used,
                 `LATEST_ROWS` of them or fewer; None for a window, in which a device that fills
                 slots itself did so
        """
        arena = self._arena
        used, rows = self._news(rows)
        evicted: list[tuple[int, int]] = []
        inserted: list[tuple[int, int]] = []
        in_slots = arena.expert_tier == Tier.SLOT
        of_windows = np.maximum(used - self._of_batches, 0)
        self._missed_bytes += self._bytes_of_missed(of_windows)
        self._of_batches[:] = 0
        self._came, self._moved = np.zeros_like(in_slots), _NOTHING
        for layers, policy in zip(self._layers, self._policies, strict=True):
            resident, slots = in_slots[layers], self._slots(layers)
            is_full = slots <= np.count_nonzero(resident)
            if latest is not None:
                tell_of_prompt(policy, used[layers], rows, latest[:, layers])
                moves = policy.behind_prompt(used[layers], resident, slots)
            elif self._device_fills and not (policy.fetches and is_full):
                policy.note(used[layers], rows)
                continue
            else:
                moves = policy.after(used[layers], rows, resident, slots)
            evicted += [(int(layers[layer]), expert) for layer, expert in moves.evicted]
            inserted += [(int(layers[layer]), expert) for layer, expert in moves.inserted]
        return Moves(evicted, inserted)

    def carry_out(self, moves: Moves, *, is_late: bool = False) -> None:
        """Move experts as was decided last; all work that read slots has ended.

        is_late   a step has ended since, of which `decide` has not heard: what it missed is what
                  had no slot before

        No answer needs this: where a copy fails, who left has left and nobody came, and a line says
        so, one until copies succeed again. Raises DeviceLost.
        """
        if is_late:
            self._moved = moves
        if moves.evicted:
            with interrupts_later():
                for layer, expert in moves.evicted:
                    self._arena.evict(layer, expert)
                self._arena.reclaim()
        if moves.inserted:
            self._insert(moves.inserted)

    def forget(self) -> None:
        """Empty every slot, and let policies begin as with no profile; no work may be running.

        The caller counts use from zero then.
        """
        arena = self._arena
        self._missed_bytes = self.missed_bytes
        for layer, expert in np.argwhere(arena.expert_tier == Tier.SLOT).tolist():
            arena.evict(layer, expert)
        arena.reclaim()
        self._counted[:], self._unseen_rows = 0, 0
        self._of_batches[:] = 0
        self._came[:], self._moved = False, _NOTHING
        unranked = np.full(arena.use.shape, -1, np.int32)
        self._policies = [self._make(unranked[layers]) for layers in self._layers]

    def pass_over(self, rows: int) -> None:
        """Note a step of which policies need not know yet: every expert has a slot.

        They hear of all such steps together, as of one, when somebody asks them; `arena.use` may be
        behind until then.
        """
        self._unseen_rows += rows

    def note_batch(self, used: npt.NDArray[np.int64], streamed: Mask) -> None:
        """Count the bytes that a prompt batch took from host memory; policies hear of it later.

        used       (layers, experts): how often the batch chose each
        streamed   the same of bool: who was copied for it, used or not
        """
        missed = (self._arena.expert_tier == Tier.IN_PLACE) & (used > 0)
        self._missed_bytes += int(np.count_nonzero(missed | streamed, axis=1) @ self._blob_bytes)
        self._of_batches += used

    @property
    def missed_bytes(self) -> int:
        """Bytes of experts that steps used and that had no slot when they began: for each choice of
        a window, and of a prompt batch, whose rows share what is read, once for each expert.

        Policies are told nothing of steps while there are no slots, or one for each expert.
        """
        unseen = self._arena.use - self._counted - self._of_batches
        return self._missed_bytes + self._bytes_of_missed(unseen)

    def _bytes_of_missed(self, used: npt.NDArray[np.int64]) -> int:
        """Return the bytes of experts that the last step used and missed; nobody left within it
        whom it used."""
        hit = (self._arena.expert_tier == Tier.SLOT) & ~self._came
        for had_slots, experts in ((True, self._moved.evicted), (False, self._moved.inserted)):
            for layer, expert in experts:
                hit[layer, expert] = had_slots
        missed = np.where(hit, 0, used)
        return int(missed.sum(axis=1) @ self._blob_bytes)

    def worth(self) -> Worth:
        """Return what experts (layers, experts) are worth to a device that brings misses itself."""
        found = Worth(np.empty(self._arena.use.shape), np.empty(self._arena.use.shape))
        for layers, policy in zip(self._layers, self._policies, strict=True):
            found.gain[layers], found.heat[layers] = policy.worth()
        return found

    def note_filled(self, came: Mask, *, is_counted: bool) -> None:
        """Count experts (layers, experts) that a device has brought to slots itself.

        is_counted   `decide` will hear of the step that did it
        """
        if is_counted:
            self._came |= came
        self._count(came)

    def heat(self) -> Heat:
        """Return the place of each expert (layers, experts) among those of its size, coldest first.

        The policy says who is colder. Those that are the same to it are in the order of the arena's
        own heat, which is use, then the profile; those that are the same to both have one place.
        """
        if self._unseen_rows:
            self.decide(0)  # where every expert has a slot, nobody comes or leaves
        places = np.empty(self._arena.use.shape)
        own = self._arena.heat()
        for layers, policy in zip(self._layers, self._policies, strict=True):
            heat = policy.heat()
            places[layers] = _places(heat.ravel(), own[layers].ravel()).reshape(heat.shape)
        return places

    def _news(self, rows: int) -> tuple[npt.NDArray[np.int64], int]:
        """Return the use that policies have not heard of, and of how many tokens it is."""
        rows += self._unseen_rows
        self._unseen_rows = 0
        used = self._arena.use - self._counted
        self._counted += used
        np.minimum(used, rows, out=used)  # a step that is repeated after an error counts once
        return used, rows

    def _insert(self, experts: list[tuple[int, int]]) -> None:
        """Copy experts to free slots, as many as find one, and count those."""
        arena = self._arena
        before = arena.expert_tier == Tier.SLOT
        try:
            arena.fill(experts)
        except DeviceLost:
            raise
        except DriverError as error:
            if not self._failing:
                self._say(f"experts are read in place, a copy to a slot failed: {error.message}")
            self._failing = True
            return
        self._failing = False
        self.copied_bytes += self._count((arena.expert_tier == Tier.SLOT) & ~before)

    def _count(self, came: Mask) -> int:
        """Count experts that came to slots; return their bytes."""
        each = np.count_nonzero(came, axis=1)
        size_bytes = int(each @ self._blob_bytes)
        self.inserted += int(each.sum())
        self.inserted_bytes += size_bytes
        return size_bytes

    def _slots(self, layers: npt.NDArray[np.intp]) -> int:
        """Return how many slots have the size of these layers' experts."""
        rounds, rest = divmod(self._arena.usable_slots, self._arena.layout.layers)
        return rounds * len(layers) + int(np.count_nonzero(layers < rest))


def tell_of_prompt(policy: Policy, used: Counts, rows: int, latest: Routes) -> None:
    """Tell a policy of a prompt batch: at first of all rows but the latest, then of those.

    What the rows before an answer used is what its first tokens will use; in a batch of hundreds
    it would not be seen.

    used     (layers, experts): how often all rows chose each
    latest   (some, layers, top_k): choices of the last of them
    """
    layers = np.arange(len(used))[:, None]
    groups = []
    for start in range(0, len(latest), LATEST_GROUP):
        some = latest[start : start + LATEST_GROUP]
        counts = np.zeros_like(used)
        np.add.at(counts, (layers, some), 1)
        groups.append((counts, len(some)))
    before = used - sum(counts for counts, _ in groups)
    if rows > len(latest):
        policy.note(np.maximum(before, 0), rows - len(latest))
    for counts, some_rows in groups:
        policy.note(counts, some_rows)


def _places(first: Heat, then: Heat) -> Heat:
    """Return the place of each in the order of `first`, where that is equal of `then`."""
    order = np.argsort(then, kind="stable")  # and the next one keeps it: half of lexsort's time
    order = order[np.argsort(first[order], kind="stable")]
    higher = (np.diff(first[order]) > 0) | (np.diff(then[order]) > 0)
    places = np.zeros(len(order))
    places[order[1:]] = np.cumsum(higher)
    return places
