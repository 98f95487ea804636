"""Find out which expert a block multiplies with before the launch that chooses has ended.

The last block of `router` has much to do behind the logits: shares, counts, tables. What blocks of
`expert_gate_up` need of it is the address of one expert. So each output of the router is *posted*
as soon as it is there, in one word with a stamp that no other layer of a step has. These blocks,
which wait on the card already, look for all of them, rank them as `routing.py` does, and ask for
their weights. Only then do they wait for the launch.

That is right where the launch lets nobody come to a slot: the plan says so. Otherwise, and where
routes are forced, blocks wait first.

    posts   int64 (experts,), 0 when a step begins: the bits of a logit, the stamp in the upper half
    stamp   1, 2, ... of the layers that have experts

A launch begins when all blocks of the one in front run, or have ended, so nobody keeps those from
running that are waited for. Where a launch stands alone for once, as it may where it is measured,
blocks look for a while, and then wait like others.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.fill_plans import LISTED, OFFERED
from strata_nb.kernels.gpu.intrinsics import (
    barrier,
    bits_of_f32,
    f32,
    f32_of_bits,
    i32,
    i64,
    load_i64,
    post_i64,
    posted_i64,
    shared_load_i32,
    shared_load_i64,
    shared_store_i32,
    shared_store_i64,
    shuffle_xor_i32,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.routing import (
    LOWEST_LOGIT,
    equals_before,
    experts_before,
    key_of,
    place_by_number,
    without_nan,
)
from strata_nb.kernels.table import ROWS_WORDS

_FOUR = 4
_MOST_PARTS = 4  # threads of an expert
_STAMP_BITS = 32
_LOOKS = 256  # at most, of half a microsecond or so


def posts_at(rows: int) -> int:
    """Return the address of the posts of a step, of that of its number of rows."""
    return rows + 8 * ROWS_WORDS


# -- in kernels ------------------------------------------------------------------------------------


def post_logit(posts: int, expert: Any, logit: Any, stamp: Any) -> None:
    """Post the logit of an expert."""
    post_i64(posts + 8 * expert, i64(bits_of_f32(logit)) & 0xFFFFFFFF | i64(stamp) << _STAMP_BITS)


def may_choose_early(plan: int, forced: int) -> Any:
    """Return whether the choice follows from the logits alone, and no address changes by it."""
    return forced == 0 and load_i64(plan + OFFERED) + load_i64(plan + LISTED) == 0


class EarlyChoice(NamedTuple):
    """Hold a device function that chooses, and how many bytes of shared memory it needs.

    find   (posts, stamp, addresses, thread, choice, here): the address of the expert of a choice,
           0 where logits do not come; here is the number of rows, 1. All threads take part
    """

    find: Function
    shared_bytes: int


@cache
def early_choice(experts: int, top_k: int, threads: int, place: int) -> EarlyChoice:
    """Return how experts are chosen early by a block; shared memory is there from `place` on, a
    multiple of 16.

    Neighbouring threads rank an expert together, as many as there are for each.
    """
    parts = _MOST_PARTS
    while parts * experts > threads:
        parts //= 2
    each = -(-experts // (_FOUR * parts)) * _FOUR  # experts that a thread looks at
    padded = each * parts
    part_bits = parts.bit_length() - 1
    word_at = place + 4 * padded
    late_at = word_at + 8
    numbers = late_at + 4

    def wait(posts: int, stamp: Any, thread: Any, here: Any) -> None:
        """Bring the key of a thread's expert to shared memory."""
        logit = f32(LOWEST_LOGIT)
        if thread < experts:
            post, looks = posts + 8 * thread, _LOOKS * here
            word = posted_i64(post)
            while word >> _STAMP_BITS != stamp and looks > 1:
                word = posted_i64(post)
                looks -= 1
            if word >> _STAMP_BITS != stamp:
                shared_store_i32(late_at, i32(1))
            logit = without_nan(f32_of_bits(i32(word)))
        shared_store_i32(place + 4 * thread, key_of(logit))

    def sum_of_parts(count: Any) -> Any:
        if parts > 1:
            count += shuffle_xor_i32(count, 1)
        if parts > 2:
            count += shuffle_xor_i32(count, 2)
        return count

    def find(posts: int, stamp: Any, addresses: int, thread: Any, choice: Any, here: Any) -> Any:
        expert, part = thread >> part_bits, thread & parts - 1
        is_expert = expert < experts
        address = load_i64(addresses + 8 * expert) if is_expert else i64(0)
        if thread == 0:
            shared_store_i32(late_at, i32(0))
        barrier()
        if thread < padded:
            wait(posts, stamp, thread, here)
        barrier()
        if shared_load_i32(late_at) != 0:
            return i64(0)
        rank = i32(0)
        if is_expert:
            key = shared_load_i32(place + 4 * expert)
            rank = experts_before(expert, key, place, each * part, each)
            rank = i32(rank + (equals_before(expert, key, place) if part == 0 else i32(0)))
        rank = i64(sum_of_parts(rank))
        is_chosen = is_expert and part == 0 and rank < top_k
        if is_chosen:
            shared_store_i32(numbers + 4 * rank, i32(expert))
        barrier()
        if is_chosen and place_by_number(i32(expert), numbers, top_k) == choice:
            shared_store_i64(word_at, address)
        barrier()
        return shared_load_i64(word_at)

    return EarlyChoice(find, 4 * padded + 12 + 4 * top_k)
