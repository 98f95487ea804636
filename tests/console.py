"""Run the command line as a user does: in this process, or in one of its own."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys

import pytest

from strata_nb.cli import main


class Console:
    """Run commands in this process.

    The line about kernels that are compiled is left out: which command is the first to need one
    depends on what was run before.
    """

    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capture, self._patch = capture, patch

    def __call__(self, *words: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        status = main(words)
        captured = self._capture.readouterr()
        return status, captured.out, re.sub(r"(?m)^compiling \d+ kernel.*\n", "", captured.err)


def start(*words: str, **options: object) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "strata_nb", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=interruptible,
        **options,  # type: ignore[call-overload]
    )


def interruptible() -> None:
    """Undo what a run in the background hands down: an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
