"""Replay routes to say what other ways to share misses between link and CPU would win.

Usage:
  shared_misses.py [options]
  shared_misses.py --help

Options:
  --budgets=LIST    slots, in percent of all experts, under routes like those of text
                    [default: 50,25,10]
  --uniform=LIST    slots, in percent, under uniform routes [default: 3]
  --tokens=N        that count [default: 100]
  --after=N         tokens before them, from empty slots [default: 280]
  --layer-us=F      microseconds of a layer whose experts all have slots [default: 37.5]
  --link-us=F       of an expert over the link [default: 58]
  --expert-us=F     of an expert that the CPU computes [default: 40]
  --post-us=F       of a post beside its experts [default: 22]
  -o FILE           write the figures here, not to bench/results/shared_misses.json

Nothing here is measured. A layer takes --layer-us and the longer of what link and CPU need for its
misses; slots follow the text as on a card (`cache/filling.py`). The defaults are those by which
what one H200 wrote is met best (bench/results/card_misses_pool.json of commit e6547f8).

  alone         the link has all misses
  whole         the CPU has whole experts, one crosses at least: as many as are best
  thirds        it has a part of one expert too, 256 of 768 values or a multiple; 24ths likewise
  single        as thirds, but also of a layer that misses one; who is cut does not stay
  carried       of all layers' misses together the CPU has its share; of one layer all or nothing
  behind        as single, and who is cut comes to a slot all the same: what the CPU has read is
                copied in the background, while later layers take the link for --first of its rate
  --first=F     [default: 0.6]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

from card_graphs import percents, whole_number  # noqa: E402 - bench/ is no package
from make_routes import make_routes  # noqa: E402
from results import write_result  # noqa: E402

from strata_nb.cache.filling import fill_layer, missed_in_order, new_plans, write_plans  # noqa: E402
from strata_nb.cache.policy import Insertion  # noqa: E402
from strata_nb.cache.replay import Routes  # noqa: E402
from strata_nb.fill_plans import STAYS  # noqa: E402

EXPERTS, CHOSEN = 128, 8


class Rates(NamedTuple):
    """Hold microseconds: of a layer without misses, of an expert over the link and on the CPU, and
    of a post; and which part of the link is left beside copies in the background."""

    layer: float
    link: float
    expert: float
    post: float
    first: float

    def by_cpu(self, experts: float) -> float:
        """Return what the CPU needs."""
        return self.post + self.expert * experts if experts else 0.0


Shares = Callable[[int], float]
"""Return how many of so many missed experts of a layer the CPU has."""


def best(rates: Rates, pieces: int, *, least: int) -> Shares:
    """Return shares in pieces of an expert, by which the later of the two ends soonest.

    least   experts that cross the link at least
    """

    def count(missed: int) -> float:
        most = max(0, pieces * (missed - least))
        return min(
            range(most + 1),
            key=lambda n: max(rates.link * (missed - n / pieces), rates.by_cpu(n / pieces)),
        ) / max(1, pieces)

    return count


def carried(share: float) -> Shares:
    """Return shares that follow each other, so that all together are right."""
    owed = 0.0

    def count(missed: int) -> float:
        nonlocal owed
        owed += share * missed
        taken = min(missed, max(0, round(owed)))
        owed = min(1.0, max(-1.0, owed - taken))
        return taken

    return count


class Token(NamedTuple):
    """Say what a token took: microseconds, and experts that were missed and that the CPU had."""

    us: float
    missed: int
    by_cpu: float


def replay(
    routes: Routes, slots: int, rates: Rates, shares: Shares, *, behind: bool
) -> Iterator[Token]:
    """Yield tokens of a text that begins with empty slots."""
    _, layers, _ = routes.shape
    counts = [len(range(layer, slots, layers)) for layer in range(layers)]
    homes, addresses = np.arange(EXPERTS), np.tile(np.arange(EXPERTS), (layers, 1))
    free = [list(range(EXPERTS, EXPERTS + count)) for count in counts]
    seen, used = np.zeros((2, layers, EXPERTS), np.int64)
    plans, policy = new_plans(layers, EXPERTS), Insertion(np.full((layers, EXPERTS), -1, np.int32))
    resident = addresses != homes
    for window, choices in enumerate(routes):
        gain, heat = policy.worth()
        left = [np.setdiff1d(some, of) for some, of in zip(free, addresses, strict=True)]
        write_plans(plans, window + STAYS + 1, left, resident, gain, heat)
        if window:
            policy.note(used, 1)
        resident = addresses != homes
        used[:] = 0
        us, all_missed, all_by_cpu, copying = 0.0, 0, 0.0, 0.0
        for layer, chosen in enumerate(choices.tolist()):
            used[layer, chosen] = 1
            plan = plans[layer]
            missed = missed_in_order(plan, chosen, addresses[layer], homes)
            by_cpu = shares(len(missed))
            crossing = len(missed) - math.ceil(by_cpu)
            if not behind:
                plan["gain"][missed[crossing:]] = -np.inf  # they do not come
            came = fill_layer(plan, chosen, addresses[layer], homes, seen[layer])
            link = rates.link * (len(missed) - by_cpu)
            both = min(link / rates.first, copying / (1 - rates.first))
            link += both * (1 - rates.first)
            took = rates.layer + max(link, rates.by_cpu(by_cpu))
            copying = max(0.0, copying - both * (1 - rates.first) - (took - link))
            if behind and by_cpu:
                late = len(set(missed[crossing:]).intersection(came))
                copying += rates.link * late * by_cpu / math.ceil(by_cpu)
            us += took
            all_missed += len(missed)
            all_by_cpu += by_cpu
        yield Token(us + copying, all_missed, all_by_cpu)


def main() -> None:
    """Replay what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    names = ("layer-us", "link-us", "expert-us", "post-us", "first")
    rates = Rates(*(float(arguments[f"--{name}"]) for name in names))
    tokens, after = whole_number(arguments, "--tokens"), whole_number(arguments, "--after", least=0)
    cut = best(rates, 3, least=0)
    ways: dict[str, tuple[Shares, bool]] = {
        "alone": (lambda _: 0.0, False),
        "whole": (best(rates, 1, least=1), False),
        "thirds": (best(rates, 3, least=1), False),
        "24ths": (best(rates, 24, least=1), False),
        "single": (cut, False),
        "carried": (carried(rates.link / (rates.link + rates.expert)), False),
        "behind": (cut, True),
    }
    rows = []
    for flag, uniform in (("--budgets", False), ("--uniform", True)):
        routes = make_routes(
            experts=EXPERTS, top_k=CHOSEN, tokens=after + tokens, uniform=uniform, seed=0
        )
        for percent in percents(arguments[flag]):
            found = {}
            for name, (shares, behind) in ways.items():
                slots = routes.shape[1] * EXPERTS * percent // 100
                some = list(replay(routes, slots, rates, shares, behind=behind))[after:]
                us, missed, by_cpu = (sum(column) / len(some) for column in zip(*some, strict=True))
                hits = 1 - missed / routes[0].size
                found[name] = {
                    "tok_per_s": 1e6 / us,
                    "hit_rate": hits,
                    "missed_experts_a_token": missed,
                    "of_them_by_cpu": by_cpu,
                }
                print(f"{percent:3}% {name:8} {1e6 / us:7.1f} tok/s, {hits:.1%} hits", flush=True)
            rows.append({"percent": percent, "uniform": uniform, "ways": found})
    write_result(
        "shared_misses",
        "tokens a second of a model of link and CPU, by how misses are shared; nothing is measured",
        "python bench/shared_misses.py " + " ".join(sys.argv[1:]),
        {"rates_us": rates._asdict(), "after": after, "tokens": tokens, "rows": rows},
        ("numpy",),
        arguments["-o"],
    )


if __name__ == "__main__":
    main()
