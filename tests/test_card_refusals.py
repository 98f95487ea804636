"""What cannot run on a card is one clear line; `auto` says why it is the host.

The driver and the backend are the real ones, over a table made of host memory; kernels are
simulated, and machine code is made for nobody but where a test says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from card_world import IMAGE, Simulated
from console import Console
from cuda_table_of_host import FailingTable, HostTable
from device_world import random_tokens

from strata_nb import Engine, Options, card_opening, driver
from strata_nb import cuda_table as cuda
from strata_nb.backend import choose_backend, open_backend
from strata_nb.cuda_table import LibraryTable
from strata_nb.errors import (
    ConfigError,
    DeviceLost,
    OutOfDeviceMemory,
    StrataError,
    UnsupportedDevice,
)
from strata_nb.kernels.gpu import compile as gpu_compile
from strata_nb.kernels.gpu import cubins

GIB = 1 << 30
CAPABILITY = (cuda.COMPUTE_CAPABILITY_MAJOR, cuda.COMPUTE_CAPABILITY_MINOR)


class Cards:
    """Be the installed driver for a test, and the compiler.

    table      that fails on request, over host memory
    compiled   how many kernels somebody wanted
    is_lost    whether only the end of the process frees what is on them
    """

    is_lost = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **table: Any) -> None:
        self._simulated = Simulated()
        table = {"devices": 1, "budget_bytes": 2 * GIB, **table}
        self.host = HostTable(kernels={IMAGE: self._simulated.kernels}, **table)
        self.table = FailingTable(self.host)
        self.compile: Callable[..., Any] = self._simulated
        monkeypatch.setattr(driver, "LibraryTable", lambda: self.table)

        def cubins_of(target: str) -> Cards:
            self.target = target
            return self

        monkeypatch.setattr(cubins, "Cubins", cubins_of)

    def __call__(self, wanted: Sequence[Any], progress: Any, say: Any) -> Any:
        return self.compile(wanted, progress, say)

    @property
    def compiled(self) -> int:
        return len(self._simulated.kernels)

    def left(self) -> dict[str, int]:
        """Return what exists on the cards."""
        return self.host.live()


MakeCards = Callable[..., Cards]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCards]:
    """Make cards, on which nothing may be left in the end."""
    made: list[Cards] = []

    def make(**table: Any) -> Cards:
        made.append(Cards(monkeypatch, **table))
        return made[-1]

    yield make
    for one in made:
        left = one.left()
        one.host.close()
        assert one.is_lost or left == {}
        assert one.host.refused == []


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


def options(path: Path, **more: Any) -> Options:
    return Options(path, **{"device": "cuda", "ctx_size": 64, "threads": 1, **more})


def refused(run: Console, *words: str) -> tuple[int, str, str]:
    """Run a command that is refused; return its status, and the line and the hint that it says."""
    status, out, err = run(*words)
    assert out == ""
    line, hint = err.splitlines()
    assert hint.startswith("hint: ")
    return status, line, hint


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LibraryTable", lambda: LibraryTable("libnone.so.1"))


# -- no card ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_library")
def test_without_a_driver_a_command_says_so_in_one_line(run: Console, tiny: Path) -> None:
    status, line, hint = refused(run, "generate", "-m", str(tiny), "--device", "cuda", "x")
    assert status == 2
    assert line.startswith("strata_nb: --device cuda: no NVIDIA driver: libnone.so.1: ")
    assert hint == "hint: install NVIDIA's driver for CUDA 13.0 or newer, or use --device host"


def test_a_program_of_its_own_says_so_too(tiny: Path) -> None:
    code = (
        "from strata_nb import driver\n"
        "from strata_nb.cuda_table import LibraryTable\n"
        "driver.LibraryTable = lambda: LibraryTable('libnone.so.1')\n"
        "from strata_nb.__main__ import main\n"
        "main()\n"
    )
    words = ["generate", "-m", str(tiny), "--device", "cuda", "x"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    line, hint = done.stderr.splitlines()
    assert line.startswith("strata_nb: --device cuda: no NVIDIA driver: libnone.so.1: ")
    assert hint.startswith("hint: ")


def test_a_driver_without_a_card_is_said(cards: MakeCards, run: Console, tiny: Path) -> None:
    cards(devices=0)
    status, line, hint = refused(run, "generate", "-m", str(tiny), "--device", "cuda", "x")
    assert (status, line) == (
        2,
        "strata_nb: --device cuda: there is an NVIDIA driver and no card that this process may use",
    )
    assert "CUDA_VISIBLE_DEVICES" in hint


def test_a_driver_that_is_too_old_is_said_with_both_versions(
    cards: MakeCards, run: Console, tiny: Path
) -> None:
    cards(version=12080)
    status, line, hint = refused(run, "generate", "-m", str(tiny), "--device", "cuda", "x")
    assert (status, line) == (
        2,
        "strata_nb: --device cuda: the NVIDIA driver is for CUDA 12.8, 13.0 or later is needed",
    )
    assert hint == "hint: install a newer NVIDIA driver, or use --device host"


@pytest.mark.parametrize(
    ("count", "said", "hint"),
    [(1, "no card 7, there is one card", "cuda:0"), (3, "no card 7, there are 3 cards", "cuda:2")],
)
def test_a_card_that_is_not_there_is_refused_with_those_that_are(
    cards: MakeCards, count: int, said: str, hint: str
) -> None:
    cards(devices=count, budget_bytes=64 << 20)
    with pytest.raises(UnsupportedDevice) as caught:
        open_backend("cuda:7", 1)
    assert caught.value.message == f"--device cuda:7: {said}"
    assert caught.value.hint.endswith(hint)


def test_a_card_that_another_program_has_for_itself_is_said(
    cards: MakeCards, run: Console, tiny: Path
) -> None:
    cards().table.plan("cuDevicePrimaryCtxRetain", status=cuda.DEVICE_UNAVAILABLE)
    status, line, hint = refused(run, "generate", "-m", str(tiny), "--device", "cuda", "x")
    assert status == 1
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in line
    assert "nvidia-smi" in hint


# -- nothing to compile kernels --------------------------------------------------------------------


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba.cuda", None)
    gpu_compile._numba.cache_clear()
    yield
    gpu_compile._numba.cache_clear()


@pytest.mark.usefixtures("no_toolkit")
def test_a_machine_without_the_toolkit_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, run: Console, tiny: Path
) -> None:
    host = HostTable(1)
    monkeypatch.setattr(driver, "LibraryTable", lambda: host)
    status, line, hint = refused(run, "generate", "-m", str(tiny), "--device", "cuda", "x")
    assert status == 2
    assert line.startswith(
        "strata_nb: --device cuda: kernels for NVIDIA cards cannot be compiled: "
    )
    assert hint == "hint: install what compiles them: pip install 'strata-nb[cuda]'"
    assert host.live() == {}
    host.close()


def test_a_part_of_the_toolkit_that_is_missing_is_named(
    cards: MakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError('Failure finding "libnvJitLink.so":\n  no such file')

    cards()
    monkeypatch.setattr(gpu_compile, "link", missing)
    with pytest.raises(UnsupportedDevice, match=r'finding "libnvJitLink.so": no such') as caught:
        open_backend("cuda", 1)
    assert "pip install 'strata-nb[cuda]'" in caught.value.hint


def test_a_compiler_that_misses_a_library_is_said_before_a_model_is_loaded(
    cards: MakeCards, tiny: Path
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("libNVVM is not available")

    made = cards()
    made.compile = missing
    with pytest.raises(UnsupportedDevice, match="cuda cannot be compiled: libNVVM") as caught:
        Engine.open(options(tiny))
    assert "pip install 'strata-nb[cuda]'" in caught.value.hint
    assert made.host.calls["cuMemAlloc"] == 0


def test_a_card_that_the_toolkit_makes_no_code_for_is_refused_before_a_model_is_loaded(
    cards: MakeCards, run: Console, tiny: Path
) -> None:
    made = cards(attributes=dict(zip(CAPABILITY, (99, 0), strict=True)))
    status, line, hint = refused(run, "generate", "-m", str(tiny), "--device", "cuda", "x")
    assert status == 2
    assert "the installed toolkit makes no code for sm_990" in line
    assert "strata-nb[cuda]" in hint
    assert made.host.calls["cuMemAlloc"] == 0


def test_a_folder_that_cannot_be_written_is_one_line_before_a_model_is_loaded(
    run: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("STRATA_NB_CACHE_DIR", str(tmp_path / "file"))
    cubins._folder.cache_clear()
    host = HostTable(1, budget_bytes=2 * GIB)
    monkeypatch.setattr(driver, "LibraryTable", lambda: host)
    status, line, hint = refused(run, "generate", "-m", str(tiny), "--device", "cuda", "x")
    cubins._folder.cache_clear()
    assert status == 2
    assert line.startswith("strata_nb: machine code cannot be kept on disk: ")
    assert "STRATA_NB_CACHE_DIR=FOLDER" in hint
    assert host.calls["cuMemAlloc"] == 0
    assert host.live() == {}
    host.close()


def test_ctrl_c_while_kernels_are_compiled_leaves_nothing(cards: MakeCards, tiny: Path) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    made = cards()
    made.compile = interrupted
    with pytest.raises(KeyboardInterrupt):
        Engine.open(options(tiny))
    assert made.left() == {}


def test_ctrl_c_in_the_compiler_itself_ends_with_130_and_no_half_file(
    tmp_path: Path, tiny: Path
) -> None:
    code = (
        "import os, signal, sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "from cuda_table_of_host import HostTable\n"
        "from strata_nb import driver\n"
        "from strata_nb.kernels.gpu import compile\n"
        f"host = HostTable(1, budget_bytes={2 * GIB})\n"
        "driver.LibraryTable = lambda: host\n"
        "calls, numba = [], compile._numba()\n"
        "class Interrupting:\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(numba.nvvm, name)\n"
        "    def set_launch_bounds(self, *given):\n"
        "        calls.append(1)\n"
        "        if len(calls) == 2:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        return numba.nvvm.set_launch_bounds(*given)\n"
        "compile._numba = lambda: numba._replace(nvvm=Interrupting())\n"
        "from strata_nb.__main__ import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('left', host.live())\n"
        "    host.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "-m", str(tiny), "--device", "cuda", "x"],
        env={**os.environ, "STRATA_NB_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "left {}" in done.stdout
    assert list(tmp_path.rglob("*.cubin"))  # what other processes made stays too
    assert not list(tmp_path.rglob("*.tmp"))


# -- memory ----------------------------------------------------------------------------------------


def test_a_card_that_is_too_small_is_refused_with_the_sum_before_anything_is_done(
    cards: MakeCards, run: Console, tiny: Path
) -> None:
    made = cards(budget_bytes=64 << 20)
    status, out, err = run("generate", "-m", str(tiny), "--device", "cuda", "-c", "64", "x")
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert lines[0] == "strata_nb: the model does not fit, in bytes:"
    assert [line.split()[0] for line in lines if line.endswith("free on the device")] == [
        f"{64 << 20:,}"
    ]
    assert lines[-1].startswith("hint: a device of ")
    assert made.compiled == 0
    assert made.host.calls["cuMemAlloc"] == made.host.calls["cuMemCreate"] == 0


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemCreate", "cuModuleLoadDataEx"])
def test_memory_that_goes_away_after_the_plan_is_said_and_everything_closed(
    cards: MakeCards, tiny: Path, call: str
) -> None:
    made = cards()
    made.table.plan(call, status=cuda.OUT_OF_MEMORY, forever=True)
    with pytest.raises(OutOfDeviceMemory) as caught:
        Engine.open(options(tiny))
    assert "on device 0" in caught.value.message
    assert "\n" not in caught.value.message
    assert "smaller --ctx-size or model" in caught.value.hint
    assert made.left() == {}


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuMemHostRegister"])
def test_a_host_that_can_lock_no_more_memory_is_not_taken_for_a_full_card(
    cards: MakeCards, tiny: Path, call: str
) -> None:
    cards().table.plan(call, status=cuda.OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory) as caught:
        Engine.open(options(tiny))
    assert caught.value.hint.startswith("the host lacks memory")


def test_whatever_call_fails_while_a_model_opens_one_line_says_so_and_nothing_is_left(
    cards: MakeCards, tiny: Path
) -> None:
    made = cards()
    with Engine.open(options(tiny)):
        calls = dict(made.table.calls)
    assert calls["cuMemCreate"] > 0
    for name, count in calls.items():
        if name == "cuStreamEndCapture":
            continue  # the library ends a capture also where it says that it went wrong
        for nth in {1, count // 2 + 1, count}:
            made.table.plan(name, nth)
            said = ""
            try:
                Engine.open(options(tiny)).close()
            except StrataError as error:
                said = error.message
            made.table.lift()
            assert "\n" not in said
            assert made.left() == {}, f"{name}, call {nth} of {count}"


# -- while a model runs ----------------------------------------------------------------------------


def test_a_card_that_is_lost_is_said_as_it_was_lost(cards: MakeCards, tiny: Path) -> None:
    made = cards()

    def lose() -> None:
        with Engine.open(options(tiny)) as engine:
            made.table.plan("cuGraphLaunch", status=700)
            engine.logits(random_tokens(3))

    with pytest.raises(DeviceLost) as caught:
        lose()
    assert (caught.value.call, caught.value.code) == ("graph_launch", 700)
    assert caught.value.hint.startswith("start the program again")
    made.is_lost = True


def test_a_fork_cannot_use_an_engine_and_closing_it_there_leaves_the_parents(
    cards: MakeCards, tiny: Path
) -> None:
    cards()
    with Engine.open(options(tiny)) as engine:
        before = engine.describe()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            said = ""
            for act in (lambda: engine.logits(random_tokens(3)), engine.close):
                try:
                    act()
                except BaseException as error:  # noqa: BLE001 - the parent looks at it
                    said += f"{type(error).__name__}: {error}\n"
            os.write(writing, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        (said,) = os.read(reading, 4096).decode().splitlines()
        os.close(reading)
        os.close(writing)
        assert said.startswith("DeviceLost: ")
        assert f"opened by process {os.getpid()}, used in its fork {child}" in said
        assert engine.describe() == before


# -- auto ------------------------------------------------------------------------------------------


def test_auto_is_the_first_card(cards: MakeCards, tiny: Path) -> None:
    made = cards(devices=2)
    with Engine.open(options(tiny, device="auto")) as engine:
        assert engine.device == "cuda:0"
        assert engine.device_reason == "NVIDIA Pretend 0"
        assert made.target == "sm_90"


def test_auto_is_the_first_card_that_can_be_used(cards: MakeCards) -> None:
    made = cards(devices=2)
    made.table.plan("cuDevicePrimaryCtxRetain", status=cuda.DEVICE_UNAVAILABLE)
    backend, reason = choose_backend(1)
    with closing(backend):
        assert backend.name == "cuda:1"
    assert reason.startswith("NVIDIA Pretend 1; cuda:0: ")
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in reason


@pytest.mark.usefixtures("no_library")
def test_auto_is_the_host_without_a_driver_and_says_why_when_asked(
    run: Console, tiny: Path
) -> None:
    words = ("generate", "-m", str(tiny), "--temp", "0", "-n", "2", "x")
    status, text, err = run(*words)
    assert status == 0
    assert "device" not in err
    status, again, err = run(*words, "--verbose")
    assert (status, again) == (0, text)
    assert [line for line in err.splitlines() if line.startswith("device ")] == [
        "device host: no NVIDIA driver: libnone.so.1: cannot open shared object file: "
        "No such file or directory"
    ]
    _, out, err = run("devices", "--device", "auto")
    assert out.startswith("host ")
    assert err.startswith("device host: no NVIDIA driver: ")


@pytest.mark.usefixtures("no_toolkit")
def test_auto_is_the_host_where_kernels_cannot_be_compiled(cards: MakeCards) -> None:
    cards(devices=2)
    backend, reason = choose_backend(1)
    with closing(backend):
        assert backend.name == "host"
    assert reason.startswith("kernels for NVIDIA cards cannot be compiled: ")


def test_auto_is_the_host_where_no_card_can_be_used(cards: MakeCards) -> None:
    cards(devices=2, attributes=dict(zip(CAPABILITY, (99, 0), strict=True)))
    backend, reason = choose_backend(1)
    with closing(backend):
        assert backend.name == "host"
    first, second = reason.split("; ")
    assert first.startswith("cuda:0: the installed toolkit makes no code for sm_990")
    assert second.startswith("cuda:1: ")


def test_a_model_that_does_not_fit_the_card_is_refused_and_not_run_on_the_host(
    cards: MakeCards, tiny: Path
) -> None:
    cards(budget_bytes=64 << 20)
    with pytest.raises(ConfigError, match="the model does not fit"):
        Engine.open(options(tiny, device="auto"))


def test_a_device_that_is_named_has_no_reason(tiny: Path) -> None:
    with Engine.open(options(tiny, device="host")) as engine:
        assert engine.device_reason == ""


def test_without_a_driver_nothing_of_the_compiler_for_cards_is_loaded() -> None:
    code = (
        "import sys\n"
        "from strata_nb import driver\n"
        "from strata_nb.cuda_table import LibraryTable\n"
        "driver.LibraryTable = lambda: LibraryTable('libnone.so.1')\n"
        "from strata_nb.backend import choose_backend\n"
        "choose_backend(1)[0].close()\n"
        "print([name for name in sys.modules if name.startswith(('numba.cuda', 'cuda'))])\n"
        "print('strata_nb.card_backend' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "False"]


def test_help_loads_no_driver() -> None:
    code = (
        "import sys\n"
        "from strata_nb.cli import main\n"
        "main(['generate', '--help'])\n"
        "print('strata_nb.driver' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "False\n"


def test_the_probe_is_linked_by_the_toolkit_that_is_there() -> None:
    assert gpu_compile.link(card_opening._PROBE, "sm_90").entry == "probe"
