"""Make functions from text: loops over a few rows that have to be unrolled.

A sum that lives in a register needs a name, and Numba unrolls no loop over names. So the text of a
kernel has lines that are repeated for every row; the rest of it is what it looks like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def fill_in(text: str, rows: int, **values: object) -> str:
    """Fill a text in; lines that begin with {each} are repeated for every row {r}."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith("{each}"):
            part = line.removeprefix("{each}")
            lines += [part.format(r=row, **values) for row in range(rows)]
        else:
            lines.append(line.format(**values))
    return "\n".join(lines) + "\n"


def define(source: str, name: str, names: dict[str, Any], module: str) -> Callable[..., Any]:
    """Run the generated source of one function, with these names in its sight; return it."""
    names["__name__"] = module  # Numba looks a function's module up
    exec(compile(source, f"<generated {name}>", "exec"), names)
    function: Callable[..., Any] = names[name]
    return function
