"""What `strata_nb bench` measured: as tables for people, as JSON for programs.

Rates are those of llama-bench: mean and standard deviation of the rates of all runs. Names in JSON
are llama-bench's where it has the same figure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import strata_nb
from strata_nb.commands.provenance import commit, device_name, machine, versions
from strata_nb.models.description import bytes_text
from strata_nb.plain_read import PlainRead

if TYPE_CHECKING:
    from strata_nb.card_profile import WindowProfile
    from strata_nb.commands.bench_misses import Misses
    from strata_nb.engine import Engine
    from strata_nb.options import Options

SCHEMA = 1


class Case(NamedTuple):
    """Say what is measured: whether tokens are written or a prompt is read, how many, behind how
    many others.

    phase        "cold" and "steady" begin with empty slots; "" takes them as they are
    unmeasured   tokens that are written before those that count
    """

    writes: bool
    tokens: int
    depth: int
    phase: str = ""
    unmeasured: int = 0

    @property
    def name(self) -> str:
        """What llama-bench calls it, "tg128 @ d1024", and the phase: "tg64 cold"."""
        behind = f" @ d{self.depth}" if self.depth else ""
        phase = f" {self.phase}" if self.phase else ""
        return f"{'tg' if self.writes else 'pp'}{self.tokens}{behind}{phase}"

    @property
    def first(self) -> int:
        """Cells that are there before what counts."""
        return self.depth + self.unmeasured

    @property
    def cells(self) -> int:
        """Cells of the K/V that it needs: of what is written, one more is there at the start."""
        return self.first + self.tokens + self.writes


@dataclass(frozen=True)
class Outcome:
    """Hold what was measured.

    seconds      of each run
    memory       experts and K/V after the last run, `figures.memory_stats`
    read_bytes   that a step reads, on the average of a run; None where that is not known
    profile      where the time of a step behind it goes; None where nobody asked
    misses       of all runs; None where there are no slots
    """

    case: Case
    seconds: tuple[float, ...]
    memory: dict[str, object]
    read_bytes: int | None = None
    profile: WindowProfile | None = None
    misses: Misses | None = None

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [self.case.tokens / each for each in self.seconds]

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes a second that the median run read."""
        return None if self.read_bytes is None else self.read_bytes * median(self.rates)


class LinkUse(NamedTuple):
    """Hold what the median run of a test made of the link; None is not known.

    share            of the rate at which pinned memory is copied
    share_of_limit   of the tokens a second that there could be if a token took what reading all of
                     its bytes from the device's memory takes, and on top what reading those that
                     were missed over the link takes
    """

    bytes_per_s: float
    share: float | None
    share_of_limit: float | None


@dataclass(frozen=True)
class Run:
    """Hold what a run measured so far, and all that it depends on.

    read   how fast the device's memory was read in the same run, or why that is not known
    link   how fast pinned memory was copied there, likewise; None for a device without slots
    """

    about: dict[str, Any]
    read: PlainRead | str
    outcomes: list[Outcome]
    link: PlainRead | str | None = None

    @classmethod
    def of(
        cls,
        engine: Engine,
        options: Options,
        command: str,
        read: PlainRead | str,
        link: PlainRead | str | None,
    ) -> Run:
        """Take down what the figures depend on."""
        model = engine.description
        packages = ["numpy", "numba", "llvmlite"]
        if engine.device.startswith("cuda"):
            packages.append("numba-cuda")
        about = {
            "command": command,
            **commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
            "device": device_name(engine.device),
            "versions": {"strata_nb": strata_nb.__version__, **versions(packages)},
            "model": model.name or options.model_path().stem,
            "model_file": options.model_path().name,
            "model_size": model.dense_bytes + model.expert_bytes,
            "model_n_params": model.parameters,
            "threads": engine.threads,
            "ctx_size": engine.ctx_size,
            "options": _plain(asdict(options)),
            "load_s": engine.load_s,
        }
        return cls(about, read, [], link)

    def share(self, bytes_per_s: float | None) -> float | None:
        """Return bytes a second as a share of the plain read."""
        if bytes_per_s is None or isinstance(self.read, str):
            return None
        return bytes_per_s / self.read.bytes_per_s

    def link_use(self, outcome: Outcome) -> LinkUse | None:
        """Return what a test made of the link; None for a device without slots."""
        if outcome.misses is None:
            return None
        per_s = outcome.misses.link_bytes_per_token * median(outcome.rates)
        if not isinstance(self.link, PlainRead):
            return LinkUse(per_s, None, None)
        share_of_limit = None
        if outcome.read_bytes is not None and isinstance(self.read, PlainRead):
            resident_s = outcome.read_bytes / self.read.bytes_per_s
            limit_s = outcome.misses.limit_s(resident_s, self.link.bytes_per_s)
            share_of_limit = limit_s * median(outcome.rates)
        return LinkUse(per_s, per_s / self.link.bytes_per_s, share_of_limit)


def as_json(run: Run) -> str:
    """Return everything as one JSON object."""
    results = [_result(run, outcome) for outcome in run.outcomes]
    content = {"schema": SCHEMA, **run.about, "plain_read": _rate(run.read)}
    content |= {"link": None if run.link is None else _rate(run.link), "results": results}
    return json.dumps(content, indent=2, allow_nan=False)


def _rate(read: PlainRead | str) -> dict[str, Any]:
    if isinstance(read, str):
        return {"not_measured": read}
    return {
        "bytes_per_s": read.bytes_per_s,
        "size_bytes": read.size_bytes,
        "samples_s": read.seconds,
    }


def _result(run: Run, outcome: Outcome) -> dict[str, Any]:
    case, rates = outcome.case, outcome.rates
    return {
        "test": case.name,
        "n_prompt": 0 if case.writes else case.tokens,
        "n_gen": case.tokens if case.writes else 0,
        "n_depth": case.depth,
        "phase": case.phase or None,
        "n_unmeasured": case.unmeasured,
        "avg_ts": fmean(rates),
        "stddev_ts": _deviation(rates),
        "median_ts": median(rates),
        "min_ts": min(rates),
        "max_ts": max(rates),
        "samples_ts": rates,
        "samples_ns": [round(1e9 * each) for each in outcome.seconds],
        "bytes_per_token": outcome.read_bytes,
        "bytes_per_s": outcome.bytes_per_s,
        "share_of_plain_read": run.share(outcome.bytes_per_s),
        "misses": _misses(run, outcome),
        "memory": outcome.memory,
        "profile": None if outcome.profile is None else _profile(run, outcome.profile),
    }


def _misses(run: Run, outcome: Outcome) -> dict[str, Any] | None:
    misses, use = outcome.misses, run.link_use(outcome)
    if misses is None or use is None:
        return None
    return {
        **asdict(misses),
        "hit_rate": misses.hit_rate,
        "link_bytes_per_token": misses.link_bytes_per_token,
        "link_bytes_per_s": use.bytes_per_s,
        "share_of_link": use.share,
        "share_of_limit": use.share_of_limit,
    }


def _profile(run: Run, profile: WindowProfile) -> dict[str, Any]:
    lines = []
    for line in profile.lines:
        rate = line.read_bytes / line.seconds if line.seconds > 0 else None
        lines.append(
            {
                "launch": line.kind.label,
                "kernel": line.kind.kernel,
                "count": line.count,
                "measured": line.measured,
                "us": 1e6 * line.seconds,
                "bytes": line.read_bytes,
                "bytes_per_s": rate,
                "share_of_plain_read": run.share(rate),
            }
        )
    return {
        "rows": profile.rows,
        "lines": lines,
        "sum_us": 1e6 * profile.sum_s,
        "whole_us": 1e6 * profile.whole_s,
        "bytes": profile.read_bytes,
    }


def as_tables(run: Run) -> str:
    """Return tables in Markdown: one of the tests, then one for each window that was looked into.

    GB are 10^9 bytes.
    """
    about = run.about
    head = ["model", "size", "params", "device", "threads", "test", "t/s"]
    head += ["median", "MB/token", "GB/s", "of plain read"]
    with_slots = any(outcome.misses is not None for outcome in run.outcomes)
    if with_slots:
        head += ["hits", "link MB/token", "of link", "of limit"]
    rows = [
        [
            about["model"],
            bytes_text(about["model_size"]),
            _parameters(about["model_n_params"]),
            about["device"],
            str(about["threads"]),
            outcome.case.name,
            f"{fmean(outcome.rates):.2f} ± {_deviation(outcome.rates):.2f}",
            f"{median(outcome.rates):.2f}",
            _scaled(outcome.read_bytes, 1e6),
            _scaled(outcome.bytes_per_s, 1e9),
            _percent(run.share(outcome.bytes_per_s)),
            *(_link_cells(run, outcome) if with_slots else []),
        ]
        for outcome in run.outcomes
    ]
    lines = [*_unusual(about["options"]), _read_line("plain read", run.read)]
    if run.link is not None:
        lines.append(_read_line("link", run.link))
    parts = [_table(head, rows, texts=4), "\n".join([*lines, _build_line(about)])]
    for outcome in run.outcomes:
        if outcome.profile is not None:
            parts.append(_profile_table(run, outcome, outcome.profile))
    return "\n\n".join(parts)


def _link_cells(run: Run, outcome: Outcome) -> list[str]:
    misses, use = outcome.misses, run.link_use(outcome)
    if misses is None or use is None:
        return ["", "", "", ""]
    return [
        _percent(misses.hit_rate),
        _scaled(misses.link_bytes_per_token, 1e6),
        _percent(use.share),
        _percent(use.share_of_limit),
    ]


def _profile_table(run: Run, outcome: Outcome, profile: WindowProfile) -> str:
    def row(name: str, kernel: str, count: str, seconds: float, size: int) -> list[str]:
        rate = size / seconds if size and seconds > 0 else None
        share = f"{seconds / profile.whole_s:.1%}"
        read = _scaled(size or None, 1e6)
        figures = [f"{1e6 * seconds:.1f}", share, read, _scaled(rate, 1e9)]
        return [name, kernel, count, *figures, _percent(run.share(rate))]

    head = ["launch", "kernel", "count", "us", "of the time", "MB", "GB/s", "of plain read"]
    rows = [
        row(line.kind.label, line.kind.kernel, str(line.count), line.seconds, line.read_bytes)
        for line in profile.lines
    ]
    count = str(sum(line.count for line in profile.lines))
    rows.append(row("sum of the lines", "", count, profile.sum_s, profile.read_bytes))
    rows.append(row("the whole graph", "", count, profile.whole_s, profile.read_bytes))
    title = (
        f"{outcome.case.name}: where the time of a token goes; in the median run a token "
        f"took {1e6 / median(outcome.rates):.1f} us"
    )
    return f"{title}\n\n{_table(head, rows, texts=2)}"


def _unusual(options: dict[str, Any]) -> list[str]:
    """Return lines on options without which the figures would be others."""
    lines = []
    if options["force_routes"] is not None:
        lines.append(f"routes: {options['force_routes']}, in place of what the routers choose")
    if not options["overlap"]:
        lines.append("off: kernels that overlap (--no-overlap)")
    return lines


def _read_line(name: str, read: PlainRead | str) -> str:
    if isinstance(read, str):
        return f"{name}: not measured: {read}"
    rates = [read.size_bytes / each / 1e9 for each in read.seconds]
    return (
        f"{name}: {read.bytes_per_s / 1e9:,.1f} GB/s, the fastest of {len(rates)} over "
        f"{bytes_text(read.size_bytes)} (median {median(rates):,.1f}, least {min(rates):,.1f})"
    )


def _build_line(about: dict[str, Any]) -> str:
    commit_text = about["commit"][:12] if about["commit"] else "unknown commit"
    changed = ", with changes" if about["clean_tree"] is False else ""
    return f"build: strata_nb {about['versions']['strata_nb']}, {commit_text}{changed}"


def _table(head: list[str], rows: list[list[str]], *, texts: int) -> str:
    """Return a Markdown table that is also aligned as text; the first columns are `texts`."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if number < texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rules = ["-" * width for width in widths[:texts]]
    rules += ["-" * (width - 1) + ":" for width in widths[texts:]]
    return "\n".join([line(head), line(rules), *map(line, rows)])


def _deviation(rates: Sequence[float]) -> float:
    return stdev(rates) if len(rates) > 1 else 0.0


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**9 else f"{count / 1e6:.2f} M"


def _scaled(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as JSON has them: paths as text."""
    kinds = (str, int, float, bool, type(None))
    return {key: one if isinstance(one, kinds) else str(one) for key, one in options.items()}
