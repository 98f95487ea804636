"""`strata_nb perplexity`: score a text, save its logits, or compare with another run's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from strata_nb.commands.arguments import Arguments, options_from, read_text_file
from strata_nb.commands.figures import STATS_SCHEMA, memory_stats, memory_text, write_json
from strata_nb.commands.logits_file import LogitsReader, LogitsWriter
from strata_nb.commands.opening import open_engine
from strata_nb.commands.output_files import output_file
from strata_nb.commands.terminal import note, progress_bar
from strata_nb.engine import Engine
from strata_nb.errors import ConfigError
from strata_nb.perplexity import Chunks, Score, cut, scored_rows
from strata_nb.whole_files import whole_file

DEFAULT_CHUNK = 512  # tokens


def _in_common(base: LogitsReader, chunks: Chunks, vocab: int) -> Chunks:
    """Return the chunks that this run and the base both have; refuse another text or model."""
    theirs = base.chunks
    if base.vocab != vocab:
        raise ConfigError(
            f"--kl-base has {base.vocab} logits a token, this model {vocab}",
            hint="compare models with the same vocabulary",
        )
    if theirs.length != chunks.length:
        raise ConfigError(
            f"--kl-base was made with chunks of {theirs.length} tokens, this run has "
            f"{chunks.length}",
            hint=f"give the same text and --ctx-size {theirs.length}",
        )
    common = chunks.head(theirs.count)
    pairs = zip(theirs.ids, common.ids, strict=False)
    for place, (there, here) in enumerate(pairs):
        if there != here:
            raise ConfigError(
                f"--kl-base was made from another text or vocabulary: token {place} is {there} "
                f"there, {here} here",
                hint="compare runs over the same text with the same tokens",
            )
    if theirs.count != chunks.count:
        note(
            f"--kl-base has {theirs.count} chunks, this run {chunks.count}: comparing the first "
            f"{common.count}"
        )
    return common


@contextmanager
def _reported(
    score: Score, chunks: Chunks, engine: Engine, save: Path | None, stats: Path | None
) -> Iterator[None]:
    """Print what was measured in the block, also where it was interrupted or failed half way."""
    started = time.perf_counter()
    whole = False
    try:
        yield
        whole = True
    finally:
        took = time.perf_counter() - started
        done = len(score.chunks)
        if not whole:
            left_out = "" if save is None else f"; {save} is written only by a whole run"
            note(f"stopped after {done} of {chunks.count} chunks{left_out}")
        if done:
            for line in score.lines():
                print(line)
            sys.stdout.flush()
            read = done * chunks.length
            memory = memory_text(engine, chunks.length)
            note(f"{read} tokens in {done} chunks, {read / took:.1f} tok/s{memory}")
            content = {
                "schema": STATS_SCHEMA,
                "model": engine.description.name,
                "device": engine.device,
                "threads": engine.threads,
                "ctx_size": engine.ctx_size,
                "load_s": engine.load_s,
                "prompt_tokens": read,
                "prompt_tps": read / took,
                **memory_stats(engine.describe()),
                **score.figures(),
            }
            write_json(stats, content)


def run(arguments: Arguments) -> int:
    """Run the command; returns 0. The result goes to stdout."""
    name = arguments.path("--file")
    if name is None:
        raise ConfigError("no text given", hint="-f FILE, or -f - for stdin")
    most = arguments.integer("--chunks")
    if most is not None and most < 1:
        raise ConfigError(f"--chunks {most}: not usable", hint="1 or more")
    length = options_from(arguments).ctx_size or DEFAULT_CHUNK
    if length < 2:
        raise ConfigError(
            f"--ctx-size {length}: a chunk has at least 2 tokens", hint="512 is usual"
        )
    save = output_file(arguments, "--save-logits")
    stats = output_file(arguments, "--stats-json")
    base_name = arguments.path("--kl-base")
    text = read_text_file("--file", name).removesuffix("\n")  # as llama.cpp's tool does
    with ExitStack() as stack:
        base = None
        if base_name is not None:
            base = stack.enter_context(LogitsReader(Path(base_name)))
        engine = stack.enter_context(open_engine(arguments, ctx_size=length))
        vocab = engine.description.vocab_size
        chunks = cut(engine.encode_prompt(text), length, most)
        if base is not None:
            chunks = _in_common(base, chunks, vocab)
        writer = None
        if save is not None:
            writer = LogitsWriter(stack.enter_context(whole_file(save)), chunks, vocab)
        score = Score(chunks.count)
        stack.enter_context(_reported(score, chunks, engine, save, stats))
        progress = stack.enter_context(progress_bar("scoring", unit="chunks"))
        for number, (logits, following) in enumerate(scored_rows(engine, chunks)):
            score.add(logits, following, None if base is None else base.rows(number))
            if writer is not None:
                writer.add(logits)
            if progress is not None:
                progress(number + 1, chunks.count)
    return 0
