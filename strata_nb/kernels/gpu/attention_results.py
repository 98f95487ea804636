"""What attention of a prompt batch does with the values of a run: a lane's sums, and their places.

Of 64 values a lane has 16 * t .. 16 * t + 15 of its two pairs, in 32 sums: number 4 * n is value n
of the first, 4 * n + 1 its value 8 + n, and 2 further are those of the other. So functions here get
the sums for one pair, and from the third on for the other.
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
    store_f32(place + 16, x[16])
    store_f32(place + 20, x[20])
    store_f32(place + 24, x[24])
    store_f32(place + 28, x[28])


@cache
def store_of_run(pieces: int) -> Function:
    """Return a function (place, sums): stores the values of a pair, so many pieces of 64, at a
    multiple of 4."""

    def sixteen(place: int, x: Any) -> None:
        _store_eight(place, x)
        _store_eight(place + 32, x[1:])

    if pieces == 1:
        return sixteen
    others = store_of_run(pieces - 1)

    def store(place: int, x: Any) -> None:
        sixteen(place, x)
        others(place + 256, x[32:])

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

    def sixteen(place: int, weight: Any, x: Any, run: int) -> None:
        _mix_four(place, weight, x[0], x[4], x[8], x[12], run)
        _mix_four(place + 16, weight, x[16], x[20], x[24], x[28], run)
        _mix_four(place + 32, weight, x[1], x[5], x[9], x[13], run)
        _mix_four(place + 48, weight, x[17], x[21], x[25], x[29], run)

    if pieces == 1:
        return sixteen
    others = mixer_of_runs(pieces - 1)

    def mix(place: int, weight: Any, x: Any, run: int) -> None:
        sixteen(place, weight, x, run)
        others(place + 256, weight, x[32:], run)

    return mix


@cache
def quotient(pieces: int) -> Function:
    """Return a function (place, total) that divides a lane's values of a pair by the sum of the
    weights."""

    def divide(place: int, total: Any) -> None:
        piece = 0
        while piece < pieces:
            part = 0
            while part < 4:
                at = place + 256 * piece + 16 * part
                a, b, c, d = load_4xf32(at)
                _store_four(at, a / total, b / total, c / total, d / total)
                part += 1
            piece += 1

    return divide
