"""Ctrl-C in a block that must not be cut in two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from strata_nb.interrupts import interrupts_later


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_at_the_end_of_the_outermost_block() -> None:
    done = []

    def work() -> None:
        with interrupts_later():
            with interrupts_later():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert done == ["inner", "outer"]
        assert os.read(reading, 9) == bytes([signal.SIGINT])  # a second one would end the program
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def test_an_interrupt_that_is_ignored_is_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_later():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_that_ends_the_process_ends_it_behind_the_block() -> None:
    text = (
        "import signal\n"
        "from strata_nb.interrupts import interrupts_later\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "with interrupts_later():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('inner', flush=True)\n"
        "print('behind')\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "inner\n")
