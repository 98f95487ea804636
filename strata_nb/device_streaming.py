"""Bring the experts that have no slot to a device while it computes the layers before theirs.

A prompt batch of many rows needs nearly every expert. Read in place, a blob crosses the link once
for each tile of its rows and matrix, and the card waits for it. So a batch borrows memory, a *ring*
of places for one blob each, and a stream of its own copies to it who is missing, layer by layer:

    copies     layer 0 | layer 1 | layer 2 | ...   each blob behind the layer that had its place
    runs                 layer 0 | layer 1 | ...   each layer behind its copies

Nothing comes to a slot or leaves one meanwhile, so the host knows before the batch who is missing,
and queues all of it at once. The batch reads addresses from a table of its own, in which who comes
has a place of the ring; who finds none is read in place. With places for the missing of two layers
the link and the products never wait for each other; with fewer they do at times.

The ring is a loan of the ledger: memory that nobody uses, or slots at the arena's end. It stays for
the next batch of the prompt, and goes back before the first window, or when something else needs
memory. Where nothing is to be borrowed it is a buffer that the plan has counted.

A batch of few rows is read in place: it does not use all experts, and those that it uses have one
tile each.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.backend import Backend
from strata_nb.cache.capacity import Ledger
from strata_nb.cache.experts import ExpertArena, Tier
from strata_nb.cache.slots import SlotLayout
from strata_nb.errors import DeviceLost, DriverError
from strata_nb.progress import Say
from strata_nb.shared_tables import SharedTable

# Choices for each expert of a layer, from which on copying all who are missing is quicker than
# reading in place who is chosen. On an H200, with 128 experts of which a row chooses 8, both take
# the same time at 16 choices with half of the experts in slots, and at 8 with 3% of them.
LEAST_CHOICES = 12
LAYERS_AT_ONCE = 2  # whose missing experts have places: one is computed, one comes


class BatchTables(NamedTuple):
    """Hold what batches read of experts, int64 (layers, experts), and where programs find it.

    reads    where each blob is
    missed   the same of those that have no slot, and 0 of all others
    """

    reads: SharedTable
    missed: SharedTable
    reads_address: int
    missed_address: int


class Coming(NamedTuple):
    """Say whose blob is copied where, and behind which layer of the batch (-1: at once)."""

    expert: int
    source: int
    target: int
    size_bytes: int
    behind: int


def ring_bytes(layout: SlotLayout) -> int:
    """Return how many bytes are of use to any batch."""
    return LAYERS_AT_ONCE * layout.experts * max(layout.classes, default=0)


class ExpertStreaming:
    """Copy missed experts for the batches of one device; call under the model's lock.

    streamed, streamed_bytes   experts that were copied for batches so far, and their bytes
    """

    def __init__(
        self,
        backend: Backend[Any],
        ledger: Ledger,
        arena: ExpertArena,
        tables: BatchTables,
        own: tuple[int, int] | None,
        *,
        top_k: int,
        say: Say,
    ) -> None:
        """`own`: address and size of a ring that is there for good; None: one is borrowed."""
        self.streamed = self.streamed_bytes = 0
        self._backend, self._driver = backend, backend.driver
        self._ledger, self._arena, self._tables = ledger, arena, tables
        self._own, self._top_k, self._say = own, top_k, say
        self._failing = False  # to borrow, since it last went well; then it was said
        # Who comes of each layer of the batch, behind what it was found by: together, so that an
        # interrupt leaves both as they were.
        self._found: tuple[tuple[Any, ...], list[list[Coming]]] = (), []
        self._awaited = -1  # the last layer of the batch that copies wait for
        with ExitStack() as undo:
            driver, device = self._driver, backend.device
            self._stream = driver.stream_create(device)
            undo.callback(driver.stream_destroy, self._stream)
            events = []
            for _ in range(2 * arena.layout.layers):
                events.append(driver.event_create(device))
                undo.callback(driver.event_destroy, events[-1])
            self._copied, self._computed = events[::2], events[1::2]  # of each layer
            self._resources = undo.pop_all()

    def close(self) -> None:
        """Wait for the copies and end their stream; may be called twice."""
        self._resources.close()

    @property
    def has_loan(self) -> bool:
        return self._ledger.holdings().loan > 0

    def begin(self, rows: int) -> bool:
        """Decide for a batch who comes, and return whether anybody does: else `bring` does nothing.

        Nothing is in flight, and the tables of experts are true. Where nothing can be borrowed, a
        line says so and nobody comes. Raises DeviceLost.
        """
        arena, experts = self._arena, self._arena.layout.experts
        is_worth_it = rows * self._top_k >= LEAST_CHOICES * experts and not arena.is_complete
        ring = self._ring() if is_worth_it else (0, 0)  # it may be slots, whose experts leave
        missing = np.count_nonzero(arena.expert_tier == Tier.IN_PLACE, axis=1)
        are_few = 0 < ring[1] < self._place_bytes * missing.max(initial=0)  # the most used come
        found_by = ring, arena.expert_tier.tobytes(), arena.use.tobytes() if are_few else b""
        if self._found[0] != found_by:
            self._found = found_by, self._assign(*ring)
        self._awaited = -1
        reads, of_layers = arena.expert_address.copy(), self._found[1]
        for layer, coming in enumerate(of_layers):
            reads[layer, [one.expert for one in coming]] = [one.target for one in coming]
        _write(self._tables.reads, reads)
        _write(self._tables.missed, np.where(arena.expert_tier == Tier.IN_PLACE, reads, 0))
        return any(of_layers)

    @property
    def coming(self) -> npt.NDArray[np.bool_]:
        """Who comes, or came, for the batch that was begun last: (layers, experts)."""
        found = np.zeros(self._arena.expert_tier.shape, bool)
        for layer, coming in enumerate(self._found[1]):
            found[layer, [one.expert for one in coming]] = True
        return found

    def bring(self, layer: int) -> None:
        """Begin to copy who comes of a layer, and let it wait for them."""
        coming, driver = self._found[1][layer], self._driver
        if not coming:
            return
        for one in coming:
            if one.behind > self._awaited:
                driver.event_wait(self._stream, self._computed[one.behind])
                self._awaited = one.behind
            self._arena.copy_from_host(one.target, one.source, one.size_bytes, self._stream)
        driver.event_record(self._copied[layer], self._stream)
        self._backend.await_event(self._copied[layer])
        self.streamed += len(coming)
        self.streamed_bytes += sum(one.size_bytes for one in coming)

    def leave(self, layer: int) -> None:
        """Let copies know when a layer, which was begun, is done with its places."""
        self._backend.record_event(self._computed[layer])

    def end(self) -> None:
        """Return what was borrowed; the hottest experts come to the slots that are there again.

        Waits for the device. Raises DriverError.
        """
        if self.has_loan:
            self._ledger.end_loan()

    def _ring(self) -> tuple[int, int]:
        """Return address and size of the ring; what is borrowed is as much as is of use and there
        is."""
        if self._own is not None:
            return self._own
        ledger, chunk_bytes = self._ledger, self._ledger.plan.chunk_bytes
        if self.has_loan:
            return ledger.loan()
        missing = np.count_nonzero(self._arena.expert_tier == Tier.IN_PLACE, axis=1)
        places = min(int(missing.sum()), LAYERS_AT_ONCE * int(missing.max()))
        wanted = -(-places * self._place_bytes // chunk_bytes)
        try:
            chunks = min(wanted, ledger.lendable())
            loan = ledger.lend(chunks) if chunks else (0, 0)
        except DeviceLost:
            raise
        except DriverError as error:
            if not self._failing:
                self._say(f"experts of prompts are read in place: {error.message}")
            self._failing = True
            return 0, 0
        self._failing = False
        return loan

    @property
    def _place_bytes(self) -> int:
        """How long a place is: any blob fits."""
        return max(self._arena.layout.classes)

    def _assign(self, base: int, size: int) -> list[list[Coming]]:
        """Return who comes of each layer: the missing, or the most used for whom there is room."""
        arena, place_bytes = self._arena, self._place_bytes
        places = size // place_bytes
        holders = [-1] * places  # the layer that had each place last
        turn, found = 0, []
        for layer, tiers in enumerate(arena.expert_tier):
            blob_bytes = arena.layout.blob_bytes[layer]
            experts = np.flatnonzero(tiers == Tier.IN_PLACE)
            if len(experts) > places:
                order = np.argsort(-arena.use[layer, experts], kind="stable")
                experts = experts[order[:places]]
            sources, coming = arena.homes[layer, experts], []
            for expert, source in zip(experts.tolist(), sources.tolist(), strict=True):
                place = turn % places
                target = base + place * place_bytes
                coming.append(Coming(expert, source, target, blob_bytes, holders[place]))
                holders[place] = layer
                turn += 1
            found.append(coming)
        return found


def _write(table: SharedTable, values: npt.NDArray[np.int64]) -> None:
    """Change a table where it is not so yet: the device gets what has changed."""
    if not np.array_equal(table.array, values):
        table[:] = values
