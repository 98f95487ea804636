"""The criteria by which a device is accepted (tools/criteria.py)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from criteria import Check, random_checks, row_error_median, text_checks

PEER = {
    "kl_mean": 0.003,
    "largest_margin_where_they_differ": 0.4,
    "best_token_agreement": 0.97,
    "row_error_median": 0.01,
}


def verdicts(checks: list[Check]) -> list[bool]:
    return [check.passed for check in checks]


@pytest.mark.parametrize(
    ("kl", "margin", "expected"),
    [
        (0.00344, 0.49, [True, True]),
        (0.00346, 0.0, [False, True]),
        (0.0, 0.5, [True, False]),
        (math.nan, math.nan, [False, False]),
    ],
)
def test_on_a_text_the_kl_may_be_15_percent_more_and_a_sure_token_must_stay(
    kl: float, margin: float, expected: list[bool]
) -> None:
    ours = {"kl_mean": kl, "largest_margin_where_they_differ": margin}
    assert verdicts(text_checks(ours, PEER)) == expected


def test_a_kl_under_a_ten_thousandth_passes_however_near_the_peer_is() -> None:
    ours = {"kl_mean": 0.9e-4, "largest_margin_where_they_differ": 0.0}
    assert verdicts(text_checks(ours, PEER | {"kl_mean": 1e-7})) == [True, True]
    ours["kl_mean"] = 1.1e-4
    assert verdicts(text_checks(ours, PEER | {"kl_mean": 1e-7})) == [False, True]


@pytest.mark.parametrize(
    ("agreement", "error", "expected"),
    [
        (0.95, 0.0119, [True, True]),
        (0.949, 0.0, [False, True]),
        (1.0, 0.0121, [True, False]),
        (1.0, math.nan, [True, False]),
    ],
)
def test_on_random_weights_two_points_and_a_fifth_of_the_row_error_are_allowed(
    agreement: float, error: float, expected: list[bool]
) -> None:
    ours = {"best_token_agreement": agreement, "row_error_median": error}
    assert verdicts(random_checks(ours, PEER)) == expected


def test_the_row_error_is_relative_to_each_row_and_one_bad_row_does_not_set_it() -> None:
    judge = np.array([[3, 4], [30, 40], [0, 1]], np.float32)
    logits = np.array([[3, 4.5], [30, 45], [9, 9]], np.float32)
    assert row_error_median(judge, logits) == pytest.approx(0.1)
    assert math.isnan(row_error_median(judge, np.full_like(judge, np.nan)))
