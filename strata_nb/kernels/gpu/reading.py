"""Read a card's memory and do nothing with it: the limit of every decode step.

A block reads one stretch of the buffer; neighbouring threads read neighbouring 16 bytes, and each
has four loads on their way at a time. Blocks are many more than a card runs at once, so that none
of its multiprocessors is idle but at the very end.
"""

from __future__ import annotations

from functools import cache

from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.intrinsics import (
    block_x,
    fetch_4xi32,
    i32,
    i64,
    store_i32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import GpuKernel

_THREADS = 256
_LOADS = 4  # of a thread on their way at a time
_STEPS = 8
_STEP_BYTES = 16 * _THREADS  # that the threads of a block read with a load each
STRETCH_BYTES = _STEPS * _LOADS * _STEP_BYTES  # of a block
SUMS_BYTES = 4 * _THREADS  # that a block writes


def _plain_read(buffer: int, sums: int, stretches: int) -> None:
    thread, block = i64(thread_index()), i64(block_x())
    place = buffer + STRETCH_BYTES * block + 16 * thread
    first, second, third, fourth = i64(0), i64(0), i64(0), i64(0)
    step = 0
    while step < _STEPS:
        a, b, c, d = fetch_4xi32(place)
        e, f, g, h = fetch_4xi32(place + _STEP_BYTES)
        i, j, k, m = fetch_4xi32(place + 2 * _STEP_BYTES)
        n, o, p, q = fetch_4xi32(place + 3 * _STEP_BYTES)
        first ^= a ^ e ^ i ^ n
        second ^= b ^ f ^ j ^ o
        third ^= c ^ g ^ k ^ p
        fourth ^= d ^ h ^ m ^ q
        place += _LOADS * _STEP_BYTES
        step += 1
    store_i32(sums + SUMS_BYTES * block + 4 * thread, i32(first ^ second ^ third ^ fourth))


@cache
def plain_read_kernel() -> GpuKernel:
    """Return the kernel (buffer, sums, stretches): sums int32 (stretches, 256).

    Grid (stretches). Reads `STRETCH_BYTES` a block, once, and writes a sum for each thread, so that
    nothing of it can be left out.
    """
    return GpuKernel(
        "plain_read",
        _plain_read,
        _THREADS,
        lambda arguments, _: (arguments["stretches"], 1, 1),
        reads=lambda arguments, _: STRETCH_BYTES * arguments["stretches"],
    )


def plain_read_launch(buffer: int, sums: int, stretches: int) -> CardLaunch:
    """Return a launch that reads so many stretches from an address on, a multiple of 16."""
    arguments = {"buffer": buffer, "sums": sums, "stretches": stretches}
    return CardLaunch(
        plain_read_kernel(), "plain_read", arguments, ("address", "address", "integer")
    )
