"""Steps of a model on a device: room for their cells, their programs, what policies do behind them.

Where the device draws tokens, the window behind a decoded token begins before the host has seen
that token (`device_windows`), if its choice is known and nothing has to move for it:

    device    window n | window n+1                  | window n+2
    host      token n-1 | begin n+1 | land n | policy, token n ... | begin n+2 | land n+1 ...

A window ahead is a guess that the next call asks for just that. Any other call *drops* it: waits,
forgets its cells, and takes back what it has counted, so that everything is as if it had not been.

The order of what may not overlap: memory and experts move only while nothing is in flight. What a
policy wants behind window n waits until n+1, which may read those slots, has landed; n+2 begins
behind the moves. Growth of the K/V does not wait for a window ahead, but the other way round: where
a window would need it, none begins ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.backend import Backend
from strata_nb.cache.elastic import ElasticKV
from strata_nb.cache.experts import ExpertArena, Tier
from strata_nb.cache.kv import KVCache
from strata_nb.cache.policy import Moves
from strata_nb.cache.residency import LATEST_ROWS, Residency
from strata_nb.cache.routing import RoutingTrace
from strata_nb.device_filling import DeviceFilling, Sent
from strata_nb.device_heads import Heads
from strata_nb.device_pool import DevicePool, NoAnswer
from strata_nb.device_readers import Reader
from strata_nb.device_streaming import ExpertStreaming
from strata_nb.device_windows import Counts, Fetched, Landed, Window, Windows
from strata_nb.errors import ConfigError, StrataError
from strata_nb.interrupts import interrupts_later
from strata_nb.kernels.pool_state import WORDS
from strata_nb.kernels.reference import Floats
from strata_nb.models.places import Programs
from strata_nb.sampling import Choice
from strata_nb.shared_tables import SharedTable
from strata_nb.steps import WINDOW_ROWS, Result, Row


class SharedCounts(NamedTuple):
    """Hold the tables of `ExpertArena.use` and `tally`, and where programs count."""

    use: SharedTable
    tally: SharedTable
    use_address: int
    tally_address: int


class _OneByOne(Exception):
    """Say that rows cannot be read together, because some of their experts cannot be read."""


class DeviceSteps:
    """Run steps, one after the other; who calls holds the model's lock.

    programs   for windows, and for every other step where `batch` is None
    batch      for steps of more rows than a window has
    streaming  brings missed experts for batches; None: batches are the programs of windows
    reads_host   whether the device reads experts in host memory; else a pool computes those of a
                 single row, and a batch brings all of them
    pool_state   where the device has the words of `pool_state.py`; 0: it has no pool
    vocabulary, top_k   of the model
    told   called behind a step with the number of its rows; None: nobody wants to know
    """

    def __init__(
        self,
        backend: Backend[Any],
        programs: Programs,
        batch: Programs | None,
        counts: SharedCounts,
        kv: KVCache,
        arena: ExpertArena,
        elastic: ElasticKV | None,
        residency: Residency,
        filling: DeviceFilling,
        streaming: ExpertStreaming | None,
        trace: RoutingTrace | None,
        told: Callable[[int], None] | None,
        *,
        reads_host: bool,
        pool_state: int,
        vocabulary: int,
        top_k: int,
    ) -> None:
        self.reads_host = reads_host
        self._backend, self._programs, self._counts = backend, programs, counts
        self._kv, self._arena, self._elastic = kv, arena, elastic
        self._residency, self._filling, self._streaming = residency, filling, streaming
        self._trace, self._told = trace, told
        self._pool_state = pool_state
        self._pool: DevicePool | None = None  # not before the experts are loaded
        self._lacks_pool: Callable[[], None] | None = None
        wanted = [programs.body, programs.head, programs.choice]
        if backend.chooses_tokens:
            wanted.append(programs.window)
        *prepared, window = [*backend.prepare(wanted), None][:4]
        self._few = self._many = Reader(backend, programs, prepared, vocabulary, top_k)
        if batch is not None:
            (body,) = backend.prepare(
                [batch.body], batch_rows=batch.max_rows, cuts=batch.layer_ends
            )
            prepared = [body, *backend.prepare([batch.head, batch.choice])]
            self._many = Reader(backend, batch, prepared, vocabulary, top_k)
        self._latest = self._few  # who began the last step
        self.windows = self._open_windows(window) if backend.chooses_tokens else None
        self._ahead: Window | None = None  # the only one in flight between two calls
        self._moves: Moves | None = None  # that wait until it has landed
        self._last: tuple[int, ...] = ()  # sequences of the last step
        self._repeatable: int | None = None  # whose row was the last step, while its cell is there
        self._has_flown = False  # since counts were fetched last

    def _open_windows(self, program: Any) -> Windows | None:
        counts = Counts(
            self._counts.use_address,
            self._counts.use.array.size,
            self._counts.tally_address,
            self._counts.tally.array.size,
            self._filling.addresses,
            self._pool_state,
        )
        words = self._few.route_words
        flights = self._backend.flights(
            Windows.most_sent(self._few.record, self._filling.most_sent),
            Windows.most_fetched(counts, words),
        )
        if flights is None:
            raise AssertionError("a device that draws tokens has flights")
        return Windows(flights, program, self._programs, self._few.record, counts, words)

    # What is done.

    def use_pool(self, pool: DevicePool) -> None:
        """Leave missed experts to the CPU from now on; whoever calls closes the pool."""
        self._pool = pool

    def lack_pool(self, tell: Callable[[], None]) -> None:
        """Call `tell`, once, when a window begins and there are fewer slots than experts."""
        self._lacks_pool = tell

    def step(self, rows: Sequence[Row]) -> Floats:
        try:
            return self._whole_step(rows, Heads.logits)
        except NoAnswer:  # all is as before the step, and nobody is asked again
            return self._whole_step(rows, Heads.logits)
        except _OneByOne:
            return np.concatenate(self._singly(rows, [Heads.logits] * len(rows)))

    def choose(
        self, rows: Sequence[Row], how: Sequence[Choice], ahead: Sequence[Choice]
    ) -> list[int]:
        try:
            return self._choose(rows, how, ahead)
        except NoAnswer:  # as in `step`
            return self._choose(rows, how, ahead)
        except _OneByOne:
            left = list(how)
            each = [[left.pop(0)] if row.wants_logits else [] for row in rows]
            found = self._singly(rows, [_drawing(some) for some in each])
            return [token for tokens in found for token in tokens]

    def _choose(
        self, rows: Sequence[Row], how: Sequence[Choice], ahead: Sequence[Choice]
    ) -> list[int]:
        before = {row.sequence: self._kv.length(row.sequence) for row in rows}
        try:
            now, self._ahead = self._asked_for(rows, how), None
            if now is None and (
                self.windows is None or not rows or not self.windows.can_draw(rows, how)
            ):
                return self._whole_step(rows, _drawing(how))
            return self._window(now, rows, how, ahead)
        except BaseException:
            self._break_off(before)
            raise

    def settle(self) -> None:
        """Let nothing be in flight, and let tables say what there is: then memory may be moved."""
        is_still = self._ahead is None and not self._has_flown and self._moves is None
        if is_still and not self._filling.is_behind:
            return
        with interrupts_later():
            ahead, self._ahead = self._ahead, None
            moves, self._moves = self._moves, None
            try:
                self._backend.wait()
                self._has_flown = False
                if ahead is not None:
                    self._repeatable = None
                    self._uncount(len(ahead.sequences))
                    if self._pool is not None:
                        self._pool.dropped(self._pool_words())
                self._filling.find()
            finally:
                if ahead is not None:
                    for sequence in ahead.sequences:
                        self._kv.rewind(sequence, self._kv.length(sequence))
                self._rest()
            if moves is not None:
                self._residency.carry_out(moves)

    def end(self) -> None:
        """Wait for a window in flight, which nobody wants: its memory is freed next."""
        if self._ahead is not None:
            with suppress(StrataError):
                self._backend.wait()

    @property
    def streamed(self) -> tuple[int, int]:
        """How many experts were copied for prompt batches so far, and their bytes."""
        streaming = self._streaming
        return (0, 0) if streaming is None else (streaming.streamed, streaming.streamed_bytes)

    def return_loan(self) -> None:
        """Give back what prompt batches borrowed; nothing is in flight."""
        if self._streaming is not None:
            self._streaming.end()

    def pause(self) -> None:
        """Begin nothing ahead of the next window.

        Somebody who looks at each token would have each window dropped, and run twice.
        """
        self._last = ()

    def forget(self, sequence: int) -> None:
        """Hear that a sequence has lost cells."""
        if self._repeatable == sequence:
            self._repeatable = None

    @property
    def can_run_again(self) -> bool:
        """Whether the programs of windows would read the row of the last step once more."""
        return self._repeatable is not None

    def silence(self) -> None:
        """Let no expert come to a slot in runs that are no steps."""
        self._filling.silence()

    def chosen(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the experts that the rows of the step begun last used: (rows, layers, top_k)."""
        return self._latest.chosen(rows)

    # Windows.

    def _asked_for(self, rows: Sequence[Row], how: Sequence[Choice]) -> Window | None:
        """Return the window in flight if it is this one; else there is none in flight."""
        if self._ahead is not None and self._ahead.is_of(rows, how):
            return self._ahead
        if self._ahead is not None or self._filling.is_behind:
            self.settle()
        return None

    def _window(
        self,
        now: Window | None,
        rows: Sequence[Row],
        how: Sequence[Choice],
        ahead: Sequence[Choice],
    ) -> list[int]:
        windows = self.windows
        if windows is None:
            raise AssertionError("windows are for devices that draw tokens")
        if now is None:
            now = self._begin(windows, rows, how)
        if self._moves is None:
            self._begin_ahead(windows, now, ahead, 1)
        landed = windows.land(now)
        if self._pool is not None and landed.pool is not None:
            self._pool.landed(landed.pool)
        if min(landed.tokens) < 0:
            return self._refused(now, rows, how)
        for sequence in now.sequences:
            self._kv.advance(sequence, 1)
        was_complete = self._arena.is_complete
        self._filling.landed(landed.addresses)
        if self._moves is not None:  # nothing is in flight
            moves, self._moves = self._moves, None
            self._residency.carry_out(moves, is_late=True)
            self._begin_ahead(windows, now, ahead, 0)
        self._follow(landed, len(rows), was_complete=was_complete)
        if self._told is not None:
            self._told(len(rows))
        if self._elastic is not None:
            self._elastic.when_idle()
        if self._ahead is not None:
            places = zip(now.sequences, landed.tokens, strict=True)
            self._ahead.rows = [Row(sequence, token, True) for sequence, token in places]
        else:
            self._rest()
        self._last = now.sequences
        # Behind all that may fail: a window that is repeated counts once.
        if self._trace is not None and landed.routes is not None:
            self._trace.append(self._few.routes(landed.routes, len(rows)))
        return landed.tokens

    def _begin(self, windows: Windows, rows: Sequence[Row], how: Sequence[Choice]) -> Window:
        new = Counter(row.sequence for row in rows)
        self.return_loan()  # the step before was a batch if there is one
        if self._elastic is not None and not self._elastic.is_ample(new):
            self.settle()  # who gives the memory is chosen by the use of experts
            self._elastic.before_step(new)
        if len(rows) > 1 and not self._is_served(None):
            raise _OneByOne
        for sequence, cells in new.items():
            self._kv.extend(sequence, cells)
        lengths = {sequence: self._kv.length(sequence) for sequence in new}
        positions = []
        for row in rows:
            positions.append(lengths[row.sequence])
            lengths[row.sequence] += 1
        self._has_flown, self._latest = True, self._few
        self._repeatable = rows[0].sequence if len(rows) == 1 else None
        beside, fetched = self._planned(), self._fetched()
        return windows.begin(rows, how, positions, fetched, beside)

    def _begin_ahead(
        self, windows: Windows, now: Window, how: Sequence[Choice], unread: int
    ) -> None:
        """Begin the window that reads what `now` draws, if nothing has to move for that.

        Where sequences take turns, a window ahead would be dropped each time: none begins then.

        how      choices of that window, none where they depend on the tokens
        unread   cells that `now` writes and that are not counted yet
        """
        sequences, kv = now.sequences, self._kv
        if not how or self._last != sequences or len(set(sequences)) < len(sequences):
            return
        cells = unread + 1
        if not all(kv.has_room(sequence, cells) for sequence in sequences):
            new = dict.fromkeys(sequences, cells)
            if any(kv.length(sequence) + cells > kv.context for sequence in sequences):
                return
            if kv.blocks_wanted(new) > kv.usable_blocks:
                return
            if self._elastic is not None and not self._elastic.is_ample(new):
                if now.fetched.counts and not self._arena.is_complete:  # policies know of each step
                    self._elastic.foresee(self._residency.heat())  # while `now` runs, if it does
                return
        for sequence in sequences:
            kv.extend(sequence, cells)
        if not windows.can_follow(now, how):
            return
        positions = [kv.length(sequence) + unread for sequence in sequences]
        self._has_flown = True
        beside, fetched = self._planned(), self._fetched()
        self._ahead = windows.begin_behind(now, how, positions, fetched, beside)

    def _planned(self) -> Sent | None:
        """Return the plan of a window that begins now, which those who serve misses await."""
        if self._pool is not None:
            self._pool.awake()
            self._filling.cpu_share = self._pool.share
        elif self._lacks_pool is not None and self._arena.usable_slots < self._arena.use.size:
            tell, self._lacks_pool = self._lacks_pool, None
            tell()
        return self._filling.begin()

    def _rest(self) -> None:
        """Let nobody wait for windows while none is in flight."""
        if self._pool is not None:
            self._pool.rest()

    def _fetched(self) -> Fetched:
        """Say what a window that begins now shall bring beside its tokens."""
        moving = self._arena.usable_slots > 0 and not self._arena.is_complete
        return Fetched(
            moving or self._told is not None,
            self._trace is not None,
            moving and self._filling.addresses != 0,
            self._pool is not None,
        )

    def _follow(self, landed: Landed, rows: int, *, was_complete: bool) -> None:
        """Tell policies of a window, and do what they want now or behind the window in flight.

        was_complete   every expert had a slot before it: who came in it was missed by it
        """
        if landed.use is not None and landed.tally is not None:
            self._counts.use.receive().reshape(-1)[:] = landed.use
            self._counts.tally.receive()[:] = landed.tally
        moves = Moves([], [])
        if self._arena.usable_slots:
            if landed.use is None or was_complete:
                self._residency.pass_over(rows)
            else:
                moves = self._residency.decide(rows)
        if self._ahead is None:
            self._residency.carry_out(moves)
        elif moves.evicted or moves.inserted:
            self._moves = moves

    def _refused(self, now: Window, rows: Sequence[Row], how: Sequence[Choice]) -> list[int]:
        """Read rows again whose logits gave no token: the host says why."""
        self.settle()
        for sequence in now.sequences:
            self._kv.rewind(sequence, self._kv.length(sequence))
        return self._whole_step(rows, _drawing(how))

    def _uncount(self, rows: int) -> None:
        """Take back what the last step has counted, which was dropped."""
        if not self._programs.chosen:
            return
        use, tally = self._counts.use.array.copy(), self._counts.tally.array.copy()
        for row in self.chosen(rows):
            for layer, experts in enumerate(row):
                use[layer, experts] -= 1
                hits = np.count_nonzero(self._arena.expert_tier[layer, experts] == Tier.SLOT)
                tally -= [hits, len(experts) - hits]
        self._counts.use[:] = use
        self._counts.tally[:] = tally

    # Other steps.

    def _whole_step(
        self, rows: Sequence[Row], head: Callable[[Heads, list[int]], Result]
    ) -> Result:
        """Read rows; return what `head` returns, which is called with the rows it is for."""
        most = self._many.most_rows
        if not 1 <= len(rows) <= most:
            raise ConfigError(f"a step of {len(rows)} rows", hint=f"1 to {most} rows")
        self.settle()
        new = Counter(row.sequence for row in rows)
        before = {sequence: self._kv.length(sequence) for sequence in new}
        is_ample = self._elastic is None or self._elastic.is_ample(new)
        if len(rows) <= WINDOW_ROWS or not is_ample:
            self.return_loan()
        if self._elastic is not None:
            self._elastic.before_step(new)
        try:
            result = self._step(rows, new, dict(before), head)
        except BaseException:
            self._break_off(before)
            raise
        self._last = tuple(new)
        if self._elastic is not None:
            self._elastic.when_idle()
        return result

    def _step(
        self,
        rows: Sequence[Row],
        new: Counter[int],
        lengths: dict[int, int],
        head: Callable[[Heads, list[int]], Result],
    ) -> Result:
        for sequence, cells in new.items():
            self._kv.extend(sequence, cells)
        reader = self._few if len(rows) <= WINDOW_ROWS else self._many
        self._latest = reader
        if reader is not self._few:
            self._filling.silence()  # the plan that the device has is an older window's
        elif (planned := self._planned()) is not None:
            self._backend.send(*planned)
        by_layer = len(rows) > WINDOW_ROWS and not self._backend.batches_apart
        streaming = self._streaming if reader is not self._few else None
        used_before = self._arena.use.copy()
        is_streamed = streaming is not None and streaming.begin(len(rows))
        if len(rows) > 1 and not self._is_served(streaming):
            raise _OneByOne
        brings = streaming if is_streamed else None
        reader.read(rows, lengths, by_layer=by_layer, streaming=brings)
        result = head(reader.heads, [n for n, row in enumerate(rows) if row.wants_logits])
        self._backend.wait()
        if reader is self._few and self._pool is not None:
            self._rest()
            self._pool.landed(self._pool_words())
        was_complete = self._arena.is_complete
        if streaming is not None:
            used = self._arena.use - used_before
            self._residency.note_batch(used, streaming.coming)
        self._filling.find(is_counted=True)
        if self._arena.usable_slots:
            if was_complete:
                self._residency.pass_over(len(rows))
            else:
                is_window = len(rows) <= WINDOW_ROWS
                self._residency.after(
                    len(rows), None if is_window else reader.latest(len(rows), LATEST_ROWS)
                )
        if self._trace is not None:  # behind all that may fail: a step that is repeated counts once
            self._trace.append(self.chosen(len(rows)))
        for sequence, cells in new.items():
            self._kv.advance(sequence, cells)
        self._repeatable = rows[0].sequence if len(rows) == 1 else None
        if self._told is not None:
            self._told(len(rows))
        return result

    def _singly(
        self, rows: Sequence[Row], heads: Sequence[Callable[[Heads, list[int]], Result]]
    ) -> list[Result]:
        """Read rows one after the other; on an error all is as before the first."""
        before = {row.sequence: self._kv.length(row.sequence) for row in rows}
        try:
            return [self._whole_step([row], head) for row, head in zip(rows, heads, strict=True)]
        except BaseException:
            for sequence, length in before.items():
                self._kv.rewind(sequence, length)
            raise

    # What they share.

    def _is_served(self, streaming: ExpertStreaming | None) -> bool:
        """Return whether the experts of several rows are all where the device reads them.

        streaming   what brings experts for these rows, and knows which
        """
        if self.reads_host or self._arena.is_complete:
            return True
        missing = self._arena.expert_tier == Tier.IN_PLACE
        return streaming is not None and not np.any(missing & ~streaming.coming)

    def _pool_words(self) -> npt.NDArray[np.int64]:
        """Fetch what the device remembers of the experts that the CPU computes."""
        words = np.empty(WORDS, np.int64)
        self._backend.fetch(self._pool_state, words)
        return words

    def _break_off(self, before: Mapping[int, int]) -> None:
        """End what is in flight after an error, and forget the cells behind these lengths.

        What experts were used for it stays counted: policies take no step for more than its rows.
        """
        self._ahead = self._moves = self._repeatable = None
        try:
            self._backend.wait()  # what was begun may still use what is moved or freed next
            self._has_flown = False
            if self._pool is not None:
                self._pool.dropped(self._pool_words())
            self._filling.find_after_failure()
        except StrataError:  # what failed first is what is told
            self._filling.lose()
        self._rest()
        with suppress(StrataError):
            self.return_loan()
        for sequence, length in before.items():
            self._kv.rewind(sequence, length)  # the room that it got is free again


def _drawing(how: Sequence[Choice]) -> Callable[[Heads, list[int]], list[int]]:
    """Return what draws the tokens of a row."""
    return lambda heads, wanted: heads.tokens(wanted, how)
