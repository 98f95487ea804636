"""The command line as a user meets it: what goes to stdout and stderr, and the exit status."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from make_model import make_model
from model_shapes import LOGITS_SHAPES

from strata_nb import Engine, Options, Sampling
from strata_nb.cli import USAGE, main

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_model(path, LOGITS_SHAPES["qwen3moe"])
    return str(path)


class Console:
    """Run commands in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capture, self._patch = capture, patch

    def __call__(self, *words: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        status = main(words)
        captured = self._capture.readouterr()
        return status, captured.out, captured.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


def start(*words: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "strata_nb", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )


def test_generate_writes_the_answer_alone_to_stdout(run: Console, model: str) -> None:
    status, out, err = run("generate", "-m", model, "hello", "--temp", "0", "-n", "9")
    with Engine.open(Options(model)) as engine:
        ids = engine.encode("hello", add_special=True)
        tokens = engine.generate(ids, max_tokens=9, sampling=Sampling(temperature=0))
        expected = "".join(token.text for token in tokens)
    assert status == 0
    assert out.removesuffix("\n") == expected.removesuffix("\n")
    assert out.endswith("\n")
    assert f"prompt {len(ids)} tokens" in err
    assert "generated 9 tokens" in err


def test_the_prompt_may_come_from_a_word_a_flag_a_file_or_stdin(
    run: Console, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt"
    file.write_text("hello\n")
    flags = ["generate", "-m", model, "-n", "5", "--temp", "0"]
    outputs = {
        run(*flags, "hello")[1],
        run(*flags, "-p", "hello")[1],
        run(*flags, "-f", str(file))[1],
        run(*flags, "-f", "-", stdin="hello\n")[1],
    }
    assert len(outputs) == 1


def test_a_stop_string_ends_the_answer_before_it(run: Console, model: str) -> None:
    flags = ["generate", "-m", model, "hello", "--temp", "0", "-n", "9"]
    whole = run(*flags)[1]
    stop = whole[12:16]
    assert run(*flags, "--stop", "never", "--stop", stop)[1].rstrip("\n") == (
        whole[: whole.index(stop)].rstrip("\n")
    )


def test_stats_json_holds_the_figures_of_the_run(run: Console, model: str, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    run("generate", "-m", model, "hello", "-n", "6", "--seed", "7", "--stats-json", str(stats))
    found = json.loads(stats.read_text())
    assert found["schema"] == 1
    assert found["generated_tokens"] == 6
    assert found["prompt_tokens"] == 4
    assert found["seed"] == 7
    assert found["finish"] == "length"
    for rate in ("load_s", "prompt_tps", "ttft_s", "decode_tps"):
        assert found[rate] > 0
    assert list(tmp_path.iterdir()) == [stats]


def test_the_end_line_names_the_seed_with_which_the_run_can_be_repeated(
    run: Console, model: str
) -> None:
    _, out, err = run("generate", "-m", model, "hello", "-n", "8")
    seed = err.rsplit("seed ", 1)[1].strip()
    assert run("generate", "-m", model, "hello", "-n", "8", "--seed", seed)[1] == out


def test_an_empty_prompt_starts_from_the_models_own_first_token(run: Console, model: str) -> None:
    status, out, err = run("generate", "-m", model, "", "-n", "3")
    assert status == 0
    assert out
    assert "the prompt is empty: starting from" in err


def test_zero_tokens_is_an_empty_answer(run: Console, model: str) -> None:
    status, out, err = run("generate", "-m", model, "hello", "-n", "0")
    assert (status, out) == (0, "\n")
    assert "generated 0 tokens" in err


def test_a_system_message_puts_the_prompt_into_the_template(run: Console, model: str) -> None:
    template = ["--chat-template", CHATML]
    status, _, err = run(
        "generate", "-m", model, "hello", "--system", "be brief", "-n", "1", *template
    )
    assert status == 0
    with Engine.open(Options(model)) as engine:
        count = len(engine.encode("<system>be brief<user>hello"))
    assert f"prompt {count} tokens" in err


def test_chat_keeps_the_conversation_and_reads_only_what_is_new(
    run: Console, model: str, tmp_path: Path
) -> None:
    stats = tmp_path / "stats.json"
    flags = ["chat", "-m", model, "--chat-template", CHATML, "--temp", "0", "-n", "4"]
    status, out, _ = run(*flags, "--stats-json", str(stats), stdin="hello\nand more\n")
    assert status == 0
    first, second = out.split("\n")[:2]
    assert run(*flags, stdin="hello\n/reset\n\n/exit\nnever\n")[1] == first + "\n"
    with Engine.open(Options(model)) as engine:
        whole = engine.encode(f"<user>hello<assistant>{first}<user>and more")
        generation = engine.generate(whole, max_tokens=4, sampling=Sampling(temperature=0))
        assert "".join(token.text for token in generation) == second
    assert json.loads(stats.read_text())["prompt_tokens"] <= len(whole)


def test_chat_without_a_template_names_a_way_out(run: Console, model: str) -> None:
    status, _, err = run("chat", "-m", model, stdin="hello\n")
    assert status == 2
    assert "--chat-template chatml" in err


def test_a_template_that_refuses_ends_with_its_message_and_status_1(
    run: Console, model: str
) -> None:
    template = "{{ raise_exception('no system message, please') }}"
    status, out, err = run("chat", "-m", model, "--chat-template", template, stdin="hello\n")
    assert (status, out) == (1, "")
    assert "no system message, please" in err


def test_tokenize_shows_a_line_per_token_or_the_ids(run: Console, model: str) -> None:
    status, out, _ = run("tokenize", "-m", model, "hey\né")
    assert status == 0
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert [shown for _, shown in rows] == ["'he'", "'y'", "'\\n'", "b'\\xc3'", "b'\\xa9'"]
    _, ids, _ = run("tokenize", "-m", model, "hey\né", "--ids")
    assert ids.split() == [token for token, _ in rows]
    assert run("tokenize", "-m", model, "", "--ids")[:2] == (0, "\n")


def test_info_sums_what_would_fit_on_a_card(run: Console, model: str) -> None:
    status, out, _ = run("info", model, "--vram", "702MiB", "--keys", "--tensors", "-c", "100")
    assert status == 0
    assert "qwen3moe" in out
    assert "general.architecture = 'qwen3moe'" in out
    assert "blk.1.ffn_down_exps.weight  Q6_K" in out or "blk.1.ffn_down_exps.weight  Q4_K" in out
    with Engine.open(Options(model)) as engine:
        known = engine.description
    free = 2 * 2**20 - known.dense_bytes - 100 * known.kv_bytes_per_cell("f16", "f16")
    fits = 0
    for one in sorted(known.one_expert_bytes * known.experts):
        free -= one
        fits += free >= 0
    assert f"experts that fit      {fits} of 16" in out
    assert 0 < fits < 16


def test_info_names_what_is_missing_on_a_card_that_is_too_small(run: Console, model: str) -> None:
    _, out, _ = run("info", model, "--vram", "600MiB")
    assert "too small by" in out
    assert "experts that fit" not in out


def test_perplexity_of_a_run_against_itself_is_no_divergence(
    run: Console, model: str, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("hello there, this is a text of some length. " * 6)
    base = tmp_path / "base.logits"
    flags = ["perplexity", "-m", model, "-f", str(text), "-c", "64"]
    status, out, _ = run(*flags, "--save-logits", str(base))
    assert status == 0
    perplexity = float(out.split()[1])
    with Engine.open(Options(model)) as engine:
        ids = engine.encode(text.read_text())[:256]
        nll = []
        for at in range(0, len(ids) - 63, 64):
            logits = engine.logits(ids[at : at + 64]).astype(np.float64)
            log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            nll += [-log_p[n, ids[at + n + 1]] for n in range(31, 63)]
    assert perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    status, out, _ = run(*flags, "--kl-base", str(base))
    assert status == 0
    assert "mean 0.000000" in out
    assert "best token agrees  100.00%" in out
    status, out, _ = run(*flags, "--kl-base", str(base), "--ctk", "int8", "--ctv", "int8")
    assert status == 0
    assert float(out.split("mean ")[1].split()[0]) > 0


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (["-c", "32"], "chunks of 64 tokens"),
        (["--chunks", "0"], "--chunks 0"),
        (["-c", "1"], "at least 2 tokens"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    run: Console, model: str, tmp_path: Path, change: list[str], cause: str
) -> None:
    text = tmp_path / "text"
    text.write_text("hello there, this is a text. " * 6)
    base = tmp_path / "base.logits"
    flags = ["perplexity", "-m", model, "-f", str(text)]
    run(*flags, "-c", "64", "--save-logits", str(base))
    status, out, err = run(*flags, "--kl-base", str(base), *change)
    assert (status, out) == (2, "")
    assert cause in err


def test_a_damaged_logits_file_is_refused(run: Console, model: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello there, this is a text. " * 6)
    base = tmp_path / "base.logits"
    flags = ["perplexity", "-m", model, "-f", str(text), "-c", "64"]
    run(*flags, "--save-logits", str(base))
    content = base.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content[:200] + bytes(64) + content[264:]):
        base.write_bytes(damaged)
        status, _, err = run(*flags, "--kl-base", str(base))
        assert status == 2
        assert "base.logits" in err


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ([], "no command given"),
        (["generat"], "unknown command"),
        (["--model"], "unknown flag"),
        (["generate"], "no prompt given"),
        (["generate", "x"], "no model given"),
        (["generate", "x", "-m", ""], "empty file name"),
        (["generate", "x", "-m", "none.gguf"], "does not exist"),
        (["generate", "x", "-m", "none.gguf", "--temp", "-1"], "--temp -1"),
        (["generate", "x", "-m", "none.gguf", "-n", "-2"], "--max-tokens -2"),
        (["generate", "x", "-m", "none.gguf", "--stats-json", "no/such/folder"], "--stats-json"),
        (["info"], "info needs one file"),
        (["perplexity", "-m", "x"], "no text given"),
        (["tokenize", "-m", "x"], "no text given"),
    ],
)
def test_what_cannot_be_used_exits_2_with_cause_and_remedy_and_says_nothing_on_stdout(
    run: Console, words: list[str], cause: str
) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert cause in lines[0]
    assert lines[1].startswith("hint: ")


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    run: Console, model: str
) -> None:
    status, out, err = run("generate", "-m", model, "-p", "hello " * 50, "-c", "16")
    assert (status, out.strip()) == (2, "")
    assert "16 cells" in err
    assert "a prompt of " in err


def test_an_empty_stop_string_is_refused(run: Console, model: str) -> None:
    status, _, err = run("generate", "-m", model, "hello", "--stop", "")
    assert status == 2
    assert "--stop" in err


@pytest.mark.parametrize("command", USAGE)
def test_every_command_explains_itself(run: Console, command: str) -> None:
    assert run(command, "--help")[:2] == (0, USAGE[command])
    assert run(command, "-h")[:2] == (0, USAGE[command])
    assert run("help", command)[:2] == (0, USAGE[command])


def test_help_and_version_load_neither_numpy_nor_jinja() -> None:
    code = (
        "import sys; from strata_nb.cli import main\n"
        "assert main(['--help']) == main(['generate', '--help']) == main(['--version']) == 0\n"
        "heavy = {'numpy', 'jinja2', 'tokenizers', 'rich', 'numba'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_an_unexpected_fault_shows_one_line_and_its_traceback_only_where_asked(
    run: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(words: list[str]) -> int:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("strata_nb.cli._dispatch", fault)
    status, _, err = run("generate")
    assert status == 1
    assert "internal error: RuntimeError: a fault of ours" in err
    assert "Traceback" not in err
    monkeypatch.setenv("STRATA_NB_DEBUG", "1")
    assert "Traceback" in run("generate")[2]


def test_ctrl_c_ends_with_130_and_keeps_what_was_written(model: str) -> None:
    process = start("generate", "-m", model, "hello", "-n", "-1", "--ignore-eos", "-c", "1000000")
    assert process.stdout is not None
    first = process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 40
    assert b"generated " in err
    assert b"Traceback" not in err


def test_ctrl_c_while_loading_ends_with_130(model: str, tmp_path: Path) -> None:
    # A model read through a slow stand-in for dequantising: loading takes long enough to hit.
    code = (
        "import time, strata_nb.models.weights as w, strata_nb.__main__ as m, sys\n"
        "def slow(*given):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(60)\n"
        "w.dequantise = slow\n"
        f"sys.argv = ['strata_nb', 'generate', '-m', {model!r}, 'hello']\n"
        "m.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_second_ctrl_c_ends_a_process_inside_a_long_matrix_product() -> None:
    code = (
        "import numpy as np, strata_nb.cli, strata_nb.__main__ as m\n"
        "def busy(words):\n"
        "    a = np.ones((10000, 10000), np.float32)\n"
        "    print('busy', flush=True)\n"
        "    try:\n"
        "        a @ a\n"
        "    except KeyboardInterrupt:\n"
        "        print('only when the product was done', flush=True)\n"
        "strata_nb.cli.main = busy\n"
        "m.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two signals sent at once arrive as one
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")


def test_a_reader_that_goes_away_ends_the_run_quietly(model: str) -> None:
    process = start("generate", "-m", model, "hello", "-n", "-1", "--ignore-eos", "-c", "1000000")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
    process.stderr.close()


def test_progress_bars_stay_away_from_pipes(model: str) -> None:
    process = start("generate", "-m", model, "hello " * 100, "-n", "1")
    _, err = process.communicate(timeout=60)
    assert b"\x1b" not in err
    assert b"loading" not in err
