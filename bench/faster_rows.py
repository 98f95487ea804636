"""Other kernels for the products of a single row, which `try_faster_rows.py` times beside ours.

All are of Q4_K, without biases. Those that change no order of sums have the bits of ours:

    kept      the residual is asked for while tiles are multiplied, ours when its sum is there
    before    the residual is loaded before the wait: it was written two launches ago or earlier
    decoded   scales and minima are decoded before the wait, as integers and floats
    narrow    `before` in so few registers that blocks find room beside those of the launch in front
    short     sixteen warps have a tile each: fewer instructions in a row, other bits
    floor     `before` that reads no weights: what is left of the time without them, no product

    at once   `expert_down`: all words that lead to its weights are loaded together, one branch
    normed    three products of a row that each block norms itself: none waits for a last block
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu import intrinsics
from strata_nb.kernels.gpu.binding import rebind, with_loads
from strata_nb.kernels.gpu.filling import ADDRESS, COMES, IN_HOST_MEMORY, ROW_COMES, row_bringer
from strata_nb.kernels.gpu.held_rows import row_norm, write_four
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    Intrinsic,
    await_previous,
    barrier,
    bits_of_f32,
    block_x,
    block_y,
    dp4a_u8,
    f32,
    f32_of_bits,
    f32_of_half,
    f32_of_i32,
    fma,
    hold,
    i32,
    i64,
    keep,
    load_4xi32,
    load_f32,
    load_i64,
    once_i32,
    once_i64,
    prefetch,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.one_row import warps_of
from strata_nb.kernels.gpu.operations import (
    MOST_REGISTERS,
    Arguments,
    Function,
    GpuKernel,
    blocks_of,
    weights_read,
)
from strata_nb.kernels.gpu.products import row_sum
from strata_nb.kernels.gpu.tile_rows import (
    NEXT,
    high_nibbles,
    low_nibbles,
    quants_at,
    tiles_of,
    two_scales,
    two_sums,
)
from strata_nb.kernels.gpu.tiles import _six_bits, tile_product
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

KIND = TensorType.Q4_K
EXPERTS, DOWN_TILES = 8, 3  # of a row, a warp each, and of an expert


class Way(NamedTuple):
    """Say how a product of one row is computed.

    residual   what it adds to is loaded: "with the row" or "before" the wait
    decodes    scales are decoded before the wait
    tiles      of a warp; other than two: other bits
    reads      weights; else their words are any
    """

    name: str
    residual: str = "with the row"
    decodes: bool = False
    registers: int = MOST_REGISTERS
    tiles: int = 2
    reads: bool = True

    @property
    def has_our_bits(self) -> bool:
        return self.reads and self.tiles == 2


WAYS = (
    Way("kept"),
    Way("before", "before"),
    Way("decoded", "before", decodes=True),
    Way("narrow", "before", registers=64),
    Way("short", "before", registers=64, tiles=1),
    Way("floor", "before", reads=False),
)


# -- tiles of Q4_K, in three steps -----------------------------------------------------------------


def _decoded(words: Any, quarter: int) -> Any:
    """Return a lane's quants, and what its two sub-blocks are multiplied by: two steps, their
    scale, two minima."""
    a, b, high, bounds = words[8:]
    steps, least = _six_bits(a, b, high, quarter), f32_of_half(bounds >> 16)
    first, second = i32(steps & 63), i32(steps >> 8 & 63)
    low, high_low = least * f32_of_i32(i32(steps >> 16 & 63)), i32(steps >> 24 & 63)
    return (
        *words[:8],
        first,
        second,
        f32_of_half(bounds),
        low,
        least * f32_of_i32(high_low),
    )


def _bits(decoded: Any) -> Any:
    """Return a word that is there when all is decoded."""
    a, b, scale, least, other_least = decoded[8:]
    return a ^ b ^ bits_of_f32(scale) ^ bits_of_f32(least) ^ bits_of_f32(other_least)


def _row_words(x: int, sub_blocks: int, quarter: int, tile: int) -> Any:
    """Return what a lane needs of the row for a tile: quants, scales, sums."""
    place = quants_at(x, quarter, tile)
    ones = (*load_4xi32(place), *load_4xi32(place + 16))
    others = (*load_4xi32(place + NEXT), *load_4xi32(place + NEXT + 16))
    scales, sums = two_scales(x, sub_blocks, quarter, tile), two_sums(x, sub_blocks, quarter, tile)
    return *ones, *others, *scales, *sums


def _dot(words: Any, row: Any) -> Any:
    """Return the product of 32 values of 4 bits with a sub-block of quants, eight words."""
    a, b, c, d = high_nibbles(words)
    upper = dp4a_u8(d, row[7], dp4a_u8(c, row[6], dp4a_u8(b, row[5], dp4a_u8(a, row[4], 0))))
    e, f, g, h = low_nibbles(words)
    total = dp4a_u8(f, row[1], dp4a_u8(e, row[0], i32(upper >> 4)))
    return dp4a_u8(h, row[3], dp4a_u8(g, row[2], total))


def _multiplied(total: Any, weights: Any, row: Any) -> Any:
    """Add the product of a tile, as `tiles.py` does."""
    first, second, scale, least, other_least = weights[8:]
    one_scale, other_scale, one_sum, other_sum = row[16:]
    dots = _dot(weights[:4], row[:8]), _dot(weights[4:8], row[8:16])
    product = f32_of_i32(i32(dots[0] * first)) * one_scale
    product = fma(f32_of_i32(i32(dots[1] * second)), other_scale, product)
    total = fma(scale, product, total)
    total = fma(-least, f32_of_i32(one_sum) * one_scale, total)
    return fma(-other_least, f32_of_i32(other_sum) * other_scale, total)


def _unread(_group: int, _rows: int, row: int, quarter: int, tile: int) -> Any:
    """Return words of no weights, as many as `tiles.py` reads of a tile."""
    a, b, c, d = i32(row), i32(quarter), i32(tile), i32(row + tile)
    return a, b, c, d, b, c, d, a, c, d, a, b


def _unchanged(words: Any, _: int) -> Any:
    return words


# -- one row ---------------------------------------------------------------------------------------


@cache
def _group_of(sub_blocks: int, way: Way) -> tuple[Function, int]:
    """Return a function (rows, x, weight, y, plus, number), one group, and its number of warps."""
    tiles = tiles_of(sub_blocks)
    warps, of_row = tiles // way.tiles, row_bytes(KIND, SUB_BLOCK * sub_blocks)
    if warps * way.tiles != tiles or sub_blocks % 8:
        raise ValueError(f"{way.name}: {tiles} tiles do not go to warps of {way.tiles} each")
    read = tile_product(KIND, sub_blocks, 0).read if way.reads else _unread
    ahead, behind = (_decoded, _unchanged) if way.decodes else (_unchanged, _decoded)
    decodes, is_before, are_two = way.decodes, way.residual == "before", way.tiles == 2

    def group_of(rows: int, x: int, weight: int, y: int, plus: int, number: int) -> None:
        thread, first = i64(thread_index()), GROUP_ROWS * number
        tile, lane = thread >> 5, thread & WARP - 1
        row, quarter = lane & GROUP_ROWS - 1, lane >> 3
        group, place = weight + first * of_row, y + 4 * (first + (thread & GROUP_ROWS - 1))
        other = tile + warps if are_two else tile
        words = read(group, GROUP_ROWS, row, quarter, tile)
        other_words = read(group, GROUP_ROWS, row, quarter, other)
        there = f32(0.0)
        if is_before and plus != 0:
            there = f32_of_bits(once_i32(bits_of_f32(load_f32(place))))
        ones, others = ahead(words, quarter), ahead(other_words, quarter)
        if decodes:  # else it is done behind the wait
            hold(i32(_bits(ones) ^ _bits(others)))
        await_previous()
        if not is_before:
            there = load_f32(place)  # whether it is wanted or not: else it is moved to its use
        count = load_i64(rows)
        of_tile = _row_words(x, sub_blocks, quarter, tile)
        of_other = _row_words(x, sub_blocks, quarter, other)
        if not is_before:
            keep()
        total = _multiplied(f32(0.0), behind(ones, quarter), of_tile)
        if are_two:
            total = _multiplied(total, behind(others, quarter), of_other)
        total = row_sum(total)
        if lane < GROUP_ROWS:
            shared_store_f32(4 * (GROUP_ROWS * tile + lane), total)
        barrier()
        if thread < GROUP_ROWS and count > 0:
            total, warp = shared_load_f32(4 * thread), 1
            while warp < warps:
                total += shared_load_f32(4 * (thread + GROUP_ROWS * warp))
                warp += 1
            store_f32(place, total + there if plus != 0 else total)

    return group_of, warps


def _three_of(one: int, of_one: int, two: int, of_two: int, three: int, number: int) -> Any:
    """Return which of three words belongs to a group, by the groups of the first two weights."""
    if number >= of_one + of_two:
        return three
    return two if number >= of_one else one


@cache
def one_row_way(values: int, weights: int, way: Way) -> GpuKernel:
    """Return a kernel for one weight, or for three, with the arguments of `one_row.py`'s."""
    group_of, warps = _group_of(values // SUB_BLOCK, way)

    def one(
        rows: int, x: int, _: int, plus: int, weight: int, _bias: int, y: int, _outputs: int
    ) -> None:
        group_of(rows, x, weight, y, plus, i64(block_x()))

    def three(
        rows: int,
        x: int,
        _: int,
        plus: int,
        weight: int,
        _bias: int,
        y: int,
        outputs: int,
        weight2: int,
        _bias2: int,
        y2: int,
        outputs2: int,
        weight3: int,
        _bias3: int,
        y3: int,
        _outputs3: int,
    ) -> None:
        number, of_one, of_two = i64(block_x()), outputs >> 3, outputs2 >> 3
        source = _three_of(weight, of_one, weight2, of_two, weight3, number)
        target = _three_of(y, of_one, y2, of_two, y3, number)
        number -= _three_of(0, of_one, of_one, of_two, of_one + of_two, number)
        group_of(rows, x, source, target, plus, number)

    return GpuKernel(
        f"try_row_{values}_{weights}_{way.name}",
        one if weights == 1 else three,
        WARP * warps,
        lambda given, _: (_groups(given), 1, 1),
        lambda _: 4 * GROUP_ROWS * warps,
        way.registers,
        lambda given, _: GROUP_ROWS * _groups(given) * row_bytes(KIND, values),
    )


def _groups(given: Arguments) -> int:
    return sum(given[name] >> 3 for name in given if name[:7] == "outputs")


# -- one row that each block norms -----------------------------------------------------------------


def _in_shared(intrinsic: Intrinsic) -> Any:
    """Return what loads from shared memory, or stores there, in place of the card's memory."""
    first, _, _ = intrinsic.name.partition("_")
    return (
        getattr(intrinsics, f"shared_{intrinsic.name}")
        if first in {"load", "store"}
        else (intrinsic)
    )


NORMED = "rows x norm_weight norm_eps weight y outputs weight2 y2 outputs2 weight3 y3 outputs3"
NORMED_KINDS = ("address",) * 3 + ("float",) + ("address", "address", "integer") * 3


@cache
def normed_kernel(width: int, groups: int) -> GpuKernel:
    """Return a kernel for three products of the norm of a row; a block has so many groups.

    Shared memory: sums of the norm, the quantised row, sums of the warps.
    """
    sub_blocks = width // SUB_BLOCK
    warps, threads = warps_of(width), WARP * warps_of(width) * groups
    row_at = 4 * WARP
    sums_at = row_at + SUB_BLOCK_BYTES * sub_blocks
    warp_bits = warps.bit_length() - 1
    if tiles_of(sub_blocks) != 2 * warps:
        raise ValueError(f"a row of {width} values has no two tiles for each of {warps} warps")
    read, of_row = tile_product(KIND, sub_blocks, 0).read, row_bytes(KIND, width)
    to_shared, row_words = rebind(write_four, _in_shared), rebind(_row_words, _in_shared)

    def write(four: Any, number: Any, out: Any, packed: Any) -> None:
        to_shared(four, number, out, packed, sub_blocks)

    fetch, norm, each = row_norm(width, threads, write)

    def normed(
        rows: int,
        x: int,
        norm_weight: int,
        eps: Any,
        weight: int,
        y: int,
        outputs: int,
        weight2: int,
        y2: int,
        outputs2: int,
        weight3: int,
        y3: int,
        outputs3: int,
    ) -> None:
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        tile, row, quarter = warp & warps - 1, lane & GROUP_ROWS - 1, lane >> 3
        of_one, of_two = outputs >> 3, outputs2 >> 3
        last = of_one + of_two + (outputs3 >> 3) - 1
        number = min(groups * i64(block_x()) + (warp >> warp_bits), last)
        source = _three_of(weight, of_one, weight2, of_two, weight3, number)
        number -= _three_of(0, of_one, of_one, of_two, of_one + of_two, number)
        group = source + GROUP_ROWS * number * of_row
        ones = read(group, GROUP_ROWS, row, quarter, tile)
        others = read(group, GROUP_ROWS, row, quarter, tile + warps)
        norm_weights, here = fetch(norm_weight, thread), load_i64(rows)
        hold(bits_of_f32(norm_weights[0]))
        await_previous()
        each(norm(x, norm_weights, thread, eps, 0), thread, 0, row_at)
        barrier()
        of_tile = row_words(row_at, sub_blocks, quarter, tile)
        total = _multiplied(f32(0.0), _decoded(ones, quarter), of_tile)
        of_tile = row_words(row_at, sub_blocks, quarter, tile + warps)
        total = row_sum(_multiplied(total, _decoded(others, quarter), of_tile))
        if lane < GROUP_ROWS:
            shared_store_f32(sums_at + 4 * (GROUP_ROWS * warp + lane), total)
        barrier()
        if thread < GROUP_ROWS * groups and here > 0:
            place = sums_at + 4 * (GROUP_ROWS * warps * (thread >> 3) + (thread & GROUP_ROWS - 1))
            total, warp = shared_load_f32(place), 1
            while warp < warps:
                total += shared_load_f32(place + 4 * GROUP_ROWS * warp)
                warp += 1
            number = min(groups * i64(block_x()) + (thread >> 3), last)
            target = _three_of(y, of_one, y2, of_two, y3, number)
            number -= _three_of(0, of_one, of_one, of_two, of_one + of_two, number)
            store_f32(target + 4 * (GROUP_ROWS * number + (thread & GROUP_ROWS - 1)), total)

    return GpuKernel(
        f"try_normed_{width}_{groups}",
        normed,
        threads,
        lambda given, _: (blocks_of(_groups(given), groups), 1, 1),
        lambda _: sums_at + 4 * GROUP_ROWS * warps * groups,
        # As many as the whole of a multiprocessor's registers allows where few blocks are large.
        96 if threads <= 640 else 64,
        lambda given, _: GROUP_ROWS * _groups(given) * row_bytes(KIND, width),
    )


# -- down ------------------------------------------------------------------------------------------


@cache
def down_at_once(values: int, asks: bool, registers: int) -> GpuKernel:
    """Return `expert_down` of one row with EXPERTS experts of DOWN_TILES tiles, a warp each.

    asks   weights are asked for in runs as well
    """
    sub_blocks, of_row = values // SUB_BLOCK, row_bytes(KIND, values)
    if tiles_of(sub_blocks) != DOWN_TILES or sub_blocks % 8:
        raise ValueError(f"an expert of {values} values has no {DOWN_TILES} tiles")
    read = with_loads(tile_product(KIND, sub_blocks, 0).read)
    bring = row_bringer(GROUP_ROWS * of_row % 16 == 0, WARP * EXPERTS)
    shares_at = 4 * GROUP_ROWS * EXPERTS

    def expert_down(
        rows: int,
        blobs: int,
        sources: int,
        inner: int,
        shares: int,
        y: int,
        down_offset: int,
        _top_k: int,
        _values: int,
        _outputs: int,
    ) -> None:
        first, thread = GROUP_ROWS * i64(block_y()), i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        row, quarter = lane & GROUP_ROWS - 1, lane >> 3
        group, place = down_offset + first * of_row, y + 4 * (first + (thread & GROUP_ROWS - 1))
        here, leading = load_i64(rows), load_i64(blobs)
        word = once_i64(load_i64(blobs + 8 * warp))  # else it is loaded behind the branch
        if asks and lane == 0 and word & (IN_HOST_MEMORY | COMES) == 0:
            prefetch((word & ADDRESS) + group, i32(GROUP_ROWS * of_row))
        share, before = load_f32(shares + 4 * (lane & EXPERTS - 1)), load_f32(place)
        is_ahead = leading & ROW_COMES == 0
        if not is_ahead:
            await_previous()
            bring(blobs, sources, EXPERTS, group, i64(GROUP_ROWS * of_row), thread)
            barrier()
            word = load_i64(blobs + 8 * warp)
        group += word & ADDRESS
        words = read(group, GROUP_ROWS, row, quarter, 0)
        next_words = read(group, GROUP_ROWS, row, quarter, 1)
        last_words = read(group, GROUP_ROWS, row, quarter, 2)
        if thread < EXPERTS:
            shared_store_f32(shares_at + 4 * thread, share)
        x = inner + SUB_BLOCK_BYTES * sub_blocks * warp
        if is_ahead:
            await_previous()
        of_first = _row_words(x, sub_blocks, quarter, 0)
        of_second = _row_words(x, sub_blocks, quarter, 1)
        of_third = _row_words(x, sub_blocks, quarter, 2)
        total = _multiplied(f32(0.0), _decoded(words, quarter), of_first)
        total = _multiplied(total, _decoded(next_words, quarter), of_second)
        total = row_sum(_multiplied(total, _decoded(last_words, quarter), of_third))
        if lane < GROUP_ROWS:
            shared_store_f32(4 * (GROUP_ROWS * warp + lane), total)
        barrier()
        if thread < GROUP_ROWS and here > 0:
            total, k = f32(0.0), 0
            while k < EXPERTS:
                product = shared_load_f32(4 * (GROUP_ROWS * k + thread))
                total = fma(shared_load_f32(shares_at + 4 * k), product, total)
                k += 1
            store_f32(place, before + total)

    return GpuKernel(
        f"try_down_{values}{'_asked' if asks else ''}_{registers}",
        expert_down,
        WARP * EXPERTS,
        lambda given, rows: (rows, given["outputs"] >> 3, 1),
        lambda _: shares_at + 4 * EXPERTS,
        registers,
        lambda given, rows: EXPERTS * weights_read(KIND)(given, rows),
    )
