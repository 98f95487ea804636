"""The chain of a layer's experts on the host, as programs launch it, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import kernel_references as plain
import numpy as np
import pytest
from host_launches import (
    COUNTS,
    ROWS,
    UNTOUCHED,
    Bytes,
    Matrix,
    as_read,
    made,
    normal,
    run,
    same_bits,
)

from strata_nb.formats import TensorType, tensor_bytes
from strata_nb.kernels import reference
from strata_nb.kernels.host.matrices import input_row_bytes, takes_packed
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.reference import Floats, Integers

T = TensorType
EXPERTS, TOP_K = 6, 2
NOBODYS, LONELY = 0, 4  # the expert that no row chooses, and that of one row


class ExpertCase(NamedTuple):
    """Types of gate, up and down, and the widths of a row and within an expert."""

    gate: TensorType
    up: TensorType
    down: TensorType
    width: int
    inner: int


CASES = [
    ExpertCase(T.F32, T.F32, T.F32, 77, 45),
    ExpertCase(T.F16, T.BF16, T.F16, 32, 100),
    ExpertCase(T.Q4_K, T.Q6_K, T.Q8_0, 256, 96),
    ExpertCase(T.Q8_0, T.Q8_0, T.Q4_K, 160, 256),
    ExpertCase(T.F32, T.F32, T.Q8_0, 50, 64),
    ExpertCase(T.Q8_0, T.Q8_0, T.F32, 64, 45),
]


def case_name(case: ExpertCase) -> str:
    return f"{case.gate.name}-{case.up.name}-{case.down.name}"


cases = pytest.mark.parametrize("case", CASES, ids=case_name)


class Layer:
    """The experts of a layer in memory: blobs in no order, each part at a multiple of 256."""

    def __init__(self, case: ExpertCase) -> None:
        self.case = case
        shapes = [(case.inner, case.width), (case.inner, case.width), (case.width, case.inner)]
        kinds = (case.gate, case.up, case.down)
        self.parts = [
            [Matrix.random(kind, *shape, seed=3 * expert + part) for expert in range(EXPERTS)]
            for part, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        ]
        sizes = [
            -(-tensor_bytes(kind, shape) // 256) * 256
            for kind, shape in zip(kinds, shapes, strict=True)
        ]
        self.offsets = [0, sizes[0], sizes[0] + sizes[1]]
        self.memory = np.full((EXPERTS, sum(sizes)), 0xFF, np.uint8)
        places = np.random.default_rng(0).permutation(EXPERTS)
        for expert, place in enumerate(places):
            for offset, matrices in zip(self.offsets, self.parts, strict=True):
                data = matrices[expert].data
                self.memory[place, offset : offset + data.size] = data
        self.addresses = self.memory.ctypes.data + places * self.memory.shape[1]

    def weights(self, part: int) -> Floats:
        """Return the values of all experts of gate (0), up (1) or down (2)."""
        return np.stack([matrix.weight for matrix in self.parts[part]])


class Routes(NamedTuple):
    """What rows chose: experts in ascending order, and their shares."""

    chosen: Integers
    shares: Floats

    @classmethod
    def of(cls, rows: int) -> Routes:
        """Return routes in which nobody chooses one expert, and the last row alone another."""
        rng = np.random.default_rng(rows)
        others = [n for n in range(EXPERTS) if n not in (NOBODYS, LONELY)]
        chosen = np.stack([rng.permutation(others)[:TOP_K] for _ in range(rows)])
        chosen[-1, 0] = LONELY
        return cls(np.sort(chosen, axis=1), rng.random((rows, TOP_K)).astype(np.float32))


class Mixture(NamedTuple):
    """What the chain of an expert layer made of rows."""

    starts: Integers
    places: Integers
    inner: Floats  # in the order of members
    packed: Bytes
    y: Floats


def mixture(threads: int, layer: Layer, x: Floats, routes: Routes, y: Floats) -> Mixture:
    """Run the launches of an expert layer over rows, on work space that holds no numbers."""
    case = layer.case
    rows, top_k = routes.chosen.shape
    choices = rows * top_k
    count = np.array([rows])
    packs_rows, packs_inner = takes_packed(case.gate), takes_packed(case.down)
    packed_x = np.empty((rows, row_bytes(case.width)), np.uint8)
    row_size = input_row_bytes(case.gate, case.width)
    gathered = np.full((choices, row_size), 0xFF, np.uint8)
    starts, members, places = (np.full(n, -7) for n in (EXPERTS + 1, choices, choices))
    inner, other = (np.full((choices, case.inner), np.float32(np.nan)) for _ in range(2))
    packed = np.full((choices, row_bytes(case.inner)), 0xFF, np.uint8)
    products = np.full((choices, case.width), np.float32(np.nan))
    out = np.concatenate([y, np.full((1, case.width), UNTOUCHED)])
    tables = np.zeros((3, EXPERTS), np.int64)
    counts: dict[str, Any] = {"rows": count, "experts": EXPERTS, "top_k": top_k}
    source: dict[str, Any] = {
        **counts,
        "x": packed_x if packs_rows else x,
        "starts": starts,
        "members": members,
        "gathered": gathered,
        "row_bytes": row_size,
    }
    gate_offset, up_offset, down_offset = layer.offsets
    launches = [
        made(
            "expert_group",
            **counts,
            chosen=routes.chosen,
            tier=tables[0],
            use=tables[2],
            tally=tables[1],
            starts=starts,
            members=members,
            places=places,
            **dict.fromkeys(("homes", "seen", "plan"), 0),
        ),
        made("expert_gather", **source),
        made(
            "expert_gate_up",
            (case.gate, case.up),
            **source,
            addresses=layer.addresses,
            inner=inner,
            other=other,
            packed=packed if packs_inner else 0,
            gate_offset=gate_offset,
            up_offset=up_offset,
            values=case.width,
            outputs=case.inner,
        ),
        made(
            "expert_down",
            case.down,
            **counts,
            starts=starts,
            places=places,
            inner=packed if packs_inner else inner,
            addresses=layer.addresses,
            shares=routes.shares,
            products=products,
            y=out,
            down_offset=down_offset,
            values=case.inner,
            outputs=case.width,
        ),
    ]
    if packs_rows:
        quantise = made("quantise", rows=count, x=x, packed=packed_x, times=1, values=case.width)
        launches.insert(0, quantise)
    run(threads, *launches)
    assert np.all(out[-1] == UNTOUCHED)
    return Mixture(starts, places, inner, packed, out[:-1])


@pytest.fixture(scope="module")
def layers() -> dict[ExpertCase, Layer]:
    return {case: Layer(case) for case in CASES}


@cases
@pytest.mark.parametrize("rows", ROWS)
def test_the_chain_of_experts_is_the_mixture_of_the_reference(
    case: ExpertCase, rows: int, layers: dict[ExpertCase, Layer]
) -> None:
    layer, routes = layers[case], Routes.of(rows)
    x, before = normal(rows, case.width, seed=1), normal(rows, case.width, seed=2)
    found = mixture(1, layer, x, routes, before)
    gate, up, down = (layer.weights(part).astype(np.float64) for part in range(3))
    expected = before + reference.expert_mixture(
        as_read(case.gate, x), routes.chosen, routes.shares, lambda n: (gate[n], up[n], down[n])
    )
    # Rows within an expert are quantised too. They are products, with few large values among many
    # small ones, so that this costs a percent, and not the half that it is for normal values.
    error = np.abs(found.y - expected)
    if takes_packed(case.down):
        assert np.sqrt(np.mean(error**2)) < 0.02 * np.std(expected - before)
    else:
        assert np.all(error < 2e-6 * (1 + np.abs(expected)))


@cases
@pytest.mark.parametrize("rows", ROWS)
def test_each_kernel_of_the_chain_computes_its_own_reference(
    case: ExpertCase, rows: int, layers: dict[ExpertCase, Layer]
) -> None:
    layer, routes = layers[case], Routes.of(rows)
    x, before = normal(rows, case.width, seed=1), normal(rows, case.width, seed=2)
    found = mixture(1, layer, x, routes, before)
    starts, members, places = plain.expert_group(routes.chosen, EXPERTS)
    counts = np.diff(starts)
    assert (counts[NOBODYS], counts[LONELY]) == (0, 1)
    assert np.array_equal(found.starts, starts)
    assert np.array_equal(found.places, places)
    gathered = plain.expert_gather(as_read(case.gate, x), members, TOP_K).astype(np.float64)
    gate, up, down = (layer.weights(part).astype(np.float64) for part in range(3))
    inner = plain.expert_gate_up(gathered, starts, gate, up)
    np.testing.assert_allclose(found.inner, inner, rtol=2e-6, atol=3e-6)
    read = found.inner.astype(np.float64)
    if takes_packed(case.down):
        assert same_bits(found.packed, plain.quantised(found.inner))
        read = plain.values_of(found.packed, case.inner).astype(np.float64)
    y = plain.expert_down(read, starts, places, routes.shares, down, before)
    np.testing.assert_allclose(found.y, y, rtol=2e-6, atol=3e-6)


@cases
@pytest.mark.parametrize("rows", ROWS)
def test_experts_give_the_same_bits_on_any_number_of_threads(
    case: ExpertCase, rows: int, layers: dict[ExpertCase, Layer]
) -> None:
    routes = Routes.of(rows)
    x, before = normal(rows, case.width, seed=1), normal(rows, case.width, seed=2)
    first, *others = (mixture(count, layers[case], x, routes, before) for count in COUNTS)
    for other in others:
        assert same_bits(other.y, first.y)
        assert same_bits(other.inner, first.inner)


@cases
def test_what_experts_make_of_a_row_does_not_depend_on_its_company(
    case: ExpertCase, layers: dict[ExpertCase, Layer]
) -> None:
    rows = 40
    layer, routes = layers[case], Routes.of(rows)
    x, before = normal(rows, case.width, seed=1), normal(rows, case.width, seed=2)
    x[7, 1] = np.nan
    together = mixture(2, layer, x, routes, before).y
    assert np.isnan(together[7]).all()
    assert np.isfinite(np.delete(together, 7, axis=0)).all()

    def apart(some: Sequence[int]) -> Floats:
        """Return what experts make of these rows alone, which chose as before."""
        part = Routes(routes.chosen[some], routes.shares[some])
        return mixture(1, layer, x[some], part, before[some]).y

    for row in range(rows):
        assert same_bits(apart([row])[0], together[row]), row
    backwards = list(reversed(range(3, 30)))
    assert same_bits(apart(backwards), together[backwards])
