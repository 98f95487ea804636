"""Multiply many rows of quantised activations by packed weights: reading a prompt.

Two groups of weights are unpacked into a *panel* in the work space, and all rows of activations
read that. In a panel a vector holds four values of each of sixteen rows, so that the product of
bytes with four values of the activations leaves one sum a row and nothing to transpose:

    panel     | unit 0                       | unit 1 | ...     | scales, minima of each unit
    unit      | vector 0 | vector 1 | ...    |                    2 x 16 float32
    vector    | 4 values of row 0 | of row 4 | of row 8 | of row 12 | of row 1 | ...

Lane 4r + i belongs to row r + 4i, which is what a transposition within 16 bytes gives. The bits of
a result are those of `window.py`: the same operations on the same numbers, lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from strata_nb.compiling import compiled, helper, inlined
from strata_nb.formats import TensorType, block_layout, row_bytes
from strata_nb.kernels.host.generated import define, fill_in
from strata_nb.kernels.host.instructions import dot_narrow, dot_wide
from strata_nb.kernels.host.lanes import load_first
from strata_nb.kernels.host.products import (
    high_halves,
    high_pairs,
    in_each_four,
    low_halves,
    low_pairs,
    store_first,
)
from strata_nb.kernels.host.steps import SIGNATURE, host_weights, steps_of, widener
from strata_nb.kernels.host.vectors import (
    BYTES,
    INTEGERS,
    floats_of,
    fused,
    load_bytes,
    load_floats,
    no_floats,
    no_integers,
    recast,
    repeat_one_float,
    repeater,
    shuffler,
)
from strata_nb.kernels.host.weights import Arithmetic
from strata_nb.kernels.quantised_rows import HALF_SUMS, SCALES, SUB_BLOCK_BYTES, SUMS
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK
from strata_nb.raw_memory import store

PANEL_ROWS = 2 * GROUP_ROWS
ROWS_AT_ONCE = 8
_SUB_BLOCK_BYTES = PANEL_ROWS * SUB_BLOCK
_SCALE_BYTES = 2 * 4 * PANEL_ROWS  # of a unit: scales and minima

_repeat_word = repeater(BYTES, "u8", 4)
_repeat_integer = repeater(INTEGERS, "i32", 1)
_as_integers = recast(INTEGERS)
_even_of_each_four = in_each_four([0, 2, 4, 6])
_odd_of_each_four = in_each_four([1, 3, 5, 7])
_in_order_of_rows = shuffler([4 * (row % 4) + row // 4 for row in range(PANEL_ROWS)])


def work_bytes(kind: TensorType, values: int) -> int:
    """Return the bytes of the work space that a thread needs for rows of so many values."""
    sub_blocks = values // SUB_BLOCK + 1
    panel = sub_blocks * (_SUB_BLOCK_BYTES + 2 * _SCALE_BYTES)
    return GROUP_ROWS * row_bytes(kind, values) + panel


# -- unpacking a panel -----------------------------------------------------------------------------


@inlined
def _store_transposed(place: int, a: Any, b: Any, c: Any, d: Any) -> None:
    """Store four vectors, the n-th made of word n of each 16 bytes of a, b, c and d."""
    ab_low, ab_high = low_pairs(a, b), high_pairs(a, b)
    cd_low, cd_high = low_pairs(c, d), high_pairs(c, d)
    store(place, low_halves(ab_low, cd_low))
    store(place + 64, high_halves(ab_low, cd_low))
    store(place + 128, low_halves(ab_high, cd_high))
    store(place + 192, high_halves(ab_high, cd_high))


@inlined
def _store_sub_block(place: int, first: Any, second: Any) -> None:
    """Store a sub-block of two groups, each as four vectors (`weights.py`)."""
    a, b, c, d = first
    e, f, g, h = second
    _store_transposed(place, _as_integers(a), _as_integers(c), _as_integers(e), _as_integers(g))
    _store_transposed(
        place + 256, _as_integers(b), _as_integers(d), _as_integers(f), _as_integers(h)
    )


def _expander(kind: TensorType) -> Callable[..., None]:
    """Return a function (first group, second group, sub_blocks, panel) that fills a panel."""
    arithmetic, steps = host_weights(kind).arithmetic, steps_of(kind)
    whole, has_last = arithmetic.unit == SUB_BLOCK, not arithmetic.whole_steps
    has_minima = arithmetic.has_minima

    @inlined
    def store_scales(panel: int, sub_blocks: int, step: int, first: Any, second: Any) -> None:
        place = panel + _SUB_BLOCK_BYTES * sub_blocks + 2 * _SCALE_BYTES * step
        scales, minima = first
        more_scales, more_minima = second
        store(place, _even_of_each_four(scales, more_scales))
        store(place + _SCALE_BYTES, _odd_of_each_four(scales, more_scales))
        if has_minima:
            store(place + 64, _even_of_each_four(minima, more_minima))
            store(place + _SCALE_BYTES + 64, _odd_of_each_four(minima, more_minima))

    @helper
    def expand(first: int, second: int, sub_blocks: int, panel: int) -> None:
        for step in range(sub_blocks // 2 if whole else sub_blocks):
            one = steps.quants(first, sub_blocks, step)
            other = steps.quants(second, sub_blocks, step)
            if whole:
                place = panel + 2 * _SUB_BLOCK_BYTES * step
                _store_sub_block(place + _SUB_BLOCK_BYTES, one[4:], other[4:])
            else:
                place = panel + _SUB_BLOCK_BYTES * step
            _store_sub_block(place, one[:4], other[:4])
            store_scales(
                panel,
                sub_blocks,
                step,
                steps.scales(first, sub_blocks, step),
                steps.scales(second, sub_blocks, step),
            )
        if has_last and sub_blocks & 1:
            step = sub_blocks // 2
            one = steps.last_quants(first, sub_blocks, step)
            other = steps.last_quants(second, sub_blocks, step)
            _store_sub_block(panel + 2 * _SUB_BLOCK_BYTES * step, one[:4], other[:4])
            store_scales(
                panel,
                sub_blocks,
                step,
                steps.last_scales(first, sub_blocks, step),
                steps.last_scales(second, sub_blocks, step),
            )

    return expand


# -- a panel times some rows of activations --------------------------------------------------------

_ROWS_TEXT = """
def {name}(panel, x, stride, y, outputs, members, sub_blocks, adds):
    scales = panel + {sub_block_bytes} * sub_blocks
{each}    x{r} = x + {r} * stride
{each}    total{r} = no_floats()
{each}    other{r} = no_floats()
    for unit in range(sub_blocks * {units}):
        vectors = panel + {unit_bytes} * unit
{each}        sum{r} = no_integers()
        for word in range({words}):
            weights = load_bytes(vectors + 64 * word)
{each}            sum{r} = dot(sum{r}, weights, repeat_word(x{r} + 4 * ({words} * unit + word)))
        scale = load_floats(scales + {scale_bytes} * unit)
        minimum = load_floats(scales + {scale_bytes} * unit + 64)
{each}        total{r} = add(total{r}, sum{r}, scale, minimum, x{r}, sub_blocks, unit)
{each}        total{r}, other{r} = other{r}, total{r}
{each}    finish(y + 4 * outputs * {r}, total{r} + other{r}, members, adds)
"""


@inlined
def _finish(place: int, total: Any, members: int, adds: int) -> None:
    """Store the results of the rows of a panel, members of them, or add them to what is there."""
    result = _in_order_of_rows(total)
    if members == PANEL_ROWS:
        if adds:
            result = load_floats(place) + result
        store(place, result)
    else:
        if adds:
            result = load_first(result, place, members) + result
        store_first(place, result, members)


def _adder(arithmetic: Arithmetic) -> Callable[..., Any]:
    """Return a function that adds the product of a unit to its sum, scaled."""
    halves = arithmetic.unit != SUB_BLOCK
    shift = arithmetic.bias or 0
    sums_start = HALF_SUMS if halves else SUMS
    has_bias, has_minima = arithmetic.bias is not None, arithmetic.has_minima

    @inlined
    def add(
        total: Any, found: Any, scale: Any, minimum: Any, x: int, sub_blocks: int, unit: int
    ) -> Any:
        factor = repeat_one_float(x + SCALES * sub_blocks + 4 * (unit >> 1 if halves else unit))
        sums = _repeat_integer(x + sums_start * sub_blocks + 4 * unit)
        if has_bias:
            found = found - (sums << shift)
        total = fused(floats_of(found), scale * factor, total)
        if has_minima:
            total = fused(no_floats() - minimum, floats_of(sums) * factor, total)
        return total

    return add


@cache
def _rows_function(arithmetic: Arithmetic, rows: int) -> Callable[..., None]:
    """Return a function of one panel and `rows` rows of activations."""
    units = SUB_BLOCK // arithmetic.unit
    source = fill_in(
        _ROWS_TEXT,
        rows,
        name="some_rows",
        units=units,
        words=arithmetic.unit // 4,
        sub_block_bytes=_SUB_BLOCK_BYTES,
        unit_bytes=_SUB_BLOCK_BYTES // units,
        scale_bytes=_SCALE_BYTES,
    )
    names = {
        "add": _adder(arithmetic),
        "dot": dot_narrow if arithmetic.narrow else dot_wide,
        "finish": _finish,
        "load_bytes": load_bytes,
        "load_floats": load_floats,
        "no_floats": no_floats,
        "no_integers": no_integers,
        "repeat_word": _repeat_word,
    }
    return helper(define(source, "some_rows", names, __name__))


@cache
def prompt_kernel(kind: TensorType) -> Callable[..., None]:
    """Return the kernel of a packed type, for many rows of activations.

    The arguments are those of `window.window_kernel`.
    """
    layout = block_layout(kind)
    block_sub_blocks, block_bytes = layout.values // SUB_BLOCK, layout.size_bytes
    widen, expand, arithmetic = widener(kind), _expander(kind), host_weights(kind).arithmetic
    some_rows, one_row = (_rows_function(arithmetic, rows) for rows in (ROWS_AT_ONCE, 1))

    def prompt(
        weights: int,
        activations: int,
        y: int,
        rows: int,
        sub_blocks: int,
        outputs: int,
        first: int,
        last: int,
        adds: int,
        work: int,
    ) -> None:
        stride = SUB_BLOCK_BYTES * sub_blocks
        row_size = sub_blocks // block_sub_blocks * block_bytes
        panel = work + GROUP_ROWS * row_size
        for start in range(first, last, PANEL_ROWS):
            members = min(PANEL_ROWS, last - start)
            group = weights + start * row_size
            second = group + GROUP_ROWS * row_size
            whole_groups = members // GROUP_ROWS
            if members % GROUP_ROWS:
                widen(
                    group + whole_groups * GROUP_ROWS * row_size,
                    members % GROUP_ROWS,
                    sub_blocks,
                    work,
                )
                if whole_groups:
                    second = work
                else:
                    group = work
            if members <= GROUP_ROWS:
                second = group  # any bytes that are weights: their results are not stored
            expand(group, second, sub_blocks, panel)
            row = 0
            while row < rows:
                x = activations + row * stride
                place = y + 4 * (row * outputs + start)
                if rows - row >= ROWS_AT_ONCE:
                    some_rows(panel, x, stride, place, outputs, members, sub_blocks, adds)
                    row += ROWS_AT_ONCE
                else:
                    one_row(panel, x, stride, place, outputs, members, sub_blocks, adds)
                    row += 1

    prompt.__name__ = prompt.__qualname__ = f"prompt_{kind.name.lower()}"
    return compiled(SIGNATURE)(prompt)
