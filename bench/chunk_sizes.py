"""Measure what the size of a chunk costs on a host device: growing a range, moving memory, waste.

Usage:
  chunk_sizes.py [options]
  chunk_sizes.py --help

Options:
  --sizes=LIST   of a chunk, in KiB [default: 64,256,1024,4096,16384,65536]
  --moved=MIB    memory that is mapped and moved [default: 256]
  --rounds=N     medians of so many [default: 5]

Grow: chunks are created, mapped and given access. Move: the end of one range is retired, unmapped,
and mapped behind another, as when the K/V takes chunks of the experts. Nothing touches the pages,
which the system fills with zeros at the first use. Waste: half a chunk behind the K/V and half a
chunk behind the slots is what a ledger loses on average. The figures go to
bench/results/chunk_sizes.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb.host import HostDriver, parse_host_devices  # noqa: E402
from strata_nb.vmm import ChunkPool  # noqa: E402


def main() -> None:
    """Measure, print and store."""
    arguments = docopt(str(__doc__))
    moved, rounds = int(arguments["--moved"]) << 20, int(arguments["--rounds"])
    rows = []
    for kib in (int(part) for part in arguments["--sizes"].split(",")):
        taken = [grow_and_move_s(kib, moved) for _ in range(rounds)]
        chunks = moved // (kib << 10)
        grow, move = (statistics.median(times) for times in zip(*taken, strict=True))
        row = {
            "chunk_kib": kib,
            "chunks": chunks,
            "grow_ms": 1e3 * grow,
            "move_ms": 1e3 * move,
            "grow_us_a_chunk": 1e6 * grow / chunks,
            "move_us_a_chunk": 1e6 * move / chunks,
            "waste_kib": kib,
        }
        rows.append(row)
        print(" ".join(f"{name} {value:,.1f}" for name, value in row.items()), flush=True)
    write_result(
        "chunk_sizes",
        f"medians of {rounds}: time to grow a range by {moved >> 20} MiB and to move as much to "
        "another range, on a host device; waste: KiB that a ledger loses on average",
        "python bench/chunk_sizes.py " + " ".join(sys.argv[1:]),
        {"moved_mib": moved >> 20, "rows": rows},
        ("numpy",),
    )


def grow_and_move_s(kib: int, moved: int) -> tuple[float, float]:
    """Return seconds to grow a range by `moved` bytes, and to move them behind another range."""
    driver = HostDriver(parse_host_devices(f"host:1x{2 * moved >> 20}MiB@{kib}KiB"))
    try:
        pool = ChunkPool(driver, 0, kib << 10, say=print)
        chunks = moved // pool.chunk_bytes
        giver, taker = pool.open_range(chunks), pool.open_range(chunks)
        start = time.perf_counter()
        giver.grow(chunks)
        grown = time.perf_counter()
        giver.retire(chunks)
        driver.synchronize(0)
        giver.shrink()
        taker.grow(chunks)
        end = time.perf_counter()
        pool.close()
    finally:
        driver.close()
    return grown - start, end - grown


if __name__ == "__main__":
    main()
