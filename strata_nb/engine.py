"""Assembly: the one place where a file, its tokenizer, its model and a device meet.

    Engine        a model that is open on a device
    Session       a conversation: the tokens so far and their K/V
    Generation    the tokens that a session writes, one after the other

An engine owns the file and its weights, a session owns its K/V; closing an engine ends its
sessions. Only the reference device exists so far: the float32 forward of `models`, which stays as
the judge of everything faster.
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
from threadpoolctl import threadpool_limits

from strata_nb import cpu, models
from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile
from strata_nb.options import DEFAULT_CONTEXT_LIMIT, DEFAULT_PREFILL_ROWS, Options, Sampling
from strata_nb.sampling import RepeatGuard, StopStrings, sample, uniform
from strata_nb.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strata_nb.models import Description, Progress

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
    seed            of the random numbers, also where none was asked for
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
        stop: Sequence[str],
        ignore_eos: bool,
    ) -> None:
        if max_tokens is not None and max_tokens < 0:
            raise ConfigError(
                f"max_tokens {max_tokens}: not usable", hint="0 or more, None: until the model ends"
            )
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.finish: Finish | None = None
        self.generated = 0
        self.first_token_s = 0.0
        self.decode_s = 0.0
        self._session = session
        self._sampling = replace(sampling, seed=self.seed)
        self._left = max_tokens
        self._stream = session.tokenizer.stream()
        self._stops = StopStrings(stop)
        self._ends = session.tokenizer.end_ids
        self._banned = self._ends if ignore_eos else frozenset[int]()
        self._guard = None if ignore_eos else RepeatGuard()
        self._started = time.perf_counter()

    def __next__(self) -> Token:
        if self._left == 0 and self.finish is None:
            self.finish = "length"
        if self.finish is not None:
            raise StopIteration
        session = self._session
        logits = session.next_logits()
        random = uniform(self.seed, 0, session.position)
        token = sample(logits, session.ids, self._sampling, random, self._banned)
        session.append(token)
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
    one is asked for. `ids` holds all of them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._state = engine.model.new_state(
            engine.ctx_size, engine.cache_type_k, engine.cache_type_v
        )
        self._logits: npt.NDArray[np.float32] | None = None
        self.ids: list[int] = []

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
        return len(self.ids)

    def extend(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        """Add `ids` and read everything that has not been read yet.

        Raises ConfigError, and adds nothing, where the context is too small for them. `progress` is
        called with (tokens read, tokens to read).
        """
        self._engine.check_ids(ids)
        total = self.position + len(ids)
        if total > self.ctx_size:
            already = f" after {self.position} earlier tokens" if self.position else ""
            raise ConfigError(
                f"a prompt of {len(ids)} tokens{already} does not fit a context of "
                f"{self.ctx_size} cells",
                hint=f"give --ctx-size {total} or more, or a shorter prompt",
            )
        self.ids.extend(ids)
        self._read(progress)

    def append(self, token: int) -> None:
        """Add one sampled token; it is read when the next logits are asked for."""
        self.ids.append(token)

    def next_logits(self) -> npt.NDArray[np.float32]:
        """Return the logits (vocab,) of the token that comes next; do not change them."""
        self._read(None)
        if self._logits is None:
            raise ConfigError(
                "nothing to continue: the session holds no token",
                hint="extend it with at least one token, such as the model's BOS",
            )
        return self._logits

    def rewind(self, position: int) -> int:
        """Forget every token from `position` on and return the position reached."""
        if not 0 <= position <= self.position:
            raise ConfigError(
                f"cannot rewind to {position}: the session holds {self.position} tokens",
                hint=f"a position from 0 to {self.position}",
            )
        if position < self.position:
            del self.ids[position:]
            # The logits after the last token kept are not stored: that token is read again.
            self._state.rewind(min(self._state.length, max(position - 1, 0)))
            self._logits = None
        return position

    def generate(
        self,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
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

    def _read(self, progress: Progress | None) -> None:
        start = self._state.length
        while self._state.length < len(self.ids):
            at = self._state.length
            batch = self.ids[at : at + self._engine.prefill_rows]
            self._logits = self._engine.model.forward(batch, self._state, want="last")[-1]
            if progress is not None:
                progress(self._state.length - start, len(self.ids) - start)


class Engine:
    """Hold an open model: `with Engine.open(Options(model="m.gguf")) as engine: ...`.

    tokenizer, description, ctx_size (cells), device, load_s (seconds), warnings (one line each)
    """

    def __init__(
        self, options: Options, file: GGUFFile, progress: Progress | None, resources: ExitStack
    ) -> None:
        started = time.perf_counter()
        self.options = options
        self.device = "reference"
        self.threads = options.threads or cpu.physical_cores()
        resources.enter_context(threadpool_limits(self.threads, user_api="blas"))
        self.cache_type_k = options.cache_type_k or "f32"
        self.cache_type_v = options.cache_type_v or "f32"
        self.prefill_rows = (
            options.prefill if isinstance(options.prefill, int) else DEFAULT_PREFILL_ROWS
        )
        self.description: Description = models.describe(file)
        self.tokenizer = Tokenizer.from_gguf(file)
        self.warnings = list(self.tokenizer.warnings)
        self.chat_template_source = file.metadata.text("tokenizer.chat_template", None)
        trained = self.description.context
        self.ctx_size = options.ctx_size or min(trained, DEFAULT_CONTEXT_LIMIT)
        self.description.check_context(self.ctx_size)
        if self.ctx_size > trained:
            self.warnings.append(
                f"a context of {self.ctx_size} cells is more than the {trained} tokens this model "
                "was trained for: expect weaker text beyond them"
            )
        self.model = models.open_reference(file, progress=progress)
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

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the logits (len(ids), vocab) after each of `ids` in a fresh context."""
        self.check_ids(ids)
        if len(ids) > self.ctx_size:
            raise ConfigError(
                f"{len(ids)} tokens do not fit a context of {self.ctx_size} cells",
                hint=f"open the engine with ctx_size={len(ids)} or more",
            )
        state = self.model.new_state(self.ctx_size, self.cache_type_k, self.cache_type_v)
        out = np.empty((len(ids), self.description.vocab_size), np.float32)
        for at in range(0, len(ids), self.prefill_rows):
            batch = ids[at : at + self.prefill_rows]
            out[at : at + len(batch)] = self.model.forward(batch, state, want="all")
        return out

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Generation:
        """Continue `ids` in a fresh session; see `Session.generate`. The prompt is read at once."""
        session = self.session()
        session.extend(ids)
        return session.generate(
            max_tokens=max_tokens, sampling=sampling, stop=stop, ignore_eos=ignore_eos
        )

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ConfigError if one of `ids` is not a token of the vocabulary."""
        for place, token in enumerate(ids):
            if not 0 <= token < self.description.vocab_size:
                raise ConfigError(
                    f"token {token} at place {place} is not in the vocabulary of "
                    f"{self.description.vocab_size} tokens",
                    hint="encode the text with this model's own tokenizer",
                )

    def close(self) -> None:
        """Close the file and give the threads back; sessions of this engine end. Idempotent."""
        self._resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
