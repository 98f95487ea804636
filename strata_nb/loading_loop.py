"""The compiled half of `loading_pieces.py`: what each thread does with the pieces of a file.

A thread takes the next piece, reads it, packs it to its place and counts it, until none is left.
Nothing here needs the GIL. Two calls of Python for each piece would be cheap for one thread; but
sixteen threads that hand the GIL on with each call wait for each other most of the time, because a
piece is read and packed in less time than it takes to wake a thread.

What a thread cannot bring, it hands back to Python: a piece that must become float32, and one that
was not read whole.
"""

from __future__ import annotations

import numpy as np

from strata_nb.compiling import compiled, inlined
from strata_nb.raw_memory import (
    add_atomic,
    call_address,
    call_for_number,
    load_atomic,
    load_i64,
    store_atomic,
)

# Words of the job, which all threads share and nobody changes.
STATE, PIECES, COUNT, PACKERS, LEFT = range(5)
READ, SLEEP, FORGET, JOB_WORDS = range(5, 9)  # functions of C; `FORGET` is 0 where the cache stays
# Words of the state, each at the beginning of a cache line of its own.
LINE_WORDS = 8
NEXT, LIMIT, STOP, STATE_WORDS = range(0, 4 * LINE_WORDS, LINE_WORDS)
# Words of a thread: bytes that it brought, and the piece that it hands back.
DONE_BYTES, HANDED_BACK = range(2)
# Columns of a piece. `KIND` is the number of a packer, or one of the two below;
# `RUN` is Python's.
DESCRIPTOR, POSITION, SIZE, TARGET, ROWS, BLOCKS, KIND, GROUP, RUN, PIECE_WORDS = range(10)
AS_IT_IS, BY_PYTHON = -1, -2

_WAIT_US = 100  # between looks at a limit: a fraction of what a piece takes
_DROP = 4  # POSIX_FADV_DONTNEED, <fcntl.h>


@inlined
def _note(job: int, thread: int, number: int) -> None:
    """Count a piece that is in its place: its bytes first, so that a whole group has all of its."""
    piece = load_i64(job + 8 * PIECES) + 8 * PIECE_WORDS * number
    add_atomic(thread + 8 * DONE_BYTES, load_i64(piece + 8 * SIZE))
    add_atomic(load_i64(job + 8 * LEFT) + 8 * load_i64(piece + 8 * GROUP), -1)


@inlined
def _may_begin(job: int, number: int) -> bool:
    """Wait until a piece may be begun; return whether it still shall be."""
    state = load_i64(job + 8 * STATE)
    while load_atomic(state + 8 * STOP) == 0:
        if number < load_atomic(state + 8 * LIMIT):
            return True
        call_for_number(load_i64(job + 8 * SLEEP), (np.int64(_WAIT_US),))
    return False


@inlined
def _is_read(job: int, piece: int, place: int) -> bool:
    """Read the bytes of a piece; return whether they all came."""
    size, got = load_i64(piece + 8 * SIZE), 0
    while got < size:
        count = call_for_number(
            load_i64(job + 8 * READ),
            (
                load_i64(piece + 8 * DESCRIPTOR),
                place + got,
                size - got,
                load_i64(piece + 8 * POSITION) + got,
            ),
        )
        if count <= 0:
            return False
        got += count
    if load_i64(job + 8 * FORGET):
        call_for_number(
            load_i64(job + 8 * FORGET),
            (
                load_i64(piece + 8 * DESCRIPTOR),
                load_i64(piece + 8 * POSITION),
                size,
                np.int64(_DROP),
            ),
        )
    return True


@compiled("void(int64,int64,int64)")
def bring_pieces(job: int, thread: int, buffer: int) -> None:
    """Bring pieces until none is left, the job is stopped, or one must be handed back.

    thread   address of this thread's words; `HANDED_BACK` is set before this returns: -1 for none
    buffer   for the bytes of the largest piece that is packed
    """
    store_atomic(thread + 8 * HANDED_BACK, -1)
    next_piece = load_i64(job + 8 * STATE) + 8 * NEXT
    while True:
        number = add_atomic(next_piece, 1)
        if number >= load_i64(job + 8 * COUNT) or not _may_begin(job, number):
            return
        piece = load_i64(job + 8 * PIECES) + 8 * PIECE_WORDS * number
        kind, target = load_i64(piece + 8 * KIND), load_i64(piece + 8 * TARGET)
        if kind == BY_PYTHON or not _is_read(job, piece, target if kind == AS_IT_IS else buffer):
            store_atomic(thread + 8 * HANDED_BACK, number)
            return
        if kind != AS_IT_IS:
            packer = load_i64(load_i64(job + 8 * PACKERS) + 8 * kind)
            rows, blocks = load_i64(piece + 8 * ROWS), load_i64(piece + 8 * BLOCKS)
            call_address(packer, (buffer, target, rows, blocks))
        _note(job, thread, number)


@compiled("void(int64,int64,int64)")
def note_piece(job: int, thread: int, number: int) -> None:
    """Count a piece that was handed back and is in its place now."""
    _note(job, thread, number)


FUNCTIONS = (bring_pieces, note_piece)
