"""Devices on the command line: what fits, what is said of it, profiles and traces, interrupts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from console import Console, interruptible, start
from model_shapes import LOGITS_SHAPES

from strata_nb import Engine, Options
from strata_nb.cache.profile import load_profile
from strata_nb.commands import answer, reading
from strata_nb.compiling import cache_folder

SHARED_MEMORY = Path("/dev/shm")
SHAPE = LOGITS_SHAPES["qwen3moe"]
GREEDY = ["--temp", "0", "-n", "20", "--ignore-eos", "-c", "128"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


def test_devices_lists_the_host_small_devices_cards_and_the_judge(run: Console) -> None:
    status, out, _ = run("devices")
    assert status == 0
    names = [line.split()[0] for line in out.splitlines() if line[0] != " "]
    assert (names[:2], names[-1]) == (["host", "host:NxSIZE"], "reference")
    assert {name.split(":")[0] for name in names[2:-1]} == {"cuda"}
    assert "GiB" in out


def test_devices_shows_one_device_or_refuses_it(run: Console) -> None:
    _, out, _ = run("devices", "--device", "host:2x64MiB@256KiB")
    assert out.count("64.0 MiB for weights") == 2
    assert "256.0 KiB" in out
    for wrong in ("tpu:0", "cuda:x", "cuda:9999"):
        status, _, err = run("devices", "--device", wrong)
        assert status == 2
        assert f"--device {wrong}: " in err


def test_a_small_device_says_what_fits_and_writes_what_the_host_writes(
    run: Console, model: str
) -> None:
    flags = ["generate", "-m", model, "hello", *GREEDY]
    _, host, host_err = run(*flags)
    status, out, err = run(*flags, "--device", "host:1x8MiB", "--expert-cache", "50%")
    assert (status, out) == (0, host)
    slots = SHAPE.layers * SHAPE.experts // 2
    assert f"slots for {slots} of {2 * slots} experts (50%, " in err
    assert f"; off: slots for {slots} experts (--expert-cache 50%)\n" in err
    assert "of 128 cells" in err
    assert re.search(
        rf"% hits with {slots} experts in {slots} slots, \d+ inserted, [\d.]+ MiB", err
    )
    assert "experts read in place" in host_err
    assert "of 128 cells" in host_err  # a chunk of the host holds more
    assert "slots" not in host_err


def test_verbose_says_how_a_prompt_is_read_and_what_experts_cost(
    run: Console, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "EVERY_S", 0.0)
    flags = ["generate", "-m", model, "a long " * 20, "-n", "1", "-c", "256", "--prefill", "16"]
    flags += ["--device", "host:1x8MiB", "--expert-cache"]
    _, _, err = run(*flags, "50%", "--verbose")
    found = r"[\d.]+% hits, [\d.]+ [KM]iB of experts from host memory, [\d.]+ GB/s"
    lines = re.findall(rf"(?m)^read (\d+) of (\d+) prompt tokens, [\d.,]+ tok/s; {found}$", err)
    (last,) = re.findall(rf"(?m)^read (\d+) prompt tokens in [\d.]+ s; {found}$", err)
    assert lines == [(str(done), last) for done in range(16, int(last), 16)]
    _, _, err = run(*flags, "100%", "--verbose")
    assert re.search(r"(?m)^read 16 of \d+ prompt tokens, [\d.,]+ tok/s$", err)
    _, _, err = run(*flags, "50%")
    assert "prompt tokens" not in err


def test_verbose_counts_the_experts_that_were_streamed_since_the_line_before(model: str) -> None:
    options = Options(model, "host:1x8MiB", ctx_size=64, expert_cache="50%")
    with Engine.open(options) as engine:
        before = replace(engine.describe(), streamed=5)
    after = replace(before, misses=before.misses + 4, link_bytes=8 * 10**9, streamed=1007)
    text = reading._from_host_memory(before, after, 0.5)
    assert (
        text
        == "; 0.0% hits, 7.45 GiB of experts from host memory, 16.0 GB/s, 1,002 experts streamed"
    )


def test_a_device_that_is_too_small_is_refused_with_the_whole_sum(run: Console, model: str) -> None:
    status, _, err = run("generate", "-m", model, "hello", "--device", "host:1x256KiB")
    assert status == 2
    assert "\n         262,144  free on the device\n" in err
    assert err.splitlines()[-1].startswith("hint: ")


def test_an_idle_second_device_is_said(run: Console, model: str) -> None:
    _, _, err = run("generate", "-m", model, "hello", *GREEDY, "--device", "host:2x8MiB")
    assert "warning: 1 of 2 devices are idle" in err


def test_a_profile_and_a_trace_are_written_and_the_profile_fills_the_slots(
    run: Console, model: str, tmp_path: Path
) -> None:
    profile, trace, stats = (str(tmp_path / name) for name in ("p", "t.npy", "s.json"))
    flags = ["generate", "-m", model, "hello", *GREEDY, "--device", "host:1x8MiB"]
    run(*flags, "--expert-profile-save", profile, "--routing-trace", trace, "--stats-json", stats)
    routes = np.load(trace)
    prompt = json.loads(Path(stats).read_text())["prompt_tokens"]
    assert routes.dtype == np.int16
    assert routes.shape == (prompt + 19, SHAPE.layers, SHAPE.top_k)  # the last token is not read
    ranked = load_profile(profile, SHAPE.layers, SHAPE.experts).order()
    counts = [int((routes[:, layer] == expert).sum()) for layer, expert in ranked]
    assert counts == sorted(counts, reverse=True)

    few = ["--expert-cache", "4", "--stats-json", stats]
    run(*flags, *few)
    without = json.loads(Path(stats).read_text())["hit_rate"]
    run(*flags, *few, "--expert-profile", profile)
    found = json.loads(Path(stats).read_text())
    assert found["slots"] == found["resident"] == 4
    assert found["hit_rate"] > without


def test_how_experts_follow_the_text_is_a_flag(run: Console, model: str, tmp_path: Path) -> None:
    stats = tmp_path / "s.json"
    flags = ["generate", "-m", model, "hello", *GREEDY, "--device", "host:1x8MiB"]
    flags += ["--expert-cache", "2", "--stats-json", str(stats)]
    written = {}
    for adapt in (["insert"], ["swap", "--adapt-every", "1", "--adapt-decay", "0.9"], ["off"]):
        _, written[adapt[0]], _ = run(*flags, "--adapt", *adapt)
        found = json.loads(stats.read_text())
        assert (found["inserted"] > 2) == (adapt != ["off"])
        assert found["inserted_bytes"] > found["inserted"]
    assert len(set(written.values())) == 1


def test_flags_about_experts_are_refused_where_there_are_none(
    run: Console, model: str, tmp_path: Path
) -> None:
    for flags, said in (
        (["--expert-cache", "5"], "has no slots"),
        (["--device", "reference", "--expert-cache", "5"], "no slots"),
        (["--adapt", "swap"], "has no slots"),
        (["--adapt", "lru"], "--adapt lru: not usable"),
        (["--adapt-every", "4"], "--adapt insert does not swap"),
        (["--device", "reference", "--routing-trace", str(tmp_path / "t")], "counts no experts"),
        (["--expert-profile", str(tmp_path / "none")], "none"),
    ):
        status, _, err = run("generate", "-m", model, "hello", *flags)
        assert status != 0
        assert said in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_cannot_be_two_things_but_a_profile_may_be_gone_on_with(
    run: Console, model: str, tmp_path: Path
) -> None:
    flags = ["generate", "-m", model, "hello", *GREEDY]
    one = str(tmp_path / "one")
    for pair in (
        ["--expert-profile-save", one, "--routing-trace", one],
        ["--stats-json", one, "--expert-profile", one],
        ["--trace", one, "--control", one],
    ):
        status, _, err = run(*flags, *pair)
        assert status == 2
        assert "names the same file" in err
    assert list(tmp_path.iterdir()) == []
    assert run(*flags, "--expert-profile-save", one)[0] == 0
    first = Path(one).read_bytes()
    assert run(*flags, "--expert-profile", one, "--expert-profile-save", one)[0] == 0
    assert len(Path(one).read_bytes()) == len(first)


def test_a_folder_for_compiled_code_that_cannot_be_made_is_refused(model: str) -> None:
    process = start(
        *["generate", "-m", model, "hello"], env={**os.environ, "STRATA_NB_CACHE_DIR": "/proc/none"}
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert b"machine code cannot be kept on disk" in err
    assert b"hint: " in err


def test_a_profile_that_cannot_be_read_is_refused(run: Console, model: str, tmp_path: Path) -> None:
    status, _, err = run("generate", "-m", model, "hi", "--expert-profile", str(tmp_path / "none"))
    assert status == 2
    assert "--expert-profile" in err
    assert "No such file" in err


def script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", text],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=interruptible,
    )


def test_ctrl_c_while_kernels_are_compiled_is_not_lost(model: str, tmp_path: Path) -> None:
    done = script(
        "import os, signal, sys\n"
        "from numba.core.codegen import JITCodeLibrary\n"
        "from strata_nb import cpu\n"
        "cpu.physical_cores = lambda: 2\n"
        "hook, calls = JITCodeLibrary._object_compiled_hook, []\n"
        "def interrupted(module, buffer):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    return hook(module, buffer)\n"
        "JITCodeLibrary._object_compiled_hook = interrupted\n"
        f"sys.argv = ['strata_nb', 'generate', '-m', {model!r}, 'hello', '-n', '3']\n"
        "from strata_nb.__main__ import main\n"
        "main()\n",
        STRATA_NB_CACHE_DIR=str(tmp_path),
    )
    assert done.returncode == 130
    assert "in 2 processes" in done.stderr
    assert "Traceback" not in done.stderr
    assert "generated" not in done.stderr
    assert not list(tmp_path.rglob("*.tmp*"))
    assert processes_with(f"STRATA_NB_CACHE_DIR={tmp_path}") == []


def processes_with(setting: str) -> list[str]:
    """Return the processes of this machine, those of others left out, with an environment."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if setting.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_a_first_start_in_several_processes_gives_what_later_ones_give(
    model: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"  # as users write them: what it does, it does when imported
    program.write_text(
        "import sys\n"
        "from strata_nb import Engine, Options, cpu\n"
        "cpu.physical_cores = lambda: 2\n"
        f"options = Options({model!r}, ctx_size=64)\n"
        "with Engine.open(options, say=lambda line: print(line, file=sys.stderr)) as engine:\n"
        "    print(engine.logits([1, 2, 3]).tobytes().hex())\n"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    settings = {"PYTHONPATH": paths, "STRATA_NB_CACHE_DIR": str(tmp_path / "cache")}
    first, second = (
        subprocess.run(
            [sys.executable, str(program)],
            env={**os.environ, **settings},
            capture_output=True,
            check=True,
            text=True,
        )
        for _ in range(2)
    )
    assert len(first.stdout) > 100
    assert second.stdout == first.stdout
    assert first.stderr.count("in 2 processes") == 1
    assert second.stderr == ""


@pytest.mark.parametrize("device", ["host", "host:1x64MiB"])
@pytest.mark.parametrize("end", ["", "import os\nif os.fork():\n    os.wait()\n"])
def test_a_program_that_closes_nothing_ends_in_silence(model: str, device: str, end: str) -> None:
    done = script(
        "from strata_nb import Engine, Options\n"
        f"engine = Engine.open(Options({model!r}, {device!r}, ctx_size=64))\n"
        "def use():\n"
        "    return engine.logits([1, 2])\n"
        f"print(use().shape)\n{end}"
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_an_engine_that_is_closed_while_another_thread_computes_ends_that_threads_work(
    model: str,
) -> None:
    done = script(
        "import threading, time\n"
        "from strata_nb import Engine, Options\n"
        "from strata_nb.errors import StrataError\n"
        f"engine = Engine.open(Options({model!r}, ctx_size=64))\n"
        "def loop():\n"
        "    try:\n"
        "        while True:\n"
        "            engine.logits(list(range(1, 60)))\n"
        "    except StrataError as error:\n"
        "        print(error)\n"
        "thread = threading.Thread(target=loop)\n"
        "thread.start()\n"
        "time.sleep(0.3)\n"
        "engine.close()\n"
        "thread.join()\n"
    )
    assert (done.returncode, done.stdout) == (0, "the engine is closed\n")


def test_a_second_start_compiles_nothing(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "strata_nb", "generate", "-m", model, "hello", "-n", "3"]
    subprocess.run(command, check=True, capture_output=True)
    # What lies in the common folder now; other tests that run beside this one may add to it.
    own = tmp_path / cache_folder().name
    shutil.copytree(cache_folder(), own, ignore=shutil.ignore_patterns("*.tmp*"))

    def compiled_files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in own.iterdir()}

    first = compiled_files()
    assert len(first) > 10
    settings = {**os.environ, "STRATA_NB_CACHE_DIR": str(tmp_path)}
    subprocess.run(command, check=True, capture_output=True, env=settings)
    assert compiled_files() == first


@pytest.mark.parametrize("device", ["host", "host:1x256MiB"])
def test_ctrl_c_while_a_prompt_is_read_ends_with_130_and_leaves_nothing(
    model: str, device: str
) -> None:
    before = set(os.listdir(SHARED_MEMORY))
    process = start(
        *["generate", "-m", model, "-f", "-", "-c", "60000", "--device", device, "--verbose"],
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"long " * 10_000)
    process.stdin.close()
    process.stdin = None
    while b"loaded in" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"prompt tokens in" not in err  # of a prompt that was read to its end
    assert left_over(before) == set()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_in_the_middle_of_an_answer_leaves_nothing(model: str, sent: int) -> None:
    before = set(os.listdir(SHARED_MEMORY))
    process = start(
        *["generate", "-m", model, "hello", "-n", "-1", "--ignore-eos", "-c", "60000"],
        *["--device", "host:1x256MiB"],
    )
    assert process.stdout is not None
    process.stdout.read(40)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if sent == signal.SIGINT else -signal.SIGKILL)
    assert b"Traceback" not in err
    if sent == signal.SIGINT:
        assert b"% hits with" in err
    assert left_over(before) == set()


def test_of_a_prompt_that_was_broken_off_the_cells_that_were_read_are_said(
    run: Console,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Interrupting(reading.Reading):
        def went_on(self, done: int, total: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(answer, "Reading", Interrupting)
    words = ["-f", "-", "-c", "600", "--prefill", "64", "--device", "host", "--verbose"]
    with pytest.raises(KeyboardInterrupt):
        run("generate", "-m", model, *words, stdin="long " * 100)
    assert "K/V 64 of 600 cells" in capsys.readouterr().err


def left_over(before: set[str]) -> set[str]:
    """Return what is in shared memory beside what was; what others put there soon goes away."""
    for _ in range(100):
        found = set(os.listdir(SHARED_MEMORY)) - before
        if not found:
            break
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("device", ["host", "reference"])
@pytest.mark.parametrize(
    ("flag", "does_not"),
    [
        ("--no-overlap", "begins no kernel before another has ended"),
        ("--no-prefill-borrow", "borrows nothing for prompts"),
        ("--pcie-frac=0.5", "shares no experts with the CPU"),
        ("--no-cpu-pool", "shares no experts with the CPU"),
        ("--no-pin", "shares no experts with the CPU"),
    ],
)
def test_a_device_without_what_a_flag_turns_off_says_so(
    run: Console, model: str, device: str, flag: str, does_not: str
) -> None:
    status, _, err = run("generate", "-m", model, "hello", *GREEDY, "--device", device, flag)
    assert status == 2
    assert err.startswith(f"strata_nb: {flag.partition('=')[0]}: the device {device} {does_not}")
