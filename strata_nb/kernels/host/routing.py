"""Choose experts, and sort rows by them.

The router's choice is an insertion into a sorted list, which lies where the result goes: most
experts fail against its last entry. Softmax takes the sum of all exponentials in 16 lanes, expert e
in lane e % 16, which `lanes.py` adds up; the sum of the chosen shares goes by ascending number.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from strata_nb.compiling import compiled, inlined
from strata_nb.kernels.host.exponential import exp
from strata_nb.kernels.host.lanes import added_up, load_first
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, share, word
from strata_nb.kernels.host.products import store_first
from strata_nb.kernels.host.vectors import (
    INTEGERS,
    all_lanes,
    constant,
    load_bytes,
    no_floats,
    no_integers,
    where_less,
)
from strata_nb.raw_memory import load_f32, load_i64, load_u8, load_u16, load_u32, store

_LANES = 16
_LOWEST = np.float32(-np.inf)
_lane_numbers = constant(INTEGERS, list(range(_LANES)))


# -- the router --------------------------------------------------------------------------------


@inlined
def _insert(chosen: int, values: int, place: int, expert: int, value: Any) -> None:
    """Insert an expert into a list of `place` entries in descending order, behind its equals."""
    while place > 0 and load_f32(values + 4 * (place - 1)) < value:
        store(chosen + 8 * place, load_i64(chosen + 8 * (place - 1)))
        store(values + 4 * place, load_f32(values + 4 * (place - 1)))
        place -= 1
    store(chosen + 8 * place, expert)
    store(values + 4 * place, value)


@inlined
def _choose(logits: int, experts: int, top_k: int, chosen: int, values: int) -> None:
    """Write numbers and logits of the top_k largest, largest first, equal ones by lower number."""
    for expert in range(experts):
        value = load_f32(logits + 4 * expert)
        if not value >= _LOWEST:
            value = _LOWEST  # NaN
        if expert < top_k:
            _insert(chosen, values, expert, np.int64(expert), value)
        elif load_f32(values + 4 * (top_k - 1)) < value:
            _insert(chosen, values, top_k - 1, np.int64(expert), value)


@inlined
def _take(logits: int, numbers: int, top_k: int, chosen: int, values: int) -> None:
    """Write numbers that are given, uint16, and their logits."""
    for place in range(top_k):
        expert = np.int64(load_u16(numbers + 2 * place))
        store(chosen + 8 * place, expert)
        store(values + 4 * place, load_f32(logits + 4 * expert))


@inlined
def _largest(logits: int, experts: int) -> Any:
    """Return the largest logit; one that is NaN counts as -infinity."""
    most = _LOWEST
    for expert in range(experts):
        value = load_f32(logits + 4 * expert)
        most = value if value > most else most
    return most


@inlined
def _sort_by_number(chosen: int, values: int, top_k: int) -> None:
    """Bring the chosen into ascending order of number, by insertion: they are few."""
    for taken in range(1, top_k):
        expert, value = load_i64(chosen + 8 * taken), load_f32(values + 4 * taken)
        place = taken
        while place > 0 and load_i64(chosen + 8 * (place - 1)) > expert:
            store(chosen + 8 * place, load_i64(chosen + 8 * (place - 1)))
            store(values + 4 * place, load_f32(values + 4 * (place - 1)))
            place -= 1
        store(chosen + 8 * place, expert)
        store(values + 4 * place, value)


@inlined
def _sum_of_exponentials(logits: int, experts: int, most: Any) -> Any:
    """Return the sum over all experts of exp(logit - most)."""
    total = no_floats()
    for start in range(0, experts, _LANES):
        count = min(_LANES, experts - start)
        raised = exp(load_first(total, logits + 4 * start, count) - most)
        left = all_lanes(no_integers(), count)
        total = total + where_less(_lane_numbers(), left, raised, no_floats())
    return added_up(total)


@inlined
def _divide(values: int, count: int, divisor: Any) -> None:
    for place in range(count):
        store(values + 4 * place, np.float32(load_f32(values + 4 * place) / divisor))


@inlined
def _share_out(values: int, top_k: int, most: Any, total: Any, renormalise: int) -> None:
    """Replace the logits of the chosen by their shares."""
    for start in range(0, top_k, _LANES):
        count = min(_LANES, top_k - start)
        place = values + 4 * start
        store_first(place, exp(load_first(no_floats(), place, count) - most) / total, count)
    if renormalise:
        of_chosen = np.float32(0)
        for place in range(top_k):
            of_chosen += load_f32(values + 4 * place)
        _divide(values, top_k, of_chosen)


@cache
def router_top_k_kernel() -> HostKernel:
    """Return `router_top_k` of the table; the threads share the rows."""

    @compiled(SIGNATURE)
    def router_top_k(arguments: int, thread: int, threads: int) -> None:
        positions, forced = word(arguments, 2), word(arguments, 3)
        experts, top_k = word(arguments, 6), word(arguments, 7)
        renormalise = word(arguments, 8)
        first, last = share(load_i64(word(arguments, 0)), 1, thread, threads)
        for row in range(first, last):
            logits = word(arguments, 1) + 4 * experts * row
            chosen = word(arguments, 4) + 8 * top_k * row
            values = word(arguments, 5) + 4 * top_k * row
            if forced:
                line = forced + 2 * top_k * load_i64(positions + 8 * row)
                _take(logits, line, top_k, chosen, values)
                most = _largest(logits, experts)
            else:
                _choose(logits, experts, top_k, chosen, values)
                most = load_f32(values)
            _sort_by_number(chosen, values, top_k)
            total = _sum_of_exponentials(logits, experts, most)
            _share_out(values, top_k, most, total, renormalise)

    return HostKernel(router_top_k)


# -- rows by expert ----------------------------------------------------------------------------


@cache
def expert_group_kernel() -> HostKernel:
    """Return `expert_group` of the table: a counting sort, by the first thread alone."""

    @compiled(SIGNATURE)
    def expert_group(arguments: int, thread: int, threads: int) -> None:
        if thread:
            return
        chosen, tier, use = word(arguments, 1), word(arguments, 2), word(arguments, 3)
        tally, starts = word(arguments, 4), word(arguments, 5)
        members, places = word(arguments, 6), word(arguments, 7)
        experts = word(arguments, 8)
        choices = load_i64(word(arguments, 0)) * word(arguments, 9)
        for expert in range(experts + 1):
            store(starts + 8 * expert, np.int64(0))
        for choice in range(choices):
            _grow(starts + 8 * load_i64(chosen + 8 * choice), 1)
        before, hits = np.int64(0), np.int64(0)
        for expert in range(experts):
            count = load_i64(starts + 8 * expert)
            _grow(use + 8 * expert, count)
            if load_u8(tier + expert) == 0:
                hits += count
            store(starts + 8 * expert, before)
            before += count
        _grow(tally, hits)
        _grow(tally + 8, choices - hits)
        # While the members are written, starts[e] is where the next of e goes: in the end where
        # those of e + 1 begin.
        for choice in range(choices):
            entry = starts + 8 * load_i64(chosen + 8 * choice)
            place = load_i64(entry)
            store(members + 8 * place, np.int64(choice))
            store(places + 8 * choice, place)
            store(entry, place + 1)
        for expert in range(experts, 0, -1):
            store(starts + 8 * expert, load_i64(starts + 8 * (expert - 1)))
        store(starts, np.int64(0))

    return HostKernel(expert_group)


@inlined
def _grow(place: int, by: int) -> None:
    """Add to an int64."""
    store(place, load_i64(place) + by)


@inlined
def _copy_row(source: int, target: int, size: int) -> None:
    """Copy a row, packed or float32: a multiple of four bytes."""
    whole = size // 64 * 64
    for place in range(0, whole, 64):
        store(target + place, load_bytes(source + place))
    for place in range(whole, size, 4):
        store(target + place, load_u32(source + place))


@cache
def expert_gather_kernel() -> HostKernel:
    """Return `expert_gather` of the table; the threads share the rows that are written."""

    @compiled(SIGNATURE)
    def expert_gather(arguments: int, thread: int, threads: int) -> None:
        x, starts, members = word(arguments, 1), word(arguments, 2), word(arguments, 3)
        gathered, experts = word(arguments, 4), word(arguments, 5)
        top_k, row_bytes = word(arguments, 6), word(arguments, 7)
        choices = load_i64(word(arguments, 0)) * top_k
        first, last = share(choices, 1, thread, threads)
        for expert in range(experts):
            start, end = load_i64(starts + 8 * expert), load_i64(starts + 8 * expert + 8)
            if end - start < 2:
                continue
            for place in range(max(first, start), min(last, end)):
                row = load_i64(members + 8 * place) // top_k
                _copy_row(x + row * row_bytes, gathered + place * row_bytes, row_bytes)

    return HostKernel(expert_gather)
