"""Sessions: conversations with a model, and the tokens that it writes.

A `Session` holds a conversation, the tokens so far and their K/V; a `Generation` writes the tokens
that follow, one after the other.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from strata_nb.errors import ConfigError, OutOfDeviceMemory, StrataError
from strata_nb.options import Sampling
from strata_nb.sampling import Choice, RepeatGuard, StopStrings, recent_tokens, sample, uniform
from strata_nb.steps import Row, StepModel
from strata_nb.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strata_nb.models import Description
    from strata_nb.progress import Progress

Finish = Literal["end", "length", "stop", "repeat", "context", "memory"]


@dataclass(frozen=True, slots=True)
class Token:
    """Hold one generated token: its id, and the text that became certain with it.

    The texts of a generation, joined, are its answer: a token in the middle of a character or of a
    possible stop string has less text, a later one more. The model's own end token comes last.
    """

    id: int
    text: str


class Generation(Iterator[Token]):
    """Write tokens after a session's last one; iterate to go on, stop iterating to stop.

    finish          why it ended, once it has: "end" the model's own end token, "length" max_tokens,
                    "stop" a stop string, "repeat" the repeat guard, "context" no cell is left,
                    "memory" the device has no memory for another cell
    refusal         the error that says so, None otherwise
    seed            of the random numbers, also where none was asked for; without effect on an
                    answer that is not `random`, at temperature 0
    generated       tokens so far
    in_turn         why each token waits for the one before it to be known, "" where the device may
                    begin with it earlier or never does
    first_token_s   seconds from the start of the generation to the first token
    decode_s        seconds from the first token to the latest
    """

    def __init__(
        self,
        session: Session,
        *,
        max_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[str] | None,
        ignore_eos: bool,
    ) -> None:
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 0):
            raise ConfigError(
                f"max_tokens {max_tokens}: not usable", hint="0 or more, None: until the model ends"
            )
        if isinstance(stop, str):
            raise ConfigError(f"stop {stop!r}: not a list of texts", hint=f"give [{stop!r}]")
        # 32 bits: readers of JSON round whole numbers from 2^53 on.
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self.finish: Finish | None = None
        self.refusal: OutOfDeviceMemory | None = None
        self.generated = 0
        self.first_token_s = 0.0
        self.decode_s = 0.0
        self._session = session
        self.random = sampling.temperature > 0  # whether the seed makes a difference
        self._sampling = replace(sampling, seed=self.seed)
        looks_back, self.in_turn = len(recent_tokens((0,), sampling)) > 0, ""
        if looks_back and session._model.goes_ahead:
            self.in_turn = "penalties look at each token before the next one is begun"
        self._goes_ahead = session._model.goes_ahead and not looks_back
        self._next: Choice | None = None  # of the next token, where it was said in advance
        self._left = max_tokens
        self._position = session.position
        self._stream = session.tokenizer.stream()
        self._stops = StopStrings(stop or ())
        self._ends = session.tokenizer.end_ids
        self._banned = self._ends if ignore_eos else frozenset[int]()
        self._guard = None if ignore_eos else RepeatGuard()
        self._started = time.perf_counter()

    def __next__(self) -> Token:
        session = self._session
        if self.finish is None:
            if self._left == 0:
                self.finish = "length"
            elif session.position > session.ctx_size:
                self.finish = "context"
        if self.finish is not None:
            raise StopIteration
        if session.position != self._position:
            raise StrataError(
                f"the session went on to position {session.position} without this generation, "
                f"which stands at {self._position}",
                hint="start a new one: session.generate()",
            )
        now = self._next or self._choice(self._position)
        ahead = self._choice(self._position + 1) if self._can_go_ahead() else None
        token = session._choose(now, ahead)
        session._add(token)
        self._next = ahead
        self._count()
        if token in self._ends:
            self.finish = "end"
            return Token(token, self._last_text(""))
        text, stopped = self._stops.feed(self._stream.feed(token))
        if stopped:
            self.finish = "stop"
            return Token(token, text)
        if self._guard is not None and self._guard.feed(token):
            self.finish = "repeat"
        elif self._left == 0:
            self.finish = "length"
        elif session.position > session.ctx_size:
            self.finish = "context"
        elif self.finish is None:
            self._make_room()
        return Token(token, self._last_text(text) if self.finish else text)

    def _choice(self, position: int) -> Choice:
        """Say how the token at a position is chosen."""
        random = uniform(self.seed, 0, position)
        return Choice(self._session._ids, self._sampling, random, self._banned)

    def _can_go_ahead(self) -> bool:
        """Return whether it is known how the token behind the next one is chosen, if one comes."""
        return self._goes_ahead and self._left != 1 and self._position < self._session.ctx_size

    def _make_room(self) -> None:
        """Get memory for the token that was just chosen, or end: it is the last one then."""
        try:
            self._session.make_room()
        except OutOfDeviceMemory as error:
            self.finish, self.refusal = "memory", error
            cause: BaseException | None = error
            while cause is not None:  # their frames hold this very object, and so its K/V
                cause.__traceback__ = None
                cause = cause.__cause__ or cause.__context__

    def _count(self) -> None:
        now = time.perf_counter()
        self.generated += 1
        if self.generated == 1:
            self.first_token_s = now - self._started
        self.decode_s = now - self._started - self.first_token_s
        if self._left is not None:
            self._left -= 1
        self._position += 1  # last: where Ctrl-C comes before, this generation is refused

    def _last_text(self, text: str) -> str:
        """Return `text` and what was held back, for nothing comes after it."""
        more, _ = self._stops.feed(self._stream.flush())
        more += self._stops.flush()
        if self._stops.stopped:
            self.finish = "stop"
        return text + more


class Session:
    """Keep one conversation: its token ids, and the K/V of those that the model has read.

    The latest tokens may not have been read yet: a token that was sampled is read when the next
    one is asked for. One generation at a time may go on; an older one is refused. Closing a session
    frees its K/V, and so does dropping it. One thread uses a session at a time; sessions of one
    engine may be used by several, whose steps take turns.
    """

    def __init__(
        self,
        model: StepModel,
        description: Description,
        tokenizer: Tokenizer,
        ctx_size: int,
        prefill_rows: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.ctx_size = ctx_size  # the number of tokens that the K/V can hold
        self._model = model
        self._description = description
        self._prefill_rows = prefill_rows
        self._sequence = model.open_sequence()
        self._finalizer = weakref.finalize(self, model.forget_sequence, self._sequence)
        self._logits: npt.NDArray[np.float32] | None = None  # after the last token read
        self._ids: list[int] = []
        self._drafted = 0

    @property
    def ids(self) -> list[int]:
        """A copy of all tokens so far, read or not."""
        return list(self._ids)

    @property
    def position(self) -> int:
        """The number of tokens so far, which is the position of the next one."""
        return len(self._ids)

    @property
    def read(self) -> int:
        """The number of tokens that the model has read, which are in the K/V."""
        return self._model.length(self._sequence)

    def extend(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        """Add `ids` and read everything that has not been read yet.

        Raises ConfigError, and adds nothing, where the context is too small for them, and
        OutOfDeviceMemory where the device is. `progress` is called behind each prompt batch with
        (tokens read, tokens to read). What it raises ends the reading there, as Ctrl-C does within
        a batch: nothing is lost, and the rest is read with what comes next, or forgotten by
        `rewind`.
        """
        self._check_open()
        self._check_decided()
        self._description.check_ids(ids)
        total = self.position + len(ids)
        if total > self.ctx_size:
            already = f" after {self.position} earlier tokens" if self.position else ""
            raise ConfigError(
                f"a prompt of {len(ids)} tokens{already} does not fit a context of "
                f"{self.ctx_size} cells",
                hint=f"give --ctx-size {total} or more, or a shorter prompt",
            )
        unread = total - self._model.length(self._sequence)
        self._model.make_room(self._sequence, unread, prompt=True)
        self._ids.extend(ids)
        self._read(progress)

    def make_room(self) -> None:
        """Get memory for what is not read yet; OutOfDeviceMemory where the device has none."""
        unread = self.position - self._model.length(self._sequence)
        self._model.make_room(self._sequence, unread, prompt=False)

    def next_logits(self) -> npt.NDArray[np.float32]:
        """Return the logits (vocab,) of the token that comes next; do not change them."""
        self._begin_next()
        self._read(None)
        if self._logits is None:
            raise AssertionError("reading at least one token gives logits")
        return self._logits

    def _choose(self, choice: Choice, ahead: Choice | None = None) -> int:
        """Read what is not read yet, and return the token that is drawn to come next.

        It is not added. Logits that were not at hand before are not kept. `ahead` is the choice of
        the token behind it, if the next call will probably be for that.
        """
        batches = self._unread(self._begin_next())
        if self._logits is not None and not batches:
            return sample(self._logits, *choice)
        *others, last = batches
        self._logits = None
        for rows in others:
            self._model.step(rows)
        (token,) = self._model.choose(last, [choice], () if ahead is None else [ahead])
        return token

    def _begin_next(self) -> int:
        """Make sure that the last token is unread, or the logits after it are at hand.

        Returns how many tokens were read.
        """
        if not self._ids:
            raise ConfigError(
                "nothing to continue: the session holds no token",
                hint="extend it with at least one token, such as the model's BOS",
            )
        length = self._check_open()
        self._check_decided()
        last = len(self._ids) - 1
        if self._logits is None and length > last:  # after a rewind, an interrupt or a choice
            self._model.rewind(self._sequence, last)  # it is read again
            return last
        return length

    def append(self, token: int) -> None:
        """Add one token without reading it: that happens when the next logits are asked for."""
        self._description.check_ids([token])
        self._add(token)

    def _add(self, token: int) -> None:
        """Add a token of the vocabulary."""
        self._check_open()
        self._check_decided()
        if self.position > self.ctx_size:
            raise ConfigError(
                f"the context of {self.ctx_size} cells is full, and another token is not read yet",
                hint="a larger --ctx-size, where the model allows it",
            )
        self._ids.append(token)

    def draft(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Read tokens that may be taken back; return the logits (len(ids), vocab) after each.

        What had not been read before is read first. `commit` says how many of them stay; until
        then nothing else may be done with the session. At most as many as a step has rows.
        """
        self._check_open()
        self._check_decided()
        self._description.check_ids(ids)
        most = min(self._model.max_rows, self.ctx_size - self.position)
        if not 1 <= len(ids) <= most:
            raise ConfigError(
                f"a draft of {len(ids)} tokens: 1 to {most} are possible at position "
                f"{self.position} of {self.ctx_size}",
                hint="draft fewer tokens",
            )
        self._read(None)
        before = self.position
        try:
            logits = self._model.step([Row(self._sequence, int(token), True) for token in ids])
            self._ids.extend(ids)
            self._drafted = len(ids)
            self._logits = logits[-1]
        except BaseException:  # an interrupt may come when the step has counted its cells
            self._drafted = 0
            self.rewind(before)
            self._rewind_model(before)
            raise
        return logits

    def commit(self, keep: int) -> int:
        """Keep the first `keep` tokens of the last draft, forget the rest; return the position."""
        self._check_open()
        if not 0 <= keep <= self._drafted:
            raise ConfigError(
                f"cannot keep {keep} of {self._drafted} drafted tokens", hint="draft them first"
            )
        drafted, self._drafted = self._drafted, 0
        return self.rewind(self.position - drafted + keep)

    def checkpoint(self) -> int:
        """Return a place that `rewind` can go back to: the position."""
        return self.position

    def rewind(self, position: int) -> int:
        """Forget every token from `position` on and return the position reached."""
        self._check_open()
        if not 0 <= position <= self.position:
            raise ConfigError(
                f"cannot rewind to {position}: the session holds {self.position} tokens",
                hint=f"a position from 0 to {self.position}",
            )
        self._drafted = 0
        if position < self.position:
            # In this order an interrupt leaves tokens that are read again, and never cells that
            # belong to no token.
            self._logits = None
            self._rewind_model(position)
            del self._ids[position:]
        return position

    def close(self) -> None:
        """Free the K/V; the ids stay. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] | None = None,
        ignore_eos: bool = False,
    ) -> Generation:
        """Return an iterator over the tokens that follow; max_tokens None: until the model ends."""
        return Generation(
            self,
            max_tokens=max_tokens,
            sampling=sampling or Sampling(),
            stop=stop,
            ignore_eos=ignore_eos,
        )

    def _rewind_model(self, position: int) -> None:
        self._model.rewind(self._sequence, min(self._model.length(self._sequence), position))

    def _read(self, progress: Progress | None) -> None:
        """Read what has not been read, in prompt batches."""
        batches = self._unread(self._check_open())
        done, total = 0, sum(map(len, batches))
        for rows in batches:
            # An interrupt may come between the cells that a step adds and its logits.
            self._logits = None
            logits = self._model.step(rows)
            done += len(rows)
            if done == total:
                self._logits = logits[0]
            if progress is not None:
                progress(done, total)

    def _unread(self, start: int) -> list[list[Row]]:
        """Return the rows from `start` on, in prompt batches; the last one wants logits."""
        end = len(self._ids)
        if end == start + 1:
            return [[Row(self._sequence, self._ids[start], True)]]
        return [
            [
                Row(self._sequence, self._ids[place], place == end - 1)
                for place in range(at, min(end, at + self._prefill_rows))
            ]
            for at in range(start, end, self._prefill_rows)
        ]

    def _check_open(self) -> int:
        """Return how many tokens were read; StrataError where session or engine is closed."""
        if not self._finalizer.alive:
            raise StrataError("the session is closed", hint="open a new one: engine.open_session()")
        return self._model.length(self._sequence)

    def _check_decided(self) -> None:
        """Raise ConfigError while a draft is open."""
        if self._drafted:
            raise ConfigError(
                f"{self._drafted} drafted tokens are not decided yet",
                hint="commit some of them, or 0",
            )
