"""Take rows out of an embedding, to the bit what `formats.dequantise` gives for them.

Packed rows come in groups of eight, and what a sub-block is, is known for a whole group at once
(`weights.py`): it is unpacked in registers, and one of the eight rows is kept. That reads up to
eight times the bytes of the row, but of few rows.

The host draws its tokens itself and has them in the record: `drawn` is not read here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from strata_nb.compiling import compiled, inlined
from strata_nb.formats import TensorType, block_layout, row_bytes
from strata_nb.kernels.host.lanes import lane, piece
from strata_nb.kernels.host.operations import SIGNATURE, HostKernel, Work, share, word
from strata_nb.kernels.host.plain import reader
from strata_nb.kernels.host.steps import host_weights, widener
from strata_nb.kernels.host.vectors import floats_of, only_lane, widen_unsigned
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED
from strata_nb.raw_memory import load_i64, store


def work_bytes(kind: TensorType, width: int) -> int:
    """Return how much work space a thread needs: that of a group, for one that lacks rows."""
    return 0 if kind in UNPACKED else GROUP_ROWS * row_bytes(kind, width)


def embed_kernel(kind: TensorType, work: Work) -> HostKernel:
    """Return `embed` of the table for a type; the threads share the rows.

    work   a space of `work_bytes` for each thread

    ValueError for a type without a kernel.
    """
    if kind in UNPACKED:
        return HostKernel(_plain(kind))
    return HostKernel(_packed(kind), (work.address, work.stride))


@cache
def _plain(kind: TensorType) -> Callable[..., None]:
    size = block_layout(kind).size_bytes
    read, read_one = reader(kind, 16), reader(kind, 1)

    def embed(arguments: int, thread: int, threads: int) -> None:
        tokens, weight, x = word(arguments, 1), word(arguments, 3), word(arguments, 4)
        width = word(arguments, 5)
        whole = width // 16 * 16
        first, last = share(load_i64(word(arguments, 0)), 1, thread, threads)
        for row in range(first, last):
            source = weight + load_i64(tokens + 8 * row) * width * size
            target = x + 4 * row * width
            for column in range(0, whole, 16):
                store(target + 4 * column, read(source + size * column))
            for column in range(whole, width):
                store(target + 4 * column, only_lane(read_one(source + size * column)))

    embed.__name__ = embed.__qualname__ = f"embed_{kind.name.lower()}"
    return compiled(SIGNATURE)(embed)


@cache
def _packed(kind: TensorType) -> Callable[..., None]:
    layout = block_layout(kind)
    block_sub_blocks, block_bytes = layout.values // SUB_BLOCK, layout.size_bytes
    widen, unpack = widener(kind), _unpacker(kind)

    def embed(arguments: int, thread: int, threads: int) -> None:
        tokens, weight, x = word(arguments, 1), word(arguments, 3), word(arguments, 4)
        sub_blocks, vocabulary = word(arguments, 5) // SUB_BLOCK, word(arguments, 6)
        space = word(arguments, 7) + thread * word(arguments, 8)  # behind the table's words
        row_size = sub_blocks // block_sub_blocks * block_bytes
        first, last = share(load_i64(word(arguments, 0)), 1, thread, threads)
        for row in range(first, last):
            token = load_i64(tokens + 8 * row)
            member = token % GROUP_ROWS
            start = token - member
            group = weight + start * row_size
            if vocabulary - start < GROUP_ROWS:
                widen(group, vocabulary - start, sub_blocks, space)
                group = space
            unpack(group, sub_blocks, member, x + 4 * SUB_BLOCK * sub_blocks * row)

    embed.__name__ = embed.__qualname__ = f"embed_{kind.name.lower()}"
    return compiled(SIGNATURE)(embed)


def _unpacker(kind: TensorType) -> Callable[..., None]:
    """Return a function (group, sub_blocks, member, target) that unpacks one row of a group."""
    host = host_weights(kind)
    unit, bias, _, has_minima, whole_steps = host.arithmetic
    whole = unit == SUB_BLOCK
    step_sub_blocks = 2 if whole else 1
    subtracted = 0 if bias is None else 1 << bias

    @inlined
    def values(bytes_: Any, four: int, scale: Any, minimum: Any) -> Any:
        found = floats_of(widen_unsigned(piece(bytes_, four)) - subtracted) * scale
        return found - minimum if has_minima else found

    @inlined
    def of_unit(scales: Any, place: int) -> Any:
        """Return scale and minimum; lanes are in the order of `weights._lane_order`."""
        if has_minima:
            return lane(scales[0], place), lane(scales[1], place)
        return lane(scales, place), np.float32(0)

    @inlined
    def sub_block(
        group: int, sub_blocks: int, number: int, member: int, first: Any, second: Any, target: int
    ) -> None:
        """Unpack a sub-block whose halves have these scales and minima."""
        four, place = member % 4, target + 4 * SUB_BLOCK * number
        a, b, c, d = host.quants(group, sub_blocks, number)
        if member >= 4:
            a, b = c, d
        store(place, values(a, four, first[0], first[1]))
        store(place + 64, values(b, four, second[0], second[1]))

    @inlined
    def unpack(group: int, sub_blocks: int, member: int, target: int) -> None:
        place = 4 * (member % 4) + 2 * (member // 4)
        for step in range(sub_blocks // step_sub_blocks):
            scales = host.scales(group, sub_blocks, step)
            first, second = of_unit(scales, place), of_unit(scales, place + 1)
            if whole:
                sub_block(group, sub_blocks, 2 * step, member, first, first, target)
                sub_block(group, sub_blocks, 2 * step + 1, member, second, second, target)
            else:
                sub_block(group, sub_blocks, step, member, first, second, target)
        if not whole_steps and sub_blocks & 1:
            only = of_unit(host.last_scales(group, sub_blocks, sub_blocks // 2), place)
            sub_block(group, sub_blocks, sub_blocks - 1, member, only, only, target)

    return unpack
