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

from strata_nb.kernels.gpu.compile import ptx_code
from strata_nb.kernels.gpu.launches import CardLaunch, card_launches
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.table import KERNELS

# (kernel of the table, variant, values by name: arrays by address; which of them are written,
# further arrays that addresses in tables point to: written, read)
Run = Callable[..., None]


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
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    memory = gpu_simulator.Memory(
        [*(arrays[name] for name in written), *written_tables],
        [*(array for name, array in arrays.items() if name not in written), *tables],
    )
    found = card_launches((launch(kernel, words, variant=variant),), most_rows)
    assert found, f"{kernel} has nothing to run on a card"
    for one in found:
        simulate(one, most_rows, memory)


def simulate(one: CardLaunch, most_rows: int, memory: gpu_simulator.Memory) -> None:
    """Run what a card launches in the simulator."""
    passed = [
        float(np.uint32(word).view(np.float32)) if kind == "float" else word
        for word, kind in zip(one.arguments.values(), one.kinds, strict=True)
    ]
    gpu_simulator.run(
        one.kernel.function,
        one.grid(most_rows),
        one.kernel.threads,
        one.shared_bytes,
        passed,
        memory,
    )


def shaped(kernel: str, variant: Any = None, **values: int | float) -> Launch:
    """Return a launch for whoever asks for code only: arguments that are not given are 0."""
    kinds = {argument.name: argument.kind for argument in KERNELS[kernel].arguments}
    words = {name: 0.0 if kind == "float" else 0 for name, kind in kinds.items()}
    return launch(kernel, {**words, **values}, variant=variant)


def check_code(kernel: str, variant: Any = None, **values: int | float) -> None:
    """Compile a kernel as far as PTX, which must not use double precision."""
    one = shaped(kernel, variant, **values)
    found = card_launches((one,), 1)
    assert found, f"{kernel} has nothing to run on a card"
    for made in found:
        code = ptx_code(made.kernel, made.kinds)
        assert ".f64" not in code, f"{made.kernel.name} computes in double precision"
