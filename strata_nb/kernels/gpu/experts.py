"""The chosen experts of all rows on a card: `expert_gate_up` and `expert_down` of `routed.py`.

A block of `expert_gate_up` has 32 outputs of one choice, a block of `expert_down` eight values of
one row over all its experts: products of single experts are not kept, and nothing is added by two
blocks. Blocks of the same outputs and other choices follow each other, so that of two rows with the
same expert the second finds in the card's cache what the first has read.

Both are bound by memory and short. A warp of `expert_gate_up` reads a tile of gate and one of up,
all of them before it multiplies; to ask for the other tiles meanwhile, through the card's cache,
takes longer than not to. `expert_down` knows where its weights are before the launch before it has
ended, because `route` was two launches ago, and asks for all of them.

Of an expert without a slot nothing is asked for ahead: host memory is read once, by who uses it.
One that comes to a slot is brought there by all blocks, each what it reads (`filling.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.binding import with_loads
from strata_nb.kernels.gpu.exponential import silu
from strata_nb.kernels.gpu.filling import (
    ADDRESS,
    BY_CPU,
    COMES,
    IN_HOST_MEMORY,
    ROW_BY_CPU,
    ROW_COMES,
    bringer,
    row_bringer,
)
from strata_nb.kernels.gpu.floats import EIGHT, FLOATS, lane_product
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    as_one,
    await_previous,
    barrier,
    block_x,
    block_y,
    block_z,
    f32,
    fma,
    i32,
    i64,
    keep,
    load_f32,
    load_i64,
    once_i64,
    prefetch,
    shared_load_f32,
    shared_load_i32,
    shared_store_f32,
    shared_store_i32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    MOST_REGISTERS,
    Arguments,
    Function,
    GpuKernel,
    Grid,
    blocks_of,
    warp_sum,
)
from strata_nb.kernels.gpu.products import row_bytes_of, row_sum
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.kernels.gpu.tile_rows import Tile, tiles_of
from strata_nb.kernels.gpu.tiles import tile_product
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED

_FLOAT_WARPS = 8  # of a block of floats


def expert_gate_up_kernel(gate: TensorType, up: TensorType, values: int, outputs: int) -> GpuKernel:
    """Return `expert_gate_up` for rows of so many values and so many outputs.

    ValueError for a type that has no kernels on a card, or two that take rows of different forms.
    """
    if (gate in UNPACKED) != (up in UNPACKED):
        raise ValueError(f"gate and up of types {gate.name} and {up.name} take no common rows")
    if gate in UNPACKED:
        return _float_gate_up(gate, up, values % EIGHT == 0)
    return _packed_gate_up(gate, up, values // SUB_BLOCK, outputs % GROUP_ROWS == 0, None)


def leaving_gate_up_kernel(
    gate: TensorType, up: TensorType, values: int, outputs: int, leaves: Function
) -> GpuKernel:
    """Return a kernel: `expert_gate_up` of packed weights, whose blocks ask whether they leave.

    It has the arguments of `expert_gate_up`, then `chosen shares layer box state`.

    leaves   device function that all threads of a block call behind the wait for the choice; the
             block has nothing else to do where it returns true:
             leaves(word, blobs, sources, x, row_bytes, top_k, chosen, shares, layer, box, state,
             choice, thread), word being that of the choice in `blobs`
    """
    return _packed_gate_up(gate, up, values // SUB_BLOCK, outputs % GROUP_ROWS == 0, leaves)


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


def reads_of(*kinds: TensorType) -> Callable[[Arguments, int], int]:
    """Return what says how many bytes of matrices a launch reads, of which each choice has one of
    each type."""

    def reads(arguments: Arguments, rows: int) -> int:
        each = sum(row_bytes(kind, arguments["values"]) for kind in kinds)
        return rows * arguments["top_k"] * arguments["outputs"] * each

    return reads


@cache
def _asker(kind: TensorType, sub_blocks: int, is_whole: bool) -> Function:
    """Return a device function that asks for rows of a weight in a slot: ask(blob, place, rows).

    blob   a word of `blobs`
    place  of the first row, which begins a group, in the blob
    """
    row_bytes = row_bytes_of(kind)(sub_blocks)
    is_aligned = is_whole and in_sixteens(row_bytes)

    def ask(blob: int, place: int, rows: int) -> None:
        if is_aligned and blob & (IN_HOST_MEMORY | COMES) == 0:
            prefetch((blob & ADDRESS) + place, i32(rows * row_bytes))

    return ask


def _tile_of(kind: TensorType, sub_blocks: int, table: int) -> Tile:
    """Return how tiles of a type are multiplied that a block may have written itself."""
    return Tile(*map(with_loads, tile_product(kind, sub_blocks, table)))


def in_sixteens(row_bytes: int) -> bool:
    """Return whether groups of rows of so many bytes begin at multiples of 16."""
    return GROUP_ROWS * row_bytes % 16 == 0


def _of_shape(name: str, sub_blocks: int, is_whole: bool) -> str:
    return f"{name}_{SUB_BLOCK * sub_blocks}{'' if is_whole else '_odd'}".lower()


# -- gate and up -----------------------------------------------------------------------------------
#
# Shared memory holds sums of parts of a row, float32: (gate and up, parts, 32 outputs).

GROUPS = SUB_BLOCK // GROUP_ROWS
PARTS = 4  # that the tiles of a row are shared by
GATE_UP_THREADS = WARP * GROUPS * PARTS
PART_BITS = (WARP * GROUPS).bit_length() - 1  # of the number of a thread, below its part
SUMS_BYTES = 4 * SUB_BLOCK
# What these decode does not fit 64 registers.
WIDE = {TensorType.Q3_K, TensorType.IQ2_XS, TensorType.IQ2_S, TensorType.IQ1_M}
# Nor does a tile of gate and one of up, read together, of these.
LARGE = {TensorType.Q6_K, TensorType.Q8_0}


def gate_up_grid(arguments: Arguments, most_rows: int) -> Grid:
    return arguments["top_k"], most_rows, blocks_of(arguments["outputs"], SUB_BLOCK)


def finish_gate_up(
    gate: Any, up: Any, lane: int, choice: int, inner: int, packed: int, outputs: int
) -> None:
    """Write 32 outputs of a choice, one in each lane of a warp."""
    number = i64(block_z())
    output = SUB_BLOCK * number + lane
    value = silu(gate) * up
    if output < outputs:
        store_f32(inner + 4 * (choice * outputs + output), value)
    if packed != 0:
        sub_blocks = outputs >> 5
        target = packed + choice * sub_blocks * SUB_BLOCK_BYTES
        quantise_sub_block(value, lane, target, sub_blocks, number)


def sum_of_parts(place: int) -> Any:
    total, part = shared_load_f32(place), 1
    while part < PARTS:
        total += shared_load_f32(place + SUMS_BYTES * part)
        part += 1
    return total


def _stay(
    word: Any,
    blobs: int,
    sources: int,
    x: int,
    row_bytes: int,
    top_k: int,
    chosen: int,
    shares: int,
    layer: int,
    box: int,
    state: int,
    choice: Any,
    thread: Any,
) -> Any:
    """Return that a block does not leave."""
    return False


@cache
def _packed_gate_up(
    gate_kind: TensorType,
    up_kind: TensorType,
    sub_blocks: int,
    is_whole: bool,
    leaves: Function | None,
) -> GpuKernel:
    """Return the kernel of packed weights: four groups of outputs, whose sums have four parts.

    is_whole   the last group has eight rows too
    leaves     of `leaving_gate_up_kernel`; None: the kernel is `expert_gate_up`

    Reads gate and up once for each choice, and its row, 1.5 bytes a value, for each group.
    """
    gate_table = 2 * SUMS_BYTES * PARTS  # behind the sums
    is_one_type = gate_kind is up_kind
    up_table = gate_table if is_one_type else gate_table + table_bytes(gate_kind)
    read_gate, add_gate = _tile_of(gate_kind, sub_blocks, gate_table)
    read_up, add_up = _tile_of(up_kind, sub_blocks, up_table)
    fill_gate = table_filler(gate_kind, gate_table, GATE_UP_THREADS)
    fill_up = table_filler(up_kind, up_table, GATE_UP_THREADS)
    gate_bytes = row_bytes_of(gate_kind)(sub_blocks)
    up_bytes = row_bytes_of(up_kind)(sub_blocks)
    bring_gate = bringer(in_sixteens(gate_bytes), GATE_UP_THREADS)
    bring_up = bringer(in_sixteens(up_bytes), GATE_UP_THREADS)
    tiles = tiles_of(sub_blocks)
    kinds = {gate_kind, up_kind}
    are_kept = not kinds & (WIDE | LARGE)
    # A loop of a known number of turns has fewer instructions, and takes more registers.
    are_two = tiles == 2 * PARTS and TensorType.Q8_0 not in kinds
    may_leave = leaves is not None
    leave = leaves or _stay

    def gate_up(
        rows: int,
        blobs: int,
        sources: int,
        x: int,
        inner: int,
        packed: int,
        gate_offset: int,
        up_offset: int,
        top_k: int,
        values: int,
        outputs: int,
        row_bytes: int,
        chosen: int,
        shares: int,
        layer: int,
        box: int,
        state: int,
    ) -> None:
        in_row, block = i64(block_y()), SUB_BLOCK * i64(block_z())
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        number, part = warp & GROUPS - 1, once_i64(thread >> PART_BITS)
        # A group behind the last is the last again, and its sums are of no output.
        first = min(block + GROUP_ROWS * number, outputs - 1 & -GROUP_ROWS)
        rows_here = GROUP_ROWS if is_whole else min(outputs - first, GROUP_ROWS)
        row, quarter = lane & GROUP_ROWS - 1, once_i64(lane >> 3)
        row = once_i64(row if is_whole else min(row, rows_here - 1))
        gate_at = once_i64(gate_offset + first * gate_bytes)
        up_at = once_i64(up_offset + first * up_bytes)
        of_row, choice = once_i64(x + row_bytes * in_row), in_row * top_k + block_x()
        here = load_i64(rows)
        fill_gate(thread)
        if not is_one_type:
            fill_up(thread)
        await_previous()
        if in_row >= here:
            return
        word = load_i64(blobs + 8 * choice)
        if may_leave and leave(
            word,
            blobs,
            sources,
            x,
            row_bytes,
            top_k,
            chosen,
            shares,
            layer,
            box,
            state,
            choice,
            thread,
        ):
            return
        if word & COMES != 0:
            of_block = min(outputs - block, SUB_BLOCK)
            before_gate, before_up = gate_offset + block * gate_bytes, up_offset + block * up_bytes
            source = load_i64(sources + 8 * choice)
            bring_gate(word, source, before_gate, of_block * gate_bytes, thread)
            bring_up(word, source, before_up, of_block * up_bytes, thread)
            barrier()
            word = load_i64(blobs + 8 * choice)
        blob = word & ADDRESS
        of_gate, of_up = blob + gate_at, blob + up_at
        gate, up, tile, turn = f32(0.0), f32(0.0), part, 0
        while turn < 2 if are_two else tile < tiles:
            gate_words = read_gate(of_gate, rows_here, row, quarter, tile)
            up_words = read_up(of_up, rows_here, row, quarter, tile)
            if are_kept:
                keep()
            gate = add_gate(gate, gate_words, of_row, quarter, tile)
            up = add_up(up, up_words, of_row, quarter, tile)
            tile, turn = tile + PARTS, turn + 1
        gate, up = row_sum(gate), row_sum(up)
        if lane < GROUP_ROWS:
            place = SUMS_BYTES * part + 4 * (GROUP_ROWS * number + lane)
            shared_store_f32(place, gate)
            shared_store_f32(place + SUMS_BYTES * PARTS, up)
        barrier()
        if warp == 0:
            gate = sum_of_parts(4 * lane)
            up = sum_of_parts(4 * lane + SUMS_BYTES * PARTS)
            finish_gate_up(gate, up, lane, choice, inner, packed, outputs)

    def expert_gate_up(
        rows: int,
        blobs: int,
        sources: int,
        x: int,
        inner: int,
        packed: int,
        gate_offset: int,
        up_offset: int,
        top_k: int,
        values: int,
        outputs: int,
        row_bytes: int,
    ) -> None:
        gate_up(
            rows,
            blobs,
            sources,
            x,
            inner,
            packed,
            gate_offset,
            up_offset,
            top_k,
            values,
            outputs,
            row_bytes,
            0,
            0,
            0,
            0,
            0,
        )

    name = _of_shape(f"expert_gate_up_{gate_kind.name}_{up_kind.name}", sub_blocks, is_whole)
    # Two blocks of a multiprocessor, so that all blocks of a row run at once on a large card.
    registers = MOST_REGISTERS if {gate_kind, up_kind} & WIDE else 64
    shared_bytes = up_table + table_bytes(up_kind)
    return GpuKernel(
        name,
        gate_up if may_leave else expert_gate_up,
        GATE_UP_THREADS,
        gate_up_grid,
        lambda _: shared_bytes,
        registers,
        reads_of(gate_kind, up_kind),
    )


@cache
def _float_gate_up(gate_kind: TensorType, up_kind: TensorType, in_eights: bool) -> GpuKernel:
    """Return the kernel of floats: a warp has four outputs, one after the other.

    Reads gate and up once for each choice, and its row for each warp.
    """
    gate_product, gate_size = (
        with_loads(lane_product(gate_kind, in_eights)),
        FLOATS[gate_kind].size_bytes,
    )
    up_product, up_size = with_loads(lane_product(up_kind, in_eights)), FLOATS[up_kind].size_bytes
    each, threads = SUB_BLOCK // _FLOAT_WARPS, WARP * _FLOAT_WARPS
    bring = bringer(in_eights, threads)

    def expert_gate_up(
        rows: int,
        blobs: int,
        sources: int,
        x: int,
        inner: int,
        packed: int,
        gate_offset: int,
        up_offset: int,
        top_k: int,
        values: int,
        outputs: int,
        row_bytes: int,
    ) -> None:
        in_row, block = i64(block_y()), SUB_BLOCK * i64(block_z())
        of_row, choice = x + row_bytes * in_row, in_row * top_k + block_x()
        here = load_i64(rows)
        await_previous()
        if in_row >= here:
            return
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        word, of_block = load_i64(blobs + 8 * choice), min(outputs - block, SUB_BLOCK)
        if word & COMES != 0:
            source = load_i64(sources + 8 * choice)
            gate_bytes, up_bytes = gate_size * values, up_size * values
            before_gate, before_up = gate_offset + block * gate_bytes, up_offset + block * up_bytes
            bring(word, source, before_gate, of_block * gate_bytes, thread)
            bring(word, source, before_up, of_block * up_bytes, thread)
            barrier()
            word = load_i64(blobs + 8 * choice)
        blob, number = word & ADDRESS, each * warp
        last = min(number + each, of_block)
        while number < last:
            before = (block + number) * values
            gate = gate_product(blob + gate_offset + gate_size * before, of_row, values, lane)
            up = up_product(blob + up_offset + up_size * before, of_row, values, lane)
            gate, up = warp_sum(gate), warp_sum(up)
            if lane == 0:
                shared_store_f32(4 * number, gate)
                shared_store_f32(4 * number + SUMS_BYTES, up)
            number += 1
        barrier()
        if warp == 0:
            gate, up = shared_load_f32(4 * lane), shared_load_f32(4 * lane + SUMS_BYTES)
            finish_gate_up(gate, up, lane, choice, inner, packed, outputs)

    name = _name(f"expert_gate_up_{gate_kind.name}_{up_kind.name}", in_eights)
    return GpuKernel(
        name,
        expert_gate_up,
        threads,
        gate_up_grid,
        lambda _: 2 * SUMS_BYTES,
        reads=reads_of(gate_kind, up_kind),
    )


# -- down ------------------------------------------------------------------------------------------
#
# A block has the eight outputs of a group for one row. Shared memory of packed weights: the sums of
# each part of each choice, (top_k, parts, 8) float32, and the shares, (top_k,).

_DOWN_WARPS = 8


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
    read_tile, add_tile = _tile_of(kind, sub_blocks, table)
    fill = table_filler(kind, table, WARP * _DOWN_WARPS)
    group_row_bytes = row_bytes_of(kind)(sub_blocks)
    ask = _asker(kind, sub_blocks, is_whole)
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

    def read(
        warp: int,
        turn: int,
        items: int,
        blobs: int,
        idle: int,
        group: int,
        rows_here: int,
        row: int,
        quarter: int,
    ) -> Any:
        """Read the tile of a turn; where there is none another one, or what `idle` has."""
        item, tile = turn_of(warp, turn)
        tile = min(tile, tiles - 1)
        if pools and item >= items:
            return read_tile(idle, rows_here, row, quarter, tile)
        blob = load_i64(blobs + 8 * choice_of(min(item, items - 1))) & ADDRESS
        return read_tile(blob + group, rows_here, row, quarter, tile)

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
        if of_row >= load_i64(rows):
            await_previous()
            return
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        rows_here = GROUP_ROWS if is_whole else min(outputs - first, GROUP_ROWS)
        row = lane & GROUP_ROWS - 1 if is_whole else min(lane & GROUP_ROWS - 1, rows_here - 1)
        quarter, choices = lane >> 3, of_row * top_k
        blobs, sources = blobs + 8 * choices, sources + 8 * choices
        inner += SUB_BLOCK_BYTES * sub_blocks * choices
        group = down_offset + first * group_row_bytes
        is_ahead = load_i64(blobs) & ROW_COMES == 0
        if thread < top_k:
            ask(load_i64(blobs + 8 * thread), group, rows_here)
            share = load_f32(shares + 4 * (choices + thread))
            if pools:
                list_choice(blobs, thread, share)
            else:
                shared_store_f32(shares_at + 4 * thread, share)
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
        ones = read(warp, turn, here, blobs, idle, group, rows_here, row, quarter)
        others = read(warp, turn + 1, here, blobs, idle, group, rows_here, row, quarter)
        thirds = read(warp, turn + 2, here, blobs, idle, group, rows_here, row, quarter)
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
                ones = read(warp, turn, here, blobs, idle, group, rows_here, row, quarter)
                others = read(warp, turn + 1, here, blobs, idle, group, rows_here, row, quarter)
                thirds = read(warp, turn + 2, here, blobs, idle, group, rows_here, row, quarter)
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

    name = _of_shape(f"expert_down_{kind.name}_{top_k}x", sub_blocks, is_whole)
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
    bring = row_bringer(in_eights, WARP * _FLOAT_WARPS)

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

    name = _name(f"expert_down_{kind.name}", in_eights)
    return GpuKernel(name, expert_down, WARP * _FLOAT_WARPS, _down_grid, reads=reads_of(kind))


def _name(name: str, in_eights: bool) -> str:
    return name.lower() if in_eights else f"{name.lower()}_odd"
