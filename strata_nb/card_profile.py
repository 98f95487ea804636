"""Find out where the time of a decode window goes on a card: a line for each kind of launch.

No clock runs inside a graph. So graphs are made of the first launches of a stretch, one launch more
each time, and what a launch takes is the time of the graph that ends with it, without the time of
the one before:

    lead | a         lead | a | b         lead | a | b | c
                                                      ~~~   the time of c

The *lead* is what runs in front of the stretch, so that the first launch begins behind another one
as well. Layers are alike, so a few in the middle are measured, and stand for the others: a kind of
launch is what it is for, its kernel, and how many bytes it reads.

Rejected: an event behind each launch (it is a node of its own that launches wait for, and hides
what they overlap), and the driver's profiling library (it needs rights that a user may lack).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from strata_nb.kernels.gpu.card_launch import CardLaunch

MEASURED_LAYERS = 6
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")

Seconds = Callable[[Sequence[CardLaunch]], float]
"""Return the seconds of a graph of launches."""


class Kind(NamedTuple):
    """Say what launches have in common whose times are averaged.

    label    what they are for, without the number of a layer: "attn_q"
    kernel   its name
    reads    bytes of weights and K/V that each reads
    """

    label: str
    kernel: str
    reads: int


@dataclass(frozen=True)
class Line:
    """Say what all launches of a kind take in a window.

    count       of launches; `measured` of them were measured
    seconds     of all of them
    """

    kind: Kind
    count: int
    measured: int
    seconds: float

    @property
    def read_bytes(self) -> int:
        """Bytes of weights and K/V that all of them read."""
        return self.count * self.kind.reads


@dataclass(frozen=True)
class WindowProfile:
    """Say where the time of a window goes.

    rows      of the window
    lines     in the order of a window
    whole_s   seconds of the graph of all launches, measured like its parts
    """

    rows: int
    lines: tuple[Line, ...]
    whole_s: float

    @property
    def sum_s(self) -> float:
        """Seconds of all lines: what it differs from `whole_s` by is what the method misses."""
        return sum(line.seconds for line in self.lines)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights and K/V that the window reads."""
        return sum(line.read_bytes for line in self.lines)


def profile_window(
    launches: Sequence[CardLaunch], rows: int, kv_layer_bytes: int, seconds: Seconds
) -> WindowProfile:
    """Measure launches of a window, from the embedding to the choice.

    kv_layer_bytes   bytes of K/V that the attention of a layer reads
    seconds          measures a graph; it is called with a few launches more than there are kinds
    """
    kinds = _kinds(launches, rows, kv_layer_bytes)
    samples: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for first, end, lead in _stretches(launches, kinds):
        times = [
            seconds([*launches[first - lead : first], *launches[first:last]])
            if first >= lead
            else seconds([*launches[first - lead :], *launches[:last]])
            for last in range(first, end + 1)
        ]
        for kind, (before, after) in zip(kinds[first:end], pairwise(times), strict=True):
            samples[kind].append(after - before)
    lines = [
        Line(kind, kinds.count(kind), len(found), kinds.count(kind) * fmean(found))
        for kind, found in samples.items()
    ]
    return WindowProfile(rows, tuple(lines), seconds(launches))


def _kinds(launches: Sequence[CardLaunch], rows: int, kv_layer_bytes: int) -> list[Kind]:
    """Return the kind of each launch.

    Of launches of attention in a layer the first reads the K/V, others work on what it left.
    """
    kinds, attended = [], set[str]()
    for one in launches:
        reads = one.kernel.reads(one.arguments, rows)
        if one.kernel.name.startswith("attention") and one.label not in attended:
            attended.add(one.label)
            reads += kv_layer_bytes
        found = _LAYER.fullmatch(one.label)
        kinds.append(Kind(found[2] if found else one.label, one.kernel.name, reads))
    return kinds


def _layer(one: CardLaunch) -> int | None:
    found = _LAYER.fullmatch(one.label)
    return int(found[1]) if found else None


def _stretches(launches: Sequence[CardLaunch], kinds: Sequence[Kind]) -> list[tuple[int, int, int]]:
    """Return what to measure: the first launch, that behind the last, and how many lead to it.

    Layers in the middle, what is outside of layers, and for each kind that is not in these the
    first layer that has it. A lead is as long as a layer, or longer: the launches in front, as if
    one window followed another. It begins where a layer does, because what is left of one layer
    cannot be gone on with from that of another: numbers of choices, and who was chosen.
    """
    layers = [_layer(one) for one in launches]
    edges = [n for n, pair in enumerate(pairwise(layers), 1) if pair[0] != pair[1]]
    parts = list(pairwise([0, *edges, len(launches)]))
    of_layers = [part for part in parts if layers[part[0]] is not None]
    skipped = max(0, len(of_layers) - MEASURED_LAYERS) // 2
    middle = of_layers[skipped : skipped + MEASURED_LAYERS]
    chosen = [part for part in parts if layers[part[0]] is None or part in middle]
    covered = {kind for first, end in chosen for kind in kinds[first:end]}
    for first, end in of_layers:
        if not covered.issuperset(kinds[first:end]):
            chosen.append((first, end))
            covered.update(kinds[first:end])
    sizes = [end - first for first, end in parts]
    return [(*part, _lead(sizes, parts.index(part))) for part in sorted(chosen)]


def _lead(sizes: Sequence[int], number: int) -> int:
    """Return how many launches lead to a part: those of whole parts in front of it, behind the
    first one the last ones."""
    lead = 0
    for size in [*reversed(sizes[:number]), *reversed(sizes[number + 1 :])]:
        if lead >= max(sizes):
            break
        lead += size
    return lead
