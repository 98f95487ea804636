"""The threads that compute experts for a card: what each does from one post to the next.

A card posts a message (`kernels/mailbox.py`), which thread 0 waits for. It looks at every number of
it, because a wrong one would be a wild read, and passes on what it found. All threads then go
through the post together:

    thread 0   post | message | gate, up, gating | meet | down, sum | wait for the next post ...
    others     wait           | gate, up, gating | meet | down, sum | wait for thread 0 ...
                                                                    ^ the last one answers

Two experts have to keep all threads busy, so outputs are shared and not experts: of gate and up
groups of eight, of all choices in a row. Who finishes the last group of 32 outputs gates and
quantises them, so that nobody waits for that. Of down a thread has the same outputs of all choices,
and adds them up in their order. Bits are those of `expert_gate_up` and `expert_down`.

Rejected: groups that threads claim one by one, for which they would fight over a word every four
microseconds.

Who waits looks again and again, gives its processor away in between if it takes long, and leaves
when the card or the host says that nobody shall wait. While a card may post nobody sleeps for more
than a moment, and that only after milliseconds in which nothing came.
"""

from __future__ import annotations

from typing import Any

from strata_nb.compiling import compiled, helper, inlined
from strata_nb.kernels import mailbox
from strata_nb.kernels.host.gating import gate_sub_blocks
from strata_nb.kernels.host.operations import share, word
from strata_nb.kernels.host.products import FLOATS_LANES, load_some, store_some
from strata_nb.kernels.host.vectors import all_lanes, no_floats
from strata_nb.kernels.host.waiting import (
    monotonic_ns,
    nap,
    pause,
    semaphore_make,
    semaphore_post,
    semaphore_wait,
    yield_processor,
)
from strata_nb.kernels.quantised_rows import SUB_BLOCK_BYTES
from strata_nb.packing import GROUP_ROWS, SUB_BLOCK
from strata_nb.raw_memory import (
    add_atomic,
    call_address,
    load_atomic,
    load_f32,
    load_i64,
    prefetch,
    store,
    store_atomic,
    swap_atomic,
)

_LINE = mailbox.LINE // 8  # words

# Words of the state. Those that threads change by turns have a line of their own; what is set once
# lies together, and so does what thread 0 writes for the others.
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
    _FIRST,  # the number behind which posts begin: GENERATION may be ahead when a thread starts
) = range(12)
AWAKE, STOP = range(1 * _LINE, 1 * _LINE + 2)
FAULT, FOUND, ALLOWED = range(2 * _LINE, 2 * _LINE + 3)
POSTS, EXPERTS, BYTES, BUSY_NS, _BEGUN_NS, _CLOCK = range(3 * _LINE, 3 * _LINE + 6)
GENERATION = 4 * _LINE
_ARRIVED, _PHASE, _FINISHED = 5 * _LINE, 6 * _LINE, 7 * _LINE
_LAYER, _COUNT = 8 * _LINE, 8 * _LINE + 1
_BLOBS, _SHARES = 9 * _LINE, 9 * _LINE + mailbox.MOST_CHOICES
_WORKERS = 9 * _LINE + 2 * mailbox.MOST_CHOICES
# Of each thread: whether it sleeps; its semaphore; for tests, what holds it up; how far it is, and
# two words for calls of the C library.
_SLEEPS, _SEMAPHORE, HOLD, PROGRESS = range(0, 4 * _LINE, _LINE)
_OWN_CLOCK = PROGRESS + 1
_WORKER_WORDS = 4 * _LINE

# Words of a layer.
(
    GATE,
    UP,
    DOWN,  # functions for one row
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

# Why a message was refused (`FAULT`): what was wrong in it.
NUMBER, LAYER, COUNT, EXPERT, ORDER, BLOB = range(1, 7)

ENDS = -1  # as what holds a thread up: it ends as if it had died

_SPINS = 4_000  # pauses, 0.1 to 0.2 ms, before a thread that waits gives its processor away
_YIELDS_NS = 2_000_000  # that it does so before it sleeps, or naps where a card may still post:
_NAP_NS = 50_000  # where others want the processor, who never sleeps is the last to get it back
_CACHE_LINE = 64
_GROUPS = SUB_BLOCK // GROUP_ROWS  # that are quantised together


def state_words(threads: int) -> int:
    """Return the int64 words of the state, which begins at a multiple of `mailbox.LINE` bytes."""
    return _WORKERS + threads * _WORKER_WORDS


def of_thread(thread: int, which: int) -> int:
    """Return the number of a word of a thread: HOLD or PROGRESS."""
    return _WORKERS + thread * _WORKER_WORDS + which


# -- waiting ---------------------------------------------------------------------------------------


@inlined
def _is_over(state: int) -> Any:
    """Return whether nobody shall wait any longer."""
    return load_atomic(state + 8 * STOP) | load_atomic(word(state, BOX) + mailbox.ABORT)


@inlined
def _sleep(state: int, own: int) -> None:
    store_atomic(own + 8 * _SLEEPS, 1)
    # Who calls looks at this word after it has changed AWAKE or STOP, so one of the two sees the
    # other; who takes the 1 back decides whether there is a post of the semaphore to take.
    called = load_atomic(state + 8 * AWAKE) | load_atomic(state + 8 * STOP)
    if not called or swap_atomic(own + 8 * _SLEEPS, 0) == 0:
        while semaphore_wait(own + 8 * _SEMAPHORE) != 0:
            pass


@helper
def _changes(state: int, own: int, place: int, known: int) -> Any:
    """Wait until a word is not what it was; return whether it is, or 0 if all is over."""
    waits, start, clock = 0, 0, own + 8 * _OWN_CLOCK
    while load_atomic(place) == known:
        if _is_over(state):
            return 0
        if waits < _SPINS:
            waits += 1
            pause()
        elif waits == _SPINS:
            waits += 1
            start = monotonic_ns(clock)
        elif monotonic_ns(clock) - start < _YIELDS_NS:
            yield_processor()
        elif load_atomic(state + 8 * AWAKE):
            nap(clock, _NAP_NS)
        else:
            _sleep(state, own)
            waits = 0
    return 1


@inlined
def _all_met(state: int, own: int, post: int, threads: int) -> Any:
    """Wait until all threads are here; what they wrote is visible to all. 0 if all is over."""
    if add_atomic(state + 8 * _ARRIVED, 1) == threads - 1:
        store_atomic(state + 8 * _ARRIVED, 0)
        store_atomic(state + 8 * _PHASE, post)
        return 1
    return _changes(state, own, state + 8 * _PHASE, post - 1)


@inlined
def _is_held(state: int, own: int) -> Any:
    """Do what a test asks of this thread; return whether it shall end."""
    held = load_atomic(own + 8 * HOLD)
    while held > 0:
        if _is_over(state):
            return 1
        yield_processor()
        held = load_atomic(own + 8 * HOLD)
    return 1 if held == ENDS else 0


# -- the message -----------------------------------------------------------------------------------


@inlined
def _refused(state: int, fault: int, found: int, allowed: int) -> Any:
    """Say why a post cannot be answered, and that nobody shall wait for it."""
    store(state + 8 * FOUND, found)
    store(state + 8 * ALLOWED, allowed)
    store_atomic(state + 8 * FAULT, fault)
    store_atomic(word(state, BOX) + mailbox.ABORT, 1)
    return 0


@helper
def _taken(state: int, post: int) -> Any:
    """Pass the message of a post on to all threads; return 0 if it was refused.

    Nothing of it is read again: what was looked at is what is used.
    """
    store(state + 8 * _BEGUN_NS, monotonic_ns(state + 8 * _CLOCK))
    box = word(state, BOX)
    posted = load_atomic(box + mailbox.POSTED)
    if posted != post:
        return _refused(state, NUMBER, posted, post)
    number, layers = load_i64(box + mailbox.LAYER), word(state, LAYER_COUNT)
    if number < 0 or number >= layers:
        return _refused(state, LAYER, number, layers)
    count = load_i64(box + mailbox.COUNT)
    if count < 1 or count > mailbox.MOST_CHOICES:
        return _refused(state, COUNT, count, mailbox.MOST_CHOICES)
    layer = word(state, LAYERS) + 8 * LAYER_WORDS * number
    experts, addresses = word(layer, LAYER_EXPERTS), word(layer, ADDRESSES)
    before = -1
    for choice in range(count):
        place = box + mailbox.CHOICES + mailbox.CHOICE_BYTES * choice
        expert = load_i64(place)
        if expert < 0 or expert >= experts:
            return _refused(state, EXPERT, expert, experts)
        if expert <= before:
            return _refused(state, ORDER, expert, before)
        blob = load_i64(addresses + 8 * expert)
        if blob == 0:
            return _refused(state, BLOB, expert, number)
        store(state + 8 * (_BLOBS + choice), blob)
        store(state + 8 * (_SHARES + choice), load_f32(place + mailbox.SHARE))
        before = expert
    store(state + 8 * _LAYER, layer)
    store(state + 8 * _COUNT, count)
    store_atomic(state + 8 * GENERATION, post)
    return 1


@inlined
def _answer(state: int, post: int) -> None:
    """Say that a post is answered, as the last thread that was at it."""
    count = word(state, _COUNT)
    size = count * word(word(state, _LAYER), BLOB_BYTES)
    took = monotonic_ns(state + 8 * _CLOCK) - word(state, _BEGUN_NS)
    store(state + 8 * POSTS, word(state, POSTS) + 1)
    store(state + 8 * EXPERTS, word(state, EXPERTS) + count)
    store(state + 8 * BYTES, word(state, BYTES) + size)
    store(state + 8 * BUSY_NS, word(state, BUSY_NS) + took)
    store_atomic(word(state, BOX) + mailbox.ANSWERED, post)


# -- experts ---------------------------------------------------------------------------------------


@helper
def _gate_up(state: int, thread: int, threads: int) -> None:
    """Compute a thread's groups of gate and up; gate and quantise what is then complete."""
    layer, count, x = word(state, _LAYER), word(state, _COUNT), word(state, BOX) + mailbox.ROW
    gate, up, outputs = word(layer, GATE), word(layer, UP), word(layer, OUTPUTS)
    gate_offset, up_offset = word(layer, GATE_OFFSET), word(layer, UP_OFFSET)
    values = word(state, WIDTH) // SUB_BLOCK
    sub_blocks = outputs // SUB_BLOCK
    first, last = share(count * outputs, GROUP_ROWS, thread, threads)
    while first < last:
        choice = first // outputs
        begin, end = first - choice * outputs, min(last - choice * outputs, outputs)
        blob = word(state, _BLOBS + choice)
        gates = word(state, GATES) + 4 * choice * outputs
        ups = word(state, UPS) + 4 * choice * outputs
        call_address(gate, (blob + gate_offset, x, gates, 1, values, outputs, begin, end, 0, 0))
        call_address(up, (blob + up_offset, x, ups, 1, values, outputs, begin, end, 0, 0))
        packed = word(state, INNER) + choice * sub_blocks * SUB_BLOCK_BYTES
        parts = word(state, PARTS) + 8 * choice * sub_blocks
        for number in range(begin // SUB_BLOCK, (end + SUB_BLOCK - 1) // SUB_BLOCK):
            here = max(begin, SUB_BLOCK * number)
            done = (min(end, SUB_BLOCK * (number + 1)) - here) // GROUP_ROWS
            if done < _GROUPS:
                done += add_atomic(parts + 8 * number, done)
            if done == _GROUPS:
                store_atomic(parts + 8 * number, 0)
                gate_sub_blocks(gates, ups, 0, packed, sub_blocks, number, number + 1)
        first += end - begin


@inlined
def _ask_for_down(state: int, thread: int, threads: int) -> None:
    """Ask for what `_down` reads first, before this thread waits for the others."""
    layer = word(state, _LAYER)
    first, last = share(word(state, WIDTH), FLOATS_LANES, thread, threads)
    if first < last:
        size = word(layer, DOWN_BYTES)
        place = word(state, _BLOBS) + word(layer, DOWN_OFFSET) + first // GROUP_ROWS * size
        for line in range(0, size, _CACHE_LINE):
            prefetch(place + line)


@helper
def _down(state: int, thread: int, threads: int) -> None:
    """Compute a thread's outputs of down for all choices, and their weighted sum."""
    layer, count, width = word(state, _LAYER), word(state, _COUNT), word(state, WIDTH)
    down, offset, values = word(layer, DOWN), word(layer, DOWN_OFFSET), word(layer, OUTPUTS)
    inner, products = word(state, INNER), word(state, PRODUCTS)
    sub_blocks = values // SUB_BLOCK
    answer = word(state, ANSWER)
    first, last = share(width, FLOATS_LANES, thread, threads)
    if first >= last:
        return
    for choice in range(count):
        weights, target = word(state, _BLOBS + choice) + offset, products + 4 * choice * width
        row = inner + choice * sub_blocks * SUB_BLOCK_BYTES
        call_address(down, (weights, row, target, 1, sub_blocks, width, first, last, 0, 0))
    for output in range(first, last, FLOATS_LANES):
        some = min(FLOATS_LANES, last - output)
        total = no_floats()
        for choice in range(count):
            product = load_some(products + 4 * (choice * width + output), some)
            weight = load_f32(state + 8 * (_SHARES + choice))
            total = total + product * all_lanes(total, weight)
        store_some(answer + 4 * output, total, some)


# -- the threads -----------------------------------------------------------------------------------


@inlined
def _next(state: int, own: int, thread: int, post: int) -> Any:
    """Wait for the post behind this one; return 0 if all is over."""
    if thread:
        return _changes(state, own, state + 8 * GENERATION, post)
    box = word(state, BOX)
    # Until all are done with this one: others may still read what `_taken` writes.
    if not _changes(state, own, box + mailbox.ANSWERED, post - 1):
        return 0
    if not _changes(state, own, box + mailbox.POSTED, post):
        return 0
    return _taken(state, post + 1)


@compiled("void(int64,int64)")
def serve(state: int, thread: int) -> None:
    """Be a thread of the pool until all is over."""
    threads, own = word(state, THREADS), state + 8 * (_WORKERS + thread * _WORKER_WORDS)
    post = word(state, _FIRST)
    while True:
        if not _next(state, own, thread, post):
            return
        post += 1
        if _is_held(state, own):
            return
        _gate_up(state, thread, threads)
        _ask_for_down(state, thread, threads)
        store_atomic(own + 8 * PROGRESS, 2 * post - 1)
        if not _all_met(state, own, post, threads):
            return
        _down(state, thread, threads)
        store_atomic(own + 8 * PROGRESS, 2 * post)
        if add_atomic(state + 8 * _FINISHED, 1) == threads - 1:
            store_atomic(state + 8 * _FINISHED, 0)
            _answer(state, post)


@compiled("void(int64)")
def begin(state: int) -> None:
    """Make ready what threads need before the first one is started; the words are set."""
    posts = load_atomic(word(state, BOX) + mailbox.ANSWERED)
    store(state + 8 * _FIRST, posts)
    store(state + 8 * GENERATION, posts)
    store(state + 8 * _PHASE, posts)
    for thread in range(word(state, THREADS)):
        own = state + 8 * (_WORKERS + thread * _WORKER_WORDS)
        semaphore_make(own + 8 * _SEMAPHORE)
        store(own + 8 * PROGRESS, 2 * posts)


@compiled("void(int64,int64)")
def call(state: int, change: int) -> None:
    """Set a word, AWAKE or STOP, and wake the threads that sleep."""
    store_atomic(state + 8 * change, 1)
    for thread in range(word(state, THREADS)):
        own = state + 8 * (_WORKERS + thread * _WORKER_WORDS)
        if load_atomic(own + 8 * _SLEEPS) and swap_atomic(own + 8 * _SLEEPS, 0):
            semaphore_post(own + 8 * _SEMAPHORE)


@compiled("int64(int64,int64,int64)")
def ask(box: int, post: int, clock: int) -> Any:
    """Post a message in the card's place and wait for the answer; return the nanoseconds it took.

    -1 if nobody shall wait any longer. `clock` is the address of 16 bytes of work space.
    """
    start = monotonic_ns(clock)
    store_atomic(box + mailbox.POSTED, post)
    spins = 0
    while load_atomic(box + mailbox.ANSWERED) != post:
        if load_atomic(box + mailbox.ABORT):
            return -1
        if spins < _SPINS:
            spins += 1
            pause()
        elif monotonic_ns(clock) - start < _YIELDS_NS:
            yield_processor()
        else:
            nap(clock, _NAP_NS)
    return monotonic_ns(clock) - start


FUNCTIONS = (begin, serve, call)
