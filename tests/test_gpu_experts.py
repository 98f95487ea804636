"""The experts of a layer on a card, against the plain form of the table's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gpu_launches
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import aligned, shaped_for_card
from host_launches import UNTOUCHED, Bytes, Matrix, as_read, normal, same_bits

from strata_nb.formats import TensorType, block_layout
from strata_nb.kernels.gpu.filling import IN_HOST_MEMORY
from strata_nb.kernels.gpu.products import DECODERS
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.reference import Floats, Integers
from strata_nb.packing import UNPACKED

T = TensorType


class Experts:
    """Experts in memory: blobs in no order, each of their parts at a multiple of 256."""

    def __init__(self, number: int, *parts: tuple[TensorType, int, int]) -> None:
        """`parts`: type, outputs and values of each."""
        self.parts = [
            [Matrix.random(*part, seed=7 * expert + place) for expert in range(number)]
            for place, part in enumerate(parts)
        ]
        sizes = [-(-matrices[0].data.size // 256) * 256 for matrices in self.parts]
        self.offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        self.memory = aligned(np.full((number, sum(sizes)), 0xFF, np.uint8))
        places = np.random.default_rng(0).permutation(number)
        for expert, place in enumerate(places):
            for offset, matrices in zip(self.offsets, self.parts, strict=True):
                data = matrices[expert].data
                self.memory[place, offset : offset + data.size] = data
        self.addresses = aligned(self.memory.ctypes.data + places * self.memory.shape[1])

    def blobs(self, routes: Routes) -> Integers:
        """Return what `route` makes of choices: every other expert has no slot."""
        chosen = routes.chosen.ravel()
        return self.addresses[chosen] + np.where(chosen % 2 == 0, 0, IN_HOST_MEMORY)

    def weights(self, part: int) -> Floats:
        """Return the values of all experts of a part, as float64."""
        return np.stack([matrix.weight for matrix in self.parts[part]]).astype(np.float64)


class Routes(NamedTuple):
    """What rows chose: experts in ascending order, and their shares."""

    chosen: Integers
    shares: Floats

    @classmethod
    def of(cls, rows: int, experts: int, top_k: int = 2) -> Routes:
        """Return random routes. Nobody chooses expert 1; the last row chooses the last expert."""
        rng = np.random.default_rng(rows)
        others = [expert for expert in range(experts) if expert != 1]
        chosen = np.stack([rng.permutation(others)[:top_k] for _ in range(rows)])
        if experts - 1 not in chosen[-1]:
            chosen[-1, 0] = experts - 1
        return cls(np.sort(chosen, axis=1), rng.random((rows, top_k)).astype(np.float32))


def with_room(array: np.ndarray, rows: int, fill: Any) -> Any:
    """Return an aligned copy of rows, and behind them more that hold `fill`."""
    room = np.full((rows - len(array), *array.shape[1:]), fill, array.dtype)
    return aligned(np.concatenate([array, room]))


class GateUp(NamedTuple):
    gate: TensorType
    up: TensorType
    values: int
    outputs: int


GATE_UPS = [
    GateUp(T.Q8_0, T.Q8_0, 64, 32),
    GateUp(T.Q4_K, T.Q6_K, 512, 64),
    GateUp(T.Q4_K, T.Q4_K, 1280, 8),  # more tiles than parts
    GateUp(T.Q8_0, T.Q4_0, 160, 45),
    GateUp(T.IQ3_S, T.IQ2_XXS, 256, 8),  # a table each in shared memory
    GateUp(T.F32, T.F32, 77, 45),
    GateUp(T.F16, T.BF16, 264, 32),
    GateUp(T.BF16, T.F32, 40, 3),
]


def gate_up(
    run: gpu_launches.Run,
    case: GateUp,
    experts: Experts,
    x: Floats,
    routes: Routes,
    most_rows: int,
) -> tuple[Floats, Bytes | None]:
    """Return what choices have in `inner` and, where outputs are whole sub-blocks, `packed`."""
    rows, top_k = routes.chosen.shape
    read = x if case.gate in UNPACKED else plain.quantised(x)
    inner = np.full((0, case.outputs), UNTOUCHED, np.float32)
    packed = np.zeros((0, row_bytes(case.outputs)), np.uint8)
    choices = most_rows * top_k
    whole = case.outputs % 32 == 0
    values: dict[str, Any] = {
        "rows": aligned(np.array([rows])),
        "blobs": with_room(experts.blobs(routes), choices, -1),
        "sources": 0,
        "x": with_room(read, most_rows, 0),
        "inner": with_room(inner, choices, UNTOUCHED),
        "packed": with_room(packed, choices, 0xEE) if whole else 0,
        "gate_offset": experts.offsets[0],
        "up_offset": experts.offsets[1],
        "top_k": top_k,
        "values": case.values,
        "outputs": case.outputs,
        "row_bytes": read.strides[0],
    }
    run(
        "expert_gate_up",
        values,
        ["inner", "packed"] if whole else ["inner"],
        variant=(case.gate, case.up),
        most_rows=most_rows,
        tables=[experts.memory],
    )
    count = rows * top_k
    assert np.all(values["inner"][count:] == UNTOUCHED)
    if not whole:
        return values["inner"][:count], None
    assert np.all(values["packed"][count:] == 0xEE)
    return values["inner"][:count], values["packed"][:count]


def gate_up_experts(case: GateUp, number: int) -> Experts:
    shape = (case.outputs, case.values)
    return Experts(number, (case.gate, *shape), (case.up, *shape))


def check_gate_up(
    run: gpu_launches.Run, case: GateUp, *, rows: int, most_rows: int, number: int
) -> None:
    experts, routes = gate_up_experts(case, number), Routes.of(rows, number)
    x = normal(rows, case.values, seed=1)
    inner, packed = gate_up(run, case, experts, x, routes, most_rows)
    starts, members, places = plain.expert_group(routes.chosen, number)
    gathered = plain.expert_gather(as_read(case.gate, x), members, routes.chosen.shape[1]).astype(
        np.float64
    )
    expected = plain.expert_gate_up(gathered, starts, experts.weights(0), experts.weights(1))
    np.testing.assert_allclose(inner, expected[places], rtol=2e-6, atol=3e-6)
    if packed is not None:
        assert same_bits(packed, plain.quantised(inner))


def down(
    run: gpu_launches.Run,
    kind: TensorType,
    experts: Experts,
    inner: Floats,
    routes: Routes,
    y: Floats,
    most_rows: int,
) -> Floats:
    """Return y with the products of `inner` (choices, values), which is in the order of choices."""
    rows, outputs = y.shape
    top_k = routes.chosen.shape[1]
    read = inner if kind in UNPACKED else plain.quantised(inner)
    values: dict[str, Any] = {
        "rows": aligned(np.array([rows])),
        "blobs": with_room(experts.blobs(routes), most_rows * top_k, -1),
        "sources": 0,
        "inner": with_room(read, most_rows * top_k, 0),
        "shares": aligned(routes.shares),
        "y": with_room(y, most_rows, UNTOUCHED),
        "down_offset": experts.offsets[-1],
        "top_k": top_k,
        "values": inner.shape[1],
        "outputs": outputs,
    }
    run(
        "expert_down",
        values,
        ["y"],
        variant=kind,
        most_rows=most_rows,
        tables=[experts.memory],
    )
    assert np.all(values["y"][rows:] == UNTOUCHED)
    return values["y"][:rows]


def check_down(
    run: gpu_launches.Run,
    kind: TensorType,
    values: int,
    outputs: int,
    *,
    rows: int,
    most_rows: int,
    number: int,
    top_k: int = 2,
) -> None:
    # A part of another size comes first, so that a wrong offset is seen.
    experts = Experts(number, (T.Q8_0, 8, 64), (kind, outputs, values))
    routes = Routes.of(rows, number, top_k)
    inner, before = normal(rows * top_k, values, seed=1), normal(rows, outputs, seed=2)
    found = down(run, kind, experts, inner, routes, before, most_rows)
    starts, members, places = plain.expert_group(routes.chosen, number)
    read = as_read(kind, inner).astype(np.float64)[members]
    expected = plain.expert_down(read, starts, places, routes.shares, experts.weights(1), before)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=3e-6)


# -- the kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GATE_UPS, ids=lambda case: f"{case.gate.name}-{case.up.name}")
def test_gate_and_up_are_those_of_each_choices_expert(gpu: gpu_launches.Run, case: GateUp) -> None:
    check_gate_up(gpu, case, rows=2, most_rows=3, number=5)


@pytest.mark.parametrize(
    ("kind", "values", "outputs"),
    [(T.Q8_0, 96, 17), (T.Q4_K, 768, 8), (T.F16, 45, 9), (T.F32, 264, 8)],
)
def test_down_adds_up_the_experts_of_a_row(
    gpu: gpu_launches.Run, kind: TensorType, values: int, outputs: int
) -> None:
    check_down(gpu, kind, values, outputs, rows=2, most_rows=3, number=5)


@pytest.mark.parametrize(("kind", "values"), [(T.F32, 32), (T.Q8_0, 32), (T.Q8_0, 1024)])
def test_a_row_may_choose_more_experts_than_a_block_has_warps(
    gpu: gpu_launches.Run, kind: TensorType, values: int
) -> None:
    check_down(gpu, kind, values, 8, rows=1, most_rows=1, number=12, top_k=10)


def narrowest(kind: TensorType) -> int:
    """Return the values of the shortest row that a type's kernels take."""
    return max(64, block_layout(kind).values)


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_experts_of_every_packed_type_are_multiplied(
    gpu: gpu_launches.Run, kind: TensorType
) -> None:
    values = narrowest(kind)
    check_gate_up(gpu, GateUp(kind, kind, values, 11), rows=1, most_rows=1, number=3)
    check_down(gpu, kind, values, 11, rows=1, most_rows=1, number=3)


@pytest.mark.parametrize("kind", [T.F32, T.Q8_0], ids=lambda kind: kind.name)
def test_what_experts_make_of_a_row_does_not_depend_on_its_company(
    gpu: gpu_launches.Run, kind: TensorType
) -> None:
    rows, number, case = 3, 5, GateUp(kind, kind, 64, 32)
    routes = Routes.of(rows, number)
    x, before = normal(rows, 64, seed=1), normal(rows, 8, seed=2)
    x[1, 5] = np.nan
    experts, last = gate_up_experts(case, number), Experts(number, (kind, 8, 32))

    def layer(some: Sequence[int], most_rows: int) -> Floats:
        part = Routes(routes.chosen[some], routes.shares[some])
        inner, _ = gate_up(gpu, case, experts, x[some], part, most_rows)
        return down(gpu, kind, last, inner, part, before[some], most_rows)

    together = layer([0, 1, 2], 4)
    assert np.isnan(together).any(axis=1).tolist() == [False, True, False]
    assert np.isnan(together[1]).all()
    for row in range(rows):
        assert same_bits(layer([row], 1)[0], together[row]), row
    assert same_bits(layer([2, 0], 2), together[[2, 0]])


def test_gate_and_up_that_take_rows_of_different_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="Q8_0 and F32"):
        shaped_for_card("expert_gate_up", (T.Q8_0, T.F32), values=64)
