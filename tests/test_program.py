"""Launches of the table's kernels: what `launch` refuses, and who has a function for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_references import REFERENCES

from strata_nb.formats import TensorType
from strata_nb.kernels.host import functions
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.table import KERNELS

T = TensorType

# -- one launch ------------------------------------------------------------------------------------

GATED_ADD = {"rows": 1, "gate": 2, "x": 3, "y": 4, "width": 5}
QUANTISE = {"rows": 1, "x": 2, "packed": 3, "times": 4, "values": 64}
EMBED = {
    "rows": 1,
    "tokens": 2,
    "drawn": 0,
    "weight": 3,
    "x": 4,
    "width": 5,
    "vocabulary": 6,
}
NORM = {"rows": 1, "index": 0, "x": 2, "weight": 3, "out": 4, "packed": 0, "parts": 1, "width": 8}


def test_arguments_come_in_the_order_of_the_table_whatever_the_order_given() -> None:
    values = dict(reversed(GATED_ADD.items()))
    made = launch("gated_add", values, waits=False, label="a label")
    assert made == Launch("gated_add", None, (1, 2, 3, 4, 5), False, "a label")


def test_a_float_is_the_bits_of_a_float32() -> None:
    made = launch("rms_norm", {**NORM, "eps": 1e-6})
    assert np.array(made.arguments[-1:], np.uint32).view(np.float32)[0] == np.float32(1e-6)
    assert made.arguments[:-1] == tuple(NORM.values())


def test_integers_may_be_numbers_of_numpy() -> None:
    made = launch("gated_add", {**GATED_ADD, "x": np.int64(2**40)})  # type: ignore[dict-item]
    assert made.arguments[2] == 2**40
    assert all(type(word) is int for word in made.arguments)


@pytest.mark.parametrize("name", GATED_ADD)
def test_a_missing_argument_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="gated_add"):
        launch("gated_add", {key: value for key, value in GATED_ADD.items() if key != name})


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="surplus"):
        launch("gated_add", {**GATED_ADD, "surplus": 1})


def test_an_argument_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width is 5.0, not of the kind integer"):
        launch("gated_add", {**GATED_ADD, "width": 5.0})
    with pytest.raises(ValueError, match=r"x is 5.0, not of the kind address"):
        launch("gated_add", {**GATED_ADD, "x": 5.0})
    with pytest.raises(ValueError, match=r"eps is 1, not of the kind float"):
        launch("rms_norm", {**NORM, "eps": 1})


def test_a_variant_is_refused_where_there_is_none_and_demanded_where_there_are_some() -> None:
    with pytest.raises(ValueError, match="gated_add of variant"):
        launch("gated_add", GATED_ADD, variant=T.F32)
    with pytest.raises(ValueError, match="embed of variant None: it has variants of weights"):
        launch("embed", EMBED)
    assert launch("embed", EMBED, variant=T.F32).variant is T.F32


def test_a_kernel_that_the_table_lacks_is_refused() -> None:
    with pytest.raises(KeyError, match="no_such_kernel"):
        launch("no_such_kernel", {})


@pytest.mark.parametrize("variant", [("f16", "f16"), "F32", 0])
def test_the_host_refuses_a_variant_that_is_no_type_of_weights(variant: Any) -> None:
    program = (launch("embed", EMBED, variant=variant, label="token_embd"),)
    with pytest.raises(ValueError, match=r"token_embd: .* is no type of weights"):
        functions.WorkSpace(program, 1)


def test_the_host_refuses_weights_without_a_kernel() -> None:
    values = {**dict.fromkeys(("rows", "x", "weight", "bias", "y", "add"), 0), "values": 32}
    program = (launch("linear", {**values, "outputs": 8}, variant=T.F64),)
    with pytest.raises(ValueError, match="F64"):
        functions.prepare(program, functions.WorkSpace((), 1))


# -- the table -------------------------------------------------------------------------------------


def test_every_kernel_has_a_function_on_the_host() -> None:
    of_cards = {"sample"}  # the host has the logits and calls `sampling.sample`
    assert set(functions._FUNCTIONS) == set(KERNELS) - of_cards


def test_every_kernel_has_a_reference_in_numpy() -> None:
    assert set(REFERENCES) == set(KERNELS)


def test_no_kernel_has_two_arguments_of_one_name_and_all_begin_with_the_rows() -> None:
    for kernel in KERNELS.values():
        names = [argument.name for argument in kernel.arguments]
        assert len(set(names)) == len(names)
        assert kernel.arguments[0] == ("rows", "address")
