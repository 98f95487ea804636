"""The exponential function of the kernels, the same bits on every machine and for every lane.

The one of the C library differs between its versions and takes numbers one at a time. Here
exp(x) = 2 ** n * exp(r) with n = x / ln 2 rounded to nearest and |r| <= ln 2 / 2; ln 2 is split in
two so that r is exact to the last bit, and exp(r) is its Taylor polynomial of degree 7, whose
remainder is below 1e-8. Error: at most 2 units in the last place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from strata_nb.compiling import inlined
from strata_nb.kernels.host.vectors import (
    FLOATS,
    INTEGERS,
    all_lanes,
    fused,
    nearest,
    no_floats,
    recast,
    truncated,
    where_equal,
    where_less,
)

_as_floats = recast(FLOATS)
_as_integers = recast(INTEGERS)

# Beyond these the result is infinity, or zero, whatever the rest says.
_HIGHEST, _LOWEST = np.float32(89.0), np.float32(-104.0)
_LOG2_E = np.float32(1 / math.log(2))
_LN2_HIGH = np.float32(0.693359375)  # 9 bits: its product with n is exact
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))
_ONE = np.float32(1)


@inlined
def exp(x: Any) -> Any:
    """Return exp of 16 floats; -inf gives an exact zero, NaN stays NaN."""
    zero = no_floats()
    highest, lowest = all_lanes(zero, _HIGHEST), all_lanes(zero, _LOWEST)
    bounded = where_less(x, highest, x, highest)
    bounded = where_less(lowest, bounded, bounded, lowest)
    n = nearest(bounded * _LOG2_E)
    r = fused(n, all_lanes(zero, -_LN2_HIGH), bounded)
    r = fused(n, all_lanes(zero, -_LN2_LOW), r)
    p = fused(r, all_lanes(zero, _C7), all_lanes(zero, _C6))
    p = fused(p, r, all_lanes(zero, _C5))
    p = fused(p, r, all_lanes(zero, _C4))
    p = fused(p, r, all_lanes(zero, _C3))
    p = fused(p, r, all_lanes(zero, _C2))
    p = fused(p, r, all_lanes(zero, _ONE))
    p = fused(p, r, all_lanes(zero, _ONE))
    # Two factors: 2 ** n itself is no normal number at either end.
    whole = truncated(n)
    half = truncated(nearest(n * np.float32(0.5)))
    p = p * _as_floats((half + 127) << 23) * _as_floats((whole - half + 127) << 23)
    return where_equal(x, x, p, x)


@inlined
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) of 16 floats."""
    one = all_lanes(x, _ONE)
    return one / (one + exp(no_floats() - x))
