"""A layer's experts for the rows of a prompt batch, on a card: groups, products, sums."""

from __future__ import annotations

from typing import Any

import gpu_launches
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import aligned
from host_launches import UNTOUCHED, Matrix, as_read, normal, same_bits
from test_gpu_experts import Experts, Routes
from test_gpu_linear import linear

from strata_nb.cache.filling import new_plans
from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.warpgroup_launches import BYTES_OF_HALVES
from strata_nb.kernels.groups import TILE_ROWS, groups_at, most_tiles
from strata_nb.kernels.program import Program, launch
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.reference import Floats, Integers
from strata_nb.kernels.table import KERNELS

T = TensorType
OUT = 8  # outputs of down, here fewer than values of a row
BEYOND = -7  # in place of what must stay untouched


def grouped(
    gpu: gpu_launches.Run, chosen: Integers, experts: int, most_rows: int, tile_rows: int
) -> Any:
    """Return members, sources and tiles of choices, with all that lies behind them."""
    rows, top_k = chosen.shape
    room = np.full((most_rows * top_k,), BEYOND)
    counts = aligned(np.full(experts, BEYOND))
    words = {
        "rows": aligned(np.array([rows])),
        "chosen": aligned(np.concatenate([chosen.ravel(), room[rows * top_k :]])),
        "counts": counts,
        "experts": experts,
        "top_k": top_k,
    }
    gpu("batch_count", words, ["counts"], most_rows=most_rows)
    words |= {
        "members": aligned(room),
        "sources": aligned(room),
        "tiles": aligned(np.full(1 + 3 * most_tiles(most_rows * top_k, experts), BEYOND)),
    }
    own = {"variant": None if tile_rows == TILE_ROWS else tile_rows, "most_rows": most_rows}
    name = "batch_group" if tile_rows == TILE_ROWS else "warpgroup_group"
    gpu(name, words, ["members", "sources", "tiles"], **own)
    return words["members"], words["sources"], words["tiles"]


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "tile_rows"),
    [
        (9, 3, 2, 64),
        (70, 2, 1, 64),
        (650, 4, 3, 64),
        (1, 12, 10, 64),
        (1400, 4, 3, 256),
        (700, 2, 1, 320),
    ],
)
def test_choices_are_sorted_by_expert_and_cut_into_tiles(
    gpu: gpu_launches.Run, rows: int, experts: int, top_k: int, tile_rows: int
) -> None:
    chosen = Routes.of(rows, experts, top_k).chosen
    members, sources, tiles = grouped(gpu, chosen, experts, rows + 3, tile_rows)
    starts, wanted, _ = plain.expert_group(chosen, experts)
    choices = rows * top_k
    assert np.array_equal(members[:choices], wanted)
    assert np.array_equal(sources[:choices], wanted // top_k)
    assert np.all(members[choices:] == BEYOND)
    assert np.all(sources[choices:] == BEYOND)
    cut = [
        (expert, first, min(tile_rows, starts[expert + 1] - first))
        for expert in range(experts)
        for first in range(starts[expert], starts[expert + 1], tile_rows)
    ]
    assert tiles[0] == len(cut)
    assert np.array_equal(tiles[1 : 1 + 3 * len(cut)].reshape(-1, 3), cut)
    assert np.all(tiles[1 + 3 * len(cut) :] == BEYOND)


@pytest.mark.parametrize("kind", [T.Q6_K], ids=lambda kind: kind.name)
def test_a_choice_has_the_bits_of_its_row_times_the_matrix_of_its_expert(
    gpu: gpu_launches.Run, kind: TensorType
) -> None:
    rows, experts, top_k, outputs, values = 40, 3, 2, 11, 256
    held, routes = Experts(experts, (T.Q8_0, 8, 64), (kind, outputs, values)), Routes.of(rows, 3)
    members, sources, tiles = grouped(gpu, routes.chosen, experts, rows, TILE_ROWS)
    x, y = normal(rows, values, seed=1), np.full((rows * top_k, outputs), UNTOUCHED)
    words = {
        "tiles": tiles,
        "sources": sources,
        "targets": members,
        "addresses": held.addresses,
        "x": aligned(plain.quantised(x)),
        "y": aligned(y),
        "offset": held.offsets[1],
        "values": values,
        "outputs": outputs,
        "parts": 1,
        "experts": experts,
        "top_k": top_k,
    }
    gpu(
        "batch_expert",
        words,
        ["y"],
        variant=kind,
        most_rows=rows,
        tables=[held.memory],
    )
    for choice in (0, 1, 2 * rows - 1):
        row, place = divmod(choice, top_k)
        matrix: Matrix = held.parts[1][routes.chosen[row, place]]
        alone = linear(gpu, matrix, x[row : row + 1], most_rows=1)
        assert same_bits(words["y"][choice], alone[0]), choice
    assert np.all(words["y"] != UNTOUCHED)


def layer(
    experts: Experts, routes: Routes, x: Floats, inner_width: int, most_rows: int, kind: TensorType
) -> tuple[Program, dict[str, Any]]:
    """Return a layer's launches of the table, whose choices are `routes`, and the arrays."""
    rows, width = x.shape
    number, top_k = len(experts.memory), routes.chosen.shape[1]
    choices = most_rows * top_k
    logits = np.full((most_rows, number), -9, np.float32)
    for row, chosen in enumerate(routes.chosen):
        logits[row, chosen] = 1 + np.arange(top_k)
    room = np.zeros(groups_at(0, choices, number).end, np.uint8)
    packed = np.zeros((most_rows, row_bytes(width)), np.uint8)
    packed[:rows] = plain.quantised(x)
    arrays = {
        "rows": np.array([rows]),
        "logits": logits,
        "chosen": np.zeros((most_rows, top_k), np.int64),
        "shares": np.zeros((most_rows, top_k), np.float32),
        "tier": np.zeros(number, np.uint8),
        "homes": np.zeros(number, np.int64),  # all have slots
        "seen": np.zeros(number, np.int64),
        "plan": new_plans(1, number).view(np.uint8),  # by which nobody comes to a slot
        "use": np.zeros(number, np.int64),
        "tally": np.zeros(2, np.int64),
        "starts": np.zeros(number + 1, np.int64),
        "members": np.zeros(choices, np.int64),
        "places": np.zeros(choices, np.int64),
        "x": np.concatenate(
            [packed.ravel(), np.zeros(BYTES_OF_HALVES * width * most_rows, np.uint8)]
        ),
        "gathered": room,
        "addresses": experts.addresses,
        "inner": np.zeros((choices, inner_width), np.float32),
        "other": np.zeros((choices, inner_width), np.float32),
        "packed": np.zeros((choices, row_bytes(inner_width)), np.uint8),
        "products": np.zeros((choices, OUT), np.float32),
        "y": np.full((most_rows, OUT), UNTOUCHED),
    }
    arrays = {name: aligned(array) for name, array in arrays.items()}
    words: dict[str, int] = {name: array.ctypes.data for name, array in arrays.items()}
    words |= {"experts": number, "top_k": top_k, "renormalise": 1, "row_bytes": packed.strides[0]}
    words |= {"positions": 0, "forced": 0}
    offsets = dict(zip(("gate_offset", "up_offset", "down_offset"), experts.offsets, strict=True))
    words |= offsets

    def part(kernel: str, variant: Any = None, **others: int) -> Any:
        given = words | others
        names = [argument.name for argument in KERNELS[kernel].arguments]
        return launch(kernel, {name: given[name] for name in names}, variant=variant)

    program = (
        part("router_top_k"),
        part("expert_group"),
        part("expert_gather"),
        part("expert_gate_up", (kind, kind), values=width, outputs=inner_width),
        part("expert_down", kind, inner=words["packed"], values=inner_width, outputs=OUT),
    )
    return program, arrays


def run_layer(program: Program, arrays: dict[str, Any], held: Experts, most_rows: int) -> None:
    read = {"addresses", "x", "rows", "tier", "logits"}
    written = [array for name, array in arrays.items() if name not in read]
    gpu_launches.simulated_program(
        program, most_rows, written, [held.memory, *(arrays[name] for name in read)]
    )


@pytest.mark.parametrize(
    ("kind", "width", "inner_width"),
    [
        (T.Q8_0, 320, 32),
        (T.Q4_K, 256, 256),
        pytest.param(T.Q8_0, 64, 288, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_batch_of_rows_passes_a_layers_experts_and_has_the_bits_of_a_window(
    kind: TensorType, width: int, inner_width: int
) -> None:
    rows, experts = 11, 3
    held = Experts(
        experts, (kind, inner_width, width), (kind, inner_width, width), (kind, OUT, inner_width)
    )
    routes, x = Routes.of(rows, experts), normal(rows, width, seed=1)
    program, arrays = layer(held, routes, x, inner_width, rows + 2, kind)
    before = normal(rows, OUT, seed=2)
    arrays["y"][:rows] = before
    run_layer(program, arrays, held, rows + 2)
    assert np.array_equal(arrays["chosen"][:rows], routes.chosen)
    assert arrays["use"].sum() == arrays["tally"][0] == routes.chosen.size
    starts, members, places = plain.expert_group(routes.chosen, experts)
    gathered = plain.expert_gather(as_read(kind, x), members, 2).astype(np.float64)
    inner = plain.expert_gate_up(gathered, starts, held.weights(0), held.weights(1))
    choices = rows * routes.chosen.shape[1]
    np.testing.assert_allclose(arrays["inner"][:choices], inner[places], rtol=2e-6, atol=3e-6)
    assert same_bits(arrays["packed"][:choices], plain.quantised(arrays["inner"][:choices]))
    _, shares = plain.router_top_k(arrays["logits"][:rows], 2, renormalise=True)
    as_kept = as_read(kind, arrays["inner"][:choices]).astype(np.float64)[members]
    y = plain.expert_down(as_kept, starts, places, shares, held.weights(2), before)
    np.testing.assert_allclose(arrays["y"][:rows], y, rtol=2e-6, atol=3e-6)
    assert np.all(arrays["y"][rows:] == UNTOUCHED)

    few = Routes(routes.chosen[:2], routes.shares[:2])
    program, window = layer(held, few, x[:2], inner_width, 2, kind)
    window["y"][:] = before[:2]
    run_layer(program, window, held, 2)
    assert same_bits(arrays["inner"][:4], window["inner"])
    assert same_bits(arrays["y"][:2], window["y"])
