"""Measure how long a start takes until the first token, and how much memory a run takes at most.

Usage:
  start_and_memory.py MODEL [options]
  start_and_memory.py --help

Options:
  --devices=TEXTS   separated by spaces, each as --device has it [default: host]
  --prompt=N        tokens of the prompt of the memory run [default: 600]
  --ctx-size=N      cells of the K/V [default: 2048]
  --repeats=N       starts, of which the median counts [default: 7]
  --name=NAME       the figures go to bench/results/start_and_memory_NAME.json; default: the name of
                    the model

A start is `generate -n 1` in a process of its own, from its beginning to its first byte of output;
the first start is not counted, for it may compile kernels. Afterwards the folder of compiled code
must hold the same files as before. Memory is RssAnon + RssShmem of a run that reads a long prompt
and writes 32 tokens, looked at every few milliseconds. What it should stay under: the file, 450
MiB, the K/V, and the budget of a device with memory of its own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb.compiling import cache_folder  # noqa: E402
from strata_nb.gguf import GGUFFile  # noqa: E402
from strata_nb.host import parse_host_devices  # noqa: E402
from strata_nb.models import describe  # noqa: E402

ALLOWANCE_BYTES = 450 << 20
LOOK_S = 0.004


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    model, cells = Path(arguments["MODEL"]), int(arguments["--ctx-size"])
    with GGUFFile.open(model) as file:
        file_bytes = file.size_bytes
        kv_bytes = cells * describe(file).kv_bytes_per_cell("f16", "f16")
    rows = {}
    for device in arguments["--devices"].split():
        words = ["--device", device, "-c", str(cells), "--temp", "0", "--ignore-eos"]
        first_token_s(model, words)
        compiled = sorted(cache_folder().iterdir())
        starts = [first_token_s(model, words) for _ in range(int(arguments["--repeats"]))]
        budget = sum(each.budget_bytes for each in parse_host_devices(device))
        limit = file_bytes + ALLOWANCE_BYTES + kv_bytes + (0 if device == "host" else budget)
        rows[device] = {
            "start_s": statistics.median(starts),
            "start_least_s": min(starts),
            "start_most_s": max(starts),
            "compiled_again": sorted(cache_folder().iterdir()) != compiled,
            "peak_bytes": peak_bytes(model, words, int(arguments["--prompt"])),
            "limit_bytes": limit,
        }
        row = rows[device]
        print(
            f"{device:14} first token after {row['start_s']:.2f} s ({min(starts):.2f} to "
            f"{max(starts):.2f}); peak {row['peak_bytes'] / 2**20:,.0f} MiB of "
            f"{limit / 2**20:,.0f}; compiled again: {row['compiled_again']}",
            flush=True,
        )
    write_result(
        f"start_and_memory_{arguments['--name'] or model.stem}",
        "start_s: seconds to the first token, warm; peak_bytes: RssAnon + RssShmem",
        " ".join(["python bench/start_and_memory.py", model.name, *sys.argv[2:]]),
        {
            "model": model.name,
            "file_bytes": file_bytes,
            "kv_bytes": kv_bytes,
            "load": os.getloadavg()[0],
            "rows": rows,
        },
        ("numpy", "numba", "llvmlite"),
    )


def _command(model: Path, words: list[str], tokens: int) -> list[str]:
    command = [sys.executable, "-m", "strata_nb", "generate", "-m", str(model)]
    return [*command, *words, "-n", str(tokens)]


def first_token_s(model: Path, words: list[str]) -> float:
    """Return the seconds from the start of a process to its first byte of output."""
    start = time.perf_counter()
    command = [*_command(model, words, 1), "The old lighthouse keeper"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if process.stdout is None:
            raise SystemExit("no pipe to the process")
        process.stdout.read(1)
        took = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return took


def peak_bytes(model: Path, words: list[str], prompt: int) -> int:
    """Return the most memory that a run with a prompt of about so many tokens held."""
    text = "word " * prompt
    command = [*_command(model, words, 32), text]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        most = 0
        ended = threading.Event()
        while process.poll() is None:
            most = max(most, _resident_bytes(process.pid))
            ended.wait(LOOK_S)
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    return most


def _resident_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    kinds = ("RssAnon:", "RssShmem:")
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))


if __name__ == "__main__":
    main()
