"""The GPU kernel that chooses the next token, against `sampling.sample`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import gpu_launches
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import Run, aligned

from strata_nb.choosing import write_choices
from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.choices import CHOICE, MOST_BANNED, MOST_RECENT
from strata_nb.kernels.gpu.functions import gpu_kernel
from strata_nb.kernels.reference import Floats
from strata_nb.options import Sampling
from strata_nb.sampling import Choice, distribution

if TYPE_CHECKING:
    from gpu_card import Card

BEYOND = -5
NEAR = 1e-5  # of the border between two tokens: there the device may draw the other one
PURE = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def records(choices: Sequence[Choice]) -> np.ndarray:
    found = np.zeros(len(choices), CHOICE)
    assert write_choices(found, choices)
    return found


def drawn(gpu: Run, logits: Floats, choices: Sequence[Choice], *, beyond: int = 1) -> list[int]:
    """Choose for rows on a grid for `beyond` more; logits may not be written."""
    rows, vocabulary = logits.shape
    chosen = aligned(np.full(rows + beyond, BEYOND))
    values = {
        "rows": aligned(np.array([rows])),
        "logits": aligned(logits),
        "choices": aligned(records(choices)),
        "work": aligned(np.zeros((rows, 2, vocabulary), np.int32)),
        "chosen": chosen,
        "vocabulary": vocabulary,
    }
    gpu("sample", values, ["work", "chosen"], most_rows=rows + beyond)
    assert np.all(chosen[rows:] == BEYOND)
    found: list[int] = chosen[:rows].tolist()
    return found


def is_near(logits: Floats, choice: Choice) -> bool:
    """Return whether rounding may decide: the random number is near a border, or top_p is."""
    sampling = choice.sampling
    counts = set()
    for change in (-1e-6, 0.0, 1e-6):
        top_p = min(1.0, max(0.0, sampling.top_p + change))
        some = replace(sampling, top_p=top_p) if sampling.top_p < 1 else sampling
        counts.add(len(distribution(logits, choice.history, some, choice.banned)[0]))
    _, probabilities = distribution(logits, choice.history, sampling, choice.banned)
    borders = np.cumsum(probabilities, dtype=np.float64)
    between = borders[:-1] / borders[-1]
    return len(counts) > 1 or bool(np.any(np.abs(between - choice.random) < NEAR))


def check(gpu: Run, logits: Floats, choices: Sequence[Choice]) -> int:
    """Compare with the reference; return how many rows were too near a border to do so."""
    found, expected = drawn(gpu, logits, choices), plain.sample(logits, choices).tolist()
    near = 0
    for row, choice in enumerate(choices):
        if found[row] != expected[row]:
            assert is_near(logits[row], choice), (row, choice.sampling, found[row], expected[row])
        near += is_near(logits[row], choice)
    return near


def spread(rows: int, vocabulary: int, seed: int, scale: float = 3.0) -> Floats:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, vocabulary)) * scale).astype(np.float32)


def numbers(count: int, seed: int) -> list[float]:
    """Return random numbers as `uniform` gives them."""
    found = np.random.default_rng(seed).integers(0, 1 << 24, count) / (1 << 24)
    return found.tolist()  # type: ignore[no-any-return]


def plans(rows: int, seed: int) -> list[Sampling]:
    """Return parameters in many combinations, neighbours differing in all of them."""
    every = product(
        (0.8, 1.0, 0.3, 2.5),
        (40, 0, 1, 3, 100, 5000),
        (0.95, 1.0, 0.0, 0.5, 0.999),
        (0.05, 0.0, 1.0, 0.5, 1e-4),
    )
    made = [
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature, top_k, top_p, min_p in every
    ]
    order = np.random.default_rng(seed).permutation(len(made))
    return [made[number] for number in order[:rows]]


def compare(gpu: Run, vocabulary: int, rows: int, seed: int) -> None:
    """Compare rows of the usual, of equal and of few logits under changing parameters."""
    logits = spread(rows, vocabulary, seed)
    logits[1::4] = np.round(logits[1::4])  # many equal ones
    logits[2::8, 5:] = -np.inf
    logits[3::8] *= 8  # a few hold everything
    choices = [
        Choice((), sampling, random)
        for sampling, random in zip(plans(rows, seed), numbers(rows, seed), strict=True)
    ]
    assert check(gpu, logits, choices) <= 1 + rows // 50


@pytest.mark.parametrize(("vocabulary", "rows"), [(257, 24), (1, 2), (33, 4), (1500, 2), (9000, 2)])
def test_the_choice_is_that_of_the_reference(gpu: Run, vocabulary: int, rows: int) -> None:
    compare(gpu, vocabulary, rows, seed=vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [257, 1500])
def test_it_is_for_every_combination_of_parameters(gpu: Run, vocabulary: int) -> None:
    compare(gpu, vocabulary, rows=600 if vocabulary < 1000 else 40, seed=1)


@pytest.mark.gpu
def test_it_is_for_the_vocabularies_of_real_models(card: Card) -> None:
    compare(card.run, 151_936, rows=100, seed=2)


def test_draws_come_as_often_as_they_are_probable(gpu: Run) -> None:
    logits = np.log(np.array([[1, 2, 4, 1]], np.float32))
    draws = np.arange(16) / 16 + 1 / 32
    found = drawn(gpu, np.repeat(logits, 16, axis=0), [Choice((), PURE, one) for one in draws])
    assert np.bincount(found).tolist() == [2, 4, 8, 2]
    assert found == sorted(found, key=[2, 1, 0, 3].index)


def test_equal_logits_go_by_ascending_id(gpu: Run) -> None:
    logits = np.full((3, 300), 2, np.float32)
    logits[:, [7, 299]] = [5, -0.0]
    alike = replace(PURE, top_k=4, temperature=1e6)
    choices = [Choice((), alike, random) for random in (0.1, 0.3, 0.9)]
    assert drawn(gpu, logits, choices) == [7, 0, 2]
    zeros = np.zeros((1, 70), np.float32)
    zeros[0, ::2] = -0.0
    half = replace(PURE, top_p=0.5)
    assert drawn(gpu, zeros, [Choice((), half, 0.5)]) == [17]


def test_at_temperature_zero_the_lowest_of_the_largest_is_taken(gpu: Run) -> None:
    logits = spread(3, 200, 5)
    logits[0, [150, 20, 199]] = 100
    logits[1, [30, 31]] = [100.0, np.nextafter(np.float32(100), np.float32(101))]
    logits[2] = -0.0
    logits[2, 64] = 0.0
    greedy = [Choice((), Sampling(temperature=0), 0.9)] * 3
    assert drawn(gpu, logits, greedy) == [20, 31, 0]


def test_penalties_and_bans_count(gpu: Run) -> None:
    rows = 12
    logits = spread(rows, 257, 6, scale=2.0)
    rng = np.random.default_rng(7)
    choices = []
    for row in range(rows):
        history = rng.integers(0, 257, 200).tolist()
        history += [int(logits[row].argmax())] * row
        sampling = Sampling(
            temperature=[0.0, 0.9, 1.5][row % 3],
            top_k=[0, 5][row % 2],
            repeat_penalty=[1.0, 1.5, 0.7][row % 3],
            presence_penalty=[0.0, 0.9, -0.4][row // 2 % 3],
            frequency_penalty=[0.3, 0.0, -0.2][row // 3 % 3],
            repeat_last_n=[64, -1, 0, 150][row % 4],
        )
        banned = rng.permutation(257)[: row * 5].tolist()
        choices.append(Choice(history, sampling, rng.integers(0, 1 << 24) / (1 << 24), banned))
    check(gpu, logits, choices)


def test_repetition_makes_every_logit_smaller(gpu: Run) -> None:
    logits = np.array([[-1.0, -1.2], [1.0, 0.8], [-1.0, -1.2]], np.float32)
    repeated = Sampling(temperature=0, repeat_penalty=2.0)
    choices = [Choice([0], repeated, 0.0)] * 2 + [Choice([], repeated, 0.0)]
    assert drawn(gpu, logits, choices) == [1, 1, 0]


def test_min_p_holds_also_just_above_the_last_of_top_k_or_top_p(gpu: Run) -> None:
    logits = np.array([[100.0, np.nextafter(np.float32(100), np.float32(0)), 0]] * 2, np.float32)
    most = replace(PURE, min_p=1.0)
    choices = [Choice((), replace(most, **one), 0.9) for one in ({"top_k": 2}, {"top_p": 0.6})]
    assert drawn(gpu, logits, choices) == [0, 0]


def test_what_was_banned_may_be_anything(gpu: Run) -> None:
    logits = spread(1, 70, 8)
    logits[0, [3, 69]] = [np.nan, np.inf]
    for temperature in (0.0, 1.0):
        choice = Choice([3, 69, 4], Sampling(temperature, repeat_penalty=2.0), 0.3, {3, 69})
        assert drawn(gpu, logits, [choice]) == plain.sample(logits, [choice]).tolist()
        assert drawn(gpu, logits, [choice._replace(banned=())]) == [-1]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_row_that_cannot_be_used_has_no_token(gpu: Run, bad: float) -> None:
    logits = spread(4, 130, 9)
    logits[1, 129], logits[3] = bad, -np.inf
    for temperature in (0.0, 0.8):
        choices = [Choice((), Sampling(temperature), 0.4)] * 4
        found = drawn(gpu, logits, choices)
        assert found == plain.sample(logits, choices).tolist()
        assert found[1] == found[3] == -1


def test_a_row_whose_tokens_are_all_banned_has_no_token(gpu: Run) -> None:
    logits = spread(2, 40, 10)
    choices = [Choice((), Sampling(), 0.1, range(40)), Choice((), Sampling(), 0.1, range(39))]
    assert drawn(gpu, logits, choices) == [-1, 39]


def test_extreme_logits_and_temperatures_are_no_special_case(gpu: Run) -> None:
    most = float(np.finfo(np.float32).max)
    logits = np.array(
        [[most, -most, 0, most], [-most, -most, -most, -most], [1e-45, 0, -1e-45, -1]], np.float32
    )
    for sampling in (PURE, replace(PURE, temperature=1e-300), replace(PURE, temperature=1e6)):
        choices = [Choice((), sampling, random) for random in (0.6, 0.6, 0.3)]
        assert drawn(gpu, logits, choices) == plain.sample(logits, choices).tolist()


def test_a_row_has_the_same_token_beside_others(gpu: Run) -> None:
    logits = spread(5, 257, 11)
    choices = [Choice((), PURE, random) for random in numbers(5, 12)]
    together = drawn(gpu, logits, choices)
    assert [drawn(gpu, logits[n : n + 1], choices[n : n + 1])[0] for n in range(5)] == together


def test_what_has_no_room_in_a_record_is_left_to_the_host() -> None:
    def has_room(choice: Choice) -> bool:
        return write_choices(np.zeros(2, CHOICE), [Choice((), some, 0.5), choice])

    some = Sampling(presence_penalty=1.0, repeat_last_n=-1)
    assert has_room(Choice(range(MOST_RECENT), some, 0.5, range(MOST_BANNED)))
    assert not has_room(Choice(range(MOST_RECENT + 1), some, 0.5))
    assert has_room(Choice(range(MOST_RECENT + 1), Sampling(), 0.5))
    assert not has_room(Choice((), some, 0.5, range(MOST_BANNED + 1)))


def test_more_tokens_than_weights_can_be_summed_of_are_refused() -> None:
    gpu_kernel(gpu_launches.shaped("sample", vocabulary=1 << 22))
    with pytest.raises(UnsupportedDevice, match="4,194,305"):
        gpu_kernel(gpu_launches.shaped("sample", vocabulary=(1 << 22) + 1))
