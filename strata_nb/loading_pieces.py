"""Read pieces of a file's tensors with several threads and put them, packed, where they belong.

Pieces come in *groups*, and who reads them is told when a group is whole: then it can be used,
while the threads go on with the next ones. They run compiled code (`loading_loop.py`) from which
they come back to Python for what is rare, or wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

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


Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Cut a tensor, or some matrices of a stack, into pieces of whole rows.

    Of each piece, int64 (pieces,):
    groups         what it belongs to
    starts, sizes  bytes of the tensor that it is made of
    rows           that these are
    targets        where it goes: packed, or as float32 where `as_float32`
    """

    tensor: TensorInfo
    as_float32: bool
    groups: Numbers
    starts: Numbers
    sizes: Numbers
    rows: Numbers
    targets: Numbers

    @property
    def target_ends(self) -> Numbers:
        """Where the pieces end, at their places."""
        if self.as_float32:
            return self.targets + FLOAT_BYTES * prod(self.tensor.shape)
        return self.targets + self.sizes


def vector_pieces(tensor: TensorInfo, target: int) -> Pieces:
    """Return the one piece of a vector, which kernels read as float32; it is of group 0."""
    numbers = (np.array([number]) for number in (0, 0, tensor.size_bytes, 1, target))
    return Pieces(tensor, True, *numbers)


def matrix_pieces(tensor: TensorInfo, targets: Numbers, groups: Numbers) -> Pieces:
    """Return the pieces of a stack of matrices, or of one.

    targets, groups   of each matrix
    """
    outputs, values = tensor.shape[-2:]
    row = row_bytes(tensor.type, values)
    step = max(1, PIECE_BYTES // (row * GROUP_ROWS)) * GROUP_ROWS
    firsts = np.arange(0, outputs, step)
    rows = np.tile(np.minimum(step, outputs - firsts), len(targets))
    starts = np.add.outer(np.arange(len(targets)) * outputs, firsts).ravel() * row
    return Pieces(
        tensor,
        False,
        np.repeat(groups, len(firsts)),
        starts,
        rows * row,
        rows,
        np.add.outer(targets, firsts * row).ravel(),
    )


class Reading:
    """Own the threads that bring pieces to their places, from now on, group after group.

    groups  that there are; each has pieces
    ahead   groups that the threads may bring beyond those that the caller waited for and let go on
            from (`allow`); None: all
    keep_cached   whether the system may keep what was read of the file

    The caller's thread learns of what they do in `wait_for`. What ends it there, an error of a
    thread or of `progress`, or Ctrl-C, stops nobody: `close` does, and is the caller's duty.
    """

    def __init__(
        self,
        file: GGUFFile,
        pieces: Sequence[Pieces],
        groups: int,
        *,
        threads: int,
        ahead: int | None,
        keep_cached: bool,
        progress: LoadProgress,
    ) -> None:
        self._file, self._keep_cached, self._progress = file, keep_cached, progress
        self._ahead = groups if ahead is None else ahead
        self._runs = pieces
        kinds = sorted({run.tensor.type for run in pieces} & PACKED)
        self._packers = np.array([address_of(packer(kind)) for kind in kinds], np.int64)
        self._table = self._tabulated(kinds)
        self._left = np.bincount(self._table[:, loop.GROUP], minlength=groups)
        self._ends = np.cumsum(self._left)
        self._state = np.zeros(loop.STATE_WORDS, np.int64)
        self._threads = np.zeros((threads, loop.LINE_WORDS), np.int64)
        self._job = np.zeros(loop.JOB_WORDS, np.int64)
        self._job[[loop.STATE, loop.PIECES, loop.PACKERS, loop.LEFT]] = [
            array.ctypes.data for array in (self._state, self._table, self._packers, self._left)
        ]
        self._job[loop.COUNT] = len(self._table)
        self._job[loop.READ] = host_pages.function_address("pread")
        self._job[loop.SLEEP] = host_pages.function_address("usleep")
        if not keep_cached:
            self._job[loop.FORGET] = host_pages.function_address("posix_fadvise")
        for function in loop.FUNCTIONS:
            function.made()  # in this thread, where Ctrl-C is heard
        packed = self._table[:, loop.KIND] >= 0
        self._buffer_bytes = int(self._table[packed, loop.SIZE].max(initial=0))
        self._told_bytes = 0
        self._began_s = time.perf_counter()
        self._ended_s = [self._began_s] * threads
        self.allow(0)
        self._pool = ThreadPoolExecutor(threads, "loading")
        try:
            self._workers = self._submitted(threads)
        except BaseException:
            self.close()
            raise

    @property
    def read_s(self) -> float:
        """How many seconds the threads took, once they have ended."""
        return max(self._ended_s) - self._began_s

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

    def _tabulated(self, kinds: Sequence[TensorType]) -> Numbers:
        """Return the pieces as the compiled threads read them: by group, then as the file has
        them."""
        tables: list[Numbers] = []
        for number, run in enumerate(self._runs):
            kind = run.tensor.type
            table = np.zeros((len(run.starts), loop.PIECE_WORDS), np.int64)
            table[:, loop.DESCRIPTOR] = self._file.descriptor(run.tensor.name)
            table[:, loop.POSITION] = run.tensor.offset + run.starts
            table[:, loop.SIZE] = run.sizes
            table[:, loop.TARGET] = run.targets
            table[:, loop.ROWS] = run.rows
            table[:, loop.GROUP] = run.groups
            table[:, loop.RUN] = number
            table[:, loop.KIND] = loop.AS_IT_IS
            if run.as_float32 and kind is not TensorType.F32:
                table[:, loop.KIND] = loop.BY_PYTHON
            elif not run.as_float32 and kind in kinds:
                table[:, loop.KIND] = kinds.index(kind)
                table[:, loop.BLOCKS] = run.tensor.shape[-1] // block_layout(kind).values
            tables.append(table)
        shards = [np.full(len(run.starts), run.tensor.shard) for run in self._runs]
        whole = np.concatenate(tables)
        keys = (whole[:, loop.POSITION], np.concatenate(shards), whole[:, loop.GROUP])
        return np.ascontiguousarray(whole[np.lexsort(keys)])

    def _work(self, number: int) -> None:
        """Be a thread."""
        own = self._threads[number]
        job, words = int(self._job.ctypes.data), int(own.ctypes.data)
        try:
            buffer = np.empty(self._buffer_bytes, np.uint8)
            place = int(buffer.ctypes.data)
            loop.bring_pieces(job, words, place)
            while (back := int(own[loop.HANDED_BACK])) >= 0:
                self._bring(back)
                loop.note_piece(job, words, back)
                loop.bring_pieces(job, words, place)
        except BaseException:
            self._state[loop.STOP] = 1
            raise
        finally:
            self._ended_s[number] = time.perf_counter()

    def _bring(self, number: int) -> None:
        """Bring a piece that the compiled loop handed back; raises what is wrong with the file."""
        words = self._table[number].tolist()
        run, rows, target = self._runs[words[loop.RUN]], words[loop.ROWS], words[loop.TARGET]
        tensor, start = run.tensor, words[loop.POSITION] - run.tensor.offset
        raw = np.empty(words[loop.SIZE], np.uint8)
        self._file.read_into(raw, tensor.name, start)
        if not self._keep_cached:
            self._file.forget_cached(tensor.name, start, len(raw))
        if run.as_float32:
            out = memory_view(target, FLOAT_BYTES * prod(tensor.shape))
            dequantise(tensor.type, raw, out.view(np.float32))
        else:
            pack(tensor.type, raw, rows, tensor.shape[-1], memory_view(target, len(raw)))

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
