"""Programs on a card, without one: the unmodified driver and backend, kernels in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from card_world import simulated_card
from device_world import load, make_tiny, opened, random_tokens, read

from strata_nb.kernels.reference import Floats

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


def test_a_model_on_a_card_gives_the_hosts_logits(tiny: Path, on_host: Floats) -> None:
    with (
        simulated_card(budget_bytes=2 * GIB) as backend,
        closing(load(backend, tiny, ctx=64, rows=8)) as model,
    ):
        logits = read(model, model.open_sequence(), random_tokens(3))
        model.ledger.check_integrity()
    assert np.abs(logits - on_host).max() < 1e-3 * np.abs(on_host).max()
