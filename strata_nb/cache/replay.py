"""Replay recorded routes against a policy, or against what could not be better.

Routes are integers (tokens, layers, top_k), as `routing` records them. Each token is a window: its
choices meet the residency that the windows before it left, then the policy moves. All experts have
one size.

`optimum` is Belady's rule with bypass: of what is resident or was just used, keep what is used
soonest. It starts with what is used first and has no floors. Nothing that brings only misses of the
window that just ended has more hits, wherever it starts; and nothing at all moves fewer experts
over the link, for who fetches one early could as well wait for the miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata_nb.cache.policy import Policy

Routes = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Outcome:
    """Count what a replay did.

    choices, hits   of experts: all, and those that found a slot
    written         experts that were written to slots
    fetched         of those: over the link for that alone
    """

    tokens: int
    choices: int
    hits: int
    written: int
    fetched: int

    @property
    def hit_rate(self) -> float:
        """Return the share of choices that found a slot."""
        return self.hits / self.choices

    @property
    def moved_a_token(self) -> float:
        """Return the experts that crossed the link, for each token."""
        return (self.choices - self.hits + self.fetched) / self.tokens

    @property
    def written_a_token(self) -> float:
        """Return the experts that were written to slots, for each token."""
        return self.written / self.tokens


def replay(
    routes: Routes, experts: int, policy: Policy, slots: int, start: Iterable[tuple[int, int]]
) -> Outcome:
    """Replay routes; the first `slots` experts (layer, number) of `start` begin."""
    tokens, layers, top_k = routes.shape
    resident = np.zeros((layers, experts), bool)
    for (layer, expert), _ in zip(start, range(slots), strict=False):
        resident[layer, expert] = True
    rows = np.repeat(np.arange(layers), top_k)
    used = np.zeros((layers, experts), np.int64)
    hits = written = 0
    for choices in routes:
        chosen = choices.reshape(-1)
        hits += int(resident[rows, chosen].sum())
        used[:] = 0
        used[rows, chosen] = 1
        moves = policy.after(used, 1, resident, slots)
        for layer, expert in moves.evicted:
            resident[layer, expert] = False
        for layer, expert in moves.inserted:
            resident[layer, expert] = True
        written += len(moves.inserted)
    fetched = written if policy.fetches else 0
    return Outcome(tokens, routes.size, hits, written, fetched)


def optimum(routes: Routes, experts: int, slots: int) -> Outcome:
    """Return what nothing that knows the future could do better; see above."""
    tokens, layers, top_k = routes.shape
    numbers = routes.reshape(tokens, -1) + experts * np.repeat(np.arange(layers), top_k)
    next_use = np.full(layers * experts, tokens)
    after = np.empty(numbers.shape, np.int64)  # the next use of each that is used
    for token in range(tokens - 1, -1, -1):
        after[token] = next_use[numbers[token]]
        next_use[numbers[token]] = token
    resident = np.zeros(layers * experts, bool)
    resident[np.argsort(next_use, kind="stable")[:slots]] = True
    hits = written = 0
    for token in range(tokens):
        found = resident[numbers[token]]
        hits += int(found.sum())
        resident[numbers[token]] = True
        next_use[numbers[token]] = after[token]
        held = np.flatnonzero(resident)
        leaving = len(held) - slots
        if leaving > 0:
            latest = np.argsort(next_use[held], kind="stable")[-leaving:]
            resident[held[latest]] = False
        written += int((resident[numbers[token]] & ~found).sum())
    return Outcome(tokens, routes.size, hits, written, 0)
