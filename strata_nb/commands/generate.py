"""`strata_nb generate`: continue a prompt, or answer it through the model's chat template."""

from __future__ import annotations

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
from strata_nb.commands.arguments import Arguments, sampling_from, text_from
from strata_nb.commands.terminal import note, warn
from strata_nb.engine import Engine
from strata_nb.errors import ConfigError

DEFAULT_MAX_TOKENS = 256


def prompt_ids(arguments: Arguments, engine: Engine, prompt: str) -> list[int]:
    """Return the tokens to continue; an empty prompt begins at the model's first token."""
    flags = ("--system", "--chat-template", "--chat-template-file")
    if any(arguments.text(flag) is not None for flag in flags):
        system = arguments.text("--system")
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        template = template_from(arguments, engine)
        ids, warnings = encode_chat(engine.tokenizer, template, messages)
        for warning in warnings:
            warn(warning)
        return ids
    ids = engine.encode(prompt, add_special=True)
    if ids:
        return ids
    tokenizer = engine.tokenizer
    first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if first is None:
        raise ConfigError(
            "the prompt is empty and the model has no token that begins a text",
            hint="give a prompt of at least one character",
        )
    note(f"the prompt is empty: starting from {tokenizer.text(first)}")
    return [first]


def run(arguments: Arguments) -> int:
    """Run the command; returns 0."""
    prompt = text_from(arguments, "PROMPT")
    if prompt is None:
        raise ConfigError("no prompt given", hint='-p "TEXT", -f FILE, or -f - for stdin')
    if arguments.path("--file") is not None:
        prompt = prompt.removesuffix("\n")
    sampling = sampling_from(arguments)
    max_tokens = max_tokens_from(arguments, DEFAULT_MAX_TOKENS)
    stats = check_writable(arguments, "--stats-json")
    with open_engine(arguments) as engine:
        figures = Figures(load_s=engine.load_s)
        ids = prompt_ids(arguments, engine, prompt)
        session = engine.session()
        try:
            read_prompt(session, ids, figures, arguments.flag("--verbose"))
            generation = session.generate(
                max_tokens=max_tokens,
                sampling=sampling,
                stop=arguments.texts("--stop"),
                ignore_eos=arguments.flag("--ignore-eos"),
            )
            write_answer(generation, figures, figures.prompt_s)
        finally:
            note(figures.line())
            write_stats(stats, figures, engine)
    return 0
