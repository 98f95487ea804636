"""Run launches of the table's kernels on the host's threads, with arrays in place of addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import kernel_references as plain
import numpy as np
from numpy.typing import NDArray
from random_blocks import random_blocks

from strata_nb.formats import TensorType, block_layout, dequantise
from strata_nb.kernels.host.functions import WorkSpace, prepare
from strata_nb.kernels.host.matrices import MANY_ROWS, takes_packed
from strata_nb.kernels.host.threads import Threads
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.reference import Floats
from strata_nb.packing import pack

Bytes = NDArray[np.uint8]
UNTOUCHED = np.float32(7e33)  # in rows that nobody may write
COUNTS = (1, 2, 3)  # of threads
ROWS = (1, 3, 40)  # one, fewer and more than what is multiplied in the manner of a prompt
assert ROWS[1] < MANY_ROWS < ROWS[2]


def run(threads: int, *launches: Launch) -> None:
    """Run a program once on so many threads."""
    space = WorkSpace(launches, threads)
    program = prepare(launches, space)
    compute = Threads(threads)
    try:
        compute.run(program)
    finally:
        compute.close()


def made(kernel: str, variant: Any = None, **values: Any) -> Launch:
    """Return a launch of which arrays are given themselves; whoever calls keeps them."""
    words = {
        name: int(value.ctypes.data) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    return launch(kernel, words, variant=variant)


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def forced_case(experts: int, top_k: int) -> tuple[Floats, NDArray[np.int16], list[int]]:
    """Return logits of three rows, lines of experts to choose, and which line each row takes."""
    rng = np.random.default_rng(experts)
    lines = rng.permuted(np.tile(np.arange(experts, dtype=np.int16), (4, 1)), axis=1)
    return normal(3, experts, seed=experts) * 3, lines[:, :top_k].copy(), [2, 0, 3]


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


class Matrix(NamedTuple):
    """A matrix (outputs, values): its bytes as kernels read them, and its values."""

    kind: TensorType
    data: Bytes
    weight: Floats

    @classmethod
    def random(cls, kind: TensorType, outputs: int, values: int, seed: int = 0) -> Matrix:
        blocks = outputs * values // block_layout(kind).values
        raw = random_blocks(kind, blocks, values**-0.5, np.random.default_rng(seed))
        data = pack(kind, raw, outputs, values) if takes_packed(kind) else raw
        return cls(kind, data, dequantise(kind, raw).reshape(outputs, values))


def as_read(kind: TensorType, x: Floats) -> Floats:
    """Return what products with a type make of rows: themselves, or what their quants stand for."""
    return plain.values_of(plain.quantised(x), x.shape[1]) if takes_packed(kind) else x
