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
from strata_nb.cache.plan import Memory, sum_refusal
from strata_nb.errors import ConfigError
from strata_nb.models.description import bytes_text


def keep_free(ledger: Ledger, say: Callable[[str], None]) -> list[str]:
    """Shrink the ledger until its reserve is free; returns warnings where that cannot be.

    Says in one line what was given back. Raises DriverError, and ConfigError with the sum where
    more than the limit is in use even then.
    """
    needs = ledger.plan.needs
    before = ledger.memory()
    warnings = _limit_warnings(needs.limit_bytes, before.device_bytes)
    if before.free_bytes >= needs.reserve_bytes:
        return warnings
    change = ledger.keep_reserve()
    now = ledger.memory()
    if now.free_bytes < 0:
        raise _over_the_limit(ledger, now)
    wanted = bytes_text(needs.reserve_bytes)
    given = (change.before.chunks - change.after.chunks) * ledger.plan.chunk_bytes
    if given:
        there = bytes_text(max(0, before.free_bytes))
        taken = bytes_text(max(0, ledger.outside_bytes(now) - ledger.plan.in_use_bytes))
        say(
            f"after loading {there} were free and not {wanted}: driver, modules, graphs and other "
            f"programs took {taken}, {bytes_text(needs.outside_bytes)} were planned; "
            f"{bytes_text(given)} given back, {change.slots:,} slots of {change.slots_before:,} "
            "are left"
        )
    if now.free_bytes < needs.reserve_bytes:
        free = bytes_text(now.free_bytes)
        warnings.append(f"only {free} are free of the {wanted} that are to stay free for others")
    return warnings


def _limit_warnings(limit_bytes: int | None, device_bytes: int) -> list[str]:
    if limit_bytes is None or limit_bytes < device_bytes:
        return []
    return [
        f"--vram-limit {bytes_text(limit_bytes)}: the device has {bytes_text(device_bytes)}, so "
        "nothing is limited"
    ]


def _over_the_limit(ledger: Ledger, memory: Memory) -> ConfigError:
    """Make the refusal of what is in use, though the ledger holds the least that it can."""
    plan, held = ledger.plan, ledger.holdings()
    beside = ledger.outside_bytes(memory)
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
        (memory.total_bytes, "allowed by --vram-limit"),
        f"--vram-limit {-(-memory.in_use_bytes >> 20)}MiB or more, or a smaller --ctx-size",
    )
