"""Read pieces of a file's tensors with several threads and put them, packed, where they belong."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.addresses import memory_view
from strata_nb.errors import StrataError
from strata_nb.execution import ExecutionDriver
from strata_nb.formats import dequantise, row_bytes
from strata_nb.gguf import GGUFFile, TensorInfo
from strata_nb.packing import GROUP_ROWS, pack
from strata_nb.progress import Progress

PIECE_BYTES = 1 << 20  # read and packed at a time: a worker's buffer stays in its core's cache
FLOAT_BYTES = 4

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


Deliver = Callable[[Piece, Bytes], None]  # with the bytes of the file


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


def to_host(piece: Piece, raw: Bytes) -> None:
    """Bring a piece to an address of the host."""
    convert(piece, raw, piece.target)


def to_device(driver: ExecutionDriver, device: int, size: int, work: ExitStack) -> Deliver:
    """Return how one worker brings pieces of at most `size` bytes to a device."""
    staging = driver.allocate_host(size)
    work.callback(driver.free_host, staging)
    stream = driver.stream_create(device)
    work.callback(driver.stream_destroy, stream)

    def deliver(piece: Piece, raw: Bytes) -> None:
        convert(piece, raw, staging)
        driver.copy_async(piece.target, staging, piece.target_bytes, stream)
        driver.stream_synchronize(stream)

    return deliver


def carry_out(
    file: GGUFFile,
    pieces: Sequence[Piece],
    deliver: Sequence[Deliver],
    keep_cached: bool,
    progress: LoadProgress,
) -> None:
    """Read and deliver all pieces, with one worker thread for each of `deliver`.

    When this returns or raises, no worker runs any more. The first error of a worker is raised, as
    is what `progress` raises.
    """
    in_file_order = iter(
        sorted(pieces, key=lambda piece: (piece.tensor.shard, piece.tensor.offset + piece.start))
    )
    taking = threading.Lock()
    stop = threading.Event()
    done: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # bytes; None: a worker ended
    largest = max((piece.size_bytes for piece in pieces), default=0)

    def work(deliver: Deliver) -> None:
        try:
            buffer = np.empty(largest, np.uint8)
            while not stop.is_set():
                with taking:
                    piece = next(in_file_order, None)
                if piece is None:
                    break
                raw = buffer[: piece.size_bytes]
                file.read_into(raw, piece.tensor.name, piece.start)
                if not keep_cached:
                    file.forget_cached(piece.tensor.name, piece.start, piece.size_bytes)
                deliver(piece, raw)
                done.put(piece.size_bytes)
        finally:
            stop.set()
            done.put(None)

    pool = ThreadPoolExecutor(len(deliver), "loading")
    try:
        workers = _submitted(pool, work, deliver)
        running = len(workers)
        while running:
            size = done.get()
            if size is None:
                running -= 1
            else:
                progress.add(size)
    finally:
        stop.set()
        _join(pool)
    for worker in workers:
        worker.result()


def _submitted(
    pool: ThreadPoolExecutor, work: Callable[[Deliver], None], deliver: Sequence[Deliver]
) -> list[Future[None]]:
    """Start the workers, as many as the system allows."""
    workers: list[Future[None]] = []
    for each in deliver:
        try:
            workers.append(pool.submit(work, each))
        except RuntimeError as error:  # no more threads
            if not workers:
                raise StrataError(
                    f"no thread can be started to load the model: {error}",
                    hint="end other programs, or raise the limit of threads (ulimit -u)",
                ) from error
            break
    return workers


def _join(pool: ThreadPoolExecutor) -> None:
    """Wait until no worker runs: what they write to is freed next, so Ctrl-C must wait too."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            pool.shutdown()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
