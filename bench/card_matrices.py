"""Measure how fast a card multiplies one row with matrices larger than its caches.

Usage:
  card_matrices.py [options]
  card_matrices.py --help

Options:
  --device=TEXT   as --device has it [default: cuda:0]
  --types=LIST    of the weights [default: Q4_K,Q6_K,Q8_0,IQ3_S,IQ4_XS]
  --values=N      of a row [default: 2048]
  --bytes=N       of a matrix [default: 500000000]
  --matrices=N    that a graph multiplies one after the other [default: 4]
  -o FILE         write the figures here, not to bench/results/card_matrices.json

The kernels are those of a decoded token. Weights are random blocks, a few thousand rows again and
again; the row is quantised. Each time is the median of 21 replays of a graph:

  alone    a graph of one launch; what a graph costs to begin is in it
  in row   a graph of launches for different matrices, per launch, as in a window

Shares are of the plain read of the same run.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]

from card_graphs import REPLAYS, TimedGraph, plain_read_figures, spread, store  # noqa: E402
from random_blocks import random_blocks  # noqa: E402

from strata_nb import backend, cpu  # noqa: E402
from strata_nb.card_backend import CardBackend  # noqa: E402
from strata_nb.errors import UnsupportedDevice  # noqa: E402
from strata_nb.formats import TensorType, block_layout  # noqa: E402
from strata_nb.formats import row_bytes as packed_row_bytes  # noqa: E402
from strata_nb.kernels.gpu.card_launch import CardLaunch  # noqa: E402
from strata_nb.kernels.gpu.launches import card_launches  # noqa: E402
from strata_nb.kernels.host import activations  # noqa: E402
from strata_nb.kernels.program import launch  # noqa: E402
from strata_nb.kernels.quantised_rows import row_bytes  # noqa: E402
from strata_nb.packing import GROUP_ROWS, pack  # noqa: E402

SPREAD = 0.02  # of the weights: their standard deviation
DIFFERENT_ROWS = 8192  # of a matrix; then they come again


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    kinds = [TensorType[name] for name in arguments["--types"].split(",")]
    values, size = int(arguments["--values"]), int(arguments["--bytes"])
    rows = []
    with closing(backend.open_backend(arguments["--device"], cpu.physical_cores())) as card:
        if not isinstance(card, CardBackend):
            raise UnsupportedDevice(f"{card.name}: no card", hint="--device=cuda:0")
        read = card.plain_read()
        figures = plain_read_figures(read)
        print(f"plain read {figures['gb_per_s']:,.0f} GB/s")
        print("type      MB      alone, us     GB/s  share    in row, us     GB/s  share")
        for kind in kinds:
            row = measure(card, kind, values, size, int(arguments["--matrices"]))
            rows.append(row)
            columns = []
            for times in (row["alone_us"], row["in_row_us"]):
                rate = row["bytes"] / times["median"] / 1e3
                times |= {"gb_per_s": rate, "share": 1e9 * rate / read.bytes_per_s}
                columns.append(f"{times['median']:12.1f} {rate:8,.0f} {times['share']:6.1%}")
            print(f"{kind.name:7} {row['bytes'] / 1e6:5.0f} {'  '.join(columns)}", flush=True)
    store(
        "card_matrices",
        "one row by a matrix of packed weights: microseconds of a launch, alone in a graph and of "
        f"several in one, {REPLAYS} replays; share of the plain read",
        arguments,
        {"plain_read": figures, "values": values, "rows": rows},
    )


def measure(
    card: CardBackend, kind: TensorType, values: int, size: int, matrices: int
) -> dict[str, Any]:
    """Return the times of one row by matrices of so many bytes; the products are checked."""
    outputs = max(GROUP_ROWS, size // packed_row_bytes(kind, values) // GROUP_ROWS * GROUP_ROWS)
    with ExitStack() as made:

        def allocated(size: int) -> int:
            address = card.driver.allocate(size, card.device)
            made.callback(card.driver.free, address)
            return address

        part = _weights(kind, min(outputs, DIFFERENT_ROWS), values)
        matrix_bytes = outputs * packed_row_bytes(kind, values)
        weights, y = allocated(matrices * matrix_bytes), allocated(4 * outputs)
        _fill(card, weights, matrices * matrix_bytes, part)
        row = _quantised_row(values)
        count, x = allocated(8), allocated(len(row))
        card.send(count, np.array([1]))
        card.send(x, row)
        launches = [
            _product(kind, count, x, weights + number * matrix_bytes, y, values, outputs)
            for number in range(matrices)
        ]
        wanted = {one.kernel.name: (one.kernel, one.kinds) for one in launches}
        card._machine.update(card._compiler([*wanted.values()], None, lambda _: None))
        alone = TimedGraph(card, launches[:1], 1, made).seconds()
        _check(card, y, outputs)
        together = TimedGraph(card, launches, 1, made).seconds()
    return {
        "type": kind.name,
        "kernel": launches[0].kernel.name,
        "outputs": outputs,
        "bytes": matrix_bytes,
        "matrices": matrices,
        "alone_us": spread(alone, 1e6),
        "in_row_us": spread(together, 1e6 / matrices),
    }


def _product(
    kind: TensorType, count: int, x: int, weight: int, y: int, values: int, outputs: int
) -> CardLaunch:
    """Return the launch of a product of the one row at `x`."""
    words = {"rows": count, "x": x, "weight": weight, "bias": 0, "y": y}
    words |= {"values": values, "outputs": outputs, "add": 0}
    (one,) = card_launches((launch("linear", words, variant=kind, label="product"),), 1)
    return one


def _weights(kind: TensorType, outputs: int, values: int) -> NDArray[np.uint8]:
    blocks = outputs * values // block_layout(kind).values
    raw = random_blocks(kind, blocks, SPREAD, np.random.default_rng(kind.value))
    return pack(kind, raw, outputs, values)


def _quantised_row(values: int) -> NDArray[np.uint8]:
    x = np.random.default_rng(1).standard_normal((1, values)).astype(np.float32)
    row = np.empty(row_bytes(values), np.uint8)
    activations.quantise_rows(x.ctypes.data, row.ctypes.data, values, 0, 1)
    return row


def _fill(card: CardBackend, address: int, size: int, part: NDArray[np.uint8]) -> None:
    """Fill memory of the card with copies of a part, the last of which may be cut."""
    card.send(address, part[:size])
    for start in range(len(part), size, len(part)):
        copied = min(len(part), size - start)
        card._card.copy_async(address + start, address, copied, card._stream)


def _check(card: CardBackend, y: int, outputs: int) -> None:
    """Make sure that the products are numbers, and of the same rows the same."""
    found = np.empty(outputs, np.float32)
    card.fetch(y, found)
    again = found[: outputs // DIFFERENT_ROWS * DIFFERENT_ROWS].reshape(-1, DIFFERENT_ROWS)
    if not np.all(np.isfinite(found)) or not np.any(found) or np.any(again != again[:1]):
        raise SystemExit("the products are not right")


if __name__ == "__main__":
    main()
