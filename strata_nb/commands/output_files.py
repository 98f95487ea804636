"""Files that a command writes beside its answer: refused before any work is done for them."""

from __future__ import annotations

import os
from pathlib import Path

from strata_nb.commands.arguments import Arguments
from strata_nb.errors import ConfigError
from strata_nb.whole_files import is_stream, unfinished_name

INPUT_FLAGS = (
    "--model",
    "FILE",
    "--file",
    "--kl-base",
    "--chat-template-file",
    "--expert-profile",
)
OUTPUT_FLAGS = (
    "--stats-json",
    "--save-logits",
    "--expert-profile-save",
    "--routing-trace",
    "--trace",
    "--html",
    "--control",
)
# The profile that a run began with may be the one that it leaves behind.
_MAY_BE_SAME = {"--expert-profile-save": "--expert-profile"}


def output_file(arguments: Arguments, flag: str) -> Path | None:
    """Return the file that `flag` names, None where it was not given.

    Raises ConfigError, before any work is done for it, for a place that cannot be written, and for
    a file that the command reads or writes under another flag, unless it is meant to go on with it.
    """
    name = arguments.path(flag)
    if name is None:
        return None
    if name == "-":
        raise ConfigError(f"{flag} -: not a file", hint=f"{flag} /dev/stdout writes to stdout")
    try:
        stream = is_stream(name)
        path = Path(name) if stream else Path(name).resolve()
    except OSError as error:  # a name that is too long
        raise _cannot_write(flag, name, error.strerror or str(error)) from None
    if stream:
        if not os.access(path, os.W_OK):
            raise _cannot_write(flag, name, "not allowed")
        return path
    for other in (*INPUT_FLAGS, *OUTPUT_FLAGS):
        taken = arguments.path(other)
        meant = other in (flag, _MAY_BE_SAME.get(flag))
        if taken is not None and not meant and Path(taken).resolve() == path:
            raise ConfigError(
                f"{flag} {name}: {other} names the same file", hint="name another file"
            )
    if path.suffix == ".gguf":  # perhaps another shard of the model
        raise ConfigError(f"{flag} {name}: the name of a model", hint="name another file")
    if path.is_dir():
        raise _cannot_write(flag, name, "is a folder")
    unfinished = unfinished_name(path)
    try:
        unfinished.touch(exist_ok=False)
        unfinished.unlink()
    except OSError as error:
        raise _cannot_write(flag, name, error.strerror or str(error)) from None
    return path


def _cannot_write(flag: str, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{flag} {name}: cannot be written: {why}",
        hint="name a file in a folder that exists and that you may write to",
    )
