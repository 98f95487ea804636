"""Find what a card launches otherwise for the rows of a prompt batch than for those of a window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.card_launch import CardLaunch, card_launch
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.gpu.grouped import batch_linear_kernel
from strata_nb.kernels.gpu.one_row import warps_of
from strata_nb.kernels.program import Launch
from strata_nb.packing import PACKED

WINDOW_ROWS = 8  # more of them are a batch


def with_batches(program: Sequence[Launch | CardLaunch]) -> Iterator[Launch | CardLaunch]:
    """Yield launches, with products by packed weights as a card has them for many rows."""
    for one in program:
        if isinstance(one, Launch) and one.kernel == "linear" and one.variant in PACKED:
            kind = TensorType(one.variant)
            warps = warps_of(arguments_of(one)["values"])
            yield card_launch(one)._replace(kernel=batch_linear_kernel(kind, warps))
        else:
            yield one
