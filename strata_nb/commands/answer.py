"""Everything `generate` and `chat` share: opening a model for a person, writing an answer, figures.

The answer is written to stdout token by token; the line at the end and the JSON file hold the
figures of the run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from strata_nb.chat import ChatTemplate, choose_template
from strata_nb.commands.arguments import Arguments, options_from, read_text_file
from strata_nb.commands.terminal import note, progress_bar, warn
from strata_nb.engine import Engine, Generation, Session
from strata_nb.errors import ConfigError

STATS_SCHEMA = 1
LONG_PROMPT = 256  # tokens from which reading a prompt shows a bar

_FINISH_NOTES = {
    "repeat": "ended: the same token 256 times in a row (--ignore-eos goes on)",
    "context": "ended: the context is full (a larger --ctx-size holds more)",
}


@dataclass
class Figures:
    """Sum up what a run did; rates are tokens a second, 0 where nothing was measured."""

    load_s: float = 0.0
    prompt_tokens: int = 0
    prompt_s: float = 0.0
    ttft_s: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    finish: str | None = None
    seed: int | None = None

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tps(self) -> float:
        """Generated tokens a second, each answer's first one left out."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    def line(self) -> str:
        """Return the line that ends a run."""
        seed = f" · seed {self.seed}" if self.seed is not None else ""
        return (
            f"prompt {self.prompt_tokens} tokens, {self.prompt_tps:.1f} tok/s · "
            f"generated {self.generated_tokens} tokens, {self.decode_tps:.1f} tok/s{seed}"
        )


def check_writable(arguments: Arguments, flag: str) -> Path | None:
    """Return the file that `flag` names, refusing a place where it could not be written."""
    name = arguments.path(flag)
    if name is None:
        return None
    path = Path(name)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{flag} {name}: cannot be written", hint="name a file in a folder that exists"
        )
    return path


def replace_file(path: Path, content: str) -> None:
    """Write a text file whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(path)


def write_stats(path: Path | None, figures: Figures, engine: Engine) -> None:
    """Write the figures of a run as JSON, whole or not at all."""
    if path is None:
        return
    content = {
        "schema": STATS_SCHEMA,
        "model": engine.description.name,
        "device": engine.device,
        "threads": engine.threads,
        "ctx_size": engine.ctx_size,
        "load_s": figures.load_s,
        "prompt_tokens": figures.prompt_tokens,
        "prompt_tps": figures.prompt_tps,
        "ttft_s": figures.ttft_s,
        "generated_tokens": figures.generated_tokens,
        "decode_tps": figures.decode_tps,
        "finish": figures.finish,
        "seed": figures.seed,
    }
    replace_file(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def open_engine(arguments: Arguments) -> Iterator[Engine]:
    """Open the model with a progress bar and print its warnings."""
    options = options_from(arguments)
    with progress_bar("loading", unit="bytes") as progress:
        engine = Engine.open(options, progress=progress)
    with engine:
        for warning in engine.warnings:
            warn(warning)
        if arguments.flag("--verbose"):
            known = engine.description
            note(
                f"{known.name}: {known.architecture}, {known.layers} layers, device "
                f"{engine.device}, {engine.threads} threads, context {engine.ctx_size} cells, "
                f"loaded in {engine.load_s:.2f} s"
            )
        yield engine


def template_from(arguments: Arguments, engine: Engine) -> ChatTemplate:
    """Return the chat template that the flags ask for, or the file's own."""
    given = arguments.text("--chat-template")
    name = arguments.path("--chat-template-file")
    if given is not None and name is not None:
        raise ConfigError(
            "--chat-template and --chat-template-file: both given", hint="give one of them"
        )
    text = None if name is None else read_text_file("--chat-template-file", name)
    return choose_template(engine.chat_template_source, given, text, engine.tokenizer)


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


def read_prompt(session: Session, ids: list[int], figures: Figures, verbose: bool) -> None:
    """Extend the session by `ids` and count what reading them took."""
    started = time.perf_counter()
    with progress_bar("reading the prompt", unit="tokens", least=LONG_PROMPT) as progress:
        session.extend(ids, progress)
    took = time.perf_counter() - started
    figures.prompt_tokens += len(ids)
    figures.prompt_s += took
    if verbose:
        note(f"read {len(ids)} prompt tokens in {took:.2f} s")


def write_answer(generation: Generation, figures: Figures, prompt_s: float) -> str:
    """Write the tokens of `generation` to stdout as they come and return the whole text.

    The figures are right also when the answer is interrupted. A newline follows where the answer
    does not end in one.
    """
    texts: list[str] = []
    try:
        for token in generation:
            texts.append(token.text)
            sys.stdout.write(token.text)
            sys.stdout.flush()
    finally:
        if not "".join(texts).endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        if figures.generated_tokens == 0:
            figures.ttft_s = prompt_s + generation.first_token_s
        figures.generated_tokens += generation.generated
        figures.decode_tokens += max(generation.generated - 1, 0)
        figures.decode_s += generation.decode_s
        figures.finish = generation.finish
        figures.seed = generation.seed
    if generation.finish in _FINISH_NOTES:
        note(_FINISH_NOTES[generation.finish])
    return "".join(texts)
