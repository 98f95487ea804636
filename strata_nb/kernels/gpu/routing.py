"""Choose experts, and sort rows by them, on a card.

The router has a thread for each expert and asks each how many others come before it: a larger
logit, or an equal one of a lower number. That takes no exchange of values between lanes, and no
sorting. First each group of 64 experts finds its best top_k, then those *candidates* are counted
among each other. Candidates lie in the order of their groups, equal ones of a group by number: the
rule for equal logits is in both rounds that the first of them comes first.

`expert_group` has a thread for each expert too, which goes through all choices: it counts its own,
which are its members, and those of lower experts, which are where its members start.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    block_x,
    f32,
    i32,
    i64,
    load_f32,
    load_i64,
    load_u8,
    shared_load_f32,
    shared_load_i32,
    shared_store_f32,
    shared_store_i32,
    store_f32,
    store_i64,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    Arguments,
    GpuKernel,
    Grid,
    block_sum,
    blocks_of,
    warp_sum_i32,
)

_GROUP = 64  # experts that find their best first
_MOST_EXPERTS = 1024  # threads of a block
_INFINITY = math.inf

# -- the router ------------------------------------------------------------------------------------

# Shared memory: the sums of `block_sum`; the logit of every expert; logit and number of every
# candidate, and of the chosen, best first; the shares of the chosen in order of number.
_LOGITS = 4 * WARP
_CANDIDATES = _LOGITS + 4 * _MOST_EXPERTS
_CANDIDATE_NUMBERS = _CANDIDATES + 4 * _MOST_EXPERTS
_CHOSEN = _CANDIDATE_NUMBERS + 4 * _MOST_EXPERTS
_CHOSEN_NUMBERS = _CHOSEN + 4 * _GROUP
_SHARES = _CHOSEN_NUMBERS + 4 * _GROUP
_SHARED_BYTES = _SHARES + 4 * _GROUP


def _before(values: Any, own: Any, first: Any, last: Any) -> Any:
    """Return how many of entries first .. last - 1 in shared memory come before entry `own`."""
    value, count, other = shared_load_f32(values + 4 * own), i32(0), first
    while other < last:
        found = shared_load_f32(values + 4 * other)
        if found > value or (found == value and other < own):
            count = i32(count + 1)
        other += 1
    return i64(count)


def _propose(expert: Any, top_k: Any) -> None:
    """Make an expert a candidate if it is among the top_k of its group.

    What a last, small group lacks is -infinity, and comes after all others: it lies behind them.
    """
    first = expert & -_GROUP
    place = _before(_LOGITS, expert, first, first + _GROUP)
    if place < top_k:
        candidate = 4 * ((expert >> 6) * top_k + place)
        shared_store_f32(_CANDIDATES + candidate, shared_load_f32(_LOGITS + 4 * expert))
        shared_store_i32(_CANDIDATE_NUMBERS + candidate, i32(expert))


def _elect(candidate: Any, candidates: Any, top_k: Any) -> None:
    """Choose a candidate if it is among the top_k of all."""
    place = _before(_CANDIDATES, candidate, i64(0), candidates)
    if place < top_k:
        shared_store_f32(_CHOSEN + 4 * place, shared_load_f32(_CANDIDATES + 4 * candidate))
        number = shared_load_i32(_CANDIDATE_NUMBERS + 4 * candidate)
        shared_store_i32(_CHOSEN_NUMBERS + 4 * place, number)


def _place_by_number(number: Any, top_k: Any) -> Any:
    """Return how many of the chosen have a lower number."""
    place, other = i64(0), i64(0)
    while other < top_k:
        place += 1 if shared_load_i32(_CHOSEN_NUMBERS + 4 * other) < number else 0
        other += 1
    return place


def _sum_of_shares(top_k: Any) -> Any:
    total, place = f32(0.0), i64(0)
    while place < top_k:
        total += shared_load_f32(_SHARES + 4 * place)
        place += 1
    return total


def _router_top_k(
    rows: int,
    logits: int,
    chosen: int,
    shares: int,
    experts: int,
    top_k: int,
    renormalise: int,
) -> None:
    row, thread = i64(block_x()), i64(thread_index())
    if row >= load_i64(rows):
        return
    groups, lowest = (experts + _GROUP - 1) >> 6, f32(-_INFINITY)
    logit = load_f32(logits + 4 * (experts * row + thread)) if thread < experts else lowest
    shared_store_f32(_LOGITS + 4 * thread, logit if logit >= lowest else lowest)  # NaN
    shared_store_f32(_CANDIDATES + 4 * thread, lowest)
    barrier()
    if thread < experts:
        _propose(thread, top_k)
    barrier()
    if thread < groups * top_k:
        _elect(thread, groups * top_k, top_k)
    barrier()
    most = shared_load_f32(_CHOSEN)
    raised = exp(logit - most) if thread < experts else f32(0.0)
    total = block_sum(raised, thread, groups * (_GROUP // WARP))
    share, place = f32(0.0), i64(0)
    if thread < top_k:
        number = shared_load_i32(_CHOSEN_NUMBERS + 4 * thread)
        place = _place_by_number(number, top_k)
        share = exp(shared_load_f32(_CHOSEN + 4 * thread) - most) / total
        shared_store_f32(_SHARES + 4 * place, share)
        store_i64(chosen + 8 * (top_k * row + place), i64(number))
    barrier()
    if thread < top_k:
        if renormalise != 0:
            share = share / _sum_of_shares(top_k)
        store_f32(shares + 4 * (top_k * row + place), share)


def _grid(_: Arguments, most_rows: int) -> Grid:
    return most_rows, 1, 1


@cache
def _of_threads(threads: int) -> GpuKernel:
    name = f"router_top_k_{threads}"
    return GpuKernel(name, _router_top_k, threads, _grid, lambda _: _SHARED_BYTES, registers=64)


def router_top_k_kernel(experts: int, top_k: int) -> GpuKernel:
    """Return `router_top_k` of the table: a block for each row, a thread for each expert.

    UnsupportedDevice for more experts than a block has threads, or more of them for each row than
    a group has.
    """
    if experts > _MOST_EXPERTS or top_k > _GROUP:
        raise UnsupportedDevice(
            f"the router of a card chooses at most {_GROUP} of {_MOST_EXPERTS:,} experts, "
            f"not {top_k:,} of {experts:,}",
            hint="compute on the processor: --device host",
        )
    return _of_threads(_GROUP * blocks_of(experts, _GROUP))


# -- rows by expert --------------------------------------------------------------------------------

_THREADS = 256


def _expert_group(
    rows: int,
    chosen: int,
    tier: int,
    use: int,
    tally: int,
    starts: int,
    members: int,
    places: int,
    experts: int,
    top_k: int,
) -> None:
    thread = i64(thread_index())
    choices = load_i64(rows) * top_k
    expert = thread
    while expert < experts:
        count, start, choice = i64(0), i64(0), i64(0)
        while choice < choices:
            found = load_i64(chosen + 8 * choice)
            count += 1 if found == expert else 0
            start += 1 if found < expert else 0
            choice += 1
        store_i64(starts + 8 * expert, start)
        if count > 0:
            store_i64(use + 8 * expert, load_i64(use + 8 * expert) + count)
            place, choice = start, i64(0)
            while choice < choices:
                if load_i64(chosen + 8 * choice) == expert:
                    store_i64(members + 8 * place, choice)
                    store_i64(places + 8 * choice, place)
                    place += 1
                choice += 1
        expert += _THREADS
    if thread < WARP:
        hits, choice = i32(0), thread
        while choice < choices:
            hits = i32(hits + (1 if load_u8(tier + load_i64(chosen + 8 * choice)) == 0 else 0))
            choice += WARP
        hits = warp_sum_i32(hits)
        if thread == 0:
            store_i64(starts + 8 * experts, choices)
            store_i64(tally, load_i64(tally) + hits)
            store_i64(tally + 8, load_i64(tally + 8) + choices - hits)


@cache
def expert_group_kernel() -> GpuKernel:
    """Return `expert_group` of the table: one block for all rows, which are few."""
    return GpuKernel("expert_group", _expert_group, _THREADS, lambda _, __: (1, 1, 1))
