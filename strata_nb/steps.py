"""Steps: what every device does for sessions, and how the float32 judge does it.

A step reads rows, each one token of some sequence, and gives the logits of those rows that want
them, or the tokens that are drawn from these. Sequences are numbers; their keys and values stay
with the model. A prompt, one decoded token and a batch of drafted ones are all steps.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from strata_nb.errors import ConfigError, StrataError
from strata_nb.kernels.reference import Floats
from strata_nb.models import ReferenceModel, ReferenceState
from strata_nb.reports import Report
from strata_nb.sampling import Choice, sample

Result = TypeVar("Result")

# Of a window. A step of more rows is long enough to look for Ctrl-C between its layers.
WINDOW_ROWS = 8


class Row(NamedTuple):
    """One token of a step: the next one of its sequence, in the order of the rows."""

    sequence: int
    token: int
    wants_logits: bool


class StepModel(Protocol):
    """Run steps. Several threads may call it; a step is not begun before another has ended.

    max_rows   of one step
    warnings   for the user, one line each
    goes_ahead whether it may read a token that it drew before anybody asks for that
    """

    @property
    def max_rows(self) -> int: ...

    @property
    def goes_ahead(self) -> bool: ...

    @property
    def warnings(self) -> Sequence[str]: ...

    def open_sequence(self) -> int:
        """Return the number of a new, empty sequence; ConfigError where there can be no more."""

    def forget_sequence(self, sequence: int) -> None:
        """End a sequence, now or before the next call: may be called at any moment."""

    def length(self, sequence: int) -> int:
        """Return how many tokens of a sequence were read."""

    def rewind(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence and forget the others."""

    def make_room(self, sequence: int, cells: int, *, prompt: bool) -> None:
        """Get memory for `cells` tokens that a sequence is about to read, before any is read.

        prompt: a text is read, and memory may also be moved away from where it is idle. A step
        makes room for itself too. Raises StrataError where there is none; then nothing changed.
        """

    def step(self, rows: Sequence[Row]) -> Floats:
        """Read rows and return float32 logits (rows that want them, vocab), a new array.

        After an error or an interrupt every sequence is as it was. Raises StrataError.
        """

    def choose(
        self, rows: Sequence[Row], how: Sequence[Choice], ahead: Sequence[Choice] = ()
    ) -> list[int]:
        """Read rows and draw the next token for each of those that want logits, by its choice.

        That is `sampling.sample` of what `step` returns, wherever it is done. After an error or an
        interrupt every sequence is as it was; an error also where the logits cannot be used.

        ahead   choices by which the next call will probably choose, these very objects, reading
                what this one draws. A device may begin that at once; whatever is called next, it
                makes no difference but in time
        """

    def report(self) -> Report:
        """Describe the devices as they are now."""

    def close(self) -> None:
        """Free everything; sequences end. May be called twice."""


class ReferenceSteps:
    """Run steps on the float32 judge, with numpy's own threads."""

    goes_ahead = False

    def __init__(
        self,
        model: ReferenceModel,
        ctx_size: int,
        cache_types: tuple[str, str],
        max_rows: int,
        threads: int,
        row_threads: int,
    ) -> None:
        """`row_threads` are for a single row: it is bound by memory, and threads that wait for each
        other in every product lose far more on a busy machine than they win on an idle one."""
        self.max_rows = max_rows
        self.warnings = model.warnings
        self._model: ReferenceModel | None = model
        self._ctx_size = ctx_size
        self._cache_types = cache_types
        self._threads, self._row_threads = threads, row_threads
        self._blas = ThreadpoolController()
        self._states: dict[int, ReferenceState] = {}
        self._forgotten: deque[int] = deque()
        self._next = 0
        self._turn = threading.RLock()

    def open_sequence(self) -> int:
        with self._turn:
            self._drop_forgotten()
            number, self._next = self._next, self._next + 1
            self._states[number] = self._opened().new_state(self._ctx_size, *self._cache_types)
            return number

    def forget_sequence(self, sequence: int) -> None:
        self._forgotten.append(sequence)

    def length(self, sequence: int) -> int:
        with self._turn:
            return self._state(sequence).length

    def rewind(self, sequence: int, length: int) -> None:
        with self._turn:
            self._state(sequence).rewind(length)

    def make_room(self, sequence: int, cells: int, *, prompt: bool) -> None:
        """Do nothing: numpy's arrays grow by themselves."""

    def step(self, rows: Sequence[Row]) -> Floats:
        return self._step(rows, lambda logits: logits)

    def choose(
        self, rows: Sequence[Row], how: Sequence[Choice], ahead: Sequence[Choice] = ()
    ) -> list[int]:
        return self._step(rows, lambda logits: draw(logits, how))

    def _step(self, rows: Sequence[Row], end: Callable[[Floats], Result]) -> Result:
        """Read rows; return what `end` makes of the logits."""
        with self._turn:
            self._drop_forgotten()
            return self._read(rows, end)

    def _read(self, rows: Sequence[Row], end: Callable[[Floats], Result]) -> Result:
        model = self._opened()
        new = Counter(row.sequence for row in rows)
        before = {sequence: self._state(sequence).length for sequence in new}
        threads = self._threads if len(rows) > 1 else self._row_threads
        parts = []
        try:
            with self._blas.limit(limits=threads, user_api="blas"):
                for sequence, group in groupby(rows, key=lambda row: row.sequence):
                    some = list(group)
                    wanted = [row.wants_logits for row in some]
                    only_last = not any(wanted[:-1])
                    logits = model.forward(
                        [row.token for row in some],
                        self._states[sequence],
                        "last" if only_last else "all",
                    )
                    parts.append(logits[wanted[-1:] if only_last else wanted])
            return end(np.concatenate(parts))
        except BaseException:
            for sequence, length in before.items():
                self._states[sequence].rewind(length)
            raise

    def report(self) -> Report:
        return Report((), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)

    def close(self) -> None:
        with self._turn:
            self._model = None
            self._states.clear()

    def _opened(self) -> ReferenceModel:
        if self._model is None:
            raise closed_error()
        return self._model

    def _state(self, sequence: int) -> ReferenceState:
        self._opened()
        if sequence not in self._states:
            raise ConfigError(f"sequence {sequence} is not open", hint="open a new session")
        return self._states[sequence]

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            self._states.pop(self._forgotten.popleft(), None)


def draw(logits: Floats, how: Sequence[Choice]) -> list[int]:
    """Return a token for each row of logits (rows, vocab); StrataError where there is none."""
    return [sample(row, *choice) for row, choice in zip(logits, how, strict=True)]


def closed_error() -> StrataError:
    """Make the error of whoever uses a model after it was closed."""
    return StrataError("the engine is closed", hint="use it and its sessions inside the with block")
