"""Engine, session and generation: what they hold, how an answer ends, what can be repeated."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from make_model import make_model
from model_shapes import LOGITS_SHAPES
from oracle_models import rewrite
from threadpoolctl import threadpool_info

from strata_nb import Engine, Options, Sampling, cpu, models
from strata_nb.backend import HostBackend
from strata_nb.errors import ConfigError, FileFormatError, StrataError
from strata_nb.sampling import Choice
from strata_nb.steps import ReferenceSteps, Row, draw

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", params=["reference", "host"])
def engine(model: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.open(Options(model, device=request.param, ctx_size=64, prefill=7)) as engine:
        yield engine


def test_a_device_reads_no_more_rows_at_a_time_than_it_can(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostBackend, "most_rows", 24)
    with Engine.open(Options(model, "host", ctx_size=64, prefill=30)) as engine:
        assert engine.prefill_rows == 24
        assert engine.warnings[-1] == (
            "--prefill 30: the device host reads prompts 24 rows at a time at most"
        )


class Script:
    """A model whose next token is scripted: after n tokens the best one is script[n]."""

    max_rows, warnings, goes_ahead = 512, (), False

    def __init__(self, script: Sequence[int], vocab: int) -> None:
        self.script, self.vocab = script, vocab
        self.batches: list[int] = []
        self.read = 0

    def open_sequence(self) -> int:
        return 0

    def forget_sequence(self, sequence: int) -> None:
        pass

    def length(self, sequence: int) -> int:
        return self.read

    def rewind(self, sequence: int, length: int) -> None:
        self.read = length

    def make_room(self, sequence: int, cells: int, *, prompt: bool) -> None:
        pass

    def step(self, rows: Sequence[Row]) -> np.ndarray:
        wanted = [row.wants_logits for row in rows]
        assert not any(wanted[:-1])
        self.batches.append(len(rows))
        self.read += len(rows)
        logits = np.zeros((sum(wanted), self.vocab), np.float32)
        logits[:, self.script[min(self.read, len(self.script) - 1)]] = 10
        return logits

    def choose(
        self, rows: Sequence[Row], how: Sequence[Choice], ahead: Sequence[Choice] = ()
    ) -> list[int]:
        return draw(self.step(rows), how)


@pytest.fixture
def scripted(model: str) -> Iterator[Engine]:
    with Engine.open(Options(model, ctx_size=600, prefill=4)) as engine:
        yield engine


def play(engine: Engine, text: str, **options: object) -> tuple[list[int], str, str | None]:
    """Let the engine write `text`, then its end token; return the ids, the text, and the reason."""
    ids = [*engine.encode(text), engine.tokenizer.eos_id or 0]
    engine._model = Script([0, *ids], engine.description.vocab_size)  # type: ignore[assignment]
    generation = engine.generate([0], sampling=GREEDY, **options)  # type: ignore[arg-type]
    tokens = list(generation)
    return [t.id for t in tokens], "".join(t.text for t in tokens), generation.finish


def test_greedy_generation_takes_the_best_logit_of_a_fresh_forward(engine: Engine) -> None:
    ids = engine.encode("hello there", add_special=True)
    written = [t.id for t in engine.generate(ids, max_tokens=12, sampling=GREEDY)]
    expected = list(ids)
    for _ in range(12):
        expected.append(int(engine.logits(expected)[-1].argmax()))
    assert written == expected[len(ids) :]


def test_the_same_seed_writes_the_same_tokens_and_another_seed_others(engine: Engine) -> None:
    ids = engine.encode("hello")

    def write(seed: int | None) -> tuple[list[int], int]:
        generation = engine.generate(ids, max_tokens=20, sampling=Sampling(seed=seed))
        return [t.id for t in generation], generation.seed

    first, seed = write(1)
    assert seed == 1
    assert write(1)[0] == first
    assert write(2)[0] != first
    drawn, seed = write(None)
    assert write(seed)[0] == drawn


def test_the_texts_of_the_tokens_join_to_the_bytes_of_the_ids(engine: Engine) -> None:
    tokens = list(engine.generate(engine.encode("h"), max_tokens=30, sampling=Sampling(seed=3)))
    whole = engine.decode([t.id for t in tokens], skip_special=True)
    assert "".join(t.text for t in tokens) == whole.decode(errors="replace")


def test_a_session_that_goes_on_equals_a_fresh_one(engine: Engine) -> None:
    session = engine.open_session()
    session.extend(engine.encode("hello"))
    first = [t.id for t in session.generate(max_tokens=5, sampling=GREEDY)]
    session.extend(engine.encode(" more"))
    ids = [*engine.encode("hello"), *first, *engine.encode(" more")]
    assert session.ids == ids
    assert session.position == len(ids)
    np.testing.assert_allclose(session.next_logits(), engine.logits(ids)[-1], atol=1e-4)


@pytest.mark.parametrize("kept", [0, 1, 3, 6, 7])
def test_a_rewound_session_forgets_and_goes_on_as_a_fresh_one(engine: Engine, kept: int) -> None:
    session = engine.open_session()
    ids = engine.encode("hello wo")
    session.extend(ids)
    assert session.rewind(kept) == session.position == kept
    session.extend(engine.encode(" abc"))
    fresh = engine.logits([*ids[:kept], *engine.encode(" abc")])[-1]
    np.testing.assert_allclose(session.next_logits(), fresh, atol=1e-4)


def test_rewinding_and_asking_at_once_gives_the_logits_of_the_last_token_kept(
    engine: Engine,
) -> None:
    session = engine.open_session()
    ids = engine.encode("hello wo")
    session.extend(ids)
    session.rewind(4)
    np.testing.assert_allclose(session.next_logits(), engine.logits(ids[:4])[-1], atol=1e-4)


@pytest.mark.parametrize("position", [-1, 9])
def test_a_rewind_to_where_nothing_was_is_refused(engine: Engine, position: int) -> None:
    session = engine.open_session()
    session.extend([1] * 8)
    with pytest.raises(ConfigError, match="8 tokens"):
        session.rewind(position)


def test_an_answer_ends_at_the_models_end_token_which_comes_last(scripted: Engine) -> None:
    ids, text, finish = play(scripted, "abc")
    assert (text, finish) == ("abc", "end")
    assert ids[-1] in scripted.tokenizer.end_ids


def test_an_answer_ends_at_its_length(scripted: Engine) -> None:
    ids, text, finish = play(scripted, "abcdef", max_tokens=2)
    assert (len(ids), text, finish) == (2, "ab", "length")


def test_no_token_is_written_where_none_is_asked_for(scripted: Engine) -> None:
    assert play(scripted, "abc", max_tokens=0) == ([], "", "length")


def test_an_answer_ends_before_a_stop_string_wherever_tokens_are_cut(scripted: Engine) -> None:
    _, text, finish = play(scripted, "one. two. three", stop=["wo.", "xyz"])
    assert (text, finish) == ("one. t", "stop")


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(scripted: Engine) -> None:
    assert play(scripted, "one tw", stop=["two"])[1:] == ("one tw", "end")
    assert play(scripted, "one two", stop=["two!"], max_tokens=6)[1:] == ("one tw", "length")


def test_a_character_cut_at_the_length_becomes_a_replacement_character(scripted: Engine) -> None:
    _, text, finish = play(scripted, "aé", max_tokens=2)  # a byte vocabulary: é is two tokens
    assert (text, finish) == ("a\N{REPLACEMENT CHARACTER}", "length")


def test_the_repeat_guard_ends_256_equal_tokens_unless_eos_is_ignored(scripted: Engine) -> None:
    ids, _, finish = play(scripted, "a" * 300)
    assert (len(ids), finish) == (256, "repeat")
    ids, _, finish = play(scripted, "a" * 300, ignore_eos=True, max_tokens=290)
    assert (len(ids), finish) == (290, "length")


def test_ignoring_eos_never_writes_an_end_token(scripted: Engine) -> None:
    ids, _, finish = play(scripted, "abc", ignore_eos=True, max_tokens=8)
    assert finish == "length"
    assert not scripted.tokenizer.end_ids & set(ids)


def test_an_answer_ends_when_the_context_is_full(scripted: Engine) -> None:
    ids, _, finish = play(scripted, "ab" * 400)
    assert (len(ids), finish) == (600, "context")  # 599 cells after the prompt, and one unread


def test_a_prompt_is_read_in_batches_and_a_sampled_token_once(scripted: Engine) -> None:
    scripted._model = script = Script([5] * 20, scripted.description.vocab_size)  # type: ignore[assignment]
    list(scripted.generate([1] * 10, max_tokens=3, sampling=GREEDY))
    assert script.batches == [4, 4, 2, 1, 1]


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers_and_nothing_is_added(
    engine: Engine,
) -> None:
    session = engine.open_session()
    session.extend([1] * 60)
    with pytest.raises(ConfigError, match=r"5 tokens after 60 earlier tokens .* 64 cells"):
        session.extend([1] * 5)
    assert session.position == 60
    session.extend([1] * 4)
    with pytest.raises(ConfigError, match="65 tokens do not fit a context of 64"):
        engine.logits([1] * 65)


@pytest.mark.parametrize("token", [-1, 512])
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(
    engine: Engine, token: int
) -> None:
    with pytest.raises(ConfigError, match=f"token {token} at place 2 .* 512 tokens"):
        engine.open_session().extend([1, 2, token])
    with pytest.raises(ConfigError, match=f"token {token} at place 0"):
        engine.logits([token])


@pytest.mark.parametrize("ids", [[1.7, 2], [float("nan")], [True], ["a"], [[1]]])
def test_ids_that_are_no_integers_are_refused(engine: Engine, ids: list[Any]) -> None:
    with pytest.raises(ConfigError, match="not a list of integers"):
        engine.logits(ids)
    with pytest.raises(ConfigError, match="not a list of integers"):
        engine.generate(ids)


def test_ids_may_be_numbers_of_numpy(engine: Engine) -> None:
    ids = np.array([1, 2, 3], np.int32)
    assert (engine.logits(ids) == engine.logits([1, 2, 3])).all()


def test_a_session_without_a_token_has_nothing_to_continue(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="no token"):
        engine.open_session().next_logits()
    with pytest.raises(ConfigError, match="no token"):
        list(engine.generate([], sampling=GREEDY))
    assert engine.logits([]).shape == (0, 512)


def test_an_interrupt_while_a_prompt_is_read_leaves_the_session_usable(engine: Engine) -> None:
    ids = [3 + number for number in range(20)]
    expected = [token.id for token in engine.generate(ids, max_tokens=4, sampling=GREEDY)]

    def interrupt(done: int, total: int) -> None:
        if done == 14:
            raise KeyboardInterrupt

    for goes_on in (True, False):
        with engine.open_session() as session:
            with pytest.raises(KeyboardInterrupt):
                session.extend(ids, interrupt)
            assert session.ids == ids
            assert engine._model.length(session._sequence) == 14  # no batch more
            if goes_on:
                written = session.generate(max_tokens=4, sampling=GREEDY)
                assert [token.id for token in written] == expected
            else:
                session.rewind(9)
                np.testing.assert_allclose(
                    session.next_logits(), engine.logits(ids[:9])[-1], atol=1e-4
                )
    with pytest.raises(KeyboardInterrupt):
        engine.generate(ids, progress=interrupt)


def test_reading_a_prompt_reports_what_is_done_up_to_the_whole(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    engine.open_session().extend([1] * 20, lambda done, total: seen.append((done, total)))
    assert seen == [(7, 20), (14, 20), (20, 20)]


def test_the_context_is_the_models_unless_asked_for_and_a_longer_one_is_warned_of(
    model: str,
) -> None:
    with Engine.open(Options(model, device="reference")) as engine:
        assert engine.ctx_size == 1024
        assert not any("1024" in warning for warning in engine.warnings)
    with Engine.open(Options(model, ctx_size=2000)) as engine:
        assert engine.ctx_size == 2000
        assert any("2000" in w and "1024" in w for w in engine.warnings)


def test_cache_types_are_used(model: str, engine: Engine) -> None:
    ids = engine.encode("hello there, this is")
    exact = engine.logits(ids)[-1]
    for kinds in (("f32", "f16"), ("int8", "int8")):
        with Engine.open(
            Options(model, engine.device, ctx_size=64, cache_type_k=kinds[0], cache_type_v=kinds[1])
        ) as other:
            difference = np.abs(other.logits(ids)[-1] - exact).max()
        assert 0 < difference < 0.5


def test_a_file_that_is_none_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="does not exist"):
        Engine.open(Options(tmp_path / "none.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(8))
    with pytest.raises(FileFormatError):
        Engine.open(Options(broken))


def test_a_closed_engine_and_its_sessions_refuse_to_compute(model: str) -> None:
    engine = Engine.open(Options(model, device="reference"))
    session = engine.open_session()
    session.extend([1, 2])
    generation = session.generate()
    engine.close()
    engine.close()
    for use in (
        lambda: engine.logits([1]),
        lambda: engine.open_session(),
        lambda: session.extend([3]),
        lambda: list(engine.generate([1])),
        lambda: list(generation),
    ):
        with pytest.raises(StrataError, match="engine is closed"):
            use()


def test_closing_an_engine_frees_its_weights(model: str) -> None:
    engine = Engine.open(Options(model, device="reference"))
    assert isinstance(engine._model, ReferenceSteps)
    weights = weakref.ref(engine._model._opened())
    engine.close()
    assert weights() is None


def test_each_engine_computes_with_its_own_number_of_threads(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    forward = models.ReferenceModel.forward

    def spy(*given: Any) -> Any:
        seen.extend(p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas")
        return forward(*given)

    monkeypatch.setattr(models.ReferenceModel, "forward", spy)
    outside = [p["num_threads"] for p in threadpool_info()]
    with (
        Engine.open(Options(model, "reference", threads=1)) as one,
        Engine.open(Options(model, "reference", threads=2)) as two,
    ):
        for engine in (one, two, one):
            engine.logits([1])
    assert seen == [1, 2, 1]
    seen.clear()
    monkeypatch.setattr(cpu, "physical_cores", lambda: 2)
    with Engine.open(Options(model, device="reference")) as default:
        default.logits([1])
        default.logits([1, 2])
    assert seen == [1, 2]
    assert [p["num_threads"] for p in threadpool_info()] == outside


def test_the_context_is_at_most_8192_cells_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    make_model(path, replace(LOGITS_SHAPES["qwen3moe"], context=20_000))
    with Engine.open(Options(path)) as engine:
        assert engine.ctx_size == 8192
    with Engine.open(Options(path, ctx_size=9000)) as engine:
        assert engine.ctx_size == 9000


def test_an_interrupt_between_cells_and_logits_costs_one_token_read_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = engine.open_session()
    session.extend([5, 6])
    model = engine._model
    step = model.step

    def interrupted(rows: Sequence[Row]) -> Any:
        step(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.extend([7])
    monkeypatch.undo()
    np.testing.assert_allclose(session.next_logits(), engine.logits([5, 6, 7])[-1], atol=1e-4)


def test_an_interrupt_between_cells_and_a_token_changes_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, model = engine.encode("hello"), engine._model
    expected = [t.id for t in engine.generate(ids, max_tokens=6, sampling=Sampling(seed=5))]
    choose = model.choose

    def interrupted(rows: Sequence[Row], *how: Sequence[Choice]) -> Any:
        choose(rows, *how)
        raise KeyboardInterrupt

    session = engine.open_session()
    session.extend(ids)
    generation = session.generate(max_tokens=6, sampling=Sampling(seed=5))
    written = [next(generation).id, next(generation).id]
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(model, "choose", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(generation)
        written.append(next(generation).id)
    assert [*written, *(t.id for t in generation)] == expected


def test_a_step_whose_logits_leave_no_token_was_never_there(engine: Engine) -> None:
    model = engine._model
    first, second = model.open_sequence(), model.open_sequence()
    model.step([Row(first, 5, True)])
    rows = [Row(first, 6, True), Row(second, 7, False), Row(second, 8, True)]
    all_banned = Choice((), GREEDY, 0.0, range(engine.description.vocab_size))
    with pytest.raises(StrataError, match="no token is left to choose"):
        model.choose(rows, [Choice((), GREEDY, 0.0), all_banned])
    assert [model.length(number) for number in (first, second)] == [1, 0]
    logits = model.step(rows)
    for number in (first, second):
        model.rewind(number, 1 if number == first else 0)
    choices = [Choice((), GREEDY, 0.0), Choice((), Sampling(), 0.7)]
    assert model.choose(rows, choices) == draw(logits, choices)
    for number in (first, second):
        model.forget_sequence(number)


def test_logits_are_at_hand_after_a_token_was_drawn(engine: Engine) -> None:
    session = engine.open_session()
    session.extend([5, 6])
    (token,) = session.generate(max_tokens=1, sampling=GREEDY)
    session.append(9)
    assert session._choose(Choice((), GREEDY, 0.0)) == session._choose(Choice((), GREEDY, 0.0))
    exact = engine.logits([5, 6, token.id, 9])[-1]
    np.testing.assert_allclose(session.next_logits(), exact, atol=1e-4)


def test_a_generation_on_a_full_session_ends_at_once(engine: Engine) -> None:
    session = engine.open_session()
    session.extend([1] * 64)
    assert len(list(session.generate(sampling=GREEDY, ignore_eos=True))) == 1
    later = session.generate()
    assert (list(later), later.finish) == ([], "context")


def test_a_generation_whose_session_went_on_without_it_is_refused(engine: Engine) -> None:
    session = engine.open_session()
    session.extend([1, 2])
    first, second = session.generate(sampling=GREEDY), session.generate(sampling=GREEDY)
    next(first)
    with pytest.raises(StrataError, match="position 3 without this generation"):
        next(second)
    next(first)


@pytest.mark.parametrize("bad", [{"max_tokens": 2.5}, {"max_tokens": -1}, {"stop": "ab"}])
def test_what_a_generation_cannot_use_is_refused(engine: Engine, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not"):
        engine.generate([1], **bad)


def test_a_prompt_ends_without_eos_even_if_the_file_adds_it_to_texts(tmp_path: Path) -> None:
    plain, added = tmp_path / "plain.gguf", tmp_path / "added.gguf"
    make_model(plain, LOGITS_SHAPES["qwen3moe"])
    flag = {"tokenizer.ggml.add_eos_token": (True, gguf.GGUFValueType.BOOL)}
    rewrite(plain, added, keys=flag, tensors={})
    with Engine.open(Options(added)) as engine:
        eos = engine.tokenizer.eos_id
        assert engine.encode("hello", add_special=True)[-1] == eos
        assert engine.encode_prompt("hello") == engine.encode("hello")
        assert engine.encode_prompt("") == [eos]


def test_a_draft_is_decided_before_the_next_and_a_rewind_forgets_it(engine: Engine) -> None:
    session = engine.open_session()
    session.extend([1, 2, 3, 4, 5, 6])
    session.draft([7, 8, 9])
    for use in (
        lambda: session.draft([7]),
        lambda: session.extend([7]),
        lambda: session.append(7),
        lambda: session.next_logits(),
    ):
        with pytest.raises(ConfigError, match="3 drafted tokens are not decided"):
            use()
    session.rewind(6)
    with pytest.raises(ConfigError, match="cannot keep 1 of 0 drafted"):
        session.commit(1)
    assert session.ids == [1, 2, 3, 4, 5, 6]


def test_a_closed_session_touches_no_other(engine: Engine) -> None:
    closed = engine.open_session()
    closed.extend([1, 2, 3])
    closed.close()
    closed.close()
    other = engine.open_session()
    other.extend([4, 5, 6])
    for use in (
        lambda: closed.rewind(0),
        lambda: closed.next_logits(),
        lambda: closed.extend([1]),
        lambda: closed.append(1),
        lambda: closed.draft([1]),
        lambda: closed.commit(0),
        lambda: list(closed.generate()),
    ):
        with pytest.raises(StrataError, match="session is closed"):
            use()
    assert engine._model.length(other._sequence) == 3
    assert closed.ids == [1, 2, 3]


def test_sessions_of_several_threads_take_turns(engine: Engine) -> None:
    prompts = [[number, number + 1, number + 2] for number in range(1, 5)]
    alone = [
        [token.id for token in engine.generate(ids, max_tokens=12, sampling=GREEDY)]
        for ids in prompts
    ]

    def write(ids: list[int]) -> list[int]:
        return [token.id for token in engine.generate(ids, max_tokens=12, sampling=GREEDY)]

    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            assert list(pool.map(write, prompts)) == alone


def test_the_judge_counts_no_experts_and_says_so(model: str, tmp_path: Path) -> None:
    with (
        Engine.open(Options(model, "reference")) as engine,
        pytest.raises(ConfigError, match="reference device counts no experts"),
    ):
        engine.save_expert_profile(tmp_path / "profile")
    with (
        Engine.open(Options(model, "host", ctx_size=64)) as engine,
        pytest.raises(ConfigError, match="no routing trace was kept"),
    ):
        engine.save_routing_trace(tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []


def test_no_token_can_be_added_behind_a_context_that_is_full(engine: Engine) -> None:
    session = engine.open_session()
    session.extend([1] * 64)
    session.append(1)  # as a generation does with its last token, which is never read
    with pytest.raises(ConfigError, match="64 cells is full"):
        session.append(1)
    assert session.position == 65


def test_the_judge_does_not_promise_bits_that_numpy_does_not_keep(model: str) -> None:
    with pytest.raises(ConfigError, match="--deterministic: the products of the reference device"):
        Engine.open(Options(model, "reference", deterministic=True))
    with Engine.open(Options(model, "host", ctx_size=64, deterministic=True)) as engine:
        assert engine.device == "host"
