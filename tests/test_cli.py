"""The command line as a user meets it: what goes to stdout and stderr, and the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from console import Console, interruptible, start

from strata_nb import Engine, Options, Sampling
from strata_nb.commands.figures import Figures
from strata_nb.usage import USAGE

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


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


def test_the_prompt_is_written_first_where_asked(run: Console, model: str) -> None:
    flags = ["generate", "-m", model, "hello", "--temp", "0", "-n", "9"]
    assert run(*flags, "--echo")[1] == "hello" + run(*flags)[1]
    assert run(*flags, "--no-echo")[1] == run(*flags)[1]
    assert run("generate", "-m", model, "hello", "-n", "0", "--echo")[1] == "hello\n"


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
    assert (status, out) == (0, "")
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


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ([], "no command given"),
        (["generat"], "unknown command"),
        (["--version", "more"], "stands alone"),
        (["help", "nonsense"], "help nonsense: unknown command"),
        (["generate", "x", "-m", "none.gguf", "--stop", ""], "--stop"),
        (["generate", "x", "-m", "none.gguf", "--chat-template-file", "nope"], "nope"),
        (
            [
                "generate",
                "x",
                "-m",
                "none.gguf",
                "--chat-template",
                "a",
                "--chat-template-file",
                "b",
            ],
            "both given",
        ),
        (
            ["generate", "x", "-m", "none.gguf", "--system", "y", "--parse-special"],
            "--parse-special",
        ),
        (["--model"], "unknown flag"),
        (["generate", "-m", "none.gguf"], "no prompt given"),
        (["generate", "x", "-m", "none.gguf", "--echo", "--no-echo"], "both given"),
        (["generate", "x", "-m", "none.gguf", "--system", "y", "--echo"], "--echo"),
        (["generate", "x", "-m", ""], "empty file name"),
        (["generate", "x", "-m", "none.gguf"], "does not exist"),
        (["generate", "x", "-m", "none.gguf", "--temp", "-1"], "--temp -1"),
        (["generate", "x", "-m", "none.gguf", "-n", "-2"], "--max-tokens -2"),
        (["generate", "x", "-m", "none.gguf", "--stats-json", "no/such/folder"], "--stats-json"),
        (["info", "a", "-m", "b"], "info takes one file"),
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


def test_a_refused_prompt_leaves_an_older_stats_file_and_prints_no_figures(
    run: Console, model: str, tmp_path: Path
) -> None:
    stats = tmp_path / "stats.json"
    stats.write_text("older")
    flags = ["-c", "2", "--stats-json", str(stats)]
    status, out, err = run("generate", "-m", model, "hello", *flags)
    assert (status, out, len(err.splitlines())) == (2, "", 2)
    assert stats.read_text() == "older"


@pytest.mark.parametrize("to", ["m.gguf", "link", "other.gguf", "p.txt"])
def test_an_output_never_replaces_what_the_command_reads(
    run: Console, model: str, tmp_path: Path, to: str
) -> None:
    own, prompt = tmp_path / "m.gguf", tmp_path / "p.txt"
    own.write_bytes(Path(model).read_bytes())
    prompt.write_text("hello")
    (tmp_path / "link").symlink_to(own)
    target = str(tmp_path / to)
    flags = ["-m", str(own), "-f", str(prompt), "-n", "1", "--stats-json", target]
    status, out, err = run("generate", *flags)
    assert (status, out) == (2, "")
    assert f"--stats-json {target}" in err
    assert own.read_bytes() == Path(model).read_bytes()
    assert prompt.read_text() == "hello"


@pytest.mark.parametrize("place", ["/proc/stats.json", "x" * 300, "."])
def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_opened(
    run: Console, place: str
) -> None:
    status, _, err = run("generate", "x", "-m", "none.gguf", "--stats-json", place)
    assert status == 2
    assert "cannot be written" in err


def test_a_message_never_takes_more_than_its_line(run: Console, model: str) -> None:
    template = "{{ raise_exception('one\n\x1b[31mtwo') }}"
    status, _, err = run("chat", "-m", model, "--chat-template", template, stdin="hello\n")
    assert status == 1
    assert "one\\n\\x1b[31mtwo" in err.splitlines()[0]


def test_stats_json_follows_links_and_writes_to_pipes(
    run: Console, model: str, tmp_path: Path
) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("older")
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, pipe):
        run("generate", "-m", model, "hello", "-n", "1", "--stats-json", str(path))
    assert link.is_symlink()
    assert json.loads(target.read_text())["generated_tokens"] == 1
    assert json.loads(os.read(reader, 10_000))["generated_tokens"] == 1
    os.close(reader)


def test_control_tokens_in_a_prompt_are_text_and_said_unless_asked_for(
    run: Console, model: str, tmp_path: Path
) -> None:
    with Engine.open(Options(model)) as engine:
        end = engine.tokenizer.text(engine.tokenizer.eos_id or 0)
        assert end in engine.tokenizer.control_texts
        as_text, as_token = len(engine.encode(end)), len(engine.encode(end, parse_special=True))
    flags = ["generate", "-m", model, end, "-n", "1"]
    _, _, err = run(*flags)
    assert f"prompt {as_text} tokens" in err
    assert "--parse-special" in err
    _, _, err = run(*flags, "--parse-special")
    assert f"prompt {as_token} tokens" in err
    assert "--parse-special" not in err


def test_figures_count_time_to_the_first_token_and_the_rate_of_the_others() -> None:
    generation = SimpleNamespace(
        generated=5, first_token_s=0.5, decode_s=2.0, finish="end", seed=1, random=True
    )
    figures = Figures(load_s=100.0, prompt_tokens=8, prompt_s=4.0)
    figures.add_answer(generation, prompt_s=4.0)  # type: ignore[arg-type]
    assert (figures.prompt_tps, figures.ttft_s, figures.decode_tps) == (2.0, 4.5, 2.0)
    figures.add_answer(generation, prompt_s=9.0)  # type: ignore[arg-type]
    assert (figures.ttft_s, figures.generated_tokens, figures.decode_tps) == (4.5, 10, 2.0)


@pytest.mark.parametrize("command", USAGE)
def test_every_command_explains_itself(run: Console, command: str) -> None:
    words = command.split()
    assert run(*words, "--help")[:2] == (0, USAGE[command])
    assert run(*words, "-h")[:2] == (0, USAGE[command])
    assert run("help", *words)[:2] == (0, USAGE[command])


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
    # A model read through a slow stand-in for dequantising: loading takes long enough to hit. The
    # other devices' loading is interrupted in test_loading.py.
    code = (
        "import time, strata_nb.models.weights as w, strata_nb.__main__ as m, sys\n"
        "def slow(*given):\n"
        "    print('loading', flush=True)\n"
        "    time.sleep(60)\n"
        "w.dequantise = slow\n"
        f"sys.argv = ['strata_nb', 'generate', '-m', {model!r}, '--device=reference', 'hello']\n"
        "m.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=interruptible,
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
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=interruptible,
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
    assert b"generated 0 tokens" not in err
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
    process.stderr.close()


def test_a_closed_stream_is_refused_in_words(model: str) -> None:
    script = f"{sys.executable} -m strata_nb"
    for command, cause in (
        (f"{script} --version >&-", "stdout is closed"),
        (f"{script} chat -m {model} <&-", "stdin is closed"),
        (f"{script} generate -m {model} -f - <&-", "stdin is closed"),
    ):
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert cause in done.stderr
        assert "Traceback" not in done.stderr


def test_what_is_said_to_a_closed_stream_does_not_come_among_the_answer(model: str) -> None:
    script = f"{sys.executable} -m strata_nb generate"
    for command, expected in (
        (f"{script} -m {model} --temp 0 -n 3 --no-echo hello 2>&-", (0, True)),
        (f"{script} -m {model}.not 2>&-", (2, False)),
    ):
        done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
        assert (done.returncode, len(done.stdout) > 0) == expected
        assert b"strata_nb" not in done.stdout


def test_an_ignored_interrupt_stays_ignored() -> None:
    code = (
        "import strata_nb.cli, strata_nb.__main__ as m, signal\n"
        "strata_nb.cli.main = lambda words: signal.raise_signal(signal.SIGINT) or 0\n"
        "m.main()"
    )
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(ignoring, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def on_a_terminal(words: list[str], keys: bytes, *, whole: bool = False, **environ: str) -> bytes:
    """Return what a terminal shows of a command: what goes to stderr, and to stdout if `whole`."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "strata_nb", *words],
        stdin=slave,
        stdout=slave if whole else subprocess.DEVNULL,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", **environ},
    )
    os.close(slave)
    os.write(master, keys)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(master, 65536):
            shown += piece
    os.close(master)
    assert process.wait(timeout=60) == 0
    return shown


def test_a_terminal_shows_progress_and_a_pipe_does_not(model: str) -> None:
    words = ["generate", "-m", model, "-p", "hello " * 100, "-n", "1", "--verbose"]
    shown = on_a_terminal(words, b"")
    assert b"loading" in shown
    assert b"reading the prompt" in shown
    _, err = start(*words).communicate(timeout=60)
    assert b"\x1b" not in err
    assert b"loading" not in err


def test_a_terminal_shows_the_prompt_and_what_continues_it_unless_told_not_to(model: str) -> None:
    words = ["generate", "-m", model, "-p", "hello there", "-n", "3", "--temp", "0"]
    assert b"\x1b[2mhello there\x1b[0m" in on_a_terminal(words, b"", whole=True)
    plain = on_a_terminal(words, b"", whole=True, NO_COLOR="1")
    assert b"hello there" in plain
    assert b"\x1b[2m" not in plain
    assert b"hello there" not in on_a_terminal([*words, "--no-echo"], b"", whole=True)
    assert b"hello there" not in on_a_terminal(words, b"")
    answer = [*words, "--chat-template", CHATML]  # which continues nothing
    assert b"hello there" not in on_a_terminal(answer, b"", whole=True)


def test_chat_on_a_terminal_prompts_and_goes_on_after_a_message_that_does_not_fit(
    model: str,
) -> None:
    words = ["chat", "-m", model, "--chat-template", CHATML, "-c", "100", "-n", "2"]
    shown = on_a_terminal(words, b"hi\n" + b"too long " * 20 + b"\nhi again\n/exit\n")
    assert shown.count(b"> ") >= 4
    assert b"does not fit a context of 100 cells" in shown
    assert b"generated 4 tokens" in shown


@pytest.mark.model
def test_the_real_model_continues_a_text(run: Console, smollm2: Path) -> None:
    flags = ["generate", "-m", str(smollm2), "--temp", "0", "-n", "12"]
    status, out, _ = run(*flags, "The capital of France is")
    assert status == 0
    assert out.startswith(" Paris")


@pytest.mark.model
def test_the_real_model_answers_in_a_conversation_and_ends_its_turns(
    run: Console, smollm2: Path, tmp_path: Path
) -> None:
    stats = tmp_path / "stats.json"
    status, out, _ = run(
        *["chat", "-m", str(smollm2), "--temp", "0", "--stats-json", str(stats)],
        *["--device", "reference"],  # whose best token leads by 0.08 only; others may take another
        stdin="What is the capital of France?\nAnd of Italy?\n",
    )
    assert status == 0
    assert out == "The capital of France is Paris.\nThe capital of Italy is Rome.\n"
    assert json.loads(stats.read_text())["finish"] == "end"


@pytest.mark.model
def test_the_real_model_answers_on_the_default_device(run: Console, smollm2: Path) -> None:
    status, out, err = run(
        *["chat", "-m", str(smollm2), "--temp", "0", "-n", "40"],
        stdin="Name three colors.\n",
    )
    assert (status, out) == (0, "1. Red\n2. Blue\n3. Green\n")
    assert "K/V" in err
