"""Make a single row ready for attention in the blocks that attend: `prepare` without a launch.

    prepare, attention of halves      one launch, for one row

Each warp of a block norms and rotates its head's query. The block that has the row's own cell does
the same for its key, stores key and value, and reads them again as it reads all cells. With several
rows that would not do: a row sees cells of the rows in front, which other blocks write. The bits
are those of `prepare` and attention alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from strata_nb.formats import BLOCK_CELLS
from strata_nb.kernels.gpu.attention_halves import (
    Source,
    attention_kernel_of,
    free_bytes_at,
    halves_attention,
    halves_attention_kernel,
    takes,
)
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.intrinsics import (
    barrier,
    fetch_f32,
    i64,
    load_i64,
    shared_load_f32,
    shared_store_f32,
)
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.gpu.preparing import heads_of, key_storer, prepare_kernel, value_storer
from strata_nb.kernels.gpu.rotation import rotator
from strata_nb.kernels.program import Launch
from strata_nb.kernels.runs import RUN_BLOCKS

_HALVES = ("f16", "f16")
_WARPS = 8
_BLOCK_SHIFT = BLOCK_CELLS.bit_length() - 1
_RUN_SHIFT = RUN_BLOCKS.bit_length() - 1
_SHARED = (
    *("rows", "sequences", "positions", "q", "blocks"),
    *("table_width", "k_offset", "v_offset", "heads", "kv_heads"),
)  # arguments that both launches have
_READY = (
    ("table", "address"),
    ("k", "address"),
    ("v", "address"),
    ("q_weight", "address"),
    ("k_weight", "address"),
    ("planes", "integer"),
    ("halves", "integer"),
    ("eps", "float"),
)
"""Arguments behind those of attention, by name and kind: as `prepare` has them."""


def with_ready_rows(program: Sequence[Launch | CardLaunch]) -> Iterator[Launch | CardLaunch]:
    """Yield launches of one row, with `prepare` in the attention behind it where that can be."""
    at = 0
    while at < len(program):
        found = _together(*program[at : at + 2]) if at + 1 < len(program) else None
        yield found or program[at]
        at += 2 if found else 1


def _together(prepare: Launch | CardLaunch, attention: Launch | CardLaunch) -> CardLaunch | None:
    """Return one launch for both, None where they are something else."""
    if not isinstance(prepare, CardLaunch) or not isinstance(attention, CardLaunch):
        return None
    given, ready = attention.arguments, prepare.arguments
    lengths = given.get("key_length", 0), given.get("value_length", 0)
    if not takes(*_HALVES, *lengths):
        return None
    group = given["heads"] // given["kv_heads"]
    if prepare.kernel is not prepare_kernel(*_HALVES, *lengths):
        return None
    if attention.kernel is not halves_attention_kernel(*lengths, group):
        return None
    if any(given[name] != ready[name] for name in _SHARED):
        return None
    return CardLaunch(
        ready_attention_kernel(*lengths, group),
        attention.label,
        {**given, **{name: ready[name] for name, _ in _READY}},
        (*attention.kinds, *(kind for _, kind in _READY)),
    )


@cache
def _made_ready(key_length: int, value_length: int) -> Source:
    """Return where a block has its queries from, and the row's own cell, that it makes itself.

    Shared memory: normed heads of the warps, and one key; weights of queries, of keys; cosines,
    then sines.
    """
    load, keep = heads_of(key_length)
    store_key = key_storer("f16", key_length)
    store_value = value_storer("f16", value_length)
    rotated = rotator(shared_load_f32, shared_load_f32)
    heads = free_bytes_at(key_length)
    own_key = heads + 4 * key_length * _WARPS
    q_weights = own_key + 4 * key_length
    k_weights = q_weights + 4 * key_length
    angles = k_weights + 4 * key_length

    def begin(given: Any, line: int, position: int, run: int, step: int, thread: int) -> Any:
        table, _, _, q_weight, k_weight, planes, _, _ = given
        if thread < key_length and q_weight != 0:
            shared_store_f32(q_weights + 4 * thread, fetch_f32(q_weight + 4 * thread))
            shared_store_f32(k_weights + 4 * thread, fetch_f32(k_weight + 4 * thread))
        if thread < 2 * planes:
            angle = fetch_f32(table + 4 * (2 * planes * position + thread))
            shared_store_f32(angles + 4 * thread, angle)
        number = position >> _BLOCK_SHIFT
        runs_behind = (number >> _RUN_SHIFT) - run
        while runs_behind > 0:
            runs_behind -= step
        return load_i64(line + 8 * number) if runs_behind == 0 else i64(0)

    def query(
        given: Any,
        q: int,
        kv_head: int,
        block: int,
        k_plane: int,
        v_plane: int,
        position: int,
        warp: int,
        lane: int,
    ) -> Any:
        _, k, v, q_weight, k_weight, planes, halves, eps = given
        place, cell = heads + 4 * key_length * warp, position & BLOCK_CELLS - 1
        has_key = block != 0 and warp == 0
        values = load(q, lane)
        key = load(k + 4 * key_length * kv_head if has_key else q, lane)
        keep(values, place, q_weights if q_weight != 0 else -1, lane, eps)
        if has_key:
            keep(key, own_key, k_weights if k_weight != 0 else -1, lane, eps)
        if block != 0 and warp == 1:
            store_value(v + 4 * value_length * kv_head, block + v_plane, cell, lane)
        barrier()
        if block != 0:
            if warp == 0:
                store_key(own_key, angles, block + k_plane, cell, lane, planes, halves)
            barrier()
        first = 4 * min(lane, key_length // 4 - 1)
        return (
            rotated(place, angles, first, key_length, planes, halves),
            rotated(place, angles, first + 1, key_length, planes, halves),
            rotated(place, angles, first + 2, key_length, planes, halves),
            rotated(place, angles, first + 3, key_length, planes, halves),
        )

    return Source(begin, query)


@cache
def ready_attention_kernel(key_length: int, value_length: int, group: int) -> GpuKernel:
    """Return `attention` of `attention_halves.py` for one row, with what `prepare` does."""
    source = _made_ready(key_length, value_length)
    attend = halves_attention(key_length, value_length, group, source)

    def attention(
        rows: int,
        sequences: int,
        positions: int,
        q: int,
        blocks: int,
        _out: int,
        work: int,
        table_width: int,
        k_offset: int,
        v_offset: int,
        heads: int,
        _kv_heads: int,
        _key_length: int,
        _value_length: int,
        scale: Any,
        table: int,
        k: int,
        v: int,
        q_weight: int,
        k_weight: int,
        planes: int,
        halves: int,
        eps: Any,
    ) -> None:
        attend(
            rows,
            sequences,
            positions,
            q,
            blocks,
            work,
            table_width,
            k_offset,
            v_offset,
            heads,
            scale,
            (table, k, v, q_weight, k_weight, planes, halves, eps),
        )

    name = f"attention_halves_ready_{key_length}_{value_length}_{group}"
    return attention_kernel_of(name, attention, key_length, value_length, group)
