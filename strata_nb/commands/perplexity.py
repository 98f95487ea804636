"""`strata_nb perplexity`: score a text, save its logits, or compare with another run's."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from strata_nb.commands.answer import STATS_SCHEMA, check_writable, replace_file
from strata_nb.commands.arguments import Arguments, options_from, read_text_file
from strata_nb.commands.terminal import note, progress_bar, warn
from strata_nb.engine import Engine
from strata_nb.errors import ConfigError
from strata_nb.perplexity import LogitsReader, LogitsWriter, Score, chunks, scored_rows

DEFAULT_CHUNK = 512  # tokens


def _check_same_text(base: LogitsReader, ids: list[int], chunk: int) -> None:
    if base.chunk != chunk:
        raise ConfigError(
            f"--kl-base was made with chunks of {base.chunk} tokens, this run has {chunk}",
            hint=f"give --ctx-size {base.chunk}",
        )
    if base.ids != ids:
        raise ConfigError(
            f"--kl-base was made from another text or vocabulary: {len(base.ids)} tokens there, "
            f"{len(ids)} here",
            hint="compare runs over the same text with the same tokens",
        )


def run(arguments: Arguments) -> int:
    """Run the command; returns 0. The result goes to stdout."""
    name = arguments.path("--file")
    if name is None:
        raise ConfigError("no text given", hint="-f FILE, or -f - for stdin")
    most = arguments.integer("--chunks")
    if most is not None and most < 1:
        raise ConfigError(f"--chunks {most}: not usable", hint="1 or more")
    options = options_from(arguments)
    chunk = options.ctx_size or DEFAULT_CHUNK
    if chunk < 2:
        raise ConfigError(f"--ctx-size {chunk}: a chunk has at least 2 tokens", hint="512 is usual")
    save = check_writable(arguments, "--save-logits")
    stats = check_writable(arguments, "--stats-json")
    base_name = arguments.path("--kl-base")
    text = read_text_file("--file", name)
    with ExitStack() as stack:
        base = None
        if base_name is not None:
            base = stack.enter_context(closing(LogitsReader(Path(base_name))))
        with progress_bar("loading", unit="bytes") as progress:
            engine = Engine.open(replace(options, ctx_size=chunk), progress=progress)
        stack.enter_context(engine)
        for warning in engine.warnings:
            warn(warning)
        ids = engine.encode(text, add_special=True)
        if base is not None:
            _check_same_text(base, ids, chunk)
        writer = None
        if save is not None:
            writer = stack.enter_context(LogitsWriter(save, ids, chunk))
        score = Score()
        started = time.perf_counter()
        pieces = chunks(ids, chunk, most)
        with progress_bar("scoring", unit="chunks") as progress:
            rows = scored_rows(engine, ids, chunk, most)
            for number, (logits, following) in enumerate(rows):
                score.add(
                    logits,
                    following,
                    None if base is None else base.logits(number, logits.shape),
                )
                if writer is not None:
                    writer.add(logits)
                if progress is not None:
                    progress(number + 1, len(pieces))
        took = time.perf_counter() - started
    for line in score.lines():
        print(line)
    read = sum(end - start for start, end in pieces)
    note(f"{read} tokens in {len(pieces)} chunks, {read / took:.1f} tok/s")
    if stats is not None:
        content = {
            "schema": STATS_SCHEMA,
            "load_s": engine.load_s,
            "prompt_tokens": read,
            "prompt_tps": read / took,
            **score.figures(),
        }
        replace_file(stats, json.dumps(content, indent=2) + "\n")
    return 0
