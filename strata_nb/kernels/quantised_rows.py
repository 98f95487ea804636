"""The layout of quantised activation rows: what a product with packed weights reads.

Each 32 values of a row share a float32 scale, their largest magnitude over 127. A quantised row is
one run of memory (`row_bytes`), S sub-blocks of 32 values each:

    32 * S bytes    the quants, int8, -127 .. 127
     4 * S bytes    the scales, float32
     4 * S bytes    the sum of the quants of each sub-block, int32
     8 * S bytes    the sums of its two halves, int32

The sums take a constant out of a product: sum((w - c) * x) = sum(w * x) - c * sum(x).

A sub-block with a value that is not finite gets the scale NaN and quants 0, so that every product
with it shows the fault. One whose magnitudes all are below `SMALLEST` counts as zeros: the scale is
0. Rounding is to nearest, ties to even. A sub-block depends on its own 32 values alone: rows may be
cut anywhere between sub-blocks.

Host and cards share the layout. The constants become part of machine code that is kept on disk:
`compiling.py` asks this file whether it is still right, because it is named here.
"""

from __future__ import annotations

from strata_nb.packing import SUB_BLOCK

# Where a field begins in a row, in bytes for each of the row's sub-blocks. Quants begin at 0.
SCALES = SUB_BLOCK
SUMS = SCALES + 4
HALF_SUMS = SUMS + 4
SUB_BLOCK_BYTES = HALF_SUMS + 8

SMALLEST = 2.0**-100  # below it 127 / magnitude overflows


def row_bytes(values: int) -> int:
    """Return the bytes of a quantised row; `values` is a multiple of 32."""
    return values // SUB_BLOCK * SUB_BLOCK_BYTES
