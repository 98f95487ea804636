"""Scoring a text: what is scored, what is compared, and what a run that is stopped leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from make_model import make_model
from model_shapes import LOGITS_SHAPES
from vocab_files import write_vocabulary

from strata_nb import Engine, Options
from strata_nb.cli import main
from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile
from strata_nb.perplexity import Floats, cut, kl_divergence, measure

BOS, EOS = 300, 511
TEXT = "hello there, this is a text of some length. " * 6  # 252 tokens, "he" being one


@pytest.fixture(scope="module")
def model_with_ends(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose vocabulary asks for BOS before and EOS after a text."""
    folder = tmp_path_factory.mktemp("models")
    with GGUFFile.open(model) as file:
        tokens = file.metadata.texts("tokenizer.ggml.tokens")
    vocabulary = write_vocabulary(
        folder / "vocab.gguf",
        tokens,
        merges=["h e"],
        kinds=[3 if token in (BOS, EOS) else 1 for token in range(len(tokens))],
        ids={"bos_token_id": BOS, "eos_token_id": EOS},
        flags={"add_bos_token": True, "add_eos_token": True},
    )
    make_model(folder / "ends.gguf", LOGITS_SHAPES["qwen3moe"], vocab_gguf=vocabulary)
    return str(folder / "ends.gguf")


class Runner:
    """Run `perplexity` in this process, on a text, and keep what the model was given to read."""

    def __init__(
        self, folder: Path, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
    ) -> None:
        self.pieces: list[list[int]] = []
        self.logits: list[Floats] = []
        self.fault_at: int | None = None  # the piece at which reading is interrupted
        self._text = folder / "text"
        self._capture = capture
        read = Engine.logits

        def logits(engine: Engine, ids: Sequence[int]) -> Floats:
            if len(self.pieces) == self.fault_at:
                raise KeyboardInterrupt
            self.pieces.append(list(ids))
            self.logits.append(read(engine, ids))
            return self.logits[-1]

        patch.setattr(Engine, "logits", logits)

    def __call__(self, model: str, *flags: str, text: str = TEXT) -> tuple[int, str, str]:
        self.pieces, self.logits = [], []
        self._text.write_text(text)
        status = main(["perplexity", "-m", model, "-f", str(self._text), *flags])
        return status, *self.captured()

    def captured(self) -> tuple[str, str]:
        captured = self._capture.readouterr()
        return captured.out, captured.err


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Runner:
    return Runner(tmp_path, capsys, monkeypatch)


# What is scored


@pytest.mark.parametrize(
    ("length", "first", "rows"),
    [(512, 256, 255), (64, 32, 31), (7, 3, 3), (4, 2, 1), (3, 1, 1), (2, 0, 1)],
)
def test_the_rows_scored_are_those_of_llama_cpp(length: int, first: int, rows: int) -> None:
    # n_ctx / 2 and n_ctx - 1 - n_ctx / 2 there, which leaves nothing of a chunk of 2.
    chunks = cut(range(2 * length + 1), length)
    assert (chunks.count, chunks.first, chunks.rows) == (2, first, rows)


def test_a_text_is_cut_into_whole_chunks_and_a_short_one_is_its_own() -> None:
    assert cut(range(11), 4).ids == [0, 1, 2, 3, 4, 5, 6, 7]
    assert cut(range(11), 4, 1).ids == [0, 1, 2, 3]
    assert cut(range(11), 4, 9).count == 2
    assert (cut(range(3), 4).length, cut(range(3), 4).count) == (3, 1)
    with pytest.raises(ConfigError, match="1 tokens"):
        cut([5], 4)


def test_perplexity_is_that_of_the_second_half_of_each_chunk(run: Runner, model: str) -> None:
    status, out, err = run(model, "-c", "64")
    assert status == 0
    nll = []
    for piece, logits in zip(run.pieces, run.logits, strict=True):
        wide = logits.astype(np.float64)
        log_p = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        nll += [-log_p[row, piece[row + 1]] for row in range(32, 63)]
    assert len(nll) == 93
    assert "(93 tokens, 3 chunks)" in out
    assert float(out.split()[1]) == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    assert "192 tokens in 3 chunks" in err


def test_each_chunk_begins_with_bos_and_the_text_does_not_end_with_eos(
    run: Runner, model: str, model_with_ends: str
) -> None:
    with Engine.open(Options(model)) as engine:
        ids = [BOS, *engine.encode(TEXT)]
    assert run(model_with_ends, "-c", "64")[0] == 0
    assert run.pieces == [[BOS, *ids[at + 1 : at + 64]] for at in (0, 64, 128)]
    assert run(model_with_ends, "-c", "512")[0] == 0
    assert run.pieces == [ids]


def test_bos_is_read_but_the_token_in_its_place_is_what_is_scored(
    run: Runner, model_with_ends: str
) -> None:
    _, out, _ = run(model_with_ends, "-c", "2", "--chunks", "1", text="xy")
    with Engine.open(Options(model_with_ends)) as engine:
        x, _ = engine.encode("xy")
    (logits,) = run.logits
    wide = logits[0].astype(np.float64)
    expected = np.exp(np.log(np.exp(wide).sum()) - wide[x])
    assert run.pieces == [[BOS, x]]
    assert float(out.split()[1]) == pytest.approx(expected, rel=1e-4)


def test_chunks_limits_what_is_read(run: Runner, model: str) -> None:
    _, out, _ = run(model, "-c", "64", "--chunks", "2")
    assert [len(piece) for piece in run.pieces] == [64, 64]
    assert "(62 tokens, 2 chunks)" in out


def test_one_newline_at_the_end_of_the_file_is_no_part_of_the_text(run: Runner, model: str) -> None:
    run(model, text="hello\n\n")
    with Engine.open(Options(model)) as engine:
        assert run.pieces == [engine.encode("hello\n")]


@pytest.mark.parametrize("text", ["", "\n", "x"])
def test_a_text_with_nothing_to_predict_is_refused(run: Runner, model: str, text: str) -> None:
    status, out, err = run(model, text=text)
    assert (status, out) == (2, "")
    assert "the text has 1 tokens" in err


@pytest.mark.parametrize(
    ("flags", "cause"), [(["--chunks", "0"], "--chunks 0"), (["-c", "1"], "at least 2 tokens")]
)
def test_what_cannot_be_cut_is_refused(
    run: Runner, model: str, flags: list[str], cause: str
) -> None:
    status, out, err = run(model, *flags)
    assert (status, out) == (2, "")
    assert cause in err


def test_stats_json_holds_the_figures(run: Runner, model: str, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    _, out, _ = run(model, "-c", "64", "--stats-json", str(stats))
    found = json.loads(stats.read_text())
    assert found["perplexity"] == pytest.approx(float(out.split()[1]), rel=1e-4)
    assert (found["scored_tokens"], found["prompt_tokens"]) == (93, 192)
    assert (found["chunks"], found["chunks_planned"]) == (3, 3)
    assert found["prompt_tps"] > 0
    assert "kl_mean" not in found


def test_verbose_says_which_model_was_opened(run: Runner, model: str) -> None:
    assert "qwen3moe, 2 layers" in run(model, "-c", "64", "--verbose")[2]
    assert "2 layers" not in run(model, "-c", "64")[2]


# What is compared


def test_kl_divergence_is_that_of_the_definition() -> None:
    base = np.log(np.array([[0.5, 0.5], [0.2, 0.8]], np.float32)) + 3
    ours = np.log(np.array([[0.25, 0.75], [0.2, 0.8]], np.float32)) - 700
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(kl_divergence(base, ours), [expected, 0], atol=1e-4)


def test_measuring_a_large_vocabulary_takes_no_memory_for_each_row() -> None:
    rng = np.random.default_rng(0)
    logits, base = rng.standard_normal((2, 32, 152_064), np.float32)
    following = rng.integers(152_064, size=32).tolist()
    tracemalloc.start()
    try:
        measured = measure(logits, following, base)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20  # all rows at once as float64: 37 MiB for each temporary
    np.testing.assert_allclose(measured.kl, kl_divergence(base, logits), rtol=1e-12)
    assert len(measured.nll) == len(measured.same_best) == 32


def test_a_run_against_itself_has_no_divergence_and_one_of_other_numbers_has(
    run: Runner, model: str, tmp_path: Path
) -> None:
    base = str(tmp_path / "base.logits")
    assert run(model, "-c", "64", "--save-logits", base)[0] == 0
    status, out, _ = run(model, "-c", "64", "--kl-base", base)
    assert status == 0
    assert "mean 0.000000" in out
    assert "best token agrees  100.00%" in out
    status, out, _ = run(model, "-c", "64", "--kl-base", base, "--ctk", "int8", "--ctv", "int8")
    assert status == 0
    assert float(out.split("mean ")[1].split()[0]) > 0


@pytest.mark.parametrize(
    ("ours", "theirs"), [([], ["--chunks", "1"]), (["--chunks", "1"], []), (["--chunks", "9"], [])]
)
def test_runs_of_different_length_are_compared_where_both_read(
    run: Runner, model: str, tmp_path: Path, ours: list[str], theirs: list[str]
) -> None:
    base = str(tmp_path / "base.logits")
    run(model, "-c", "64", *theirs, "--save-logits", base)
    there = len(run.pieces)
    status, out, err = run(model, "-c", "64", *ours, "--kl-base", base)
    here = 1 if ours == ["--chunks", "1"] else 3
    common = min(here, there)
    assert status == 0
    assert len(run.pieces) == common
    assert f"({31 * common} tokens, {common} chunks)" in out
    assert "mean 0.000000" in out
    said = f"--kl-base has {there} chunks, this run {here}: comparing the first {common}\n"
    assert (said in err) == (here != there)


def test_a_text_that_goes_on_is_compared_as_far_as_the_base_goes(
    run: Runner, model: str, tmp_path: Path
) -> None:
    base = str(tmp_path / "base.logits")
    run(model, "-c", "64", "--save-logits", base)
    status, _, err = run(model, "-c", "64", "--kl-base", base, text=TEXT * 2)
    assert status == 0
    assert "has 3 chunks, this run 7" in err


@pytest.mark.parametrize(
    ("flags", "text", "cause"),
    [
        (["-c", "32"], TEXT, "made with chunks of 64 tokens, this run has 32"),
        (["-c", "64"], TEXT[:50], "made with chunks of 64 tokens, this run has 47"),
        (["-c", "64"], TEXT[:99] + "?" + TEXT[100:], "token 93 is 11 there, 30 here"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_before_anything_is_read(
    run: Runner, model: str, tmp_path: Path, flags: list[str], text: str, cause: str
) -> None:
    base = str(tmp_path / "base.logits")
    run(model, "-c", "64", "--save-logits", base)
    status, out, err = run(model, *flags, "--kl-base", base, text=text)
    assert (status, out) == (2, "")
    assert cause in err
    assert run.pieces == []


def test_a_model_with_another_vocabulary_is_refused_before_anything_is_read(
    run: Runner, model: str, tmp_path: Path
) -> None:
    base = str(tmp_path / "base.logits")
    run(model, "-c", "64", "--save-logits", base)
    other = tmp_path / "other.gguf"
    make_model(other, replace(LOGITS_SHAPES["qwen3moe"], vocab=520))
    status, out, err = run(str(other), "-c", "64", "--kl-base", base)
    assert (status, out) == (2, "")
    assert "--kl-base has 512 logits a token, this model 520" in err
    assert run.pieces == []


# What a run leaves behind that does not come to its end


def test_a_base_damaged_half_way_ends_with_the_score_so_far_and_the_place(
    run: Runner, model: str, tmp_path: Path
) -> None:
    base = tmp_path / "base.logits"
    run(model, "-c", "64", "--save-logits", str(base))
    content = bytearray(base.read_bytes())
    content[-100] ^= 1
    base.write_bytes(content)
    status, out, err = run(model, "-c", "64", "--kl-base", str(base))
    assert status == 2
    assert "(62 tokens, 2 of 3 chunks)" in out
    assert "base.logits, offset " in err
    assert "the logits of chunk 3 of 3 are damaged" in err


def test_a_base_with_a_damaged_header_is_refused_before_the_model_is_opened(
    run: Runner, tmp_path: Path
) -> None:
    base = tmp_path / "base.logits"
    base.write_bytes(b"")
    status, out, err = run("missing.gguf", "--kl-base", str(base))
    assert (status, out) == (2, "")
    assert "base.logits" in err


def test_an_interrupted_run_says_its_score_so_far_and_keeps_the_older_logits(
    run: Runner, model: str, tmp_path: Path
) -> None:
    base, stats = tmp_path / "base.logits", tmp_path / "stats.json"
    base.write_bytes(b"older")
    run.fault_at = 2
    with pytest.raises(KeyboardInterrupt):
        run(model, "-c", "64", "--save-logits", str(base), "--stats-json", str(stats))
    out, err = run.captured()
    assert "(62 tokens, 2 of 3 chunks)" in out
    assert f"stopped after 2 of 3 chunks; {base} is written only by a whole run" in err
    assert base.read_bytes() == b"older"
    found = json.loads(stats.read_text())
    assert (found["chunks"], found["chunks_planned"], found["scored_tokens"]) == (2, 3, 62)
    assert {path.name for path in tmp_path.iterdir()} == {"text", "base.logits", "stats.json"}


def test_an_interrupt_before_the_first_score_leaves_nothing(
    run: Runner, model: str, tmp_path: Path
) -> None:
    run.fault_at = 0
    with pytest.raises(KeyboardInterrupt):
        run(model, "-c", "64", "--save-logits", str(tmp_path / "base"))
    out, err = run.captured()
    assert out == ""
    assert "stopped after 0 of 3 chunks" in err
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_ctrl_c_ends_with_130_and_the_score_so_far(model: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    code = (
        "import sys, time, strata_nb.__main__ as m\n"
        "from strata_nb.engine import Engine\n"
        "read = Engine.logits\n"
        "def slow(engine, ids, count=[]):\n"
        "    count.append(1)\n"
        "    if len(count) == 2:\n"
        "        print('reading', file=sys.stderr, flush=True)\n"
        "        time.sleep(60)\n"
        "    return read(engine, ids)\n"
        "Engine.logits = slow\n"
        f"sys.argv = ['strata_nb', 'perplexity', '-m', {model!r}, '-f', {str(text)!r}, '-c64']\n"
        "m.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A run in the background hands down an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert process.stderr.readline() == b"reading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"(31 tokens, 1 of 3 chunks)" in out
    assert b"Traceback" not in err


def test_logits_may_go_through_a_link_and_to_a_device(
    run: Runner, model: str, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert run(model, "-c", "64", "--save-logits", str(tmp_path / "link"))[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_size > 3 * 31 * 512 * 4
    assert run(model, "-c", "64", "--save-logits", os.devnull)[0] == 0
    assert not Path(os.devnull).is_file()
