"""What a card launches for the attention of a layer: fewer and other kernels than the table's.

    table                                          card
    (rms_norm of q, of k,) rope, kv_append         prepare, of many rows batch_prepare
    attention (, quantise of its result)           attention by runs, combine
    attention of many rows                         attention

The results have the bits that the kernels of the table give one by one, but those of attention of
many rows where they need not (`attention_batches.py`, `attention_warpgroups.py`). Only what nothing
reads behind them is not written: keys that are normalised and not yet rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from strata_nb.kernels.gpu.attention_batches import batch_attention_kernel, batch_blocks
from strata_nb.kernels.gpu.attention_tiles import (
    blocks_for,
    maxima_bytes,
    takes,
    tiles_attention_kernel,
)
from strata_nb.kernels.gpu.attention_warpgroups import warpgroup_attention_kernel
from strata_nb.kernels.gpu.batch_preparing import batch_prepare_kernel, rotates
from strata_nb.kernels.gpu.batches import WINDOW_ROWS
from strata_nb.kernels.gpu.card_launch import CardLaunch, card_launch
from strata_nb.kernels.gpu.combining import ARGUMENTS as COMBINE
from strata_nb.kernels.gpu.combining import combine_kernel
from strata_nb.kernels.gpu.functions import arguments_of
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.gpu.preparing import ARGUMENTS as PREPARE
from strata_nb.kernels.gpu.preparing import normed_by_a_warp, prepare_kernel
from strata_nb.kernels.program import Launch
from strata_nb.kernels.runs import work_bytes

SOME_BLOCKS = 64  # of threads: half of a large card's multiprocessors are busy
PREPARED_ROWS = 256  # of which each has a block: with fewer, blocks of a head are done sooner
MANY_BLOCKS = 256  # of threads: two for each multiprocessor of a large card

Own = Callable[[int, int], GpuKernel]


class Fused(NamedTuple):
    """Hold what is launched, and how many launches of the program that stands for."""

    made: Sequence[CardLaunch]
    taken: int


def with_runs(
    program: Sequence[Launch], rows: int, *, same_bits: bool = True, warpgroups: bool = False
) -> Iterator[Launch | CardLaunch]:
    """Yield launches of so many rows, with those of each layer's attention as a card has them.

    same_bits    whether a row has the bits of a window however many there are
    warpgroups   whether the card has their products
    """
    fast = warpgroup_attention_kernel if warpgroups else batch_attention_kernel
    own = None if same_bits else fast
    number = 0
    while number < len(program):
        fused = _fused(program, number, rows, own)
        yield from fused.made if fused else program[number : number + 1]
        number += fused.taken if fused else 1


def _fused(program: Sequence[Launch], start: int, rows: int, own: Own | None) -> Fused | None:
    """Return what a card launches for the launches from `start` on, None if they are no part of
    attention that is launched otherwise."""
    first = program[start]
    if first.kernel == "attention":
        return _attention(program, start, rows, own)
    for normed in (True, False):
        names = ("rms_norm", "rms_norm", "rope", "kv_append")[0 if normed else 2 :]
        found = program[start : start + len(names)]
        if tuple(one.kernel for one in found) == names:
            made = _prepare(found, rows, normed=normed)
            if made is not None:
                return Fused([made], len(names))
    return None


def _attention(program: Sequence[Launch], start: int, rows: int, own: Own | None) -> Fused:
    """Return what a card launches for attention.

    own   makes the kernel of many rows whose bits need not be those of a window, of both lengths
    """
    one = program[start]
    given = arguments_of(one)
    attention = card_launch(one)
    lengths = given["key_length"], given["value_length"]
    if rows > WINDOW_ROWS and one.variant == ("f16", "f16") and takes(*lengths):
        if own is not None and batch_blocks(rows, given) >= SOME_BLOCKS:
            return Fused([attention._replace(kernel=own(*lengths))], 1)
        is_whole = _fills_a_card(rows, given)
        kernel = tiles_attention_kernel(*lengths, is_whole=is_whole)
        attention = attention._replace(kernel=kernel)
        if is_whole:
            return Fused([attention], 1)
    packed, heads, length = 0, given["heads"], lengths[1]
    if length % 32 == 0 and start + 1 < len(program) and program[start + 1].kernel == "quantise":
        after = arguments_of(program[start + 1])
        is_of_these = after["rows"] == given["rows"] and after["x"] == given["out"]
        if is_of_these and (after["times"], after["values"]) == (1, heads * length):
            packed = after["packed"]
    values = {**given, "packed": packed}
    combine = CardLaunch(
        combine_kernel(length),
        f"{one.label}.combine",
        {name: values[name] for name, _ in COMBINE},
        tuple(kind for _, kind in COMBINE),
    )
    return Fused([attention, combine], 2 if packed else 1)


def _fills_a_card(rows: int, given: Mapping[str, int]) -> bool:
    """Return whether a card is busy with blocks that each have all runs of some rows, and whether
    the work space is enough for them."""
    work = work_bytes(rows, given["heads"], given["table_width"], given["value_length"])
    return blocks_for(rows, given) >= MANY_BLOCKS and maxima_bytes(rows, given) <= work


def _prepare(found: Sequence[Launch], rows: int, *, normed: bool) -> CardLaunch | None:
    """Return the launch of `prepare` in place of those of the table, None where they do not fit."""
    *norms, rope, store = (arguments_of(one) for one in found)
    shared = ("rows", "positions", "table", "planes", "halves")
    if any(rope[name] != store[name] for name in shared) or rope["length"] != store["key_length"]:
        return None
    weights = [0, 0]
    eps = 0
    if normed:
        for norm, x, heads in zip(
            norms, (rope["x"], store["k"]), (rope["heads"], store["heads"]), strict=True
        ):
            wanted = {
                "rows": rope["rows"],
                "index": 0,
                "x": x,
                "out": x,
                "packed": 0,
                "parts": heads,
                "width": rope["length"],
                "eps": norms[0]["eps"],
            }
            if any(norm[name] != value for name, value in wanted.items()):
                return None
        if not normed_by_a_warp(rope["length"]):
            return None
        weights, eps = [norm["weight"] for norm in norms], norms[0]["eps"]
    values = {
        **store,
        "q": rope["x"],
        "q_weight": weights[0],
        "k_weight": weights[1],
        "heads": rope["heads"],
        "kv_heads": store["heads"],
        "eps": eps,
    }
    variant = found[-1].variant
    assert isinstance(variant, tuple)  # noqa: S101 - the table says so
    lengths = store["key_length"], store["value_length"]
    rotation = rope["planes"], rope["halves"]
    if rows >= PREPARED_ROWS and rotates(lengths, *rotation):
        kernel = batch_prepare_kernel(variant, lengths, *rotation)
    else:
        kernel = prepare_kernel(*variant, *lengths)
    arguments = {name: values[name] for name, _ in PREPARE}
    label = found[-1].label.replace("kv_append", "prepare")
    return CardLaunch(kernel, label, arguments, tuple(kind for _, kind in PREPARE))
