"""Let the K/V have the memory that text needs, and experts the rest: when it grows, how much.

    cells    0 .......... written | ahead | ........ room ........ | step | step | .... context
                                           ^ grows when the room behind `ahead` ends
                                   ^ and before, beside windows, where nobody has to give for it

A K/V for the whole context would starve the experts from the start, for cells that most texts never
reach. So it begins small and grows before a prompt is read, for the whole prompt, and ahead of each
window while an answer is written; it is cut again before a prompt, and only when two steps or more
are idle, because what was needed once is likely to be needed again. Cells of every open sequence
count as needed.

The ledger says what can be had; here is nothing but the occasion and the size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strata_nb.cache.accounts import Change
from strata_nb.cache.capacity import Ledger
from strata_nb.cache.kv_layout import BLOCK_CELLS, blocks_for
from strata_nb.cache.plan import Plan
from strata_nb.cache.policy import Heat
from strata_nb.errors import DeviceLost, DriverError, OutOfDeviceMemory
from strata_nb.interrupts import interrupts_later

MOST_INIT_CELLS = 16_384
MOST_STEP_CELLS = 8_192
LEAST_INIT_CELLS = 512  # a short prompt and what is ahead of it
AHEAD_CELLS = 64  # of a window, so that growth comes before it is needed
PROMPT_AHEAD_CELLS = 256  # of a prompt, for the answer's beginning
SAID_CELLS = 1_024  # smaller growths are said together
LEFT_BLOCKS = 1  # free; then the K/V grows beside windows
MOST_GIVEN_BYTES = 64 << 20  # by experts at a time, for growth that a window waits for
IDLE_STEPS = 2  # that are left before the K/V is cut
_GROWING = "the K/V could not grow ahead"
_PREPARING = "chunks for the K/V could not be prepared"


@dataclass(frozen=True, slots=True)
class GrowthRules:
    """Say how a K/V grows, in cells: what it begins with, and the step that it grows by."""

    init_cells: int
    step_cells: int

    @classmethod
    def of(cls, context: int, init: int | None, step: int | None) -> GrowthRules:
        """Return the rules for a context; None: a quarter of it, and an eighth, within limits."""
        if init is None:
            init = min(MOST_INIT_CELLS, max(LEAST_INIT_CELLS, context // 4))
        if step is None:
            step = min(MOST_STEP_CELLS, max(BLOCK_CELLS, context // 8))
        return cls(min(init, context), step)


class ElasticKV:
    """Grow and cut the K/V of one ledger; call between steps."""

    def __init__(self, ledger: Ledger, rules: GrowthRules, *, say: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._say = say
        plan = ledger.plan
        self._most_blocks = blocks_for(plan.needs.kv_most_cells)
        self._init_blocks = blocks_for(rules.init_cells)
        self._step_blocks = max(1, blocks_for(rules.step_cells))
        self._stopped_at: int | None = None  # blocks behind which a growth found nothing
        self._stopped_beside: int | None = None  # the same, of what nobody has to give
        self._steps = 0  # that have ended
        self._foreseen: tuple[int, Heat] | None = None  # in the step behind so many
        self._idle_chunks_wanted = False
        self._unsaid: list[Change] = []
        self._failing: set[str] = set()  # what failed, and was said, since it last went well

    def before_prompt(self, cells: Mapping[int, int]) -> None:
        """Make room for cells that sequences are about to read, and some of the answer.

        Cuts the K/V where much of it is idle. Raises DriverError, OutOfDeviceMemory where there is
        no memory for these cells; then nothing changed.
        """
        self.flush()
        kv = self._ledger.kv
        needed = kv.blocks_wanted(cells)
        ample = self._rounded(needed + blocks_for(PROMPT_AHEAD_CELLS))
        idle = IDLE_STEPS * self._step_blocks
        if kv.usable_blocks > self._init_blocks and kv.usable_blocks >= ample + idle:
            with interrupts_later():
                self._trim(max(ample, self._init_blocks))
        self._make_room(needed, needed + blocks_for(PROMPT_AHEAD_CELLS), a_prompt=True)

    def before_step(self, cells: Mapping[int, int]) -> None:
        """Make room for the cells of a step and of the next one; raises as `before_prompt` does.

        Experts give little at a time, because somebody waits for the step.
        """
        needed = self._ledger.kv.blocks_wanted(cells)
        self._make_room(needed, needed + blocks_for(AHEAD_CELLS), a_prompt=False)

    def is_ample(self, cells: Mapping[int, int]) -> bool:
        """Return whether `before_step` would change nothing."""
        needed = self._ledger.kv.blocks_wanted(cells)
        return self._is_ample(needed, needed + blocks_for(AHEAD_CELLS))

    def foresee(self, heat: Heat) -> None:
        """Take what experts are worth, for a growth before the next step and for no other.

        Whoever asks while a step runs spares the next one to wait for the answer.
        """
        self._foreseen = self._steps, heat

    def when_idle(self) -> None:
        """Do one thing ahead of need: grow by what nobody gives, or get ready what that will map.

        Call behind each step. Windows may be in flight: what they use stays as it is, and nothing
        waits for them.
        """
        self._steps += 1
        kv = self._ledger.kv
        usable = kv.usable_blocks
        if usable >= self._most_blocks:
            return
        if self._idle_chunks_wanted:
            self._idle_chunks_wanted = False
            self._prepare()
        elif usable - kv.live_blocks <= LEFT_BLOCKS and usable != self._stopped_beside:
            with interrupts_later():  # what was done shall be said
                self._grow_beside(usable)

    def _prepare(self) -> None:
        """Have ready what the next growth will map, if the system has it."""
        ledger = self._ledger
        next_chunks = ledger.plan.chunks_for_blocks(self._rounded(ledger.kv.usable_blocks + 1))
        try:
            ledger.prepare(next_chunks - ledger.holdings().kv)
        except DeviceLost:
            raise
        except DriverError as error:  # nothing changed, and the growth will ask for itself
            self._say_once(_PREPARING, error)
            return
        self._failing.discard(_PREPARING)

    def _grow_beside(self, usable: int) -> None:
        """Grow by a step that nobody gives anything for, or as much of it as there is."""
        self._stopped_beside = usable  # also where it fails: `before_step` asks again
        try:
            change = self._ledger.grow_kv_beside(self._rounded(usable + 1))
        except DeviceLost:
            raise
        except DriverError as error:
            self._say_once(_GROWING, error)
            return
        self._failing.discard(_GROWING)
        self._note(change, usable)

    def reconsider(self) -> None:
        """Try again where a growth found nothing: memory was given or taken otherwise."""
        self._stopped_at = self._stopped_beside = None
        self._idle_chunks_wanted = True

    def flush(self) -> None:
        """Say what was not worth a line of its own."""
        if self._unsaid:
            self._say(growth_line(self._unsaid, self._ledger.plan))
            self._unsaid = []

    def _rounded(self, blocks: int) -> int:
        """Return whole steps that hold `blocks`, at most the context."""
        steps = -(-blocks // self._step_blocks)
        return min(self._most_blocks, steps * self._step_blocks)

    def _make_room(self, needed: int, ample: int, *, a_prompt: bool) -> None:
        """Grow where `ample` blocks are not there; only for `needed` ones is that an error."""
        if not self._is_ample(needed, ample):
            with interrupts_later():  # what was done shall be said
                self._grow(needed, ample, a_prompt)

    def _is_ample(self, needed: int, ample: int) -> bool:
        usable = self._ledger.kv.usable_blocks
        if min(ample, self._most_blocks) <= usable:
            return True
        return needed <= usable and self._stopped_at == usable

    def _grow(self, needed: int, ample: int, a_prompt: bool) -> None:
        usable = self._ledger.kv.usable_blocks
        least = min(needed, self._most_blocks)  # beyond the context, `extend` refuses
        few = usable + MOST_GIVEN_BYTES // self._ledger.kv.layout.block_bytes
        enough = None if a_prompt else max(ample, few)
        heat = None
        if self._foreseen is not None:
            (steps, foreseen), self._foreseen = self._foreseen, None
            heat = foreseen if steps + 1 == self._steps else None
        try:
            change = self._ledger.grow_kv(max(least, usable), self._rounded(ample), enough, heat)
        except DeviceLost:
            raise
        except DriverError as error:
            if least <= usable:
                self._stopped_at = usable
                self._say_once(_GROWING, error)
                return
            if isinstance(error, OutOfDeviceMemory):
                raise self._refusal(least, error) from error
            raise
        self._failing.discard(_GROWING)
        if self._note(change, usable) < min(ample, self._most_blocks):
            self._stopped_at = self._ledger.kv.usable_blocks

    def _note(self, change: Change, usable: int) -> int:
        """Note a growth, where there were `usable` blocks, and say it; returns how many are."""
        grown = self._ledger.kv.usable_blocks
        if grown > usable:
            self._unsaid.append(change)
            self._idle_chunks_wanted = True
        told = sum(change.after.kv - change.before.kv for change in self._unsaid)
        if told >= self._ledger.plan.chunks_for_blocks(blocks_for(SAID_CELLS)):
            self.flush()
        return grown

    def _trim(self, blocks: int) -> None:
        """Cut the K/V; where that fails it stays as it is, and is said."""
        kv = self._ledger.kv
        before = kv.usable_blocks
        try:
            change = self._ledger.trim_kv(blocks)
        except DeviceLost:
            raise
        except DriverError as error:
            self._say(f"the K/V stays at {before * BLOCK_CELLS:,} cells: {error.message}")
            return
        self.reconsider()
        if kv.usable_blocks < before:
            self._say(
                f"K/V cut to {kv.usable_blocks * BLOCK_CELLS:,} cells: experts got "
                f"{_count(change.slots - change.slots_before, 'slot')}{_resident_text(change)}"
            )

    def _say_once(self, what: str, error: DriverError) -> None:
        """Say what failed, once until it goes well; that there is no memory is no failure."""
        if what not in self._failing and not isinstance(error, OutOfDeviceMemory):
            self._failing.add(what)
            self._say(f"{what}: {error.message}")

    def _refusal(self, blocks: int, error: OutOfDeviceMemory) -> OutOfDeviceMemory:
        ledger = self._ledger
        numbers = {
            "cells": blocks * BLOCK_CELLS,
            "there are": ledger.kv.usable_blocks * BLOCK_CELLS,
            **error.numbers,
            "reserve": ledger.reserve_bytes,
        }
        return OutOfDeviceMemory(
            "K/V",
            0,
            "no memory to grow",
            device=ledger.device,
            numbers=numbers,
            hint="a shorter text, --ctk int8 --ctv int8, a smaller --vram-reserve-mib, or the end "
            "of another conversation",
        )


def growth_line(changes: list[Change], plan: Plan) -> str:
    """Return in words what growths came to, and what was given for all of them."""
    first, last = changes[0], changes[-1]
    size_bytes = last.after.kv * plan.chunk_bytes
    unit, of = ("GiB", 30) if size_bytes >= 1 << 30 else ("MiB", 20)
    blocks = size_bytes // plan.needs.kv.block_bytes
    cells = min(blocks * BLOCK_CELLS, plan.needs.kv_most_cells)  # the last chunk may hold more
    text = f"K/V grown to {cells:,} cells ({size_bytes / (1 << of):.2f} {unit})"
    if len(changes) > 1:
        text += f" in {len(changes)} steps"
    given = first.slots_before - last.slots
    if given > 0:
        moved = sum(change.moved for change in changes)
        text += f": experts gave {_count(given, 'slot')}, {_count(moved, 'hot expert')} moved"
    return text + _resident_text(last)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _resident_text(change: Change) -> str:
    if not change.slots:
        return ""
    return f", {change.resident:,} of {change.slots:,} slots hold experts"
