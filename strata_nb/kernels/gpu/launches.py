"""What a card launches for a program, by the number of rows.

A program is written in kernels of the table, which every device has. A card may take several of
them together, or another kernel for one row than for eight; results have the same bits. Each pass
goes over the program and puts launches of cards in the place of those that it knows better; what is
left then becomes the card's kernel for it.

    with_runs        a layer's attention
    with_routes      a layer's routing and experts
    with_shares      a choice of tokens in two launches
    with_ready_rows  of a single row what attention needs, in the attention
    with_routers     of a single row what leads to the choice of experts
    with_normed_rows products of a single row that norm it
    with_products    products of a single row
    with_last_norms  products that finish a single row, and its norm
    with_answers     where the CPU computes experts of a single row, the wait for it
    with_slices      attention of more rows than a window has
    with_batches     products and experts of more rows than a window has
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from strata_nb.kernels.gpu.attention_launches import with_runs
from strata_nb.kernels.gpu.attention_ready import with_ready_rows
from strata_nb.kernels.gpu.attention_slices import with_slices
from strata_nb.kernels.gpu.batches import WINDOW_ROWS, with_batches
from strata_nb.kernels.gpu.card_launch import CardLaunch, card_launch
from strata_nb.kernels.gpu.last_norm import with_last_norms
from strata_nb.kernels.gpu.normed_rows import with_normed_rows
from strata_nb.kernels.gpu.pool_answers import with_answers
from strata_nb.kernels.gpu.pooled import PoolPlaces
from strata_nb.kernels.gpu.product_launches import with_products
from strata_nb.kernels.gpu.routed import with_routes
from strata_nb.kernels.gpu.router import with_routers
from strata_nb.kernels.gpu.sampling import sample_keys_kernel
from strata_nb.kernels.program import Launch, Program


def card_launches(
    program: Program,
    rows: int,
    pool: PoolPlaces | None = None,
    *,
    same_bits: bool = True,
    warpgroups: bool = False,
) -> Sequence[CardLaunch]:
    """Return what a card launches, in order, for a program of so many rows.

    pool         what it shares with the CPU, which then computes some of the missed experts of one
                 row
    same_bits    whether a row has the bits of a window however many there are
    warpgroups   whether batches are multiplied by them: the card has them, and a row's bits need
                 not be those of a window
    """
    found = list(with_runs(program, rows, same_bits=same_bits, warpgroups=warpgroups))
    if rows > WINDOW_ROWS:
        found = list(with_batches(list(with_slices(found, rows)), rows, warpgroups=warpgroups))
    found = list(with_shares(with_routes(found, rows, pool)))
    if rows == 1:
        pools = pool is not None
        found = list(with_routers(list(with_ready_rows(found)), pools=pools))
        found = list(with_products(list(with_normed_rows(found))))
        found = list(with_answers(list(with_last_norms(found))))
    return [one if isinstance(one, CardLaunch) else card_launch(one) for one in found]


def with_shares(program: Iterable[Launch | CardLaunch]) -> Iterator[Launch | CardLaunch]:
    """Yield launches, with `sample` in the two that a card has for it."""
    for one in program:
        if isinstance(one, Launch) and one.kernel == "sample":
            yield card_launch(one)._replace(kernel=sample_keys_kernel())
        yield one
