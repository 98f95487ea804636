"""Architectures: what a file holds (`describe`), and the float32 forward that judges all others.

To add an architecture: a file with `describe`, `expected_tensors` and `forward`, and a row in
`_ARCHITECTURES`.
"""

from __future__ import annotations

from types import ModuleType

from strata_nb.errors import FileFormatError
from strata_nb.gguf import GGUFFile
from strata_nb.models import llama, olmoe, qwen2moe, qwen3moe
from strata_nb.models.description import Description
from strata_nb.models.reference import ReferenceModel
from strata_nb.models.state import ReferenceState
from strata_nb.models.tensors import check_tensors
from strata_nb.models.weights import Progress, Weights

__all__ = [
    "SUPPORTED",
    "Description",
    "Progress",
    "ReferenceModel",
    "ReferenceState",
    "describe",
    "open_reference",
]

_ARCHITECTURES = {
    "llama": llama,
    "olmoe": olmoe,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
}
SUPPORTED = tuple(_ARCHITECTURES)


def describe(file: GGUFFile) -> Description:
    """Return the facts about a model, having made sure that all of the file is understood.

    FileFormatError names the architecture, keys or tensors that are not.
    """
    module = _module(file)
    description: Description = module.describe(file)
    check_tensors(file, module.expected_tensors(description))
    return description


def open_reference(
    file: GGUFFile, *, budget_bytes: int | None = None, progress: Progress | None = None
) -> ReferenceModel:
    """Open a model for the float32 forward; `file` must stay open as long as the model is used.

    budget_bytes   for weights kept in float32; None: a share of the memory available
    progress       called with (bytes done, bytes in all) while weights are dequantised; it may
                   raise, and so may an interrupt: nothing but memory is held, and that is freed
    """
    description = describe(file)
    weights = Weights.open(file, budget_bytes=budget_bytes, progress=progress)
    return ReferenceModel(description, weights, _module(file).forward)


def _module(file: GGUFFile) -> ModuleType:
    architecture = file.architecture
    module = _ARCHITECTURES.get(architecture)
    if module is None:
        raise FileFormatError(
            file.path,
            file.metadata.offset("general.architecture"),
            f"architecture {architecture!r} is not supported",
            hint="supported are: " + ", ".join(SUPPORTED),
        )
    return module
