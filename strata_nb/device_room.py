"""What is in use of a device once all of a model is there: whether it is what was planned.

A plan counts what it cannot know yet: modules, graphs and page tables are the driver's, and others
take memory while a model is loaded. So what is free is read again in the end, and the ledger gives
back what is missing from the reserve, or lies beyond the limit. A full card would not fail: it
would be slow, without a word.
"""

from __future__ import annotations

from collections.abc import Callable

from strata_nb.cache.capacity import Ledger
from strata_nb.cache.kv_layout import BLOCK_CELLS
from strata_nb.cache.plan import memory_within, sum_refusal
from strata_nb.errors import ConfigError
from strata_nb.models.description import bytes_text
from strata_nb.vmm import MemoryDriver


def outside_bytes(ledger: Ledger, in_use_bytes: int) -> int:
    """Return what is in use of a device beside weights, buffers and the ledger's chunks."""
    account, plan = ledger.account(), ledger.plan
    chunks = account.capacity - account.given_back
    return max(0, in_use_bytes - plan.needs.dense_bytes - chunks * plan.chunk_bytes)


def keep_free(driver: MemoryDriver, ledger: Ledger, say: Callable[[str], None]) -> list[str]:
    """Shrink the ledger until its reserve is free; returns warnings where that cannot be.

    Says in one line what was given back. Raises ConfigError with the sum where more than the limit
    is in use even then, DriverError.
    """
    needs, device = ledger.plan.needs, ledger.device
    before, _ = memory_within(driver, device, needs.limit_bytes)
    change = ledger.keep_reserve()
    if change is None:
        return []
    free, total = memory_within(driver, device, needs.limit_bytes)
    if free < 0:
        raise _over_the_limit(ledger, total - free, total)
    outside = outside_bytes(ledger, total - free) - ledger.plan.in_use_bytes
    chunks = change.before.chunks - change.after.chunks
    wanted = bytes_text(needs.reserve_bytes)
    if chunks:
        say(
            f"after loading {_signed_text(before)} were free and not {wanted}: driver, modules, "
            f"graphs and other programs took {bytes_text(max(0, outside))}, "
            f"{bytes_text(needs.outside_bytes)} were planned; "
            f"{bytes_text(chunks * ledger.plan.chunk_bytes)} given back, {change.slots:,} slots of "
            f"{change.slots_before:,} are left"
        )
    if free >= needs.reserve_bytes:
        return []
    return [f"only {bytes_text(free)} are free of the {wanted} that are to stay free for others"]


def _signed_text(size: int) -> str:
    return f"{'-' if size < 0 else ''}{bytes_text(abs(size))}"


def _over_the_limit(ledger: Ledger, in_use: int, limit: int) -> ConfigError:
    """Make the refusal of what is in use, though the ledger holds the least that it can."""
    plan, held = ledger.plan, ledger.holdings()
    beside = outside_bytes(ledger, in_use)
    driver = max(0, beside - plan.in_use_bytes)
    cells = ledger.kv.usable_blocks * BLOCK_CELLS
    parts = [
        (beside - driver, "in use before: the context, other programs"),
        (plan.needs.dense_bytes, "dense weights and buffers"),
        (driver, "driver, modules and graphs, other programs since"),
        (held.kv * plan.chunk_bytes, f"K/V of {cells:,} cells"),
        (held.experts * plan.chunk_bytes, f"{ledger.experts.usable_slots:,} expert slots"),
        (held.spare * plan.chunk_bytes, "spare"),
    ]
    return sum_refusal(
        "the model does not fit after it was loaded",
        parts,
        (limit, "allowed by --vram-limit"),
        f"--vram-limit {-(-in_use >> 20)}MiB or more, or a smaller --ctx-size",
    )
