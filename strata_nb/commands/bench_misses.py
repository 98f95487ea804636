"""What misses cost in `strata_nb bench`: hits, and bytes over the link, of one test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata_nb.reports import Report


@dataclass(frozen=True)
class Misses:
    """Count what the runs of a test asked of a device with slots.

    tokens         of all runs
    hits, misses   choices of an expert that found a slot, or did not
    missed_bytes   of the experts that misses read
    link_bytes     that experts took over the link, copies to slots included
    """

    tokens: int
    hits: int
    misses: int
    missed_bytes: int
    link_bytes: int

    @classmethod
    def between(cls, before: Report, after: Report, tokens: int) -> Misses:
        """Return what happened between two reports, while so many tokens were read."""
        return cls(
            tokens,
            after.hits - before.hits,
            after.misses - before.misses,
            after.missed_bytes - before.missed_bytes,
            after.link_bytes - before.link_bytes,
        )

    def __add__(self, other: Misses) -> Misses:
        return Misses(
            self.tokens + other.tokens,
            self.hits + other.hits,
            self.misses + other.misses,
            self.missed_bytes + other.missed_bytes,
            self.link_bytes + other.link_bytes,
        )

    @property
    def hit_rate(self) -> float | None:
        """The share of choices that found a slot; None where nothing was chosen."""
        choices = self.hits + self.misses
        return self.hits / choices if choices else None

    @property
    def link_bytes_per_token(self) -> float:
        return self.link_bytes / self.tokens

    def limit_s(self, resident_s: float, link_bytes_per_s: float) -> float:
        """Return the seconds of a token that the link allows.

        resident_s   of one whose experts all have slots; what misses read comes on top of that
        """
        return resident_s + self.missed_bytes / self.tokens / link_bytes_per_s
