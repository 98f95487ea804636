"""The exponential function of the GPU kernels, and what follows from it.

A card has an approximation of its own in hardware, whose bits differ between cards. This one is the
function of `kernels/host/exponential.py`, step by step: exp(x) = 2 ** n * exp(r) with n = x / ln 2
rounded to nearest and |r| <= ln 2 / 2; ln 2 is split in two so that r is exact to the last bit, and
exp(r) is its Taylor polynomial of degree 7. Error: at most 2 units in the last place.
"""

from __future__ import annotations

import math
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    bits_of_f32,
    f32,
    f32_of_bits,
    f32_of_i32,
    fma,
    i32,
    nearest_i32,
)

# Beyond these the result is infinity, or zero, whatever the rest says.
_HIGHEST, _LOWEST = 89.0, -104.0
_LOG2_E = 1 / math.log(2)
_LN2_HIGH = 0.693359375  # 9 bits: its product with n is exact
_LN2_LOW = math.log(2) - _LN2_HIGH
_ROUNDING = 1.5 * 2**23
_LEAST_WEIGHED = -64.0
_C2, _C3, _C4, _C5, _C6, _C7 = (1 / math.factorial(n) for n in range(2, 8))


def exp(x: Any) -> Any:
    """Return exp of a float32; -inf gives an exact zero, NaN stays NaN."""
    bounded = x if x < f32(_HIGHEST) else f32(_HIGHEST)
    bounded = bounded if bounded > f32(_LOWEST) else f32(_LOWEST)
    whole = nearest_i32(bounded * f32(_LOG2_E))
    n = f32_of_i32(whole)
    r = fma(n, f32(-_LN2_HIGH), bounded)
    r = fma(n, f32(-_LN2_LOW), r)
    p = fma(r, f32(_C7), f32(_C6))
    p = fma(p, r, f32(_C5))
    p = fma(p, r, f32(_C4))
    p = fma(p, r, f32(_C3))
    p = fma(p, r, f32(_C2))
    p = fma(p, r, f32(1.0))
    p = fma(p, r, f32(1.0))
    # Two factors: 2 ** n itself is no normal number at either end.
    half = whole >> 1
    p = p * f32_of_bits(i32((half + 127) << 23)) * f32_of_bits(i32((whole - half + 127) << 23))
    return x if x != x else p


def weight_of(x: Any) -> Any:
    """Return exp(x) * 2 ** 15 of a float32 that is 0 at most, with the bits of `exp`.

    Below -64 it is 0: that is less than what a sum with a weight of 2 ** 15 in it can hold. In
    fewer steps: adding 1.5 * 2 ** 23 rounds to an integer, and leaves it in the lowest bits.
    """
    rounded = x * f32(_LOG2_E) + f32(_ROUNDING)
    n = rounded - f32(_ROUNDING)
    r = fma(n, f32(-_LN2_HIGH), x)
    r = fma(n, f32(-_LN2_LOW), r)
    p = fma(r, f32(_C7), f32(_C6))
    p = fma(p, r, f32(_C5))
    p = fma(p, r, f32(_C4))
    p = fma(p, r, f32(_C3))
    p = fma(p, r, f32(_C2))
    p = fma(p, r, f32(1.0))
    p = fma(p, r, f32(1.0))
    p = p * f32_of_bits(i32((bits_of_f32(rounded) << 23) + ((127 + 15) << 23)))
    return f32(0.0) if x < f32(_LEAST_WEIGHED) else p


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) of a float32."""
    return f32(1.0) / (f32(1.0) + exp(-x))


def silu(x: Any) -> Any:
    """Return x * sigmoid(x) of a float32."""
    return x * sigmoid(x)
