"""Memory for other programs while a model is open: by the engine's method, and over a socket."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from device_world import SHAPE, random_tokens

from strata_nb import Engine, Options, Sampling
from strata_nb.commands.control import ControlSocket, answer
from strata_nb.errors import ConfigError, DriverError, RuleViolation
from strata_nb.reports import Report

GREEDY = Sampling(temperature=0)
IDS = random_tokens(30)


@pytest.fixture(scope="module")
def options(small: Path) -> Options:
    return Options(
        small,
        device="host:1x9MiB@64KiB",
        ctx_size=512,
        prefill=64,
        vram_elastic=True,
        vram_reserve_mib=2,
        deterministic=True,
    )


@pytest.fixture
def engine(options: Options) -> Iterator[Engine]:
    with Engine.open(options) as engine:
        yield engine
        engine._device().ledger.check_integrity()


def write(engine: Engine, count: int = 60) -> list[int]:
    generation = engine.generate(IDS, sampling=GREEDY, max_tokens=count, ignore_eos=True)
    return [token.id for token in generation]


def free_bytes(engine: Engine) -> int:
    (device,) = engine.describe().devices
    assert device.free_bytes is not None
    return device.free_bytes


@pytest.fixture(scope="module")
def expected(options: Options) -> list[int]:
    with Engine.open(replace(options, kv_grow=False)) as engine:
        return write(engine)


def test_memory_is_given_and_taken_in_the_middle_of_an_answer_and_no_token_changes(
    engine: Engine, expected: list[int]
) -> None:
    session = engine.open_session()
    session.extend(IDS)
    generation = session.generate(sampling=GREEDY, max_tokens=60, ignore_eos=True)
    ids, slots = [], []
    for number, token in enumerate(generation):
        ids.append(token.id)
        reserve: int | None = [4, 5, 3, 0, None][number // 12]
        if number % 12 == 3:
            report = engine.set_vram_reserve(reserve)
            slots.append(report.expert_slots)
            assert report.reserve_mib == (2 if reserve is None else reserve)
            assert free_bytes(engine) >= report.reserve_mib << 20
    assert ids == expected
    assert slots[1] < slots[0] < slots[3]
    assert slots[1] <= slots[2]


def test_the_answer_says_what_there_is(engine: Engine) -> None:
    write(engine)
    full = engine.describe()
    report = engine.set_vram_reserve(4)
    now = engine.describe()
    assert report.expert_slots == now.slots < full.slots
    assert report.expert_slots_full == SHAPE.layers * SHAPE.experts
    assert report.expert_cache_mib == now.bytes_by_owner["experts"] >> 20
    assert report.expert_cache_full_mib >= report.expert_cache_mib
    assert report.vram_free_mib == free_bytes(engine) >> 20 >= 4
    assert report.prompt_chunk == engine.prefill_rows == 64
    engine.set_vram_reserve(None)
    again = engine.describe()
    assert (again.slots, again.resident) == (full.slots, full.resident)


def test_a_slot_a_layer_and_the_kv_stay_whatever_is_asked_for(
    engine: Engine, expected: list[int]
) -> None:
    report = engine.set_vram_reserve(1000)
    assert SHAPE.layers <= report.expert_slots < SHAPE.layers + 3
    assert report.vram_free_mib < 1000
    assert write(engine, 20) == expected[:20]
    engine.set_vram_reserve(0)
    assert write(engine) == expected


@pytest.mark.parametrize("mib", [-1, 2**31, 1.5, "5", True])
def test_a_number_that_is_none_is_refused(engine: Engine, mib: Any) -> None:
    with pytest.raises(ConfigError, match="not usable"):
        engine.set_vram_reserve(mib)


def test_without_the_flag_and_on_the_whole_machine_it_is_refused(options: Options) -> None:
    with Engine.open(replace(options, vram_elastic=False)) as engine:
        with pytest.raises(ConfigError, match="not opened to change") as refused:
            engine.set_vram_reserve(1)
        assert "--vram-elastic" in refused.value.hint
    with pytest.raises(ConfigError, match="--vram-elastic: the device host is the whole machine"):
        Engine.open(replace(options, device="host", vram_reserve_mib=None))
    with pytest.raises(ConfigError, match="--vram-elastic: the reference device"):
        Engine.open(Options(options.model, device="reference", vram_elastic=True))


@pytest.mark.parametrize("operation", ["synchronize", "mem_info", "unmap", "release", "map"])
def test_a_device_error_is_told_and_the_engine_goes_on(
    engine: Engine, expected: list[int], operation: str
) -> None:
    write(engine, 5)
    engine.set_vram_reserve(4)
    faults = engine._device()._backend.driver.faults  # type: ignore[attr-defined]
    faults.plan(operation, forever=True)
    for reserve in (5, None):
        with suppress(DriverError):
            engine.set_vram_reserve(reserve)
    faults.lift()
    engine._device().ledger.check_integrity()
    assert write(engine) == expected
    engine.set_vram_reserve(3)


def test_a_request_waits_for_the_step_and_not_for_the_answer(
    engine: Engine, expected: list[int]
) -> None:
    generation = engine.generate(IDS, sampling=GREEDY, max_tokens=60, ignore_eos=True)
    ids = [next(generation).id]
    done = threading.Event()

    def ask() -> None:
        for reserve in (4, 3, 5, None):
            engine.set_vram_reserve(reserve)
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    ids += [token.id for token in generation]
    thread.join()
    assert done.is_set()
    assert ids == expected


def test_an_answer_has_the_numbers_of_its_own_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, 5)
    alone = engine.set_vram_reserve(5)
    model = engine._device()
    set_reserve = model.set_reserve

    def and_another_at_once(reserve_bytes: int | None) -> object:
        done = set_reserve(reserve_bytes)
        set_reserve(3 << 20)
        return done

    monkeypatch.setattr(model, "set_reserve", and_another_at_once)
    assert engine.set_vram_reserve(5) == alone
    assert free_bytes(engine) >> 20 < alone.vram_free_mib


# The socket.


def test_lines_are_answered_in_the_words_that_programs_know(engine: Engine) -> None:
    line = answer(engine, "VRAM 4")
    word, *pairs = line.split()
    assert word == "VRAM"
    values = dict(pair.split("=") for pair in pairs)
    assert list(values) == [
        "reserve_mib",
        "expert_slots",
        "expert_slots_full",
        "expert_cache_mib",
        "expert_cache_full_mib",
        "vram_free_mib",
        "prompt_chunk",
    ]
    assert values["reserve_mib"] == "4"
    assert answer(engine, "VRAM\r\n").startswith("VRAM reserve_mib=2 ")
    status = json.loads(answer(engine, "STATUS"))
    assert status["slots"] == engine.describe().slots
    assert status["devices"][0]["name"] == "host:1x9MiB@64KiB"
    assert answer(engine, "VRAM -1") == "ERR VRAM: '-1' is not a number of MiB"
    assert answer(engine, "VRAM 1 2") == "ERR VRAM: '1 2' is not a number of MiB"
    assert answer(engine, "").startswith("ERR ''")
    assert answer(engine, "vram \u0001").startswith("ERR 'vram': not understood")


def test_a_status_is_of_one_moment(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    report, moments = engine.describe(), count()

    def at_a_moment() -> Report:
        slots = next(moments)
        devices = tuple(device._replace(slots=slots) for device in report.devices)
        return replace(report, devices=devices)

    monkeypatch.setattr(engine, "describe", at_a_moment)
    status = json.loads(answer(engine, "STATUS"))
    assert status["devices"][0]["slots"] == status["slots"]


def test_a_socket_answers_several_clients_and_goes_away(engine: Engine, tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    control = ControlSocket(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with (
        closing(control),
        control.serving(engine),
        client(path) as silent,
        client(path) as first,
        client(path) as second,
    ):
        first.sendall(b"VRAM 4\nSTA")
        second.sendall(b"VRAM x\n")
        answers = first.makefile(), second.makefile()
        assert answers[0].readline().startswith("VRAM reserve_mib=4 ")
        assert answers[1].readline() == "ERR VRAM: 'x' is not a number of MiB\n"
        first.sendall(b"TUS\nVRAM")
        assert json.loads(answers[0].readline())["slots"] > 0
        first.shutdown(socket.SHUT_WR)
        assert answers[0].readline().startswith("VRAM reserve_mib=2 ")
        assert answers[0].readline() == ""
        silent.sendall(b"x" * 5000)
        with pytest.raises(ConfigError, match=r"--control .*: Address already in use"):
            ControlSocket(path)
        for one in answers:
            one.close()
    assert not os.path.exists(path)


def test_a_socket_of_a_dead_process_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    ControlSocket(path).close()
    assert not os.path.exists(path)
    Path(path).write_text("precious")
    with pytest.raises(ConfigError, match="Address already in use"):
        ControlSocket(path)
    assert Path(path).read_text() == "precious"
    with pytest.raises(ConfigError, match="too long"):
        ControlSocket(str(tmp_path / ("x" * 200)))
    with pytest.raises(ConfigError, match="No such file"):
        ControlSocket(str(tmp_path / "none" / "x"))


def test_a_socket_listens_before_it_is_at_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def connected_first(place: str, path: str) -> None:
        client(place).close()
        link(place, path)

    monkeypatch.setattr(os, "link", connected_first)
    with closing(ControlSocket(str(tmp_path / "control"))):
        assert [one.name for one in tmp_path.iterdir()] == ["control"]


def test_a_socket_whose_owner_is_busy_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    with socket.socket(socket.AF_UNIX) as busy, ExitStack() as waiting:
        busy.bind(path)
        busy.listen(0)
        for _ in range(3):  # until the queue of those who want to connect is full
            one = waiting.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            one.connect_ex(path)
        with pytest.raises(ConfigError, match="Address already in use"):
            ControlSocket(path)


def test_a_socket_that_another_process_made_in_the_place_of_ours_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    ours = ControlSocket(path)
    os.unlink(path)
    with closing(ControlSocket(path)):
        ours.close()
        with client(path):
            pass
    assert not os.path.exists(path)


@pytest.mark.parametrize("failure", [RuleViolation(9, "of\nours"), MemoryError(), OSError(5, "x")])
def test_an_error_that_is_not_the_callers_is_told_and_ends_the_socket_and_the_run(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(mib: int | None) -> None:
        raise failure

    monkeypatch.setattr(engine, "set_vram_reserve", fail)
    path = str(tmp_path / "control")

    def ask() -> None:
        with (
            closing(ControlSocket(path)) as control,
            control.serving(engine),
            client(path) as asking,
            client(path) as waiting,
            asking.makefile() as answers,
            waiting.makefile() as none,
        ):
            asking.sendall(b"VRAM 4\n")
            assert answers.readline().startswith(f"ERR VRAM: {type(failure).__name__}: ")
            assert none.readline() == ""
            assert not os.path.exists(path)

    with pytest.raises(type(failure)) as raised:
        ask()
    assert raised.value is failure


def client(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(20)
    made.connect(path)
    return made


def test_a_running_generate_answers_on_its_socket(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "control"
    command = [sys.executable, "-m", "strata_nb", "generate", "-m", str(small), "-p", "abc"]
    command += [
        "--device",
        "host:1x9MiB@64KiB",
        "-c",
        "4096",
        "--prefill",
        "64",
        "--kv-grow-step",
        "64",
    ]
    command += ["-n", "1500", "--ignore-eos", "--temp", "0", "--vram-elastic"]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert plain.returncode == 0, plain.stderr
    assert re.search(r"^K/V grown to [\d,]+ cells \([\d.]+ MiB\)", plain.stderr, re.MULTILINE)
    running = subprocess.Popen(
        [*command, "--control", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not path.exists() and running.poll() is None:
        time.sleep(0.01)
    with client(str(path)) as asking, asking.makefile() as answers:
        asking.sendall(b"STATUS\nVRAM 5\nVRAM\n")
        assert json.loads(answers.readline())["slots"] > SHAPE.layers
        assert answers.readline().startswith("VRAM reserve_mib=5 ")
        assert answers.readline().startswith("VRAM reserve_mib=0 ")
    stdout, stderr = running.communicate()
    assert running.returncode == 0, stderr
    assert stdout == plain.stdout
    assert not path.exists()


def test_generate_keeps_what_was_written_when_memory_ends(small: Path) -> None:
    command = [sys.executable, "-m", "strata_nb", "generate", "-m", str(small), "-p", "abc"]
    command += [
        "--device",
        "host:1x4MiB@16KiB",
        "-c",
        "4096",
        "--prefill",
        "64",
        "--kv-grow-init",
        "64",
    ]
    command += ["-n", "-1", "--ignore-eos", "--temp", "0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "of the context's 4,096 cells: a longer text ends there" in run.stderr
    *_, end, cause, hint = run.stderr.splitlines()
    written = int(re.search(r"generated (\d+) tokens", end)[1])  # type: ignore[index]
    assert written > 64
    assert re.match(r"strata_nb: K/V on device 0: no memory to grow, cells [\d,]+, there", cause)
    assert hint.startswith("hint: a shorter text")
    assert run.stdout


def test_on_a_terminal_growth_is_told_after_the_text(small: Path) -> None:
    command = [sys.executable, "-m", "strata_nb", "generate", "-m", str(small), "-p", "abc"]
    command += ["--device", "host:1x9MiB@64KiB", "-c", "4096", "--prefill", "64"]
    command += ["--kv-grow-init", "64", "--kv-grow-step", "1024"]
    command += ["-n", "400", "--ignore-eos", "--temp", "0"]
    piped = subprocess.run(command, capture_output=True, check=True)
    seen, output = pty.openpty()
    with open(seen, "rb", closefd=True) as terminal:
        running = subprocess.Popen(command, stdout=output, stderr=output)
        os.close(output)
        text = b""
        with suppress(OSError):  # what a terminal says at its end
            while part := os.read(terminal.fileno(), 4096):
                text += part
        assert running.wait() == 0
    assert piped.stdout.rstrip(b"\n").replace(b"\n", b"\r\n") in text
    assert text.count(b"K/V grown to ") == 1
