"""`strata_nb generate`: continue a prompt, or answer it through the model's chat template."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from strata_nb import story_model
from strata_nb.chat import encode_chat
from strata_nb.commands.answer import (
    max_tokens_from,
    notes_later,
    read_prompt,
    reported,
    stops_from,
    write_answer,
)
from strata_nb.commands.arguments import Arguments, sampling_from, text_from
from strata_nb.commands.figures import Figures
from strata_nb.commands.opening import (
    TemplateChoice,
    open_engine,
    refuse_to_answer_with_the_story_model,
)
from strata_nb.commands.output_files import output_file
from strata_nb.commands.terminal import dimmed, note, warn
from strata_nb.commands.watch import Watch, watch_from
from strata_nb.engine import Engine
from strata_nb.errors import ConfigError

DEFAULT_MAX_TOKENS = 256


def _chat_ids(engine: Engine, choice: TemplateChoice, system: str | None, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    ids, warnings = encode_chat(engine.tokenizer, choice.of(engine), messages)
    for warning in warnings:
        warn(warning)
    return ids


def _plain_ids(engine: Engine, prompt: str, parse_special: bool) -> list[int]:
    if not prompt:
        note("the prompt is empty: starting from the token that begins a text")
    control = [text for text in engine.tokenizer.control_texts if text in prompt]
    if control and not parse_special:
        note(
            f"{control[0]} in the prompt is read as plain text: --parse-special reads it as a "
            "token, --chat-template auto writes the model's own"
        )
    return engine.encode_prompt(prompt, parse_special)


@dataclass(frozen=True)
class _Prompt:
    """Hold the text to continue or to answer."""

    text: str
    given: bool
    shown: bool  # written before what continues it

    @classmethod
    def from_flags(cls, arguments: Arguments, as_chat: bool) -> _Prompt:
        """Read the prompt; where neither it nor a model is given, a story begins by itself.

        By default a terminal shows a text from its beginning, while a file or a program gets what
        it does not have: the continuation, and a beginning that nobody gave. An answer continues
        nothing.
        """
        text = text_from(arguments, "PROMPT")
        if text is None and arguments.path("--model") is not None:
            raise ConfigError("no prompt given", hint='-p "TEXT", -f FILE, or -f - for stdin')
        if text is not None and arguments.path("--file") is not None:
            text = text.removesuffix("\n")
        show, hide = arguments.flag("--echo"), arguments.flag("--no-echo")
        if show and hide:
            raise ConfigError("--echo and --no-echo: both given", hint="give one of them")
        usual = text is None or sys.stdout.isatty()
        shown = show or (usual and not hide and not as_chat)
        return cls(story_model.OPENING if text is None else text, text is not None, shown)


def _story_line(engine: Engine) -> str:
    model = engine.description
    return (
        f"{story_model.NAME}: {model.parameters / 1e6:.0f}M parameters, {model.layers} layers of "
        f"{model.experts} experts, trained for strata_nb to write short stories; "
        f"{story_model.ANOTHER_MODEL}"
    )


def _check_chat_flags(arguments: Arguments, asked: str) -> None:
    """Refuse what does not go with a chat template, which `asked` asks for."""
    refuse_to_answer_with_the_story_model(arguments, asked)
    for flag, why in (
        ("--parse-special", "which alone writes control tokens"),
        ("--echo", "whose answer continues no text"),
    ):
        if arguments.flag(flag):
            raise ConfigError(
                f"{flag}: not with a chat template, {why}", hint="leave one of them out"
            )


def run(arguments: Arguments) -> int:
    """Run the command; returns 0."""
    system = arguments.text("--system")
    choice = TemplateChoice.from_flags(arguments)
    as_chat = choice.asked_for or system is not None
    if as_chat:
        _check_chat_flags(arguments, "a chat template" if system is None else "--system")
    prompt = _Prompt.from_flags(arguments, as_chat)
    story = arguments.path("--model") is None
    sampling = sampling_from(arguments)
    max_tokens = max_tokens_from(arguments, None if story else DEFAULT_MAX_TOKENS)
    stops = stops_from(arguments)
    stats = output_file(arguments, "--stats-json")
    watched = watch_from(arguments)
    with open_engine(arguments) as engine:
        if story:
            note(_story_line(engine))
        if not prompt.given:
            note(f'no prompt given: beginning with "{prompt.text}" (-f - reads one from stdin)')
        if as_chat:
            ids = _chat_ids(engine, choice, system, prompt.text)
        else:
            ids = _plain_ids(engine, prompt.text, arguments.flag("--parse-special"))
        figures = Figures(load_s=engine.load_s)
        session = engine.open_session()
        with reported(figures, engine, session, stats):
            read_prompt(engine, session, ids, figures, arguments.flag("--verbose"))
            generation = session.generate(
                max_tokens=max_tokens,
                sampling=sampling,
                stop=stops,
                ignore_eos=arguments.flag("--ignore-eos"),
            )
            if generation.in_turn and arguments.flag("--verbose"):
                note(f"one token after the other: {generation.in_turn}")
            before = prompt.text if prompt.shown else ""
            with notes_later(engine):
                if watched:
                    with Watch(engine, generation) as watch:
                        write_answer(generation, figures, figures.prompt_s, before, watch.write)
                else:
                    write_answer(generation, figures, figures.prompt_s, dimmed(before))
            if generation.refusal is not None:
                raise generation.refusal
    return 0
