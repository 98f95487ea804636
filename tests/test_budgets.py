"""Slots for experts: no budget changes a bit, slots are what is read, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_world import has_free_slots, owner_of
from device_world import (
    ONE_SIZE,
    SHAPE,
    opened,
    random_tokens,
    read,
    read_in,
    same_bits,
)
from make_model import make_model

from strata_nb import Engine, Options
from strata_nb.addresses import memory_view
from strata_nb.cache.experts import Tier
from strata_nb.cache.profile import load_profile
from strata_nb.cache.replay import replay
from strata_nb.device_model import DeviceModel
from strata_nb.device_opening import policy_maker
from strata_nb.errors import ConfigError, FileFormatError, StrataError
from strata_nb.kernels.reference import Floats

ROOMY = "host:1x64MiB"
EXPERTS = SHAPE.layers * SHAPE.experts
CONTEXT = 256


@pytest.fixture(scope="module")
def one_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts fit every slot."""
    path = tmp_path_factory.mktemp("models") / "one_size.gguf"
    make_model(path, SHAPE, rules=ONE_SIZE)
    return path


def text(model: DeviceModel) -> Floats:
    """Return the logits of two prompts, and of 64 tokens that the model writes behind each."""
    parts = []
    for prompt in (random_tokens(40), random_tokens(100, 1)):
        sequence = model.open_sequence()
        for at in range(0, len(prompt), 64):
            parts.append(read(model, sequence, prompt[at : at + 64]))
            model.ledger.check_integrity()
        for _ in range(64):
            parts.append(read(model, sequence, [int(parts[-1][-1].argmax())]))
            model.ledger.check_integrity()
        model.forget_sequence(sequence)
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def exact(small: Path) -> Floats:
    with opened(small) as one:
        return text(one)


def hit_rate(model: DeviceModel) -> float:
    hits, misses = model.arena.tally.tolist()
    return float(hits / (hits + misses))


def device_with(model: Path, slots: int) -> str:
    """Return a device that has room for so many slots, and not for one more."""
    with opened(model, ROOMY, expert_cache=str(slots)) as one:
        layout = one.arena.layout
        owners = one.report().devices[0].bytes_by_owner
    kib = owners["dense"] + owners["kv"] + layout.bytes_of(slots)
    return f"host:1x{-(-kib // 65536) * 64 + 64}KiB@64KiB"


# Budgets.


def test_no_number_of_slots_changes_a_bit_and_more_slots_are_hit_more_often(
    small: Path, exact: Floats
) -> None:
    rates = []
    for slots in (0, SHAPE.layers, EXPERTS // 10, EXPERTS // 2, EXPERTS):
        with opened(small, ROOMY, expert_cache=str(slots)) as one:
            assert same_bits(text(one), exact), slots
            report = one.report()
            assert report.devices[0].slots == slots
            assert report.devices[0].resident == slots
            rates.append(hit_rate(one))
    assert rates[0] == 0
    assert rates == sorted(set(rates))
    assert rates[-1] == 1  # every expert had its slot at the start


@pytest.mark.parametrize("slots", [SHAPE.layers, EXPERTS // 10, EXPERTS // 2, EXPERTS])
def test_a_small_device_has_the_bits_of_the_whole_machine(
    small: Path, exact: Floats, slots: int
) -> None:
    device = device_with(small, slots)
    with opened(small, device) as one:
        assert slots <= one.report().devices[0].slots <= slots + 2
        assert same_bits(text(one), exact)


def test_slots_that_the_ledger_takes_back_change_no_bit(small: Path, exact: Floats) -> None:
    with opened(small, ROOMY + "@64KiB", expert_cache=str(EXPERTS)) as one:
        assert same_bits(text(one), exact)
        for share in (2, 8, 1):
            held = one.ledger.holdings()
            full = one.ledger.plan.arena_chunks
            one.ledger.carry_out(replace(held, experts=full // share))
            assert same_bits(text(one), exact)
            assert not has_free_slots(one.arena) or one.arena.usable_slots > one.arena.resident


# Residency follows the text.

ADAPTATIONS: list[dict[str, Any]] = [
    {"adapt": "insert"},
    {"adapt": "off"},
    {"adapt": "swap"},
    {"adapt": "swap", "adapt_every": 1, "adapt_swaps": 1000, "adapt_decay": 0.9},
]


@pytest.mark.parametrize("slots", [SHAPE.layers, EXPERTS // 4, EXPERTS // 2])
@pytest.mark.parametrize("options", ADAPTATIONS, ids=str)
def test_no_policy_changes_a_bit(
    small: Path, exact: Floats, options: dict[str, Any], slots: int
) -> None:
    with opened(small, ROOMY, expert_cache=str(slots), **options) as one:
        assert same_bits(text(one), exact)
        report = one.report()
        assert report.devices[0].resident == slots
        if options["adapt"] == "off":
            assert report.inserted == slots
        elif slots > SHAPE.layers:
            assert report.inserted > slots


@pytest.mark.parametrize("options", ADAPTATIONS, ids=str)
def test_a_replay_of_the_trace_finds_what_the_engine_found(
    one_size: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    slots = 12
    flags = {"expert_cache": str(slots), "routing_trace": tmp_path / "trace", **options}
    with opened(one_size, ROOMY, **flags) as one:
        read_in(one, random_tokens(120, 6) + [7] * 60, 1)
        one.save_trace(tmp_path / "trace")
        report = one.report()
    outcome = replay(
        np.load(tmp_path / "trace"),
        SHAPE.experts,
        policy_maker(Options(one_size, **options))(np.full((SHAPE.layers, SHAPE.experts), -1)),
        slots,
        start=[],
    )
    assert (outcome.hits, outcome.choices) == (report.hits, report.hits + report.misses)
    assert outcome.written == report.inserted


def test_what_was_inserted_is_counted_with_its_bytes(one_size: Path) -> None:
    with opened(one_size, ROOMY, expert_cache="9") as one:
        (blob,) = set(one.arena.layout.blob_bytes)
        assert (one.report().inserted, one.report().inserted_bytes) == (0, 0)
        text(one)
        report = one.report()
        assert report.inserted > 9
        assert report.inserted_bytes == report.inserted * blob


def test_a_text_that_stays_with_its_experts_finds_them_in_slots(one_size: Path) -> None:
    """One token again and again uses few experts, which another text had no slots for."""
    rates = {}
    for adapt in ("insert", "swap", "off"):
        with opened(one_size, ROOMY, expert_cache="12", adapt=adapt) as one:
            read_in(one, random_tokens(60, 4), 1)
            one.arena.tally[:] = 0
            read_in(one, [7] * 120, 1)
            rates[adapt] = hit_rate(one)
    assert rates["insert"] > rates["off"] + 0.1
    assert rates["swap"] > rates["off"]


@pytest.mark.parametrize("operation", ["copy_async", "stream_synchronize"])
def test_a_step_whose_exchange_fails_counts_all_the_same(one_size: Path, operation: str) -> None:
    ids = random_tokens(60, 5)
    with opened(one_size) as one:
        exact = read_in(one, ids, 1)
    failed = 0
    for nth in range(1, 12):
        with opened(one_size, ROOMY, expert_cache="6") as one:
            faults = one._backend.driver.faults  # type: ignore[attr-defined]
            sequence = one.open_sequence()
            logits = [read(one, sequence, ids[:20])]
            assert not has_free_slots(one.arena)
            faults.plan(operation, nth)
            for token in ids[20:]:
                logits.append(read(one, sequence, [token]))
                failed += has_free_slots(one.arena)
                one.ledger.check_integrity()
            faults.lift()
            assert same_bits(np.concatenate(logits)[19:], exact[19:])
            assert one.arena.resident == 6
    assert failed > 3


def test_slots_that_the_ledger_takes_while_text_goes_on_change_no_bit(
    small: Path, exact: Floats
) -> None:
    with opened(small, ROOMY + "@64KiB", expert_cache=str(EXPERTS)) as one:
        full = one.ledger.plan.arena_chunks
        for share in (3, 1, 6, 2):
            one.ledger.carry_out(replace(one.ledger.holdings(), experts=full // share))
            assert same_bits(text(one), exact)
            assert one.arena.resident == min(one.arena.usable_slots, EXPERTS)


def test_slots_that_the_ledger_takes_are_of_who_the_policy_would_let_leave(one_size: Path) -> None:
    with opened(one_size, ROOMY + "@64KiB", expert_cache="24") as one:
        read_in(one, random_tokens(60, 4) + [7] * 10, 1)
        heat, there = one._residency.heat(), one.arena.expert_tier == Tier.SLOT
        held = one.ledger.holdings()
        one.ledger.carry_out(replace(held, experts=held.experts // 2))
        stay = one.arena.expert_tier == Tier.SLOT
        assert 0 < stay.sum() < there.sum()
        assert heat[stay].min() > heat[there & ~stay].max()
        use = one.arena.use
        assert use[stay].min() < use[there & ~stay].max()  # by count others would stay


# Slots are real.


def blobs(model: DeviceModel, tier: Tier) -> list[tuple[int, int]]:
    layers, experts = np.nonzero(model.arena.expert_tier == tier)
    return list(zip(layers.tolist(), experts.tolist(), strict=True))


def overwrite(addresses: Sequence[int], sizes: Sequence[int]) -> None:
    for address, size in zip(addresses, sizes, strict=True):
        memory_view(address, size)[:] = 0xFF


def filled(model: DeviceModel) -> list[tuple[int, int]]:
    """Fill all slots and return who is in them."""
    text(model)
    assert not has_free_slots(model.arena)
    return blobs(model, Tier.SLOT)


@pytest.fixture(scope="module")
def one_by_one(small: Path) -> Floats:
    """The logits of a long text, read on the whole machine."""
    with opened(small) as one:
        return read_in(one, random_tokens(256, 3), 1)


@pytest.mark.parametrize("slots", [SHAPE.layers, EXPERTS // 2, EXPERTS])
def test_the_hosts_copy_of_an_expert_in_a_slot_is_not_read(
    small: Path, exact: Floats, one_by_one: Floats, slots: int
) -> None:
    ids = random_tokens(256, 3)
    with opened(small, ROOMY, expert_cache=str(slots), adapt="off") as one:
        arena = one.arena
        home = arena._in_place.copy()
        resident = filled(one)
        assert len(resident) == slots
        sizes = [arena.layout.blob_bytes[layer] for layer, _ in resident]
        overwrite([int(home[who]) for who in resident], sizes)
        for rows in (1, 64, 7, 2):
            assert same_bits(read_in(one, ids, rows), one_by_one)
        assert same_bits(text(one), exact)


@pytest.mark.parametrize("tier", list(Tier))
def test_the_copy_that_the_table_names_is_read(small: Path, tier: Tier) -> None:
    ids = random_tokens(64, 3)
    with opened(small, ROOMY, expert_cache="50%", adapt="off") as one:
        filled(one)
        before = read_in(one, ids, 64)
        victim = max(blobs(one, tier), key=lambda who: int(one.arena.use[who]))
        size = one.arena.layout.blob_bytes[victim[0]]
        overwrite([int(one.arena.expert_address[victim])], [size])
        assert not same_bits(read_in(one, ids, 64), before)


# First use.


@pytest.mark.parametrize("operation", ["copy_async", "stream_synchronize"])
def test_a_step_whose_fill_fails_counts_all_the_same(
    small: Path, tmp_path: Path, operation: str
) -> None:
    ids = random_tokens(40)
    slots = 14  # more than the first token uses, and fewer than there are experts
    with opened(small) as one:
        exact = read_in(one, ids, 40)
    for nth in count(1):
        with opened(
            small, ROOMY, expert_cache=str(slots), adapt="off", routing_trace=tmp_path / "trace"
        ) as one:
            faults = one._backend.driver.faults  # type: ignore[attr-defined]
            sequence = one.open_sequence()
            read(one, sequence, ids[:1])
            resident = one.arena.resident
            faults.plan(operation, nth)
            assert same_bits(read(one, sequence, ids[1:20]), exact[1:20])
            if one.arena.resident > resident:
                break
            one.ledger.check_integrity()
            faults.plan(operation, forever=True)
            assert same_bits(read(one, sequence, ids[20:30]), exact[20:30])
            assert one.arena.resident == resident
            faults.lift()
            assert same_bits(read(one, sequence, ids[30:]), exact[30:40])
            assert one.arena.resident > resident
            one.save_trace(tmp_path / "trace")
            assert len(np.load(tmp_path / "trace")) == len(ids)
            assert same_bits(read_in(one, ids, 7), exact)
    assert nth > (2 if operation == "copy_async" else 1)


# Profiles and traces.


def test_a_profile_fills_the_slots_of_the_next_start_in_its_order(
    one_size: Path, tmp_path: Path
) -> None:
    ids, profile = random_tokens(90), tmp_path / "profile"
    options = Options(one_size, device=ROOMY, ctx_size=CONTEXT, expert_cache="7")
    with Engine.open(options) as engine:
        exact = engine.logits(ids)
        engine.save_expert_profile(profile)
        use = engine._device().arena.use.copy()
    order = load_profile(profile, SHAPE.layers, SHAPE.experts).order()
    uses = [int(use[who]) for who in order]
    assert uses == sorted(uses, reverse=True)
    assert len(order) == EXPERTS
    for slots in (SHAPE.layers, 20, EXPERTS):
        with Engine.open(
            replace(options, expert_profile=profile, expert_cache=str(slots), adapt="off")
        ) as engine:
            arena = engine._device().arena
            assert [owner_of(arena, slot) for slot in range(slots)] == order[:slots]
            engine.save_expert_profile(tmp_path / "again")  # nothing was used yet
            assert load_profile(tmp_path / "again", SHAPE.layers, SHAPE.experts).order() == order
            assert same_bits(engine.logits(ids), exact)
            expected = sum(uses[:slots]) / sum(uses)
            assert engine.describe().hit_rate == pytest.approx(expected, abs=1e-12)
            engine.save_expert_profile(tmp_path / "again")
        assert load_profile(tmp_path / "again", SHAPE.layers, SHAPE.experts).order() == order


def test_a_profile_of_another_model_is_refused(small: Path, tiny: Path, tmp_path: Path) -> None:
    options = Options(tiny, device=ROOMY)
    profile = tmp_path / "profile"
    with Engine.open(options) as engine:
        engine.logits([1, 2, 3])
        engine.save_expert_profile(profile)
    other = replace(options, model=small, expert_profile=profile)
    with (
        pytest.raises(FileFormatError, match="2 layers of 3 experts, the model has 3 of 16") as got,
        Engine.open(other),
    ):
        pass
    assert got.value.hint


def test_a_trace_holds_every_choice_that_was_counted(small: Path, tmp_path: Path) -> None:
    ids = random_tokens(50)
    options = Options(small, device=ROOMY, ctx_size=CONTEXT, prefill=16, expert_cache="9")
    with Engine.open(replace(options, routing_trace=tmp_path / "trace.npy")) as engine:
        session = engine.open_session()
        session.extend(ids)
        session.draft([1, 2, 3])
        session.commit(1)
        session.append(7)
        session.next_logits()
        engine.save_routing_trace(tmp_path / "trace.npy")
        arena = engine._device().arena
        use, tally = arena.use.copy(), arena.tally.copy()
    routes = np.load(tmp_path / "trace.npy")
    tokens = len(ids) + 3 + 1
    assert routes.shape == (tokens, SHAPE.layers, SHAPE.top_k)
    assert tally.sum() == routes.size
    for layer in range(SHAPE.layers):
        counted = np.bincount(routes[:, layer].reshape(-1), minlength=SHAPE.experts)
        assert np.array_equal(counted, use[layer])
    assert all(len(set(row)) == SHAPE.top_k for row in routes.reshape(-1, SHAPE.top_k).tolist())


# Refusals.


def refusal(path: Path, **options: object) -> StrataError:
    with pytest.raises(ConfigError) as got, Engine.open(Options(path, **options)):  # type: ignore[arg-type]
        pass
    assert got.value.hint
    return got.value


def test_a_policy_is_refused_where_nothing_has_slots(small: Path, tiny: Path) -> None:
    error = refusal(small, device="host", adapt="off")
    assert "--adapt off: the device host has no slots" in str(error)
    error = refusal(tiny, device="reference", adapt="swap")
    assert "--adapt swap: the reference device" in str(error)


def test_slots_are_refused_where_the_device_has_none(small: Path) -> None:
    error = refusal(small, device="host", expert_cache="12")
    assert "--expert-cache 12" in str(error)
    assert "host:1x512MiB" in error.hint


def test_a_device_without_room_for_the_dense_weights_is_refused_with_the_sum(small: Path) -> None:
    error = refusal(small, device="host:1x256KiB")
    assert "262,144  free on the device" in str(error)
    lines = [line.split(None, 1) for line in str(error).splitlines()[1:]]
    numbers = {name: int(number.replace(",", "")) for number, name in lines}
    needed, free, missing = (
        numbers.pop(name) for name in ("needed", "free on the device", "missing")
    )
    assert sum(numbers.values()) == needed == free + missing
    assert numbers["dense weights and buffers"] > 262_144


def test_a_device_of_the_bytes_that_a_refusal_asks_for_is_enough(tiny: Path) -> None:
    for cells in range(200, 216):  # the buffers end anywhere in a page
        options = Options(tiny, device="host:1x64KiB@64KiB", ctx_size=cells, kv_grow=False)
        lines = str(
            refusal(tiny, device=options.device, ctx_size=cells, kv_grow=False)
        ).splitlines()
        needed = next(line for line in lines if line.endswith(" needed")).split()[0]
        kib = -(-int(needed.replace(",", "")) // 1024)
        with Engine.open(replace(options, device=f"host:1x{kib}KiB@64KiB")) as engine:
            assert engine.describe().slots == 2


def test_the_context_that_a_refusal_names_does_fit(small: Path) -> None:
    options = Options(small, device=ROOMY, ctx_size=1024, expert_cache="0", kv_grow=False)
    with Engine.open(options) as engine:
        owners = engine.describe().bytes_by_owner
    kib = (owners["dense"] + owners["kv"] // 2) >> 10
    device = f"host:1x{kib}KiB@64KiB"
    error = refusal(small, device=device, ctx_size=1024, expert_cache="0", kv_grow=False)
    assert "K/V of 1,024 cells" in str(error)
    cells = int(error.hint.split("--ctx-size ")[1].split()[0])
    assert 256 <= cells <= 512
    with Engine.open(replace(options, device=device, ctx_size=cells)) as engine:
        engine.logits(random_tokens(cells))


def test_fewer_slots_than_layers_are_refused(small: Path) -> None:
    error = refusal(small, device=ROOMY, expert_cache="2")
    assert "2 expert slots: a model of 3 layers" in str(error)
    assert "3 or more" in error.hint


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "dense.gguf"
    make_model(path, replace(SHAPE, architecture="qwen3", experts=0, top_k=0, layers=1))
    return path


@pytest.mark.parametrize("flag", ["expert_profile", "expert_profile_save", "routing_trace"])
def test_flags_about_experts_are_refused_where_none_are_counted(
    small: Path, dense: Path, flag: str
) -> None:
    name = "--" + flag.replace("_", "-")
    for device in ("host", ROOMY):
        assert f"{name} some.file" in str(refusal(dense, device=device, **{flag: "some.file"}))
    assert f"{name} some.file" in str(refusal(small, device="reference", **{flag: "some.file"}))


def test_a_dense_model_runs_on_a_small_device_and_refuses_slots(dense: Path) -> None:
    ids = random_tokens(70)
    with opened(dense) as one:
        exact = read_in(one, ids, 1)
    with opened(dense, ROOMY) as one:
        assert same_bits(read_in(one, ids, 64), exact)
        report = one.report()
        assert (report.devices[0].slots, report.hits, report.misses) == (0, 0, 0)
    assert "--expert-cache 5: this model has no experts" in str(
        refusal(dense, device=ROOMY, expert_cache="5")
    )


def test_the_judge_refuses_slots(small: Path) -> None:
    assert "--expert-cache 5" in str(refusal(small, device="reference", expert_cache="5"))
