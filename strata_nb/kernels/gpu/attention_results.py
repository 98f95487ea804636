"""What attention of a prompt batch does with the values of a run: a lane's sums, and their places.

Of 32 values a lane has 8 * t .. 8 * t + 7 of its two pairs, in 16 sums: number 4 * n is value n of
the first pair, 4 * n + 1 its value 4 + n, and 2 further are those of the other. So functions here
get the sums for one pair, and from the third on for the other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from strata_nb.kernels.gpu.intrinsics import (
    bits_of_f32,
    f32,
    fma,
    load_4xf32,
    store_4xi32,
    store_f32,
)
from strata_nb.kernels.gpu.operations import Function


def _store_four(place: int, a: Any, b: Any, c: Any, d: Any) -> None:
    store_4xi32(place, bits_of_f32(a), bits_of_f32(b), bits_of_f32(c), bits_of_f32(d))


def _store_eight(place: int, x: Any) -> None:
    store_f32(place, x[0])
    store_f32(place + 4, x[4])
    store_f32(place + 8, x[8])
    store_f32(place + 12, x[12])
    store_f32(place + 16, x[1])
    store_f32(place + 20, x[5])
    store_f32(place + 24, x[9])
    store_f32(place + 28, x[13])


@cache
def store_of_run(pieces: int) -> Function:
    """Return a function (place, sums): stores the values of a pair, so many pieces of 32, at a
    multiple of 4."""
    if pieces == 1:
        return _store_eight
    others = store_of_run(pieces - 1)

    def store(place: int, x: Any) -> None:
        _store_eight(place, x)
        others(place + 128, x[16:])

    return store


def _mix_four(place: int, weight: Any, a: Any, b: Any, c: Any, d: Any, run: int) -> None:
    w, x, y, z = load_4xf32(place)
    if run == 0:
        w, x, y, z = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
    a, b, c, d = fma(weight, a, w), fma(weight, b, x), fma(weight, c, y), fma(weight, d, z)
    _store_four(place, a, b, c, d)


@cache
def mixer_of_runs(pieces: int) -> Function:
    """Return a function (place, weight, sums, run): adds the values of a run of a pair, times its
    weight, to those of the runs before it, which begin at a multiple of 16; run 0 has none."""

    def eight(place: int, weight: Any, x: Any, run: int) -> None:
        _mix_four(place, weight, x[0], x[4], x[8], x[12], run)
        _mix_four(place + 16, weight, x[1], x[5], x[9], x[13], run)

    if pieces == 1:
        return eight
    others = mixer_of_runs(pieces - 1)

    def mix(place: int, weight: Any, x: Any, run: int) -> None:
        eight(place, weight, x, run)
        others(place + 128, weight, x[16:], run)

    return mix


@cache
def quotient(pieces: int) -> Function:
    """Return a function (place, total) that divides a lane's values of a pair by the sum of the
    weights."""

    def divide(place: int, total: Any) -> None:
        piece = 0
        while piece < 2 * pieces:
            at = place + 128 * (piece >> 1) + 16 * (piece & 1)
            a, b, c, d = load_4xf32(at)
            _store_four(at, a / total, b / total, c / total, d / total)
            piece += 1

    return divide
