"""`expert_gate_up` of a single row behind `router`, whose blocks choose their experts.

A block norms the row itself, as the router does meanwhile: what finished the row was two launches
ago. It finds out its expert by posted logits (`early_choice.py`), asks for its weights and
multiplies. For the router's launch it waits when all of them are on their way: that one then has
ended, and its last block, which writes tables, has kept nobody waiting.

The products are those of `experts.py`, in the same order, and so are the bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.fill_plans import LISTED, OFFERED
from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.binding import with_loads, with_shared
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.early_choice import MOST_EXPERTS, early_choice, may_choose_early
from strata_nb.kernels.gpu.expert_gate_up import (
    GATE_UP_THREADS,
    GROUPS,
    LARGE,
    PART_BITS,
    PARTS,
    SUMS_BYTES,
    WIDE,
    finish_gate_up,
    gate_up_grid,
    sum_of_parts,
)
from strata_nb.kernels.gpu.experts import in_sixteens, reads_of
from strata_nb.kernels.gpu.filling import ADDRESS, COMES, bringer
from strata_nb.kernels.gpu.held_rows import row_norm, write_four
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    block_x,
    block_z,
    f32,
    i64,
    keep,
    load_i64,
    once_i64,
    shared_store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import MOST_REGISTERS, Arguments, GpuKernel
from strata_nb.kernels.gpu.products import row_bytes_of, row_sum
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.kernels.gpu.tile_rows import tiles_of
from strata_nb.kernels.gpu.tiles import tile_product
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED

_SPILLING = LARGE | {TensorType.Q5_K}  # which do not quite fit 64 registers on newer cards
_SPILLS = 64  # bytes

_EARLY = (
    ("norm_weight", "address"),
    ("eps", "float"),
    ("posts", "address"),
    ("stamp", "integer"),
    ("addresses", "address"),
    ("plan", "address"),
    ("forced", "address"),
)
"""Arguments of the router behind those of `expert_gate_up`, by name and kind. `x` of
`expert_gate_up` is the router's, too: the row that is not normed."""


def early_gate_up(launch: CardLaunch, router: Arguments) -> CardLaunch | None:
    """Return what takes the place of `expert_gate_up` behind a router with such arguments, None
    where there is no such kernel."""
    given = launch.arguments
    gate, up = launch.variant
    experts, width = router["experts"], given["values"]
    is_packed = not {gate, up} & UNPACKED
    if not is_packed or experts > MOST_EXPERTS:
        return None
    of_these = given["blobs"] == router["blobs"] and given["x"] == router["packed"]
    if not of_these or given["rows"] != router["rows"]:
        return None
    kernel = early_gate_up_kernel(gate, up, width, given["outputs"], experts, router["top_k"])
    return launch._replace(
        kernel=kernel,
        arguments={**given, "x": router["x"], **{name: router[name] for name, _ in _EARLY}},
        kinds=(*launch.kinds, *(kind for _, kind in _EARLY)),
    )


@cache
def early_gate_up_kernel(
    gate_kind: TensorType, up_kind: TensorType, values: int, outputs: int, experts: int, top_k: int
) -> GpuKernel:
    """Return the kernel of packed weights; a row has top_k of so many experts.

    Grid and reads are those of `expert_gate_up`; besides, each block reads the row and the norm's
    weights, 8 bytes a value. Shared memory: sums of parts, tables, what `early_choice` has, sums of
    the norm, the quantised row.
    """
    sub_blocks, is_whole = values // SUB_BLOCK, outputs % GROUP_ROWS == 0
    gate_table = 2 * SUMS_BYTES * PARTS
    is_one_type = gate_kind is up_kind
    up_table = gate_table if is_one_type else gate_table + table_bytes(gate_kind)
    choice_at = _in_steps(up_table + table_bytes(up_kind))
    ask_addresses, find, choice_bytes = early_choice(experts, top_k, choice_at)
    norm_at = _in_steps(choice_at + choice_bytes)
    row_at = norm_at + 4 * WARP
    gate_tile = tile_product(gate_kind, sub_blocks, gate_table)
    up_tile = tile_product(up_kind, sub_blocks, up_table)
    read_gate, read_up = with_loads(gate_tile.read), with_loads(up_tile.read)
    add_gate, add_up = with_shared(gate_tile.add), with_shared(up_tile.add)
    to_shared = with_shared(write_four)

    def write(four: Any, number: Any, out: Any, packed: Any) -> None:
        to_shared(four, number, out, packed, sub_blocks)

    ask, norm, each = row_norm(values, GATE_UP_THREADS, write)
    fill_gate = table_filler(gate_kind, gate_table, GATE_UP_THREADS)
    fill_up = table_filler(up_kind, up_table, GATE_UP_THREADS)
    gate_bytes = row_bytes_of(gate_kind)(sub_blocks)
    up_bytes = row_bytes_of(up_kind)(sub_blocks)
    bring_gate = bringer(in_sixteens(gate_bytes), GATE_UP_THREADS)
    bring_up = bringer(in_sixteens(up_bytes), GATE_UP_THREADS)
    tiles = tiles_of(sub_blocks)
    kinds = {gate_kind, up_kind}
    are_kept = not kinds & (WIDE | LARGE)
    are_two = tiles == 2 * PARTS and TensorType.Q8_0 not in kinds

    def gate_up(
        rows: int,
        blobs: int,
        sources: int,
        x: int,
        inner: int,
        packed: int,
        gate_offset: int,
        up_offset: int,
        _top_k: int,
        _values: int,
        outputs: int,
        _row_bytes: int,
        norm_weight: int,
        eps: Any,
        posts: int,
        stamp: int,
        addresses: int,
        plan: int,
        forced: int,
    ) -> None:
        block, choice = SUB_BLOCK * i64(block_z()), i64(block_x())
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        number, part = warp & GROUPS - 1, once_i64(thread >> PART_BITS)
        # A group behind the last is the last again, and its sums are of no output.
        first = min(block + GROUP_ROWS * number, outputs - 1 & -GROUP_ROWS)
        rows_here = GROUP_ROWS if is_whole else min(outputs - first, GROUP_ROWS)
        row, quarter = lane & GROUP_ROWS - 1, once_i64(lane >> 3)
        row = once_i64(row if is_whole else min(row, rows_here - 1))
        before_gate, before_up = gate_offset + block * gate_bytes, up_offset + block * up_bytes
        gate_at = once_i64(gate_offset + first * gate_bytes)
        up_at = once_i64(up_offset + first * up_bytes)
        of_block = min(outputs - block, SUB_BLOCK)
        here, offered, listed = load_i64(rows), load_i64(plan + OFFERED), load_i64(plan + LISTED)
        own = ask_addresses(addresses, thread)
        normed = norm(x, ask(norm_weight, thread), thread, eps, norm_at)
        each(normed, thread, 0, row_at)
        fill_gate(thread)
        if not is_one_type:
            fill_up(thread)
        word = i64(0)
        if here > 0 and may_choose_early(offered, listed, forced):
            word = find(posts, stamp, own, thread, choice)
        word = once_i64(word)  # one path from here on, not one for each reason
        is_early = word != 0
        if not is_early:
            await_previous()
            if here == 0:
                return
            barrier()  # the row is in shared memory
            word = load_i64(blobs + 8 * choice)
        if word & COMES != 0:
            source = load_i64(sources + 8 * choice)
            bring_gate(word, source, before_gate, of_block * gate_bytes, thread)
            bring_up(word, source, before_up, of_block * up_bytes, thread)
            barrier()
            word = load_i64(blobs + 8 * choice)
        blob = word & ADDRESS
        of_gate, of_up = blob + gate_at, blob + up_at
        gate, up, tile = f32(0.0), f32(0.0), part
        if are_two:
            gate_words = read_gate(of_gate, rows_here, row, quarter, part)
            up_words = read_up(of_up, rows_here, row, quarter, part)
            if are_kept:
                keep()
            gate = add_gate(gate, gate_words, row_at, quarter, part)
            gate_words = read_gate(of_gate, rows_here, row, quarter, part + PARTS)
            up = add_up(up, up_words, row_at, quarter, part)
            up_words = read_up(of_up, rows_here, row, quarter, part + PARTS)
            if are_kept:
                keep()
            if is_early:
                await_previous()
            gate = add_gate(gate, gate_words, row_at, quarter, part + PARTS)
            up = add_up(up, up_words, row_at, quarter, part + PARTS)
        elif is_early:
            await_previous()
        while tile < tiles and not are_two:
            gate_words = read_gate(of_gate, rows_here, row, quarter, tile)
            up_words = read_up(of_up, rows_here, row, quarter, tile)
            if are_kept:
                keep()
            gate = add_gate(gate, gate_words, row_at, quarter, tile)
            up = add_up(up, up_words, row_at, quarter, tile)
            tile += PARTS
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

    shared_bytes = row_at + SUB_BLOCK_BYTES * sub_blocks
    shape = f"{gate_kind.name}_{up_kind.name}_{values}_{top_k}_of_{experts}".lower()
    return GpuKernel(
        f"early_gate_up_{shape}{'' if is_whole else '_odd'}",
        gate_up,
        GATE_UP_THREADS,
        gate_up_grid,
        lambda _: shared_bytes,
        # Two blocks of a multiprocessor, so that all blocks of a row run at once on a large card.
        MOST_REGISTERS if kinds & WIDE else 64,
        reads_of(gate_kind, up_kind),
        _SPILLS if kinds & _SPILLING else 0,
    )


def _in_steps(size: int) -> int:
    """Return the next multiple of 16."""
    return -(-size // 16) * 16
