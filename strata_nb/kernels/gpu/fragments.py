"""Read weights as tensor cores take them: the packed layout has their order.

A lane 4 * g + t of a product of bytes (`intrinsics/matrices.py`) needs of an output 4 * t .. 4 * t
+ 3 of a sub-block's 32 values, and those 16 further. In the packed layout word t of a piece of 4
bits holds exactly these, in its low and its high nibbles; what a type has of higher bits lies
beside them. So pieces are copied to shared memory as they are, a lane reads a word of each, and
decoding is a few masks.

What sub-blocks are scaled by is decoded once for all rows, to floats in shared memory.

Here are the types whose rows are whole tiles and whose sub-blocks are scaled in pairs
(`scaling.py`). All others are decoded by `weights.py` and `grids.py`, into bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import (
    copy_4,
    copy_8,
    copy_16,
    even_bytes,
    f32_of_half,
    f32_of_i32,
    i32,
    load_i32,
    load_u16,
    shared_load_i32,
    shared_load_matrices,
)
from strata_nb.kernels.gpu.operations import Function
from strata_nb.kernels.gpu.tile_rows import APART, TILE
from strata_nb.kernels.gpu.weights import place_of
from strata_nb.packing import GROUP_ROWS, Field, fields

T = TensorType

_COPIES = {16: copy_16, 8: copy_8, 4: copy_4}
_LOW = 0x0F0F0F0F
_HIGHEST = -0x7F7F7F80  # bits of the bytes of a word


class Fragments(NamedTuple):
    """Hold device functions that read tiles of a type.

    group_bytes  of a tile of a group in shared memory
    copy         (target, group, rows_in_group, row, blocks, tile, s): copy what a row of a group
                 has of every other sub-block of a tile, from s on, to `target` in shared memory
    pair         (place, lane, quarter) -> the words of A of sub-blocks `quarter` and, behind them,
                 quarter + 4; place is that of a tile of two groups in shared memory
    read         (group, rows_in_group, row, sub_blocks, tile) -> words that hold a row's scales
    steps        (words, quarter) -> four floats: of sub-block `quarter`, of the other of the pair
    scale        (words) -> the float that all sub-blocks of a tile share

    group, rows_in_group, row and sub_blocks are those of `Decoder.read`. Two of `steps` and
    `scale` are a record of `Scaling.add`.
    """

    group_bytes: int
    copy: Function
    pair: Function
    read: Function
    steps: Function
    scale: Function


@cache
def fragments_of(kind: TensorType) -> Fragments:
    """Return how tiles of a type are read; KeyError for one of another kind."""
    return FRAGMENTS[kind](kind)


def _copier(parts: list[Field]) -> tuple[int, Function, list[int]]:
    """Return the bytes of a tile of a group, `Fragments.copy`, and where in it fields begin."""
    starts = [TILE * GROUP_ROWS * sum(one.width for one in parts[:n]) for n in range(len(parts))]
    end = TILE * GROUP_ROWS * sum(one.width for one in parts)

    def copier(field: Field, start: int) -> Function:
        place, width, move = place_of(field), field.width, _COPIES[field.width]
        apart = 2 * GROUP_ROWS * width

        def copy(
            target: int, group: int, rows_in_group: int, row: int, blocks: int, tile: int, s: int
        ) -> None:
            there = i32(min(row, rows_in_group - 1))
            source = place(group, rows_in_group, there, blocks, TILE * tile + s)
            further = i32(2 * width * rows_in_group)
            target += start + width * (GROUP_ROWS * s + row)
            move(target, source)
            move(target + apart, source + further)
            move(target + 2 * apart, source + 2 * further)
            move(target + 3 * apart, source + 3 * further)

        return copy

    first, *others = [copier(*one) for one in zip(parts, starts, strict=True)]
    if not others:
        return end, first, starts
    (second,) = others

    def both(
        target: int, group: int, rows_in_group: int, row: int, blocks: int, tile: int, s: int
    ) -> None:
        first(target, group, rows_in_group, row, blocks, tile, s)
        second(target, group, rows_in_group, row, blocks, tile, s)

    return end, both, starts


def _four_bits(place: int, group_bytes: int, lane: int, quarter: int) -> Any:
    """Return word t of the first field of two outputs: of a sub-block, of the pair's other."""
    block, row = lane >> 3, lane & GROUP_ROWS - 1
    own = 16 * row + group_bytes * (block & 1) + 16 * GROUP_ROWS * APART * (block >> 1)
    return shared_load_matrices(i32(place + own + 16 * GROUP_ROWS * quarter))


# -- six bits of scale and of minimum --------------------------------------------------------------


def _six_bits(kind: TensorType) -> tuple[Function, Function, Function]:
    """Return `read`, `steps` and `scale` of Q4_K and Q5_K."""
    steps_at = place_of(fields(kind)["group_scales"])
    bounds_at = place_of(fields(kind)["scale+minimum"])

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, tile: int) -> Any:
        blocks = sub_blocks >> 3
        place = steps_at(group, rows_in_group, row, blocks, 3 * tile)
        bounds = load_i32(bounds_at(group, rows_in_group, row, blocks, tile))
        a, b = load_i32(place), load_i32(place + 4 * rows_in_group)
        return a, b, load_i32(place + 8 * rows_in_group), bounds

    def steps(words: Any, quarter: int) -> Any:
        a, b, high, bounds = words
        found = even_bytes(i32(a >> 4 * quarter), i32(b >> 4 * quarter)) & _LOW
        found = i32(found | high >> 2 * quarter << 4 & 0x30303030)
        least = f32_of_half(bounds >> 16)
        return (
            f32_of_i32(i32(found & 63)),
            least * f32_of_i32(i32(found >> 16 & 63)),
            f32_of_i32(i32(found >> 8 & 63)),
            least * f32_of_i32(i32(found >> 24 & 63)),
        )

    def scale(words: Any) -> Any:
        return f32_of_half(words[3])

    return read, steps, scale


def _q4_k(kind: TensorType) -> Fragments:
    group_bytes, copy, _ = _copier([fields(kind)["quants"]])

    def pair(place: int, lane: int, quarter: int) -> Any:
        a, b, c, d = _four_bits(place, group_bytes, lane, quarter)
        return (
            (a & _LOW, b & _LOW, a >> 4 & _LOW, b >> 4 & _LOW),
            (c & _LOW, d & _LOW, c >> 4 & _LOW, d >> 4 & _LOW),
        )

    return Fragments(group_bytes, copy, pair, *_six_bits(kind))


def _five(word: Any, top: Any) -> Any:
    """Return both words of a lane: four low bits in one, the fifth in another."""
    return i32(word & _LOW | top << 4 & 0x10101010), i32(word >> 4 & _LOW | top & 0x10101010)


def _q5_k(kind: TensorType) -> Fragments:
    group_bytes, copy, starts = _copier([fields(kind)["low"], fields(kind)["high"]])
    tops_at = starts[1]

    def pair(place: int, lane: int, quarter: int) -> Any:
        g, t = lane >> 2, lane & 3
        tops = i32(place + tops_at + 4 * g + 4 * GROUP_ROWS * quarter)
        a, b, c, d = _four_bits(place, group_bytes, lane, quarter)
        other = tops + 4 * GROUP_ROWS * APART
        a, i = _five(a, shared_load_i32(tops) >> t)
        b, j = _five(b, shared_load_i32(tops + group_bytes) >> t)
        c, k = _five(c, shared_load_i32(other) >> t)
        d, m = _five(d, shared_load_i32(other + group_bytes) >> t)
        return (a, b, i, j), (c, d, k, m)

    return Fragments(group_bytes, copy, pair, *_six_bits(kind))


# -- Q6_K ------------------------------------------------------------------------------------------


def _six(word: Any, top: Any) -> Any:
    """Return both words of a lane: four low bits in one, two high ones in another, less 32."""
    low = word & _LOW | top << 4 & 0x30303030
    high = word >> 4 & _LOW | top & 0x30303030
    # No byte lends to another.
    return (
        i32((i32(low) | _HIGHEST) - 0x20202020 ^ _HIGHEST),
        i32((i32(high) | _HIGHEST) - 0x20202020 ^ _HIGHEST),
    )


def _q6_k(kind: TensorType) -> Fragments:
    group_bytes, copy, starts = _copier([fields(kind)["low"], fields(kind)["high"]])
    tops_at = starts[1]
    steps_at, scale_at = place_of(fields(kind)["group_scales"]), place_of(fields(kind)["scale"])

    def pair(place: int, lane: int, quarter: int) -> Any:
        g, t = lane >> 2, lane & 3
        tops = i32(place + tops_at + 8 * g + 4 * (t & 1) + 8 * GROUP_ROWS * quarter)
        other, shift = tops + 8 * GROUP_ROWS * APART, 2 * (t >> 1)
        a, b, c, d = _four_bits(place, group_bytes, lane, quarter)
        a, i = _six(a, shared_load_i32(tops) >> shift)
        b, j = _six(b, shared_load_i32(tops + group_bytes) >> shift)
        c, k = _six(c, shared_load_i32(other) >> shift)
        d, m = _six(d, shared_load_i32(other + group_bytes) >> shift)
        return (a, b, i, j), (c, d, k, m)

    def read(group: int, rows_in_group: int, row: int, sub_blocks: int, tile: int) -> Any:
        blocks, number = sub_blocks >> 3, TILE * tile
        place = steps_at(group, rows_in_group, row, blocks, number)
        apart = 2 * rows_in_group
        scale = load_u16(scale_at(group, rows_in_group, row, blocks, tile))
        return (
            load_u16(place) | load_u16(place + 4 * apart) << 16,
            load_u16(place + apart) | load_u16(place + 5 * apart) << 16,
            load_u16(place + 2 * apart) | load_u16(place + 6 * apart) << 16,
            load_u16(place + 3 * apart) | load_u16(place + 7 * apart) << 16,
            scale,
        )

    def steps(words: Any, quarter: int) -> Any:
        a, b, c, d, _ = words
        found = i32(a if quarter == 0 else b if quarter == 1 else c if quarter == 2 else d)
        return (
            f32_of_i32(i32(found << 24) >> 24),
            f32_of_i32(i32(found << 16) >> 24),
            f32_of_i32(i32(found << 8) >> 24),
            f32_of_i32(found >> 24),
        )

    def half(words: Any) -> Any:
        return f32_of_half(words[4])

    return Fragments(group_bytes, copy, pair, read, steps, half)


FRAGMENTS: dict[TensorType, Callable[[TensorType], Fragments]] = {
    T.Q4_K: _q4_k,
    T.Q5_K: _q5_k,
    T.Q6_K: _q6_k,
}
