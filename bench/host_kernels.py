"""Measure the products with packed weights on this machine's CPU.

Usage:
  host_kernels.py [--types=NAMES] [--outputs=N] [--values=N] [--mib=N] [--prompt=N] [--repeats=N]
  host_kernels.py --help

Options:
  --types=NAMES    comma-separated (default: all that have a kernel)
  --outputs=N      rows of a weight (default 8192)
  --values=N       values of a row, a multiple of 256 (default 2048)
  --mib=N          weights read in one measurement, MiB, more than the caches hold (default 256)
  --prompt=N       rows of activations of the prompt (default 256)
  --repeats=N      measurements, of which the median counts (default 5)

For one and two threads: GB/s of packed weights for one row of activations, and the share of the
plain read of the same memory that it is, measured in turn with it; for the prompt GFLOP/s, two for
each multiplication and addition. Weights are random bytes with sane scales; speed does not depend
on values. A run over all types also writes bench/results/host_kernels.json.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from random_blocks import random_blocks
from results import write_result

from strata_nb import cpu
from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.host import activations, prompt, window
from strata_nb.kernels.host.capability import PATH
from strata_nb.kernels.host.reading import read_passes, seconds
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.packing import GROUP_ROWS, PACKED, pack

THREADS = (1, 2)
SPREAD = 0.02  # standard deviation of the weights


def main() -> None:
    arguments = docopt(__doc__)
    names = arguments["--types"].split(",") if arguments["--types"] else None
    kinds = [TensorType[name] for name in names] if names else kernel_types()
    bench = Bench(
        outputs=int(arguments["--outputs"] or 8192),
        values=int(arguments["--values"] or 2048),
        size_bytes=int(arguments["--mib"] or 256) << 20,
        prompt=int(arguments["--prompt"] or 256),
        repeats=int(arguments["--repeats"] or 5),
    )
    print(f"{cpu.processor_name()}, load {os.getloadavg()[0]:.1f}, {PATH.value}")
    print("type        GB/s of weights (share of plain read)      GFLOP/s of a prompt")
    print("            1 thread         2 threads                 1 thread   2 threads")
    table: dict[str, Any] = {}
    for kind in kinds:
        row = table[kind.name] = bench.measure(kind)
        decode = [f"{row[f'decode_{n}']:6.1f} ({row[f'share_{n}']:4.0%})" for n in THREADS]
        prompt = [f"{row[f'prompt_{n}']:9.0f}" for n in THREADS]
        print(f"{kind.name:10}  {'    '.join(decode)}      {'   '.join(prompt)}", flush=True)
    if names is None:
        write_result(
            "host_kernels",
            "decode_N: GB/s of packed weights, share_N: of the plain read of the same memory, "
            "prompt_N: GFLOP/s, with N threads; medians",
            " ".join(["python bench/host_kernels.py", *sys.argv[1:]]),
            {
                "repeats": bench.repeats,
                "path": PATH.value,
                "load": os.getloadavg()[0],
                "rows": table,
            },
            ("numpy", "numba", "llvmlite"),
        )


def kernel_types() -> list[TensorType]:
    return sorted(PACKED)


class Bench:
    """Buffers and sizes of all measurements."""

    def __init__(
        self, *, outputs: int, values: int, size_bytes: int, prompt: int, repeats: int
    ) -> None:
        self.outputs, self.values, self.size_bytes = outputs, values, size_bytes
        self.prompt, self.repeats = prompt, repeats
        x = np.random.default_rng(0).standard_normal((prompt, values)).astype(np.float32)
        self.x = np.empty(prompt * row_bytes(values), np.uint8)
        activations.quantise_rows(x.ctypes.data, self.x.ctypes.data, values, 0, prompt)
        self.y = np.empty((prompt, outputs), np.float32)

    def measure(self, kind: TensorType) -> dict[str, float]:
        """Return GB/s, share and GFLOP/s by number of threads."""
        rng = np.random.default_rng(0)
        blocks = self.outputs * self.values // block_layout(kind).values
        raw = random_blocks(kind, blocks, SPREAD, rng)
        packed = pack(kind, raw, self.outputs, self.values)
        copies = max(1, self.size_bytes // packed.size)
        weights = np.tile(packed, copies)
        work = [np.empty(prompt.work_bytes(kind, self.values), np.uint8) for _ in range(8)]
        result: dict[str, float] = {}

        def multiply(kernel: Callable[..., None], rows: int, copies: int) -> Callable[..., None]:
            def run(thread: int, threads: int) -> None:
                first, last = share(self.outputs, thread, threads)
                for copy in range(copies):
                    kernel(
                        weights.ctypes.data + copy * packed.size,
                        self.x.ctypes.data,
                        self.y.ctypes.data,
                        *(rows, self.values // 32, self.outputs, first, last, 0),
                        work[thread].ctypes.data,
                    )

            return run

        decode = multiply(window.window_kernel(kind), 1, copies)
        reading_prompt = multiply(prompt.prompt_kernel(kind), self.prompt, 1)
        for threads in THREADS:
            pairs = [
                (min(read_passes(weights, threads)), seconds(decode, threads))
                for _ in range(self.repeats)
            ]
            reading, decoding = (statistics.median(column) for column in zip(*pairs, strict=True))
            result[f"read_{threads}"] = weights.size / reading / 1e9
            result[f"decode_{threads}"] = weights.size / decoding / 1e9
            result[f"share_{threads}"] = reading / decoding
            took = statistics.median(seconds(reading_prompt, threads) for _ in range(self.repeats))
            operations = 2 * self.prompt * self.outputs * self.values
            result[f"prompt_{threads}"] = operations / took / 1e9
        return result


def share(total: int, thread: int, threads: int) -> tuple[int, int]:
    """Return a thread's part of `total`, in whole groups of rows."""
    groups = -(-total // GROUP_ROWS)
    first, last = (groups * number // threads * GROUP_ROWS for number in (thread, thread + 1))
    return first, min(total, last)


if __name__ == "__main__":
    main()
