"""Take rows out of an embedding, to the bit what `formats.dequantise` gives for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from strata_nb.formats import TensorType, row_bytes
from strata_nb.kernels.gpu.floats import FLOATS
from strata_nb.kernels.gpu.intrinsics import (
    block_x,
    block_y,
    f32_of_i32,
    i32,
    i64,
    load_i64,
    store_f32,
    thread_index,
)
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid, blocks_of
from strata_nb.kernels.gpu.products import decoder_of, row_bytes_of
from strata_nb.kernels.gpu.tables import table_bytes, table_filler
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK, UNPACKED

THREADS = 64


def embed_kernel(kind: TensorType) -> GpuKernel:
    """Return `embed` of the table for a type: a thread for each sub-block, or for each float.

    ValueError for a type that has no kernels on a card.
    """
    return _plain(kind) if kind in UNPACKED else _packed(kind)


def _reads(kind: TensorType) -> Callable[[Arguments, int], int]:
    """Return what says how many bytes of the table a launch reads: a row for each row."""
    return lambda arguments, rows: rows * row_bytes(kind, arguments["width"])


def _token(tokens: Any, drawn: Any, row: Any) -> Any:
    """Return the token of a row; where it is one that could not be drawn, any that there is."""
    token = load_i64(tokens + 8 * row)
    if token < 0:
        token = load_i64(drawn + 8 * (-1 - token))
    return token if token > 0 else i64(0)


@cache
def _plain(kind: TensorType) -> GpuKernel:
    size, one, _ = FLOATS[kind]

    def embed(
        rows: int, tokens: int, drawn: int, weight: int, x: int, width: int, vocabulary: int
    ) -> None:
        row = i64(block_y())
        column = THREADS * i64(block_x()) + i64(thread_index())
        if row < load_i64(rows) and column < width:
            token = _token(tokens, drawn, row)
            found = one(weight + size * (token * width + column))
            store_f32(x + 4 * (row * width + column), found)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return blocks_of(arguments["width"], THREADS), most_rows, 1

    return GpuKernel(f"embed_{kind.name.lower()}", embed, THREADS, grid, reads=_reads(kind))


@cache
def _packed(kind: TensorType) -> GpuKernel:
    decoder = decoder_of(kind)
    read, unpack, offset, minima = decoder.read, decoder.unpack, decoder.offset, decoder.minima
    fill = table_filler(kind, 0, THREADS)
    bytes_of_row = row_bytes_of(kind)

    def store_four(place: int, quants: int, scale: Any, minimum: Any) -> None:
        """Write the values of a word of quants."""
        shift = 24
        while shift >= 0:
            value = scale * f32_of_i32((i32(quants << shift) >> 24) - offset)
            store_f32(place, value - minimum if minima else value)
            place += 4
            shift -= 8

    def embed(
        rows: int, tokens: int, drawn: int, weight: int, x: int, width: int, vocabulary: int
    ) -> None:
        row = i64(block_y())
        s, sub_blocks = THREADS * i64(block_x()) + i64(thread_index()), width >> 5
        fill(i64(thread_index()))
        if row < load_i64(rows) and s < sub_blocks:
            token = _token(tokens, drawn, row)
            member = token & GROUP_ROWS - 1
            first = token - member
            rows_in_group = min(vocabulary - first, GROUP_ROWS)
            group = weight + first * bytes_of_row(sub_blocks)
            words = read(group, rows_in_group, member, sub_blocks, s)
            a, b, c, d, e, f, g, h, low, high, low_minimum, high_minimum = unpack(words, 0)
            place = x + 4 * (row * width + SUB_BLOCK * s)
            store_four(place, a, low, low_minimum)
            store_four(place + 16, b, low, low_minimum)
            store_four(place + 32, c, low, low_minimum)
            store_four(place + 48, d, low, low_minimum)
            store_four(place + 64, e, high, high_minimum)
            store_four(place + 80, f, high, high_minimum)
            store_four(place + 96, g, high, high_minimum)
            store_four(place + 112, h, high, high_minimum)

    def grid(arguments: Arguments, most_rows: int) -> Grid:
        return blocks_of(arguments["width"] // SUB_BLOCK, THREADS), most_rows, 1

    shared_bytes = table_bytes(kind)
    return GpuKernel(
        f"embed_{kind.name.lower()}",
        embed,
        THREADS,
        grid,
        lambda _: shared_bytes,
        reads=_reads(kind),
    )
