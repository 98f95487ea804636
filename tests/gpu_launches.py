"""Run launches of the table's kernels as a card does, with arrays in place of addresses.

`simulated` runs them in `gpu_simulator`, on the arrays themselves; every test of a GPU kernel takes
the fixture `gpu` of conftest.py, which is that, and on a machine with a card the card as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gpu_simulator
import numpy as np
from numpy.typing import NDArray

from strata_nb.kernels.gpu.batches import BATCH_KERNELS
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.routed import CARD_KERNELS
from strata_nb.kernels.gpu.warpgroup_launches import WARPGROUP_KERNELS
from strata_nb.kernels.program import Launch, Program, launch
from strata_nb.kernels.table import KERNELS

# (kernel of the table or of cards alone, variant, values by name: arrays by address; which of them
# are written, further arrays that addresses in tables point to: written, read)
Run = Callable[..., None]
OF_CARDS = CARD_KERNELS | BATCH_KERNELS | WARPGROUP_KERNELS  # that the table does not have


def aligned(array: NDArray[Any], boundary: int = 256) -> NDArray[Any]:
    """Return a copy that begins at a multiple of `boundary`, as all buffers of a device do."""
    room = np.empty(array.nbytes + boundary, np.uint8)
    start = -room.ctypes.data % boundary
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def simulated(
    kernel: str,
    values: dict[str, Any],
    written: Sequence[str],
    *,
    variant: Any = None,
    most_rows: int = 8,
    tables: Sequence[NDArray[Any]] = (),
    written_tables: Sequence[NDArray[Any]] = (),
) -> None:
    """Run one launch; arrays are passed by address, and only those in `written` may be written.

    most_rows   for which the grid is made, as in a captured program
    tables      arrays that the kernel reaches through addresses in other arrays
    """
    words = {
        name: int(value.ctypes.data) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    found = of_card(kernel, words, variant, most_rows)
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    _simulate(
        found,
        most_rows,
        [*(arrays[name] for name in written), *written_tables],
        [*(array for name, array in arrays.items() if name not in written), *tables],
    )


def simulated_program(
    program: Program, rows: int, written: Sequence[NDArray[Any]], read: Sequence[NDArray[Any]]
) -> None:
    """Run what a card launches for a program of so many rows; these arrays are all that it uses."""
    _simulate(card_launches(program, rows), rows, written, read)


def _simulate(
    launches: Sequence[CardLaunch],
    rows: int,
    written: Sequence[NDArray[Any]],
    read: Sequence[NDArray[Any]],
) -> None:
    memory = gpu_simulator.Memory(written, read)
    for one in launches:
        simulate(one, rows, memory)


def simulate(one: CardLaunch, rows: int, memory: gpu_simulator.Memory) -> None:
    """Run one launch of a card in the simulator."""
    passed = [
        float(np.uint32(word).view(np.float32)) if kind == "float" else word
        for word, kind in zip(one.arguments.values(), one.kinds, strict=True)
    ]
    gpu_simulator.run(
        one.kernel.function,
        one.grid(rows),
        one.kernel.threads,
        one.shared_bytes,
        passed,
        memory,
    )


def of_card(
    kernel: str, words: dict[str, int | float], variant: Any = None, rows: int = 8
) -> Sequence[CardLaunch]:
    """Return what a card launches for a kernel of the table, or for one that it has instead."""
    if kernel in OF_CARDS:
        described = OF_CARDS[kernel]
        assert set(words) == set(described.arguments)
        return [described.part({name: int(value) for name, value in words.items()}, variant)]
    return card_launches((launch(kernel, words, variant=variant),), rows)


def shaped(kernel: str, variant: Any = None, **values: int | float) -> Launch:
    """Return a launch for whoever asks for code only: arguments that are not given are 0."""
    kinds = {argument.name: argument.kind for argument in KERNELS[kernel].arguments}
    words = {name: 0.0 if kind == "float" else 0 for name, kind in kinds.items()}
    return launch(kernel, {**words, **values}, variant=variant)


def shaped_for_card(
    kernel: str, variant: Any = None, *, rows: int = 8, **values: int
) -> Sequence[CardLaunch]:
    """Return `shaped` as a card has it, also of a kernel that cards alone have."""
    if kernel in OF_CARDS:
        words = dict.fromkeys(OF_CARDS[kernel].arguments, 0) | values
        return of_card(kernel, words, variant)
    return card_launches((shaped(kernel, variant, **values),), rows)
