"""The window behind a token begins before the token is known, and nothing else is different."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing_backend import DrawingBackend

from strata_nb import Engine, Options, Sampling, backend
from strata_nb.addresses import memory_view
from strata_nb.cache.accounts import Change
from strata_nb.cache.kv_layout import BLOCK_CELLS
from strata_nb.cache.policy import Heat
from strata_nb.device_model import DeviceModel
from strata_nb.errors import ConfigError, StrataError, UnsupportedDevice
from strata_nb.sampling import Choice, uniform
from strata_nb.session import Generation, Session
from strata_nb.steps import Row

PROMPT = list(range(7, 27))
WHOLE = "host:1x64MiB"  # room for all experts
HALF = {"device": WHOLE, "expert_cache": "40%"}


@contextmanager
def engine_of(
    path: Path,
    device: str = WHOLE,
    opens: type[DrawingBackend] = DrawingBackend,
    **options: Any,
) -> Iterator[Engine]:
    """Open a model on a device that draws tokens; its accounts must be right in the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "open_backend", opens)
        options = {"ctx_size": 256, "prefill": 8, "threads": 1, **options}
        with Engine.open(Options(path, device=device, **options)) as engine:
            yield engine
            model_of(engine).report()
            model_of(engine).ledger.check_integrity()


def model_of(engine: Engine) -> DeviceModel:
    model = engine._model
    assert isinstance(model, DeviceModel)
    return model


def device_of(engine: Engine) -> DrawingBackend:
    device = model_of(engine)._backend
    assert isinstance(device, DrawingBackend)
    return device


@contextmanager
def nothing_ahead() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generation, "_can_go_ahead", lambda _: False)
        yield


@dataclass
class State:
    """What a run leaves: its tokens, and all that must not depend on what was begun ahead.

    Which experts have slots may: what a policy wants behind a window is done a window later.
    """

    ids: list[list[int]]
    use: list[list[int]]
    choices: int
    hits: int | None
    free_cells: int
    lengths: list[int]

    @classmethod
    def of(cls, engine: Engine, sessions: Sequence[Session]) -> State:
        model = model_of(engine)
        report = model.report()
        moves = model.arena.usable_slots > 0
        return cls(
            [session.ids for session in sessions],
            model.arena.use.tolist(),
            report.hits + report.misses,
            None if moves else report.hits,
            model.kv.free_cells,
            [model.length(session._sequence) for session in sessions],
        )


Use = Callable[[Engine], Sequence[Session]]


def check_same(path: Path, use: Use, *, goes_ahead: bool = True, **options: Any) -> State:
    """Compare a use of an engine with the same where nothing begins ahead."""
    with engine_of(path, **options) as engine, nothing_ahead():
        expected = State.of(engine, use(engine))
        assert device_of(engine).most_in_flight == 1
    with engine_of(path, **options) as engine:
        assert State.of(engine, use(engine)) == expected
        assert device_of(engine).most_in_flight == (2 if goes_ahead else 1)
    return expected


def begun(engine: Engine) -> Session:
    session = engine.open_session()
    session.extend(PROMPT)
    return session


def write(session: Session, count: int, **sampling: Any) -> list[int]:
    options = {"seed": 3, "temperature": 1.0, **sampling}
    tokens = session.generate(max_tokens=count, sampling=Sampling(**options), ignore_eos=True)
    return [token.id for token in tokens]


# Tokens, and what is left behind.


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0},
        {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 3, "top_p": 0.5, "seed": 11},
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", ["100%", "40%", "0"])
def test_tokens_and_accounts_are_the_same(small: Path, sampling: Any, cache: str) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        session = begun(engine)
        write(session, 40, **sampling)
        write(session, 7, **sampling)
        return [session]

    check_same(small, use, expert_cache=cache)


@pytest.mark.parametrize(
    "penalty", [{"repeat_penalty": 1.3}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}]
)
def test_nothing_begins_ahead_where_a_choice_needs_the_tokens_before_it(
    small: Path, penalty: Any
) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        session = begun(engine)
        write(session, 20, **penalty)
        return [session]

    check_same(small, use, goes_ahead=False)


def test_a_generation_begins_no_window_more_than_it_has_tokens(small: Path) -> None:
    with engine_of(small) as engine:
        session = begun(engine)
        assert len(write(session, 12)) == 12
        assert device_of(engine).begun == 11  # the first is drawn from the prompt's logits
        assert model_of(engine).length(session._sequence) == session.position - 1


def test_no_window_reads_beyond_the_context(small: Path) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        session = begun(engine)
        generation = session.generate(sampling=Sampling(seed=1), ignore_eos=True)
        assert len(list(generation)) == engine.ctx_size + 1 - len(PROMPT)
        assert generation.finish == "context"
        return [session]

    check_same(small, use, ctx_size=40)


def test_none_begins_ahead_of_the_last_cell_whoever_asks_for_it(small: Path) -> None:
    with engine_of(small, ctx_size=70) as engine:
        model, how = model_of(engine), [Choice((), Sampling(seed=1), 0.5)]
        sequence = model.open_sequence()
        token = 1
        for _ in range(70):
            (token,) = model.choose([Row(sequence, token, True)], how, how)
        assert model.length(sequence) == 70
        assert device_of(engine).begun == 70


def test_what_was_begun_behind_the_end_of_an_answer_leaves_nothing(small: Path) -> None:
    with engine_of(small) as engine, nothing_ahead():
        ids = write(begun(engine), 30)

    for end in sorted({token for token in ids[3:] if ids.index(token) > 2}, key=ids.index)[:3]:

        def use(engine: Engine, end: int = end) -> Sequence[Session]:
            engine.tokenizer.end_ids = frozenset([end])  # type: ignore[misc]
            session = begun(engine)
            generation = session.generate(sampling=Sampling(seed=3, temperature=1.0))
            assert [token.id for token in generation] == ids[: ids.index(end) + 1]
            assert generation.finish == "end"
            write(session, 5)
            return [session]

        check_same(small, use, **HALF)


def test_a_block_that_a_dropped_window_took_is_free_again(small: Path) -> None:
    with engine_of(small) as engine:
        session, kv = begun(engine), model_of(engine).kv
        generation = session.generate(sampling=Sampling(seed=3), ignore_eos=True)
        while kv.length(session._sequence) < BLOCK_CELLS:
            next(generation)
        assert kv.live_blocks == 2
        model_of(engine).report()
        assert kv.live_blocks == 1
        next(generation)


def test_a_user_who_stops_looking_and_comes_back_sees_no_difference(small: Path) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        session = begun(engine)
        sampling = Sampling(seed=3)
        some = session.generate(sampling=sampling, ignore_eos=True)
        for _ in range(5):
            next(some)
        session.append(9)
        session.extend([4, 5, 6])
        write(session, 4)
        session.rewind(session.position - 6)
        write(session, 4)
        session.draft([1, 2, 3])
        session.commit(1)
        session.next_logits()
        write(session, 4)
        with pytest.raises(StrataError, match="without this generation"):
            next(some)
        return [session]

    for options in ({}, HALF):
        check_same(small, use, **options)


def test_sessions_that_take_turns_see_no_difference_and_waste_nothing(small: Path) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        sessions = [begun(engine), begun(engine)]
        generations = [
            session.generate(max_tokens=20, sampling=Sampling(seed=n), ignore_eos=True)
            for n, session in enumerate(sessions)
        ]
        for turn in (0, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1):
            next(generations[turn])
        before = device_of(engine).begun
        for turn in (0, 1, 0, 1, 0, 1):
            next(generations[turn])
        assert device_of(engine).begun == before + 6
        return sessions

    for options in ({}, HALF):
        check_same(small, use, **options)


def test_a_session_that_is_dropped_under_way_gives_its_cells_back(small: Path) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        session = begun(engine)
        other = begun(engine)
        next(session.generate(sampling=Sampling(seed=1), ignore_eos=True))
        some = session.generate(sampling=Sampling(seed=1), ignore_eos=True)
        next(some), next(some)
        session.close()
        write(other, 3)
        return [other]

    check_same(small, use)


def test_routes_are_those_of_the_tokens_that_were_read(small: Path, tmp_path: Path) -> None:
    def routes(engine: Engine, path: Path) -> np.ndarray:
        session = begun(engine)
        write(session, 9)
        some = session.generate(sampling=Sampling(seed=1), ignore_eos=True)
        for _ in range(4):
            next(some)
        engine.save_routing_trace(path)
        write(session, 3)
        engine.save_routing_trace(path)
        assert model_of(engine).length(session._sequence) == len(np.load(path))
        return np.load(path)  # type: ignore[no-any-return]

    path = tmp_path / "routes.npy"
    with engine_of(small, routing_trace=path, **HALF) as engine, nothing_ahead():
        expected = routes(engine, path)
    with engine_of(small, routing_trace=path, **HALF) as engine:
        assert np.array_equal(routes(engine, path), expected)
        assert device_of(engine).most_in_flight == 2


def test_routes_of_a_window_that_is_repeated_are_kept_once(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    path = tmp_path / "routes.npy"
    with engine_of(small, routing_trace=path, **HALF) as engine:
        session, model = begun(engine), model_of(engine)
        with monkeypatch.context() as patch:
            patch.setattr(model._elastic, "when_idle", interrupted)
            with pytest.raises(KeyboardInterrupt):
                write(session, 3)
        write(session, 3)
        engine.save_routing_trace(path)
        assert model.length(session._sequence) == len(np.load(path))


@pytest.mark.parametrize("count", [2, 8])
def test_windows_of_several_rows_go_ahead_together(small: Path, count: int) -> None:
    def texts(model: DeviceModel, ahead: bool) -> list[list[int]]:
        sequences = [model.open_sequence() for _ in range(count)]
        found = [[10 + sequence] for sequence in sequences]
        choices = [
            [Choice((), Sampling(), uniform(5, sequence, place)) for sequence in sequences]
            for place in range(10)
        ]
        for place, how in enumerate(choices[:9]):
            rows = [Row(s, text[-1], True) for s, text in zip(sequences, found, strict=True)]
            drawn = model.choose(rows, how, choices[place + 1] if ahead else ())
            for text, token in zip(found, drawn, strict=True):
                text.append(token)
        for sequence in sequences:
            assert model.length(sequence) == 9
            model.forget_sequence(sequence)
        return found

    with engine_of(small, ctx_size=512, **HALF) as engine:
        model = model_of(engine)
        expected = texts(model, ahead=False)
        assert device_of(engine).most_in_flight == 1
        assert texts(model, ahead=True) == expected
        assert device_of(engine).most_in_flight == 2


def test_a_window_that_was_not_foreseen_is_answered_as_if_nothing_had_been(small: Path) -> None:
    """Another token, another choice, other rows: each drops what is ahead."""
    choices = [Choice((), Sampling(), uniform(5, 0, place)) for place in range(5)]
    with engine_of(small) as engine:
        model = model_of(engine)
        first, second = model.open_sequence(), model.open_sequence()

        def begin() -> int:
            model.rewind(first, 0)
            model.rewind(second, 0)
            (token,) = model.choose([Row(first, 3, True)], choices[:1])
            (token,) = model.choose([Row(first, token, True)], choices[1:2], choices[2:3])
            return token

        def check(rows: list[Row], how: list[Choice], length: int = 2) -> None:
            begin()
            assert model._steps._ahead is not None
            model.rewind(first, length)
            found = model.choose(rows, how)
            begin()
            model.report()
            assert model._steps._ahead is None
            model.rewind(first, length)
            assert model.choose(rows, how) == found

        token = begin()
        check([Row(first, token + 1, True)], choices[2:3])
        check([Row(first, token, True)], choices[3:4])
        check([Row(first, token, True)], [choices[2]._replace()])
        check([Row(first, token, True)], choices[2:3])
        check([Row(first, token, True)], choices[2:3], length=1)
        check([Row(second, token, True)], choices[2:3])
        check([Row(first, token, True), Row(second, 4, True)], choices[2:4])
        check([Row(first, token, True), Row(first, 4, True)], choices[2:4])
        check([Row(first, token, False), Row(first, 4, True)], choices[2:3])


# Memory that moves.


def test_growth_of_the_kv_changes_nothing(small: Path) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        session = begun(engine)
        write(session, 500)
        assert model_of(engine).ledger.growths > 1
        return [session]

    check_same(small, use, ctx_size=1024, kv_grow=True, kv_grow_init=64, kv_grow_step=64, **HALF)


def test_growth_that_nobody_gives_for_comes_while_a_window_is_in_flight(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight = []
    sizes = {"ctx_size": 1024, "kv_grow_init": 64, "kv_grow_step": 64}
    with engine_of(small, kv_grow=True, **sizes, **HALF) as engine:
        session, ledger = begun(engine), model_of(engine).ledger
        grow_beside = ledger.grow_kv_beside

        def grow(blocks: int) -> Change:
            in_flight.append(device_of(engine)._in_flight)
            return grow_beside(blocks)

        monkeypatch.setattr(ledger, "grow_kv_beside", grow)
        monkeypatch.setattr(ledger, "grow_kv", pytest.fail)
        growths = ledger.growths
        write(session, 500)
        assert ledger.growths == growths + len(in_flight) > growths + 2
        assert set(in_flight) == {1}


def test_what_experts_are_worth_is_asked_while_a_window_runs(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight = []
    sizes = {"ctx_size": 1024, "kv_grow_init": 64, "kv_grow_step": 64}
    with engine_of(small, kv_grow=True, **sizes, **HALF) as engine:
        session, model = begun(engine), model_of(engine)
        slots, ledger, heat = model.arena.usable_slots, model.ledger, model._residency.heat

        def asked() -> Heat:
            in_flight.append(device_of(engine)._in_flight)
            return heat()

        monkeypatch.setattr(model._residency, "heat", asked)
        monkeypatch.setattr(ledger, "heat", pytest.fail)  # while a window waits
        ledger.reserve_bytes = 1 << 40  # so that experts must give
        write(session, 500)
        assert model.arena.usable_slots < slots
        assert in_flight.count(1) > 2


def test_a_give_back_in_the_middle_changes_no_token(small: Path) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        session = begun(engine)
        generation = session.generate(max_tokens=60, sampling=Sampling(seed=2), ignore_eos=True)
        for number, _ in enumerate(generation):
            if number in (10, 40):
                (device,) = engine.describe().devices
                assert device.free_bytes is not None
                engine.set_vram_reserve((device.free_bytes >> 20) + 1)
            elif number in (25, 50):
                engine.set_vram_reserve(None)
        return [session]

    check_same(small, use, vram_elastic=True)


def test_who_looks_at_each_token_wastes_one_window_at_most(small: Path) -> None:
    def use(engine: Engine) -> Sequence[Session]:
        session = begun(engine)
        generation = session.generate(max_tokens=20, sampling=Sampling(seed=2), ignore_eos=True)
        for number, _ in enumerate(generation):
            if 4 < number < 15:
                assert engine.look() is not None
        assert device_of(engine).begun <= 19 + 1
        return [session]

    for options in ({}, HALF):
        check_same(small, use, **options)


def test_what_a_policy_wants_behind_a_window_that_is_dropped_is_done(small: Path) -> None:
    with engine_of(small, **HALF) as engine:
        model = model_of(engine)
        generation = begun(engine).generate(sampling=Sampling(seed=3), ignore_eos=True)
        while model._steps._moves is None:
            next(generation)
        before = model._residency.inserted
        engine.describe()
        assert model._residency.inserted > before


def test_a_step_is_measured_only_while_it_can_run_again(small: Path) -> None:
    def check(engine: Engine, error: type[StrataError]) -> None:
        with pytest.raises(error):
            engine.profile(1)

    with engine_of(small) as engine:
        check(engine, ConfigError)
        session = begun(engine)
        check(engine, ConfigError)  # several rows
        session.append(1)
        session.next_logits()
        check(engine, UnsupportedDevice)  # which a card is not
        write(session, 3)
        check(engine, UnsupportedDevice)
        generation = session.generate(sampling=Sampling(seed=3), ignore_eos=True)
        for _ in range(3):
            next(generation)
        check(engine, ConfigError)  # the window ahead is dropped
        write(session, 3)
        session.rewind(session.position - 2)
        check(engine, ConfigError)
        write(session, 3)
        session.close()
        check(engine, ConfigError)


def test_a_window_in_flight_has_ended_when_its_memory_is_freed(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "open_backend", DrawingBackend)
    options = Options(small, device=WHOLE, ctx_size=256, prefill=8, threads=1)
    with Engine.open(options) as engine:
        device = device_of(engine)
        generation = begun(engine).generate(sampling=Sampling(seed=3), ignore_eos=True)
        for _ in range(3):
            next(generation)
        assert device._queue
    assert not device._queue


def test_policies_hear_of_the_tokens_that_they_were_not_asked_about(small: Path) -> None:
    """While every expert has a slot; then slots are given away, and the hot experts stay."""
    found = []
    for ahead in (True, False):
        with engine_of(small, vram_elastic=True) as engine:
            model = model_of(engine)
            model.arena.fill(np.ndindex(model.arena.use.shape))  # type: ignore[arg-type]
            assert model.arena.is_complete
            with nullcontext() if ahead else nothing_ahead():
                write(begun(engine), 40)
            assert model._residency._unseen_rows >= 40
            (device,) = engine.describe().devices
            assert device.free_bytes is not None
            engine.set_vram_reserve((device.free_bytes >> 20) + 1)
            assert model._residency._unseen_rows == 0
            assert 0 < engine.describe().resident < model.arena.use.size
            found.append((model._residency.heat(), model.arena.expert_tier.copy()))
    for first, second in zip(*found, strict=True):
        assert np.array_equal(first, second)


# What goes wrong.


class Interrupted:
    """Raise at the n-th call of a function."""

    def __init__(self, function: Callable[..., Any], nth: int, error: BaseException) -> None:
        self.function, self.left, self.error = function, nth, error

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*given, **named)


@pytest.mark.parametrize("name", ["begin", "land", "_execute", "run"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), StrataError("no")], ids=["Ctrl-C", "error"])
def test_after_an_interrupt_the_next_token_is_the_one_that_would_have_come(
    small: Path, name: str, error: BaseException
) -> None:
    with engine_of(small, **HALF) as engine, nothing_ahead():
        expected = write(begun(engine), 12)
    with engine_of(small, **HALF) as engine:
        device = device_of(engine)
        for nth in range(1, 6):
            session = begun(engine)
            generation = session.generate(
                max_tokens=12, sampling=Sampling(seed=3, temperature=1.0), ignore_eos=True
            )
            ids = [next(generation).id for _ in range(3)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(device, name, Interrupted(getattr(device, name), nth, error))
                with pytest.raises(type(error)):
                    ids.extend(token.id for token in generation)
            ids += [token.id for token in generation]
            assert ids == expected, nth
            session.close()
            model_of(engine).report()
            assert model_of(engine).kv.live_blocks == 0
            model_of(engine).ledger.check_integrity()


@pytest.mark.parametrize("name", ["land", "_follow"])
def test_after_an_error_every_sequence_is_as_it_was(
    small: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where the cells of the window were counted, and another is ahead."""
    with engine_of(small) as engine:
        model = model_of(engine)
        session = begun(engine)
        generation = session.generate(max_tokens=9, sampling=Sampling(seed=3), ignore_eos=True)
        next(generation), next(generation), next(generation)
        length = model.length(session._sequence)
        failing = device_of(engine) if name == "land" else model._steps
        with monkeypatch.context() as patch:
            patch.setattr(failing, name, Interrupted(lambda *_: None, 1, StrataError("no")))
            with pytest.raises(StrataError, match="no"):
                next(generation)
        assert model._steps._ahead is None
        assert model.length(session._sequence) == length
        assert model.kv.live_blocks == 1
        assert len(list(generation)) == 6


def test_logits_that_give_no_token_are_told_by_the_host(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(small) as engine:
        session, device = begun(engine), device_of(engine)
        generation = session.generate(sampling=Sampling(seed=3), ignore_eos=True)
        first = [next(generation).id for _ in range(3)]
        execute, places = device._execute, model_of(engine)._programs

        def damaged(program: Any, *given: Any) -> None:
            execute(program, *given)
            bad = np.full(engine.description.vocab_size, np.nan, np.float32)
            memory_view(places.logits, bad.nbytes)[:] = bad.view(np.uint8)
            memory_view(places.drawn, 8).view(np.int64)[0] = -1

        with monkeypatch.context() as patch:
            patch.setattr(device, "_execute", damaged)
            with pytest.raises(StrataError, match="are NaN or infinite"):
                next(generation), next(generation)
        assert session.ids[len(PROMPT) : len(PROMPT) + 3] == first
        model_of(engine).report()
        next(generation)
