"""Read pieces of a file's tensors with several threads and put them, packed, where they belong.

Pieces come in *groups*, and who reads them is told when a group is whole: then it can be used,
while the threads go on with the next ones. They run compiled code (`loading_loop.py`) from which
they come back to Python for what is rare, or wrong.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb import host_pages
from strata_nb import loading_loop as loop
from strata_nb.addresses import memory_view
from strata_nb.compiling import address_of
from strata_nb.errors import StrataError
from strata_nb.formats import TensorType, block_layout, dequantise, row_bytes
from strata_nb.gguf import GGUFFile, TensorInfo
from strata_nb.packing import GROUP_ROWS, PACKED, pack, packer
from strata_nb.progress import Progress

PIECE_BYTES = 1 << 20  # read and packed at a time: a thread's buffer stays in its core's cache
FLOAT_BYTES = 4
LOOK_S = 0.001  # between looks at what the threads have done

Bytes = npt.NDArray[np.uint8]


class LoadProgress:
    """Count the bytes of a file that were loaded, over several loads.

    total_bytes   of all of them
    report        is called with (done, total) after each piece, on the thread that called the load;
                  what it raises ends the load
    """

    def __init__(self, total_bytes: int, report: Progress | None = None) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._report = report

    def add(self, size: int) -> None:
        self.done_bytes += size
        if self._report is not None:
            self._report(self.done_bytes, self.total_bytes)


class Piece(NamedTuple):
    """Some rows of a tensor: `size_bytes` from byte `start` on, and the address they go to.

    They are packed, or become float32 where `as_float32`.
    """

    tensor: TensorInfo
    start: int
    size_bytes: int
    rows: int
    target: int
    target_bytes: int
    as_float32: bool

    @property
    def position(self) -> int:
        """Where its bytes begin in the file of its tensor."""
        return self.tensor.offset + self.start


def vector_piece(tensor: TensorInfo, target: int) -> Piece:
    """Return the one piece of a vector, which kernels read as float32."""
    size = FLOAT_BYTES * prod(tensor.shape)
    return Piece(tensor, 0, tensor.size_bytes, 1, target, size, True)


def matrix_pieces(tensor: TensorInfo, number: int, target: int) -> Iterator[Piece]:
    """Yield the pieces, in their order, of a matrix: the only one, or that number of a stack."""
    outputs, values = tensor.shape[-2:]
    row = row_bytes(tensor.type, values)
    start = number * outputs * row
    step = max(1, PIECE_BYTES // (row * GROUP_ROWS)) * GROUP_ROWS
    for first in range(0, outputs, step):
        rows = min(step, outputs - first)
        size = rows * row
        yield Piece(tensor, start + first * row, size, rows, target + first * row, size, False)


def convert(piece: Piece, raw: Bytes, address: int) -> None:
    """Write the piece as kernels read it."""
    out = memory_view(address, piece.target_bytes)
    if piece.as_float32:
        dequantise(piece.tensor.type, raw, out.view(np.float32))
    else:
        pack(piece.tensor.type, raw, piece.rows, piece.tensor.shape[-1], out)


class Reading:
    """Own the threads that bring groups of pieces to their places, from now on.

    ahead   groups that the threads may bring beyond those that the caller waited for and let go on
            from (`allow`); None: all
    keep_cached   whether the system may keep what was read of the file

    The caller's thread learns of what they do in `wait_for`. What ends it there, an error of a
    thread or of `progress`, or Ctrl-C, stops nobody: `close` does, and is the caller's duty.
    """

    def __init__(
        self,
        file: GGUFFile,
        groups: Sequence[Sequence[Piece]],
        *,
        threads: int,
        ahead: int | None,
        keep_cached: bool,
        progress: LoadProgress,
    ) -> None:
        self._file, self._keep_cached, self._progress = file, keep_cached, progress
        self._ahead = len(groups) if ahead is None else ahead
        self._pieces = [
            piece
            for group in groups
            for piece in sorted(group, key=lambda piece: (piece.tensor.shard, piece.position))
        ]
        self._ends = list(itertools.accumulate(len(group) for group in groups))
        self._left = np.array([len(group) for group in groups], np.int64)
        kinds = sorted({piece.tensor.type for piece in self._pieces} & PACKED)
        self._packers = np.array([address_of(packer(kind)) for kind in kinds], np.int64)
        self._table = self._tabulated(kinds, groups)
        self._state = np.zeros(loop.STATE_WORDS, np.int64)
        self._threads = np.zeros((threads, loop.LINE_WORDS), np.int64)
        self._job = np.zeros(loop.JOB_WORDS, np.int64)
        self._job[[loop.STATE, loop.PIECES, loop.PACKERS, loop.LEFT]] = [
            array.ctypes.data for array in (self._state, self._table, self._packers, self._left)
        ]
        self._job[loop.COUNT] = len(self._pieces)
        self._job[loop.READ] = host_pages.function_address("pread")
        self._job[loop.SLEEP] = host_pages.function_address("usleep")
        if not keep_cached:
            self._job[loop.FORGET] = host_pages.function_address("posix_fadvise")
        for function in loop.FUNCTIONS:
            function.made()  # in this thread, where Ctrl-C is heard
        packed = [piece for piece in self._pieces if piece.tensor.type in PACKED]
        self._buffer_bytes = max((piece.size_bytes for piece in packed), default=0)
        self._told_bytes = 0
        self.allow(0)
        self._pool = ThreadPoolExecutor(threads, "loading")
        try:
            self._workers = self._submitted(threads)
        except BaseException:
            self.close()
            raise

    def allow(self, groups: int) -> None:
        """Let the threads bring `ahead` groups beyond the first `groups` of them."""
        allowed = min(groups + self._ahead, len(self._ends))
        self._state[loop.LIMIT] = self._ends[allowed - 1] if allowed else 0

    def wait_for(self, group: int) -> None:
        """Wait until all pieces of a group are in their places; raise what a thread raised."""
        while self._left[group] > 0:
            for worker in self._workers:
                if worker.done():
                    worker.result()
            self._tell()
            time.sleep(LOOK_S)
        self._tell()

    def close(self) -> None:
        """Stop the threads after their pieces and wait for them; may be called twice.

        What they write to is freed next, so Ctrl-C waits too.
        """
        self._state[loop.STOP] = 1
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._pool.shutdown()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _tell(self) -> None:
        """Report what was brought since the last time."""
        done = int(self._threads[:, loop.DONE_BYTES].sum())
        if done > self._told_bytes:
            self._progress.add(done - self._told_bytes)
            self._told_bytes = done

    def _tabulated(
        self, kinds: Sequence[TensorType], groups: Sequence[Sequence[Piece]]
    ) -> npt.NDArray[np.int64]:
        """Return the pieces as the compiled threads read them."""
        rows = {kind: number for number, kind in enumerate(kinds)}
        descriptors: dict[int, int] = {}
        for piece in self._pieces:
            if piece.tensor.shard not in descriptors:
                descriptors[piece.tensor.shard] = self._file.descriptor(piece.tensor.name)
        table = np.zeros((len(self._pieces), loop.PIECE_WORDS), np.int64)
        table[:, loop.GROUP] = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        for number, piece in enumerate(self._pieces):
            kind = piece.tensor.type
            blocks = piece.tensor.shape[-1] // block_layout(kind).values if kind in rows else 0
            if piece.as_float32:
                row = loop.AS_IT_IS if kind is TensorType.F32 else loop.BY_PYTHON
            else:
                row = rows.get(kind, loop.AS_IT_IS)
            table[number, : loop.GROUP] = (
                descriptors[piece.tensor.shard],
                piece.position,
                piece.size_bytes,
                piece.target,
                piece.rows,
                blocks,
                row,
            )
        return table

    def _work(self, number: int) -> None:
        """Be a thread."""
        own = self._threads[number]
        job, words = int(self._job.ctypes.data), int(own.ctypes.data)
        try:
            buffer = np.empty(self._buffer_bytes, np.uint8)
            place = int(buffer.ctypes.data)
            loop.bring_pieces(job, words, place)
            while (back := int(own[loop.HANDED_BACK])) >= 0:
                self._bring(self._pieces[back])
                loop.note_piece(job, words, back)
                loop.bring_pieces(job, words, place)
        except BaseException:
            self._state[loop.STOP] = 1
            raise

    def _bring(self, piece: Piece) -> None:
        """Bring a piece that the compiled loop handed back; raises what is wrong with the file."""
        raw = np.empty(piece.size_bytes, np.uint8)
        self._file.read_into(raw, piece.tensor.name, piece.start)
        if not self._keep_cached:
            self._file.forget_cached(piece.tensor.name, piece.start, piece.size_bytes)
        convert(piece, raw, piece.target)

    def _submitted(self, threads: int) -> list[Future[None]]:
        """Start the threads, as many as the system allows."""
        workers: list[Future[None]] = []
        for number in range(threads):
            try:
                workers.append(self._pool.submit(self._work, number))
            except RuntimeError as error:  # no more threads
                if not workers:
                    raise StrataError(
                        f"no thread can be started to load the model: {error}",
                        hint="end other programs, or raise the limit of threads (ulimit -u)",
                    ) from error
                break
        return workers
