"""Measure how fast the CPU pool answers posts on this machine; no card is needed.

Usage:
  cpu_pool.py [options]
  cpu_pool.py --help

Options:
  --threads=LIST   comma-separated (default: all processors but one, and powers of two below)
  --experts=LIST   of a post, comma-separated [default: 1,2,3,4,6,8]
  --down=TYPE      of down; gate and up are Q4_K [default: Q6_K]
  --mib=N          of experts, more than the caches hold [default: 1024]
  --posts=N        that count, of each kind [default: 200]
  --pause-us=N     between an answer and the next post, as a card has other work [default: 50]
  --json=FILE      also write the figures there

Experts have the shape of the benchmark model: gate and up 768 x 2048, down 2048 x 768. Microseconds
from the post to the answer as the one who posts sees them, median and ninth decile, and GB/s of
weights at the median; in front the plain read of the same memory by as many threads. Weights are
random bytes with sane scales; speed does not depend on values.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]

from card_graphs import whole_number, whole_numbers  # noqa: E402 - bench/ is no package
from random_blocks import random_blocks  # noqa: E402
from results import write_result  # noqa: E402

from strata_nb import cpu  # noqa: E402
from strata_nb.cpu_pool import PoolLayer  # noqa: E402
from strata_nb.formats import TensorType, block_layout  # noqa: E402
from strata_nb.kernels.host.capability import PATH  # noqa: E402
from strata_nb.kernels.host.reading import read_passes  # noqa: E402
from strata_nb.packing import pack  # noqa: E402
from strata_nb.pool_rate import measure  # noqa: E402

WIDTH, INNER = 2048, 768
MADE = 4  # experts whose bytes are made; the others are copies at other places
ALIGNMENT = 256
SPREAD = 0.02  # standard deviation of the weights


def main() -> None:
    """Measure what the command line asks for; print it, and store it where that is asked for."""
    arguments = docopt(str(__doc__))
    threads = powers_up_to(max(1, cpu.usable_processors() - 1))
    if arguments["--threads"] is not None:
        threads = whole_numbers(arguments, "--threads")
    counts, posts = whole_numbers(arguments, "--experts"), whole_number(arguments, "--posts")
    pause_us = whole_number(arguments, "--pause-us", least=0)
    layer, kept, addresses = experts(
        TensorType[arguments["--down"]], whole_number(arguments, "--mib") << 20
    )
    print(
        f"{cpu.processor_name()}, {cpu.usable_processors()} processors, "
        f"load {os.getloadavg()[0]:.1f}, {PATH.value}, "
        f"{layer.experts} experts of {layer.blob_bytes():,} bytes"
    )
    print(
        "threads  read  " + "".join(f"{count:>9} expert{'s'[: count > 1]:1} " for count in counts)
    )
    rows: dict[int, Any] = {}
    for number in threads:
        plain = kept.nbytes / min(read_passes(kept, number, 2)) / 1e9
        row = rows[number] = {"read_gb_per_s": round(plain, 1), "median_us": {}, "p90_us": {}}
        cells = []
        for count in counts:
            ns = measure([layer], number, count, posts=posts, pause_s=pause_us * 1e-6)
            median = float(np.median(ns))
            row["median_us"][count] = round(median / 1e3, 1)
            late = float(np.percentile(ns, 90))
            row["p90_us"][count] = round(late / 1e3, 1)
            rate = count * layer.blob_bytes() / median
            cells.append(f"{median / 1e3:5.0f} {late / 1e3:5.0f} {rate:5.1f}")
        print(f"{number:7} {plain:5.1f}   {'  '.join(cells)}", flush=True)
    del addresses
    if arguments["--json"]:
        write_result(
            "cpu_pool",
            "microseconds from a post to its answer by threads and experts; read_gb_per_s: plain "
            "read of the same memory",
            " ".join(["python bench/cpu_pool.py", *sys.argv[1:]]),
            {"posts": posts, "pause_us": pause_us, "path": PATH.value, "rows": rows},
            ("numpy", "numba", "llvmlite"),
            arguments["--json"],
        )


def experts(
    down: TensorType, size_bytes: int
) -> tuple[PoolLayer, np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return a layer of about so many bytes of experts, its memory, and the addresses in it."""
    rng = np.random.default_rng(0)
    shapes = [
        (TensorType.Q4_K, INNER, WIDTH),
        (TensorType.Q4_K, INNER, WIDTH),
        (down, WIDTH, INNER),
    ]
    offsets: list[int] = []
    blobs = []
    for _ in range(MADE):
        parts: list[np.ndarray[Any, Any]] = []
        offsets, place = [], 0
        for kind, outputs, values in shapes:
            blocks = outputs * values // block_layout(kind).values
            packed = pack(kind, random_blocks(kind, blocks, SPREAD, rng), outputs, values)
            parts.append(np.pad(packed, (0, -packed.size % ALIGNMENT)))
            offsets.append(place)
            place += parts[-1].size
        blobs.append(np.concatenate(parts))
    size = blobs[0].size
    count = max(MADE, size_bytes // size)
    memory = np.empty(count * size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    for expert in range(count):
        place = start + expert * size
        memory[place : place + size] = blobs[expert % MADE]
    addresses = memory.ctypes.data + start + np.arange(count, dtype=np.int64) * size
    kinds = (TensorType.Q4_K, TensorType.Q4_K, down)
    gate_offset, up_offset, down_offset = offsets
    table = int(addresses.ctypes.data)
    layer = PoolLayer(
        *kinds, gate_offset, up_offset, down_offset, WIDTH, INNER, experts=count, addresses=table
    )
    return layer, memory, addresses


def powers_up_to(most: int) -> list[int]:
    """Return 1, 2, 4 ... and `most`."""
    return sorted({most, *(1 << bit for bit in range(most.bit_length()) if 1 << bit <= most)})


if __name__ == "__main__":
    main()
