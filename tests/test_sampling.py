"""The sampler chain against its definition, the random numbers against published vectors, stops."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_nb.errors import ConfigError, StrataError
from strata_nb.options import Sampling
from strata_nb.sampling import (
    RepeatGuard,
    StopStrings,
    distribution,
    philox4x32,
    sample,
    uniform,
)

OFF = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)  # every sampler off


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def kept(logits: np.ndarray, sampling: Sampling, history: list[int] | None = None) -> list[int]:
    return distribution(logits, history or [], sampling)[0].tolist()


def by_definition(
    logits: np.ndarray, history: list[int], sampling: Sampling, banned: tuple[int, ...]
) -> list[tuple[int, float]]:
    """Return (id, probability), one sampler after the other, as a reader would write them."""
    scores = {token: float(value) for token, value in enumerate(logits) if token not in banned}
    last = sampling.repeat_last_n
    recent = history if last == -1 else history[len(history) - min(last, len(history)) :]
    for token, count in Counter(recent).items():
        if token in scores:
            score, repeat = scores[token], sampling.repeat_penalty
            score = score * repeat if score <= 0 else score / repeat
            score -= count * sampling.frequency_penalty + sampling.presence_penalty
            scores[token] = score
    order = sorted(scores, key=lambda token: (-np.float32(scores[token]), token))
    order = [token for token in order if scores[token] > -math.inf]
    if sampling.temperature == 0:
        return [(order[0], 1.0)]

    def softmax(tokens: list[int], temperature: float) -> list[float]:
        weights = [math.exp((scores[t] - scores[tokens[0]]) / temperature) for t in tokens]
        total = math.fsum(weights)
        return [weight / total for weight in weights]

    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        reached, count = 0.0, 0
        for probability in softmax(order, 1.0):
            reached, count = reached + probability, count + 1
            if reached >= sampling.top_p:
                break
        order = order[:count]
    if sampling.min_p > 0:
        least = scores[order[0]] + math.log(sampling.min_p)
        order = [token for token in order if scores[token] >= least]
    return list(zip(order, softmax(order, sampling.temperature), strict=True))


# Quarters keep the logits of the two far from each other's rounding, and make ties common.
quarters = st.integers(-40, 40).map(lambda n: n / 4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[int], Sampling, tuple[int, ...]]:
    values = draw(st.lists(quarters | st.just(-math.inf), min_size=1, max_size=30))
    values[draw(st.integers(0, len(values) - 1))] = draw(quarters)
    tokens = st.integers(0, len(values) - 1)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.1, 0.8, 1.0, 3.0])),
        top_k=draw(st.integers(0, 35)),
        top_p=draw(st.sampled_from([0.0, 0.123, 0.517, 0.9, 0.951, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.051, 0.31, 1.0])),
        repeat_penalty=draw(st.sampled_from([0.5, 1.0, 2.0])),
        presence_penalty=draw(st.sampled_from([-0.5, 0.0, 0.25])),
        frequency_penalty=draw(st.sampled_from([-0.25, 0.0, 0.5])),
        repeat_last_n=draw(st.integers(-1, 12)),
    )
    finite = [token for token, value in enumerate(values) if value > -math.inf]
    banned = draw(st.lists(tokens, max_size=5).filter(lambda ids: set(finite) - set(ids)))
    return (
        np.array(values, np.float32),
        draw(st.lists(tokens, max_size=20)),
        sampling,
        tuple(banned),
    )


@settings(max_examples=400)
@given(cases())
def test_the_distribution_is_that_of_the_samplers_one_after_the_other(
    case: tuple[np.ndarray, list[int], Sampling, tuple[int, ...]],
) -> None:
    logits, history, sampling, banned = case
    before = logits.copy()
    expected = [(t, p) for t, p in by_definition(logits, history, sampling, banned) if p > 1e-37]
    ids, probabilities = distribution(logits, history, sampling, banned)
    assert ids.tolist()[: len(expected)] == [token for token, _ in expected]
    assert probabilities[len(expected) :].sum() < 1e-36
    np.testing.assert_allclose(probabilities[: len(expected)], [p for _, p in expected], rtol=2e-6)
    assert (ids.dtype, probabilities.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(logits, before)


@settings(max_examples=100)
@given(cases(), st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_cumulative_distribution(
    case: tuple[np.ndarray, list[int], Sampling, tuple[int, ...]], random: float
) -> None:
    logits, history, sampling, banned = case
    ids, probabilities = distribution(logits, history, sampling, banned)
    target = random * math.fsum(probabilities.tolist())
    reached, expected = 0.0, int(ids[-1])
    for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True):
        reached += probability
        if reached > target:
            expected = token
            break
    if abs(reached - target) > 1e-12:  # at a border, rounding decides
        assert sample(logits, history, sampling, random, banned) == expected


def test_frequencies_of_100_000_draws_agree_with_the_probabilities() -> None:
    logits = logits_of(2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0, 1.0)
    ids, probabilities = distribution(logits, [], OFF)
    draws = 100_000
    cumulative = np.cumsum(probabilities, dtype=np.float64)
    randoms = [uniform(1234, 5, position) for position in range(draws)]
    places = np.searchsorted(cumulative, np.array(randoms) * cumulative[-1], side="right")
    counts = np.bincount(places, minlength=len(ids))
    expected = probabilities * draws
    chi_square = float((((counts - expected) ** 2) / expected).sum())
    assert chi_square < 24.3  # seven degrees of freedom exceed it once in 1,000 seeds
    for random, place in list(zip(randoms, places, strict=True))[:200]:
        assert sample(logits, [], OFF, random) == ids[place]


def test_a_random_number_of_zero_takes_the_most_likely_token_and_the_largest_the_last() -> None:
    logits = logits_of(0.0, 2.0, 1.0, -math.inf)
    assert sample(logits, [], OFF, 0.0) == 1
    assert sample(logits, [], OFF, 1 - 2**-24) == 0


def test_a_token_owns_its_stretch_from_its_start_up_to_the_next_tokens() -> None:
    halves = logits_of(1.0, 1.0)
    assert sample(halves, [], OFF, 0.5 - 2**-24) == 0
    assert sample(halves, [], OFF, 0.5) == 1


def test_temperature_zero_takes_the_best_after_penalties_whatever_the_other_samplers_say() -> None:
    greedy = Sampling(temperature=0, top_k=3, top_p=0.0, min_p=1.0)
    assert sample(logits_of(1.0, 3.0, 2.9), [], greedy, 0.7) == 1
    assert sample(logits_of(1.0, 3.0, 2.9), [1], replace(greedy, repeat_penalty=1.5), 0.7) == 2
    assert sample(logits_of(1.0, 3.0, 2.9), [], greedy, 0.7, banned={1, 2}) == 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        replace(OFF, top_k=1),
        replace(OFF, top_p=0.0),
        replace(OFF, temperature=1e-300),
    ],
)
def test_ties_go_to_the_lower_id(sampling: Sampling) -> None:
    logits = np.zeros(1000, np.float32)
    logits[[700, 300, 900]] = 5.0
    assert sample(logits, [], sampling, 0.0) == 300


def test_top_k_cuts_a_tie_at_its_border_by_id() -> None:
    assert kept(logits_of(1, 3, 1, 1, 2), replace(OFF, top_k=4)) == [1, 4, 0, 2]
    assert kept(logits_of(*[0.0] * 50), replace(OFF, top_k=3)) == [0, 1, 2]


def test_top_k_above_the_vocabulary_keeps_all_and_tokens_at_minus_infinity_never_count() -> None:
    assert kept(logits_of(1, 3, 2), replace(OFF, top_k=40)) == [1, 2, 0]
    assert kept(logits_of(-math.inf, 3, -math.inf, 2), replace(OFF, top_k=3)) == [1, 3]


def test_top_p_keeps_the_token_that_reaches_it_and_at_least_one() -> None:
    logits = np.log(logits_of(0.5, 0.25, 0.125, 0.125))
    assert kept(logits, replace(OFF, top_p=0.0)) == [0]
    assert kept(logits, replace(OFF, top_p=0.49)) == [0]
    assert kept(logits, replace(OFF, top_p=0.51)) == [0, 1]
    assert kept(logits, replace(OFF, top_p=0.76)) == [0, 1, 2]


def test_top_p_is_reached_by_an_equal_sum() -> None:
    assert kept(logits_of(1, 1, 1, 1), replace(OFF, top_p=0.5)) == [0, 1]


def test_top_p_counts_the_probability_that_top_k_left_over() -> None:
    logits = np.log(logits_of(0.4, 0.2, 0.2, 0.2))
    assert kept(logits, replace(OFF, top_p=0.65)) == [0, 1, 2]
    assert kept(logits, replace(OFF, top_p=0.65, top_k=2)) == [0]  # 0.4 / 0.6 reaches it


def test_min_p_looks_at_the_logits_before_temperature_flattens_them() -> None:
    logits = np.log(logits_of(0.8, 0.15, 0.05))
    for temperature in (0.1, 1.0, 100.0):
        sampling = replace(OFF, min_p=0.1, temperature=temperature)
        assert kept(logits, sampling) == [0, 1]


def test_min_p_keeps_a_logit_equal_to_its_limit() -> None:
    limit = np.float32(np.log(0.25))
    logits = logits_of(0, limit, np.nextafter(limit, np.float32(-9)))
    assert kept(logits, replace(OFF, min_p=0.25)) == [0, 1]


def test_min_p_of_one_keeps_what_ties_with_the_best() -> None:
    assert kept(logits_of(1, 2, 2, 1.9), replace(OFF, min_p=1.0)) == [1, 2]


def test_top_p_runs_before_temperature() -> None:
    logits = np.log(logits_of(0.9, 0.05, 0.05))
    # After a temperature of 100 the three would be nearly equal, and top_p would keep all.
    assert kept(logits, replace(OFF, top_p=0.89, temperature=100.0)) == [0]


def test_penalties_run_before_top_k() -> None:
    sampling = replace(OFF, top_k=1, presence_penalty=2.0)
    assert kept(logits_of(3.0, 2.0), sampling, history=[0]) == [1]


@pytest.mark.parametrize(
    ("last", "best"), [(0, 0), (1, 0), (2, 0), (3, 2), (4, 3), (64, 3), (-1, 3)]
)
def test_penalties_see_the_last_tokens_only(last: int, best: int) -> None:
    sampling = Sampling(temperature=0, presence_penalty=2.0, repeat_last_n=last)
    assert sample(logits_of(3.0, 2.0, 2.5, 1.5), [2, 0, 1, 1], sampling, 0.0) == best


def test_a_repeated_token_loses_whatever_the_sign_of_its_logit() -> None:
    sampling = Sampling(temperature=0, repeat_penalty=2.0)
    assert sample(logits_of(4.0, 3.0), [0], sampling, 0.0) == 1
    assert sample(logits_of(-4.0, -5.0), [0], sampling, 0.0) == 1


def test_the_frequency_penalty_grows_with_each_occurrence() -> None:
    sampling = Sampling(temperature=0, frequency_penalty=0.4)
    assert sample(logits_of(3.0, 2.0), [0, 0], sampling, 0.0) == 0
    assert sample(logits_of(3.0, 2.0), [0, 0, 0], sampling, 0.0) == 1


def test_extreme_parameters_stay_numbers() -> None:
    logits = logits_of(3e38, -3e38, 1e-45, 0.0)
    for sampling in (
        replace(OFF, temperature=5e-324),
        replace(OFF, temperature=1e6, min_p=5e-324),
        replace(OFF, repeat_penalty=1e6, presence_penalty=-1e6),
        Sampling(top_p=5e-324),
    ):
        ids, probabilities = distribution(logits, [1, 2], sampling)
        assert ids[0] == 0
        assert np.isfinite(probabilities).all()
        assert math.isclose(float(probabilities.sum()), 1.0, rel_tol=1e-6)


def test_the_tail_of_a_large_vocabulary_keeps_its_probability() -> None:
    # 250,000 tokens of weight 1e-7 beside one of weight 1: a float32 sum would lose most of them.
    logits = np.full(250_001, np.log(1e-7), np.float32)
    logits[123] = 0.0
    ids, probabilities = distribution(logits, [], OFF)
    assert len(ids) == 250_001
    assert math.isclose(float(probabilities[0]), 1 / 1.025, rel_tol=1e-5)
    assert sample(logits, [], OFF, 0.99) not in (123, 0)


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.999, 1.0])
def test_a_large_vocabulary_agrees_with_a_full_sort(top_k: int, min_p: float, top_p: float) -> None:
    logits = np.random.default_rng(7).normal(0, 3, 20_000).astype(np.float32)
    sampling = replace(OFF, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = by_definition(logits, [], sampling, ())
    ids, probabilities = distribution(logits, [], sampling)
    assert ids.tolist() == [token for token, _ in expected]
    np.testing.assert_allclose(probabilities, [p for _, p in expected], rtol=1e-5)


def test_logits_that_are_not_numbers_are_refused_with_their_count_and_place() -> None:
    logits = np.zeros(10, np.float32)
    logits[[4, 7]] = np.nan, np.inf
    for sampling in (Sampling(temperature=0), Sampling(), Sampling(repeat_penalty=1.1)):
        with pytest.raises(StrataError, match=r"2 of 10 .* first is nan for token 4") as found:
            sample(logits, [1], sampling, 0.5)
        assert "--deterministic" in str(found.value.hint)  # halves of a prompt end at 524,000


def test_nothing_left_to_choose_is_refused() -> None:
    with pytest.raises(StrataError, match=r"all 3 logits are -inf, 2 tokens are banned"):
        sample(logits_of(-math.inf, 1, 2), [], Sampling(temperature=0), 0.5, banned=[1, 2])


WORDS = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORDS,) * 4, (WORDS,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_is_the_first_word_of_seed_sequence_and_position() -> None:
    seed, sequence, position = 0x299F31D0_A4093822, 0x03707344_13198A2E, 0x85A308D3_243F6A88
    assert uniform(seed, sequence, position) == (0xD16CFE09 >> 8) / 2**24
    assert uniform(0, 0, 0) == (0x6627E8D5 >> 8) / 2**24


@given(*[st.integers(0, 2**64 - 1)] * 3)
def test_uniform_numbers_are_exact_in_float32_and_below_one(
    seed: int, sequence: int, position: int
) -> None:
    number = uniform(seed, sequence, position)
    assert 0 <= number < 1
    assert float(np.float32(number)) == number


def test_neighbouring_seeds_sequences_and_positions_have_unrelated_numbers() -> None:
    numbers = {
        uniform(seed, sequence, position)
        for seed in range(10)
        for sequence in range(10)
        for position in range(10)
    }
    assert len(numbers) == 1000
    assert 0.45 < sum(numbers) / 1000 < 0.55


def test_the_repeat_guard_ends_at_the_limit_of_equal_tokens_in_a_row() -> None:
    guard = RepeatGuard(limit=3)
    assert [guard.feed(token) for token in (5, 5, 6, 5, 5, 5, 5, 1)] == [
        *(False,) * 5,
        True,
        True,
        False,
    ]
    assert [RepeatGuard().feed(1) for _ in range(3)] == [False] * 3
    guard = RepeatGuard()
    assert [guard.feed(0) for _ in range(256)] == [False] * 255 + [True]


def cut_at_first(text: str, stops: list[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@settings(max_examples=500)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_cut_like_the_whole_text_for_any_chunks(
    chunks: list[str], stops: list[str]
) -> None:
    text, out = "".join(chunks), ""
    stream = StopStrings(stops)
    for chunk in chunks:
        piece, stopped = stream.feed(chunk)
        out += piece
        assert cut_at_first(text, stops).startswith(out)
        assert stopped == stream.stopped
    out += stream.flush()
    assert out == cut_at_first(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)


def test_text_that_cannot_begin_a_stop_string_is_let_through_at_once() -> None:
    stream = StopStrings(["###", "User:"])
    assert stream.feed("Hello U") == ("Hello ", False)
    assert stream.feed("lf #") == ("Ulf ", False)
    assert stream.feed("1 ##") == ("#1 ", False)
    assert stream.feed("# and on") == ("", True)
    assert stream.feed("more") == ("", True)
    assert stream.flush() == ""


def test_the_stop_string_that_begins_first_wins_over_the_one_that_is_complete_first() -> None:
    stream = StopStrings(["abcd", "bc"])
    assert stream.feed("xabc") == ("x", False)
    assert stream.feed("d") == ("", True)
    stream = StopStrings(["abcd", "bc"])
    assert stream.feed("xabc") == ("x", False)
    assert stream.feed("x") == ("a", True)
    stream = StopStrings(["abcd", "bc"])
    stream.feed("xabc")
    assert (stream.flush(), stream.stopped) == ("a", True)


def test_a_complete_stop_string_does_not_wait_for_a_longer_one_that_begins_with_it() -> None:
    assert StopStrings(["ab", "abc"]).feed("xab") == ("x", True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty stop string"):
        StopStrings(["a", ""])
