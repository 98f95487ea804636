"""Multiply very many rows with weights of floats: the router of a long prompt.

A block has 64 rows by 64 outputs, a thread 8 by 4. What a lane of `float_linear.py` adds up, the
*chain* of a sum, a thread adds up for all of its sums at once, from shared memory. Chains are taken
in the order in which `warp_sum` joins them, each two, four, eight as soon as they are there: so
sums have the same bits, and of a row's 32 chains a thread keeps four. Two groups of threads have
every other lane's chains each, which are joined last.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.float_linear import parts_of
from strata_nb.kernels.gpu.floats import EIGHT
from strata_nb.kernels.gpu.intrinsics import (
    WARP,
    await_older_copies,
    barrier,
    block_x,
    block_y,
    copy_16,
    end_copies,
    f32,
    f32_of_bits,
    f32_of_half,
    fetch_f32,
    fma,
    i32,
    i64,
    load_f32,
    load_i64,
    once_i64,
    shared_load_2xi32,
    shared_load_4xf32,
    shared_load_f32,
    shared_store_f32,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import (
    Arguments,
    Function,
    GpuKernel,
    Grid,
    blocks_of,
    outputs_grid,
    weights_read,
)

SIDE = 64  # rows of a block, and outputs
_GROUP = 128  # threads that have the sums of a block, of their chains
_GROUPS = 2
_THREADS = _GROUP * _GROUPS
_ROWS, _OUTPUTS = 8, 4  # of a thread
_CHAINS = WARP // _GROUPS
_CHAIN_BITS = _CHAINS.bit_length() - 1
_REGISTERS, _SPILLS = 255, 128  # of a thread: sums need nearly all

# Shared memory, in bytes: stages, each with eight values of the rows and of the outputs of each
# group; sums so far; what the second group hands over. Of rows 4 .. 7 of each eight, and of outputs
# of F32, the two halves of eight values have changed places: so lanes that load the same half of
# eight neighbours meet no bank twice.
_STAGES = 4
_MATRIX = 4 * EIGHT * SIDE
_OF_GROUP = 2 * _MATRIX
_STAGE = _GROUPS * _OF_GROUP
_SUMS = _STAGES * _STAGE
_AREA = 4 * SIDE * SIDE
_SHARED = _SUMS + 2 * _AREA


class _Weights(NamedTuple):
    """Say how eight values of an output lie in shared memory.

    size_bytes   of a value
    four         of the place of four: a tuple of them
    """

    size_bytes: int
    four: Function


def _four_f32(place: int) -> Any:
    return shared_load_4xf32(place)


def _four_f16(place: int) -> Any:
    a, b = shared_load_2xi32(place)
    return f32_of_half(a), f32_of_half(a >> 16), f32_of_half(b), f32_of_half(b >> 16)


def _four_bf16(place: int) -> Any:
    a, b = shared_load_2xi32(place)
    return (
        f32_of_bits(i32(a << 16)),
        f32_of_bits(a & -65536),
        f32_of_bits(i32(b << 16)),
        f32_of_bits(b & -65536),
    )


_WEIGHTS = {
    TensorType.F32: _Weights(4, _four_f32),
    TensorType.F16: _Weights(2, _four_f16),
    TensorType.BF16: _Weights(2, _four_bf16),
}


# -- a thread's sums: of eight rows, of four outputs each ------------------------------------------


def _four_more(total: Any, weights: Any, x: Any) -> Any:
    """Add four values times weights, in ascending order."""
    a, b, c, d = weights
    xa, xb, xc, xd = x
    return fma(d, xd, fma(c, xc, fma(b, xb, fma(a, xa, total))))


def _row_more(sums: Any, weights: Any, x: Any) -> Any:
    return (
        _four_more(sums[0], weights[0], x),
        _four_more(sums[1], weights[1], x),
        _four_more(sums[2], weights[2], x),
        _four_more(sums[3], weights[3], x),
    )


def _rows_more(sums: Any, weights: Any, x: int, half: int) -> Any:
    """Add four values of eight rows, 4 rows apart, of which every other one has turned halves."""
    even, odd, step = x + 16 * half, x + 16 * (half ^ 1), 4 * 4 * EIGHT
    return (
        _row_more(sums[0], weights, shared_load_4xf32(even)),
        _row_more(sums[1], weights, shared_load_4xf32(odd + step)),
        _row_more(sums[2], weights, shared_load_4xf32(even + 2 * step)),
        _row_more(sums[3], weights, shared_load_4xf32(odd + 3 * step)),
        _row_more(sums[4], weights, shared_load_4xf32(even + 4 * step)),
        _row_more(sums[5], weights, shared_load_4xf32(odd + 5 * step)),
        _row_more(sums[6], weights, shared_load_4xf32(even + 6 * step)),
        _row_more(sums[7], weights, shared_load_4xf32(odd + 7 * step)),
    )


def _four_plus(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _plus(a: Any, b: Any) -> Any:
    return (
        _four_plus(a[0], b[0]),
        _four_plus(a[1], b[1]),
        _four_plus(a[2], b[2]),
        _four_plus(a[3], b[3]),
        _four_plus(a[4], b[4]),
        _four_plus(a[5], b[5]),
        _four_plus(a[6], b[6]),
        _four_plus(a[7], b[7]),
    )


@cache
def _storer(rows: int) -> Function:
    """Return a function (place, sums): store those of so many rows, a thread's 4 * _GROUP apart."""

    def one(place: int, sums: Any) -> None:
        for_row = sums[0]
        shared_store_f32(place, for_row[0])
        shared_store_f32(place + 4 * _GROUP, for_row[1])
        shared_store_f32(place + 8 * _GROUP, for_row[2])
        shared_store_f32(place + 12 * _GROUP, for_row[3])

    if rows == 1:
        return one
    others = _storer(rows - 1)

    def several(place: int, sums: Any) -> None:
        one(place, sums)
        others(place + 16 * _GROUP, sums[1:])

    return several


@cache
def _joiner(rows: int) -> Function:
    """Return a function (place, sums, part): add what the other group has to sums of so many rows,
    and these to those of the parts before."""

    def joined(place: int, total: Any, part: int) -> None:
        total += shared_load_f32(place + _AREA)
        if part > 0:
            total = shared_load_f32(place) + total
        shared_store_f32(place, total)

    def one(place: int, sums: Any, part: int) -> None:
        for_row = sums[0]
        joined(place, for_row[0], part)
        joined(place + 4 * _GROUP, for_row[1], part)
        joined(place + 8 * _GROUP, for_row[2], part)
        joined(place + 12 * _GROUP, for_row[3], part)

    if rows == 1:
        return one
    others = _joiner(rows - 1)

    def several(place: int, sums: Any, part: int) -> None:
        one(place, sums, part)
        others(place + 16 * _GROUP, sums[1:], part)

    return several


def _finish(
    area: int, y: int, row: int, output: int, end: int, outputs: int, bias: int, add: int
) -> None:
    """Write a thread's sums, with biases and what is there where the launch asks for them.

    area   where they are, `_GROUP` apart
    row, output   the first
    end    of the rows
    """
    number = 0
    while number < _ROWS * _OUTPUTS:
        to_row, to_output = row + 4 * (number // _OUTPUTS), output + 8 * (number % _OUTPUTS)
        if to_row < end and to_output < outputs:
            total = shared_load_f32(area + 4 * _GROUP * number)
            if bias != 0:
                total += fetch_f32(bias + 4 * to_output)
            place = y + 4 * (to_row * outputs + to_output)
            if add != 0:
                total += load_f32(place)
            store_f32(place, total)
        number += 1


def _zeros() -> Any:
    zero = f32(0.0)
    row = zero, zero, zero, zero
    return row, row, row, row, row, row, row, row


def _first_value(chain: int) -> int:
    """Return the first value of a chain of the first group, as chains are joined."""
    lane = (chain & 1) << 4 | (chain & 2) << 2 | chain & 4 | (chain & 8) >> 2
    return EIGHT * (lane + WARP * (chain >> _CHAIN_BITS))


class _Turns(NamedTuple):
    """Hold device functions that go through the stages of a launch; see `_turns`."""

    ask: Function
    chain: Function


@cache
def _turns(kind: TensorType, values: int) -> _Turns:
    """Return the functions that copy and multiply, of a row of so many values.

    ask     (place, chain, turn, copied): ask for eight values of a chain; return the next chain and
            turn
    chain   (state, copied, places): the state behind a chain, and its sums

    state    where the next stage is, and which chain and turn is asked for next
    copied   what a thread copies: where to and from, of rows and of weights (from 0: none), and
             how many values there are from its group's first on
    places   of a thread's rows and outputs in a stage
    """
    size, four = _WEIGHTS[kind]
    parts = parts_of(values)
    step, chains, pitch = EIGHT * WARP * parts, _CHAINS * parts, size * EIGHT
    turns, is_whole = blocks_of(values, step), values % step == 0

    def ask(place: int, chain: int, turn: int, copied: Any) -> Any:
        x_target, x, w_target, weights, left = copied
        value = _first_value(chain) + step * turn
        if is_whole or value < left:
            copy_16(place + x_target, x + 4 * value)
            if weights != 0:
                copy_16(place + w_target, weights + size * value)
        end_copies()
        if turn + 1 < turns:
            return chain, turn + 1
        return chain + 1 & chains - 1, i64(0)  # behind the last the first, which nobody reads

    def multiplied(sums: Any, x: int, weights: int) -> Any:
        sums = _rows_more(sums, _of_outputs(weights), x, 0)
        return _rows_more(sums, _of_outputs(weights ^ 4 * size), x, 1)

    def _of_outputs(place: int) -> Any:
        return (
            four(place),
            four(place + 8 * pitch),
            four(place + 16 * pitch),
            four(place + 24 * pitch),
        )

    def chain_of(state: Any, number: int, copied: Any, places: Any) -> Any:
        place, chain, turn = state
        sums, own = _zeros(), i64(0)
        while own < turns:
            await_older_copies()
            barrier()
            chain, turn = ask(place + 2 * _STAGE & _STAGES * _STAGE - 1, chain, turn, copied)
            if is_whole or _first_value(number) + step * own < copied[4]:
                sums = multiplied(sums, place + places[0], place + places[1])
            place = place + _STAGE & _STAGES * _STAGE - 1
            own += 1
        return (place, chain, turn), sums

    return _Turns(ask, chain_of)


@cache
def batch_float_tiles_kernel(kind: TensorType, values: int) -> GpuKernel:
    """Return `linear` of the table for a type of `FLOATS` and rows of so many values, whole eights.

    Its grid is (rows / 64, outputs / 64), of 256 threads. A block reads its 64 rows and its 64
    outputs once; it writes 4 bytes for each of its sums.
    """
    size, chains = _WEIGHTS[kind].size_bytes, _CHAINS * parts_of(values)
    ask, chain_of = _turns(kind, values)
    store, join = _storer(_ROWS), _joiner(_ROWS)
    pitch = size * EIGHT

    def two_chains(state: Any, number: int, copied: Any, places: Any) -> Any:
        state, one = chain_of(state, number, copied, places)
        state, other = chain_of(state, number + 1, copied, places)
        return state, _plus(one, other)

    def linear(
        rows: int, x: int, weight: int, bias: int, y: int, _values: int, outputs: int, add: int
    ) -> None:
        first_row, first = SIDE * i64(block_x()), SIDE * i64(block_y())
        here = load_i64(rows) - first_row
        if here <= 0:
            return
        thread = i64(thread_index())
        group, within = thread // _GROUP, thread % _GROUP
        # A thread copies half of a row's eight values, and half of an output's or all of them.
        line, half, own = within >> 1, within & 1, group * _OF_GROUP
        turned = own + 4 * EIGHT * line + 16 * (half ^ (line >> 2 & 1))
        of_row = x + 4 * (values * (first_row + min(line, here - 1)) + EIGHT * group) + 16 * half
        of_output = weight + size * (values * min(first + line, outputs - 1) + EIGHT * group)
        if size == 4:
            of_output += 16 * half
            w_target = _MATRIX + turned
        else:
            of_output = of_output if half == 0 else i64(0)
            w_target = own + _MATRIX + pitch * line
        copied = (
            once_i64(turned),
            once_i64(of_row),
            once_i64(w_target),
            once_i64(of_output),
            values - EIGHT * group,
        )
        # Its sums: of rows 4 apart, of outputs 8 apart.
        lane, warp = within % WARP, within // WARP
        row = SIDE // 2 * (warp & 1) + 2 * (lane >> 4) + (lane & 1)
        column = SIDE // 2 * (warp >> 1) + (lane >> 1 & 7)
        of_column = own + _MATRIX + pitch * column
        if size == 4:
            of_column += 16 * (column >> 2 & 1)
        places = once_i64(own + 4 * EIGHT * row), once_i64(of_column)
        chain, turn = ask(i64(0), i64(0), i64(0), copied)
        chain, turn = ask(i64(_STAGE), chain, turn, copied)
        state = i64(0), chain, turn
        four = eight = _zeros()
        number, area = i64(0), _SUMS + 4 * within
        while number < chains:
            state, two = two_chains(state, number, copied, places)
            state, others = two_chains(state, number + 2, copied, places)
            sums = _plus(two, others)
            if number & 4 == 0:
                four = sums
            else:
                sums = _plus(four, sums)
                if number & 8 == 0:
                    eight = sums
                else:
                    sums = _plus(eight, sums)
                    if group == 1:
                        store(area + _AREA, sums)
                    barrier()
                    if group == 0:
                        join(area, sums, number >> _CHAIN_BITS)
            number += 4
        if group == 0:
            row, column = first_row + row, first + column
            _finish(area, y, row, column, first_row + here, outputs, bias, add)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return outputs_grid(blocks_of(most_rows, SIDE), arguments["outputs"], SIDE)

    return GpuKernel(
        f"batch_linear_tiles_{kind.name}_{values}".lower(),
        linear,
        _THREADS,
        grid,
        lambda _: _SHARED,
        _REGISTERS,
        reads=weights_read(kind),
        spills=_SPILLS,
    )
