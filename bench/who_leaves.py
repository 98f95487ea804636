"""Measure what it is worth that exactly the coldest experts leave when slots are given up.

Usage:
  who_leaves.py TRACE... [options]
  who_leaves.py --help

Options:
  --slots=PERCENT  of all experts that have a slot [default: 25]
  --lost=LIST      shares of the slots that are given up, in percent [default: 5,10,25,50]
  --moments=N      of each trace at which that is done, each time from the start [default: 8]
  --still=N        tokens after it, while nothing is inserted [default: 512]
  --on=N           tokens after it, while the default policy goes on [default: 16]
  --name=NAME      the figures go to bench/results/who_leaves_NAME.json; default: the first trace's

A trace is what --routing-trace writes: int16 .npy (tokens, layers, top-k). The default policy fills
the slots and exchanges experts, so that hot and cold lie mixed as they do after a while. Then slots
are given up, by one of these rules:

  tail      whoever lies in the last slots leaves
  region    the slots before a fixed region of an eighth at the end are given up; an expert there is
            copied over the coldest one of that region if that is colder
  layer     the last slots are given up; experts move into colder slots of their own layer
  size      the same, into colder slots of their size (all have one size here)
  policy    the same as size, but the policy says who is colder; else it is who was used less often

What the ledger does is `size` where the policy counts uses and inserts nothing (--adapt off), and
`policy` where it goes on. A prompt batch of as many tokens as --still is between the two: nothing
is inserted meanwhile, but it fetches an expert once, however many of its rows use it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb.cache.moves import choose_moves  # noqa: E402
from strata_nb.cache.policy import Insertion  # noqa: E402
from strata_nb.cache.replay import Routes  # noqa: E402
from strata_nb.cache.slots import SlotLayout  # noqa: E402

NOBODY = -1
MODES = ("still", "on", "batch")
RULES = ("tail", "region", "layer", "size", "policy")
Slots = npt.NDArray[np.int64]  # slot -> layer * experts + expert, NOBODY
Heat = npt.NDArray[np.float64]  # of each expert, by layer * experts + expert


class Moment(NamedTuple):
    """What there was before a token: the policy, the slots that it filled, and how often who was
    used."""

    token: int
    policy: Insertion
    slots: Slots
    use: Heat

    @property
    def heat(self) -> Heat:
        """Return the policy's heat as places, those of one heat in the order of their use."""
        order = np.lexsort((self.use, self.policy.heat().ravel()))
        places = np.empty(len(order))
        places[order] = np.arange(len(order))
        return places


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    still, on = int(arguments["--still"]), int(arguments["--on"])
    rows: list[dict[str, Any]] = []
    for name in arguments["TRACE"]:
        routes = np.load(name).astype(np.int64)
        tokens, layers, _ = routes.shape
        experts = int(routes.max()) + 1
        layout = SlotLayout((256,) * layers, experts)
        count = max(layers, layers * experts * int(arguments["--slots"]) // 100)
        times = np.linspace(tokens // 4, tokens - still, int(arguments["--moments"]), dtype=int)
        moments = list(replayed(routes, experts, count, times.tolist()))
        for lost in map(int, arguments["--lost"].split(",")):
            kept = max(layers, count - count * lost // 100)
            row: dict[str, Any] = {
                "trace": Path(name).name,
                "lost_percent": lost,
                "slots": count,
                "kept": kept,
            }
            row |= measured(routes, experts, moments, kept, layout, still, on)
            rows.append(row)
            print(f"{row['trace']}: {count:,} slots to {kept:,}")
            for mode in MODES:
                rates = ", ".join(f"{rule} {row[rule][mode]:.1%}" for rule in RULES)
                gain, error = (100 * figure for figure in row[f"gain_{mode}"])
                print(
                    f"    {mode:5}  before {row[f'before_{mode}']:.1%}, {rates}; "
                    f"policy over size {gain:+.2f} +- {error:.2f}"
                )
    write_result(
        f"who_leaves_{arguments['--name'] or Path(arguments['TRACE'][0]).stem}",
        "share of routes that find a slot after slots were given up by each rule, means of several "
        "moments of a trace: still, for some tokens without insertion; on, for fewer tokens with "
        "the default policy; batch, share of the experts that the tokens of still use; moved, "
        "experts between slots. gain_*: of policy over size, with the standard error",
        " ".join(["python bench/who_leaves.py", *(Path(a).name for a in sys.argv[1:])]),
        {"still_tokens": still, "on_tokens": on, "rows": rows},
        ("numpy",),
    )


def replayed(routes: Routes, experts: int, count: int, times: list[int]) -> Iterator[Moment]:
    """Yield what there was before the tokens of `times`, with `count` slots from the start."""
    layers = routes.shape[1]
    policy = Insertion(np.full((layers, experts), -1, np.int32))
    slots = np.full(count, NOBODY, np.int64)
    use = np.zeros(layers * experts)
    for token, choices in enumerate(routes):
        if token in times:
            yield Moment(token, copy.deepcopy(policy), slots.copy(), use.copy())
        use += step(policy, slots, choices, experts).ravel()


def step(policy: Insertion, slots: Slots, choices: Routes, experts: int) -> npt.NDArray[np.int64]:
    """Let a policy exchange experts of `slots` behind a token; returns what the token used."""
    layers, top_k = choices.shape
    used = np.zeros((layers, experts), np.int64)
    used[np.repeat(np.arange(layers), top_k), choices.ravel()] = 1
    resident = np.zeros(layers * experts, bool)
    resident[slots[slots != NOBODY]] = True
    moves = policy.after(used, 1, resident.reshape(layers, experts), len(slots))
    for layer, expert in moves.evicted:
        slots[slots == layer * experts + expert] = NOBODY
    free = np.flatnonzero(slots == NOBODY)
    for slot, (layer, expert) in zip(free, moves.inserted, strict=False):
        slots[slot] = layer * experts + expert
    return used


def measured(
    routes: Routes,
    experts: int,
    moments: list[Moment],
    kept: int,
    layout: SlotLayout,
    still: int,
    on: int,
) -> dict[str, Any]:
    """Return the figures of all rules when all but `kept` slots are given up."""
    found: dict[str, list[tuple[float, float, float, int]]] = {
        rule: [] for rule in ("before", *RULES)
    }
    for moment in moments:
        next_routes = routes[moment.token : moment.token + still]
        left = {"before": (moment.slots, 0), **leave(moment, kept, layout, experts)}
        for rule, (slots, moved) in left.items():
            hits = in_slots(slots, next_routes, experts)
            going_on = hits_going_on(moment.policy, slots, next_routes[:on], experts)
            batch = in_slots(slots, next_routes, experts, once=True)
            found[rule].append((hits, going_on, batch, moved))
    means = {rule: np.mean(some, axis=0).tolist() for rule, some in found.items()}
    figures: dict[str, Any] = {
        f"before_{mode}": value for mode, value in zip(MODES, means["before"], strict=False)
    }
    for rule in RULES:
        figures[rule] = dict(zip((*MODES, "moved"), means[rule], strict=True))
    gain = np.array(found["policy"])[:, :3] - np.array(found["size"])[:, :3]
    error = gain.std(axis=0, ddof=1) / np.sqrt(len(gain))
    for column, mode in enumerate(MODES):
        figures[f"gain_{mode}"] = [float(gain[:, column].mean()), float(error[column])]
    return figures


def leave(
    moment: Moment, kept: int, layout: SlotLayout, experts: int
) -> dict[str, tuple[Slots, int]]:
    """Return for each rule the slots that are left, and how many experts moved."""
    slots, heat = moment.slots, moment.use
    found = {"tail": (slots[:kept], 0)}

    region = slots.copy()
    top = len(slots) - len(slots) // 8
    moved = 0
    for given in reversed(range(top - (len(slots) - kept), top)):
        coldest = top + int(np.argmin(heat[region[top:]]))
        if heat[region[coldest]] < heat[region[given]]:
            region[coldest] = region[given]
            moved += 1
        region[given] = NOBODY
    found["region"] = region[region != NOBODY], moved

    of_slot = heat_of_slots(slots, heat)
    within = slots.copy()
    moved = 0
    for layer in range(layout.layers):
        own = np.flatnonzero(slots // experts == layer)
        lost = sorted((slot for slot in own if slot >= kept), key=lambda slot: -of_slot[slot])
        cold = sorted((slot for slot in own if slot < kept), key=lambda slot: of_slot[slot])
        for source, target in zip(lost, cold, strict=False):
            if of_slot[source] <= of_slot[target]:
                break
            within[target] = slots[source]
            moved += 1
    found["layer"] = within[:kept], moved

    for rule, worth in (("size", moment.use), ("policy", moment.heat)):
        anywhere = slots.copy()
        moves = choose_moves(heat_of_slots(slots, worth).tolist(), kept, layout)
        for hot, cold_slot in moves.items():
            anywhere[cold_slot] = slots[hot]
        found[rule] = anywhere[:kept], len(moves)
    return found


def heat_of_slots(slots: Slots, heat: Heat) -> Heat:
    """Return the heat of the expert in each slot, -inf for nobody."""
    return np.where(slots == NOBODY, -np.inf, heat[slots])


def in_slots(slots: Slots, routes: Routes, experts: int, *, once: bool = False) -> float:
    """Return which share of the routes (tokens, layers, top_k) is in a slot.

    once   of the experts that they lead to
    """
    numbers = routes + np.arange(routes.shape[1])[:, None] * experts
    return float(np.isin(np.unique(numbers) if once else numbers, slots).mean())


def hits_going_on(policy: Insertion, slots: Slots, routes: Routes, experts: int) -> float:
    """Return the same where the policy goes on meanwhile; neither it nor `slots` is changed."""
    policy, slots = copy.deepcopy(policy), slots.copy()
    rates = []
    for choices in routes:
        rates.append(in_slots(slots, choices[None], experts))
        step(policy, slots, choices, experts)
    return float(np.mean(rates))


if __name__ == "__main__":
    main()
