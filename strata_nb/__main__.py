"""Start the command line, with Ctrl-C working from the first moment.

The first Ctrl-C raises KeyboardInterrupt where the program stands, so that what was written stays
and the line at the end is printed; a second one ends the process at once, also inside a long matrix
product, during which Python runs no signal handler: a thread reads the signals from the pipe that
the interpreter's C handler writes to.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def _end_at_the_second_interrupt(pipe: int) -> None:
    interrupts = 0
    while interrupts < 2:
        interrupts += os.read(pipe, 1) == bytes([signal.SIGINT])
    os._exit(INTERRUPTED)


def main() -> None:
    """Run `python -m strata_nb`; the process ends here with its exit status."""
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for a job in the background
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(
                target=_end_at_the_second_interrupt, args=(reading,), daemon=True, name="interrupts"
            ).start()
        from strata_nb.cli import main as run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
