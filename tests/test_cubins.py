"""Machine code of kernels on disk: what is kept, found again, and made again."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from gpu_launches import shaped_for_card

from strata_nb import cpu
from strata_nb.errors import ConfigError, UnsupportedDevice
from strata_nb.kernels.gpu import compile as gpu_compile
from strata_nb.kernels.gpu import cubins
from strata_nb.kernels.gpu.compile import Cubin
from strata_nb.kernels.gpu.cubins import Cubins
from strata_nb.kernels.gpu.gating import gated_add_kernel
from strata_nb.kernels.gpu.operations import GpuKernel

KINDS = ["address", "address", "address", "address", "integer"]
DEADLINE_S = 120.0
WANTED = [(gated_add_kernel(), KINDS)]


def quiet(_: str) -> None:
    """Say nothing."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STRATA_NB_CACHE_DIR", str(tmp_path))
    cubins._folder.cache_clear()
    yield tmp_path
    cubins._folder.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled once more")

    monkeypatch.setattr(cubins, "cubin_of", refuse)


def test_a_second_start_compiles_nothing(folder: Path, request: pytest.FixtureRequest) -> None:
    said: list[str] = []
    told: list[tuple[int, int]] = []
    first = Cubins("sm_90")(WANTED, lambda *done: told.append(done), said.append)
    assert said == ["compiling 1 kernel for sm_90, once"]
    assert told == [(0, 1), (1, 1)]
    request.getfixturevalue("no_compiler")
    assert Cubins("sm_90")(WANTED, None, said.append) == first
    assert len(said) == 1


def test_another_process_makes_the_same_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [shaped_for_card(name)[0] for name in ("gated_add", "silu_mul", "quantise")]
    launches += shaped_for_card("rms_norm", width=64)  # a closure
    wanted = [(one.kernel, one.kinds) for one in launches]
    here: list[str] = []

    def last(kernel: GpuKernel, kinds: Sequence[str], target: str) -> Cubin:
        end = time.monotonic() + DEADLINE_S
        while len(list(folder.rglob("*.cubin"))) < len(wanted) - 1 and time.monotonic() < end:
            time.sleep(0.02)
        here.append(kernel.name)
        return gpu_compile.cubin_of(kernel, kinds, target)

    monkeypatch.setattr(cubins, "cubin_of", last)
    monkeypatch.setattr(cpu, "physical_cores", lambda: 2)
    said: list[str] = []
    found = Cubins("sm_90")(wanted, None, said.append)
    assert said == ["compiling 4 kernels for sm_90, once, in 2 processes"]
    assert len(here) == 1
    for kernel, kinds in wanted[-2:]:
        assert found[kernel.name] == gpu_compile.cubin_of(kernel, kinds, "sm_90")


def test_each_target_has_its_own_code(folder: Path) -> None:
    (old,) = Cubins("sm_75")(WANTED, None, quiet).values()
    (new,) = Cubins("sm_120")(WANTED, None, quiet).values()
    assert old.image != new.image


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no code", "a number"])
def test_damaged_code_is_made_again(folder: Path, damage: str) -> None:
    first = Cubins("sm_90")(WANTED, None, quiet)
    (path,) = folder.rglob("*.cubin")
    whole = path.read_bytes()
    at = len(whole) // 2
    path.write_bytes(
        {
            "cut": whole[:at],
            "changed": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
            "empty": b"",
            "no code": b"{}\n",
            "a number": b"1\n",
        }[damage]
    )
    assert Cubins("sm_90")(WANTED, None, quiet) == first
    assert path.read_bytes() == whole


def test_two_programs_that_start_at_once_both_have_the_code(folder: Path) -> None:
    code = (
        "from test_cubins import *\n"
        "(made,) = Cubins('sm_90')(WANTED, None, quiet).values()\n"
        "print(len(made.image), made.registers)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=-1)
        for _ in range(2)
    ]
    answers = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(answers) == 1
    (kept,) = folder.rglob("*.cubin")
    assert not list(folder.rglob("*.tmp")), kept


def test_a_folder_that_cannot_be_written_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("STRATA_NB_CACHE_DIR", str(tmp_path / "file"))
    cubins._folder.cache_clear()
    with pytest.raises(ConfigError, match="machine code cannot be kept on disk"):
        Cubins("sm_90")(WANTED, None, quiet)
    cubins._folder.cache_clear()


@pytest.mark.parametrize("obstacle", ["a folder in the place of a file", "a full disk"])
def test_code_that_cannot_be_kept_is_refused_with_its_name(
    folder: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Cubins("sm_90")
    path = cubins._folder() / "gated_add-sm_90.cubin"
    if obstacle == "a full disk":
        monkeypatch.setattr(cubins, "whole_file", _full_disk)
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match=r"machine code cannot be kept on disk.*gated_add"):
        compiler(WANTED, None, quiet)


def _full_disk(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_who_lacks_the_toolkit_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba.cuda", None)
    gpu_compile._numba.cache_clear()
    with pytest.raises(UnsupportedDevice) as caught:
        Cubins("sm_90")
    gpu_compile._numba.cache_clear()
    assert "strata-nb[cuda]" in caught.value.hint


def test_a_target_that_the_toolkit_does_not_know_is_named(folder: Path) -> None:
    with pytest.raises(UnsupportedDevice, match="sm_12345"):
        Cubins("sm_12345")(WANTED, None, quiet)


def test_a_card_that_is_too_old_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(UnsupportedDevice, match="sm_70, kernels are for sm_75"):
        Cubins("sm_70")
