"""Choose experts on a card: `route`, in place of the table's `router_top_k` and `expert_group`.

A row has a block, and an expert a thread. Each thread counts how many experts come before its own:
those of a larger logit, and of an equal one the lower numbers. That takes no exchange of values
between lanes and no sorting, and logits, as integers in the same order, are read four at a time
from shared memory. With 128 experts a warp has a few hundred instructions; with twice as many there
are four times as many. How many experts there are and how many are chosen is part of the code: it
is run once in a while, and a card waits for code that it jumps over.

Kernels of cards read the row of a choice where it is, so choices stay in the order of rows and are
not sorted by expert. What they need of an expert is its address: `route` looks it up, and whether
the blob is in a slot, so that who comes next does not wait for two loads, one after the other. An
expert has no slot where its address is that of its home, in the host's memory.

    blobs   int64 (rows, top_k), by ascending expert of each row: the address of the blob, plus
            IN_HOST_MEMORY where it is read there; of a single row also what `filling.py` adds

For a single row it decides as well which missed experts get slots (`filling.py`), and which go to
the CPU (`pooled.py`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from strata_nb.errors import UnsupportedDevice
from strata_nb.fill_plans import LISTED, NOT_LISTED, OFFERED, WINDOW
from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.filling import (
    BY_CPU,
    COMES,
    IN_HOST_MEMORY,
    LISTS_BYTES,
    LOWEST,
    NOT_POSTED,
    ROW_BY_CPU,
    ROW_COMES,
    cpu_share_of,
    gain_of,
    goes_to_cpu,
    heat_of,
    list_victim,
    may_leave,
    order_of,
    slot_for,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    add_i64,
    await_previous,
    barrier,
    bits_of_f32,
    block_x,
    f32,
    i32,
    i64,
    load_f32,
    load_i64,
    load_u16,
    shared_load_4xi32,
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
    Function,
    GpuKernel,
    Grid,
    block_sum,
    blocks_of,
)

_MOST_EXPERTS = 1024  # threads of a block
_MOST_CHOICES = 64
LOWEST_LOGIT = -math.inf
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign

# Shared memory: the sums of `block_sum`; numbers of the chosen; what the chosen raise,
# by ascending number; the largest logit; what `filling.py` needs: the gains of the chosen,
# who of them is missed, who may leave, whether somebody comes, and whether somebody goes to the
# CPU; the key of every expert, and of none up to whole warps.
_NUMBERS = 4 * WARP
_RAISED = _NUMBERS + 4 * _MOST_CHOICES
_MOST = _RAISED + 4 * _MOST_CHOICES
_GAINS = _MOST + 16
_MISSED = _GAINS + 4 * _MOST_CHOICES
_LISTS = _MISSED + 4 * _MOST_CHOICES
_COMING = _LISTS + LISTS_BYTES
_BY_CPU = _COMING + 4
_KEYS = _COMING + 16


def route_bytes(threads: int) -> int:
    """Return how much shared memory `route_row` has for a block of so many threads, from 0 on."""
    return _KEYS + 4 * threads


def without_nan(logit: Any) -> Any:
    """Return a logit, the lowest there is in place of a NaN."""
    return logit if logit >= f32(LOWEST_LOGIT) else f32(LOWEST_LOGIT)


def key_of(logit: Any) -> Any:
    """Return an integer that is larger than another one where the logit is; none is a NaN."""
    bits = bits_of_f32(logit + f32(0.0))  # -0 is 0
    return i32(bits ^ (bits >> 31 & _MAGNITUDE))


def experts_before(own: Any, key: Any, keys: Any, first: Any, count: int) -> Any:
    """Return how many of `count` experts from `first` on come before one's own, of whose key this
    is, without equal ones of one's own four (`equals_before`); first and count are multiples of
    four, and where there are no experts up to there, their keys are the lowest.

    Fours before one's own count where they are not less, those behind where they are larger.
    """
    counts, other, four = (i32(0), i32(0), i32(0), i32(0)), i64(0), i32((own & -4) - first)
    keys += 4 * first
    while other < count:
        least = i32(key - 1 if i32(other) < four else key)
        a, b, c, d = shared_load_4xi32(keys + 4 * other)
        counts = _counted(counts, a > least, b > least, c > least, d > least)
        other += 4
    return i32(i32(counts[0] + counts[1]) + i32(counts[2] + counts[3]))


def equals_before(own: Any, key: Any, keys: Any) -> Any:
    """Return how many experts of one's own four have the same key and a lower number."""
    a, b, c, _ = shared_load_4xi32(keys + 4 * (own & -4))
    place = i32(own & 3)
    found = i32(1 if place > 0 and a == key else 0)
    found += 1 if place > 1 and b == key else 0
    return i32(found + (1 if place > 2 and c == key else 0))


def _counted(counts: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return four numbers, which do not wait for each other, and 1 more where a condition holds."""
    first, second, third, last = counts
    return (
        i32(first + 1) if a else first,
        i32(second + 1) if b else second,
        i32(third + 1) if c else third,
        i32(last + 1) if d else last,
    )


def chosen_ids(rank: Any, expert: Any, forced: Any, position: int, top_k: Any) -> Any:
    """Return the place of an expert among the chosen, or top_k or more: it is none of them.

    rank       how many experts come before it
    forced     of the table: what a row at a position chooses in place of the best; 0: the best
    position   address of the row's
    """
    if forced == 0:
        return rank
    line = forced + 2 * top_k * load_i64(position)
    found, place = i64(top_k), i64(0)
    while place < top_k:
        found = place if i64(load_u16(line + 2 * place)) == expert else found
        place += 1
    return found


def place_by_number(number: Any, numbers: Any, top_k: Any) -> Any:
    """Return how many of the chosen, whose numbers are there in shared memory, have a lower one."""
    place, other = i64(0), i64(0)
    while other < top_k:
        place += 1 if shared_load_i32(numbers + 4 * other) < number else 0
        other += 1
    return place


def _sum_of_chosen(top_k: Any) -> Any:
    total, place = f32(0.0), i64(0)
    while place < top_k:
        total += shared_load_f32(_RAISED + 4 * place)
        place += 1
    return total


def _somebody_wants(top_k: Any) -> Any:
    """Return whether one of the chosen would gain by a slot."""
    found, other = False, i64(0)
    while other < top_k:
        found = found or shared_load_f32(_GAINS + 4 * other) > f32(LOWEST)
        other += 1
    return found


@cache
def expert_of(decides: bool, pools: bool) -> Function:
    """Return a device function: what a thread has to know of its expert when it is chosen.

    of(thread, experts, addresses, homes, seen, plan) -> address and home, the number of the window
    and of the last one that used the expert, its order, heat and gain by the plan, and the share
    that the CPU computes; for a thread without an expert, and of a plan by which nobody comes,
    numbers that mean nothing

    All this was written between windows or by the last one, so whoever looks it up need not wait
    for the launch before.
    """

    def of(thread: Any, experts: Any, addresses: int, homes: int, seen: int, plan: int) -> Any:
        is_expert = thread < experts
        address = load_i64(addresses + 8 * thread) if is_expert else i64(0)
        home = load_i64(homes + 8 * thread) if is_expert else i64(0)
        window = load_i64(plan + WINDOW)
        planned = load_i64(plan + OFFERED) + load_i64(plan + LISTED) if decides else i64(0)
        fills = is_expert and planned > 0
        used = load_i64(seen + 8 * thread) if fills else i64(0)
        order = order_of(plan, thread, experts) if fills else i32(NOT_LISTED)
        heat = heat_of(plan, thread, experts) if fills else f32(0.0)
        gain = gain_of(plan, thread) if fills and address == home else f32(LOWEST)
        share = cpu_share_of(plan) if pools else i64(0)
        return address, home, window, used, order, heat, gain, share

    return of


@cache
def route_row(experts: int, top_k: int, decides: bool, pools: bool) -> Function:
    """Return a device function that chooses so many experts of a row, in a block of as many threads
    as there are experts at least.

    decides   who comes to a slot as well, which takes that there is a single row
    pools     and who goes to the CPU

    route(row, own, logits, position, forced, addresses, homes, seen, plan, use, tally, chosen,
    shares, blobs, sources, renormalise); own is a thread's, from `expert_of`, and position the
    address of the row's
    """

    padded = -(-experts // 4) * 4

    def route(
        row: Any,
        own: Any,
        logits: int,
        position: int,
        forced: int,
        addresses: int,
        homes: int,
        seen: int,
        plan: int,
        use: int,
        tally: int,
        chosen: int,
        shares: int,
        blobs: int,
        sources: int,
        renormalise: int,
    ) -> None:
        address, home, window, used, order, heat, gain, cpu_share = own
        thread, lowest = i64(thread_index()), f32(LOWEST_LOGIT)
        is_expert, is_miss = thread < experts, address == home
        logit = load_f32(logits + 4 * (experts * row + thread)) if is_expert else lowest
        ranked = without_nan(logit)
        key = key_of(ranked)
        shared_store_i32(_KEYS + 4 * thread, key)
        barrier()
        rank = i64(top_k)
        if is_expert:
            rank = i64(experts_before(thread, key, _KEYS, 0, padded))
            rank += equals_before(thread, key, _KEYS)
        if rank == 0:
            shared_store_f32(_MOST, ranked)
            shared_store_i32(_COMING, i32(0))
            shared_store_i32(_BY_CPU, i32(0))
        rank = chosen_ids(rank, thread, forced, position, top_k)
        is_chosen = rank < top_k
        if is_chosen:
            shared_store_i32(_NUMBERS + 4 * rank, i32(thread))
            store_i64(seen + 8 * thread, window)
        if decides:
            if is_chosen:
                shared_store_f32(_GAINS + 4 * rank, gain)
                if pools:
                    shared_store_i32(_MISSED + 4 * rank, i32(1 if is_miss else 0))
            leaves = may_leave(not is_miss, is_chosen, used, window)
            list_victim(_LISTS, thread, order, heat, leaves)
        barrier()
        by_cpu = False
        if pools and is_chosen and is_miss and cpu_share > 0:
            by_cpu = goes_to_cpu(thread, gain, cpu_share, _NUMBERS, _GAINS, _MISSED, top_k)
            if by_cpu:
                shared_store_i32(_BY_CPU, i32(ROW_BY_CPU))
        slot, marks = i64(0), i64(0)
        if decides and (cpu_share > 0 or _somebody_wants(top_k)):
            if is_chosen and gain > f32(LOWEST) and not by_cpu:
                slot = slot_for(
                    thread, gain, _NUMBERS, _GAINS, top_k, _LISTS, plan, addresses, homes
                )
                if slot != 0:
                    shared_store_i32(_COMING, i32(ROW_COMES))
            barrier()
            marks = i64(shared_load_i32(_COMING)) | i64(shared_load_i32(_BY_CPU))
        raised = exp(logit - shared_load_f32(_MOST)) if is_expert else f32(0.0)
        place = i64(0)
        if is_chosen:
            place = place_by_number(i32(thread), _NUMBERS, top_k)
            choice = top_k * row + place
            store_i64(chosen + 8 * choice, thread)
            word = address + (IN_HOST_MEMORY if is_miss else 0) + (BY_CPU if by_cpu else 0)
            if slot != 0:
                word = slot + COMES
                store_i64(sources + 8 * choice, home)
            if by_cpu:
                store_i64(sources + 8 * choice, i64(NOT_POSTED))
            store_i64(blobs + 8 * choice, word + marks)
            shared_store_f32(_RAISED + 4 * place, raised)
            add_i64(use + 8 * thread, i64(1))
            add_i64(tally + (8 if is_miss else 0), i64(1))
        total = block_sum(raised, thread, experts + WARP - 1 >> 5)
        if is_chosen:
            share = raised / total
            if renormalise != 0:
                share = share / (_sum_of_chosen(top_k) / total)
            store_f32(shares + 4 * (top_k * row + place), share)

    return route


@cache
def _route(experts: int, top_k: int, decides: bool, pools: bool) -> Function:
    """Return the kernel `route`."""
    of_thread, route_one = expert_of(decides, pools), route_row(experts, top_k, decides, pools)

    def route(
        rows: int,
        logits: int,
        positions: int,
        forced: int,
        addresses: int,
        homes: int,
        seen: int,
        plan: int,
        use: int,
        tally: int,
        chosen: int,
        shares: int,
        blobs: int,
        sources: int,
        _experts: int,
        _top_k: int,
        renormalise: int,
    ) -> None:
        row, count = i64(block_x()), load_i64(rows)
        own = of_thread(i64(thread_index()), experts, addresses, homes, seen, plan)
        await_previous()
        if row < count:
            route_one(
                row,
                own,
                logits,
                positions + 8 * row,
                forced,
                addresses,
                homes,
                seen,
                plan,
                use,
                tally,
                chosen,
                shares,
                blobs,
                sources,
                renormalise,
            )

    return route


def _grid(_: Arguments, most_rows: int) -> Grid:
    return most_rows, 1, 1


@cache
def _of_shape(experts: int, top_k: int, decides: bool, pools: bool) -> GpuKernel:
    threads = WARP * blocks_of(experts, WARP)
    shared_bytes = route_bytes(threads)
    name = f"route_{experts}_{top_k}{'_alone' if decides else ''}{'_pool' if pools else ''}"
    route = _route(experts, top_k, decides, pools)
    return GpuKernel(name, route, threads, _grid, lambda _: shared_bytes)


def route_kernel(experts: int, top_k: int, *, decides: bool, pools: bool = False) -> GpuKernel:
    """Return `route` of `routed.py`: a block for each row, a thread for each expert.

    decides   who comes to a slot: for a single row
    pools     and who goes to the CPU: for a row that decides

    UnsupportedDevice for more experts than a block has threads, or more of them for each row than
    a block has room for.
    """
    if experts > _MOST_EXPERTS or top_k > _MOST_CHOICES:
        raise UnsupportedDevice(
            f"the router of a card chooses at most {_MOST_CHOICES} of {_MOST_EXPERTS:,} experts, "
            f"not {top_k:,} of {experts:,}",
            hint="compute on the processor: --device host",
        )
    return _of_shape(experts, top_k, decides, pools)
