"""What a card launches in place of a layer's routing and experts: kernels of its own.

    the table                          a card
    router_top_k, expert_group         route           choices, counts, where the experts are
    -                                  expert_fill     who comes to a slot; of a single row `route`
                                                       says that too
    expert_gather                      -               rows are read where they are
    expert_gate_up                     expert_gate_up  in order of choices
    expert_down                        expert_down

The table sorts choices by expert, for devices that read a prompt's rows many at a time. A card has
few rows: choice row * top_k + k stays where it is, `starts` is not written, and in the places of
`members` and `places` are the addresses of the experts' blobs, and whence those are brought that
come to a slot: `blobs` of `routing.py`, and `sources` of `filling.py`.

Where the CPU computes some of the missed experts of a single row (`pooled.py`), `pool_gate_up` and
`pool_down` take the place of the last two.

The other arguments are named as those of the table. `inner`, `packed` and what `expert_down` reads
of them have a row for each choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.expert_down import expert_down_kernel
from strata_nb.kernels.gpu.expert_gate_up import expert_gate_up_kernel
from strata_nb.kernels.gpu.filling import expert_fill_kernel
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel
from strata_nb.kernels.gpu.pooled import PoolPlaces, pool_down_kernel, pool_gate_up_kernel
from strata_nb.kernels.gpu.routing import route_kernel
from strata_nb.kernels.program import Launch
from strata_nb.kernels.table import KERNELS

FUSED = ("router_top_k", "expert_group", "expert_gather", "expert_gate_up", "expert_down")


class CardKernel(NamedTuple):
    """Describe a kernel that cards alone have: its arguments by name, and what returns it.

    find   of a variant and arguments
    """

    arguments: tuple[str, ...]
    kinds: tuple[str, ...]
    find: Callable[[Any, Arguments], GpuKernel]

    def part(self, given: Mapping[str, int], variant: Any = None, label: str = "") -> CardLaunch:
        """Return a launch of it; of what is given it takes what it has arguments for."""
        arguments = {name: given[name] for name in self.arguments}
        return CardLaunch(self.find(variant, arguments), label, arguments, self.kinds, variant)


def card_kernel(arguments: str, find: Callable[[Any, Arguments], GpuKernel]) -> CardKernel:
    """Return a kernel whose addresses are written `*name`, as in the table."""
    words = arguments.split()
    kinds = tuple("address" if word.startswith("*") else "integer" for word in words)
    return CardKernel(tuple(word.lstrip("*") for word in words), kinds, find)


WITH_CPU = "with cpu"  # a variant of `route`, which decides who goes there as well

CARD_KERNELS = {
    "route": card_kernel(
        "*rows *logits *positions *forced *addresses *homes *seen *plan *use *tally *chosen "
        "*shares *blobs *sources experts top_k renormalise",
        lambda decides, given: route_kernel(
            given["experts"], given["top_k"], decides=bool(decides), pools=decides == WITH_CPU
        ),
    ),
    "expert_fill": card_kernel(
        "*rows *addresses *homes *seen *plan *chosen *blobs *sources experts top_k",
        lambda _, given: expert_fill_kernel(given["experts"]),
    ),
    "expert_gate_up": card_kernel(
        "*rows *blobs *sources *x *inner *packed gate_offset up_offset top_k values outputs "
        "row_bytes",
        lambda pair, given: expert_gate_up_kernel(
            pair[0], pair[1], given["values"], given["outputs"]
        ),
    ),
    "expert_down": card_kernel(
        "*rows *blobs *sources *inner *shares *y down_offset top_k values outputs",
        lambda kind, given: expert_down_kernel(
            kind, given["values"], given["outputs"], given["top_k"]
        ),
    ),
    "pool_gate_up": card_kernel(
        "*rows *blobs *sources *x *inner *packed gate_offset up_offset top_k values outputs "
        "row_bytes *chosen *shares layer *box *state",
        lambda pair, given: pool_gate_up_kernel(
            pair[0], pair[1], given["values"], given["outputs"]
        ),
    ),
    "pool_down": card_kernel(
        "*rows *blobs *sources *inner *shares *y down_offset top_k values outputs *box *state "
        "*idle",
        lambda kind, given: pool_down_kernel(
            kind, given["values"], given["outputs"], given["top_k"]
        ),
    ),
}


def with_routes(
    program: Sequence[Launch | CardLaunch], rows: int, pool: PoolPlaces | None = None
) -> Iterator[Launch | CardLaunch]:
    """Yield the launches of a program of so many rows, with those of each layer's experts as a card
    has them.

    pool   of a single row: what the card shares with the CPU, which computes some of the missed

    ValueError where one of them stands alone: it has no kernel on a card.
    """
    number = layer_number = 0
    while number < len(program):
        one = program[number]
        if isinstance(one, CardLaunch) or one.kernel not in FUSED:
            yield one
            number += 1
            continue
        layer = [one for one in program[number : number + len(FUSED)] if isinstance(one, Launch)]
        if tuple(part.kernel for part in layer) != FUSED:
            names = ", ".join(part.kernel for part in layer)
            raise ValueError(f"{one.label}: a card takes {', '.join(FUSED)} together, not {names}")
        if pool is not None and rows == 1:
            yield from _pooled(*layer, number=layer_number, pool=pool)
        else:
            yield from _routed(*layer, is_alone=rows == 1)
        number += len(FUSED)
        layer_number += 1


def _routed(
    router: Launch,
    group: Launch,
    gather: Launch,
    gate_up: Launch,
    down: Launch,
    *,
    is_alone: bool,
) -> Iterator[CardLaunch]:
    routing, after = _arguments(router, group, gate_up)
    yield CARD_KERNELS["route"].part(routing, is_alone, router.label)
    if not is_alone:
        yield CARD_KERNELS["expert_fill"].part(routing, label=f"{group.label} fill")
    yield CARD_KERNELS["expert_gate_up"].part(after, gate_up.variant, gate_up.label)
    yield CARD_KERNELS["expert_down"].part({**after, **_named(down)}, down.variant, down.label)


def _pooled(
    router: Launch,
    group: Launch,
    gather: Launch,
    gate_up: Launch,
    down: Launch,
    *,
    number: int,
    pool: PoolPlaces,
) -> Iterator[CardLaunch]:
    """Yield what `_routed` yields for a single row of a layer that shares misses with the CPU."""
    routing, after = _arguments(router, group, gate_up)
    after |= {"chosen": routing["chosen"], "shares": routing["shares"], "layer": number}
    after |= pool._asdict()
    yield CARD_KERNELS["route"].part(routing, WITH_CPU, router.label)
    yield CARD_KERNELS["pool_gate_up"].part(after, gate_up.variant, gate_up.label)
    yield CARD_KERNELS["pool_down"].part({**after, **_named(down)}, down.variant, down.label)


def _arguments(
    router: Launch, group: Launch, gate_up: Launch
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the arguments of who chooses experts, and of who multiplies with them."""
    grouped = _named(group)
    after = {**_named(gate_up), "blobs": grouped["members"], "sources": grouped["places"]}
    return {**_named(router), **grouped, **after}, after


def _named(launch: Launch) -> dict[str, int]:
    names = [argument.name for argument in KERNELS[launch.kernel].arguments]
    return dict(zip(names, launch.arguments, strict=True))
