"""Norm a row, multiply it with the router and choose its experts, in one launch.

    table                                                card, for one row
    rms_norm, linear of floats, and what `route` does    router

A router is so small that the launches around its product take most of the time. So each block norms
the whole row anew, which costs little more than reading it, keeps it in shared memory, and has a
few outputs; the last block that has written its logits (`is_last`) chooses. The normed row, which
the experts read, is written by all of them together, a part each. The bits are those of the three
kernels alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.early_choice import post_logit, posts_at
from strata_nb.kernels.gpu.early_gate_up import early_gate_up
from strata_nb.kernels.gpu.float_linear import WARPS, add_eight, parts_of
from strata_nb.kernels.gpu.floats import EIGHT, FLOATS
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.gpu.held_rows import HELD, may_norm, row_norm, write_four
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_previous,
    barrier,
    bits_of_f32,
    block_x,
    f32,
    fetch_f32,
    hold,
    i32,
    i64,
    load_i64,
    shared_load_4xf32,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    ARRIVED,
    GpuKernel,
    blocks_of,
    is_last,
    warp_sum,
)
from strata_nb.kernels.gpu.routed import CARD_KERNELS
from strata_nb.kernels.gpu.routing import expert_of, route_bytes, route_row
from strata_nb.kernels.program import Launch

_THREADS = WARP * WARPS
_ROUTE, _GATE_UP = CARD_KERNELS["route"], CARD_KERNELS["expert_gate_up"]
_ARGUMENTS = (
    ("x", "address"),
    ("norm_weight", "address"),
    ("out", "address"),
    ("packed", "address"),
    ("weight", "address"),
    ("bias", "address"),
    ("eps", "float"),
    ("posts", "address"),
    ("stamp", "integer"),
)
"""Of the kernel, by name and kind, in front of those of `route`: of the norm, of the product, and
what logits are posted with (`early_choice.py`)."""

# Shared memory: sums of the norm, then of the product's parts; the row. Behind it, or behind what
# `route_row` has, whether the block is the last.
_SUMS = 4 * WARP
_ROW = _SUMS + 4 * WARPS


def with_routers(
    program: Sequence[Launch | CardLaunch], *, pools: bool = False
) -> Iterator[Launch | CardLaunch]:
    """Yield launches of one row, with those that lead to the choice of experts as one.

    pools   who goes to the CPU is chosen as well
    """
    at = stamp = 0
    while at < len(program):
        three = program[at : at + 3]
        found = _router(*three, stamp=stamp + 1, pools=pools) if len(three) == 3 else None
        yield found or program[at]
        at += 3 if found else 1
        if found is None:
            continue
        stamp += 1
        behind = program[at] if at < len(program) else None
        if isinstance(behind, CardLaunch) and tuple(behind.arguments) == _GATE_UP.arguments:
            yield early_gate_up(behind, found.arguments) or behind
            at += 1


def _router(
    norm: Launch | CardLaunch,
    product: Launch | CardLaunch,
    route: Launch | CardLaunch,
    *,
    stamp: int,
    pools: bool,
) -> CardLaunch | None:
    """Return one launch for a norm, a product and a choice, None where they are something else."""
    if isinstance(norm, CardLaunch) or isinstance(product, CardLaunch):
        return None
    if not isinstance(route, CardLaunch) or tuple(route.arguments) != _ROUTE.arguments:
        return None
    kind = product.variant
    if (norm.kernel, product.kernel) != ("rms_norm", "linear") or kind not in FLOATS:
        return None
    assert isinstance(kind, TensorType)  # noqa: S101 - the table says so
    first, second, last = arguments_of(norm), arguments_of(product), route.arguments
    width, experts = first["width"], last["experts"]
    fits = {
        "rows": first["rows"] == second["rows"] == last["rows"],
        "rows in their order": first["index"] == 0 and first["parts"] == 1,
        "not in place": first["out"] != first["x"],  # blocks read x while others write
        "of the norm": second["x"] == first["out"] and second["values"] == width,
        "of the product": second["y"] == last["logits"] and second["outputs"] == experts,
        "alone": second["add"] == 0,
        "threads": experts <= _THREADS and may_norm(width, _THREADS),
    }
    if not all(fits.values()):
        return None
    given = {**second, **first, "norm_weight": first["weight"], "weight": second["weight"]}
    given |= {"posts": posts_at(first["rows"]), "stamp": stamp}
    return CardLaunch(
        router_kernel(kind, width, experts, last["top_k"], pools),
        f"{norm.label}, {product.label.rpartition('.')[2]}, {route.label.rpartition('.')[2]}",
        {**{name: given[name] for name, _ in _ARGUMENTS}, **last},
        (*(kind for _, kind in _ARGUMENTS), *route.kinds),
    )


@cache
def router_kernel(kind: TensorType, width: int, experts: int, top_k: int, pools: bool) -> GpuKernel:
    """Return the kernel for a type of `FLOATS`, a row of a width that its blocks can norm, and at
    most as many experts as they have threads; the others as `route_row` has them.

    Its grid is experts / 8 * parts, of 256 threads. Each block reads the row and the norm's
    weights, 8 bytes a value, and its part of the router.
    """
    size, _, eight = FLOATS[kind]
    parts = parts_of(width)
    each, step = WARPS // parts, EIGHT * WARP * parts
    blocks, last = blocks_of(experts, each), width - EIGHT
    place = max(_ROW + 4 * width, route_bytes(_THREADS))

    def keep(four: Any, number: Any, _: Any, __: Any) -> None:
        """Put four values of the row where the block's own product finds them."""
        a, b, c, d = four
        target = _ROW + 4 * HELD * number
        shared_store_f32(target, a)
        shared_store_f32(target + 4, b)
        shared_store_f32(target + 8, c)
        shared_store_f32(target + 12, d)

    def write(four: Any, number: Any, out: Any, packed: Any) -> None:
        """Write four values of the row where experts find them, if they are the block's share."""
        if (number >> 5) % blocks == block_x():
            write_four(four, number, out, packed, width >> 5)

    of_thread, route_one = expert_of(True, pools), route_row(experts, top_k, True, pools)
    ask, norm, keep_each = row_norm(width, _THREADS, keep)
    write_each = row_norm(width, _THREADS, write).each

    def add(total: Any, weights: Any, value: int) -> Any:
        """Add the products of eight values of the row; there may be no such eight."""
        if value < width:
            row = _ROW + 4 * value
            total = add_eight(total, weights, shared_load_4xf32(row), shared_load_4xf32(row + 16))
        return total

    def router(
        x: int,
        norm_weight: int,
        out: int,
        packed: int,
        weight: int,
        bias: int,
        eps: Any,
        posts: int,
        stamp: int,
        rows: int,
        logits: int,
        positions: int,
        forced: int,
        addresses: int,
        homes: int,
        seen: int,
        plan: int,
        use: int,
        tally: int,
        chosen: int,
        shares: int,
        blobs: int,
        sources: int,
        _experts: int,
        _top_k: int,
        renormalise: int,
    ) -> None:
        thread, block = i64(thread_index()), i64(block_x())
        warp, lane = thread >> 5, thread & WARP - 1
        own, part = warp // parts, warp % parts
        output, value = min(each * block + own, experts - 1), EIGHT * (lane + WARP * part)
        of_output = weight + size * width * output
        first = eight(of_output + size * min(value, last))
        second = eight(of_output + size * min(value + step, last))
        norm_weights = ask(norm_weight, thread)
        before = fetch_f32(bias + 4 * output) if bias != 0 else f32(0.0)
        of_expert = of_thread(thread, experts, addresses, homes, seen, plan)
        here = load_i64(rows)
        hold(i32(bits_of_f32(first[0]) ^ bits_of_f32(second[0]) ^ bits_of_f32(norm_weights[0])))
        await_previous()
        if here == 0:
            return
        values = norm(x, norm_weights, thread, eps, 0)
        keep_each(values, thread, 0, 0)
        barrier()
        total = add(add(f32(0.0), first, value), second, value + step)
        total = warp_sum(total)
        if lane == 0:
            shared_store_f32(_SUMS + 4 * warp, total)
        barrier()
        if lane == 0 and part == 0 and each * block + own < experts:
            other = 1
            while other < parts:
                total += shared_load_f32(_SUMS + 4 * (warp + other))
                other += 1
            logit = total + before if bias != 0 else total
            post_logit(posts, output, logit, stamp)
            store_f32(logits + 4 * output, logit)
        if is_last(rows + ARRIVED, blocks, thread, place):
            route_one(
                0,
                of_expert,
                logits,
                positions,
                forced,
                addresses,
                homes,
                seen,
                plan,
                use,
                tally,
                chosen,
                shares,
                blobs,
                sources,
                renormalise,
            )
        write_each(values, thread, out, packed)  # nobody waits for it here

    return GpuKernel(
        f"router_{kind.name}_{width}_{experts}_{top_k}{'_pool' if pools else ''}".lower(),
        router,
        _THREADS,
        lambda _, __: (blocks, 1, 1),
        lambda _: place + 16,
        reads=lambda _, __: experts * row_bytes(kind, width),
    )
