"""Products of one row that a card does in one launch: up to three weights of the same row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_simulator
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import Run, aligned, shaped, simulate, simulated_program
from host_launches import UNTOUCHED, Matrix, normal, same_bits

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu import one_row
from strata_nb.kernels.gpu.card_launch import card_launch
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.program import Launch, launch

T = TensorType


def product(x: int, kind: TensorType, *, outputs: int = 8, waits: bool = False) -> Launch:
    one = shaped("linear", kind, x=x, values=256, outputs=outputs)
    return one._replace(waits=waits, label=f"blk.0.of_{outputs}")


def test_products_of_the_same_row_are_one_launch() -> None:
    program = [product(1, T.Q4_K, waits=True), product(1, T.Q6_K, outputs=16), product(1, T.Q4_K)]
    (one,) = card_launches(tuple(program), 1)
    assert one.kernel.name == "one_row_q4_k_q6_k_q4_k_256"
    assert one.grid(1) == (4, 1, 1)
    assert one.label == "blk.0.of_8, of_16, of_8"
    assert len(card_launches(tuple(program), 2)) == 3


@pytest.mark.parametrize(
    "second",
    [
        product(2, T.Q4_K),  # another row
        product(1, T.Q4_K, waits=True),  # it reads what the first writes
        product(1, T.F32),
        shaped("quantise"),
    ],
    ids=["another row", "one that waits", "floats", "another kernel"],
)
def test_what_cannot_be_done_together_is_apart(second: Launch) -> None:
    program = (product(1, T.Q4_K), second)
    assert len(card_launches(program, 1)) == 2


def test_a_fourth_product_begins_another_launch() -> None:
    assert len(card_launches(tuple(product(1, T.Q8_0) for _ in range(4)), 1)) == 2


@pytest.mark.parametrize(
    ("kinds", "values"),
    [((T.Q4_K, T.Q8_0, T.Q6_K), 512), ((T.Q4_K, T.Q4_K, T.Q6_K), 256), ((T.Q5_1, T.Q5_1), 1024)],
    ids=["of three types", "of two types", "of one type"],
)
def test_products_together_have_the_bits_of_each_alone(
    kinds: Sequence[TensorType], values: int
) -> None:
    rows, x = aligned(np.array([1])), aligned(plain.quantised(normal(1, values, seed=1)))
    program, read, written = [], [rows, x], []
    for number, kind in enumerate(kinds):
        matrix = Matrix.random(kind, (11, 8, 3)[number], values)
        data, y = aligned(matrix.data), aligned(np.full((1, len(matrix.weight)), UNTOUCHED))
        arrays = {"rows": rows, "x": x, "weight": data, "y": y}
        words = {name: int(array.ctypes.data) for name, array in arrays.items()}
        sizes = {"bias": 0, "values": values, "outputs": len(matrix.weight), "add": 0}
        program.append(launch("linear", words | sizes, variant=kind, waits=number == 0))
        read.append(data)
        written.append(y)
    assert len(card_launches(tuple(program), 1)) == 1
    simulated_program(tuple(program), 1, written, read)
    found = [array.copy() for array in written]
    memory = gpu_simulator.Memory(written, read)
    for one in program:
        simulate(card_launch(one), 1, memory)
    assert all(same_bits(one, other) for one, other in zip(found, written, strict=True))


@pytest.mark.parametrize("add", [0, 1])
def test_groups_in_pairs_have_the_bits_of_each_alone(
    gpu: Run, monkeypatch: pytest.MonkeyPatch, add: int
) -> None:
    monkeypatch.setattr(one_row, "_IN_PAIRS", 24)
    matrix = Matrix.random(T.IQ3_S, 24, 512)  # three groups, of which the last is alone
    before, bias = normal(1, 24, seed=2), normal(1, 24, seed=3)
    values: dict[str, Any] = {
        "rows": aligned(np.array([1])),
        "x": aligned(plain.quantised(normal(1, 512, seed=1))),
        "weight": aligned(matrix.data),
        "bias": aligned(bias),
        "values": 512,
        "outputs": 24,
        "add": add,
    }
    found = []
    for most_rows in (1, 8):
        y = aligned(np.concatenate([before, np.full((7, 24), UNTOUCHED)]).astype(np.float32))
        gpu("linear", {**values, "y": y}, ["y"], variant=T.IQ3_S, most_rows=most_rows)
        found.append(y[:1])
    assert same_bits(*found)
    assert not same_bits(found[0], before)
