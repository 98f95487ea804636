"""The error tree of the project, and the exit status each branch ends the program with.

    StrataError                       exit 1   something that was asked for failed
    +-- ConfigError                   exit 2   an option or a combination of options cannot be used
    +-- FileFormatError               exit 2   a file cannot be used: path, offset, what was found
    +-- TemplateError                 exit 1   a chat template refused the conversation

A message says what was tried, where, and with which numbers; `hint` says what to do about it.
"""

from __future__ import annotations

import os


class StrataError(Exception):
    """Report a failure that the caller can understand; `hint` is one line of remedy, or empty."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(StrataError):
    """Refuse an option, a value or a combination of options."""

    exit_status = 2


class FileFormatError(StrataError):
    """Refuse a file.

    `path` is the file, `offset` the byte where reading it stopped making sense (None where the
    fault has no single place, such as a missing shard).
    """

    exit_status = 2

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int | None,
        message: str,
        *,
        hint: str = "",
    ) -> None:
        self.path = os.fspath(path)
        self.offset = offset
        self.reason = message
        place = self.path if offset is None else f"{self.path}, offset {offset}"
        super().__init__(f"{place}: {message}", hint=hint)


class TemplateError(StrataError):
    """Report that a chat template is broken, or refused the conversation, in its own words."""
