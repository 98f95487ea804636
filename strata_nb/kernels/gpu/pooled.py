"""Experts of a single row that the CPU computes while the card computes others.

The CPU reads experts where they are, so those that are computed there need not cross the link: the
two read the same memory at the same time. `route` says who goes to the CPU (BY_CPU of a word of
`blobs`), and in all words of the row that somebody does (ROW_BY_CPU): most rows miss little, and
then nobody looks any further. The CPU's side is `cpu_pool.py`, and between them is a mailbox
(`kernels/mailbox.py`).

    expert_gate_up   the first block of the first such choice posts the row and all such choices;
                     all blocks of such choices leave
    expert_down      passes over them. The last block of all waits for the answer, adds it to the
                     row, and then norms it, where a norm follows

Reads of host memory stand in one queue with what is written there, and those of a launch take a
hundred microseconds. So the message goes first: who reads experts over the link waits until it is
on its way, two microseconds or so, or for POST_NS at most. On one H200 without that, half of what
the CPU needed passed before it saw the message.

So the card waits once for a layer, behind all that it has to do itself, and for nothing in a layer
that posted nothing. It does not wait for ever: after DEADLINE_NS, or when the mailbox says ABORT,
it notes an error (`kernels/pool_state.py`) that comes back with the window, whose results are
wrong.

What a row becomes depends on who computed which expert, in the order of a sum.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import TensorType
from strata_nb.kernels import mailbox
from strata_nb.kernels.gpu.expert_down import passing_down_kernel
from strata_nb.kernels.gpu.expert_gate_up import GATE_UP_THREADS, leaving_gate_up_kernel
from strata_nb.kernels.gpu.filling import BY_CPU, COMES, IN_HOST_MEMORY, NOT_POSTED, ROW_BY_CPU
from strata_nb.kernels.gpu.intrinsics import (
    await_previous,
    barrier,
    bits_of_f32,
    block_z,
    i32,
    i64,
    load_4xf32,
    load_4xi32,
    load_f32,
    load_i64,
    load_system_i64,
    nanoseconds,
    shared_load_i32,
    shared_store_i32,
    store_4xi32,
    store_i64,
    store_system_i64,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Function, GpuKernel
from strata_nb.kernels.pool_state import (
    ABORTED,
    ALONE_NS,
    BESIDE,
    CHOICES,
    DEADLINE_NS,
    ERROR,
    LATE,
    POSTED_AT,
    POSTS,
    WAITED_NS,
)

POST_NS = 20_000  # that others let pass at most before they read over the link
_ABORT_EVERY = 8  # looks at the answer: each takes as long as the way to the host and back


class PoolPlaces(NamedTuple):
    """Say where a card finds what it shares with the CPU.

    box     the mailbox, in memory of the host
    state   words of `pool_state.py`, in the card's own
    idle    there too: as many bytes as eight rows of any down have, which are read in place of an
            expert that the CPU computes
    """

    box: int
    state: int
    idle: int


def _number_by_cpu(blobs: int, count: Any) -> Any:
    """Return how many of the first choices of a row go to the CPU."""
    return _number_of(blobs, count, BY_CPU, BY_CPU)


def _number_of(blobs: int, count: Any, mask: Any, least: Any) -> Any:
    """Return of how many of the first choices of a row the word has `least` at least, masked."""
    found, k = i64(0), i64(0)
    while k < count:
        found += 1 if load_i64(blobs + 8 * k) & mask >= least else 0
        k += 1
    return found


def _first_by_cpu(blobs: int, count: Any) -> Any:
    """Return the first of so many choices that goes to the CPU, the number of all if none does."""
    first, k = i64(count), i64(count) - 1
    while k >= 0:
        first = k if load_i64(blobs + 8 * k) & BY_CPU != 0 else first
        k -= 1
    return first


def _await_post(place: int, thread: Any) -> None:
    """Wait until the message is on its way, of whose first choice `place` is that in `sources`."""
    if thread == 0:
        begin = nanoseconds()
        while load_system_i64(place) == NOT_POSTED and nanoseconds() - begin < POST_NS:
            pass
    barrier()


def _pooled(kernel: GpuKernel) -> str:
    """Return the name of a kernel of experts that leaves some of them to the CPU."""
    return kernel.name.replace("expert_", "pool_", 1)


# -- posting ---------------------------------------------------------------------------------------


@cache
def _poster(threads: int) -> Function:
    """Return a device function by which a block posts a layer's message.

    posted   address of the choice in `sources`, which says NOT_POSTED before
    """

    def post(
        blobs: int,
        chosen: int,
        shares: int,
        x: int,
        row_bytes: int,
        top_k: int,
        layer: int,
        box: int,
        state: int,
        posted: int,
        thread: int,
    ) -> None:
        place = 16 * thread
        while place < row_bytes:
            a, b, c, d = load_4xi32(x + place)
            store_4xi32(box + mailbox.ROW + place, a, b, c, d)
            place += 16 * threads
        if thread < top_k and load_i64(blobs + 8 * thread) & BY_CPU != 0:
            number = _number_by_cpu(blobs, thread)
            choice = box + mailbox.CHOICES + mailbox.CHOICE_BYTES * number
            store_i64(choice, load_i64(chosen + 8 * thread))
            share = bits_of_f32(load_f32(shares + 4 * thread))
            store_i64(choice + mailbox.SHARE, i64(share))
        count = _number_by_cpu(blobs, top_k)
        if thread == 0:
            store_i64(box + mailbox.LAYER, layer)
            store_i64(box + mailbox.COUNT, count)
        error, number = load_i64(state + ERROR), load_i64(state + POSTS) + 1
        barrier()
        now = nanoseconds() if thread == 0 else i64(0)
        if thread == 0 and error == 0:
            store_system_i64(box + mailbox.POSTED, number)
        if thread == 0:
            store_i64(posted, i64(NOT_POSTED + 1))
        if thread == 0 and error == 0:  # what nobody waits for
            store_i64(state + POSTS, number)
            store_i64(state + POSTED_AT, now)
            missed = _number_of(blobs, top_k, BY_CPU | COMES | IN_HOST_MEMORY, 1)
            store_i64(state + CHOICES, load_i64(state + CHOICES) + count)
            store_i64(state + BESIDE, load_i64(state + BESIDE) + missed - count)

    return post


@cache
def _leaver(threads: int) -> Function:
    """Return a device function by which a block leaves a choice to the CPU, or waits for the
    message where it will read over the link."""
    post = _poster(threads)

    def leaves(
        word: Any,
        blobs: int,
        sources: int,
        x: int,
        row_bytes: int,
        top_k: int,
        chosen: int,
        shares: int,
        layer: int,
        box: int,
        state: int,
        choice: Any,
        thread: Any,
    ) -> Any:
        if word & ROW_BY_CPU != 0:
            first = _first_by_cpu(blobs, top_k)
            if word & BY_CPU != 0 and block_z() == 0 and choice == first:
                posted = sources + 8 * choice
                post(blobs, chosen, shares, x, row_bytes, top_k, layer, box, state, posted, thread)
            if word & BY_CPU == 0 and word & (IN_HOST_MEMORY | COMES) != 0:
                _await_post(sources + 8 * first, thread)
        return word & BY_CPU != 0

    return leaves


@cache
def pool_gate_up_kernel(gate: TensorType, up: TensorType, values: int, outputs: int) -> GpuKernel:
    """Return `pool_gate_up` of `routed.py`: `expert_gate_up` of packed weights, which posts."""
    kernel = leaving_gate_up_kernel(gate, up, values, outputs, _leaver(GATE_UP_THREADS))
    return kernel._replace(name=_pooled(kernel))


# -- the answer ------------------------------------------------------------------------------------


def _await_answer(box: int, state: int) -> Any:
    """Wait for the answer to the latest post; return 1 if it is there, 0 where it will not come,
    and when the wait began and ended."""
    begin, number = nanoseconds(), load_i64(state + POSTS)
    known = load_i64(state + ERROR)
    error, now, looks = known, begin, i64(0)
    while error == 0 and load_system_i64(box + mailbox.ANSWERED) < number:
        now, looks = nanoseconds(), looks + 1
        if now - begin > DEADLINE_NS:
            error = i64(LATE)
        elif looks % _ABORT_EVERY == 0 and load_system_i64(box + mailbox.ABORT) != 0:
            error = i64(ABORTED)
    if error != known:
        store_i64(state + ERROR, error)
        store_system_i64(box + mailbox.ABORT, 1)
    return i32(1 if error == 0 else 0), begin, now


def _count_wait(state: int, begin: Any, end: Any) -> None:
    """Note how long the card needed for its own part, and how long it then waited."""
    store_i64(state + ALONE_NS, load_i64(state + ALONE_NS) + begin - load_i64(state + POSTED_AT))
    store_i64(state + WAITED_NS, load_i64(state + WAITED_NS) + end - begin)


def _add_four(place: int, four: Any, more: Any) -> None:
    """Store the sums of four values and four others."""
    a, b, c, d = four
    e, f, g, h = more
    store_4xi32(
        place, bits_of_f32(a + e), bits_of_f32(b + f), bits_of_f32(c + g), bits_of_f32(d + h)
    )


@cache
def answer_taker(width: int, threads: int, place: int) -> Function:
    """Return a device function by which the last block of a launch adds the answer to a row.

    take(marks, y, box, state, thread); marks is a word of the row in `blobs`; a barrier must follow
    before y is read

    width   of the row, a multiple of 32
    place   offset of four bytes of shared memory

    A load from the host takes more than a microsecond. Each thread has two of four values under way
    before it stores anything, and the time is noted when all is done that others wait for.
    """
    answer, fours = mailbox.answer_offset(width), width // 4

    def take(marks: Any, y: int, box: int, state: int, thread: int) -> None:
        if marks & ROW_BY_CPU == 0:
            return
        begin, end = i64(0), i64(0)
        if thread == 0:
            is_there, begin, end = _await_answer(box, state)
            shared_store_i32(place, is_there)
        barrier()
        if shared_load_i32(place) != 0:
            four = thread
            while four < fours:
                other = min(four + threads, fours - 1)
                first = load_4xf32(box + answer + 16 * four)
                second = load_4xf32(box + answer + 16 * other)
                here, there = load_4xf32(y + 16 * four), load_4xf32(y + 16 * other)
                _add_four(y + 16 * four, here, first)
                if four + threads < fours:
                    _add_four(y + 16 * other, there, second)
                four += 2 * threads
        if thread == 0:
            _count_wait(state, begin, end)

    return take


@cache
def pool_down_kernel(kind: TensorType, values: int, outputs: int, top_k: int) -> GpuKernel:
    """Return `pool_down` of `routed.py` without its end: `expert_down` of packed weights, which
    passes over the experts that the CPU computes.

    Whoever makes it a launch adds the answer: `last_norm.py`, where a norm follows, or
    `pool_answers.py`.
    """
    kernel = passing_down_kernel(kind, values, outputs, top_k)
    product = kernel.function

    def pool_down(
        rows: int,
        blobs: int,
        sources: int,
        inner: int,
        shares: int,
        y: int,
        down_offset: int,
        top_k: int,
        values: int,
        outputs: int,
        box: int,
        state: int,
        idle: int,
    ) -> None:
        left = i64(top_k)
        if load_i64(rows) > 0 and load_i64(blobs) & ROW_BY_CPU != 0:
            _await_post(sources + 8 * _first_by_cpu(blobs, top_k), i64(thread_index()))
            left -= _number_by_cpu(blobs, top_k)
        if left > 0:
            product(rows, blobs, sources, inner, shares, y, down_offset, outputs, idle)
        else:
            await_previous()

    return kernel._replace(name=_pooled(kernel), function=pool_down)
