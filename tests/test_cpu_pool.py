"""The host's side of the CPU pool: its answers, and that no fault of either side hangs the other.

A test plays the card: it writes messages to a mailbox in plain memory.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_launches import normal, same_bits
from test_host_experts import EXPERTS, ExpertCase, Layer, Routes, mixture
from test_threads import run_script

from strata_nb import cpu
from strata_nb.compiling import compiled
from strata_nb.cpu_pool import CpuPool, PoolLayer, pool_threads
from strata_nb.errors import StrataError
from strata_nb.formats import TensorType
from strata_nb.kernels import mailbox
from strata_nb.kernels.host import pool as host_pool
from strata_nb.kernels.host import pool_words as at
from strata_nb.kernels.reference import Floats
from strata_nb.pool_rate import Poster, measure

T = TensorType
# Layers of one width: of one group within a sub-block for each of many threads, and of several.
CASES = (
    ExpertCase(T.Q4_K, T.Q4_K, T.Q6_K, 256, 256),
    ExpertCase(T.Q8_0, T.Q6_K, T.Q8_0, 256, 96),
)
THREADS = (1, 2, 3, 7)
PATIENCE_S = 60.0  # of a test whose condition comes at once, or never


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [Layer(case) for case in CASES]


def described(layer: Layer) -> PoolLayer:
    case = layer.case
    kinds = (case.gate, case.up, case.down)
    return PoolLayer(
        *kinds, *layer.offsets, case.width, case.inner, EXPERTS, int(layer.addresses.ctypes.data)
    )


@contextmanager
def pool_of(layers: Sequence[Layer], threads: int = 2) -> Iterator[tuple[CpuPool, Poster]]:
    """Return a pool that is awake, and its card with a row in the message."""
    poster = Poster(layers[0].case.width)
    poster.row(row_of(layers[0].case.width))
    with closing(CpuPool(poster.box, [described(one) for one in layers], threads)) as made_pool:
        made_pool.awake()
        yield made_pool, poster


def by_launches(layer: Layer, chosen: Sequence[int], shares: Floats) -> Floats:
    """Return what the host's launches make of the row of `pool_of` with these choices."""
    width = layer.case.width
    routes = Routes(np.array([chosen]), shares[None])
    found: Floats = mixture(
        1, layer, row_of(width)[None], routes, np.zeros((1, width), np.float32)
    ).y
    return found[0]


def row_of(width: int) -> Floats:
    return normal(width, seed=1)


def some_shares(count: int) -> Floats:
    return np.random.default_rng(count).random(count).astype(np.float32)


def message(poster: Poster, layer: int = 0, chosen: Sequence[int] = (1, 4)) -> None:
    poster.message(layer, chosen, some_shares(len(chosen)))


def until(condition: Any) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0001)


def ask(poster: Poster) -> None:
    """Post the message and wait until it is answered."""
    poster.post()
    until(lambda: poster.word(mailbox.ANSWERED) == poster.word(mailbox.POSTED))


def hold(made_pool: CpuPool, thread: int, value: int) -> None:
    """Have a thread stand still before the next post (1), or end there (`at.ENDS`)."""
    made_pool._state[at.of_thread(thread, at.HOLD)] = value


def workers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("strata-pool-")}


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_answers_have_the_bits_of_the_launches(layers: list[Layer], threads: int) -> None:
    choices = [(2,), (1, 4), (0, 1, 2, 3, 4, 5), (0, 3, 5)]
    expected = {
        (number, chosen): by_launches(layer, chosen, some_shares(len(chosen)))
        for number, layer in enumerate(layers)
        for chosen in choices
    }
    with pool_of(layers, threads) as (made_pool, poster):
        for _ in range(10):
            for (number, chosen), answer in expected.items():
                poster.answer[:] = np.nan
                message(poster, number, chosen)
                ask(poster)
                assert same_bits(poster.answer, answer), (number, chosen)
        assert made_pool.failure is None
        computed = 10 * sum(len(chosen) for _, chosen in expected)
        assert (made_pool.posts, made_pool.experts) == (10 * len(expected), computed)
        assert made_pool.busy_s > 0
    blobs = [described(layer).blob_bytes() for layer in layers]
    assert made_pool.bytes == computed * sum(blobs) // 2


def test_a_thread_that_starts_late_takes_part_in_the_first_post(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    poster = Poster(layers[0].case.width)
    poster.row(row_of(layers[0].case.width))
    message(poster)
    start = threading.Thread.start

    def late(self: threading.Thread) -> None:
        if self.name == "strata-pool-1":
            poster.post()
            time.sleep(0.05)  # thread 0 sees the post, and says so to all that will be
        start(self)

    monkeypatch.setattr(threading.Thread, "start", late)
    with closing(CpuPool(poster.box, [described(one) for one in layers], 2)) as made_pool:
        made_pool.awake()
        until(lambda: poster.word(mailbox.ANSWERED) == 1)


@compiled("void(int64,int64)")
def fall_asleep(state: int, own: int) -> None:
    host_pool._sleep(state, own)


@pytest.mark.parametrize("change", [at.AWAKE, at.STOP])
def test_a_thread_that_is_called_while_it_falls_asleep_does_not_sleep(change: int) -> None:
    state = np.zeros(at.state_words(1), np.int64)
    state[change] = 1  # behind the thread's last look, and before it said that it sleeps
    address = int(state.ctypes.data)
    falls = threading.Thread(
        target=fall_asleep, args=(address, address + 8 * at.THREADS_AT), daemon=True
    )
    falls.start()
    until(lambda: not falls.is_alive())
    assert state[at.of_thread(0, at.SLEEPS)] == 0


def test_threads_wake_after_any_pause(layers: list[Layer]) -> None:
    with pool_of(layers) as (made_pool, poster):
        message(poster)
        for pause_s in (*np.linspace(0, 0.02, 40), 0.2):
            made_pool.rest()
            time.sleep(pause_s)
            made_pool.awake()
            ask(poster)


def test_threads_at_rest_sleep_and_others_do_not(layers: list[Layer]) -> None:
    with pool_of(layers, 3) as (made_pool, _):
        sleeps = [at.of_thread(thread, at.SLEEPS) for thread in range(3)]
        time.sleep(0.1)
        assert not made_pool._state[sleeps].any()
        made_pool.rest()
        until(lambda: made_pool._state[sleeps].all())
        time.sleep(0.05)
        assert made_pool._state[sleeps].all()


def test_threads_hardly_work_while_nobody_takes_a_windows_token(layers: list[Layer]) -> None:
    def naps(pool: CpuPool) -> int:
        status = [Path(f"/proc/self/task/{one.native_id}/status") for one in pool._workers]
        words = [
            re.findall(r"\nvoluntary_ctxt_switches:\s*(\d+)", one.read_text()) for one in status
        ]
        return sum(int(number) for (number,) in words)

    def are_few() -> bool:
        before = naps(made_pool)
        time.sleep(0.1)
        return naps(made_pool) - before < 300  # of naps of 50 microseconds, over a thousand

    with pool_of(layers) as (made_pool, poster):
        until(are_few)
        message(poster)
        ask(poster)


def test_the_rate_of_a_pool_is_measured_on_its_layers(layers: list[Layer]) -> None:
    before = workers()
    found = measure([described(layer) for layer in layers], 2, 3, posts=8)
    assert found.shape == (8,)
    assert np.all(found > 0)
    assert workers() == before


def test_a_pool_that_does_not_answer_has_no_rate_and_leaves_no_thread(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "ask", lambda *_: -1)
    with pytest.raises(StrataError, match="did not answer"):
        measure([described(layer) for layer in layers], 2, 3, posts=8)
    assert workers() == set()


# -- messages that nobody can have meant -----------------------------------------------------------


WRONG = [
    ({mailbox.LAYER: 2}, "layer 2 of 2"),
    ({mailbox.LAYER: -1}, "layer -1 of 2"),
    ({mailbox.COUNT: 0}, "0 choices, where 1 to 64 can be"),
    ({mailbox.COUNT: 65}, "65 choices, where 1 to 64 can be"),
    ({mailbox.CHOICES: EXPERTS}, f"expert {EXPERTS} of {EXPERTS}"),
    ({mailbox.CHOICES: -1}, f"expert -1 of {EXPERTS}"),
    ({mailbox.CHOICES: 4}, "expert 4 behind expert 4"),
    ({mailbox.CHOICES: 3}, "expert 3 of layer 0, which is not in memory of the host"),
    ({mailbox.POSTED: 6}, "it has this number where 1 was due"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_message_is_refused_and_nobody_waits(
    layers: list[Layer], words: dict[int, int], said: str
) -> None:
    lacking = Layer(CASES[0])
    lacking.addresses[3] = 0
    with pool_of([lacking, layers[1]]) as (made_pool, poster):
        message(poster)
        for offset, value in words.items():
            poster.write(offset, value)
        post = words.get(mailbox.POSTED, 1)
        poster.write(mailbox.POSTED, post)
        until(lambda: poster.word(mailbox.ABORT))
        assert poster.word(mailbox.ANSWERED) == 0
        until(lambda: not workers())
    assert made_pool.failure == f"the CPU pool cannot answer post {post}: {said}"


# -- threads that stall or end, and others who want to end -----------------------------------------


def test_a_thread_that_stalls_is_named_once_the_card_gives_up(layers: list[Layer]) -> None:
    with pool_of(layers, 3) as (made_pool, poster):
        message(poster)
        ask(poster)
        hold(made_pool, 1, 1)
        poster.post()
        progress = [at.of_thread(thread, at.PROGRESS) for thread in range(3)]
        until(lambda: made_pool._state[progress].tolist() == [3, 2, 3])
        assert poster.word(mailbox.ANSWERED) == 1
        assert made_pool.failure is None
        poster.write(mailbox.ABORT, 1)  # as a card does behind its deadline
        expected = "nobody waited for post 2 (3 threads) any longer; thread 1 came last"
        assert made_pool.failure == expected
        until(lambda: not workers())
    assert made_pool.failure == expected


def test_a_thread_that_stalls_for_a_moment_only_makes_the_answer_late(layers: list[Layer]) -> None:
    with pool_of(layers, 2) as (made_pool, poster):
        message(poster)
        hold(made_pool, 0, 1)
        poster.post()
        time.sleep(0.02)
        hold(made_pool, 0, 0)
        until(lambda: poster.word(mailbox.ANSWERED) == 1)
        assert same_bits(poster.answer, by_launches(layers[0], (1, 4), some_shares(2)))


def test_what_was_looked_at_of_a_message_is_what_is_used(layers: list[Layer]) -> None:
    with pool_of(layers, 2) as (made_pool, poster):
        message(poster)
        hold(made_pool, 1, 1)
        poster.post()
        until(lambda: made_pool._state[at.GENERATION] == 1)
        poster.message(1, (5, 3, -9), np.full(3, np.nan, np.float32))
        hold(made_pool, 1, 0)
        until(lambda: poster.word(mailbox.ANSWERED) == 1)
        assert same_bits(poster.answer, by_launches(layers[0], (1, 4), some_shares(2)))


@pytest.mark.parametrize("thread", [0, 2])
def test_a_thread_that_ends_is_noticed_and_nobody_waits(layers: list[Layer], thread: int) -> None:
    with pool_of(layers, 3) as (made_pool, poster):
        message(poster)
        ask(poster)
        hold(made_pool, thread, at.ENDS)
        poster.post()
        until(lambda: poster.word(mailbox.ABORT))
        until(lambda: not workers())
        said = f"thread {thread} of the CPU pool ended at post 2 (3 threads)"
        assert made_pool.failure == said
        made_pool.awake()  # harmless
        assert poster.ask() == -1
        assert poster.word(mailbox.ANSWERED) == 1


def test_a_card_that_gives_up_ends_the_threads(layers: list[Layer]) -> None:
    with pool_of(layers) as (made_pool, poster):
        message(poster)
        ask(poster)
        poster.write(mailbox.ABORT, 1)
        until(lambda: not workers())
        said = "the card gave up the CPU pool behind post 1 (2 threads), which was answered"
        assert made_pool.failure == said


@pytest.mark.parametrize("asleep", [False, True])
def test_closing_ends_the_threads_and_may_be_done_twice(layers: list[Layer], asleep: bool) -> None:
    with pool_of(layers, 3) as (made_pool, poster):
        assert len(workers()) == 3
        if asleep:
            made_pool.rest()
            time.sleep(0.1)
        made_pool.close()
        assert workers() == set()
        assert poster.word(mailbox.ABORT)
        made_pool.close()
        assert made_pool.failure is None
        with pytest.raises(StrataError, match="has ended"):
            made_pool.awake()


def test_closing_in_the_middle_of_a_post_ends_it(layers: list[Layer]) -> None:
    with pool_of(layers, 3) as (made_pool, poster):
        message(poster)
        hold(made_pool, 2, 1)
        poster.post()
        waits = threading.Thread(target=lambda: until(lambda: poster.word(mailbox.ABORT)))
        waits.start()
        made_pool.close()
        waits.join()
        assert workers() == set()
        assert poster.word(mailbox.ANSWERED) == 0


def test_a_second_pool_goes_on_where_the_first_one_ended(layers: list[Layer]) -> None:
    with pool_of(layers) as (_, poster):
        message(poster)
        ask(poster)
    poster.write(mailbox.ABORT, 0)
    with closing(CpuPool(poster.box, [described(one) for one in layers], 2)) as second:
        second.awake()
        ask(poster)
        assert poster.word(mailbox.ANSWERED) == 2


def test_an_interrupt_while_it_is_closed_comes_when_no_thread_is_left(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    join = threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        signal.raise_signal(signal.SIGINT)
        join(self, timeout)

    with pool_of(layers, 3) as (made_pool, poster):
        message(poster)
        hold(made_pool, 1, 1)
        poster.post()
        monkeypatch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made_pool.close()
        assert workers() == set()


def test_an_interrupt_of_who_waits_leaves_the_pool_as_it_is(layers: list[Layer]) -> None:
    with pool_of(layers) as (made_pool, poster):
        message(poster)
        hold(made_pool, 1, 1)
        poster.post()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        hold(made_pool, 1, 0)
        until(lambda: poster.word(mailbox.ANSWERED) == 1)
        ask(poster)
        assert made_pool.failure is None


def test_a_pool_that_nobody_holds_ends_by_itself(layers: list[Layer]) -> None:
    poster = Poster(layers[0].case.width)
    made_pool = CpuPool(poster.box, [described(layers[0])], 2)
    made_pool.awake()
    del made_pool
    gc.collect()
    assert workers() == set()


def test_a_thread_that_cannot_be_started_leaves_none_behind(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fails_at_the_third(self: threading.Thread) -> None:
        if self.name == "strata-pool-2":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails_at_the_third)
    poster = Poster(layers[0].case.width)
    with pytest.raises(StrataError, match="can't start new thread"):
        CpuPool(poster.box, [described(layers[0])], 4)
    assert workers() == set()


def test_a_fork_says_nothing_in_the_mailbox_which_it_may_share(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(layers) as (made_pool, poster):
        monkeypatch.setattr(os, "getpid", lambda: -1)
        made_pool.close()
        monkeypatch.undo()
        message(poster)
        ask(poster)
        poster.write(mailbox.ABORT, 1)
        until(lambda: not workers())


FORK = """
import warnings

with pool_of([Layer(CASES[1])]) as (made_pool, poster):
    message(poster, 0)
    ask(poster)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forks with threads
        child = os.fork()
    if child == 0:
        try:
            made_pool.awake()
        except StrataError as error:
            print(error, error.hint, sep="; ")
        made_pool.close()
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    ask(poster)
    print(os.getpid(), poster.word(mailbox.ANSWERED), made_pool.failure)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    done = run_script(f"import os, sys\nfrom test_cpu_pool import *\n{FORK}")
    assert (done.returncode, done.stderr) == (0, "")
    said, status, parent = done.stdout.splitlines()
    number = parent.split()[0]
    assert said == (
        f"the CPU pool belongs to process {number}, this is its fork; "
        "start the child with the spawn method"
    )
    assert (status, parent) == ("7", f"{number} 2 None")


# -- what it is made of ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processors", "cores", "chosen", "threads"),
    [(2, 2, None, 0), (3, 3, None, 2), (16, 16, None, 15), (16, 8, None, 8), (16, 16, 4, 4)],
)
def test_a_pool_has_a_thread_a_core_and_leaves_a_processor_to_the_caller(
    monkeypatch: pytest.MonkeyPatch, processors: int, cores: int, chosen: int | None, threads: int
) -> None:
    monkeypatch.setattr(cpu, "usable_processors", lambda: processors)
    monkeypatch.setattr(cpu, "physical_cores", lambda: cores)
    assert pool_threads(chosen) == threads


def test_what_a_pool_cannot_work_on_is_refused(layers: list[Layer]) -> None:
    first, second = (described(layer) for layer in layers)
    poster = Poster(first.width)
    for box, wrong, threads in (
        (poster.box, [], 2),
        (poster.box, [first._replace(down=T.F16)], 2),
        (poster.box, [first, second._replace(width=512)], 2),
        (poster.box, [first._replace(inner=300)], 2),
        (poster.box + 8, [first], 2),
        (poster.box, [first], 0),
    ):
        with pytest.raises(ValueError, match=r"layers|experts"):
            CpuPool(box, wrong, threads)
