"""A model on a device: where model, weights, K/V, experts and backend meet.

Opening lays everything out before anything is read, so that what does not fit is refused first:

    dense weights and buffers   plain memory of the device, for as long as the model is open
    experts                     one arena in host memory; slots of the device hold copies of some
    K/V                         blocks that the ledger maps
    programs                    emitted once over those addresses, and prepared by the backend

What changes between steps are tables that the programs read. Steps are `device_steps`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb import device_needs, device_room, loading, models
from strata_nb.backend import Backend
from strata_nb.cache.accounts import Change
from strata_nb.cache.capacity import Ledger
from strata_nb.cache.elastic import ElasticKV
from strata_nb.cache.experts import ExpertArena, HostArena
from strata_nb.cache.kv import KVCache
from strata_nb.cache.kv_layout import BLOCK_CELLS, HeadPlane, KVLayout, blocks_for
from strata_nb.cache.look import Look
from strata_nb.cache.plan import Memory, Needs, plan_device
from strata_nb.cache.policy import Insertion, Maker, static, swaps
from strata_nb.cache.profile import Profile, load_profile, rank_by_use, save_profile
from strata_nb.cache.residency import Residency
from strata_nb.cache.routing import RoutingTrace, forced_routes
from strata_nb.cache.slots import SlotLayout
from strata_nb.device_filling import DeviceFilling, FillingPlaces
from strata_nb.device_pool import (
    NO_POOL_YET,
    DevicePool,
    Served,
    compile_pool,
    open_device_pool,
    pool_layers,
    pool_places,
    why_no_pool,
)
from strata_nb.device_steps import DeviceSteps, SharedCounts
from strata_nb.device_streaming import BatchTables, ExpertStreaming
from strata_nb.errors import ConfigError, DeviceLost
from strata_nb.fill_plans import plan_type
from strata_nb.formats import dequantise
from strata_nb.gguf import GGUFFile
from strata_nb.interrupts import interrupts_later
from strata_nb.kernels.reference import Floats, rope_frequencies, rope_table
from strata_nb.link_rate import link_rate
from strata_nb.loading_pieces import LoadProgress
from strata_nb.models.description import Description
from strata_nb.models.places import Buffers, ExpertPlaces, KVPlaces, Places, Programs
from strata_nb.models.tensors import EXPERT_PARTS, is_expert
from strata_nb.options import Options
from strata_nb.plain_read import PlainRead
from strata_nb.progress import Progress
from strata_nb.sampling import Choice
from strata_nb.shared_tables import SharedTable
from strata_nb.steps import WINDOW_ROWS, DeviceReport, ModelReport, Row, closed_error
from strata_nb.tracing import Announce

if TYPE_CHECKING:
    from strata_nb.card_profile import WindowProfile
    from strata_nb.kernels.gpu.pooled import PoolPlaces

SEQUENCES = 16  # rows of the block table
HEAD_ROWS = 32  # whose logits are computed at a time: 20 MB for a vocabulary of 150,000
ROPE_FACTORS = "rope_freqs.weight"  # read here, and by no kernel


class _Sizes(NamedTuple):
    """What is known before anything is loaded."""

    dense: list[str]  # names of tensors
    stacks: list[dict[str, str]]  # of each layer, by part: names of tensors
    experts: loading.ExpertLayout | None
    slots: SlotLayout
    kv: KVLayout
    table_width: int  # K/V blocks of a sequence
    rope_bytes: int


class Reserved(NamedTuple):
    """Answer a request to leave memory free: the change, the reserve, and what there is then."""

    change: Change
    reserve_bytes: int
    device: DeviceReport


class DeviceModel:
    """Run steps of a model on a backend's device; `steps.StepModel` says what each method does.

    `arena`, `kv` and `ledger` may be looked at between steps. `off` says what the device does not
    do since it was opened, and why.
    """

    def __init__(
        self,
        file: GGUFFile,
        description: Description,
        options: Options,
        ctx_size: int,
        max_rows: int,
        backend: Backend[Any],
        *,
        progress: Progress | None,
        compiling: Progress | None = None,
        say: Callable[[str], None],
        announce: Announce | None = None,
    ) -> None:
        """Load the model, or leave nothing behind but the backend, which stays the caller's."""
        self.description = description
        self.max_rows = max_rows
        self.warnings: list[str] = []
        self.off: list[str] = []
        self._backend = backend
        self._forgotten: deque[int] = deque()
        self._process = os.getpid()
        self._turn = threading.RLock()  # of the thread that runs a step, or changes sequences
        self._filling_places: FillingPlaces | None = None
        self._batch_tables: BatchTables | None = None
        self._trace: RoutingTrace | None = None
        self._forced: npt.NDArray[np.int16] | None = None  # (layers, context, top_k)
        self._prior: Profile | None = None
        self._announce = announce
        self._pool: DevicePool | None = None
        sizes = _measure(file, description, options, ctx_size)
        with ExitStack() as undo:
            self._open(file, options, ctx_size, sizes, progress, compiling, say, undo)
            self._resources: ExitStack | None = undo.pop_all()

    def _open(
        self,
        file: GGUFFile,
        options: Options,
        ctx_size: int,
        sizes: _Sizes,
        progress: Progress | None,
        compiling: Progress | None,
        say: Callable[[str], None],
        undo: ExitStack,
    ) -> None:
        backend, driver, device = self._backend, self._backend.driver, self._backend.device
        model = self.description
        self._read_files(options, model, ctx_size)
        wanted_slots = device_needs.slots_wanted(options, sizes.slots, backend)
        rules = device_needs.growth_rules(options, ctx_size, backend)
        unplaced, weight_bytes = loading.dense_layout(file, sizes.dense)
        measured, batch, buffer_bytes = self._emit(sizes, unplaced, Buffers(), placed=False)
        needs = Needs(
            dense_bytes=device_needs.plain_bytes(weight_bytes, buffer_bytes),
            reserve_bytes=device_needs.reserve_bytes(options, backend),
            kv=sizes.kv,
            kv_cells=ctx_size if rules is None else rules.init_cells,
            kv_most_cells=ctx_size,
            slots=sizes.slots if wanted_slots != 0 else None,
            slots_wanted=wanted_slots,
            outside_bytes=backend.outside_bytes,
            limit_bytes=device_needs.limit_bytes(options, backend),
        )
        expert_bytes = sizes.experts.size_bytes if sizes.experts else 0
        self.warnings += loading.check_memory(device_needs.host_bytes(expert_bytes, needs, backend))
        plan, ring_bytes = plan_device(driver, device, needs), 0
        if batch is not None and sizes.experts is not None:
            needs, ring_bytes = device_needs.with_ring(
                needs, plan, sizes.slots, borrows=options.prefill_borrow
            )
            plan = plan_device(driver, device, needs)
        self.warnings += device_needs.reach_warnings(plan)
        misses = backend.pools and plan.start_slots < model.layers * model.experts
        pool: PoolPlaces | None = None
        if misses and sizes.experts is not None:
            reason = why_no_pool(options, sizes.experts.parts)
            if reason is None:
                pool = pool_places(backend, model, sizes.experts.parts)
            else:
                self.off.append(f"experts computed by the CPU ({reason})")
        backend.compile([measured.body, measured.head, measured.choice], compiling, say)
        if pool is not None and sizes.experts is not None:
            compile_pool(sizes.experts.parts, say)
        if batch is not None:
            backend.compile([batch.body], compiling, say, batch_rows=batch.max_rows)

        keep = loading.cache_fits(file, file.size_bytes)
        total = sum(info.size_bytes for info in file.tensors.values())
        load = LoadProgress(total, progress)
        weights = loading.load_dense(
            file,
            sizes.dense,
            driver,
            device,
            threads=backend.threads,
            keep_cached=keep,
            progress=load,
        )
        undo.callback(weights.close)
        self._tell(
            "block", device=device, owner="weights", address=weights.address, size=weight_bytes
        )
        host = HostArena(0, 0, np.zeros((0, 0), np.int64))
        loaded: loading.HostExperts | None = None
        if sizes.experts is not None:
            loaded = loading.begin_experts(  # read while the rest is laid out
                file,
                sizes.stacks,
                sizes.experts,
                driver,
                threads=backend.threads,
                keep_cached=keep,
                progress=load,
            )
            undo.callback(loaded.close)
            host = loaded.arena

        stream = driver.stream_create(device)
        undo.callback(driver.stream_destroy, stream)
        self.kv = KVCache(
            sizes.kv, context=ctx_size, sequences=SEQUENCES, driver=driver, stream=stream
        )
        self.arena = ExpertArena(
            sizes.slots,
            host,
            max_slots=plan.most_slots,
            driver=driver,
            stream=stream,
            announce=self._announce,
        )
        self.ledger = Ledger(
            driver, device, plan, self.kv, self.arena, say=say, record=self._announce
        )
        if self._announce is not None:
            self.ledger.announce = self._announce
        undo.callback(self.ledger.close)
        self.ledger.open()

        base = driver.allocate(buffer_bytes, device)
        undo.callback(driver.free, base)
        self._tell("block", device=device, owner="buffers", address=base, size=buffer_bytes)
        use, tally = SharedTable(self.arena.use), SharedTable(self.arena.tally)
        places = (backend.share(table, is_written=True) for table in (use, tally))
        self._counts = SharedCounts(use, tally, *places)
        ring = None if options.prefill_borrow else (0, 0)
        if ring_bytes:
            ring = driver.allocate(ring_bytes, device), ring_bytes
            undo.callback(driver.free, ring[0])
            self._tell("block", device=device, owner="buffers", address=ring[0], size=ring_bytes)
        emitted, batch, placed_bytes = self._emit(
            sizes, weights.tensors, Buffers(base), placed=True
        )
        if placed_bytes != buffer_bytes:
            raise AssertionError(f"buffers of {placed_bytes:,} bytes in {buffer_bytes:,}")
        self._programs = emitted
        front = Buffers(base)
        _write_rope_table(file, model, backend, front.take(sizes.rope_bytes), ctx_size)
        if self._forced is not None:
            backend.send(front.take(self._forced.nbytes), self._forced)
        self._elastic = ElasticKV(self.ledger, rules, say=say) if rules is not None else None
        if self._elastic is not None:
            self._elastic.reconsider()
            self._elastic.when_idle()
        ranks = np.full(host.offsets.shape, -1, np.int32)
        if self._prior is not None:
            ranks = self._prior.ranks()
        self._residency = Residency(
            self.arena, ranks, policy_maker(options), say=say, device_fills=backend.fills
        )
        self.ledger.heat = self._residency.heat
        streaming: ExpertStreaming | None = None
        if self._batch_tables is not None:
            streaming = ExpertStreaming(
                backend,
                self.ledger,
                self.arena,
                self._batch_tables,
                ring,
                top_k=model.top_k,
                say=say,
            )
            undo.callback(streaming.close)
        self._steps = DeviceSteps(
            backend,
            emitted,
            batch,
            self._counts,
            self.kv,
            self.arena,
            self._elastic,
            self._residency,
            DeviceFilling(backend, self.arena, self._residency, self._filling_places),
            streaming,
            self._trace,
            None if self._announce is None else self._tell_step,
            pool_state=pool.state if pool is not None else 0,
            vocabulary=model.vocab_size,
            top_k=model.top_k,
        )
        self._fill(loaded)
        if pool is not None and sizes.experts is not None:
            sizes_of = (model.width, model.expert_width)
            layers = pool_layers(sizes.experts.parts, *sizes_of, self.arena.homes)
            self._pool = open_device_pool(backend, pool, layers, options, model.top_k, say)
            undo.callback(self._pool.close)
            self._steps.use_pool(self._pool)
        elif backend.pools and sizes.experts and not why_no_pool(options, sizes.experts.parts):
            self._steps.lack_pool(lambda: say(NO_POOL_YET))
        if backend.has_slots:
            self.warnings += device_room.keep_free(self.ledger, say)
            experts = model.layers * model.experts
            self.off += device_needs.switched_off(options, plan, self.arena.usable_slots, experts)

    def _fill(self, loaded: loading.HostExperts | None) -> None:
        """Wait for the experts, and copy those that the profile ranks to slots as they come.

        Where every expert has a slot, those that it does not rank follow.
        """
        order = self._prior.order() if self._prior is not None else []
        for rank, pair in enumerate(order, start=1):
            self.arena.prior[pair] = 1 - rank / (len(order) + 1)
        if loaded is None:
            return
        if self.arena.usable_slots >= self.arena.expert_tier.size:
            order += np.ndindex(*self.arena.expert_tier.shape)
        filling = self.arena.begin_fill(order)

        def ready(address: int, size: int) -> None:
            self._tell("block", device=None, owner="host", address=address, size=size)
            filling.copy(address, size)

        loaded.finish(ready)
        filling.finish()

    def _emit(
        self,
        sizes: _Sizes,
        tensors: Mapping[str, loading.PackedTensor],
        buffers: Buffers,
        *,
        placed: bool,
    ) -> tuple[Programs, Programs | None, int]:
        """Return the programs over these places, and the bytes of their buffers.

        Those of prompt batches are None where all steps have the same.

        The first buffers are the rope table, and routes that are forced. `placed`: whether there
        are K/V and experts to name.
        """
        model = self.description
        rope = buffers.take(sizes.rope_bytes)
        forced, layer_bytes = 0, 0
        if self._forced is not None:
            forced, layer_bytes = buffers.take(self._forced.nbytes), self._forced[0].nbytes
        share = self._backend.share
        kv = KVPlaces(
            table=share(self.kv.blocks) if placed else 0,
            table_width=sizes.table_width,
            key_type=sizes.kv.key.cache_type,
            value_type=sizes.kv.value.cache_type,
            key_offsets=[sizes.kv.part_offset(layer, "k") for layer in range(model.layers)],
            value_offsets=[sizes.kv.part_offset(layer, "v") for layer in range(model.layers)],
        )
        experts: list[ExpertPlaces] = []
        if sizes.experts is not None:
            count = model.experts
            addresses = tiers = use = tally = 0
            plan_bytes = plan_type(count).itemsize
            filling = FillingPlaces(0, 0, 0, 0)
            if self._backend.fills:
                homes, seen = (buffers.take(8 * count * model.layers) for _ in range(2))
                filling = FillingPlaces(0, homes, seen, buffers.take(plan_bytes * model.layers))
            if placed:
                addresses, tiers = share(self.arena.addresses), share(self.arena.tiers)
                use, tally = self._counts.use_address, self._counts.tally_address
                if self._backend.fills:
                    self._filling_places = filling._replace(addresses=addresses)
            experts = [
                ExpertPlaces(
                    addresses + 8 * count * layer,
                    tiers + count * layer,
                    use + 8 * count * layer,
                    tally,
                    forced + layer_bytes * layer,
                    sizes.experts.parts[layer],
                    *filling.of_layer(layer, count),
                )
                for layer in range(model.layers)
            ]
        backend, places = self._backend, Places(tensors, experts, kv, rope)

        def emit(max_rows: int, head_rows: int, places: Places = places) -> Programs:
            return models.emit_programs(
                model,
                places,
                buffers,
                max_rows=max_rows,
                head_rows=min(head_rows, max_rows),
                packed_row_bytes=backend.packed_row_bytes,
                chooses_tokens=backend.chooses_tokens,
                attends_in_runs=backend.attends_in_runs,
                gathers_rows=backend.gathers_rows,
            )

        if not backend.batches_apart:
            return emit(self.max_rows, HEAD_ROWS), None, buffers.size_bytes
        programs = emit(min(self.max_rows, WINDOW_ROWS), WINDOW_ROWS)
        batch = None
        if self.max_rows > WINDOW_ROWS:
            if placed and experts:
                self._batch_tables = self._share_batch_tables()
                _, _, reads, missed = self._batch_tables
                experts = [
                    one._replace(
                        addresses=reads + 8 * model.experts * layer,
                        homes=one.homes and missed + 8 * model.experts * layer,
                    )
                    for layer, one in enumerate(experts)
                ]
            batch = emit(self.max_rows, WINDOW_ROWS, places._replace(experts=experts))
        return programs, batch, buffers.size_bytes

    def _share_batch_tables(self) -> BatchTables:
        """Make the tables of experts that batches read, as if none had a slot."""
        reads, missed = (SharedTable(self.arena.homes.copy()) for _ in range(2))
        return BatchTables(reads, missed, self._backend.share(reads), self._backend.share(missed))

    def _read_files(self, options: Options, model: Description, ctx_size: int) -> None:
        """Read the profile and the routes that are given, and begin the trace that is asked for."""
        profile = options.profile_path()
        asked = [
            (profile, "--expert-profile"),
            (options.expert_profile_save, "--expert-profile-save"),
            (options.routing_trace, "--routing-trace"),
            (options.force_routes, "--force-routes"),
        ]
        for value, flag in asked:
            if value is not None and not model.experts:
                raise ConfigError(f"{flag} {value}: this model has no experts", hint="leave it out")
        if profile is not None:
            try:
                self._prior = load_profile(profile, model.layers, model.experts)
            except OSError as error:
                raise ConfigError(
                    f"--expert-profile {profile}: {error.strerror}",
                    hint="check the name and the permissions",
                ) from error
        if options.routing_trace is not None:
            self._trace = RoutingTrace(model.layers, model.experts, model.top_k)
        if options.force_routes is not None:
            sizes = model.layers, model.experts, model.top_k
            self._forced = forced_routes(options.force_routes, *sizes, ctx_size)

    # Steps.

    @property
    def goes_ahead(self) -> bool:
        return self._steps.windows is not None

    def open_sequence(self) -> int:
        with self._turn:
            self._settle()
            sequence = self.kv.open_sequence()
            self._tell("sequence", sequence=sequence, state="open")
            return sequence

    def forget_sequence(self, sequence: int) -> None:
        self._forgotten.append(sequence)

    def length(self, sequence: int) -> int:
        with self._turn:
            self._opened()
            return self.kv.length(sequence)

    def rewind(self, sequence: int, length: int) -> None:
        with self._turn:
            self._opened()
            if length != self.kv.length(sequence):
                self._settle()
                self.kv.rewind(sequence, length)

    def make_room(self, sequence: int, cells: int, *, prompt: bool) -> None:
        with self._turn:
            self._opened()
            if self._elastic is None:
                return
            if not prompt and self.kv.has_room(sequence, cells):
                return
            self._settle()
            self._steps.return_loan()
            if prompt:
                self._elastic.before_prompt({sequence: cells})
            else:
                self._elastic.before_step({sequence: cells})

    def step(self, rows: Sequence[Row]) -> Floats:
        with self._turn:
            self._settle()
            return self._steps.step(rows)

    def choose(
        self, rows: Sequence[Row], how: Sequence[Choice], ahead: Sequence[Choice] = ()
    ) -> list[int]:
        with self._turn:
            self._opened()
            if self._forgotten:
                self._settle()
            return self._steps.choose(rows, how, ahead)

    def _tell_step(self, rows: int) -> None:
        """Announce a step, with the figures that it leaves behind."""
        hits, misses = self.arena.tally.tolist()
        kv, arena = self.kv, self.arena
        self._tell(
            "step",
            device=self._backend.device,
            rows=rows,
            kv_cells=kv.usable_blocks * BLOCK_CELLS,
            free_cells=kv.free_cells,
            slots=arena.usable_slots,
            resident=arena.resident,
            hits=hits,
            misses=misses,
            filled=arena.filled,
            streamed=self._steps.streamed[0],
            by_cpu=self._served().experts,
        )

    def _tell(self, kind: str, **fields: object) -> None:
        if self._announce is not None:
            self._announce({"kind": kind, **fields})

    def chosen(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the experts that the rows of the step begun last used: (rows, layers, top_k)."""
        self._opened()
        return self._steps.chosen(rows)

    # Measuring.

    def step_bytes(self, cells: int) -> int:
        """Return the bytes that a step of one row reads: weights, and K/V of so many cells."""
        kv_bytes = cells * self.kv.layout.block_bytes // BLOCK_CELLS
        return self.description.row_weight_bytes + kv_bytes

    def plain_read(self) -> PlainRead:
        """Measure how fast the device's memory can be read; StrataError where that cannot be."""
        with self._turn:
            self._settle()
            return self._backend.plain_read()

    def link_rate(self) -> PlainRead:
        """Measure how fast pinned memory is copied to the device; StrataError where it cannot."""
        with self._turn:
            self._settle()
            return link_rate(self._backend.driver, self._backend.device)

    def profile(self, cells: int) -> WindowProfile:
        """Measure where the time of the last step goes, whose one row sees so many cells.

        It must have given logits. UnsupportedDevice where programs are no graphs.
        """
        with self._turn:
            self._settle()
            self._steps.silence()
            programs = [self._programs.body, self._programs.head, self._programs.choice]
            kv_layer_bytes = cells * self.kv.layout.layer_bytes // BLOCK_CELLS
            return self._backend.profile(programs, 1, kv_layer_bytes)

    # The rest.

    def report(self) -> ModelReport:
        with self._turn:
            self._pause()
            if self._elastic is not None:
                self._elastic.flush()  # what is said and what is reported shall agree
            return self._report()

    def _report(self) -> ModelReport:
        ledger = self.ledger.describe()
        owners = ledger.bytes_by_owner
        memory: Memory | None = None
        if self._backend.has_slots:
            memory = self.ledger.memory()
            owners["outside"] = self.ledger.outside_bytes(memory)
        device = DeviceReport(
            self._backend.name,
            memory and memory.free_bytes,
            memory and memory.total_bytes,
            memory and memory.device_bytes,
            self.ledger.reserve_bytes,
            ledger.slots,
            ledger.resident,
            ledger.kv_cells,
            owners,
        )
        hits, misses = self.arena.tally.tolist()
        moved = self._residency
        missed_bytes = moved.missed_bytes if self._backend.has_slots else 0
        served = self._served()
        return ModelReport(
            (device,),
            hits,
            misses,
            moved.inserted,
            moved.inserted_bytes,
            missed_bytes,
            max(0, missed_bytes - served.bytes) + moved.copied_bytes,
            self.arena.filled,
            *self._steps.streamed,
            served.experts,
            served.bytes,
            served.waited_s,
        )

    def _served(self) -> Served:
        """Return what the CPU has computed of what was missed."""
        return self._pool.served() if self._pool is not None else Served(0, 0, 0.0)

    def look(self) -> Look:
        """Look at the device's chunks as they are now."""
        with self._turn:
            self._pause()
            return replace(self.ledger.look(), by_cpu=self._served().experts)

    def set_reserve(self, reserve_bytes: int | None) -> Reserved:
        """Leave so much of the device free for others; None: as much as at the start.

        The answer is of the moment when that was done, whatever others ask for at the same time.
        """
        with self._turn:
            self._settle()
            self._steps.return_loan()
            if reserve_bytes is None:
                reserve_bytes = self.ledger.plan.needs.reserve_bytes
            if self._elastic is not None:
                self._elastic.flush()
            try:
                change = self.ledger.set_reserve(reserve_bytes)
            finally:
                if self._elastic is not None:
                    self._elastic.reconsider()
            (device,) = self._report().devices
            return Reserved(change, self.ledger.reserve_bytes, device)

    def empty_slots(self) -> None:
        """Let every expert leave its slot, and forget the profile and what was used so far."""
        with self._turn:
            self._settle()
            self._steps.return_loan()
            with interrupts_later():
                self._residency.forget()
                self._counts.use[:] = 0
                self.arena.prior[:] = 0

    def save_profile(self, path: str | os.PathLike[str]) -> None:
        """Write how often experts were used, added to the order of the profile given."""
        with self._turn:
            self._settle()
            save_profile(path, rank_by_use(self.arena.use, self._prior))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the routes of all steps so far."""
        if self._trace is None:
            raise ConfigError(
                "no routing trace was kept", hint="open the engine with Options(routing_trace=...)"
            )
        self._trace.save(path)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a fork owns none of it
        with self._turn:
            resources, self._resources = self._resources, None
            if resources is not None:
                if self._elastic is not None:
                    self._elastic.flush()
                self._steps.end()
                with suppress(DeviceLost):  # nothing of it is left, and who lost it was told
                    resources.close()

    def _opened(self) -> None:
        if self._resources is None:
            raise closed_error()

    def _pause(self) -> None:
        """Settle for somebody who looks, and may look again behind the next token."""
        self._settle()
        self._steps.pause()

    def _settle(self) -> None:
        """Let no step be in flight, and end the sequences whose sessions are gone."""
        self._opened()
        self._steps.settle()
        while self._forgotten:
            if self.kv.is_open(self._forgotten[0]):
                self.kv.close_sequence(self._forgotten[0])
                self._tell("sequence", sequence=self._forgotten[0], state="closed")
            self._forgotten.popleft()


def _measure(file: GGUFFile, model: Description, options: Options, ctx_size: int) -> _Sizes:
    """Lay out what the model needs; nothing is read but the table of tensors."""
    dense = [name for name in file.tensors if not is_expert(name) and name != ROPE_FACTORS]
    stacks = [
        {part: f"blk.{layer}.{part}.weight" for part in EXPERT_PARTS}
        for layer in range(model.layers if model.experts else 0)
    ]
    experts = loading.expert_layout(file, stacks) if stacks else None
    slots = SlotLayout(experts.blob_bytes if experts is not None else (), model.experts)
    kv = KVLayout(
        model.layers,
        model.kv_heads,
        HeadPlane(options.cache_type_k or "f16", model.key_length),
        HeadPlane(options.cache_type_v or "f16", model.value_length),
    )
    rope_bytes = ctx_size * model.rope_dims * 4
    return _Sizes(dense, stacks, experts, slots, kv, blocks_for(ctx_size), rope_bytes)


def policy_maker(options: Options) -> Maker:
    """Return what makes the policy that is asked for."""
    if options.adapt == "swap":
        return swaps(options.adapt_every, options.adapt_swaps, options.adapt_decay)
    return Insertion if options.adapt == "insert" else static


def _write_rope_table(
    file: GGUFFile, model: Description, backend: Backend[Any], address: int, ctx_size: int
) -> None:
    """Write cosines and sines of all positions: float32 (ctx_size, 2, planes)."""
    factors = None
    if ROPE_FACTORS in file.tensors:
        factors = dequantise(file.tensors[ROPE_FACTORS].type, file.raw(ROPE_FACTORS))
    frequencies = rope_frequencies(model.rope_dims, model.rope_base, model.rope_scale, factors)
    row_bytes = model.rope_dims * 4
    for start in range(0, ctx_size, 4096):
        positions = np.arange(start, min(start + 4096, ctx_size))
        table = np.stack(rope_table(positions, frequencies), axis=1)
        backend.send(address + start * row_bytes, np.ascontiguousarray(table, np.float32))
