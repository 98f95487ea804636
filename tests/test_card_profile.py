"""Where the time of a window goes, found out from times of graphs alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from strata_nb.card_profile import MEASURED_LAYERS, Kind, WindowProfile, profile_window
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.operations import GpuKernel

KV_BYTES = 1000
COSTS_US = {"embed": 3.0, "norm": 1.0, "attention_f16": 7.0, "linear_a": 4.0, "linear_b": 9.0}
COSTS_US |= {"head": 100.0, "sample": 20.0, "attention_join": 2.0}


def made(label: str, name: str, size: int = 0) -> CardLaunch:
    kernel = GpuKernel(
        name,
        lambda: None,
        32,
        lambda *_: (1, 1, 1),
        reads=lambda arguments, rows: rows * arguments["size"],
    )
    return CardLaunch(kernel, label, {"size": size}, ("integer",))


def window(layers: int, *, other: int | None = None) -> list[CardLaunch]:
    """Return the launches of a window; layer `other` has a product of another type."""
    launches = [made("token_embd", "embed", 5)]
    for layer in range(layers):
        blk = f"blk.{layer}"
        launches += [
            made(f"{blk}.attn_norm", "norm"),
            made(f"{blk}.attention", "attention_f16"),
            made(f"{blk}.attention", "attention_join"),
            made(f"{blk}.ffn_down", "linear_b" if layer == other else "linear_a", 50),
        ]
    return [*launches, made("output_norm", "norm"), made("output", "head", 70), made("", "sample")]


class Card:
    """Give the time of a graph: what its launches cost, and something that all graphs cost."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, launches: Sequence[CardLaunch]) -> float:
        self.asked.append([one.label for one in launches])
        return 1e-6 * (50 + sum(COSTS_US[one.kernel.name] for one in launches))


def profiled(launches: Sequence[CardLaunch], rows: int = 1) -> WindowProfile:
    return profile_window(launches, rows, KV_BYTES, Card())


@pytest.mark.parametrize("layers", [1, 2, MEASURED_LAYERS, 48])
def test_every_launch_is_counted_and_has_its_own_time(layers: int) -> None:
    found = profiled(window(layers))
    seen = {(line.kind.label, line.kind.kernel): line for line in found.lines}
    assert list(seen) == [
        ("token_embd", "embed"),
        ("attn_norm", "norm"),
        ("attention", "attention_f16"),
        ("attention", "attention_join"),
        ("ffn_down", "linear_a"),
        ("output_norm", "norm"),
        ("output", "head"),
        ("", "sample"),
    ]
    for (label, kernel), line in seen.items():
        in_layers = label in ("attn_norm", "attention", "ffn_down")
        assert line.count == (layers if in_layers else 1)
        assert line.measured == (min(layers, MEASURED_LAYERS) if in_layers else 1)
        assert line.seconds == pytest.approx(1e-6 * line.count * COSTS_US[kernel])
    assert found.whole_s == pytest.approx(found.sum_s + 50e-6)


def test_of_attention_the_first_launch_of_a_layer_reads_the_kv() -> None:
    reads = {line.kind.kernel: line.read_bytes for line in profiled(window(3), rows=2).lines}
    assert reads["attention_f16"] == 3 * KV_BYTES
    assert reads["attention_join"] == reads["norm"] == 0
    assert reads["linear_a"] == 3 * 2 * 50
    assert reads["embed"] == 2 * 5
    assert profiled(window(3)).read_bytes == 3 * KV_BYTES + 3 * 50 + 5 + 70


def test_a_kind_that_no_layer_in_the_middle_has_is_measured_where_it_is() -> None:
    found = profiled(window(48, other=1))
    lines = {line.kind: line for line in found.lines}
    other = lines[Kind("ffn_down", "linear_b", 50)]
    assert (other.count, other.measured) == (1, 1)
    assert other.seconds == pytest.approx(9e-6)
    usual = lines[Kind("ffn_down", "linear_a", 50)]
    assert (usual.count, usual.measured) == (47, MEASURED_LAYERS)


def test_what_is_measured_runs_behind_other_launches_as_in_a_window() -> None:
    card = Card()
    launches = window(48)
    profile_window(launches, 1, KV_BYTES, card)
    assert min(map(len, card.asked[:-1])) == 4  # as many as a layer has
    labels = [one.label for one in launches]
    for asked in card.asked[:-1]:
        start = labels.index(asked[0]) if asked[0] else len(labels) - 1
        around = labels + labels
        assert asked == around[start : start + len(asked)]
    assert card.asked[-1] == labels


def test_graphs_begin_where_layers_do() -> None:
    launches = window(48)
    del launches[3 + 4 * 20]  # a layer in front of those in the middle has one launch less
    card = Card()
    profile_window(launches, 1, KV_BYTES, card)
    assert {asked[0].rpartition(".")[2] for asked in card.asked} == {"token_embd", "attn_norm"}
