"""The model that comes with the package: a small one that writes stories, and its expert profile.

Both are files beside the code, so that a first run needs no download. Code that is imported from an
archive has no files that could be mapped into memory, and is told so.
"""

from __future__ import annotations

from pathlib import Path

from strata_nb.errors import ConfigError

NAME = "stories"
OPENING = "Once upon a time"  # how a story begins where no prompt is given
ANOTHER_MODEL = "-m FILE runs another model"
_STUB_BYTES = 1024  # a pointer in place of a large file is smaller, a model never is


def model_path() -> Path:
    """Return the model's file; ConfigError where it is missing or only stands for the model."""
    path = _present(f"{NAME}.gguf", f"install the package again, or: {ANOTHER_MODEL}")
    size = path.stat().st_size
    if size < _STUB_BYTES:
        raise ConfigError(
            f"{path}: {size} bytes in place of the model that comes with strata_nb: a copy that "
            "was made without its large files",
            hint=f"copy or install the package with its large files, or: {ANOTHER_MODEL}",
        )
    return path


def profile_path() -> Path:
    """Return the file that ranks the model's experts by use; ConfigError where it is missing."""
    remedy = "install the package again, or go on without it: --expert-profile none"
    return _present(f"{NAME}.strp", remedy)


def _folder() -> Path:
    from importlib.resources import files  # slow to import, and `--help` does not need it

    package = files("strata_nb")
    if not isinstance(package, Path):
        raise ConfigError(
            f"{package}: a model inside an archive cannot be read",
            hint=f"unpack or install the package, or: {ANOTHER_MODEL}",
        )
    return package / "stories"


def _present(name: str, remedy: str) -> Path:
    path = _folder() / name
    if not path.is_file():
        raise ConfigError(f"{path}: missing, a file that comes with strata_nb", hint=remedy)
    return path
