"""`linear` of the table: rows times a matrix of weights; threads share the outputs."""

from __future__ import annotations

from strata_nb.compiling import compiled
from strata_nb.formats import TensorType
from strata_nb.kernels.host.matrices import OUTPUTS_AT_ONCE, matrix_functions, multiply
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, Work, share, word
from strata_nb.raw_memory import load_f32, load_i64, store


@compiled(SIGNATURE)
def _linear(arguments: int, thread: int, threads: int) -> None:
    rows = load_i64(word(arguments, 0))
    bias, y = word(arguments, 3), word(arguments, 4)
    outputs, adds = word(arguments, 6), word(arguments, 7)
    size, few, many = (
        word(arguments, 5) // word(arguments, 10),
        word(arguments, 8),
        word(arguments, 9),
    )
    work = word(arguments, 11) + thread * word(arguments, 12)
    first, last = share(outputs, OUTPUTS_AT_ONCE, thread, threads)
    if first >= last or rows == 0:
        return
    x, weight = word(arguments, 1), word(arguments, 2)
    multiply(few, many, rows, (weight, x, y, rows, size, outputs, first, last, adds, work))
    if bias:
        for row in range(rows):
            for output in range(first, last):
                place = y + 4 * (row * outputs + output)
                store(place, load_f32(place) + load_f32(bias + 4 * output))


def linear_kernel(kind: TensorType, work: Work) -> HostKernel:
    """Return `linear` for weights of a type; `work` has `matrices.work_bytes` a thread."""
    functions = matrix_functions(kind)
    return HostKernel(_linear, (*functions, *work))
