"""A device that draws tokens and gives missed experts slots within the window, as a card does.

Behind each run it does what `cache.filling.fill_layer` says to its own tables, and copies blobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from drawing_backend import Drawing, DrawingBackend
from numpy.typing import NDArray

from strata_nb.addresses import memory_view
from strata_nb.cache.filling import fill_layer
from strata_nb.fill_plans import plan_type
from strata_nb.formats import tensor_bytes
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.program import Program

# The words of a layer's routing, and offset and bytes of each matrix in its blobs.
Layer = tuple[dict[str, int], list[tuple[int, int]]]


class FillingBackend(DrawingBackend):
    """Give experts slots.

    came     how many came to slots
    missed   of each layer, how many choices found no slot
    """

    fills, most_rows = True, 8

    def __init__(self, text: str, threads: int = 1, *given: Any) -> None:
        super().__init__(text, threads, *given)
        self.came = 0
        self.missed: Counter[int] = Counter()
        self._layers: dict[int, list[Layer]] = {}

    def prepare(
        self, programs: Sequence[Program], *, batch_rows: int = 0, cuts: Sequence[int] = ()
    ) -> list[Any]:
        prepared = super().prepare(programs, batch_rows=batch_rows)
        for program, made in zip(programs, prepared, strict=True):
            self._layers[id(made)] = list(layers_of(program))
        return prepared

    def _execute(self, program: Drawing, rows: int, first: int, last: int | None) -> None:
        super()._execute(program, rows, first, last)
        for number, layer in enumerate(self._layers[id(program)]):
            self._count_missed(number, layer, rows)
            self._fill(layer, rows)

    def _count_missed(self, number: int, layer: Layer, rows: int) -> None:
        words, _ = layer
        addresses, homes = (
            memory_view(words[name], 8 * words["experts"]).view(np.int64)
            for name in ("addresses", "homes")
        )
        chosen = memory_view(words["chosen"], 8 * rows * words["top_k"]).view(np.int64)
        self.missed[number] += int(np.count_nonzero(addresses[chosen] == homes[chosen]))

    def _fill(self, layer: Layer, rows: int) -> None:
        words_of, parts = layer
        experts, choices = words_of["experts"], rows * words_of["top_k"]

        def words(name: str, count: int) -> NDArray[np.int64]:
            return memory_view(words_of[name], 8 * count).view(np.int64)

        addresses, homes, seen = (words(name, experts) for name in ("addresses", "homes", "seen"))
        kind = plan_type(experts)
        plan = memory_view(words_of["plan"], kind.itemsize).view(kind)[0]
        came = fill_layer(plan, words("chosen", choices).tolist(), addresses, homes, seen)
        for expert in came:
            source, target = int(homes[expert]), int(addresses[expert])
            for offset, size in parts:
                memory_view(target + offset, size)[:] = memory_view(source + offset, size)
        self.came += len(came)
        memory_view(words_of["tier"], experts)[:] = addresses == homes


def layers_of(program: Program) -> Iterator[Layer]:
    """Yield the arguments of each layer's routing, and where matrices are in its blobs."""
    words: dict[str, int] = {}
    parts: list[tuple[int, int]] = []
    for one in program:
        given = arguments_of(one)
        if one.kernel == "expert_group":
            words, parts = given, []
        elif one.kernel in ("expert_gate_up", "expert_down"):
            kinds: Any = one.variant if isinstance(one.variant, tuple) else (one.variant,)
            offsets = [given[name] for name in given if name.endswith("_offset")]
            shape = given["outputs"], given["values"]
            each = zip(offsets, kinds, strict=True)
            parts += [(offset, tensor_bytes(kind, shape)) for offset, kind in each]
        if one.kernel == "expert_down":
            yield {**words, "addresses": given["addresses"]}, parts
