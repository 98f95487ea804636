"""Write a measurement to bench/results/ with all that it depends on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from strata_nb.commands.provenance import commit, machine, versions

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def write_result(
    name: str,
    what: str,
    command: str,
    figures: Mapping[str, object],
    packages: tuple[str, ...],
    file: str | None = None,
) -> Path:
    """Write `bench/results/NAME.json`, or `file`, and return its path.

    what      one line: what the figures are, with their units
    command   that makes them again, from the root of the project
    packages  whose versions the figures depend on
    """
    result = {
        "what": what,
        **figures,
        "command": command,
        **commit(),
        "machine": machine(),
        "versions": versions(packages),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    path = RESULTS / f"{name}.json" if file is None else Path(file)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path
