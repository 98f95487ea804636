"""Measure how fast text is written where a part of the experts has no slot.

Usage:
  card_misses.py MODEL [options]
  card_misses.py --help

Options:
  --device=TEXT    as --device has it, with slots [default: cuda:0]
  --budgets=LIST   slots, in percent of all experts, under routes like those of text
                   [default: 100,50,25,10]
  --uniform=LIST   slots, in percent, under uniform routes [default: 3]
  --hits=LIST      in percent, under uniform routes [default: 0,25,50,75,90,100]
  --adapt=LIST     of the budgets, each as --adapt has it [default: insert]
  --pcie-frac=F    as --pcie-frac has it; 1: the CPU computes none [default: 1]
  --cold=N         first tokens of a text [default: 64]
  --after=N        tokens before steady ones [default: 256]
  --tokens=N       steady ones [default: 128]
  --runs=N         of each [default: 3]
  --seed=N         of the routes [default: 0]
  --picture=FILE   SVG of tok/s by hits [default: bench/results/card_misses.svg]
  -o FILE          write the figures here, not to bench/results/card_misses_MODEL.json

Routes are made (tools/make_routes.py) and forced; texts are greedy behind one token. All texts
under the same routes must be the same, whatever had slots, unless the CPU computes some experts.
What fails is named, and the rest is measured and stored.

  cold      the first tokens of a text that begins with empty slots
  steady    tokens of it behind the first --after; `resident` where every expert has a slot
  hits      of each layer a random part of the experts has slots and stays there, of which hits
            are as large a part; as many tokens as cold ones
  limit     of the link alone, 1 / (t + m / l) tokens a second: t seconds are a token's with every
            expert in a slot, m bytes are those of the experts that a token missed, and l is the
            rate of a copy of pinned memory to the device; t and l are of the same run
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

from card_graphs import (  # noqa: E402 - bench/ is no package
    failing_alone,
    percents,
    plain_read_figures,
    spread,
    store,
    whole_number,
)
from make_routes import make_routes  # noqa: E402
from misses_picture import picture  # noqa: E402

from strata_nb import Engine, Options, Sampling  # noqa: E402
from strata_nb.cache.profile import Profile, rank_by_use, save_profile  # noqa: E402
from strata_nb.commands.bench_misses import Misses  # noqa: E402
from strata_nb.gguf import GGUFFile  # noqa: E402
from strata_nb.models import describe  # noqa: E402
from strata_nb.options import ADAPTATIONS  # noqa: E402
from strata_nb.plain_read import PlainRead  # noqa: E402
from strata_nb.session import Session  # noqa: E402

GREEDY = Sampling(temperature=0)
FIRST_TOKEN = 1
LOCAL, UNIFORM = "like text", "uniform"
WHOLE = 100  # percent


class Part(NamedTuple):
    """Hold a part of a text: seconds, and what was missed meanwhile."""

    seconds: float
    misses: Misses


class Row(NamedTuple):
    """Hold the parts of all runs that are one figure.

    percent   of the experts that had slots
    adapt     how they followed the text
    """

    routes: str
    percent: int
    adapt: str
    phase: str
    slots: int
    parts: list[Part]

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [part.misses.tokens / part.seconds for part in self.parts]

    @property
    def misses(self) -> Misses:
        """Those of all runs."""
        first, *others = (part.misses for part in self.parts)
        return sum(others, first)

    def line(self) -> str:
        rates, misses = spread(self.rates), self.misses
        return (
            f"{self.routes:9} {self.percent:3}% in slots, {self.adapt:6} {self.phase:8} "
            f"{rates['median']:8,.1f} "
            f"tok/s ({rates['least']:,.1f} to {rates['most']:,.1f}, n {rates['n']}), "
            f"{misses.hit_rate or 0:6.1%} hits, {misses.link_bytes_per_token / 1e6:,.1f} MB a token"
        )


class Lengths(NamedTuple):
    """Say how many tokens each part of a text has."""

    cold: int
    after: int
    tokens: int

    @property
    def whole(self) -> int:
        return max(self.after, self.cold) + self.tokens


class Bench:
    """Open the model again and again, and keep what was measured.

    texts         the ids of each text, by the routes that were forced
    token_bytes   of the experts that a token uses
    failed        what could not be measured, and why
    """

    def __init__(
        self,
        model: str,
        device: str,
        pcie_frac: float | str,
        lengths: Lengths,
        runs: int,
        folder: Path,
        seed: int,
    ) -> None:
        self._model, self._device, self._pcie_frac = model, device, pcie_frac
        self._lengths, self._runs = lengths, runs
        self.texts: dict[str, list[list[int]]] = {LOCAL: [], UNIFORM: []}
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.read: PlainRead | None = None
        self.link: PlainRead | None = None
        with GGUFFile.open(model) as file:
            known = describe(file)
        self._profile = folder / "profile.strp"
        save_profile(self._profile, _random_profile(known.layers, known.experts, seed))
        self.token_bytes = known.top_k * sum(known.one_expert_bytes)
        self._files = {}
        for name in self.texts:
            self._files[name] = folder / f"{name.replace(' ', '_')}.npy"
            routes = make_routes(
                layers=known.layers,
                experts=known.experts,
                top_k=known.top_k,
                tokens=lengths.whole + 1,
                uniform=name == UNIFORM,
                seed=seed,
            )
            np.save(self._files[name], routes)

    @contextmanager
    def _opened(
        self, routes: str, slots: str, adapt: str, profile: Path | str = "none"
    ) -> Iterator[Engine]:
        options = Options(
            self._model,
            self._device,
            ctx_size=self._lengths.whole + 1,
            expert_cache=slots,
            adapt=adapt,
            kv_grow=False,  # memory that moves brings experts
            expert_profile=profile,
            force_routes=self._files[routes],
            cpu_pool=self._pcie_frac != 1 or not self._device.startswith("cuda"),
            pcie_frac="auto" if self._pcie_frac == 1 else self._pcie_frac,
        )
        with Engine.open(options) as engine:
            if self.link is None:
                self.read, self.link = engine.plain_read(), engine.link_rate()
            yield engine

    def budget(self, routes: str, percent: int, adapt: str) -> None:
        """Write texts with slots for so many percent of all experts."""
        cold: list[Part] = []
        steady: list[Part] = []
        lengths, slots = self._lengths, 0
        with (
            failing_alone(self.failed, f"{routes}, {percent}% in slots, {adapt}"),
            self._opened(routes, f"{percent}%", adapt) as engine,
        ):
            slots = engine.describe().slots
            for number in range(1 + self._runs):  # the first does not count
                ids: list[int] = []
                if percent < WHOLE:
                    engine.empty_slots()
                with engine.open_session() as session:
                    session.append(FIRST_TOKEN)
                    first = _write(engine, session, lengths.cold, ids)
                    if number == 0:
                        continue
                    _write(engine, session, max(0, lengths.after - lengths.cold), ids)
                    cold.append(first)
                    steady.append(_write(engine, session, lengths.tokens, ids))
                self.texts[routes].append(ids)
        if percent < WHOLE:
            self._add(Row(routes, percent, adapt, "cold", slots, cold))
        phase = "steady" if percent < WHOLE else "resident"
        self._add(Row(routes, percent, adapt, phase, slots, steady))

    def hits(self, percent: int) -> None:
        """Write texts with so many percent of each layer's experts in slots, where they stay."""
        parts: list[Part] = []
        slots = 0
        with (
            failing_alone(self.failed, f"{UNIFORM}, {percent}% in slots that stay"),
            self._opened(UNIFORM, f"{percent}%", "off", self._profile) as engine,
        ):
            slots = engine.describe().slots
            for number in range(1 + self._runs):
                ids: list[int] = []
                with engine.open_session() as session:
                    session.append(FIRST_TOKEN)
                    part = _write(engine, session, self._lengths.cold, ids)
                if number:
                    parts.append(part)
                    self.texts[UNIFORM].append(ids)
        self._add(Row(UNIFORM, percent, "off", "hits", slots, parts))

    def _add(self, row: Row) -> None:
        if row.parts:
            self.rows.append(row)
            print(row.line(), flush=True)

    @property
    def same_tokens(self) -> bool:
        """Whether texts under the same routes are the same, as far as both go."""
        return all(
            text == longest[: len(text)]
            for texts in self.texts.values()
            if texts
            for longest in [max(texts, key=len)]
            for text in texts
        )

    @property
    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of the longest text under each routes, as int64."""
        return {
            name: hashlib.sha256(np.array(max(texts, key=len), np.int64).tobytes()).hexdigest()
            for name, texts in self.texts.items()
            if texts
        }

    def resident_s(self) -> float | None:
        """Return the seconds of a token whose experts all have slots; None if none was written."""
        whole = [row for row in self.rows if row.percent == WHOLE]
        return min((1 / statistics.median(row.rates) for row in whole), default=None)


def main() -> None:
    """Measure what the command line asks for; print, draw and store it."""
    arguments = docopt(str(__doc__))
    started = time.perf_counter()
    budgets, uniform, hits = (percents(arguments[f"--{n}"]) for n in ("budgets", "uniform", "hits"))
    if not budgets + uniform + hits:
        raise SystemExit("nothing to measure: give --budgets, --uniform or --hits")
    if WHOLE not in budgets + uniform + hits:
        raise SystemExit("no limit without a budget, or hits, of 100%: give --budgets=100, say")
    adapts = arguments["--adapt"].split(",")
    if unknown := set(adapts) - set(ADAPTATIONS):
        raise SystemExit(
            f"--adapt {','.join(sorted(unknown))}: not known; {', '.join(ADAPTATIONS)}"
        )
    lengths = Lengths(
        whole_number(arguments, "--cold"),
        whole_number(arguments, "--after", least=0),
        whole_number(arguments, "--tokens"),
    )
    runs, seed = whole_number(arguments, "--runs"), whole_number(arguments, "--seed", least=0)
    pcie_frac = share_of_link(arguments["--pcie-frac"])
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            arguments["MODEL"],
            arguments["--device"],
            pcie_frac,
            lengths,
            runs,
            Path(folder),
            seed,
        )
        for routes, some in ((LOCAL, budgets), (UNIFORM, uniform)):
            for percent in some:
                for adapt in adapts[:1] if percent == WHOLE else adapts:
                    bench.budget(routes, percent, adapt)
        for percent in hits:
            bench.hits(percent)
    if bench.link is None or bench.read is None:
        raise SystemExit("nothing was measured")
    resident_s, link_bytes_per_s = bench.resident_s(), bench.link.bytes_per_s
    rows = [_figures(row, resident_s, link_bytes_per_s) for row in bench.rows]
    figures: dict[str, Any] = {
        **lengths._asdict(),
        "adapt": adapts,
        "pcie_frac": pcie_frac,
        "seed": seed,
        "same_tokens": bench.same_tokens,
        "texts_sha256": bench.digests,
        "plain_read": plain_read_figures(bench.read),
        "link_gb_per_s": link_bytes_per_s / 1e9,
        "resident_us": None if resident_s is None else 1e6 * resident_s,
        "experts_bytes_per_token": bench.token_bytes,
        "rows": rows,
        "failed": bench.failed,
        "took_s": time.perf_counter() - started,
    }
    for row in rows:
        if row["phase"] != "resident" and row["limit"] is not None:
            print(
                f"{row['routes']:9} {row['percent']:3}% {row['adapt']:6} {row['phase']:8} "
                f"{row['share_of_limit']:6.1%} of {row['limit']:,.1f} tok/s, "
                f"{row['share_of_link']:6.1%} of the link"
            )
    print(f"tokens: {'same' if bench.same_tokens else 'DIFFER'}; took {figures['took_s']:.0f} s")
    if resident_s is not None:
        missed_s = bench.token_bytes / link_bytes_per_s
        drawn = picture(rows, resident_s, [missed_s], Path(arguments["MODEL"]).name)
        Path(arguments["--picture"]).write_text(drawn, encoding="utf-8")
    store(
        "card_misses",
        "tokens a second where a part of the experts has no slot, medians of runs, beside the "
        "limit of the link",
        arguments,
        figures,
    )
    if not bench.same_tokens and pcie_frac == 1:
        raise SystemExit("the tokens differ")
    if bench.failed:
        raise SystemExit(f"{len(bench.failed)} failed")


def share_of_link(text: str) -> float | str:
    """Return what `--pcie-frac` is given, or end the program and say what it may be."""
    if text == "auto":
        return text
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise SystemExit(f"--pcie-frac {text}: not usable; a number from 0 to 1, or auto")
    return share


def _write(engine: Engine, session: Session, tokens: int, ids: list[int]) -> Part:
    """Write tokens behind what a session holds, and add them to `ids`."""
    before = engine.describe()
    started = time.perf_counter()
    if tokens:
        writing = session.generate(max_tokens=tokens, sampling=GREEDY, ignore_eos=True)
        written = [token.id for token in writing]
        if len(written) != tokens:
            raise SystemExit(f"{len(written)} of {tokens} tokens: {writing.finish}")
        ids += written
    seconds = time.perf_counter() - started
    return Part(seconds, Misses.between(before, engine.describe(), tokens))


def _random_profile(layers: int, experts: int, seed: int) -> Profile:
    """Rank all experts: the first of each layer, in an order of its own, then the second ones."""
    rng = np.random.default_rng(seed)
    places = rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)
    return rank_by_use(experts - places)


def _figures(row: Row, resident_s: float | None, link_bytes_per_s: float) -> dict[str, Any]:
    misses, rates = row.misses, spread(row.rates)
    limit = None if resident_s is None else 1 / misses.limit_s(resident_s, link_bytes_per_s)
    return {
        "routes": row.routes,
        "percent": row.percent,
        "adapt": row.adapt,
        "phase": row.phase,
        "slots": row.slots,
        "tokens": misses.tokens // len(row.parts),
        "tok_per_s": rates,
        "hit_rate": misses.hit_rate,
        "missed_bytes_per_token": misses.missed_bytes / misses.tokens,
        "link_bytes_per_token": misses.link_bytes_per_token,
        "share_of_link": misses.link_bytes_per_token * rates["median"] / link_bytes_per_s,
        "limit": limit,
        "share_of_limit": None if limit is None else rates["median"] / limit,
    }


if __name__ == "__main__":
    main()
