"""Find what a card launches otherwise for the rows of a prompt batch than for those of a window.

    linear            `grouped.py`: tensor cores; weights of floats: `batch_floats.py`, and of many
                      rows `batch_float_tiles.py`
    a layer's experts

        the table                       a card, for a batch
        router_top_k, expert_group      route, batch_count, batch_group
        expert_gather                   -
        expert_gate_up                  batch_expert of gate, batch_up
        expert_down                     batch_expert, batch_sum

The bits are those of windows.

Experts of floats have no other kernels here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.attention_slices import SLICES
from strata_nb.kernels.gpu.batch_float_tiles import SIDE, batch_float_tiles_kernel
from strata_nb.kernels.gpu.batch_floats import batch_float_kernel
from strata_nb.kernels.gpu.batch_products import (
    batch_expert_kernel,
    batch_linear_kernel,
    batch_up_kernel,
)
from strata_nb.kernels.gpu.card_launch import CardLaunch, card_launch
from strata_nb.kernels.gpu.expert_down import parts_of_down
from strata_nb.kernels.gpu.expert_gate_up import PARTS
from strata_nb.kernels.gpu.floats import EIGHT
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.gpu.gathering import sum_kernel
from strata_nb.kernels.gpu.grouping import count_kernel, group_kernel
from strata_nb.kernels.gpu.one_row import warps_of
from strata_nb.kernels.gpu.routed import CARD_KERNELS, FUSED, card_kernel
from strata_nb.kernels.gpu.warpgroup_launches import (
    WARPGROUP_KERNELS,
    adds,
    halves_at,
    rows_of_block,
    rows_of_tile,
    takes,
)
from strata_nb.kernels.groups import groups_at
from strata_nb.kernels.program import Launch
from strata_nb.packing import PACKED, UNPACKED

WINDOW_ROWS = 8  # more of them are a batch
MANY_SUMS = 1_700 * 128  # of floats: from so many on tiles of them are sooner on an H200

BATCH_KERNELS = {
    "batch_slices": SLICES,
    "batch_count": card_kernel("*rows *chosen *counts experts top_k", lambda _, __: count_kernel()),
    "batch_group": card_kernel(
        "*rows *chosen *counts *members *sources *tiles experts top_k",
        lambda _, given: group_kernel(given["top_k"]),
    ),
    "batch_linear": card_kernel(
        "*rows *x *weight *bias *y values outputs add parts",
        lambda kind, _: batch_linear_kernel(kind),
    ),
    "batch_expert": card_kernel(
        "*tiles *sources *targets *addresses *x *y offset values outputs parts experts top_k",
        lambda kind, _: batch_expert_kernel(kind),
    ),
    "batch_up": card_kernel(
        "*tiles *sources *targets *addresses *x *inner *packed offset values outputs parts experts "
        "top_k",
        lambda kind, _: batch_up_kernel(kind),
    ),
    "batch_sum": card_kernel(
        "*rows *products *shares *y top_k outputs", lambda _, __: sum_kernel()
    ),
}

OF_BATCHES = BATCH_KERNELS | WARPGROUP_KERNELS


def with_batches(
    program: Sequence[Launch | CardLaunch], rows: int, *, warpgroups: bool = False
) -> Iterator[Launch | CardLaunch]:
    """Yield launches, with products by packed weights as a card has them for so many rows.

    warpgroups   whether it has them, and bits may be others than those of windows
    """
    number, halved = 0, 0  # the address of rows that are there as halves
    while number < len(program):
        one = program[number]
        layer = [one for one in program[number : number + len(FUSED)] if isinstance(one, Launch)]
        if isinstance(one, Launch) and one.kernel == "linear" and one.variant in PACKED:
            given = arguments_of(one)
            of_block = rows_of_block(rows, given["outputs"])
            if warpgroups and takes(given["values"]) and of_block:
                halves = halves_at(given["x"], rows, given["values"])
                if halved != halves:
                    yield _part("warpgroup_halves", one.label, given | {"halves": halves})
                halved = halves
                variant = one.variant, of_block
                yield _part("warpgroup_linear", one.label, given | {"x": halves}, variant)
            else:
                words = given | {"parts": warps_of(given["values"])}
                yield _part("batch_linear", one.label, words, one.variant)
            number += 1
            continue
        halved = 0
        if isinstance(one, Launch) and one.kernel == "linear" and one.variant in UNPACKED:
            yield _of_floats(one, TensorType(one.variant), rows)
        elif tuple(part.kernel for part in layer) == FUSED and _is_packed(*layer[-2:]):
            yield from _routed(rows, *layer, warpgroups=warpgroups)
            number += len(FUSED) - 1
        else:
            yield one
        number += 1


def _of_floats(one: Launch, kind: TensorType, rows: int) -> CardLaunch:
    """Return a product by weights of floats, of so many rows."""
    given, made = arguments_of(one), card_launch(one)
    if given["values"] % EIGHT:
        return made
    are_many = rows >= SIDE and rows * given["outputs"] >= MANY_SUMS
    chosen = batch_float_tiles_kernel if are_many else batch_float_kernel
    return made._replace(kernel=chosen(kind, given["values"]))


def _is_packed(gate_up: Launch, down: Launch) -> bool:
    return {*_pair(gate_up), down.variant} <= PACKED


def _pair(gate_up: Launch) -> tuple[TensorType, TensorType]:
    """Return the types of gate and up."""
    pair: Any = gate_up.variant
    return TensorType(pair[0]), TensorType(pair[1])


def _part(name: str, label: str, given: Mapping[str, int], variant: object = None) -> CardLaunch:
    return (CARD_KERNELS | OF_BATCHES)[name].part(given, variant, label)


def _routed(
    rows: int,
    router: Launch,
    group: Launch,
    gather: Launch,
    gate_up: Launch,
    down: Launch,
    *,
    warpgroups: bool,
) -> Iterator[CardLaunch]:
    given = arguments_of(router) | arguments_of(group) | arguments_of(gather)
    places = groups_at(given["gathered"], rows * given["top_k"], given["experts"])
    given |= places._asdict()
    # Nobody comes to a slot in a batch, so that blobs are written and not looked at.
    yield _part("route", router.label, {**arguments_of(gate_up), **given, "blobs": given["places"]})
    yield _part("batch_count", group.label, given)
    members = {"targets": given["members"]}
    inner = given | arguments_of(gate_up) | members
    outer = given | arguments_of(down) | members
    gate, up = _pair(gate_up)
    products = {"sources": given["members"], "y": outer["products"], "offset": outer["down_offset"]}
    of_tile = rows_of_tile(rows, given["top_k"], given["experts"])
    all_taken = takes(inner["values"]) and takes(outer["values"]) and adds(outer["outputs"])
    if warpgroups and all_taken and gate == up and of_tile:
        halves = halves_at(inner["x"], rows, inner["values"])
        yield _part("warpgroup_halves", gate_up.label, inner | {"halves": halves})
        yield _part("warpgroup_group", group.label, given, of_tile)
        yield _part("warpgroup_gate_up", gate_up.label, inner | {"x": halves}, (gate, of_tile))
        variant = TensorType(down.variant), of_tile  # type: ignore[arg-type]
        products |= {"x": inner["inner"]}
        yield _part("warpgroup_expert", down.label, outer | products, variant)
        yield _part("warpgroup_sum", down.label, outer)
        return
    yield _part("batch_group", group.label, given)
    words = {**inner, "y": inner["inner"], "offset": inner["gate_offset"], "parts": PARTS}
    yield _part("batch_expert", gate_up.label, words, gate)
    words = {**inner, "offset": inner["up_offset"], "parts": PARTS}
    yield _part("batch_up", gate_up.label, words, up)

    products |= {"x": outer["inner"], "parts": parts_of_down(outer["top_k"], outer["values"])}
    yield _part("batch_expert", down.label, outer | products, down.variant)
    yield _part("batch_sum", down.label, outer)
