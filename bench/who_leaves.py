"""Measure what it is worth that exactly the coldest experts leave when slots are given up.

Usage:
  who_leaves.py TRACE... [options]
  who_leaves.py --help

Options:
  --slots=PERCENT  of all experts that have a slot [default: 25]
  --lost=LIST      shares of the slots that are given up, in percent [default: 5,10,25,50]
  --after=N        tokens after that whose routes are counted [default: 512]
  --name=NAME      the figures go to bench/results/who_leaves_NAME.json; default: the first trace's

A trace is what --routing-trace writes: int16 .npy (tokens, layers, top-k). Its first half fills the
slots, by insertion on a miss in place of whoever was used longest ago, so that hot and cold lie
mixed as they do after a while; heat is the count of that half. Then slots are given up, by one of
these rules, and nothing is inserted any more:

  tail      whoever lies in the last slots leaves
  region    the slots before a fixed region of an eighth at the end are given up; an expert there is
            copied over the coldest one of that region if that is colder
  layer     the last slots are given up; experts move into colder slots of their own layer
  size      the same, into colder slots of their size: what the ledger does (all have one size here)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb.cache.moves import choose_moves  # noqa: E402
from strata_nb.cache.slots import SlotLayout  # noqa: E402

NOBODY = -1
Slots = npt.NDArray[np.int64]  # slot -> layer * experts + expert, NOBODY
Heat = npt.NDArray[np.int64]  # of each expert, counted by layer * experts + expert


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    after = int(arguments["--after"])
    rows = []
    for name in arguments["TRACE"]:
        trace = np.load(name).astype(np.int64)
        tokens, layers, _ = trace.shape
        experts = int(trace.max()) + 1
        numbers = (trace + np.arange(layers)[:, None] * experts).reshape(tokens, -1)
        count = max(layers, layers * experts * int(arguments["--slots"]) // 100)
        half = tokens // 2
        slots, heat = warmed(numbers[:half], count, layers * experts)
        routes = numbers[half : half + after].ravel()
        layout = SlotLayout((256,) * layers, experts)
        for lost in map(int, arguments["--lost"].split(",")):
            kept = max(layers, count - count * lost // 100)
            row = {"trace": Path(name).name, "lost_percent": lost, "slots": count, "kept": kept}
            row["hits_before"] = hit_rate(slots, routes)
            for rule, (left, moved) in leave(slots, heat, kept, layout, experts).items():
                row[rule] = hit_rate(left, routes)
                row[f"{rule}_moved"] = moved
            rows.append(row)
            rates = ", ".join(f"{rule} {row[rule]:.1%}" for rule in ("tail", "region", "layer"))
            print(
                f"{row['trace']}: {count:,} slots to {kept:,}: {row['hits_before']:.1%} before, "
                f"{rates}, size {row['size']:.1%} ({row['size_moved']:,} moved)"
            )
    write_result(
        f"who_leaves_{arguments['--name'] or Path(arguments['TRACE'][0]).stem}",
        "share of routes that find a slot, right after slots were given up by each rule",
        " ".join(["python bench/who_leaves.py", *(Path(a).name for a in sys.argv[1:])]),
        {"after_tokens": after, "rows": rows},
        ("numpy",),
    )


def warmed(numbers: npt.NDArray[np.int64], count: int, all_experts: int) -> tuple[Slots, Heat]:
    """Return slots after these routes (tokens, routes of each) and how often each was used."""
    slot_of: dict[int, int] = {}  # in the order of use, longest ago first
    heat = np.zeros(all_experts, np.int64)
    for token in numbers.tolist():
        for number in token:
            heat[number] += 1
            slot = slot_of.pop(number, None)
            if slot is None:
                slot = len(slot_of) if len(slot_of) < count else slot_of.pop(next(iter(slot_of)))
            slot_of[number] = slot
    slots = np.full(count, NOBODY, np.int64)
    slots[list(slot_of.values())] = list(slot_of)
    return slots, heat


def leave(
    slots: Slots, heat: Heat, kept: int, layout: SlotLayout, experts: int
) -> dict[str, tuple[Slots, int]]:
    """Return for each rule the slots that are left, and how many experts moved."""
    of_slot = np.where(slots == NOBODY, -np.inf, heat[slots])
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
    found["region"] = region, moved

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

    anywhere = slots.copy()
    moves = choose_moves(of_slot.tolist(), kept, layout)
    for hot, cold_slot in moves.items():
        anywhere[cold_slot] = slots[hot]
    found["size"] = anywhere[:kept], len(moves)
    return found


def hit_rate(slots: Slots, routes: npt.NDArray[np.int64]) -> float:
    """Return which share of the routes is in a slot."""
    return float(np.isin(routes, slots).mean())


if __name__ == "__main__":
    main()
