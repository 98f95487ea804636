"""`expert_gate_up` and `expert_down` of the table: the chosen experts of all rows.

Choices are grouped by expert (`expert_group`), so that an expert's weights are read once for all
rows that chose it. Threads share the outputs of every expert.
"""

from __future__ import annotations

from strata_nb.compiling import compiled
from strata_nb.formats import TensorType
from strata_nb.kernels.host.gating import gate_sub_blocks, gate_values
from strata_nb.kernels.host.matrices import (
    OUTPUTS_AT_ONCE,
    input_row_bytes,
    matrix_functions,
    multiply,
)
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, Work, share, word
from strata_nb.kernels.host.products import load_some, store_some
from strata_nb.kernels.host.vectors import all_lanes, no_floats
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import SUB_BLOCK
from strata_nb.raw_memory import load_f32, load_i64

_LANES = 16
# Outputs that one thread quantises by itself: whole sub-blocks, and whole panels of the products.
_QUANTISED_AT_ONCE = max(SUB_BLOCK, OUTPUTS_AT_ONCE)


@compiled(SIGNATURE)
def _expert_gate_up(arguments: int, thread: int, threads: int) -> None:
    starts, members = word(arguments, 1), word(arguments, 2)
    x, gathered, addresses = word(arguments, 3), word(arguments, 4), word(arguments, 5)
    inner, other, packed = word(arguments, 6), word(arguments, 7), word(arguments, 8)
    gate_offset, up_offset = word(arguments, 9), word(arguments, 10)
    experts, top_k = word(arguments, 11), word(arguments, 12)
    values, outputs, row_size = word(arguments, 13), word(arguments, 14), word(arguments, 15)
    gate_few, gate_many, gate_size = word(arguments, 16), word(arguments, 17), word(arguments, 18)
    up_few, up_many, up_size = word(arguments, 19), word(arguments, 20), word(arguments, 21)
    work = word(arguments, 22) + thread * word(arguments, 23)
    first, last = share(outputs, _QUANTISED_AT_ONCE, thread, threads)
    if first >= last:
        return
    for expert in range(experts):
        start = load_i64(starts + 8 * expert)
        count = load_i64(starts + 8 * expert + 8) - start
        if count == 0:
            continue
        source = gathered + start * row_size
        if count == 1:
            source = x + load_i64(members + 8 * start) // top_k * row_size
        blob = load_i64(addresses + 8 * expert)
        target, beside = inner + 4 * start * outputs, other + 4 * start * outputs
        multiply(
            gate_few,
            gate_many,
            count,
            (
                blob + gate_offset,
                source,
                target,
                count,
                values // gate_size,
                outputs,
                first,
                last,
                0,
                work,
            ),
        )
        multiply(
            up_few,
            up_many,
            count,
            (
                blob + up_offset,
                source,
                beside,
                count,
                values // up_size,
                outputs,
                first,
                last,
                0,
                work,
            ),
        )
        for row in range(count):
            place = target + 4 * row * outputs
            up = beside + 4 * row * outputs
            if packed:
                sub_blocks = outputs // SUB_BLOCK
                quantised = packed + (start + row) * sub_blocks * SUB_BLOCK_BYTES
                begin, end = first // SUB_BLOCK, last // SUB_BLOCK
                gate_sub_blocks(place, up, place, quantised, sub_blocks, begin, end)
            else:
                gate_values(place, up, place, first, last)


@compiled(SIGNATURE)
def _expert_down(arguments: int, thread: int, threads: int) -> None:
    rows = load_i64(word(arguments, 0))
    starts, places, inner = word(arguments, 1), word(arguments, 2), word(arguments, 3)
    addresses, shares = word(arguments, 4), word(arguments, 5)
    products, y, down_offset = word(arguments, 6), word(arguments, 7), word(arguments, 8)
    experts, top_k = word(arguments, 9), word(arguments, 10)
    values, outputs = word(arguments, 11), word(arguments, 12)
    few, many, size = word(arguments, 13), word(arguments, 14), word(arguments, 15)
    row_size = word(arguments, 16)
    work = word(arguments, 17) + thread * word(arguments, 18)
    first, last = share(outputs, OUTPUTS_AT_ONCE, thread, threads)
    if first >= last:
        return
    for expert in range(experts):
        start = load_i64(starts + 8 * expert)
        count = load_i64(starts + 8 * expert + 8) - start
        if count:
            multiply(
                few,
                many,
                count,
                (
                    load_i64(addresses + 8 * expert) + down_offset,
                    inner + start * row_size,
                    products + 4 * start * outputs,
                    count,
                    values // size,
                    outputs,
                    first,
                    last,
                    0,
                    work,
                ),
            )
    for row in range(rows):
        for output in range(first, last, _LANES):
            count = min(_LANES, last - output)
            total = no_floats()
            for place in range(row * top_k, (row + 1) * top_k):
                member = load_i64(places + 8 * place)
                product = load_some(products + 4 * (member * outputs + output), count)
                total = total + product * all_lanes(total, load_f32(shares + 4 * place))
            here = y + 4 * (row * outputs + output)
            store_some(here, load_some(here, count) + total, count)


def expert_gate_up_kernel(gate: TensorType, up: TensorType, work: Work) -> HostKernel:
    """Return `expert_gate_up`; gate and up take rows of one form, both packed or both float32.

    `work` has the `matrices.work_bytes` of either type a thread.
    """
    return HostKernel(_expert_gate_up, (*matrix_functions(gate), *matrix_functions(up), *work))


def expert_down_kernel(kind: TensorType, values: int, work: Work) -> HostKernel:
    """Return `expert_down` for rows of so many values; `work` as in `linear_kernel`."""
    row_size = input_row_bytes(kind, values)
    return HostKernel(_expert_down, (*matrix_functions(kind), row_size, *work))
