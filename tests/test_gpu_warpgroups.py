"""Products of prompt batches by warpgroups, against products of numpy."""

from __future__ import annotations

from typing import Any

import gpu_launches
import gpu_simulator
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import aligned, shaped
from host_launches import UNTOUCHED, Matrix, as_read, normal
from test_gpu_batches import OUT, layer
from test_gpu_experts import Experts, Routes
from test_gpu_linear import buffer_of

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu import compile as gpu_compile
from strata_nb.kernels.gpu.batches import BATCH_KERNELS
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.gpu.gathering import sum_kernel
from strata_nb.kernels.gpu.half_stages import ROWS_BY
from strata_nb.kernels.gpu.intrinsics.warpgroups import WITH_WARPGROUPS
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.gpu.warpgroup_launches import WARPGROUP_KERNELS, rows_of_tile
from strata_nb.kernels.gpu.warpgroup_tiles import SIZES
from strata_nb.kernels.program import launch
from strata_nb.kernels.reference import Floats
from strata_nb.packing import PACKED

T = TensorType


@pytest.fixture
def warpgroups(request: pytest.FixtureRequest, gpu: gpu_launches.Run) -> gpu_launches.Run:
    """What runs launches, where it has warpgroups."""
    if request.node.callspec.params["gpu"] == "card":
        capability = request.getfixturevalue("card").driver.card_facts(0).capability
        if capability != WITH_WARPGROUPS:
            pytest.skip(f"compute capability {capability}, not {WITH_WARPGROUPS}")
    return gpu


def linear(
    gpu: gpu_launches.Run,
    matrix: Matrix,
    x: Floats,
    block_rows: int,
    *,
    bias: Floats | None = None,
    y: Floats | None = None,
) -> Floats:
    """Return rows times a matrix, as blocks of so many rows multiply them."""
    (rows, values), outputs = x.shape, len(matrix.weight)
    out = np.full((rows + 2, outputs), UNTOUCHED)
    if y is not None:
        out[:rows] = y
    out = aligned(out)
    words: dict[str, Any] = {
        "rows": np.array([rows]),
        "x": buffer_of((ROWS_BY * x).astype(np.float16), rows + 2),
        "weight": aligned(matrix.data),
        "bias": 0 if bias is None else aligned(bias),
        "y": out,
        "values": values,
        "outputs": outputs,
        "add": int(y is not None),
    }
    variant = matrix.kind, block_rows
    gpu("warpgroup_linear", words, ["y"], variant=variant, most_rows=rows + 2)
    assert np.all(out[rows:] == UNTOUCHED)
    return out[:rows]


def bound(matrix: Matrix, x: Floats) -> Floats:
    """Return how far halves may lead off, for each product.

    Of a weight scale, minimum and result are rounded to a half, and a value is: that is 2 ** -11
    each, of a weight with its minimum at most three times as much as of itself. Sums are rounded
    for each of their terms.
    """
    magnitudes = np.abs(x).astype(np.float64) @ np.abs(matrix.weight).astype(np.float64).T
    return np.asarray(6 * 2.0**-11 * magnitudes)


@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "values", "block_rows"),
    [
        (T.Q4_K, 66, 71, 256, 64),  # two blocks, two warpgroups
        (T.Q6_K, 66, 8, 256, 256),  # half a block
        (T.Q8_0, 130, 4, 192, 256),  # a whole one
        (T.Q4_0, 257, 5, 64, 256),  # and the fewest rows of another
        (T.Q8_0, 300, 4, 384, 320),  # more than an instruction multiplies
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_warpgroups_multiply_within_the_rounding_of_halves(
    warpgroups: gpu_launches.Run,
    kind: TensorType,
    rows: int,
    outputs: int,
    values: int,
    block_rows: int,
) -> None:
    matrix, x = Matrix.random(kind, outputs, values), normal(rows, values, seed=1)
    bias, before = normal(1, outputs, seed=2)[0], normal(rows, outputs, seed=3)
    found = linear(warpgroups, matrix, x, block_rows, bias=bias, y=before)
    wanted = plain.linear(x.astype(np.float64), matrix.weight) + bias + before
    assert np.all(np.abs(found - wanted) <= bound(matrix, x) + 1e-6)


def test_rows_of_any_magnitude_are_halves_as_near_as_their_bits_allow(
    gpu: gpu_launches.Run,
) -> None:
    x = normal(5, 64, seed=1)
    x *= np.array([[1e-3], [1e-2], [1.0], [1e5], [1.0]], np.float32)
    x[3, 7], x[4, 40] = 520_000, np.inf
    packed = plain.quantised(x)
    halves = np.zeros((5, 64), np.float16)
    words = {"rows": np.array([5]), "x": aligned(packed), "halves": aligned(halves), "values": 64}
    gpu("warpgroup_halves", words, ["halves"], most_rows=5)
    found = words["halves"].astype(np.float32) / ROWS_BY  # type: ignore[attr-defined]
    wanted = plain.values_of(packed, 64)
    assert np.all(np.isnan(found[4, 32:]))
    assert np.all(np.isfinite(found[:4]))
    # Scale and product are rounded; no half is nearer to another than 2 ** -24.
    near = 2.0**-10 * np.abs(wanted) + 2.0**-25 / ROWS_BY
    assert np.all(np.abs(found - wanted)[:4] <= near[:4])


def test_products_of_the_same_rows_share_their_halves() -> None:
    sizes = {"x": 4096, "values": 256, "outputs": 4096}
    one, other = shaped("linear", T.Q4_K, **sizes), shaped("linear", T.Q6_K, **sizes)
    odd = shaped("linear", T.Q8_0, **{**sizes, "values": 96})  # no number of tiles
    norm = shaped("rms_norm", parts=1, width=256)
    found = card_launches((one, other, odd, norm, one), 512, warpgroups=True)
    assert [made.kernel.name.rpartition("_")[0] for made in found] == [
        "warpgroup",
        "warpgroup_linear_q4_k",
        "warpgroup_linear_q6_k",
        "batch_linear_q8",
        "rms_norm_held",
        "warpgroup",
        "warpgroup_linear_q4_k",
    ]


def test_warpgroups_pass_a_layers_experts() -> None:
    kind, rows, experts, width, inner_width = T.Q8_0, 50, 2, 128, 64
    shapes = (kind, inner_width, width), (kind, inner_width, width), (kind, OUT, inner_width)
    held, routes, x = (
        Experts(experts, *shapes),
        Routes.of(rows, experts),
        normal(rows, width, seed=1),
    )
    program, arrays = layer(held, routes, x, inner_width, rows + 2, kind)
    before = arrays["y"][:rows] = normal(rows, OUT, seed=2)
    read = {"addresses", "rows", "tier", "logits"}
    written = [array for name, array in arrays.items() if name not in read]
    launches = card_launches(program, rows + 2, warpgroups=True)
    assert [one.kernel.name for one in launches if one.kernel.name.startswith("warp")] == [
        "warpgroup_halves",
        "warpgroup_gate_up_q8_0_64",
        "warpgroup_expert_q8_0_64",
        "warpgroup_sum_1",
    ]
    memory = gpu_simulator.Memory(written, [held.memory, *(arrays[name] for name in read)])
    for one in launches:
        gpu_launches.simulate(one, rows + 2, memory)
    top_k = routes.chosen.shape[1]
    starts, members, places = plain.expert_group(routes.chosen, experts)
    gathered = plain.expert_gather(as_read(kind, x), members, top_k).astype(np.float64)
    inner = plain.expert_gate_up(gathered, starts, held.weights(0), held.weights(1))
    choices = rows * top_k
    halves = arrays["inner"].ravel().view(np.float16)[: choices * inner_width] / ROWS_BY
    halves = halves.reshape(choices, inner_width).astype(np.float64)
    np.testing.assert_allclose(halves, inner[places], rtol=4e-3, atol=4e-3)
    _, shares = plain.router_top_k(arrays["logits"][:rows], top_k, renormalise=True)
    y = plain.expert_down(halves[members], starts, places, shares, held.weights(2), before)
    np.testing.assert_allclose(arrays["y"][:rows], y, rtol=2e-3, atol=2e-3)
    assert np.all(arrays["y"][rows:] == UNTOUCHED)


@pytest.mark.parametrize(
    ("rows", "outputs", "tile_rows"),
    [(70, 136, 128), (180, 8, 320)],  # blocks of 128 and 8 outputs; more rows than threads
)
def test_products_of_choices_are_rounded_to_halves(
    warpgroups: gpu_launches.Run, rows: int, outputs: int, tile_rows: int
) -> None:
    kind, values, top_k = T.Q8_0, 64, 2
    held = Experts(2, (kind, outputs, values))
    x, y = normal(rows * top_k, values, seed=1), np.full((rows * top_k + 1, outputs), -7)
    places = np.random.default_rng(2).permutation(rows * top_k)
    y = aligned(y.astype(np.float16))
    words = {
        "tiles": aligned(np.array([2, 0, 0, 64, 1, 64, rows * top_k - 64, 0, 0, 0])),
        "sources": aligned(places),
        "targets": aligned(places),
        "addresses": held.addresses,
        "x": buffer_of((ROWS_BY * x).astype(np.float16), rows * top_k),
        "y": y,
        "offset": held.offsets[0],
        "values": values,
        "outputs": outputs,
        "experts": 2,
        "top_k": top_k,
    }
    variant, tables = (kind, tile_rows), [held.memory]
    warpgroups("warpgroup_expert", words, ["y"], variant=variant, most_rows=rows, tables=tables)
    for expert, some in enumerate((places[:64], places[64:])):
        matrix = held.parts[0][expert]
        wanted = plain.linear(x[some].astype(np.float64), matrix.weight)
        found = y[some].astype(np.float64) / ROWS_BY
        near = bound(matrix, x[some]) + 2.0**-11 * np.abs(wanted)
        assert np.all(np.abs(found - wanted) <= near)
    assert np.all(y[-1] == -7)


@pytest.mark.parametrize(("top_k", "outputs"), [(1, 8), (3, 1032)])
def test_halves_of_a_rows_choices_are_added_up_in_their_order(
    gpu: gpu_launches.Run, top_k: int, outputs: int
) -> None:
    rows = 3
    products = (ROWS_BY * normal(rows * top_k, outputs, seed=1)).astype(np.float16)
    shares, before = normal(rows, top_k, seed=2), normal(rows, outputs, seed=3)
    y = aligned(np.concatenate([before, np.full((1, outputs), UNTOUCHED)]))
    words = {
        "rows": np.array([rows]),
        "products": aligned(products),
        "shares": aligned(shares),
        "y": y,
        "top_k": top_k,
        "outputs": outputs,
    }
    gpu("warpgroup_sum", words, ["y"], most_rows=rows + 1)
    total = np.zeros((rows, outputs), np.float32)
    for choice in range(top_k):
        share = shares[:, choice, None].astype(np.float64) / ROWS_BY
        total = (share * products[choice::top_k] + total).astype(np.float32)
    assert np.array_equal(y[:rows], before + total)
    assert np.all(y[rows:] == UNTOUCHED)


def test_choices_whose_products_are_no_whole_pieces_are_multiplied_as_bytes() -> None:
    kind, rows, experts, width, inner_width = T.Q8_0, 50, 2, 128, 64
    shapes = (kind, inner_width, width), (kind, inner_width, width), (kind, OUT, inner_width)
    x = normal(rows, width, seed=1)
    program, _ = layer(
        Experts(experts, *shapes), Routes.of(rows, experts), x, inner_width, rows, kind
    )
    *others, down = program
    odd = launch("expert_down", arguments_of(down) | {"outputs": OUT + 4}, variant=down.variant)
    for last, multiplied in (down, "warpgroup_expert_q8_0_64"), (odd, "batch_expert_q8_0"):
        found = card_launches((*others, last), rows, warpgroups=True)
        assert found[-2].kernel.name == multiplied


def code_of(name: str, kind: TensorType, rows: int) -> tuple[GpuKernel, gpu_compile.Cubin]:
    described = WARPGROUP_KERNELS[name]
    kernel = described.find((kind, rows), {})
    ptx = gpu_compile.ptx_code(kernel, described.kinds)
    assert ".f64" not in ptx
    return kernel, gpu_compile.link(ptx, "sm_90")


@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    [
        ("warpgroup_gate_up", T.Q4_K, 128),  # two blocks a multiprocessor
        ("warpgroup_gate_up", T.Q8_0, 128),  # whose weights take most registers
        *(
            pytest.param(f"warpgroup_{name}", kind, rows, marks=pytest.mark.slow)
            for name, sizes in (("linear", SIZES[:3]), ("gate_up", SIZES), ("expert", SIZES))
            for kind in sorted(PACKED)
            for rows in sizes
        ),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_products_of_warpgroups_fit_their_registers(name: str, kind: TensorType, rows: int) -> None:
    kernel, made = code_of(name, kind, rows)
    assert made.registers <= kernel.registers
    assert made.spill_bytes == 0


def test_a_kernel_whose_products_wait_for_each_other_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "wgmma.mma_async instructions are serialized due to the presence of Extern calls"
    monkeypatch.setattr(gpu_compile, "_log", lambda *_: said)
    with pytest.raises(AssertionError, match="batch_sum do not go on"):
        gpu_compile.cubin_of(sum_kernel(), BATCH_KERNELS["batch_sum"].kinds, "sm_90")


@pytest.mark.parametrize(
    ("rows", "tile"),
    [(256, 0), (512, 64), (1024, 128), (2048, 128), (3072, 256), (4096, 320), (16384, 320)],
)
def test_a_tile_has_room_for_the_choices_of_most_experts(rows: int, tile: int) -> None:
    assert rows_of_tile(rows, top_k=8, experts=128) == tile
