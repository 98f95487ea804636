"""Keep the machine code of GPU kernels on disk, and compile what is not there.

A folder stands for everything that can change the code, as with the host's kernels
(`compiling.py`): the sources that kernels are made of, and the versions of Numba and of the
toolkit. A file in it is one kernel for one target: a line of JSON, and the cubin. Files appear
whole, under their names: of programs that start at once each may compile, and either result is
right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from strata_nb.compiling import cache_home, kept_folder, not_kept
from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.gpu.compile import OLDEST, Cubin, cubin_of, toolkit_versions
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.progress import Progress, Say
from strata_nb.whole_files import whole_file

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

        `progress` is told of (kernels done, in all), `say` once if there is something to compile.
        ConfigError where it cannot be kept on disk.
        """
        found: dict[str, Cubin] = {}
        missing = []
        for kernel, kinds in wanted:
            kept = self._read(kernel.name)
            if kept is None:
                missing.append((kernel, kinds))
            else:
                found[kernel.name] = kept
        if missing:
            say(f"compiling {len(missing)} kernels for {self.target}, which is kept for later")
        for done, (kernel, kinds) in enumerate(missing):
            if progress is not None:
                progress(done, len(missing))
            found[kernel.name] = cubin_of(kernel, kinds, self.target)
            self._write(kernel.name, found[kernel.name])
        if missing and progress is not None:
            progress(len(missing), len(missing))
        return found

    def _path(self, name: str) -> Path:
        return _folder() / f"{name}-{self.target}.cubin"

    def _read(self, name: str) -> Cubin | None:
        """Return a kernel from disk; None where there is none, or the file is damaged."""
        try:
            head, _, image = self._path(name).read_bytes().partition(b"\n")
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

    def _write(self, name: str, made: Cubin) -> None:
        facts = made._asdict()
        image = facts.pop("image")
        facts["sha256"] = hashlib.sha256(image).hexdigest()
        try:
            with whole_file(self._path(name)) as file:
                file.write(json.dumps(facts).encode() + b"\n" + image)
        except OSError as error:
            raise not_kept(error) from error


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
