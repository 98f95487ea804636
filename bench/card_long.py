"""Write many tokens about changing topics with one engine, and see whether anything drifts.

Usage:
  card_long.py MODEL [options]
  card_long.py --help

Options:
  --device=TEXT    as --device has it, with slots [default: cuda:0]
  --slots=N        in percent of all experts [default: 25]
  --adapt=TEXT     as --adapt has it [default: insert]
  --texts=N        one behind the other, at least 3 [default: 5]
  --topics=N       of each text [default: 4]
  --topic=N        tokens of each topic [default: 1000]
  --seed=N         of the routes [default: 0]
  --deterministic  as it is of the engine: then all texts must be the same
  -o FILE          write the figures here, not to bench/results/card_long_MODEL.json

Topics are routes of their own (tools/make_routes.py, each with another seed), forced by position;
texts are greedy behind one token. So every text goes through the same topics by the same experts,
and what a topic takes can be compared from text to text: in one long text each token would see more
cells than the one before, and be slower for that.

The first text finds empty slots. `drift` is the last text against the second:

  tok_per_s   largest change of a topic's rate, as a share
  hit_rate    largest change of a topic's share of hits
  rss_bytes   of the process, memory of its own and shared memory: what it has more at the end
  device      whether every owner of the device's memory has as much, topic by topic
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

from card_graphs import failing_alone, spread, store, whole_number  # noqa: E402 - bench/ is no package
from make_routes import Routes, make_routes  # noqa: E402

from strata_nb import Engine, Options, Sampling  # noqa: E402
from strata_nb.commands.bench_misses import Misses  # noqa: E402
from strata_nb.gguf import GGUFFile  # noqa: E402
from strata_nb.models import Description, describe  # noqa: E402

GREEDY = Sampling(temperature=0)
FIRST_TOKEN = 1
SECOND = 1  # the text that the last one is compared with
MIB = 1 << 20


class Piece(NamedTuple):
    """Hold what writing about a topic took, and the accounts behind it.

    owners       bytes of the device's memory by owner
    chunks       of the ledger, by owner
    free_bytes   of the device, as its driver says; None where it has no memory of its own
    rss_bytes    of the process
    """

    text: int
    topic: int
    seconds: float
    misses: Misses
    owners: dict[str, int]
    chunks: dict[str, int]
    free_bytes: int | None
    rss_bytes: int

    @property
    def tok_per_s(self) -> float:
        return self.misses.tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.misses.hit_rate or 0.0

    def figures(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "topic": self.topic,
            "tok_per_s": self.tok_per_s,
            "hit_rate": self.hit_rate,
            "link_bytes_per_token": self.misses.link_bytes_per_token,
            "bytes_by_owner": self.owners,
            "chunks": self.chunks,
            "free_bytes": self.free_bytes,
            "rss_bytes": self.rss_bytes,
        }

    def line(self) -> str:
        free = "" if self.free_bytes is None else f", free {self.free_bytes / MIB:,.0f} MiB"
        return (
            f"text {self.text}, topic {self.topic}: {self.tok_per_s:8,.1f} tok/s, "
            f"{self.hit_rate:.1%} hits, K/V {self.owners['kv'] / MIB:,.0f} MiB, "
            f"experts {self.owners['experts'] / MIB:,.0f} MiB{free}, "
            f"process {self.rss_bytes / MIB:,.0f} MiB"
        )


def main() -> None:
    """Write what the command line asks for; print and store what was seen."""
    arguments = docopt(str(__doc__))
    percent, topics, topic = (
        whole_number(arguments, n) for n in ("--slots", "--topics", "--topic")
    )
    texts = whole_number(arguments, "--texts", least=3)
    seed = whole_number(arguments, "--seed", least=0)
    started = time.perf_counter()
    pieces: list[Piece] = []
    written: list[list[int]] = []
    failed: list[str] = []
    with GGUFFile.open(arguments["MODEL"]) as file:
        known = describe(file)
    with tempfile.TemporaryDirectory() as folder:
        routes = Path(folder) / "routes.npy"
        np.save(routes, routes_of(known, topics, topic, seed))
        options = Options(
            arguments["MODEL"],
            arguments["--device"],
            ctx_size=topics * topic + 1,
            expert_cache=f"{percent}%",
            adapt=arguments["--adapt"],
            expert_profile="none",
            force_routes=routes,
            deterministic=arguments["--deterministic"],
        )
        with failing_alone(failed, "the run"), Engine.open(options) as engine:
            for text in range(texts):
                written.append([])
                write(engine, text, topics, topic, written[-1], pieces)
    same = all(text == written[0][: len(text)] for text in written)
    figures: dict[str, Any] = {
        "slots_percent": percent,
        "adapt": arguments["--adapt"],
        "seed": seed,
        "deterministic": arguments["--deterministic"],
        "tokens": sum(map(len, written)),
        "same_tokens": same,
        "pieces": [piece.figures() for piece in pieces],
        "failed": failed,
        "took_s": time.perf_counter() - started,
    }
    if len(pieces) == texts * topics:
        figures |= {"by_topic": by_topic(pieces, topics), "drift": drift(pieces, topics)}
        told = figures["drift"]
        print(
            f"drift from text {SECOND} to text {texts - 1}: {told['tok_per_s']:+.2%} tok/s, "
            f"{100 * told['hit_rate']:+.2f} points of hits, {told['rss_bytes'] / MIB:+,.1f} MiB of "
            f"the process; device memory {'the same' if told['device'] else 'DIFFERS'}"
        )
    print(
        f"{figures['tokens']:,} tokens in {figures['took_s']:.0f} s: {'same' if same else 'DIFFER'}"
    )
    store(
        "card_long",
        "topics of texts that one engine wrote: tokens a second, hits, and whose the memory is; "
        "drift: the last text against the second",
        arguments,
        figures,
    )
    if not same and arguments["--deterministic"]:
        failed.append("the tokens differ")
    if failed:
        raise SystemExit("; ".join(failed))


def routes_of(known: Description, topics: int, topic: int, seed: int) -> Routes:
    """Return routes for texts of so many topics."""
    return np.concatenate(
        [
            make_routes(
                layers=known.layers,
                experts=known.experts,
                top_k=known.top_k,
                tokens=topic,
                topic=topic,
                seed=seed + number,
            )
            for number in range(topics)
        ]
    )


def write(
    engine: Engine, text: int, topics: int, topic: int, ids: list[int], pieces: list[Piece]
) -> None:
    """Write a text, and add its tokens and what each topic took."""
    with engine.open_session() as session:
        session.append(FIRST_TOKEN)
        writing = session.generate(max_tokens=topics * topic, sampling=GREEDY, ignore_eos=True)
        for number in range(topics):
            before, started = engine.describe(), time.perf_counter()
            some = [token.id for token in islice(writing, topic)]
            seconds = time.perf_counter() - started
            ids += some
            if writing.refusal is not None:
                raise writing.refusal
            report = engine.describe()
            piece = Piece(
                text,
                number,
                seconds,
                Misses.between(before, report, len(some)),
                report.bytes_by_owner,
                engine.look().chunks,
                report.devices[0].free_bytes,
                rss_bytes(),
            )
            pieces.append(piece)
            print(piece.line(), flush=True)


def by_topic(pieces: Sequence[Piece], topics: int) -> list[dict[str, Any]]:
    """Return the spread of each topic over all texts but the first."""
    warm = pieces[SECOND * topics :]
    return [
        {
            "topic": number,
            "tok_per_s": spread([one.tok_per_s for one in warm[number::topics]]),
            "hit_rate": spread([one.hit_rate for one in warm[number::topics]]),
        }
        for number in range(topics)
    ]


def drift(pieces: Sequence[Piece], topics: int) -> dict[str, Any]:
    """Return how the last text differs from the second; see above."""
    pairs = list(zip(pieces[SECOND * topics :][:topics], pieces[-topics:], strict=True))
    return {
        "tok_per_s": max((end.tok_per_s / one.tok_per_s - 1 for one, end in pairs), key=abs),
        "hit_rate": max((end.hit_rate - one.hit_rate for one, end in pairs), key=abs),
        "rss_bytes": pairs[-1][1].rss_bytes - pairs[-1][0].rss_bytes,
        "device": all((end.owners, end.chunks) == (one.owners, one.chunks) for one, end in pairs),
    }


def rss_bytes() -> int:
    """Return the memory of this process that is no file: its own, and what it shares."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    )


if __name__ == "__main__":
    main()
