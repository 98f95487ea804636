"""Small random mixtures of experts, open on host devices, and what tests ask of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from make_model import make_model
from model_shapes import ModelShape

from strata_nb import Options, models
from strata_nb.backend import HostBackend
from strata_nb.device_model import DeviceModel
from strata_nb.formats import TensorType
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import Floats
from strata_nb.steps import Row
from strata_nb.tracing import Announce

SHAPE = ModelShape("qwen3moe", layers=3, experts=16, top_k=3)  # experts of two sizes
TINY = ModelShape("qwen3moe", layers=2, experts=3, top_k=2, vocab=258)  # all experts of one size
ONE_SIZE = [("output.weight", TensorType.Q6_K), ("*", TensorType.Q4_K)]


def make_tiny(path: str | os.PathLike[str]) -> None:
    """Write a model of six experts that have one size."""
    make_model(path, TINY, rules=ONE_SIZE)


def random_tokens(count: int, seed: int = 0, vocab: int = 258) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()  # type: ignore[no-any-return]


def load(
    backend: HostBackend,
    path: Path,
    *,
    ctx: int,
    rows: int,
    announce: Announce | None = None,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> DeviceModel:
    """Open a model on a backend, which stays the caller's."""
    with GGUFFile.open(path) as file:
        return DeviceModel(
            file,
            models.describe(file),
            Options(path, device=backend.name, ctx_size=ctx, **options),
            ctx,
            rows,
            backend,
            progress=None,
            say=say,
            announce=announce,
        )


@contextmanager
def opened(
    path: Path,
    device: str = "host",
    *,
    threads: int = 2,
    ctx: int = 256,
    rows: int = 64,
    **options: Any,
) -> Iterator[DeviceModel]:
    """Open a model and close it; then nothing of it may be left."""
    backend = HostBackend(device, threads)
    try:
        model = load(backend, path, ctx=ctx, rows=rows, **options)
        try:
            yield model
            model.ledger.check_integrity()
        finally:
            model.close()
        assert backend.driver.live() == {}
    finally:
        backend.close()


def read(model: DeviceModel, sequence: int, ids: Sequence[int]) -> Floats:
    """Return the logits (len(ids), vocab) of one step."""
    return model.step([Row(sequence, token, True) for token in ids])


def read_in(model: DeviceModel, ids: Sequence[int], rows: int) -> Floats:
    """Return the logits (len(ids), vocab) of a new sequence that is read `rows` at a time."""
    sequence = model.open_sequence()
    parts = [read(model, sequence, ids[at : at + rows]) for at in range(0, len(ids), rows)]
    model.forget_sequence(sequence)
    return np.concatenate(parts)


def same_bits(first: Floats, second: Floats) -> bool:
    return first.dtype == second.dtype and np.array_equal(
        first.view(np.uint32), second.view(np.uint32)
    )
