"""Programs on a card, without one: the unmodified driver and backend, kernels in the simulator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import kernel_references as plain
import numpy as np
import pytest
from card_world import IMAGE, Simulated, failing_card, simulated_card
from cuda_table_of_host import FailingTable, HostTable
from device_world import load, make_tiny, opened, random_tokens, read
from gpu_launches import shaped
from host_launches import normal
from make_model import make_model
from model_shapes import ModelShape
from numpy.typing import NDArray

from strata_nb import Sampling, card_backend, cuda_table, device_streaming
from strata_nb.addresses import memory_view
from strata_nb.card_backend import CardBackend, CardProgram
from strata_nb.device_model import DeviceModel
from strata_nb.driver import CudaDriver
from strata_nb.errors import DeviceLost, DriverError, StrataError
from strata_nb.formats import TensorType
from strata_nb.kernels import mailbox
from strata_nb.kernels.gpu.card_launch import CardLaunch, card_launch
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.gpu.reading import STRETCH_BYTES, SUMS_BYTES
from strata_nb.kernels.pool_state import WORDS
from strata_nb.kernels.program import launch
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.reference import Floats
from strata_nb.sampling import Choice, uniform
from strata_nb.shared_tables import SharedTable
from strata_nb.steps import Row

GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card") / "tiny.gguf"
    make_tiny(path)
    return path


@pytest.fixture(scope="module")
def on_host(tiny: Path) -> Iterator[Floats]:
    with opened(tiny, rows=8, ctx=64) as model:
        yield read(model, model.open_sequence(), random_tokens(3))


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[DeviceModel]:
    """The model on a simulated card."""
    with (
        simulated_card(budget_bytes=2 * GIB) as backend,
        closing(load(backend, tiny, ctx=64, rows=8)) as model,
    ):
        yield model
        model.ledger.check_integrity()


@contextmanager
def heads_alone(model: DeviceModel) -> Iterator[None]:
    """Leave the bodies out, which take long: heads read what the step before left."""
    run, steps = model._backend.run, model._steps
    windows = steps.windows
    assert windows is not None

    def run_heads(program: Any, *given: Any) -> None:
        if program is windows._program:
            model._backend.run(steps._few.heads._head, *given)
            model._backend.run(steps._few.heads._choice, *given)
        elif program is not steps._few._body:
            run(program, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model._backend, "run", run_heads)
        patch.setattr(windows._flights, "_run", run_heads)
        yield


def leave_rows(model: DeviceModel) -> None:
    """Leave made numbers where heads read the rows of a step."""
    rows = arguments_of(model._programs.head[0])["x"]
    model._backend.send(rows, normal(8, model.description.width))


def test_a_model_on_a_card_gives_the_hosts_logits_and_draws_from_them(
    model: DeviceModel, on_host: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, ids = model.open_sequence(), random_tokens(3)
    fetched: list[int] = []
    fetch = model._backend.fetch

    def watched(address: int, array: NDArray[Any]) -> None:
        fetched.append(address)
        fetch(address, array)

    monkeypatch.setattr(model._backend, "fetch", watched)
    few = Sampling(presence_penalty=2.0, top_k=0)
    choices = [
        Choice((), Sampling(temperature=0), 0.0),
        Choice((), Sampling(), uniform(1, 0, 1)),
        Choice(ids, few, uniform(1, 0, 2), {int(on_host[2].argmax())}),
    ]
    tokens = model.choose([Row(sequence, token, True) for token in ids], choices)
    assert fetched == []  # one window, whose tokens come by themselves
    assert model.length(sequence) == 3
    model.rewind(sequence, 0)
    with heads_alone(model):
        logits = read(model, sequence, ids)
    assert np.abs(logits - on_host).max() < 1e-3 * np.abs(on_host).max()
    assert tokens == plain.sample(logits, choices).tolist()


def test_launches_of_a_row_that_overlap_give_the_hosts_logits(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    sizes = {"experts": 3, "top_k": 2, "dim": 512, "ff": 32, "heads": 2, "kv_heads": 1}
    make_model(path, ModelShape("qwen3moe", vocab=258, **sizes), rules=[("*", TensorType.Q8_0)])
    ids = random_tokens(1)
    with opened(path, rows=8, ctx=64) as model:
        wanted = read(model, model.open_sequence(), ids)
    with (
        simulated_card(budget_bytes=2 * GIB) as backend,
        closing(load(backend, path, ctx=64, rows=8)) as model,
    ):
        launches = backend.launches(model._programs.body, 1)
        names = [one.kernel.name.partition("_q8")[0] for one in launches]
        layer = ["normed_row", "attention_halves_ready_64_64_2_joined", "one_row"]
        layer += ["router_f32_512_3_2", "early_gate_up", "expert_down"]
        assert names == ["embed", *layer, *layer]
        found = read(model, model.open_sequence(), ids)
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.slow
def test_a_prompt_is_read_in_a_batch(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_streaming, "LEAST_CHOICES", 8)  # of so few rows
    ids = random_tokens(14)
    with opened(tiny, rows=16, ctx=64) as model:
        wanted = read(model, model.open_sequence(), ids)
    with (
        simulated_card(budget_bytes=2 * GIB) as backend,
        closing(load(backend, tiny, ctx=64, rows=16, expert_cache="2")) as model,
    ):
        sequence = model.open_sequence()
        rows = [Row(sequence, token, number in (2, 10)) for number, token in enumerate(ids[:12])]
        logits = [*model.step(rows), *read(model, sequence, ids[12:])]
        assert model.report().streamed == 6
        assert model.chosen(2).shape == (2, 2, 2)
        assert model.arena.tally.sum() == 14 * 2 * 2
        model.ledger.check_integrity()
    for found, row in zip(logits, (2, 10, 12, 13), strict=True):
        assert np.abs(found - wanted[row]).max() < 1e-3 * np.abs(wanted).max()


def test_graphs_of_batches_have_sizes_between_a_few_rows_and_the_most() -> None:
    assert [list(card_backend._sizes(most)) for most in (9, 32, 33, 512, 4096)] == [
        [9],
        [32],
        [32, 33],
        [32, 128, 512],
        [32, 64, 256, 1024, 4096],
    ]
    program = card_backend.CardProgram({32: [1, 4], 128: [2, 5], 512: [3, 6]}, [7, 9])
    asked = (9, 32, 33, 128, 129, 512)
    assert [program.graphs(rows, 0, 7) for rows in asked] == [[1], [1], [2], [2], [3], [3]]
    assert (program.graphs(9), program.graphs(9, 7)) == ([1, 4], [4])
    with pytest.raises(AssertionError, match="launches 0 to 8 are no pieces"):
        program.graphs(9, 0, 8)


def test_a_choice_that_has_no_room_on_the_card_is_made_by_the_host(model: DeviceModel) -> None:
    sequence = model.open_sequence()
    leave_rows(model)
    with heads_alone(model):
        logits = read(model, sequence, [1])
        banned = np.argsort(-logits[0])[:100].tolist()
        choice = Choice((), Sampling(), 0.5, banned)
        tokens = model.choose([Row(sequence, 1, True)], [choice])
    assert tokens == plain.sample(logits, [choice])


def test_logits_that_the_card_cannot_use_are_reported_as_the_host_reports_them(
    model: DeviceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = model.open_sequence()
    leave_rows(model)
    with heads_alone(model):
        run = model._backend.run

        def damaged(program: Any, *given: Any) -> None:
            run(program, *given)
            if program is model._steps._few.heads._head:
                bad = np.full(model.description.vocab_size, np.nan, np.float32)
                model._backend.send(model._programs.logits, bad)

        with monkeypatch.context() as patch:
            patch.setattr(model._backend, "run", damaged)
            with pytest.raises(StrataError, match="258 of 258 are NaN or infinite"):
                model.choose([Row(sequence, 1, True)], [Choice((), Sampling(), 0.5)])
        assert model.length(sequence) == 0
        read(model, sequence, [1])
    assert model.length(sequence) == 1


WIDTH = 8


class Adding:
    """A program that adds `x` to `y`, which it writes, on a card."""

    def __init__(self, backend: CardBackend) -> None:
        self.x = SharedTable(np.ones(WIDTH, np.float32))
        self.y = SharedTable(np.zeros(WIDTH, np.float32))
        one_row, open_gate = np.ones(1, np.int64), np.full(1, np.inf, np.float32)
        self._kept = SharedTable(one_row), SharedTable(open_gate)
        self.backend = backend
        rows, gate = (backend.share(one) for one in self._kept)
        self.x_address = backend.share(self.x)
        self.y_address = backend.share(self.y, is_written=True)
        words = {"rows": rows, "gate": gate, "x": self.x_address, "y": self.y_address}
        words["width"] = WIDTH
        self.launches = (launch("gated_add", words),)
        self.program: CardProgram
        (self.program,) = backend.prepare([self.launches])

    def run(self) -> None:
        self.backend.run(self.program, 1)


def test_a_run_sees_what_the_host_wrote_though_nobody_waited() -> None:
    """As after a step that Ctrl-C broke off."""
    with simulated_card() as backend:
        adding = Adding(backend)
        adding.run()
        adding.x[:] = 10
        adding.run()
        backend.wait()
        assert adding.y.array.tolist() == [11] * WIDTH


def test_what_programs_wrote_is_there_after_a_wait_and_can_be_changed() -> None:
    with simulated_card() as backend:
        adding = Adding(backend)
        adding.run()
        backend.wait()
        assert adding.y.array.tolist() == [1] * WIDTH
        adding.y[:] = 5
        adding.run()
        backend.wait()
        assert adding.y.array.tolist() == [6] * WIDTH


def test_a_wait_leaves_tables_alone_that_no_run_has_written() -> None:
    with simulated_card() as backend:
        adding = Adding(backend)
        adding.y[:] = 5
        backend.wait()
        assert adding.y.array.tolist() == [5] * WIDTH
        adding.run()
        backend.wait()
        adding.y[:] = 7
        backend.wait()
        assert adding.y.array.tolist() == [7] * WIDTH


def test_tables_that_the_host_left_alone_are_not_sent_again() -> None:
    with failing_card() as (open_card, table), closing(open_card()) as backend:
        adding = Adding(backend)
        adding.run()
        backend.wait()
        before = table.calls["cuMemcpyAsync"]
        adding.run()
        assert table.calls["cuMemcpyAsync"] == before
        adding.x[:] = 2
        adding.run()
        assert table.calls["cuMemcpyAsync"] == before + 1
        backend.wait()


def test_what_a_card_shares_with_the_cpu_begins_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("allocate", "allocate_host"):
        taken = getattr(CudaDriver, name)

        def used(driver: CudaDriver, size: int, *on: int, taken: Any = taken) -> int:
            address: int = taken(driver, size, *on)
            memory_view(address, size)[:] = 0xFF  # by somebody else, before
            return address

        monkeypatch.setattr(CudaDriver, name, used)
    with simulated_card() as backend:
        places = backend.open_pool(64, 256)
        assert not memory_view(places.box, mailbox.box_bytes(64)).any()
        for address, size in ((places.state, 8 * WORDS), (places.idle, 256)):
            found = np.full(size, 0xFF, np.uint8)
            backend.fetch(address, found)
            assert not found.any()


def test_arrays_larger_than_the_staging_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging is used again and again, while copies from it are under way."""
    monkeypatch.setattr(card_backend, "STAGING_BYTES", 1 << 10)
    random = np.random.default_rng(0)
    with simulated_card() as backend:
        sent = [random.integers(0, 256, size, np.uint8) for size in (10_000, 0, 300, 900, 1024, 1)]
        places = [backend.share(SharedTable(np.zeros_like(one))) for one in sent]
        found: list[NDArray[Any]] = [np.zeros_like(one) for one in sent]
        for _ in range(3):
            for place, one, back in zip(places, sent, found, strict=True):
                backend.send(place, one)
                backend.fetch(places[1], found[1])  # of nothing
                one += 1
                back[:] = 0
        for place, one, back in zip(places, sent, found, strict=True):
            backend.fetch(place, back)
            assert np.array_equal(back, one - 1)


def test_reading_the_cards_memory_is_timed_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(card_backend, "PLAIN_READ_BYTES", 2 * (STRETCH_BYTES + SUMS_BYTES))
    monkeypatch.setattr(card_backend, "PLAIN_READ_LEAST", STRETCH_BYTES)
    monkeypatch.setattr(card_backend, "PLAIN_READ_LEAVES", GIB // 8)
    monkeypatch.setattr(card_backend, "PLAIN_READ_PASSES", 2)
    with simulated_card(budget_bytes=GIB) as backend:
        backend.driver.mem_info(0)
        before = backend.driver.live()  # type: ignore[attr-defined]
        found = backend.plain_read()
        assert found.size_bytes == 2 * STRETCH_BYTES
        assert len(found.seconds) == 2
        assert min(found.seconds) > 0
        assert found.bytes_per_s == found.size_bytes / min(found.seconds)
        assert {**backend.driver.live(), "modules": 0} == {**before, "modules": 0}  # type: ignore[attr-defined]


def test_a_card_with_too_little_free_memory_is_not_measured() -> None:
    with simulated_card() as backend, pytest.raises(StrataError, match=r"bytes of cuda are free"):
        backend.plain_read()


def test_a_profile_runs_parts_behind_whole_windows_and_leaves_counts_and_driver_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(card_backend, "REPLAYS", 2)
    with failing_card() as (open_card, table), closing(open_card()) as backend:
        adding = Adding(backend)
        adding.run()
        backend.wait()
        before = backend.driver.live()  # type: ignore[attr-defined]
        adding.x[:] = 3  # which the card has not seen yet
        launched = table.calls["cuGraphLaunch"]
        found = backend.profile([adding.launches, adding.launches], 1, 0)
        # Of two launches that are no layer: behind 1, of 2 and 3, and the whole, each time twice.
        assert table.calls["cuGraphLaunch"] - launched == 2 * 2 * 4
        (line,) = found.lines
        assert (line.kind.kernel, line.count, line.measured) == ("gated_add", 2, 2)
        assert found.whole_s > 0
        assert backend.driver.live() == before  # type: ignore[attr-defined]
        assert adding.y.array.tolist() == [1] * WIDTH
        adding.run()
        backend.wait()
        assert adding.y.array.tolist() == [4] * WIDTH


@pytest.mark.parametrize(
    "function",
    ["cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuEventRecord", "cuEventElapsedTime"],
)
def test_a_profile_that_fails_leaves_counts_and_driver_as_they_were(function: str) -> None:
    with failing_card() as (open_card, table), closing(open_card()) as backend:
        adding = Adding(backend)
        adding.run()
        backend.wait()
        before = backend.driver.live()  # type: ignore[attr-defined]
        table.plan(function, 2)
        with pytest.raises(DriverError, match=function):
            backend.profile([adding.launches], 1, 0)
        assert backend.driver.live() == before  # type: ignore[attr-defined]
        adding.run()
        backend.wait()
        assert adding.y.array.tolist() == [2] * WIDTH


@pytest.mark.parametrize("same_bits", [True, False])
def test_a_card_with_warpgroups_multiplies_by_them_unless_bits_shall_be_those_of_windows(
    same_bits: bool,
) -> None:
    idle = Simulated()
    with closing(HostTable(1)) as cards, closing(CudaDriver(cards)) as driver:
        backend = CardBackend("cuda", driver, 0, idle, 1, has_warpgroups=True)
        backend.same_bits = same_bits
        product = shaped("linear", TensorType.Q4_K, values=256, outputs=4096)
        (*_, last) = backend.launches((product,), 512)
        (alone,) = backend.launches((product,), 1)
        assert last.kernel.name.startswith("batch" if same_bits else "warpgroup")
        assert alone.kernel.name.startswith("one_row")
        assert backend.bytes_beside == (0 if same_bits else 2)
        assert backend.packed_row_bytes(256) == row_bytes(256)  # kernels of windows step by it
        backend.close()


@pytest.mark.parametrize("overlaps", [True, False])
def test_launches_overlap_unless_they_shall_not(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    monkeypatch.setattr(CardBackend, "overlaps", overlaps)
    simulated = Simulated()
    with closing(HostTable(1, kernels={IMAGE: simulated.kernels})) as cards:
        with closing(CardBackend("cuda", CudaDriver(cards), 0, simulated, 1)) as backend:
            Adding(backend)
        assert cards.calls["cuLaunchKernelEx"] > 1
        assert cards.overlapping == (cards.calls["cuLaunchKernelEx"] if overlaps else 0)


class Invalidated(FailingTable):
    """Refuse launches, which makes the capture they belong to invalid, as on a card."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = super().__getattr__(name)
        if name == "cuLaunchKernelEx":
            return lambda *_: cuda_table.INVALID_VALUE
        if name != "cuStreamEndCapture":
            return function

        def end(stream: int, graph: Any) -> int:
            ended = ctypes.c_void_p()
            assert function(stream, ctypes.byref(ended)) == cuda_table.SUCCESS
            assert self.cuGraphDestroy(ended) == cuda_table.SUCCESS
            return 901  # CUDA_ERROR_STREAM_CAPTURE_INVALIDATED

        return end


def test_a_launch_that_is_refused_is_what_is_reported_not_the_capture_it_spoils() -> None:
    with (
        failing_card(wrap=Invalidated) as (open_card, _),
        closing(open_card()) as backend,
        pytest.raises(DriverError, match="cuLaunchKernelEx"),
    ):
        Adding(backend)


CALLS = {
    "cuDevicePrimaryCtxRetain": 1,
    "cuMemGetInfo": 1,
    "cuStreamCreateWithPriority": 1,
    "cuMemHostAlloc": 1,
    "cuMemAlloc": 3,
    "cuModuleLoadDataEx": 1,
    "cuModuleGetFunction": 1,
    "cuStreamBeginCapture": 2,
    "cuLaunchKernelEx": 3,
    "cuGraphInstantiateWithFlags": 2,
    "cuGraphDestroy": 2,
    "cuMemcpyAsync": 2,
    "cuGraphLaunch": 1,
    "cuStreamSynchronize": 1,
}


@pytest.mark.parametrize("function", CALLS)
def test_a_call_that_fails_leaves_nothing_behind(function: str) -> None:
    def use() -> None:
        with closing(open_card()) as backend:
            adding = Adding(backend)
            adding.run()
            backend.wait()

    with failing_card() as (open_card, table):
        table.plan(function, CALLS[function])
        with pytest.raises(DriverError, match=function):
            use()


def test_closing_after_a_card_is_lost_says_nothing_new_and_calls_nothing() -> None:
    with failing_card(is_lost=True) as (open_card, table):
        backend = open_card()
        adding = Adding(backend)
        adding.run()
        table.plan("cuStreamSynchronize", status=700)
        with pytest.raises(DeviceLost, match="cuStreamSynchronize"):
            backend.wait()
        calls = table.calls.total()
        backend.close()
        assert table.calls.total() == calls


def test_a_backend_can_be_closed_twice_and_not_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_card() as (open_card, table):
        backend = open_card()
        Adding(backend)
        calls = table.calls.total()
        with monkeypatch.context() as fork:
            fork.setattr("os.getpid", lambda: 0)
            backend.close()
        assert table.calls.total() == calls
        backend.close()
        calls = table.calls.total()
        backend.close()
        assert table.calls.total() == calls


def test_a_kernel_keeps_the_most_shared_memory_that_a_launch_of_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = card_launch(shaped("gated_add", width=8)).kernel
    kernel = kernel._replace(shared_bytes=lambda given: given["width"])

    def taking(size: int) -> CardLaunch:
        return card_launch(shaped("gated_add", width=size))._replace(kernel=kernel)

    monkeypatch.setattr(card_backend, "card_launches", lambda program, *_, **__: program)
    with simulated_card() as backend:
        backend.prepare([[taking(8), taking(100_000), taking(60_000)], [taking(80_000)]])


def test_a_large_card_reads_more_rows_at_once_unless_it_counts_as_a_small_one() -> None:
    with simulated_card() as card, pytest.MonkeyPatch.context() as patch:
        for memory, limit, rows in (
            (80 << 30, None, 4096),
            (32 << 30, 40 << 30, 4096),
            (80 << 30, (32 << 30) - 1, 2048),
            (24 << 30, None, 2048),
        ):
            patch.setattr(card.driver, "mem_info", lambda _, total=memory: (0, total))
            assert card.usual_rows(limit) == rows
