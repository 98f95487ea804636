"""Find out where the time of one prompt batch goes on a card: a line for each kind of launch.

Usage:
  card_one_batch.py MODEL [options]
  card_one_batch.py --help

Options:
  --device=TEXT   as --device has it [default: cuda:0]
  --rows=N        of the batch [default: 4096]
  --depth=N       tokens that were read before it, in batches of as many rows [default: 0]
  -o FILE         write the figures here, not to bench/results/card_one_batch_MODEL.json

A launch takes what a graph that ends with it takes longer than one that ends before it
(`card_profile.py`); each graph begins a layer earlier, is replayed without waits, and its median
counts. Every expert has a slot. Operations are two for each weight and row, and in attention two
for each product of a query with a key that its row sees, and of a weight with a value; the rate of
int8 tensor cores is no limit for them alone, because each 32 values have scales of their own
(docs/decisions/0013-batches-on-tensor-cores.md).
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from card_graphs import (  # noqa: E402 - bench/ is no package
    TimedGraph,
    card_of,
    plain_read_figures,
    put_back,
    store,
    whole_number,
)

from strata_nb import Engine, Options  # noqa: E402
from strata_nb.card_profile import profile_window  # noqa: E402
from strata_nb.kernels.gpu.card_launch import CardLaunch  # noqa: E402

SEED = 1
SPARE_CELLS = 64
REPEATS = 5  # of a graph


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    rows = whole_number(arguments, "--rows", least=9)
    depth = whole_number(arguments, "--depth", least=0)
    options = Options(
        model=arguments["MODEL"],
        device=arguments["--device"],
        ctx_size=rows + depth + SPARE_CELLS,
        prefill=rows,
        expert_cache="100%",
    )
    with Engine.open(options) as engine:
        card = card_of(engine)
        ids = np.random.default_rng(SEED).integers(0, engine.description.vocab_size, depth + rows)
        with engine.open_session() as session:
            for first in range(0, depth, rows):
                session.extend(ids[first : min(first + rows, depth)].tolist())
            session.extend(ids[depth:].tolist())
            figures = _profiled(engine, rows, depth)
        figures["plain_read"] = plain_read_figures(card.plain_read())
    store("card_one_batch", "where the time of a prompt batch goes", arguments, figures)


def _profiled(engine: Engine, rows: int, depth: int) -> dict[str, Any]:
    model = engine._device()
    card, many = card_of(engine), model._steps._many
    launches = card.launches(many._programs.body, rows)

    def seconds(some: Any) -> float:
        with ExitStack() as owner:
            return statistics.median(TimedGraph(card, some, rows, owner, REPEATS).seconds())

    with put_back(card):
        found = profile_window(launches, rows, 0, seconds)
    cells = rows * depth + rows * (rows + 1) // 2
    operations: dict[tuple[str, str], int] = {}
    for one in launches:
        label = one.label.split(".", 2)[-1] if one.label.startswith("blk.") else one.label
        operations.setdefault((label, one.kernel.name), _operations(one, rows))
    shape = engine.description
    attention = 2 * cells * shape.heads * (shape.key_length + shape.value_length) * shape.layers
    lines = []
    print(f"{rows:,} rows at depth {depth:,}: {found.whole_s * 1e3:,.1f} ms, ", end="")
    print(f"{rows / found.whole_s:,.0f} tok/s; the lines sum to {found.sum_s * 1e3:,.1f} ms")
    for line in found.lines:
        each = line.seconds / line.count
        work = operations[line.kind.label, line.kind.kernel]
        if line.kind.kernel.startswith("attention"):
            work = attention // line.count  # all of its launches together
        rate = work / each / 1e12
        said = f"{rate:7.1f} Tops/s" if work else ""
        share = line.seconds / found.whole_s
        print(
            f"{line.count:4} {line.kind.label:34.34} {line.kind.kernel:34.34} "
            f"{each * 1e6:9.1f} us {share:6.1%} {said}"
        )
        lines.append(
            {
                "label": line.kind.label,
                "kernel": line.kind.kernel,
                "count": line.count,
                "measured": line.measured,
                "us": each * 1e6,
                "share_of_time": share,
                "tera_operations_per_s": rate if work else None,
            }
        )
    return {
        "rows": rows,
        "depth": depth,
        "whole_ms": found.whole_s * 1e3,
        "sum_ms": found.sum_s * 1e3,
        "tok_per_s": rows / found.whole_s,
        "lines": lines,
    }


def _operations(one: CardLaunch, rows: int) -> int:
    """Return how many operations a product of weights needs, 0 of other launches."""
    given = one.arguments
    if {"values", "outputs"} <= set(given):
        matrices = 2 if "gate_offset" in given else 1
        return 2 * matrices * rows * given.get("top_k", 1) * given["values"] * given["outputs"]
    return 0


if __name__ == "__main__":
    main()
