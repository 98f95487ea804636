"""Norm a row in the blocks that multiply it, if they all run at once.

    table                                     card, for one row
    rms_norm, three linear of its result      one launch

Who finishes a row could norm it in its last block (`last_norm.py`): that block waits for all
others, and everybody for it. Three products of a row, such as queries, keys and values, are so
small that a few large blocks do them, one for each multiprocessor. Each of these norms the whole
row, which costs less, and keeps it in shared memory; nobody writes it. The weights are in registers
before the launch in front has ended.

Sums are those of `one_row.py`, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.binding import with_shared
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.gpu.held_rows import may_norm, row_norm, write_four
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    block_x,
    f32,
    fetch_f32,
    i64,
    load_i64,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.one_row import warps_of
from strata_nb.kernels.gpu.operations import Arguments, Function, GpuKernel, blocks_of
from strata_nb.kernels.gpu.product_launches import one_row_launch, products_from, types_of
from strata_nb.kernels.gpu.products import row_bytes_of, row_sum
from strata_nb.kernels.gpu.tables import table_bytes
from strata_nb.kernels.gpu.tile_rows import tiles_of
from strata_nb.kernels.gpu.tiles import tile_product
from strata_nb.kernels.program import Launch
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK

_BLOCKS = 132  # at most: multiprocessors of a large card
_MOST_WARPS = 32  # of a block
_WIDE_WARPS = 20  # up to which a thread may have the most registers
_WIDE, _NARROW = 96, 64
_WEIGHTS = 3
_NORM_KINDS = ("address", "address", "float")
_TAKEN = ("x", "values", "add")  # arguments of the products that are not the kernel's


def with_normed_rows(program: Sequence[Launch | CardLaunch]) -> Iterator[Launch | CardLaunch]:
    """Yield launches of one row, with norms in the products of their row where that pays."""
    at = 0
    while at < len(program):
        found = _together(program, at)
        yield found or program[at]
        at += 1 + _WEIGHTS if found else 1


def _together(program: Sequence[Launch | CardLaunch], at: int) -> CardLaunch | None:
    """Return one launch for a norm and three products of its row, None for others."""
    norm = program[at]
    if isinstance(norm, CardLaunch) or norm.kernel != "rms_norm" or at + 1 == len(program):
        return None
    found = products_from(program, at + 1)
    if len(found) != _WEIGHTS:
        return None
    products = one_row_launch(found)
    first, given = arguments_of(norm), products.arguments
    kinds, width = types_of(found), first["width"]
    fits = {
        "rows": given["rows"] == first["rows"],
        "row in its order": first["index"] == 0 and first["parts"] == 1,
        "of the norm": given["x"] == first["packed"] and given["values"] == width,
        "alone": given["add"] == 0 and first["out"] == 0,
        "not in place": first["x"] not in (given["y"], given["y2"], given["y3"]),
        "not read again": not _reads_again(program[at + 1 + _WEIGHTS :], first["packed"]),
    }
    groups = groups_of_block(kinds, width, _outputs_of(given))
    if groups == 0 or not all(fits.values()):
        return None
    words = {"rows": given["rows"], "x": first["x"], "norm_weight": first["weight"]}
    words |= {"eps": first["eps"]}
    words |= {name: word for name, word in given.items() if name not in {"rows", *_TAKEN}}
    left = [kind for name, kind in zip(given, products.kinds, strict=True) if name not in _TAKEN]
    return CardLaunch(
        normed_row_kernel(kinds, width, groups),
        f"{norm.label}, {', '.join(one.label.rpartition('.')[2] for one in found)}",
        words,
        (left[0], *_NORM_KINDS, *left[1:]),
    )


def _outputs_of(given: Arguments) -> tuple[int, ...]:
    return given["outputs"], given["outputs2"], given["outputs3"]


def _reads_again(behind: Sequence[Launch | CardLaunch], packed: int) -> bool:
    """Return whether a row is read before another one is written in its place."""
    for one in behind:
        words = one.arguments if isinstance(one, CardLaunch) else arguments_of(one)
        found = {name for name, word in words.items() if word == packed}
        if found:
            return found != {"packed"}
    return False


def groups_of_block(kinds: Sequence[TensorType], width: int, outputs: Sequence[int]) -> int:
    """Return how many groups of eight outputs a block has, so that all blocks run at once; 0 where
    there is no such kernel."""
    sub_blocks = width // SUB_BLOCK
    warps = warps_of(width)
    if width % SUB_BLOCK or tiles_of(sub_blocks) != 2 * warps or any(map(table_bytes, kinds)):
        return 0
    if any(count % GROUP_ROWS for count in outputs):
        return 0
    for groups in range(1, _MOST_WARPS // warps + 1):
        blocks = sum(blocks_of(count, GROUP_ROWS * groups) for count in outputs)
        if blocks <= _BLOCKS and may_norm(width, WARP * warps * groups):
            return groups
    return 0


# -- the kernel ------------------------------------------------------------------------------------


@cache
def _group_of(kind: TensorType, sub_blocks: int, groups: int) -> Function:
    """Return a function (rows, x, norm_weight, eps, weight, bias, y, outputs, number): what a block
    does that has a weight's groups from groups * number on.

    Shared memory: sums of the norm, the quantised row, sums of the warps.
    """
    width = SUB_BLOCK * sub_blocks
    warps, row_at = warps_of(width), 4 * WARP
    sums_at = row_at + SUB_BLOCK_BYTES * sub_blocks
    warp_bits = warps.bit_length() - 1
    read, add = tile_product(kind, sub_blocks, 0)
    add, to_shared = with_shared(add), with_shared(write_four)
    group_row_bytes = row_bytes_of(kind)(sub_blocks)

    def write(four: Any, number: Any, out: Any, packed: Any) -> None:
        to_shared(four, number, out, packed, sub_blocks)

    ask, norm, each = row_norm(width, WARP * warps * groups, write)

    def group_of(
        rows: int,
        x: int,
        norm_weight: int,
        eps: Any,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
        number: int,
    ) -> None:
        thread = i64(thread_index())
        warp, lane = thread >> 5, thread & WARP - 1
        tile, row, quarter = warp & warps - 1, lane & GROUP_ROWS - 1, lane >> 3
        last = (outputs >> 3) - 1  # whose sums a block has more than once where there are too few
        own = min(groups * number + (warp >> warp_bits), last)
        group = weight + GROUP_ROWS * group_row_bytes * own
        ones = read(group, GROUP_ROWS, row, quarter, tile)
        others = read(group, GROUP_ROWS, row, quarter, tile + warps)
        finished = min(groups * number + (thread >> 3), last)
        output = GROUP_ROWS * finished + (thread & GROUP_ROWS - 1)
        before = fetch_f32(bias + 4 * output) if bias != 0 else f32(0.0)
        norm_weights, here = ask(norm_weight, thread), load_i64(rows)
        await_previous()
        each(norm(x, norm_weights, thread, eps, 0), thread, 0, row_at)
        barrier()
        total = add(f32(0.0), ones, row_at, quarter, tile)
        total = row_sum(add(total, others, row_at, quarter, tile + warps))
        if lane < GROUP_ROWS:
            shared_store_f32(sums_at + 4 * (GROUP_ROWS * warp + lane), total)
        barrier()
        if thread < GROUP_ROWS * groups and here > 0:
            place = sums_at + 4 * (GROUP_ROWS * warps * (thread >> 3) + (thread & GROUP_ROWS - 1))
            total, warp = shared_load_f32(place), 1
            while warp < warps:
                total += shared_load_f32(place + 4 * GROUP_ROWS * warp)
                warp += 1
            store_f32(y + 4 * output, total + before if bias != 0 else total)

    return group_of


@cache
def normed_row_kernel(kinds: tuple[TensorType, ...], width: int, groups: int) -> GpuKernel:
    """Return the kernel for three packed weights of these types, rows of a width, and so many
    groups a block: as `groups_of_block` says.

    A block has groups of one weight. Each reads the row and the norm's weights, 8 bytes a value.
    """
    sub_blocks, warps = width // SUB_BLOCK, warps_of(width)
    # Weights of the same type share their code.
    types = tuple(dict.fromkeys(kinds))
    made = [_group_of(kind, sub_blocks, groups) for kind in types]
    first_of, second_of, third_of = (made * len(kinds))[: len(kinds)]
    type_count = len(types)
    second_type, third_type = types.index(kinds[1]), types.index(kinds[2])

    def normed_row(
        rows: int,
        x: int,
        norm_weight: int,
        eps: Any,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
        weight2: int,
        bias2: int,
        y2: int,
        outputs2: int,
        weight3: int,
        bias3: int,
        y3: int,
        outputs3: int,
    ) -> None:
        number, of_type = i64(block_x()), 0
        blocks = _blocks_here(outputs, groups)
        blocks2 = blocks + _blocks_here(outputs2, groups)
        if number >= blocks2:
            weight, bias, y, outputs = weight3, bias3, y3, outputs3
            of_type, number = third_type, number - blocks2
        elif number >= blocks:
            weight, bias, y, outputs = weight2, bias2, y2, outputs2
            of_type, number = second_type, number - blocks
        if of_type == 0 or type_count == 1:
            first_of(rows, x, norm_weight, eps, weight, bias, y, outputs, number)
        elif of_type == 1 or type_count == 2:
            second_of(rows, x, norm_weight, eps, weight, bias, y, outputs, number)
        else:
            third_of(rows, x, norm_weight, eps, weight, bias, y, outputs, number)

    shared_bytes = 4 * WARP + SUB_BLOCK_BYTES * sub_blocks + 4 * GROUP_ROWS * warps * groups
    names = "_".join(kind.name.lower() for kind in kinds)
    return GpuKernel(
        f"normed_row_{names}_{width}_{groups}",
        normed_row,
        WARP * warps * groups,
        lambda given, _: (sum(blocks_of(n, GROUP_ROWS * groups) for n in _outputs_of(given)), 1, 1),
        lambda _: shared_bytes,
        _WIDE if warps * groups <= _WIDE_WARPS else _NARROW,
        lambda given, _: sum(
            count * row_bytes(kind, width)
            for kind, count in zip(kinds, _outputs_of(given), strict=True)
        ),
    )


def _blocks_here(outputs: int, groups: int) -> Any:
    """Return how many blocks a weight has, in a kernel."""
    return (outputs + (GROUP_ROWS * groups - 1)) // (GROUP_ROWS * groups)
