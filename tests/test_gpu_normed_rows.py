"""Products of a single row that norm it: launches of a card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_simulator
import numpy as np
import pytest
from gpu_launches import aligned, simulate
from host_launches import UNTOUCHED, Matrix, normal, same_bits
from numpy.typing import NDArray

from strata_nb.formats import TensorType as T
from strata_nb.kernels.gpu import normed_rows
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.compile import ptx_code
from strata_nb.kernels.gpu.launches import card_launch, card_launches
from strata_nb.kernels.gpu.product_launches import with_products
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.quantised_rows import row_bytes

WIDTH, OUTPUTS = 512, (40, 8, 16)
KINDS = (T.Q4_K, T.Q8_0, T.Q4_K)
Arrays = dict[str, NDArray[Any]]


def layer(bias: bool = True) -> Arrays:
    arrays = {
        "rows": np.array([1, 0]),
        "x": normal(1, WIDTH, seed=1),
        "norm": normal(WIDTH, seed=2),
        "packed": np.zeros((1, row_bytes(WIDTH)), np.uint8),
        "bias": normal(max(OUTPUTS), seed=3) if bias else np.zeros(0, np.float32),
    }
    for number, (kind, count) in enumerate(zip(KINDS, OUTPUTS, strict=True)):
        arrays[f"weight{number}"] = Matrix.random(kind, count, WIDTH, seed=number).data
        arrays[f"y{number}"] = np.full((1, count), UNTOUCHED, np.float32)
    return {name: aligned(array) for name, array in arrays.items()}


def program_of(
    arrays: Arrays, norm: dict[str, int] | None = None, product: dict[str, int] | None = None
) -> list[Launch]:
    """Return a norm and three products; with some arguments of the norm, and the first product."""
    at = {name: int(array.ctypes.data) for name, array in arrays.items()}
    words: dict[str, Any] = {name: at[name] for name in ("rows", "x", "packed")}
    words |= {"index": 0, "weight": at["norm"], "out": 0, "parts": 1, "width": WIDTH, "eps": 1e-6}
    found = [launch("rms_norm", words | (norm or {}), label="blk.0.attn_norm")]
    for number, (kind, count) in enumerate(zip(KINDS, OUTPUTS, strict=True)):
        words = {"rows": at["rows"], "x": at["packed"], "values": WIDTH, "outputs": count}
        words |= {"weight": at[f"weight{number}"], "y": at[f"y{number}"], "add": 0}
        words["bias"] = at["bias"] if arrays["bias"].size else 0
        if number == 0:
            words |= product or {}
        label = f"blk.0.attn_{'qkv'[number]}"
        found.append(launch("linear", words, variant=kind, label=label, waits=number == 0))
    return found


def run(launches: Sequence[CardLaunch], arrays: Arrays) -> list[NDArray[Any]]:
    """Run launches of one row; return what the products wrote, which is put back."""
    outputs = [arrays[f"y{number}"] for number in range(3)]
    written = [*outputs, arrays["packed"]]
    read = [array for array in arrays.values() if not any(array is one for one in written)]
    memory = gpu_simulator.Memory(written, read)
    for one in launches:
        simulate(one, 1, memory)
    found = [array.copy() for array in outputs]
    for array in outputs:
        array[...] = UNTOUCHED
    return found


@pytest.mark.parametrize("blocks", [132, 5, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_products_that_norm_their_row_have_the_bits_of_norm_and_products(
    monkeypatch: pytest.MonkeyPatch, bias: bool, blocks: int
) -> None:
    monkeypatch.setattr(normed_rows, "_BLOCKS", blocks)
    arrays = layer(bias)
    program = program_of(arrays)
    (together,) = card_launches(program, 1)
    assert together.label == "blk.0.attn_norm, attn_q, attn_k, attn_v"
    assert together.grid(1)[0] == {132: 8, 5: 5, 3: 3}[blocks]
    assert together.kernel.reads(together.arguments, 1) == sum(
        arrays[f"weight{number}"].nbytes for number in range(3)
    )
    apart = [
        one if isinstance(one, CardLaunch) else card_launch(one) for one in with_products(program)
    ]
    assert len(apart) == 2
    found, expected = run([together], arrays), run(apart, arrays)
    for one, other in zip(found, expected, strict=True):
        assert not np.any(one == UNTOUCHED)
        assert same_bits(one, other)


def test_a_row_that_a_step_does_not_have_is_left_alone() -> None:
    arrays = layer()
    arrays["rows"][0] = 0
    assert all(
        np.all(one == UNTOUCHED) for one in run(card_launches(program_of(arrays), 1), arrays)
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"norm": {"out": 4096}},
        {"norm": {"index": 4096}},
        {"norm": {"parts": 2}},
        {"norm": {"packed": 4096}},
        {"product": {"rows": 4096}},
        {"product": {"add": 1}},
    ],
    ids=lambda changed: "-".join(f"{one}.{name}" for one in changed for name in changed[one]),
)
def test_products_that_a_norm_does_not_lead_to_stay_apart(
    changed: dict[str, dict[str, int]],
) -> None:
    assert len(card_launches(program_of(layer(), **changed), 1)) > 1


def test_a_row_that_is_read_again_is_written_by_a_norm_of_its_own() -> None:
    arrays = layer()
    program = program_of(arrays)
    assert len(card_launches([*program, program[1]], 1)) == 3
    assert len(card_launches([*program, *program], 1)) == 2


def test_rows_that_blocks_do_not_norm_at_once_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert normed_rows.groups_of_block(KINDS, 2048, (4096, 512, 512)) == 5
    assert normed_rows.groups_of_block(KINDS, 2048, (8192, 1024, 1024)) == 0  # too many
    assert normed_rows.groups_of_block(KINDS, 2304, (64, 64, 64)) == 0  # no two tiles a warp
    assert normed_rows.groups_of_block(KINDS, 2048, (64, 64, 60)) == 0
    assert normed_rows.groups_of_block((T.IQ3_S, *KINDS[1:]), 2048, (64, 64, 64)) == 0  # a table
    monkeypatch.setattr(normed_rows, "_BLOCKS", 2)
    assert len(card_launches(program_of(layer()), 1)) == 2


def test_products_with_their_norm_compile_without_doubles() -> None:
    (one,) = card_launches(program_of(layer()), 1)
    assert ".f64" not in ptx_code(one.kernel, one.kinds)
