"""Choose the functions that multiply by weights of a type, and call them by address.

A kernel of the table multiplies by weights of any type through two addresses, of the function for
few rows and of that for many, so that it is compiled once and not once for each type.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.compiling import inlined
from strata_nb.formats import TensorType
from strata_nb.kernels.host import plain, prompt, window
from strata_nb.kernels.host.operations import Function
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.packing import SUB_BLOCK, UNPACKED
from strata_nb.raw_memory import call_address

MANY_ROWS = 8  # as many rows pay for unpacking the weights into a work space, a window's too
OUTPUTS_AT_ONCE = prompt.PANEL_ROWS  # a thread's outputs begin at a multiple of it


class MatrixFunctions(NamedTuple):
    """Say how weights of a type are multiplied.

    few, many   the functions (`steps.SIGNATURE`) for fewer than MANY_ROWS rows and for others; the
                bits are the same
    unit        values that make up one of the `size` that the functions take
    """

    few: Function
    many: Function
    unit: int


@cache
def matrix_functions(kind: TensorType) -> MatrixFunctions:
    """Return the functions of a type; ValueError for one without a kernel."""
    if not takes_packed(kind):
        function = plain.plain_kernel(kind)
        return MatrixFunctions(function, function, 1)
    return MatrixFunctions(window.window_kernel(kind), prompt.prompt_kernel(kind), SUB_BLOCK)


def takes_packed(kind: TensorType) -> bool:
    """Return whether products with a type take quantised rows, and not float32 ones."""
    return kind not in UNPACKED


def input_row_bytes(kind: TensorType, values: int) -> int:
    """Return the bytes of a row of what products with a type take."""
    return row_bytes(values) if takes_packed(kind) else 4 * values


def work_bytes(kind: TensorType, values: int) -> int:
    """Return the bytes of work space that a thread needs."""
    return prompt.work_bytes(kind, values) if takes_packed(kind) else 0


@inlined
def multiply(few: int, many: int, rows: int, arguments: Any) -> None:
    """Call the function for so many rows, with the arguments of `steps.SIGNATURE`."""
    call_address(many if rows >= MANY_ROWS else few, arguments)
