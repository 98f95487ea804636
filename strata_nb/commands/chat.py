"""`strata_nb chat`: a conversation on a terminal or through a pipe, one line a message.

The whole conversation is put into the chat template at each turn. What the session has already read
of it stays: it is rewound to the first token that differs, and only the rest is read.
"""

from __future__ import annotations

import io
import re
import sys

from strata_nb.chat import encode_chat
from strata_nb.commands.answer import (
    max_tokens_from,
    notes_later,
    read_prompt,
    reported,
    stops_from,
    write_answer,
)
from strata_nb.commands.arguments import Arguments, sampling_from
from strata_nb.commands.figures import Figures
from strata_nb.commands.opening import (
    TemplateChoice,
    open_engine,
    refuse_to_answer_with_the_story_model,
)
from strata_nb.commands.output_files import output_file
from strata_nb.commands.terminal import note, warn
from strata_nb.engine import Session
from strata_nb.errors import ConfigError, StrataError

PROMPT = "> "


def shared_prefix(session: Session, ids: list[int]) -> int:
    """Return how many of the first tokens the session and `ids` share, leaving one to read."""
    limit = min(session.position, len(ids) - 1)
    earlier = session.ids
    return next((n for n in range(limit) if earlier[n] != ids[n]), limit)


def read_line(interactive: bool) -> str | None:
    """Return the next message without its newline, None at the end of input."""
    if interactive:
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
    line = ""
    try:
        line = sys.stdin.readline()
    finally:
        if interactive and not line:
            note("")  # ends the line of the prompt
    return line.rstrip("\r\n") if line else None


def _check_utf8(line: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the message is not UTF-8 text at character {error.start}",
            hint="check the terminal's encoding",
        ) from None


def run(arguments: Arguments) -> int:
    """Run the command; returns 0 when the input ends."""
    refuse_to_answer_with_the_story_model(arguments, "chat")
    sampling = sampling_from(arguments)
    max_tokens = max_tokens_from(arguments, None)
    stops = stops_from(arguments)
    stats = output_file(arguments, "--stats-json")
    choice = TemplateChoice.from_flags(arguments)
    system = arguments.text("--system")
    opening = [] if system is None else [{"role": "system", "content": system}]
    if not isinstance(sys.stdin, io.TextIOWrapper):
        raise ConfigError("stdin is closed", hint="chat reads its messages from stdin")
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    interactive = sys.stdin.isatty()
    with open_engine(arguments) as engine:
        template = choice.of(engine)
        figures = Figures(load_s=engine.load_s)
        session = engine.open_session()
        messages = list(opening)
        warned: set[str] = set()
        if interactive:
            note("a line is a message; /reset forgets the conversation, /exit ends")
        with reported(figures, engine, session, stats):
            while (line := read_line(interactive)) is not None and line.strip() != "/exit":
                if line.strip() == "/reset":
                    messages = list(opening)
                    continue
                if not line.strip():
                    continue
                if re.fullmatch(r"/[a-z]+", line.strip()):
                    note(f"{line.strip()}: unknown command; /reset forgets, /exit ends")
                    continue
                turn = [*messages, {"role": "user", "content": line}]
                earlier_s = figures.prompt_s
                try:
                    _check_utf8(line)
                    ids, warnings = encode_chat(engine.tokenizer, template, turn)
                    for warning in set(warnings) - warned:
                        warn(warning)
                    warned.update(warnings)
                    new = ids[session.rewind(shared_prefix(session, ids)) :]
                    read_prompt(engine, session, new, figures, arguments.flag("--verbose"))
                except StrataError as error:
                    if not interactive:
                        raise
                    # The message is dropped and the conversation goes on as it was.
                    note(error.message)
                    note(f"hint: {error.hint or '/reset forgets the conversation'}")
                    continue
                generation = session.generate(
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stop=stops,
                    ignore_eos=arguments.flag("--ignore-eos"),
                )
                if generation.in_turn and arguments.flag("--verbose"):
                    note(f"one token after the other: {generation.in_turn}")
                with notes_later(engine):
                    answer = write_answer(generation, figures, figures.prompt_s - earlier_s)
                messages = [*turn, {"role": "assistant", "content": answer}]
                if generation.refusal is not None:
                    if not interactive:
                        raise generation.refusal
                    note(f"ended: {generation.refusal.message}")
                    note(f"hint: {generation.refusal.hint}, or /reset")
    return 0
