"""Give the names in a kernel their meaning: rebuild its functions over other globals.

A kernel calls intrinsics and other functions of its package, which lie in its globals and closures.
`rebind` copies a function and everything of the package that it calls, and puts what `meaning` says
in the place of each intrinsic. The originals are left as they are, so that one process can compile
a kernel for two vendors and simulate it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from strata_nb.kernels.gpu import intrinsics
from strata_nb.kernels.gpu.intrinsics import Intrinsic

Function = Callable[..., Any]


def rebind(
    kernel: Function,
    meaning: Callable[[Intrinsic], Any],
    callee: Callable[[Function], Any] = lambda function: function,
) -> Function:
    """Return a copy of a kernel in which every intrinsic is what `meaning` returns for it.

    callee   makes what the kernel calls of the copy of a function that it calls
    """
    done: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if isinstance(value, Intrinsic):
            if id(value) not in done:
                done[id(value)] = meaning(value)
            return done[id(value)]
        if isinstance(value, FunctionType):
            if id(value) not in done:
                done[id(value)] = callee(copy(value))
            return done[id(value)]
        return value

    def copy(function: FunctionType) -> FunctionType:
        code = function.__code__
        names = [name for name in code.co_names if name in function.__globals__]
        scope = {name: of(function.__globals__[name]) for name in names}
        scope["__builtins__"] = function.__globals__["__builtins__"]
        cells = tuple(CellType(of(cell.cell_contents)) for cell in function.__closure__ or ())
        made = FunctionType(code, scope, function.__name__, function.__defaults__, cells)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made

    if not isinstance(kernel, FunctionType):
        raise TypeError(f"{kernel!r} is no plain function")
    return copy(kernel)


def with_loads(function: Function) -> Function:
    """Return a copy of a device function that loads what it fetched: of memory that the kernel
    writes before."""

    def meaning(intrinsic: Intrinsic) -> Any:
        first, _, rest = intrinsic.name.partition("_")
        return getattr(intrinsics, f"load_{rest}") if first == "fetch" else intrinsic

    return rebind(function, meaning)


def in_shared(intrinsic: Intrinsic) -> Any:
    """Return what loads from shared memory, or stores there, in place of the card's memory: a
    meaning for `rebind`."""
    first, _, _ = intrinsic.name.partition("_")
    if first not in {"load", "store"}:
        return intrinsic
    return getattr(intrinsics, f"shared_{intrinsic.name}")
