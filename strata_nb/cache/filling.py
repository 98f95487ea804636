"""Say which missed experts get slots within the window that misses them: the rule, in plain form.

Where the link to the host is slow, an expert that is missed should cross it once: to be multiplied
with, and to stay. Only the device knows in time what a window misses, so it decides, by a plan that
the host made while the window before ran (`fill_plans.py`): slots that nobody has, experts of the
layer that may leave, and what each is worth.

The missed come in the order of what they would gain: the first to the first free slot, whatever it
is worth, and so on; then the next to the slot of the coldest that may leave, if it gains at least
as much as that one is worth. Who was used in this window or in the one before does not leave, for
of these the plan knows nothing. So nobody waits, and what is decided is nearly as good as what a
policy could say between windows.

Where the CPU computes a share of the missed of a single row (`cpu_count`), those are the last in
that order, and do not come.

A layer decides for itself, hence slots move between layers only by the host, between windows.
Rejected: the host repeating each decision from the routes, in place of reading the addresses that
came out. They are 49 KB for 6,144 experts, a microsecond of the link beside counts that come
anyway; and a table that was read is right after a window that was interrupted or dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from strata_nb.fill_plans import (
    MOST_LISTED,
    MOST_OFFERED,
    NOT_LISTED,
    SHARE_BITS,
    SHARE_UNITS,
    STAYS,
    plan_type,
)

Addresses = npt.NDArray[np.int64]


def new_plans(layers: int, experts: int) -> npt.NDArray[np.void]:
    """Return plans (layers,) by which nobody gets a slot."""
    plans = np.zeros(layers, plan_type(experts))
    plans["gain"], plans["order"] = -np.inf, NOT_LISTED
    return plans


def write_plans(
    plans: npt.NDArray[np.void],
    window: int,
    free: Sequence[Sequence[int] | Addresses],
    resident: npt.NDArray[np.bool_],
    gain: npt.NDArray[np.floating],
    heat: npt.NDArray[np.floating],
) -> None:
    """Write the plans of a window.

    free       of each layer, addresses of slots that nobody has, and that no window in flight was
               offered; more than there is room for are passed over. Of no layer: none is free
    resident, gain, heat   (layers, experts); an infinite heat: nothing comes in its place
    """
    plans["window"] = window
    plans["offered"] = 0
    for layer, slots in enumerate(free):
        offered = slots[:MOST_OFFERED]
        plans["offered"][layer] = len(offered)
        plans["slots"][layer, : len(offered)] = offered
    plans["gain"], plans["heat"] = gain, heat
    may_leave = resident & np.isfinite(heat)
    heats = np.where(may_leave, plans["heat"], np.float32(np.inf))
    order = np.argsort(heats, axis=1, kind="stable")
    places = np.empty(order.shape, np.int32)
    np.put_along_axis(places, order, np.arange(order.shape[1], dtype=np.int32)[None], axis=1)
    plans["order"] = np.where(may_leave & (places < MOST_LISTED), places, NOT_LISTED)
    plans["listed"] = np.minimum(np.count_nonzero(may_leave, axis=1), MOST_LISTED)


def missed_in_order(
    plan: np.void, chosen: Iterable[int], addresses: Addresses, homes: Addresses
) -> list[int]:
    """Return the missed of a layer in the order in which they come to slots."""
    missed = [one for one in sorted(set(chosen)) if addresses[one] == homes[one]]
    return sorted(missed, key=lambda one: -float(plan["gain"][one]))


def cpu_count(share: int, missed: int) -> int:
    """Return how many of the missed of a row the CPU computes, by the share that a plan has.

    Where that is the CPU's share of the bytes that both read in a second, no other number has the
    later of the two end sooner: of n missed it is the largest that is less than share * (n + 1).
    But one at least crosses the link, unless the CPU has the whole: who crosses it may stay, and
    who never does is missed again.
    """
    most = missed if share == SHARE_UNITS else missed - 1
    return max(0, min(share * (missed + 1) - 1 >> SHARE_BITS, most))


def fill_layer(
    plan: np.void, chosen: Iterable[int], addresses: Addresses, homes: Addresses, seen: Addresses
) -> list[int]:
    """Change a layer's tables as a device does in a window; return who came to slots, in order.

    chosen      experts that the rows of the window chose
    addresses   (experts,): where each is, its slot or its home
    homes       (experts,): where each is in host memory
    seen        (experts,): number of the window that used it last
    """
    used, gain, heat = set(chosen), plan["gain"], plan["heat"]
    missed = missed_in_order(plan, used, addresses, homes)
    missed = missed[: len(missed) - cpu_count(int(plan["cpu_share"]), len(missed))]
    missed = [one for one in missed if gain[one] > -np.inf]
    order = np.argsort(plan["order"], kind="stable")
    leaving = [
        one
        for one in order[: plan["listed"]].tolist()
        if addresses[one] != homes[one] and one not in used and seen[one] + STAYS < plan["window"]
    ]
    slots, came = plan["slots"][: plan["offered"]].tolist(), []
    for place, one in enumerate(missed):
        if place < len(slots):
            addresses[one] = slots[place]
        elif place < len(slots) + len(leaving):
            victim = leaving[place - len(slots)]
            if gain[one] < heat[victim]:
                continue
            addresses[one], addresses[victim] = addresses[victim], homes[victim]
        else:
            break
        came.append(one)
    seen[list(used)] = plan["window"]
    return came
