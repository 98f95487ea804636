"""What a card launches for whole layers, with all passes over the program."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_world import SHAPE, opened
from make_model import make_model

from strata_nb.kernels.gpu.launches import card_launches


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launches") / "model.gguf"
    make_model(path, SHAPE)
    return path


def test_a_layer_of_one_row_is_six_launches(path: Path) -> None:
    with opened(path, ctx=64, rows=8) as model:
        body = model._programs.body
        assert sum(one.label.startswith("blk.1.") for one in body) == 18
        found = [one for one in card_launches(body, 1) if one.label.startswith("blk.1.")]
    assert [one.label.replace("blk.1.", "") for one in found] == [
        "attn_q, attn_k, attn_v",
        "attention",
        "attn_output",
        "ffn_norm, ffn_gate_inp, router_top_k",
        "expert_gate_up",
        "expert_down, attn_norm",
    ]


def test_a_layer_of_several_rows_has_its_norms_and_its_choice_apart(path: Path) -> None:
    with opened(path, ctx=64, rows=8) as model:
        found = [one for one in card_launches(model._programs.body, 8) if "blk.1." in one.label]
    assert [one.label.replace("blk.1.", "") for one in found] == [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "prepare",
        "attention",
        "attention.combine",
        "attn_output",
        "ffn_norm",
        "ffn_gate_inp",
        "router_top_k",
        "expert_group fill",
        "expert_gate_up",
        "expert_down",
    ]
