"""The compiled half of `packing.py`: for each type a function that packs rows, and its inverse.

That file's tables are turned into instructions here, one after the other, with every offset, mask
and shift a constant: a loop that reads the tables for each block takes six times as long. What only
moves goes from the file's block to its pieces directly; what is rearranged goes through a work
space of one block, which the compiler keeps in registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any
from zlib import crc32

from llvmlite import ir
from numba.core import cgutils, types

from strata_nb.compiling import Compiled, compiled, inlined, instruction
from strata_nb.packing_tables import Moves, PieceMove, Swap

_BYTE, _WORD, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def pack_function(name: str, moves: Moves, group_rows: int) -> Compiled:
    """Return what packs rows: (source, target, rows, blocks of a row), which do not overlap.

    name   of the type
    """
    return _function(f"pack_{name}", moves, group_rows, packs=True)


def unpack_function(name: str, moves: Moves, group_rows: int) -> Compiled:
    """Return the inverse of `pack_function`: (source, target, rows, blocks of a row)."""
    return _function(f"unpack_{name}", moves, group_rows, packs=False)


def _function(name: str, moves: Moves, group_rows: int, *, packs: bool) -> Compiled:
    size, move = moves.block_bytes, _block_move(moves, packs=packs)

    @inlined
    def move_group(rows: int, group: int, members: int, blocks: int) -> None:
        for member in range(members):
            for number in range(blocks):
                block = rows + (member * blocks + number) * size
                move(block, group, members, blocks, member, number)

    def move_rows(source: int, target: int, rows: int, blocks: int) -> None:
        plain, packed = (source, target) if packs else (target, source)
        whole = rows // group_rows * group_rows
        for first in range(0, whole, group_rows):
            skipped = first * blocks * size
            move_group(plain + skipped, packed + skipped, group_rows, blocks)
        if whole < rows:
            skipped = whole * blocks * size
            move_group(plain + skipped, packed + skipped, rows - whole, blocks)

    # The cache knows a function by its name, and does not see the tables.
    move_rows.__name__ = move_rows.__qualname__ = f"{name}_{crc32(repr(moves).encode()):08x}"
    return compiled("void(int64,int64,int64,int64)")(move_rows)


# -- the instructions for one block ----------------------------------------------------------------


def _block_move(moves: Moves, *, packs: bool) -> Any:
    """Return an instruction (block, group, members, blocks, member, number) that moves a block."""

    @instruction
    def move(
        _: Any, block: Any, group: Any, members: Any, blocks: Any, member: Any, number: Any
    ) -> Any:
        def generate(context: Any, builder: Any, _typed: Any, values: Sequence[Any]) -> Any:
            kind = ir.ArrayType(_BYTE, moves.block_bytes)
            space = builder.ptrtoint(cgutils.alloca_once(builder, kind), _LONG)
            (_emit_packing if packs else _emit_unpacking)(builder, moves, space, *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return move


def _emit_packing(builder: Any, moves: Moves, space: Any, block: Any, *place: Any) -> None:
    rearranged = _rearranged(moves)
    for offset in sorted(rearranged):
        _copy(builder, _at(builder, block, offset), _at(builder, space, offset), 4)
    for swap, words in _joined(moves.swaps):
        _emit_swap(builder, space, swap, words)
    _emit_bits(builder, space, moves.bits_offset, moves.bits)
    for piece in moves.pieces:
        source = space if piece.offset in rearranged else block
        target = _place_of(builder, piece, *place)
        _copy(builder, _at(builder, source, piece.offset), target, piece.width)


def _emit_unpacking(builder: Any, moves: Moves, space: Any, block: Any, *place: Any) -> None:
    rearranged = _rearranged(moves)
    for piece in moves.pieces:
        target = space if piece.offset in rearranged else block
        source = _place_of(builder, piece, *place)
        _copy(builder, source, _at(builder, target, piece.offset), piece.width)
    inverse = [0] * len(moves.bits)
    for position, origin in enumerate(moves.bits):
        inverse[origin] = position
    _emit_bits(builder, space, moves.bits_offset, inverse)
    for swap, words in reversed(list(_joined(moves.swaps))):
        _emit_swap(builder, space, swap, words)
    for offset in sorted(rearranged):
        _copy(builder, _at(builder, space, offset), _at(builder, block, offset), 4)


def _rearranged(moves: Moves) -> set[int]:
    """Return the offsets of the 32-bit words of a block in which bits move."""
    words = {
        offset + inside
        for swap in moves.swaps
        for offset in (swap.first, swap.second)
        for inside in range(0, swap.width, 4)
    }
    return words | {moves.bits_offset + 4 * word for word in range(len(moves.bits) // 32)}


def _joined(swaps: Iterable[Swap]) -> Iterator[tuple[Swap, int]]:
    """Yield swaps of the words that follow each other as one, with the number of its words."""
    first: Swap | None = None
    words = 0
    for swap in swaps:
        if first is not None and swap == first._replace(
            first=first.first + words * swap.width, second=first.second + words * swap.width
        ):
            words += 1
            continue
        if first is not None:
            yield first, words
        first, words = swap, 1
    if first is not None:
        yield first, words


def _emit_swap(builder: Any, space: Any, swap: Swap, words: int) -> None:
    word = ir.IntType(8 * swap.width)
    kind = word if words == 1 else ir.VectorType(word, words)
    mask = swap.mask if swap.width == 4 else swap.mask * 0x1_0000_0001

    def constant(number: int) -> Any:
        return ir.Constant(kind, number if words == 1 else [number] * words)

    first, second = (
        _pointer(builder, _at(builder, space, offset), kind) for offset in (swap.first, swap.second)
    )
    left, right = _load(builder, first), _load(builder, second)
    shift = constant(swap.shift)
    change = builder.and_(builder.xor(builder.lshr(left, shift), right), constant(mask))
    _store(builder, builder.xor(left, builder.shl(change, shift)), first)
    _store(builder, builder.xor(right, change), second)


def _emit_bits(builder: Any, space: Any, offset: int, bits: Sequence[int]) -> None:
    """Put bit `bits[n]` of a field at bit n; those that move together do so in one step."""
    pointers = [
        _pointer(builder, _at(builder, space, offset + 4 * word), _WORD)
        for word in range(len(bits) // 32)
    ]
    words = [_load(builder, pointer) for pointer in pointers]
    sums: list[Any] = [None] * len(words)

    def step(position: int) -> tuple[int, int, int]:
        """Return target word, source word and how far a bit moves up."""
        return position // 32, bits[position] // 32, position % 32 - bits[position] % 32

    for (target, source, distance), moved in groupby(sorted(range(len(bits)), key=step), step):
        mask = sum(1 << position % 32 for position in moved)
        value = words[source]
        if distance > 0:
            value = builder.shl(value, ir.Constant(_WORD, distance))
        elif distance < 0:
            value = builder.lshr(value, ir.Constant(_WORD, -distance))
        value = builder.and_(value, ir.Constant(_WORD, mask))
        sums[target] = value if sums[target] is None else builder.or_(sums[target], value)
    for pointer, value in zip(pointers, sums, strict=True):
        _store(builder, value, pointer)


def _place_of(
    builder: Any, piece: PieceMove, group: Any, members: Any, blocks: Any, member: Any, number: Any
) -> Any:
    """Return the address of a piece of a row's block in its group."""
    before = builder.mul(builder.mul(blocks, members), _number(piece.before))
    along = builder.add(builder.mul(number, _number(piece.per_block)), _number(piece.number))
    inside = builder.mul(builder.add(builder.mul(along, members), member), _number(piece.width))
    return builder.add(group, builder.add(before, inside))


def _copy(builder: Any, source: Any, target: Any, size: int) -> None:
    """Copy 1, 2, 4, 8 or 16 bytes."""
    kind = ir.VectorType(_LONG, 2) if size == 16 else ir.IntType(8 * size)
    value = _load(builder, _pointer(builder, source, kind))
    _store(builder, value, _pointer(builder, target, kind))


def _number(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, _number(offset))


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 1
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, pointer).align = 1
