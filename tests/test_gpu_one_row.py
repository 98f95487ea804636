"""Products of one row that a card does in one launch: up to three weights of the same row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gpu_simulator
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import aligned, shaped, simulate, simulated_program
from host_launches import UNTOUCHED, Matrix, normal, same_bits
from numpy.typing import NDArray

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.card_launch import card_launch
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.packing import PACKED

T = TensorType


def product(x: int, kind: TensorType, *, outputs: int = 8, waits: bool = False) -> Launch:
    one = shaped("linear", kind, x=x, values=256, outputs=outputs)
    return one._replace(waits=waits, label=f"blk.0.of_{outputs}")


def test_products_of_the_same_row_are_one_launch() -> None:
    program = [product(1, T.Q4_K, waits=True), product(1, T.Q6_K, outputs=16), product(1, T.Q4_K)]
    (one,) = card_launches(tuple(program), 1)
    assert one.kernel.name == "one_row_1_q4_k_q6_k_q4_k"
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


class Layer(NamedTuple):
    """A norm and what multiplies its rows, with the arrays that they read and write."""

    program: tuple[Launch, ...]
    read: list[NDArray[Any]]
    written: list[NDArray[Any]]


def layer(kinds: Sequence[TensorType], values: int, rows: int, *, norm: bool) -> Layer:
    """Return products of rows of x, which are normed before or quantised already."""
    x, count = normal(rows, values, seed=1), aligned(np.array([rows]))
    is_packed = kinds[0] in PACKED
    floats = aligned(np.full((rows, values), UNTOUCHED))
    packed = aligned(np.full((rows, row_bytes(values)), 99, np.uint8))
    source = aligned(x)
    weight = aligned(normal(values, seed=2))
    written, read = [], [count, source, weight]
    program = []

    def at(array: NDArray[Any]) -> int:
        return int(array.ctypes.data)

    if norm:
        written += [floats, packed]
        named = {"rows": at(count), "index": 0, "x": at(source), "weight": at(weight)}
        sizes = {"out": at(floats), "packed": at(packed), "parts": 1, "width": values, "eps": 1e-5}
        program.append(launch("rms_norm", named | sizes, label="blk.0.norm"))
    else:
        packed[...] = plain.quantised(x)
        read.append(packed)
    multiplied = packed if is_packed else floats
    for number, kind in enumerate(kinds):
        matrix = Matrix.random(kind, (11, 8, 3)[number], values)
        data, y = aligned(matrix.data), aligned(np.full((rows, len(matrix.weight)), UNTOUCHED))
        words = {"rows": at(count), "x": at(multiplied), "weight": at(data), "bias": 0, "y": at(y)}
        sizes = {"values": values, "outputs": len(matrix.weight), "add": 0}
        waits = number == 0
        program.append(launch("linear", words | sizes, variant=kind, waits=waits, label="blk.0.p"))
        read.append(data)
        written.append(y)
    return Layer(tuple(program), read, written)


@pytest.mark.parametrize(
    ("kinds", "values", "rows", "norm", "kernel"),
    [
        ((T.Q4_K, T.Q8_0, T.Q6_K), 512, 1, False, "one_row_1w_q4_k_q8_0_q6_k"),
        ((T.Q4_K, T.Q8_0, T.Q6_K), 512, 1, True, "normed_row_1w_q4_k_q8_0_q6_k"),
        ((T.Q5_1,), 1024, 1, True, "normed_row_2w_q5_1"),
        ((T.F32,), 512, 3, True, "normed_linear_f32_1"),
        ((T.F32,), 1024, 1, True, "normed_linear_f32_2"),
    ],
    ids=["of one row", "behind a norm", "of two warps", "of floats", "of floats by parts"],
)
def test_launches_together_have_the_bits_of_each_alone(
    kinds: Sequence[TensorType], values: int, rows: int, norm: bool, kernel: str
) -> None:
    one = layer(kinds, values, rows, norm=norm)
    (together,) = card_launches(one.program, rows)
    assert together.kernel.name == kernel
    simulated_program(one.program, rows, one.written, one.read)
    found = [array.copy() for array in one.written]
    for array in one.written:
        array[...] = 99
    memory = gpu_simulator.Memory(one.written, one.read)
    for launched in one.program:
        simulate(card_launch(launched), rows, memory)
    for array, expected in zip(found, one.written, strict=True):
        assert same_bits(array, expected)
    if norm:
        x = normal(rows, values, seed=1)
        expected = plain.rms_norm(x, normal(values, seed=2), 1e-5)
        np.testing.assert_allclose(found[0], expected, rtol=6e-7, atol=0)
        assert same_bits(found[1], plain.quantised(found[0]))


def test_a_norm_whose_rows_nobody_multiplies_next_stays_alone() -> None:
    norm = shaped("rms_norm", packed=1, parts=1, width=512)
    other = shaped("linear", T.Q8_0, x=2, values=512, outputs=8)
    names = [one.kernel.name for one in card_launches((norm, other), 1)]
    assert names == ["rms_norm_held_1", "one_row_1w_q8_0"]
