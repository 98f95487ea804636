"""Models whose missed experts the CPU computes in part: on a simulated card, and on a real one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_world import AllMemory, simulated_card
from device_world import load, make_tiny, opened, random_tokens, read
from gpu_card import Card

from strata_nb import Engine, Options, Sampling, device_pool
from strata_nb.device_model import DeviceModel
from strata_nb.kernels.host import pool_words
from strata_nb.kernels.reference import Floats

GIB = 1 << 30
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "tiny.gguf"
    make_tiny(path)
    return path


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a pool on a machine with few processors too."""
    monkeypatch.setattr(device_pool, "pool_threads", lambda _: 2)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"pcie_frac": 0.0}, {"pin": False}])
def test_a_model_whose_missed_experts_the_cpu_computes_gives_the_hosts_logits(
    tiny: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_tokens(2)
    with opened(tiny, rows=8, ctx=64) as model:
        expected = read(model, model.open_sequence(), ids[:1])
    options = {"expert_cache": "2", **given}
    with (
        simulated_card(budget_bytes=2 * GIB) as backend,
        closing(load(backend, tiny, ctx=64, rows=8, **options)) as model,
    ):
        host, check = model.arena._host, AllMemory.check

        def outside(memory: AllMemory, address: int, size: int, use: str) -> Any:
            assert not 0 <= address - host.address < host.size_bytes
            return check(memory, address, size, use)

        monkeypatch.setattr(AllMemory, "check", outside)
        found = read(model, model.open_sequence(), ids[:1])
        report = model.report()
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    assert report.cpu_experts == report.misses > 0
    assert report.link_bytes == report.inserted_bytes  # what the host copied to free slots


@pytest.fixture
def on_card(card: Card, small: Path) -> Iterator[Engine]:
    """A model on a card that leaves half of what it misses to the CPU."""
    options = Options(small, "cuda", ctx_size=256, expert_cache="20%", pcie_frac=0.5, prefill=8)
    with Engine.open(options) as engine:
        yield engine


def written(engine: Engine, count: int) -> list[int]:
    with engine.open_session() as session:
        session.extend([1])
        some = session.generate(max_tokens=count, sampling=GREEDY, ignore_eos=True)
        return [token.id for token in some]


def logits(engine: Engine, ids: Sequence[int]) -> Floats:
    """Return the logits behind each token, read one at a time."""
    found = []
    with engine.open_session() as session:
        for token in ids:
            session.extend([token])
            found.append(session.next_logits().copy())
    return np.stack(found)


@pytest.mark.gpu
def test_logits_with_a_pool_are_near_those_without(on_card: Engine, small: Path) -> None:
    ids = random_tokens(40)
    found, report = logits(on_card, ids), on_card.describe()
    assert 0 < report.cpu_experts < report.misses
    with Engine.open(Options(small, "cuda", ctx_size=256, prefill=8, cpu_pool=False)) as engine:
        expected = logits(engine, ids)
    # A sum that differs in its last bit may be another quant in the next product.
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


@pytest.mark.gpu
def test_windows_one_behind_the_other_are_answered(on_card: Engine) -> None:
    assert len(written(on_card, 200)) == 200
    assert on_card.describe().cpu_experts > 200


@pytest.mark.gpu
def test_a_pool_that_stands_still_leaves_all_to_the_card(on_card: Engine) -> None:
    written(on_card, 5)
    model = on_card._model
    assert isinstance(model, DeviceModel)
    assert model._pool is not None
    threads = model._pool._pool
    threads._state[pool_words.of_thread(0, pool_words.HOLD)] = 1
    for _ in range(2):
        assert len(written(on_card, 5)) == 5
        assert model._pool.share == 0


@pytest.mark.gpu
def test_an_interrupt_in_a_window_leaves_a_model_that_goes_on(on_card: Engine) -> None:
    session = on_card.open_session()
    session.extend([1])
    generation = session.generate(max_tokens=200, sampling=GREEDY, ignore_eos=True)
    next(generation)
    threading.Timer(0.01, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert len(written(on_card, 20)) == 20
