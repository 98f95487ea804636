"""What a person sees beside the answer: notes, warnings, progress bars. All of it goes to stderr.

The answer alone goes to stdout. Bars are drawn only where stderr is a terminal, and nothing a
message says depends on colour. rich is imported only when a bar is drawn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from strata_nb.progress import Progress


def note(text: str) -> None:
    """Write one line to stderr."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Write one warning line to stderr."""
    note(f"warning: {text}")


def dimmed(text: str) -> str:
    """Return `text` so that a terminal on stdout shows it dim; unchanged for all others."""
    plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or "NO_COLOR" in os.environ
    return text if plain or not text else f"\x1b[2m{text}\x1b[0m"


def one_line(text: str) -> str:
    """Write what would move the cursor, which a file may hold, as an escape."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


@contextmanager
def progress_bar(label: str, *, unit: str, least: int = 0) -> Iterator[Progress | None]:
    """Give a progress callback that draws a bar, or None where stderr is not a terminal.

    unit   "bytes" shows sizes and bytes a second, anything else counts and a rate
    least  totals below this are not worth a bar
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if unit == "bytes"
        else (MofNCompleteColumn(), TextColumn(unit))
    )
    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = None

    def show(done: int, total: int) -> None:
        nonlocal task
        if total < least:
            return
        if task is None:
            bar.start()
            task = bar.add_task(label, total=total)
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()  # another bar may follow

    try:
        yield show
    finally:
        if task is not None and not bar.finished:
            bar.stop()
