"""What a GPU kernel of the table is, and what kernels share.

A kernel is a plain Python function of the table's arguments in their order: addresses and integers
are i64, floats f32. It is launched on a grid that is fixed when a program is captured; the number
of rows is read from memory, so blocks of rows that a step does not have leave at once.

Loops are written with `while` and steps of their own: Numba counts a `range` with a variable step
in twice as many instructions. Literals of floats are written f32(0.5): without it Python's double
precision spreads, which cards for games do 64 times slower.

Sums have a fixed order: lanes add what they have in order of its place, then `warp_sum`, then the
warps of a block the same way (`block_sum`) or in ascending order. Nothing depends on how many rows
a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from strata_nb.errors import UnsupportedDevice
from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.intrinsics import (
    arrive,
    barrier,
    block_y,
    block_z,
    f32,
    i32,
    i64,
    larger_f32,
    shared_load_f32,
    shared_load_i32,
    shared_store_f32,
    shared_store_i32,
    shuffle_xor_f32,
    shuffle_xor_i32,
)
from strata_nb.kernels.table import ROWS_WORDS

Function = Callable[..., Any]
Grid = tuple[int, int, int]
Arguments = Mapping[str, int]  # of a launch, by the table's names

MOST_BLOCKS = 65_535  # of a grid in every direction but the first
MOST_REGISTERS = 128  # of a thread, unless a kernel says otherwise: 512 threads on every card


def no_shared_bytes(_: Arguments) -> int:
    """Say that a kernel needs no shared memory."""
    return 0


def no_reads(_: Arguments, rows: int) -> int:
    """Say that a kernel reads no weights."""
    return 0


class GpuKernel(NamedTuple):
    """Hold a kernel, and how it is launched.

    name          unlike that of every other kernel, variants included; letters, digits and _
    function      the kernel
    threads       of a block, a multiple of 32
    grid          of a launch's arguments and the most rows that it will see
    shared_bytes  of a block, of a launch's arguments
    registers     the most that a thread may take on any target: it decides how many blocks of it a
                  multiprocessor runs beside each other
    spills        the most bytes of a thread that may be kept in memory: of a kernel whose
                  inner loop needs all, what is wanted outside of it
    reads         bytes of weights that a launch reads, of its arguments and the number of rows:
                  each weight once where rows share it, experts as if no two rows chose the same
    """

    name: str
    function: Function
    threads: int
    grid: Callable[[Arguments, int], Grid]
    shared_bytes: Callable[[Arguments], int] = no_shared_bytes
    registers: int = MOST_REGISTERS
    reads: Callable[[Arguments, int], int] = no_reads
    spills: int = 0


def blocks_of(count: int, each: int) -> int:
    """Return how many blocks of `each` cover `count`."""
    return -(-count // each)


def outputs_grid(parts: int, outputs: int, each: int) -> Grid:
    """Return a grid of blocks of `each` outputs, each block for so many parts of the rows.

    Blocks of the same outputs follow each other: what the first reads of the weights, the others
    find in the card's cache. UnsupportedDevice for more outputs than a grid has blocks for.
    """
    blocks = blocks_of(outputs, each)
    if blocks > MOST_BLOCKS:
        raise UnsupportedDevice(
            f"a matrix of {outputs:,} outputs: on a card it has {each * MOST_BLOCKS:,} at most",
            hint="--device host runs this model",
        )
    return parts, blocks, 1


def high_grid(parts: int, outputs: int, each: int) -> Grid:
    """Return `outputs_grid` for any number of outputs: `high_block` numbers its blocks."""
    blocks = blocks_of(outputs, each)
    return parts, min(blocks, MOST_BLOCKS), blocks_of(blocks, MOST_BLOCKS)


def weights_read(kind: TensorType) -> Callable[[Arguments, int], int]:
    """Return what says how many bytes of a weight of a type a launch of a product reads."""
    return lambda arguments, _: arguments["outputs"] * row_bytes(kind, arguments["values"])


ARRIVED = 8  # bytes from the number of rows to the word in which a launch counts its blocks
COUNTED = ARRIVED + 4  # and to words in which it counts those of each of its parts
MOST_COUNTED = (8 * ROWS_WORDS - COUNTED) // 4


# -- in kernels ------------------------------------------------------------------------------------


def high_block() -> Any:
    """Return which block of outputs this is, of a `high_grid`; the last may have none."""
    return i64(block_y()) + MOST_BLOCKS * i64(block_z())


def warp_sum(x: Any) -> Any:
    """Return the sum over a warp's lanes, the same in each: pairs 16 apart first, then 8, ..."""
    x += shuffle_xor_f32(x, 16)
    x += shuffle_xor_f32(x, 8)
    x += shuffle_xor_f32(x, 4)
    x += shuffle_xor_f32(x, 2)
    x += shuffle_xor_f32(x, 1)
    return x


def warp_max(x: Any) -> Any:
    """Return the largest of a warp's lanes, the same in each; no lane holds a NaN."""
    x = larger_f32(x, shuffle_xor_f32(x, 16))
    x = larger_f32(x, shuffle_xor_f32(x, 8))
    x = larger_f32(x, shuffle_xor_f32(x, 4))
    x = larger_f32(x, shuffle_xor_f32(x, 2))
    return larger_f32(x, shuffle_xor_f32(x, 1))


def warp_sum_i32(x: Any) -> Any:
    """Return the sum over a warp's lanes of an integer."""
    x += shuffle_xor_i32(x, 16)
    x += shuffle_xor_i32(x, 8)
    x += shuffle_xor_i32(x, 4)
    x += shuffle_xor_i32(x, 2)
    x += shuffle_xor_i32(x, 1)
    return x


def warp_max_i32(x: Any) -> Any:
    """Return the largest of a warp's lanes of an i32."""
    x = max(x, shuffle_xor_i32(x, 16))
    x = max(x, shuffle_xor_i32(x, 8))
    x = max(x, shuffle_xor_i32(x, 4))
    x = max(x, shuffle_xor_i32(x, 2))
    return max(x, shuffle_xor_i32(x, 1))


def block_sum(x: Any, thread: Any, warps: Any) -> Any:
    """Return the sum over a block's threads, the same in each: over warps, then of their sums.

    All threads of the block take part, once in a kernel. The first 4 * WARP bytes of shared memory
    are its own.
    """
    x = warp_sum(x)
    lane = thread & 31
    if lane == 0:
        shared_store_f32(4 * (thread >> 5), x)
    barrier()
    return warp_sum(shared_load_f32(4 * lane) if lane < warps else f32(0.0))


def is_last(word: Any, blocks: Any, thread: Any, place: Any) -> Any:
    """Return whether a block is the last of a launch to come here: it sees what all others wrote.

    word    address of an i32, 0 before and after: behind the number of rows, see `ARRIVED`
    place   offset of four bytes of shared memory

    All threads of all blocks take part, once in a kernel.
    """
    barrier()
    if thread == 0:
        shared_store_i32(place, arrive(word, i32(blocks - 1)))
    barrier()
    return shared_load_i32(place) == blocks - 1
