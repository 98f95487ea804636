"""The host's side of missed experts that the CPU computes: when it wakes, its share, its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from filling_backend import FillingBackend, Layer
from test_launch_ahead import PROMPT, begun, engine_of, model_of, write
from test_launch_ahead_interrupts import check_any_line

from strata_nb import Engine, Options, Sampling, device_pool, formats
from strata_nb.addresses import memory_view
from strata_nb.cache.filling import cpu_count, missed_in_order
from strata_nb.compiling import Compiled
from strata_nb.device_pool import (
    LEANS,
    LEAST_POSTS,
    NO_POOL_YET,
    WINDOWS,
    DevicePool,
    NoAnswer,
    compile_pool,
    pool_layers,
    pool_places,
    why_no_pool,
)
from strata_nb.device_steps import DeviceSteps
from strata_nb.errors import DeviceLost, DriverError
from strata_nb.fill_plans import SHARE_UNITS, plan_type
from strata_nb.formats import TensorType as T
from strata_nb.kernels import mailbox
from strata_nb.kernels.gpu.pooled import PoolPlaces
from strata_nb.kernels.host import pool as host_pool
from strata_nb.kernels.host.matrices import matrix_functions
from strata_nb.kernels.pool_state import (
    ABORTED,
    ALONE_NS,
    BESIDE,
    CHOICES,
    ERROR,
    LATE,
    POSTS,
    WAITED_NS,
    WORDS,
)
from strata_nb.loading_layout import ExpertPart
from strata_nb.models.tensors import EXPERT_PARTS


class FakePool:
    """Stand in for a pool of threads."""

    def __init__(self, *_: Any) -> None:
        self.is_awake = self.is_closed = False
        self.experts = self.bytes = 0
        self.busy_s = 0.0
        self.failure: str | None = None
        pools.append(self)

    def awake(self) -> None:
        self.is_awake = True

    def rest(self) -> None:
        self.is_awake = False

    def close(self) -> None:
        self.is_closed = True


pools: list[FakePool] = []
GREEDY = Sampling(temperature=0)


class PoolingBackend(FillingBackend):
    """Leave missed experts to the CPU as a card does, but compute them all.

    is_late   nobody answers
    """

    pools = True
    is_late = False

    def open_pool(self, width: int, idle_bytes: int) -> PoolPlaces:
        self._box = np.zeros(mailbox.box_bytes(width), np.uint8)
        self.state, self._idle = np.zeros(WORDS, np.int64), np.zeros(idle_bytes, np.uint8)
        return PoolPlaces(*(int(one.ctypes.data) for one in (self._box, self.state, self._idle)))

    def _fill(self, layer: Layer, rows: int) -> None:
        words, experts = layer[0], layer[0]["experts"]
        kind = plan_type(experts)
        plan = memory_view(words["plan"], kind.itemsize).view(kind)[0]
        share = int(plan["cpu_share"])
        if rows > 1 or not share:
            plan["cpu_share"] = 0
            super()._fill(layer, rows)
            plan["cpu_share"] = share
            return
        chosen, addresses, homes = (
            memory_view(words[name], 8 * count).view(np.int64)
            for name, count in (
                ("chosen", words["top_k"]),
                ("addresses", experts),
                ("homes", experts),
            )
        )
        missed = len(missed_in_order(plan, chosen.tolist(), addresses, homes))
        count = cpu_count(share, missed)
        if count and not self.state[ERROR // 8]:
            assert pools[-1].is_awake
            self.state[POSTS // 8] += 1
            self.state[CHOICES // 8] += count
            self.state[BESIDE // 8] += missed - count
            self.state[WAITED_NS // 8] += 1000
            pools[-1].experts += count
            pools[-1].bytes += 100 * count
            if self.is_late:
                self.state[ERROR // 8] = LATE
        super()._fill(layer, rows)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    pools.clear()
    monkeypatch.setattr(device_pool, "CpuPool", FakePool)
    monkeypatch.setattr(device_pool, "pool_threads", lambda _: 2)


@contextmanager
def pooling(path: Path, **options: Any) -> Iterator[Engine]:
    options = {"expert_cache": "40%", "pcie_frac": 0.5, **options}
    with engine_of(path, opens=PoolingBackend, **options) as engine:
        yield engine


def device_of(engine: Engine) -> PoolingBackend:
    device = model_of(engine)._backend
    assert isinstance(device, PoolingBackend)
    return device


def test_threads_are_awake_while_windows_are_in_flight_and_what_they_did_is_counted(
    small: Path,
) -> None:
    with pooling(small) as engine:
        assert len(write(begun(engine), 30)) == 30
        (pool,) = pools
        assert not pool.is_awake
        report = engine.describe()
        assert report.cpu_experts == pool.experts > 0
        assert report.cpu_bytes == 100 * pool.experts
        assert report.misses > report.cpu_experts
        copied_bytes = model_of(engine)._residency.copied_bytes
        assert report.link_bytes == report.missed_bytes - report.cpu_bytes + copied_bytes
        assert report.cpu_wait_s == pytest.approx(device_of(engine).state[POSTS // 8] * 1e-6)
    assert pool.is_closed


def test_threads_rest_when_the_window_in_flight_is_dropped_or_broken_off(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with pooling(small) as engine:
        model, session = model_of(engine), begun(engine)
        tokens = session.generate(max_tokens=30, sampling=GREEDY, ignore_eos=True)
        for _ in range(3):  # the first token has no window ahead
            next(tokens)
        assert pools[0].is_awake
        engine.describe()
        assert not pools[0].is_awake
        monkeypatch.setattr(model._steps.windows, "land", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(tokens)
        assert not pools[0].is_awake


def test_what_the_cpu_did_for_windows_that_were_dropped_is_not_counted(small: Path) -> None:
    with pooling(small, pcie_frac=0.0) as engine:
        session = engine.open_session()
        session.extend(PROMPT[:1])
        tokens = session.generate(max_tokens=20, sampling=GREEDY, ignore_eos=True)
        for number, _ in enumerate(tokens):
            if number % 4 == 3:
                engine.describe()
        report, (pool,) = engine.describe(), pools
        assert pool.experts > report.cpu_experts == report.misses > 0
        assert report.cpu_bytes == 100 * report.cpu_experts


def test_after_ctrl_c_at_any_line_threads_rest_and_answers_go_on(small: Path) -> None:
    with pooling(small) as engine:
        check_any_line(engine, 13)  # the device says whether they were awake when it wanted them
        assert pools[0].experts > 0
        assert not pools[0].is_awake


def test_threads_rest_when_what_was_in_flight_cannot_be_waited_for(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        device._queue.clear()
        raise DriverError("wait", 1, "no")

    with pooling(small) as engine:
        session, device = begun(engine), device_of(engine)
        with monkeypatch.context() as patch:
            patch.setattr(model_of(engine)._steps.windows, "land", lost)
            patch.setattr(device, "wait", lost)
            with pytest.raises(DriverError):
                write(session, 3)
        assert not pools[0].is_awake


def test_a_window_that_waited_in_vain_is_read_again_without_the_cpu(small: Path) -> None:
    said: list[str] = []
    with pooling(small) as engine:
        engine.say = said.append
        expected = write(begun(engine), 30)
        session, before = begun(engine), engine.describe().cpu_experts
        device_of(engine).is_late = True
        pools[0].failure = "thread 1 of the CPU pool ended"
        assert write(session, 30) == expected
        assert said == [
            "the card computes all experts from now on: the CPU gave no answer within 2 s: thread "
            "1 of the CPU pool ended"
        ]
        stopped = engine.describe().cpu_experts
        assert before == stopped  # the card did it all in the end
        assert write(begun(engine), 10) == expected[:10]
        assert engine.describe().cpu_experts == stopped
        pool = model_of(engine)._pool
        assert pool is not None
        assert pool.share == 0  # else who goes to the CPU would be computed by nobody
        assert not pools[0].is_awake


def test_an_engine_that_is_interrupted_while_it_opens_ends_its_threads(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    is_closed: list[bool] = []
    close = PoolingBackend.close

    def closed(self: PoolingBackend) -> None:
        is_closed.append(pools[0].is_closed)  # else they would read what is freed here
        close(self)

    monkeypatch.setattr(PoolingBackend, "close", closed)
    for owner, place in ((DeviceSteps, "use_pool"), (Engine, "off")):
        pools.clear()
        with monkeypatch.context() as patch:
            if owner is DeviceSteps:
                patch.setattr(owner, place, interrupted)
            else:  # set when the model is there
                patch.setattr(owner, place, property(None, interrupted), raising=False)
            with pytest.raises(KeyboardInterrupt), pooling(small):
                pass
    assert is_closed == [True, True]


def test_logits_that_waited_in_vain_are_computed_again(small: Path) -> None:
    with pooling(small) as engine:
        wanted = begun(engine).next_logits().copy()
        assert not pools[0].is_awake
        device_of(engine).is_late = True
        session = engine.open_session()
        session.extend(PROMPT[:1])
        for token in PROMPT[1:]:
            session.append(token)
            found = session.next_logits()
        assert pools[0].experts > 0
        assert device_of(engine).state[ERROR // 8] == LATE
        assert np.array_equal(found, wanted)
        pool = model_of(engine)._pool
        assert pool is not None
        assert pool.share == 0


@pytest.mark.parametrize("pcie_frac", [0.25, "auto"])
def test_a_device_that_experts_fill_without_holding_all_has_a_pool(
    small: Path, pcie_frac: float | str
) -> None:
    options = {"expert_cache": "auto", "pcie_frac": pcie_frac}
    with pooling(small, device="host:1x5MiB@64KiB", **options) as engine:
        model = model_of(engine)
        assert 0 < model.arena.usable_slots < model.ledger.plan.most_slots == 48
        (pool,) = pools
        write(begun(engine), 20)
        assert pool.experts > 0
        # There is no room to measure the link with.
        assert model._pool is not None
        assert model._pool.share == SHARE_UNITS * (0.75 if pcie_frac == 0.25 else 0.5)


def test_a_device_that_is_lost_while_its_link_is_measured_is_named(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise DeviceLost("copy", 1, "lost")

    monkeypatch.setattr(device_pool, "link_rate", lost)
    with pytest.raises(DeviceLost), pooling(small, pcie_frac="auto"):
        pass
    assert pools == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"cpu_pool": False, "pcie_frac": "auto"}, "--no-cpu-pool"),
        ({"deterministic": True, "pcie_frac": "auto"}, "--deterministic"),
        ({"pcie_frac": 1}, "--pcie-frac 1"),
    ],
)
def test_a_model_says_why_the_cpu_computes_none(
    small: Path, given: dict[str, Any], reason: str
) -> None:
    with pooling(small, **given) as engine:
        assert f"experts computed by the CPU ({reason})" in engine.off
    assert pools == []


def test_a_machine_with_few_processors_or_room_for_all_experts_has_no_pool(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pooling(small, expert_cache="100%") as engine:
        assert not any("CPU" in line for line in engine.off)
    monkeypatch.setattr(device_pool, "pool_threads", lambda _: 0)
    with pooling(small) as engine:
        assert "experts computed by the CPU (fewer than three processors)" in engine.off
    assert pools == []


def test_where_experts_lose_the_slots_that_all_had_it_is_said_once_that_no_cpu_helps(
    small: Path,
) -> None:
    said: list[str] = []
    with pooling(small, expert_cache="100%", vram_elastic=True) as engine:
        engine.say = said.append
        write(begun(engine), 10)
        assert said == []
        (device,) = engine.describe().devices
        assert device.free_bytes is not None
        engine.set_vram_reserve((device.free_bytes >> 20) + 1)
        session = begun(engine)
        write(session, 10)
        write(session, 10)
        assert said == [NO_POOL_YET]
    assert pools == []


def test_experts_of_floats_are_left_to_the_card() -> None:
    packed, floats = (ExpertPart(0, kind, (32, 32)) for kind in (T.Q4_K, T.F16))
    options = Options("model.gguf")
    for parts, reason in (([packed, packed], None), ([packed, floats], "experts of floats")):
        assert why_no_pool(options, [{"gate": one} for one in parts]) == reason


def test_what_threads_call_is_compiled_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Compiled] = []
    said: list[str] = []
    monkeypatch.setattr(Compiled, "is_at_hand", lambda _: False)
    monkeypatch.setattr(Compiled, "made", lambda one: made.append(one))
    compile_pool([{EXPERT_PARTS[0]: ExpertPart(0, T.Q4_K, (64, 64))}], said.append)
    assert {*host_pool.FUNCTIONS, matrix_functions(T.Q4_K).few} == set(made)
    assert said == [f"compiling {len(made)} functions of the CPU pool for this processor, once"]
    monkeypatch.setattr(Compiled, "is_at_hand", lambda one: one is not made[-1])
    compile_pool([{EXPERT_PARTS[0]: ExpertPart(0, T.Q4_K, (64, 64))}], said.append)
    assert said[1:] == ["compiling 1 function of the CPU pool for this processor, once"]


def test_a_pool_knows_of_each_layer_where_its_experts_are_and_how_they_are_packed() -> None:
    kinds, homes = ((T.Q4_K, T.Q5_K, T.Q6_K), (T.Q8_0, T.Q8_0, T.Q4_K)), np.zeros((2, 3), np.int64)
    parts = [
        {name: ExpertPart(100 * n, kind, (64, 64)) for n, (name, kind) in enumerate(each)}
        for each in (zip(EXPERT_PARTS, of_layer, strict=True) for of_layer in kinds)
    ]
    layers = pool_layers(parts, 256, 512, homes)
    assert [(one.gate, one.up, one.down) for one in layers] == list(kinds)
    assert [one.addresses for one in layers] == [int(row.ctypes.data) for row in homes]
    assert layers[1][3:9] == (0, 100, 200, 256, 512, 3)


def test_a_card_has_as_many_idle_bytes_as_eight_rows_of_any_down() -> None:
    asked: list[tuple[int, int]] = []
    device: Any = SimpleNamespace(open_pool=lambda *sizes: asked.append(sizes))
    model: Any = SimpleNamespace(width=64, expert_width=512)
    parts = [{EXPERT_PARTS[2]: ExpertPart(0, kind, (64, 512))} for kind in (T.Q4_K, T.Q8_0)]
    pool_places(device, model, parts)
    assert asked == [(64, 8 * formats.row_bytes(T.Q8_0, 512))]


def test_in_runs_that_are_no_windows_nobody_goes_to_the_cpu(small: Path) -> None:
    with pooling(small) as engine:
        write(begun(engine), 5)
        model = model_of(engine)
        model.report()
        kind, places = plan_type(model.arena.layout.experts), model._filling_places
        assert places is not None
        size_bytes = model.arena.layout.layers * kind.itemsize
        plans = memory_view(places.plan, size_bytes).view(kind)
        assert plans["cpu_share"].all()
        model._steps.silence()
        model._backend.wait()
        assert not plans["cpu_share"].any()


def test_the_share_follows_what_card_and_pool_needed() -> None:
    made = FakePool()
    pool = DevicePool(made, 0.5, lambda _: None, follows=True)  # type: ignore[arg-type]
    state = np.zeros(WORDS, np.int64)
    for _ in range(400):  # the CPU does three experts in the time that the card takes for one
        state[[POSTS // 8, CHOICES // 8, BESIDE // 8]] += [LEAST_POSTS // WINDOWS, 30, 20]
        state[ALONE_NS // 8] += 20 * 3000
        made.busy_s += 30 * 1e-6
        pool.landed(state)
    assert pool.share == pytest.approx(LEANS * 0.75 * SHARE_UNITS, rel=1e-3)
    few = DevicePool(made, 0.25, lambda _: None, follows=True)  # type: ignore[arg-type]
    state[POSTS // 8] = LEAST_POSTS - 1
    for _ in range(2 * WINDOWS):
        few.landed(state)
    assert few.share == SHARE_UNITS // 4
    state[POSTS // 8] = LEAST_POSTS
    fixed = DevicePool(made, 0.25, lambda _: None, follows=False)  # type: ignore[arg-type]
    for _ in range(2 * WINDOWS):
        fixed.landed(state)
    assert fixed.share == SHARE_UNITS // 4


@pytest.mark.parametrize("lacking", [ALONE_NS, BESIDE, None])
def test_the_share_stays_where_one_of_the_two_did_nothing(lacking: int | None) -> None:
    made = FakePool()
    pool = DevicePool(made, 0.25, lambda _: None, follows=True)  # type: ignore[arg-type]
    state = np.zeros(WORDS, np.int64)
    state[[POSTS // 8, CHOICES // 8, BESIDE // 8]] = LEAST_POSTS
    state[ALONE_NS // 8] = 10**6
    if lacking is None:
        made.busy_s = 0.0
    else:
        made.busy_s, state[lacking // 8] = 1e-3, 0
    for _ in range(WINDOWS):
        pool.landed(state)
    assert pool.share == SHARE_UNITS // 4


def test_a_mailbox_that_lets_nobody_wait_is_told_apart_from_a_late_answer() -> None:
    said: list[str] = []
    pool = DevicePool(FakePool(), 0.5, said.append, follows=False)  # type: ignore[arg-type]
    state = np.zeros(WORDS, np.int64)
    state[ERROR // 8] = ABORTED
    with pytest.raises(NoAnswer, match="no answer, and told it to wait no longer"):
        pool.landed(state)
    assert len(said) == 1


def test_a_share_that_became_too_small_for_posts_is_tried_again() -> None:
    made, layers, missed = FakePool(), 24, 4
    pool = DevicePool(made, 0.4, lambda _: None, follows=True)  # type: ignore[arg-type]
    state, found = np.zeros(WORDS, np.int64), []
    for window in range(1200):
        count = cpu_count(pool.share, missed)
        if count:
            state[[POSTS // 8, CHOICES // 8, BESIDE // 8]] += layers * np.array(
                [1, count, missed - count]
            )
            state[ALONE_NS // 8] += layers * (missed - count) * 1000
            is_busy = window < 200  # with other programs
            made.busy_s += layers * count * (100e-6 if is_busy else 1e-6)
        pool.landed(state)
        found.append(count)
    assert found[199] == 0
    assert found[-1] > 0
