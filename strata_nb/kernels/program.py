"""A program: the launches that take a step through a model, over buffers that never move.

A model emits it once; a backend prepares it once and runs it for every step. What changes from step
to step (tokens, positions, the number of rows, block tables, where experts are) lies in buffers
that the launches name.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np

from strata_nb.kernels.table import KERNELS


class Launch(NamedTuple):
    """Launch a kernel of the table.

    kernel      its name
    variant     which of its variants, None where it has none: a type of weights, a pair of types
    arguments   one 64-bit word each, in the table's order; a float is the bits of a float32
    waits       whether it must see what the launches before it wrote; else it may run beside them
    label       what it is for, such as "blk.3.attn_q": for people
    """

    kernel: str
    variant: Hashable
    arguments: tuple[int, ...]
    waits: bool
    label: str


Program = tuple[Launch, ...]


def launch(
    kernel: str,
    values: Mapping[str, int | float],
    *,
    variant: Hashable = None,
    waits: bool = True,
    label: str = "",
) -> Launch:
    """Return a launch with its arguments in the table's order.

    ValueError for an argument that is missing, unknown or of the wrong kind, or for a variant where
    there is none and the other way round: a mistake of the program.
    """
    described = KERNELS[kernel]
    names = [argument.name for argument in described.arguments]
    if set(names) != set(values):
        raise ValueError(f"{kernel}{tuple(names)} was given {tuple(values)}")
    if (variant is None) != (described.axis is None):
        raise ValueError(f"{kernel} of variant {variant}: it has variants of {described.axis}")
    words = []
    for name, kind in described.arguments:
        value = values[name]
        if (kind == "float") != isinstance(value, float):
            raise ValueError(f"{kernel}: {name} is {value!r}, not of the kind {kind}")
        word = int(np.float32(value).view(np.uint32)) if kind == "float" else int(value)
        words.append(word)
    return Launch(kernel, variant, tuple(words), waits, label)
