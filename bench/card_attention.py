"""Measure the attention of a prompt batch on a card, of one layer, behind what was read before.

Usage:
  card_attention.py [options]
  card_attention.py --help

Options:
  --device=TEXT    as --device has it [default: cuda:0]
  --rows=LIST      of a batch [default: 512,4096]
  --depths=LIST    cells before the batch's [default: 0,32768]
  --heads=TEXT     heads, K/V heads, values of a head [default: 32,4,128]
  -o FILE          write the figures here, not to bench/results/card_attention.json

Kernels are measured with the bits of windows (--deterministic), and in an order of their own: by
warps, and by warpgroups where the card has them.
Queries, keys and values are random. The last four rows are compared with those of a window: they
differ by so large a share of the largest result. Each time is the median of 21 replays of a graph
of what a card launches for the attention of one layer. TFLOPS count two operations for each product
of a query with a key that its row sees, and of a weight with a value.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]

from card_batches import Memory, compiled, timed  # noqa: E402
from card_graphs import REPLAYS, store, whole_numbers  # noqa: E402

from strata_nb import backend, cpu  # noqa: E402
from strata_nb.card_backend import CardBackend  # noqa: E402
from strata_nb.errors import UnsupportedDevice  # noqa: E402
from strata_nb.formats import BLOCK_CELLS  # noqa: E402
from strata_nb.kernels.gpu.launches import card_launches  # noqa: E402
from strata_nb.kernels.program import launch  # noqa: E402
from strata_nb.kernels.runs import work_bytes  # noqa: E402

COMPARED = 4  # rows
FORMS: list[dict[str, Any]] = [
    {"same_bits": True},
    {"same_bits": False},
    {"same_bits": False, "warpgroups": True},
]
DIFFERENT_BLOCKS = 16  # of the K/V; then they come again


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    batches, sizes = (whole_numbers(arguments, name) for name in ("--rows", "--heads"))
    depths = whole_numbers(arguments, "--depths", least=0)
    if len(sizes) != 3:
        raise SystemExit(f"--heads {arguments['--heads']}: not usable; three numbers")
    figures = []
    with closing(backend.open_backend(arguments["--device"], cpu.physical_cores())) as card:
        if not isinstance(card, CardBackend):
            raise UnsupportedDevice(f"{card.name}: no card", hint="--device=cuda:0")
        for rows in batches:
            for depth in depths:
                for form in FORMS if card.has_warpgroups else FORMS[:-1]:
                    one = attention(card, rows, depth, sizes, form)
                    figures.append(one)
                    print(
                        f"{rows:5} rows at depth {depth:6,} {one['us']['median']:12.1f} us "
                        f"{one['tflops']:8.1f} TFLOPS, {'+'.join(one['kernels'])}, "
                        f"{one['work_bytes'] >> 20:,} MiB of work space, "
                        f"from a window's by {one['difference']:.1e}",
                        flush=True,
                    )
    store(
        "card_attention",
        "attention of a prompt batch, of one layer: microseconds of its launches in a graph, "
        f"{REPLAYS} replays",
        arguments,
        {"attention": figures},
    )


def attention(
    card: CardBackend, rows: int, depth: int, sizes: list[int], form: dict[str, Any]
) -> dict[str, Any]:
    """Return the time of the attention of rows behind so many cells."""
    heads, kv_heads, length = sizes
    width = -(-(depth + rows) // BLOCK_CELLS)
    rng = np.random.default_rng(rows + depth)
    plane = BLOCK_CELLS * kv_heads * length  # halves, of keys or of values
    some = rng.standard_normal((DIFFERENT_BLOCKS, 2 * plane)).astype(np.float16)
    with ExitStack() as made:
        memory = Memory(card, made)
        places = memory.copy(some, -(-width // DIFFERENT_BLOCKS))
        work = work_bytes(rows, heads, width, length)
        q = rng.standard_normal((rows, heads, length)).astype(np.float32)
        out = memory.room(4 * q.size)
        given = {
            "rows": memory.copy(np.array([rows, 0])),
            "sequences": memory.copy(np.zeros(rows, np.int64)),
            "positions": memory.copy(depth + np.arange(rows, dtype=np.int64)),
            "q": memory.copy(q),
            "blocks": memory.copy(places + 4 * plane * rng.permutation(width)),
            "out": out,
            "work": memory.room(work),
            "table_width": width,
            "k_offset": 0,
            "v_offset": 2 * plane,
            "heads": heads,
            "kv_heads": kv_heads,
            "key_length": length,
            "value_length": length,
            "scale": length**-0.5,
        }
        one = launch("attention", given, variant=("f16", "f16"))
        many = list(card_launches((one,), rows, **form))
        first = rows - COMPARED
        shifted = given | {
            "sequences": given["sequences"] + 8 * first,
            "positions": given["positions"] + 8 * first,
            "q": given["q"] + 4 * first * heads * length,
        }
        few = list(card_launches((launch("attention", shifted, variant=("f16", "f16")),), COMPARED))
        compiled(card, [*many, *few])
        us = timed(card, many, rows)
        found, wanted = (np.empty((COMPARED, heads, length), np.float32) for _ in range(2))
        card.fetch(out + 4 * first * heads * length, found)
        card.send(given["rows"], np.array([COMPARED, 0]))
        timed(card, few, COMPARED)
        card.fetch(out, wanted)
    if not np.all(np.isfinite(found)):
        raise SystemExit(f"{rows} rows at depth {depth}: the results are no numbers")
    seen = rows * depth + rows * (rows + 1) // 2
    difference = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if form["same_bits"] and difference:
        print(f"the bits differ from those of a window, by {difference}")
    return {
        "rows": rows,
        "depth": depth,
        "same_bits": form["same_bits"],
        "kernels": [one.kernel.name for one in many],
        "work_bytes": work,
        "us": us,
        "tflops": 4 * heads * length * seen / us["median"] / 1e6,
        "difference": difference,
    }


if __name__ == "__main__":
    main()
