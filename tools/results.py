"""Write a measurement to bench/results/ with all that it depends on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from strata_nb import cpu

_OTHER_RESULTS = ":(top,exclude)bench/results"
RESULTS = Path(__file__).parents[1] / "bench" / "results"


def write_result(
    name: str, what: str, command: str, figures: Mapping[str, object], packages: tuple[str, ...]
) -> Path:
    """Write `bench/results/NAME.json` and return its path.

    what      one line: what the figures are, with their units
    command   that makes them again, from the root of the project
    packages  whose versions the figures depend on
    """
    result = {
        "what": what,
        **figures,
        "command": command,
        "commit": _git("rev-parse", "HEAD"),
        # Results of the same run, written a moment ago, do not make the code another one.
        "clean_tree": _git("status", "--porcelain", "--", ":/", _OTHER_RESULTS) == "",
        "machine": _machine(),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def _machine() -> str:
    """Return the processor's name and the number of CPUs this process may use."""
    return f"{cpu.processor_name()}, {len(os.sched_getaffinity(0))} CPUs"


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True, cwd=RESULTS.parent
    )
    return done.stdout.strip()
