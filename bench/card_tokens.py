"""Measure what a token costs beside the graph of its window: Python, copies, launches, waits.

Usage:
  card_tokens.py MODEL [options]
  card_tokens.py --help

Options:
  --device=TEXT   as --device has it [default: cuda:0]
  --warm-up=N     tokens before those that count [default: 64]
  --tokens=N      that count, of each run [default: 256]
  --runs=N        generations [default: 5]
  --windows=N     of the text, spread over it, whose graphs are replayed [default: 5]
  -o FILE         write the figures here, not to bench/results/card_tokens_MODEL.json

Text is written greedily with `Engine.generate`, with the window behind each token begun before the
token is known, and without. Tokens must be the same in all runs. A run's figure is the wall clock
of all its tokens by their number. The graphs are those of windows of the same text; what is between
them and the wall clock is the host's, and what the card does between two graphs.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from card_graphs import (  # noqa: E402 - bench/ is no package
    REPLAYS,
    TimedGraph,
    card_of,
    plain_read_figures,
    put_back,
    spread,
    store,
)

from strata_nb import Engine, Options, Sampling  # noqa: E402
from strata_nb.kernels.gpu.launches import card_launches  # noqa: E402
from strata_nb.sampling import Choice  # noqa: E402
from strata_nb.session import Generation  # noqa: E402
from strata_nb.steps import Row  # noqa: E402

PROMPT = 16  # tokens
GREEDY = Sampling(temperature=0)


class Text(NamedTuple):
    """Hold a run: its tokens, and microseconds a token of those that count."""

    ids: list[int]
    us: float


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    warm_up, tokens = int(arguments["--warm-up"]), int(arguments["--tokens"])
    context = PROMPT + warm_up + tokens + 1
    options = Options(arguments["MODEL"], arguments["--device"], ctx_size=context)
    with Engine.open(options) as engine:
        card_of(engine)
        report = engine.describe()
        prompt = _prompt(engine)
        ahead, waiting = [], []
        for _ in range(int(arguments["--runs"])):
            ahead.append(write(engine, prompt, warm_up, tokens))
            with mock.patch.object(Generation, "_can_go_ahead", _never):
                waiting.append(write(engine, prompt, warm_up, tokens))
        ids = ahead[0].ids
        digests = {_digest(text.ids) for text in [*ahead, *waiting]}
        graphs = windows(engine, ids, PROMPT + warm_up, int(arguments["--windows"]))
        read = engine.plain_read()
        middle = len(ids) - tokens // 2
        figures: dict[str, Any] = {
            "ahead_us": spread([text.us for text in ahead]),
            "waiting_us": spread([text.us for text in waiting]),
            "graph_us": spread(graphs, 1e6),
            "same_tokens": len(digests) == 1,
            "different_tokens": len(set(ids)),
            "tokens_sha256": sorted(digests),
            "step_bytes": engine.step_bytes(middle),
            "plain_read": plain_read_figures(read),
            "slots": report.slots,
            "resident": report.resident,
        }
    graph = figures["graph_us"]["median"]
    for name in ("ahead", "waiting"):
        figures[f"overhead_{name}_us"] = figures[f"{name}_us"]["median"] - graph
    bound = 1e6 * figures["step_bytes"] / read.bytes_per_s
    for name in ("ahead", "waiting", "graph"):
        us = figures[f"{name}_us"]
        print(
            f"{name:8} {us['median']:9,.1f} us ({us['least']:,.1f} to {us['most']:,.1f}, n "
            f"{us['n']}), {1e6 / us['median']:7,.1f} tok/s, {us['median'] - graph:+8.1f} us beside "
            f"the graph, {bound / us['median']:.1%} of the plain read"
        )
    print(f"tokens: {'same' if figures['same_tokens'] else 'DIFFER'}")
    store(
        "card_tokens",
        "microseconds a token of Engine.generate, with the next window begun ahead and without "
        f"(waiting), each run's mean; of its window's graph, {REPLAYS} replays of several windows",
        arguments,
        {"warm_up": warm_up, "tokens": tokens, **figures},
    )
    if not figures["same_tokens"]:
        raise SystemExit("the tokens differ")


def write(engine: Engine, prompt: list[int], warm_up: int, tokens: int) -> Text:
    """Write a text behind the prompt; the first tokens do not count."""
    writing = engine.generate(prompt, max_tokens=warm_up + tokens, sampling=GREEDY, ignore_eos=True)
    ids = [next(writing).id for _ in range(warm_up)]
    start = time.perf_counter()
    ids += [token.id for token in writing]
    took = time.perf_counter() - start
    writing._session.close()
    if len(ids) != warm_up + tokens:
        raise SystemExit(f"{len(ids)} of {warm_up + tokens} tokens: {writing.finish}")
    return Text(ids, 1e6 * took / tokens)


def windows(engine: Engine, ids: list[int], first: int, count: int) -> list[float]:
    """Return the median seconds of the graphs of windows of a text.

    ids     written behind the prompt
    first   position from which windows are taken, spread over the rest
    """
    card, model = card_of(engine), engine._device()
    text, seconds = [*_prompt(engine), *ids], []
    with engine.open_session() as session, ExitStack() as made:
        graph = TimedGraph(card, card_launches(model._programs.window, 1), 1, made)
        for place in np.linspace(first, len(text) - 1, count).astype(int).tolist():
            session.extend(text[session.position : place])
            row = Row(session._sequence, text[place], True)
            model.choose([row], [Choice((), GREEDY, 0.0)])
            model._settle()
            with put_back(card):
                seconds.append(statistics.median(graph.seconds()))
            model.rewind(row.sequence, place)
    return seconds


def _never(_: Generation) -> bool:
    """Stand for `Generation._can_go_ahead`: a mock's own call takes longer than that."""
    return False


def _prompt(engine: Engine) -> list[int]:
    ids: list[int] = (
        np.random.default_rng(0).integers(0, engine.description.vocab_size, PROMPT).tolist()
    )
    return ids


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest()


if __name__ == "__main__":
    main()
