"""Lay a model out on a device before anything of it is read: what does not fit is refused here.

A plan divides the device's memory; programs are emitted over buffers that begin at 0, so that their
kernels can be compiled and their buffers counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from strata_nb import device_needs, loading
from strata_nb.backend import Backend
from strata_nb.cache.elastic import GrowthRules
from strata_nb.cache.plan import Needs, Plan, plan_device
from strata_nb.device_pool import compile_pool, pool_places, why_no_pool
from strata_nb.device_programs import Emitted, TablePlaces, emit
from strata_nb.device_sizes import Given, Sizes, measure
from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile
from strata_nb.loading_layout import dense_layout
from strata_nb.models.description import Description
from strata_nb.models.places import Buffers
from strata_nb.options import Options
from strata_nb.progress import Progress
from strata_nb.tracing import Announce

if TYPE_CHECKING:
    from strata_nb.kernels.gpu.pooled import PoolPlaces


class Asked(NamedTuple):
    """Say what is to be opened, and where."""

    file: GGUFFile
    model: Description
    options: Options
    ctx_size: int
    max_rows: int
    backend: Backend[Any]
    say: Callable[[str], None]
    announce: Announce | None

    def tell_block(self, device: int | None, owner: str, address: int, size: int) -> None:
        """Announce memory that is not the ledger's."""
        if self.announce is not None:
            block = {"device": device, "owner": owner, "address": address, "size": size}
            self.announce({"kind": "block", **block})


class Laid(NamedTuple):
    """Hold what was laid out before anything was read.

    emitted        programs over buffers that begin at 0
    weight_bytes   of dense weights
    rules          how the K/V grows; None: it has its whole size from the start
    ring_bytes     of a buffer of our own for what prompt batches miss
    """

    sizes: Sizes
    emitted: Emitted
    weight_bytes: int
    rules: GrowthRules | None
    plan: Plan
    ring_bytes: int
    warnings: list[str]


def lay_out(asked: Asked, given: Given) -> Laid:
    """Plan the device's memory; ConfigError with the sum where it does not suffice."""
    backend, options, ctx_size = asked.backend, asked.options, asked.ctx_size
    sizes = measure(asked.file, asked.model, options, ctx_size)
    wanted_slots = device_needs.slots_wanted(options, sizes.slots, backend)
    rules = device_needs.growth_rules(options, ctx_size, backend)
    unplaced, weight_bytes = dense_layout(asked.file, sizes.dense)
    emitted = emit(
        asked.model,
        sizes,
        backend,
        unplaced,
        Buffers(),
        TablePlaces(),
        given.forced,
        asked.max_rows,
    )
    needs = Needs(
        dense_bytes=device_needs.plain_bytes(weight_bytes, emitted.buffer_bytes),
        reserve_bytes=device_needs.reserve_bytes(options, backend),
        kv=sizes.kv,
        kv_cells=ctx_size if rules is None else rules.init_cells,
        kv_most_cells=ctx_size,
        slots=sizes.slots if wanted_slots != 0 else None,
        slots_wanted=wanted_slots,
        outside_bytes=backend.outside_bytes,
        limit_bytes=device_needs.limit_bytes(options, backend),
    )
    expert_bytes = sizes.experts.size_bytes if sizes.experts is not None else 0
    warnings = loading.check_memory(device_needs.host_bytes(expert_bytes, needs, backend))
    plan, ring_bytes = plan_device(backend.driver, backend.device, needs), 0
    if emitted.batch is not None and sizes.experts is not None:
        needs, ring_bytes = device_needs.with_ring(
            needs, plan, sizes.slots, borrows=options.prefill_borrow
        )
        plan = plan_device(backend.driver, backend.device, needs)
    warnings += device_needs.reach_warnings(plan)
    return Laid(sizes, emitted, weight_bytes, rules, plan, ring_bytes, warnings)


def may_pool(asked: Asked, laid: Laid) -> bool:
    """Return whether the CPU would compute experts that the device misses."""
    experts = laid.sizes.experts
    if experts is None or not asked.backend.pools:
        return False
    return why_no_pool(asked.options, experts.parts) is None


def leave_to_pool(asked: Asked, laid: Laid, off: list[str]) -> PoolPlaces | None:
    """Have programs leave missed experts to the CPU, where some will be missed.

    off   gets a line where that cannot be; ConfigError where nobody else computes them
    """
    backend, model, experts = asked.backend, asked.model, laid.sizes.experts
    misses = laid.plan.start_slots < model.layers * model.experts or not asked.options.pin
    if experts is None or not backend.pools or not misses:
        return None
    reason = why_no_pool(asked.options, experts.parts)
    if reason is not None and not asked.options.pin:
        raise ConfigError(
            f"--no-pin: the CPU computes all experts without a slot, and cannot: {reason}",
            hint="leave it out, or use --device host",
        )
    if reason is not None:
        off.append(f"experts computed by the CPU ({reason})")
        return None
    return pool_places(backend, model, experts.parts)


def compile_programs(
    asked: Asked, laid: Laid, pool_at: PoolPlaces | None, compiling: Progress | None
) -> None:
    """Compile what the programs need and is not at hand."""
    backend, (steps, batch, *_) = asked.backend, laid.emitted
    backend.compile(
        [steps.body, steps.head, steps.choice],
        compiling,
        asked.say,
        batches=[] if batch is None else [batch.body],
        batch_rows=0 if batch is None else batch.max_rows,
    )
    if pool_at is not None and laid.sizes.experts is not None:
        compile_pool(laid.sizes.experts.parts, asked.say)
