"""Architectures: what a file holds (`describe`), the float32 forward that judges all others, and
the programs that devices run.

To add an architecture: a file with `describe`, `expected_tensors`, `forward` and `emit`, and a row
in `_ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from strata_nb.errors import FileFormatError
from strata_nb.gguf import GGUFFile
from strata_nb.models import llama, olmoe, qwen2moe, qwen3, qwen3moe
from strata_nb.models.description import Description
from strata_nb.models.emitting import Emitter
from strata_nb.models.places import Buffers, Places, Programs
from strata_nb.models.reference import Forward, ReferenceModel
from strata_nb.models.state import ReferenceState
from strata_nb.models.tensors import Expected, check_tensors
from strata_nb.models.weights import Weights
from strata_nb.progress import Progress

__all__ = [
    "SUPPORTED",
    "Description",
    "ReferenceModel",
    "ReferenceState",
    "describe",
    "emit_programs",
    "open_reference",
]


class Architecture(NamedTuple):
    """Hold what there is to know of an architecture: metadata, tensors, formulas, programs."""

    describe: Callable[[GGUFFile], Description]
    expected_tensors: Callable[[Description], Expected]
    forward: Forward
    emit: Callable[[Description, Emitter], None]


_ARCHITECTURES = {
    "llama": Architecture(llama.describe, llama.expected_tensors, llama.forward, llama.emit),
    "olmoe": Architecture(olmoe.describe, olmoe.expected_tensors, olmoe.forward, olmoe.emit),
    "qwen2moe": Architecture(
        qwen2moe.describe, qwen2moe.expected_tensors, qwen2moe.forward, qwen2moe.emit
    ),
    "qwen3": Architecture(qwen3.describe, qwen3.expected_tensors, qwen3.forward, qwen3.emit),
    "qwen3moe": Architecture(
        qwen3moe.describe, qwen3moe.expected_tensors, qwen3moe.forward, qwen3moe.emit
    ),
}
SUPPORTED = tuple(_ARCHITECTURES)


def describe(file: GGUFFile) -> Description:
    """Return the facts about a model, having made sure that all of the file is understood.

    FileFormatError names the architecture, keys or tensors that are not.
    """
    name = file.architecture
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        raise FileFormatError(
            file.path,
            file.metadata.offset("general.architecture"),
            f"architecture {name!r} is not supported",
            hint="supported are: " + ", ".join(SUPPORTED),
        )
    description = architecture.describe(file)
    check_tensors(file, architecture.expected_tensors(description))
    return description


def open_reference(
    file: GGUFFile,
    description: Description,
    *,
    budget_bytes: int | None = None,
    progress: Progress | None = None,
) -> ReferenceModel:
    """Open a model for the float32 forward; `file` must stay open as long as the model is used.

    description    what `describe` returned for this file
    budget_bytes   for weights kept in float32; None: a share of the memory available
    progress       called with (bytes done, bytes in all) while weights are dequantised; it may
                   raise, and so may an interrupt: nothing but memory is held, and that is freed
    """
    weights = Weights.open(file, budget_bytes=budget_bytes, progress=progress)
    return ReferenceModel(description, weights, _ARCHITECTURES[description.architecture].forward)


def emit_programs(
    description: Description,
    places: Places,
    buffers: Buffers,
    *,
    max_rows: int,
    head_rows: int,
    packed_row_bytes: Callable[[int], int],
    bytes_beside: int,
    chooses_tokens: bool,
    attends_in_runs: bool,
    gathers_rows: bool,
) -> Programs:
    """Return what a step of a model runs; see `Emitter` for the arguments.

    max_rows, head_rows   the most rows of a step, and of one run of its head
    """
    emitter = Emitter(
        description,
        places,
        buffers,
        max_rows=max_rows,
        head_rows=head_rows,
        packed_row_bytes=packed_row_bytes,
        bytes_beside=bytes_beside,
        chooses_tokens=chooses_tokens,
        attends_in_runs=attends_in_runs,
        gathers_rows=gathers_rows,
    )
    _ARCHITECTURES[description.architecture].emit(description, emitter)
    return emitter.finish()
