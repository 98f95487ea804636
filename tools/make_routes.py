"""Make a trace of routes with the locality of real text, for benchmarks and policy tests.

Usage:
  make_routes.py [options] OUT
  make_routes.py --help

Options:
  --layers=N   (default 48)
  --experts=N  per layer (default 128)
  --top-k=N    experts that a token uses, fewer than all (default 8)
  --tokens=N   (default 4096)
  --topic=N    tokens until the subject of the text changes (default 1500)
  --uniform    every expert is as likely as every other, whatever was used before
  --seed=N     (default 0)

OUT is a .npy file: int16 (tokens, layers, top_k), the ids of the experts that each token uses in
each layer, in no order. What was made is printed.

A random router on random tokens has next to no reuse between neighbouring tokens (12%), which turns
the ranking of cache policies round. Published traces of Qwen3-30B-A3B say: about 45% of a token's
experts were used by the token before, about 80% within the last 8; an LRU cache of 40% of the
experts hits 90 to 95%; a change of subject costs 5 to 10 points for a while. The score of an expert
is therefore a sum of four parts: how popular it is, how popular with this subject, something that
wanders slowly from token to token, and noise. The defaults give 52%, 83% and 91%; the hottest
quarter of the experts takes 57% of the routes, the hottest half 82%.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from docopt import docopt
from numpy.typing import NDArray

from strata_nb.errors import ConfigError, StrataError

Routes = NDArray[np.int16]

# Standard deviations of the parts of a score; the wandering part has 1.
POPULARITY = 0.5
POPULARITY_WITH_SUBJECT = 0.25
NOISE = 0.5
MEMORY = 0.95  # correlation of the wandering part between neighbouring tokens

RECENT_TOKENS = 8


class Statistics(NamedTuple):
    """Measure the locality of one layer; all are shares from 0 to 1.

    reuse           of a token's experts that the token before used as well
    recent          of a token's experts that one of the last 8 tokens used
    hottest_quarter of the routes that go to the most used quarter of the experts; half likewise
    """

    reuse: float
    recent: float
    hottest_quarter: float
    hottest_half: float


def make_routes(
    *,
    layers: int = 48,
    experts: int = 128,
    top_k: int = 8,
    tokens: int = 4096,
    topic: int = 1500,
    uniform: bool = False,
    seed: int = 0,
) -> Routes:
    """Return the trace (tokens, layers, top_k); ConfigError for sizes that make none.

    uniform   without popularity, subjects and memory: no expert is more likely than another
    """
    if min(layers, top_k, tokens, topic) < 1 or not top_k < experts <= 2**15:
        raise ConfigError(
            f"no routes of {layers} layers, {top_k} of {experts} experts, {tokens} tokens, "
            f"{topic} tokens a topic",
            hint="give 1 or more of each, and more experts than are used (at most 32768)",
        )
    rng = np.random.default_rng(seed)
    if uniform:
        scores = rng.random((tokens, layers, experts), np.float32)
        return np.argpartition(scores, top_k)[..., :top_k].astype(np.int16)
    traces = [_layer_routes(rng, experts, top_k, tokens, topic) for _ in range(layers)]
    return np.stack(traces, axis=1)


def _layer_routes(
    rng: np.random.Generator, experts: int, top_k: int, tokens: int, topic: int
) -> Routes:
    """Return the routes (tokens, top_k) of one layer."""
    wandering = rng.standard_normal(experts)
    popularity = POPULARITY * rng.standard_normal(experts)
    subject = np.zeros(experts)
    routes = np.empty((tokens, top_k), np.int16)
    for token in range(tokens):
        if token % topic == 0:
            subject = POPULARITY_WITH_SUBJECT * rng.standard_normal(experts)
        step = rng.standard_normal(experts)
        wandering = MEMORY * wandering + np.sqrt(1 - MEMORY**2) * step  # keeps its deviation
        score = popularity + subject + wandering + NOISE * rng.standard_normal(experts)
        routes[token] = np.argpartition(-score, top_k)[:top_k]
    return routes


def measure(trace: Routes, experts: int) -> Statistics:
    """Return the statistics of the first layer of a trace (tokens, layers, top_k)."""
    routes = trace[:, 0].astype(np.int64)
    tokens, top_k = routes.shape
    used = np.zeros((tokens, experts), bool)
    np.put_along_axis(used, routes, True, axis=1)
    counts = np.concatenate([np.zeros((1, experts), np.int64), used.cumsum(axis=0)])
    within = counts[RECENT_TOKENS:-1] - counts[: -RECENT_TOKENS - 1] > 0
    shares = np.sort(used.sum(axis=0))[::-1] / used.sum()
    return Statistics(
        reuse=float((used[1:] & used[:-1]).sum() / (top_k * max(tokens - 1, 1))),
        recent=float((used[RECENT_TOKENS:] & within).sum() / (top_k * max(len(within), 1))),
        hottest_quarter=float(shares[: experts // 4].sum()),
        hottest_half=float(shares[: experts // 2].sum()),
    )


def _run(arguments: dict[str, Any]) -> None:
    sizes: dict[str, int] = {}
    for flag in ("--layers", "--experts", "--top-k", "--tokens", "--topic", "--seed"):
        text = arguments[flag]
        if text is None:
            continue
        if not text.isdecimal():
            raise ConfigError(f"{flag} {text}: not usable", hint=f"give {flag} a whole number")
        sizes[flag.removeprefix("--").replace("-", "_")] = int(text)
    trace = make_routes(**sizes, uniform=arguments["--uniform"])
    np.save(arguments["OUT"], trace)
    found = measure(trace, sizes.get("experts", 128))
    print(
        f"{arguments['OUT']}: {trace.shape}, reuse {found.reuse:.2f} from the token before, "
        f"{found.recent:.2f} within {RECENT_TOKENS}, hottest quarter {found.hottest_quarter:.2f}, "
        f"half {found.hottest_half:.2f}"
    )


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        _run(docopt(str(__doc__)))
    except StrataError as error:
        print(error, f"hint: {error.hint}", sep="\n", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
