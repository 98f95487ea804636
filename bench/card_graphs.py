"""Time graphs of launches on a card, and write down what was found: for the programs card_*.py.

A graph is replayed with an event behind each replay and no wait in between, as windows follow each
other while a text is written: a card that waits for the host would be measured with its wait.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb.card_backend import CardBackend  # noqa: E402
from strata_nb.commands.provenance import device_name  # noqa: E402
from strata_nb.engine import Engine  # noqa: E402
from strata_nb.errors import StrataError, UnsupportedDevice  # noqa: E402
from strata_nb.kernels.gpu.card_launch import CardLaunch  # noqa: E402
from strata_nb.plain_read import PlainRead  # noqa: E402

REPLAYS = 21
LEAST_PLAIN_READ = (
    4e12  # bytes a second of an H200; below it others use the card, or its clock is low
)


def card_of(engine: Engine) -> CardBackend:
    """Return the card that an engine computes on; UnsupportedDevice where it is none."""
    card = engine._device()._backend
    if not isinstance(card, CardBackend):
        raise UnsupportedDevice(
            f"the device {engine.device} has no graphs to measure", hint="--device=cuda:0 has"
        )
    return card


class TimedGraph:
    """Hold a graph of launches that is captured once, and replay it.

    rows      of its launches
    owner     ends it
    """

    def __init__(
        self,
        card: CardBackend,
        launches: Sequence[CardLaunch],
        rows: int,
        owner: ExitStack,
    ) -> None:
        for one in launches:
            card._load(one.kernel, one.shared_bytes)
        self._card = card
        self._executable = card._executable(launches, rows, owner)
        self._events = [card._timed_event(owner) for _ in range(REPLAYS + 1)]

    def seconds(self) -> list[float]:
        """Return the seconds of each replay, behind one that is not counted."""
        driver, stream = self._card._card, self._card._stream
        driver.graph_launch(self._executable, stream)
        driver.event_record(self._events[0], stream)
        for event in self._events[1:]:
            driver.graph_launch(self._executable, stream)
            driver.event_record(event, stream)
        driver.stream_synchronize(stream)
        return [driver.event_elapsed_s(*pair) for pair in pairwise(self._events)]


@contextmanager
def put_back(card: CardBackend) -> Iterator[None]:
    """Let programs of a model run again in the block: what they count is put back behind it.

    Nothing may be in flight.
    """
    card.wait()
    card._send_tables()
    try:
        yield
    finally:
        for one in card._shared:
            if one.is_written:
                card._staging.send(one.address, one.table.array)
        card._card.stream_synchronize(card._stream)


def whole_number(arguments: Mapping[str, Any], flag: str, *, least: int = 1) -> int:
    """Return the number that a flag is given, or end the program and say what it may be."""
    text = str(arguments[flag])
    if not text.isdecimal() or int(text) < least:
        raise SystemExit(f"{flag} {text}: not usable; a whole number, {least} or more")
    return int(text)


def whole_numbers(arguments: Mapping[str, Any], flag: str, *, least: int = 1) -> list[int]:
    """Return the numbers of a list that a flag is given, or end the program likewise."""
    parts = str(arguments[flag]).split(",")
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise SystemExit(f"{flag} {arguments[flag]}: not usable; whole numbers, {least} or more")
    return [int(part) for part in parts]


def percents(text: str) -> list[int]:
    """Return the whole percents of a list, or end the program and say what is none."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isdecimal() and int(part) <= 100 for part in parts):
        raise SystemExit(f"{text}: not percents")
    return [int(part) for part in parts]


@contextmanager
def failing_alone(failed: list[str], what: str) -> Iterator[None]:
    """Let a StrataError end the block and not the program: it is said, and added to `failed`."""
    try:
        yield
    except StrataError as error:
        failed.append(f"{what}: {error.message}")
        print(f"failed: {failed[-1]}", file=sys.stderr, flush=True)


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return number, median, least and most of some values, each times `scale`."""
    return {
        "n": len(values),
        "median": statistics.median(values) * scale,
        "least": min(values) * scale,
        "most": max(values) * scale,
    }


def plain_read_figures(read: PlainRead) -> dict[str, float]:
    """Return what a result says of the plain read of its run, and say where it is too slow."""
    if read.bytes_per_s < LEAST_PLAIN_READ:
        print(
            f"the plain read is {read.bytes_per_s / 1e9:,.0f} GB/s: below "
            f"{LEAST_PLAIN_READ / 1e9:,.0f} shares of it say nothing",
            file=sys.stderr,
        )
    return {
        "size_bytes": read.size_bytes,
        "passes": len(read.seconds),
        "gb_per_s": read.bytes_per_s / 1e9,
    }


def store(
    program: str,
    what: str,
    arguments: Mapping[str, Any],
    figures: Mapping[str, object],
) -> None:
    """Write what a program measured, to `-o` or to bench/results/.

    arguments   of its command line, `--device` among them
    """
    model = arguments.get("MODEL")
    given = [Path(word).name if word == model else word for word in sys.argv[1:]]
    path = write_result(
        program if model is None else f"{program}_{Path(model).stem}",
        what,
        " ".join([f"python bench/{program}.py", *given]),
        {
            **({} if model is None else {"model": Path(model).name}),
            "device": device_name(arguments["--device"]),
            **figures,
        },
        ("numpy", "numba", "llvmlite"),
        arguments["-o"],
    )
    print(path)
