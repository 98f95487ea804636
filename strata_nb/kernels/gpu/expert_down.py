"""Down of the chosen experts on a card: `expert_down` of `routed.py`.

A block has the eight outputs of a group for one row, over all its experts: products of single
experts are not kept, and nothing is added by two blocks. It knows where its weights are before the
launch before it has ended, because `route` was two launches ago, and asks for all of them.

Shared memory of packed weights: the sums of each part of each choice, (top_k, parts, 8) float32,
and the shares, (top_k,).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.binding import with_loads
from strata_nb.kernels.gpu.experts import (
    FLOAT_WARPS,
    asker,
    float_name,
    in_sixteens,
    of_shape,
    reads_of,
    tile_of,
)
from strata_nb.kernels.gpu.filling import ADDRESS, BY_CPU, ROW_BY_CPU, ROW_COMES, row_bringer
from strata_nb.kernels.gpu.floats import EIGHT, FLOATS, lane_product
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    as_one,
    await_previous,
    barrier,
    block_x,
    block_y,
    f32,
    fma,
    i32,
    i64,
    load_f32,
    load_i64,
    once_i64,
    shared_load_f32,
    shared_load_i32,
    shared_store_f32,
    shared_store_i32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid, blocks_of, warp_sum
from strata_nb.kernels.gpu.products import row_bytes_of, row_sum
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.kernels.gpu.tile_rows import tiles_of
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED

_DOWN_WARPS = 8
_READ_AHEAD = 3  # tiles of a warp, before it multiplies


def expert_down_kernel(kind: TensorType, values: int, outputs: int, top_k: int) -> GpuKernel:
    """Return `expert_down` for a type, rows of so many values, and so many experts of each row.

    ValueError for a type that has no kernels on a card.
    """
    if kind in UNPACKED:
        return _float_down(kind, values % EIGHT == 0)
    return _packed_down(kind, values // SUB_BLOCK, outputs % GROUP_ROWS == 0, top_k, False)


def passing_down_kernel(kind: TensorType, values: int, outputs: int, top_k: int) -> GpuKernel:
    """Return a part of a kernel: `expert_down` of packed weights, which passes over experts that
    are BY_CPU; not all of them are.

    down(rows, blobs, sources, inner, shares, y, down_offset, outputs, idle); idle is the address of
    as many bytes as eight rows of down have, which are read where there is nothing to do
    """
    return _packed_down(kind, values // SUB_BLOCK, outputs % GROUP_ROWS == 0, top_k, True)


def parts_of_down(top_k: int, values: int) -> int:
    """Return how many parts the sum over an expert's values has, by which a batch's bits are those
    of a window: so many that few choices have work for all warps."""
    parts, tiles = 1, tiles_of(values // SUB_BLOCK)
    while 2 * parts * top_k <= _DOWN_WARPS and 2 * parts <= tiles:
        parts *= 2
    return parts


def _down_grid(arguments: Arguments, most_rows: int) -> Grid:
    return most_rows, blocks_of(arguments["outputs"], GROUP_ROWS), 1


@cache
def _packed_down(
    kind: TensorType, sub_blocks: int, is_whole: bool, top_k: int, pools: bool
) -> GpuKernel:
    """Return the kernel of packed weights.

    is_whole   the last group has eight rows too
    pools      some choices may be passed over: warps share what is left, in the same order

    A warp has every eighth part of a choice (`parts_of_down`), whose tiles it adds up one after the
    other; in the end the parts of a choice are added, and the choices by ascending expert. A warp
    reads the weights of three tiles before it multiplies, the first three while `expert_gate_up`
    still runs: an expert of 768 values has no more. Where some of the experts come to slots, it
    waits first, as everybody does who writes.

    Reads down once for each choice, and inner, 1.5 bytes a value, for each group.
    """
    tiles, parts = tiles_of(sub_blocks), parts_of_down(top_k, SUB_BLOCK * sub_blocks)
    items, each = top_k * parts, blocks_of(tiles, parts)  # what warps share; most tiles of one
    turns = each * blocks_of(items, _DOWN_WARPS)  # tiles that a warp takes, or fewer
    part_bits = parts.bit_length() - 1
    shares_at = 4 * GROUP_ROWS * items
    left_at = shares_at + 4 * top_k  # numbers of the choices that are not passed over
    table = left_at + 4 * top_k if pools else left_at
    read_tile, add_tile = tile_of(kind, sub_blocks, table)
    fill = table_filler(kind, table, WARP * _DOWN_WARPS)
    group_row_bytes = row_bytes_of(kind)(sub_blocks)
    ask = asker(kind, sub_blocks, is_whole)
    bring = row_bringer(in_sixteens(group_row_bytes), WARP * _DOWN_WARPS)

    def turn_of(warp: int, turn: int) -> Any:
        """Return the item of a warp's turn, and the number of its tile."""
        item = warp + _DOWN_WARPS * (turn // each)
        return item, (item & parts - 1) + parts * (turn % each)

    def list_choice(blobs: int, choice: int, share: Any) -> None:
        """Write a choice and its share among those that are not passed over, if it is one."""
        passes = load_i64(blobs) & ROW_BY_CPU != 0
        place, k = 0 if passes else choice, 0 if passes else choice
        while k < choice:
            place += 1 if load_i64(blobs + 8 * k) & BY_CPU == 0 else 0
            k += 1
        if load_i64(blobs + 8 * choice) & BY_CPU == 0:
            shared_store_i32(left_at + 4 * place, i32(choice))
            shared_store_f32(shares_at + 4 * place, share)

    def number_left(blobs: int) -> Any:
        """Return how many choices are not passed over."""
        passes = load_i64(blobs) & ROW_BY_CPU != 0
        left, k = 0 if passes else top_k, 0 if passes else top_k
        while k < top_k:
            left += 1 if load_i64(blobs + 8 * k) & BY_CPU == 0 else 0
            k += 1
        return left

    def choice_of(item: int) -> Any:
        """Return the choice that an item is of."""
        place = item >> part_bits
        return i64(shared_load_i32(left_at + 4 * place)) if pools else place

    def word_of(warp: int, turn: int, items: int, blobs: int) -> Any:
        """Return the word of `blobs` for a turn's choice; where there is none for the last."""
        item, _ = turn_of(warp, turn)
        return load_i64(blobs + 8 * choice_of(min(item, items - 1)))

    def read(
        word: int,
        warp: int,
        turn: int,
        items: int,
        idle: int,
        group: int,
        rows_here: int,
        row: int,
        quarter: int,
    ) -> Any:
        """Read the tile of a turn, for whose choice that is the word; where there is none another
        one, or what `idle` has."""
        item, tile = turn_of(warp, turn)
        tile = min(tile, tiles - 1)
        if pools and item >= items:
            return read_tile(idle, rows_here, row, quarter, tile)
        return read_tile((word & ADDRESS) + group, rows_here, row, quarter, tile)

    def add(
        total: Any,
        warp: int,
        turn: int,
        items: int,
        words: Any,
        inner: int,
        lane: int,
        quarter: int,
    ) -> Any:
        """Add the tile of a turn, if there is one; put the sum of an item away at its end."""
        item, tile = turn_of(warp, turn)
        if item >= items or turn >= turns:
            return f32(0.0)
        if tile < tiles:
            x = as_one(inner + SUB_BLOCK_BYTES * sub_blocks * choice_of(item))
            total = add_tile(total, words, x, quarter, tile)
        if turn % each < each - 1:
            return total
        total = row_sum(total)
        if lane < GROUP_ROWS:
            shared_store_f32(4 * (GROUP_ROWS * item + lane), total)
        return f32(0.0)

    def sum_of(output: int, choices: int) -> Any:
        """Return the sum of an output over so many choices."""
        total, item, k = f32(0.0), 0, 0
        while k < choices:
            product, last = shared_load_f32(4 * (GROUP_ROWS * item + output)), item + parts
            item += 1
            while item < last:
                product += shared_load_f32(4 * (GROUP_ROWS * item + output))
                item += 1
            total = fma(shared_load_f32(shares_at + 4 * k), product, total)
            k += 1
        return total

    def down(
        rows: int,
        blobs: int,
        sources: int,
        inner: int,
        shares: int,
        y: int,
        down_offset: int,
        outputs: int,
        idle: int,
    ) -> None:
        of_row, first = i64(block_x()), GROUP_ROWS * i64(block_y())
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        quarter, choices = lane >> 3, of_row * top_k
        blobs, sources = blobs + 8 * choices, sources + 8 * choices
        # All that leads to weights is loaded at once; of a row that there is not it is not used.
        count, mark = load_i64(rows), load_i64(blobs)
        one_word = other_word = third_word = i64(0)
        if not pools:
            one_word = once_i64(word_of(warp, 0, items, blobs))
            other_word = once_i64(word_of(warp, 1, items, blobs))
            third_word = once_i64(word_of(warp, 2, items, blobs))
        if of_row >= count:
            await_previous()
            return
        rows_here = GROUP_ROWS if is_whole else min(outputs - first, GROUP_ROWS)
        row = lane & GROUP_ROWS - 1 if is_whole else min(lane & GROUP_ROWS - 1, rows_here - 1)
        inner += SUB_BLOCK_BYTES * sub_blocks * choices
        group = down_offset + first * group_row_bytes
        is_ahead = mark & ROW_COMES == 0
        share = load_f32(shares + 4 * (choices + min(thread, top_k - 1)))
        if turns > _READ_AHEAD and thread < top_k:
            ask(load_i64(blobs + 8 * thread), group, rows_here)
        if pools and thread < top_k:
            list_choice(blobs, thread, share)
        left = number_left(blobs) if pools else top_k
        here = left * parts
        if pools:
            barrier()
        if not is_ahead:
            await_previous()
            bring(blobs, sources, top_k, group, i64(rows_here) * group_row_bytes, thread)
            barrier()
        place = y + 4 * (of_row * outputs + first + thread)
        before = load_f32(place) if thread < rows_here else f32(0.0)

        turn = 0
        if pools:
            one_word = word_of(warp, 0, here, blobs)
            other_word = word_of(warp, 1, here, blobs)
            third_word = word_of(warp, 2, here, blobs)
        ones = read(one_word, warp, 0, here, idle, group, rows_here, row, quarter)
        others = read(other_word, warp, 1, here, idle, group, rows_here, row, quarter)
        thirds = read(third_word, warp, 2, here, idle, group, rows_here, row, quarter)
        if not pools and thread < top_k:
            shared_store_f32(shares_at + 4 * thread, share)
        fill(thread)
        if is_ahead:
            await_previous()
        total = f32(0.0)
        while turn < turns:
            total = add(total, warp, turn, here, ones, inner, lane, quarter)
            total = add(total, warp, turn + 1, here, others, inner, lane, quarter)
            total = add(total, warp, turn + 2, here, thirds, inner, lane, quarter)
            turn += 3
            if turn < turns:
                one_word = word_of(warp, turn, here, blobs)
                other_word = word_of(warp, turn + 1, here, blobs)
                third_word = word_of(warp, turn + 2, here, blobs)
                ones = read(one_word, warp, turn, here, idle, group, rows_here, row, quarter)
                others = read(
                    other_word, warp, turn + 1, here, idle, group, rows_here, row, quarter
                )
                thirds = read(
                    third_word, warp, turn + 2, here, idle, group, rows_here, row, quarter
                )
        barrier()
        if thread < rows_here:
            store_f32(place, before + sum_of(thread, left))

    def expert_down(
        rows: int,
        blobs: int,
        sources: int,
        inner: int,
        shares: int,
        y: int,
        down_offset: int,
        _top_k: int,
        values: int,
        outputs: int,
    ) -> None:
        down(rows, blobs, sources, inner, shares, y, down_offset, outputs, 0)

    name = of_shape(f"expert_down_{kind.name}_{top_k}x", sub_blocks, is_whole)
    shared_bytes = table + table_bytes(kind)
    return GpuKernel(
        name,
        down if pools else expert_down,
        WARP * _DOWN_WARPS,
        _down_grid,
        lambda _: shared_bytes,
        reads=reads_of(kind),
    )


@cache
def _float_down(kind: TensorType, in_eights: bool) -> GpuKernel:
    """Return the kernel of floats: a warp has one output.

    Reads down once for each choice, and its row for each warp.
    """
    product, size = with_loads(lane_product(kind, in_eights)), FLOATS[kind].size_bytes
    bring = row_bringer(in_eights, WARP * FLOAT_WARPS)

    def expert_down(
        rows: int,
        blobs: int,
        sources: int,
        inner: int,
        shares: int,
        y: int,
        down_offset: int,
        top_k: int,
        values: int,
        outputs: int,
    ) -> None:
        of_row, thread = i64(block_x()), i64(thread_index())
        here = load_i64(rows)
        first = GROUP_ROWS * i64(block_y())
        output, lane = first + (thread >> 5), thread & WARP - 1
        await_previous()
        if of_row >= here:
            return
        k, row_bytes = of_row * top_k, size * values
        if load_i64(blobs + 8 * k) & ROW_COMES != 0:
            before, rows_here = down_offset + first * row_bytes, min(outputs - first, GROUP_ROWS)
            bring(blobs + 8 * k, sources + 8 * k, top_k, before, rows_here * row_bytes, thread)
            barrier()
        if output >= outputs:
            return
        weights, total = down_offset + row_bytes * output, f32(0.0)
        last = k + top_k
        while k < last:
            blob, share = load_i64(blobs + 8 * k) & ADDRESS, load_f32(shares + 4 * k)
            x = inner + 4 * values * k
            total = fma(share, product(blob + weights, x, values, lane), total)
            k += 1
        total = warp_sum(total)
        if lane == 0:
            place = y + 4 * (of_row * outputs + output)
            store_f32(place, load_f32(place) + total)

    name = float_name(f"expert_down_{kind.name}", in_eights)
    return GpuKernel(name, expert_down, WARP * FLOAT_WARPS, _down_grid, reads=reads_of(kind))
