"""Choose the next token on a card, by the rule of `sampling.py`, so that only its id is fetched.

Many blocks write the keys of a row's tokens and find the largest; then one block draws. Whatever
top_k, top_p and min_p keep is a prefix of one order: descending logit, then ascending id. So
nothing is sorted. Tokens have depths and weights (`weighing.py`), and a prefix is an *edge*: all
tokens of a depth below it, and the first few at the edge itself. These weigh the same, so their
number is enough until the very end. Searches find the token at which the weights of a prefix pass a
sum: that is the last one of top_k, the last one of top_p, and the one that is drawn.

Each thread has its own tokens, every `threads`-th, and moves those that may still be chosen to the
front of its places (`_keep`), so that only the first passes see the whole vocabulary. For top_k the
threads' largest logits say in advance who can be left out: the k-th of these is not above the k-th
of all.

Against sampling.py: weights are exp in float32, and less than 2^-40 of the largest is nothing. The
rest is the same to the bit, so another token is drawn only where the random number, or top_p, is
within about 1e-6 of the border between two tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.choices import CHOICE, WHOLE, offset
from strata_nb.kernels.gpu.intrinsics import (
    barrier,
    block_x,
    block_y,
    f32,
    f32_of_i32,
    i32,
    i64,
    load_f32,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
    thread_index,
)
from strata_nb.kernels.gpu.operations import MOST_REGISTERS, Arguments, GpuKernel, Grid, blocks_of
from strata_nb.kernels.gpu.weighing import (
    INFINITE_KEY,
    INFINITY,
    MOST_TOKENS,
    SHARED_BYTES,
    UNIT_BITS,
    VANISHING,
    WORD_MASK,
    block_max,
    depth_at,
    float_of,
    key_of,
    search,
    share_of,
    sum_up_to,
)

_TEMPERATURE, _LEAST = offset("temperature"), offset("least")
_REPEAT, _PRESENCE = offset("repeat_penalty"), offset("presence_penalty")
_FREQUENCY, _TOP_K = offset("frequency_penalty"), offset("top_k")
_TOP_P, _RANDOM = offset("top_p"), offset("random")
_BANNED_COUNT, _RECENT_COUNT = offset("banned_count"), offset("recent_count")
_BANNED, _RECENT = offset("banned"), offset("recent")
_RECORD_BYTES = CHOICE.itemsize

# -- a thread's own tokens -------------------------------------------------------------------------


def _penalised(score: Any, times: Any, choice: Any) -> Any:
    """Return the logit of a token that came so many times."""
    repeat = load_f32(choice + _REPEAT)
    # Dividing a negative logit would reward the repetition.
    score = score * repeat if score <= f32(0.0) else score / repeat
    score -= f32_of_i32(times) * load_f32(choice + _FREQUENCY)
    return score - load_f32(choice + _PRESENCE)


def _write_keys(
    keys: Any, logits: Any, choice: Any, first: Any, last: Any, thread: Any, threads: Any
) -> None:
    """Write the keys of the tokens first .. last - 1 after penalties and bans."""
    token = first + thread
    while token < last:
        store_i32(keys + 4 * token, i32(key_of(load_f32(logits + 4 * token))))
        token += threads
    barrier()
    entry, entries = thread, i64(load_i32(choice + _RECENT_COUNT))
    while entry < entries:
        place = choice + _RECENT + 8 * entry
        token = i64(load_i32(place))
        if first <= token < last:
            score = _penalised(load_f32(logits + 4 * token), load_i32(place + 4), choice)
            store_i32(keys + 4 * token, i32(key_of(score)))
        entry += threads
    barrier()
    entry, entries = thread, i64(load_i32(choice + _BANNED_COUNT))
    while entry < entries:
        token = i64(load_i32(choice + _BANNED + 4 * entry))
        if first <= token < last:
            store_i32(keys + 4 * token, i32(-INFINITE_KEY))
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
        depth = i64(load_i32(depths + stride * number)) & WORD_MASK
        if least <= depth <= most:
            store_i32(depths + stride * kept, i32(depth))
            store_i32(ids + stride * kept, load_i32(ids + stride * number))
            kept += 1
        number += 1
    return kept


# -- the stages of a choice ------------------------------------------------------------------------

_OUTLINE = 0  # a bound for top_k, among the most likely tokens of each thread
_OF_TOP_K = 1
_OF_TOP_P = 2  # and of min_p
_DRAW = 3
_BY_ID = 4  # among equals of the one that is drawn


def _first_largest(keys: Any, stride: Any, count: Any, first: Any) -> Any:
    """Return the largest of a thread's keys, and the lowest id that has it."""
    most, token, number = i64(-INFINITE_KEY), i64(0), i64(0)
    while number < count:
        key = i64(load_i32(keys + stride * number))
        if key > most:
            most, token = key, first + (stride >> 2) * number
        number += 1
    return most, token


def _draw(
    choice: Any,
    depths: Any,
    ids: Any,
    stride: Any,
    count: Any,
    thread: Any,
    threads: Any,
    vocabulary: Any,
    best: Any,
    reach: Any,
) -> Any:
    """Return the token that is drawn from those up to a depth, the same in each thread.

    The stages are turns of one loop, so that the code of a search is there once: a lone block waits
    for code too, and spelled out it takes twice as many bytes.
    """
    top_k, top_p = i64(load_i32(choice + _TOP_K)), i64(load_i32(choice + _TOP_P))
    stage = i64(_OUTLINE if top_k <= threads else _OF_TOP_K)
    if top_k == 0 or top_k >= vocabulary:
        stage = i64(_OF_TOP_P)
    edge, ties, before = reach + 1, i64(0), i64(0)
    while stage <= _BY_ID:
        searches = stage != _OF_TOP_P or top_p < WHOLE
        heat, passed = f32(INFINITY), i64(0)
        if stage <= _OF_TOP_K:
            passed = (top_k - 1) << UNIT_BITS
        elif stage == _BY_ID:
            passed = before << UNIT_BITS
        elif searches:
            heat = f32(1.0) if stage == _OF_TOP_P else load_f32(choice + _TEMPERATURE)
            total = sum_up_to(depths, stride, count, thread, threads, edge, ties, best, heat)
            share = top_p if stage == _OF_TOP_P else i64(load_i32(choice + _RANDOM))
            # The prefix of top_p reaches its share, the token that is drawn goes beyond.
            passed = share_of(total, share, i64(1 if stage == _OF_TOP_P else 0))
        if stage == _OF_TOP_P:
            bottom = depth_at(float_of(best) + load_f32(choice + _LEAST), best) + 1
            if bottom <= edge:
                edge, ties = bottom, i64(0)
            reach = edge if ties > 0 else edge - 1
        if stage > _OUTLINE:
            least = reach if stage == _BY_ID else i64(0)
            count = _keep(depths, ids, stride, count, least, reach)
        if searches:
            values = ids if stage == _BY_ID else depths
            searched = min(count, i64(1)) if stage == _OUTLINE else count
            reach = vocabulary - 1 if stage == _BY_ID else reach
            found, before = search(
                values, stride, searched, thread, threads, reach, passed, best, heat
            )
            if found >= 0:
                reach, edge, ties = found, found, before + 1
        stage += 1
    return reach


# -- the kernels -----------------------------------------------------------------------------------

# (the largest vocabulary, threads of a block). Of the most that a block may have, 1,024, each would
# have 64 registers, and this kernel needs more.
_THREADS = ((1024, 64), (8192, 256))
_MOST_THREADS = 640
_CARD_REGISTERS = 1 << 16  # of all threads that run at once

# Keys are written by many blocks. Each leaves the token that has its largest key, the first of
# equals, where the first ids will be.
_KEY_THREADS = 256
_SHARE = 2048  # tokens of a block, or more where there are many
_MOST_SHARES = 64


def _shares(vocabulary: int) -> int:
    return min(_MOST_SHARES, blocks_of(vocabulary, _SHARE))


@cache
def sample_keys_kernel() -> GpuKernel:
    """Return the first kernel of `sample`, with its arguments: keys, and the largest of each block.

    Its grid is (shares of the vocabulary, rows).
    """

    def sample_keys(
        rows: int, logits: int, choices: int, work: int, chosen: int, vocabulary: int
    ) -> None:
        row, number, thread = i64(block_y()), i64(block_x()), i64(thread_index())
        if row >= load_i64(rows):
            return
        shares = min(i64(_MOST_SHARES), (vocabulary + _SHARE - 1) >> _SHARE_SHIFT)
        share = (vocabulary + shares - 1) // shares
        first = share * number
        last = min(first + share, vocabulary)
        choice, keys = choices + _RECORD_BYTES * row, work + 8 * vocabulary * row
        row_logits = logits + 4 * vocabulary * row
        _write_keys(keys, row_logits, choice, first, last, thread, _KEY_THREADS)
        own, count = keys + 4 * (first + thread), max(last - first - thread, i64(0))
        count = (count + _KEY_THREADS - 1) >> _KEY_SHIFT
        most, token = _first_largest(own, 4 * _KEY_THREADS, count, first + thread)
        best = block_max(most, thread, _KEY_THREADS)
        token = -block_max(-token if most == best else -MOST_TOKENS, thread, _KEY_THREADS)
        if thread == 0:
            store_i32(keys + 4 * (vocabulary + number), i32(token))

    return GpuKernel(
        "sample_keys",
        sample_keys,
        _KEY_THREADS,
        lambda arguments, most_rows: (_shares(arguments["vocabulary"]), most_rows, 1),
        lambda _: SHARED_BYTES,
    )


_SHARE_SHIFT, _KEY_SHIFT = _SHARE.bit_length() - 1, _KEY_THREADS.bit_length() - 1


@cache
def _of_threads(threads: int) -> GpuKernel:
    stride = 4 * threads

    def sample(
        rows: int, logits: int, choices: int, work: int, chosen: int, vocabulary: int
    ) -> None:
        row, thread = i64(block_x()), i64(thread_index())
        if row >= load_i64(rows):
            return
        choice, keys = choices + _RECORD_BYTES * row, work + 8 * vocabulary * row
        shares = min(i64(_MOST_SHARES), (vocabulary + _SHARE - 1) >> _SHARE_SHIFT)
        token = i64(load_i32(keys + 4 * (vocabulary + min(thread, shares - 1))))
        most = i64(load_i32(keys + 4 * token))
        best = block_max(most, thread, threads)
        temperature = load_f32(choice + _TEMPERATURE)
        if best >= INFINITE_KEY or best <= -INFINITE_KEY:
            token = i64(-1)
        elif temperature == f32(0.0):
            token = -block_max(-token if most == best else -MOST_TOKENS, thread, threads)
        else:
            # What weighs nothing at either temperature is left out from the start.
            warmest = temperature if temperature > f32(1.0) else f32(1.0)
            reach = depth_at(float_of(best) - f32(VANISHING) * warmest, best)
            own, ids = keys + 4 * thread, keys + 4 * (vocabulary + thread)
            count = (vocabulary - thread + threads - 1) // threads
            count = _gather(own, ids, stride, count, thread, best, reach)
            token = _draw(choice, own, ids, stride, count, thread, threads, vocabulary, best, reach)
        if thread == 0:
            store_i64(chosen + 8 * row, token)

    registers = min(MOST_REGISTERS, _CARD_REGISTERS // threads // 8 * 8)
    return GpuKernel(f"sample_{threads}", sample, threads, _grid, lambda _: SHARED_BYTES, registers)


def _grid(_: Arguments, most_rows: int) -> Grid:
    return most_rows, 1, 1


def sample_kernel(vocabulary: int) -> GpuKernel:
    """Return the second kernel of `sample`, which draws by the keys: a block for each row.

    Reads 4 bytes of each key unless the temperature is 0, writes and reads 4 of work, and moves
    little else where top_k, min_p or the temperature leave few tokens. UnsupportedDevice for more
    than 2^22 tokens.
    """
    if vocabulary > MOST_TOKENS:
        raise UnsupportedDevice(
            f"a card chooses among at most {MOST_TOKENS:,} tokens, not {vocabulary:,}",
            hint="compute on the processor: --device host",
        )
    return _of_threads(
        next((threads for most, threads in _THREADS if vocabulary <= most), _MOST_THREADS)
    )
