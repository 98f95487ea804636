"""Choices written down for a device: what is sent of a record, and that nothing old is left."""

from __future__ import annotations

import numpy as np

from strata_nb import Sampling
from strata_nb.choosing import used_bytes, write_choices
from strata_nb.kernels.choices import CHOICE, WHOLE
from strata_nb.sampling import Choice

PENALTY = Sampling(presence_penalty=0.5, repeat_last_n=-1)


def test_a_record_that_is_written_again_says_nothing_of_what_it_said_before() -> None:
    fresh, used = np.zeros(2, CHOICE), np.zeros(2, CHOICE)
    assert write_choices(used, [Choice([4, 5, 5], PENALTY, 0.5, {1, 2}), Choice([9], PENALTY, 0.1)])
    how = [Choice([4], Sampling(top_k=3), 0.25), Choice([], Sampling(), 0.75, {7})]
    assert write_choices(fresh, how)
    assert write_choices(used, how)
    for name in CHOICE.names or ():
        if name != "recent":  # of which none counts
            assert np.array_equal(fresh[name], used[name]), name


def test_only_the_random_number_differs_from_one_token_to_the_next() -> None:
    first, second = np.zeros(1, CHOICE), np.zeros(1, CHOICE)
    write_choices(first, [Choice([1], Sampling(), 0.25, {3})])
    write_choices(second, [Choice([1, 2], Sampling(), 0.5, {3})])
    assert [first["random"][0], second["random"][0]] == [WHOLE // 4, WHOLE // 2]
    second["random"] = first["random"]
    assert first.tobytes() == second.tobytes()


def test_what_is_sent_ends_behind_the_last_token_that_a_penalty_looks_at() -> None:
    records = np.zeros(3, CHOICE)
    how = [Choice([], Sampling(), 0.5), Choice([1], PENALTY, 0.5), Choice([4, 5, 5], PENALTY, 0.5)]
    write_choices(records, how)
    size = used_bytes(records)
    data = records.view(np.uint8)
    assert data[size - 16 : size].view(np.int32).tolist() == [4, 1, 5, 2]
    assert not data[size:].any()
    write_choices(records[:1], how[:1])
    assert used_bytes(records[:1]) < 400
    assert used_bytes(records[:1]) % 8 == 0
