"""Move the chunks of one device between experts, K/V, loan, spare and the system.

    capacity = experts + K/V + loan + spare + given back + stuck          at every step [9]

The capacity is a number of chunks, fixed when the plan is made; *given back* is the part of it that
the system has. `carry_out` takes the `Holdings` that shall be and moves chunks until they are, or
leaves all as it was.

Order of a change [8]: acquire, copy what is worth keeping out of what shrinks, publish, drain,
unmap, map, publish what grew, and release to the system last, for that cannot be undone. One thread
makes changes, between steps [17].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from strata_nb.cache.accounts import Account
from strata_nb.cache.experts import ExpertArena
from strata_nb.cache.kv import KVCache
from strata_nb.cache.plan import Holdings, Plan
from strata_nb.cache.policy import Heat
from strata_nb.errors import DeviceLost, DriverError, OutOfDeviceMemory, RuleViolation
from strata_nb.interrupts import interrupts_later
from strata_nb.tracing import Announce
from strata_nb.vmm import ChunkPool, MemoryDriver, Range


class Tenant(Protocol):
    """Use the memory of a range that a ledger maps."""

    def place(self, base: int) -> None:
        """Take the first address of the range, of which nothing is usable yet."""

    def resize(self, usable_bytes: int) -> None:
        """Use the first `usable_bytes`, and let tables name nothing behind them."""


class Chunks:
    """Own a device's chunks and the ranges that they are mapped in; one `Ledger` uses them.

    ranges   "kv" and "experts", while they are open
    moved    experts, in all changes so far
    lost     the device: nothing is asked of it any more
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
        record: Announce | None,
    ) -> None:
        """Take no memory yet."""
        self.ranges: dict[str, Range] = {}
        self.moved = 0
        self.lost: DeviceLost | None = None
        self._driver, self._device, self._plan = driver, device, plan
        self._kv, self._experts = kv, experts
        self._say, self._record = say, record
        self._pool = ChunkPool(driver, device, plan.chunk_bytes, say=say)
        self._loan = 0

    def reserve(self) -> None:
        """Reserve the addresses of K/V and experts; `close` frees them, also after a failure."""
        self._reserve("kv", self._plan.kv_chunks, self._kv)
        arena_chunks = self._plan.arena_chunks + self._plan.loan_chunks
        self._reserve("experts", arena_chunks, self._experts)

    def carry_out(self, wanted: Holdings, heat: Callable[[], Heat]) -> None:
        """Move chunks until every owner holds what is wanted, or leave all as it was.

        heat   says what each expert is worth, where some must leave

        Of the experts the coldest leave, and are read in place afterwards; K/V blocks that are held
        must fit in a smaller K/V. Raises DriverError. Addresses and K/V are then as before; experts
        may have lost their slots, and what could not even be undone is said.
        """
        if self.lost is not None:
            raise self.lost
        plan, parts = self._plan, (wanted.experts, wanted.kv, wanted.loan, wanted.spare)
        behind = wanted.experts + wanted.loan
        fits = wanted.kv <= plan.kv_chunks and wanted.experts <= plan.arena_chunks
        fits = fits and behind <= plan.arena_chunks + plan.loan_chunks
        if min(parts) < 0 or wanted.chunks > plan.capacity or not fits:
            raise RuleViolation(9, f"{wanted} of {plan}")
        with interrupts_later():
            error = ""
            try:
                self._change(wanted, heat)
            except BaseException as failure:
                error = str(failure) or type(failure).__name__
                if isinstance(failure, DeviceLost):
                    self.lost = failure
                raise
            finally:
                counts = asdict(self.account())
                self._tell("account", chunk_bytes=plan.chunk_bytes, **counts, error=error)
            self.check_account()

    def close(self) -> None:
        """Let the tables name nothing here, drain, unmap and release; again, to retry.

        Raises DriverError after everything that could be done.
        """
        self._loan = 0
        for owner in ("kv", "experts"):
            self._resize(owner, 0)
        if self.lost is None and self.ranges:
            try:
                self._drain()
            except DeviceLost as error:
                self.lost = error  # the pool will find out, and only close its books [15]
        self._experts.reclaim()
        try:
            self._pool.close()
        finally:
            self.ranges = {
                owner: range_
                for owner, range_ in self.ranges.items()
                if range_ in self._pool.ranges
            }

    # What there is.

    def holdings(self) -> Holdings:
        """Return what each owner has now."""
        return Holdings(
            experts=self._mapped("experts") - self._loan,
            kv=self._mapped("kv"),
            loan=self._loan,
            spare=self._pool.account().spare,
        )

    def account(self) -> Account:
        """Return every chunk's owner."""
        held, pool = self.holdings(), self._pool.account()
        return Account(
            capacity=self._plan.capacity,
            experts=held.experts,
            kv=held.kv,
            loan=held.loan,
            spare=held.spare,
            given_back=self._plan.capacity - pool.capacity,
            stuck=pool.stuck,
        )

    @property
    def taken(self) -> int:
        """How many chunks there are: the capacity but for what is given back."""
        return self._pool.account().capacity

    def loan(self) -> tuple[int, int]:
        """Return address and size of what is lent from the end of the arena."""
        held, size = self.holdings(), self._plan.chunk_bytes
        base = self.ranges["experts"].base if held.loan else 0
        return base + held.experts * size, held.loan * size

    def check_account(self) -> None:
        """Raise RuleViolation unless every chunk of the capacity has exactly one owner."""
        self._pool.check_integrity()
        account = self.account()
        owned = account.experts + account.kv + account.loan + account.spare + account.stuck
        if account.given_back < 0 or owned + account.given_back != account.capacity:
            raise RuleViolation(9, f"device {self._device}: {account} does not add up")

    def covers(self, owner: str) -> Callable[[int, int], bool]:
        """Return what says whether bytes from an address on may be used by an owner's tables."""
        return lambda address, size: self.ranges[owner].covers(address, size)

    # Changes.

    def _reserve(self, owner: str, chunks: int, tenant: Tenant) -> None:
        if chunks:
            size, range_ = self._plan.chunk_bytes, self._pool.open_range(chunks)
            self.ranges[owner] = range_
            self._tell(
                "range", owner=owner, address=range_.base, size=chunks * size, chunk_bytes=size
            )
            tenant.place(range_.base)

    def _mapped(self, owner: str) -> int:
        return self.ranges[owner].mapped_chunks if owner in self.ranges else 0

    def _targets(self, wanted: Holdings) -> dict[str, int]:
        """Return how many chunks each open range shall map."""
        targets = {"kv": wanted.kv, "experts": wanted.experts + wanted.loan}
        return {owner: targets[owner] for owner in self.ranges}

    def _change(self, wanted: Holdings, heat: Callable[[], Heat]) -> None:
        before = self.holdings()
        try:
            self._acquire(wanted)
            self._keep(wanted, heat)
            self._withdraw(wanted)
            self._map(wanted)
        except DeviceLost:
            raise
        except BaseException:
            self._undo(before)
            raise
        self._publish(wanted)
        self._release(wanted.spare)

    def _acquire(self, wanted: Holdings) -> None:
        """Create what is missing for the whole change, before anything else changes."""
        account = self._pool.account()
        missing = wanted.chunks - (account.mapped + account.spare)
        if account.capacity + max(0, missing) > self._plan.capacity:
            numbers = {"wanted": wanted.chunks, "of": self._plan.capacity, "stuck": account.stuck}
            raise OutOfDeviceMemory(
                "carry_out", 0, "chunks are stuck", device=self._device, numbers=numbers
            )
        if missing > 0:
            self._pool.prepare(account.spare + missing)

    def _keep(self, wanted: Holdings, heat: Callable[[], Heat]) -> None:
        """Copy what is worth keeping out of memory that owners are about to lose.

        Live K/V blocks move below the new end, and hot experts to slots that stay. Those of colder
        experts are drained before they are written.
        """
        size, held = self._plan.chunk_bytes, self.holdings()
        if wanted.kv < held.kv:
            self._kv.compact(wanted.kv * size // self._kv.layout.block_bytes)
        if wanted.experts >= held.experts:
            return
        moves = self._experts.moves_into(wanted.experts * size, heat())
        if moves:
            self._experts.make_way(moves)
            self._drain()
            self._experts.reclaim()
            self._experts.move(moves)
            self.moved += len(moves)

    def _withdraw(self, wanted: Holdings) -> None:
        """Take from owners what they shall not have: publish, drain, unmap [7]."""
        size, held, targets = self._plan.chunk_bytes, self.holdings(), self._targets(wanted)
        surplus = {
            owner: max(0, range_.mapped_chunks - targets[owner])
            for owner, range_ in self.ranges.items()
        }
        lost_slots, loan_ends = wanted.experts < held.experts, wanted.loan < held.loan
        if not (lost_slots or loan_ends or any(surplus.values())):
            return
        self._resize("kv", min(wanted.kv, held.kv) * size)
        self._resize("experts", min(wanted.experts, held.experts) * size)
        for owner, range_ in self.ranges.items():
            range_.retire(surplus[owner])
        try:
            self._drain()
        except BaseException:
            for range_ in self.ranges.values():
                range_.reinstate()
            raise
        self._experts.reclaim()
        for range_ in self.ranges.values():
            range_.shrink()

    def _map(self, wanted: Holdings) -> None:
        """Give owners what they shall have, from spare chunks; nothing is published."""
        missing = {
            owner: max(0, target - self._mapped(owner))
            for owner, target in self._targets(wanted).items()
        }
        needed, spare = sum(missing.values()), self._pool.account().spare
        if needed > spare:  # chunks that could not be unmapped: stuck
            numbers = {"needed": needed, "spare": spare}
            raise OutOfDeviceMemory(
                "carry_out", 0, "chunks are stuck", device=self._device, numbers=numbers
            )
        for owner, count in missing.items():
            self.ranges[owner].grow(count)

    def _publish(self, held: Holdings) -> None:
        """Let each owner use what is mapped for it."""
        self._loan = held.loan
        self._resize("kv", held.kv * self._plan.chunk_bytes)
        self._resize("experts", held.experts * self._plan.chunk_bytes)

    def _resize(self, owner: str, usable_bytes: int) -> None:
        """Let an owner's tables name its first `usable_bytes`."""
        tenant: Tenant = self._kv if owner == "kv" else self._experts
        tenant.resize(usable_bytes)
        if owner in self.ranges:
            base = self.ranges[owner].base
            self._tell("publish", owner=owner, address=base, size=usable_bytes)

    def _tell(self, kind: str, **fields: object) -> None:
        if self._record is not None:
            self._record({"kind": kind, "device": self._device, **fields})

    def _release(self, spare: int) -> None:
        """Give the system what is spare beyond `spare`; a chunk that fails is stuck, and said."""
        surplus = self._pool.account().spare - spare
        if surplus > 0:
            self._pool.give_back(surplus)

    def _undo(self, before: Holdings) -> None:
        """Return to what was held; where the driver refuses that too, publish what there is."""
        try:
            self._withdraw(before)
            self._map(before)
        except DeviceLost:
            raise
        except DriverError as error:
            self._say(f"device {self._device}: could not return to {before}: {error.message}")
        arena = self._mapped("experts")
        loan = min(before.loan, arena)
        self._publish(Holdings(experts=arena - loan, kv=self._mapped("kv"), loan=loan))
        self._release(before.spare)
        self.check_account()

    def _drain(self) -> None:
        """Wait for all work of the device: what it could name may then be unmapped [7]."""
        self._driver.synchronize(self._device)
