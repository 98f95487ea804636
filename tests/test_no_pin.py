"""Experts in memory that a card cannot read: the CPU computes them, or they come, and bits stay."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_device_pool
from device_world import load, opened, random_tokens, read, read_in, same_bits
from filling_backend import Layer
from streaming_backend import StreamingBackend
from test_device_pool import FakePool, PoolingBackend

from strata_nb import Options, device_pool
from strata_nb.addresses import memory_view
from strata_nb.cache.experts import Tier
from strata_nb.choosing import Choice
from strata_nb.device_model import DeviceModel
from strata_nb.errors import ConfigError, StrataError, UnsupportedDevice
from strata_nb.fill_plans import SHARE_UNITS, plan_type
from strata_nb.host import HostDriver, parse_host_devices
from strata_nb.kernels.reference import Floats
from strata_nb.sampling import Sampling
from strata_nb.staged_copies import PLACE_BYTES, PLACES, StagedCopies
from strata_nb.steps import Row

IDS = random_tokens(64)
ROOMY = "host:1x64MiB@64KiB"


class Unpinned(PoolingBackend, StreamingBackend):
    """Refuse to compute what a card could not read.

    arena   first address and end of the experts in host memory
    read    rows of each run
    """

    arena = 0, 0

    def __init__(self, text: str, threads: int = 1, *given: Any) -> None:
        super().__init__(text, threads, *given)
        self.read: list[int] = []

    def _fill(self, layer: Layer, rows: int) -> None:
        words = layer[0]
        chosen = memory_view(words["chosen"], 8 * rows * words["top_k"]).view(np.int64)
        addresses = memory_view(words["addresses"], 8 * words["experts"]).view(np.int64)[chosen]
        start, end = self.arena
        if np.any((addresses >= start) & (addresses < end)):
            kind = plan_type(words["experts"])
            plan = memory_view(words["plan"], kind.itemsize).view(kind)[0]
            assert (rows, plan["cpu_share"]) == (1, SHARE_UNITS)
            assert plan["offered"] == plan["listed"] == 0
        self.read.append(rows)
        super()._fill(layer, rows)


@pytest.fixture(autouse=True)
def _pools(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("registered")

    test_device_pool.pools.clear()
    monkeypatch.setattr(device_pool, "CpuPool", FakePool)
    monkeypatch.setattr(device_pool, "pool_threads", lambda _: 2)
    monkeypatch.setattr(HostDriver, "register_host", refuse)


@contextmanager
def unpinned(path: Path, **options: Any) -> Iterator[DeviceModel]:
    with closing(Unpinned(ROOMY)) as backend:
        options = {"expert_cache": "40%", "pin": False, **options}
        with closing(load(backend, path, ctx=256, rows=64, **options)) as model:
            host = model.arena._host
            backend.arena = host.address, host.address + host.size_bytes
            yield model
            model.ledger.check_integrity()
        assert backend.driver.live() == {"streams": 1}  # the backend's own


def runs_of(model: DeviceModel) -> list[int]:
    backend = model._backend
    assert isinstance(backend, Unpinned)
    return backend.read[:: model.description.layers]


@pytest.fixture(scope="module")
def exact(small: Path) -> Floats:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostDriver, "register_host", lambda *_: None)
        patch.setattr(HostDriver, "unregister_host", lambda *_: None)
        with opened(small) as model:
            return read_in(model, IDS, 64)


@pytest.mark.parametrize("cache", ["40%", "0"])
def test_rows_are_read_singly_where_the_cpu_computes_some_of_their_experts(
    small: Path, exact: Floats, cache: str
) -> None:
    with unpinned(small, expert_cache=cache) as model:
        assert same_bits(read_in(model, IDS[:20], 4), exact[:20])
        assert runs_of(model) == [1] * 20
        assert any("--no-pin" in line for line in model.off)
        assert test_device_pool.pools[0].experts == model.arena.tally[1] > 0


def test_rows_are_read_together_where_every_expert_has_a_slot(small: Path, exact: Floats) -> None:
    with unpinned(small, expert_cache="100%") as model:
        assert same_bits(read_in(model, IDS[:20], 4), exact[:20])
        assert runs_of(model) == [4] * 5


def test_a_batch_brings_all_that_it_misses_and_is_read_singly_where_it_cannot(
    small: Path, exact: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unpinned(small, adapt="off") as model:
        missing = int(np.count_nonzero(model.arena.expert_tier == Tier.IN_PLACE))
        assert same_bits(read_in(model, IDS, 64), exact)
        assert set(runs_of(model)) == {64}
        runs = len(runs_of(model))
        assert model.report().streamed == missing > 0
        model._steps.return_loan()
        monkeypatch.setattr(model.ledger, "lendable", lambda: 7)  # places for a few of a layer
        assert same_bits(read_in(model, IDS, 64), exact)
        assert runs_of(model)[runs:] == [1] * 64


def test_tokens_of_several_rows_are_those_of_one_at_a_time(small: Path) -> None:
    how = [Choice((), Sampling(temperature=0), 0.5)] * 3
    found = []
    for cache in ("100%", "40%"):
        with unpinned(small, expert_cache=cache) as model:
            sequences = [model.open_sequence() for _ in how]
            for sequence, token in zip(sequences, IDS, strict=False):
                read(model, sequence, [token])
            rows = [Row(sequence, 5, True) for sequence in sequences]
            found.append(model.choose(rows, how))
            assert runs_of(model)[3:] == ([3] if cache == "100%" else [1, 1, 1])
    assert found[0] == found[1]


def test_rows_that_are_broken_off_leave_no_cell(small: Path, exact: Floats) -> None:
    with unpinned(small) as model:
        sequence = model.open_sequence()
        read(model, sequence, IDS[:2])
        steps, whole = model._steps, model._steps._whole_step
        count = 0

        def third_fails(*given: Any) -> Any:
            nonlocal count
            count += len(given[0]) == 1
            if count == 3:
                raise KeyboardInterrupt
            return whole(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps, "_whole_step", third_fails)
            with pytest.raises(KeyboardInterrupt):
                read(model, sequence, IDS[2:8])
        assert model.length(sequence) == 2
        assert same_bits(read(model, sequence, IDS[2:8]), exact[2:8])


def test_slots_follow_the_text_by_copies_of_the_host(small: Path) -> None:
    with unpinned(small) as model:
        before = model.arena.expert_tier.copy()
        read_in(model, IDS, 1)
        assert model.report().inserted > 0
        assert np.any(before != model.arena.expert_tier)
        for layer, expert in np.argwhere(model.arena.expert_tier == Tier.SLOT):
            size = model.arena.layout.blob_bytes[layer]
            slot, home = (
                memory_view(int(where[layer, expert]), size)
                for where in (model.arena.expert_address, model.arena.homes)
            )
            assert np.array_equal(slot, home)


def test_a_cpu_that_gives_no_answer_ends_the_model_and_not_the_card(small: Path) -> None:
    with unpinned(small) as model:
        backend, sequence = model._backend, model.open_sequence()
        assert isinstance(backend, Unpinned)
        read(model, sequence, IDS[:1])
        backend.is_late = True
        with pytest.raises(StrataError, match=r"no answer within 2 s"):
            read(model, sequence, IDS[1:2])
        with pytest.raises(StrataError, match="the CPU stopped computing"):
            read(model, sequence, IDS[1:2])
        assert model.length(sequence) == 1


def test_a_window_that_needs_the_cpu_is_not_looked_into(small: Path) -> None:
    with unpinned(small) as model, pytest.raises(UnsupportedDevice, match="--no-pin"):
        model.profile(1)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"deterministic": True}, "--deterministic"),
        ({"cpu_pool": False}, "--no-cpu-pool"),
        ({"pcie_frac": 0.5}, "--pcie-frac 0.5"),
    ],
)
def test_what_leaves_experts_to_the_card_is_refused(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--no-pin.* {flag} forbids it"):
        Options(pin=False, **options)
    assert not Options(pin=False, pcie_frac=0).pin


def test_a_machine_whose_cpu_cannot_compute_experts_is_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pool, "pool_threads", lambda _: 0)
    refused = pytest.raises(ConfigError, match="cannot: fewer than three processors")
    with refused, unpinned(small):
        pass


def test_copies_through_a_staging_bring_every_byte_though_the_source_changes() -> None:
    size = PLACES * PLACE_BYTES + 12_345
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    expected = source.copy()
    with closing(HostDriver(parse_host_devices("host:1x64MiB"))) as driver:
        driver.mem_info(0)
        target, stream = driver.allocate(size, 0), driver.stream_create(0)
        with closing(StagedCopies(driver, 0)) as copies:
            copies.copy(target, source.ctypes.data, size, stream)
            source[:] = 0
            driver.stream_synchronize(stream)
            assert np.array_equal(memory_view(target, size), expected)
        driver.stream_destroy(stream)
        driver.free(target)
        assert driver.live() == {}


def test_a_copy_that_is_interrupted_has_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    source, recorded = np.zeros(4096, np.uint8), []
    with closing(HostDriver(parse_host_devices("host:1x64MiB"))) as driver:
        driver.mem_info(0)
        target, stream = driver.allocate(source.size, 0), driver.stream_create(0)
        copy, record = driver.copy_async, driver.event_record

        def interrupted(*given: int) -> None:
            copy(*given)
            signal.raise_signal(signal.SIGINT)

        def noted(event: int, on: int) -> None:
            record(event, on)
            recorded.append(on)

        with closing(StagedCopies(driver, 0)) as copies:
            monkeypatch.setattr(driver, "copy_async", interrupted)
            monkeypatch.setattr(driver, "event_record", noted)
            with pytest.raises(KeyboardInterrupt):
                copies.copy(target, source.ctypes.data, source.size, stream)
            assert recorded == [stream]
            driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
        driver.free(target)
