"""Models on a real card: the same bits however they are run, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_world import SHAPE, load, random_tokens, read, read_in, same_bits
from filling_backend import layers_of
from gpu_card import Card
from make_model import make_model
from make_routes import make_routes
from model_shapes import ModelShape

from strata_nb import (
    Engine,
    Options,
    Sampling,
    device_layout,
    device_opening,
    device_streaming,
    story_model,
)
from strata_nb.addresses import memory_view
from strata_nb.backend import open_backend
from strata_nb.device_model import DeviceModel
from strata_nb.driver import CudaDriver
from strata_nb.kernels.gpu import attention_launches, warpgroup_launches
from strata_nb.kernels.reference import Floats
from strata_nb.models.places import Buffers
from strata_nb.sampling import Choice, uniform
from strata_nb.steps import Row, draw

pytestmark = pytest.mark.gpu

GUARD_BYTES = 256
PATTERN = 0x5A
IDS = random_tokens(100)
EXPERTS = SHAPE.layers * SHAPE.experts


@pytest.fixture(scope="module", autouse=True)
def _needs(card: Card) -> None:
    """Skip where there is no card."""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card") / "experts.gguf"
    make_model(path, SHAPE)
    return path


@contextmanager
def on_card(
    path: Path, *, ctx: int = 256, rows: int = 8, same_bits: bool = True, **options: Any
) -> Iterator[DeviceModel]:
    options = {"cpu_pool": False, **options}  # with one, bits depend on who has slots
    with closing(open_backend("cuda", 2)) as backend:
        backend.same_bits = same_bits
        with closing(load(backend, path, ctx=ctx, rows=rows, **options)) as model:  # type: ignore[arg-type]
            yield model
            model.ledger.check_integrity()


@pytest.fixture(scope="module")
def exact(model_file: Path) -> Floats:
    """The logits of all tokens, read one at a time with all experts in slots."""
    with on_card(model_file) as model:
        return read_in(model, IDS, 1)


@pytest.mark.parametrize("rows", range(2, 9))
def test_a_row_has_the_same_bits_in_every_window(
    model_file: Path, exact: Floats, rows: int
) -> None:
    with on_card(model_file) as model:
        assert same_bits(read_in(model, IDS, rows), exact)


@pytest.mark.parametrize("batch", [100, 64, 33, 9])
def test_a_row_has_the_same_bits_in_every_batch(
    model_file: Path, exact: Floats, batch: int
) -> None:
    with on_card(model_file, rows=128) as model:
        assert same_bits(read_in(model, IDS, batch), exact)


def test_batches_that_need_not_have_the_same_bits_come_near_and_are_the_same_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All that is faster, of few rows as well; and all experts, so that no rounding takes another.
    monkeypatch.setattr(attention_launches, "SOME_BLOCKS", 1)
    monkeypatch.setattr(warpgroup_launches, "_FEWEST_BLOCKS", 1)
    path = tmp_path / "all.gguf"
    make_model(path, ModelShape("qwen3moe", layers=3, experts=3, top_k=3))
    with on_card(path) as model:
        exact = read_in(model, IDS, 1)
    with on_card(path, rows=128, same_bits=False) as model:
        found, again = read_in(model, IDS, 100), read_in(model, IDS, 100)
    assert same_bits(found, again)
    # The least difference rounds some quants of a row otherwise, and so all that follow: they are
    # as far from each other as quants are from what they stand for.
    off = np.abs(found - exact).max(axis=1) / np.abs(exact).max()
    assert np.median(off) < 0.02
    assert off.max() < 0.05


@pytest.mark.parametrize("streams", [True, False])
def test_experts_that_a_batch_reads_in_place_or_streams_change_no_bit(
    model_file: Path, exact: Floats, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.setattr(device_streaming, "LEAST_CHOICES", 1 if streams else 1 << 40)
    with on_card(model_file, rows=64, expert_cache="0") as model:
        assert same_bits(read_in(model, IDS, 64), exact)
        assert (model.report().streamed == 2 * EXPERTS) == streams


def test_sequences_are_read_in_one_batch(model_file: Path) -> None:
    texts = [random_tokens(count, count) for count in (30, 1, 12)]
    with on_card(model_file, rows=64) as model:
        sequences = [model.open_sequence() for _ in texts]
        rows = [
            Row(sequence, token, place == len(text) - 1)
            for sequence, text in zip(sequences, texts, strict=True)
            for place, token in enumerate(text)
        ]
        found = model.step(rows)
        wanted = np.stack([read_in(model, text, 8)[-1] for text in texts])
    assert same_bits(found, wanted)


def test_a_row_has_the_same_bits_beside_rows_of_other_sequences(
    model_file: Path, exact: Floats
) -> None:
    others = [random_tokens(len(IDS), seed) for seed in (1, 2, 3)]
    with on_card(model_file) as model:
        found = _together(model, [IDS, *others])
    assert same_bits(found, exact)


def _together(model: DeviceModel, texts: Sequence[Sequence[int]]) -> Floats:
    """Return the logits of the first of some texts that are read beside each other."""
    sequences = [model.open_sequence() for _ in texts]
    logits = []
    for tokens in zip(*texts, strict=True):
        rows = [Row(s, token, True) for s, token in zip(sequences, tokens, strict=True)]
        logits.append(model.step(rows)[0])
    return np.stack(logits)


def test_tokens_are_those_that_the_host_draws_from_the_logits(model_file: Path) -> None:
    every = [
        Sampling(temperature=0),
        Sampling(),
        Sampling(top_k=0, min_p=0.0),
        Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=1.5),
        Sampling(presence_penalty=1.0, repeat_penalty=1.2, frequency_penalty=0.1),
    ]
    choices = [Choice(IDS, one, uniform(1, 0, number)) for number, one in enumerate(every)]
    with on_card(model_file) as model:
        sequence = model.open_sequence()
        rows = [Row(sequence, token, True) for token in IDS[: len(every)]]
        tokens = model.choose(rows, choices)
        model.rewind(sequence, 0)
        assert draw(model.step(rows), choices) == tokens


def test_kernels_that_wait_for_each_other_give_the_same_bits(
    model_file: Path, exact: Floats
) -> None:
    options = Options(model_file, "cuda", ctx_size=256, overlap=False, deterministic=True)
    with Engine.open(options) as engine:
        assert same_bits(engine.logits(IDS), exact)


def test_a_card_takes_the_routes_that_are_forced_and_comes_near_the_host(
    model_file: Path, exact: Floats, tmp_path: Path
) -> None:
    routes = make_routes(layers=SHAPE.layers, experts=SHAPE.experts, top_k=SHAPE.top_k, tokens=30)
    file, taken = tmp_path / "routes.npy", tmp_path / "taken.npy"
    np.save(file, routes)
    with on_card(model_file, routing_trace=taken, force_routes=file) as model:
        found = read_in(model, IDS, 1)
        model.save_trace(taken)
        assert same_bits(read_in(model, IDS, 8), found)
    assert np.array_equal(np.load(taken), np.sort(routes[np.arange(len(IDS)) % 30], axis=2))
    with Engine.open(Options(model_file, "host", ctx_size=256, force_routes=file)) as engine:
        expected = engine.logits(IDS)
    assert np.abs(found - expected).max() < 0.1 * np.abs(found - exact).max()


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_fewer_slots_change_no_bit(model_file: Path, exact: Floats, share: float) -> None:
    slots = max(SHAPE.layers, int(share * EXPERTS))
    with on_card(model_file, expert_cache=str(slots)) as model:
        assert same_bits(read_in(model, IDS, 1), exact)
        assert model.report().misses > 0


def test_experts_that_are_read_in_place_change_no_bit(model_file: Path, exact: Floats) -> None:
    with on_card(model_file, expert_cache="0") as model:
        assert same_bits(read_in(model, IDS, 1), exact)
        assert model.report().hits == 0


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("count", [1, 3])
def test_the_host_knows_which_experts_the_card_has_brought(
    model_file: Path, share: float, count: int
) -> None:
    """Windows of one row and of several, each begun before the one in front of it has ended."""

    def texts(model: DeviceModel) -> list[list[int]]:
        sequences = [model.open_sequence() for _ in range(count)]
        found = [[10 + sequence] for sequence in sequences]
        choices = [
            [Choice((), Sampling(), uniform(5, sequence, place)) for sequence in sequences]
            for place in range(200)
        ]
        for how, ahead in pairwise(choices):
            rows = [Row(s, text[-1], True) for s, text in zip(sequences, found, strict=True)]
            for text, token in zip(found, model.choose(rows, how, ahead), strict=True):
                text.append(token)
        return found

    with on_card(model_file) as model:
        expected = texts(model)
    with on_card(model_file, expert_cache=str(int(share * EXPERTS))) as model:
        assert texts(model) == expected
        report = model.report()
        assert model.arena.filled == report.inserted > model.arena.usable_slots
        assert report.hits > 0
        check_slots(model)


def check_slots(model: DeviceModel) -> None:
    """Compare the card's table with the host's, and matrices in slots with those at home."""
    arena, backend = model.arena, model._backend
    assert model._filling_places is not None
    table = np.empty(arena.use.shape, np.int64)
    backend.fetch(model._filling_places.addresses, table)
    assert np.array_equal(table, arena.expert_address)
    resident = np.argwhere(table != arena.homes)
    assert len(resident) == arena.resident > 0
    parts = [of_layer for _, of_layer in layers_of(model._programs.body)]
    for layer, expert in resident:
        for offset, size in parts[layer]:
            found, home = np.empty(size, np.uint8), int(arena.homes[layer, expert])
            backend.fetch(int(table[layer, expert]) + offset, found)
            assert np.array_equal(found, memory_view(home + offset, size))


@pytest.mark.parametrize("cache_type", ["f32", "int8"])
def test_other_types_of_kv_give_the_same_bits_in_every_window(
    model_file: Path, cache_type: str
) -> None:
    types = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    with on_card(model_file, **types) as model:
        assert same_bits(read_in(model, IDS, 5), read_in(model, IDS, 1))


def test_growth_and_give_back_change_no_token() -> None:
    """The story model, whose K/V grows and which gives memory away in the middle."""
    prompt = "Once upon a time"

    def written(engine: Engine, at: Sequence[int] = ()) -> list[int]:
        session = engine.open_session()
        session.extend(engine.encode_prompt(prompt))
        ids = []
        generation = session.generate(max_tokens=200, sampling=Sampling(seed=4), ignore_eos=True)
        for number, token in enumerate(generation):
            ids.append(token.id)
            if number in at:
                (device,) = engine.describe().devices
                assert device.free_bytes is not None
                engine.set_vram_reserve((device.free_bytes >> 20) + 10)  # half of the slots
                assert engine.describe().slots < 256
            elif number - 20 in at:
                engine.set_vram_reserve(None)
        return ids

    with Engine.open(Options(device="cuda", ctx_size=512, kv_grow=False)) as engine:
        expected = written(engine)
    options = Options(
        device="cuda", ctx_size=512, kv_grow_init=64, kv_grow_step=64, vram_elastic=True
    )
    with Engine.open(options) as engine:
        assert written(engine, at=(50, 120)) == expected


def test_what_a_limited_card_uses_stays_within_the_limit_when_it_runs() -> None:
    """The story model, with memory for half of its experts and nothing kept for others."""
    options = {"ctx": 512, "kv_grow_init": 64, "kv_grow_step": 64, "vram_reserve_mib": 0}
    path = story_model.model_path()
    with on_card(path, **options) as model:
        plan, slots = model.ledger.plan, model.report().devices[0].slots
        expected = read_in(model, IDS, 8)
    chunks = plan.start.kv + plan.start.experts // 2
    limit = plan.in_use_bytes + plan.needs.beside_bytes + chunks * plan.chunk_bytes
    with on_card(path, vram_limit=limit, **options) as model:
        assert 0 < model.report().devices[0].slots < slots
        assert same_bits(read_in(model, IDS, 8), expected)
        free, total = model._backend.driver.mem_info(0)
        assert total - free <= limit


def test_twenty_starts_and_stops_leave_the_memory_of_the_card_where_it_was(
    model_file: Path,
) -> None:
    def free_bytes() -> int:
        with closing(CudaDriver()) as driver:
            return driver.mem_info(0)[0]

    with on_card(model_file) as model:  # the driver keeps some of what it takes first
        read(model, model.open_sequence(), IDS[:8])
    before = free_bytes()
    for _ in range(20):
        with on_card(model_file) as model:
            read(model, model.open_sequence(), IDS[:8])
    assert free_bytes() == before


class GuardedBuffers(Buffers):
    """Leave bytes between the buffers of a step; `guards` are their addresses."""

    def __init__(self, base: int = 0) -> None:
        super().__init__(base)
        self.guards: list[int] = []
        seen.append(self)

    def take(self, size: int) -> int:
        address = super().take(size)
        self.guards.append(super().take(GUARD_BYTES))
        return address


seen: list[GuardedBuffers] = []


def test_no_kernel_writes_between_the_buffers_of_a_step(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device_layout, device_opening):
        monkeypatch.setattr(module, "Buffers", GuardedBuffers)
    seen.clear()
    # The record is sent as one run of memory, guards and all.
    pattern = np.full(GUARD_BYTES, PATTERN, np.uint8)
    with on_card(model_file) as model:
        _, buffers, *_ = seen  # the first only measures; others place a few of these again
        backend, record = model._backend, model._steps._few.record
        sent = range(record.address, record.address + len(record.memory))
        guards = [address for address in buffers.guards if address not in sent]
        assert len(guards) > 20
        for address in guards:
            backend.send(address, pattern)
        read_in(model, IDS, 8)
        read_in(model, IDS[:10], 1)
        for address in guards:
            found = np.empty(GUARD_BYTES, np.uint8)
            backend.fetch(address, found)
            assert np.array_equal(found, pattern), f"{address - buffers.guards[0]:,}"


def test_a_profile_finds_every_launch_and_changes_no_bit(model_file: Path, exact: Floats) -> None:
    with on_card(model_file) as model:
        sequence = model.open_sequence()
        for token in IDS[:20]:
            model.step([Row(sequence, token, True)])
        before = model.report()
        found = model.profile(20)
        after = model.report()
        assert (after.hits, after.misses) == (before.hits, before.misses)
        assert {line.count for line in found.lines} >= {1, SHAPE.layers}
        assert 0 < found.sum_s < 2 * found.whole_s
        assert found.read_bytes > 0.9 * model.step_bytes(20)
        logits = [model.step([Row(sequence, token, True)])[0] for token in IDS[20:]]
    assert same_bits(np.stack(logits), exact[20:])


def test_a_cards_memory_is_read_faster_than_a_disk_and_all_of_it_is_given_back() -> None:
    with closing(open_backend("cuda", 1)) as backend:
        backend.plain_read()  # loads the kernel, which stays
        free_bytes = backend.driver.mem_info(0)[0]
        found = backend.plain_read()
        assert found.bytes_per_s > 50e9
        assert backend.driver.mem_info(0)[0] == free_bytes
