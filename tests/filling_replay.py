"""Replay routes on a device that gives slots within the window; `cache.replay` has the others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strata_nb.cache.filling import fill_layer, new_plans, write_plans
from strata_nb.cache.policy import Policy
from strata_nb.cache.replay import Outcome, Routes
from strata_nb.fill_plans import STAYS

_FIRST = STAYS + 1  # number of a window before which nobody was used
_AWAY = -1  # the highest address of a slot that the start fills; those of free ones are above homes


def replay_filling(
    routes: Routes,
    experts: int,
    policy: Policy,
    slots: int,
    start: Iterable[tuple[int, int]],
    cpu_share: int = 0,
) -> Outcome:
    """Replay routes on a device that decides within the window (`filling.py`), as `replay` does.

    A plan knows the windows up to the one before the last. Slots are divided among the layers. Of
    the missed the CPU computes a share, as a plan has it, and those do not come.
    """
    tokens, layers, _ = routes.shape
    counts = [len(range(layer, slots, layers)) for layer in range(layers)]
    homes, addresses = np.arange(experts), np.tile(np.arange(experts), (layers, 1))
    for layer, expert in start:
        if counts[layer] > 0:
            counts[layer] -= 1
            addresses[layer, expert] = _AWAY - counts[layer]
    free = [list(range(experts, experts + count)) for count in counts]
    seen, used = np.zeros((2, layers, experts), np.int64)
    plans = new_plans(layers, experts)
    plans["cpu_share"] = cpu_share
    hits = written = 0
    resident = addresses != homes
    for window, choices in enumerate(routes):
        gain, heat = policy.worth()
        left = [np.setdiff1d(some, of) for some, of in zip(free, addresses, strict=True)]
        write_plans(plans, window + _FIRST, left, resident, gain, heat)
        if window:
            policy.note(used, 1)
        resident = addresses != homes
        used[:] = 0
        for layer, chosen in enumerate(choices.tolist()):
            used[layer, chosen] = 1
            hits += int(resident[layer, chosen].sum())
            written += len(fill_layer(plans[layer], chosen, addresses[layer], homes, seen[layer]))
    return Outcome(tokens, routes.size, hits, written, 0)
