"""Windows on a device that draws tokens: one program from embedding to tokens, and one ahead.

A window whose rows all have a token drawn for them is sent, run and fetched in one go. The token of
a row may be named as "what was drawn last for row r", so the window behind it can begin before
anybody has seen that token: it is *ahead*. What was begun and not landed is *in flight*.

Here windows are begun and landed; `device_steps` says when, and what becomes of their cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.backend import Flights
from strata_nb.choosing import used_bytes, write_choices
from strata_nb.device_heads import Record
from strata_nb.kernels.pool_state import WORDS as POOL_WORDS
from strata_nb.models.places import Programs
from strata_nb.sampling import Choice
from strata_nb.steps import WINDOW_ROWS, Row

_WORD = 8  # bytes

Sent = tuple[int, npt.NDArray[np.uint8]]  # an address, and what is sent there


class Fetched(NamedTuple):
    """Say what is fetched with a window's tokens: use and tally of experts, the routes, the
    addresses of experts, where the window may change them, and what the device remembers of the
    experts that the CPU computes."""

    counts: bool
    routes: bool
    addresses: bool = False
    pool: bool = False


class Counts(NamedTuple):
    """Say where a device counts the use of experts: addresses, and words.

    addresses   where it has those of the experts, as many words as of `use`; 0: never fetched
    pool        where it has the words of `pool_state.py`; 0 likewise
    """

    use: int
    use_words: int
    tally: int
    tally_words: int
    addresses: int = 0
    pool: int = 0


@dataclass(slots=True)
class Window:
    """Hold a window that was begun.

    sequences   of its rows, in order
    how         how their tokens are chosen
    rows        what it reads; None while the tokens are only known to the device
    """

    sequences: tuple[int, ...]
    how: Sequence[Choice]
    rows: Sequence[Row] | None
    fetched: Fetched
    flight: Any

    def is_of(self, rows: Sequence[Row], how: Sequence[Choice]) -> bool:
        """Return whether this is the window that reads these rows and chooses by these choices."""
        return (
            self.rows is not None
            and len(rows) == len(self.rows)
            and all(one is other for one, other in zip(how, self.how, strict=True))
            and list(rows) == self.rows
        )


class Landed(NamedTuple):
    """Hold what a window has brought.

    tokens   drawn, -1 where that was not possible
    use, tally   of all windows up to this one; None where they were not fetched
    routes       int64 words as `Programs.chosen` has them, from the first layer's; likewise
    addresses    int64, of all experts behind this window; likewise
    pool         int64 words of `pool_state.py`; likewise
    """

    tokens: list[int]
    use: npt.NDArray[np.int64] | None
    tally: npt.NDArray[np.int64] | None
    routes: npt.NDArray[np.int64] | None
    addresses: npt.NDArray[np.int64] | None = None
    pool: npt.NDArray[np.int64] | None = None


class Windows:
    """Begin windows, one ahead of another, and land them in that order.

    program   what the backend made of `Programs.window`
    record    the step's; written here for each window
    """

    def __init__(
        self,
        flights: Flights,
        program: Any,
        programs: Programs,
        record: Record,
        counts: Counts,
        route_words: int,
    ) -> None:
        """`flights` have room for `most_sent` and `most_fetched` bytes."""
        self._flights, self._program, self._record = flights, program, record
        self._programs, self._counts, self._route_words = programs, counts, route_words

    @staticmethod
    def most_sent(record: Record, beside: int) -> int:
        """Return the most bytes that a window sends, with so many beside its record."""
        return len(record.memory) + beside

    @staticmethod
    def most_fetched(counts: Counts, route_words: int) -> int:
        """Return the most bytes that a window fetches."""
        words = WINDOW_ROWS + route_words + 2 * counts.use_words + counts.tally_words + POOL_WORDS
        return _WORD * words

    def can_draw(self, rows: Sequence[Row], how: Sequence[Choice]) -> bool:
        """Return whether such rows are a window: few, and a token is drawn for each of them.

        The choices are in the record then.
        """
        return (
            len(rows) <= WINDOW_ROWS
            and all(row.wants_logits for row in rows)
            and write_choices(self._record.choices[: len(rows)], how)
        )

    def begin(
        self,
        rows: Sequence[Row],
        how: Sequence[Choice],
        positions: Sequence[int],
        fetched: Fetched,
        beside: Sent | None = None,
    ) -> Window:
        """Begin the window that `can_draw` was just asked about.

        beside   what is sent with its record: an address, and bytes
        """
        sequences = tuple(row.sequence for row in rows)
        self._record.write_window([row.token for row in rows], sequences, positions)
        return Window(sequences, how, list(rows), fetched, self._begin(len(rows), fetched, beside))

    def can_follow(self, now: Window, how: Sequence[Choice]) -> bool:
        """Return whether the window behind `now` can draw; the choices are in the record then."""
        return write_choices(self._record.choices[: len(now.sequences)], how)

    def begin_behind(
        self,
        now: Window,
        how: Sequence[Choice],
        positions: Sequence[int],
        fetched: Fetched,
        beside: Sent | None = None,
    ) -> Window:
        """Begin the window that reads what `now` draws, of which `can_follow` was just asked."""
        count = len(now.sequences)
        self._record.write_window(range(-1, -1 - count, -1), now.sequences, positions)
        return Window(now.sequences, how, None, fetched, self._begin(count, fetched, beside))

    def _begin(self, rows: int, fetched: Fetched, beside: Sent | None) -> Any:
        record, counts, programs = self._record, self._counts, self._programs
        size = record.choices_offset + used_bytes(record.choices[:rows])
        wanted = [(programs.drawn, _WORD * rows)]
        if fetched.routes:
            wanted.append((programs.chosen[0], _WORD * self._route_words))
        if fetched.counts:
            wanted.append((counts.use, _WORD * counts.use_words))
            wanted.append((counts.tally, _WORD * counts.tally_words))
        if fetched.addresses:
            wanted.append((counts.addresses, _WORD * counts.use_words))
        if fetched.pool:
            wanted.append((counts.pool, _WORD * POOL_WORDS))
        sent = [(record.address, record.memory[:size])]
        if beside is not None:
            sent.append(beside)
        return self._flights.begin(self._program, rows, sent, wanted)

    def land(self, window: Window) -> Landed:
        """Wait for a window; what it has brought stays until the one after the next begins."""
        words, fetched = self._flights.land(window.flight), window.fetched
        count, counts = len(window.sequences), self._counts
        sizes = [
            count,
            self._route_words if fetched.routes else 0,
            counts.use_words if fetched.counts else 0,
            counts.tally_words if fetched.counts else 0,
            counts.use_words if fetched.addresses else 0,
            POOL_WORDS if fetched.pool else 0,
        ]
        ends = np.cumsum(sizes).tolist()
        chosen, use, tally, addresses, pool = (words[start:end] for start, end in pairwise(ends))
        return Landed(
            words[:count].tolist(),
            use if fetched.counts else None,
            tally if fetched.counts else None,
            chosen if fetched.routes else None,
            addresses if fetched.addresses else None,
            pool if fetched.pool else None,
        )
