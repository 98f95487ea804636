"""Choose the next token, and notice what ends an answer: stop strings, one token over and over.

The choice is a pure function of logits, history, parameters and one random number. The samplers run
in llama.cpp's order, each on what the one before left over:

    banned tokens -> penalties -> top_k -> top_p -> min_p -> temperature -> draw

Whatever a sampler keeps is a prefix of one order, descending logit and then ascending id, so ties
go to the lower id everywhere. Logits, weights and probabilities are float32. Exponentials are taken
in float64 and rounded, and sums run in float64: a float32 sum over 250,000 tokens would swallow the
tail, and in float64 the order of summation stops mattering, so a device may choose its own.

The random number comes from a counter (seed, sequence, position) and no state: what is drawn at a
position does not depend on how many rows a step had, nor on what else was drawn before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from strata_nb.errors import ConfigError, StrataError
from strata_nb.options import Sampling

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

REPEAT_LIMIT = 256  # equal tokens in a row; no text that anyone asked for has as many
_WORD = 0xFFFFFFFF


class Choice(NamedTuple):
    """Hold what decides about the next token beside the logits: the arguments of `sample`."""

    history: Sequence[int]
    sampling: Sampling
    random: float
    banned: Collection[int] = ()


def sample(
    logits: Floats,
    history: Sequence[int],
    sampling: Sampling,
    random: float,
    banned: Collection[int] = (),
) -> int:
    """Return the id of the next token.

    logits   float32 (vocab,), left unchanged
    history  ids of prompt and answer so far, oldest first; the penalties look at its end
    random   in [0, 1), from `uniform`; unused at temperature 0
    banned   ids that must not be drawn

    The draw inverts the cumulative distribution in the order of `distribution`. Raises StrataError
    where the logits hold a NaN or +inf, or leave no token to choose.
    """
    ids, probabilities = distribution(logits, history, sampling, banned)
    cumulative = np.cumsum(probabilities, dtype=np.float64)
    # A token owns the half-open stretch from the sum before it to its own.
    return int(ids[np.searchsorted(cumulative, random * cumulative[-1], side="right")])


def distribution(
    logits: Floats,
    history: Sequence[int],
    sampling: Sampling,
    banned: Collection[int] = (),
) -> tuple[Ids, Floats]:
    """Return the tokens that may be drawn, int64 (n,), and their probabilities, float32 (n,).

    Sorted by descending probability, then ascending id; all probabilities are above 0 and n is at
    least 1. At temperature 0 that is the most likely token alone. Arguments and errors as `sample`.
    """
    scores = _scores(logits, history, sampling, banned)
    best = scores.max()  # a NaN anywhere makes this NaN: one pass checks everything
    if not np.isfinite(best):
        raise _unusable(scores, len(banned))
    if sampling.temperature == 0:
        return np.array([scores.argmax()], np.int64), np.ones(1, np.float32)

    ids = _largest(scores, sampling.top_k)
    weights = _weights(scores[ids], best, 1.0)
    total = float(weights.sum(dtype=np.float64))

    # Sorting 250,000 tokens takes longer than all the rest, so drop first what top_p and min_p drop
    # anyhow. The tokens lighter than (1 - p) / n of the total weigh less than (1 - p) together, so
    # the others reach p without them; the half is a margin for rounding.
    likely = weights >= 0.5 * (1.0 - sampling.top_p) * total / ids.size
    if sampling.min_p > 0:
        likely &= scores[ids] >= best + np.float32(np.log(sampling.min_p))
    ids, weights = ids[likely], weights[likely]
    order = np.argsort(-scores[ids], kind="stable")  # ids ascend so far: ties stay so
    ids, weights = ids[order], weights[order]
    if sampling.top_p < 1:
        reached = np.cumsum(weights, dtype=np.float64)
        ids = ids[: np.searchsorted(reached, sampling.top_p * total, side="left") + 1]

    weights = _weights(scores[ids], best, sampling.temperature)
    probabilities = (weights / weights.sum(dtype=np.float64)).astype(np.float32)
    possible = np.count_nonzero(probabilities)  # descending, so the zeros are the end
    return ids[:possible], probabilities[:possible]


def uniform(seed: int, sequence: int, position: int) -> float:
    """Return the random number in [0, 1) of one position of one sequence, a multiple of 2^-24.

    Such a multiple is exact in float32, so every device sees the same number. `seed`, `sequence`
    and `position` are below 2^64.
    """
    word, *_ = philox4x32(
        (position & _WORD, position >> 32, sequence & _WORD, sequence >> 32),
        (seed & _WORD, seed >> 32),
    )
    return (word >> 8) / (1 << 24)


def recent_tokens(history: Sequence[int], sampling: Sampling) -> Sequence[int]:
    """Return the tokens that the penalties look at; none where no penalty is on."""
    off = (
        sampling.repeat_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
    )
    if off or sampling.repeat_last_n == 0:
        return ()
    return history if sampling.repeat_last_n == -1 else history[-sampling.repeat_last_n :]


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return four random 32-bit words: Philox4x32-10.

    Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), table 2 and
    section 3.3. The caller's words are below 2^32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


class StopStrings:
    """Let text through up to the first stop string, however the text is cut into pieces.

    What comes out equals the whole text cut where the first stop string begins (the one that begins
    earliest, not the one that is complete earliest). So a tail that may begin a stop string is held
    back until more text decides. `stopped` is true once a stop string was found; nothing comes out
    after that.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ConfigError(
                "--stop: an empty stop string would end every answer before its first letter",
                hint="leave the flag out, or give it the text to stop at",
            )
        self.stopped = False
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take the next piece of text; return what may be shown and whether a stop was reached."""
        if self.stopped:
            return "", True
        text = self._held + text
        found = self._found(text)
        pending = self._pending(text)
        self.stopped = found < len(text) and found <= pending
        cut = min(found, pending)
        self._held = "" if self.stopped else text[cut:]
        return text[:cut], self.stopped

    def flush(self) -> str:
        """Return the text still held back at the end of the answer, without a stop string in it."""
        found = self._found(self._held)
        text, self.stopped = self._held[:found], self.stopped or found < len(self._held)
        self._held = ""
        return text

    def _found(self, text: str) -> int:
        """Return where the first complete stop string begins, or the length of the text."""
        places = [text.find(stop) for stop in self._stops]
        return min((place for place in places if place >= 0), default=len(text))

    def _pending(self, text: str) -> int:
        """Return where the first tail begins that more text could complete, or the length."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)


class RepeatGuard:
    """Notice a model that produces the same token for ever."""

    def __init__(self, limit: int = REPEAT_LIMIT) -> None:
        self._limit = limit
        self._token: int | None = None
        self._count = 0

    def feed(self, token: int) -> bool:
        """Take the next token; return whether the last `limit` tokens were all equal."""
        self._count = self._count + 1 if token == self._token else 1
        self._token = token
        return self._count >= self._limit


def _scores(
    logits: Floats, history: Sequence[int], sampling: Sampling, banned: Collection[int]
) -> Floats:
    """Return the logits after bans and penalties; a copy wherever something changes."""
    recent = recent_tokens(history, sampling)
    if not recent and not banned:
        return logits
    scores = logits.astype(np.float32)
    if banned:
        scores[list(banned)] = -np.inf
    if recent:
        ids, counts = np.unique(np.asarray(recent, np.int64), return_counts=True)
        at = scores[ids]
        repeat = np.float32(sampling.repeat_penalty)
        with np.errstate(over="ignore"):
            # Dividing a negative logit would reward the repetition.
            at = np.where(at <= 0, at * repeat, at / repeat)
            at -= counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
            at -= np.float32(sampling.presence_penalty)
        scores[ids] = at
    return scores


def _largest(scores: Floats, count: int) -> Ids:
    """Return the ids, ascending, of the `count` best scores above -inf; for 0 of all of them."""
    if 0 < count < scores.size:
        border = np.partition(scores, scores.size - count)[scores.size - count]
        if border > -np.inf:
            above = scores > border
            tied = np.flatnonzero(scores == border)[: count - np.count_nonzero(above)]
            above[tied] = True
            return np.flatnonzero(above)
    return np.flatnonzero(scores > -np.inf)


def _weights(scores: Floats, best: np.float32, temperature: float) -> Floats:
    """Return exp((score - best) / temperature), float32 (n,); the best has 1."""
    with np.errstate(over="ignore", under="ignore"):
        exponents: Doubles = (scores - best).astype(np.float64) / temperature
        return np.exp(exponents).astype(np.float32)


def _unusable(scores: Floats, banned: int) -> StrataError:
    """Describe scores whose maximum is not a number: NaN, +inf, or -inf throughout."""
    bad = np.flatnonzero(np.isnan(scores) | (scores == np.inf))
    if bad.size:
        return StrataError(
            f"the model's logits cannot be used: {bad.size} of {scores.size} are NaN or infinite,"
            f" the first is {scores[bad[0]]} for token {bad[0]}",
            hint="the weights are damaged or out of range: check the file with `strata_nb info`; "
            "or a prompt's values are, of which a card takes larger ones with --deterministic",
        )
    return StrataError(
        f"no token is left to choose: all {scores.size} logits are -inf, {banned} tokens are banned"
    )
