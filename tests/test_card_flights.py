"""Windows on a card: what is called for a token, and two under way at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from card_world import simulated_card
from device_world import load
from make_model import make_model
from model_shapes import ModelShape
from test_card_backend import WIDTH, Adding
from test_card_failures import Machine

from strata_nb import Engine, Options, Sampling, backend
from strata_nb.card_backend import CardBackend
from strata_nb.formats import TensorType
from strata_nb.sampling import Choice, uniform
from strata_nb.steps import Row

GIB = 1 << 30
CALLS = (
    "cuMemcpyAsync",
    "cuGraphLaunch",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamSynchronize",
)


def test_two_windows_are_under_way_and_each_brings_what_was_there_at_its_end() -> None:
    with simulated_card() as backend:
        adding = Adding(backend)
        adding.run()  # sends the tables: x is 1, y becomes that
        flights = backend.flights(8 * WIDTH, 8 * WIDTH)
        x, y = adding.x_address, adding.y_address
        sent = np.full(WIDTH, 2, np.float32)
        first = flights.begin(adding.program, 1, [(x, sent.view(np.uint8))], [(y, 4 * WIDTH)])
        sent[:] = 5
        second = flights.begin(adding.program, 1, [(x, sent.view(np.uint8))], [(y, 16), (x, 16)])
        sent[:] = 9
        assert flights.land(first).view(np.float32)[:WIDTH].tolist() == [3] * WIDTH
        assert flights.land(second).view(np.float32)[:8].tolist() == [8] * 4 + [5] * 4


def test_a_window_that_nobody_landed_is_waited_for_before_its_memory_is_used_again() -> None:
    with simulated_card() as backend:
        adding = Adding(backend)
        adding.run()  # sends the tables: x is 1, y becomes that
        flights = backend.flights(8 * WIDTH, 8 * WIDTH)
        for number in range(1, 6):
            sent = np.full(WIDTH, number, np.float32).view(np.uint8)
            last = flights.begin(
                adding.program, 1, [(adding.x_address, sent)], [(adding.y_address, 8)]
            )
        assert flights.land(last).view(np.float32)[0] == 16


@contextmanager
def idle_card(path: Path, machine: Machine) -> Iterator[Engine]:
    """Open a model on a card whose kernels do nothing: every token is the one that was before."""

    def open_card(*_: object) -> CardBackend:
        return machine.open()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "open_backend", open_card)
        with closing(machine.cards), Engine.open(Options(path, device="cuda", ctx_size=256)) as one:
            model = one._device()
            model._backend.send(model._programs.drawn, np.full(8, 7))
            model.arena.fill(np.ndindex(model.arena.use.shape))  # type: ignore[arg-type]
            yield one


def test_a_token_takes_a_copy_to_the_card_a_graph_a_copy_back_and_one_wait(tiny: Path) -> None:
    machine = Machine()
    with idle_card(tiny, machine) as engine:
        session = engine.open_session()
        session.append(5)
        generation = session.generate(sampling=Sampling(seed=1), ignore_eos=True)
        for _ in range(3):
            next(generation)
        before = machine.table.calls.copy()
        for _ in range(10):
            next(generation)
        calls = machine.table.calls - before
        assert {name: calls[name] for name in CALLS} == dict(
            zip(CALLS, (20, 10, 10, 10, 0), strict=True)
        )
        assert not set(calls) - set(CALLS)


def test_tables_go_to_the_card_when_they_have_changed_and_only_then(tiny: Path) -> None:
    machine = Machine()
    with idle_card(tiny, machine) as engine:
        session = engine.open_session()
        session.append(5)
        generation = session.generate(sampling=Sampling(seed=1), ignore_eos=True)
        next(generation)
        before = machine.table.calls["cuMemcpyAsync"]
        for _ in range(130):
            next(generation)
        windows, blocks = 131, 2  # one window is ahead
        assert machine.table.calls["cuMemcpyAsync"] == before + 2 * windows + blocks


def test_a_window_reads_on_the_card_what_the_one_before_it_drew_there(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shape = ModelShape("llama", 1, 0, 0, dim=32, ff=32, heads=1, kv_heads=1, head_dim=32, vocab=258)
    make_model(path, shape, rules=[("*", TensorType.F32)])
    choices = [Choice((), Sampling(top_k=0), uniform(1, 0, place)) for place in range(3)]
    with (
        simulated_card(budget_bytes=2 * GIB) as card,
        closing(load(card, path, ctx=64, rows=8)) as model,  # type: ignore[arg-type]
    ):
        sequence = model.open_sequence()

        def choose(token: int, place: int, *behind: Choice) -> int:
            row = Row(sequence, token, True)
            return model.choose([row], choices[place : place + 1], behind)[0]

        second = choose(choose(7, 0), 1, choices[2])
        assert model._steps._ahead is not None
        third = choose(second, 2)
        model.rewind(sequence, 2)
        assert choose(second, 2) == third
        model.rewind(sequence, 2)
        assert choose(0, 2) != third
        model.ledger.check_integrity()
