"""What a card launches for a program: kernels with their arguments, for a number of rows.

A program is written in kernels of the table, which every device has. A card may take several of
them together, or another kernel for one row than for eight; results have the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.functions import argument_kinds, arguments_of, gpu_kernel
from strata_nb.kernels.gpu.one_row import MOST_WEIGHTS, one_row_kernel
from strata_nb.kernels.gpu.operations import GpuKernel, Grid
from strata_nb.kernels.gpu.sampling import sample_keys_kernel
from strata_nb.kernels.program import Launch, Program
from strata_nb.packing import PACKED


class CardLaunch(NamedTuple):
    """Hold a kernel and what it is launched with.

    label       what it is for, such as "blk.3.attn_q"
    arguments   by name, in the kernel's order: one 64-bit word each, as `program.Launch` has them
    kinds       of the arguments: address, integer or float
    """

    kernel: GpuKernel
    label: str
    arguments: Mapping[str, int]
    kinds: tuple[str, ...]

    def grid(self, rows: int) -> Grid:
        return self.kernel.grid(self.arguments, rows)

    @property
    def shared_bytes(self) -> int:
        return self.kernel.shared_bytes(self.arguments)

    @property
    def packed(self) -> bytes:
        """The arguments as a kernel reads them: int64 and float32, as C has them."""
        layout = "@" + "".join("f" if kind == "float" else "q" for kind in self.kinds)
        values = [
            float(np.uint32(word).view(np.float32)) if kind == "float" else word
            for word, kind in zip(self.arguments.values(), self.kinds, strict=True)
        ]
        return struct.pack(layout, *values)


def card_launch(one: Launch) -> CardLaunch | None:
    """Return what runs a launch of the table by itself, None if nothing has to."""
    kernel = gpu_kernel(one)
    if kernel is None:
        return None
    return CardLaunch(kernel, one.label, arguments_of(one), tuple(argument_kinds(one)))


def card_launches(program: Program, rows: int) -> Sequence[CardLaunch]:
    """Return what a card launches, in order, for a program of so many rows."""
    made, at = [], 0
    while at < len(program):
        found = products_of_one_row(program, at) if rows == 1 else ()
        if found:
            made.append(_one_row(found))
        elif program[at].kernel == "sample":
            made += _sample(program[at])
        elif (alone := card_launch(program[at])) is not None:
            made.append(alone)
        at += max(1, len(found))
    return made


def products_of_one_row(program: Program, at: int) -> Sequence[Launch]:
    """Return the launches from a place on that one launch can do: products of the same row."""
    found: list[Launch] = []
    while at < len(program) and len(found) < MOST_WEIGHTS:
        one = program[at]
        if one.kernel != "linear" or one.variant not in PACKED or (found and one.waits):
            break
        given, first = arguments_of(one), arguments_of(found[0] if found else one)
        if any(given[name] != first[name] for name in _OF_THE_ROW):
            break
        found.append(one)
        at += 1
    return found


def _sample(one: Launch) -> list[CardLaunch]:
    """Return the two launches that draw tokens."""
    whole = card_launch(one)
    assert whole is not None  # noqa: S101 - a card has it
    return [whole._replace(kernel=sample_keys_kernel()), whole]


_OF_THE_ROW = ("rows", "x", "values", "add")
_OF_A_WEIGHT = ("weight", "bias", "y", "outputs")


def _one_row(launches: Sequence[Launch]) -> CardLaunch:
    """Return one launch for products of the same row."""
    given = [arguments_of(one) for one in launches]
    types = tuple(TensorType(one.variant) for one in launches)  # type: ignore[arg-type]
    kernel = one_row_kernel(types, given[0]["values"])
    kinds = dict(zip(given[0], argument_kinds(launches[0]), strict=True))
    words = {name: (given[0][name], kinds[name]) for name in _OF_THE_ROW}
    for number, one in enumerate(given, start=1):
        suffix = "" if number == 1 else str(number)
        words |= {name + suffix: (one[name], kinds[name]) for name in _OF_A_WEIGHT}
    label = ", ".join([launches[0].label, *(one.label.rpartition(".")[2] for one in launches[1:])])
    arguments = {name: word for name, (word, _) in words.items()}
    return CardLaunch(kernel, label, arguments, tuple(kind for _, kind in words.values()))
