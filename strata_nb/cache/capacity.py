"""Keep the account of one device's memory, and answer what is asked of it.

What is asked for (`grow_kv`, `set_reserve`, `lend`, ...) becomes `Holdings` by a pure function of
requests.py, and `chunks.py` moves chunks until they are. Opening is the first of many changes, all
of one kind, so the pairs of requests need no code of their own, and nothing else moves memory.
Rejected: an operation for each kind of request, whose pairs would all have to be proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from strata_nb.cache import requests
from strata_nb.cache.accounts import Account, Change, LedgerReport, in_all
from strata_nb.cache.chunks import Chunks
from strata_nb.cache.experts import ExpertArena, Tier
from strata_nb.cache.kv import KVCache
from strata_nb.cache.kv_layout import BLOCK_CELLS
from strata_nb.cache.look import Look
from strata_nb.cache.plan import Holdings, Memory, Plan, memory_within
from strata_nb.cache.policy import Heat
from strata_nb.cache.requests import Situation
from strata_nb.errors import DeviceLost, DriverError, OutOfDeviceMemory
from strata_nb.interrupts import interrupts_later
from strata_nb.tracing import Announce
from strata_nb.vmm import MemoryDriver

RESERVE_ROUNDS = 4  # of giving and looking again, where others take memory at the same time


class Ledger:
    """Own the chunks of one device and move them between experts, K/V and the system.

    Making one takes no memory; `open` does. `close` may be called at any time, also after an `open`
    that failed, and again: what it could not free it still owns. Every failure of a change leaves
    valid tables and a balanced account.

    reserve_bytes   that requests leave free on the device; `set_reserve` changes it
    announce        called with every `Change` that was asked for, also those that failed; it must
                    not call the ledger
    record          the same for every event of docs/trace.md
    heat            says what each expert (layers, experts) is worth: of each size the coldest leave
                    and the hottest come back. A policy's, once one is in force
    growths         of the K/V so far, as announced
    """

    def __init__(
        self,
        driver: MemoryDriver,
        device: int,
        plan: Plan,
        kv: KVCache,
        experts: ExpertArena,
        *,
        say: Callable[[str], None],
        announce: Callable[[Change], None] = lambda change: None,
        record: Announce | None = None,
    ) -> None:
        self.reserve_bytes = plan.needs.reserve_bytes
        self.announce = announce
        self.device = device
        self.plan = plan
        self.kv = kv
        self.experts = experts
        self.heat: Callable[[], Heat] = experts.heat
        self.growths = 0
        self._driver = driver
        self._say = say
        self._chunks = Chunks(driver, device, plan, kv, experts, say=say, record=record)

    def open(self) -> None:
        """Reserve addresses and map what the plan starts with, or leave nothing behind.

        Raises DriverError. Where even undoing fails, `close` tries again.
        """
        try:
            self._chunks.reserve()
            self._ask("open", lambda: self.plan.start)
        except DriverError as error:
            try:
                self.close()
            except DriverError as another:
                error.add_note(f"undoing failed as well: {another.message}")
            raise

    def close(self) -> None:
        """Let the tables name nothing here, drain, unmap and release; again, to retry.

        Sequences end. Raises DriverError after everything that could be done.
        """
        self.kv.clear()
        self._chunks.close()

    def carry_out(self, wanted: Holdings, heat: Heat | None = None) -> None:
        """Move chunks as `Chunks.carry_out` does.

        heat   of the experts; None: as `self.heat` says, which takes a millisecond
        """
        self._chunks.carry_out(wanted, self.heat if heat is None else lambda: heat)

    # Requests. Each raises DriverError, then all is as it was but for residency; where a device has
    # not what is asked for, OutOfDeviceMemory.

    def grow_kv(
        self,
        least_blocks: int,
        wanted_blocks: int,
        enough_blocks: int | None = None,
        heat: Heat | None = None,
    ) -> Change:
        """Make room for `wanted_blocks` K/V blocks or for as many as can be, at least the least.

        Where the system has less than it said, experts give what is missing.

        enough_blocks   for more than these experts give nothing; None: for all that are wanted
        heat            as `carry_out` has it
        """
        asked = least_blocks, wanted_blocks, enough_blocks
        try:
            return self._ask("grow_kv", lambda: requests.grow_kv(self._now(), *asked), heat=heat)
        except OutOfDeviceMemory as error:
            if not error.code:  # nobody but the plan refused
                raise
        return self._ask(
            "grow_kv",
            lambda: requests.grow_kv(replace(self._now(), obtainable=0), *asked),
            heat=heat,
        )

    def grow_kv_beside(self, wanted_blocks: int) -> Change:
        """Make as much of the room for `wanted_blocks` K/V blocks as nobody has to give.

        Work of the device may be running: no table names the new memory yet, and nothing is
        unmapped, so nothing is waited for [7].
        """
        return self._ask("grow_kv", lambda: requests.grow_kv_beside(self._now(), wanted_blocks))

    def trim_kv(self, blocks: int) -> Change:
        """Keep room for `blocks` K/V blocks, and for all that are held; experts get the rest."""
        return self._ask("trim_kv", lambda: requests.trim_kv(self._now(), blocks), refill=True)

    def set_reserve(self, reserve_bytes: int) -> Change:
        """Leave so much of the device free for others, or what can be; experts get what is more.

        The arena keeps a slot a layer, and the K/V what it began with and what is held. What is
        really free is read again after giving, because others take memory too [13].
        """
        earlier, self.reserve_bytes = self.reserve_bytes, reserve_bytes
        try:
            taken = self._ask("set_reserve", lambda: requests.take_back(self._now()), refill=True)
            return in_all([taken, *self._give_what_is_short("set_reserve")])
        except BaseException:  # also Ctrl-C between two changes
            self.reserve_bytes = earlier
            raise

    def keep_reserve(self) -> Change:
        """Give the system what is missing from the reserve, or what can be; no expert comes.

        Others may have taken it, or the driver more than was planned for it [13].
        """
        return in_all(self._give_what_is_short("keep_reserve"))

    def prepare(self, chunks: int) -> Change:
        """Have up to `chunks` spare chunks, so that the next growth of the K/V only maps."""
        return self._ask("prepare", lambda: requests.prepare(self._now(), chunks))

    def lendable(self) -> int:
        """Return how many chunks `lend` would lend at most."""
        return self._now().lendable

    def lend(self, chunks: int) -> tuple[int, int]:
        """Lend chunks behind the slots until `end_loan`; returns their address and size.

        The system gives them as far as it has some that need not stay free; then the arena does.
        """
        self._ask("lend", lambda: requests.lend(self._now(), chunks))
        return self.loan()

    def end_loan(self) -> Change:
        """Give back what was lent; experts come to the slots that are there again."""
        return self._ask("end_loan", lambda: requests.end_loan(self._now()), refill=True)

    def attach(self, chunks: int) -> Change:
        """Give a device that helps another one an arena of up to `chunks` chunks."""
        return self._ask("attach", lambda: requests.attach(self._now(), chunks), refill=True)

    def detach(self) -> Change:
        """Take the arena from a device: no expert has a slot there any more."""
        return self._ask("detach", lambda: requests.detach(self._now()))

    def _give_what_is_short(self, request: str) -> list[Change]:
        """Give the system what is missing from the reserve, and look again, until nothing goes."""
        changes: list[Change] = []
        for _ in range(RESERVE_ROUNDS):
            held = self.holdings()
            changes.append(self._ask(request, self._what_is_short))
            if changes[-1].after == held:
                break
        return changes

    def _what_is_short(self) -> Holdings:
        """Plan to give the system what is missing from the reserve."""
        now = self._now()
        return requests.give_back(now, now.owed)

    def _ask(
        self,
        request: str,
        plan: Callable[[], Holdings],
        *,
        refill: bool = False,
        heat: Heat | None = None,
    ) -> Change:
        """Carry out what a request comes to, and announce it; then Ctrl-C may come."""
        before, slots = self.holdings(), self.experts.usable_slots
        moved, filled = self._chunks.moved, 0
        with interrupts_later():
            error = ""
            try:
                self.carry_out(plan(), heat)
                if refill and self.experts.usable_slots > slots:
                    filled = self._refill()
            except BaseException as failure:
                error = str(failure) or type(failure).__name__
                raise
            finally:
                change = Change(
                    self.device,
                    request,
                    before,
                    self.holdings(),
                    slots,
                    self.experts.usable_slots,
                    self.experts.resident,
                    self._chunks.moved - moved,
                    filled,
                    error,
                )
                self.growths += request == "grow_kv" and change.after.kv > before.kv
                self.announce(change)
        return change

    def _refill(self) -> int:
        """Bring the hottest experts into free slots; where that fails they are read in place."""
        try:
            return self.experts.fill(self.experts.hottest(self.heat()))
        except DeviceLost as error:
            self._chunks.lost = error
            raise
        except DriverError as error:
            self._say(f"device {self.device}: experts are read in place: {error.message}")
            return 0

    def _now(self) -> Situation:
        """Describe the ledger for a plan; asks the driver what is free."""
        if self._chunks.lost is not None:
            raise self._chunks.lost
        needs, size = self.plan.needs, self.plan.chunk_bytes
        memory = self.memory()
        left = self.plan.capacity - self._chunks.taken
        beyond_bytes = memory.free_bytes - self.reserve_bytes  # or owed, below 0
        taken_bytes = self.outside_bytes(memory) - self.plan.in_use_bytes
        expected_bytes = min(max(0, needs.outside_bytes - taken_bytes), needs.outside_bytes)
        limits = {owner: range_.limit_chunks for owner, range_ in self._chunks.ranges.items()}
        return Situation(
            device=self.device,
            plan=self.plan,
            held=self.holdings(),
            obtainable=max(0, min(left, (beyond_bytes - expected_bytes) // size)),
            owed=max(0, -(beyond_bytes // size)),
            live_blocks=self.kv.live_blocks,
            kv_limit=limits.get("kv", 0),
            arena_limit=limits.get("experts", 0),
        )

    # What there is.

    def holdings(self) -> Holdings:
        """Return what each owner has now."""
        return self._chunks.holdings()

    def account(self) -> Account:
        """Return every chunk's owner."""
        return self._chunks.account()

    def loan(self) -> tuple[int, int]:
        """Return address and size of what is lent from the end of the arena."""
        return self._chunks.loan()

    def memory(self) -> Memory:
        """Ask the driver for the device's memory, within the limit."""
        return memory_within(self._driver, self.device, self.plan.needs.limit_bytes)

    def outside_bytes(self, memory: Memory) -> int:
        """Return what is in use beside weights, buffers and chunks, once these are all there."""
        in_use_bytes = memory.in_use_bytes - self.plan.needs.dense_bytes
        return max(0, in_use_bytes - self._chunks.taken * self.plan.chunk_bytes)

    def describe(self) -> LedgerReport:
        """Return slots, cells and bytes as they are now."""
        account, size = self.account(), self.plan.chunk_bytes
        owners = ("experts", "kv", "loan", "spare", "given_back", "stuck")
        return LedgerReport(
            device=self.device,
            chunk_bytes=size,
            slots=self.experts.usable_slots,
            resident=self.experts.resident,
            kv_cells=self.kv.usable_blocks * BLOCK_CELLS,
            bytes_by_owner={
                "dense": self.plan.needs.dense_bytes,
                **{owner: getattr(account, owner) * size for owner in owners},
            },
        )

    def look(self) -> Look:
        """Return whose each chunk is, and what is in it, as they are now."""
        account, arena, kv = asdict(self.account()), self.experts, self.kv
        bases = {owner: range_.base for owner, range_ in self._chunks.ranges.items()}
        resident = np.argwhere(arena.expert_tier == Tier.SLOT)
        layers, experts = resident.T
        hits, misses = arena.tally.tolist()
        return Look(
            chunk_bytes=self.plan.chunk_bytes,
            chunks={owner: count for owner, count in account.items() if owner != "capacity"},
            kv_cells=kv.usable_blocks * BLOCK_CELLS,
            free_cells=kv.free_cells,
            growths=self.growths,
            slots=arena.usable_slots,
            hits=hits,
            misses=misses,
            filled=arena.filled,
            use=arena.use.copy(),
            resident=resident,
            offsets=arena.expert_address[layers, experts] - bases.get("experts", 0),
            sizes=np.array(arena.layout.blob_bytes, np.int64)[layers],
            blocks=np.unique(kv.table[kv.table != 0]) - bases.get("kv", 0),
            block_bytes=kv.layout.block_bytes,
        )

    def check_integrity(self) -> None:
        """Raise RuleViolation unless accounts balance and tables name only usable memory [16]."""
        self._chunks.check_account()
        self.kv.check_integrity(self._chunks.covers("kv"))
        self.experts.check_integrity(self._chunks.covers("experts"))
