"""Routers: given the judge's hidden state, a device chooses the judge's experts in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle_models import RANDOM_MODELS, random_ids

from strata_nb import Engine, Options, models
from strata_nb.device_model import DeviceModel
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import Floats, rms_norm
from strata_nb.models import llama, olmoe, qwen2moe, qwen3moe
from strata_nb.steps import WINDOW_ROWS, Row

ROWS = 96
CLOSE = 1e-3  # router logits that are nearer to each other may change places

MODULES = {"mixtral": llama, "olmoe": olmoe, "qwen2moe": qwen2moe, "qwen3moe": qwen3moe}


class Judged:
    """What the judge computed: the rows before each layer's experts, and its router's logits."""

    def __init__(self, path: Path, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[Floats] = []
        self.router: list[Floats] = []
        with GGUFFile.open(path) as file:
            description = models.describe(file)
            self.ids = random_ids(file, ROWS).tolist()
            judge = models.open_reference(file, description)
            weights = judge._weights
            norms = [weights.vector(f"blk.{n}.ffn_norm.weight") for n in range(description.layers)]
            linear = weights.linear

            def norm(x: Floats, weight: Floats, eps: float) -> Floats:
                if any(weight is one for one in norms):
                    self.hidden.append(x.copy())
                return rms_norm(x, weight, eps)

            def watched(x: Floats, name: str) -> Floats:
                result = linear(x, name)
                if name.endswith("ffn_gate_inp"):
                    self.router.append(result)
                return result

            monkeypatch.setattr(module, "rms_norm", norm)
            monkeypatch.setattr(weights, "linear", watched)
            judge.forward(self.ids, judge.new_state(ROWS), "last")


def rows_at_once(model: DeviceModel) -> int:
    """Return for how many rows the programs are that windows have."""
    return WINDOW_ROWS if model._backend.batches_apart else model.max_rows


def chosen_by_the_device(model: DeviceModel, layer: int, hidden: Floats) -> np.ndarray:
    """Run a layer from its second norm to its experts, over the rows given: (rows, top_k)."""
    backend, programs, body = model._backend, model._programs, model._programs.body
    labels = [one.label for one in body]
    first = labels.index(f"blk.{layer}.ffn_norm")
    last = labels.index(f"blk.{layer}.expert_down") + 1  # a card takes them together
    (part,) = backend.prepare([body[first:last]])
    x = body[0].arguments[4]  # of embed
    found = np.empty((len(hidden), model.description.top_k), np.int64)
    at_once = rows_at_once(model)
    for start in range(0, len(hidden), at_once):
        rows = hidden[start : start + at_once]
        backend.send(x, np.ascontiguousarray(rows))
        backend.run(part, len(rows))
        backend.wait()
        backend.fetch(programs.chosen[layer], found[start : start + at_once])
    return found


@pytest.mark.parametrize("device", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", MODULES)
def test_a_device_chooses_the_judges_experts_where_logits_are_not_close(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    RANDOM_MODELS[name](path)
    judged = Judged(path, MODULES[name], monkeypatch)
    compared = 0
    with Engine.open(Options(path, device, ctx_size=ROWS)) as engine:
        model = engine._on_device
        assert model is not None
        at_once = rows_at_once(model)
        assert ROWS % at_once == 0
        sequence = model.open_sequence()
        # Writes the record that the layers below read: as many rows as go at once.
        model.step([Row(sequence, token, False) for token in judged.ids[:at_once]])
        top_k = model.description.top_k
        for layer, (hidden, router) in enumerate(zip(judged.hidden, judged.router, strict=True)):
            ours = chosen_by_the_device(model, layer, hidden)
            order = np.argsort(-router, axis=-1, kind="stable")
            ranked = np.take_along_axis(router, order, axis=-1)
            clear = ranked[:, top_k - 1] - ranked[:, top_k] > CLOSE
            theirs = np.sort(order[:, :top_k], axis=-1)
            np.testing.assert_array_equal(ours[clear], theirs[clear])
            compared += int(clear.sum())
        assert len(judged.hidden) == model.description.layers
    assert compared > ROWS * len(judged.hidden) * 0.9
