"""Give the names in a kernel their meaning: rebuild its functions over other globals.

A kernel calls intrinsics and other functions of its package, which lie in its globals and closures.
A `Binder` copies a function and everything of the package that it calls, and puts what `meaning`
says in the place of each intrinsic. The originals are left as they are, so that one process can
compile a kernel for two vendors and simulate it as well.

Kernels are made by functions that close over constants and other functions, so that two of them
seldom call the same objects, and mostly call equal ones: the same code over equal values. A binder
copies those once, and a compiler that keeps one compiles a fifth of the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import CellType, FunctionType
from typing import Any

from strata_nb.kernels.gpu import intrinsics
from strata_nb.kernels.gpu.intrinsics import Intrinsic

Function = Callable[..., Any]


class Binder:
    """Copy kernels, with every intrinsic being what `meaning` returns for it.

    callee   makes what the kernel calls of the copy of a function that it calls
    """

    def __init__(
        self,
        meaning: Callable[[Intrinsic], Any],
        callee: Callable[[Function], Any] = lambda function: function,
    ) -> None:
        self._meaning, self._callee = meaning, callee
        self._callees: dict[Hashable, Any] = {}  # by what they are made of
        # By the identity of the original, which is kept: no other object gets its number.
        self._done: dict[int, tuple[Any, Any]] = {}

    def bind(self, kernel: Function) -> Function:
        """Return a copy of a kernel."""
        if not isinstance(kernel, FunctionType):
            raise TypeError(f"{kernel!r} is no plain function")
        return self._copy(kernel, *self._bound_parts(kernel))

    def _bound(self, value: Any) -> Any:
        """Return what takes the place of something that a function names."""
        if not isinstance(value, (Intrinsic, FunctionType)):
            return value
        if id(value) not in self._done:
            if isinstance(value, Intrinsic):
                found = self._meaning(value)
            else:
                names, parts = self._bound_parts(value)
                made_of = value.__defaults__, tuple(names), *parts
                key = value.__code__, *map(_identity, made_of)
                if key not in self._callees:
                    self._callees[key] = self._callee(self._copy(value, names, parts))
                found = self._callees[key]
            self._done[id(value)] = value, found
        return self._done[id(value)][1]

    def _bound_parts(self, function: FunctionType) -> tuple[list[str], list[Any]]:
        """Return the globals that a function names, and what it then has: of these, then cells."""
        scope = function.__globals__
        names = [name for name in function.__code__.co_names if name in scope]
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return names, [self._bound(one) for one in (*(scope[name] for name in names), *cells)]

    def _copy(self, function: FunctionType, names: list[str], values: list[Any]) -> FunctionType:
        scope = dict(zip(names, values, strict=False))
        scope["__builtins__"] = function.__globals__["__builtins__"]
        cells = tuple(CellType(value) for value in values[len(names) :])
        made = FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, cells
        )
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made


def _identity(value: Any) -> Hashable:
    """Return what is the same of values for which the same code is made, and only of those."""
    if value is None or isinstance(value, (int, float, str, tuple)):
        return type(value), repr(value)  # 1 is not True, and 0.0 not -0.0
    return id(value)


def with_loads(function: Function) -> Function:
    """Return a copy of a device function that loads what it fetched: of memory that the kernel
    writes before."""

    def meaning(intrinsic: Intrinsic) -> Any:
        first, _, rest = intrinsic.name.partition("_")
        return getattr(intrinsics, f"load_{rest}") if first == "fetch" else intrinsic

    return Binder(meaning).bind(function)


def with_shared(function: Function) -> Function:
    """Return a copy of a device function that loads from shared memory, and stores there, in place
    of the card's memory."""

    def meaning(intrinsic: Intrinsic) -> Any:
        first, _, _ = intrinsic.name.partition("_")
        if first not in {"load", "store"}:
            return intrinsic
        return getattr(intrinsics, f"shared_{intrinsic.name}")

    return Binder(meaning).bind(function)
