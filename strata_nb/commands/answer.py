"""Read a prompt and write an answer: what `generate` does once and `chat` at every turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from strata_nb.commands.arguments import Arguments
from strata_nb.commands.figures import Figures, write_json
from strata_nb.commands.reading import Reading
from strata_nb.commands.terminal import note, progress_bar
from strata_nb.engine import Engine, Generation, Session
from strata_nb.errors import ConfigError
from strata_nb.sampling import StopStrings

LONG_PROMPT = 256  # tokens from which reading a prompt shows a bar

_FINISH_NOTES = {
    "repeat": "ended: the same token 256 times in a row (--ignore-eos goes on)",
    "context": "ended: the context is full (a larger --ctx-size holds more)",
}


def stops_from(arguments: Arguments) -> list[str]:
    """Return the stop strings, refusing those that cannot be used before a model is loaded."""
    stops = arguments.texts("--stop")
    StopStrings(stops)
    return stops


def max_tokens_from(arguments: Arguments, default: int | None) -> int | None:
    """Return -n as a number of tokens, None for -1 (until the model ends)."""
    value = arguments.integer("--max-tokens")
    if value is None:
        return default
    if value < -1:
        raise ConfigError(
            f"--max-tokens {value}: not usable", hint="0 or more, or -1: until the model ends"
        )
    return None if value == -1 else value


@contextmanager
def reported(
    figures: Figures, engine: Engine, session: Session, stats: Path | None
) -> Iterator[None]:
    """Print the end line and write the stats when the block ends, also by an interrupt.

    After an error before anything was read there is nothing to report, and an older stats file
    stays what it is.
    """
    try:
        yield
    finally:
        if figures.prompt_tokens:
            note(figures.line(engine, _cells(session)))
            write_json(stats, figures.stats(engine))


def _cells(session: Session) -> int:
    """Return in how many cells tokens are, or will be when the next one is asked for: all but those
    of a prompt that was broken off."""
    unread = session.position - session.read
    return session.position if unread <= 1 else session.read


def read_prompt(
    engine: Engine, session: Session, ids: list[int], figures: Figures, verbose: bool
) -> None:
    """Extend the session by `ids` and count what reading them took.

    `verbose` says how it goes, and at the end how it went.
    """
    started, before = time.perf_counter(), figures.prompt_tokens
    reading = Reading(engine) if verbose else None
    with progress_bar("reading the prompt", unit="tokens", least=LONG_PROMPT) as bar:

        def count(done: int, total: int) -> None:
            # What a session reads may begin with the last token of the answer before.
            figures.prompt_tokens = before + max(0, len(ids) - (total - done))
            if bar is not None:
                bar(done, total)
            if reading is not None and done < total:
                reading.went_on(done, total)

        try:
            session.extend(ids, count)
        finally:
            took = time.perf_counter() - started
            figures.prompt_s += took
    if reading is not None:
        reading.ended(len(ids), took)


@contextmanager
def notes_later(engine: Engine) -> Iterator[None]:
    """Keep what the engine says to the end, where a terminal would show it amid the text."""
    if not sys.stdout.isatty():
        yield
        return
    lines: list[str] = []
    say, engine.say = engine.say, lines.append
    try:
        yield
    finally:
        engine.say = say
        for line in lines:
            say(line)


def to_stdout(text: str) -> None:
    """Write a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_answer(
    generation: Generation,
    figures: Figures,
    prompt_s: float,
    before: str = "",
    write: Callable[[str], None] = to_stdout,
) -> str:
    """Write the tokens of `generation` as they come, usually to stdout; return the whole text.

    `before` is what they continue, written before them. A newline follows unless there is one.
    """
    text = ""
    if before:
        write(before)
    try:
        for token in generation:
            text += token.text
            write(token.text)
    finally:
        figures.add_answer(generation, prompt_s)
        if (before + text)[-1:] not in ("", "\n"):
            write("\n")
    if generation.finish in _FINISH_NOTES:
        note(_FINISH_NOTES[generation.finish])
    return text
