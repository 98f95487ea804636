"""Calls of the driver that the engine makes while a window may wait for the host must not wait."""

from __future__ import annotations

from contextlib import closing

import pytest
from card_blocking import Blocked, measured

from strata_nb.driver import CudaDriver

# What is called while a window runs (chunks by `Ledger.grow_kv_beside`, the next window, the copies
# of a prompt's experts), and calls that only ask.
BESIDE_A_WINDOW = {
    "mem_info",
    "event_record",
    "event_record behind the kernel",
    "event_query behind the kernel",
    "event_wait",
    "copy_async pinned to card",
    "copy_async behind the kernel",
    "launch behind the kernel",
    "create",
    "map",
    "set_access",
}


def test_a_call_waited_if_it_took_most_of_what_was_left_of_the_kernel() -> None:
    assert Blocked("unmap", (0.04, 0.001, 0.05), (0.05, 0.05, 0.05)).waited
    assert not Blocked("map", (0.02, 0.001, 0.05), (0.05, 0.05, 0.05)).waited


@pytest.mark.gpu
def test_what_runs_beside_a_window_does_not_wait_for_it() -> None:
    with closing(CudaDriver()) as driver:
        waited = {one.name for one in measured(driver, 0, 0.05, 3) if one.waited}
    assert not waited & BESIDE_A_WINDOW, f"these waited: {sorted(waited)}"
