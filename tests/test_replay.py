"""Replays: what is counted, and that nothing is better than the optimum."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from behind_prompts import measure
from filling_replay import replay_filling
from hypothesis import given
from hypothesis import strategies as st
from make_routes import make_routes

from strata_nb.cache.policy import (
    Insertion,
    LeastRecent,
    LeastUsed,
    Moves,
    Policy,
    Static,
    Swaps,
)
from strata_nb.cache.profile import rank_by_use
from strata_nb.cache.replay import Routes, optimum, replay
from strata_nb.cache.routing import count_use
from strata_nb.fill_plans import SHARE_UNITS

Experts = frozenset[int]


def routes_of(*tokens: list[list[int]]) -> Routes:
    """Return a trace from the experts of each layer, token by token."""
    return np.array(tokens, np.int16)


def test_a_choice_meets_what_the_windows_before_it_left() -> None:
    trace = routes_of([[0, 1]], [[0, 2]], [[2, 1]], [[0, 3]])
    outcome = replay(trace, 4, LeastRecent(1, 4), 2, [(0, 0), (0, 3)])
    # 0 is there; 1 comes for 3; 0 is there; 2 comes for 1; 2 is there; 1 for 0; then nothing.
    assert (outcome.tokens, outcome.choices, outcome.hits) == (4, 8, 3)
    assert (outcome.written, outcome.fetched) == (5, 0)
    assert outcome.hit_rate == 3 / 8
    assert outcome.moved_a_token == 5 / 4
    assert outcome.written_a_token == 5 / 4


def test_a_swap_crosses_the_link_beside_the_misses() -> None:
    trace = routes_of([[0]], [[1]], [[1]], [[1]])
    outcome = replay(trace, 2, Swaps(1, 2, every=3, decay=1.0), 1, [(0, 0)])
    assert (outcome.hits, outcome.written, outcome.fetched) == (1, 0, 0)  # 1 leads 0 by 1 only
    outcome = replay(np.concatenate([trace, trace[1:]]), 2, Swaps(1, 2), 1, [(0, 0)])
    assert (outcome.hits, outcome.written, outcome.fetched) == (4, 1, 1)
    assert outcome.moved_a_token == (3 + 1) / 7


def test_a_start_longer_than_the_slots_is_cut_and_a_shorter_one_leaves_slots_free() -> None:
    trace = routes_of([[0], [0]], [[1], [0]])
    everyone = [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert replay(trace, 2, Static(2, 2), 2, everyone).hits == 3
    assert replay(trace, 2, Static(2, 2), 4, everyone).hits == 4
    assert replay(trace, 2, LeastRecent(2, 2), 4, []).hits == 1


def test_the_optimum_keeps_who_is_used_soonest_and_passes_by_who_is_not() -> None:
    trace = routes_of([[0]], [[1]], [[2]], [[0]], [[1]], [[3]], [[0]], [[1]])
    outcome = optimum(trace, 4, 2)
    assert (outcome.hits, outcome.written) == (6, 0)  # 2 and 3 are never kept
    assert optimum(trace, 4, 1).hits == 3
    assert optimum(trace, 4, 0).hits == 0
    assert optimum(trace, 4, 4).hits == 8


def test_uses_of_a_count_fall_on_layer_and_expert() -> None:
    trace = routes_of([[0, 1], [3, 2]], [[0, 2], [3, 1]])
    assert count_use(trace, 4).tolist() == [[2, 1, 1, 0], [0, 1, 1, 2]]


# Nothing is better than the optimum.


def subsets(experts: Experts, most: int) -> list[Experts]:
    sizes = range(min(most, len(experts)) + 1)
    found = chain.from_iterable(combinations(sorted(experts), size) for size in sizes)
    return [frozenset(one) for one in found]


def most_hits(windows: list[Experts], everyone: Experts, slots: int) -> int:
    """Try everything: any start, and after each window any part of what is there or was used."""
    best = dict.fromkeys(subsets(everyone, slots), 0)
    for window in windows:
        after: dict[Experts, int] = {}
        for resident, hits in best.items():
            hits += len(resident & window)
            for kept in subsets(resident | window, slots):
                after[kept] = max(after.get(kept, 0), hits)
        best = after
    return max(best.values())


@st.composite
def traces(draw: st.DrawFn, most_tokens: int) -> tuple[Routes, int]:
    layers, experts = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    top_k = draw(st.integers(1, experts - 1))
    tokens = draw(st.integers(1, most_tokens))
    choice = st.permutations(range(experts)).map(lambda order: order[:top_k])
    routes = draw(st.lists(choice, min_size=tokens * layers, max_size=tokens * layers))
    return np.array(routes, np.int16).reshape(tokens, layers, top_k), experts


@given(traces(6), st.integers(0, 4))
def test_nothing_that_keeps_misses_has_more_hits_than_the_optimum(
    case: tuple[Routes, int], slots: int
) -> None:
    trace, experts = case
    layers = trace.shape[1]
    windows = [
        frozenset(int(layer * experts + one) for layer in range(layers) for one in token[layer])
        for token in trace
    ]
    everyone = frozenset(range(layers * experts))
    assert optimum(trace, experts, slots).hits == most_hits(windows, everyone, slots)


@given(traces(30), st.integers(0, 6))
def test_no_policy_beats_the_optimum(case: tuple[Routes, int], slots: int) -> None:
    trace, experts = case
    layers = trace.shape[1]
    slots = min(slots, layers * experts)
    best = optimum(trace, experts, slots)
    profile = rank_by_use(count_use(trace, experts))  # in hindsight
    for policy in all_policies(layers, experts):
        outcome = replay(trace, experts, policy, slots, profile.order())
        if not policy.fetches:
            assert outcome.hits <= best.hits
        assert outcome.moved_a_token >= best.moved_a_token


def all_policies(layers: int, experts: int) -> list[Policy]:
    return [
        Static(layers, experts),
        LeastRecent(layers, experts),
        LeastUsed(layers, experts),
        Swaps(layers, experts, every=2),
        Insertion(np.full((layers, experts), -1)),
        Fetching(),
    ]


class Fetching:
    """Fetch what the next window needs: every choice is a hit, and nothing is won on the link."""

    fetches = True

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def after(self, used: np.ndarray, rows: int, resident: np.ndarray, slots: int) -> Moves:
        moves = Moves([], [])
        outside, inside = np.argwhere(~resident).tolist(), np.argwhere(resident).tolist()
        if outside and inside:
            moves.inserted.append(tuple(self._rng.permutation(outside)[0]))
            moves.evicted.append(tuple(self._rng.permutation(inside)[0]))
        return moves


# What is asked of ours.

SETTINGS = [
    {"layers": 4, "experts": 32, "top_k": 4},
    {"layers": 4, "experts": 32, "top_k": 4, "topic": 200},
    {"layers": 3, "experts": 64, "top_k": 6},
    {"layers": 2, "experts": 128, "top_k": 8},
]


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_ours_is_no_worse_than_lru_and_than_a_profile_of_the_same_model(
    setting: dict[str, int], seed: int
) -> None:
    """Half a point of hits is allowed; the profile comes from an earlier part of the text."""
    trace = make_routes(tokens=4000, seed=seed, **setting)
    layers, experts = setting["layers"], setting["experts"]
    learned, rest = trace[:2000], trace[2000:]
    profile = rank_by_use(count_use(learned, experts))
    for percent in (10, 25, 50):
        slots = layers * experts * percent // 100
        ours, lru, static = (
            replay(rest, experts, policy, slots, profile.order()).hit_rate
            for policy in (
                Insertion(profile.ranks()),
                LeastRecent(layers, experts),
                Static(layers, experts),
            )
        )
        assert ours >= max(lru, static) - 0.005, f"{percent}%: {ours} of {lru} and {static}"


def test_what_is_decided_within_windows_hits_nearly_as_often() -> None:
    routes = make_routes(layers=2, experts=32, top_k=4, tokens=400)
    for slots, lost in ((64, 0.0), (32, 0.02), (16, 0.04)):
        ranks = np.full((2, 32), -1, np.int32)
        between = replay(routes, 32, Insertion(ranks), slots, [])
        within = replay_filling(routes, 32, Insertion(ranks), slots, [])
        assert within.choices == between.choices
        assert within.hit_rate >= between.hit_rate - lost
        assert within.written <= within.choices - within.hits
    whole = [(layer, expert) for layer in range(2) for expert in range(32)]
    assert replay_filling(routes, 32, Static(2, 32), 64, whole).hit_rate == 1
    shared = [
        replay_filling(routes, 32, Insertion(ranks), 32, [], share)
        for share in (0, SHARE_UNITS // 2, SHARE_UNITS)
    ]
    assert shared[0].written > shared[1].written > shared[2].written == 0
    assert shared[2].hits == 0


def test_behind_a_prompt_less_is_copied_and_more_of_it_is_used_than_behind_a_window() -> None:
    sizes = {"layers": 2, "experts": 64, "top_k": 4}
    text = make_routes(**sizes, tokens=364, seed=1)
    empty = measure(text[:0], text[:300], text[300:], 64, 25)
    assert empty["prompt"].copies == empty["window"].copies == 16
    assert empty["prompt"].misses < empty["window"].misses < empty["none"].misses
    earlier = make_routes(**sizes, tokens=300, seed=2)
    full = measure(earlier, text[:60], text[60:124], 64, 50)
    assert 0 < full["prompt"].copies < full["window"].copies / 2
    assert sum(full["prompt"][1:]) < sum(full["window"][1:])
