"""Estimate how often the next tokens will use each expert, and learn the estimate on the way.

Texts differ in what foretells a use: that an expert was just used, that the subject likes it, that
the model always likes it. Recency alone (LRU) is best for the first, counting alone (LFU) for the
last. So the estimate is a straight line in two rates,

    chance = w0 + w1 * recent + w2 * lasting

with weights for each class of age, which is how many tokens ago the expert was last used. The
weights are the least squares over what was seen, where the distant past fades; before anything was
seen they are 0, 1/2 and 1/2. The chance is the share of the next 4 tokens, not of one: where a text
alternates, who was just used is not used by the next token, but by the one behind it.

Rejected: fixed weights, which lose to LRU or to a static profile on one trace or another; a table
over classes of age and rate, which forgets differences within a class; a chance of the next token
alone, which falls behind LRU where a text alternates; and one of the next 16 tokens, which falls
behind it where recency is all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.integer]
Heat = npt.NDArray[np.float64]

# What a token leaves of each rate: half-lives of 14 and 1,400 tokens.
RECENT = 0.95
LASTING = 0.9995
# Tokens that a first estimate of the lasting rate counts as.
PRIOR_TOKENS = 100

AGES = (1, 2, 4, 8, 16)  # the last age of each class but the last, in tokens

# Tokens that a chance is of. What takes more than twice as many in one go, such as a prompt batch,
# says how often an expert is used, and not how soon.
HORIZON = 4
FADING = 0.998  # an observation; of what the weights are made of
PRIOR_STRENGTH = 10.0  # uses seen or not seen that the first weights count as, in each class

_CLASS_OF_AGE = np.searchsorted(AGES, np.arange(AGES[-1] + 2))
_FEATURES = 3
_FIRST_WEIGHTS = np.array([0.0, 0.5, 0.5])
_PAIRS = [(one, two) for one in range(_FEATURES) for two in range(one, _FEATURES)]


class Foresight:
    """Follow the use of experts; a rate is the share of tokens that use one."""

    def __init__(self, ranks: npt.NDArray[np.integer]) -> None:
        """`ranks` (layers, experts) is a first guess: the lower the hotter, -1 behind all others.

        Rates are then taken to fall in a straight line.
        """
        self._shape = ranks.shape
        self._ranks = ranks.reshape(-1)
        self._features = np.ones((_FEATURES, ranks.size))  # 1, recent and lasting rate
        self._age = np.full(ranks.size, AGES[-1] + 1, np.int64)
        self._tokens = 0
        self._then: tuple[npt.NDArray[np.intp], Heat] | None = None
        self._seen = np.zeros(ranks.size, np.int64)
        self._seen_rows = 0
        classes = len(AGES) + 1
        self._products = np.zeros((classes, _FEATURES, _FEATURES))  # sums of feature by feature
        self._outcomes = np.zeros((classes, _FEATURES))  # sums of feature by use
        self._weights = np.tile(_FIRST_WEIGHTS, (classes, 1))

    def after(self, used: Counts, rows: int) -> Heat:
        """Take in a window, as `note` does, and return the chance behind it."""
        self.note(used, rows)
        return self.chance()

    def note(self, used: Counts, rows: int) -> None:
        """Take in a window of `rows` tokens.

        used   (layers, experts): how often the window chose each
        """
        share = used.reshape(-1) / rows
        mean = max(float(share.mean()), 1 / share.size)
        if self._tokens == 0:
            self._begin(mean)
        self._follow(used.reshape(-1), share, rows)
        self._learn(used.reshape(-1), rows, mean)

    def chance(self) -> Heat:
        """Return the share of the next tokens that will use each expert (layers, experts).

        Before the first window it is 1 for all.
        """
        one, recent, lasting = self._weights.T[:, self._classes()] * self._features
        chance: Heat = one + recent + lasting
        return chance.reshape(self._shape)

    def chance_if_used(self) -> Heat:
        """Return what the chance of each expert would be behind one more token that uses it."""
        one, recent, lasting = self._weights[_CLASS_OF_AGE[1]]
        kept = min(LASTING, 1 - 1 / (self._tokens + 1 + PRIOR_TOKENS))
        chance: Heat = (
            one
            + recent * (RECENT * self._features[1] + (1 - RECENT))
            + lasting * (kept * self._features[2] + (1 - kept))
        )
        return chance.reshape(self._shape)

    def _begin(self, mean: float) -> None:
        """Guess the rates: as the ranks have it, and one rate for all behind them."""
        ranked = np.flatnonzero(self._ranks >= 0)
        size = self._ranks.size
        guess = np.full(size, mean * (1 - len(ranked) / size))
        order = ranked[np.argsort(self._ranks[ranked], kind="stable")]
        guess[order] = 2 * mean * (1 - (np.arange(len(order)) + 0.5) / size)
        self._features[1:] = guess

    def _classes(self) -> npt.NDArray[np.intp]:
        return _CLASS_OF_AGE[np.minimum(self._age, len(_CLASS_OF_AGE) - 1)]

    def _learn(self, used: Counts, rows: int, mean: float) -> None:
        """Note what came of an observation, once its time is over, and begin another."""
        if self._then is None:  # a window later than the last one ended, so that phases change
            self._then = self._classes(), self._features.copy()
            self._seen[:] = 0
            self._seen_rows = 0
            return
        self._seen += used
        self._seen_rows += rows
        if self._seen_rows < HORIZON:
            return
        if self._seen_rows <= 2 * HORIZON:
            self._note(*self._then, self._seen / self._seen_rows)
            prior = PRIOR_STRENGTH * np.diag([1.0, mean * mean, mean * mean])
            right = self._outcomes + prior @ _FIRST_WEIGHTS
            self._weights = np.linalg.solve(self._products + prior, right[..., None])[..., 0]
        self._then = None

    def _note(self, classes: npt.NDArray[np.intp], features: Heat, share: Heat) -> None:
        """Add to the sums that features at a time were followed by these shares."""
        count = len(self._products)
        self._products *= FADING
        self._outcomes *= FADING
        for one, two in _PAIRS:
            sums = np.bincount(classes, features[one] * features[two], count)
            self._products[:, one, two] += sums
            if one != two:
                self._products[:, two, one] += sums
        for one in range(_FEATURES):
            self._outcomes[:, one] += np.bincount(classes, features[one] * share, count)

    def _follow(self, used: Counts, share: Heat, rows: int) -> None:
        """Bring rates and ages behind a window."""
        _, recent, lasting = self._features
        kept = RECENT**rows
        recent *= kept
        recent += (1 - kept) * share
        kept = min(LASTING**rows, 1 - rows / (self._tokens + rows + PRIOR_TOKENS))
        lasting *= kept
        lasting += (1 - kept) * share
        self._tokens += rows
        # Used n times by a window, an expert was last used 1/(n+1) of it ago, if evenly.
        self._age = np.where(used > 0, rows // (used + 1) + 1, self._age + rows)
