"""Measure how fast prompts are read, with every expert in a slot and with a part of them.

Usage:
  card_prompts.py MODEL [options]
  card_prompts.py --help

Options:
  --device=TEXT   as --device has it, with slots [default: cuda:0]
  --rows=LIST     tokens of prompts that are read with every expert in a slot [default: 512,4096]
  --depth=N       tokens in front of the longest of them, which is read there once more; 0: none
                  [default: 32768]
  --budgets=LIST  slots, in percent of all experts, with which the longest is read too
                  [default: 50,3]
  --first=N       tokens of the prompt whose first answer is waited for; 0: none [default: 100]
  --waits=N       for that answer, with each of the budgets [default: 5]
  --prefill=N     rows of a batch, as --prefill has it [default: auto]
  --runs=N        of each prompt [default: 5]
  --seed=N        of the tokens, which are random [default: 0]
  -o FILE         write the figures here, not to bench/results/card_prompts_MODEL.json

Every budget has an engine of its own; slots begin empty, and a run that does not count comes first.
Routes are the model's own. A row that fails is named, and the others are stored.

  prompts   tokens a second until the logits of the last token are there
  depth     the longest prompt behind so many tokens that were read before
  first     milliseconds until the token behind a prompt of --first tokens is known, in a session of
            its own
  link      bytes of experts that were read or copied over it, as the engine counts them
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from card_graphs import (  # noqa: E402 - bench/ is no package
    failing_alone,
    percents,
    plain_read_figures,
    spread,
    store,
    whole_number,
    whole_numbers,
)

from strata_nb import Engine, Options, Sampling  # noqa: E402
from strata_nb.commands.bench_misses import Misses  # noqa: E402
from strata_nb.plain_read import PlainRead  # noqa: E402
from strata_nb.session import Session  # noqa: E402

GREEDY = Sampling(temperature=0)
WHOLE = 100  # percent


@dataclass
class Row:
    """Hold the runs that are one figure.

    tokens    that each run reads, `depth` of the session before
    percent   of the experts that have slots
    first     whether a run ends with the first token of the answer
    misses    of each run
    """

    tokens: int
    depth: int
    percent: int
    slots: int
    first: bool = False
    seconds: list[float] = field(default_factory=list)
    misses: list[Misses] = field(default_factory=list)

    @property
    def name(self) -> str:
        behind = f" at depth {self.depth:,}" if self.depth else ""
        return f"{self.tokens:,} tokens{behind}, {self.percent}% in slots"

    @property
    def link_bytes(self) -> float:
        """Of a run, on the average."""
        return sum(one.link_bytes for one in self.misses) / len(self.misses)

    def figures(self, link_bytes_per_s: float) -> dict[str, Any]:
        seconds = spread(self.seconds)
        misses = self.misses[0]
        for more in self.misses[1:]:
            misses += more
        link_rate = self.link_bytes / seconds["median"]
        return {
            "tokens": self.tokens,
            "depth": self.depth,
            "percent": self.percent,
            "slots": self.slots,
            "until": "first token" if self.first else "logits",
            "tok_per_s": spread([self.tokens / one for one in self.seconds]),
            "ms": spread(self.seconds, 1e3),
            "hit_rate": misses.hit_rate,
            "link_bytes": self.link_bytes,
            "link_gb_per_s": link_rate / 1e9,
            "share_of_link": link_rate / link_bytes_per_s,
        }


def line(row: Row, figures: Mapping[str, Any]) -> str:
    """Return what a row's figures say, for people."""
    rate, ms = figures["tok_per_s"], figures["ms"]
    found = (
        f"first token {ms['median']:9,.1f} ms ({ms['least']:,.1f} to {ms['most']:,.1f}"
        if row.first
        else f"{rate['median']:9,.1f} tok/s ({rate['least']:,.1f} to {rate['most']:,.1f}"
    )
    return (
        f"{row.name}: {found}, n {ms['n']}), {figures['hit_rate'] or 0:.1%} hits, "
        f"{figures['link_bytes'] / 1e9:,.2f} GB over the link, {figures['share_of_link']:.0%} of it"
    )


class Bench:
    """Open the model once for each budget, and keep what was measured.

    failed   what could not be measured, and why
    """

    def __init__(self, model: str, device: str, prefill: int | str, runs: int, seed: int) -> None:
        self._options = Options(model, device, prefill=prefill, kv_grow=False)
        self._runs = runs
        self._random = np.random.default_rng(seed)
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.prefill_rows = 0
        self.read: PlainRead | None = None
        self.link: PlainRead | None = None

    @contextmanager
    def opened(self, percent: int, cells: int) -> Iterator[Engine]:
        """Open the model with slots for so many percent, and K/V for so many cells."""
        options = replace(self._options, ctx_size=cells, expert_cache=f"{percent}%")
        with Engine.open(options) as engine:
            self.prefill_rows = engine.prefill_rows
            if self.link is None:
                self.read, self.link = engine.plain_read(), engine.link_rate()
            yield engine

    def failing(self, percent: int) -> AbstractContextManager[None]:
        """Let a budget fail alone."""
        return failing_alone(self.failed, f"{percent}% in slots")

    def prompts(self, engine: Engine, percent: int, lengths: list[int], depth: int = 0) -> None:
        """Read prompts of these lengths in one session, each behind `depth` tokens."""
        with engine.open_session() as session:
            if depth:
                with failing_alone(self.failed, f"{depth:,} tokens, {percent}% in slots"):
                    session.extend(self._ids(engine, depth))
            for tokens in lengths:
                row = Row(tokens, depth, percent, engine.describe().slots)
                with failing_alone(self.failed, row.name):
                    for _ in range(1 + self._runs):  # the first does not count
                        session.rewind(depth)
                        self._run(engine, session, row)
                    self._add(row)

    def waits(self, engine: Engine, percent: int, tokens: int, times: int) -> None:
        """Wait so many times for the first token behind a prompt of so many tokens."""
        row = Row(tokens, 0, percent, engine.describe().slots, first=True)
        with failing_alone(self.failed, f"first token, {row.name}"):
            for _ in range(1 + times):
                with engine.open_session() as session:
                    self._run(engine, session, row)
            self._add(row)

    def _run(self, engine: Engine, session: Session, row: Row) -> None:
        ids, before = self._ids(engine, row.tokens), engine.describe()
        started = time.perf_counter()
        session.extend(ids)
        if row.first:
            next(session.generate(max_tokens=1, sampling=GREEDY, ignore_eos=True))
        row.seconds.append(time.perf_counter() - started)
        row.misses.append(Misses.between(before, engine.describe(), row.tokens))

    def _add(self, row: Row) -> None:
        del row.seconds[0], row.misses[0]
        self.rows.append(row)
        print(line(row, row.figures(self.link_bytes_per_s)), flush=True)

    @property
    def link_bytes_per_s(self) -> float:
        if self.link is None:
            raise AssertionError("an engine was opened, and its link never measured")
        return self.link.bytes_per_s

    def _ids(self, engine: Engine, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, engine.description.vocab_size, count).tolist()
        return ids


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    lengths = whole_numbers(arguments, "--rows")
    budgets, longest = percents(arguments["--budgets"]), max(lengths)
    depth, first = (whole_number(arguments, name, least=0) for name in ("--depth", "--first"))
    waits, runs = (whole_number(arguments, name) for name in ("--waits", "--runs"))
    seed = whole_number(arguments, "--seed", least=0)
    batch = arguments["--prefill"]
    prefill = "auto" if batch == "auto" else whole_number(arguments, "--prefill")
    started = time.perf_counter()
    bench = Bench(arguments["MODEL"], arguments["--device"], prefill, runs, seed)
    with bench.failing(WHOLE), bench.opened(WHOLE, depth + longest) as engine:
        bench.prompts(engine, WHOLE, lengths)
        if depth:
            bench.prompts(engine, WHOLE, [longest], depth)
    for percent in budgets:
        cells = max(longest, first + 1)
        with bench.failing(percent), bench.opened(percent, cells) as engine:
            bench.prompts(engine, percent, [longest])
            if first:
                bench.waits(engine, percent, first, waits)
    if bench.read is None:
        raise SystemExit("nothing was measured")
    figures: dict[str, Any] = {
        "prefill_rows": bench.prefill_rows,
        "seed": seed,
        "plain_read": plain_read_figures(bench.read),
        "link_gb_per_s": bench.link_bytes_per_s / 1e9,
        "rows": [row.figures(bench.link_bytes_per_s) for row in bench.rows],
        "failed": bench.failed,
        "took_s": time.perf_counter() - started,
    }
    store(
        "card_prompts",
        "prompts: tokens a second and milliseconds of runs, with slots for a part of the experts; "
        "bytes of experts over the link, and its rate in a copy of pinned memory",
        arguments,
        figures,
    )
    if bench.failed:
        raise SystemExit(f"{len(bench.failed)} failed")


if __name__ == "__main__":
    main()
