"""A launch on a card: a kernel with its arguments."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from strata_nb.kernels.gpu.functions import argument_kinds, arguments_of, gpu_kernel
from strata_nb.kernels.gpu.operations import GpuKernel, Grid
from strata_nb.kernels.program import Launch


class CardLaunch(NamedTuple):
    """Hold a kernel and what it is launched with.

    label       what it is for, such as "blk.3.attn_q"
    arguments   by name, in the kernel's order: one 64-bit word each, as `program.Launch` has them
    kinds       of the arguments: address, integer or float
    variant     what the kernel was found by, of those that cards alone have
    """

    kernel: GpuKernel
    label: str
    arguments: Mapping[str, int]
    kinds: tuple[str, ...]
    variant: Any = None

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


def card_launch(one: Launch) -> CardLaunch:
    """Return what runs a launch of the table by itself."""
    return CardLaunch(gpu_kernel(one), one.label, arguments_of(one), tuple(argument_kinds(one)))
