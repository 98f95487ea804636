"""Deliver Ctrl-C between steps that must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Let Ctrl-C do what it does at the end of the block instead of in it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread alone
        return
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    handler = signal.getsignal(signal.SIGINT)
    if handler is None:  # set by other than Python, and not to be given back
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupted and callable(handler):
            handler(signal.SIGINT, None)  # no second signal: whoever counts them counts one
        elif interrupted:
            signal.raise_signal(signal.SIGINT)  # which ends the process, or is ignored
