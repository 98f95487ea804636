"""Find the products of a prompt batch that warpgroups multiply (`warpgroup_products.py`).

Quantised rows become halves first, which lie behind them in the same buffer.

batch_linear               warpgroup_linear
batch_expert, batch_up     warpgroup_gate_up
batch_expert               warpgroup_expert, whose products are halves
batch_sum                  warpgroup_sum
"""

from __future__ import annotations

from typing import Any

from strata_nb.kernels.gpu.gathering import half_sum_kernel
from strata_nb.kernels.gpu.grouping import group_kernel
from strata_nb.kernels.gpu.intrinsics.warpgroups import K
from strata_nb.kernels.gpu.routed import CardKernel, card_kernel
from strata_nb.kernels.gpu.warpgroup_products import (
    halves_kernel,
    warpgroup_expert_kernel,
    warpgroup_gate_up_kernel,
    warpgroup_linear_kernel,
)
from strata_nb.kernels.gpu.warpgroup_sums import EIGHT
from strata_nb.kernels.gpu.warpgroup_tiles import IN_PAIRS, OUTPUTS, SIZES
from strata_nb.kernels.quantised_rows import row_bytes

# What products of bytes do sooner on an H200: fewer choices of an expert, on average, and fewer
# blocks of 128 rows.
_FEWEST_CHOICES = 24
_FEWEST_BLOCKS = 48
_SPREAD = 2  # standard deviations of choices that are drawn, of which few experts have more
_MANY_BLOCKS = 128  # of 256 rows: about what a card runs at once

BYTES_OF_HALVES = 2  # for each value of the rows of a buffer, behind them


def _find(kernel: Any) -> Any:
    return lambda variant, _: kernel(*variant)


WARPGROUP_KERNELS: dict[str, CardKernel] = {
    "warpgroup_linear": card_kernel(
        "*rows *x *weight *bias *y values outputs add", _find(warpgroup_linear_kernel)
    ),
    "warpgroup_expert": card_kernel(
        "*tiles *sources *targets *addresses *x *y offset values outputs experts top_k",
        _find(warpgroup_expert_kernel),
    ),
    "warpgroup_gate_up": card_kernel(
        "*tiles *sources *targets *addresses *x *inner gate_offset up_offset values outputs "
        "experts top_k",
        _find(warpgroup_gate_up_kernel),
    ),
    "warpgroup_sum": card_kernel(
        "*rows *products *shares *y top_k outputs",
        lambda _, given: half_sum_kernel(given["top_k"]),
    ),
    "warpgroup_halves": card_kernel("*rows *x *halves values", lambda _, __: halves_kernel()),
    "warpgroup_group": card_kernel(
        "*rows *chosen *counts *members *sources *tiles experts top_k",
        lambda rows, given: group_kernel(given["top_k"], rows),
    ),
}


def halves_at(x: int, rows: int, values: int) -> int:
    """Return where the halves of quantised rows are, in a buffer of so many or more rows at x."""
    return x + rows * row_bytes(values)


def takes(values: int) -> bool:
    """Return whether warpgroups multiply rows of so many values."""
    return values % K == 0


def adds(outputs: int) -> bool:
    """Return whether products of choices with so many outputs are stored as halves."""
    return outputs % EIGHT == 0


def rows_of_block(rows: int, outputs: int) -> int:
    """Return how many rows a block of a dense product has, so that there are enough blocks; 0 where
    they are too few for warpgroups."""
    columns = -(-outputs // OUTPUTS)
    if -(-rows // 256) * columns >= _MANY_BLOCKS:
        return 256
    return 128 if -(-rows // 128) * columns >= _FEWEST_BLOCKS else 0


def rows_of_tile(rows: int, top_k: int, experts: int) -> int:
    """Return how many choices of an expert a tile has; 0 where they are too few for warpgroups.

    Each tile has its weights decoded anew, so one should be enough for most experts. But of blocks
    up to `IN_PAIRS` rows a multiprocessor runs two, which wait beside each other: they are worth
    it even where half of the experts have a second tile.
    """
    each = rows * top_k / experts
    if each < _FEWEST_CHOICES:
        return 0
    most = each + _SPREAD * each**0.5
    small = [size for size in SIZES if size <= IN_PAIRS]
    large = [size for size in SIZES if size > IN_PAIRS]
    usable = small if each <= IN_PAIRS else large
    return next((size for size in usable if most <= size), usable[-1])
