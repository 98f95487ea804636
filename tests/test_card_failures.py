"""A card that fails: what is told, what is left, and whether the next step and the next life are
right. Kernels do nothing here, so that every call of the driver can fail once in seconds.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_world import IMAGE, Entry
from cuda_table_of_host import FailingTable, HostTable
from device_world import load, make_tiny, random_tokens, read

from strata_nb import Sampling, device_pool, device_streaming
from strata_nb.card_backend import CardBackend
from strata_nb.device_model import DeviceModel
from strata_nb.driver import CudaDriver
from strata_nb.errors import DeviceLost, DriverError, UnsupportedDevice
from strata_nb.kernels.gpu import operations
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.sampling import Choice
from strata_nb.steps import Row

GIB = 1 << 30
LOST = 700


class Idle:
    """Compile kernels into ones that do nothing."""

    def __init__(self) -> None:
        self.kernels: dict[str, Callable[[object], None]] = {}

    def __call__(
        self, wanted: Sequence[tuple[GpuKernel, Sequence[str]]], progress: Any, say: Any
    ) -> Mapping[str, Entry]:
        for kernel, _ in wanted:
            self.kernels[kernel.name] = lambda launch: None
        return {kernel.name: Entry(kernel.name) for kernel, _ in wanted}


class Machine:
    """A machine with one card, whose driver can be told to fail."""

    def __init__(self) -> None:
        self.idle = Idle()
        self.cards = HostTable(1, kernels={IMAGE: self.idle.kernels}, budget_bytes=2 * GIB)
        self.table = FailingTable(self.cards)

    def open(self) -> CardBackend:
        return CardBackend("cuda", CudaDriver(self.table), 0, self.idle, 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card") / "tiny.gguf"
    make_tiny(path)
    return path


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.cards.close()


@contextmanager
def on_card(machine: Machine, path: Path) -> Iterator[DeviceModel]:
    with (
        closing(machine.open()) as backend,
        closing(load(backend, path, ctx=64, rows=8)) as model,  # type: ignore[arg-type]
    ):
        yield model


def live_once(machine: Machine, path: Path) -> None:
    """Open a model, read, draw a token, give memory away and take it back, and close."""
    with on_card(machine, path) as model:
        sequence = model.open_sequence()
        read(model, sequence, random_tokens(8))
        model.set_reserve(model._backend.driver.mem_info(0)[0] + (4 << 20))
        read(model, sequence, random_tokens(1))
        # What a kernel would draw that does something.
        model._backend.send(model._programs.drawn, np.array([7]))
        assert model.choose([Row(sequence, 1, True)], [Choice((), Sampling(), 0.5)]) == [7]
        model.set_reserve(None)
        model.ledger.check_integrity()


def _calls_of_a_life(path: Path) -> Counter[str]:
    machine = Machine()
    live_once(machine, path)
    machine.cards.close()
    return machine.table.calls


# A failed unmapping is tried again, and says nothing where that helps; behind the release of a
# context there is nobody who could try again.
_NOT_SWEPT = ("cuMemUnmap", "cuDevicePrimaryCtxRelease")


def _fails(path: Path, name: str, nth: int) -> None:
    """Live with one call that fails, and again on the same machine without."""
    machine = Machine()
    machine.table.plan(name, nth)
    with pytest.raises((DriverError, UnsupportedDevice), match="CUDA_ERROR_UNKNOWN"):
        live_once(machine, path)
    assert machine.cards.live() == {}, f"call {nth} of {name}"
    assert machine.cards.refused == []
    if nth == 1:
        live_once(machine, path)
    machine.cards.close()


def test_whichever_function_fails_once_is_told_and_leaves_nothing(tiny: Path) -> None:
    for name, count in _calls_of_a_life(tiny).items():
        if name not in _NOT_SWEPT:
            _fails(tiny, name, (count + 1) // 2)


@pytest.mark.slow
def test_whichever_call_fails_once_is_told_and_leaves_nothing(tiny: Path) -> None:
    for name, count in _calls_of_a_life(tiny).items():
        if name not in _NOT_SWEPT:
            for nth in range(1, count + 1, max(1, count // 16)):
                _fails(tiny, name, nth)


def test_a_call_that_fails_around_the_start_of_a_cpu_pool_leaves_no_thread(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live(machine: Machine) -> None:
        with (
            closing(machine.open()) as backend,
            closing(load(backend, tiny, ctx=64, rows=8, expert_cache="2", pcie_frac=0.5)) as model,  # type: ignore[arg-type]
        ):
            assert model._pool is not None

    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name.startswith("strata-pool-")]

    monkeypatch.setattr(device_pool, "pool_threads", lambda _: 2)
    machine = Machine()
    live(machine)
    machine.cards.close()
    for name in ("cuMemHostAlloc", "cuMemAlloc", "cuMemHostRegister", "cuMemGetInfo"):
        for nth in {1, machine.table.calls[name]}:  # the last, behind the start of the threads too
            failing = Machine()
            failing.table.plan(name, nth)
            with pytest.raises((DriverError, UnsupportedDevice), match="CUDA_ERROR_UNKNOWN"):
                live(failing)
            assert threads() == []
            assert failing.cards.live() == {}, f"call {nth} of {name}"
            failing.cards.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_tables_are_sent_again_after_a_step_that_failed(
    machine: Machine, tiny: Path, nth: int
) -> None:
    """The body's launch fails, or the head's: by then the card has the tables of that step."""
    with on_card(machine, tiny) as model:
        read(model, model.open_sequence(), [1, 2])
        machine.table.plan("cuGraphLaunch", nth)
        with pytest.raises(DriverError, match="cuGraphLaunch"):
            read(model, model.open_sequence(), [1])
        read(model, model.open_sequence(), [1])
        backend = model._backend
        assert isinstance(backend, CardBackend)
        (shared,) = [one for one in backend._shared if one.table is model.kv.blocks]
        on_it = np.empty_like(model.kv.table)
        backend.fetch(shared.address, on_it)
        assert np.array_equal(on_it, model.kv.table)


def test_a_table_whose_copy_failed_is_sent_again(machine: Machine, tiny: Path) -> None:
    with on_card(machine, tiny) as model:
        backend, tiers = model._backend, model.arena.tiers
        assert isinstance(backend, CardBackend)
        (shared,) = [one for one in backend._shared if one.table is tiers]
        sequence, on_it = model.open_sequence(), np.empty_like(tiers.array)
        for nth in itertools.count(1):
            backend.send(shared.address, np.full_like(on_it, 7))
            tiers[:] = tiers.array.copy()
            machine.table.plan("cuMemcpyAsync", nth)
            has_failed = False
            try:
                read(model, sequence, [1])
            except DriverError:
                has_failed = True
            machine.table.lift()
            read(model, sequence, [1])
            backend.fetch(shared.address, on_it)
            assert np.array_equal(on_it, tiers.array), f"copy {nth}"
            if not has_failed:
                break
        assert nth > 3


def test_a_batch_in_which_a_call_failed_gives_back_what_it_borrowed(
    machine: Machine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_streaming, "LEAST_CHOICES", 8)  # of so few rows
    with (
        closing(machine.open()) as backend,
        closing(load(backend, tiny, ctx=64, rows=16, expert_cache="2")) as model,  # type: ignore[arg-type]
    ):
        sequence, start = model.open_sequence(), model.ledger.holdings()

        def batch() -> None:
            read(model, sequence, random_tokens(12))
            model.rewind(sequence, 0)

        before = machine.table.calls.copy()
        batch()
        calls = machine.table.calls - before
        assert model.ledger.loan()[1] > 0
        model.make_room(sequence, 1, prompt=True)  # by then nothing is lent
        raised = set()
        for name, count in calls.items():
            for nth in {1, (count + 1) // 2, count}:
                machine.table.plan(name, nth)
                try:
                    batch()
                except DriverError:  # what no answer needs is only said
                    raised.add(name)
                machine.table.lift()
                assert model.length(sequence) == 0
                model.ledger.check_integrity()
                batch()
                model.make_room(sequence, 1, prompt=True)
                assert model.ledger.holdings() == start
        assert raised >= {"cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuGraphLaunch"}


def test_a_step_that_failed_has_ended_on_the_card_when_it_is_told(
    machine: Machine, tiny: Path
) -> None:
    with on_card(machine, tiny) as model:
        sequence = model.open_sequence()
        machine.table.plan("cuGraphLaunch", 2)
        before = machine.table.calls["cuStreamSynchronize"]
        with pytest.raises(DriverError, match="cuGraphLaunch"):
            read(model, sequence, [1])
        assert machine.table.calls["cuStreamSynchronize"] > before
        assert model.length(sequence) == 0


@pytest.mark.parametrize(
    ("name", "nth"), [("cuGraphLaunch", 1), ("cuGraphLaunch", 2), ("cuStreamSynchronize", 1)]
)
def test_a_card_that_is_lost_in_a_step_is_named_until_the_end(
    machine: Machine, tiny: Path, name: str, nth: int
) -> None:
    backend = machine.open()
    model = load(backend, tiny, ctx=64, rows=8)  # type: ignore[arg-type]
    sequence = model.open_sequence()
    machine.table.plan(name, nth, status=LOST)
    for _ in range(2):
        with pytest.raises(DeviceLost, match=f"{name}: CUDA_ERROR_ILLEGAL_ADDRESS"):
            read(model, sequence, [1])
    for _ in range(2):  # nothing is left to be freed, and who lost the card was told
        model.close()
        backend.close()
    assert backend.driver.live() == {}
    assert machine.cards.refused == []


def test_a_launch_that_fails_while_it_is_captured_is_what_is_told(
    machine: Machine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver calls the whole capture invalid then, which says nothing about the cause."""
    ended = CudaDriver.capture_end

    def invalidated(driver: CudaDriver, stream: int) -> int:
        driver.graph_destroy(ended(driver, stream))
        raise DriverError("capture_end", 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", device=0)

    monkeypatch.setattr(CudaDriver, "capture_end", invalidated)
    machine.table.plan("cuLaunchKernelEx", 5)
    with pytest.raises(DriverError, match="cuLaunchKernelEx"):
        live_once(machine, tiny)
    assert machine.cards.live() == {}


@pytest.mark.parametrize("name", ["cuStreamBeginCapture", "cuLaunchKernelEx", "cuStreamEndCapture"])
def test_an_interrupt_during_a_capture_leaves_nothing(
    machine: Machine, tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def interrupt(*_: object) -> int:
        monkeypatch.delattr(machine.table, name)
        raise KeyboardInterrupt

    monkeypatch.setattr(machine.table, name, interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        live_once(machine, tiny)
    assert machine.cards.live() == {}
    live_once(machine, tiny)


def test_a_fork_closes_nothing_of_its_parents(machine: Machine, tiny: Path) -> None:
    with on_card(machine, tiny) as model:
        before = machine.table.calls.copy()
        child = os.fork()
        if child == 0:
            model.close()
            model._backend.close()
            os._exit(0 if machine.table.calls == before else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        read(model, model.open_sequence(), [1])


def test_a_shape_that_no_grid_has_is_refused_before_anything_is_loaded(
    machine: Machine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MOST_BLOCKS", 32)  # the head has 258 outputs
    with closing(machine.open()) as backend:
        before = machine.table.calls["cuMemAlloc"]
        with pytest.raises(UnsupportedDevice, match="258 outputs: on a card it has 256 at most"):
            load(backend, tiny, ctx=64, rows=8)  # type: ignore[arg-type]
        assert machine.table.calls["cuMemAlloc"] == before
