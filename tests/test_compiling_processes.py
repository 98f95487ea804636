"""Compiling in several processes: who does what, and what becomes of it when one of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from compiling_worker import COUNT, functions

from strata_nb import compiling, compiling_processes, cpu
from strata_nb.compiling import CACHE_VARIABLE, Compiled, cache_folder
from strata_nb.compiling_processes import compile_together
from strata_nb.formats import TensorType
from strata_nb.kernels.host import ahead
from strata_nb.kernels.program import launch
from strata_nb.packing import packer

WORKER = "compiling_worker"
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, here and in workers."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    cache_folder.cache_clear()
    yield cache_folder()
    cache_folder.cache_clear()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every worker that is started."""
    started: list[subprocess.Popen[bytes]] = []
    start = compiling_processes._start

    def noted(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments))
        return started[-1]

    monkeypatch.setattr(compiling_processes, "_start", noted)
    return started


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all functions that this process compiles."""
    names: list[str] = []
    compile_now = compiling._compile

    def noted(signature: str, function: Any) -> Any:
        names.append(function.__qualname__)
        return compile_now(signature, function)

    monkeypatch.setattr(compiling, "_compile", noted)
    return names


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def first_waits(wait: Callable[[], object]) -> list[Compiled]:
    """Return functions of which the first, when it is compiled here, waits before that."""
    first, *others = functions()

    class Waiting(Compiled):
        def made(self) -> Any:
            wait()
            return super().made()

    return [Waiting("int64(int64)", first.__wrapped__), *others]  # type: ignore[attr-defined]


def failed(some: Sequence[Compiled], processes: int, request_: bytes = b"") -> int:
    """Compile together; return how many processes are said not to have done their part."""
    said: list[str] = []
    compile_together(some, processes, WORKER, request_, cache_folder(), say=said.append)
    assert len(said) <= 1
    return int(said[0].split()[0]) if said else 0


def test_a_process_compiles_what_another_one_does_not_come_to(
    folder: Path, workers: list[Any], compiled_here: list[str]
) -> None:
    some = first_waits(lambda: wait_until(lambda: all(one.is_on_disk() for one in some[1:])))
    told: list[tuple[int, int]] = []
    said: list[str] = []
    compile_together(
        some,
        2,
        WORKER,
        b"",
        cache_folder(),
        progress=lambda done, total: told.append((done, total)),
        say=said.append,
    )
    assert said == []
    assert compiled_here == ["add_0"]
    assert [worker.returncode for worker in workers] == [0]
    assert told[0] == (0, COUNT)
    assert told[-1] == (COUNT, COUNT)
    assert [one(10) for one in some] == [10, 11, 12, 13]
    assert not list(folder.glob("*.tmp*"))


@pytest.mark.parametrize("request_", [b"die", b"fail"])
def test_what_a_worker_that_ended_has_left_is_compiled_here(
    workers: list[Any], compiled_here: list[str], request_: bytes
) -> None:
    some = first_waits(lambda: wait_until(lambda: workers[0].poll() is not None))
    assert failed(some, 2, request_) == 1
    assert compiled_here == [f"add_{number}" for number in range(COUNT)]
    assert workers[0].returncode != 0


def test_what_a_worker_took_and_did_not_do_is_compiled_here(
    workers: list[Any], compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_one(module: str, queue: int, report: int, task: IO[bytes]) -> Any:
        workers.append(subprocess.Popen(["head", "-c", "1"], stdin=queue, stdout=report))
        return workers[-1]

    monkeypatch.setattr(compiling_processes, "_start", takes_one)
    some = first_waits(lambda: wait_until(lambda: workers[0].poll() is not None))
    assert failed(some, 2) == 0
    assert sorted(compiled_here) == [f"add_{number}" for number in range(COUNT)]


def test_a_worker_that_says_nothing_is_not_waited_for_without_end(
    workers: list[Any], compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling_processes, "_PATIENCE_S", 0.1)
    some = functions()
    failed(some, 2, b"sleep")
    assert len(compiled_here) == COUNT
    assert workers[0].returncode is not None


def test_a_worker_with_another_cache_does_nothing(
    folder: Path, workers: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    monkeypatch.setenv(CACHE_VARIABLE, str(other))  # for workers: here the folder is known
    some = first_waits(lambda: wait_until(lambda: workers[0].poll() is not None))
    assert failed(some, 2) == 1
    assert workers[0].returncode == 1
    assert not list(other.rglob("*.nb?"))
    assert all(one.is_on_disk() for one in some)


def test_no_worker_is_left_when_this_process_is_interrupted(
    folder: Path, workers: list[Any]
) -> None:
    def interrupted() -> None:
        wait_until(lambda: some[1].is_on_disk())
        raise KeyboardInterrupt

    some = first_waits(interrupted)
    with pytest.raises(KeyboardInterrupt):
        failed(some, 2)
    assert workers[0].returncode is not None
    assert not list(folder.glob("*.tmp*"))


def test_no_worker_is_left_when_this_process_is_killed() -> None:
    text = (
        "import time\n"
        "from compiling_worker import functions\n"
        "from strata_nb import compiling_processes\n"
        "from strata_nb.compiling import cache_folder\n"
        "start = compiling_processes._start\n"
        "def noted(*arguments):\n"
        "    worker = start(*arguments)\n"
        "    print(worker.pid, flush=True)\n"
        "    time.sleep(600)\n"
        "compiling_processes._start = noted\n"
        "compiling_processes.compile_together(\n"
        "    functions(), 2, 'compiling_worker', b'sleep', cache_folder())\n"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    ) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        os.kill(worker, 0)  # it is there
        program.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(worker))


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # where nobody waits for orphans


def test_one_process_starts_no_other(workers: list[Any]) -> None:
    assert failed(functions(), 1) == 0
    assert workers == []


def test_where_no_process_can_be_started_this_one_does_all(
    monkeypatch: pytest.MonkeyPatch, compiled_here: list[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/none/python")
    assert failed(functions(), 3) == 2
    assert len(compiled_here) == COUNT


# -- the kernels of programs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "functions_", "room", "processes"),
    [(1, 20, 64, 1), (2, 20, 64, 2), (2, 3, 64, 1), (64, 20, 64, 8), (64, 6, 64, 3), (8, 20, 2, 2)],
)
def test_there_are_no_more_processes_than_cores_and_work_and_memory_for_them(
    monkeypatch: pytest.MonkeyPatch, cores: int, functions_: int, room: int, processes: int
) -> None:
    monkeypatch.setattr(cpu, "physical_cores", lambda: cores)
    room_bytes = room * compiling_processes._PROCESS_BYTES
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: room_bytes)
    assert compiling_processes.processes_for(functions_, 8) == processes


def test_what_is_on_disk_is_not_compiled_again_and_nothing_is_said(
    workers: list[Any], compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "physical_cores", lambda: 2)
    values = {"rows": 1, "x": 2, "packed": 3, "times": 4, "values": 64}
    program = (launch("quantise", values),)
    needed = list(ahead._functions(program))
    assert len(needed) > 4  # of loading, of threads, and of the launch
    for one in needed:  # as in a process that has just begun
        monkeypatch.setattr(one, "_made", None)
    said: list[str] = []
    ahead.compile_ahead([program, program], say=said.append)
    assert len(workers) == 1
    (line,) = said
    assert line.startswith(
        f"compiling {len(needed)} kernels for this processor, once, in 2 processes"
    )
    compiled_here.clear()
    ahead.compile_ahead([program], say=said.append)
    assert (compiled_here, len(workers), len(said)) == ([], 1, 1)


def test_what_packs_the_weights_is_compiled_with_what_multiplies_by_them() -> None:
    values = dict.fromkeys(["rows", "x", "weight", "bias", "y", "values", "outputs", "add"], 64)
    program = (launch("linear", values, variant=TensorType.Q4_K),)
    found = [one.name for one in ahead._functions(program)]
    assert packer(TensorType.Q4_K).name in found
    assert packer(TensorType.Q6_K).name not in found
