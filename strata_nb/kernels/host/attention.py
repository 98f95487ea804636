"""Attention over the K/V of some rows: a softmax that streams over blocks of 64 cells.

A *query* is one head of one row. The bits of its result follow from this order alone:

- Score: lane i sums q[c] * k[c] over the columns c with c % 16 == i, ascending and fused; then the
  lanes are added as `transposed` does, halving their number each time. Times the scale.
- A block of 64 cells at a time, in order: the running maximum takes in the block's; sums and
  results shrink by exp(old - new); the weight exp(score - maximum) of cell c goes to sum c % 16,
  and, fused and in ascending order of cells, into the result. At the end, the results over the sum.

What else happens is for speed: *units* of work, each some rows of one sequence and some heads that
read the same keys and values, dealt out to the threads in turn. A unit takes a block into all its
queries before it goes on to the next, so that the block comes from memory once.

Keys beyond a row's position may be multiplied, but the score is replaced; values are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from strata_nb.compiling import compiled, helper, inlined
from strata_nb.formats import BLOCK_CELLS, CACHE_TYPES
from strata_nb.kernels.host.attention_block import (
    MAXIMUM,
    MINUS_INFINITY,
    POSITION,
    QUERIES_AT_ONCE,
    QUERY,
    RESULT,
    RESULTS,
    SUMS,
    WEIGHTS_BYTES,
    block_steps,
    chunks_of,
    finisher,
    state_bytes_of,
)
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, Work, real, word
from strata_nb.kernels.host.vectors import all_lanes, no_floats
from strata_nb.raw_memory import load_i64, store

UNIT_QUERIES = 32


def attention_work_bytes(value_length: int) -> int:
    """Return the bytes of work space that a thread needs."""
    return UNIT_QUERIES * state_bytes_of(value_length) + QUERIES_AT_ONCE * WEIGHTS_BYTES


@helper
def _heads_a_unit(rows: int, kv_heads: int, group: int, threads: int) -> Any:
    """Return how many of the heads that read the same keys and values make a unit of work.

    Most, so that these are read once; fewer where threads would have nothing to do. To read counts
    as much as a query.
    """
    best, least = 1, 0
    for heads in range(1, min(group, UNIT_QUERIES) + 1):
        unit_rows = max(1, min(rows, UNIT_QUERIES // heads))
        parts = (rows + unit_rows - 1) // unit_rows * kv_heads * ((group + heads - 1) // heads)
        cost = (parts + threads - 1) // threads * (1 + heads * unit_rows)
        if heads == 1 or cost <= least:
            best, least = heads, cost
    return best


@cache
def _function(keys: str, values: str, key_length: int, value_length: int) -> Callable[..., None]:
    take_two, take_one = block_steps(keys, values, key_length, value_length)
    finish = finisher(value_length)
    chunks, state_bytes = chunks_of(value_length), state_bytes_of(value_length)
    key_bytes = BLOCK_CELLS * CACHE_TYPES[keys].head_bytes(key_length)
    value_bytes = BLOCK_CELLS * CACHE_TYPES[values].head_bytes(value_length)

    @inlined
    def begin(state: int, q: int, out: int, position: int) -> None:
        store(state + QUERY, q)
        store(state + RESULT, out)
        store(state + POSITION, position)
        store(state + MAXIMUM, all_lanes(no_floats(), MINUS_INFINITY))
        store(state + SUMS, no_floats())
        for number in range(chunks):
            store(state + RESULTS + 64 * number, no_floats())

    @helper
    def attend(
        states: int, queries: int, line: int, k_offset: int, v_offset: int, scale: float
    ) -> None:
        """Take all blocks into the states of a unit; line is the address of its sequence's row."""
        weights = states + UNIT_QUERIES * state_bytes
        furthest = 0
        for query in range(queries):
            furthest = max(furthest, load_i64(states + state_bytes * query + POSITION))
        for number in range(furthest // BLOCK_CELLS + 1):
            place, start = load_i64(line + 8 * number), BLOCK_CELLS * number
            following = place
            if number < furthest // BLOCK_CELLS:
                following = load_i64(line + 8 * (number + 1))
            keys, values, ahead = place + k_offset, place + v_offset, following - place
            query = 0
            while query < queries:
                state = states + state_bytes * query
                ready = 0  # queries from here on, two at most, that see a cell of the block
                for next_query in range(query, min(query + QUERIES_AT_ONCE, queries)):
                    if load_i64(states + state_bytes * next_query + POSITION) < start:
                        break
                    ready += 1
                if ready == QUERIES_AT_ONCE:
                    take_two(state, keys, values, ahead, weights, start, scale)
                    query += QUERIES_AT_ONCE
                else:
                    if ready:
                        take_one(state, keys, values, ahead, weights, start, scale)
                    query += 1

    def attention(arguments: int, thread: int, threads: int) -> None:
        rows = load_i64(word(arguments, 0))
        sequences, positions = word(arguments, 1), word(arguments, 2)
        q, blocks, out = word(arguments, 3), word(arguments, 4), word(arguments, 5)
        table_width = word(arguments, 7)
        k_offset, v_offset = word(arguments, 8), word(arguments, 9)
        heads, kv_heads = word(arguments, 10), word(arguments, 11)
        scale = real(arguments, 14)
        states = word(arguments, 15) + thread * word(arguments, 16)
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
                            number = row * heads + part + head
                            begin(
                                states + state_bytes * ((row - first) * part_heads + head),
                                q + 4 * key_length * number,
                                out + 4 * value_length * number,
                                load_i64(positions + 8 * row),
                            )
                    queries = (last - first) * part_heads
                    key_plane = k_offset + key_bytes * kv_head
                    value_plane = v_offset + value_bytes * kv_head
                    attend(states, queries, line, key_plane, value_plane, scale)
                    for query in range(queries):
                        finish(states + state_bytes * query)
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
