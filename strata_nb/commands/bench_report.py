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

if TYPE_CHECKING:
    from strata_nb.card_profile import WindowProfile
    from strata_nb.engine import Engine
    from strata_nb.options import Options
    from strata_nb.plain_read import PlainRead

SCHEMA = 1


class Case(NamedTuple):
    """Say what is measured: whether tokens are written or a prompt is read, how many, behind how
    many others."""

    writes: bool
    tokens: int
    depth: int

    @property
    def name(self) -> str:
        """What llama-bench calls it: "tg128 @ d1024"."""
        behind = f" @ d{self.depth}" if self.depth else ""
        return f"{'tg' if self.writes else 'pp'}{self.tokens}{behind}"

    @property
    def cells(self) -> int:
        """Cells of the K/V that it needs: of what is written, one more is there at the start."""
        return self.depth + self.tokens + self.writes


@dataclass(frozen=True)
class Outcome:
    """Hold what was measured.

    seconds      of each run
    memory       experts and K/V after the last run, `figures.memory_stats`
    read_bytes   that a step reads, on the average of a run; None where that is not known
    profile      where the time of the last step went; None where nobody asked
    """

    case: Case
    seconds: tuple[float, ...]
    memory: dict[str, object]
    read_bytes: int | None = None
    profile: WindowProfile | None = None

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [self.case.tokens / each for each in self.seconds]

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes a second that the median run read."""
        return None if self.read_bytes is None else self.read_bytes * median(self.rates)


@dataclass(frozen=True)
class Run:
    """Hold what a run measured so far, and all that it depends on.

    read   how fast the device's memory was read in the same run, or why that is not known
    """

    about: dict[str, Any]
    read: PlainRead | str
    outcomes: list[Outcome]

    @classmethod
    def of(
        cls,
        engine: Engine,
        options: Options,
        command: str,
        read: PlainRead | str,
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
        return cls(about, read, [])

    def share(self, bytes_per_s: float | None) -> float | None:
        """Return bytes a second as a share of the plain read."""
        if bytes_per_s is None or isinstance(self.read, str):
            return None
        return bytes_per_s / self.read.bytes_per_s


def as_json(run: Run) -> str:
    """Return everything as one JSON object."""
    read: dict[str, Any] = {"not_measured": run.read}
    if not isinstance(run.read, str):
        read = {
            "bytes_per_s": run.read.bytes_per_s,
            "size_bytes": run.read.size_bytes,
            "samples_s": run.read.seconds,
        }
    results = [_result(run, outcome) for outcome in run.outcomes]
    content = {"schema": SCHEMA, **run.about, "plain_read": read, "results": results}
    return json.dumps(content, indent=2, allow_nan=False)


def _result(run: Run, outcome: Outcome) -> dict[str, Any]:
    case, rates = outcome.case, outcome.rates
    return {
        "test": case.name,
        "n_prompt": 0 if case.writes else case.tokens,
        "n_gen": case.tokens if case.writes else 0,
        "n_depth": case.depth,
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
        "memory": outcome.memory,
        "profile": None if outcome.profile is None else _profile(run, outcome.profile),
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
        ]
        for outcome in run.outcomes
    ]
    parts = [_table(head, rows, texts=4), "\n".join([_read_line(run.read), _build_line(about)])]
    for outcome in run.outcomes:
        if outcome.profile is not None:
            parts.append(_profile_table(run, outcome, outcome.profile))
    return "\n\n".join(parts)


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
        f"{outcome.case.name}: where the time of the last token goes; in the median run a token "
        f"took {1e6 / median(outcome.rates):.1f} us"
    )
    return f"{title}\n\n{_table(head, rows, texts=2)}"


def _read_line(read: PlainRead | str) -> str:
    if isinstance(read, str):
        return f"plain read: not measured: {read}"
    rates = [read.size_bytes / each / 1e9 for each in read.seconds]
    return (
        f"plain read: {read.bytes_per_s / 1e9:,.1f} GB/s, the fastest of {len(rates)} over "
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
