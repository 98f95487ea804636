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
(`card_profile.py`); each graph begins a layer earlier, right behind a whole batch, and the median
of a few replays counts. Every expert has a slot, and routes are the model's own.

The limit of a launch is the larger of two times: its bytes at the rate of a plain read, and its
operations at the rate that cuBLAS reaches in bfloat16 with the batch's rows and a matrix of 4,096
by 4,096, both of the same run; without that library, which a line says, its bytes alone. Bytes are
those of weights, and of the rows that go in and come out, each once. Operations are two for each
weight and row, and in attention two for each product of a query with a key that its row sees, and
of a weight with a value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from card_graphs import card_of, plain_read_figures, store, whole_number  # noqa: E402 - no package
from cublas import Cublas  # noqa: E402

from strata_nb import Engine, Options  # noqa: E402
from strata_nb.card_profile import WindowProfile  # noqa: E402
from strata_nb.kernels.gpu.card_launch import CardLaunch  # noqa: E402
from strata_nb.kernels.gpu.warpgroup_launches import BYTES_OF_HALVES  # noqa: E402
from strata_nb.kernels.quantised_rows import row_bytes  # noqa: E402
from strata_nb.models.description import Description  # noqa: E402

SEED = 1
SPARE_CELLS = 64
REPLAYS = 3  # of a graph, each behind a whole batch
FLOAT, WORD = 4, 8  # bytes


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
        card, many = card_of(engine), engine._device()._steps._many
        ids = np.random.default_rng(SEED).integers(0, engine.description.vocab_size, depth + rows)
        with engine.open_session() as session:
            for first in range(0, depth, rows):
                session.extend(ids[first : min(first + rows, depth)].tolist())
            session.extend(ids[depth:].tolist())
            found = card.profile([many._programs.body], rows, 0, REPLAYS)
        figures: dict[str, Any] = {"rows": rows, "depth": depth, "replays": REPLAYS}
        figures["plain_read"] = plain_read_figures(card.plain_read())
        figures["cublas_tops"] = Cublas(card).tops([(rows, 4096, 4096)])
        launches = card.launches(many._programs.body, rows)
        figures |= lines_of(found, launches, engine.description, figures)
    store("card_one_batch", "where the time of a prompt batch goes", arguments, figures)


def lines_of(
    found: WindowProfile,
    launches: Any,
    model: Description,
    figures: Mapping[str, Any],
) -> dict[str, Any]:
    """Print and return what each kind of launch takes, beside its limit.

    figures   rows, depth, plain_read and cublas_tops of the run
    """
    rows, depth = figures["rows"], figures["depth"]
    if figures["cublas_tops"] is None:
        print("no cuBLAS: limits are those of bytes alone", file=sys.stderr)
    print(f"{rows:,} rows at depth {depth:,}: {found.whole_s * 1e3:,.1f} ms, ", end="")
    print(f"{rows / found.whole_s:,.0f} tok/s; the lines sum to {found.sum_s * 1e3:,.1f} ms")
    kinds = {(_label(one), one.kernel.name): one for one in launches}
    lines, limit_s = [], 0.0
    for line in found.lines:
        one = kinds[line.kind.label, line.kind.kernel]
        each_us = line.seconds / line.count * 1e6
        size = line.kind.reads + bytes_of_rows(one, rows, model)
        work = operations(one, rows, depth, model)
        limit_us = size / figures["plain_read"]["gb_per_s"] * 1e-3
        if work and figures["cublas_tops"]:
            limit_us = max(limit_us, work / figures["cublas_tops"] * 1e-6)
        limit_s += limit_us * line.count * 1e-6
        made = {
            "label": line.kind.label,
            "kernel": line.kind.kernel,
            "count": line.count,
            "measured": line.measured,
            "us": each_us,
            "share_of_time": line.seconds / found.whole_s,
            "bytes": size,
            "operations": work,
            "limit_us": limit_us,
            "share_of_limit": limit_us / each_us if each_us > 0 else 0.0,
        }
        lines.append(made)
        print(
            f"{line.count:4} {line.kind.label:21.21} {line.kind.kernel:29.29} {each_us:8.1f} us "
            f"{made['share_of_time']:6.1%} {size / 1e6:7.1f} MB {work / 1e9:7.1f} GFLOP, limit "
            f"{limit_us:6.1f} us {made['share_of_limit']:4.0%}"
        )
    print(f"limits sum to {limit_s * 1e3:.1f} ms, {limit_s / found.whole_s:.0%} of the time")
    return {
        "whole_ms": found.whole_s * 1e3,
        "sum_ms": found.sum_s * 1e3,
        "limits_ms": limit_s * 1e3,
        "tok_per_s": rows / found.whole_s,
        "lines": lines,
    }


def _label(one: CardLaunch) -> str:
    return one.label.split(".", 2)[-1] if one.label.startswith("blk.") else one.label


def bytes_of_rows(one: CardLaunch, rows: int, model: Description) -> int:
    """Return the bytes of rows that a launch reads and writes, each once; 0 of kernels that this
    program does not know."""
    given, name = one.arguments, one.kernel.name
    values, outputs = given.get("values", 0), given.get("outputs", 0)
    width, choices = given.get("width", 0), given.get("top_k", 1)
    results = FLOAT * outputs * (2 if given.get("add") else 1)
    halves, lengths = BYTES_OF_HALVES, model.kv_heads * (model.key_length + model.value_length)
    queries, mixed = model.heads * model.key_length, model.heads * model.value_length
    each = {
        "embed": FLOAT * width,
        "rms_norm": FLOAT * width + row_bytes(width) + (FLOAT * width if given.get("out") else 0),
        "quantise": FLOAT * values + row_bytes(values),
        "warpgroup_halves": row_bytes(values) + halves * values,
        "warpgroup_linear": halves * values + results,
        "batch_linear_f": FLOAT * values + results,
        "batch_linear_bf16": FLOAT * values + results,
        "batch_linear_tiles": FLOAT * values + results,
        "batch_linear_": row_bytes(values) + results,
        "prepare": 2 * FLOAT * queries + (FLOAT + halves) * lengths,
        "batch_prepare": 2 * FLOAT * queries + (FLOAT + halves) * lengths,
        "attention": FLOAT * (queries + mixed),
        "route": FLOAT * given.get("experts", 0) + (WORD + FLOAT) * choices,
        "batch_count": WORD * choices,
        "batch_group": 3 * WORD * choices,
        "batch_expert": choices * (row_bytes(values) + FLOAT * outputs),
        "batch_up": choices * (row_bytes(values) + FLOAT * outputs + row_bytes(outputs)),
        "warpgroup_gate_up": halves * (values + choices * outputs),
        "warpgroup_expert": choices * halves * (values + outputs),
        "warpgroup_sum": outputs * (choices * halves + 2 * FLOAT),
        "batch_sum": FLOAT * outputs * (choices + 2),
    }
    found = [size for prefix, size in each.items() if name.startswith(prefix)]
    return rows * found[0] if found else 0


def operations(one: CardLaunch, rows: int, depth: int, model: Description) -> int:
    """Return how many operations a product of weights or attention needs, 0 of other launches."""
    given = one.arguments
    if one.kernel.name.startswith("attention"):
        pairs = rows * depth + rows * (rows + 1) // 2
        return 2 * pairs * model.heads * (model.key_length + model.value_length)
    if {"values", "outputs"} <= set(given):
        matrices = 2 if "gate_offset" in given else 1
        return 2 * matrices * rows * given.get("top_k", 1) * given["values"] * given["outputs"]
    return 0


if __name__ == "__main__":
    main()
