"""Assembly: the one place where a file, its tokenizer, its model and a device meet.

    Engine        a model that is open on a device
    Session       a conversation: the tokens so far and their K/V
    Generation    the tokens that a session writes, one after the other

An engine owns the file and its weights, a session owns its K/V; closing an engine frees the
weights and ends its sessions. Only the reference device exists so far: the float32 forward of
`models`, which stays as the judge of everything faster.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from strata_nb import cpu, models
from strata_nb.errors import ConfigError, StrataError
from strata_nb.gguf import GGUFFile
from strata_nb.options import DEFAULT_CONTEXT_LIMIT, DEFAULT_PREFILL_ROWS, Options, Sampling
from strata_nb.sampling import RepeatGuard, StopStrings, sample, uniform
from strata_nb.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strata_nb.models import Description, Progress, ReferenceModel, ReferenceState

Finish = Literal["end", "length", "stop", "repeat", "context"]


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
                    "stop" a stop string, "repeat" the repeat guard, "context" no cell is left
    seed            of the random numbers, also where none was asked for; without effect on an
                    answer that is not `random`, at temperature 0
    generated       tokens so far
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
        self.generated = 0
        self.first_token_s = 0.0
        self.decode_s = 0.0
        self._session = session
        self.random = sampling.temperature > 0  # whether the seed makes a difference
        self._sampling = replace(sampling, seed=self.seed)
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
        logits = session.next_logits()
        random = uniform(self.seed, 0, session.position)
        token = sample(logits, session._ids, self._sampling, random, self._banned)
        session._append(token)
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
        return Token(token, self._last_text(text) if self.finish else text)

    def _count(self) -> None:
        now = time.perf_counter()
        self.generated += 1
        self._position += 1
        if self.generated == 1:
            self.first_token_s = now - self._started
        self.decode_s = now - self._started - self.first_token_s
        if self._left is not None:
            self._left -= 1

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
    one is asked for. One generation at a time may go on; an older one is refused.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state = engine._new_state()
        self._logits: npt.NDArray[np.float32] | None = None  # after the last token read
        self._ids: list[int] = []

    @property
    def ids(self) -> list[int]:
        """A copy of all tokens so far, read or not."""
        return list(self._ids)

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        return self._engine.tokenizer

    @property
    def ctx_size(self) -> int:
        """The number of tokens the K/V can hold."""
        return self._engine.ctx_size

    @property
    def position(self) -> int:
        """The number of tokens so far, which is the position of the next one."""
        return len(self._ids)

    def extend(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        """Add `ids` and read everything that has not been read yet.

        Raises ConfigError, and adds nothing, where the context is too small for them. `progress` is
        called with (tokens read, tokens to read).
        """
        self._engine._opened()
        self._engine.description.check_ids(ids)
        total = self.position + len(ids)
        if total > self.ctx_size:
            already = f" after {self.position} earlier tokens" if self.position else ""
            raise ConfigError(
                f"a prompt of {len(ids)} tokens{already} does not fit a context of "
                f"{self.ctx_size} cells",
                hint=f"give --ctx-size {total} or more, or a shorter prompt",
            )
        self._ids.extend(ids)
        self._read(progress)

    def next_logits(self) -> npt.NDArray[np.float32]:
        """Return the logits (vocab,) of the token that comes next; do not change them."""
        if not self._ids:
            raise ConfigError(
                "nothing to continue: the session holds no token",
                hint="extend it with at least one token, such as the model's BOS",
            )
        if self._logits is None:  # after a rewind or an interrupt: the last token is read again
            self._state.rewind(min(self._state.length, self.position - 1))
        self._read(None)
        if self._logits is None:
            raise AssertionError("reading at least one token gives logits")
        return self._logits

    def rewind(self, position: int) -> int:
        """Forget every token from `position` on and return the position reached."""
        if not 0 <= position <= self.position:
            raise ConfigError(
                f"cannot rewind to {position}: the session holds {self.position} tokens",
                hint=f"a position from 0 to {self.position}",
            )
        if position < self.position:
            self._logits = None
            del self._ids[position:]
            self._state.rewind(min(self._state.length, position))
        return position

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

    def _append(self, token: int) -> None:
        """Add one sampled token; it is read when the next logits are asked for."""
        self._ids.append(token)

    def _read(self, progress: Progress | None) -> None:
        """Read what has not been read, in prompt batches."""
        start, end = self._state.length, self.position
        while self._state.length < end:
            at = self._state.length
            batch = self._ids[at : at + self._engine.prefill_rows]
            # An interrupt may come between the cells that a forward adds and its logits.
            self._logits = None
            self._logits = self._engine._forward(batch, self._state, "last")[-1]
            if progress is not None:
                progress(self._state.length - start, end - start)


class Engine:
    """Hold an open model: `with Engine.open(Options(model="m.gguf")) as engine: ...`.

    description      of the model; `tokenizer` is its own
    chat_template    the text of the file's chat template, None where it has none
    device, threads  where and with how many threads it computes; without `Options.threads` a single
                     token takes one
    ctx_size         cells of a session's K/V; `prefill_rows` of a prompt batch
    load_s           seconds that opening took
    warnings         one line each, for the user
    """

    def __init__(
        self, options: Options, file: GGUFFile, progress: Progress | None, resources: ExitStack
    ) -> None:
        started = time.perf_counter()
        self.device = "reference"
        self.threads = options.threads or cpu.physical_cores()
        # A single row is bound by memory, and threads that wait for each other in every product
        # lose far more on a busy machine than they win on an idle one.
        self._row_threads = options.threads or 1
        self._cache_types = (options.cache_type_k or "f32", options.cache_type_v or "f32")
        self.prefill_rows = (
            options.prefill if isinstance(options.prefill, int) else DEFAULT_PREFILL_ROWS
        )
        self.description: Description = models.describe(file)
        self.tokenizer = Tokenizer.from_gguf(file)
        self.warnings = list(self.tokenizer.warnings)
        self.chat_template = file.metadata.text("tokenizer.chat_template", None)
        trained = self.description.context
        self.ctx_size = options.ctx_size or min(trained, DEFAULT_CONTEXT_LIMIT)
        self.description.check_context(self.ctx_size)
        if self.ctx_size > trained:
            self.warnings.append(
                f"a context of {self.ctx_size} cells is more than the {trained} tokens this model "
                "was trained for: expect weaker text beyond them"
            )
        model = models.open_reference(file, self.description, progress=progress)
        self.warnings += model.warnings
        self._model: ReferenceModel | None = model
        self._blas = ThreadpoolController()
        self._resources = resources.pop_all()
        self.load_s = time.perf_counter() - started

    @classmethod
    def open(cls, options: Options, *, progress: Progress | None = None) -> Engine:
        """Open the model that `options` names.

        `progress` is called with (bytes done, bytes in all). Raises FileFormatError for a file that
        cannot be used, ConfigError for options that do not fit it; then nothing stays open.
        """
        with ExitStack() as resources:
            file = resources.enter_context(GGUFFile.open(options.model))
            return cls(options, file, progress, resources)

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of `text`; control tokens in it are parsed only where asked."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """Return the bytes that `ids` stand for."""
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def session(self) -> Session:
        """Return a new conversation, with nothing in it."""
        return Session(self)

    def encode_prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Return the ids of a text that is to be continued, at least one.

        BOS comes first where the file asks for it. EOS never comes last, whatever the file asks
        for: nothing follows an end. An empty text is the token that begins one. Raises ConfigError
        where there is none.
        """
        tokenizer = self.tokenizer
        ids = self.encode(text, add_special=True, parse_special=parse_special)
        if tokenizer.add_eos and ids[-1:] == [tokenizer.eos_id]:
            del ids[-1]
        if ids:
            return ids
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if first is None:
            raise ConfigError(
                "the prompt is empty, and the model has no token that begins a text",
                hint="give a prompt of at least one character",
            )
        return [first]

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the logits (len(ids), vocab) after each of `ids` in a fresh context."""
        self.description.check_ids(ids)
        if len(ids) > self.ctx_size:
            raise ConfigError(
                f"{len(ids)} tokens do not fit a context of {self.ctx_size} cells",
                hint=f"open the engine with ctx_size={len(ids)} or more",
            )
        state = self._new_state()
        out = np.empty((len(ids), self.description.vocab_size), np.float32)
        for at in range(0, len(ids), self.prefill_rows):
            batch = ids[at : at + self.prefill_rows]
            out[at : at + len(batch)] = self._forward(batch, state, "all")
        return out

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] | None = None,
        ignore_eos: bool = False,
    ) -> Generation:
        """Continue `ids` in a fresh session; see `Session.generate`. The prompt is read at once."""
        session = self.session()
        session.extend(ids)
        return session.generate(
            max_tokens=max_tokens, sampling=sampling, stop=stop, ignore_eos=ignore_eos
        )

    def close(self) -> None:
        """Free the weights and close the file; sessions of this engine end. Idempotent."""
        self._model = None
        self._resources.close()

    def _opened(self) -> ReferenceModel:
        if self._model is None:
            raise StrataError(
                "the engine is closed", hint="use it and its sessions inside the with block"
            )
        return self._model

    def _new_state(self) -> ReferenceState:
        return self._opened().new_state(self.ctx_size, *self._cache_types)

    def _forward(
        self, ids: Sequence[int], state: ReferenceState, want: Literal["all", "last"]
    ) -> npt.NDArray[np.float32]:
        """Compute with this engine's number of threads, whatever another one uses."""
        model = self._opened()
        threads = self.threads if len(ids) > 1 else self._row_threads
        with self._blas.limit(limits=threads, user_api="blas"):
            return model.forward(ids, state, want)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
