"""What options ask of a device's memory: slots, growth, a limit; what is off, and what to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strata_nb.backend import Backend
from strata_nb.cache.elastic import GrowthRules
from strata_nb.cache.kv_layout import BLOCK_CELLS
from strata_nb.cache.plan import Needs, Plan
from strata_nb.cache.slots import SlotLayout, slot_budget
from strata_nb.device_streaming import ring_bytes
from strata_nb.errors import ConfigError
from strata_nb.execution import PLAIN_UNIT_BYTES
from strata_nb.models.description import bytes_text
from strata_nb.options import Options, expert_cache_size


def slots_wanted(options: Options, slots: SlotLayout, backend: Backend[Any]) -> int | None:
    """Return how many slots there shall be: 0 for none, None for as many as there is room."""
    if not slots.layers and options.expert_cache != "auto":
        raise ConfigError(
            f"--expert-cache {options.expert_cache}: this model has no experts",
            hint="leave it out",
        )
    if not backend.has_slots:
        if options.expert_cache != "auto":
            raise ConfigError(
                f"--expert-cache {options.expert_cache}: the device {backend.name} reads experts "
                "where the host has them and has no slots",
                hint="leave it out, or give a device of its own memory: --device host:1x512MiB",
            )
        if options.adapt != "insert":
            raise ConfigError(
                f"--adapt {options.adapt}: the device {backend.name} has no slots",
                hint="leave it out, or give a device of its own memory: --device host:1x512MiB",
            )
        return 0
    if not slots.layers and options.adapt != "insert":
        raise ConfigError(
            f"--adapt {options.adapt}: this model has no experts", hint="leave it out"
        )
    return slot_budget(expert_cache_size(options.expert_cache), slots) if slots.layers else 0


def growth_rules(options: Options, ctx_size: int, backend: Backend[Any]) -> GrowthRules | None:
    """Return how the K/V grows, None where it has its whole size from the start.

    On the whole machine it does not unless asked to: a machine that runs out of memory ends the
    process, and refuses nothing.
    """
    grows = backend.has_slots if options.kv_grow is None else options.kv_grow
    sizes = {"--kv-grow-init": options.kv_grow_init, "--kv-grow-step": options.kv_grow_step}
    for flag, cells in sizes.items():
        if cells is not None and not grows:
            raise ConfigError(
                f"{flag} {cells}: the K/V has its whole size from the start",
                hint="add --kv-grow" if options.kv_grow is None else "leave out --no-kv-grow",
            )
    if options.vram_elastic and not backend.has_slots:
        raise ConfigError(
            f"--vram-elastic: the device {backend.name} is the whole machine, of which nothing is "
            "kept for others",
            hint="give a device of its own memory: --device host:1x512MiB",
        )
    return GrowthRules.of(ctx_size, *sizes.values()) if grows else None


def limit_bytes(options: Options, backend: Backend[Any]) -> int | None:
    """Return how much memory the device counts as having; None: all that it has."""
    if options.vram_limit is not None and not backend.has_slots:
        raise ConfigError(
            f"--vram-limit {bytes_text(options.vram_limit)}: the device {backend.name} is the "
            "whole machine, which can be no smaller",
            hint="give a device of its own memory: --device host:1x512MiB",
        )
    return options.vram_limit


def plain_bytes(*sizes: int) -> int:
    """Return what allocations of these sizes take of a device's memory, each in whole pages."""
    return sum(-(-size // PLAIN_UNIT_BYTES) * PLAIN_UNIT_BYTES for size in sizes)


def with_ring(needs: Needs, plan: Plan, slots: SlotLayout, *, borrows: bool) -> tuple[Needs, int]:
    """Return needs with what prompt batches need for missed experts, and the bytes of buffers.

    plan      of `needs`: where all experts have slots, nothing is added
    borrows   memory that nobody uses is enough, or slots; else buffers are taken at the start
    """
    size = ring_bytes(slots) if plan.start_slots < slots.full_slots else 0
    if borrows:
        return replace(needs, loan_bytes=size), 0
    return replace(needs, dense_bytes=needs.dense_bytes + plain_bytes(size)), size


def reserve_bytes(options: Options, backend: Backend[Any]) -> int:
    """Return how much of the device stays free for others."""
    if options.vram_reserve_mib is None:
        return backend.reserve_bytes
    return options.vram_reserve_mib << 20


def host_bytes(expert_bytes: int, needs: Needs, backend: Backend[Any]) -> dict[str, int]:
    """Return what host memory must hold, for people and by bytes."""
    if not backend.of_host:
        return {"experts": expert_bytes}
    host = {
        "experts": expert_bytes,
        "dense weights and buffers": needs.dense_bytes,
        f"K/V of {needs.kv_cells:,} cells": needs.kv.bytes_for(needs.kv_cells),
    }
    if needs.slots is not None:  # small devices are made of the same memory
        wanted = needs.slots_wanted or needs.slots.layers
        host[f"at least {wanted:,} expert slots"] = needs.slots.bytes_of(wanted)
    return host


def switched_off(options: Options, plan: Plan, slots: int, experts: int) -> list[str]:
    """Return what a device of its own memory does not do, and in brackets why.

    slots    that there are now, for so many experts
    """
    off = []
    if slots < experts:
        auto = options.expert_cache == "auto"
        why = "no room for more" if auto else f"--expert-cache {options.expert_cache}"
        off.append(f"slots for {experts - slots:,} experts ({why})")
    if slots and options.adapt == "off":
        off.append("following the text (--adapt off)")
    if not options.pin:
        off.append("experts read in host memory (--no-pin: the CPU computes them)")
    if not options.overlap:
        off.append("kernels that overlap (--no-overlap)")
    if not options.prefill_borrow and slots < experts:
        off.append("loans to prompts (--no-prefill-borrow)")
    if plan.needs.kv_cells >= plan.needs.kv_most_cells and options.kv_grow is False:
        off.append("growth of the K/V (--no-kv-grow)")
    return off


def reach_warnings(plan: Plan) -> list[str]:
    """Return a line where the K/V cannot grow to the whole context beside what others have now."""
    blocks = plan.kv_reach * plan.chunk_bytes // plan.needs.kv.block_bytes
    cells, most = blocks * BLOCK_CELLS, plan.needs.kv_most_cells
    if cells >= most:
        return []
    return [
        f"there is memory for {cells:,} of the context's {most:,} cells: a longer text ends there"
    ]
