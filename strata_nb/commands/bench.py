"""`strata_nb bench`: measure how fast prompts are read and tokens written.

Names and meanings are llama-bench's. What it does not say is how far a rate is from what the
machine could do: a token that is written reads weights and K/V once, so bytes a second are compared
with a plain read of the same memory in the same run.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from strata_nb.commands.arguments import Arguments, options_from
from strata_nb.commands.bench_misses import Misses
from strata_nb.commands.bench_report import Case, Outcome, Run, as_json, as_tables
from strata_nb.commands.figures import memory_stats
from strata_nb.commands.opening import open_engine
from strata_nb.commands.terminal import note, progress_bar
from strata_nb.engine import Engine, Session
from strata_nb.errors import ConfigError, StrataError, UnsupportedDevice
from strata_nb.options import REFERENCE, Sampling

if TYPE_CHECKING:
    from strata_nb.plain_read import PlainRead
    from strata_nb.progress import Progress

PROMPT, GENERATED, DEPTH, REPETITIONS = "512", "128", "0", 5
_MOST_TOKENS = 2**31 - 1
_REPORTS: dict[str, Callable[[Run], str]] = {"md": as_tables, "json": as_json}


def run(arguments: Arguments) -> int:
    """Run the command; returns 0. The report goes to stdout."""
    cases = _cases(arguments)
    repetitions = arguments.integer("--repetitions")
    repetitions = REPETITIONS if repetitions is None else repetitions
    if not 1 <= repetitions <= _MOST_TOKENS:
        raise ConfigError(f"--repetitions {repetitions}: not usable", hint="1 or more")
    seed = arguments.integer("--seed") or 0
    if seed < 0:
        raise ConfigError(f"--seed {seed}: not usable", hint="0 or more")
    form = arguments.text("--output") or "md"
    if form not in _REPORTS:
        raise ConfigError(f"--output {form}: not known", hint="give md or json")
    profiles = arguments.flag("--profile")
    with open_engine(arguments, ctx_size=_context(arguments, cases)) as engine:
        if profiles and not engine.device.startswith("cuda"):
            raise UnsupportedDevice(
                f"--profile: the device {engine.device} has no graphs to look into",
                hint="--device cuda has",
            )
        has_slots = engine.describe().slots > 0
        if not has_slots and any(case.phase for case in cases):
            raise UnsupportedDevice(
                f"--cold, --steady: the device {engine.device} has no slots that experts come to",
                hint=_hint_on_slots(engine, arguments),
            )
        read = _measured(engine, engine.plain_read)
        link = _measured(engine, engine.link_rate) if has_slots else None
        done = Run.of(engine, options_from(arguments), arguments.line, read, link)
        total = len(cases) * (repetitions + 1)
        with (
            _reported(done, len(cases), _REPORTS[form]),
            progress_bar("measuring", unit="runs") as progress,
        ):
            bench = Bench(engine, repetitions, seed, profiles, _counted(progress, total))
            for outcome in bench.outcomes(cases):
                done.outcomes.append(outcome)
    return 0


def _hint_on_slots(engine: Engine, arguments: Arguments) -> str:
    """Say what would give an engine without slots some."""
    if not engine.description.experts:
        return "the model has no experts: take one that has"
    if arguments.text("--expert-cache") is not None:
        return "a larger --expert-cache"
    return "give a device of its own memory: --device cuda, or host:1x512MiB"


@contextmanager
def _reported(done: Run, cases: int, report: Callable[[Run], str]) -> Iterator[None]:
    """Print what was measured in the block, also where it was interrupted or failed half way."""
    try:
        yield
    finally:
        if done.outcomes:
            if len(done.outcomes) < cases:
                note(f"stopped after {len(done.outcomes)} of {cases} tests")
            print(report(done))
            sys.stdout.flush()


class Bench:
    """Run cases on an engine.

    repetitions   of each that count
    profiles      whether a token behind each case that writes is looked into
    done          called after each run
    """

    def __init__(
        self,
        engine: Engine,
        repetitions: int,
        seed: int,
        profiles: bool,
        done: Callable[[], None],
    ) -> None:
        self._engine, self._repetitions, self._profiles = engine, repetitions, profiles
        self._done = done
        self._random = np.random.default_rng(seed)
        every = np.arange(engine.description.vocab_size)
        self._tokens = np.setdiff1d(every, list(engine.tokenizer.end_ids))

    def outcomes(self, cases: list[Case]) -> Iterator[Outcome]:
        """Run the cases, which come by depth: those of one depth share what is before them."""
        for depth in dict.fromkeys(case.depth for case in cases):
            with self._engine.open_session() as session:
                if depth:
                    session.extend(self._ids(depth))
                for case in cases:
                    if case.depth == depth:
                        yield self._outcome(session, case)

    def _outcome(self, session: Session, case: Case) -> Outcome:
        samples, counts = [], []
        for _ in range(1 + self._repetitions):  # the first may grow the K/V, and bring experts
            session.rewind(case.depth)
            self._prepare(session, case)
            before = self._engine.describe()
            samples.append((self._write if case.writes else self._read)(session, case.tokens))
            counts.append(Misses.between(before, self._engine.describe(), case.tokens))
            self._done()
        report = self._engine.describe()
        seconds, memory = tuple(samples[1:]), memory_stats(report)
        misses = reduce(Misses.__add__, counts[1:]) if report.slots else None
        if not case.writes or self._engine.device == REFERENCE:
            return Outcome(case, seconds, memory, misses=misses)
        end = case.first + case.tokens  # cells that the last token sees
        read_bytes = [self._engine.step_bytes(cells) for cells in (case.first + 1, end)]
        profile = None
        if self._profiles:
            session.next_logits()  # the last token is read now, in a step that can be repeated
            profile = self._engine.profile(end + 1)
        return Outcome(case, seconds, memory, sum(read_bytes) // 2, profile, misses)

    def _prepare(self, session: Session, case: Case) -> None:
        """Bring session and slots to where a run begins; what is written next reads a token."""
        if case.phase:
            self._engine.empty_slots()
        if case.writes:
            session.append(*self._ids(1))
        if case.unmeasured:
            self._write(session, case.unmeasured)

    def _read(self, session: Session, tokens: int) -> float:
        """Return the seconds of reading a prompt."""
        ids = self._ids(tokens)
        started = time.perf_counter()
        session.extend(ids)
        return time.perf_counter() - started

    def _write(self, session: Session, tokens: int) -> float:
        """Return the seconds of writing tokens, each of which takes one step.

        The first step reads a token that was added before.
        """
        started = time.perf_counter()
        generation = session.generate(
            max_tokens=tokens, sampling=Sampling(temperature=0), ignore_eos=True
        )
        for _ in generation:
            pass
        took = time.perf_counter() - started
        if generation.refusal is not None:
            raise generation.refusal
        if generation.generated != tokens:
            raise AssertionError(f"{generation.generated} of {tokens} tokens: {generation.finish}")
        return took

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._random.choice(self._tokens, count).tolist()
        return ids


def _cases(arguments: Arguments) -> list[Case]:
    """Return what is to be measured, by depth; ConfigError where that is nothing."""
    lists = [
        _numbers(arguments, flag, default)
        for flag, default in (
            ("--n-depth", DEPTH),
            ("--n-prompt", PROMPT),
            ("--n-gen", GENERATED),
        )
    ]
    depths, prompts, generated = lists
    cold, after = (_phase(arguments, flag) for flag in ("--cold", "--steady"))
    cases = [
        Case(writes, tokens, depth)
        for depth in depths
        for writes, counts in ((False, prompts), (True, generated))
        for tokens in counts
        if tokens
    ]
    if cold:
        cases.append(Case(True, cold, 0, "cold"))
    if after:
        steady = [Case(True, tokens, 0, "steady", after) for tokens in generated if tokens]
        if not steady:
            raise ConfigError(
                f"--steady {after}: no tokens to write behind them", hint="-n 128, say"
            )
        cases += steady
    if not cases:
        raise ConfigError("nothing to measure: no prompt and nothing to write", hint="-n 128, say")
    return cases


def _phase(arguments: Arguments, flag: str) -> int:
    """Return a number of tokens, 0 where the flag is not given."""
    tokens = arguments.integer(flag)
    if tokens is None:
        return 0
    if not 1 <= tokens <= _MOST_TOKENS:
        raise ConfigError(f"{flag} {tokens}: not usable", hint="a number of tokens, 1 or more")
    return tokens


def _numbers(arguments: Arguments, flag: str, default: str) -> list[int]:
    """Return the numbers of a list, each once."""
    given = arguments.text(flag)
    text = default if given is None else given
    if not re.fullmatch(r"[0-9]{1,10}(,[0-9]{1,10})*", text, re.ASCII):
        raise ConfigError(f"{flag} {text}: not numbers of tokens", hint=f"give {flag} 0,512")
    numbers = [int(part) for part in text.split(",")]
    if max(numbers) > _MOST_TOKENS:
        raise ConfigError(f"{flag} {text}: too many tokens", hint=f"{_MOST_TOKENS} at most")
    return list(dict.fromkeys(numbers))


def _context(arguments: Arguments, cases: list[Case]) -> int:
    """Return the cells of the K/V: as many as are asked for, or as the longest test needs."""
    longest = max(cases, key=lambda case: case.cells)
    given = options_from(arguments).ctx_size
    if given is not None and given < longest.cells:
        raise ConfigError(
            f"--ctx-size {given}: {longest.name} needs {longest.cells} cells",
            hint=f"give --ctx-size {longest.cells} or more, or leave it out",
        )
    return longest.cells if given is None else given


def _measured(engine: Engine, measure: Callable[[], PlainRead]) -> PlainRead | str:
    """Return how fast the device's memory is read, or copied to, or why that is not known."""
    if engine.device == REFERENCE:
        return "the reference device computes over float32 copies of the weights"
    try:
        return measure()
    except StrataError as error:
        return error.message


def _counted(progress: Progress | None, total: int) -> Callable[[], None]:
    """Return what shows one run more each time that it is called."""
    runs = 0

    def done() -> None:
        nonlocal runs
        runs += 1
        if progress is not None:
            progress(runs, total)

    return done
