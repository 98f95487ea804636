"""Measure the speed of prompts and of decoding beside llama.cpp's, on this machine's CPU.

Usage:
  beside_llama_cpp.py MODEL [options]
  beside_llama_cpp.py --help

Options:
  --prompt=N[,N]       tokens of the prompts [default: 512,2000]
  --context=N[,N]      tokens that lie before a decoding [default: 1,1000]
  --generate=N         tokens that are decoded [default: 128]
  --repeats=N          rounds [default: 5]
  --tries=N            of each of llama.cpp's settings, of which the fastest counts [default: 2]
  --threads=N          of both engines [default: 2]
  --device=NAME        of this project [default: auto]
  --text=FILE          what is read, again and again; default: the one of tests/data/text
  --mib=N              memory read to measure bandwidth, more than the caches hold [default: 256]
  --llama-python=PATH  interpreter of an environment with llama-cpp-python; default: this one
  --name=NAME          the figures go to bench/results/beside_llama_cpp_NAME.json; default: the
                       name of the model

A round measures the plain read of memory, then each case with both engines in turn, so that noise
of the machine meets all alike. Each engine has a process of its own and is idle while the other
one works; how idle is measured as well. llama.cpp runs its bare loop, each case with what was
fastest when all settings were tried at the beginning (its K/V stays float16). This project runs
twice where it decodes: the bare loop over logits, and `session.generate` at temperature 0.

The share of a decoding is the bytes it has to read, per second, over the plain read: the dense
tensors, the experts chosen, and keys and values, counted as float16 for both.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt
from llama_cpp_peer import Case, Peer
from numpy.typing import NDArray

from strata_nb.kernels.host.reading import read_passes

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "tests/data/text/pride_and_prejudice.txt"
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb import Engine, Options, Sampling  # noqa: E402
from strata_nb.gguf import GGUFFile  # noqa: E402
from strata_nb.kernels.host.capability import PATH  # noqa: E402
from strata_nb.models import Description  # noqa: E402

PAUSE_S = 0.2  # before each turn: threads that wait for more work have gone to sleep by then
BARE, GENERATE, LLAMA_CPP = "bare", "generate", "llama.cpp"

Spread = dict[str, float]


class Ours:
    """Measure this project's engine; every case begins with an empty session."""

    def __init__(self, engine: Engine, ids: Sequence[int]) -> None:
        self._engine, self._ids = engine, list(ids)
        self._session = engine.open_session()

    def ways(self, case: Case) -> dict[str, Callable[[Case], float]]:
        """Return the ways to measure a case, by name."""
        return (
            {BARE: self._decode, GENERATE: self._generate} if case.tokens else {BARE: self._prompt}
        )

    def _prompt(self, case: Case) -> float:
        self._session.rewind(0)
        start = time.perf_counter()
        self._session.extend(self._ids[: case.before])
        int(self._session.next_logits().argmax())
        return time.perf_counter() - start

    def _decode(self, case: Case) -> float:
        self._prompt(case)
        start = time.perf_counter()
        for _ in range(case.tokens):
            self._session.extend([int(self._session.next_logits().argmax())])
        return time.perf_counter() - start

    def _generate(self, case: Case) -> float:
        """Measure what users do. The first token comes before the clock: it costs no reading."""
        self._prompt(case)
        generation = self._session.generate(
            max_tokens=case.tokens + 1, sampling=Sampling(temperature=0.0), ignore_eos=True
        )
        next(generation)
        start = time.perf_counter()
        count = sum(1 for _ in generation)
        took = time.perf_counter() - start
        if count != case.tokens:
            raise SystemExit(f"{count} of {case.tokens} tokens generated: {generation.finish}")
        return took


class Idleness:
    """Add up how busy each process was while the other one worked: CPU seconds per second."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._cpu_s = {"ours": 0.0, LLAMA_CPP: 0.0}
        self._wall_s = {"ours": 0.0, LLAMA_CPP: 0.0}

    @contextmanager
    def of_ours(self) -> Iterator[None]:
        """Watch this process."""
        with self._of("ours", time.process_time):
            yield

    @contextmanager
    def of_peer(self) -> Iterator[None]:
        """Watch llama.cpp's process."""
        with self._of(LLAMA_CPP, self._peer.cpu_s):
            yield

    def shares(self) -> dict[str, float]:
        """Return CPU seconds per second."""
        return {name: self._cpu_s[name] / self._wall_s[name] for name in self._cpu_s}

    @contextmanager
    def _of(self, name: str, cpu_s: Callable[[], float]) -> Iterator[None]:
        time.sleep(PAUSE_S)
        before, start = cpu_s(), time.perf_counter()
        yield
        self._wall_s[name] += time.perf_counter() - start
        self._cpu_s[name] += cpu_s() - before


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    model, threads = Path(arguments["MODEL"]), int(arguments["--threads"])
    tokens = int(arguments["--generate"])
    cases = [Case(int(number)) for number in arguments["--prompt"].split(",")]
    cases += [Case(int(number), tokens) for number in arguments["--context"].split(",")]
    # A session that generates also holds the token before the clock.
    cells = max(case.before + case.tokens for case in cases) + 1
    load_average = os.getloadavg()[0]
    options = Options(model, device=arguments["--device"], ctx_size=cells, threads=threads)
    with Engine.open(options) as engine:
        description = engine.description
        if cells > description.context:
            raise SystemExit(
                f"the cases need {cells} cells, the model has a context of {description.context}\n"
                "hint: give smaller --prompt, --context, --generate"
            )
        ids = text_ids(engine, Path(arguments["--text"] or TEXT), cells)
        python = arguments["--llama-python"] or sys.executable
        with closing(Peer(python, model, ids, cells, threads)) as peer:
            peer.tune(cases, int(arguments["--tries"]))
            idleness = Idleness(peer)
            memory = np.ones(int(arguments["--mib"]) << 20, np.uint8)
            measure = partial(run_round, Ours(engine, ids), peer, idleness, cases, memory, threads)
            measure()  # warms up
            rounds = [measure() for _ in range(int(arguments["--repeats"]))]
        device = engine.device
    bandwidth = spread([memory.size / each.read_s for each in rounds])
    rows = []
    for case in cases:
        size_bytes = decode_bytes(model, description, case)
        row = figures(case, [each.case_s[case] for each in rounds], size_bytes, bandwidth["median"])
        row[LLAMA_CPP]["settings"] = peer.contexts[case]
        rows.append(row)
    print(f"load average before: {load_average:.1f}; {len(rounds)} rounds")
    print(table(rows, bandwidth, idleness.shares()))
    write_result(
        f"beside_llama_cpp_{arguments['--name'] or model.stem}",
        "tokens per second of this project (bare loop, session.generate) and of llama.cpp's bare "
        "loop, in turn; ratio: ours over llama.cpp's; share: bytes that a token has to read, per "
        "second, over the plain read of memory, bytes per second",
        command(arguments),
        {
            "model": model.name,
            "device": device,
            "cpu_path": PATH.value,
            "threads": threads,
            "repeats": len(rounds),
            "load_average_before": load_average,
            "plain_read_bytes_per_s": bandwidth,
            "rows": rows,
            "llama_cpp_load": peer.load,
            "llama_cpp_versions": peer.about,
            "busy_while_the_other_worked": idleness.shares(),
        },
        ("numpy", "numba", "llvmlite"),
    )


@dataclass(frozen=True, slots=True)
class Round:
    """Hold the seconds of a round: of the plain read, and of each case by who ran it."""

    read_s: float
    case_s: dict[Case, dict[str, float]]


def run_round(
    ours: Ours,
    peer: Peer,
    idleness: Idleness,
    cases: Sequence[Case],
    memory: NDArray[np.uint8],
    threads: int,
) -> Round:
    """Measure the plain read once, and each case once with each engine."""
    with idleness.of_peer():
        read_s = min(read_passes(memory, threads))
    case_s: dict[Case, dict[str, float]] = {}
    for case in cases:
        row = case_s[case] = {}
        for name, measure in ours.ways(case).items():
            with idleness.of_peer():
                row[name] = measure(case)
        peer.prepare(case)
        with idleness.of_ours():
            row[LLAMA_CPP] = peer.seconds(case)
    return Round(read_s, case_s)


def command(arguments: dict[str, Any]) -> str:
    """Return the command that makes the figures again, without where things lie on this machine."""
    words = ["python bench/beside_llama_cpp.py", Path(arguments["MODEL"]).name]
    for flag, value in arguments.items():
        if flag not in ("MODEL", "--help", "--llama-python") and value is not None:
            words.append(f"{flag}={Path(value).name if flag == '--text' else value}")
    return " ".join(words)


def text_ids(engine: Engine, text: Path, count: int) -> list[int]:
    """Return `count` tokens of a text, which begins again where it is too short."""
    ids = engine.encode(text.read_text(encoding="utf-8"))
    return (ids * -(-count // len(ids)))[:count]


def decode_bytes(model: Path, description: Description, case: Case) -> float:
    """Return the bytes that one token of a decoding has to read, on average; 0 for a prompt.

    Of an embedding that is not also the head one row is read, which is nothing.
    """
    if not case.tokens:
        return 0.0
    size: float = description.dense_bytes
    if not description.tied_head:
        with GGUFFile.open(model) as file:
            size -= file.raw("token_embd.weight").nbytes
    if description.experts:
        size += description.expert_bytes * description.top_k / description.experts
    cells = case.before + (case.tokens + 1) / 2
    return size + cells * description.kv_bytes_per_cell("f16", "f16")


def spread(values: Sequence[float]) -> Spread:
    """Return median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def figures(
    case: Case, rounds: Sequence[dict[str, float]], size_bytes: float, bandwidth: float
) -> dict[str, Any]:
    """Return the figures of a case from seconds by engine, and the bytes that a token reads."""
    result: dict[str, Any] = {"case": case.name}
    if case.tokens:
        result["bytes_per_token"] = size_bytes
    for name in rounds[0]:
        rates = spread([case.measured / seconds[name] for seconds in rounds])
        found = result[name] = {"tokens_per_s": rates}
        if case.tokens:
            found["share"] = rates["median"] * size_bytes / bandwidth
    peer_median = result[LLAMA_CPP]["tokens_per_s"]["median"]
    for name in rounds[0].keys() - {LLAMA_CPP}:
        found = result[name]
        found["ratio_of_medians"] = found["tokens_per_s"]["median"] / peer_median
        found["median_ratio"] = statistics.median(
            seconds[LLAMA_CPP] / seconds[name] for seconds in rounds
        )
    return result


def table(rows: Sequence[dict[str, Any]], bandwidth: Spread, shares: dict[str, float]) -> str:
    """Return the figures for a person."""
    lines = [
        f"plain read {bandwidth['median'] / 1e9:.1f} GB/s "
        f"({bandwidth['min'] / 1e9:.1f}, {bandwidth['max'] / 1e9:.1f}); "
        "busy while the other one worked: "
        + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()),
        "",
        "| case | engine | tokens/s (least, most) | share of read | ratio of medians | of pairs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name in (BARE, GENERATE, LLAMA_CPP):
            if name not in row:
                continue
            found, rates = row[name], row[name]["tokens_per_s"]
            speed = f"{rates['median']:.1f} ({rates['min']:.1f}, {rates['max']:.1f})"
            share = f"{found['share']:.0%}" if "share" in found else ""
            ratios = (
                f"{found['ratio_of_medians']:.3f} | {found['median_ratio']:.3f}"
                if "median_ratio" in found
                else "|"
            )
            lines.append(f"| {row['case']} | {name} | {speed} | {share} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
