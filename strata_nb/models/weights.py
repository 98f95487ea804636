"""The weights of a file as float32: kept where memory allows it, else made again at each use.

A model whose float32 form fits into a share of the memory that is free is dequantised once, when it
is opened. Of a larger one the dense tensors are kept if they fit, and each expert is dequantised
when a row chose it; of a still larger one nothing is kept, and a matrix passes through memory slab
by slab. All three give the same logits, up to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from strata_nb import cpu
from strata_nb.formats import dequantise
from strata_nb.gguf import GGUFFile, TensorInfo
from strata_nb.kernels.reference import Floats, matmul
from strata_nb.models.tensors import EXPERT_PARTS, is_expert, values_in

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

MEMORY_SHARE = 0.6  # of the memory available when the model is opened
SLAB_VALUES = 2**24  # of a matrix that is not kept: 64 MiB of float32 at a time


class Weights:
    """Give the tensors of a file as float32.

    The file must stay open as long as the weights are used. Values that were read from it are
    copies: they stay valid.
    """

    def __init__(self, file: GGUFFile, keep: Sequence[str], progress: Progress | None) -> None:
        self._file = file
        self._kept: dict[str, Floats] = {}
        total = sum(file.tensors[name].size_bytes for name in keep)
        done = 0
        for name in keep:
            info = file.tensors[name]
            values = np.empty(info.shape, np.float32)
            dequantise(info.type, file.raw(name), values.reshape(-1))
            self._kept[name] = values
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
            budget_bytes = int(cpu.available_memory_bytes() * MEMORY_SHARE)
        return cls(file, tensors_to_keep(file, budget_bytes), progress)

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def vector(self, name: str) -> Floats:
        """Return a whole tensor in its own shape."""
        kept = self._kept.get(name)
        if kept is not None:
            return kept
        info = self._file.tensors[name]
        return dequantise(info.type, self._file.raw(name)).reshape(info.shape)

    def rows(self, name: str, numbers: npt.NDArray[np.int64]) -> Floats:
        """Return rows of a matrix (rows, columns): (len(numbers), columns)."""
        kept = self._kept.get(name)
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
        kept = self._kept.get(name)
        if kept is not None:
            matrix: Floats = kept[number]
            return matrix
        info = self._file.tensors[name]
        raw = self._file.raw(name).reshape(info.shape[0], -1)
        return dequantise(info.type, raw[number]).reshape(info.shape[1:])

    def _multiply(self, x: Floats, name: str) -> Floats:
        kept = self._kept.get(name)
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


def tensors_to_keep(file: GGUFFile, budget_bytes: int) -> list[str]:
    """Return the names of all tensors, of the dense ones or of none, whichever fits first."""
    everything = list(file.tensors)
    dense = [name for name in everything if not is_expert(name)]
    for names in (everything, dense):
        if sum(float32_bytes(file.tensors[name]) for name in names) <= budget_bytes:
            return names
    return []


def float32_bytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor in float32."""
    return 4 * values_in(info)
