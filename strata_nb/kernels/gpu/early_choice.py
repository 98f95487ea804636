"""Find out which expert a block multiplies with before the launch that chooses has ended.

The last block of `router` has much to do behind the logits: shares, counts, tables. What blocks of
`expert_gate_up` need of it is the address of one expert. So each output of the router is *posted*
as soon as it is there, in one word with a stamp that no other layer of a step has. These blocks,
which are on the card already, look for all of them, choose as `routing.py` does, and ask for their
weights. They wait for the launch when it has ended anyway.

One warp of a block looks and chooses: it takes the best of all lanes as many times as experts are
chosen. If all threads ranked experts together, as `routing.py` does, two blocks of a multiprocessor
would count for each other's time.

That is right where the launch lets nobody come to a slot: the plan says so. Otherwise, and where
routes are forced, blocks wait first.

    posts   int64 (experts, or one more: an even number), 0 when a step begins: the bits of a logit,
            the stamp in the upper half
    stamp   1, 2, ... of the layers that have experts

A launch begins when all blocks of the one in front run, or have ended, so nobody keeps those from
running that are waited for. Where a launch stands alone for once, as it may where it is measured,
blocks look for a while, and then wait like others.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    bits_of_f32,
    bits_set,
    f32_of_bits,
    i32,
    i64,
    lanes_where,
    largest_of_lanes,
    load_i64,
    post_i64,
    posted_2xi64,
    shared_load_i64,
    shared_store_i64,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.routing import key_of, without_nan
from strata_nb.kernels.table import ROWS_WORDS

MOST_EXPERTS = 256  # eight of a lane: what it knows of them fits its registers
_STAMP_BITS = 32
_LOOKS = 256  # at most, of half a microsecond or so
_TAKEN = -(1 << 31)  # the key of an expert that is chosen, or not there: below those of all logits


def posts_at(rows: int) -> int:
    """Return the address of the posts of a step, of that of its number of rows."""
    return rows + 8 * ROWS_WORDS


# -- in kernels ------------------------------------------------------------------------------------


def post_logit(posts: int, expert: Any, logit: Any, stamp: Any) -> None:
    """Post the logit of an expert."""
    post_i64(posts + 8 * expert, i64(bits_of_f32(logit)) & 0xFFFFFFFF | i64(stamp) << _STAMP_BITS)


def may_choose_early(offered: Any, listed: Any, forced: int) -> Any:
    """Return whether the choice follows from the logits alone, and no address changes by it.

    offered, listed   what a plan has there
    """
    return forced == 0 and offered + listed == 0


class EarlyChoice(NamedTuple):
    """Hold device functions that choose, and how many bytes of shared memory they need.

    ask    (addresses, thread): the addresses of a thread's experts, which `find` takes; those of
           the first warp have some
    find   (posts, stamp, own, thread, choice): the address of the expert of a choice, 0 where
           logits do not come. All threads take part
    """

    ask: Function
    find: Function
    shared_bytes: int


@cache
def early_choice(experts: int, top_k: int, place: int) -> EarlyChoice:
    """Return how at most MOST_EXPERTS experts are chosen early by a block; shared memory is there
    from `place` on, a multiple of 8.

    A lane has neighbours, as many as the others, and an even number.
    """
    pairs = -(-experts // (2 * WARP))
    each = 2 * pairs
    look, are_there, keys_of = _of_pairs(pairs, experts)
    largest_of, taken_of = _largest(each), _taken(each)
    addresses_of, chosen_of = _addresses(each, experts - 1), _chosen(each)
    nobody = (0,) * each

    def ask(addresses: int, thread: Any) -> Any:
        return addresses_of(addresses, each * thread) if thread < WARP else nobody

    def choose(posts: int, stamp: Any, own: Any, lane: Any, choice: Any) -> None:
        """Bring the address of a choice to shared memory: all lanes of a warp."""
        first, looks = each * lane, _LOOKS
        words = look(posts, first)
        while not are_there(words, first, stamp) and looks > 1:
            words = look(posts, first)
            looks -= 1
        late = lanes_where(i32(0 if are_there(words, first, stamp) else 1))
        keys, below = keys_of(words, first), i32((1 << lane) - 1)
        taken, turn = i32(0), 0
        while turn < top_k:
            mine = largest_of(keys)
            most = largest_of_lanes(mine)
            # Of equal ones the lowest number comes first.
            if lanes_where(i32(1 if mine == most else 0)) & below == 0 and mine == most:
                bit, keys = taken_of(keys, most)
                taken = i32(taken | bit)
            turn += 1
        before, number = i64(0), 0
        while number < each:
            before += i64(bits_set(i32(lanes_where(i32(taken >> number & 1)) & below)))
            number += 1
        left = choice - before
        if left >= 0 and left < i64(bits_set(taken)):
            shared_store_i64(place, chosen_of(own, taken, left) if late == 0 else i64(0))

    def find(posts: int, stamp: Any, own: Any, thread: Any, choice: Any) -> Any:
        if thread < WARP:
            choose(posts, stamp, own, thread, choice)
        barrier()
        return shared_load_i64(place)

    return EarlyChoice(ask, find, 8)


# -- what a lane has -------------------------------------------------------------------------------


class _Pairs(NamedTuple):
    """Hold device functions of a lane's experts, pairs of neighbours from a number on.

    look        (posts, number): their words
    are_there   (words, number, stamp): whether all are posted
    keys_of     (words, number): their keys, which are larger where logits are
    """

    look: Function
    are_there: Function
    keys_of: Function


@cache
def _of_pairs(pairs: int, experts: int) -> _Pairs:
    last = (experts - 1) & -2  # where the last pair begins; what is behind it repeats it

    def look(posts: int, number: Any) -> Any:
        return posted_2xi64(posts + 8 * min(number, last))

    def is_there(word: Any, number: Any, stamp: Any) -> Any:
        return number >= experts or word >> _STAMP_BITS == stamp

    def are_there(words: Any, number: Any, stamp: Any) -> Any:
        return is_there(words[0], number, stamp) and is_there(words[1], number + 1, stamp)

    def key(word: Any, number: Any) -> Any:
        found = key_of(without_nan(f32_of_bits(i32(word))))
        return found if number < experts else i32(_TAKEN)

    def keys_of(words: Any, number: Any) -> Any:
        return key(words[0], number), key(words[1], number + 1)

    if pairs == 1:
        return _Pairs(look, are_there, keys_of)
    others = _of_pairs(pairs - 1, experts)
    look_further, are_others_there, keys_of_others = others

    def look_all(posts: int, number: Any) -> Any:
        return look(posts, number) + look_further(posts, number + 2)

    def are_all_there(words: Any, number: Any, stamp: Any) -> Any:
        others = are_others_there(words[2:], number + 2, stamp)
        return are_there(words[:2], number, stamp) and others

    def keys_of_all(words: Any, number: Any) -> Any:
        return keys_of(words[:2], number) + keys_of_others(words[2:], number + 2)

    return _Pairs(look_all, are_all_there, keys_of_all)


@cache
def _largest(count: int) -> Function:
    """Return a device function of so many keys: the largest."""

    def one(keys: Any) -> Any:
        return keys[0]

    if count == 1:
        return one
    others = _largest(count - 1)

    def several(keys: Any) -> Any:
        return i32(max(keys[0], others(keys[1:])))

    return several


@cache
def _taken(count: int) -> Function:
    """Return a device function (keys, key): which of so many keys is the first of those, as a bit
    of a word, and all keys with that one as _TAKEN."""

    def taken() -> Any:
        return (i32(_TAKEN),)

    def one(keys: Any, key: Any) -> Any:
        return i32(1), taken()

    if count == 1:
        return one
    others = _taken(count - 1)

    def several(keys: Any, key: Any) -> Any:
        if keys[0] == key:
            return i32(1), taken() + keys[1:]
        bit, rest = others(keys[1:], key)
        return i32(bit << 1), keys[:1] + rest

    return several


@cache
def _addresses(count: int, last: int) -> Function:
    """Return a device function (addresses, number): those of so many experts from a number on, the
    last one's in place of those behind it."""

    def one(addresses: int, number: Any) -> Any:
        return (load_i64(addresses + 8 * min(number, last)),)

    if count == 1:
        return one
    others = _addresses(count - 1, last)

    def several(addresses: int, number: Any) -> Any:
        return one(addresses, number) + others(addresses, number + 1)

    return several


@cache
def _chosen(count: int) -> Function:
    """Return a device function (own, taken, left): of so many addresses the one whose bit of
    `taken` is a 1 with `left` such bits below it."""

    def one(own: Any, taken: Any, left: Any) -> Any:
        return own[0]

    if count == 1:
        return one
    others = _chosen(count - 1)

    def several(own: Any, taken: Any, left: Any) -> Any:
        if taken & 1 != 0 and left == 0:
            return own[0]
        return others(own[1:], taken >> 1, left - (taken & 1))

    return several
