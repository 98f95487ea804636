"""Replay a prompt and the answer behind it: which experts are there when the answer begins.

Usage:
  behind_prompts.py [options]
  behind_prompts.py --help

Options:
  --layers=N      [default: 6]
  --experts=N     of each layer [default: 128]
  --top-k=N       [default: 8]
  --earlier=LIST  tokens of a text that was written before; 0: slots are empty [default: 1200,0]
  --prompts=LIST  tokens of prompts, each read as one batch [default: 100,512]
  --slots=LIST    in percent of all experts [default: 50,25,10]
  --first=N       tokens of the answer [default: 64]
  --seeds=N       routes that are replayed [default: 3]
  -o FILE         write the figures here, not to bench/results/behind_prompts.json

Routes are made (tools/make_routes.py): one text, and another one that a prompt begins. Windows give
slots as a card does (`cache/filling.py`), and the policy is the default one. Behind the prompt the
host copies experts to slots:

  window   as if the prompt were one window: nobody whom it used leaves
  prompt   as it is done (`cache/residency.py`): the last rows are told by themselves, anybody may
           leave, and who comes leads by much more
  none     nobody is copied, and the prompt is told as one window

Copies and misses are those of a layer: a copy takes the link as long as a miss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

from card_graphs import percents, whole_number, whole_numbers  # noqa: E402 - bench/ is no package
from make_routes import make_routes  # noqa: E402
from results import write_result  # noqa: E402

from strata_nb.cache.filling import fill_layer, new_plans, write_plans  # noqa: E402
from strata_nb.cache.policy import Insertion, Mask, Moves  # noqa: E402
from strata_nb.cache.replay import Routes  # noqa: E402
from strata_nb.cache.residency import LATEST_ROWS, tell_of_prompt  # noqa: E402
from strata_nb.cache.routing import count_use  # noqa: E402

FIRST_WINDOW = 3  # so that nobody was used by a window lately
OTHER_TEXT = 100  # seeds of texts and of prompts behind them lie so far apart

Behind = Callable[["Replay", Routes], Moves]


class Replay:
    """Hold the slots of a device, and a policy that follows what it reads.

    Experts have addresses: their number while they are at home, more than that in a slot.
    """

    def __init__(self, layers: int, experts: int, slots: int) -> None:
        self.policy = Insertion(np.full((layers, experts), -1, np.int32))
        self.slots = slots
        self.homes = np.arange(experts)
        self.addresses = np.tile(self.homes, (layers, 1))
        self._own = [list(range(experts + n, experts + slots, layers)) for n in range(layers)]
        self.used = np.zeros((layers, experts), np.int64)  # by the last window
        self._seen, self._plans = np.zeros_like(self.used), new_plans(layers, experts)
        self._window = 0

    @property
    def resident(self) -> Mask:
        """Which experts (layers, experts) have slots."""
        return np.not_equal(self.addresses, self.homes)

    def write(self, routes: Routes) -> int:
        """Go on by windows of a token, (tokens, layers, top_k); return the hits."""
        hits, known = 0, self.resident
        for token, choices in enumerate(routes):
            gain, heat = self.policy.worth()
            write_plans(
                self._plans, self._window + FIRST_WINDOW, self._offered(), known, gain, heat
            )
            if token:  # a plan is made before the window in front of it has ended
                self.policy.note(self.used, 1)
            known = self.resident
            self.used[:] = 0
            for layer, chosen in enumerate(choices.tolist()):
                self.used[layer, chosen] = 1
                hits += int(known[layer, chosen].sum())
                plan, addresses = self._plans[layer], self.addresses[layer]
                fill_layer(plan, chosen, addresses, self.homes, self._seen[layer])
            self._window += 1
        if len(routes):
            self.policy.note(self.used, 1)
        return hits

    def read(self, routes: Routes, behind: Behind) -> int:
        """Read a prompt, and move whom `behind` says; return how many were copied."""
        moves = behind(self, routes)
        for layer, expert in moves.evicted:
            self.addresses[layer, expert] = expert
        offered = [slots.tolist() for slots in self._offered()]
        for layer, expert in moves.inserted:
            giver = layer if offered[layer] else next(n for n, some in enumerate(offered) if some)
            slot = offered[giver].pop()
            self._own[giver].remove(slot)
            self._own[layer].append(slot)
            self.addresses[layer, expert] = slot
        return len(moves.inserted)

    def _offered(self) -> list[Any]:
        """Return each layer's own slots that nobody has."""
        held = zip(self._own, self.addresses, strict=True)
        return [np.setdiff1d(slots, addresses) for slots, addresses in held]


def as_a_window(replay: Replay, routes: Routes) -> Moves:
    """Move experts as if the prompt were one window."""
    used = count_use(routes, len(replay.homes))
    return replay.policy.after(used, len(routes), replay.resident, replay.slots)


def as_a_prompt(replay: Replay, routes: Routes) -> Moves:
    """Move experts as `Residency` does."""
    used = count_use(routes, len(replay.homes))
    tell_of_prompt(replay.policy, used, len(routes), routes[-LATEST_ROWS:])
    return replay.policy.behind_prompt(used, replay.resident, replay.slots)


def nobody(replay: Replay, routes: Routes) -> Moves:
    """Tell the policy of the prompt, and move nobody."""
    replay.policy.note(count_use(routes, len(replay.homes)), len(routes))
    return Moves([], [])


RULES: dict[str, Behind] = {"window": as_a_window, "prompt": as_a_prompt, "none": nobody}


class Found(NamedTuple):
    """Say what an answer found: its share of hits, and a layer's copies and misses."""

    hit_rate: float
    copies: float
    misses: float


def measure(
    earlier: Routes, prompt: Routes, answer: Routes, experts: int, percent: int
) -> dict[str, Found]:
    """Return what each rule gives with slots for so many percent."""
    layers = prompt.shape[1]
    found: dict[str, Found] = {}
    for name, rule in RULES.items():
        replay = Replay(layers, experts, layers * experts * percent // 100)
        replay.write(earlier)
        copies = replay.read(prompt, rule)
        hits = replay.write(answer)
        misses = answer.size - hits
        found[name] = Found(hits / answer.size, copies / layers, misses / layers)
    return found


def main() -> None:
    """Replay what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    layers, experts, top_k, seeds, first = (
        whole_number(arguments, name)
        for name in ("--layers", "--experts", "--top-k", "--seeds", "--first")
    )
    budgets = percents(arguments["--slots"])
    before = whole_numbers(arguments, "--earlier", least=0)
    lengths = whole_numbers(arguments, "--prompts")

    def routes(tokens: int, seed: int) -> Routes:
        return make_routes(
            layers=layers,
            experts=experts,
            top_k=top_k,
            tokens=max(1, tokens),  # of none, none is kept
            topic=max(1, tokens),
            seed=seed,
        )[:tokens]

    rows: list[dict[str, Any]] = []
    for earlier, length, percent in product(before, lengths, budgets):
        found = []
        for seed in range(seeds):
            text = routes(length + first, seed + OTHER_TEXT)
            parts = routes(earlier, seed), text[:length], text[length:]
            found.append(measure(*parts, experts, percent))
        for name in RULES:
            hit_rate, copies, misses = np.mean([one[name] for one in found], axis=0).tolist()
            rows.append(
                {
                    "earlier": earlier,
                    "prompt": length,
                    "slots_percent": percent,
                    "rule": name,
                    "hit_rate": hit_rate,
                    "copies_a_layer": copies,
                    "misses_a_layer": misses,
                }
            )
            print(
                f"{earlier:5,} before, prompt {length:5,}, {percent:3}% in slots, {name:6} "
                f"{hit_rate:6.1%} hits; a layer {copies:5.1f} copies, {misses:6.1f} misses",
                flush=True,
            )
    path = write_result(
        "behind_prompts",
        "hit_rate: share of hits in the first tokens behind a prompt; experts that a layer copied "
        "in front of them, and missed in them; means over seeds",
        " ".join(["python bench/behind_prompts.py", *sys.argv[1:]]),
        {"layers": layers, "first": first, "seeds": seeds, "rows": rows},
        ("numpy",),
        arguments["-o"],
    )
    print(path)


if __name__ == "__main__":
    main()
