"""Where the threads of a CPU pool find what they share: numbers of int64 words.

The state of a pool is written by `cpu_pool.py` and by the threads (`pool.py`). Words that threads
change by turns have a line of their own; what is set once lies together, and so does what thread 0
writes for the others.
"""

from __future__ import annotations

from strata_nb.kernels import mailbox

_LINE = mailbox.LINE // 8

# Set before the first thread starts.
(
    BOX,
    ANSWER,  # the address of the answer in it
    LAYERS,
    LAYER_COUNT,
    WIDTH,
    THREADS,
    GATES,  # work space for MOST_CHOICES: float32 (choices, outputs) of the widest layer
    UPS,  # the same
    INNER,  # quantised rows of as many values
    PRODUCTS,  # float32 (choices, width)
    PARTS,  # int64 (choices, sub-blocks): groups of each that are done, 0 between posts
    FIRST,  # the number behind which posts begin: GENERATION may be ahead when a thread starts
) = range(12)

# Set by the caller.
AWAKE, STOP = range(1 * _LINE, 1 * _LINE + 2)

# Why a message was refused, what was found in it, and what would have been right; the thread that
# ended while all others might have gone on, counted from 1.
FAULT, FOUND, ALLOWED, DIED = range(2 * _LINE, 2 * _LINE + 4)
WRONG_NUMBER, WRONG_LAYER, WRONG_COUNT, WRONG_EXPERT, WRONG_ORDER, NO_BLOB = range(1, 7)

# Counted by whoever answers; when the post was seen, and two words for asking the time.
POSTS, EXPERTS, BYTES, BUSY_NS, BEGUN_NS, CLOCK = range(3 * _LINE, 3 * _LINE + 6)

# How threads meet: the post that thread 0 has passed on; how many are done with gate and up, and
# the post in which all are; how many are done with all of it.
GENERATION, ARRIVED, PHASE, FINISHED = range(4 * _LINE, 8 * _LINE, _LINE)

# The message, as thread 0 found it: the address of the layer's words, and of each choice the
# address of the blob and the share.
JOB_LAYER, JOB_COUNT = range(8 * _LINE, 8 * _LINE + 2)
BLOBS, SHARES = 9 * _LINE, 9 * _LINE + mailbox.MOST_CHOICES

# Of each thread: whether it sleeps; its semaphore; for tests, what holds it up; how far it is (2
# for each post, 1 behind gate and up), and two words for calls of the C library.
THREADS_AT = 9 * _LINE + 2 * mailbox.MOST_CHOICES
SLEEPS, SEMAPHORE, HOLD, PROGRESS = range(0, 4 * _LINE, _LINE)
OWN_CLOCK = PROGRESS + 1
THREAD_WORDS = 4 * _LINE
ENDS = -1  # as what holds a thread up: it ends as if it had died

# Of a layer.
(
    GATE,  # functions for one row
    UP,
    DOWN,
    GATE_OFFSET,
    UP_OFFSET,
    DOWN_OFFSET,
    OUTPUTS,  # of gate and up
    LAYER_EXPERTS,
    ADDRESSES,
    BLOB_BYTES,  # of the three matrices
    DOWN_BYTES,  # of a group of down
) = range(11)
LAYER_WORDS = _LINE


def state_words(threads: int) -> int:
    """Return the words of the state, which begins at a multiple of `mailbox.LINE` bytes."""
    return THREADS_AT + threads * THREAD_WORDS


def of_thread(thread: int, which: int) -> int:
    """Return the number of a word of a thread."""
    return THREADS_AT + thread * THREAD_WORDS + which
