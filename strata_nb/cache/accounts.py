"""What a ledger says of itself: who owns what, for programs and people, and what a change did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata_nb.cache.plan import Holdings


@dataclass(frozen=True, slots=True)
class Account:
    """Count a device's chunks by owner; the parts add up to the capacity."""

    capacity: int
    experts: int
    kv: int
    loan: int
    spare: int
    given_back: int
    stuck: int


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """Describe a device's ledger for people.

    slots, resident   expert slots, and how many hold an expert
    kv_cells          there is memory for
    bytes_by_owner    what each has; the ledger's owners by the names of `Account`, and dense
    """

    device: int
    chunk_bytes: int
    slots: int
    resident: int
    kv_cells: int
    bytes_by_owner: dict[str, int]


@dataclass(frozen=True, slots=True)
class Change:
    """Say what a request did.

    request          its name: that of the ledger's method
    before, after    what each owner held
    slots, resident  expert slots that there are now, and how many hold an expert
    slots_before     that there were
    moved, filled    experts that moved to other slots, and that came from the host's memory
    error            why nothing, or not all, was done; empty where all went well
    """

    device: int
    request: str
    before: Holdings
    after: Holdings
    slots_before: int
    slots: int
    resident: int
    moved: int = 0
    filled: int = 0
    error: str = ""


def in_all(changes: Sequence[Change]) -> Change:
    """Return what changes that followed each other came to."""
    first = changes[0]
    return replace(
        changes[-1],
        before=first.before,
        slots_before=first.slots_before,
        moved=sum(change.moved for change in changes),
        filled=sum(change.filled for change in changes),
    )
