"""Profile the launches of a decoded token on a card, and with norms and choices apart.

Usage:
  card_products.py MODEL [options]
  card_products.py --help

Options:
  --device=TEXT   as --device has it [default: cuda:0]
  --cells=N       of the context when the token is read [default: 64]
  -o FILE         write the figures here, not to bench/results/card_products_MODEL.json

A token runs in few launches: products norm their row, and the router chooses experts
(docs/decisions/0020-one-row-waits-less.md). What such a launch takes is not what its product takes.
So the same graph is profiled (`card_profile.py`) as it runs, and with each norm and choice apart:

  apart   norms, products, the router and the choice of experts are launches of their own

Both read the same bytes and leave the same bits. Shares are of the rate of a plain read of the same
run: of the time that a launch takes, which part reading its bytes would take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from card_graphs import card_of, plain_read_figures, store, whole_number  # noqa: E402 - no package

from strata_nb import Engine, Options  # noqa: E402
from strata_nb.card_profile import WindowProfile  # noqa: E402
from strata_nb.kernels.gpu import launches  # noqa: E402

JOINING = ("with_routers", "with_normed_rows", "with_last_norms")  # passes of `card_launches`
SEED = 1


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    cells = whole_number(arguments, "--cells", least=2)
    figures: dict[str, Any] = {"cells": cells}
    digests = set()
    for name, arrange in (("joined", nullcontext), ("apart", apart)):
        with arrange():
            found, logits, figures["plain_read"] = _profiled(arguments, cells)
        digests.add(logits.tobytes())
        figures[name] = _lines(name, found, figures["plain_read"]["gb_per_s"])
    figures["same_bits"] = len(digests) == 1
    store(
        "card_products",
        "launches of a decoded token: microseconds within its graph, bytes, share of the plain "
        "read; as they run, and with norms and choices apart",
        arguments,
        figures,
    )
    if not figures["same_bits"]:
        raise SystemExit("the bits differ")


@contextmanager
def apart() -> Iterator[None]:
    """Let no pass join norms and choices with products."""
    with ExitStack() as patched:
        for name in JOINING:
            patched.enter_context(mock.patch.object(launches, name, _unchanged()))
        yield


def _unchanged() -> Callable[..., Any]:
    return lambda program, **_: iter(program)


def _profiled(
    arguments: dict[str, Any], cells: int
) -> tuple[WindowProfile, np.ndarray[Any, Any], dict[str, float]]:
    """Return a token's profile, its logits, and the plain read beside it."""
    options = Options(
        model=arguments["MODEL"],
        device=arguments["--device"],
        ctx_size=cells + 1,
        expert_cache="100%",
        cpu_pool=False,
    )
    with Engine.open(options) as engine, engine.open_session() as session:
        ids = np.random.default_rng(SEED).integers(0, engine.description.vocab_size, cells)
        session.extend(ids[:-1].tolist())
        session.extend(ids[-1:].tolist())
        logits = np.array(session.next_logits())
        found = engine.profile(cells)
        return found, logits, plain_read_figures(card_of(engine).plain_read())


def _lines(name: str, found: WindowProfile, gb_per_s: float) -> dict[str, Any]:
    print(f"{name}: {found.whole_s * 1e6:,.0f} us a token; the lines sum to ", end="")
    print(f"{found.sum_s * 1e6:,.0f}")
    lines = []
    for line in found.lines:
        us = 1e6 * line.seconds / line.count
        share = line.kind.reads / us / gb_per_s * 1e-3
        label = line.kind.label
        print(f"{line.count:4} {label:36.36} {line.kind.kernel:40.40} {us:7.2f} us {share:4.0%}")
        lines.append(
            {
                "label": label,
                "kernel": line.kind.kernel,
                "count": line.count,
                "measured": line.measured,
                "us": us,
                "bytes": line.kind.reads,
                "share_of_plain_read": share,
            }
        )
    return {"whole_us": found.whole_s * 1e6, "sum_us": found.sum_s * 1e6, "lines": lines}


if __name__ == "__main__":
    main()
