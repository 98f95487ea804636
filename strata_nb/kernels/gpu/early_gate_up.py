"""`expert_gate_up` of a single row behind `router`, whose blocks choose their experts.

A block finds out its expert by posted logits (`early_choice.py`) and asks for its first tiles of
weights; only then does it wait for the router's launch, which has the row.

The products are those of `experts.py`, in the same order, and so are the bits.
"""

from __future__ import annotations

from functools import cache

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.binding import with_loads
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.early_choice import early_choice, may_choose_early
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
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED

_SPILLING = LARGE | {TensorType.Q5_K}  # which do not quite fit 64 registers on newer cards
_SPILLS = 64  # bytes

_EARLY = (
    ("posts", "address"),
    ("stamp", "integer"),
    ("addresses", "address"),
    ("plan", "address"),
    ("forced", "address"),
)
"""Arguments behind those of `expert_gate_up`, by name and kind: of who chooses early."""


def early_gate_up(launch: CardLaunch, router: Arguments) -> CardLaunch | None:
    """Return what takes the place of `expert_gate_up` behind a router with such arguments, None
    where there is no such kernel."""
    given = launch.arguments
    gate, up = launch.variant
    experts, width = router["experts"], given["values"]
    is_packed = not {gate, up} & UNPACKED
    if not is_packed or experts > GATE_UP_THREADS:
        return None
    of_these = given["blobs"] == router["blobs"] and given["x"] == router["packed"]
    if not of_these or given["rows"] != router["rows"]:
        return None
    kernel = early_gate_up_kernel(gate, up, width, given["outputs"], experts, router["top_k"])
    return launch._replace(
        kernel=kernel,
        arguments={**given, **{name: router[name] for name, _ in _EARLY}},
        kinds=(*launch.kinds, *(kind for _, kind in _EARLY)),
    )


@cache
def early_gate_up_kernel(
    gate_kind: TensorType, up_kind: TensorType, values: int, outputs: int, experts: int, top_k: int
) -> GpuKernel:
    """Return the kernel of packed weights; a row has top_k of so many experts.

    Grid and reads are those of `expert_gate_up`. Shared memory: sums of parts, tables, what
    `early_choice` has.
    """
    sub_blocks, is_whole = values // SUB_BLOCK, outputs % GROUP_ROWS == 0
    gate_table = 2 * SUMS_BYTES * PARTS
    is_one_type = gate_kind is up_kind
    up_table = gate_table if is_one_type else gate_table + table_bytes(gate_kind)
    choice_at = _in_steps(up_table + table_bytes(up_kind))
    find, choice_bytes = early_choice(experts, top_k, GATE_UP_THREADS, choice_at)
    gate_tile = tile_product(gate_kind, sub_blocks, gate_table)
    up_tile = tile_product(up_kind, sub_blocks, up_table)
    read_gate, add_gate = map(with_loads, gate_tile)
    read_up, add_up = map(with_loads, up_tile)
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
        here = load_i64(rows)
        fill_gate(thread)
        if not is_one_type:
            fill_up(thread)
        word = i64(0)
        if here > 0 and may_choose_early(plan, forced):
            word = find(posts, stamp, addresses, thread, choice, here)
        word = once_i64(word)  # one path from here on, not one for each reason
        is_early = word != 0
        if not is_early:
            await_previous()
            if here == 0:
                return
            word = load_i64(blobs + 8 * choice)
        if word & COMES != 0:
            source = load_i64(sources + 8 * choice)
            bring_gate(word, source, before_gate, of_block * gate_bytes, thread)
            bring_up(word, source, before_up, of_block * up_bytes, thread)
            barrier()
            word = load_i64(blobs + 8 * choice)
        blob = word & ADDRESS
        of_gate, of_up, of_row = blob + gate_at, blob + up_at, once_i64(x)
        gate, up, tile, turn = f32(0.0), f32(0.0), part, 0
        if not are_two and is_early:
            await_previous()
        if are_two:
            gate_words = read_gate(of_gate, rows_here, row, quarter, tile)
            up_words = read_up(of_up, rows_here, row, quarter, tile)
            if are_kept:
                keep()
            if is_early:
                await_previous()
            gate = add_gate(gate, gate_words, of_row, quarter, tile)
            up = add_up(up, up_words, of_row, quarter, tile)
            tile, turn = tile + PARTS, 1
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

    shared_bytes = choice_at + choice_bytes
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
