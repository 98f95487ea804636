"""Decide which experts have slots, from how often each was used.

After each window a policy is told what the window used and answers with moves. A window may be one
token, some drafted ones or a prompt batch; whatever it is, time is counted in tokens.

    policy    who comes                                  when             link, beside misses
    static    a miss, while slots are free               each window      nothing
    lru       every miss, for who was longest unused     each window      nothing
    lfu       every miss, for who is used least often    each window      nothing
    insert    a miss more likely to be used than who     each window      nothing
              leaves
    swap      who was used often though it has no slot   every N windows  an expert a swap

Behind a prompt batch free slots are filled, hottest first, and `insert` also exchanges, where who
comes leads by so much that the copy is repaid within some 64 tokens: nothing passes the link there
that could stay, and the first token of the answer waits.

The last column counts as if a miss that crosses the link to be computed with were written to its
slot as it passes, so that only a swap fetches what has passed before. Host devices have no link:
there `Residency` copies whoever comes once more, between steps.

Two rules hold for all: an expert that a window used never leaves, and no layer falls below its
floor because experts of others are hotter. Layers whose experts differ in size cannot trade slots:
each size class has a policy of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from strata_nb.cache.foresight import Foresight

Counts = npt.NDArray[np.integer]
Heat = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Ranks = npt.NDArray[np.int32]

Expert = tuple[int, int]  # layer and number

FLOOR = 1  # slots of a layer that other layers cannot take
# The lead that pays for writing an expert to a slot: 0.005 of an expert saved by each token.
INSERT_MARGIN = 0.005
# The same where an expert that would otherwise wait for its miss is copied: behind a prompt batch.
COPY_MARGIN = 0.2
LFU_DECAY = 0.998  # a token: what was used 350 tokens ago counts half

# Periodic swaps: what it takes to come, and the lead over who leaves, in uses; windows between two
# rounds, swaps of a round, what a round leaves of a count.
SWAP_LEAST_HEAT = 2.0
SWAP_MARGIN = 1.5
SWAP_EVERY = 4
SWAP_MOST = 96
SWAP_DECAY = 0.7

NOBODY_LEAVES = -np.inf  # the lead over nobody
ANY_LEAD = np.finfo(np.float64).min  # the margin of those who bring every miss


class Moves(NamedTuple):
    """Say what changes: `evicted` leave, then `inserted` come; none is named twice."""

    evicted: list[Expert]
    inserted: list[Expert]


class Worth(NamedTuple):
    """Say what experts (layers, experts) are worth to who decides about misses in their window.

    gain   of one that is missed, if it comes: -infinity where it shall not
    heat   of one that has a slot: infinite where it stays. Who comes gains as much at least
    """

    gain: Heat
    heat: Heat


class Policy(Protocol):
    """Choose which experts of some layers, all of one size, have slots.

    fetches   whether who comes crosses the link for it; else it was missed in the window that just
              ended, and crossed to be computed with

    Who decides within a window needs no answer, only what experts are worth: `note`, then `worth`.
    """

    fetches: bool

    def note(self, used: Counts, rows: int) -> None:
        """Hear of a window as `after` does; where slots are full, a policy that fetches swaps later
        than it would."""

    def worth(self) -> Worth:
        """Return what experts are worth in the next window; the caller may change it."""

    def after(self, used: Counts, rows: int, resident: Mask, slots: int) -> Moves:
        """Return the moves after a window; nothing that is given is changed or kept.

        used       (layers, experts): how often the window chose each
        rows       tokens of the window
        resident   (layers, experts): which have a slot
        slots      that there are, no fewer than are held
        """

    def behind_prompt(self, used: Counts, resident: Mask, slots: int) -> Moves:
        """Return the moves behind a prompt batch of which the policy was told by `note`.

        The rest is as in `after`, but that who was used may leave: hardly anybody is not.
        """

    def heat(self) -> Heat:
        """Return (layers, experts): the coldest leave where slots are lost, and come last.

        The caller may change it. Equal where the policy does not care.
        """


# Makes a policy for layers whose experts have these ranks in a profile, -1 for none.
Maker = Callable[[Ranks], Policy]


def exchanges(
    heat: Heat,
    resident: Mask,
    candidates: Mask,
    protected: Mask,
    slots: int,
    *,
    floor: int = FLOOR,
    margin: float = 0.0,
    within_layers: bool = False,
) -> Moves:
    """Give candidates free slots, then those of colder experts: the hottest for the coldest.

    heat         (layers, experts), as all that follow: who is colder leaves sooner
    candidates   may come, where they are not resident
    protected    never leave
    slots        that there are; no more are held afterwards
    floor        slots that a layer keeps; a layer that has fewer comes first and needs no margin.
                 Where there are not as many, what there is for each
    margin       a candidate leads its victim by that much, or comes not. Free slots need no lead
    within_layers   an expert takes slots of its own layer only

    Equal heats count in the order of layer and number.
    """
    held = np.count_nonzero(resident, axis=1)
    free, floor = slots - int(held.sum()), min(floor, slots // len(heat))
    coming, leaving = candidates & ~resident, resident & ~protected
    if free <= 0:  # most candidates lead nobody, and to look at each takes milliseconds
        leads = heat - heat.min(where=leaving, initial=np.inf) >= margin
        coming &= leads | (held < floor)[:, None]
    wanted = np.argwhere(coming)
    moves = Moves([], [])
    if not len(wanted):
        return moves
    victims = _Victims(heat, leaving, held, floor)
    hot = heat[wanted[:, 0], wanted[:, 1]]
    order = np.argsort(-hot, kind="stable")
    queue = list(zip(wanted[order].tolist(), hot[order].tolist(), strict=True))
    for (layer, expert), candidate_heat in _poor_first(queue, victims.missing()):
        if free > 0:
            free -= 1
        else:
            poor = victims.held[layer] < victims.floor
            source = layer if within_layers else victims.coldest_layer(layer)
            if source is None:
                continue
            lead = candidate_heat - victims.coldest_heat(source)
            if lead == NOBODY_LEAVES or not (poor or lead >= margin):
                continue
            moves.evicted.append(victims.take(source))
        victims.held[layer] += 1
        moves.inserted.append((layer, expert))
    return moves


def _filling(heat: Heat, resident: Mask, candidates: Mask, slots: int) -> Moves:
    """Give candidates free slots only."""
    if slots <= np.count_nonzero(resident):
        return Moves([], [])
    return exchanges(heat, resident, candidates, np.ones_like(resident), slots, floor=0)


def _poor_first(
    queue: list[tuple[list[int], float]], missing: list[int]
) -> list[tuple[list[int], float]]:
    """Put in front what layers `missing` slots need; else the order stays."""
    if not any(missing):
        return queue
    first, rest = [], []
    for candidate in queue:
        (layer, _), _ = candidate
        if missing[layer] > 0:
            missing[layer] -= 1
            first.append(candidate)
        else:
            rest.append(candidate)
    return first + rest


class Static:
    """Give free slots to who was missed, most used first; then keep all: `--adapt off`."""

    fetches = False

    def __init__(self, layers: int, experts: int) -> None:
        self._use = np.zeros((layers, experts))

    def note(self, used: Counts, rows: int) -> None:
        """Hear of a window; see Policy."""
        self._use += used

    def worth(self) -> Worth:
        """Return that all experts may come to free slots, and nobody leaves."""
        return _nobody_leaves(self._use)

    def after(self, used: Counts, rows: int, resident: Mask, slots: int) -> Moves:
        """Return the moves after a window; see Policy."""
        self.note(used, rows)
        return _filling(self._use, resident, self._use > 0, slots)

    def behind_prompt(self, used: Counts, resident: Mask, slots: int) -> Moves:
        """Return the moves behind a prompt batch; see Policy."""
        return _filling(self._use, resident, used > 0, slots)

    def heat(self) -> Heat:
        """Return how often each expert was used."""
        return self._use.copy()


class LeastRecent:
    """Bring every miss, for the expert that was unused for the longest time."""

    fetches = False

    def __init__(self, layers: int, experts: int) -> None:
        self._last_use = np.full((layers, experts), -1.0)  # number of the window
        self._windows = 0

    def note(self, used: Counts, rows: int) -> None:
        """Hear of a window; see Policy."""
        self._last_use[used > 0] = self._windows
        self._windows += 1

    def worth(self) -> Worth:
        """Return that whoever is missed comes."""
        return Worth(np.full(self._last_use.shape, float(self._windows)), self.heat())

    def after(self, used: Counts, rows: int, resident: Mask, slots: int) -> Moves:
        """Return the moves after a window; see Policy."""
        self.note(used, rows)
        chosen = used > 0
        return exchanges(self._last_use, resident, chosen, chosen, slots, margin=ANY_LEAD)

    def behind_prompt(self, used: Counts, resident: Mask, slots: int) -> Moves:
        """Return the moves behind a prompt batch; see Policy."""
        return _filling(self._last_use, resident, used > 0, slots)

    def heat(self) -> Heat:
        """Return in which window each expert was last used, -1 for never."""
        return self._last_use.copy()


class LeastUsed:
    """Bring every miss, for the expert that was used least often, lately."""

    fetches = False

    def __init__(self, layers: int, experts: int, *, decay: float = LFU_DECAY) -> None:
        self._heat = np.zeros((layers, experts))
        self._decay = decay

    def note(self, used: Counts, rows: int) -> None:
        """Hear of a window; see Policy."""
        self._heat *= self._decay**rows
        self._heat += used

    def worth(self) -> Worth:
        """Return that whoever is missed comes."""
        return Worth(self._heat + self._heat.max(initial=0.0), self.heat())

    def after(self, used: Counts, rows: int, resident: Mask, slots: int) -> Moves:
        """Return the moves after a window; see Policy."""
        self.note(used, rows)
        chosen = used > 0
        return exchanges(self._heat, resident, chosen, chosen, slots, margin=ANY_LEAD)

    def behind_prompt(self, used: Counts, resident: Mask, slots: int) -> Moves:
        """Return the moves behind a prompt batch; see Policy."""
        return _filling(self._heat, resident, used > 0, slots)

    def heat(self) -> Heat:
        """Return how often each expert was used, lately."""
        return self._heat.copy()


class Swaps:
    """Swap at times: within each layer the hottest that has no slot for the coldest that has one.

    every    windows between two rounds; 0: never
    most     swaps of a round, of all layers together, those of the largest lead
    decay    what a round leaves of each heat, which counts uses

    Until no slot is free, what was missed comes in each window.
    """

    fetches = True

    def __init__(
        self,
        layers: int,
        experts: int,
        *,
        every: int = SWAP_EVERY,
        most: int = SWAP_MOST,
        decay: float = SWAP_DECAY,
    ) -> None:
        self._heat = np.zeros((layers, experts))
        self._every, self._most, self._decay = every, most, decay
        self._windows = 0

    def note(self, used: Counts, rows: int) -> None:
        """Hear of a window; see Policy."""
        self._heat += used
        self._windows += 1

    def worth(self) -> Worth:
        """Return that all experts may come to free slots, and nobody leaves between swaps."""
        return _nobody_leaves(self._heat)

    def after(self, used: Counts, rows: int, resident: Mask, slots: int) -> Moves:
        """Return the moves after a window; see Policy."""
        self.note(used, rows)
        if slots > np.count_nonzero(resident):
            return _filling(self._heat, resident, used > 0, slots)
        if not self._every or self._windows % self._every:
            return Moves([], [])
        moves = exchanges(
            self._heat,
            resident,
            self._heat >= SWAP_LEAST_HEAT,
            used > 0,
            slots,
            margin=SWAP_MARGIN,
            within_layers=True,
        )
        leads = [
            self._heat[new] - self._heat[old]
            for old, new in zip(moves.evicted, moves.inserted, strict=True)
        ]
        chosen = sorted(np.argsort(leads, kind="stable")[::-1][: self._most].tolist())
        self._heat *= self._decay
        return Moves([moves.evicted[n] for n in chosen], [moves.inserted[n] for n in chosen])

    def behind_prompt(self, used: Counts, resident: Mask, slots: int) -> Moves:
        """Return the moves behind a prompt batch; see Policy."""
        return _filling(self._heat, resident, used > 0, slots)

    def heat(self) -> Heat:
        """Return how often each expert was used, less for what lies some rounds back."""
        return self._heat.copy()


class Insertion:
    """Bring a miss where it is more likely to be used again than the least likely that has a slot.

    How likely is learned from the text: see `foresight`. `ranks` (layers, experts) are those of a
    profile, -1 for experts that it does not rank.
    """

    fetches = False

    def __init__(
        self,
        ranks: Ranks,
        *,
        margin: float = INSERT_MARGIN,
        floor: int = FLOOR,
    ) -> None:
        self._foresight = Foresight(ranks)
        self._margin, self._floor = margin, floor

    def note(self, used: Counts, rows: int) -> None:
        """Hear of a window; see Policy."""
        self._foresight.note(used, rows)

    def worth(self) -> Worth:
        """Return the chances that experts are used again: of who is missed as if it were just used,
        less the margin."""
        gain = self._foresight.chance_if_used() - self._margin
        return Worth(gain, self.heat())

    def after(self, used: Counts, rows: int, resident: Mask, slots: int) -> Moves:
        """Return the moves after a window; see Policy."""
        self.note(used, rows)
        chosen = used > 0
        return exchanges(
            self.heat(), resident, chosen, chosen, slots, floor=self._floor, margin=self._margin
        )

    def behind_prompt(self, used: Counts, resident: Mask, slots: int) -> Moves:
        """Return the moves behind a prompt batch; see Policy."""
        nobody = np.zeros_like(resident)
        return exchanges(
            self.heat(), resident, used > 0, nobody, slots, floor=self._floor, margin=COPY_MARGIN
        )

    def heat(self) -> Heat:
        """Return the chance that a token uses each expert; the same for all before the first."""
        return self._foresight.chance()


def _nobody_leaves(heat: Heat) -> Worth:
    """Return the worth of experts, of which all may come and those that have slots stay."""
    return Worth(heat.astype(np.float64), np.full(heat.shape, np.inf))


def static(ranks: Ranks) -> Static:
    """Make the policy that keeps what it has."""
    return Static(*ranks.shape)


def swaps(every: int | None, most: int | None, decay: float | None) -> Maker:
    """Return what makes periodic swaps; None is the default of each."""
    return lambda ranks: Swaps(
        *ranks.shape,
        every=SWAP_EVERY if every is None else every,
        most=SWAP_MOST if most is None else most,
        decay=SWAP_DECAY if decay is None else decay,
    )


class _Victims:
    """Hold who may leave, the coldest of each layer first."""

    def __init__(self, heat: Heat, victims: Mask, held: Counts, floor: int) -> None:
        heats = np.where(victims, heat, np.inf)
        order = np.argsort(heats, axis=1, kind="stable")
        self._heats = np.take_along_axis(heats, order, axis=1)
        self._order = order
        self._next = [0] * len(heat)
        self._heads: list[float] = self._heats[:, 0].tolist()  # infinite where nobody is left
        self.held: list[int] = held.tolist()
        self.floor = floor

    def missing(self) -> list[int]:
        """Return how many slots each layer has less than its floor."""
        return [max(0, self.floor - held) for held in self.held]

    def coldest_heat(self, layer: int) -> float:
        """Return the heat of who leaves this layer next, infinite for nobody."""
        return self._heads[layer]

    def coldest_layer(self, layer: int) -> int | None:
        """Return which layer gives a slot to `layer`: itself, or one above its floor.

        A layer below its floor gains nothing from itself.
        """
        best, best_heat = None, np.inf
        for other, heat in enumerate(self._heads):
            floor = self.floor if other == layer else self.floor + 1
            if heat < best_heat and self.held[other] >= floor:
                best, best_heat = other, heat
        return best

    def take(self, layer: int) -> Expert:
        """Let the coldest expert of a layer leave."""
        at = self._next[layer]
        expert = int(self._order[layer, at])
        self._next[layer] = at + 1
        more = at + 1 < self._order.shape[1]
        self._heads[layer] = float(self._heats[layer, at + 1]) if more else np.inf
        self.held[layer] -= 1
        return layer, expert
