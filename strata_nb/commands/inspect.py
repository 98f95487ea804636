"""`strata_nb inspect`: what a trace says, whether it breaks a rule, and a page to look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from strata_nb.commands.arguments import Arguments
from strata_nb.commands.output_files import output_file
from strata_nb.commands.terminal import note, one_line
from strata_nb.errors import ConfigError
from strata_nb.models.description import bytes_text
from strata_nb.trace_checker import MOST_SHOWN, TITLES, Violation, check_trace
from strata_nb.trace_page import trace_page
from strata_nb.trace_reader import Trace, read_trace
from strata_nb.whole_files import whole_file

SHOWN = 10  # broken rules that are printed: one mistake often breaks a rule many times


def run(arguments: Arguments) -> int:
    """Run the command; returns 1 where a rule is broken, and 0 otherwise."""
    name = arguments.path("FILE")
    if name is None:
        raise ConfigError("inspect needs one file", hint="strata_nb inspect FILE")
    page = output_file(arguments, "--html")
    try:
        trace = read_trace(name)
    except OSError as error:
        raise ConfigError(
            f"{name}: {error.strerror}", hint="check the name and the permissions"
        ) from error
    violations = check_trace(trace)
    lines = [*trace_lines(trace), *verdict_lines(trace, violations)]
    print("\n".join(map(one_line, lines)), flush=True)  # before what stderr says of the page
    if page is not None:
        with whole_file(page) as stream:
            stream.write(trace_page(trace, Path(name).name).encode())
        note(f"wrote {page}: open it in a browser")
    return 1 if violations else 0


def trace_lines(trace: Trace) -> Iterator[str]:
    """Yield what is in a trace."""
    lines = trace.lines
    took_s = lines[-1].t_us / 1e6 if lines else 0.0
    end = "" if trace.whole else ", cut off: it has no end"
    yield f"trace         {trace.device}, {len(lines) + 1:,} lines, {took_s:.2f} s{end}"
    for number, device in enumerate(trace.devices):
        created = [line for line in lines if line.kind == "create" and line.ok]
        sizes = [line["size"] for line in created if line["device"] == number]
        chunks = f": {len(sizes):,} chunks of {bytes_text(sizes[0])} created" if sizes else ""
        yield f"device {number}      {device.name}, {bytes_text(device.memory_bytes)}{chunks}"
    yield f"calls         {_counts(Counter(line.kind for line in lines if line.ok))}"
    failed = Counter(
        f"{line.kind} ({line.outcome})"
        for line in lines
        if line.outcome is not None and not line.ok
    )
    if failed:
        yield f"failed        {_counts(failed)}"
    yield f"events        {_counts(Counter(line.kind for line in lines if line.outcome is None))}"
    steps = [line for line in lines if line.kind == "step"]
    if steps:
        last = steps[-1]
        used = max(line["kv_cells"] - line["free_cells"] for line in steps)
        yield f"K/V           {used:,} of {last['kv_cells']:,} cells held at most, in blocks of 64"
        choices = last["hits"] + last["misses"]
        if last["slots"] and choices:
            yield (
                f"experts       {last['resident']:,} in {last['slots']:,} slots, "
                f"{last['hits'] / choices:.1%} of {choices:,} choices were hits"
            )


def verdict_lines(trace: Trace, violations: list[Violation]) -> Iterator[str]:
    """Yield which rules were broken."""
    if not violations:
        yield f"rules         none of {len(TITLES)} broken"
        return
    more = " or more" if len(violations) == MOST_SHOWN else ""
    yield f"rules         broken {len(violations)} times{more}"
    yield from map(str, violations[:SHOWN])
    if len(violations) > SHOWN:
        yield f"and {len(violations) - SHOWN}{more}: --html FILE shows them"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common()) or "none"
