"""Open a model on a device: everything is laid out first, so that what does not fit is refused.

    dense weights and buffers   plain memory of the device, for as long as the model is open
    experts                     one arena in host memory; slots of the device hold copies of some
    K/V                         blocks that the ledger maps
    programs                    emitted once over those addresses, and prepared by the backend

The order: what the model takes, and a plan of the device's memory; kernels that are not at hand are
compiled; dense weights are read, and experts while the rest is laid out; slots are filled as they
come; then what is free is looked at again. Whoever opens gives an `ExitStack`, onto which goes what
closes each thing: it ends all of it, also where opening fails half way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from strata_nb import device_needs, device_room, loading
from strata_nb.cache.capacity import Ledger
from strata_nb.cache.elastic import ElasticKV
from strata_nb.cache.experts import Copy, ExpertArena, HostArena
from strata_nb.cache.kv import KVCache
from strata_nb.cache.policy import Insertion, Maker, static, swaps
from strata_nb.cache.residency import Residency
from strata_nb.device_filling import DeviceFilling, FillingPlaces
from strata_nb.device_layout import (
    Asked,
    Laid,
    compile_programs,
    lay_out,
    leave_to_pool,
    may_pool,
)
from strata_nb.device_pool import NO_POOL_YET, DevicePool, open_device_pool, pool_layers
from strata_nb.device_programs import Emitted, TablePlaces, emit
from strata_nb.device_sizes import ROPE_FACTORS, Given, read_given
from strata_nb.device_steps import DeviceSteps, SharedCounts
from strata_nb.device_streaming import BatchTables, ExpertStreaming
from strata_nb.formats import dequantise
from strata_nb.kernels.reference import rope_frequencies, rope_table
from strata_nb.loading_pieces import LoadProgress
from strata_nb.models.places import Buffers, Programs
from strata_nb.options import Options
from strata_nb.progress import Progress
from strata_nb.shared_tables import SharedTable
from strata_nb.staged_copies import StagedCopies

if TYPE_CHECKING:
    from strata_nb.kernels.gpu.pooled import PoolPlaces

SEQUENCES = 16  # rows of the block table


@dataclass
class Opened:
    """Hold the parts of an open model.

    filling    where the device has its tables of experts, if it gives them slots
    pool       computes experts that the device misses, if there is one
    warnings   lines for whoever opened it
    off        what the device does not do, and why
    """

    given: Given
    kv: KVCache
    arena: ExpertArena
    ledger: Ledger
    counts: SharedCounts
    programs: Programs
    filling: FillingPlaces | None
    elastic: ElasticKV | None
    residency: Residency
    steps: DeviceSteps
    pool: DevicePool | None
    warnings: list[str]
    off: list[str]


def open_device(
    asked: Asked,
    undo: ExitStack,
    *,
    progress: Progress | None,
    compiling: Progress | None,
    told: Callable[[int], None] | None,
) -> Opened:
    """Open a model; `told` is what `DeviceSteps` calls behind each step.

    ConfigError where it does not fit, and what loading and drivers raise.
    """
    given = read_given(asked.options, asked.model, asked.ctx_size)
    laid = lay_out(asked, given)
    warnings, off = laid.warnings, list[str]()
    pool_at = leave_to_pool(asked, laid, off)
    compile_programs(asked, laid, pool_at, compiling)
    weights, loaded = _begin_loading(asked, laid, progress, undo)
    kv, arena, ledger = _open_memory(asked, laid, loaded, undo)
    buffers, ring = _allocate_buffers(asked, laid, undo)
    emitted, counts, batch_tables = _emit_placed(asked, laid, given, weights, kv, arena, buffers)
    elastic, residency = _open_policies(asked, laid, given, ledger, arena)
    streaming: ExpertStreaming | None = None
    if batch_tables is not None:
        streaming = ExpertStreaming(
            asked.backend,
            ledger,
            arena,
            batch_tables,
            ring,
            top_k=asked.model.top_k,
            say=asked.say,
        )
        undo.callback(streaming.close)
    steps = DeviceSteps(
        asked.backend,
        emitted.programs,
        emitted.batch,
        counts,
        kv,
        arena,
        elastic,
        residency,
        DeviceFilling(asked.backend, arena, residency, emitted.filling, fills=asked.options.pin),
        streaming,
        given.trace,
        told,
        reads_host=asked.options.pin or not asked.model.experts,
        pool_state=pool_at.state if pool_at is not None else 0,
        vocabulary=asked.model.vocab_size,
        top_k=asked.model.top_k,
    )
    _fill(asked, given, arena, loaded)
    pool = _start_pool(asked, laid, pool_at, arena, undo)
    if pool is not None:
        steps.use_pool(pool)
    elif may_pool(asked, laid):
        steps.lack_pool(partial(asked.say, NO_POOL_YET))
    if asked.backend.has_slots:
        warnings += device_room.keep_free(ledger, asked.say)
        experts = asked.model.layers * asked.model.experts
        off += device_needs.switched_off(asked.options, laid.plan, arena.usable_slots, experts)
    return Opened(
        given,
        kv,
        arena,
        ledger,
        counts,
        emitted.programs,
        emitted.filling,
        elastic,
        residency,
        steps,
        pool,
        warnings,
        off,
    )


def policy_maker(options: Options) -> Maker:
    """Return what makes the policy that is asked for."""
    if options.adapt == "swap":
        return swaps(options.adapt_every, options.adapt_swaps, options.adapt_decay)
    return Insertion if options.adapt == "insert" else static


# -- memory and what lies in it --------------------------------------------------------------------


def _begin_loading(
    asked: Asked, laid: Laid, progress: Progress | None, undo: ExitStack
) -> tuple[loading.DenseWeights, loading.HostExperts | None]:
    """Load dense weights, and begin to read the experts, beside which the rest is laid out."""
    backend, file, sizes = asked.backend, asked.file, laid.sizes
    keep = loading.cache_fits(file, file.size_bytes)
    load = LoadProgress(sum(info.size_bytes for info in file.tensors.values()), progress)
    weights = loading.load_dense(
        file,
        sizes.dense,
        backend.driver,
        backend.device,
        threads=backend.threads,
        keep_cached=keep,
        progress=load,
    )
    undo.callback(weights.close)
    asked.tell_block(backend.device, "weights", weights.address, laid.weight_bytes)
    if sizes.experts is None:
        return weights, None
    loaded = loading.begin_experts(
        file,
        sizes.stacks,
        sizes.experts,
        backend.driver if asked.options.pin else None,
        threads=backend.threads,
        keep_cached=keep,
        progress=load,
    )
    undo.callback(loaded.close)
    return weights, loaded


def _open_memory(
    asked: Asked, laid: Laid, loaded: loading.HostExperts | None, undo: ExitStack
) -> tuple[KVCache, ExpertArena, Ledger]:
    """Have the ledger map K/V and slots, as the plan divides the memory."""
    driver, device = asked.backend.driver, asked.backend.device
    host = HostArena(0, 0, np.zeros((0, 0), np.int64)) if loaded is None else loaded.arena
    stream = driver.stream_create(device)
    undo.callback(driver.stream_destroy, stream)
    kv = KVCache(
        laid.sizes.kv, context=asked.ctx_size, sequences=SEQUENCES, driver=driver, stream=stream
    )
    copy: Copy | None = None
    if not asked.options.pin:
        staged = StagedCopies(driver, device)
        undo.callback(staged.close)
        copy = staged.copy
    arena = ExpertArena(
        laid.sizes.slots,
        host,
        max_slots=laid.plan.most_slots,
        driver=driver,
        stream=stream,
        announce=asked.announce,
        copy=copy,
    )
    ledger = Ledger(driver, device, laid.plan, kv, arena, say=asked.say, record=asked.announce)
    if asked.announce is not None:
        ledger.announce = asked.announce
    undo.callback(ledger.close)
    ledger.open()
    return kv, arena, ledger


def _allocate_buffers(
    asked: Asked, laid: Laid, undo: ExitStack
) -> tuple[Buffers, tuple[int, int] | None]:
    """Return the buffers of programs, and address and size of a ring; None: it is borrowed."""
    driver, device = asked.backend.driver, asked.backend.device

    def block(size: int) -> int:
        address = driver.allocate(size, device)
        undo.callback(driver.free, address)
        asked.tell_block(device, "buffers", address, size)
        return address

    buffers = Buffers(block(laid.emitted.buffer_bytes))
    if laid.ring_bytes:
        return buffers, (block(laid.ring_bytes), laid.ring_bytes)
    return buffers, None if asked.options.prefill_borrow else (0, 0)


def _emit_placed(
    asked: Asked,
    laid: Laid,
    given: Given,
    weights: loading.DenseWeights,
    kv: KVCache,
    arena: ExpertArena,
    buffers: Buffers,
) -> tuple[Emitted, SharedCounts, BatchTables | None]:
    """Emit the programs, and share and write the tables that they read."""
    backend, experts = asked.backend, laid.sizes.experts
    use, tally = SharedTable(arena.use), SharedTable(arena.tally)
    use_at, tally_at = (backend.share(table, is_written=True) for table in (use, tally))
    tables = TablePlaces(backend.share(kv.blocks))
    if experts is not None:
        addresses, tiers = backend.share(arena.addresses), backend.share(arena.tiers)
        tables = TablePlaces(tables.blocks, addresses, tiers, use_at, tally_at)
        if laid.emitted.batch is not None:  # which reads as if no expert had a slot
            reads, missed = (SharedTable(arena.homes.copy()) for _ in range(2))
            batch = BatchTables(reads, missed, backend.share(reads), backend.share(missed))
            tables = tables._replace(batch=batch)
    emitted = emit(
        asked.model,
        laid.sizes,
        backend,
        weights.tensors,
        buffers,
        tables,
        given.forced,
        asked.max_rows,
    )
    size, expected = emitted.buffer_bytes, laid.emitted.buffer_bytes
    if size != expected:
        raise AssertionError(f"buffers of {size:,} bytes in {expected:,}")
    _write_rope_table(asked, emitted.rope)
    if given.forced is not None:
        backend.send(emitted.forced, given.forced)
    return emitted, SharedCounts(use, tally, use_at, tally_at), tables.batch


def _write_rope_table(asked: Asked, address: int) -> None:
    """Write cosines and sines of all positions: float32 (ctx_size, 2, planes)."""
    file, model, factors = asked.file, asked.model, None
    if ROPE_FACTORS in file.tensors:
        factors = dequantise(file.tensors[ROPE_FACTORS].type, file.raw(ROPE_FACTORS))
    frequencies = rope_frequencies(model.rope_dims, model.rope_base, model.rope_scale, factors)
    row_bytes = model.rope_dims * 4
    for start in range(0, asked.ctx_size, 4096):
        positions = np.arange(start, min(start + 4096, asked.ctx_size))
        table = np.stack(rope_table(positions, frequencies), axis=1)
        asked.backend.send(address + start * row_bytes, np.ascontiguousarray(table, np.float32))


# -- who decides, and the experts ------------------------------------------------------------------


def _open_policies(
    asked: Asked, laid: Laid, given: Given, ledger: Ledger, arena: ExpertArena
) -> tuple[ElasticKV | None, Residency]:
    """Return who has the K/V grow, if it does, and who decides which experts have slots."""
    elastic: ElasticKV | None = None
    if laid.rules is not None:
        elastic = ElasticKV(ledger, laid.rules, say=asked.say)
        elastic.reconsider()
        elastic.when_idle()
    ranks = np.full(arena.use.shape, -1, np.int32)
    if given.prior is not None:
        ranks = given.prior.ranks()
    residency = Residency(
        arena,
        ranks,
        policy_maker(asked.options),
        say=asked.say,
        device_fills=asked.backend.fills and asked.options.pin,
    )
    ledger.heat = residency.heat
    return elastic, residency


def _fill(
    asked: Asked, given: Given, arena: ExpertArena, loaded: loading.HostExperts | None
) -> None:
    """Wait for the experts, and copy those that the profile ranks to slots as they come.

    Where every expert has a slot, those that it does not rank follow.
    """
    order = given.prior.order() if given.prior is not None else []
    for rank, pair in enumerate(order, start=1):
        arena.prior[pair] = 1 - rank / (len(order) + 1)
    if loaded is None:
        return
    if arena.usable_slots >= arena.expert_tier.size:
        order += np.ndindex(*arena.expert_tier.shape)
    filling = arena.begin_fill(order)

    def ready(address: int, size: int) -> None:
        asked.tell_block(None, "host", address, size)
        filling.copy(address, size)

    loaded.finish(ready)
    filling.finish()


def _start_pool(
    asked: Asked, laid: Laid, pool_at: PoolPlaces | None, arena: ExpertArena, undo: ExitStack
) -> DevicePool | None:
    """Start the threads to which programs leave experts; all are loaded."""
    experts, model = laid.sizes.experts, asked.model
    if pool_at is None or experts is None:
        return None
    layers = pool_layers(experts.parts, model.width, model.expert_width, arena.homes)
    started: list[DevicePool] = []

    def close() -> None:
        for pool in started:
            pool.close()

    undo.callback(close)  # before it starts: an interrupt right behind that still ends it
    started.append(
        open_device_pool(asked.backend, pool_at, layers, asked.options, model.top_k, asked.say)
    )
    return started[0]
