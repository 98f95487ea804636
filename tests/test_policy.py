"""Policies: who comes, who leaves, and what no policy may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_nb.cache.foresight import Foresight
from strata_nb.cache.policy import (
    COPY_MARGIN,
    INSERT_MARGIN,
    Insertion,
    LeastRecent,
    LeastUsed,
    Moves,
    Policy,
    Static,
    Swaps,
    exchanges,
)

Mask = npt.NDArray[np.bool_]


def mask(*rows: str) -> Mask:
    """Return a mask (layers, experts): x is true."""
    return np.array([[mark == "x" for mark in row] for row in rows])


def moved(
    heat: Sequence[Sequence[float]],
    resident: Mask,
    candidates: Mask,
    slots: int,
    *,
    protected: Mask | None = None,
    floor: int = 0,
    margin: float = 0.0,
    within_layers: bool = False,
) -> Moves:
    return exchanges(
        np.array(heat, float),
        resident,
        candidates,
        np.zeros_like(resident) if protected is None else protected,
        slots,
        floor=floor,
        margin=margin,
        within_layers=within_layers,
    )


# The rules of an exchange.


def test_free_slots_come_first_and_the_hottest_candidate_gets_them() -> None:
    moves = moved([[9, 5, 3, 9]], mask("x..."), mask(".xx."), 2)
    assert moves == Moves([], [(0, 1)])


def test_the_hottest_candidate_takes_the_slot_of_the_coldest_resident() -> None:
    moves = moved([[4, 1, 6, 0]], mask("xx.."), mask("..x."), 2)
    assert moves == Moves([(0, 1)], [(0, 2)])


def test_candidates_are_served_by_heat_until_none_beats_who_is_left() -> None:
    heat = [[2, 4, 6, 3, 7, 5]]
    moves = moved(heat, mask("xxx..."), mask("...xxx"), 3)
    assert moves == Moves([(0, 0), (0, 1)], [(0, 4), (0, 5)])


def test_a_slot_goes_to_another_layer_where_that_is_hotter() -> None:
    moves = moved([[1, 2], [8, 9]], mask("xx", "x."), mask("..", ".x"), 3)
    assert moves == Moves([(0, 0)], [(1, 1)])


def test_within_layers_a_slot_stays_with_its_layer() -> None:
    heat = [[1, 2, 0], [8, 9, 7]]
    moves = moved(heat, mask("xx.", "x.x"), mask("..x", ".x."), 4, within_layers=True)
    assert moves == Moves([(1, 2)], [(1, 1)])


def test_who_is_protected_never_leaves() -> None:
    heat, resident, candidates = [[0, 1, 9]], mask("xx."), mask("..x")
    assert moved(heat, resident, candidates, 2, protected=mask("x..")).evicted == [(0, 1)]
    assert moved(heat, resident, candidates, 2, protected=mask("xx.")) == Moves([], [])


def test_a_candidate_must_lead_by_the_margin() -> None:
    resident, candidates = mask("x."), mask(".x")
    assert moved([[1.0, 1.5]], resident, candidates, 1, margin=0.5).inserted == [(0, 1)]
    assert moved([[1.0, 1.4]], resident, candidates, 1, margin=0.5).inserted == []
    assert moved([[1.0, 1.0]], resident, candidates, 1).inserted == [(0, 1)]


def test_a_free_slot_asks_for_no_lead() -> None:
    assert moved([[1, 0]], mask("x."), mask(".x"), 2, margin=9).inserted == [(0, 1)]


def test_a_layer_at_its_floor_gives_nothing_to_others() -> None:
    heat, resident, candidates = [[0, 1], [5, 9]], mask("xx", "x."), mask("..", ".x")
    assert moved(heat, resident, candidates, 3, floor=1).evicted == [(0, 0)]
    assert moved(heat, resident, candidates, 3, floor=1, margin=10).evicted == []
    heat = [[0, 1], [5, 9]]
    assert moved(heat, mask("x.", "x."), candidates, 2, floor=1).evicted == [(1, 0)]


def test_a_layer_gives_to_others_down_to_its_floor_and_no_further() -> None:
    heat = [[0, 1, 2, 3], [5, 6, 7, 8]]
    moves = moved(heat, mask("xxx.", "x..."), mask("....", ".xxx"), 4, floor=2)
    # One from the first layer, which then has two; two from the second, which had one.
    assert moves.evicted == [(0, 0), (1, 0)]
    assert moves.inserted == [(1, 3), (1, 2)]


def test_a_layer_at_its_floor_still_exchanges_its_own() -> None:
    moves = moved([[1, 5], [0, 0]], mask("x.", "x."), mask(".x", ".."), 2, floor=1)
    assert moves == Moves([(0, 0)], [(0, 1)])


def test_a_layer_below_its_floor_is_served_first_and_without_a_lead() -> None:
    heat = [[5, 6, 9], [0, 1, 0]]
    moves = moved(heat, mask("xx.", "..."), mask("..x", ".x."), 2, floor=1, margin=1)
    assert moves == Moves([(0, 0), (0, 1)], [(1, 1), (0, 2)])
    free = moved(heat, mask("x..", "..."), mask("..x", ".x."), 2, floor=1, margin=99)
    assert free == Moves([], [(1, 1)])


def test_a_layer_below_its_floor_does_not_exchange_its_own_instead() -> None:
    heat = [[9, 9, 9], [0, 1, 0]]
    moves = moved(
        heat, mask("xx.", "x.."), mask("...", ".x."), 3, floor=2, protected=mask("xx.", "...")
    )
    # floor 2 is 1 with three slots: the second layer is at it
    assert moves == Moves([(1, 0)], [(1, 1)])
    heat = [[9, 9, 9], [0, 1, 0]]
    moves = moved(heat, mask("xxx", "x.."), mask("...", ".x."), 4, floor=2)
    assert moves == Moves([(0, 0)], [(1, 1)])


def test_a_floor_that_there_are_no_slots_for_is_what_there_is_for_each() -> None:
    heat = [[0, 0], [9, 9]]
    assert moved(heat, mask("x.", "x."), mask("..", ".x"), 2, floor=5).evicted == [(1, 0)]
    assert moved(heat, mask("x.", ".."), mask("..", ".x"), 1, floor=5).evicted == [(0, 0)]


def test_equal_heats_count_in_the_order_of_layer_and_number() -> None:
    heat = np.zeros((2, 3))
    moves = moved(heat.tolist(), mask("xx.", "x.."), mask("..x", ".xx"), 3)
    assert moves == Moves([(0, 0), (0, 1), (1, 0)], [(0, 2), (1, 1), (1, 2)])


@st.composite
def situations(draw: st.DrawFn) -> tuple[np.ndarray, Mask, Mask, Mask, int, int, float, bool]:
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    size = layers * experts

    def some() -> Mask:
        marks = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        return np.array(marks).reshape(layers, experts)

    heat = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    resident = some()
    slots = int(resident.sum()) + draw(st.integers(0, 3))
    return (
        np.array(heat, float).reshape(layers, experts),
        resident,
        some(),
        some(),
        slots,
        draw(st.integers(0, 4)),
        float(draw(st.integers(0, 4))),
        draw(st.booleans()),
    )


@given(situations())
def test_no_exchange_breaks_a_rule(
    situation: tuple[np.ndarray, Mask, Mask, Mask, int, int, float, bool],
) -> None:
    heat, resident, candidates, protected, slots, floor, margin, within = situation
    moves = exchanges(
        heat,
        resident,
        candidates,
        protected,
        slots,
        floor=floor,
        margin=margin,
        within_layers=within,
    )
    after = resident.copy()
    for expert in moves.evicted:
        assert after[expert]
        assert not protected[expert]
        after[expert] = False
    for expert in moves.inserted:
        assert candidates[expert]
        assert not resident[expert]
        after[expert] = True
    assert len({*moves.inserted, *moves.evicted}) == len(moves.inserted) + len(moves.evicted)
    assert after.sum() <= slots
    floor = min(floor, slots // len(heat))
    assert np.all(after.sum(axis=1) >= np.minimum(resident.sum(axis=1), floor))
    if after.sum() < slots:
        assert not (candidates & ~after).any(), "a slot stays free and a candidate outside"


# Policies.


def used(layers: int, experts: int, *chosen: tuple[int, int]) -> npt.NDArray[np.int64]:
    counts = np.zeros((layers, experts), np.int64)
    for expert in chosen:
        counts[expert] += 1
    return counts


def run(policy: Policy, resident: Mask, slots: int, windows: Sequence[int]) -> list[Moves]:
    """Let windows of a token use one expert each, of one layer."""
    found = []
    for expert in windows:
        moves = policy.after(used(1, resident.size, (0, expert)), 1, resident, slots)
        for gone in moves.evicted:
            resident[gone] = False
        for new in moves.inserted:
            resident[new] = True
        found.append(moves)
    return found


def test_static_fills_free_slots_and_then_moves_nothing() -> None:
    moves = run(Static(1, 4), mask("x..."), 2, [1, 2, 2, 3])
    assert moves == [Moves([], [(0, 1)]), *[Moves([], [])] * 3]
    policy = Static(1, 4)
    policy.after(np.array([[0, 1, 2, 0]]), 2, mask("x..."), 1)
    assert policy.after(used(1, 4), 1, mask("x..."), 2).inserted == [(0, 2)]  # missed before


def test_lru_lets_the_one_leave_that_was_unused_for_the_longest_time() -> None:
    moves = run(LeastRecent(1, 4), mask("...."), 2, [0, 1, 0, 2, 3, 0])
    assert [one.inserted for one in moves] == [[(0, 0)], [(0, 1)], [], [(0, 2)], [(0, 3)], [(0, 0)]]
    assert [one.evicted for one in moves] == [[], [], [], [(0, 1)], [(0, 0)], [(0, 2)]]


def test_lfu_lets_the_one_leave_that_was_used_least() -> None:
    moves = run(LeastUsed(1, 4), mask("...."), 2, [0, 0, 0, 1, 2, 3])
    assert [one.evicted for one in moves] == [[], [], [], [], [(0, 1)], [(0, 2)]]


def test_lfu_forgets() -> None:
    moves = run(LeastUsed(1, 3, decay=0.5), mask("..."), 2, [0, 0, 0, 1, 1, 1, 2])
    assert moves[-1].evicted == [(0, 0)]


def test_lfu_forgets_by_tokens_and_not_by_windows() -> None:
    policy, resident = LeastUsed(1, 3, decay=0.5), mask("xx.")
    policy.after(np.array([[4, 0, 0]]), 4, resident, 2)
    policy.after(np.array([[0, 1, 0]]), 4, resident, 2)  # 4 / 16 is less than 1
    assert policy.after(np.array([[0, 0, 1]]), 1, resident, 2).evicted == [(0, 0)]


def test_swaps_come_every_few_windows_from_two_uses_and_with_a_lead() -> None:
    resident = mask("x...")
    moves = run(Swaps(1, 4, every=4, decay=1.0), resident, 1, [1, 1, 2, 1])
    assert [len(one.inserted) for one in moves] == [0, 0, 0, 1]
    assert moves[-1] == Moves([(0, 0)], [(0, 1)])
    once = run(Swaps(1, 4, every=2, decay=1.0), mask("x..."), 1, [1, 2])
    assert once[-1] == Moves([], [])
    close = run(Swaps(1, 4, every=4, decay=1.0), mask("x..."), 1, [1, 1, 0, 2])
    assert close[-1] == Moves([], [])  # 2 lead 1 by less than 1.5


def test_a_round_of_swaps_leaves_a_part_of_every_count() -> None:
    windows = [1, 2, 1, 2]  # two uses of each, of which a half of the first is left
    assert run(Swaps(1, 4, every=4, decay=0.5), mask("x..."), 1, windows)[-1].inserted == [(0, 1)]
    assert not run(Swaps(1, 4, every=2, decay=0.5), mask("x..."), 1, windows)[-1].inserted


def test_who_was_used_less_than_twice_does_not_swap_though_it_leads() -> None:
    assert not run(Swaps(1, 2, every=1, decay=0.6), mask("x."), 1, [1, 1])[-1].inserted  # 1.6
    assert run(Swaps(1, 2, every=1, decay=0.6), mask("x."), 1, [1] * 4)[-1].inserted == [(0, 1)]


def test_swaps_stay_within_a_layer() -> None:
    policy = Swaps(2, 2, every=1)
    moves = policy.after(np.array([[0, 0], [0, 5]]), 5, mask("xx", "x."), 3)
    assert moves == Moves([(1, 0)], [(1, 1)])


def test_swaps_are_cut_to_those_of_the_largest_lead() -> None:
    policy = Swaps(2, 2, every=1, most=1)
    moves = policy.after(np.array([[0, 3], [0, 5]]), 8, mask("x.", "x."), 2)
    assert moves == Moves([(1, 0)], [(1, 1)])


def test_swaps_fill_free_slots_at_once() -> None:
    policy = Swaps(1, 4, every=0)
    assert policy.after(used(1, 4, (0, 2)), 1, mask("x..."), 2).inserted == [(0, 2)]
    assert policy.after(used(1, 4, (0, 3)), 1, mask("x.x."), 2) == Moves([], [])


def test_insertion_leaves_slots_to_those_who_are_used_more() -> None:
    policy = Insertion(np.full((1, 4), -1))
    resident = mask("xx..")
    for _ in range(50):
        assert policy.after(used(1, 4, (0, 0), (0, 1)), 1, resident, 2) == Moves([], [])
    only_once = policy.after(used(1, 4, (0, 2), (0, 0)), 1, resident, 2)
    assert only_once == Moves([], [])


def test_insertion_follows_a_text_that_changes() -> None:
    policy, resident = Insertion(np.full((1, 6), -1)), mask("xx....")
    run(policy, resident, 2, [0, 1] * 60)
    assert resident.tolist() == mask("xx....").tolist()
    run(policy, resident, 2, [3, 4] * 60)
    assert resident.tolist() == mask("...xx.").tolist()


def test_insertion_leaves_a_layer_its_floor() -> None:
    ranks = np.full((2, 4), -1)
    counts = np.array([[0, 0, 0, 0], [1, 1, 1, 0]])
    for floor, left in ((0, [(0, 0), (0, 1)]), (1, [(0, 0)]), (2, [])):
        policy = Insertion(ranks, floor=floor)
        moves = policy.after(counts, 1, mask("xx..", "x..."), 3 if floor < 2 else 4)
        if floor < 2:
            assert moves.evicted == left
        else:  # a free slot, and none of the other layer
            assert moves == Moves([], [(1, 1)])


def test_insertion_asks_for_a_lead() -> None:
    counts = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    for margin, comes in ((0.0, 2), (0.5, 0)):
        policy = Insertion(np.full((2, 4), -1), margin=margin)
        assert len(policy.after(counts, 1, mask("..xx", "..xx"), 4).inserted) == comes


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeastRecent(2, 8),
        lambda: LeastUsed(2, 8),
        lambda: Swaps(2, 8, every=2),
        lambda: Insertion(np.full((2, 8), -1)),
    ],
)
def test_no_policy_lets_an_expert_leave_that_the_window_used(make: Callable[[], Policy]) -> None:
    rng = np.random.default_rng(0)
    policy, resident = make(), np.zeros((2, 8), bool)
    changes = 0
    for _ in range(300):
        rows = int(rng.integers(1, 4))
        counts = (rng.random((2, 8)) ** 3 * (rows + 1)).astype(np.int64)
        before = resident.copy()
        moves = policy.after(counts, rows, resident, 6)
        assert np.array_equal(before, resident)
        for gone in moves.evicted:
            assert counts[gone] == 0
            resident[gone] = False
        for new in moves.inserted:
            resident[new] = True
        changes += len(moves.evicted)
    assert changes > 10


def test_a_policy_says_what_experts_are_worth_and_lets_nobody_change_it() -> None:
    none = mask("xxxx")
    for policy, wanted in (
        (Static(1, 4), [2, 1, 1, 0]),
        (LeastRecent(1, 4), [2, 1, 2, -1]),
        (LeastUsed(1, 4, decay=0.5), [1.25, 0.5, 1, 0]),
        (Swaps(1, 4, every=2, decay=0.5), [1.5, 0.5, 1, 0]),
    ):
        for window in ([0], [1], [0, 2]):
            policy.after(used(1, 4, *((0, expert) for expert in window)), 1, none, 4)
        for _ in range(2):
            heat = policy.heat()
            assert heat.tolist() == [wanted], policy
            heat[:] = 9


def test_insertion_says_the_chance_that_it_decides_by() -> None:
    policy, foresight = Insertion(np.full((1, 4), -1)), Foresight(np.full((1, 4), -1))
    assert len(set(policy.heat().ravel().tolist())) == 1  # nothing is known
    for expert in (0, 1, 0, 2, 0, 3):
        window = used(1, 4, (0, expert))
        policy.after(window, 1, mask("xxxx"), 4)
        chance = foresight.after(window, 1)
        assert np.array_equal(policy.heat(), chance)
        assert np.array_equal(policy.heat(), chance)


# Foresight.


def test_the_first_chances_are_the_mean_or_those_of_the_ranks() -> None:
    nobody_known = Foresight(np.full((1, 4), -1))
    chance = nobody_known.after(used(1, 4, (0, 0), (0, 1)), 1)
    assert chance[0, 2] == chance[0, 3]
    ranked = Foresight(np.array([[90, 80, 70, 7]]))
    chance = ranked.after(used(1, 4, (0, 0)), 1)
    assert chance[0, 3] > chance[0, 2] > chance[0, 1] > 0
    np.testing.assert_allclose(chance[0, 1:], np.array([3, 5, 7]) / 16, rtol=0.05)
    in_part = Foresight(np.array([[-1, -1, -1, 4]]))
    chance = in_part.after(used(1, 4, (0, 0)), 1)
    assert chance[0, 3] > chance[0, 2] == chance[0, 1] > 0


def test_chances_are_the_shares_where_uses_are_drawn_at_random() -> None:
    rng = np.random.default_rng(1)
    shares = np.array([[0.9, 0.6, 0.3, 0.1]])
    foresight = Foresight(np.full((1, 4), -1))
    for _ in range(3000):
        chance = foresight.after((rng.random((1, 4)) < shares).astype(np.int64), 1)
    np.testing.assert_allclose(chance, shares, atol=0.06)


def test_that_an_expert_was_just_used_counts_as_far_as_the_text_says() -> None:
    rng = np.random.default_rng(2)
    sticky, round_robin = (Foresight(np.full((1, 16), -1)) for _ in range(2))
    stays = 0
    for token in range(1500):
        stays = stays if rng.random() < 0.9 else int(rng.integers(16))
        after_use = sticky.after(used(1, 16, (0, stays)), 1)
        around = round_robin.after(used(1, 16, (0, token % 16)), 1)
    assert after_use.argmax() == stays
    assert after_use[0, stays] > 0.5
    # Whose turn was longest ago is next; whose it was just now is among the last.
    assert set(np.argsort(around[0])[-3:]) == {(token + n) % 16 for n in (1, 2, 3)}
    assert around[0, token % 16] < 0.03


def test_an_expert_of_every_other_token_is_expected_though_the_next_does_not_use_it() -> None:
    rng = np.random.default_rng(3)
    foresight = Foresight(np.full((1, 10), -1))
    for token in range(400):
        other = 2 + int(rng.integers(8))
        chance = foresight.after(used(1, 10, (0, token % 2), (0, other)), 1)
    assert set(np.argsort(chance[0])[-2:]) == {0, 1}


def test_a_prompt_batch_counts_as_its_tokens() -> None:
    """One window of many tokens leaves about the rates of as many windows of one."""
    shares = np.array([[64, 32, 8, 0]])
    at_once, one_by_one = Foresight(np.full((1, 4), -1)), Foresight(np.full((1, 4), -1))
    at_once.after(np.zeros((1, 4), np.int64) + 1, 4)
    one_by_one.after(np.zeros((1, 4), np.int64) + 1, 4)
    batch = at_once.after(shares, 64)
    for token in range(64):
        counts = np.array([[1, token % 2, token % 8 == 7, 0]]).astype(np.int64)
        each = one_by_one.after(counts, 1)
    assert batch.argsort().tolist() == [[3, 2, 1, 0]] == each.argsort().tolist()
    for rate in (1, 2):  # recent and lasting
        found = at_once._features[rate], one_by_one._features[rate]
        np.testing.assert_allclose(*found, atol=0.05)


def sticky() -> tuple[Foresight, int]:
    """Return a foresight of a text that stays with an expert for ten tokens, and the expert."""
    rng = np.random.default_rng(2)
    foresight, stays = Foresight(np.full((1, 16), -1)), 0
    for _ in range(1500):
        stays = stays if rng.random() < 0.9 else int(rng.integers(16))
        foresight.after(used(1, 16, (0, stays)), 1)
    return foresight, stays


def test_an_expert_that_a_prompt_batch_used_once_was_not_just_used() -> None:
    foresight, _ = sticky()
    once = foresight.after(np.ones((1, 16), np.int64), 64)
    assert once.max() < 0.2
    foresight, _ = sticky()
    often = foresight.after(np.array([[64] + [0] * 15]), 64)
    assert often[0, 0] > 0.5


def test_prompt_batches_do_not_blur_how_soon_an_expert_is_used() -> None:
    foresight, stays = sticky()
    for _ in range(60):
        foresight.after(used(1, 16, (0, stays)), 1)
        foresight.after(np.full((1, 16), 4), 64)
    chance = foresight.after(used(1, 16, (0, stays)), 1)
    assert chance[0, stays] > 0.5


def test_lasting_rates_fade() -> None:
    foresight = Foresight(np.full((1, 2), -1))
    for expert in (0, 1):
        for _ in range(30):
            foresight.after(used(1, 2, *[(0, expert)] * 100), 100)
    lasting = foresight._features[2]
    np.testing.assert_allclose(lasting, [0.9995**3000, 1 - 0.9995**3000], atol=0.03)


def test_the_chance_if_used_is_that_behind_a_token_that_uses_the_expert() -> None:
    foresight = Foresight(np.array([[3, 2, 1, -1]]))
    foresight.note(np.array([[1, 0, 1, 0]]), 1)
    before = foresight.chance_if_used()
    foresight.note(np.array([[0, 1, 0, 1]]), 1)
    np.testing.assert_allclose(before[0, [1, 3]], foresight.chance()[0, [1, 3]])


# Behind prompts.


def told_of_a_prompt(make: Callable[[], Policy], *uses: int) -> Policy:
    """Return a policy that was told of 100 tokens, which used the experts of one layer so often."""
    policy = make()
    policy.note(np.array([uses]), 100)
    return policy


def test_behind_a_prompt_an_expert_that_it_used_leaves_for_a_much_hotter_one() -> None:
    policy = told_of_a_prompt(lambda: Insertion(np.full((1, 4), -1, np.int32)), 90, 5, 80, 60)
    resident = np.array([[True, True, False, False]])
    used = np.array([[90, 5, 80, 60]])
    assert policy.behind_prompt(used, resident, 2) == Moves([(0, 1)], [(0, 2)])
    assert policy.after(used, 100, resident, 2) == Moves([], [])  # as if it were a window


def test_behind_a_prompt_a_small_lead_is_not_worth_a_copy() -> None:
    policy = told_of_a_prompt(lambda: Insertion(np.full((1, 3), -1, np.int32)), 50, 30, 45)
    used, resident = np.array([[50, 30, 45]]), np.array([[True, True, False]])
    lead = policy.heat()[0, 2] - policy.heat()[0, 1]
    assert INSERT_MARGIN < lead < COPY_MARGIN
    assert policy.behind_prompt(used, resident, 2) == Moves([], [])


@pytest.mark.parametrize(
    "make",
    [lambda: Static(1, 4), lambda: LeastRecent(1, 4), lambda: LeastUsed(1, 4), lambda: Swaps(1, 4)],
)
def test_behind_a_prompt_the_others_fill_free_slots_only(make: Callable[[], Policy]) -> None:
    policy = told_of_a_prompt(make, 1, 0, 90, 80)
    used, resident = np.array([[1, 0, 90, 80]]), np.array([[True, False, False, False]])
    assert policy.behind_prompt(used, resident, 2) == Moves([], [(0, 2)])
    assert policy.behind_prompt(used, resident, 1) == Moves([], [])
