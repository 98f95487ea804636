"""Find products of rows that a card does together: with a norm in front, or of the same row.

    rms_norm, linear by floats        normed_linear, for any number of rows: a router
    (rms_norm,) linear x 1 to 3       one_row, normed_row: packed weights, a single row

A norm goes into the products that follow it at once. What others read of the normed row is written
as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from strata_nb.formats import TensorType
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.float_linear import can_norm as can_norm_floats
from strata_nb.kernels.gpu.float_linear import normed_linear_kernel
from strata_nb.kernels.gpu.functions import argument_kinds, arguments_of
from strata_nb.kernels.gpu.one_row import MOST_WEIGHTS, can_norm, one_row_kernel
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.program import Launch
from strata_nb.packing import PACKED, UNPACKED

_OF_THE_ROW = ("rows", "x", "values", "add")
_OF_A_WEIGHT = ("weight", "bias", "y", "outputs")
_OF_A_NORM = ("norm_weight", "out", "packed", "eps")
_Launches = Sequence[Launch | CardLaunch]


def with_products(program: _Launches, rows: int) -> Iterator[Launch | CardLaunch]:
    """Yield launches, with products and norms as a card has them for so many rows."""
    at = 0
    while at < len(program):
        norm = _norm(program[at])
        first = at if norm is None else at + 1
        found = _products(program, first)
        made = None
        if found and norm is not None and _is_of(norm, found[0]):
            made = _normed(norm, found, rows)
        elif found and norm is None and rows == 1 and found[0].variant in PACKED:
            made = _one_row(found, None)
        if made is None:
            yield program[at]
            at += 1
        elif made.kernel.name.startswith("normed_linear"):
            yield made
            at = first + 1
        else:
            yield made
            at = first + len(found)


def _norm(one: Launch | CardLaunch) -> Launch | None:
    """Return a norm of whole rows in their order."""
    if isinstance(one, CardLaunch) or one.kernel != "rms_norm":
        return None
    given = arguments_of(one)
    return one if given["parts"] == 1 and not given["index"] else None


def _products(program: _Launches, at: int) -> Sequence[Launch]:
    """Return the products from a place on, the first alone or as many packed ones of its row as one
    launch takes."""
    if at >= len(program):
        return []
    one = program[at]
    if isinstance(one, CardLaunch) or one.kernel != "linear":
        return []
    if one.variant not in PACKED:
        return [one]
    others = program[at + 1 : at + MOST_WEIGHTS]
    together = takewhile(lambda other: _go_together(one, other), others)
    return [one, *(other for other in together if isinstance(other, Launch))]


def _go_together(first: Launch, other: Launch | CardLaunch) -> bool:
    """Return whether a launch may run beside the first, and multiplies the same row."""
    if isinstance(other, CardLaunch) or other.kernel != "linear" or other.waits:
        return False
    one, two = arguments_of(first), arguments_of(other)
    return other.variant in PACKED and all(one[name] == two[name] for name in _OF_THE_ROW)


def _is_of(norm: Launch, one: Launch) -> bool:
    """Return whether a product reads what a norm writes, and writes elsewhere."""
    given, product = arguments_of(norm), arguments_of(one)
    written = given["packed"] if one.variant in PACKED else given["out"]
    same_rows = given["rows"] == product["rows"] and given["width"] == product["values"]
    return (
        same_rows and product["x"] == written and not product["add"] and given["out"] != given["x"]
    )


def _normed(norm: Launch, products: Sequence[Launch], rows: int) -> CardLaunch | None:
    values, variant = arguments_of(norm)["width"], products[0].variant
    if variant in UNPACKED and can_norm_floats(values):
        return _normed_linear(norm, products[0])
    if variant in PACKED and rows == 1 and can_norm(values):
        return _one_row(products, norm)
    return None


def _words(one: Launch) -> dict[str, tuple[int, str]]:
    """Return a launch's arguments with their kinds, by name."""
    return {
        name: (word, kind)
        for (name, word), kind in zip(arguments_of(one).items(), argument_kinds(one), strict=True)
    }


def _of_norm(norm: Launch | None) -> dict[str, tuple[int, str]]:
    if norm is None:
        kinds = ("address", "address", "address", "float")
        return {name: (0, kind) for name, kind in zip(_OF_A_NORM, kinds, strict=True)}
    words = _words(norm)
    return {name: words[name.removeprefix("norm_")] for name in _OF_A_NORM}


def _normed_linear(norm: Launch, one: Launch) -> CardLaunch:
    kernel = normed_linear_kernel(_type_of(one), arguments_of(one)["values"])
    words = _words(one) | {"x": _words(norm)["x"]} | _of_norm(norm)
    return _card_launch(kernel, _label([norm, one]), words)


def _one_row(products: Sequence[Launch], norm: Launch | None) -> CardLaunch:
    """Return one launch for products of the same row, which is normed before where there is one."""
    values = arguments_of(products[0])["values"]
    types = tuple(_type_of(one) for one in products)
    kernel = one_row_kernel(types, values, is_normed=norm is not None)
    words = {name: _words(products[0])[name] for name in _OF_THE_ROW} | _of_norm(norm)
    if norm is not None:
        words["x"] = _words(norm)["x"]
    for number, one in enumerate(products, start=1):
        suffix = "" if number == 1 else str(number)
        words |= {name + suffix: _words(one)[name] for name in _OF_A_WEIGHT}
    return _card_launch(kernel, _label([*([norm] if norm else []), *products]), words)


def _type_of(one: Launch) -> TensorType:
    return TensorType(one.variant)  # type: ignore[arg-type]


def _label(launches: Sequence[Launch]) -> str:
    first, *others = launches
    return ", ".join([first.label, *(one.label.rpartition(".")[2] for one in others)])


def _card_launch(kernel: GpuKernel, label: str, words: dict[str, tuple[int, str]]) -> CardLaunch:
    arguments = {name: word for name, (word, _) in words.items()}
    return CardLaunch(kernel, label, arguments, tuple(kind for _, kind in words.values()))
