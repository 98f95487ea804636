"""`strata_nb generate`: continue a prompt, or answer it through the model's chat template."""

from __future__ import annotations

from strata_nb.chat import encode_chat
from strata_nb.commands.answer import (
    max_tokens_from,
    read_prompt,
    reported,
    stops_from,
    write_answer,
)
from strata_nb.commands.arguments import Arguments, sampling_from, text_from
from strata_nb.commands.figures import Figures
from strata_nb.commands.opening import TemplateChoice, open_engine
from strata_nb.commands.output_files import output_file
from strata_nb.commands.terminal import note, warn
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


def run(arguments: Arguments) -> int:
    """Run the command; returns 0."""
    prompt = text_from(arguments, "PROMPT")
    if prompt is None:
        raise ConfigError("no prompt given", hint='-p "TEXT", -f FILE, or -f - for stdin')
    if arguments.path("--file") is not None:
        prompt = prompt.removesuffix("\n")
    sampling = sampling_from(arguments)
    max_tokens = max_tokens_from(arguments, DEFAULT_MAX_TOKENS)
    stops = stops_from(arguments)
    stats = output_file(arguments, "--stats-json")
    system = arguments.text("--system")
    choice = TemplateChoice.from_flags(arguments)
    as_chat = choice.asked_for or system is not None
    parse_special = arguments.flag("--parse-special")
    if as_chat and parse_special:
        raise ConfigError(
            "--parse-special: not with a chat template, which alone writes control tokens",
            hint="leave one of them out",
        )
    watched = watch_from(arguments)
    with open_engine(arguments) as engine:
        if as_chat:
            ids = _chat_ids(engine, choice, system, prompt)
        else:
            ids = _plain_ids(engine, prompt, parse_special)
        figures = Figures(load_s=engine.load_s)
        session = engine.open_session()
        with reported(figures, engine, session, stats):
            read_prompt(session, ids, figures, arguments.flag("--verbose"))
            generation = session.generate(
                max_tokens=max_tokens,
                sampling=sampling,
                stop=stops,
                ignore_eos=arguments.flag("--ignore-eos"),
            )
            if watched:
                with Watch(engine) as watch:
                    write_answer(generation, figures, figures.prompt_s, watch.write)
            else:
                write_answer(generation, figures, figures.prompt_s)
    return 0
