"""Give missed experts slots on a card, within the window that misses them.

The host plans ahead (`fill_plans.py`), and a card does as `cache/filling.py` says, layer by layer,
because only it knows in time what a window misses: bytes that cross the link to be multiplied with
are written to the slot as they pass. Its table of addresses is the truth while windows run.

    route         one row: its block, which has the choices in shared memory, decides as well
    expert_fill   more rows: a block of its own behind `route`, which knows the choices of all rows
    expert_gate_up, expert_down   bring what comes: each block copies the part of a blob that it is
                  about to read, and then reads it in the slot

So blocks that multiply know of one place to read from, whatever the type of the weights is, each
byte crosses the link once, and nobody waits for another block. That a block writes and reads again
takes a microsecond or two; an expert takes fifty to cross. Of rows that choose the same expert the
first brings it, and the others read it in host memory, as who finds no slot does.

What is written to a slot is read by other blocks in later windows only. Who leaves has not been
used in this window, so nobody reads its slot while it is written; and the windows before have
ended, because of three launches in a row the first has ended before the third begins.

    blobs     int64 (rows, top_k): besides the address, COMES where the blob is brought first, and
              ROW_COMES where that of any choice of the row is; ROW_BY_CPU likewise
    sources   int64 (rows, top_k): where a blob that comes is brought from; else not written

Of a single row some of the missed may be computed by the CPU instead (`pooled.py`): BY_CPU. In
`sources` they have NOT_POSTED, until something else says that the message is on its way.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from strata_nb.fill_plans import (
    COLUMNS,
    CPU_SHARE,
    LISTED,
    MOST_LISTED,
    OFFERED,
    SHARE_BITS,
    SHARE_UNITS,
    SLOTS,
    STAYS,
    WINDOW,
)
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    f32,
    i32,
    i64,
    load_4xi32,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    shared_load_f32,
    shared_load_i32,
    shared_store_f32,
    shared_store_i32,
    store_4xi32,
    store_i8,
    store_i64,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function, GpuKernel, blocks_of

# Added to the address of a blob, which is a multiple of 256.
IN_HOST_MEMORY, COMES, ROW_COMES, BY_CPU, ROW_BY_CPU = 1, 2, 4, 8, 16
NOT_POSTED = 0
ADDRESS = -256  # of a word of `blobs`: those bits that are the address

NOBODY = -1
LOWEST = -math.inf  # the gain of an expert that wants no slot

LISTS_BYTES = 8 * MOST_LISTED  # of shared memory that `list_victim` writes


# -- who comes, and where to -----------------------------------------------------------------------


def gain_of(plan: int, expert: Any) -> Any:
    """Return what an expert would be worth if it were used now."""
    return load_f32(plan + COLUMNS + 4 * expert)


def heat_of(plan: int, expert: Any, experts: Any) -> Any:
    """Return what an expert is worth to its slot."""
    return load_f32(plan + COLUMNS + 4 * (experts + expert))


def order_of(plan: int, expert: Any, experts: Any) -> Any:
    """Return the place of an expert among those that may leave."""
    return load_i32(plan + COLUMNS + 4 * (2 * experts + expert))


def cpu_share_of(plan: int) -> Any:
    """Return which share of the missed goes to the CPU."""
    return load_i64(plan + CPU_SHARE)


def list_victim(lists: Any, expert: Any, order: Any, heat: Any, may_leave: Any) -> None:
    """Write an expert that may leave, or NOBODY, at its place in the order of all.

    lists   int32 and float32 (MOST_LISTED,) in shared memory
    """
    if order < MOST_LISTED:
        shared_store_i32(lists + 4 * order, i32(expert) if may_leave else i32(NOBODY))
        shared_store_f32(lists + 4 * (MOST_LISTED + order), heat)


def may_leave(is_resident: Any, is_chosen: Any, seen: Any, window: Any) -> Any:
    """Return whether an expert may leave that was last used by the window `seen`."""
    return is_resident and not is_chosen and seen + STAYS < window


def goes_to_cpu(
    expert: Any, gain: Any, share: Any, numbers: Any, gains: Any, missed: Any, count: Any
) -> Any:
    """Return whether a missed expert is one of those that the CPU computes (`cpu_count`).

    They are the last in the order in which the missed come to slots.

    share            of the missed that the CPU computes, as a plan has it
    numbers, gains   int32 and float32 (count,) in shared memory: of the chosen
    missed           int32 (count,) there: 1 of a miss, 0 of others
    """
    all_missed, behind, other = i64(0), i64(0), i64(0)
    while other < count:
        is_missed = i64(shared_load_i32(missed + 4 * other))
        found = shared_load_f32(gains + 4 * other)
        is_higher = i64(shared_load_i32(numbers + 4 * other)) > expert
        all_missed += is_missed
        behind += is_missed if found < gain or (found == gain and is_higher) else 0
        other += 1
    most = all_missed if share == SHARE_UNITS else all_missed - 1
    return behind < min((share * (all_missed + 1) - 1) >> SHARE_BITS, most)


def slot_for(
    expert: Any,
    gain: Any,
    numbers: Any,
    gains: Any,
    count: Any,
    lists: Any,
    plan: int,
    addresses: int,
    homes: int,
) -> Any:
    """Return the address of the slot that a missed expert gets, which the table names then; or 0.

    numbers, gains   int32 and float32 (count,) in shared memory: the missed, of whom the one with
                     the largest gain comes first, and of equal ones the lowest number. What is no
                     miss has the gain LOWEST
    lists            what `list_victim` wrote
    """
    place, other = i64(0), i64(0)
    while other < count:
        found = shared_load_f32(gains + 4 * other)
        is_lower = shared_load_i32(numbers + 4 * other) < expert
        place += 1 if found > gain or (found == gain and is_lower) else 0
        other += 1
    offered = load_i64(plan + OFFERED)
    slot = i64(0)
    if place < offered:
        slot = load_i64(plan + SLOTS + 8 * place)
    else:
        place -= offered
        listed, at, victim = load_i64(plan + LISTED), i64(0), i64(NOBODY)
        while at < listed:
            found_here = i64(shared_load_i32(lists + 4 * at))
            if found_here != NOBODY:
                if place == 0 and gain >= shared_load_f32(lists + 4 * (MOST_LISTED + at)):
                    victim = found_here
                place -= 1
            at = at + 1 if place >= 0 else listed
        if victim != NOBODY:
            slot = load_i64(addresses + 8 * victim)
            store_i64(addresses + 8 * victim, load_i64(homes + 8 * victim))
    if slot != 0:
        store_i64(addresses + 8 * expert, slot)
    return slot


# -- of several rows -------------------------------------------------------------------------------

_MOST_CHOICES = 512
_GAINS = 4 * _MOST_CHOICES
_LISTS = 2 * _GAINS
_SHARED_BYTES = _LISTS + LISTS_BYTES


def _first_of(expert: Any, count: Any) -> Any:
    """Return the first choice of an expert, `count` where there is none."""
    first, other = i64(count), i64(count) - 1
    while other >= 0:
        first = other if i64(shared_load_i32(4 * other)) == expert else first
        other -= 1
    return first


def _mark_row(blobs: int, row: Any, top_k: Any) -> None:
    """Let all choices of a row say that something comes, where something does."""
    marks, place = i64(0), row * top_k
    last = place + top_k
    while place < last:
        marks |= load_i64(blobs + 8 * place) & COMES
        place += 1
    place = row * top_k
    while marks != 0 and place < last:
        store_i64(blobs + 8 * place, load_i64(blobs + 8 * place) | ROW_COMES)
        place += 1


@cache
def expert_fill_kernel(experts: int) -> GpuKernel:
    """Return `expert_fill` for so many experts, which has a thread for each of them."""
    threads = WARP * blocks_of(experts, WARP)

    def expert_fill(
        rows: int,
        addresses: int,
        homes: int,
        seen: int,
        plan: int,
        chosen: int,
        blobs: int,
        sources: int,
        experts: int,
        top_k: int,
    ) -> None:
        thread = i64(thread_index())
        await_previous()
        if load_i64(plan + OFFERED) + load_i64(plan + LISTED) == 0:
            return
        here = load_i64(rows)
        count = here * top_k
        choice = thread
        while choice < count:
            shared_store_i32(4 * choice, i32(load_i64(chosen + 8 * choice)))
            shared_store_f32(_GAINS + 4 * choice, f32(LOWEST))
            choice += threads
        barrier()
        is_expert = thread < experts
        first = _first_of(thread, count) if is_expert else count
        address = load_i64(addresses + 8 * thread) if is_expert else i64(0)
        home = load_i64(homes + 8 * thread) if is_expert else i64(0)
        gain = f32(LOWEST)
        if is_expert:
            used, window = load_i64(seen + 8 * thread), load_i64(plan + WINDOW)
            leaves = may_leave(address != home, first < count, used, window)
            order, heat = order_of(plan, thread, experts), heat_of(plan, thread, experts)
            list_victim(_LISTS, thread, order, heat, leaves)
            if first < count and address == home:
                gain = gain_of(plan, thread)
                shared_store_f32(_GAINS + 4 * first, gain)
        barrier()
        if gain > f32(LOWEST):
            slot = slot_for(thread, gain, 0, _GAINS, count, _LISTS, plan, addresses, homes)
            if slot != 0:
                store_i64(blobs + 8 * first, slot + COMES)
                store_i64(sources + 8 * first, home)
        barrier()
        if thread < here:
            _mark_row(blobs, thread, top_k)

    return GpuKernel(
        f"expert_fill_{threads}",
        expert_fill,
        threads,
        lambda _, __: (1, 1, 1),
        lambda _: _SHARED_BYTES,
    )


# -- bringing it -----------------------------------------------------------------------------------


@cache
def bringer(in_sixteens: bool, threads: int) -> Function:
    """Return a device function: a block of threads copies bytes of a blob.

    bring(word, source, before, size, thread); word is one of `blobs`, source that of `sources`, and
    `before` where the bytes begin in the blob

    in_sixteens   they begin at multiples of 16

    A barrier must follow. Behind it the word is loaded anew: a load that knows its address may be
    moved in front of the copy.
    """

    def bring(word: int, source: int, before: int, size: int, thread: int) -> None:
        target, source = (word & ADDRESS) + before, source + before
        whole = size & -16 if in_sixteens else i64(0)
        place = 16 * thread
        while place < whole:
            a, b, c, d = load_4xi32(source + place)
            store_4xi32(target + place, a, b, c, d)
            place += 16 * threads
        place = whole + thread
        while place < size:
            store_i8(target + place, load_u8(source + place))
            place += threads

    return bring


@cache
def row_bringer(in_sixteens: bool, threads: int) -> Function:
    """Return a device function: as `bringer`, of all those of a row's choices that come.

    bring(blobs, sources, top_k, before, size, thread); blobs and sources are the row's
    """
    bring_one = bringer(in_sixteens, threads)

    def bring(blobs: int, sources: int, top_k: int, before: int, size: int, thread: int) -> None:
        k = i64(0)
        while k < top_k:
            word = load_i64(blobs + 8 * k)
            if word & COMES != 0:
                bring_one(word, load_i64(sources + 8 * k), before, size, thread)
            k += 1

    return bring
