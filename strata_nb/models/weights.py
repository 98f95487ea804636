"""The weights of a file as float32: kept where memory allows it, else made again at each use.

A model whose float32 form fits into a share of the memory that is free is dequantised once, when it
is opened. Of a larger one the dense tensors are kept if they fit, and each expert is dequantised
when a row chose it; of a still larger one nothing is kept, and a matrix passes through memory slab
by slab. All three give the same logits, up to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb import cpu
from strata_nb.formats import dequantise
from strata_nb.gguf import GGUFFile, TensorInfo
from strata_nb.kernels.reference import Floats, matmul
from strata_nb.models.description import bytes_text
from strata_nb.models.tensors import EXPERT_PARTS, is_expert, values_in
from strata_nb.progress import Progress

MEMORY_SHARE = 0.6  # of the memory available when the model is opened
SLAB_VALUES = 2**24  # of a matrix that is not kept: 64 MiB of float32 at a time


class Kept(NamedTuple):
    """Say which tensors of a file are kept, and how much that is as float32.

    names       of the tensors, in the file's order
    tensors     how many the file has
    size_bytes  of those that are kept, all_bytes of all, both as float32
    """

    names: list[str]
    tensors: int
    size_bytes: int
    all_bytes: int

    @property
    def everything(self) -> bool:
        """Whether nothing has to be dequantised at each use."""
        return len(self.names) == self.tensors

    @property
    def warnings(self) -> list[str]:
        """What will be slow, one line each."""
        if self.everything:
            return []
        return [
            f"{bytes_text(self.size_bytes)} of {bytes_text(self.all_bytes)} of weights are kept as "
            "float32; the rest is dequantised at each use, which is slow"
        ]

    def __str__(self) -> str:
        return (
            f"{len(self.names)} of {self.tensors} tensors, "
            f"{bytes_text(self.size_bytes)} of {bytes_text(self.all_bytes)}"
        )


class Weights:
    """Give the tensors of a file as float32.

    The file must stay open as long as the weights are used. Values that were read from it are
    copies: they stay valid.

    kept   which tensors stay in memory
    """

    def __init__(self, file: GGUFFile, kept: Kept, progress: Progress | None) -> None:
        self.kept = kept
        self._file = file
        self._values: dict[str, Floats] = {}
        total = sum(file.tensors[name].size_bytes for name in kept.names)
        done = 0
        for name in kept.names:
            info = file.tensors[name]
            values = np.empty(info.shape, np.float32)
            dequantise(info.type, file.raw(name), values.reshape(-1))
            self._values[name] = values
            done += info.size_bytes
            if progress is not None:
                progress(done, total)

    @classmethod
    def open(
        cls,
        file: GGUFFile,
        *,
        budget_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> Weights:
        """Keep as much of `file` in float32 as `budget_bytes` allow.

        None: `MEMORY_SHARE` of the memory available now. `progress` counts the file's bytes.
        """
        if budget_bytes is None:
            budget_bytes = usual_budget_bytes(cpu.available_memory_bytes())
        return cls(file, tensors_to_keep(file.tensors, budget_bytes), progress)

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def vector(self, name: str) -> Floats:
        """Return a whole tensor in its own shape."""
        kept = self._values.get(name)
        if kept is not None:
            return kept
        info = self._file.tensors[name]
        return dequantise(info.type, self._file.raw(name)).reshape(info.shape)

    def rows(self, name: str, numbers: npt.NDArray[np.int64]) -> Floats:
        """Return rows of a matrix (rows, columns): (len(numbers), columns)."""
        kept = self._values.get(name)
        if kept is not None:
            return kept[numbers]
        info = self._file.tensors[name]
        raw = self._file.raw(name).reshape(info.shape[0], -1)
        return dequantise(info.type, raw[numbers].reshape(-1)).reshape(-1, info.shape[1])

    def linear(self, x: Floats, name: str) -> Floats:
        """Multiply rows x (n, columns in) by `name`.weight and add `name`.bias if the file has one.

        Returns (n, columns out).
        """
        product = self._multiply(x, f"{name}.weight")
        bias = f"{name}.bias"
        return product + self.vector(bias) if bias in self else product

    def experts_of(self, layer: int) -> Callable[[int], tuple[Floats, Floats, Floats]]:
        """Return a function that gives gate, up and down of one expert of a layer."""

        def expert(number: int) -> tuple[Floats, Floats, Floats]:
            gate, up, down = (f"blk.{layer}.{part}.weight" for part in EXPERT_PARTS)
            return self._one_of(gate, number), self._one_of(up, number), self._one_of(down, number)

        return expert

    def _one_of(self, name: str, number: int) -> Floats:
        """Return one expert's matrix (columns out, columns in) of a stack of experts."""
        kept = self._values.get(name)
        if kept is not None:
            matrix: Floats = kept[number]
            return matrix
        info = self._file.tensors[name]
        raw = self._file.raw(name).reshape(info.shape[0], -1)
        return dequantise(info.type, raw[number]).reshape(info.shape[1:])

    def _multiply(self, x: Floats, name: str) -> Floats:
        kept = self._values.get(name)
        if kept is not None:
            return matmul(x, kept.reshape(-1, kept.shape[-1]))
        info = self._file.tensors[name]
        columns = info.shape[-1]
        raw = self._file.raw(name).reshape(-1, info.size_bytes * columns // values_in(info))
        product = np.empty((len(x), len(raw)), np.float32)
        step = max(1, SLAB_VALUES // columns)
        for at in range(0, len(raw), step):
            slab = dequantise(info.type, raw[at : at + step].reshape(-1)).reshape(-1, columns)
            product[:, at : at + step] = matmul(x, slab)
        return product


def usual_budget_bytes(available_bytes: int) -> int:
    """Return what weights may take of the memory available: K/V and the rows need some too."""
    return int(available_bytes * MEMORY_SHARE)


def tensors_to_keep(tensors: Mapping[str, TensorInfo], budget_bytes: int) -> Kept:
    """Choose all tensors, the dense ones or none, whichever fits first."""
    sizes = {name: 4 * values_in(info) for name, info in tensors.items()}
    all_bytes = sum(sizes.values())
    for names in (list(sizes), [name for name in sizes if not is_expert(name)]):
        size_bytes = sum(sizes[name] for name in names)
        if size_bytes <= budget_bytes:
            return Kept(names, len(sizes), size_bytes, all_bytes)
    return Kept([], len(sizes), 0, all_bytes)
