"""Weigh tokens on a card, and find where their weights pass a sum, without sorting.

    key      a float as a whole number that is ordered as floats are
    depth    how many floats lie between a token's logit and the largest: 0 for the most likely
             token, equal for equal logits
    weight   exp((logit - largest) / temperature) in whole parts of 2^-40, so that a sum of weights
             has no order. Counting is weighing at an infinite temperature.

`search` goes by a histogram of weights in shared memory, 8 bits of the depth at a time. Each thread
brings tokens of its own: `count` values of 32 bits, `stride` bytes apart.
"""

from __future__ import annotations

import math
from typing import Any

from strata_nb.kernels.choices import SHARE_BITS, WHOLE
from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    bits_of_f32,
    f32,
    f32_of_bits,
    i32,
    i64,
    load_i32,
    shared_add_i64,
    shared_load_i32,
    shared_load_i64,
    shared_store_i32,
    shared_store_i64,
    truncated_i64,
)
from strata_nb.kernels.gpu.operations import warp_max_i32

INFINITY = math.inf
INFINITE_KEY = 0x7F800000  # of +infinity; its negative is -infinity's
_NAN_KEY = 0x7FFFFFFF
_LOWEST_BITS = -(1 << 31)  # the sign of a float32
UNIT_BITS = 40
_UNIT = 1 << UNIT_BITS  # the weight of the most likely token
VANISHING = 28.0  # exp(-28) is less than 2^-40
MOST_TOKENS = 1 << 22  # the sum of all weights has 62 bits then
WORD_MASK = 0xFFFFFFFF

# Shared memory: a histogram of weights, its groups' sums, what a search found, warps' maxima.
_BINS, _GROUPS = 256, 16
_GROUPS_AT = 8 * _BINS
_FOUND_AT = _GROUPS_AT + 8 * _GROUPS
_MAXIMA_AT = _FOUND_AT + 8 * 2
SHARED_BYTES = _MAXIMA_AT + 4 * WARP

# -- logits as whole numbers -----------------------------------------------------------------------


def key_of(x: Any) -> Any:
    """Return an i64 that is ordered as floats are, 0 for both zeros; NaN comes above all."""
    bits = i64(bits_of_f32(x))
    key = bits if bits >= 0 else _LOWEST_BITS - bits
    return key if x == x else i64(_NAN_KEY)


def float_of(key: Any) -> Any:
    return f32_of_bits(i32(key if key >= 0 else _LOWEST_BITS - key))


def weight(depth: Any, best: Any, temperature: Any) -> Any:
    """Return what a token of a depth below the key `best` weighs."""
    if temperature == f32(INFINITY):
        return i64(_UNIT)
    below = (float_of(best - depth) - float_of(best)) / temperature
    return truncated_i64(exp(below) * f32(_UNIT))


def depth_at(score: Any, best: Any) -> Any:
    """Return the depth of a score; -infinity counts as the lowest float."""
    return best - max(key_of(score), i64(1 - INFINITE_KEY))


def share_of(total: Any, parts: Any, less: Any) -> Any:
    """Return total * parts / WHOLE rounded down, for `less` 1 the last whole number below it."""
    low = (total & (WHOLE - 1)) * parts - less
    return (total >> SHARE_BITS) * parts + (low >> SHARE_BITS)


# -- the threads together --------------------------------------------------------------------------


def block_max(x: Any, thread: Any, threads: Any) -> Any:
    """Return the largest of the block's i32, the same in each thread; begins with a barrier."""
    x = warp_max_i32(i32(x))
    barrier()
    if thread & 31 == 0:
        shared_store_i32(_MAXIMA_AT + 4 * (thread >> 5), x)
    barrier()
    lane = thread & 31
    x = shared_load_i32(_MAXIMA_AT + 4 * (lane if lane < threads // WARP else 0))
    return i64(warp_max_i32(x))


def _empty_bins(thread: Any, threads: Any) -> None:
    place = thread
    while place < _BINS:
        shared_store_i64(8 * place, i64(0))
        place += threads
    barrier()


def _add_groups(thread: Any) -> None:
    """Sum the bins by groups."""
    barrier()
    if thread < _GROUPS:
        total, place = i64(0), i64(0)
        while place < _BINS // _GROUPS:
            total += shared_load_i64(8 * (_BINS // _GROUPS * thread + place))
            place += 1
        shared_store_i64(_GROUPS_AT + 8 * thread, total)
    barrier()


def _find_bin(passed: Any, before: Any) -> None:
    """Leave the first bin at which a sum passes, _BINS if none, and the sum before it."""
    group = i64(0)
    while group < _GROUPS:
        more = shared_load_i64(_GROUPS_AT + 8 * group)
        if before + more > passed:
            break
        before += more
        group += 1
    number = group * (_BINS // _GROUPS)
    while number < _BINS:
        more = shared_load_i64(8 * number)
        if before + more > passed:
            break
        before += more
        number += 1
    shared_store_i64(_FOUND_AT, number)
    shared_store_i64(_FOUND_AT + 8, before)


def search(
    values: Any,
    stride: Any,
    count: Any,
    thread: Any,
    threads: Any,
    reach: Any,
    passed: Any,
    best: Any,
    temperature: Any,
) -> Any:
    """Find the value at which the weights, in ascending order of value, pass a sum.

    values         address of this thread's first; `count` of them, `stride` bytes apart, 32 bits
    reach          no value of any thread is above it
    best           what they are depths below; of no account at an infinite temperature

    Returns it, and how many of its equals come before the one that passes; -1 and 0 if none does.
    """
    shift, start, before = i64(24), i64(0), i64(0)
    while shift > 0 and reach >> shift == 0:
        shift -= 8
    while shift >= 0:
        _empty_bins(thread, threads)
        number = i64(0)
        while number < count:
            value = i64(load_i32(values + stride * number)) & WORD_MASK
            place = (value - start) >> shift
            if 0 <= place < _BINS:
                shared_add_i64(8 * place, weight(value, best, temperature))
            number += 1
        _add_groups(thread)
        if thread == 0:
            _find_bin(passed, before)
        barrier()
        found = shared_load_i64(_FOUND_AT)
        before = shared_load_i64(_FOUND_AT + 8)
        if found == _BINS:
            return i64(-1), i64(0)
        start += found << shift
        shift -= 8
    return start, (passed - before) // weight(start, best, temperature)


def sum_up_to(
    depths: Any,
    stride: Any,
    count: Any,
    thread: Any,
    threads: Any,
    edge: Any,
    ties: Any,
    best: Any,
    temperature: Any,
) -> Any:
    """Return the weights of the prefix up to an edge, the same in each thread."""
    total, number = i64(0), i64(0)
    while number < count:
        depth = i64(load_i32(depths + stride * number)) & WORD_MASK
        if depth < edge:
            total += weight(depth, best, temperature)
        number += 1
    _empty_bins(thread, threads)
    shared_add_i64(8 * (thread & (_BINS - 1)), total)
    _add_groups(thread)
    total, number = i64(0), i64(0)
    while number < _GROUPS:
        total += shared_load_i64(_GROUPS_AT + 8 * number)
        number += 1
    if ties > 0:
        total += ties * weight(edge, best, temperature)
    return total
