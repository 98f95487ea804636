"""Programs on a card, without one: the unmodified driver and backend, kernels in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import kernel_references as plain
import numpy as np
import pytest
from card_world import simulated_card
from device_world import load, make_tiny, opened, random_tokens, read

from strata_nb import Sampling
from strata_nb.device_model import DeviceModel
from strata_nb.errors import StrataError
from strata_nb.kernels.reference import Floats
from strata_nb.sampling import Choice, uniform
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


def test_a_model_on_a_card_gives_the_hosts_logits_and_draws_from_them(
    model: DeviceModel, on_host: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, ids = model.open_sequence(), random_tokens(3)
    logits = read(model, sequence, ids)
    assert np.abs(logits - on_host).max() < 1e-3 * np.abs(on_host).max()
    model.rewind(sequence, 0)
    fetched: list[int] = []
    fetch = model._backend.fetch

    def watched(address: int, array: np.ndarray) -> None:
        fetched.append(address)
        fetch(address, array)

    monkeypatch.setattr(model._backend, "fetch", watched)
    penalties = Sampling(seed=1, presence_penalty=2.0, top_k=0)
    choices = [
        Choice((), Sampling(temperature=0), 0.0),
        Choice((), Sampling(), uniform(1, 0, 1)),
        Choice(ids, penalties, uniform(1, 0, 2), {int(logits[2].argmax())}),
    ]
    tokens = model.choose([Row(sequence, token, True) for token in ids], choices)
    assert tokens == plain.sample(logits, choices).tolist()
    assert fetched == [model._programs.drawn]
    assert model.length(sequence) == 3


@pytest.fixture
def heads_alone(model: DeviceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the bodies out, which take long: heads read what the step before left."""
    run = model._backend.run

    def run_heads(program: Any, *given: Any) -> None:
        if program is not model._body:
            run(program, *given)

    monkeypatch.setattr(model._backend, "run", run_heads)


@pytest.mark.usefixtures("heads_alone")
def test_a_choice_that_has_no_room_on_the_card_is_made_by_the_host(model: DeviceModel) -> None:
    sequence = model.open_sequence()
    logits = read(model, sequence, [1])
    banned = np.argsort(-logits[0])[:100].tolist()
    choice = Choice((), Sampling(), 0.5, banned)
    assert model.choose([Row(sequence, 1, True)], [choice]) == plain.sample(logits, [choice])


@pytest.mark.usefixtures("heads_alone")
def test_logits_that_the_card_cannot_use_are_reported_as_the_host_reports_them(
    model: DeviceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, run = model.open_sequence(), model._backend.run

    def damaged(program: Any, *given: Any) -> None:
        run(program, *given)
        if program is model._head:
            bad = np.full(model.description.vocab_size, np.nan, np.float32)
            model._backend.send(model._programs.logits, bad)

    with monkeypatch.context() as patch:
        patch.setattr(model._backend, "run", damaged)
        with pytest.raises(StrataError, match="258 of 258 are NaN or infinite"):
            model.choose([Row(sequence, 1, True)], [Choice((), Sampling(), 0.5)])
    assert model.length(sequence) == 0
    read(model, sequence, [1])
    assert model.length(sequence) == 1
