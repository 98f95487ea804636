"""Replay routes against policies that decide which experts have slots, and store the table.

Usage:
  policies.py [options]
  policies.py --help

Options:
  --budgets=LIST  slots, in percent of all experts [default: 10,25,50]
  --tokens=N      of a made trace, of which the first half teaches the profile [default: 4096]
  --stories=N     that the story model writes, and as many pieces of other text [default: 24]

Traces: routes made by tools/make_routes.py, and of the story model, which writes stories, reads
text that it was not trained on (tests/data/document.txt), and does both in turns. The
profile of the story model is its own, learned on held-out stories. `strata_nb bench policy` does
the same with any trace. The figures go to bench/results/policies.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from make_routes import make_routes  # noqa: E402 - tools/ is no package
from results import write_result  # noqa: E402

from strata_nb import Engine, Options, Sampling, story_model  # noqa: E402
from strata_nb.cache import policy  # noqa: E402
from strata_nb.cache.profile import load_profile, rank_by_use  # noqa: E402
from strata_nb.cache.replay import Routes  # noqa: E402
from strata_nb.cache.routing import count_use, load_trace  # noqa: E402
from strata_nb.commands.bench_policy import OPTIMUM, Case, measure  # noqa: E402

MAKERS: dict[str, policy.Maker] = {
    "static": policy.static,
    "lru": lambda ranks: policy.LeastRecent(*ranks.shape),
    "lfu": lambda ranks: policy.LeastUsed(*ranks.shape),
    "swap": policy.swaps(None, None, None),
    "insert": policy.Insertion,
}
MADE = ((48, 128, 8), (8, 32, 4))  # layers, experts, top-k
DOCUMENT = ROOT / "tests/data/document.txt"  # of 8,111 tokens
PIECE_TOKENS = 300


def main() -> None:
    """Measure, print and store."""
    arguments = docopt(str(__doc__))
    budgets = [float(part) for part in arguments["--budgets"].split(",")]
    cases = [*made(int(arguments["--tokens"])), *of_the_story_model(int(arguments["--stories"]))]
    rows: list[dict[str, object]] = []
    leads = []
    for case in cases:
        for budget in budgets:
            lines = list(measure(case, budget, MAKERS))
            hits = {line.policy: line.outcome.hit_rate for line in lines}
            moved = {line.policy: line.outcome.moved_a_token for line in lines}
            lead = hits["insert"] - max(hits["static"], hits["lru"])
            leads.append(lead)
            rows.append(
                {
                    "trace": case.name,
                    "tokens": len(case.routes),
                    "budget_percent": budget,
                    "hit_rate": hits,
                    "experts_over_the_link_a_token": moved,
                    "lead_of_insert": lead,
                    "insert_below_optimum": hits[OPTIMUM] - hits["insert"],
                }
            )
            shown = " ".join(f"{name} {100 * rate:.1f}" for name, rate in hits.items())
            print(f"{case.name} at {budget:g}%: {shown}; lead {100 * lead:+.2f}", flush=True)
    write_result(
        "policies",
        "hit_rate: share of the routers' choices that find a slot; lead_of_insert: over the better "
        "of lru and static; experts that cross the link, for each token",
        "python bench/policies.py " + " ".join(sys.argv[1:]),
        {"rows": rows, "least_lead": min(leads)},
        ("numpy", "numba"),
    )


def made(tokens: int) -> Iterator[Case]:
    """Yield made routes; the first half of each teaches the profile of the other."""
    for layers, experts, top_k in MADE:
        trace = make_routes(layers=layers, experts=experts, top_k=top_k, tokens=tokens)
        half = tokens // 2
        profile = rank_by_use(count_use(trace[:half], experts))
        yield Case(f"made, {layers} x {experts}, top {top_k}", trace[half:], experts, profile, "")


def of_the_story_model(count: int) -> Iterator[Case]:
    """Yield routes of stories that are written, of other text, and of both in turns."""
    text = DOCUMENT.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routes.npy"
        with Engine.open(Options(device="host:1x64MiB", routing_trace=path)) as engine:
            experts, layers = engine.description.experts, engine.description.layers
            opening, other = engine.encode(story_model.OPENING), engine.encode(text)
            ends = []
            for number in range(count):
                for _ in engine.generate(opening, sampling=Sampling(seed=number)):
                    pass
                ends.append(saved(engine, path))
                engine.logits(other[number * PIECE_TOKENS : (number + 1) * PIECE_TOKENS])
                ends.append(saved(engine, path))
        routes: Routes = load_trace(str(path))
    pieces = np.split(routes, ends[:-1])
    profile = load_profile(story_model.profile_path(), layers, experts)
    for name, some in (
        ("the story model, stories", pieces[0::2]),
        ("the story model, other text", pieces[1::2]),
        ("the story model, both in turns", pieces),
    ):
        yield Case(name, np.concatenate(some), experts, profile, "stories.strp")


def saved(engine: Engine, path: Path) -> int:
    """Write the routes so far and return how many tokens they are of."""
    engine.save_routing_trace(path)
    return len(load_trace(str(path)))


if __name__ == "__main__":
    main()
