"""Put the tables of types that look quants up into shared memory, where lookups are cheap.

A block that multiplies such weights calls `fill` before it unpacks any: its threads copy the table,
which is a part of the code and in the card's caches, and wait for each other. Weights that are read
before that are on their way meanwhile.
"""

from __future__ import annotations

from functools import cache

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.intrinsics import barrier, shared_store_i32
from strata_nb.kernels.gpu.operations import Function, blocks_of
from strata_nb.kernels.gpu.products import decoder_of


def table_bytes(kind: TensorType) -> int:
    """Return how many bytes of shared memory the table of a type takes; none where it has none."""
    table = decoder_of(kind).table
    return 4 * len(table.words) if table else 0


@cache
def table_filler(kind: TensorType, at: int, threads: int) -> Function:
    """Return a device function that puts the table of a type at an offset: fill(thread).

    threads   of the block, all of which call it; for a type without a table nothing happens
    """
    table = decoder_of(kind).table
    if table is None:
        return _nothing
    count = len(table.words)
    rounds, are_whole = blocks_of(count, threads), count % threads == 0

    def fill(thread: int) -> None:
        number = 0
        while number < rounds:
            word = thread + threads * number
            if are_whole or word < count:
                shared_store_i32(at + 4 * word, table(word))
            number += 1
        barrier()

    return fill


def _nothing(_thread: int) -> None:
    pass
