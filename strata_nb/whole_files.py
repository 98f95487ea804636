"""Write files whole or not at all.

A regular file appears under its name, or replaces an older one there, only when all of it is
written, and a link is followed. What is no regular file, a device, a pipe, or a stream of this
process such as /dev/stdout, is written to as it stands.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# Streams of this process: what they lead to may be a regular file, and others write to it too.
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a name stands for a device, a pipe or a stream; OSError for a bad name."""
    if os.path.abspath(path).startswith(_STREAMS):
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def unfinished_name(path: Path) -> Path:
    """Return a name beside a file that nobody has, for what is not whole yet."""
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.tmp")


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file to an error of writing, which names none: a disk is full, and which?"""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Give a stream to write; what it holds becomes the file when the block ends without an error.

    Where the block or the system fails, an old file stays and the temporary one is removed.
    """
    if is_stream(path):
        with _named(path), open(path, "ab") as stream:
            yield stream
        return
    target = Path(path).resolve()
    unfinished = unfinished_name(target)
    try:
        with _named(path), open(unfinished, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # else a crash may leave the new name with no content
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
