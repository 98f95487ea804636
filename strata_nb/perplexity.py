"""How well a model predicts a text, and how far two runs on the same text are apart.

The text is cut into chunks of a fixed number of tokens; each is read in a fresh context and the
second half of it is scored, so that every scored token has about half a chunk before it. Which
tokens are scored is the convention of llama.cpp's tools/perplexity: of a chunk of n tokens, the
predictions of tokens n // 2 + 1 to n - 1. Unlike there, a text shorter than two chunks is read all
the same, and one shorter than a chunk is a chunk of its own length.

With p the distribution of a base run and q that of this run at the same place, what is summed is
KL(p || q) = sum p (log p - log q), in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.engine import Engine
from strata_nb.errors import ConfigError, StrataError

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

SLICE_VALUES = 1 << 20  # logits that are worked on at a time: 8 MiB for each float64 temporary


def log_softmax(logits: Floats) -> Doubles:
    """Return log probabilities (rows, vocab) in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(base_logits: Floats, logits: Floats) -> Doubles:
    """Return KL(base || this) of each row (rows,), in nats, from two (rows, vocab) arrays."""
    return _kl_of_logs(log_softmax(base_logits), log_softmax(logits))


def _kl_of_logs(base: Doubles, ours: Doubles) -> Doubles:
    divergence: Doubles = (np.exp(base) * (base - ours)).sum(axis=-1)
    return divergence


@dataclass(frozen=True, slots=True)
class Chunks:
    """Hold a text that was cut for scoring: the ids of its whole chunks, one after the other."""

    ids: list[int]
    length: int  # tokens of a chunk, 2 or more

    @property
    def count(self) -> int:
        """The number of chunks."""
        return len(self.ids) // self.length

    @property
    def first(self) -> int:
        """The first row of a chunk whose prediction is scored; the last one is `length - 2`."""
        return min(self.length // 2, self.length - 2)

    @property
    def rows(self) -> int:
        """The number of rows of a chunk that are scored."""
        return self.length - 1 - self.first

    def head(self, count: int) -> Chunks:
        """Return the first `count` chunks."""
        return Chunks(self.ids[: count * self.length], self.length)


def cut(ids: Sequence[int], length: int, most: int | None = None) -> Chunks:
    """Return the whole chunks of `length` tokens of a text, at most `most`; the rest is left out.

    Raises ConfigError for a text of fewer than 2 tokens.
    """
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens", hint="give at least 2 tokens of text")
    length = min(length, len(ids))
    count = len(ids) // length
    return Chunks(list(ids), length).head(count if most is None else min(count, most))


def scored_rows(engine: Engine, chunks: Chunks) -> Iterator[tuple[Floats, list[int]]]:
    """Yield for each chunk the scored logits (rows, vocab), and the tokens that follow (rows,).

    The first token of each chunk is replaced by BOS where the model begins a text with it.
    """
    tokenizer = engine.tokenizer
    for start in range(0, len(chunks.ids), chunks.length):
        piece = chunks.ids[start : start + chunks.length]
        following = piece[chunks.first + 1 :]
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            piece[0] = tokenizer.bos_id
        yield engine.logits(piece)[chunks.first : -1], following


class Measured(NamedTuple):
    """Hold what was measured at the rows of a chunk; the last two only against a base."""

    nll: list[float]  # nats
    kl: list[float]  # nats
    same_best: list[bool]


def measure(logits: Floats, following: Sequence[int], base: Floats | None) -> Measured:
    """Score logits (rows, vocab) against the tokens that follow them (rows,), and against a base.

    The memory it takes beside its arguments does not grow with the number of rows. Raises
    StrataError where logits are not numbers: the model is damaged.
    """
    bad = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if bad.size:
        raise StrataError(
            f"the logits of {bad.size} of {len(logits)} scored tokens are not numbers",
            hint="the model file is damaged, or does not fit its architecture",
        )
    measured = Measured([], [], [])
    step = max(1, SLICE_VALUES // logits.shape[1])
    for at in range(0, len(logits), step):
        some = slice(at, at + step)
        log_p = log_softmax(logits[some])
        measured.nll.extend((-log_p[np.arange(len(log_p)), list(following[some])]).tolist())
        if base is not None:
            measured.kl.extend(_kl_of_logs(log_softmax(base[some]), log_p).tolist())
            same = base[some].argmax(axis=-1) == logits[some].argmax(axis=-1)
            measured.same_best.extend(same.tolist())
    return measured


def _exp(nats: float) -> float:
    """Return e to the power of `nats`, infinity where a float cannot hold it."""
    return math.exp(nats) if nats < 700 else math.inf


@dataclass(slots=True)
class Score:
    """Gather what was measured, whole chunks only, so that it is right also when interrupted."""

    planned: int  # chunks
    chunks: list[Measured] = field(default_factory=list)

    def add(self, logits: Floats, following: Sequence[int], base: Floats | None) -> None:
        """Add a chunk; see `measure`."""
        self.chunks.append(measure(logits, following, base))

    def figures(self) -> dict[str, float]:
        """Return the result as numbers; those of a comparison only where there was a base.

        There must be a chunk.
        """
        nll = [value for chunk in self.chunks for value in chunk.nll]
        mean, error = _mean_and_error(nll)
        figures = {
            "chunks": len(self.chunks),
            "chunks_planned": self.planned,
            "scored_tokens": len(nll),
            "perplexity": _exp(mean),
            "perplexity_error": _exp(mean) * error,
        }
        kl = [value for chunk in self.chunks for value in chunk.kl]
        same_best = [value for chunk in self.chunks for value in chunk.same_best]
        if kl:
            mean, error = _mean_and_error(kl)
            figures |= {
                "kl_mean": mean,
                "kl_error": error,
                "kl_median": float(np.median(kl)),
                "kl_max": max(kl),
                "best_token_agreement": sum(same_best) / len(same_best),
            }
        return figures

    def lines(self) -> list[str]:
        """Return the result as lines for a person; what covers not all chunks says so."""
        found = self.figures()
        of = "" if len(self.chunks) == self.planned else f" of {self.planned}"
        lines = [
            f"perplexity  {found['perplexity']:.4f} +- {found['perplexity_error']:.4f}  "
            f"({found['scored_tokens']} tokens, {len(self.chunks)}{of} chunks)"
        ]
        if "kl_mean" in found:
            lines.append(
                f"KL(base || this)  mean {found['kl_mean']:.6f} +- {found['kl_error']:.6f}, median "
                f"{found['kl_median']:.6f}, max {found['kl_max']:.6f}  (nats)"
            )
            lines.append(f"best token agrees  {100 * found['best_token_agreement']:.2f}%")
        return lines


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error (0 for one value)."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return float(np.mean(values)), spread / math.sqrt(len(values))
