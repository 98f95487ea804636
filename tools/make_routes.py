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
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from docopt import docopt
from numpy.typing import NDArray

from strata_nb.errors import ConfigError, StrataError
from strata_nb.whole_files import whole_file

Routes = NDArray[np.int16]

# Standard deviations of the parts of a score; the wandering part has 1.
POPULARITY = 0.5
POPULARITY_WITH_SUBJECT = 0.25
NOISE = 0.5
MEMORY = 0.95  # correlation of the wandering part between neighbouring tokens

RECENT_TOKENS = 8
PIECE_SCORES = 1 << 20  # that are made at a time


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
    routes = np.empty((tokens, layers, top_k), np.int16)
    if uniform:
        for some in _pieces(0, tokens, layers * experts):
            scores = rng.random((len(some), layers, experts), np.float32)
            routes[some] = np.argpartition(scores, top_k)[..., :top_k]
        return routes
    for layer in range(layers):
        _route_layer(rng, routes[:, layer], experts, topic)
    return routes


def _pieces(start: int, end: int, scores: int) -> Iterator[range]:
    """Cut tokens into pieces, so that a longer trace takes no more memory for its scores.

    scores   of a token
    """
    most = max(1, PIECE_SCORES // scores)
    for at in range(start, end, most):
        yield range(at, min(end, at + most))


def _route_layer(rng: np.random.Generator, routes: Routes, experts: int, topic: int) -> None:
    """Write the routes (tokens, top_k) of one layer."""
    tokens, top_k = routes.shape
    wandering = rng.standard_normal(experts)
    popularity = POPULARITY * rng.standard_normal(experts)
    for start in range(0, tokens, topic):
        subject = POPULARITY_WITH_SUBJECT * rng.standard_normal(experts)
        for some in _pieces(start, min(tokens, start + topic), experts):
            drawn = rng.standard_normal((len(some), 2, experts))
            steps, noise = np.sqrt(1 - MEMORY**2) * drawn[:, 0], NOISE * drawn[:, 1]
            for step in steps:
                wandering = MEMORY * wandering + step  # keeps its deviation
                step[:] = wandering
            scores = popularity + subject + steps + noise
            routes[some] = np.argpartition(-scores, top_k)[:, :top_k]


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
    out = arguments["OUT"]
    try:
        with whole_file(out) as file:  # first: to make routes takes longer
            trace = make_routes(**sizes, uniform=arguments["--uniform"])
            np.save(file, trace)
    except OSError as error:
        raise ConfigError(
            f"{out}: {error.strerror}", hint="check the name and the permissions"
        ) from None
    found = measure(trace, sizes.get("experts", 128))
    print(
        f"{out}: {trace.shape}, reuse {found.reuse:.2f} from the token before, "
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
