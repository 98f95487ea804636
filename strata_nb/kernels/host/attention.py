"""Attention over the K/V of some rows: a softmax that streams over blocks of 64 cells.

A *query* is one head of one row. The bits of its result follow from this order alone:

- Score: lane i sums q[c] * k[c] over the columns c with c % 16 == i, ascending and fused; then the
  lanes are added as `transposed` does, halving their number each time. Times the scale.
- A block of 64 cells at a time, in order: the running maximum takes in the block's; sums and
  results shrink by exp(old - new); the weight exp(score - maximum) of cell c goes to sum c % 16,
  and, fused and in ascending order of cells, into the result. At the end, the results over the sum.

What else happens is for speed: *units* of work, each some rows of one sequence and some heads that
read the same keys and values, dealt out to the threads in turn; and within a unit four queries at a
time, so that a key or value which was loaded and converted serves all four. Four keys times four
queries are sixteen sums in registers; adding up their lanes by transposing costs a third of the
products, not more than them, as a sum within each register would.

Keys beyond a row's position may be multiplied, but the score is replaced; values are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from strata_nb.compiling import compiled, helper, inlined
from strata_nb.formats import BLOCK_CELLS, CACHE_TYPES
from strata_nb.kernels.host.exponential import exp
from strata_nb.kernels.host.generated import define, fill_in
from strata_nb.kernels.host.instructions import floats_of_halves
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, Work, real, word
from strata_nb.kernels.host.products import transposed
from strata_nb.kernels.host.vectors import (
    INTEGERS,
    Vector,
    all_lanes,
    constant,
    floats_of,
    fused,
    join,
    load_floats,
    loader,
    no_floats,
    repeat_one_float,
    repeater,
    shuffler,
    where_equal,
    where_less,
    widen_signed,
)
from strata_nb.raw_memory import load_i64, store

_LANES = 16
_GROUP = 64  # values; a scale, where there are scales, belongs to such a group
QUERIES_AT_ONCE = 4
UNIT_QUERIES = 32

# The state of a query, in bytes: two words, then vectors.
_QUERY, _POSITION = 0, 8  # the address of q, the position of the row
_MAXIMUM, _SUMS, _RESULTS = 64, 128, 192
_WEIGHTS_BYTES = 4 * BLOCK_CELLS  # of one query and block

_lane_numbers = constant(INTEGERS, range(_LANES))
_across_8, _across_4, _across_2, _across_1 = (
    shuffler([lane ^ step for lane in range(_LANES)]) for step in (8, 4, 2, 1)
)
_MINUS_INFINITY = np.float32(-np.inf)


def _chunks(length: int) -> int:
    """Return how many vectors hold a head."""
    return -(-length // _LANES)


def _state_bytes(value_length: int) -> int:
    return _RESULTS + 64 * _chunks(value_length)


def attention_work_bytes(value_length: int) -> int:
    """Return the bytes of work space that a thread needs."""
    return UNIT_QUERIES * _state_bytes(value_length) + QUERIES_AT_ONCE * _WEIGHTS_BYTES


# -- reading a plane -------------------------------------------------------------------------------


class _Plane(NamedTuple):
    """Read the keys or values of one head and block, as float32.

    scale   (plane, cell, group) -> what `chunk` and `tail` need of a group of 64 values
    chunk   (plane, cell, number, scale) -> values 16 * number and on
    tail    (plane, cell, scale) -> the values behind the last whole chunk, then zeros
    """

    scale: Callable[..., Any]
    chunk: Callable[..., Any]
    tail: Callable[..., Any]


def _padded(count: int) -> Callable[..., Any]:
    """Return a function that fills a vector of `count` lanes up to 16 with zeros."""
    zeros = constant(Vector("f32", count), [0.0] * count)
    lanes = shuffler([lane if lane < count else count for lane in range(_LANES)])

    @inlined
    def pad(values: Any) -> Any:
        return lanes(join(values, zeros()))

    return pad


@cache
def _plane(kind: str, length: int) -> _Plane:
    """Return how to read a plane of a type of `CACHE_TYPES`, of heads of so many values."""
    described = CACHE_TYPES[kind]
    size, groups = described.dtype.itemsize, described.groups(length)
    element = {1: "u8", 2: "u16", 4: "f32"}[size]
    whole, rest = length // _LANES * _LANES, length % _LANES
    load, load_rest = loader(Vector(element, _LANES)), loader(Vector(element, rest or 1))
    repeat_half = repeater(Vector("u16", _LANES), "u16", 1)
    pad = _padded(rest or 1)
    scales_offset = BLOCK_CELLS * length * size

    @inlined
    def no_scale(plane: int, cell: int, group: int) -> Any:
        return no_floats()

    @inlined
    def scale_of(plane: int, cell: int, group: int) -> Any:
        return floats_of_halves(repeat_half(plane + scales_offset + 2 * (cell * groups + group)))

    @inlined
    def as_it_is(values: Any) -> Any:
        return values

    @inlined
    def of_bytes(values: Any) -> Any:
        return floats_of(widen_signed(values))

    has_scale = described.scale_dtype is not None
    floats = {"u8": of_bytes, "u16": floats_of_halves, "f32": as_it_is}[element]

    @inlined
    def chunk(plane: int, cell: int, number: int, scale: Any) -> Any:
        values = floats(load(plane + size * (cell * length + _LANES * number)))
        return values * scale if has_scale else values

    @inlined
    def tail(plane: int, cell: int, scale: Any) -> Any:
        values = pad(floats(load_rest(plane + size * (cell * length + whole))))
        return values * scale if has_scale else values

    return _Plane(scale_of if has_scale else no_scale, chunk, tail)


# -- scores ----------------------------------------------------------------------------------------

_DOTS_TEXT = """
def {name}(states, keys, cell):
{each}    q{r} = load_i64(states + {state_bytes} * {r})
{each}    a{r} = no_floats()
{each}    b{r} = no_floats()
{each}    c{r} = no_floats()
{each}    d{r} = no_floats()
    for group in range({groups}):
        scale_a = scale(keys, cell, group)
        scale_b = scale(keys, cell + 1, group)
        scale_c = scale(keys, cell + 2, group)
        scale_d = scale(keys, cell + 3, group)
        for number in range(4 * group, min(4 * group + 4, {whole})):
            key_a = chunk(keys, cell, number, scale_a)
            key_b = chunk(keys, cell + 1, number, scale_b)
            key_c = chunk(keys, cell + 2, number, scale_c)
            key_d = chunk(keys, cell + 3, number, scale_d)
{each}            x{r} = load_floats(q{r} + 64 * number)
{each}            a{r} = fused(x{r}, key_a, a{r})
{each}            b{r} = fused(x{r}, key_b, b{r})
{each}            c{r} = fused(x{r}, key_c, c{r})
{each}            d{r} = fused(x{r}, key_d, d{r})
    if {rest} > 0:
        key_a = tail(keys, cell, scale(keys, cell, {groups} - 1))
        key_b = tail(keys, cell + 1, scale(keys, cell + 1, {groups} - 1))
        key_c = tail(keys, cell + 2, scale(keys, cell + 2, {groups} - 1))
        key_d = tail(keys, cell + 3, scale(keys, cell + 3, {groups} - 1))
{each}        x{r} = pad(load_rest(q{r} + 64 * {whole}))
{each}        a{r} = fused(x{r}, key_a, a{r})
{each}        b{r} = fused(x{r}, key_b, b{r})
{each}        c{r} = fused(x{r}, key_c, c{r})
{each}        d{r} = fused(x{r}, key_d, d{r})
    return ({results})
"""

# The sums of four cells in each of a's four lanes of four, and so on; of all sixteen one sum each.
_first_of_two = shuffler([0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27])
_second_of_two = shuffler([4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31])


@inlined
def _joined(a: Any, b: Any) -> Any:
    """Return the sums of two neighbours among the quarters of a, then of b."""
    both = join(a, b)
    return _first_of_two(both) + _second_of_two(both)


_SCORES_TEXT = """
def {name}(states, keys, weights, groups):
    for group in range(groups):
        cell = {lanes} * group
        first = dots(states, keys, cell)
        second = dots(states, keys, cell + 4)
{each}        low{r} = joined(first[{r}], second[{r}])
        first = dots(states, keys, cell + 8)
        second = dots(states, keys, cell + 12)
{each}        high{r} = joined(first[{r}], second[{r}])
{each}        store(weights + {weights_bytes} * {r} + 4 * cell, joined(low{r}, high{r}))
"""


@cache
def _scores(kind: str, key_length: int, state_bytes: int, queries: int) -> Callable[..., None]:
    """Return a function of some queries and a block of keys.

    (states, keys, weights, groups) writes q . k of the first 16 * groups cells to `weights`,
    float32 (queries, 64); what they are for cells that were never written does not matter.
    """
    plane = _plane(kind, key_length)
    rest = key_length % _LANES
    names = {
        "load_i64": load_i64,
        "load_floats": load_floats,
        "load_rest": loader(Vector("f32", rest or 1)),
        "pad": _padded(rest or 1),
        "no_floats": no_floats,
        "fused": fused,
        "transposed": transposed,
        **plane._asdict(),
    }
    sums = ", ".join(f"transposed(a{r}, b{r}, c{r}, d{r})" for r in range(queries))
    source = fill_in(
        _DOTS_TEXT,
        queries,
        name="dots",
        state_bytes=state_bytes,
        groups=-(-key_length // _GROUP),
        whole=key_length // _LANES,
        rest=rest,
        results=f"{sums},",
    )
    dots = inlined(define(source, "dots", names, __name__))
    names = {"dots": dots, "joined": _joined, "store": store}
    source = fill_in(
        _SCORES_TEXT, queries, name="scores", lanes=_LANES, weights_bytes=_WEIGHTS_BYTES
    )
    return helper(define(source, "scores", names, __name__))


# -- weights ---------------------------------------------------------------------------------------


@inlined
def _larger(a: Any, b: Any) -> Any:
    """Return the larger of two, a where b is NaN."""
    return where_less(a, b, b, a)


@cache
def _weigh(value_length: int) -> Callable[..., None]:
    """Return a function (state, weights, count, groups, scale) of one query and block.

    It makes products into weights of the first `count` cells, and 0 up to 16 * groups; and it
    brings maximum, sums and results of the query up to them.
    """
    chunks = _chunks(value_length)

    @helper
    def weigh(state: int, weights: int, count: int, groups: int, scale: float) -> None:
        lowest = all_lanes(no_floats(), _MINUS_INFINITY)
        before = load_floats(state + _MAXIMUM)
        best = before
        for group in range(groups):
            place = weights + 64 * group
            left = all_lanes(_lane_numbers(), count - _LANES * group)
            score = where_less(_lane_numbers(), left, load_floats(place) * scale, lowest)
            best = _larger(best, score)
            store(place, score)
        best = _larger(best, _across_8(best))
        best = _larger(best, _across_4(best))
        best = _larger(best, _across_2(best))
        best = _larger(best, _across_1(best))
        store(state + _MAXIMUM, best)
        # While all scores are -infinity, any finite number gives the weights 0.
        best = where_equal(best, lowest, no_floats(), best)
        shrink = exp(before - best)
        sums = load_floats(state + _SUMS) * shrink
        for group in range(groups):
            place = weights + 64 * group
            weight = exp(load_floats(place) - best)
            sums = sums + weight
            store(place, weight)
        store(state + _SUMS, sums)
        for number in range(chunks):
            place = state + _RESULTS + 64 * number
            store(place, load_floats(place) * shrink)

    return weigh


# -- results ---------------------------------------------------------------------------------------

_MIX_FOUR_TEXT = """
def {name}(states, values, weights, first, last, group):
    place = states + {results} + 256 * group
{each}    a{r} = load_floats(place + {state_bytes} * {r})
{each}    b{r} = load_floats(place + {state_bytes} * {r} + 64)
{each}    c{r} = load_floats(place + {state_bytes} * {r} + 128)
{each}    d{r} = load_floats(place + {state_bytes} * {r} + 192)
    for cell in range(first, last):
        scale = scale_of(values, cell, group)
        value_a = chunk(values, cell, 4 * group, scale)
        value_b = chunk(values, cell, 4 * group + 1, scale)
        value_c = chunk(values, cell, 4 * group + 2, scale)
        value_d = chunk(values, cell, 4 * group + 3, scale)
{each}        weight{r} = repeat_one_float(weights + {weights_bytes} * {r} + 4 * cell)
{each}        a{r} = fused(value_a, weight{r}, a{r})
{each}        b{r} = fused(value_b, weight{r}, b{r})
{each}        c{r} = fused(value_c, weight{r}, c{r})
{each}        d{r} = fused(value_d, weight{r}, d{r})
{each}    store(place + {state_bytes} * {r}, a{r})
{each}    store(place + {state_bytes} * {r} + 64, b{r})
{each}    store(place + {state_bytes} * {r} + 128, c{r})
{each}    store(place + {state_bytes} * {r} + 192, d{r})
"""

_MIX_ONE_TEXT = """
def {name}(states, values, weights, first, last, number):
    place = states + {results} + 64 * number
{each}    a{r} = load_floats(place + {state_bytes} * {r})
    for cell in range(first, last):
        scale = scale_of(values, cell, number // 4)
        value = {read}
{each}        weight{r} = repeat_one_float(weights + {weights_bytes} * {r} + 4 * cell)
{each}        a{r} = fused(value, weight{r}, a{r})
{each}    store(place + {state_bytes} * {r}, a{r})
"""


@cache
def _mix(kind: str, value_length: int, queries: int) -> Callable[..., None]:
    """Return a function of some queries and a block of values.

    (states, values, weights, first, last) adds cells first .. last - 1 to the results.
    """
    plane = _plane(kind, value_length)

    def made(text: str, read: str) -> Callable[..., None]:
        names = {
            "load_floats": load_floats,
            "repeat_one_float": repeat_one_float,
            "fused": fused,
            "store": store,
            "scale_of": plane.scale,
            "chunk": plane.chunk,
            "tail": plane.tail,
        }
        source = fill_in(
            text,
            queries,
            name="mix",
            results=_RESULTS,
            state_bytes=_state_bytes(value_length),
            weights_bytes=_WEIGHTS_BYTES,
            read=read,
        )
        return inlined(define(source, "mix", names, __name__))

    four = made(_MIX_FOUR_TEXT, "")
    one = made(_MIX_ONE_TEXT, "chunk(values, cell, number, scale)")
    last_one = made(_MIX_ONE_TEXT, "tail(values, cell, scale)")
    whole, rest = divmod(value_length, _LANES)
    fours = whole // 4

    @helper
    def mix(states: int, values: int, weights: int, first: int, last: int) -> None:
        for group in range(fours):
            four(states, values, weights, first, last, group)
        for number in range(4 * fours, whole):
            one(states, values, weights, first, last, number)
        if rest:
            last_one(states, values, weights, first, last, whole)

    return mix


# -- a unit of work --------------------------------------------------------------------------------


@cache
def _finish(value_length: int) -> Callable[..., None]:
    """Return a function (state, out) that writes the result of a query."""
    whole, rest = divmod(value_length, _LANES)
    first_lanes = shuffler(range(rest or 1))

    @helper
    def finish(state: int, out: int) -> None:
        total = load_floats(state + _SUMS)
        total = total + _across_8(total)
        total = total + _across_4(total)
        total = total + _across_2(total)
        total = total + _across_1(total)
        for number in range(whole):
            store(out + 64 * number, load_floats(state + _RESULTS + 64 * number) / total)
        if rest:
            last = load_floats(state + _RESULTS + 64 * whole) / total
            store(out + 64 * whole, first_lanes(last))

    return finish


class _Block(NamedTuple):
    """Take a block into the states of some queries; see `_block`."""

    four: Callable[..., None]
    one: Callable[..., None]


@cache
def _block(keys: str, values: str, key_length: int, value_length: int) -> _Block:
    """Return functions of four queries and of one: (states, keys, values, weights, start, scale).

    keys, values   addresses of the planes of a block, whose first cell is `start`
    weights        work space, float32 (queries, 64)
    Every query sees a cell of the block at least.
    """
    state_bytes = _state_bytes(value_length)
    weigh = _weigh(value_length)
    scores_of_one, scores_of_four = (
        _scores(keys, key_length, state_bytes, queries) for queries in (1, QUERIES_AT_ONCE)
    )
    mix_one, mix_four = (_mix(values, value_length, queries) for queries in (1, QUERIES_AT_ONCE))

    @inlined
    def seen(state: int, start: int) -> Any:
        return min(BLOCK_CELLS, load_i64(state + _POSITION) + 1 - start)

    @helper
    def one(states: int, keys: int, values: int, weights: int, start: int, scale: float) -> None:
        count = seen(states, start)
        groups = (count + _LANES - 1) // _LANES
        scores_of_one(states, keys, weights, groups)
        weigh(states, weights, count, groups, scale)
        mix_one(states, values, weights, 0, count)

    @helper
    def four(states: int, keys: int, values: int, weights: int, start: int, scale: float) -> None:
        least, most = BLOCK_CELLS, 0
        for query in range(QUERIES_AT_ONCE):
            count = seen(states + state_bytes * query, start)
            least, most = min(least, count), max(most, count)
        groups = (most + _LANES - 1) // _LANES
        scores_of_four(states, keys, weights, groups)
        for query in range(QUERIES_AT_ONCE):
            state, own = states + state_bytes * query, weights + _WEIGHTS_BYTES * query
            weigh(state, own, seen(state, start), groups, scale)
        mix_four(states, values, weights, 0, least)
        if least < most:
            for query in range(QUERIES_AT_ONCE):
                state, own = states + state_bytes * query, weights + _WEIGHTS_BYTES * query
                mix_one(state, values, own, least, seen(state, start))

    return _Block(four, one)


@helper
def _heads_a_unit(rows: int, kv_heads: int, group: int, threads: int) -> Any:
    """Return how many of the heads that read the same keys and values make a unit of work.

    Most, so that these are read once; fewer where threads would have nothing to do. To read counts
    as much as a query.
    """
    best, least = 1, 0
    for heads in range(1, min(group, UNIT_QUERIES) + 1):
        unit_rows = min(rows, UNIT_QUERIES // heads)
        parts = (rows + unit_rows - 1) // unit_rows * kv_heads * ((group + heads - 1) // heads)
        cost = (parts + threads - 1) // threads * (1 + heads * unit_rows)
        if heads == 1 or cost <= least:
            best, least = heads, cost
    return best


@cache
def _function(keys: str, values: str, key_length: int, value_length: int) -> Callable[..., None]:
    block = _block(keys, values, key_length, value_length)
    take_four, take_one = block
    finish = _finish(value_length)
    chunks, state_bytes = _chunks(value_length), _state_bytes(value_length)
    key_bytes = BLOCK_CELLS * CACHE_TYPES[keys].head_bytes(key_length)
    value_bytes = BLOCK_CELLS * CACHE_TYPES[values].head_bytes(value_length)

    @inlined
    def begin(state: int, q: int, position: int) -> None:
        store(state + _QUERY, q)
        store(state + _POSITION, position)
        store(state + _MAXIMUM, all_lanes(no_floats(), _MINUS_INFINITY))
        store(state + _SUMS, no_floats())
        for number in range(chunks):
            store(state + _RESULTS + 64 * number, no_floats())

    @helper
    def attend(
        states: int, queries: int, line: int, k_offset: int, v_offset: int, scale: float
    ) -> None:
        """Take all blocks into the states of a unit; line is the address of its sequence's row."""
        weights = states + UNIT_QUERIES * state_bytes
        furthest = 0
        for query in range(queries):
            furthest = max(furthest, load_i64(states + state_bytes * query + _POSITION))
        for number in range(furthest // BLOCK_CELLS + 1):
            place, start = load_i64(line + 8 * number), BLOCK_CELLS * number
            query = 0
            while query < queries:
                state = states + state_bytes * query
                ready = 0  # queries from here on, four at most, that see a cell of the block
                for next_query in range(query, min(query + QUERIES_AT_ONCE, queries)):
                    if load_i64(states + state_bytes * next_query + _POSITION) < start:
                        break
                    ready += 1
                if ready == QUERIES_AT_ONCE:
                    take_four(state, place + k_offset, place + v_offset, weights, start, scale)
                    query += QUERIES_AT_ONCE
                else:
                    if ready:
                        take_one(state, place + k_offset, place + v_offset, weights, start, scale)
                    query += 1

    def attention(arguments: int, thread: int, threads: int) -> None:
        rows = load_i64(word(arguments, 0))
        sequences, positions = word(arguments, 1), word(arguments, 2)
        q, blocks, out = word(arguments, 3), word(arguments, 4), word(arguments, 5)
        table_width = word(arguments, 6)
        k_offset, v_offset = word(arguments, 7), word(arguments, 8)
        heads, kv_heads = word(arguments, 9), word(arguments, 10)
        scale = real(arguments, 13)
        states = word(arguments, 14) + thread * word(arguments, 15)
        group = heads // kv_heads
        unit_heads = _heads_a_unit(rows, kv_heads, group, threads)
        unit, first = 0, 0
        while first < rows:
            sequence = load_i64(sequences + 8 * first)
            most = min(rows, first + UNIT_QUERIES // unit_heads)
            last = first + 1
            while last < most and load_i64(sequences + 8 * last) == sequence:
                last += 1
            line = blocks + 8 * table_width * sequence
            for first_head in range(0, heads, group):
                kv_head = first_head // group
                for part in range(first_head, first_head + group, unit_heads):
                    part_heads = min(unit_heads, first_head + group - part)
                    unit += 1
                    if unit % threads != thread:
                        continue
                    for row in range(first, last):
                        for head in range(part_heads):
                            number = (row - first) * part_heads + head
                            place = q + 4 * key_length * (row * heads + part + head)
                            position = load_i64(positions + 8 * row)
                            begin(states + state_bytes * number, place, position)
                    queries = (last - first) * part_heads
                    key_plane = k_offset + key_bytes * kv_head
                    value_plane = v_offset + value_bytes * kv_head
                    attend(states, queries, line, key_plane, value_plane, scale)
                    for row in range(first, last):
                        for head in range(part_heads):
                            number = (row - first) * part_heads + head
                            place = out + 4 * value_length * (row * heads + part + head)
                            finish(states + state_bytes * number, place)
            first = last

    name = f"attention_{keys}_{values}_{key_length}_{value_length}"
    attention.__name__ = attention.__qualname__ = name
    return compiled(SIGNATURE)(attention)


@cache
def attention_kernel(
    keys: str, values: str, key_length: int, value_length: int, work: Work
) -> HostKernel:
    """Return the kernel `attention` for a pair of `CACHE_TYPES` and lengths of heads.

    work   of `attention_work_bytes` or more for each thread
    """
    return HostKernel(_function(keys, values, key_length, value_length), tuple(work))
