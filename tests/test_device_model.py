"""A model on a host device: near the judge, the same bits in any company, sessions and refusals."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from criteria import KL_ALWAYS_ENOUGH, KL_FACTOR
from device_world import SHAPE, opened, random_tokens, read, read_in, same_bits
from make_model import make_model
from model_shapes import LOGITS_SHAPES, ModelShape
from oracle_models import RANDOM_MODELS, RANDOM_TOKENS, float32_logits, random_ids

from strata_nb import Engine, Options, models
from strata_nb.cache.residency import Residency
from strata_nb.device_model import DeviceModel
from strata_nb.errors import ConfigError
from strata_nb.formats import DEQUANTISABLE, TensorType
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import Floats
from strata_nb.perplexity import kl_divergence
from strata_nb.steps import Row

STORED = Path(__file__).parent.parent / "bench" / "results"
# Of the router's logits, which lie a few units apart: what int8 activations may well change.
CLOSE = 0.15
CACHE_TYPES = ("f16", "f32", "int8")


@pytest.fixture(scope="module")
def engine(small: Path) -> Iterator[Engine]:
    with Engine.open(Options(small, device="host", ctx_size=256, prefill=16, threads=2)) as engine:
        yield engine


# Near the judge.


def judge(
    path: Path, ids: npt.NDArray[np.int64], monkeypatch: pytest.MonkeyPatch
) -> tuple[Floats, list[Floats]]:
    """Return the judge's logits (tokens, vocab), and its routers' (tokens, experts) by layer."""
    routers: list[Floats] = []
    with GGUFFile.open(path) as file:
        architecture = import_module(f"strata_nb.models.{models.describe(file).architecture}")
        choose = getattr(architecture, "router_top_k", None)

        def recorded(logits: Floats, k: int, **kwargs: Any) -> Any:
            routers.append(logits)
            return choose(logits, k, **kwargs)

        monkeypatch.setattr(architecture, "router_top_k", recorded, raising=False)
        return float32_logits(file, ids), routers


def device_logits(
    path: Path, ids: list[int], trace: Path | None
) -> tuple[Floats, npt.NDArray[np.int16]]:
    """Return the device's logits, and the experts it chose: (tokens, layers, top_k)."""
    with opened(path, ctx=len(ids), rows=64, routing_trace=trace) as model:
        logits = read_in(model, ids, 64)
        if trace is None:
            return logits, np.empty((len(ids), 0, 0), np.int16)
        model.save_trace(trace)
        return logits, np.load(trace)


def check_near(path: Path, peer_kl: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a device with the judge on random tokens.

    Random routers have near ties, and a token that a tie sends to another expert is far from the
    judge by chance: those tokens must be few and must be ties, and the others near.
    """
    with GGUFFile.open(path) as file:
        ids = random_ids(file, RANDOM_TOKENS)
    exact, routers = judge(path, ids, monkeypatch)
    trace = path.with_suffix(".npy") if routers else None
    logits, chosen = device_logits(path, ids.tolist(), trace)
    as_judged = np.ones(len(ids), bool)
    for layer, router in enumerate(routers):
        k = chosen.shape[2]
        expected = np.argsort(-router, axis=-1, kind="stable")[:, :k]
        best = -np.sort(-router, axis=-1)
        same = np.all(np.sort(expected) == np.sort(chosen[:, layer]), axis=-1)
        surely = best[:, k - 1] - best[:, k] > CLOSE
        # What an earlier layer sent elsewhere is another row from there on.
        assert np.all(same[surely & as_judged]), layer
        as_judged &= same
    assert np.mean(as_judged) > 0.85
    divergence = kl_divergence(exact, logits)[as_judged]
    limit = max(KL_FACTOR * peer_kl, KL_ALWAYS_ENOUGH)
    assert divergence.mean() <= limit, np.sort(divergence)[-5:]


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_an_architecture_is_as_near_the_judge_as_llama_cpp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    RANDOM_MODELS[name](path)
    stored = json.loads((STORED / f"kl_llama_cpp_random_{name}.json").read_text())
    check_near(path, stored["rows"]["float32, llama.cpp prompt"]["kl_mean"], monkeypatch)


def test_matrices_of_every_type_in_one_file_are_near_the_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = sorted(DEQUANTISABLE - {TensorType.F64})
    uses = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps")
    uses += ("ffn_down_exps",)
    names = (f"blk.{layer}.{use}.weight" for layer in count() for use in uses)
    rules = [*zip(names, kinds, strict=False), ("*", TensorType.Q4_K)]
    path = tmp_path / "types.gguf"
    make_model(path, replace(LOGITS_SHAPES["qwen3moe"], layers=4), rules=rules)
    with GGUFFile.open(path) as file:
        assert {info.type for info in file.tensors.values()} == set(kinds)
    stored = json.loads((STORED / "kl_llama_cpp_random_qwen3moe.json").read_text())
    check_near(path, stored["rows"]["float32, llama.cpp prompt"]["kl_mean"], monkeypatch)


# The same bits in any company.


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_row_has_the_same_bits_alone_in_windows_and_in_prompt_batches(
    small: Path, cache_type: str
) -> None:
    ids = random_tokens(520)
    cache = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    with opened(small, ctx=520, threads=1, rows=8, **cache) as one:
        alone = read_in(one, ids, 1)
        for rows in range(2, 9):
            assert same_bits(read_in(one, ids[:43], rows), alone[:43]), rows
    for threads, prefill in ((1, 7), (2, 1), (2, 64), (3, 7), (3, 512)):
        options = Options(
            small, device="host", ctx_size=520, threads=threads, prefill=prefill, **cache
        )
        with Engine.open(options) as engine:
            assert same_bits(engine.logits(ids), alone), (threads, prefill)


def test_two_types_of_cache_give_different_bits(small: Path) -> None:
    ids = random_tokens(20)
    logits = []
    for cache_type in CACHE_TYPES:
        with opened(small, cache_type_k=cache_type, cache_type_v=cache_type) as one:
            logits.append(read_in(one, ids, 20))
    assert not same_bits(logits[0], logits[1])
    assert not same_bits(logits[0], logits[2])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sequences_in_one_step_have_the_bits_of_each_alone(small: Path, threads: int) -> None:
    ids = [random_tokens(70, seed) for seed in (1, 2)]
    with opened(small, threads=threads, rows=64) as one:
        alone = [read_in(one, some, 1) for some in ids]
        numbers = [one.open_sequence(), one.open_sequence()]
        read_so_far = [0, 0]
        for counts in ((20, 13), (1, 1), (1, 7), (40, 24), (0, 3), (2, 1)):
            # One of each in turn, then what is left of the longer one.
            order = sorted((n, which) for which in (0, 1) for n in range(counts[which]))
            rows = [
                Row(numbers[which], ids[which][read_so_far[which] + n], True) for n, which in order
            ]
            logits = one.step(rows)
            for which in (0, 1):
                start, end = read_so_far[which], read_so_far[which] + counts[which]
                mine = logits[[at for at, (_, whose) in enumerate(order) if whose == which]]
                assert same_bits(mine, alone[which][start:end]), (counts, which)
                read_so_far[which] = end


# Sessions.


def test_the_logits_of_a_draft_are_those_of_reading_one_by_one(engine: Engine) -> None:
    ids = random_tokens(60)
    exact = engine.logits(ids)
    session = engine.open_session()
    session.extend(ids[:20])
    session.append(ids[20])
    at = 21
    for length, keep in ((8, 8), (5, 2), (1, 0), (3, 1), (16, 16)):
        assert same_bits(session.draft(ids[at : at + length]), exact[at : at + length])
        assert session.commit(keep) == at + keep == session.position
        at += keep
    assert same_bits(session.next_logits(), exact[at - 1])


@pytest.mark.parametrize("keep", range(5))
def test_committing_a_part_of_a_draft_and_going_on_equals_a_fresh_session(
    engine: Engine, keep: int
) -> None:
    ids, drafted, more = random_tokens(63), random_tokens(4, 1), random_tokens(9, 2)
    session = engine.open_session()
    session.extend(ids)
    place = session.checkpoint()
    session.draft(drafted)
    assert session.commit(keep) == place + keep
    session.extend(more)
    whole = ids + drafted[:keep] + more
    assert session.ids == whole
    assert same_bits(session.next_logits(), engine.logits(whole)[-1])
    session.rewind(place)
    assert same_bits(session.next_logits(), engine.logits(ids)[-1])


class Interrupted:
    """Let the n-th run of a backend raise, as Ctrl-C between two layers does."""

    def __init__(self, one: DeviceModel, nth: int, patch: pytest.MonkeyPatch) -> None:
        self.left, self.run = nth, one._backend.run
        patch.setattr(one._backend, "run", self)

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        self.run(*args)


def test_an_interrupt_between_the_layers_of_a_prompt_leaves_every_sequence_as_it_was(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, others = random_tokens(50), random_tokens(40, 1)
    with opened(small, rows=64) as one:
        exact, other_exact = read_in(one, ids, 50), read_in(one, others, 40)
        first, second = one.open_sequence(), one.open_sequence()
        read(one, first, ids[:10])
        read(one, second, others[:5])
        rows = [Row(first, token, True) for token in ids[10:40]]
        rows += [Row(second, token, True) for token in others[5:30]]
        free = one.kv.free_cells
        for nth in count(1):
            with monkeypatch.context() as patch:
                interrupted = Interrupted(one, nth, patch)
                try:
                    logits = one.step(rows)
                except KeyboardInterrupt:
                    assert (one.length(first), one.length(second)) == (10, 5)
                    assert one.kv.free_cells == free
                    one.ledger.check_integrity()
                else:
                    assert interrupted.left > 0
                    break
        assert nth > SHAPE.layers
        assert same_bits(logits, np.concatenate([exact[10:40], other_exact[5:30]]))
        assert same_bits(read(one, first, ids[40:]), exact[40:])
        assert same_bits(read(one, second, others[30:]), other_exact[30:])


def test_behind_a_prompt_batch_policies_hear_what_its_last_rows_used(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[int, Any]] = []
    after = Residency.after

    def listening(residency: Residency, rows: int, latest: Any = None) -> None:
        heard.append((rows, latest))
        after(residency, rows, latest)

    monkeypatch.setattr(Residency, "after", listening)
    with opened(small, "host:1x64MiB", rows=64, expert_cache="50%") as one:
        sequence = one.open_sequence()
        for rows in (50, 8, 9):
            read(one, sequence, random_tokens(rows))
            chosen = one.chosen(rows)
            told, latest = heard.pop()
            assert told == rows
            if rows == 8:
                assert latest is None
            else:
                assert np.array_equal(latest, chosen[-32:])


def test_an_interrupt_right_after_a_draft_was_read_leaves_the_session_as_it_was(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_tokens(12)
    session = engine.open_session()
    session.extend(ids[:10])
    step = engine._model.step

    def interrupted(rows: list[Row]) -> None:
        step(rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.draft([5, 6, 7])
    assert session.ids == ids[:10]
    session.append(ids[10])
    assert same_bits(session.next_logits(), engine.logits(ids[:11])[-1])


@pytest.mark.parametrize("rewound", [False, True])
def test_an_interrupt_of_a_rewind_never_leaves_cells_of_tokens_that_are_gone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, rewound: bool
) -> None:
    ids = random_tokens(18)
    session = engine.open_session()
    session.extend(ids[:10])
    rewind = engine._model.rewind

    def interrupted(sequence: int, length: int) -> None:
        if rewound:
            rewind(sequence, length)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "rewind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.rewind(4)
    session.extend(ids[10:])
    assert same_bits(session.next_logits(), engine.logits(session.ids)[-1])


def test_a_second_session_waits_for_the_first_ones_cells(tiny: Path) -> None:
    options = Options(tiny, device="host:1x16MiB@64KiB", ctx_size=128)
    ids = random_tokens(128)
    with Engine.open(options) as engine:
        exact = engine.logits(ids)[-1]
        cells = engine.describe().kv_cells
        held = [engine.open_session() for _ in range(cells // 128)]
        for session in held:
            session.extend(ids)
        late = engine.open_session()
        with pytest.raises(MemoryError, match=r"K/V is full.*cells 128, free 0, of 128"):
            late.extend(ids)
        held.pop().close()
        assert same_bits(late.next_logits(), exact)
        later = engine.open_session()
        with pytest.raises(MemoryError):
            later.extend(ids)
        del late, session
        gc.collect()
        assert same_bits(later.next_logits(), exact)
        assert all(same_bits(session.next_logits(), exact) for session in held)


def test_a_step_that_does_not_fit_takes_no_cells_from_anybody(tiny: Path) -> None:
    with opened(tiny, "host:1x16MiB@64KiB", ctx=256) as one:
        first, second = one.open_sequence(), one.open_sequence()
        read(one, first, random_tokens(64))
        while one.kv.free_cells > 64:
            read(one, second, random_tokens(64))
        rows = [Row(number, 1, True) for number in (first, second)]
        lengths = [one.length(number) for number in (first, second)]
        with pytest.raises(MemoryError):
            one.step(rows)
        assert one.kv.free_cells == 64
        assert [one.length(number) for number in (first, second)] == lengths
        read(one, second, [1])


def test_sessions_beyond_the_table_are_refused_until_one_is_closed(engine: Engine) -> None:
    gc.collect()
    sessions = [engine.open_session() for _ in range(16)]
    with pytest.raises(ConfigError, match="16 sequences are open") as got:
        engine.open_session()
    assert got.value.hint
    sessions.pop().close()
    engine.open_session().extend([1])


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2moe"])
def test_matrices_of_one_row_or_one_column_are_matrices(family: str, tmp_path: Path) -> None:
    path = tmp_path / "narrow.gguf"
    experts = {"experts": 4, "top_k": 2, "shared_ff": 1} if family == "qwen2moe" else {}
    shape = ModelShape(
        family,
        **{"experts": 0, "top_k": 0, **experts},
        dim=32,
        ff=1,
        heads=1,
        kv_heads=1,
        head_dim=32,
        vocab=258,
    )
    make_model(path, shape, rules=[("*", TensorType.F16)])
    logits = {}
    for device in ("reference", "host"):
        with Engine.open(Options(path, device, ctx_size=64)) as engine:
            logits[device] = engine.logits(list(range(1, 20)))
    np.testing.assert_allclose(logits["host"], logits["reference"], atol=0.02)
