"""Measure what changes of memory cost while text is written, and how fast memory comes and goes.

Usage:
  card_memory.py MODEL [options]
  card_memory.py --help

Options:
  --device=TEXT   as --device has it [default: cuda:0]
  --cells=N       of the texts, prompt included [default: 8192]
  --texts=N       that are written with growth and without [default: 3]
  --kv-init=N     cells that a growing K/V begins with [default: 512]
  --limit=GIB     of the device's memory (`--vram-limit`): experts give what the K/V gets
  --give=GIB      of experts that leave, at most all but a slot a layer [default: 14.7]
  --rounds=N      of giving and taking [default: 5]
  -o FILE         write the figures here, not to bench/results/card_memory_MODEL.json

Texts are written greedily, once with a K/V that begins small and grows (`--kv-grow`), once with one
for all cells from the start; their tokens must be the same. A gap is the time between two tokens;
those before the 32nd token do not count. With a limit both have as many slots for experts as fit.

  waits    of a token for a growth, the longest call of `ElasticKV.before_step` in each text
  beside   the longest call of `ElasticKV.when_idle`, which grows while a window runs
  give     `Engine.set_vram_reserve` until so many bytes of experts have left: the call's wall clock
  take     the same back to the reserve of the start; the call returns when experts are back
  parts    of that, in calls of the driver and of the arena, which keeps the tables of experts, and
           the rest: measured in a round of its own, which does not count
  link     what one copy of pinned memory to the device reaches in the same run

A profile ranks every expert, so that slots are full from the start, also within a limit.
Tokens written before, between and after must be the same.
"""

from __future__ import annotations

import hashlib
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench")]

from card_graphs import spread, store  # noqa: E402 - bench/ is no package

from strata_nb import Engine, Options, Sampling  # noqa: E402
from strata_nb.cache.elastic import ElasticKV  # noqa: E402
from strata_nb.cache.profile import rank_by_use, save_profile  # noqa: E402
from strata_nb.gguf import GGUFFile  # noqa: E402
from strata_nb.models import describe  # noqa: E402

PROMPT = 16  # tokens
WARM_UP = 32  # tokens whose gaps do not count
SHORT = 32  # tokens that are written between changes
LONGEST = 5  # gaps that are told with their places
COPIES = 8
COPY_BYTES = 256 << 20
MIB = 1 << 20
# What a change of memory calls: none of these calls another one.
DRIVER_CALLS = (
    "create",
    "release",
    "map",
    "unmap",
    "set_access",
    "copy_async",
    "synchronize",
    "stream_synchronize",
    "mem_info",
)
GROWING_CALLS = ("before_step", "when_idle")
ARENA_CALLS = ("moves_into", "resize", "hottest", "begin_fill")


class Text(NamedTuple):
    """Hold a text: its tokens, seconds between them, and how often the K/V grew meanwhile.

    longest   milliseconds of the longest call that grows the K/V, by name
    """

    ids: list[int]
    gaps: np.ndarray[Any, np.dtype[np.float64]]
    growths: int
    longest: dict[str, float]


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    cells, texts = int(arguments["--cells"]), int(arguments["--texts"])
    limit = int(float(arguments["--limit"]) * 1024 * MIB) if arguments["--limit"] else None
    figures: dict[str, Any] = {"cells": cells}
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        profile = _whole_profile(Path(arguments["MODEL"]), Path(folder))
        for name, grows in (("grown", True), ("whole", False)):
            options = Options(
                arguments["MODEL"],
                arguments["--device"],
                ctx_size=cells,
                kv_grow=grows,
                kv_grow_init=int(arguments["--kv-init"]) if grows else None,
                vram_elastic=grows,
                vram_limit=limit,
                expert_profile=profile,
            )
            with Engine.open(options) as engine:
                write(engine, 2 * SHORT)  # what is slower once does not count
                written = [write(engine, cells - PROMPT) for _ in range(texts)]
                digests |= {_digest(text.ids) for text in written}
                figures[name] = _gap_figures(written)
                print(_gap_line(name, figures[name]), flush=True)
                if grows:
                    figures["link_gb_per_s"] = link_rate(engine)
                    give = int(float(arguments["--give"]) * 1024 * MIB)
                    figures["memory"] = exchange(engine, give, int(arguments["--rounds"]))
                    print_memory(figures["memory"], figures["link_gb_per_s"])
    figures["same_tokens"] = len(digests) == 1
    more = figures["grown"]["longest_ms"]["median"] - figures["whole"]["longest_ms"]["median"]
    print(f"longest gap {more:+.2f} ms with growth; tokens: {len(digests)} different texts")
    store(
        "card_memory",
        "gaps between tokens, with a K/V that grows and without: longest of each text and median; "
        "memory: milliseconds of giving experts' memory away and of taking it back, GB/s of "
        "experts that came",
        arguments,
        figures,
    )
    if not figures["same_tokens"] or not figures["memory"]["same_tokens"]:
        raise SystemExit("the tokens differ")


# -- gaps ------------------------------------------------------------------------------------------


def write(engine: Engine, count: int) -> Text:
    """Write so many tokens greedily behind a short prompt."""
    vocab = engine.description.vocab_size
    ledger, longest = engine._device().ledger, dict.fromkeys(GROWING_CALLS, 0.0)
    with engine.open_session() as session, _longest(longest):
        session.extend(np.random.default_rng(0).integers(0, vocab, PROMPT).tolist())
        growths = ledger.growths
        writing = session.generate(
            max_tokens=count, sampling=Sampling(temperature=0), ignore_eos=True
        )
        ids, times = [], []
        for token in writing:
            times.append(time.perf_counter())
            ids.append(token.id)
    if len(ids) != count:
        raise SystemExit(f"{len(ids)} of {count} tokens: {writing.finish} {writing.refusal or ''}")
    return Text(ids, np.diff(times), ledger.growths - growths, longest)


def _gap_figures(texts: list[Text]) -> dict[str, Any]:
    counted = [text.gaps[WARM_UP:] for text in texts]
    places = [np.argsort(-gaps)[:LONGEST] for gaps in counted]
    return {
        "tokens": len(texts[0].ids),
        "growths": [text.growths for text in texts],
        "longest_ms": spread([float(gaps.max()) for gaps in counted], 1e3),
        "median_ms": spread([float(np.median(gaps)) for gaps in counted], 1e3),
        "waits_ms": spread([text.longest["before_step"] for text in texts]),
        "beside_ms": spread([text.longest["when_idle"] for text in texts]),
        "slowest": [
            [(int(place) + WARM_UP + 1, 1e3 * float(gaps[place])) for place in some]
            for some, gaps in zip(places, counted, strict=True)
        ],
    }


def _gap_line(name: str, figures: dict[str, Any]) -> str:
    longest, median = figures["longest_ms"], figures["median_ms"]
    slowest = ", ".join(f"{ms:.2f} at {place}" for place, ms in figures["slowest"][-1])
    return (
        f"{name}: longest gap {longest['median']:.2f} ms ({longest['least']:.2f} to "
        f"{longest['most']:.2f}, n {longest['n']}), median {median['median']:.3f} ms, growths "
        f"{figures['growths']}, waits {figures['waits_ms']['median']:.2f} ms, beside "
        f"{figures['beside_ms']['median']:.2f} ms; last text: {slowest}"
    )


# -- giving and taking -----------------------------------------------------------------------------


def exchange(engine: Engine, give_bytes: int, rounds: int) -> dict[str, Any]:
    """Give memory of experts away and take it back, some rounds and one that is looked into."""
    expected = _digest(write(engine, SHORT).ids)
    same = True
    measured: list[dict[str, float]] = []
    split: dict[str, dict[str, float]] = {"give": {}, "take": {}}
    for number in range(rounds + 1):
        is_split = number == rounds
        before = engine.describe()
        (device,) = before.devices
        if device.free_bytes is None:
            raise SystemExit(f"{device.name}: memory of the machine is not given away")
        reserve = device.free_bytes + before.bytes_by_owner["spare"] + give_bytes
        with _parts(engine, split["give"] if is_split else None):
            give_s = _seconds(engine, -(-reserve // MIB))
        given = engine.describe()
        same &= _digest(write(engine, SHORT).ids) == expected
        gone = engine.describe()  # and a policy may have exchanged experts
        with _parts(engine, split["take"] if is_split else None):
            take_s = _seconds(engine, None)
        after = engine.describe()
        same &= _digest(write(engine, SHORT).ids) == expected
        if is_split:
            for name, whole_s in (("give", give_s), ("take", take_s)):
                split[name]["rest"] = 1e3 * whole_s - sum(split[name].values())
            break
        came_bytes = _resident_bytes(engine, after.resident) - _resident_bytes(
            engine, gone.resident
        )
        measured.append(
            {
                "give_ms": 1e3 * give_s,
                "take_ms": 1e3 * take_s,
                "given_bytes": before.bytes_by_owner["experts"] - given.bytes_by_owner["experts"],
                "resident_before": before.resident,
                "resident_between": gone.resident,
                "resident_after": after.resident,
                "came_bytes": came_bytes,
                "gb_per_s": came_bytes / take_s / 1e9,
            }
        )
    return {
        "give_ms": spread([one["give_ms"] for one in measured]),
        "take_ms": spread([one["take_ms"] for one in measured]),
        "gb_per_s": spread([one["gb_per_s"] for one in measured]),
        "given_bytes": statistics.median(one["given_bytes"] for one in measured),
        "all_came_back": all(one["resident_after"] == one["resident_before"] for one in measured),
        "same_tokens": same,
        "parts_ms": split,
        "rounds": measured,
    }


@contextmanager
def _longest(took: dict[str, float]) -> Iterator[None]:
    """Note in `took` the milliseconds of the longest call that grows the K/V, by name."""
    with ExitStack() as patches:
        for name in took:
            function = _noting(getattr(ElasticKV, name), name, took, max)
            patches.enter_context(mock.patch.object(ElasticKV, name, function))
        yield


def _seconds(engine: Engine, reserve_mib: int | None) -> float:
    start = time.perf_counter()
    engine.set_vram_reserve(reserve_mib)
    return time.perf_counter() - start


def _resident_bytes(engine: Engine, resident: int) -> float:
    """Return the bytes of so many experts, of the average size."""
    layout = engine._device().arena.layout
    return resident * sum(layout.blob_bytes) / max(1, layout.layers)


@contextmanager
def _parts(engine: Engine, took: dict[str, float] | None) -> Iterator[None]:
    """Add up in `took` the milliseconds that parts of a change take; None: do nothing."""
    model = engine._device()
    with ExitStack() as patches:
        if took is not None:
            for owner, names in ((model._backend.driver, DRIVER_CALLS), (model.arena, ARENA_CALLS)):
                for name in names:
                    function = _noting(getattr(type(owner), name), name, took, operator.add)
                    patches.enter_context(mock.patch.object(type(owner), name, function))
        yield


def _noting(
    function: Callable[..., Any],
    name: str,
    took: dict[str, float],
    join: Callable[[float, float], float],
) -> Any:
    """Return a function that also joins its milliseconds with those in `took`."""

    @wraps(function)
    def timed(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            took[name] = join(took.get(name, 0.0), 1e3 * (time.perf_counter() - start))

    return timed


def link_rate(engine: Engine) -> float:
    """Return the GB/s of one large copy from pinned memory to the device."""
    backend = engine._device()._backend
    driver, device = backend.driver, backend.device
    free_bytes, _ = driver.mem_info(device)
    size = min(COPY_BYTES, free_bytes // 2)
    with ExitStack() as made:
        source = driver.allocate_host(size)
        made.callback(driver.free_host, source)
        target = driver.allocate(size, device)
        made.callback(driver.free, target)
        stream = driver.stream_create(device)
        made.callback(driver.stream_destroy, stream)
        seconds = []
        for _ in range(COPIES):
            start = time.perf_counter()
            driver.copy_async(target, source, size, stream)
            driver.stream_synchronize(stream)
            seconds.append(time.perf_counter() - start)
    return size / min(seconds) / 1e9


def print_memory(figures: dict[str, Any], link: float) -> None:
    """Print giving and taking, a line each, with its parts."""
    rate = figures["gb_per_s"]["median"]
    for name in ("give", "take"):
        ms, calls = figures[f"{name}_ms"], figures["parts_ms"][name]
        parts = ", ".join(f"{call} {took:.1f}" for call, took in calls.items())
        print(
            f"{name}: {ms['median']:.1f} ms ({ms['least']:.1f} to {ms['most']:.1f}, n {ms['n']}); "
            f"a round of {sum(calls.values()):.1f} ms: {parts}"
        )
    print(
        f"{figures['given_bytes'] / 2**30:.2f} GiB of experts left; they came back at {rate:.1f} "
        f"GB/s, the link has {link:.1f}; all of them: {figures['all_came_back']}; same tokens: "
        f"{figures['same_tokens']}"
    )


def _whole_profile(model: Path, folder: Path) -> str | None:
    """Write a profile that ranks every expert of the model; None where it has none."""
    with GGUFFile.open(model) as file:
        description = describe(file)
    if not description.experts:
        return None
    path = folder / "whole.profile"
    save_profile(path, rank_by_use(np.zeros((description.layers, description.experts), np.int64)))
    return str(path)


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest()


if __name__ == "__main__":
    main()
