"""A device that gives missed experts slots: tokens stay, and the host knows where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filling_backend import FillingBackend, layers_of
from test_launch_ahead import Interrupted, begun, engine_of, model_of, nothing_ahead, write

from strata_nb import Engine, Sampling
from strata_nb.addresses import memory_view
from strata_nb.cache.experts import Tier
from strata_nb.cache.policy import Moves
from strata_nb.errors import StrataError
from strata_nb.steps import Row

LENGTH = 40


@contextmanager
def filling(path: Path, **options: Any) -> Iterator[Engine]:
    """Open a model on a device that fills; in the end the host must know what it did."""
    options = {"expert_cache": "40%", **options}
    with engine_of(path, opens=FillingBackend, **options) as engine:
        yield engine
        check_tables(engine)


def device_of(engine: Engine) -> FillingBackend:
    device = model_of(engine)._backend
    assert isinstance(device, FillingBackend)
    return device


def check_tables(engine: Engine) -> None:
    """Compare what the host knows with the device's tables and with what is in the slots."""
    model = model_of(engine)
    model.report()
    arena, places = model.arena, model._filling_places
    assert places is not None
    device_of(engine)._do()
    table = np.empty(arena.use.shape, np.int64)
    model._backend.fetch(places.addresses, table)
    if model._steps._counts.use.array.any():
        assert np.array_equal(table, arena.expert_address)
    parts = [of_layer for _, of_layer in layers_of(model._programs.body)]
    for layer, expert in np.argwhere(arena.expert_address != arena.homes):
        slot, home = int(arena.expert_address[layer, expert]), int(arena.homes[layer, expert])
        for at, size in parts[layer]:
            assert np.array_equal(memory_view(slot + at, size), memory_view(home + at, size))
    model.ledger.check_integrity()


@pytest.fixture(scope="module")
def expected(small: Path) -> list[int]:
    with engine_of(small) as engine:
        return write(begun(engine), LENGTH)


@pytest.mark.parametrize("cache", ["100%", "40%", "6", "0"])
@pytest.mark.parametrize("ahead", [True, False])
def test_tokens_are_the_same_however_many_slots_there_are(
    small: Path, expected: list[int], cache: str, ahead: bool
) -> None:
    with filling(small, expert_cache=cache) as engine, pytest.MonkeyPatch.context() as patch:
        if not ahead:
            patch.setattr("strata_nb.session.Generation._can_go_ahead", lambda _: False)
        assert write(begun(engine), LENGTH) == expected
        report = model_of(engine).report()
        residency, arena = model_of(engine)._residency, model_of(engine).arena
        assert arena.filled == device_of(engine).came == report.inserted
        if cache in ("40%", "6"):
            assert report.hits > 0 < report.misses
            assert arena.filled > arena.usable_slots  # slots were used again
        assert residency.missed_bytes >= residency.inserted_bytes


def test_policies_that_keep_what_they_have_fill_free_slots_only(
    small: Path, expected: list[int]
) -> None:
    for adapt in ("off", "swap"):
        with filling(small, adapt=adapt) as engine:
            assert write(begun(engine), LENGTH) == expected
            slots = model_of(engine).arena.usable_slots
            assert model_of(engine).arena.filled == slots
            assert (model_of(engine).report().inserted > slots) == (adapt == "swap")


@pytest.mark.parametrize("adapt", ["insert", "swap", "off"])
def test_missed_bytes_are_those_of_the_experts_that_found_no_slot(small: Path, adapt: str) -> None:
    """Where a policy swaps, experts move behind a window that is not counted yet."""
    every = 2 if adapt == "swap" else None
    with filling(small, adapt=adapt, adapt_every=every) as engine:
        write(begun(engine), LENGTH)
        sizes, missed = model_of(engine).arena.layout.blob_bytes, device_of(engine).missed
        assert engine.describe().misses == missed.total() > 0
        expected = sum(sizes[layer] * count for layer, count in missed.items())
        assert engine.describe().missed_bytes == expected


def test_sessions_that_take_turns_and_drop_windows_see_no_difference(small: Path) -> None:
    def texts(engine: Engine) -> Sequence[list[int]]:
        sessions = [begun(engine), begun(engine)]
        generations = [
            session.generate(max_tokens=30, sampling=Sampling(seed=n), ignore_eos=True)
            for n, session in enumerate(sessions)
        ]
        for turn in (0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0):
            next(generations[turn])
            if turn:
                model_of(engine).report()
        return [session.ids for session in sessions]

    with engine_of(small) as engine:
        wanted = texts(engine)
    with filling(small) as engine:
        assert texts(engine) == wanted


def test_memory_that_is_given_away_and_taken_back_changes_no_token(small: Path) -> None:
    def written(engine: Engine) -> list[int]:
        generation = begun(engine).generate(
            max_tokens=60, sampling=Sampling(seed=2), ignore_eos=True
        )
        ids = []
        for number, token in enumerate(generation):
            ids.append(token.id)
            if number in (10, 40):
                (device,) = engine.describe().devices
                assert device.free_bytes is not None
                engine.set_vram_reserve((device.free_bytes >> 20) + 1)
            elif number in (25, 50):
                engine.set_vram_reserve(None)
        return ids

    options = {"vram_elastic": True, "kv_grow": True, "kv_grow_init": 64, "kv_grow_step": 64}
    with engine_of(small, **options) as engine:
        wanted = written(engine)
    with filling(small, expert_cache="60%", **options) as engine:
        assert written(engine) == wanted


def test_after_an_interrupt_the_host_knows_what_windows_have_done(
    small: Path, expected: list[int]
) -> None:
    for name in ("begin", "land", "_execute", "run"):
        for nth in range(1, 4):
            with filling(small) as engine:
                device = device_of(engine)
                sampling = Sampling(seed=3, temperature=1.0)
                generation = begun(engine).generate(
                    max_tokens=LENGTH, sampling=sampling, ignore_eos=True
                )
                ids = [next(generation).id for _ in range(3)]
                with pytest.MonkeyPatch.context() as patch:
                    interrupt = Interrupted(getattr(device, name), nth, KeyboardInterrupt())
                    patch.setattr(device, name, interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        ids.extend(token.id for token in generation)
                check_tables(engine)
                assert ids + [token.id for token in generation] == expected


@pytest.mark.parametrize("name", ["begin", "run", "adopt"])
def test_after_an_interrupt_the_host_believes_no_table_that_is_older_than_its_own(
    small: Path, expected: list[int], name: str
) -> None:
    with filling(small) as engine, nothing_ahead():
        model, session = model_of(engine), begun(engine)
        sampling = Sampling(seed=3, temperature=1.0)
        generation = session.generate(max_tokens=LENGTH, sampling=sampling, ignore_eos=True)
        ids = [next(generation).id for _ in range(5)]
        model.report()
        layer, leaves = np.argwhere(model.arena.expert_tier == Tier.SLOT)[0].tolist()
        comes = int(np.argmax(model.arena.expert_tier[layer]))
        model._residency.carry_out(Moves([(layer, leaves)], [(layer, comes)]))
        with pytest.MonkeyPatch.context() as patch:
            owner: Any = model.arena if name == "adopt" else device_of(engine)
            interrupt = Interrupted(getattr(owner, name), 1, KeyboardInterrupt())
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(generation)
        check_tables(engine)
        assert ids + [token.id for token in generation] == expected


def test_after_a_window_that_failed_all_experts_are_at_home(
    small: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with filling(small) as engine:
        device, arena = device_of(engine), model_of(engine).arena
        sampling = Sampling(seed=3, temperature=1.0)
        generation = begun(engine).generate(max_tokens=LENGTH, sampling=sampling, ignore_eos=True)
        ids = [next(generation).id for _ in range(9)]
        assert arena.resident > 0
        # What a policy wants behind the window in flight, of which nothing is true any more then.
        layer, expert = np.argwhere(arena.expert_tier == Tier.SLOT)[0].tolist()
        model_of(engine)._steps._moves = Moves([(layer, expert)], [])

        def fail(*_: object) -> None:
            device._queue.clear()
            device._in_flight = 0
            raise StrataError("lost")

        with monkeypatch.context() as patch:
            patch.setattr(device, "land", fail)
            patch.setattr(device, "wait", fail)
            with pytest.raises(StrataError, match="lost"):
                next(generation)
        assert arena.resident == 0
        assert np.array_equal(arena.expert_address, arena.homes)
        assert ids + [token.id for token in generation] == expected
        assert arena.resident > 0


def test_what_windows_left_is_found_later_where_it_cannot_be_fetched(
    small: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with filling(small) as engine:
        device, arena, places = (
            device_of(engine),
            model_of(engine).arena,
            model_of(engine)._filling_places,
        )
        fetch = device.fetch

        def fail(address: int, array: np.ndarray[Any, Any]) -> None:
            if places is not None and address == places.addresses:
                raise StrataError("no")
            fetch(address, array)

        sampling = Sampling(seed=3, temperature=1.0)
        generation = begun(engine).generate(max_tokens=LENGTH, sampling=sampling, ignore_eos=True)
        ids = [next(generation).id for _ in range(9)]
        with monkeypatch.context() as patch:
            patch.setattr(device, "fetch", fail)
            with pytest.raises(StrataError, match="no"):
                engine.describe()
        assert arena.resident > 0
        check_tables(engine)
        assert ids + [token.id for token in generation] == expected


def test_steps_of_prompts_and_of_several_rows_fill_as_well(small: Path) -> None:
    found = []
    for opened in (engine_of(small), filling(small)):
        with opened as engine:
            model = model_of(engine)
            sequence = model.open_sequence()
            rows = [Row(sequence, token, True) for token in range(30, 38)]
            found.append(np.concatenate([model.step(rows), model.step(rows[:3])]))
            assert not isinstance(model._backend, FillingBackend) or device_of(engine).came > 8
    assert np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


class BatchingBackend(FillingBackend):
    """Read prompts in batches, by programs that give slots as windows do if a plan says so."""

    most_rows, batches_apart = 16, True


def test_a_prompt_batch_gives_slots_by_no_old_plan_and_fills_free_ones_behind(small: Path) -> None:
    with engine_of(small, opens=BatchingBackend, expert_cache="40%", prefill=16) as engine:
        model, device = model_of(engine), device_of(engine)
        sequence = model.open_sequence()
        model.step([Row(sequence, 20, True)])  # the device has a plan
        came, held = device.came, np.count_nonzero(model.arena.expert_address != model.arena.homes)
        assert came == held > 0
        model.step([Row(sequence, token, True) for token in range(21, 33)])
        assert device.came == came
        assert np.count_nonzero(model.arena.expert_address != model.arena.homes) > held
        found = write(begun(engine), LENGTH)
        check_tables(engine)
    with engine_of(small) as engine:
        assert found == write(begun(engine), LENGTH)


def test_a_plan_that_was_not_sent_is_sent_again(small: Path) -> None:
    with filling(small) as engine:
        write(begun(engine), 4)
        model = model_of(engine)
        sent: list[int] = []

        def breaks(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model._backend, "send", breaks)
            with pytest.raises(KeyboardInterrupt):
                model._steps._filling.silence()
            patch.setattr(model._backend, "send", lambda address, _: sent.append(address))
            model._steps._filling.silence()
            model._steps._filling.silence()
            assert len(sent) == 1
            for failed in (model._steps._filling.lose, model._steps._filling.find_after_failure):
                failed()  # perhaps before what was to be sent was sent
                model._steps._filling.silence()
        assert model._filling_places is not None
        assert sent == 3 * [model._filling_places.plan]
        model._steps._filling._silent_share = None


def test_runs_that_measure_give_no_slots(small: Path) -> None:
    with filling(small) as engine:
        model = model_of(engine)
        session = begun(engine)
        with nothing_ahead():
            write(session, 5)
        model.report()
        before = model.arena.expert_address.copy()
        model._steps.silence()
        for _ in range(3):
            model._backend.run(model._steps._few._body, 1)
        model._backend.wait()
        table = np.empty(before.shape, np.int64)
        places = model._filling_places
        assert places is not None
        model._backend.fetch(places.addresses, table)
        assert np.array_equal(table, before)
        write(session, 5)


def test_who_takes_the_last_free_slots_is_missed_once(small: Path) -> None:
    with filling(small, expert_cache="100%") as engine, nothing_ahead():
        model, session = model_of(engine), begun(engine)
        model.empty_slots()
        write(session, 100)
        assert model.arena.is_complete
        write(session, 20)
        residency = model._residency
        assert residency.missed_bytes == residency.inserted_bytes > 0
