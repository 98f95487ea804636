"""Turn what is asked of a device's memory into what each owner shall hold; arithmetic only.

    request                        memory comes from                       memory goes to
    K/V growth                     spare, the system, the arena's end      the K/V
    K/V growth beside windows      spare, the system                       the K/V
    K/V trim                       the K/V's end                           the arena, the system
    give-back                      spare, the arena's end, the K/V's end   the system
    take-back, peer attach         the system                              the arena
    prompt loan                    the system, the arena's end             the loan
    its return                     the loan                                the arena, the system
    peer detach                    spare, the arena                        the system

Each is a function of the same `Situation` and gives the `Holdings` that the ledger then brings
about, so any request may follow any other. Three rules bind them all: the arena keeps one slot a
layer, what is lent stays where it is until it is returned (so the arena does not change meanwhile),
and the system is asked for nothing that was to stay free for others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata_nb.cache.plan import Holdings, Plan
from strata_nb.errors import OutOfDeviceMemory


@dataclass(frozen=True, slots=True)
class Situation:
    """Describe a ledger at the moment of a request.

    device         its number, for people
    plan, held     how it is cut up, and who has what
    obtainable     chunks that the system would give and that need not stay free for others
    owed           chunks that are missing from what is to stay free
    live_blocks    K/V blocks that sequences hold
    kv_limit, arena_limit   chunks that the ranges can map; less than is reserved once one is stuck
    """

    device: int
    plan: Plan
    held: Holdings
    obtainable: int
    owed: int
    live_blocks: int
    kv_limit: int
    arena_limit: int

    @property
    def arena_gives(self) -> int:
        """How many chunks the arena can lose."""
        return 0 if self.held.loan else max(0, self.held.experts - self.plan.floor_chunks)

    @property
    def arena_takes(self) -> int:
        """How many chunks more would hold slots."""
        if self.held.loan:
            return 0
        return max(0, min(self.plan.arena_chunks, self.arena_limit) - self.held.experts)

    @property
    def loan_takes(self) -> int:
        """How many chunks can be lent that nobody has to give."""
        places = min(self.plan.arena_chunks + self.plan.loan_chunks, self.arena_limit)
        return max(0, min(places - self.held.experts, self.obtainable))

    @property
    def lendable(self) -> int:
        """How many chunks can be lent in all."""
        return 0 if self.held.loan else self.loan_takes + self.arena_gives

    @property
    def kv_floor(self) -> int:
        """How many chunks the K/V keeps whatever is asked: what it began with, and what is live."""
        live = self.plan.chunks_for_blocks(self.live_blocks)
        return min(self.held.kv, max(live, self.plan.start.kv))


def grow_kv(
    now: Situation, least_blocks: int, wanted_blocks: int, enough_blocks: int | None = None
) -> Holdings:
    """Plan room for `wanted_blocks` K/V blocks, or for as many as there can be.

    enough_blocks   for more than these the arena gives nothing; None: for all that are wanted

    Raises OutOfDeviceMemory where not even `least_blocks` can be had.
    """
    plan, held = now.plan, now.held
    limit = min(plan.kv_chunks, now.kv_limit)
    possible = min(limit, held.kv + held.spare + now.obtainable + now.arena_gives)
    least, wanted = map(plan.chunks_for_blocks, (least_blocks, wanted_blocks))
    if least > possible:
        raise _refuse(
            "grow the K/V",
            now,
            needed=least * plan.chunk_bytes,
            possible=possible * plan.chunk_bytes,
        )
    count = max(0, min(wanted, possible) - held.kv)
    if enough_blocks is not None:
        enough = max(least, plan.chunks_for_blocks(enough_blocks)) - held.kv
        count = min(count, max(enough, held.spare + now.obtainable))
    spare = min(count, held.spare)
    from_arena = max(0, count - spare - now.obtainable)
    return replace(
        held, kv=held.kv + count, spare=held.spare - spare, experts=held.experts - from_arena
    )


def grow_kv_beside(now: Situation, wanted_blocks: int) -> Holdings:
    """Plan as much of the room for `wanted_blocks` K/V blocks as nobody has to give."""
    plan, held = now.plan, now.held
    limit = min(plan.kv_chunks, now.kv_limit, plan.chunks_for_blocks(wanted_blocks))
    count = max(0, min(limit - held.kv, held.spare + now.obtainable))
    return replace(held, kv=held.kv + count, spare=max(0, held.spare - count))


def trim_kv(now: Situation, blocks: int) -> Holdings:
    """Plan a K/V of `blocks` blocks, more where more are live.

    Experts get what it gives up, but for what is owed to others.
    """
    plan, held = now.plan, now.held
    kv = min(held.kv, plan.chunks_for_blocks(max(blocks, now.live_blocks)))
    for_experts = min(max(0, held.kv - kv - now.owed), now.arena_takes)
    return replace(held, kv=kv, experts=held.experts + for_experts)


def give_back(now: Situation, chunks: int) -> Holdings:
    """Plan to give the system `chunks` chunks, or what can be spared."""
    held = now.held
    spare = min(chunks, held.spare)
    experts = min(chunks - spare, now.arena_gives)
    kv = min(chunks - spare - experts, held.kv - now.kv_floor)
    return replace(held, spare=held.spare - spare, experts=held.experts - experts, kv=held.kv - kv)


def take_back(now: Situation) -> Holdings:
    """Plan to use for experts what the system has and need not stay free."""
    return replace(now.held, experts=now.held.experts + min(now.obtainable, now.arena_takes))


def prepare(now: Situation, chunks: int) -> Holdings:
    """Plan to have `chunks` chunks spare for the K/V to grow into, or as many as may be created."""
    held = now.held
    useful = min(now.plan.kv_chunks, now.kv_limit) - held.kv
    return replace(held, spare=min(chunks, useful, held.spare + now.obtainable))


def lend(now: Situation, chunks: int) -> Holdings:
    """Plan to lend `chunks` chunks behind the slots: what nobody has to give, then the arena's."""
    if not 0 < chunks <= now.lendable:
        size = now.plan.chunk_bytes
        raise _refuse("lend memory", now, needed=chunks * size, possible=now.lendable * size)
    from_arena = max(0, chunks - now.loan_takes)
    return replace(now.held, experts=now.held.experts - from_arena, loan=chunks)


def end_loan(now: Situation) -> Holdings:
    """Plan to give what is lent to the arena, as far as there may be slots, then to the system."""
    held = now.held
    experts = max(held.experts, min(held.experts + held.loan, now.plan.arena_chunks))
    return replace(held, experts=experts, loan=0)


def attach(now: Situation, chunks: int) -> Holdings:
    """Plan an arena of up to `chunks` chunks on a device that helps another one."""
    more = min(chunks - now.held.experts, now.obtainable, now.arena_takes)
    experts = now.held.experts + max(0, more)
    if experts < now.plan.floor_chunks:
        size = now.plan.chunk_bytes
        floor = now.plan.floor_chunks * size
        raise _refuse("attach a peer", now, needed=floor, possible=experts * size)
    return replace(now.held, experts=experts)


def detach(now: Situation) -> Holdings:
    """Plan to give the system the whole arena; experts are read in place from then on."""
    if now.held.loan:
        raise _refuse("detach a peer", now, needed=now.held.loan * now.plan.chunk_bytes, possible=0)
    return replace(now.held, experts=0, spare=0)


def _refuse(what: str, now: Situation, *, needed: int, possible: int) -> OutOfDeviceMemory:
    held, size = now.held, now.plan.chunk_bytes
    numbers = {
        "needed": needed,
        "possible": possible,
        "K/V": held.kv * size,
        "experts": held.experts * size,
        "lent": held.loan * size,
    }
    hint = "wait until the prompt is read" if held.loan else "free memory of the device"
    return OutOfDeviceMemory(
        what, 0, "there is not enough memory", device=now.device, numbers=numbers, hint=hint
    )
