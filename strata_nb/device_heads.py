"""The end of a step on a device: logits of the rows that want them, or tokens drawn from these.

The body of the step was begun before, and nothing has waited for it. Logits are computed for some
rows at a time; where the device draws tokens, their ids are all that comes back.

    Record   what programs read of a step, as the host writes it
    Heads    runs the head, and what draws tokens

Windows whose rows all have tokens drawn need none of this: `device_windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from strata_nb.backend import Backend
from strata_nb.choosing import write_choices
from strata_nb.kernels.choices import CHOICE
from strata_nb.kernels.reference import Floats
from strata_nb.models.places import Programs
from strata_nb.sampling import Choice
from strata_nb.steps import Row, draw


class Heads:
    """Run the programs of the head, and of the choice, after that of the body.

    record         of the step; its words are written here for each run
    head, choice   as the backend prepared them
    """

    def __init__(
        self,
        backend: Backend[Any],
        programs: Programs,
        record: Record,
        head: Any,
        choice: Any,
        vocabulary: int,
    ) -> None:
        self._backend, self._programs, self._record = backend, programs, record
        self._head, self._choice, self._vocabulary = head, choice, vocabulary

    def logits(self, wanted: Sequence[int]) -> Floats:
        """Return the logits (wanted rows, vocab), a new array."""
        logits = np.empty((len(wanted), self._vocabulary), np.float32)
        at_a_time = self._programs.head_rows
        for start in range(0, len(wanted), at_a_time):
            some = wanted[start : start + at_a_time]
            self._begin(some)
            self._backend.fetch(self._programs.logits, logits[start : start + len(some)])
        return logits

    def tokens(self, wanted: Sequence[int], how: Sequence[Choice]) -> list[int]:
        """Return a token for each wanted row: drawn on the device if it can, else from logits."""
        if self._backend.chooses_tokens:
            records = np.zeros(len(wanted), CHOICE)
            if write_choices(records, how):
                return self._drawn(wanted, how, records)
        return draw(self.logits(wanted), how)

    def _begin(self, wanted: Sequence[int]) -> None:
        self._record.want(wanted)
        self._backend.send(self._record.address, self._record.words)
        self._backend.run(self._head, len(wanted))

    def _drawn(
        self, wanted: Sequence[int], how: Sequence[Choice], records: npt.NDArray[Any]
    ) -> list[int]:
        """Return a token for each wanted row; `records` say the same as `how`."""
        tokens = np.empty(len(wanted), np.int64)
        at_a_time = self._programs.head_rows
        for start in range(0, len(wanted), at_a_time):
            some = slice(start, start + at_a_time)
            self._begin(wanted[some])
            self._backend.send(self._programs.choices, records[some])
            self._backend.run(self._choice, len(records[some]))
            self._backend.fetch(self._programs.drawn, tokens[some])
            if np.any(tokens[some] < 0):
                self._refuse(how[some])
        drawn: list[int] = tokens.tolist()
        return drawn

    def _refuse(self, how: Sequence[Choice]) -> NoReturn:
        """Raise what the host says of logits from which the device could draw no token."""
        logits = np.empty((len(how), self._vocabulary), np.float32)
        self._backend.fetch(self._programs.logits, logits)
        tokens = draw(logits, how)
        raise AssertionError(f"the device draws no token where the host draws {tokens}")


class Record:
    """The host's copy of a step's record: `words` go to `address` before each run.

    choices   records of `kernels/choices.py` for the head's rows, where the device draws tokens;
              none elsewhere
    memory    the bytes of both, `choices_offset` being where choices begin: what is sent together
    """

    def __init__(self, programs: Programs) -> None:
        record, rows, head_rows = programs.record, programs.max_rows, programs.head_rows
        self.address = record.rows
        words = (record.wanted_rows - self.address) // 8 + head_rows
        drawn_rows = head_rows if programs.choices else 0
        self.choices_offset = programs.choices - self.address if drawn_rows else 8 * words
        self.memory = np.zeros(self.choices_offset + CHOICE.itemsize * drawn_rows, np.uint8)
        self.words = self.memory[: 8 * words].view(np.int64)
        self.choices: npt.NDArray[Any] = self.memory[self.choices_offset :].view(CHOICE)

        def part(address: int, count: int) -> npt.NDArray[np.int64]:
            first = (address - self.address) // 8
            return self.words[first : first + count]

        self._rows, self._wanted = part(record.rows, 1), part(record.wanted, 1)
        self._tokens = part(record.tokens, rows)
        self._sequences = part(record.sequences, rows)
        self._positions = part(record.positions, rows)
        self._wanted_rows = part(record.wanted_rows, head_rows)

    def write(self, rows: Sequence[Row], lengths: dict[int, int]) -> None:
        """Write rows, each at the next position of its sequence; `lengths` is used up."""
        positions = []
        for row in rows:
            positions.append(lengths[row.sequence])
            lengths[row.sequence] += 1
        self._write([row.token for row in rows], [row.sequence for row in rows], positions)

    def write_window(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Write rows for all of which the head is."""
        self._write(tokens, sequences, positions)
        self.want(range(len(tokens)))

    def _write(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]
    ) -> None:
        count = len(tokens)
        self._rows[0] = count
        self._tokens[:count] = tokens
        self._sequences[:count] = sequences
        self._positions[:count] = positions

    def want(self, rows: Sequence[int]) -> None:
        """Write which rows the head is for."""
        self._wanted[0] = len(rows)
        self._wanted_rows[: len(rows)] = rows
