"""Time the first command of a newcomer: a story of the package's model, from the shell to its end.

Usage:
  first_story.py [--rounds=N]
  first_story.py --help

Options:
  --rounds=N  [default: 3]

Every round runs it with an empty folder for compiled kernels, and then twice more. The figures go
to bench/results/first_story.json; run it on a machine that does nothing else.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb.compiling import CACHE_VARIABLE  # noqa: E402

COMMAND = ["-m", "strata_nb", "generate", "--seed", "1", "Once upon a time"]


def main() -> None:
    """Measure, print and store."""
    arguments = docopt(str(__doc__))
    first, second = [], []
    for _ in range(int(arguments["--rounds"])):
        with tempfile.TemporaryDirectory() as folder:
            first.append(run_s(folder))
            second += [run_s(folder), run_s(folder)]
    for name, seconds in (("first", first), ("second", second)):
        print(
            f"{name}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
        )
    write_result(
        "first_story",
        "seconds of one command, process start included: first with no compiled kernels, second "
        "with those of the first",
        "python bench/first_story.py " + " ".join(sys.argv[1:]),
        {"arguments": COMMAND, "first_s": first, "second_s": second},
        ("numpy", "numba", "llvmlite"),
    )


def run_s(folder: str) -> float:
    """Return how long the command takes with compiled kernels in `folder`."""
    start = time.perf_counter()
    environment = {**os.environ, CACHE_VARIABLE: folder}
    subprocess.run([sys.executable, *COMMAND], check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
