"""Say how a long prompt is read: what `--verbose` shows beside the bar."""

from __future__ import annotations

import time

from strata_nb.commands.terminal import note
from strata_nb.engine import Engine
from strata_nb.models.description import bytes_text
from strata_nb.reports import Report

EVERY_S = 1.0  # between two lines


class Reading:
    """Write a line at times, about the tokens that were read since the line before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first = self._before = engine.describe()
        self._done, self._at = 0, time.perf_counter()

    def went_on(self, done: int, total: int) -> None:
        """Hear that `done` of `total` tokens were read."""
        now = time.perf_counter()
        seconds = now - self._at
        if seconds < EVERY_S:
            return
        report = self._engine.describe()
        rate = (done - self._done) / seconds
        moved = _from_host_memory(self._before, report, seconds)
        note(f"read {done:,} of {total:,} prompt tokens, {rate:,.1f} tok/s{moved}")
        self._before, self._done, self._at = report, done, now

    def ended(self, tokens: int, seconds: float) -> None:
        """Say what reading all `tokens` took."""
        moved = _from_host_memory(self._first, self._engine.describe(), seconds)
        note(f"read {tokens:,} prompt tokens in {seconds:.2f} s{moved}")


def _from_host_memory(before: Report, after: Report, seconds: float) -> str:
    """Return what experts cost meanwhile, nothing where every choice found a slot or the device is
    the host."""
    hits, misses = after.hits - before.hits, after.misses - before.misses
    size_bytes = after.link_bytes - before.link_bytes
    if not misses or not size_bytes:
        return ""
    streamed = after.streamed - before.streamed
    how = f", {streamed:,} experts streamed" if streamed else ""
    return (
        f"; {hits / (hits + misses):.1%} hits, "
        f"{bytes_text(size_bytes)} of experts from host memory, "
        f"{size_bytes / max(seconds, 1e-9) / 1e9:.1f} GB/s{how}"
    )
