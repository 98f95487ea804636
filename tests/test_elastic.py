"""A K/V that grows: when, by how much, what is said, and that no token depends on it."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_world import World
from device_world import SHAPE, opened, random_tokens, read, same_bits

from strata_nb import Engine, Options, Sampling
from strata_nb.cache.elastic import ElasticKV, GrowthRules
from strata_nb.cache.experts import Tier
from strata_nb.device_model import DeviceModel
from strata_nb.errors import ConfigError, DeviceLost, DriverError, OutOfDeviceMemory
from strata_nb.kernels.reference import Floats

GREEDY = Sampling(temperature=0)
CONTEXT = 1024


# Rules, on a ledger alone.


class Grown:
    """A ledger whose K/V begins with two blocks of at most eight."""

    def __init__(
        self,
        *,
        chunks: int = 34,
        step: int = 64,
        blobs: tuple[int, ...] = (5000, 9000, 5000),
    ) -> None:
        self.world = World(chunks=chunks, kv_cells=128, kv_most_cells=512, blobs=blobs)
        self.ledger = self.world.open()
        self.said: list[str] = []
        rules = GrowthRules(init_cells=128, step_cells=step)
        self.elastic = ElasticKV(self.ledger, rules, say=self.said.append)
        self.ledger.experts.use[...] = 1
        self.ledger.experts.fill((layer, n) for n in range(4) for layer in range(len(blobs)))
        self.sequence = self.ledger.kv.open_sequence()

    @property
    def blocks(self) -> int:
        return self.ledger.kv.usable_blocks

    def write(self, cells: int) -> None:
        """Do a step of so many cells."""
        self.elastic.before_step({self.sequence: cells})
        self.ledger.kv.extend(self.sequence, cells)
        self.ledger.kv.advance(self.sequence, cells)
        self.elastic.when_idle()
        self.world.check()


@pytest.fixture
def grown() -> Iterator[Grown]:
    made = Grown()
    yield made
    made.world.check()
    made.world.end()


@pytest.mark.parametrize(
    ("context", "init", "step"), [(256, 256, 64), (8192, 2048, 1024), (262_144, 16_384, 8_192)]
)
def test_what_is_not_given_follows_from_the_context(context: int, init: int, step: int) -> None:
    assert GrowthRules.of(context, None, None) == GrowthRules(init, step)
    assert GrowthRules.of(context, 100, 1) == GrowthRules(100, 1)
    assert GrowthRules.of(context, 2**30, 5).init_cells == context


def test_it_grows_one_block_ahead_of_a_window(grown: Grown) -> None:
    grown.write(64)
    assert grown.blocks == 2
    grown.write(1)
    assert grown.blocks == 3
    for _ in range(63):
        grown.write(1)
        assert grown.blocks == 3
    grown.write(1)
    assert grown.blocks == 4


def test_a_prompt_is_given_its_room_and_the_answers_beginning_at_once() -> None:
    grown = Grown(blobs=())
    with pytest.raises(OutOfDeviceMemory):
        grown.elastic.before_prompt({grown.sequence: 400})
    assert grown.blocks == 2
    grown.elastic.before_prompt({grown.sequence: 130})
    assert grown.blocks == 5  # 3 and 4 ahead, as far as there is memory
    grown.world.end()


def test_growth_ahead_that_finds_nothing_is_no_error_until_it_is_needed(grown: Grown) -> None:
    grown.write(64)
    while True:
        before = grown.blocks
        grown.write(64)
        if grown.blocks == before:
            break
    full = grown.blocks * 64 - grown.ledger.kv.length(grown.sequence)
    calls = grown.world.driver.faults.calls
    if full:
        grown.write(full)
    asked = calls["mem_info"]
    held = grown.ledger.holdings()
    with pytest.raises(OutOfDeviceMemory, match="no memory to grow, cells") as refused:
        grown.elastic.before_step({grown.sequence: 1})
    assert calls["mem_info"] == asked + 1
    assert refused.value.numbers["cells"] == (grown.blocks + 1) * 64
    assert refused.value.numbers["there are"] == grown.blocks * 64
    assert "--ctk int8" in refused.value.hint
    assert grown.ledger.holdings() == held
    assert held.experts == grown.ledger.plan.floor_chunks


def test_a_refusal_has_its_numbers_whoever_refused() -> None:
    grown = Grown(blobs=())
    grown.world.driver.faults.plan("create", forever=True)
    grown.write(64)
    with pytest.raises(OutOfDeviceMemory, match="no memory to grow, cells 192, there are 128"):
        grown.elastic.before_step({grown.sequence: 65})
    grown.world.end()


def test_a_failed_growth_ahead_is_not_tried_at_every_token(grown: Grown) -> None:
    grown.write(64)
    grown.world.driver.faults.plan("map", forever=True)
    grown.write(1)
    resident, calls = grown.ledger.experts.resident, grown.world.driver.faults.calls["map"]
    for _ in range(62):
        grown.write(1)
    assert grown.world.driver.faults.calls["map"] == calls
    assert grown.ledger.experts.resident == resident
    grown.world.driver.faults.lift()
    grown.write(1)
    grown.world.driver.faults.plan("map")
    with pytest.raises(DriverError):
        grown.elastic.before_step({grown.sequence: 64})
    grown.write(64)
    assert grown.blocks >= 3


def test_what_fails_ahead_of_its_need_is_one_line_until_it_goes_well(grown: Grown) -> None:
    faults = grown.world.driver.faults
    grown.write(64)
    faults.plan("map", forever=True)
    for _ in range(3):
        grown.elastic.reconsider()
        grown.elastic.before_step({grown.sequence: 1})
    faults.lift()
    (line,) = grown.said
    assert line.startswith("the K/V could not grow ahead: map")
    faults.plan("mem_info", forever=True)
    for _ in range(3):
        grown.elastic.reconsider()
        grown.elastic.when_idle()
    faults.lift()
    assert grown.said[1].startswith("chunks for the K/V could not be prepared: mem_info")
    assert len(grown.said) == 2
    grown.elastic.reconsider()
    grown.write(1)
    faults.plan("mem_info", forever=True)
    grown.elastic.reconsider()
    grown.elastic.when_idle()
    faults.lift()
    assert len(grown.said) == 3


def test_a_growth_that_ctrl_c_came_into_is_said(grown: Grown) -> None:
    grown.write(64)
    synchronize = grown.world.driver.synchronize

    def interrupted(device: int) -> None:
        signal.raise_signal(signal.SIGINT)
        synchronize(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grown.world.driver, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grown.elastic.before_step({grown.sequence: 1})
    assert grown.blocks == 3
    grown.elastic.flush()
    (line,) = grown.said
    assert line.startswith("K/V grown to 192 cells")


def test_it_is_cut_before_a_prompt_when_two_steps_are_idle(grown: Grown) -> None:
    for _ in range(3):
        grown.write(64)
    assert grown.blocks == 4
    slots = grown.ledger.experts.usable_slots
    grown.ledger.kv.rewind(grown.sequence, 0)
    grown.elastic._most_blocks = 4
    grown.elastic.before_prompt({grown.sequence: 1})
    assert grown.blocks == 4  # a cell and what is ahead would take all again
    grown.ledger.kv.close_sequence(grown.sequence)
    grown.elastic.before_prompt({})
    assert grown.blocks == 4
    ahead = "strata_nb.cache.elastic.PROMPT_AHEAD_CELLS"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, 0)
        grown.elastic.before_prompt({})
    assert grown.blocks == 2
    assert grown.ledger.experts.usable_slots > slots
    assert re.fullmatch(
        r"K/V cut to 128 cells: experts got \d+ slots, 12 of 12 slots hold experts", grown.said[-1]
    )


def test_growths_of_tiny_steps_are_said_together(grown: Grown) -> None:
    for _ in range(3):
        grown.write(64)
    assert grown.said == []
    grown.elastic.flush()
    (line,) = grown.said
    pattern = (
        r"K/V grown to 256 cells \(0\.10 MiB\) in 2 steps: experts gave (\d+) slots, \d+ hot "
        r"experts? moved, (\d+) of (\d+) slots hold experts"
    )
    match = re.fullmatch(pattern, line)
    assert match is not None, line
    arena = grown.ledger.experts
    assert [int(n) for n in match.groups()] == [
        12 - arena.usable_slots,
        arena.resident,
        arena.usable_slots,
    ]
    grown.elastic.flush()
    assert len(grown.said) == 1


def test_chunks_are_prepared_so_that_growth_creates_none() -> None:
    grown = Grown(blobs=())
    grown.elastic.reconsider()
    grown.elastic.when_idle()
    calls = grown.world.driver.faults.calls
    grown.write(64)
    created = calls["create"]
    grown.elastic.before_step({grown.sequence: 1})
    assert grown.blocks == 3
    assert calls["create"] == created
    grown.elastic.when_idle()
    assert calls["create"] > created
    grown.world.driver.faults.plan("create", forever=True)
    grown.elastic.reconsider()
    grown.elastic.when_idle()  # finds nothing, which is no error
    grown.world.end()


def test_chunks_are_prepared_for_the_next_growth_and_no_more() -> None:
    grown = Grown(blobs=(), step=128)
    ledger = grown.ledger
    grown.elastic.reconsider()
    grown.elastic.when_idle()
    prepared = ledger.holdings()
    assert prepared.spare == ledger.plan.chunks_for_blocks(4) - prepared.kv > 0
    grown.elastic.before_step({grown.sequence: 65})
    assert grown.blocks == 4
    assert ledger.holdings().spare == 0
    grown.world.end()


def test_it_grows_in_idle_moments_where_nobody_has_to_give_for_it() -> None:
    grown = Grown(chunks=90)
    slots = grown.ledger.experts.usable_slots
    grown.write(64)
    assert grown.blocks == 3  # a block is free, and nobody needs another yet
    calls = grown.world.driver.faults.calls
    calls.clear()
    for _ in range(64):
        grown.write(1)
    assert grown.blocks == 4
    assert calls["mem_info"] == 3  # to prepare, grow and prepare: nothing is asked at each token
    assert calls["unmap"] == 0
    assert grown.ledger.experts.usable_slots == slots
    grown.world.end()


def test_a_growth_in_an_idle_moment_that_fails_is_tried_again_when_it_is_needed() -> None:
    grown = Grown(chunks=90)
    grown.world.driver.faults.plan("map", forever=True)
    grown.write(64)
    (line,) = grown.said
    assert line.startswith("the K/V could not grow ahead: map")
    tried = grown.world.driver.faults.calls["map"]
    for _ in range(10):
        grown.elastic.when_idle()
    assert grown.world.driver.faults.calls["map"] == tried
    grown.world.driver.faults.lift()
    assert grown.blocks == 2
    grown.write(1)
    assert grown.blocks >= 3
    grown.world.end()


@pytest.mark.parametrize(("most_given", "blocks"), [(1 << 20, 6), (0, 3), (60_000, 4)])
def test_experts_give_little_at_a_time_while_somebody_waits_for_a_window(
    most_given: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata_nb.cache.elastic.MOST_GIVEN_BYTES", most_given)
    grown = Grown(chunks=54, step=384, blobs=(5000, 9000, *[5000] * 5))
    grown.world.driver.faults.plan("create", forever=True)
    grown.write(64)
    grown.write(1)
    assert grown.blocks == blocks
    grown.ledger.kv.close_sequence(grown.sequence)
    sequence = grown.ledger.kv.open_sequence()
    grown.elastic.before_prompt({sequence: 100})
    assert grown.blocks == 6
    grown.world.end()


def test_what_experts_are_worth_is_foreseen_for_the_next_step_only(grown: Grown) -> None:
    worth = np.arange(12.0).reshape(3, 4)
    grown.ledger.heat = lambda: -worth
    arena = grown.ledger.experts
    grown.write(64)
    grown.elastic.foresee(worth)
    grown.elastic.when_idle()
    grown.write(1)
    gone = arena.expert_tier == Tier.IN_PLACE
    assert gone[[0, 2]].ravel().tolist() == [True] * int(gone[[0, 2]].sum()) + [False] * int(
        (~gone[[0, 2]]).sum()
    )
    grown.elastic.foresee(worth)
    grown.elastic.when_idle()
    grown.elastic.when_idle()
    grown.write(64)
    assert gone.sum() < np.count_nonzero(arena.expert_tier == Tier.IN_PLACE)
    assert arena.expert_tier[2, 3] == Tier.IN_PLACE  # the coldest now


def test_a_lost_device_is_an_error_wherever_it_is_lost(grown: Grown) -> None:
    grown.write(64)
    grown.world.driver.faults.plan("mem_info", lost=True)
    with pytest.raises(DeviceLost):
        grown.write(1)
    grown.elastic.reconsider()
    with pytest.raises(DeviceLost):
        grown.elastic.when_idle()
    with pytest.raises(DeviceLost):
        grown.elastic.before_prompt({grown.sequence: 500})
    grown.world.driver.close()
    grown.world = World()


# Models.


def text(model: DeviceModel, tokens: int, *, moving: bool) -> Floats:
    """Return the logits of what two sequences write in turns, while memory moves if it is to."""
    parts = []
    first, second = model.open_sequence(), model.open_sequence()
    parts.append(read(model, first, random_tokens(60)))
    parts.append(read(model, second, random_tokens(33, 1)))
    for step in range(tokens):
        for sequence, part in ((first, -2), (second, -1)):
            parts.append(read(model, sequence, [int(parts[part][-1].argmax())]))
        if moving and step % 40 == 20:
            plan = model.ledger.plan
            some = (model.ledger.holdings().experts - plan.floor_chunks) * plan.chunk_bytes // 2
            done = model.set_reserve((64 << 10) + some if step % 80 == 20 else None)
            assert not done.change.error
            model.ledger.check_integrity()
        if step == tokens // 2:
            model.rewind(first, 40)
            model.make_room(first, 20, prompt=True)
            parts.append(read(model, first, random_tokens(8, 2)))
            parts.append(read(model, second, random_tokens(8, 3)))
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def static(small: Path) -> Floats:
    with opened(small, "host:1x64MiB", ctx=CONTEXT, kv_grow=False) as one:
        assert one.kv.usable_blocks >= CONTEXT // 64
        return text(one, 200, moving=False)


def needed_mib(model: Path, slots: int, cells: int) -> float:
    with opened(model, "host:1x64MiB", ctx=CONTEXT, expert_cache=str(slots)) as one:
        owners = one.report().devices[0].bytes_by_owner
        kv = one.ledger.plan.needs.kv.bytes_for(cells)
        return (owners["dense"] + kv + one.arena.layout.bytes_of(slots)) / (1 << 20)


@pytest.mark.parametrize("slots", [SHAPE.layers, 12, 48])
@pytest.mark.parametrize("moving", [False, True], ids=["undisturbed", "with give-back"])
def test_growth_and_give_back_change_no_bit(
    small: Path, static: Floats, slots: int, moving: bool
) -> None:
    kib = int(needed_mib(small, slots, 640) * 1024 // 16 * 16 + 64)
    device = f"host:1x{kib}KiB@16KiB"
    with opened(
        small, device, ctx=CONTEXT, kv_grow_init=64, kv_grow_step=1, vram_elastic=True
    ) as one:
        assert one.kv.usable_blocks < 4
        slots_before = one.arena.usable_slots
        assert same_bits(text(one, 200, moving=moving), static)
        assert one.kv.usable_blocks > 6
        if slots < 48:
            assert one.arena.usable_slots < slots_before or slots == SHAPE.layers


def test_an_answer_ends_with_a_refusal_when_memory_ends_and_the_engine_goes_on(
    small: Path,
) -> None:
    kib = int(needed_mib(small, SHAPE.layers, 256) * 1024 // 16 * 16 + 16)
    options = Options(
        small,
        device=f"host:1x{kib}KiB@16KiB",
        ctx_size=CONTEXT,
        kv_grow_init=64,
        kv_grow_step=64,
        prefill=64,
    )
    with Engine.open(options) as engine:
        (warning,) = [line for line in engine.warnings if "of the context's" in line]
        reach = int(warning.split()[4].replace(",", ""))
        assert 128 <= reach <= 320
        ids = random_tokens(20)
        session = engine.open_session()
        session.extend(ids)
        generation = session.generate(sampling=GREEDY, ignore_eos=True)
        written = [token.id for token in generation]
        assert generation.finish == "memory"
        assert generation.refusal is not None
        assert "no memory to grow, cells" in str(generation.refusal)
        assert session.ids == ids + written
        assert engine.describe().kv_cells == reach
        assert len(session.ids) == reach + 1  # the last one is not read any more
        with pytest.raises(OutOfDeviceMemory):
            session.extend([1])
        assert len(session.ids) == reach + 1
        session.rewind(20)
        again = session.generate(sampling=GREEDY, ignore_eos=True, max_tokens=50)
        assert [token.id for token in again] == written[:50]
        session.close()
        with pytest.raises(OutOfDeviceMemory):
            engine.generate(random_tokens(reach + 10))
        assert engine.describe().kv_cells <= reach


def test_the_whole_machine_grows_only_when_asked_to(tiny: Path) -> None:
    with opened(tiny, ctx=CONTEXT) as one:
        assert one.kv.usable_blocks >= CONTEXT // 64
    with opened(tiny, ctx=4 * CONTEXT, kv_grow=True, kv_grow_init=64) as one:
        assert one.report().devices[0].kv_cells < 4 * CONTEXT
        sequence = one.open_sequence()
        for at in range(0, 640, 64):
            read(one, sequence, random_tokens(64, at))


@pytest.mark.parametrize("flag", ["kv_grow_init", "kv_grow_step"])
def test_sizes_of_a_growth_that_is_not_there_are_refused(tiny: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match="whole size from the start") as refused:
        Engine.open(Options(tiny, **{flag: 64}))
    assert refused.value.hint == "add --kv-grow"
    with pytest.raises(ConfigError, match="whole size from the start"):
        Engine.open(Options(tiny, device="host:1x64MiB", kv_grow=False, **{flag: 64}))


def budget_of(path: Path, ctx: int, extra_mib: int) -> str:
    """Return a device that holds a dense model's weights and buffers, and so much more."""
    with opened(path, ctx=ctx) as one:
        dense_kib = one.report().devices[0].bytes_by_owner["dense"] >> 10
    return f"host:1x{dense_kib + 1 + (extra_mib << 10)}KiB"


@pytest.mark.model
@pytest.mark.parametrize(
    ("context", "tokens"), [(512, 110), pytest.param(4096, 4000, marks=pytest.mark.slow)]
)
def test_a_real_model_writes_the_same_with_a_kv_that_grows(
    smollm2: Path, context: int, tokens: int
) -> None:
    written = []
    sizes: list[dict[str, Any]] = [
        {"kv_grow": False},
        {"kv_grow_init": 256, "kv_grow_step": 1},
        {"kv_grow_init": 64, "vram_elastic": True},
    ]
    for size in sizes:
        options = Options(smollm2, device="host:1x700MiB", ctx_size=context, prefill=64, **size)
        with Engine.open(options) as engine:
            ids = engine.encode("Once upon a time, in a village by the sea,")
            generation = engine.generate(ids, sampling=GREEDY, max_tokens=tokens, ignore_eos=True)
            written.append([])
            for number, token in enumerate(generation):
                written[-1].append(token.id)
                if options.vram_elastic and number % 30 == 20:
                    engine.set_vram_reserve(200 if number % 60 == 20 else None)
            cells = engine.describe().kv_cells
            assert cells >= context if size == sizes[0] else cells <= context + 64
    assert len(written[0]) == tokens
    assert written[1] == written[2] == written[0]


@pytest.mark.model
@pytest.mark.parametrize("mib", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_a_real_model_on_its_weights_and_little_more_runs_until_its_kv_is_full(
    smollm2: Path, mib: int
) -> None:
    options = Options(smollm2, device=budget_of(smollm2, 4096, mib), ctx_size=4096, prefill=64)
    with Engine.open(replace(options, kv_grow_init=64)) as engine:
        block_bytes = engine._device().ledger.plan.needs.kv.block_bytes
        possible = (mib << 20) // block_bytes * 64
        ids = engine.encode("The tide came in. " * 4000)[: possible - 100]
        generation = engine.generate(ids, sampling=GREEDY, ignore_eos=True)
        count = sum(1 for _ in generation)
        assert generation.finish == "memory"
        assert possible - 64 < len(ids) + count <= possible + 1
        with pytest.raises(OutOfDeviceMemory):  # the conversation above is still there
            engine.generate(ids[:50])
        gc.disable()
        del generation  # what it holds goes with it, and not later
        try:
            assert len(list(engine.generate(ids[:50], sampling=GREEDY, max_tokens=5))) == 5
        finally:
            gc.enable()
