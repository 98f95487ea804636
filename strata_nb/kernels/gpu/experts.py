"""`expert_gate_up` and `expert_down` of the table: the chosen experts of all rows.

A card has no `expert_gather`: a block reads the row of its choice where it is, and rows that chose
the same expert follow each other in the grid, so that what the first reads of its weights the
others find in the card's cache. Nor are products of single experts kept: a block of `expert_down`
owns eight values of one row, and adds up all experts of that row.

Which expert a choice belongs to follows from its place in the order of experts alone: it is the
number of experts that end at that place or before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.activations import quantise_sub_block
from strata_nb.kernels.gpu.exponential import silu
from strata_nb.kernels.gpu.floats import EIGHT, FLOATS, lane_product
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    block_x,
    block_y,
    f32,
    fma,
    i64,
    load_f32,
    load_i64,
    shared_load_f32,
    shared_load_i64,
    shared_store_f32,
    shared_store_i64,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    Arguments,
    GpuKernel,
    Grid,
    blocks_of,
    warp_sum,
    warp_sum_i32,
)
from strata_nb.kernels.gpu.products import (
    WARP_SUB_BLOCKS,
    row_bytes_of,
    row_sum,
    sub_block_product,
)
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED

_WARPS = 8
_THREADS = _WARPS * WARP


def expert_gate_up_kernel(gate: TensorType, up: TensorType, values: int) -> GpuKernel:
    """Return `expert_gate_up` of the table for rows of so many values.

    ValueError for a type that has no kernels on a card, or two that take rows of different forms.
    """
    if (gate in UNPACKED) != (up in UNPACKED):
        raise ValueError(f"gate and up of types {gate.name} and {up.name} take no common rows")
    if gate in UNPACKED:
        return _float_gate_up(gate, up, values % EIGHT == 0)
    return _packed_gate_up(gate, up)


def expert_down_kernel(kind: TensorType, values: int) -> GpuKernel:
    """Return `expert_down` of the table for a type and rows of so many values.

    ValueError for a type that has no kernels on a card.
    """
    return _float_down(kind, values % EIGHT == 0) if kind in UNPACKED else _packed_down(kind)


def _expert_at(starts: int, experts: int, place: int) -> Any:
    """Return the expert whose choices `place` is among; the lanes of a warp search together."""
    ended = i64(0)
    expert = i64(thread_index()) & WARP - 1
    while expert < experts:
        if load_i64(starts + 8 * (expert + 1)) <= place:
            ended += 1
        expert += WARP
    return i64(warp_sum_i32(ended))


def _reads(*kinds: TensorType) -> Callable[[Arguments, int], int]:
    """Return what says how many bytes of matrices a launch reads, of which each choice has one of
    each type."""

    def reads(arguments: Arguments, rows: int) -> int:
        each = sum(row_bytes(kind, arguments["values"]) for kind in kinds)
        return rows * arguments["top_k"] * arguments["outputs"] * each

    return reads


# -- gate and up -----------------------------------------------------------------------------------
#
# A block has 32 outputs of one choice. Its shared memory holds sums of parts, float32:
#
#     (gate and up, parts, 32 outputs)

_GROUPS = SUB_BLOCK // GROUP_ROWS
_PARTS = _WARPS // _GROUPS  # that the sum over a packed row is cut into
_SUMS_BYTES = 4 * SUB_BLOCK


def _gate_up_grid(arguments: Arguments, most_rows: int) -> Grid:
    return most_rows * arguments["top_k"], blocks_of(arguments["outputs"], SUB_BLOCK), 1


def _row_of(choice: int, top_k: int) -> Any:
    """Return choice // top_k. A window has few rows, and a card no instruction that divides."""
    row, end = i64(0), top_k
    while end <= choice:
        row += 1
        end += top_k
    return row


def _finish_gate_up(
    gate: Any, up: Any, lane: int, choice: int, inner: int, packed: int, outputs: int
) -> None:
    """Write 32 outputs of a choice, one in each lane of a warp."""
    number = i64(block_y())
    output = SUB_BLOCK * number + lane
    value = silu(gate) * up
    if output < outputs:
        store_f32(inner + 4 * (choice * outputs + output), value)
    if packed != 0:
        sub_blocks = outputs >> 5
        target = packed + choice * sub_blocks * SUB_BLOCK_BYTES
        quantise_sub_block(value, lane, target, sub_blocks, number)


@cache
def _packed_gate_up(gate_kind: TensorType, up_kind: TensorType) -> GpuKernel:
    """Return the kernel of packed weights: four groups of outputs, whose sums have two parts.

    Reads gate and up once for each choice, and its row, 1.5 bytes a value, for each group.
    """
    add_gate, gate_bytes = sub_block_product(gate_kind), row_bytes_of(gate_kind)
    add_up, up_bytes = sub_block_product(up_kind), row_bytes_of(up_kind)

    def expert_gate_up(
        rows: int,
        starts: int,
        members: int,
        x: int,
        gathered: int,
        addresses: int,
        inner: int,
        other: int,
        packed: int,
        gate_offset: int,
        up_offset: int,
        experts: int,
        top_k: int,
        values: int,
        outputs: int,
        row_bytes: int,
    ) -> None:
        choice = i64(block_x())
        if choice >= load_i64(rows) * top_k:
            return
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        part = warp // _GROUPS
        first = SUB_BLOCK * i64(block_y()) + GROUP_ROWS * (warp % _GROUPS)
        gate, up = f32(0.0), f32(0.0)
        if first < outputs:
            expert = _expert_at(starts, experts, choice)
            blob = load_i64(addresses + 8 * expert)
            of_row = x + row_bytes * _row_of(load_i64(members + 8 * choice), top_k)
            sub_blocks, rows_in_group = values >> 5, min(outputs - first, GROUP_ROWS)
            row = min(lane & GROUP_ROWS - 1, rows_in_group - 1)
            of_gate = blob + gate_offset + first * gate_bytes(sub_blocks)
            of_up = blob + up_offset + first * up_bytes(sub_blocks)
            s = WARP_SUB_BLOCKS * part + (lane >> 3)
            while s < sub_blocks:
                gate = add_gate(gate, of_gate, rows_in_group, row, of_row, sub_blocks, s)
                up = add_up(up, of_up, rows_in_group, row, of_row, sub_blocks, s)
                s += WARP_SUB_BLOCKS * _PARTS
        gate, up = row_sum(gate), row_sum(up)
        if lane < GROUP_ROWS:
            place = _SUMS_BYTES * part + 4 * (GROUP_ROWS * (warp % _GROUPS) + lane)
            shared_store_f32(place, gate)
            shared_store_f32(place + _SUMS_BYTES * _PARTS, up)
        barrier()
        if warp == 0:
            gate = _part_sum(4 * lane)
            up = _part_sum(4 * lane + _SUMS_BYTES * _PARTS)
            _finish_gate_up(gate, up, lane, choice, inner, packed, outputs)

    name = f"expert_gate_up_{gate_kind.name}_{up_kind.name}".lower()
    return GpuKernel(
        name,
        expert_gate_up,
        _THREADS,
        _gate_up_grid,
        lambda _: 8 * SUB_BLOCK * _PARTS,
        reads=_reads(gate_kind, up_kind),
    )


@cache
def _float_gate_up(gate_kind: TensorType, up_kind: TensorType, in_eights: bool) -> GpuKernel:
    """Return the kernel of floats: a warp has four outputs, one after the other.

    Reads gate and up once for each choice, and its row for each warp.
    """
    gate_product, gate_size = lane_product(gate_kind, in_eights), FLOATS[gate_kind].size_bytes
    up_product, up_size = lane_product(up_kind, in_eights), FLOATS[up_kind].size_bytes
    each = SUB_BLOCK // _WARPS

    def expert_gate_up(
        rows: int,
        starts: int,
        members: int,
        x: int,
        gathered: int,
        addresses: int,
        inner: int,
        other: int,
        packed: int,
        gate_offset: int,
        up_offset: int,
        experts: int,
        top_k: int,
        values: int,
        outputs: int,
        row_bytes: int,
    ) -> None:
        choice = i64(block_x())
        if choice >= load_i64(rows) * top_k:
            return
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        blob = load_i64(addresses + 8 * _expert_at(starts, experts, choice))
        of_row = x + row_bytes * _row_of(load_i64(members + 8 * choice), top_k)
        number = each * warp
        last = min(number + each, outputs - SUB_BLOCK * i64(block_y()))
        while number < last:
            before = (SUB_BLOCK * i64(block_y()) + number) * values
            gate = gate_product(blob + gate_offset + gate_size * before, of_row, values, lane)
            up = up_product(blob + up_offset + up_size * before, of_row, values, lane)
            gate, up = warp_sum(gate), warp_sum(up)
            if lane == 0:
                shared_store_f32(4 * number, gate)
                shared_store_f32(4 * number + _SUMS_BYTES, up)
            number += 1
        barrier()
        if warp == 0:
            gate, up = shared_load_f32(4 * lane), shared_load_f32(4 * lane + _SUMS_BYTES)
            _finish_gate_up(gate, up, lane, choice, inner, packed, outputs)

    name = _name(f"expert_gate_up_{gate_kind.name}_{up_kind.name}", in_eights)
    return GpuKernel(
        name,
        expert_gate_up,
        _THREADS,
        _gate_up_grid,
        lambda _: 2 * _SUMS_BYTES,
        reads=_reads(gate_kind, up_kind),
    )


def _part_sum(place: int) -> Any:
    """Return the sum of the two parts of an output's sum."""
    return shared_load_f32(place) + shared_load_f32(place + _SUMS_BYTES)


# -- down ------------------------------------------------------------------------------------------
#
# A block has the eight outputs of a group for one row. Its shared memory:
#
#     (warps, 8) float32              sums of a warp
#     (top_k, 2) int64                of each choice of the row: the expert's blob, its inner row
#     (top_k,) float32                its share

_CHOICES = 4 * _WARPS * GROUP_ROWS


def _down_grid(arguments: Arguments, most_rows: int) -> Grid:
    return most_rows, blocks_of(arguments["outputs"], GROUP_ROWS), 1


def _down_shared_bytes(arguments: Arguments) -> int:
    return _CHOICES + 20 * arguments["top_k"]


def _find_choices(
    row: int,
    warp: int,
    lane: int,
    starts: int,
    places: int,
    inner: int,
    row_bytes: int,
    addresses: int,
    shares: int,
    experts: int,
    top_k: int,
) -> None:
    """Write what the block needs of each choice of its row to shared memory: a warp for each."""
    k = warp
    while k < top_k:
        choice = row * top_k + k
        place = load_i64(places + 8 * choice)
        expert = _expert_at(starts, experts, place)
        if lane == 0:
            shared_store_i64(_CHOICES + 16 * k, load_i64(addresses + 8 * expert))
            shared_store_i64(_CHOICES + 16 * k + 8, inner + place * row_bytes)
            shared_store_f32(_CHOICES + 16 * top_k + 4 * k, load_f32(shares + 4 * choice))
        k += _WARPS
    barrier()


@cache
def _packed_down(kind: TensorType) -> GpuKernel:
    """Return the kernel of packed weights.

    The sub-blocks of all choices form one sequence, by ascending expert, that the warps share: four
    each in turn, as in one long row. So a block has work for all its warps with few choices of
    narrow experts, and sums are exchanged once.

    Reads down once for each choice.
    """
    add, bytes_of_row = sub_block_product(kind), row_bytes_of(kind)

    def expert_down(
        rows: int,
        starts: int,
        places: int,
        inner: int,
        addresses: int,
        shares: int,
        products: int,
        y: int,
        down_offset: int,
        experts: int,
        top_k: int,
        values: int,
        outputs: int,
    ) -> None:
        of_row, first = i64(block_x()), GROUP_ROWS * i64(block_y())
        if of_row >= load_i64(rows):
            return
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        sub_blocks, rows_in_group = values >> 5, min(outputs - first, GROUP_ROWS)
        _find_choices(
            of_row,
            warp,
            lane,
            starts,
            places,
            inner,
            SUB_BLOCK_BYTES * sub_blocks,
            addresses,
            shares,
            experts,
            top_k,
        )
        row = min(lane & GROUP_ROWS - 1, rows_in_group - 1)
        group = down_offset + first * bytes_of_row(sub_blocks)
        k, s = _wrapped(i64(0), WARP_SUB_BLOCKS * warp + (lane >> 3), sub_blocks)
        total = f32(0.0)
        while k < top_k:
            blob = shared_load_i64(_CHOICES + 16 * k)
            x = shared_load_i64(_CHOICES + 16 * k + 8)
            share = shared_load_f32(_CHOICES + 16 * top_k + 4 * k)
            product = add(f32(0.0), blob + group, rows_in_group, row, x, sub_blocks, s)
            total = fma(share, product, total)
            k, s = _wrapped(k, s + WARP_SUB_BLOCKS * _WARPS, sub_blocks)
        total = row_sum(total)
        if lane < GROUP_ROWS:
            shared_store_f32(4 * (GROUP_ROWS * warp + lane), total)
        barrier()
        if thread < rows_in_group:
            place = y + 4 * (of_row * outputs + first + thread)
            store_f32(place, load_f32(place) + _sum_of_warps(thread))

    name = f"expert_down_{kind.name.lower()}"
    return GpuKernel(
        name, expert_down, _THREADS, _down_grid, _down_shared_bytes, reads=_reads(kind)
    )


@cache
def _float_down(kind: TensorType, in_eights: bool) -> GpuKernel:
    """Return the kernel of floats: a warp has one output.

    Reads down once for each choice, and its row for each warp.
    """
    product, size = lane_product(kind, in_eights), FLOATS[kind].size_bytes

    def expert_down(
        rows: int,
        starts: int,
        places: int,
        inner: int,
        addresses: int,
        shares: int,
        products: int,
        y: int,
        down_offset: int,
        experts: int,
        top_k: int,
        values: int,
        outputs: int,
    ) -> None:
        of_row = i64(block_x())
        if of_row >= load_i64(rows):
            return
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        _find_choices(
            of_row, warp, lane, starts, places, inner, 4 * values, addresses, shares, experts, top_k
        )
        output = GROUP_ROWS * i64(block_y()) + warp
        if output >= outputs:
            return
        weights = down_offset + size * values * output
        k, total = i64(0), f32(0.0)
        while k < top_k:
            blob = shared_load_i64(_CHOICES + 16 * k)
            x = shared_load_i64(_CHOICES + 16 * k + 8)
            share = shared_load_f32(_CHOICES + 16 * top_k + 4 * k)
            total = fma(share, product(blob + weights, x, values, lane), total)
            k += 1
        total = warp_sum(total)
        if lane == 0:
            place = y + 4 * (of_row * outputs + output)
            store_f32(place, load_f32(place) + total)

    name = _name(f"expert_down_{kind.name}", in_eights)
    return GpuKernel(
        name, expert_down, _THREADS, _down_grid, _down_shared_bytes, reads=_reads(kind)
    )


def _wrapped(k: int, s: int, sub_blocks: int) -> Any:
    """Return sub-block s counted from choice k, as a choice and a sub-block of its own."""
    while s >= sub_blocks:
        s -= sub_blocks
        k += 1
    return k, s


def _sum_of_warps(output: int) -> Any:
    """Return what the warps have of an output of the block, added up in their order."""
    total, warp = shared_load_f32(4 * output), 1
    while warp < _WARPS:
        total += shared_load_f32(4 * (GROUP_ROWS * warp + output))
        warp += 1
    return total


def _name(name: str, in_eights: bool) -> str:
    return name.lower() if in_eights else f"{name.lower()}_odd"
