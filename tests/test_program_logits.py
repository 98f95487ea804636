"""Programs, run in numpy launch by launch, give the logits of the judge."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from emitted_models import CASES, MAX_ROWS, make
from numpy_backend import NumpyBackend

from strata_nb import models
from strata_nb.device_model import DeviceModel
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import Floats
from strata_nb.options import Options
from strata_nb.steps import Row

CONTEXT = 192  # three blocks: two for the first text, one for the second
FIRST, SECOND = list(range(3, 3 + MAX_ROWS + 30)), [200, 5, 5, 90, 7, 8, 13]


def steps_of(
    path: Path, device: str, cache_types: tuple[str, str]
) -> tuple[list[Floats], list[Floats]]:
    """Return the logits of two texts, from steps that mix them, and those of the judge."""
    with ExitStack() as stack:
        file = stack.enter_context(GGUFFile.open(path))
        description = models.describe(file)
        backend = NumpyBackend(device)
        stack.callback(backend.close)
        keys, values = cache_types
        options = Options(path, cache_type_k=keys, cache_type_v=values)
        model = DeviceModel(
            file,
            description,
            options,
            CONTEXT,
            MAX_ROWS,
            backend,
            progress=None,
            say=lambda line: None,
        )
        stack.callback(model.close)
        a, b = model.open_sequence(), model.open_sequence()

        def rows(sequence: int, tokens: Sequence[int]) -> list[Row]:
            return [Row(sequence, token, True) for token in tokens]

        # A full step; one of both texts, whose rows alternate; and one of a single row.
        full = model.step(rows(a, FIRST[:MAX_ROWS]))
        end = len(FIRST) - 1
        pairs = zip(rows(a, FIRST[MAX_ROWS : MAX_ROWS + 7]), rows(b, SECOND), strict=True)
        mixed = model.step([row for pair in pairs for row in pair])
        rest = model.step(rows(a, FIRST[MAX_ROWS + 7 : end]))
        last = model.step(rows(a, FIRST[end:]))
        found = [np.concatenate([full, mixed[::2], rest, last]), mixed[1::2]]
        assert (model.length(a), model.length(b)) == (len(FIRST), len(SECOND))
        if description.experts:
            hits, misses = model.report().hits, model.report().misses
            tokens = len(FIRST) + len(SECOND)
            assert hits + misses == tokens * description.layers * description.top_k
            assert (hits > 0) == backend.has_slots
        judge = models.open_reference(file, description)
        expected = [
            judge.forward(ids, judge.new_state(CONTEXT, keys, values), "all")
            for ids in (FIRST, SECOND)
        ]
    return found, expected


@pytest.mark.parametrize(("name", "types"), CASES)
def test_a_program_gives_the_logits_of_the_judge(name: str, types: str, tmp_path: Path) -> None:
    found, expected = steps_of(make(tmp_path, name, types), "host", ("f32", "f32"))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * theirs.std())


@pytest.mark.parametrize(
    "cache_types", [("f16", "int8"), ("int8", "f16")], ids=lambda pair: "-".join(pair)
)
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_keys_and_values_may_be_of_two_types(
    name: str, cache_types: tuple[str, str], tmp_path: Path
) -> None:
    found, expected = steps_of(make(tmp_path, name, "packed"), "host", cache_types)
    # A value on the edge between two quants may fall to either side.
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-2 * theirs.std())


@pytest.mark.parametrize("types", ["float32", "packed"])
def test_experts_in_slots_give_the_logits_of_the_judge(types: str, tmp_path: Path) -> None:
    path = make(tmp_path, "qwen2moe", types)
    found, expected = steps_of(path, "host:1x16MiB", ("f32", "f32"))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * theirs.std())
