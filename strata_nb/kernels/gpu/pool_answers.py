"""Take the CPU's answer in the launch that adds the card's own experts to a row.

a card that shares misses with the CPU    one launch
pool_down, rms_norm of its row            one, see `last_norm.py`
pool_down                                 one, here
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.intrinsics import i64, load_i64, thread_index
from strata_nb.kernels.gpu.operations import ARRIVED, GpuKernel, is_last
from strata_nb.kernels.gpu.pooled import answer_taker
from strata_nb.kernels.gpu.routed import CARD_KERNELS
from strata_nb.kernels.program import Launch

POOL_DOWN = CARD_KERNELS["pool_down"].arguments


def with_answers(program: Sequence[Launch | CardLaunch]) -> Iterator[Launch | CardLaunch]:
    """Yield launches, with those `pool_down` that no norm follows as they wait for the answer."""
    for one in program:
        if isinstance(one, CardLaunch) and tuple(one.arguments) == POOL_DOWN:
            x, y, _ = one.grid(1)
            kernel = _answered(one.kernel, one.shared_bytes, one.arguments["outputs"], x * y)
            one = one._replace(kernel=kernel)
        yield one


@cache
def _answered(kernel: GpuKernel, shared_bytes: int, width: int, blocks: int) -> GpuKernel:
    """Return a `pool_down` whose last block takes the answer."""
    product, threads = kernel.function, kernel.threads
    place = -(-shared_bytes // 16) * 16  # behind the product's own
    take = answer_taker(width, threads, place + 4)

    def pool_down(
        rows: int,
        blobs: int,
        sources: int,
        inner: int,
        shares: int,
        y: int,
        down_offset: int,
        top_k: int,
        values: int,
        outputs: int,
        box: int,
        state: int,
        idle: int,
    ) -> None:
        here, marks, thread = load_i64(rows), load_i64(blobs), i64(thread_index())
        product(
            rows,
            blobs,
            sources,
            inner,
            shares,
            y,
            down_offset,
            top_k,
            values,
            outputs,
            box,
            state,
            idle,
        )
        if is_last(rows + ARRIVED, blocks, thread, place) and here > 0:
            take(marks, y, box, state, thread)

    return kernel._replace(
        name=f"{kernel.name}_answered_{width}",
        function=pool_down,
        shared_bytes=lambda _: place + 16,
    )
