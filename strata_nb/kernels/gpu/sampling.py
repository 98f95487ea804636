"""Choose the next token on a card, by the rule of `sampling.py`, so that only its id is fetched.

A block has a row. Whatever top_k, top_p and min_p keep is a prefix of one order: descending logit,
then ascending id. So nothing is sorted; three facts do instead:

    depth    how many floats lie between a token's logit and the largest: a whole number, 0 for the
             most likely token, equal for equal logits
    weight   exp((logit - largest) / temperature) in whole parts of 2^-40, so that a sum of weights
             has no order. Counting is weighing at an infinite temperature.
    edge     a prefix: all tokens of a depth below the edge, and the first few at the edge itself.
             These weigh the same, so their number is enough until the very end.

`_search` finds the token at which the weights of the prefix pass a sum, 8 bits of its depth at a
time: that is the last one of top_k, the last one of top_p, and the one that is drawn.

Each thread has its own tokens, every `threads`-th, and moves those that may still be chosen to the
front of its places (`_keep`), so that only the first passes see the whole vocabulary. For top_k the
threads' largest logits say in advance who can be left out: the k-th of these is not above the k-th
of all.

Against sampling.py: weights are exp in float32, and less than 2^-40 of the largest is nothing. The
rest is the same to the bit, so another token is drawn only where the random number, or top_p, is
within about 1e-6 of the border between two tokens.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.choices import CHOICE, SHARE_BITS, offset
from strata_nb.kernels.gpu.exponential import exp
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    bits_of_f32,
    block_x,
    f32,
    f32_of_bits,
    f32_of_i32,
    i32,
    i64,
    load_f32,
    load_i32,
    load_i64,
    shared_add_i64,
    shared_load_i32,
    shared_load_i64,
    shared_store_i32,
    shared_store_i64,
    store_i32,
    store_i64,
    thread_index,
    truncated_i64,
)
from strata_nb.kernels.gpu.operations import (
    MOST_REGISTERS,
    Arguments,
    GpuKernel,
    Grid,
    warp_max_i32,
)

MOST_VOCABULARY = 1 << 22  # the sum of all weights has 62 bits then

_TEMPERATURE, _LEAST = offset("temperature"), offset("least")
_REPEAT, _PRESENCE = offset("repeat_penalty"), offset("presence_penalty")
_FREQUENCY, _TOP_K = offset("frequency_penalty"), offset("top_k")
_TOP_P, _RANDOM = offset("top_p"), offset("random")
_BANNED_COUNT, _RECENT_COUNT = offset("banned_count"), offset("recent_count")
_BANNED, _RECENT = offset("banned"), offset("recent")
_RECORD_BYTES = CHOICE.itemsize

_INFINITY = math.inf
_INFINITE_KEY = 0x7F800000  # of +infinity; its negative is -infinity's
_NAN_KEY = 0x7FFFFFFF
_LOWEST_BITS = -(1 << 31)  # the sign of a float32
_UNIT_BITS = 40
_UNIT = 1 << _UNIT_BITS  # the weight of the most likely token
_ALL = 1 << SHARE_BITS
_VANISHING = 28.0  # exp(-28) is less than 2^-40
_WORD_MASK = 0xFFFFFFFF

# Shared memory: a histogram of weights, its groups' sums, what a search found, warps' maxima.
_BINS, _GROUPS = 256, 16
_GROUPS_AT = 8 * _BINS
_FOUND_AT = _GROUPS_AT + 8 * _GROUPS
_MAXIMA_AT = _FOUND_AT + 8 * 2
_SHARED_BYTES = _MAXIMA_AT + 4 * WARP

# -- logits as whole numbers -----------------------------------------------------------------------


def _key_of(x: Any) -> Any:
    """Return an i64 that is ordered as floats are, 0 for both zeros; NaN comes above all."""
    bits = i64(bits_of_f32(x))
    key = bits if bits >= 0 else _LOWEST_BITS - bits
    return key if x == x else i64(_NAN_KEY)


def _float_of(key: Any) -> Any:
    return f32_of_bits(i32(key if key >= 0 else _LOWEST_BITS - key))


def _weight(depth: Any, best: Any, temperature: Any) -> Any:
    """Return what a token of a depth below the key `best` weighs."""
    if temperature == f32(_INFINITY):
        return i64(_UNIT)
    below = (_float_of(best - depth) - _float_of(best)) / temperature
    return truncated_i64(exp(below) * f32(_UNIT))


def _depth_at(score: Any, best: Any) -> Any:
    """Return the depth of a score, -infinity and what is below the lowest float among it."""
    return best - max(_key_of(score), i64(1 - _INFINITE_KEY))


def _share(total: Any, parts: Any, less: Any) -> Any:
    """Return total * parts / 2^SHARE_BITS rounded down, or what is below it if `less` is 1."""
    low = (total & (_ALL - 1)) * parts - less
    return (total >> SHARE_BITS) * parts + (low >> SHARE_BITS)


# -- the threads together --------------------------------------------------------------------------


def _block_max(x: Any, thread: Any, threads: Any) -> Any:
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


def _search(
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
            value = i64(load_i32(values + stride * number)) & _WORD_MASK
            place = (value - start) >> shift
            if 0 <= place < _BINS:
                shared_add_i64(8 * place, _weight(value, best, temperature))
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
    return start, (passed - before) // _weight(start, best, temperature)


def _sum(
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
        depth = i64(load_i32(depths + stride * number)) & _WORD_MASK
        if depth < edge:
            total += _weight(depth, best, temperature)
        number += 1
    _empty_bins(thread, threads)
    shared_add_i64(8 * (thread & (_BINS - 1)), total)
    _add_groups(thread)
    total, number = i64(0), i64(0)
    while number < _GROUPS:
        total += shared_load_i64(_GROUPS_AT + 8 * number)
        number += 1
    if ties > 0:
        total += ties * _weight(edge, best, temperature)
    return total


# -- a thread's own tokens -------------------------------------------------------------------------


def _penalised(score: Any, times: Any, choice: Any) -> Any:
    """Return the logit of a token that came so many times."""
    repeat = load_f32(choice + _REPEAT)
    # Dividing a negative logit would reward the repetition.
    score = score * repeat if score <= f32(0.0) else score / repeat
    score -= f32_of_i32(times) * load_f32(choice + _FREQUENCY)
    return score - load_f32(choice + _PRESENCE)


def _write_keys(
    keys: Any, logits: Any, choice: Any, vocabulary: Any, thread: Any, threads: Any
) -> None:
    """Write the keys of all tokens after penalties and bans."""
    token = thread
    while token < vocabulary:
        store_i32(keys + 4 * token, i32(_key_of(load_f32(logits + 4 * token))))
        token += threads
    barrier()
    entry, entries = thread, i64(load_i32(choice + _RECENT_COUNT))
    while entry < entries:
        place = choice + _RECENT + 8 * entry
        token = i64(load_i32(place))
        score = _penalised(load_f32(logits + 4 * token), load_i32(place + 4), choice)
        store_i32(keys + 4 * token, i32(_key_of(score)))
        entry += threads
    barrier()
    entry, entries = thread, i64(load_i32(choice + _BANNED_COUNT))
    while entry < entries:
        token = i64(load_i32(choice + _BANNED + 4 * entry))
        store_i32(keys + 4 * token, i32(-_INFINITE_KEY))
        entry += threads
    barrier()


def _gather(
    depths: Any, ids: Any, stride: Any, count: Any, first: Any, best: Any, reach: Any
) -> Any:
    """Make depths of a thread's keys and write their ids, up to a depth; return how many.

    The least depth comes to the front.
    """
    number, kept, front, least = i64(0), i64(0), i64(0), reach + 1
    while number < count:
        depth = best - i64(load_i32(depths + stride * number))
        if depth <= reach:
            if depth < least:
                front, least = kept, depth
            store_i32(depths + stride * kept, i32(depth))
            store_i32(ids + stride * kept, i32(first + (stride >> 2) * number))
            kept += 1
        number += 1
    if front > 0:
        token = load_i32(ids + stride * front)
        store_i32(depths + stride * front, load_i32(depths))
        store_i32(ids + stride * front, load_i32(ids))
        store_i32(depths, i32(least))
        store_i32(ids, token)
    return kept


def _keep(depths: Any, ids: Any, stride: Any, count: Any, least: Any, most: Any) -> Any:
    """Move the tokens of depths least .. most to the front; return how many there are."""
    number, kept = i64(0), i64(0)
    while number < count:
        depth = i64(load_i32(depths + stride * number)) & _WORD_MASK
        if least <= depth <= most:
            store_i32(depths + stride * kept, i32(depth))
            store_i32(ids + stride * kept, load_i32(ids + stride * number))
            kept += 1
        number += 1
    return kept


# Stages of a choice: each searches for where its sum is passed.
_OUTLINE = 0  # a bound for top_k, among the most likely tokens of each thread
_OF_TOP_K, _OF_TOP_P, _DRAW = 1, 2, 3
_BY_ID = 4  # among equals of the one that is drawn

# -- the kernel ------------------------------------------------------------------------------------


# (the largest vocabulary, threads of a block). Of the most that a block may have, 1,024, each would
# have 64 registers, and this kernel needs more.
_THREADS = ((1024, 64), (8192, 256))
_MOST_THREADS = 768
_CARD_REGISTERS = 1 << 16  # of all threads that run at once


@cache
def _of_threads(threads: int) -> GpuKernel:
    stride = 4 * threads

    def sample(
        rows: int, logits: int, choices: int, work: int, chosen: int, vocabulary: int
    ) -> None:
        row, thread = i64(block_x()), i64(thread_index())
        if row >= load_i64(rows):
            return
        choice, result = choices + _RECORD_BYTES * row, chosen + 8 * row
        keys = work + 8 * vocabulary * row
        _write_keys(keys, logits + 4 * vocabulary * row, choice, vocabulary, thread, threads)

        ids = keys + 4 * vocabulary + 4 * thread
        own = keys + 4 * thread
        count = (vocabulary - thread + threads - 1) // threads
        most, where, number = i64(-_INFINITE_KEY), i64(0), i64(0)
        while number < count:
            key = i64(load_i32(own + stride * number))
            if key > most:
                most, where = key, thread + threads * number
            number += 1
        best = _block_max(most, thread, threads)
        if best >= _INFINITE_KEY or best <= -_INFINITE_KEY:
            if thread == 0:
                store_i64(result, i64(-1))
            return
        temperature = load_f32(choice + _TEMPERATURE)
        if temperature == f32(0.0):
            token = -_block_max(-where if most == best else -MOST_VOCABULARY, thread, threads)
            if thread == 0:
                store_i64(result, token)
            return

        # What weighs nothing at both temperatures is left out whatever comes.
        largest, warmest = _float_of(best), f32(1.0)
        warmest = temperature if temperature > warmest else warmest
        reach = _depth_at(largest - f32(_VANISHING) * warmest, best)
        count = _gather(own, ids, stride, count, thread, best, reach)

        top_k, top_p = i64(load_i32(choice + _TOP_K)), i64(load_i32(choice + _TOP_P))
        stage = i64(_OUTLINE if top_k <= threads else _OF_TOP_K)
        if top_k == 0 or top_k >= vocabulary:
            stage = i64(_OF_TOP_P)
        edge, ties, before, above = reach + 1, i64(0), i64(0), i64(0)
        while stage <= _BY_ID:
            values, searched, heat, passed = own, count, f32(_INFINITY), i64(0)
            if stage <= _OF_TOP_K:
                passed = (top_k - 1) << _UNIT_BITS
            elif stage == _BY_ID:
                passed = before << _UNIT_BITS
            else:
                heat = f32(1.0) if stage == _OF_TOP_P else temperature
                total = _sum(own, stride, count, thread, threads, edge, ties, best, heat)
                share = top_p if stage == _OF_TOP_P else i64(load_i32(choice + _RANDOM))
                # The prefix of top_p reaches its share, the token that is drawn goes beyond.
                passed = _share(total, share, i64(1 if stage == _OF_TOP_P else 0))
            if stage == _OF_TOP_P:
                below = _depth_at(largest + load_f32(choice + _LEAST), best) + 1
                if below <= edge:
                    edge, ties = below, i64(0)
                reach = edge if ties > 0 else edge - 1
            if stage == _OUTLINE:
                searched = min(count, i64(1))
            else:
                count = _keep(own, ids, stride, count, above, reach)
                searched = count
            if stage == _BY_ID:
                values, reach = ids, vocabulary - 1
            found, before = _search(
                values, stride, searched, thread, threads, reach, passed, best, heat
            )
            if found >= 0:
                reach = found
                if stage == _OUTLINE:
                    edge = found + 1
                else:
                    edge, ties = found, before + 1
            if stage == _DRAW:
                above = found
            stage += 1
        if thread == 0:
            store_i64(result, reach)

    registers = min(MOST_REGISTERS, _CARD_REGISTERS // threads // 8 * 8)
    return GpuKernel(
        f"sample_{threads}", sample, threads, _grid, lambda _: _SHARED_BYTES, registers
    )


def _grid(_: Arguments, most_rows: int) -> Grid:
    return most_rows, 1, 1


def sample_kernel(vocabulary: int) -> GpuKernel:
    """Return `sample` of the table: a block for each row.

    Reads 4 bytes of each logit, writes and reads 4 of work three times, and moves little else where
    top_k, min_p or the temperature leave few tokens. UnsupportedDevice for more than 2^22 tokens.
    """
    if vocabulary > MOST_VOCABULARY:
        raise UnsupportedDevice(
            f"a card chooses among at most {MOST_VOCABULARY:,} tokens, not {vocabulary:,}",
            hint="compute on the processor: --device host",
        )
    return _of_threads(
        next((threads for most, threads in _THREADS if vocabulary <= most), _MOST_THREADS)
    )
