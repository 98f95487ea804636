"""Ctrl-C at any line between two tokens, while a window is ahead."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from device_world import SHAPE
from filling_backend import FillingBackend
from test_device_filling import check_tables
from test_launch_ahead import HALF, PROMPT, begun, device_of, engine_of, model_of

from strata_nb import (
    Engine,
    Sampling,
    device_filling,
    device_model,
    device_pool,
    device_steps,
    device_windows,
    session,
)
from strata_nb.errors import StrataError
from strata_nb.session import Generation, Session

WATCHED = {
    module.__file__
    for module in (
        device_filling,
        device_model,
        device_pool,
        device_steps,
        device_windows,
        session,
    )
}
SAMPLING = Sampling(seed=3, temperature=1.0)
TOKENS = 12


class Lines:
    """Count lines of the watched files; raise a signal at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                signal.raise_signal(signal.SIGINT)
        return self


@contextmanager
def traced(lines: Lines) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        yield
    finally:
        sys.settrace(before)


def writing(one: Session, count: int) -> Generation:
    return one.generate(max_tokens=count, sampling=SAMPLING, ignore_eos=True)


def interrupted(engine: Engine, at: int, expected: list[int]) -> bool:
    """Interrupt a generation at a line; what it and its session say after that must be right."""
    one = begun(engine)
    generation = writing(one, TOKENS)
    ids = [next(generation).id for _ in range(4)]
    was_interrupted = False
    try:
        with traced(Lines(at)):
            ids += [next(generation).id for _ in range(3)]
    except KeyboardInterrupt:
        was_interrupted = True
    written = one.ids[len(PROMPT) :]
    assert written == expected[: len(written)]
    assert 4 <= len(written) <= 7
    try:
        for token in generation:
            assert token.id == expected[one.position - len(PROMPT) - 1]
    except StrataError as error:
        assert "without this generation" in error.message  # noqa: PT017
    list(writing(one, TOKENS - (one.position - len(PROMPT))))
    assert one.ids[len(PROMPT) :] == expected
    model = model_of(engine)
    assert model.length(one._sequence) == one.position - 1
    one.close()
    model.report()
    assert model.kv.live_blocks == 0
    model.ledger.check_integrity()
    if isinstance(model._backend, FillingBackend):
        check_tables(engine)
    return was_interrupted


def check_any_line(engine: Engine, every: int) -> None:
    """Interrupt generations at every so many lines of the steps behind their first tokens."""
    expected = [token.id for token in writing(begun(engine), TOKENS)]
    one, lines = begun(engine), Lines(None)
    generation = writing(one, TOKENS)
    for _ in range(4):
        next(generation)
    with traced(lines):
        for _ in range(3):
            next(generation)
    assert device_of(engine).most_in_flight == 2
    assert lines.seen > 150
    one.close()
    came = [interrupted(engine, at, expected) for at in range(1, lines.seen, every)]
    assert came.count(True) > len(came) * 0.8


FILLS = {**HALF, "opens": FillingBackend}


@pytest.mark.parametrize(
    "options", [{}, HALF, FILLS], ids=["all in slots", "some in slots", "the device fills"]
)
def test_after_ctrl_c_at_any_line_the_answer_goes_on_or_says_why_not(
    small: Path, options: dict[str, Any]
) -> None:
    with engine_of(small, **options) as engine:
        if not options:
            arena = model_of(engine).arena
            arena.fill(np.ndindex(arena.use.shape))  # type: ignore[arg-type]
        check_any_line(engine, 5)


def test_ctrl_c_at_any_line_while_a_window_is_dropped_leaves_nothing_of_it(small: Path) -> None:
    with engine_of(small, **FILLS) as engine:
        model, choices = model_of(engine), SHAPE.layers * SHAPE.top_k

        def dropped(at: int | None) -> int:
            """Drop a window, interrupted at a line; return how many lines that took."""
            before, one, lines = model.arena.use.sum(), begun(engine), Lines(at)
            generation = writing(one, TOKENS)
            for _ in range(4):
                next(generation)
            assert model._steps._ahead is not None
            with suppress(KeyboardInterrupt), traced(lines):
                engine.describe()
            check_tables(engine)
            rows = model.length(one._sequence)
            assert model.arena.use.sum() - before == rows * choices
            assert model.arena.tally.sum() == model.arena.use.sum()
            one.close()
            return lines.seen

        for at in range(1, dropped(None), 3):
            dropped(at)
        model.report()
        assert model.kv.live_blocks == 0
