"""Read the rows of a step on a device: its record, the body of a program, and what comes of it.

A device may have other programs for the rows of a prompt batch than for a window's, each with
buffers of its own, so that what a window sends and fetches stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from strata_nb.backend import Backend
from strata_nb.device_heads import Heads, Record
from strata_nb.device_streaming import ExpertStreaming
from strata_nb.models.places import Programs
from strata_nb.steps import Row


class Reader:
    """Run the body of programs for steps of up to `most_rows` rows; `heads` runs what follows.

    body, head, choice   as the backend prepared them
    """

    def __init__(
        self,
        backend: Backend[Any],
        programs: Programs,
        prepared: Sequence[Any],
        vocabulary: int,
        top_k: int,
    ) -> None:
        self._backend, self._programs, self._top_k = backend, programs, top_k
        self._body, head, choice = prepared
        self.record = Record(programs)
        self.heads = Heads(backend, programs, self.record, head, choice, vocabulary)

    @property
    def most_rows(self) -> int:
        return self._programs.max_rows

    def read(
        self,
        rows: Sequence[Row],
        lengths: dict[int, int],
        *,
        by_layer: bool,
        streaming: ExpertStreaming | None = None,
    ) -> None:
        """Begin to read rows, each at the next position of its sequence; `lengths` is used up.

        by_layer    stop between layers, where an interrupt is seen
        streaming   what brings the experts of each layer before it
        """
        self.record.write(rows, lengths)
        self._backend.send(self.record.address, self.record.words)
        if not by_layer and streaming is None:
            self._backend.run(self._body, len(rows))
            return
        first = 0
        for layer, end in enumerate(self._programs.layer_ends):
            if streaming is not None:
                streaming.bring(layer)
            self._backend.run(self._body, len(rows), first, end)
            if streaming is not None:
                streaming.leave(layer)
            first = end

    def chosen(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the experts that the rows of the last step used: (rows, layers, top_k)."""
        words = np.empty(self.route_words, np.int64)
        if len(words):
            self._backend.fetch(self._programs.chosen[0], words)
        return self.routes(words, rows)

    def latest(self, rows: int, most: int) -> npt.NDArray[np.int64]:
        """Return the experts that the last of `rows` rows used, `most` of them or fewer.

        int64 (rows, layers, top_k), as `chosen`, without fetching what the others used.
        """
        chosen, count = self._programs.chosen, min(rows, most)
        routes = np.empty((len(chosen), count, self._top_k), np.int64)
        for layer, address in enumerate(chosen):
            self._backend.fetch(address + 8 * self._top_k * (rows - count), routes[layer])
        return routes.swapaxes(0, 1)

    @property
    def route_words(self) -> int:
        """How many words there are from the first layer's routes to the end of the last one's."""
        chosen = self._programs.chosen
        if not chosen:
            return 0
        return (chosen[-1] - chosen[0]) // 8 + self._top_k * self._programs.max_rows

    def routes(self, words: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
        """Return the routes (rows, layers, top_k) that lie in words as in the device's memory."""
        chosen, size = self._programs.chosen, rows * self._top_k
        places = [(address - chosen[0]) // 8 for address in chosen]
        routes = np.empty((rows, len(chosen), self._top_k), np.int64)
        for layer, place in enumerate(places):
            routes[:, layer] = words[place : place + size].reshape(rows, self._top_k)
        return routes
