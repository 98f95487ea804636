"""What leads to the choice of a row's experts, in one launch of a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gpu_simulator
import numpy as np
import pytest
from gpu_launches import aligned, of_card, simulate
from host_launches import UNTOUCHED, normal, same_bits
from numpy.typing import NDArray

from strata_nb.cache.filling import new_plans, write_plans
from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.card_launch import CardLaunch, card_launch
from strata_nb.kernels.gpu.compile import ptx_code
from strata_nb.kernels.gpu.router import router_kernel, with_routers
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.table import ROWS_WORDS

T = TensorType
Arrays = dict[str, NDArray[Any]]
WRITTEN = (
    *("rows", "out", "packed", "logits", "use", "tally", "chosen", "shares", "blobs"),
    *("sources", "addresses", "seen"),
)


def of_layer(width: int, experts: int, top_k: int, kind: TensorType = T.F32) -> Arrays:
    weight = normal(experts, width, seed=5)
    weight[0] = weight[experts - 1]  # equal logits
    numbers = np.arange(experts)
    homes, slots = 0x7E0000000000 + 0x100 * numbers, 0x7F0000000000 + 0x100 * numbers
    is_resident = numbers % 5 == 1
    plan = new_plans(1, experts)  # by which one comes to a free slot, and others to those of others
    worth = np.ones((2, 1, experts))
    write_plans(plan, 9, [[0x7D0000000000]], is_resident[None], *worth)
    found = {
        "rows": np.array([1] + [0] * (ROWS_WORDS - 1 + experts)),
        "x": normal(1, width, seed=1),
        "norm": normal(width, seed=2),
        "weight": weight if kind is T.F32 else weight.astype(np.float16),
        "bias": normal(experts, seed=3),
        "positions": np.array([0]),
        "homes": homes,
        "addresses": np.where(is_resident, slots, homes),
        "seen": np.zeros(experts, np.int64),
        "plan": plan,
        "out": np.full((1, width), UNTOUCHED),
        "packed": np.full((1, row_bytes(width)), 99, np.uint8),
        "logits": np.full((1, experts), UNTOUCHED),
        "use": np.arange(experts),
        "tally": np.array([100, 200]),
        "chosen": np.full((1, top_k), -5),
        "shares": np.full((1, top_k), UNTOUCHED),
        "blobs": np.full((1, top_k), -5),
        "sources": np.full((1, top_k), -5),
    }
    return {name: aligned(array) for name, array in found.items()}


def launches_of(
    arrays: Arrays,
    kind: TensorType = T.F32,
    *,
    bias: bool = True,
    norm: Mapping[str, int] | None = None,
    product: Mapping[str, int] | None = None,
) -> list[Launch | CardLaunch]:
    """Return the launches that lead to a choice, as a card has them for several rows.

    norm, product   arguments of theirs that are something else
    """
    at = {name: int(array.ctypes.data) for name, array in arrays.items()}
    width, experts, top_k = (arrays[name].shape[-1] for name in ("x", "logits", "chosen"))
    first: dict[str, Any] = {"index": 0, "parts": 1, "width": width, "eps": 1e-6}
    first |= {name: at[name] for name in ("rows", "x", "out", "packed")}
    second = {"x": at["out"], "y": at["logits"], "values": width, "outputs": experts, "add": 0}
    second |= {"rows": at["rows"], "weight": at["weight"], "bias": at["bias"] if bias else 0}
    third = {"experts": experts, "top_k": top_k, "renormalise": 1, "forced": 0}
    third |= {name: at[name] for name in (*WRITTEN[3:], "rows", "positions", "homes", "plan")}
    return [
        launch("rms_norm", {**first, "weight": at["norm"], **(norm or {})}, label="blk.0.ffn_norm"),
        launch("linear", {**second, **(product or {})}, variant=kind, label="blk.0.ffn_gate_inp"),
        *of_card("route", third, True),
    ]


def run(launches: Sequence[Launch | CardLaunch], arrays: Arrays) -> Arrays:
    """Run launches of one row; return what they wrote, and leave the arrays as they were."""
    before = {name: arrays[name].copy() for name in WRITTEN}
    read = [array for name, array in arrays.items() if name not in WRITTEN]
    memory = gpu_simulator.Memory([arrays[name] for name in WRITTEN], read)
    for one in launches:
        simulate(one if isinstance(one, CardLaunch) else card_launch(one), 1, memory)
    found = {name: arrays[name].copy() for name in WRITTEN}
    for name, array in before.items():
        arrays[name][...] = array
    return found


@pytest.mark.parametrize(
    ("kind", "width", "experts", "top_k"),
    [(T.F32, 256, 20, 4), (T.F16, 640, 6, 2), (T.F32, 1280, 5, 5)],
    ids=["a warp an output", "two warps", "four warps, more fours than threads"],
)
def test_a_router_has_the_bits_of_norm_product_and_choice_alone(
    kind: TensorType, width: int, experts: int, top_k: int
) -> None:
    arrays = of_layer(width, experts, top_k, kind)
    for bias in (True, False):
        apart = launches_of(arrays, kind, bias=bias)
        (together,) = with_routers(apart)
        assert isinstance(together, CardLaunch)
        assert together.grid(1)[0] > 1
        found, expected = run([together], arrays), run(apart, arrays)
        assert not np.any(found["chosen"] < 0)
        assert np.any(found["sources"] != -5)
        posts = found["rows"][ROWS_WORDS:]
        assert np.array_equal(posts & 0xFFFFFFFF, found["logits"][0].view(np.uint32))
        assert np.all(posts >> 32 == 1)
        found["rows"][ROWS_WORDS:] = 0
        for name in WRITTEN:
            assert same_bits(found[name], expected[name]), name


def test_a_row_that_a_step_does_not_have_is_left_alone() -> None:
    arrays = of_layer(256, 20, 4)
    arrays["rows"][0] = 0
    found = run(list(with_routers(launches_of(arrays))), arrays)
    assert all(same_bits(found[name], arrays[name]) for name in WRITTEN)


@pytest.mark.parametrize(
    "changed",
    [
        {"norm": {"index": 4096}},
        {"norm": {"parts": 2}},
        {"norm": {"rows": 4096}},
        {"norm": {"out": 4096}},
        {"product": {"add": 1}},
        {"product": {"y": 4096}},
        {"product": {"outputs": 8}},
    ],
    ids=lambda changed: "-".join(f"{one}.{name}" for one in changed for name in changed[one]),
)
def test_launches_that_do_not_follow_from_each_other_stay_apart(changed: dict[str, Any]) -> None:
    arrays = of_layer(256, 20, 4)
    assert len(list(with_routers(launches_of(arrays)))) == 1
    assert len(list(with_routers(launches_of(arrays, **changed)))) == 3


def test_a_row_that_is_normed_in_place_is_normed_in_a_launch_of_its_own() -> None:
    arrays = of_layer(256, 20, 4)
    x = int(arrays["x"].ctypes.data)
    assert len(list(with_routers(launches_of(arrays, norm={"out": x}, product={"x": x})))) == 3


def test_routers_that_no_block_can_take_stay_apart() -> None:
    for width, experts in ((128, 8), (4224, 8), (256, 257)):
        arrays = of_layer(width, experts, 2)
        assert len(list(with_routers(launches_of(arrays)))) == 3, (width, experts)
    assert len(list(with_routers(launches_of(of_layer(256, 256, 2))))) == 1


def test_a_router_compiles_without_doubles() -> None:
    arrays = of_layer(2048, 128, 8)
    (one,) = with_routers(launches_of(arrays))
    assert isinstance(one, CardLaunch)
    assert one.kernel is router_kernel(T.F32, 2048, 128, 8, False)
    assert one.kernel.reads(one.arguments, 1) == 1 << 20
    assert ".f64" not in ptx_code(one.kernel, one.kinds)
