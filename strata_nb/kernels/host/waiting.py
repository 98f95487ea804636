"""Ways for a compiled thread to wait: pause, give the processor away, sleep; and the time.

They call the C library, hold no GIL and allocate nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types

from strata_nb.compiling import inlined, instruction
from strata_nb.raw_memory import load_i64, store

_POINTER = ir.IntType(8).as_pointer()
_NUMBER = ir.IntType(32)
_CLOCK_MONOTONIC = 1  # Linux


def _system(name: str, *arguments: ir.Type) -> Callable[..., Any]:
    """Return a function of the C library that takes addresses and ints, and returns int."""

    def emit(_: Any, builder: Any, _typed: Any, values: Sequence[Any]) -> Any:
        kind = ir.FunctionType(ir.IntType(32), arguments)
        module = builder.module
        found = module.globals.get(name) or ir.Function(module, kind, name)
        given = [
            builder.trunc(value, one) if one is _NUMBER else builder.inttoptr(value, one)
            for value, one in zip(values, arguments, strict=True)
        ]
        return builder.sext(builder.call(found, given), ir.IntType(64))

    signature = types.int64(*[types.int64] * len(arguments))

    @instruction
    def plain(_: Any) -> Any:
        return signature, emit

    @instruction
    def of_one(_: Any, first: Any) -> Any:
        return signature, emit

    @instruction
    def of_two(_: Any, first: Any, second: Any) -> Any:
        return signature, emit

    @instruction
    def of_three(_: Any, first: Any, second: Any, third: Any) -> Any:
        return signature, emit

    return (plain, of_one, of_two, of_three)[len(arguments)]


yield_processor = _system("sched_yield")
semaphore_wait = _system("sem_wait", _POINTER)
semaphore_post = _system("sem_post", _POINTER)
_semaphore_init = _system("sem_init", _POINTER, _NUMBER, _NUMBER)
_clock_gettime = _system("clock_gettime", _NUMBER, _POINTER)
_nanosleep = _system("nanosleep", _POINTER, _POINTER)


@inlined
def semaphore_make(address: int) -> None:
    """Make a semaphore of value 0 for the threads of this process."""
    _semaphore_init(address, 0, 0)


@inlined
def monotonic_ns(place: int) -> Any:
    """Return the time since some moment; `place` is the address of 16 bytes of work space."""
    _clock_gettime(_CLOCK_MONOTONIC, place)
    return 1_000_000_000 * load_i64(place) + load_i64(place + 8)


@inlined
def nap(place: int, ns: int) -> None:
    """Sleep for less than a second, or a signal; `place` as in `monotonic_ns`."""
    store(place, 0)
    store(place + 8, ns)
    _nanosleep(place, 0)


@instruction
def pause(_: Any) -> Any:
    """Let the other thread of this core work for a moment, where the machine has a word for it."""

    def emit(context: Any, builder: Any, _typed: Any, _values: Any) -> Any:
        if _for_x86():
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=kind), [])
        return context.get_dummy_value()

    return types.void(), emit


def _for_x86() -> bool:
    """Return whether compiled code is for an x86 processor."""
    return os.uname().machine in ("x86_64", "i686")
