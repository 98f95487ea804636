"""Measure what windows of several rows cost on a card, beside what they have to read.

Usage:
  card_windows.py MODEL [options]
  card_windows.py --help

Options:
  --device=TEXT   as --device has it [default: cuda:0]
  --rows=LIST     of the windows; the first is what the others are compared with [default: 1,2,4,8]
  --depth=N       cells before the window [default: 512]
  --steps=N       windows of each number of rows, of other tokens each [default: 5]
  -o FILE         write the figures here, not to bench/results/card_windows_MODEL.json

A window reads pseudo-random tokens of one sequence and draws a token behind each of its rows,
greedily. The router says which experts it used; those that rows share are counted once, as is the
K/V. The time of a window is the median of 21 replays of its graph, with launches that begin while
the one in front ends, and without; logits and tokens must have the same bits both ways.

  bound   what reading the bytes at the rate of the plain read takes
  ratio   the time over that of the first number of rows, by the bytes over its bytes: 1 where rows
          cost nothing but what they read
"""

from __future__ import annotations

import hashlib
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
    REPLAYS,
    TimedGraph,
    card_of,
    plain_read_figures,
    put_back,
    spread,
    store,
)

from strata_nb import Engine, Options, Sampling  # noqa: E402
from strata_nb.card_backend import CardBackend  # noqa: E402
from strata_nb.device_model import DeviceModel  # noqa: E402
from strata_nb.kernels.gpu.launches import card_launches  # noqa: E402
from strata_nb.sampling import Choice  # noqa: E402
from strata_nb.steps import WINDOW_ROWS, Row  # noqa: E402

GREEDY = Choice((), Sampling(temperature=0), 0.0)


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    counts = [int(count) for count in arguments["--rows"].split(",")]
    depth, steps = int(arguments["--depth"]), int(arguments["--steps"])
    options = Options(
        arguments["MODEL"], arguments["--device"], ctx_size=depth + WINDOW_ROWS, adapt="off"
    )
    with Engine.open(options) as engine:
        card_of(engine)
        report = engine.describe()
        read = engine.plain_read()
        random = np.random.default_rng(0)
        vocab = engine.description.vocab_size
        with engine.open_session() as session:
            session.extend(random.integers(0, vocab, depth).tolist())
            rows: list[dict[str, Any]] = []
            for count in counts:
                windows = random.integers(0, vocab, (steps, count)).tolist()
                row = measure(engine, session._sequence, windows, rows[:1], read.bytes_per_s)
                rows.append(row)
        print_table(rows, read.bytes_per_s)
    store(
        "card_windows",
        f"windows: microseconds of {REPLAYS} replays each of the graphs of several windows, "
        "medians of each; serial: without overlap of launches; bytes that they must read",
        arguments,
        {
            "plain_read": plain_read_figures(read),
            "depth": depth,
            "slots": report.slots,
            "resident": report.resident,
            "rows": rows,
        },
    )
    if not all(row["same_bits"] for row in rows):
        raise SystemExit("the bits differ")


def measure(
    engine: Engine,
    sequence: int,
    windows: list[list[int]],
    first: list[dict[str, Any]],
    bytes_per_s: float,
) -> dict[str, Any]:
    """Return figures of windows of as many rows each.

    first   the figures to compare with, if there are any yet
    """
    card, model, (count,) = card_of(engine), engine._device(), {len(ids) for ids in windows}
    overlapping, serial, used, sizes, same = [], [], [], [], []
    with ExitStack() as made:
        graphs = [_graph(card, model, count, overlaps, made) for overlaps in (True, False)]
        for ids in windows:
            depth = model.length(sequence)
            tokens = model.choose([Row(sequence, token, True) for token in ids], [GREEDY] * count)
            routes = model.chosen(count)
            model._settle()
            with put_back(card):
                times = [statistics.median(graph.seconds()) for graph in graphs]
                digests = {_digest(card, model, graph, count, tokens) for graph in graphs}
            model.rewind(sequence, depth)
            overlapping.append(times[0])
            serial.append(times[1])
            same.append(len(digests) == 1)
            distinct = [len(np.unique(routes[:, layer])) for layer in range(routes.shape[1])]
            used.append(float(np.mean(distinct or [0])))
            sizes.append(_read_bytes(engine, depth + count, distinct))
    row: dict[str, Any] = {
        "rows": count,
        "experts_a_layer": statistics.fmean(used),
        "bytes": statistics.fmean(sizes),
        "us": spread(overlapping, 1e6),
        "serial_us": spread(serial, 1e6),
        "same_bits": all(same),
    }
    row["bound_us"] = 1e6 * row["bytes"] / bytes_per_s
    base = first[0] if first else row
    cost, more = row["us"]["median"] / base["us"]["median"], row["bytes"] / base["bytes"]
    return row | {"times_the_first": cost, "bytes_times_the_first": more, "ratio": cost / more}


def _graph(
    card: CardBackend, model: DeviceModel, rows: int, overlaps: bool, owner: ExitStack
) -> TimedGraph:
    """Return the graph of a whole window, with or without launches that overlap."""
    before = card.overlaps
    card.overlaps = overlaps
    try:
        return TimedGraph(card, card_launches(model._programs.window, rows), rows, owner)
    finally:
        card.overlaps = before


def _digest(
    card: CardBackend, model: DeviceModel, graph: TimedGraph, rows: int, tokens: list[int]
) -> str:
    """Return a digest of the logits and tokens that a graph leaves; what was there is erased."""
    logits = np.full((rows, model.description.vocab_size), np.nan, np.float32)
    drawn = np.full(rows, -1, np.int64)
    card.send(model._programs.logits, logits)
    card.send(model._programs.drawn, drawn)
    graph.seconds()
    card.fetch(model._programs.logits, logits)
    card.fetch(model._programs.drawn, drawn)
    if np.isnan(logits).any():
        raise SystemExit("a replay gave not all logits")
    if drawn.tolist() != tokens:
        raise SystemExit(f"a replay drew {drawn.tolist()}, the window itself {tokens}")
    return hashlib.sha256(logits.tobytes() + drawn.tobytes()).hexdigest()


def _read_bytes(engine: Engine, cells: int, distinct: list[int]) -> int:
    """Return what a window reads: dense weights and K/V once, and these experts of each layer."""
    model = engine.description
    more = zip(distinct, model.one_expert_bytes, strict=True)
    return engine.step_bytes(cells) + sum((count - model.top_k) * size for count, size in more)


def print_table(rows: list[dict[str, Any]], bytes_per_s: float) -> None:
    """Print a line for each number of rows."""
    print(f"plain read {bytes_per_s / 1e9:,.0f} GB/s")
    print(
        "rows  experts     MB        us (least to most)     bound  x bound  ratio  serial us  bits"
    )
    for row in rows:
        us, serial = row["us"], row["serial_us"]
        print(
            f"{row['rows']:4} {row['experts_a_layer']:8.1f} {row['bytes'] / 1e6:6,.0f} "
            f"{us['median']:9,.0f} ({us['least']:,.0f} to {us['most']:,.0f}) "
            f"{row['bound_us']:9,.0f} {us['median'] / row['bound_us']:8.2f} {row['ratio']:6.2f} "
            f"{serial['median']:10,.0f}  {'same' if row['same_bits'] else 'DIFFER'}"
        )


if __name__ == "__main__":
    main()
