"""Kernels over other globals: what they share is copied once, and nothing that differs is taken
for the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strata_nb.kernels.gpu.binding import Binder
from strata_nb.kernels.gpu.intrinsics import i32

Function = Callable[..., Any]


def added(value: Any) -> Function:
    return lambda x: i32(x) + value


def calling(function: Function) -> Function:
    return lambda x: function(x)


@pytest.fixture
def copies() -> list[Function]:
    return []


@pytest.fixture
def binder(copies: list[Function]) -> Binder:
    def callee(function: Function) -> Function:
        copies.append(function)
        return function

    return Binder(lambda intrinsic: int, callee)


def test_what_kernels_share_is_copied_once(binder: Binder, copies: list[Function]) -> None:
    kernels = [binder.bind(calling(calling(added(2)))) for _ in range(3)]
    assert [kernel(5) for kernel in kernels] == [7, 7, 7]
    assert len(copies) == 2  # what is called, and what that calls


@pytest.mark.parametrize(
    ("one", "other"), [(1, 2), (1, 1.0), (1, True), (0.0, -0.0), ((1,), (1.0,))], ids=str
)
def test_what_differs_is_not_taken_for_the_same(
    binder: Binder, copies: list[Function], one: Any, other: Any
) -> None:
    for value in (one, other, one, other):
        binder.bind(calling(added(value)))
    assert [str(copy.__closure__[0].cell_contents) for copy in copies] == [str(one), str(other)]


def test_functions_differ_by_what_they_call(binder: Binder) -> None:
    kernels = [binder.bind(calling(calling(added(value)))) for value in (1, 2)]
    assert [kernel(0) for kernel in kernels] == [1, 2]


def test_objects_are_the_same_only_if_they_are_one(binder: Binder, copies: list[Function]) -> None:
    first, second = object(), object()
    for value in (first, second, first):
        binder.bind(calling(added(value)))
    assert len(copies) == 2
