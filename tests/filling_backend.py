"""A device that draws tokens and gives missed experts slots within the window, as a card does.

Behind each run it does what `cache.filling.fill_layer` says to its own tables, and copies blobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from drawing_backend import Drawing, DrawingBackend
from numpy.typing import NDArray

from strata_nb.addresses import memory_view
from strata_nb.cache.filling import fill_layer
from strata_nb.fill_plans import plan_type
from strata_nb.kernels.program import Program
from strata_nb.kernels.table import KERNELS


class FillingBackend(DrawingBackend):
    """Give experts slots.

    blob_bytes   of each layer's experts, which the test says
    came         how many came to slots
    """

    fills, most_rows = True, 8

    def __init__(self, text: str, threads: int = 1, *given: Any) -> None:
        super().__init__(text, threads, *given)
        self.blob_bytes: Sequence[int] = ()
        self.came = 0
        self._layers: dict[int, list[dict[str, int]]] = {}

    def prepare(self, programs: Sequence[Program]) -> list[Any]:
        prepared = super().prepare(programs)
        for program, made in zip(programs, prepared, strict=True):
            self._layers[id(made)] = list(_layers(program))
        return prepared

    def _execute(self, program: Drawing, rows: int, first: int, last: int | None) -> None:
        super()._execute(program, rows, first, last)
        for number, layer in enumerate(self._layers[id(program)]):
            self._fill(number, layer, rows)

    def _fill(self, number: int, layer: dict[str, int], rows: int) -> None:
        experts, choices = layer["experts"], rows * layer["top_k"]

        def words(name: str, count: int) -> NDArray[np.int64]:
            return memory_view(layer[name], 8 * count).view(np.int64)

        addresses, homes, seen = (words(name, experts) for name in ("addresses", "homes", "seen"))
        plan = memory_view(layer["plan"], plan_type(experts).itemsize).view(plan_type(experts))[0]
        came = fill_layer(plan, words("chosen", choices).tolist(), addresses, homes, seen)
        size = self.blob_bytes[number] if came else 0
        for expert in came:
            source = memory_view(int(homes[expert]), size)
            memory_view(int(addresses[expert]), size)[:] = source
        self.came += len(came)
        memory_view(layer["tier"], experts)[:] = addresses == homes


def _layers(program: Program) -> Any:
    """Yield the arguments of each layer's routing, with the addresses of its experts."""
    layer: dict[str, int] = {}
    for one in program:
        names = [argument.name for argument in KERNELS[one.kernel].arguments]
        arguments = dict(zip(names, one.arguments, strict=True))
        if one.kernel == "expert_group":
            layer = arguments
        elif one.kernel == "expert_gate_up":
            yield {**layer, "addresses": arguments["addresses"]}
