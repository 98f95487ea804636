"""Files that a command writes beside its answer: whole or not at all.

A regular file appears under its name, or replaces an older one there, only when all of it is
written. A link is followed; a device or a pipe, such as /dev/stdout, is written to as it stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from strata_nb.commands.arguments import Arguments
from strata_nb.errors import ConfigError


def output_file(arguments: Arguments, flag: str) -> Path | None:
    """Return the file that `flag` names, None where it was not given.

    Raises ConfigError for a place that cannot be written, before any work is done for it.
    """
    name = arguments.path(flag)
    if name is None:
        return None
    path = Path(name).resolve()
    target = path if _is_special(path) else path.parent
    folder_is_there = _is_special(path) or (path.parent.is_dir() and not path.is_dir())
    if not folder_is_there or not os.access(target, os.W_OK):
        raise ConfigError(
            f"{flag} {name}: cannot be written",
            hint="name a file in a folder that exists and that you may write to",
        )
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a stream to write; what it holds becomes `path` when the block ends without an error."""
    if _is_special(path):
        with open(path, "wb") as stream:
            yield stream
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "xb") as stream:
            yield stream
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
