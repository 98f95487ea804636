"""Keep the machine code of GPU kernels on disk, and compile what is not there.

A folder stands for everything that can change the code, as with the host's kernels
(`compiling.py`): the sources that kernels are made of, and the versions of Numba and of the
toolkit. A file in it is one kernel for one target: a line of JSON, and the cubin. Files appear
whole, under their names: of programs that start at once each may compile, and either result is
right.

Where many are missing, other processes compile some of them. What they are to compile is sent by
value, closures and all: functions that others return have no name by which a process finds them.
Run as a module, this is one of those processes.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from numba import cloudpickle

from strata_nb.compiling import cache_home, garbage_later, kept_folder, not_kept, saving
from strata_nb.compiling_processes import compile_together, processes_for, serve
from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.gpu.compile import OLDEST, Cubin, cubin_of, toolkit_versions
from strata_nb.kernels.gpu.operations import Arguments, GpuKernel, Grid
from strata_nb.progress import Progress, Say
from strata_nb.whole_files import whole_file

_MODULE = "strata_nb.kernels.gpu.cubins"
_MOST_PROCESSES = 16  # the longest kernel takes a tenth of the time of all
# What takes longest comes first, so that no process is left with it at the end. Beginnings of
# names.
_LONGEST = ("attention_tiles", "warpgroup_", "attention_", "batch_", "router_", "expert_")
_PACKAGE = Path(__file__).parents[2]
# Folders and files of the package that kernels are made of.
_SOURCES = ("kernels", "quants", "packing.py", "formats.py")


class Cubins:
    """Find or make the machine code of kernels for a target such as "sm_90".

    UnsupportedDevice for cards that are too old, and where something that compiles is missing.
    """

    def __init__(self, target: str) -> None:
        oldest = f"sm_{OLDEST[0]}{OLDEST[1]}"
        if int(target.removeprefix("sm_")) < int(oldest.removeprefix("sm_")):
            raise UnsupportedDevice(
                f"the card is a {target}, kernels are for {oldest} and newer",
                hint="use --device host",
            )
        toolkit_versions()  # who lacks the toolkit hears it before a model is loaded
        self.target = target

    def __call__(
        self,
        wanted: Sequence[tuple[GpuKernel, Sequence[str]]],
        progress: Progress | None,
        say: Say,
    ) -> Mapping[str, Cubin]:
        """Return machine code by names of kernels; each is given with the kinds of its arguments.

        Where many are missing, several processes compile them. `progress` is told of (kernels done,
        in all), `say` once if there is something to compile. ConfigError where it cannot be kept on
        disk.
        """
        every = {kernel.name: _Kernel(kernel, kinds, self.target) for kernel, kinds in wanted}
        missing = [one for one in every.values() if not one.is_on_disk()]
        if missing:
            self._compile(sorted(missing, key=_rank), progress, say)
        return {name: one.made() for name, one in every.items()}

    def _compile(self, missing: Sequence[_Kernel], progress: Progress | None, say: Say) -> None:
        processes = processes_for(len(missing), _MOST_PROCESSES)
        together = f", in {processes} processes" if processes > 1 else ""
        kernels = "1 kernel" if len(missing) == 1 else f"{len(missing)} kernels"
        say(f"compiling {kernels} for {self.target}, once{together}")
        request = [one.parts for one in missing] if processes > 1 else []
        compile_together(
            missing,
            processes,
            _MODULE,
            cloudpickle.dumps(request),
            _folder(),
            progress=progress,
            say=say,
        )


class _Kernel:
    """A kernel whose machine code is on disk, or is compiled when it is asked for.

    name    of its file
    parts   what `_of_request` makes the same of: neither a grid nor anything else of its launches
    """

    def __init__(self, kernel: GpuKernel, kinds: Sequence[str], target: str) -> None:
        self.name = f"{kernel.name}-{target}"
        self.parts = *kernel[:3], kernel.registers, tuple(kinds), target
        self._kernel, self._kinds, self._target = kernel, kinds, target
        self._made: Cubin | None = None

    def is_on_disk(self) -> bool:
        self._made = self._made or self._read()
        return self._made is not None

    def made(self) -> Cubin:
        """Return the machine code; ConfigError where it cannot be kept on disk."""
        if self._made is None:
            self._made = self._read() or self._compiled()
        return self._made

    def _compiled(self) -> Cubin:
        with garbage_later():
            made = cubin_of(self._kernel, self._kinds, self._target)
        facts = made._asdict()
        image = facts.pop("image")
        facts["sha256"] = hashlib.sha256(image).hexdigest()
        try:
            with saving, whole_file(self._path) as file:
                file.write(json.dumps(facts).encode() + b"\n" + image)
        except OSError as error:
            raise not_kept(error) from error
        return made

    @property
    def _path(self) -> Path:
        return _folder() / f"{self.name}.cubin"

    def _read(self) -> Cubin | None:
        """Return what is on disk; None where there is nothing, or the file is damaged."""
        try:
            head, _, image = self._path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise not_kept(error) from error
        try:
            facts = dict(json.loads(head))
            digest = facts.pop("sha256")
            whole = Cubin(image=image, **facts)
        except (ValueError, KeyError, TypeError):
            return None
        return whole if hashlib.sha256(image).hexdigest() == digest else None


def _rank(kernel: _Kernel) -> int:
    for rank, beginning in enumerate(_LONGEST):
        if kernel.name.startswith(beginning):
            return rank
    return len(_LONGEST)


def _of_request(request: bytes) -> Iterator[_Kernel]:
    for name, function, threads, registers, kinds, target in pickle.loads(request):
        kernel = GpuKernel(name, function, threads, _no_grid, registers=registers)
        yield _Kernel(kernel, kinds, target)


def _no_grid(_: Arguments, __: int) -> Grid:
    raise AssertionError("this process launches nothing")


@cache
def _folder() -> Path:
    """Return the folder of these sources and versions, and make it."""
    digest = hashlib.sha256()
    for part in _ingredients():
        digest.update(len(part).to_bytes(8, "little") + part)
    return kept_folder(cache_home() / f"cubins-{digest.hexdigest()[:24]}")


def _ingredients() -> Iterator[bytes]:
    yield toolkit_versions().encode()
    for name in _SOURCES:
        path = _PACKAGE / name
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            place = source.relative_to(_PACKAGE)
            if place.parts[:2] != ("kernels", "host"):
                yield place.as_posix().encode()
                yield source.read_bytes()


if __name__ == "__main__":
    serve(_of_request, _folder)
