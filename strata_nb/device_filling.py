"""Let a device give missed experts slots within their window, and know afterwards where they are.

The host plans, the device decides by the plan (`cache/filling.py`), and its table of addresses is
the truth while windows run:

    before a window   `begin`: the plan, made of what is known by then, goes with the window
    behind it         `landed`: the addresses came with its tokens, and the arena takes them over
    settled           `find`: they are fetched, of windows that were dropped or broken off as well
    after a failure   `lose`: nobody knows what the slots hold, so all experts are at home again

A plan for window n + 1 is made while n runs, and knows the windows up to n - 1. Free slots that n
was offered are not offered once more before it has landed. The device has what the host changed in
the table before a window counts as begun: what is fetched after a failure is never older than that.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.backend import Backend
from strata_nb.cache.experts import ExpertArena
from strata_nb.cache.filling import new_plans, write_plans
from strata_nb.cache.residency import Residency
from strata_nb.fill_plans import MOST_OFFERED, plan_type
from strata_nb.interrupts import interrupts_later

Sent = tuple[int, npt.NDArray[np.uint8]]  # address, and what is sent there


class FillingPlaces(NamedTuple):
    """Say where a device has its tables (layers, experts): addresses and homes of experts and the
    windows that used them last, int64; and the plan."""

    addresses: int
    homes: int
    seen: int
    plan: int

    def of_layer(self, layer: int, experts: int) -> tuple[int, int, int]:
        """Return where a layer has its homes, windows and plan."""
        before = 8 * experts * layer
        plan_bytes = plan_type(experts).itemsize
        return self.homes + before, self.seen + before, self.plan + plan_bytes * layer


class DeviceFilling:
    """Plan windows and take over what they decided; call under the model's lock.

    cpu_share   of the missed of a row, in parts of SHARE_UNITS, that plans leave to the CPU
    """

    def __init__(
        self,
        backend: Backend[Any],
        arena: ExpertArena,
        residency: Residency,
        places: FillingPlaces | None,
        *,
        fills: bool = True,
    ) -> None:
        """`places` None: the device decides nothing, and all this does nothing.

        fills   whether missed experts may come to slots; else plans say only who goes to the CPU
        """
        self._backend, self._arena, self._residency = backend, arena, residency
        self._places, self._fills = places, fills
        shape = arena.layout.layers, arena.layout.experts
        self._plans, self._silence = new_plans(*shape), new_plans(*shape)
        self._window = 0
        self.cpu_share = 0
        self._offered: deque[set[int]] = deque()  # of windows in flight, the oldest first
        self._sent_changes = -1  # of the host's to the addresses, which the device has
        # Of the plan by which nobody comes, the share that the device has with it; None: it has
        # another plan.
        self._silent_share: int | None = None
        if places is not None:
            backend.send(places.homes, arena.homes)
            backend.send(places.seen, np.zeros(arena.use.shape, np.int64))
            self.silence()

    @property
    def most_sent(self) -> int:
        """How many bytes a plan has."""
        return self._plans.nbytes if self._places is not None else 0

    @property
    def addresses(self) -> int:
        """Where the device has the addresses of experts that it changes; 0: it changes none."""
        return self._places.addresses if self._places is not None else 0

    @property
    def is_behind(self) -> bool:
        """Whether windows may have decided what the arena does not know of."""
        return bool(self._offered)

    def begin(self) -> Sent | None:
        """Return what is sent before a window that begins now."""
        if self._places is None:
            return None
        arena = self._arena
        self._send_changes(self._places.addresses)
        self._window += 1
        if not self._fills or not arena.usable_slots or arena.is_complete:
            self._offered.append(set())
            return self._silent_plan(self.cpu_share)
        passed = set().union(*self._offered)
        gain, heat = self._residency.worth()
        resident = arena.expert_address != arena.homes
        write_plans(self._plans, self._window, arena.free_slots(passed), resident, gain, heat)
        self._plans["cpu_share"] = self.cpu_share
        is_offered = np.arange(MOST_OFFERED) < self._plans["offered"][:, None]
        self._offered.append(set(self._plans["slots"][is_offered].tolist()))
        self._silent_share = None
        return self._places.plan, self._plans.view(np.uint8)

    def landed(self, addresses: npt.NDArray[np.int64] | None) -> None:
        """Take over what the oldest window in flight left; None: its plan let nobody come."""
        if addresses is not None:
            self._adopt(addresses, is_counted=True)
        # Only now is the window out of flight: where this is broken off before, `find` fetches the
        # addresses.
        if self._offered:
            self._offered.popleft()

    def find(self, *, is_counted: bool = False) -> None:
        """Fetch what all windows left, of which none runs; what fails is to be tried again.

        is_counted   the use of experts by these windows counts
        """
        if not self._offered or self._places is None:
            return
        addresses = np.empty(self._arena.use.shape, np.int64)
        self._backend.fetch(self._places.addresses, addresses)
        self._adopt(addresses, is_counted=is_counted)
        self._offered.clear()

    def lose(self) -> None:
        """Let all experts be at home, because a window failed and nobody knows what it wrote."""
        self._silent_share = None  # a plan that was to be sent may not have been
        if self._offered:
            self._arena.forget()
            self._offered.clear()

    def find_after_failure(self) -> None:
        """Fetch what all windows left, of which none runs, and which may not all have begun."""
        self._silent_share = None
        self.find()

    def silence(self) -> None:
        """Let nobody come, or go to the CPU, in runs that are no windows, such as those that
        measure."""
        if self._places is not None and (plan := self._silent_plan(0)) is not None:
            self._silent_share = None  # until it is sent: what comes between may end this
            self._backend.send(*plan)
            self._silent_share = 0

    def _silent_plan(self, cpu_share: int) -> Sent | None:
        """Return what is sent so that nobody comes; None where the device has that plan."""
        if self._places is None or self._silent_share == cpu_share:
            return None
        self._silent_share = cpu_share
        self._silence["cpu_share"] = cpu_share
        return self._places.plan, self._silence.view(np.uint8)

    def _send_changes(self, addresses: int) -> None:
        """Send the table where the host has changed it since, though a run will do so too."""
        changes = self._arena.addresses.changes
        if self._sent_changes != changes:
            self._backend.send(addresses, self._arena.expert_address)
            self._sent_changes = changes

    def _adopt(self, addresses: npt.NDArray[np.int64], *, is_counted: bool) -> None:
        with interrupts_later():
            came = self._arena.adopt(addresses.reshape(self._arena.use.shape))
            self._residency.note_filled(came, is_counted=is_counted)
