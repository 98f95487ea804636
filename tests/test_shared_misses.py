"""The replay of ways to share misses: it follows the rules of those that run."""

from __future__ import annotations

import numpy as np
import pytest
import shared_misses
from filling_replay import replay_filling
from make_routes import make_routes
from shared_misses import Rates, best

from strata_nb.cache.filling import cpu_count
from strata_nb.cache.policy import Insertion
from strata_nb.fill_plans import SHARE_UNITS


@pytest.mark.parametrize("expert", [20.0, 40.0, 90.0])
def test_the_rule_of_cards_is_the_best_number_of_whole_experts(expert: float) -> None:
    rates = Rates(layer=1.0, link=58.0, expert=expert, post=0.0, first=0.6)
    shares = best(rates, 1, least=1)
    share = round(SHARE_UNITS * rates.link / (rates.link + rates.expert))
    for missed in range(2, 9):
        times = [
            max(rates.link * (missed - count), rates.by_cpu(count))
            for count in (shares(missed), cpu_count(share, missed))
        ]
        assert times[0] == pytest.approx(times[1])


def test_slots_follow_the_text_as_on_a_card_and_the_link_takes_what_is_missed() -> None:
    routes = make_routes(layers=3, tokens=40, seed=1)
    rates = Rates(layer=10.0, link=58.0, expert=40.0, post=0.0, first=0.6)
    tokens = list(shared_misses.replay(routes, 60, rates, lambda _: 0.0, behind=False))
    known = replay_filling(
        routes, shared_misses.EXPERTS, Insertion(np.full((3, 128), -1, np.int32)), 60, ()
    )
    assert routes.size - sum(token.missed for token in tokens) == known.hits
    assert all(token.us == pytest.approx(30 + 58 * token.missed) for token in tokens)


@pytest.mark.parametrize(("layer", "expected"), [(1000.0, 3 * 1008 + 400), (0.0, 24 * 50 + 8)])
def test_copies_in_the_background_delay_a_token_by_what_is_left_of_them(
    layer: float, expected: float
) -> None:
    """The CPU has all eight of each layer, and all come to slots."""
    routes = make_routes(layers=3, tokens=1, seed=1)
    rates = Rates(layer, link=50.0, expert=1.0, post=0.0, first=0.5)
    (token,) = shared_misses.replay(routes, 60, rates, float, behind=True)
    assert token.us == pytest.approx(expected)
