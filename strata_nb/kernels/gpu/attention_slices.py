"""Attention of a prompt batch on a card: as for a window, for a slice of the rows after another.

Each row's runs of cells need work space, which is large for long contexts: `kernels/runs.py` says
for how many rows there is room. Launches of a slice name its first row; how many rows it has is
written behind the work space, by a kernel that runs once in a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.combining import ARGUMENTS as COMBINE
from strata_nb.kernels.gpu.intrinsics import block_x, i64, load_i64, store_i64, thread_index
from strata_nb.kernels.gpu.operations import GpuKernel, blocks_of
from strata_nb.kernels.gpu.routed import card_kernel
from strata_nb.kernels.program import Launch
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.runs import slice_rows, work_bytes

_THREADS = 32


def _slices(rows: int, counts: int, each: int, slices: int) -> None:
    number = _THREADS * i64(block_x()) + thread_index()
    if number < slices:
        left = load_i64(rows) - each * number
        store_i64(counts + 8 * number, min(max(left, 0), each))


@cache
def slices_kernel() -> GpuKernel:
    """Return the kernel (rows, counts, each, slices): how many of the rows each slice has."""
    return GpuKernel(
        "batch_slices",
        _slices,
        _THREADS,
        lambda arguments, _: (max(1, blocks_of(arguments["slices"], _THREADS)), 1, 1),
    )


SLICES = card_kernel("*rows *counts each slices", lambda _, __: slices_kernel())


def with_slices(program: Sequence[Launch | CardLaunch], rows: int) -> Iterator[Launch | CardLaunch]:
    """Yield the launches of so many rows, with attention and what combines its runs by slices.

    Attention reads how many rows there are before the launch in front of it has ended. So slices
    are counted at the beginning, and where attention is what comes first another launch, which
    counts none, stands between.
    """
    first = next(
        (number for number, pair in enumerate(pairwise(program)) if _are_runs(*pair)), None
    )
    if first is not None:
        attention = program[first]
        assert isinstance(attention, CardLaunch)  # noqa: S101 - as `_are_runs` says
        yield _count(attention, rows)
        if first == 0:
            counted = _count(attention, rows)
            yield counted._replace(arguments={**counted.arguments, "slices": 0})
    number = 0
    while number < len(program):
        one, *behind = program[number : number + 2]
        if behind and _are_runs(one, behind[0]):
            assert isinstance(one, CardLaunch)  # noqa: S101 - as `_are_runs` says
            yield from _sliced(one, behind[0], rows)
            number += 2
        else:
            yield one
            number += 1


def _are_runs(one: Launch | CardLaunch, behind: Launch | CardLaunch) -> bool:
    """Return whether these are attention by runs and what combines them."""
    found = [set(each.arguments) for each in (one, behind) if isinstance(each, CardLaunch)]
    return (
        len(found) == 2
        and {"kv_heads", "work"} <= found[0]
        and {name for name, _ in COMBINE} == found[1]
    )


def _count(attention: CardLaunch, rows: int) -> CardLaunch:
    """Return the launch that counts the rows of slices."""
    given = attention.arguments
    sizes = given["heads"], given["table_width"], given["value_length"]
    each = slice_rows(rows, *sizes)
    slices = blocks_of(rows, each)
    counts = given["work"] + work_bytes(rows, *sizes) - 8 * slices
    words = {"rows": given["rows"], "counts": counts, "each": each, "slices": slices}
    return SLICES.part(words, label="slices")


def _sliced(attention: CardLaunch, combine: Launch | CardLaunch, rows: int) -> Iterator[CardLaunch]:
    """Yield the launches of each slice."""
    if not isinstance(combine, CardLaunch):
        raise AssertionError(f"{attention.label}: nothing combines its runs")
    given, counted = attention.arguments, _count(attention, rows).arguments
    heads, length = given["heads"], given["value_length"]
    each, slices, counts = counted["each"], counted["slices"], counted["counts"]
    steps = {
        "rows": 8,
        "sequences": 8 * each,
        "positions": 8 * each,
        "q": 4 * heads * given["key_length"] * each,
        "out": 4 * heads * length * each,
        "packed": row_bytes(heads * length) * each if combine.arguments["packed"] else 0,
    }
    for number in range(slices):
        here = min(each, rows - each * number)
        for one in (attention, combine):
            shifted = {
                name: word + number * steps.get(name, 0) for name, word in one.arguments.items()
            }
            shifted["rows"] = counts + 8 * number
            yield one._replace(kernel=_of_rows(one.kernel, here), arguments=shifted)


def _of_rows(kernel: GpuKernel, rows: int) -> GpuKernel:
    """Return a kernel whose grid is for so many rows, whatever the step has."""
    return kernel._replace(grid=lambda arguments, _: kernel.grid(arguments, rows))
