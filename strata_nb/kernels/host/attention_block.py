"""Take one block of 64 cells into the running softmax of some queries.

The state of a query lies in work space: how far its softmax has come. A block changes it in three
steps: *scores* (q . k of every cell), *weights* (exp, and the new maximum and sums), *results* (the
weighted values). Scores and results exist for one query and for two at once, so that a key or value
which was loaded and converted serves both: eight sums of scores, or of results, in registers. Four
at once gained nothing with AVX-512 and lost with the 16 registers of AVX2.

The lanes of sixteen sums are added up by transposing, which costs a third of the products, not more
than them, as a sum within each register would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from strata_nb.compiling import helper, inlined
from strata_nb.formats import BLOCK_CELLS, CACHE_TYPES
from strata_nb.kernels.host.exponential import exp
from strata_nb.kernels.host.generated import define, fill_in
from strata_nb.kernels.host.instructions import prefetch_far
from strata_nb.kernels.host.lanes import across_1, across_2, across_4, across_8, larger
from strata_nb.kernels.host.planes import GROUP, LANES, padded, plane_reader
from strata_nb.kernels.host.products import transposed
from strata_nb.kernels.host.vectors import (
    INTEGERS,
    Vector,
    all_lanes,
    constant,
    fused,
    join,
    load_floats,
    loader,
    no_floats,
    repeat_one_float,
    shuffler,
    where_equal,
    where_less,
)
from strata_nb.raw_memory import load_i64, store

QUERIES_AT_ONCE = 2

# The state of a query, in bytes: three words, then vectors.
QUERY, RESULT, POSITION = 0, 8, 16  # addresses of q and of the result, the position of the row
MAXIMUM, SUMS, RESULTS = 64, 128, 192
WEIGHTS_BYTES = 4 * BLOCK_CELLS  # of one query and block

_lane_numbers = constant(INTEGERS, range(LANES))
MINUS_INFINITY = np.float32(-np.inf)


def chunks_of(length: int) -> int:
    """Return how many vectors hold a head."""
    return -(-length // LANES)


def state_bytes_of(value_length: int) -> int:
    """Return the bytes of the state of a query."""
    return RESULTS + 64 * chunks_of(value_length)


# -- scores ----------------------------------------------------------------------------------------

_DOTS_TEXT = """
def {name}(states, keys, ahead, cell):
    for line in range(0, {four_cells}, 64):
        prefetch_far(keys + ahead + {four_cells} // 4 * cell + line)
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
def {name}(states, keys, ahead, weights, groups):
    for group in range(groups):
        cell = {lanes} * group
        first = dots(states, keys, ahead, cell)
        second = dots(states, keys, ahead, cell + 4)
{each}        low{r} = joined(first[{r}], second[{r}])
        first = dots(states, keys, ahead, cell + 8)
        second = dots(states, keys, ahead, cell + 12)
{each}        high{r} = joined(first[{r}], second[{r}])
{each}        store(weights + {weights_bytes} * {r} + 4 * cell, joined(low{r}, high{r}))
"""


@cache
def _scores(kind: str, key_length: int, state_bytes: int, queries: int) -> Callable[..., None]:
    """Return a function of some queries and a block of keys.

    (states, keys, ahead, weights, groups) writes q . k of the first 16 * groups cells to `weights`,
    float32 (queries, 64); what they are for cells that were never written does not matter.
    """
    plane = plane_reader(kind, key_length)
    rest = key_length % LANES
    names = {
        "load_i64": load_i64,
        "prefetch_far": prefetch_far,
        "load_floats": load_floats,
        "load_rest": loader(Vector("f32", rest or 1)),
        "pad": padded(rest or 1),
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
        four_cells=4 * key_length * CACHE_TYPES[kind].dtype.itemsize,
        groups=-(-key_length // GROUP),
        whole=key_length // LANES,
        rest=rest,
        results=f"{sums},",
    )
    dots = inlined(define(source, "dots", names, __name__))
    names = {"dots": dots, "joined": _joined, "store": store}
    source = fill_in(_SCORES_TEXT, queries, name="scores", lanes=LANES, weights_bytes=WEIGHTS_BYTES)
    return helper(define(source, "scores", names, __name__))


# -- weights ---------------------------------------------------------------------------------------


@cache
def _weigh(value_length: int) -> Callable[..., None]:
    """Return a function (state, weights, count, groups, scale) of one query and block.

    It makes products into weights of the first `count` cells, and 0 up to 16 * groups; and it
    brings maximum, sums and results of the query up to them.
    """
    chunks = chunks_of(value_length)

    @helper
    def weigh(state: int, weights: int, count: int, groups: int, scale: float) -> None:
        lowest = all_lanes(no_floats(), MINUS_INFINITY)
        before = load_floats(state + MAXIMUM)
        best = before
        for group in range(groups):
            place = weights + 64 * group
            left = all_lanes(_lane_numbers(), count - LANES * group)
            score = where_less(_lane_numbers(), left, load_floats(place) * scale, lowest)
            best = larger(best, score)
            store(place, score)
        best = larger(best, across_8(best))
        best = larger(best, across_4(best))
        best = larger(best, across_2(best))
        best = larger(best, across_1(best))
        store(state + MAXIMUM, best)
        # While all scores are -infinity, any finite number gives the weights 0.
        best = where_equal(best, lowest, no_floats(), best)
        shrink = exp(before - best)
        sums = load_floats(state + SUMS) * shrink
        for group in range(groups):
            place = weights + 64 * group
            weight = exp(load_floats(place) - best)
            sums = sums + weight
            store(place, weight)
        store(state + SUMS, sums)
        for number in range(chunks):
            place = state + RESULTS + 64 * number
            store(place, load_floats(place) * shrink)

    return weigh


# -- results ---------------------------------------------------------------------------------------

_MIX_FOUR_TEXT = """
def {name}(states, values, ahead, weights, first, last, group):
    place = states + {results} + 256 * group
{each}    a{r} = load_floats(place + {state_bytes} * {r})
{each}    b{r} = load_floats(place + {state_bytes} * {r} + 64)
{each}    c{r} = load_floats(place + {state_bytes} * {r} + 128)
{each}    d{r} = load_floats(place + {state_bytes} * {r} + 192)
    for cell in range(first, last):
        for line in range(0, 64 * {size}, 64):
            prefetch_far(values + ahead + {size} * ({length} * cell + 64 * group) + line)
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
def {name}(states, values, ahead, weights, first, last, number):
    place = states + {results} + 64 * number
{each}    a{r} = load_floats(place + {state_bytes} * {r})
    for cell in range(first, last):
        prefetch_far(values + ahead + {size} * ({length} * cell + 16 * number))
        scale = scale_of(values, cell, number // 4)
        value = {read}
{each}        weight{r} = repeat_one_float(weights + {weights_bytes} * {r} + 4 * cell)
{each}        a{r} = fused(value, weight{r}, a{r})
{each}    store(place + {state_bytes} * {r}, a{r})
"""


@cache
def _mix(kind: str, value_length: int, queries: int) -> Callable[..., None]:
    """Return a function of some queries and a block of values.

    (states, values, ahead, weights, first, last) adds cells first .. last - 1 to the results.
    """
    plane = plane_reader(kind, value_length)

    def made(text: str, read: str) -> Callable[..., None]:
        names = {
            "load_floats": load_floats,
            "repeat_one_float": repeat_one_float,
            "fused": fused,
            "store": store,
            "prefetch_far": prefetch_far,
            "scale_of": plane.scale,
            "chunk": plane.chunk,
            "tail": plane.tail,
        }
        source = fill_in(
            text,
            queries,
            name="mix",
            results=RESULTS,
            state_bytes=state_bytes_of(value_length),
            weights_bytes=WEIGHTS_BYTES,
            read=read,
            size=CACHE_TYPES[kind].dtype.itemsize,
            length=value_length,
        )
        return inlined(define(source, "mix", names, __name__))

    four = made(_MIX_FOUR_TEXT, "")
    one = made(_MIX_ONE_TEXT, "chunk(values, cell, number, scale)")
    last_one = made(_MIX_ONE_TEXT, "tail(values, cell, scale)")
    whole, rest = divmod(value_length, LANES)
    fours, ones = divmod(whole, 4)

    @helper
    def mix(states: int, values: int, ahead: int, weights: int, first: int, last: int) -> None:
        if fours:  # Numba compiles what is called in a loop, but not what `if 0` leaves out
            for group in range(fours):
                four(states, values, ahead, weights, first, last, group)
        if ones:
            for number in range(4 * fours, whole):
                one(states, values, ahead, weights, first, last, number)
        if rest:
            last_one(states, values, ahead, weights, first, last, whole)

    return mix


# -- states ----------------------------------------------------------------------------------------


@cache
def finisher(value_length: int) -> Callable[..., None]:
    """Return a function (state) that writes the result of a query to its place."""
    whole, rest = divmod(value_length, LANES)
    first_lanes = shuffler(range(rest or 1))

    @helper
    def finish(state: int) -> None:
        out = load_i64(state + RESULT)
        total = load_floats(state + SUMS)
        total = total + across_8(total)
        total = total + across_4(total)
        total = total + across_2(total)
        total = total + across_1(total)
        for number in range(whole):
            store(out + 64 * number, load_floats(state + RESULTS + 64 * number) / total)
        if rest:
            last = load_floats(state + RESULTS + 64 * whole) / total
            store(out + 64 * whole, first_lanes(last))

    return finish


class BlockSteps(NamedTuple):
    """Take a block into the states of some queries; see `_block`."""

    two: Callable[..., None]
    one: Callable[..., None]


@cache
def block_steps(keys: str, values: str, key_length: int, value_length: int) -> BlockSteps:
    """Return functions of two queries and of one.

    (states, keys, values, ahead, weights, start, scale)

    keys, values   addresses of the planes of a block, whose first cell is `start`
    ahead          distance to the same of the next block, which is asked for beside the work: it
                   lies anywhere, and no processor guesses where
    weights        work space, float32 (queries, 64)
    Every query sees a cell of the block at least.
    """
    state_bytes = state_bytes_of(value_length)
    weigh = _weigh(value_length)
    scores_of_one, scores_of_two = (
        _scores(keys, key_length, state_bytes, queries) for queries in (1, QUERIES_AT_ONCE)
    )
    mix_one, mix_two = (_mix(values, value_length, queries) for queries in (1, QUERIES_AT_ONCE))

    @inlined
    def seen(state: int, start: int) -> Any:
        return min(BLOCK_CELLS, load_i64(state + POSITION) + 1 - start)

    @helper
    def one(
        states: int, keys: int, values: int, ahead: int, weights: int, start: int, scale: float
    ) -> None:
        count = seen(states, start)
        groups = (count + LANES - 1) // LANES
        scores_of_one(states, keys, ahead, weights, groups)
        weigh(states, weights, count, groups, scale)
        mix_one(states, values, ahead, weights, 0, count)

    @helper
    def two(
        states: int, keys: int, values: int, ahead: int, weights: int, start: int, scale: float
    ) -> None:
        least, most = BLOCK_CELLS, 0
        for query in range(QUERIES_AT_ONCE):
            count = seen(states + state_bytes * query, start)
            least, most = min(least, count), max(most, count)
        groups = (most + LANES - 1) // LANES
        scores_of_two(states, keys, ahead, weights, groups)
        for query in range(QUERIES_AT_ONCE):
            state, own = states + state_bytes * query, weights + WEIGHTS_BYTES * query
            weigh(state, own, seen(state, start), groups, scale)
        mix_two(states, values, ahead, weights, 0, least)
        if least < most:
            for query in range(QUERIES_AT_ONCE):
                state, own = states + state_bytes * query, weights + WEIGHTS_BYTES * query
                mix_one(state, values, ahead, own, least, seen(state, start))

    return BlockSteps(two, one)
