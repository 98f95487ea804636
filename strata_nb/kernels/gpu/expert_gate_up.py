"""Gate and up of the chosen experts on a card: `expert_gate_up` of `routed.py`.

A block has 32 outputs of one choice. Blocks of the same outputs and other choices follow each
other, so that of two rows with the same expert the second finds in the card's cache what the first
has read.

A warp reads a tile of gate and one of up, all of them before it multiplies; to ask for the other
tiles meanwhile, through the card's cache, takes longer than not to.

Shared memory holds sums of parts of a row, float32: (gate and up, parts, 32 outputs).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.binding import with_loads
from strata_nb.kernels.gpu.experts import (
    FLOAT_WARPS,
    float_name,
    in_sixteens,
    of_shape,
    reads_of,
    tile_of,
)
from strata_nb.kernels.gpu.exponential import silu
from strata_nb.kernels.gpu.filling import ADDRESS, COMES, bringer
from strata_nb.kernels.gpu.floats import EIGHT, FLOATS, lane_product
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    block_x,
    block_y,
    block_z,
    f32,
    i64,
    keep,
    load_i64,
    once_i64,
    shared_load_f32,
    shared_store_f32,
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
from strata_nb.kernels.gpu.tile_rows import tiles_of
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED

GROUPS = SUB_BLOCK // GROUP_ROWS
PARTS = 4  # that the tiles of a row are shared by
GATE_UP_THREADS = WARP * GROUPS * PARTS
PART_BITS = (WARP * GROUPS).bit_length() - 1  # of the number of a thread, below its part
SUMS_BYTES = 4 * SUB_BLOCK
# What these decode does not fit 64 registers.
WIDE = {TensorType.Q3_K, TensorType.IQ2_XS, TensorType.IQ2_S, TensorType.IQ1_M}
# Nor does a tile of gate and one of up, read together, of these.
LARGE = {TensorType.Q6_K, TensorType.Q8_0}


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
    read_gate, add_gate = tile_of(gate_kind, sub_blocks, gate_table)
    read_up, add_up = tile_of(up_kind, sub_blocks, up_table)
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

    name = of_shape(f"expert_gate_up_{gate_kind.name}_{up_kind.name}", sub_blocks, is_whole)
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
    each, threads = SUB_BLOCK // FLOAT_WARPS, WARP * FLOAT_WARPS
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

    name = float_name(f"expert_gate_up_{gate_kind.name}_{up_kind.name}", in_eights)
    return GpuKernel(
        name,
        expert_gate_up,
        threads,
        gate_up_grid,
        lambda _: 2 * SUMS_BYTES,
        reads=reads_of(gate_kind, up_kind),
    )
