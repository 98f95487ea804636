"""Models whose missed experts the CPU computes in part: on a simulated card, and on a real one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from card_world import simulated_card
from device_world import load, make_tiny, opened, random_tokens, read

from strata_nb import device_pool

GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "tiny.gguf"
    make_tiny(path)
    return path


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a pool on a machine with few processors too."""
    monkeypatch.setattr(device_pool, "pool_threads", lambda _: 2)


def test_a_model_whose_missed_experts_the_cpu_computes_gives_the_hosts_logits(tiny: Path) -> None:
    ids = random_tokens(2)
    with opened(tiny, rows=8, ctx=64) as model:
        expected = read(model, model.open_sequence(), ids[:1])
    options = {"expert_cache": "2", "pcie_frac": 0.0}
    with (
        simulated_card(budget_bytes=2 * GIB) as backend,
        closing(load(backend, tiny, ctx=64, rows=8, **options)) as model,
    ):
        found = read(model, model.open_sequence(), ids[:1])
        report = model.report()
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    assert report.cpu_experts == report.misses > 0
    assert report.link_bytes == 0
