"""Compile functions with Numba ahead of use, and keep the machine code on disk.

Numba's own cache asks whether the file of a function has changed. A function here is made of
helpers in other files, so its machine code would go stale in silence. The cache of this file is a
folder whose name is a hash of everything that can change the code: all sources of the package that
import Numba, the versions of Python, Numba and llvmlite, the processor with its features, and the
variables that steer the choice of instructions. Whatever changes, the folder is another one.

Each function has one explicit signature, and so one file of machine code, which is written under a
temporary name and then renamed: two programs that start at once both compile, and either result is
right.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import pickle
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
import numba.extending
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from strata_nb.compiling_parts import Part
from strata_nb.errors import ConfigError
from strata_nb.interrupts import interrupts_later

Function = Callable[..., Any]

CACHE_VARIABLE = "STRATA_NB_CACHE_DIR"
_PACKAGE = Path(__file__).parent
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
# A part is never called from Python or C.
_PART = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class Compiled:
    """A function that is compiled, or read from disk, when it is first called or asked for.

    name   of its file in the cache, unlike that of any other function
    """

    def __init__(self, signature: str, function: Function) -> None:
        functools.update_wrapper(self, function)
        self._signature, self._function = signature, function
        self._made: Function | None = None
        self._lock = threading.Lock()  # of whoever compiles: loading calls from several threads

    @functools.cached_property
    def name(self) -> str:
        name: str = _Implementation(self._function).filename_base
        return name

    def is_on_disk(self) -> bool:
        """Return whether the machine code is in the cache; ConfigError if nobody may look there."""
        path = cache_folder() / f"{self.name}.1.nbc"
        try:
            path.stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise not_kept(error) from error
        return True

    def is_at_hand(self) -> bool:
        """Return whether nothing is left to compile: it is in this process, or on disk."""
        return self._made is not None or self.is_on_disk()

    def made(self) -> Function:
        """Return the compiled function, without the lock on the way of every call.

        ConfigError if the machine code cannot be written to disk.
        """
        with self._lock:
            if self._made is None:
                self._made = _compile(self._signature, self._function)
            return self._made

    def __call__(self, *arguments: Any) -> Any:
        return self.made()(*arguments)


def compiled(signature: str) -> Callable[[Function], Compiled]:
    """Return a decorator that compiles a function for one signature, when it is first used.

    The function runs without the GIL, without bounds checks, and with the rounding that its text
    says: nothing is reordered. Its name must be unique within its file.
    """
    return functools.partial(Compiled, signature)


def _compile(signature: str, function: Function) -> Function:
    dispatcher: Any = numba.njit(**_OPTIONS)(function)
    try:
        dispatcher._cache = _FolderCache(function)
        with interrupts_later(), garbage_later():
            dispatcher.compile(signature)
    except OSError as error:
        raise not_kept(error) from error
    dispatcher.disable_compile()
    chosen: Function = dispatcher
    return chosen


def address_of(function: Function) -> int:
    """Return the address of what `compiled` made, for C's calling convention; it stays valid."""
    dispatcher: Any = function.made() if isinstance(function, Compiled) else function
    (made,) = dispatcher.overloads.values()
    name = made.fndesc.llvm_cfunc_wrapper_name
    with interrupts_later():  # LLVM calls back into Python, and ctypes would forget what is raised
        address: int = made.library.get_pointer_to_function(name)
    return address


@contextmanager
def garbage_later() -> Iterator[None]:
    """Let Python look for cycles after the block only: it would go through Numba's again and again.

    That is a tenth of the time that compiling takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def inlined(function: Function) -> Function:
    """Make a function that compiled ones may call; it becomes part of them."""
    return Part(_with_unique_name(function), {**_PART, "forceinline": True})


def helper(function: Function) -> Function:
    """Make a function that compiled ones may call, as a function of its own."""
    return Part(_with_unique_name(function), _PART)


def _with_unique_name(function: Function) -> Function:
    """Give a part a name that no part of any other program has.

    Numba tells functions of one name apart by counting them, anew in every program. The parts lie
    in the files of the cache under that name, and the loader takes the first of a name for all: of
    two kernels that two programs compiled, one would call the other's part.
    """
    function.__qualname__ = f"{function.__name__}_{uuid.uuid4().hex}"
    return function


def instruction(function: Function) -> Function:
    """Make a function that emits LLVM code callable from compiled ones.

    It takes Numba's types and returns a signature and a function that emits the code.
    """
    made: Function = numba.extending.intrinsic(function)
    return made


@cache
def cache_folder() -> Path:
    """Return the folder of this version, these sources and this processor, and make it."""
    digest = hashlib.sha256()
    for part in _ingredients():
        digest.update(len(part).to_bytes(8, "little") + part)
    return kept_folder(cache_home() / f"kernels-{digest.hexdigest()[:24]}")


def cache_home() -> Path:
    """Return where machine code is kept: STRATA_NB_CACHE_DIR or else, as the XDG convention has it,
    in the user's cache.
    """
    home = os.environ.get(CACHE_VARIABLE)
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "strata_nb"


def kept_folder(folder: Path) -> Path:
    """Make a folder for machine code and return it; ConfigError where that is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_kept(error) from error
    return folder


def not_kept(error: OSError) -> ConfigError:
    """Make the error of whoever cannot read or write machine code."""
    return ConfigError(
        f"machine code cannot be kept on disk: {error}",
        hint=f"name a folder with room that can be written: {CACHE_VARIABLE}=FOLDER",
    )


def _ingredients() -> Iterator[bytes]:
    yield sys.version.encode()
    yield numba.__version__.encode()
    yield llvmlite.__version__.encode()
    yield llvmlite.binding.get_host_cpu_name().encode()
    yield llvmlite.binding.get_host_cpu_features().flatten().encode()
    for variable in ("STRATA_NB_CPU_PATH", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT"):
        yield os.environ.get(variable, "").encode()
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_bytes()
        if b"numba" in source or b"compiling" in source:
            yield path.relative_to(_PACKAGE).as_posix().encode()
            yield source


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Tell Numba where the machine code of a function lies."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        pass

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return ""  # the folder's name stands for every source

    def get_disambiguator(self) -> str:
        return ""

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:
        return cls(function, file)


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]  # noqa: RUF012 - Numba's interface


saving = threading.Lock()
"""Held while machine code is written: who ends the process with it leaves no half file."""

# What reading machine code raises where the file was cut, overwritten or is not what it seems.
_DAMAGED = (
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


class _FolderCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return super().load_overload(signature, target)
        except _DAMAGED:
            # As after a loss of power: forget the file and compile again.
            self.flush()
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        with saving:
            super().save_overload(signature, data)

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        # Numba adds the function's code and closure; a closure over functions never hashes the
        # same twice. Here the name of the file and that of the folder say which code it is.
        return signature, codegen.magic_tuple()
