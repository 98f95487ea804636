"""Attention of a prompt batch by warpgroups (a try)."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.attention_sets import is_no_number
from strata_nb.kernels.gpu.attention_spans import span_of
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_copies,
    await_previous,
    barrier,
    block_x,
    block_y,
    copy_16,
    f32,
    halves_of_f32,
    i32,
    i64,
    larger_f32,
    load_f32,
    load_i64,
    of_any_lane,
    power_of_two,
    quotient_i32,
    shared_load_4xi32,
    shared_store_4xi32,
    shared_store_i32,
    shuffle_xor_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.intrinsics.attending import mixed_products, score_products
from strata_nb.kernels.gpu.intrinsics.warpgroups import WARPGROUP, nearly_divided, publish
from strata_nb.kernels.gpu.operations import Arguments, Function, GpuKernel, Grid, blocks_of
from strata_nb.kernels.gpu.planes import plane_bytes

GROUPS = 2
PAIRS = 64
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_LOG2_E = 1 / math.log(2)
_NANS = 0x7FFF7FFF
_REGISTERS = 255
_UNIT, _MOST = 9.0, 15.0
_MINUS_INFINITY = float("-inf")
_PANEL = 128 * BLOCK_CELLS


def turned(row: Any, piece: Any) -> Any:
    return _PANEL * (piece >> 3) + 128 * row + 16 * ((piece & 7) ^ (row & 7))


@cache
def _copier(length: int, threads: int) -> Function:
    pieces, pitch = length // 8, 2 * length
    between = threads // pieces

    def copy(place: int, plane: int, thread: int) -> None:
        row, piece = thread // pieces, thread & (pieces - 1)
        to, address, number = place + turned(row, piece), plane + 16 * thread, 0
        while number < BLOCK_CELLS // between:
            copy_16(to + 128 * between * number, address + pitch * between * number)
            number += 1

    return copy


@cache
def _sifter(value_length: int, threads: int) -> Function:
    pieces = value_length // 8
    between = threads // pieces

    def sift(keys: int, values: int, seen: int, thread: int) -> None:
        row, piece = thread // pieces, thread & (pieces - 1)
        while row < BLOCK_CELLS:
            if row >= seen:
                at = values + turned(row, piece)
                a, b, c, d = shared_load_4xi32(at)
                if is_no_number(a) or is_no_number(b) or is_no_number(c) or is_no_number(d):
                    nothing = i32(0)
                    shared_store_4xi32(at, nothing, nothing, nothing, nothing)
                    shared_store_i32(keys + 128 * row, i32(_NANS))
            row += between

    return sift


def _sum_of_quad(x: Any) -> Any:
    x += shuffle_xor_f32(x, 1)
    return x + shuffle_xor_f32(x, 2)


def _largest_of_quad(x: Any) -> Any:
    x = larger_f32(x, shuffle_xor_f32(x, 1))
    return larger_f32(x, shuffle_xor_f32(x, 2))


def _chosen(best: Any, most: Any) -> Any:
    best = _largest_of_quad(best)
    return f32(_UNIT) - best if best > most else f32(0.0)


def _eight(a: Any, b: Any) -> Any:
    return a, a, b, b, a, a, b, b


@cache
def of_pairs(eights: int) -> Function:
    if eights == 1:
        return _eight
    others = of_pairs(eights // 2)
    return lambda a, b: others(a, b) + others(a, b)


def _seen_eight(x: Any, seen: Any, other: Any) -> Any:
    nothing = f32(_MINUS_INFINITY)
    return (
        x[0] if seen >= 0 else nothing,
        x[1] if seen >= 1 else nothing,
        x[2] if other >= 0 else nothing,
        x[3] if other >= 1 else nothing,
        x[4] if seen >= 8 else nothing,
        x[5] if seen >= 9 else nothing,
        x[6] if other >= 8 else nothing,
        x[7] if other >= 9 else nothing,
    )


@cache
def seen_ones(eights: int) -> Function:
    if eights == 1:
        return _seen_eight
    others = seen_ones(eights - 1)
    return lambda x, seen, other: _seen_eight(x[:8], seen, other) + others(
        x[8:], i32(seen - 16), i32(other - 16)
    )


def _largest_eight(x: Any, a: Any, b: Any) -> Any:
    c = larger_f32(larger_f32(x[0], x[1]), larger_f32(x[4], x[5]))
    d = larger_f32(larger_f32(x[2], x[3]), larger_f32(x[6], x[7]))
    return larger_f32(a, c), larger_f32(b, d)


@cache
def largest_of(eights: int) -> Function:
    if eights == 1:
        return _largest_eight
    others = largest_of(eights - 1)

    def largest(x: Any, a: Any, b: Any) -> Any:
        c, d = _largest_eight(x[:8], a, b)
        return others(x[8:], c, d)

    return largest


def _add_eight(x: Any, a: Any, b: Any) -> Any:
    return x[0] + a, x[1] + a, x[2] + b, x[3] + b, x[4] + a, x[5] + a, x[6] + b, x[7] + b


def _times_eight(x: Any, a: Any, b: Any) -> Any:
    return x[0] * a, x[1] * a, x[2] * b, x[3] * b, x[4] * a, x[5] * a, x[6] * b, x[7] * b


@cache
def of_each(one: Function, eights: int) -> Function:
    if eights == 1:
        return one
    others = of_each(one, eights - 1)
    return lambda x, a, b: one(x[:8], a, b) + others(x[8:], a, b)


def _weigh_eight(x: Any, first: Any, second: Any) -> Any:
    a, b, c, d = power_of_two(x[0]), power_of_two(x[1]), power_of_two(x[2]), power_of_two(x[3])
    e, f, g, h = power_of_two(x[4]), power_of_two(x[5]), power_of_two(x[6]), power_of_two(x[7])
    words = halves_of_f32(a, b), halves_of_f32(c, d), halves_of_f32(e, f), halves_of_f32(g, h)
    return words, first + ((a + b) + (e + f)), second + ((c + d) + (g + h))


@cache
def weigh(eights: int) -> Function:
    if eights == 1:
        return _weigh_eight
    others = weigh(eights - 1)

    def of_all(x: Any, first: Any, second: Any) -> Any:
        words, first, second = _weigh_eight(x[:8], first, second)
        more, first, second = others(x[8:], first, second)
        return words + more, first, second

    return of_all


@cache
def store_row(pair: int, eights: int) -> Function:
    first = 2 * pair
    second, third, fourth = first + 1, first + 4, first + 5

    def one(place: int, x: Any, factor: Any) -> None:
        store_f32(place, x[first] * factor)
        store_f32(place + 4, x[second] * factor)
        store_f32(place + 32, x[third] * factor)
        store_f32(place + 36, x[fourth] * factor)

    if eights == 1:
        return one
    others = store_row(pair, eights - 1)

    def all_columns(place: int, x: Any, factor: Any) -> None:
        one(place, x[:8], factor)
        others(place + 64, x[8:], factor)

    return all_columns


def _two(place: int, by: Any) -> Any:
    return halves_of_f32(load_f32(place) * by, load_f32(place + 4) * by)


@cache
def query_loader(steps: int) -> Function:
    def step(x: int, y: int, by: Any) -> Any:
        return _two(x, by), _two(y, by), _two(x + 32, by), _two(y + 32, by)

    if steps == 1:
        return step
    others = query_loader(steps - 1)
    return lambda x, y, by: step(x, y, by) + others(x + 64, y + 64, by)


@cache
def warpgroup_attention_kernel(key_length: int, value_length: int, groups: int = GROUPS) -> GpuKernel:
    pairs, threads = PAIRS * groups, WARPGROUP * groups
    key_bytes, value_bytes = BLOCK_CELLS * 2 * key_length, BLOCK_CELLS * 2 * value_length
    stage = key_bytes + value_bytes
    pairs_shift = pairs.bit_length() - 1
    key_plane, value_plane = plane_bytes("f16", key_length), plane_bytes("f16", value_length)
    copy_keys, copy_values = _copier(key_length, threads), _copier(value_length, threads)
    sift = _sifter(value_length, threads)
    eights, columns = BLOCK_CELLS // 16, value_length // 16
    multiply = score_products(BLOCK_CELLS, key_length // 16)
    mix = mixed_products(value_length, BLOCK_CELLS)
    begun, no_sums = of_pairs(eights), of_pairs(columns)
    only_seen, largest, weigh_all = seen_ones(eights), largest_of(eights), weigh(eights)
    shift, shrink = of_each(_add_eight, eights), of_each(_times_eight, columns)
    store, store_second = store_row(0, columns), store_row(1, columns)
    load_queries = query_loader(key_length // 16)

    def position_of(positions: int, row: int, begin: int, end: int) -> Any:
        position = i32(-1)
        if begin <= row and row < end:
            position = i32(load_i64(positions + 8 * row))
        return position

    def attention(
        rows: int,
        sequences: int,
        positions: int,
        q: int,
        blocks: int,
        out: int,
        _work: int,
        table_width: int,
        k_offset: int,
        v_offset: int,
        heads: int,
        kv_heads: int,
        _key_length: int,
        _value_length: int,
        scale: Any,
    ) -> None:
        kv_head, thread = i64(block_y()), thread_index()
        await_previous()
        count, group = load_i64(rows), quotient_i32(i32(heads), i32(kv_heads))
        tile = ((count * group + pairs - 1) >> pairs_shift) - 1 - block_x()
        if tile < 0:
            return
        first_pair = i32(pairs * tile)
        begin = i64(quotient_i32(first_pair, group))
        stop = min(i64(quotient_i32(i32(first_pair + pairs + group - 1), group)), count)
        lane = thread & 31
        g, t = lane >> 2, lane & 3
        pair = first_pair + 16 * (thread >> 5) + g
        row, other_row = quotient_i32(i32(pair), group), quotient_i32(i32(pair + 8), group)
        here = heads * min(row, count - 1) + group * kv_head + pair - group * row
        there = heads * min(other_row, count - 1) + group * kv_head + pair + 8 - group * other_row
        queries = load_queries(
            q + 4 * key_length * here + 8 * t, q + 4 * key_length * there + 8 * t, scale * f32(_LOG2_E)
        )
        k_plane, v_plane = k_offset + key_plane * kv_head, v_offset + value_plane * kv_head

        while begin < stop:
            end, last, lowest = span_of(sequences, positions, begin, stop, lane)
            line = blocks + 8 * table_width * load_i64(sequences + 8 * begin)
            position = position_of(positions, row, begin, end)
            other_position = position_of(positions, other_row, begin, end)
            block = load_i64(line)
            barrier()
            place = i32(0)
            copy_keys(place, block + k_plane, thread)
            copy_values(place + key_bytes, block + v_plane, thread)
            block = load_i64(line + 8 * (min(BLOCK_CELLS, last) >> _BLOCK_SHIFT))
            zero, nothing = f32(0.0), f32(_MINUS_INFINITY)
            offset, other_offset, total, other_total = zero, zero, zero, zero
            sums, first = no_sums(zero, zero), i32(0)
            while first <= last:
                await_copies()
                publish()
                barrier()
                other_place = i32(stage - place)
                if first + BLOCK_CELLS <= last:
                    copy_keys(other_place, block + k_plane, thread)
                    copy_values(other_place + key_bytes, block + v_plane, thread)
                    block = load_i64(line + 8 * (min(first + 2 * BLOCK_CELLS, last) >> _BLOCK_SHIFT))
                are_seen = first + BLOCK_CELLS - 1 <= lowest
                if not are_seen:
                    sift(place, place + key_bytes, i32(lowest - first + 1), thread)
                    publish()
                    barrier()
                found = multiply(begun(offset, other_offset), queries, place)
                if not are_seen:
                    cell = first + 2 * t
                    found = only_seen(found, i32(position - cell), i32(other_position - cell))
                if first == 0:
                    a, b = largest(found, nothing, nothing)
                    offset, other_offset = _chosen(a, nothing), _chosen(b, nothing)
                    found = shift(found, offset, other_offset)
                a, b = largest(found, nothing, nothing)
                if of_any_lane(i32(1) if larger_f32(a, b) > f32(_MOST) else i32(0)) != 0:
                    a, b = _chosen(a, f32(_MOST)), _chosen(b, f32(_MOST))
                    c, d = power_of_two(a), power_of_two(b)
                    found, sums = shift(found, a, b), shrink(sums, c, d)
                    offset, other_offset = offset + a, other_offset + b
                    total, other_total = total * c, other_total * d
                words, total, other_total = weigh_all(found, total, other_total)
                sums = mix(sums, words, place + key_bytes)
                place, first = other_place, i32(first + BLOCK_CELLS)

            one = f32(1.0)
            a, b = nearly_divided(one, _sum_of_quad(total)), nearly_divided(one, _sum_of_quad(other_total))
            if position >= 0:
                store(out + 4 * value_length * here + 8 * t, sums, a)
            if other_position >= 0:
                store_second(out + 4 * value_length * there + 8 * t, sums, b)
            begin = end

    def grid(given: Arguments, rows: int) -> Grid:
        kv_heads = given["kv_heads"]
        return blocks_of(rows * (given["heads"] // kv_heads), pairs), kv_heads, 1

    name = f"attention_warpgroups_{key_length}_{value_length}"
    attention.__name__ = attention.__qualname__ = name
    return GpuKernel(name, attention, threads, grid, lambda _: 2 * stage, _REGISTERS)
