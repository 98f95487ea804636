"""What a card launches for a program: kernels with their arguments, for a number of rows.

A program is written in kernels of the table, which every device has. A card may take several of
them together, or another kernel for one row than for eight; results have the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from strata_nb.kernels.gpu.attention_launches import fused_attention
from strata_nb.kernels.gpu.functions import argument_kinds, arguments_of, gpu_kernel
from strata_nb.kernels.gpu.operations import GpuKernel, Grid
from strata_nb.kernels.program import Launch, Program


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
    launches: list[CardLaunch] = []
    number = 0
    while number < len(program):
        if (fused := fused_attention(program, number)) is not None:
            launches += [CardLaunch(*one) for one in fused.made]
            number += fused.taken
            continue
        if (made := card_launch(program[number])) is not None:
            launches.append(made)
        number += 1
    return launches
