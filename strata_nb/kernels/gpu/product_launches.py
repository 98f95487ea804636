"""Find products of the same row, which a card does in one launch (`one_row.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.functions import argument_kinds, arguments_of
from strata_nb.kernels.gpu.one_row import MOST_WEIGHTS, one_row_kernel
from strata_nb.kernels.program import Launch
from strata_nb.packing import PACKED

_OF_THE_ROW = ("rows", "x", "values", "add")
_OF_A_WEIGHT = ("weight", "bias", "y", "outputs")


def with_products(program: Sequence[Launch | CardLaunch]) -> Iterator[Launch | CardLaunch]:
    """Yield launches, with products of a single row by packed weights as a card has them."""
    at = 0
    while at < len(program):
        found = products_from(program, at)
        yield one_row_launch(found) if found else program[at]
        at += max(1, len(found))


def products_from(program: Sequence[Launch | CardLaunch], at: int) -> Sequence[Launch]:
    """Return the products from a place on that one launch can do: of the same row."""
    first = program[at]
    if isinstance(first, CardLaunch) or not _is_product(first):
        return []
    others = program[at + 1 : at + MOST_WEIGHTS]
    together = takewhile(lambda other: _go_together(first, other), others)
    return [first, *(other for other in together if isinstance(other, Launch))]


def _is_product(one: Launch) -> bool:
    return one.kernel == "linear" and one.variant in PACKED


def _go_together(first: Launch, other: Launch | CardLaunch) -> bool:
    """Return whether a launch may run beside the first, and multiplies the same row."""
    if isinstance(other, CardLaunch) or not _is_product(other) or other.waits:
        return False
    one, two = arguments_of(first), arguments_of(other)
    return all(one[name] == two[name] for name in _OF_THE_ROW)


def types_of(products: Sequence[Launch]) -> tuple[TensorType, ...]:
    """Return the types of the weights of products."""
    return tuple(TensorType(one.variant) for one in products)  # type: ignore[arg-type]


def one_row_launch(launches: Sequence[Launch]) -> CardLaunch:
    """Return one launch for products of the same row."""
    given = [arguments_of(one) for one in launches]
    kinds = dict(zip(given[0], argument_kinds(launches[0]), strict=True))
    words = {name: (given[0][name], kinds[name]) for name in _OF_THE_ROW}
    for number, one in enumerate(given, start=1):
        suffix = "" if number == 1 else str(number)
        words |= {name + suffix: (one[name], kinds[name]) for name in _OF_A_WEIGHT}
    first, *others = launches
    return CardLaunch(
        one_row_kernel(types_of(launches), given[0]["values"], [one["outputs"] for one in given]),
        ", ".join([first.label, *(one.label.rpartition(".")[2] for one in others)]),
        {name: word for name, (word, _) in words.items()},
        tuple(kind for _, kind in words.values()),
    )
