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
_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "bench" / "results"


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
        **_commit(),
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


def device_name(device: str) -> str:
    """Return what `--device` names, with the card's own name where it is one."""
    if not device.startswith("cuda"):
        return device
    from strata_nb.driver import CudaDriver  # not where there is no card

    driver = CudaDriver()
    try:
        facts = driver.card_facts(int(device.partition(":")[2] or 0))
        major, minor = divmod(driver.version // 10, 100)
        return f"{device}: {facts.name}, driver for CUDA {major}.{minor}"
    finally:
        driver.close()


def _commit() -> dict[str, object]:
    """Return the commit, and whether the files are its own."""
    archived = (_ROOT / ".git_archival.txt").read_text(encoding="ascii").split()
    if archived[-1:] and not archived[-1].startswith("$"):  # `git archive` put the commit there
        return {"commit": archived[-1], "clean_tree": True}
    return {
        "commit": _git("rev-parse", "HEAD"),
        # Results of the same run, written a moment ago, do not make the code another one.
        "clean_tree": _git("status", "--porcelain", "--", ":/", _OTHER_RESULTS) == "",
    }


def _machine() -> str:
    """Return the processor's name and the number of CPUs this process may use."""
    return f"{cpu.processor_name()}, {len(os.sched_getaffinity(0))} CPUs"


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True, cwd=RESULTS.parent
    )
    return done.stdout.strip()
