"""What a device must reach to be accepted: how near the float32 judge, measured by llama.cpp.

A device rounds, so it cannot give the judge's bits. It may be about as far from the judge as
llama.cpp is on the same tokens, which people who run quantised models find good enough.

On a text, real weights have few near ties: the distributions count, and the best token only where
the judge itself is sure. On random weights near ties are everywhere, so the best token is counted
against llama.cpp's count, and the logits are compared row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strata_nb.kernels.reference import Floats

KL_FACTOR = 1.15
KL_ALWAYS_ENOUGH = 1e-4  # nats; below it llama.cpp's own distance is mostly chance
SURE_MARGIN = 0.5  # between the judge's two best logits
AGREEMENT_POINTS = 0.02
ERROR_FACTOR = 1.2
ROUNDING = 1e-9  # of the agreement, a quotient of whole numbers

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Check:
    """Hold one figure of a device beside its limit; a figure that is no number never passes."""

    name: str
    ours: float
    peer: float  # the same figure of llama.cpp
    limit: float
    passed: bool

    def row(self) -> str:
        """Return the check as the end of a table's row."""
        verdict = "pass" if self.passed else "FAIL"
        return f"{self.name} | {self.ours:.6f} | {self.peer:.6f} | {self.limit:.6f} | {verdict}"


def text_checks(ours: Figures, peer: Figures) -> list[Check]:
    """Return the criteria on a text; the figures are those of `oracle_llama_cpp.distance`."""
    kl, peer_kl = ours["kl_mean"], peer["kl_mean"]
    kl_limit = max(KL_FACTOR * peer_kl, KL_ALWAYS_ENOUGH)
    margin = ours["largest_margin_where_they_differ"]
    peer_margin = peer["largest_margin_where_they_differ"]
    return [
        Check("mean KL, nats", kl, peer_kl, kl_limit, kl <= kl_limit),
        Check("margin where not best", margin, peer_margin, SURE_MARGIN, margin < SURE_MARGIN),
    ]


def random_checks(ours: Figures, peer: Figures) -> list[Check]:
    """Return the criteria on random weights: figures of `distance`, and `row_error_median`."""
    agree, peer_agree = ours["best_token_agreement"], peer["best_token_agreement"]
    least = peer_agree - AGREEMENT_POINTS
    error, peer_error = ours["row_error_median"], peer["row_error_median"]
    most = ERROR_FACTOR * peer_error
    return [
        Check("best token agrees", agree, peer_agree, least, agree >= least - ROUNDING),
        Check("median row error", error, peer_error, most, error <= most),
    ]


def row_error_median(judge: Floats, logits: Floats) -> float:
    """Return the median over rows of |logits - judge| / |judge|, Euclidean norms in float64."""
    exact = judge.astype(np.float64)
    errors = np.linalg.norm(logits - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return float(np.median(errors))
