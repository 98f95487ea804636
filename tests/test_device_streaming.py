"""Experts that a prompt batch misses come while it runs: bits stay, and the memory goes back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_world import SHAPE, load, opened, random_tokens, read, read_in, same_bits
from make_model import make_model
from streaming_backend import StreamingBackend
from test_launch_ahead import engine_of, write

from strata_nb import Engine, Options, Sampling
from strata_nb.commands.reading import _from_host_memory
from strata_nb.device_model import DeviceModel
from strata_nb.device_streaming import ExpertStreaming, ring_bytes
from strata_nb.errors import DeviceLost, DriverError
from strata_nb.kernels.reference import Floats
from strata_nb.steps import Row

IDS = random_tokens(64)
ROOMY, FULL = "host:1x64MiB@64KiB", "host:1x7MiB@64KiB"  # the second has no room for all experts


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streaming") / "small.gguf"
    make_model(path, SHAPE)
    return path


@pytest.fixture(scope="module")
def exact(model_file: Path) -> Floats:
    with opened(model_file) as model:
        return read_in(model, IDS, 64)


@contextmanager
def streams(path: Path, device: str = ROOMY, **options: Any) -> Iterator[DeviceModel]:
    """Open a model on a device that streams; in the end nothing may be left."""
    with closing(StreamingBackend(device)) as backend:
        with closing(load(backend, path, ctx=256, rows=64, **options)) as model:
            yield model
            model.ledger.check_integrity()
        assert backend.driver.live() == {"streams": 1}  # the backend's own


def streaming_of(model: DeviceModel) -> ExpertStreaming:
    found = model._steps._streaming
    assert found is not None
    return found


def missing(model: DeviceModel) -> int:
    return int(np.count_nonzero(model.arena.expert_tier))


@pytest.mark.parametrize("cache", ["100%", "50%", "3", "0"])
def test_rows_have_the_same_bits_however_many_experts_come(
    model_file: Path, exact: Floats, cache: str
) -> None:
    with streams(model_file, expert_cache=cache) as model:
        for _ in range(2):
            before, were_missing = streaming_of(model).streamed, missing(model)
            assert same_bits(read_in(model, IDS, 64), exact)
            assert streaming_of(model).streamed - before == were_missing


@pytest.mark.parametrize("slow", ["copies", "layers"])
def test_neither_copies_nor_layers_run_before_what_they_wait_for(
    model_file: Path, exact: Floats, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    with streams(model_file, expert_cache="3") as model, monkeypatch.context() as patch:
        patch.setattr(model.ledger, "lendable", lambda: 7)  # places for a few of a layer
        backend: Any = model._backend
        copy, execute = backend.driver.copy_async, backend._execute

        def slow_copy(*given: int) -> None:
            backend.driver.launch_host(given[-1], lambda: time.sleep(0.01))
            copy(*given)

        def slow_layer(*given: Any) -> None:
            time.sleep(0.1)
            execute(*given)

        if slow == "copies":
            patch.setattr(backend.driver, "copy_async", slow_copy)
        else:
            patch.setattr(backend, "_execute", slow_layer)
        assert same_bits(read_in(model, IDS, 64), exact)
        places = 7 * model.ledger.plan.chunk_bytes // max(model.arena.layout.classes)
        assert streaming_of(model).streamed == places * SHAPE.layers < missing(model)


def test_where_there_are_few_places_the_most_used_experts_come(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streams(model_file, expert_cache="0") as model:
        monkeypatch.setattr(model.ledger, "lendable", lambda: 7)
        read_in(model, IDS, 64)
        used = model.arena.use.copy()
        read_in(model, IDS, 64)
        for of_layer, comes in zip(used, streaming_of(model).coming, strict=True):
            assert comes.any()
            assert of_layer[comes].min() >= of_layer[~comes].max()


def test_each_blob_crosses_the_link_once_a_batch(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streams(model_file, expert_cache="0") as model:
        sources: Counter[int] = Counter()
        copy = model._backend.driver.copy_async

        def counted(target: int, source: int, size: int, stream: int) -> None:
            sources[source] += 1
            copy(target, source, size, stream)

        monkeypatch.setattr(model._backend.driver, "copy_async", counted)
        read_in(model, IDS, 64)
        assert sources == Counter(model.arena.homes.ravel().tolist())


def test_a_batch_of_few_rows_reads_experts_in_place(model_file: Path) -> None:
    with streams(model_file, expert_cache="0") as model:
        for rows, comes in ((63, False), (64, True)):  # of 16 experts with 3 choices a row
            read_in(model, IDS[:rows], rows)
            assert (streaming_of(model).streamed > 0) == comes
            assert streaming_of(model).has_loan == comes


def test_no_more_is_lent_than_a_batch_has_use_for(model_file: Path) -> None:
    with streams(model_file, expert_cache="75%") as model:
        read_in(model, IDS, 64)
        read(model, model.open_sequence(), IDS[:1])  # behind which the loan is back
        places = min(missing(model), 2 * int(model.arena.expert_tier.sum(axis=1).max()))
        read_in(model, IDS, 64)
        wanted_bytes = places * max(model.arena.layout.classes)
        assert 0 <= model.ledger.loan()[1] - wanted_bytes < model.ledger.plan.chunk_bytes


def test_slots_are_lent_where_there_is_nothing_else_and_filled_again(
    model_file: Path, exact: Floats
) -> None:
    with streams(model_file, FULL) as model:
        slots = model.arena.usable_slots
        read_in(model, IDS, 64)
        read(model, model.open_sequence(), IDS[:1])
        assert model.arena.resident == model.arena.usable_slots == slots < 48
        before = model.ledger.holdings()
        for _ in range(2):  # the loan stays from batch to batch
            assert same_bits(read_in(model, IDS, 64), exact)
            held = model.ledger.holdings()
            assert held.experts + held.loan == before.experts > held.experts
        assert model.arena.resident == model.arena.usable_slots < slots
        read(model, model.open_sequence(), IDS[:1])
        assert model.ledger.holdings() == before
        assert model.arena.resident == slots


def test_memory_that_others_want_between_two_batches_is_no_longer_lent(
    model_file: Path, exact: Floats
) -> None:
    with streams(model_file, FULL, vram_elastic=True) as model:
        read_in(model, IDS, 64)
        lent = model.ledger.holdings()
        model.set_reserve(1 << 20)
        assert lent.loan > model.ledger.holdings().loan == 0
        assert model.ledger.memory().free_bytes >= 1 << 20
        assert same_bits(read_in(model, IDS, 64), exact)
        model.make_room(model.open_sequence(), 200, prompt=True)
        assert model.ledger.holdings().loan == 0
        read_in(model, IDS, 64)
        assert streaming_of(model).has_loan
        model.empty_slots()
        assert (model.ledger.holdings().loan, model.arena.resident) == (0, 0)


def test_a_batch_for_which_the_kv_must_grow_gives_back_the_loan_first(model_file: Path) -> None:
    with streams(model_file, FULL, kv_grow_init=64, kv_grow_step=64) as model:
        sequence = model.open_sequence()
        read(model, sequence, IDS)
        before = model.ledger.holdings()
        assert before.loan > 0
        for _ in range(3):  # the arena's rest alone would not be enough
            read(model, sequence, IDS)
        assert model.ledger.holdings().kv > before.kv


@pytest.mark.parametrize("nth", [1, 20, 40])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), DriverError("copy", 1, "no")])
def test_after_a_failure_in_a_batch_the_loan_is_back_and_the_next_one_is_right(
    model_file: Path,
    exact: Floats,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    nth: int,
) -> None:
    with streams(model_file, expert_cache="0") as model:
        driver, start, calls = model._backend.driver, model.ledger.holdings(), 0
        copy = driver.copy_async

        def failing(*given: int) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise failure
            copy(*given)

        sequence = model.open_sequence()
        with monkeypatch.context() as patch:
            patch.setattr(driver, "copy_async", failing)
            with pytest.raises(type(failure)):
                read(model, sequence, IDS)
        assert model.ledger.holdings() == start
        assert model.kv.length(sequence) == 0
        assert same_bits(read(model, sequence, IDS), exact)


def test_an_interrupt_while_it_is_decided_who_comes_leaves_nothing_half_decided(
    model_file: Path, exact: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    with streams(model_file, expert_cache="0") as model:
        with monkeypatch.context() as patch:
            patch.setattr(streaming_of(model), "_assign", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read_in(model, IDS, 64)
        assert same_bits(read_in(model, IDS, 64), exact)
        assert streaming_of(model).streamed == SHAPE.layers * SHAPE.experts


def test_where_nothing_can_be_borrowed_a_line_says_so_once_until_it_can(
    model_file: Path, exact: Floats
) -> None:
    said: list[str] = []
    with streams(model_file, expert_cache="0", say=said.append) as model:
        model._backend.driver.faults.plan("create", forever=True)
        for _ in range(2):
            assert same_bits(read_in(model, IDS, 64), exact)
        assert streaming_of(model).streamed == 0
        (line,) = said
        assert line.startswith("experts of prompts are read in place: create")
        model._backend.driver.faults.lift()
        read_in(model, IDS, 64)
        assert streaming_of(model).streamed == missing(model)
        read(model, model.open_sequence(), IDS[:1])  # behind which the loan is back
        model._backend.driver.faults.plan("create", forever=True)
        read_in(model, IDS, 64)
        assert said == 2 * [line]


def test_a_device_that_is_lost_while_memory_is_borrowed_is_named(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: int) -> tuple[int, int]:
        raise DeviceLost("create", 1, "lost")

    said: list[str] = []
    with streams(model_file, expert_cache="0", say=said.append) as model:
        with monkeypatch.context() as patch:
            patch.setattr(model.ledger, "lend", lost)
            with pytest.raises(DeviceLost):
                read_in(model, IDS, 64)
        assert said == []


def test_choices_of_experts_that_came_for_a_batch_are_misses(model_file: Path) -> None:
    with streams(model_file, expert_cache="0") as model:
        read_in(model, IDS, 64)
        assert model.arena.tally.tolist() == [0, 64 * SHAPE.layers * SHAPE.top_k]
        assert np.array_equal(model.arena.expert_address, model.arena.homes)
    with streams(model_file, expert_cache="50%") as model:
        read_in(model, IDS, 64)
        away, before = model.arena.expert_tier.copy(), model.arena.tally.copy()
        read_in(model, IDS, 64)
        chosen = model.chosen(64)
        misses = sum(int(away[layer, chosen[:, layer]].sum()) for layer in range(SHAPE.layers))
        assert (model.arena.tally - before).tolist() == [chosen.size - misses, misses]
        assert 0 < misses < chosen.size


@pytest.mark.parametrize("cache", ["0", "50%"])
def test_bytes_over_the_link_are_those_of_each_blob_once(model_file: Path, cache: str) -> None:
    with streams(model_file, expert_cache=cache) as model:
        read_in(model, IDS, 64)
        first = model.report()
        came = model._residency.inserted_bytes  # to slots, behind the batch
        blobs = SHAPE.experts * sum(model.arena.layout.blob_bytes)
        assert first.streamed == missing(model) + first.inserted == 48
        assert first.streamed_bytes == first.missed_bytes == first.link_bytes - came == blobs
        sequence = model.open_sequence()
        read(model, sequence, IDS[:16])  # a batch that reads in place
        of_few, read_there = model.report(), model.arena.expert_tier != 0
        if cache == "0":
            sizes = np.array(model.arena.layout.blob_bytes)
            chosen = model.chosen(16)
            wanted = [len(np.unique(chosen[:, layer])) for layer in range(SHAPE.layers)]
            assert of_few.missed_bytes - first.missed_bytes == wanted @ sizes
            assert read_there.all()
        read(model, sequence, IDS[:1])  # a window
        window = model.report()
        misses = window.misses - of_few.misses
        assert (window.missed_bytes > of_few.missed_bytes) == (misses > 0)
        assert window.streamed == first.streamed


def test_buffers_of_its_own_are_counted_and_nothing_is_borrowed(
    model_file: Path, exact: Floats
) -> None:
    for device in (ROOMY, FULL):
        with streams(model_file, device) as model:
            borrowing = model.ledger.plan
        with streams(model_file, device, prefill_borrow=False) as model:
            plan = model.ledger.plan
            size = ring_bytes(model.arena.layout) if device == FULL else 0
            assert 0 <= plan.needs.dense_bytes - borrowing.needs.dense_bytes - size < 4096
            assert (plan.start_slots < borrowing.start_slots) == (device == FULL)
            before = model.ledger.holdings()
            assert same_bits(read_in(model, IDS, 64), exact)
            assert (streaming_of(model).streamed > 0) == (device == FULL)
            assert model.ledger.holdings() == before
            off = "loans to prompts (--no-prefill-borrow)"
            assert (off in model.off) == (device == FULL)


def test_tokens_behind_prompts_are_the_same_however_many_slots_there_are(
    model_file: Path,
) -> None:
    found = []
    for cache in ("100%", "40%", "0"):
        with engine_of(model_file, ROOMY, StreamingBackend, prefill=64, expert_cache=cache) as one:
            first, texts = one.describe(), []
            for rows in (100, 64, 5):
                with one.open_session() as session:
                    session.extend(random_tokens(rows, rows))
                    write(session, 10)
                    assert one.describe().bytes_by_owner["loan"] == 0
                    session.extend(random_tokens(60, rows))
                    write(session, 10)
                    texts.append(session.ids)
            found.append(texts)
            report = one.describe()
            assert (report.streamed > 0) == (cache != "100%")
            said = _from_host_memory(first, report, 1.0)
            assert said.endswith(" experts streamed") == (cache != "100%")
            assert report.bytes_by_owner["loan"] == 0
    assert found == found[:1] * 3


def test_a_device_says_how_many_rows_a_prompt_batch_has(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamingBackend, "usual_rows", lambda _, limit_bytes: 40)
    for prefill, rows in (("auto", 40), (64, 64)):
        with engine_of(model_file, ROOMY, StreamingBackend, prefill=prefill) as engine:
            assert engine.prefill_rows == rows


def test_several_texts_share_a_batch(model_file: Path) -> None:
    with streams(model_file, expert_cache="50%") as model:
        sequences = [model.open_sequence(), model.open_sequence()]
        rows = [Row(s, token, True) for s in sequences for token in IDS[:32]]
        first, second = np.split(model.step(rows), 2)
        assert streaming_of(model).streamed > 0
        assert same_bits(first, second)


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
def test_a_card_writes_the_same_tokens_with_half_the_experts_and_with_few(
    model_file: Path,
) -> None:
    found = []
    for cache in ("100%", "50%", "3", "0"):
        options = Options(model_file, "cuda", ctx_size=1024, prefill=512, expert_cache=cache)
        with Engine.open(options) as engine:
            texts = []
            for rows in (100, 700):
                with engine.open_session() as session:
                    session.extend(random_tokens(rows, rows))
                    greedy = Sampling(temperature=0)
                    list(session.generate(max_tokens=20, sampling=greedy, ignore_eos=True))
                    texts.append(session.ids)
            found.append(texts)
            model: Any = engine._model
            assert (streaming_of(model).streamed > 0) == (cache != "100%")
            assert not streaming_of(model).has_loan
    assert found == found[:1] * len(found)
