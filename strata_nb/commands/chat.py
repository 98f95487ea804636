"""`strata_nb chat`: a conversation on a terminal or through a pipe, one line a message.

The whole conversation is put into the chat template at each turn. What the session has already read
of it stays: it is rewound to the first token that differs, and only the rest is read.
"""

from __future__ import annotations

import sys

from strata_nb.chat import encode_chat
from strata_nb.commands.answer import (
    Figures,
    check_writable,
    max_tokens_from,
    open_engine,
    read_prompt,
    template_from,
    write_answer,
    write_stats,
)
from strata_nb.commands.arguments import Arguments, sampling_from
from strata_nb.commands.terminal import note, warn
from strata_nb.engine import Session
from strata_nb.errors import ConfigError, StrataError

PROMPT = "> "


def shared_prefix(session: Session, ids: list[int]) -> int:
    """Return how many of the first tokens the session and `ids` share, leaving one to read."""
    limit = min(session.position, len(ids) - 1)
    return next((n for n in range(limit) if session.ids[n] != ids[n]), limit)


def read_line(interactive: bool) -> str | None:
    """Return the next message without its newline, None at the end of input."""
    if interactive:
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the message is not UTF-8 text: byte {error.object[error.start]:#04x}",
            hint="check the terminal's encoding",
        ) from None
    return line.rstrip("\r\n") if line else None


def run(arguments: Arguments) -> int:
    """Run the command; returns 0 when the input ends."""
    sampling = sampling_from(arguments)
    max_tokens = max_tokens_from(arguments, None)
    stats = check_writable(arguments, "--stats-json")
    system = arguments.text("--system")
    opening = [] if system is None else [{"role": "system", "content": system}]
    interactive = sys.stdin.isatty()
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    with open_engine(arguments) as engine:
        template = template_from(arguments, engine)
        figures = Figures(load_s=engine.load_s)
        session = engine.session()
        messages = list(opening)
        warned: set[str] = set()
        if interactive:
            note("a line is a message; /reset forgets the conversation, /exit ends")
        try:
            while (line := read_line(interactive)) is not None and line.strip() != "/exit":
                if line.strip() == "/reset":
                    messages = list(opening)
                    continue
                if not line.strip():
                    continue
                turn = [*messages, {"role": "user", "content": line}]
                try:
                    ids, warnings = encode_chat(engine.tokenizer, template, turn)
                    for warning in set(warnings) - warned:
                        warn(warning)
                    warned.update(warnings)
                    session.rewind(shared_prefix(session, ids))
                    earlier_s = figures.prompt_s
                    read_prompt(
                        session, ids[session.position :], figures, arguments.flag("--verbose")
                    )
                except StrataError as error:
                    if not interactive:
                        raise
                    # The message is dropped and the conversation goes on as it was.
                    hint = error.hint or "/reset forgets the conversation"
                    note(f"{error.message}\nhint: {hint}")
                    continue
                generation = session.generate(
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stop=arguments.texts("--stop"),
                    ignore_eos=arguments.flag("--ignore-eos"),
                )
                answer = write_answer(generation, figures, figures.prompt_s - earlier_s)
                messages = [*turn, {"role": "assistant", "content": answer}]
        finally:
            note(figures.line())
            write_stats(stats, figures, engine)
    return 0
