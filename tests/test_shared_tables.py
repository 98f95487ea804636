"""Tables that devices copy: no change of the host escapes who has a copy."""

from __future__ import annotations

import numpy as np
import pytest

from strata_nb.shared_tables import SharedTable


def test_every_change_is_counted_and_seen() -> None:
    table = SharedTable(np.zeros((2, 3), np.int64))
    table[1, 2] = 5
    table[0] = 7
    table[:, 1:] = [[1, 2], [3, 4]]
    assert table.changes == 3
    assert table.array.tolist() == [[7, 1, 2], [0, 3, 4]]


def test_nobody_can_write_past_the_count() -> None:
    table = SharedTable(np.zeros(4))
    for part in (table.array, table.array[1:], table.array.reshape(2, 2)):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        table.array += 1
    assert table.changes == 0


def test_what_programs_wrote_is_no_change_of_the_host() -> None:
    table = SharedTable(np.zeros(4))
    table.receive()[:] = 3
    assert (table.array.tolist(), table.changes) == ([3] * 4, 0)


def test_a_write_that_fails_counts_for_some_of_it_may_be_there() -> None:
    table = SharedTable(np.zeros(4))
    with pytest.raises(ValueError, match="could not broadcast"):
        table[:] = [1, 2]
    assert table.changes == 1
