"""Say from which code, on what, figures come: a figure without it cannot be had again."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import strata_nb
from strata_nb import cpu

_ROOT = Path(strata_nb.__file__).parents[1]
# Results of the same run, written a moment ago, do not make the code another one.
_OTHER_RESULTS = ":(top,exclude)bench/results"


def commit() -> dict[str, object]:
    """Return the commit of this code, and whether the files are its own.

    Both are None for a package that is neither a checkout nor of an archive that git made.
    """
    archive = _ROOT / ".git_archival.txt"
    archived = archive.read_text(encoding="ascii").split() if archive.exists() else []
    if archived[-1:] and not archived[-1].startswith("$"):  # `git archive` put the commit there
        return {"commit": archived[-1], "clean_tree": True}
    if not (_ROOT / ".git").exists():
        return {"commit": None, "clean_tree": None}
    try:
        return {
            "commit": _git("rev-parse", "HEAD"),
            "clean_tree": _git("status", "--porcelain", "--", ":/", _OTHER_RESULTS) == "",
        }
    except (OSError, subprocess.CalledProcessError):  # no git, or it does not trust the folder
        return {"commit": None, "clean_tree": None}


def machine() -> str:
    """Return the processor's name and the number of CPUs this process may use."""
    return f"{cpu.processor_name()}, {len(os.sched_getaffinity(0))} CPUs"


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of packages."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


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


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], check=True, capture_output=True, text=True, cwd=_ROOT)
    return done.stdout.strip()
