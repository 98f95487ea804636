"""What the host's form of a kernel of the table is, and what all of them share.

Every kernel is a compiled function

    (arguments, thread, threads) -> nothing

that all threads of an executor call at once, each for its share of the work. `arguments` is the
address of int64 words: those of the table, in its order, and behind them what only the host needs
(`extra`): addresses of the functions that multiply a type, and the work space of the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from strata_nb.compiling import address_of, inlined
from strata_nb.raw_memory import load_f32, load_i64

SIGNATURE = "void(int64,int64,int64)"


Function = Callable[..., None]


class HostKernel(NamedTuple):
    """Hold the compiled function of a launch and the words that follow the table's.

    A function among these words stands for its address: the kernel calls it.
    """

    function: Function
    extra: tuple[int | Function, ...] = ()

    def functions(self) -> Iterator[Function]:
        """Yield what has to be compiled before the kernel can run."""
        yield self.function
        yield from (word for word in self.extra if not isinstance(word, int))

    def words(self) -> list[int]:
        """Return the extra words as the kernel reads them; compiles the functions among them."""
        return [word if isinstance(word, int) else address_of(word) for word in self.extra]


class Work(NamedTuple):
    """Say where the threads' work space is: thread t has `stride` bytes at address + t * stride."""

    address: int
    stride: int


@inlined
def word(arguments: int, number: int) -> Any:
    """Return an argument: an address or an integer."""
    return load_i64(arguments + 8 * number)


@inlined
def real(arguments: int, number: int) -> Any:
    """Return an argument that is a float32."""
    return load_f32(arguments + 8 * number)


@inlined
def share(count: int, unit: int, thread: int, threads: int) -> Any:
    """Return first and last + 1 of the part of `count` that a thread does, in whole units.

    The parts follow each other, cover everything, and differ by a unit at most.
    """
    units = (count + unit - 1) // unit
    first = units * thread // threads * unit
    last = min(count, units * (thread + 1) // threads * unit)
    return first, last
