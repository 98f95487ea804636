"""Norm a row in the launch that finishes it: the last block of a product does it.

    table                                     card, for one row
    linear that adds to x, rms_norm of x      one launch
    expert_down, rms_norm of x                one launch; of pool_down as well

Each block writes its outputs and counts itself (`is_last`); the one that finds all others counted
reads the whole row, norms it and writes what the next product reads. For that it waits twice for
the card's cache; a launch of its own takes longer. The bits are those of the norm alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.gpu.held_rows import may_norm, row_norm, write_four
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    barrier,
    block_x,
    block_y,
    i32,
    i64,
    load_i64,
    prefetch,
    thread_index,
)
from strata_nb.kernels.gpu.operations import ARRIVED, Function, GpuKernel, is_last
from strata_nb.kernels.gpu.pool_answers import POOL_DOWN
from strata_nb.kernels.gpu.pooled import answer_taker
from strata_nb.kernels.gpu.routed import CARD_KERNELS
from strata_nb.kernels.program import Launch

_ONE_ROW = ("rows", "x", "values", "add", "weight", "bias", "y", "outputs")
_EXPERT_DOWN = CARD_KERNELS["expert_down"].arguments
_NORM = ("norm_weight", "norm_out", "norm_packed", "norm_blocks", "norm_eps")
_NORM_KINDS = ("address", "address", "address", "integer", "float")


def with_last_norms(program: Sequence[Launch | CardLaunch]) -> Iterator[Launch | CardLaunch]:
    """Yield launches of one row, with norms in the products that finish their row."""
    at = 0
    while at < len(program):
        found = _together(*program[at : at + 2]) if at + 1 < len(program) else None
        yield found or program[at]
        at += 2 if found else 1


def _together(product: Launch | CardLaunch, norm: Launch | CardLaunch) -> CardLaunch | None:
    """Return one launch for a product and the norm of what it adds to, None for others."""
    if isinstance(norm, CardLaunch) or norm.kernel != "rms_norm":
        return None
    if not isinstance(product, CardLaunch):
        return None
    given, words = product.arguments, arguments_of(norm)
    if tuple(given) not in (_ONE_ROW, _EXPERT_DOWN, POOL_DOWN) or given.get("add") == 0:
        return None
    wanted = {
        "rows": given["rows"],
        "index": 0,
        "parts": 1,
        "x": given["y"],
        "width": given["outputs"],
    }
    if any(words[name] != word for name, word in wanted.items()):
        return None
    if not may_norm(words["width"], product.kernel.threads):
        return None
    x, y, _ = product.grid(1)
    values = (words["weight"], words["out"], words["packed"], x * y, words["eps"])
    return CardLaunch(
        _with_norm(product.kernel, product.shared_bytes, words["width"], tuple(given)),
        f"{product.label}, {norm.label.rpartition('.')[2]}",
        {**given, **dict(zip(_NORM, values, strict=True))},
        (*product.kinds, *_NORM_KINDS),
    )


@cache
def _with_norm(
    kernel: GpuKernel, shared_bytes: int, width: int, names: tuple[str, ...]
) -> GpuKernel:
    """Return a product, with arguments of such names, whose last block norms what it adds to."""
    product, threads = kernel.function, kernel.threads
    sums = -(-shared_bytes // 16) * 16  # behind the product's own
    place = sums + 4 * WARP

    def write(four: Any, number: Any, out: Any, packed: Any) -> None:
        write_four(four, number, out, packed, width >> 5)

    ask, norm, each = row_norm(width, threads, write)

    def begin(rows: int, weight: int) -> Any:
        if thread_index() + block_x() + block_y() == 0:  # it was last read a token ago
            prefetch(weight, i32(4 * width))
        return load_i64(rows)

    def finish(
        rows: int, here: int, x: int, weight: int, out: int, packed: int, blocks: int, eps: Any
    ) -> None:
        thread = i64(thread_index())
        if is_last(rows + ARRIVED, blocks, thread, place) and here > 0:
            values = norm(x, ask(weight, thread), thread, eps, sums)
            each(values, thread, out, packed)

    def one_row(
        rows: int,
        x: int,
        values: int,
        add: int,
        weight: int,
        bias: int,
        y: int,
        outputs: int,
        norm_weight: int,
        norm_out: int,
        norm_packed: int,
        norm_blocks: int,
        norm_eps: Any,
    ) -> None:
        here = begin(rows, norm_weight)
        product(rows, x, values, add, weight, bias, y, outputs)
        finish(rows, here, y, norm_weight, norm_out, norm_packed, norm_blocks, norm_eps)

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
        norm_weight: int,
        norm_out: int,
        norm_packed: int,
        norm_blocks: int,
        norm_eps: Any,
    ) -> None:
        here = begin(rows, norm_weight)
        product(rows, blobs, sources, inner, shares, y, down_offset, top_k, values, outputs)
        finish(rows, here, y, norm_weight, norm_out, norm_packed, norm_blocks, norm_eps)

    take = answer_taker(width, threads, place + 4)

    def pool_down(
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
        box: int,
        state: int,
        idle: int,
        norm_weight: int,
        norm_out: int,
        norm_packed: int,
        norm_blocks: int,
        norm_eps: Any,
    ) -> None:
        here, thread = begin(rows, norm_weight), i64(thread_index())
        marks = load_i64(blobs)  # `route` was two launches ago
        product(
            rows,
            blobs,
            sources,
            inner,
            shares,
            y,
            down_offset,
            top_k,
            values,
            outputs,
            box,
            state,
            idle,
        )
        if is_last(rows + ARRIVED, norm_blocks, thread, place) and here > 0:
            take(marks, y, box, state, thread)
            barrier()
            values_here = norm(y, ask(norm_weight, thread), thread, norm_eps, sums)
            each(values_here, thread, norm_out, norm_packed)

    functions: dict[tuple[str, ...], Function] = {
        _ONE_ROW: one_row,
        _EXPERT_DOWN: expert_down,
        POOL_DOWN: pool_down,
    }
    return kernel._replace(
        name=f"{kernel.name}_norm_{width}",
        function=functions[names],
        shared_bytes=lambda _: place + 16,
    )
