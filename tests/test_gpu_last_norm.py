"""Norms that the last block of a product does: launches of one row on a card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_simulator
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import aligned, of_card, shaped, simulate
from gpu_simulator import KernelFault
from host_launches import UNTOUCHED, Matrix, normal, same_bits
from numpy.typing import NDArray

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.card_launch import CardLaunch, card_launch
from strata_nb.kernels.gpu.last_norm import with_last_norms
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.quantised_rows import row_bytes

T = TensorType
Arrays = dict[str, NDArray[Any]]
WRITTEN = ("rows", "y", "out", "packed")
WIDTH = 256  # the narrowest that blocks of more than a warp hold


def one_row() -> NDArray[np.int64]:
    """Return the words of a step of one row: the number, and what launches count in."""
    return aligned(np.array([1, 0]))


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def norm_of(arrays: Arrays, width: int, **changed: int) -> Launch:
    words: dict[str, Any] = {
        "rows": address(arrays["rows"]),
        "index": 0,
        "x": address(arrays["y"]),
        "weight": address(arrays["norm"]),
        "out": address(arrays["out"]),
        "packed": address(arrays["packed"]),
        "parts": 1,
        "width": width,
        "eps": 1e-6,
    }
    return launch("rms_norm", words | changed, label="blk.1.attn_norm")


def of_row(width: int) -> Arrays:
    return {
        "rows": one_row(),
        "y": aligned(normal(1, width, seed=2)),
        "norm": aligned(normal(width, seed=3)),
        "out": aligned(np.full((1, width), UNTOUCHED)),
        "packed": aligned(np.full((1, row_bytes(width)), 99, np.uint8)),
    }


def product_of(arrays: Arrays, kind: TensorType, values: int, width: int, **changed: int) -> Launch:
    """Return a product that adds to y."""
    arrays["x"] = aligned(plain.quantised(normal(1, values, seed=1)))
    arrays["weight"] = aligned(Matrix.random(kind, width, values).data)
    arrays["bias"] = aligned(normal(width, seed=4))
    words: dict[str, Any] = {name: address(arrays[name]) for name in ("rows", "x", "weight", "y")}
    words |= {"bias": address(arrays["bias"]), "values": values, "outputs": width, "add": 1}
    return launch("linear", words | changed, variant=kind, label="blk.0.attn_output")


def experts_of(arrays: Arrays, values: int, width: int) -> CardLaunch:
    """Return the products of two experts, which add to y."""
    experts = [aligned(Matrix.random(T.Q8_0, width, values, seed=n).data) for n in range(2)]
    arrays |= {f"expert{number}": one for number, one in enumerate(experts)}
    arrays["blobs"] = aligned(np.array([address(one) for one in experts]))
    arrays["sources"] = aligned(np.zeros(len(experts), np.int64))  # nobody comes
    arrays["inner"] = aligned(plain.quantised(normal(2, values, seed=1)))
    arrays["shares"] = aligned(np.array([0.75, 0.25], np.float32))
    names = ("rows", "blobs", "sources", "inner", "shares", "y")
    sizes = {"down_offset": 0, "top_k": 2, "values": values, "outputs": width}
    (found,) = of_card("expert_down", {n: address(arrays[n]) for n in names} | sizes, T.Q8_0, 1)
    return found._replace(label="blk.0.expert_down")


def run(launches: Sequence[CardLaunch], arrays: Arrays) -> Arrays:
    """Run launches of one row; return what they wrote, and leave the arrays as they were."""
    before = {name: arrays[name].copy() for name in WRITTEN}
    read = [array for name, array in arrays.items() if name not in WRITTEN]
    memory = gpu_simulator.Memory([arrays[name] for name in WRITTEN], read)
    for one in launches:
        simulate(one, 1, memory)
    found = {name: arrays[name].copy() for name in WRITTEN}
    for name, array in before.items():
        arrays[name][...] = array
    return found


def check_bits(together: CardLaunch, apart: Sequence[CardLaunch], arrays: Arrays) -> None:
    found, expected = run([together], arrays), run(apart, arrays)
    assert not np.array_equal(found["y"], arrays["y"])
    for name in WRITTEN:
        assert same_bits(found[name], expected[name]), name


@pytest.mark.parametrize(
    ("kind", "values", "width"),
    [(T.Q4_K, 256, 256), (T.Q8_0, 544, 384)],
    ids=["two fours of a thread", "one or two"],
)
def test_a_product_and_the_norm_behind_it_have_the_bits_of_both_alone(
    kind: TensorType, values: int, width: int
) -> None:
    arrays = of_row(width)
    program = product_of(arrays, kind, values, width), norm_of(arrays, width)
    (together,) = card_launches(program, 1)
    assert together.label == "blk.0.attn_output, attn_norm"
    (first,) = card_launches(program[:1], 1)
    check_bits(together, [first, card_launch(program[1])], arrays)


def test_experts_and_the_norm_behind_them_have_the_bits_of_both_alone() -> None:
    arrays = of_row(WIDTH)
    down, norm = experts_of(arrays, 64, WIDTH), norm_of(arrays, WIDTH)
    (together,) = with_last_norms([down, norm])
    assert isinstance(together, CardLaunch)
    check_bits(together, [down, card_launch(norm)], arrays)


def test_a_row_that_a_step_does_not_have_is_left_alone() -> None:
    arrays = of_row(WIDTH)
    arrays["rows"][0] = 0
    (one,) = card_launches((product_of(arrays, T.Q8_0, 64, WIDTH), norm_of(arrays, WIDTH)), 1)
    found = run([one], arrays)
    assert all(same_bits(found[name], arrays[name]) for name in WRITTEN)


def test_a_word_that_is_not_0_in_front_of_a_launch_is_found() -> None:
    arrays = of_row(WIDTH)
    (one,) = card_launches((product_of(arrays, T.Q8_0, 64, WIDTH), norm_of(arrays, WIDTH)), 1)
    arrays["rows"][1] = WIDTH
    with pytest.raises(KernelFault, match="the word was not 0"):
        run([one], arrays)


@pytest.mark.parametrize(
    "changed",
    [{"x": 4096}, {"rows": 4096}, {"index": 4096}, {"parts": 2}],
    ids=["another row", "other rows", "rows by their numbers", "heads"],
)
def test_other_norms_are_launched_alone(changed: dict[str, int]) -> None:
    arrays = of_row(WIDTH)
    product = product_of(arrays, T.Q8_0, 64, WIDTH)
    assert len(card_launches((product, norm_of(arrays, WIDTH)), 1)) == 1
    assert len(card_launches((product, norm_of(arrays, WIDTH, **changed)), 1)) == 2


def test_norms_of_several_rows_or_behind_what_does_not_add_are_launched_alone() -> None:
    arrays = of_row(WIDTH)
    product, norm = product_of(arrays, T.Q8_0, 64, WIDTH), norm_of(arrays, WIDTH)
    assert len(card_launches((product, norm), 2)) == 2
    assert len(card_launches((product_of(arrays, T.Q8_0, 64, WIDTH, add=0), norm), 1)) == 2
    assert len(card_launches((shaped("quantise"), norm), 1)) == 2


def test_rows_that_a_block_does_not_hold_are_normed_in_a_launch_of_their_own() -> None:
    for width in (128, 576, 4224):
        product = shaped("linear", T.Q8_0, values=64, outputs=width, add=1)
        assert len(card_launches((product, shaped("rms_norm", parts=1, width=width)), 1)) == 2
