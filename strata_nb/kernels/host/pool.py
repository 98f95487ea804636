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

Who waits looks again and again, gives its processor away in between if it takes long, and leaves
when the card or the host says that nobody shall wait. While a card may post nobody sleeps for more
than a moment, and that only after milliseconds in which nothing came.
"""

from __future__ import annotations

from typing import Any

from strata_nb.compiling import compiled, helper, inlined
from strata_nb.kernels import mailbox
from strata_nb.kernels.host import pool_words as at
from strata_nb.kernels.host.activations import quantise_rows
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

_SPINS = 4_000  # pauses, 0.1 to 0.2 ms, before a thread that waits gives its processor away
# That it does so before it sleeps, or naps where a card may still post: where others want the
# processor, who never sleeps is the last to get it back.
_YIELDS_NS = 10_000_000
_NAP_NS = 50_000
# A window may be in flight whose token nobody takes. For as long as that lasts, naps every 50
# microseconds would take a twelfth of each processor.
_LONG_AFTER_NS, _LONG_NAP_NS = 500_000_000, 2_000_000
_CACHE_LINE = 64
_GROUPS = SUB_BLOCK // GROUP_ROWS  # that are quantised together


# -- waiting ---------------------------------------------------------------------------------------


@inlined
def _words_of(state: int, thread: int) -> int:
    """Return the address of a thread's own words."""
    return state + 8 * (at.THREADS_AT + thread * at.THREAD_WORDS)


@inlined
def _is_over(state: int) -> Any:
    """Return whether nobody shall wait any longer."""
    return load_atomic(state + 8 * at.STOP) | load_atomic(word(state, at.BOX) + mailbox.ABORT)


@inlined
def _sleep(state: int, own: int) -> None:
    store_atomic(own + 8 * at.SLEEPS, 1)
    # Who calls looks at this word after it has changed AWAKE or STOP, so one of the two sees the
    # other; who takes the 1 back decides whether there is a post of the semaphore to take.
    called = load_atomic(state + 8 * at.AWAKE) | load_atomic(state + 8 * at.STOP)
    if not called or swap_atomic(own + 8 * at.SLEEPS, 0) == 0:
        while semaphore_wait(own + 8 * at.SEMAPHORE) != 0:
            pass


@helper
def _changes(state: int, own: int, place: int, known: int, may_sleep: int) -> Any:
    """Wait until a word is not what it was; return 1, or 0 if all is over.

    Who may sleep is woken by the caller alone, and so does not wait for another thread.
    """
    waits, start, clock = 0, 0, own + 8 * at.OWN_CLOCK
    while load_atomic(place) == known:
        if _is_over(state):
            return 0
        if waits < _SPINS:
            waits += 1
            pause()
        elif waits == _SPINS:
            waits += 1
            start = monotonic_ns(clock)
        else:
            waited = monotonic_ns(clock) - start
            if waited < _YIELDS_NS:
                yield_processor()
            elif not may_sleep or load_atomic(state + 8 * at.AWAKE):
                nap(clock, _NAP_NS if waited < _LONG_AFTER_NS else _LONG_NAP_NS)
            else:
                _sleep(state, own)
                waits = 0
    return 1


@inlined
def _all_met(state: int, own: int, post: int, threads: int) -> Any:
    """Wait until all threads are here; what they wrote is visible to all. 0 if all is over."""
    if add_atomic(state + 8 * at.ARRIVED, 1) == threads - 1:
        store_atomic(state + 8 * at.ARRIVED, 0)
        store_atomic(state + 8 * at.PHASE, post)
        return 1
    return _changes(state, own, state + 8 * at.PHASE, post - 1, 0)


@inlined
def _is_held(state: int, own: int) -> Any:
    """Do what a test asks of this thread; return whether it shall end."""
    held = load_atomic(own + 8 * at.HOLD)
    while held > 0:
        if _is_over(state):
            return 1
        yield_processor()
        held = load_atomic(own + 8 * at.HOLD)
    return 1 if held == at.ENDS else 0


# -- the message -----------------------------------------------------------------------------------


@inlined
def _refused(state: int, fault: int, found: int, allowed: int) -> Any:
    """Say why a post cannot be answered, and that nobody shall wait for it."""
    store(state + 8 * at.FOUND, found)
    store(state + 8 * at.ALLOWED, allowed)
    store_atomic(state + 8 * at.FAULT, fault)
    store_atomic(word(state, at.BOX) + mailbox.ABORT, 1)
    return 0


@helper
def _taken(state: int, post: int) -> Any:
    """Pass the message of a post on to all threads; return 0 if it was refused.

    Nothing of it is read again: what was looked at is what is used.
    """
    store(state + 8 * at.BEGUN_NS, monotonic_ns(state + 8 * at.CLOCK))
    box = word(state, at.BOX)
    posted = load_atomic(box + mailbox.POSTED)
    if posted != post:
        return _refused(state, at.WRONG_NUMBER, posted, post)
    number, layers = load_i64(box + mailbox.LAYER), word(state, at.LAYER_COUNT)
    if number < 0 or number >= layers:
        return _refused(state, at.WRONG_LAYER, number, layers)
    count = load_i64(box + mailbox.COUNT)
    if count < 1 or count > mailbox.MOST_CHOICES:
        return _refused(state, at.WRONG_COUNT, count, mailbox.MOST_CHOICES)
    layer = word(state, at.LAYERS) + 8 * at.LAYER_WORDS * number
    experts, addresses = word(layer, at.LAYER_EXPERTS), word(layer, at.ADDRESSES)
    before = -1
    for choice in range(count):
        place = box + mailbox.CHOICES + mailbox.CHOICE_BYTES * choice
        expert = load_i64(place)
        if expert < 0 or expert >= experts:
            return _refused(state, at.WRONG_EXPERT, expert, experts)
        if expert <= before:
            return _refused(state, at.WRONG_ORDER, expert, before)
        blob = load_i64(addresses + 8 * expert)
        if blob == 0:
            return _refused(state, at.NO_BLOB, expert, number)
        store(state + 8 * (at.BLOBS + choice), blob)
        store(state + 8 * (at.SHARES + choice), load_f32(place + mailbox.SHARE))
        before = expert
    store(state + 8 * at.JOB_LAYER, layer)
    store(state + 8 * at.JOB_COUNT, count)
    store_atomic(state + 8 * at.GENERATION, post)
    return 1


@inlined
def _answer(state: int, post: int) -> None:
    """Say that a post is answered, as the last thread that was at it."""
    count = word(state, at.JOB_COUNT)
    size = count * word(word(state, at.JOB_LAYER), at.BLOB_BYTES)
    took = monotonic_ns(state + 8 * at.CLOCK) - word(state, at.BEGUN_NS)
    store(state + 8 * at.POSTS, word(state, at.POSTS) + 1)
    store(state + 8 * at.EXPERTS, word(state, at.EXPERTS) + count)
    store(state + 8 * at.BYTES, word(state, at.BYTES) + size)
    store(state + 8 * at.BUSY_NS, word(state, at.BUSY_NS) + took)
    store_atomic(word(state, at.BOX) + mailbox.ANSWERED, post)


# -- experts ---------------------------------------------------------------------------------------


@helper
def _gate_up(state: int, thread: int, threads: int) -> None:
    """Compute a thread's groups of gate and up; gate and quantise what is then complete."""
    layer, count = word(state, at.JOB_LAYER), word(state, at.JOB_COUNT)
    x = word(state, at.BOX) + mailbox.ROW
    gate, up, outputs = word(layer, at.GATE), word(layer, at.UP), word(layer, at.OUTPUTS)
    gate_offset, up_offset = word(layer, at.GATE_OFFSET), word(layer, at.UP_OFFSET)
    values = word(state, at.WIDTH) // SUB_BLOCK
    sub_blocks = outputs // SUB_BLOCK
    first, last = share(count * outputs, GROUP_ROWS, thread, threads)
    while first < last:
        choice = first // outputs
        begin, end = first - choice * outputs, min(last - choice * outputs, outputs)
        blob = word(state, at.BLOBS + choice)
        gates = word(state, at.GATES) + 4 * choice * outputs
        ups = word(state, at.UPS) + 4 * choice * outputs
        call_address(gate, (blob + gate_offset, x, gates, 1, values, outputs, begin, end, 0, 0))
        call_address(up, (blob + up_offset, x, ups, 1, values, outputs, begin, end, 0, 0))
        packed = word(state, at.INNER) + choice * sub_blocks * SUB_BLOCK_BYTES
        parts = word(state, at.PARTS) + 8 * choice * sub_blocks
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
    layer = word(state, at.JOB_LAYER)
    first, last = share(word(state, at.WIDTH), FLOATS_LANES, thread, threads)
    if first < last:
        size = word(layer, at.DOWN_BYTES)
        place = word(state, at.BLOBS) + word(layer, at.DOWN_OFFSET) + first // GROUP_ROWS * size
        for line in range(0, size, _CACHE_LINE):
            prefetch(place + line)


@helper
def _down(state: int, thread: int, threads: int) -> None:
    """Compute a thread's outputs of down for all choices, and their weighted sum."""
    layer, count = word(state, at.JOB_LAYER), word(state, at.JOB_COUNT)
    down, offset = word(layer, at.DOWN), word(layer, at.DOWN_OFFSET)
    inner, sub_blocks = word(state, at.INNER), word(layer, at.OUTPUTS) // SUB_BLOCK
    products, answer = word(state, at.PRODUCTS), word(state, at.ANSWER)
    width = word(state, at.WIDTH)
    first, last = share(width, FLOATS_LANES, thread, threads)
    if first >= last:
        return
    for choice in range(count):
        weights, target = word(state, at.BLOBS + choice) + offset, products + 4 * choice * width
        row = inner + choice * sub_blocks * SUB_BLOCK_BYTES
        call_address(down, (weights, row, target, 1, sub_blocks, width, first, last, 0, 0))
    for output in range(first, last, FLOATS_LANES):
        some = min(FLOATS_LANES, last - output)
        total = no_floats()
        for choice in range(count):
            product = load_some(products + 4 * (choice * width + output), some)
            weight = load_f32(state + 8 * (at.SHARES + choice))
            total = total + product * all_lanes(total, weight)
        store_some(answer + 4 * output, total, some)


# -- the threads -----------------------------------------------------------------------------------


@inlined
def _next(state: int, own: int, thread: int, post: int) -> Any:
    """Wait for the post behind this one; return 0 if all is over."""
    if thread:
        return _changes(state, own, state + 8 * at.GENERATION, post, 1)
    box = word(state, at.BOX)
    # Until all are done with this one: others may still read what `_taken` writes.
    if not _changes(state, own, box + mailbox.ANSWERED, post - 1, 0):
        return 0
    if not _changes(state, own, box + mailbox.POSTED, post, 1):
        return 0
    return _taken(state, post + 1)


@compiled("void(int64,int64)")
def serve(state: int, thread: int) -> None:
    """Be a thread of the pool until all is over."""
    threads, own = word(state, at.THREADS), _words_of(state, thread)
    post = word(state, at.FIRST)
    while True:
        if not _next(state, own, thread, post):
            return
        post += 1
        if _is_held(state, own):
            return
        _gate_up(state, thread, threads)
        _ask_for_down(state, thread, threads)
        store_atomic(own + 8 * at.PROGRESS, 2 * post - 1)
        if not _all_met(state, own, post, threads):
            return
        _down(state, thread, threads)
        store_atomic(own + 8 * at.PROGRESS, 2 * post)
        if add_atomic(state + 8 * at.FINISHED, 1) == threads - 1:
            store_atomic(state + 8 * at.FINISHED, 0)
            _answer(state, post)


@compiled("void(int64)")
def begin(state: int) -> None:
    """Make ready what threads need before the first one is started; the words are set."""
    posts = load_atomic(word(state, at.BOX) + mailbox.ANSWERED)
    store(state + 8 * at.FIRST, posts)
    store(state + 8 * at.GENERATION, posts)
    store(state + 8 * at.PHASE, posts)
    for thread in range(word(state, at.THREADS)):
        own = _words_of(state, thread)
        semaphore_make(own + 8 * at.SEMAPHORE)
        store(own + 8 * at.PROGRESS, 2 * posts)


@compiled("void(int64,int64)")
def call(state: int, change: int) -> None:
    """Set a word, AWAKE or STOP, and wake the threads that sleep."""
    store_atomic(state + 8 * change, 1)
    for thread in range(word(state, at.THREADS)):
        own = _words_of(state, thread)
        if load_atomic(own + 8 * at.SLEEPS) and swap_atomic(own + 8 * at.SLEEPS, 0):
            semaphore_post(own + 8 * at.SEMAPHORE)


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


FUNCTIONS = (begin, serve, call, ask, quantise_rows)  # with what measures a pool (`pool_rate.py`)
