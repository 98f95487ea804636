"""`strata_nb bench`: what is measured, how it is reported, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from console import Console

import strata_nb
from strata_nb import backend, story_model
from strata_nb.card_profile import Kind, Line, WindowProfile
from strata_nb.commands import bench, provenance
from strata_nb.commands.bench_report import Case, Outcome, Run, as_json, as_tables
from strata_nb.engine import Engine
from strata_nb.errors import OutOfDeviceMemory, StrataError
from strata_nb.options import Options
from strata_nb.plain_read import PlainRead
from strata_nb.session import Session


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(backend, "PLAIN_READ_BYTES", 1 << 20)
    monkeypatch.setattr(backend, "PLAIN_READ_LEAST", 1 << 20)
    return Console(capsys, monkeypatch)


class Watched:
    """What sessions were asked for: ("extend", tokens), ("generate", at which position, tokens)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ids: list[int] = []
        extend, generate = Session.extend, Session.generate

        def extended(session: Session, ids: list[int], *rest: Any) -> None:
            self.calls.append(("extend", session.position, len(ids)))
            self.ids += ids
            extend(session, ids, *rest)

        def generated(session: Session, **words: Any) -> Any:
            self.calls.append(("generate", session.position, words["max_tokens"]))
            self.ids.append(session.ids[-1])
            return generate(session, **words)

        patch.setattr(Session, "extend", extended)
        patch.setattr(Session, "generate", generated)


def table(output: str) -> list[list[str]]:
    """Return the cells of the first table, without its head."""
    lines = output.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_table_has_a_line_for_each_test_in_llama_benchs_words(run: Console) -> None:
    words = ["--device", "host", "-p", "8,0", "-n", "3", "-d", "0,16", "-r", "2"]
    status, out, err = run("bench", *words)
    assert (status, err) == (0, "")
    rows = table(out)
    assert [row[5] for row in rows] == ["pp8", "tg3", "pp8 @ d16", "tg3 @ d16"]
    for row in rows:
        assert row[:5][3] == "host"
        mean, deviation = re.fullmatch(r"([\d.]+) ± ([\d.]+)", row[6]).groups()  # type: ignore[union-attr]
        assert float(mean) > 0 <= float(deviation)
        of_writing = row[5].startswith("tg")
        assert bool(row[8]) == bool(row[9]) == bool(row[10].endswith("%")) == of_writing
    assert float(rows[3][8]) > float(rows[1][8])  # the K/V of 16 tokens more
    assert re.search(r"^plain read: [\d,.]+ GB/s, the fastest of 5 over 1.0 MiB", out, re.M)
    assert f"build: strata_nb {strata_nb.__version__}, " in out


def test_each_test_runs_once_more_than_it_counts_from_the_same_place(
    run: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    assert run("bench", "--device=host", "-p4", "-n2", "-d", "0,8", "-r", "2")[0] == 0
    assert watched.calls == [
        *[("extend", 0, 4)] * 3,
        *[("generate", 1, 2)] * 3,
        ("extend", 0, 8),
        *[("extend", 8, 4)] * 3,
        *[("generate", 9, 2)] * 3,
    ]


def test_prompts_are_random_and_the_same_for_a_seed(
    run: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_measured", lambda *_: "not asked for")
    words = ["--device=host", "-p", "70", "-n", "0", "-r", "1"]
    found = []
    for seed in ("0", "0", "1"):
        with monkeypatch.context() as patch:
            watched = Watched(patch)
            assert run("bench", *words, "--seed", seed)[0] == 0
        found.append(watched.ids)
    assert found[0] == found[1] != found[2]
    assert len({*found[0]}) > 100  # of 140


def test_every_token_but_an_end_can_be_in_a_prompt() -> None:
    with Engine.open(Options(device="reference")) as engine:
        vocabulary, ends = engine.description.vocab_size, engine.tokenizer.end_ids
        drawn = bench.Bench(engine, 1, 0, False, lambda: None)._ids(20 * vocabulary)
    assert ends
    assert {*drawn} == {*range(vocabulary)} - ends


def test_json_holds_every_sample_and_what_the_figures_depend_on(run: Console) -> None:
    words = ["--device=host", "-p", "4", "-n", "3", "-r", "2", "-o", "json", "--ctx-size=64"]
    status, out, _ = run("bench", *words)
    assert status == 0
    found = json.loads(out)
    assert found["command"] == "strata_nb bench " + " ".join(words)
    assert found["device"] == "host"
    assert found["ctx_size"] == 64
    assert found["versions"]["strata_nb"] == strata_nb.__version__
    assert found["commit"] is None or len(found["commit"]) == 40
    assert found["options"]["adapt"] == "insert"
    assert len(found["plain_read"]["samples_s"]) == 5
    prompt, writing = found["results"]
    assert prompt["memory"]["kv_cells"] >= 64
    assert (prompt["test"], prompt["n_prompt"], prompt["n_gen"]) == ("pp4", 4, 0)
    assert prompt["bytes_per_s"] is prompt["share_of_plain_read"] is None
    assert (writing["test"], writing["n_prompt"], writing["n_gen"]) == ("tg3", 0, 3)
    for one, tokens in ((prompt, 4), (writing, 3)):
        rates = [1e9 * tokens / each for each in one["samples_ns"]]
        assert one["samples_ts"] == pytest.approx(rates, rel=1e-3)
        assert one["avg_ts"] == pytest.approx(sum(rates) / 2, rel=1e-3)
        assert one["min_ts"] <= one["median_ts"] <= one["max_ts"]
    achieved = writing["bytes_per_token"] * writing["median_ts"]
    assert writing["bytes_per_s"] == pytest.approx(achieved)
    share = achieved / found["plain_read"]["bytes_per_s"]
    assert writing["share_of_plain_read"] == pytest.approx(share)


def test_a_token_reads_all_but_the_rows_of_the_embedding_and_experts_that_it_does_not_use() -> None:
    with Engine.open(Options(device="host", ctx_size=64)) as engine:
        model = engine.description
        everything = model.dense_bytes + model.expert_bytes
        unused = model.experts - model.top_k
        unused_experts = sum(unused * each for each in model.one_expert_bytes)
        assert engine.step_bytes(0) == everything - unused_experts
        untied = replace(model, tied_head=False).row_weight_bytes
        row_bytes = model.embedding_bytes // model.vocab_size
        assert engine.step_bytes(0) - untied == (model.vocab_size - 1) * row_bytes
        cell = model.kv_bytes_per_cell("f16", "f16")
        assert engine.step_bytes(10) - engine.step_bytes(0) == 10 * cell


def test_the_context_is_as_large_as_the_longest_test_needs(run: Console) -> None:
    def context(*words: str) -> int:
        out = run("bench", "--device=host", "-r1", "-o", "json", *words)[1]
        return int(json.loads(out)["ctx_size"])

    assert context("-p8", "-n4", "-d16") == 16 + 8
    assert context("-p2", "-n4", "-d16") == 16 + 4 + 1
    assert context("-p2", "-n4", "-c100") == 100


def test_on_the_judge_there_is_no_plain_read_and_a_line_says_why(run: Console) -> None:
    status, out, _ = run("bench", "--device=reference", "-p4", "-n2", "-r1")
    assert status == 0
    assert "plain read: not measured: the reference device computes over float32" in out
    assert [row[8:] for row in table(out)] == [["", "", ""]] * 2


def test_without_memory_to_read_past_the_caches_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strata_nb.cpu.available_memory_bytes", lambda: 400 << 20)
    host = backend.HostBackend("host", 1)
    try:
        with pytest.raises(StrataError, match="419,430,400 bytes of memory are available"):
            host.plain_read()
    finally:
        host.close()


def test_a_plain_read_that_fails_is_one_line_and_the_rest_is_measured(
    run: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(engine: Engine) -> PlainRead:
        raise StrataError("300 bytes are free")

    monkeypatch.setattr(Engine, "plain_read", fails)
    status, out, _ = run("bench", "--device=host", "-p0", "-n2", "-r1")
    assert status == 0
    assert "plain read: not measured: 300 bytes are free\n" in out
    (row,) = table(out)
    assert row[9]
    assert not row[10]
    found = json.loads(run("bench", "--device=host", "-p0", "-n2", "-r1", "-ojson")[1])
    assert found["plain_read"] == {"not_measured": "300 bytes are free"}
    assert found["results"][0]["share_of_plain_read"] is None


def test_what_was_measured_before_a_failure_is_reported(
    run: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(session: Session, **words: Any) -> Any:
        raise StrataError("no more tokens")

    monkeypatch.setattr(Session, "generate", fails)
    status, out, err = run("bench", "--device=host", "-p4", "-n2", "-r1", "-ojson")
    assert status == 1
    assert "stopped after 1 of 2 tests\n" in err
    assert "no more tokens" in err
    assert [one["test"] for one in json.loads(out)["results"]] == ["pp4"]
    status, out, _ = run("bench", "--device=host", "-p0", "-n2", "-r1")
    assert (status, out) == (1, "")


def test_a_device_without_memory_for_the_text_is_an_error_of_the_device(
    run: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(session: Session) -> None:
        raise OutOfDeviceMemory("create", 2, "no memory", device=0)

    monkeypatch.setattr(Session, "make_room", full)
    status, out, err = run("bench", "--device=host", "-p0", "-n2", "-r1")
    assert (status, out) == (1, "")
    assert "create on device 0: no memory" in err


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["-p", "8,"], "--n-prompt 8,: not numbers of tokens"),
        (["-n", "-1"], "--n-gen -1: not numbers of tokens"),
        (["-n", "\u0663"], "--n-gen \u0663: not numbers of tokens"),
        (["-d", "9999999999"], "--n-depth 9999999999: too many tokens"),
        (["-p", "0", "-n", "0,0"], "nothing to measure"),
        (["-r", "0"], "--repetitions 0: not usable"),
        (["--seed", "-1"], "--seed -1: not usable"),
        (["-o", "csv"], "--output csv: not known"),
        (["-c", "100", "-n", "64", "-d", "36"], "--ctx-size 100: pp512 @ d36 needs 548 cells"),
        (["-c", "100", "-n", "64", "-d", "36", "-p", "0"], "tg64 @ d36 needs 101 cells"),
        (["--profile", "-p1", "-n1"], "--profile: the device host has no graphs"),
        (["speed", "ROUTES"], "do not fit `strata_nb bench`"),
    ],
)
def test_what_cannot_be_measured_is_refused(run: Console, words: list[str], cause: str) -> None:
    status, out, err = run("bench", "--device=host", *words)
    assert (status, out) == (2, "")
    assert cause in err
    assert "hint: " in err


PROFILE = WindowProfile(
    1,
    (
        Line(Kind("attn_q", "linear_q4_k", 3_000_000), 48, 6, 48e-6),
        Line(Kind("attn_norm", "rms_norm", 0), 48, 6, 24e-6),
        Line(Kind("choice", "sample", 0), 1, 1, -1e-7),
    ),
    80e-6,
)


@pytest.fixture
def profiled() -> Run:
    about = {
        "model": "m",
        "model_size": 1 << 30,
        "model_n_params": 10**9,
        "options": {"force_routes": None, "overlap": True},
        "device": "cuda",
        "threads": 2,
        "commit": None,
        "clean_tree": None,
        "versions": {"strata_nb": "1"},
    }
    read = PlainRead(4_000_000_000, (0.001, 0.002))
    return Run(about, read, [Outcome(Case(True, 2, 0), (0.002, 0.004), {}, 1_000_000, PROFILE)])


def test_a_profile_is_a_table_of_kinds_with_their_sum_beside_the_whole_graph(
    profiled: Run,
) -> None:
    _, _, title, found = as_tables(profiled).split("\n\n")
    assert title.startswith("tg2: where the time of a token goes")
    assert title.endswith("in the median run a token took 1333.3 us")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in found.splitlines()[2:]]
    assert rows == [
        ["attn_q", "linear_q4_k", "48", "48.0", "60.0%", "144.0", "3,000.0", "75.0%"],
        ["attn_norm", "rms_norm", "48", "24.0", "30.0%", "", "", ""],
        ["choice", "sample", "1", "-0.1", "-0.1%", "", "", ""],
        ["sum of the lines", "", "97", "71.9", "89.9%", "144.0", "2,002.8", "50.1%"],
        ["the whole graph", "", "97", "80.0", "100.0%", "144.0", "1,800.0", "45.0%"],
    ]
    line = json.loads(as_json(profiled))["results"][0]["profile"]["lines"][0]
    assert line == {
        "launch": "attn_q",
        "kernel": "linear_q4_k",
        "count": 48,
        "measured": 6,
        "us": pytest.approx(48),
        "bytes": 144_000_000,
        "bytes_per_s": pytest.approx(3e12),
        "share_of_plain_read": pytest.approx(0.75),
    }


def test_code_without_a_history_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = story_model.model_path().parent
    monkeypatch.setattr(provenance, "_ROOT", folder)
    assert provenance.commit() == {"commit": None, "clean_tree": None}
