"""The error tree of the project, and the exit status each branch ends the program with.

    StrataError                       exit 1   something that was asked for failed
    +-- ConfigError                   exit 2   an option or a combination of options cannot be used
    +-- FileFormatError               exit 2   a file cannot be used: path, offset, what was found
    +-- TemplateError                 exit 1   a chat template refused the conversation
    +-- UnsupportedDevice             exit 2   this machine or card lacks what a device needs
    +-- DriverError                   exit 1   a driver call failed: call, status, device, numbers
        +-- OutOfDeviceMemory         exit 1   no memory for it (also a MemoryError)
        +-- DeviceLost                exit 1   the device answers no call any more

    RuleViolation (AssertionError)             our own bug: a rule of docs/vmm.md was broken

A message says what was tried, where, and with which numbers; `hint` says what to do about it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


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


class UnsupportedDevice(StrataError):
    """Refuse a device: the machine, the card or its driver lacks something that is needed."""

    exit_status = 2


class DriverError(StrataError):
    """Report a driver call that failed.

    `call` is the operation, `code` and `name` are the driver's answer (0 where it was not asked),
    `device` is where (None where the call concerns no device), `numbers` are the sizes and
    addresses that were asked for.
    """

    def __init__(
        self,
        call: str,
        code: int,
        name: str,
        *,
        device: int | None = None,
        numbers: Mapping[str, int] | None = None,
        hint: str = "",
    ) -> None:
        self.call = call
        self.code = code
        self.name = name
        self.device = device
        self.numbers = dict(numbers or {})
        place = "" if device is None else f" on device {device}"
        figures = "".join(
            f", {key} {value:#x}" if key.endswith("address") else f", {key} {value:,}"
            for key, value in self.numbers.items()
        )
        answer = f"{name} (code {code})" if code else name
        super().__init__(f"{call}{place}: {answer}{figures}", hint=hint)


class OutOfDeviceMemory(DriverError, MemoryError):
    """Report that a device has no memory for what was asked; nothing was changed."""


class DeviceLost(DriverError):
    """Report an error that every later call on the device would repeat."""


class RuleViolation(AssertionError):
    """Report a bug of ours: rule `rule` of docs/vmm.md was broken.

    On a card it would have been a wrong answer or the death of the process, so nothing catches it.
    """

    def __init__(self, rule: int, message: str) -> None:
        super().__init__(f"rule {rule}: {message}")
        self.rule = rule
