"""The packed layout of quantised rows: the one that every backend reads.

In a file the parts of a block lie together, in sizes such as 18, 110 or 210 bytes: most loads of a
wide machine would be unaligned, and neighbouring threads would read far apart. Here the same bytes
are put into another order, once, when a tensor is read. Nothing is added, lost or rounded.

Rows come in *groups* of eight. A group takes exactly the bytes that its rows took in the file, so
any run of whole groups can be packed by itself. A group is a sequence of *fields*, a field a
sequence of *pieces*: piece 0 of every row, piece 1 of every row, and so on.

    group     | field: quants                    | field: scales | ...
              |                                  |
    field     | piece 0     | piece 1     | ...  |        one piece: `width` bytes of one row
              |             |
    pieces    | r0 r1 .. r7 | r0 r1 .. r7 | ...           piece p of row r: (p * 8 + r) * width

Quants are cut into *sub-blocks* of 32 values. A field with b bits a value has one piece of 4 * b
bytes for each sub-block; for 8 bits it has two of 16 bytes. Within a piece of w bytes

    value i lies in byte i % w, at bits b * (i // w)

    4 bits   byte 0: v0 low, v16 high   byte 1: v1, v17           ...  byte 15: v15, v31
    2 bits   byte 0: v0, v8, v16, v24   byte 1: v1, v9, v17, v25  ...  byte 7:  v7 .. v31
    1 bit    byte 0: v0, v4, v8 .. v28  byte 1: v1, v5 .. v29     ...  byte 3:  v3 .. v31

so that four values in a row are always one shift and one mask of a 32-bit word away, which is what
an instruction that multiplies four bytes (dp4a, vpdpbusd) takes.

Who reads it how. A GPU warp takes eight rows and four sub-blocks at a time: lane = row + 8 *
sub-block loads 16 bytes of quants, and the warp 512 in a row; scales and high bits of a warp are as
contiguous. A CPU core takes 64 bytes at a time, sixteen values of four rows (`kernels/host/`). Both
find all that belongs to 32 values in one place of each field.

Fields (width in bytes, for each 32 values unless it says "a block", which means 256):

    Q4_0  IQ4_NL   quants 16, scale 2                          MXFP4   quants 16, exponent 1
    Q4_1           quants 16, scale and minimum 4              Q8_0    quants 2 x 16, scale 2
    Q5_0           low 16, high 4, scale 2
    Q5_1           low 16, high 4, scale and minimum 4
    Q2_K           quants 8, group scales 2 (of 16 values each), scale and minimum 4 a block
    Q3_K           low 8, high 4, group scales 3 x 4 a block, scale 2 a block
    Q4_K           quants 16, group scales 3 x 4 a block, scale and minimum 4 a block
    Q5_K           low 16, high 4, group scales 3 x 4 a block, scale and minimum 4 a block
    Q6_K           low 16, high 8, group scales 2 (of 16 values each), scale 2 a block
    IQ4_XS         quants 16, low scales 4 a block, high scales 2 a block, scale 2 a block
    IQ3_S          grid 8, signs 4, group scales 4 a block, scale 2 a block, high grid bits 1
    IQ3_XXS        grid 8, signs and scales 4, scale 2 a block
    IQ2_S          grid 4, signs 4, scale 2 a block, high grid bits 1, group scales 1
    IQ2_XS         grid and signs 8, scale 2 a block, group scales 1
    IQ2_XXS        grid and signs 8, scale 2 a block
    IQ1_S          grid 4, high grid bits and scales 2, scale 2 a block
    IQ1_M          scales 8 a block, grid 4, high grid bits 2

The six-bit group scales of Q4_K, Q5_K and Q3_K are pairs, one for each sub-block s: (scale,
minimum), in Q3_K (scale of the first 16 values, of the last). Three 32-bit words hold a block's:

    word 0    four low bits of the first of each pair, at bit 4 * s
    word 1    four low bits of the second, at bit 4 * s
    word 2    two high bits: of the first at bit 2 * s, of the second at bit 16 + 2 * s

All other fields keep the bits of their bytes as the file has them (`formats.py`).

A field starts at a multiple of 16 bytes within its group, and a group within its tensor, whenever
the row is a multiple of 64 values. (Only MXFP4 needs the 64; all others need whole blocks.) The
last group of a tensor may have fewer rows, g: then g takes the place of 8 everywhere above, and
nothing is promised of alignment. Types without blocks (F32, F16, BF16 ...) stay as they are.

Rejected: interleaving rows every four bytes, which spares the CPU a transposition of sums but makes
a GPU lane decode the scales of four rows for eight values of each; sixteen bytes cut along the row
for every field, which leaves tails in rows of 32-value blocks and makes four lanes share a load;
padding, because what is read from memory is what decides the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_nb.formats import TensorType, block_layout, block_record, row_bytes
from strata_nb.packing_tables import Moves, PieceMove, Swap

if TYPE_CHECKING:
    from strata_nb.compiling import Compiled

GROUP_ROWS = 8
SUB_BLOCK = 32  # values that share one integer sum

Bytes = NDArray[np.uint8]


class Field(NamedTuple):
    """A field of a group: its pieces, in order of the row.

    name      fields of the file's record that it holds, joined by "+"
    width     bytes of a piece
    pieces    pieces of one block of one row
    before    bytes of one block of one row in the fields before this one
    """

    name: str
    width: int
    pieces: int
    before: int

    def start(self, blocks: int, rows: int = GROUP_ROWS) -> int:
        """Return the offset of this field in a group of rows with as many blocks each."""
        return self.before * blocks * rows


# name:width of each field in its order, as the head of this file has them.
_FIELDS: dict[TensorType, str] = {
    TensorType.Q4_0: "quants:16 scale:2",
    TensorType.Q4_1: "quants:16 scale+minimum:4",
    TensorType.Q5_0: "low:16 high:4 scale:2",
    TensorType.Q5_1: "low:16 high:4 scale+minimum:4",
    TensorType.Q8_0: "quants:16 scale:2",
    TensorType.Q2_K: "quants:8 group_scales:2 scale+minimum:4",
    TensorType.Q3_K: "low:8 high:4 group_scales:4 scale:2",
    TensorType.Q4_K: "quants:16 group_scales:4 scale+minimum:4",
    TensorType.Q5_K: "low:16 high:4 group_scales:4 scale+minimum:4",
    TensorType.Q6_K: "low:16 high:8 group_scales:2 scale:2",
    TensorType.IQ4_NL: "quants:16 scale:2",
    TensorType.IQ4_XS: "quants:16 scales_low:4 scales_high:2 scale:2",
    TensorType.IQ3_S: "grid_low:8 signs:4 group_scales:4 scale:2 grid_high:1",
    TensorType.IQ3_XXS: "grid:8 signs_and_scales:4 scale:2",
    TensorType.IQ2_S: "grid_low:4 signs:4 scale:2 grid_high:1 group_scales:1",
    TensorType.IQ2_XS: "grid_and_signs:8 scale:2 group_scales:1",
    TensorType.IQ2_XXS: "grid_and_signs:8 scale:2",
    TensorType.IQ1_S: "grid_low:4 high_and_scales:2 scale:2",
    TensorType.IQ1_M: "scales:8 grid_low:4 grid_high:2",
    TensorType.MXFP4: "quants:16 exponent:1",
}
PACKED = frozenset(_FIELDS)  # types whose packed form differs from the file's
# Types without blocks that kernels multiply by; of the others without blocks none is common.
UNPACKED = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})


@cache
def fields(kind: TensorType) -> dict[str, Field]:
    """Return the fields of a packed type by name, in their order; none for a type that stays."""
    record = block_record(kind)
    found: dict[str, Field] = {}
    before = 0
    for text in _FIELDS.get(kind, "").split():
        name, _, width = text.partition(":")
        size = sum(record[part].itemsize for part in name.split("+"))
        found[name] = Field(name, int(width), size // int(width), before)
        before += size
    if found and before != record.itemsize:
        raise AssertionError(f"{kind.name}: the fields do not add up to a block")
    return found


# -- rearranging the bits of a block ---------------------------------------------------------------
#
# A swap exchanges bits between two words of a block: the bits `mask` of the second with those
# `shift` places higher of the first. It is its own inverse. The transposition of a matrix of bits
# whose rows are words takes log2(rows) rounds of them (Warren, Hacker's Delight, section 7-3).


def _transpose(start: int, width: int, words: int, bits: int) -> Iterator[Swap]:
    """Exchange word w's bits number v with word v's number w, `words` words of `width` bytes.

    Each byte is cut into `words` slices of `bits` bits; words * bits is 8.
    """
    distance = words // 2
    while distance:
        mask = sum(
            (1 << bits) - 1 << bits * number for number in range(words) if not number & distance
        )
        for word in range(words):
            if not word & distance:
                first = start + word * width
                yield Swap(
                    first, first + distance * width, bits * distance, mask * 0x01010101, width
                )
        distance //= 2


def _swaps(kind: TensorType) -> Iterator[Swap]:
    """Yield the swaps that bring the quants of a block into the order of pieces."""

    def start(name: str) -> int:
        return _start(kind, name)

    if kind in (TensorType.Q4_K, TensorType.Q5_K):
        quants = start("quants" if kind is TensorType.Q4_K else "low")
        for run in range(quants, quants + 128, 32):  # low nibbles: 32 values, high: the next 32
            yield from _nibbles(run, run + 16)
    if kind is TensorType.Q6_K:
        for run in range(start("low"), start("low") + 128, 64):  # low: 64 values, high: the next
            yield from _nibbles(run, run + 16)
            yield from _nibbles(run + 32, run + 48)
    if kind in (TensorType.Q2_K, TensorType.Q3_K, TensorType.Q6_K):
        name = {TensorType.Q2_K: "quants", TensorType.Q3_K: "low"}.get(kind, "high")
        for run in range(start(name), start(name) + 64, 32):
            yield from _transpose(run, 8, 4, 2)
    if kind in (TensorType.Q3_K, TensorType.Q5_K):
        yield from _transpose(start("high"), 4, 8, 1)


def _nibbles(first: int, second: int) -> Iterator[Swap]:
    """Exchange the high nibbles of 16 bytes with the low nibbles of 16 others."""
    for word in (0, 8):
        yield Swap(first + word, second + word, 4, 0x0F0F0F0F, 8)


def _moved_bits(kind: TensorType) -> tuple[str, list[int]] | None:
    """Return a field and, for each of its bits in packed order, the number of the file's bit."""
    if kind in (TensorType.Q5_0, TensorType.Q5_1):
        return "high", [4 * (bit % 8) + bit // 8 for bit in range(32)]
    if kind in (TensorType.Q4_K, TensorType.Q5_K):
        pairs = [(_six_bits_of_scale(s), _six_bits_of_minimum(s)) for s in range(8)]
    elif kind is TensorType.Q3_K:
        pairs = [(_six_bits_of_half(2 * s), _six_bits_of_half(2 * s + 1)) for s in range(8)]
    else:
        return None
    low = [bit for side in (0, 1) for pair in pairs for bit in pair[side][:4]]
    high = [bit for side in (0, 1) for pair in pairs for bit in pair[side][4:]]
    return "group_scales", low + high


def _six_bits_of_scale(number: int) -> list[int]:
    """Return where the file has the bits of a scale of Q4_K (`decoders._scales_and_minima`)."""
    if number < 4:
        return [8 * number + bit for bit in range(6)]
    late = number - 4
    return [8 * (8 + late) + bit for bit in range(4)] + [8 * late + 6, 8 * late + 7]


def _six_bits_of_minimum(number: int) -> list[int]:
    if number < 4:
        return [8 * (4 + number) + bit for bit in range(6)]
    late = number - 4
    high = 8 * (4 + late) + 6
    return [8 * (8 + late) + 4 + bit for bit in range(4)] + [high, high + 1]


def _six_bits_of_half(number: int) -> list[int]:
    """Return where the file has the bits of a scale of Q3_K (`decoders.q3_k`)."""
    high = 8 * (8 + number % 4) + 2 * (number // 4)
    return [8 * (number % 8) + 4 * (number // 8) + bit for bit in range(4)] + [high, high + 1]


def _start(kind: TensorType, name: str) -> int:
    """Return the offset of a field in a block of the file."""
    places: Any = block_record(kind).fields
    return int(places[name][1])


def _piece_sources(kind: TensorType, field: Field) -> list[int]:
    """Return where, in a block whose bits were rearranged, each piece of a field begins."""
    start = _start(kind, field.name.split("+")[0])
    starts = [start + piece * field.width for piece in range(field.pieces)]
    if kind is TensorType.Q6_K and field.name == "low":
        # After the swaps bytes 0, 16, 32, 48 of a run hold sub-blocks 0, 2, 1, 3.
        starts = [starts[4 * (piece // 4) + (0, 2, 1, 3)[piece % 4]] for piece in range(8)]
    return starts


@cache
def _functions(kind: TensorType) -> tuple[Compiled, Compiled]:
    """Return what packs rows of a type in `PACKED`, and what unpacks them."""
    # Here, because this loads Numba, and who only asks for fields can do without.
    from strata_nb.packing_moves import pack_function, unpack_function

    pieces = [
        PieceMove(source, field.width, field.before, field.pieces, number)
        for field in fields(kind).values()
        for number, source in enumerate(_piece_sources(kind, field))
    ]
    moved = _moved_bits(kind)
    offset, bits = (0, []) if moved is None else (_start(kind, moved[0]), moved[1])
    moves = Moves(
        block_layout(kind).size_bytes, tuple(pieces), tuple(_swaps(kind)), offset, tuple(bits)
    )
    name = kind.name.lower()
    return (
        pack_function(name, moves, GROUP_ROWS),
        unpack_function(name, moves, GROUP_ROWS),
    )


# -- packing ---------------------------------------------------------------------------------------


def pack(
    kind: TensorType, raw: Bytes, rows: int, row_values: int, out: Bytes | None = None
) -> Bytes:
    """Return the packed form of `rows` rows of `row_values` values: uint8 (bytes,).

    `raw` holds the rows as the file has them, contiguous; it is not changed. `out`, where given, is
    a contiguous uint8 array of as many bytes, does not overlap `raw`, and is returned. A tensor may
    be packed in runs of rows; every run but the last is a multiple of `GROUP_ROWS`. The GIL is
    released. ValueError if the bytes do not fit the shape.
    """
    return _move(kind, raw, rows, row_values, out, packs=True)


def unpack(
    kind: TensorType, packed: Bytes, rows: int, row_values: int, out: Bytes | None = None
) -> Bytes:
    """Return the rows as the file has them: the exact inverse of `pack`, under the same rules."""
    return _move(kind, packed, rows, row_values, out, packs=False)


def _move(
    kind: TensorType, source: Bytes, rows: int, row_values: int, out: Bytes | None, *, packs: bool
) -> Bytes:
    size = rows * row_bytes(kind, row_values)
    _check("source", source, size)
    if out is None:
        out = np.empty(size, np.uint8)
    _check("out", out, size)
    if kind not in PACKED:
        out[...] = source.reshape(-1)
        return out
    function = packer(kind) if packs else _functions(kind)[1]
    blocks = row_values // block_layout(kind).values
    function(source.ctypes.data, out.ctypes.data, rows, blocks)
    return out


def packer(kind: TensorType) -> Compiled:
    """Return the compiled half of `pack` for a type in `PACKED`: `packing_moves.pack_function`."""
    return _functions(kind)[0]


def _check(name: str, array: Bytes, size: int) -> None:
    if array.dtype != np.uint8 or not array.flags.c_contiguous or array.size != size:
        raise ValueError(
            f"{name} has {array.size} elements of {array.dtype}; "
            f"contiguous uint8 ({size},) is needed"
        )
