"""Keep keys and values in blocks of 64 cells that sequences hold by address.

    reservation   | block 0 | block 1 | block 2 | . . .     a mapped prefix, cut into blocks
    table         row 0: address of block 2, of block 0     a sequence is a row of addresses
                  row 1: address of block 2                 and may share blocks with another

A block holds its cells for every layer (kv_layout.py), so one address a block is all that a kernel
looks up, and several sequences, shared beginnings and a window over the past are changes of the
table. One range for each layer and part was rejected: each wastes a part of a chunk, 120 MiB for a
model of 135M.

What is stored is rounded by kernels, never here. This file maps no memory either: the ledger says
with `place` and `resize` which addresses may be used.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from strata_nb.cache.kv_layout import BLOCK_CELLS, KVLayout, blocks_for
from strata_nb.errors import ConfigError, OutOfDeviceMemory, RuleViolation
from strata_nb.execution import ExecutionDriver
from strata_nb.shared_tables import SharedTable


@dataclass(slots=True)
class _Sequence:
    """The cells [0, length) are written; [length, room) may be written: nobody else sees them."""

    length: int = 0
    room: int = 0
    blocks: list[int] = field(default_factory=list)


class KVCache:
    """Own the blocks of one device and the table that kernels read.

    table   int64 (sequences, blocks of a full context): addresses of a sequence's blocks, 0 behind
            the last. The array stays the same object; a row is a sequence's number. Written
            through `blocks` alone, which counts its changes

    A step is `extend` (room for its rows), then kernels that write the new cells and read all, then
    `advance`. A step that fails is forgotten by not calling `advance`. Call between steps, on the
    thread that enqueues them: a block that is freed here is written again only by later work of the
    same stream. Cells that were never written hold arbitrary bytes [14].
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        context: int,
        sequences: int,
        driver: ExecutionDriver,
        stream: int,
    ) -> None:
        self.layout = layout
        self.context = context
        self.blocks = SharedTable(np.zeros((sequences, blocks_for(context)), np.int64))
        self.table = self.blocks.array
        self.usable_blocks = 0
        self._base = 0
        self._driver = driver
        self._stream = stream
        self._free: list[int] = []  # a heap: low blocks first, so that the end can be given up
        self._holders: Counter[int] = Counter()  # block -> sequences that hold it
        self._open: dict[int, _Sequence] = {}

    # For the ledger.

    def place(self, base: int) -> None:
        """Take the first address of the reservation; nothing of it is usable yet."""
        self._base = base

    def resize(self, usable_bytes: int) -> None:
        """Use the blocks that lie whole in the first `usable_bytes`, and name no other.

        Raises RuleViolation, and changes nothing, where a sequence holds one beyond.
        """
        usable = usable_bytes // self.layout.block_bytes
        highest = max(self._holders, default=-1)
        if usable <= highest:
            raise RuleViolation(16, f"{usable} K/V blocks stay, block {highest} is held")
        self.usable_blocks = usable
        self._free = [block for block in range(usable) if block not in self._holders]

    @property
    def live_blocks(self) -> int:
        """How many blocks sequences hold."""
        return len(self._holders)

    def compact(self, usable: int) -> int:
        """Copy held blocks to free ones until all are among the first `usable`, and wait.

        Returns how many were copied. The old ones are free, but older work may still read them.
        Raises RuleViolation where fewer stay than are held, and DriverError; then nothing changed.
        """
        if usable < self.live_blocks:
            raise RuleViolation(16, f"{usable} K/V blocks stay, {self.live_blocks} are held")
        stray = sorted(block for block in self._holders if block >= usable)
        room = sorted(block for block in self._free if block < usable)
        place = dict(zip(stray, room, strict=False))
        size = self.layout.block_bytes
        for old, new in place.items():
            self._driver.copy_async(self._address(new), self._address(old), size, self._stream)
        if place:
            self._driver.stream_synchronize(self._stream)
        for number, held in self._open.items():
            for index, block in enumerate(held.blocks):
                if block in place:
                    held.blocks[index] = place[block]
                    self.blocks[number, index] = self._address(place[block])
        for old, new in place.items():
            self._holders[new] = self._holders.pop(old)
        if place:
            self._free = [n for n in range(self.usable_blocks) if n not in self._holders]
        return len(place)

    def clear(self) -> None:
        """Close every sequence."""
        for sequence in list(self._open):
            self.close_sequence(sequence)

    # For sessions.

    @property
    def free_cells(self) -> int:
        """Cells of the blocks that no sequence holds."""
        return len(self._free) * BLOCK_CELLS

    def blocks_wanted(self, cells: Mapping[int, int]) -> int:
        """Return how many blocks there must be so that each sequence can be extended by so many.

        A block that several sequences copy may be counted once too often. Changes nothing.
        """
        missing = sum(sum(self._missing(number, count)) for number, count in cells.items())
        return self.live_blocks + missing

    def has_room(self, sequence: int, cells: int) -> bool:
        """Return whether `extend` by so many cells would take no block."""
        held = self._open[sequence]
        end = held.length + cells
        if not 0 < cells <= len(held.blocks) * BLOCK_CELLS - held.length or end > self.context:
            return False
        return self._holders[held.blocks[held.length // BLOCK_CELLS]] == 1

    def is_open(self, sequence: int) -> bool:
        """Return whether there is such a sequence."""
        return sequence in self._open

    def length(self, sequence: int) -> int:
        """Return how many cells are written."""
        return self._open[sequence].length

    def open_sequence(self) -> int:
        """Return the number of a new, empty sequence; ConfigError where all rows are taken."""
        rows = len(self.table)
        number = next((row for row in range(rows) if row not in self._open), None)
        if number is None:
            raise ConfigError(
                f"{rows} sequences are open, as many as there is a table for",
                hint="close one first",
            )
        self._open[number] = _Sequence()
        return number

    def close_sequence(self, sequence: int) -> None:
        """Forget a sequence; its blocks are free where no other holds them."""
        self._drop_behind(sequence, 0)
        del self._open[sequence]

    def extend(self, sequence: int, cells: int) -> None:
        """Make room for `cells` cells behind those written, or raise and change nothing.

        A block that another sequence holds too is copied before its free cells are given away.
        Waits for that copy. ConfigError beyond the context; OutOfDeviceMemory without free blocks.
        """
        held = self._open[sequence]
        end = held.length + cells
        if cells < 0 or end > self.context:
            raise ConfigError(
                f"{cells} more cells behind {held.length}: the context has {self.context}",
                hint="a larger --ctx-size, where the model allows it",
            )
        copies, missing = self._missing(sequence, cells)
        if missing + copies > len(self._free):
            numbers = {
                "cells": BLOCK_CELLS * (missing + copies),
                "free": self.free_cells,
                "of": BLOCK_CELLS * self.usable_blocks,
            }
            raise OutOfDeviceMemory(
                "extend", 0, "the K/V is full", numbers=numbers, hint="end another conversation"
            )
        if copies:
            self._own(sequence, held.length // BLOCK_CELLS)
        for _ in range(missing):
            # In this order: what ends this half way, such as Ctrl-C, loses no block.
            self._hold(sequence, len(held.blocks), self._free[0])
            heapq.heappop(self._free)
        held.room = max(held.room, end)

    def advance(self, sequence: int, cells: int) -> None:
        """Count `cells` of the cells that there is room for as written, in every layer."""
        held = self._open[sequence]
        if not 0 <= cells <= held.room - held.length:
            raise RuleViolation(14, f"{cells} cells written, room was for {held.room}")
        held.length += cells

    def rewind(self, sequence: int, length: int) -> None:
        """Keep the first `length` cells; blocks behind them are free where no other holds them."""
        held = self._open[sequence]
        if not 0 <= length <= held.length:
            raise ConfigError(
                f"cannot rewind to {length}: the K/V holds {held.length} cells",
                hint=f"a length from 0 to {held.length}",
            )
        self._drop_behind(sequence, blocks_for(length))
        held.length = held.room = length

    def fork(self, sequence: int, length: int) -> int:
        """Return a new sequence that begins with the first `length` cells; copies nothing.

        The room that either had behind its cells is gone: `extend` it before it is written.
        """
        held = self._open[sequence]
        if not 0 <= length <= held.length:
            raise ConfigError(
                f"cannot fork at {length}: the K/V holds {held.length} cells",
                hint=f"a length from 0 to {held.length}",
            )
        number = self.open_sequence()
        self.rewind(sequence, held.length)
        for index, block in enumerate(held.blocks[: blocks_for(length)]):
            self._hold(number, index, block)
        self._open[number].length = self._open[number].room = length
        return number

    def check_integrity(self, covers: Callable[[int, int], bool]) -> None:
        """Raise RuleViolation unless table, sequences and free blocks say the same.

        covers   whether an address and a size lie in memory that tables may name
        """
        holders: Counter[int] = Counter()
        wanted = np.zeros_like(self.table)
        for number, held in self._open.items():
            if not 0 <= held.length <= held.room <= len(held.blocks) * BLOCK_CELLS:
                raise RuleViolation(14, f"sequence {number}: {held}")
            holders.update(held.blocks)
            wanted[number, : len(held.blocks)] = [self._address(block) for block in held.blocks]
        if not np.array_equal(wanted, self.table):
            raise RuleViolation(16, "the K/V table does not name what the sequences hold")
        if holders != self._holders:
            raise RuleViolation(9, f"K/V blocks are held {holders}, counted {self._holders}")
        if sorted([*self._free, *holders]) != list(range(self.usable_blocks)):
            raise RuleViolation(9, f"of {self.usable_blocks} K/V blocks {self._free} are free")
        for number, held in self._open.items():
            for index in range(held.length // BLOCK_CELLS, len(held.blocks)):
                writable = held.room > max(held.length, index * BLOCK_CELLS)
                if writable and holders[held.blocks[index]] > 1:
                    raise RuleViolation(3, f"sequence {number} may write a block that others hold")
        for block in holders:
            if not covers(self._address(block), self.layout.block_bytes):
                raise RuleViolation(16, f"K/V block {block} has no memory")

    def _missing(self, sequence: int, cells: int) -> tuple[bool, int]:
        """Return whether the block of the next cell must be copied, and how many are appended."""
        held = self._open[sequence]
        last = held.length // BLOCK_CELLS
        copies = cells > 0 and last < len(held.blocks) and self._holders[held.blocks[last]] > 1
        return copies, max(0, blocks_for(held.length + cells) - len(held.blocks))

    def _address(self, block: int) -> int:
        return self._base + block * self.layout.block_bytes

    def _hold(self, sequence: int, index: int, block: int) -> None:
        """Append a block to a sequence, or exchange one of its blocks."""
        blocks = self._open[sequence].blocks
        blocks[index : index + 1] = [block]
        self._holders[block] += 1
        self.blocks[sequence, index] = self._address(block)

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            del self._holders[block]
            heapq.heappush(self._free, block)

    def _drop_behind(self, sequence: int, count: int) -> None:
        """Keep the first `count` blocks of a sequence."""
        held = self._open[sequence]
        if count >= len(held.blocks):
            return
        self.blocks[sequence, count:] = 0
        for block in held.blocks[count:]:
            self._let_go(block)
        del held.blocks[count:]

    def _own(self, sequence: int, index: int) -> None:
        """Give a sequence a copy of a block of its own, whole, in the place of a shared one."""
        shared, block = self._open[sequence].blocks[index], self._free[0]
        size = self.layout.block_bytes
        self._driver.copy_async(self._address(block), self._address(shared), size, self._stream)
        self._driver.stream_synchronize(self._stream)
        heapq.heappop(self._free)
        self._hold(sequence, index, block)
        self._let_go(shared)
