"""`inspect`: what it says of a trace, its status, and the page."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from console import Console

from strata_nb.trace_checker import Checker
from strata_nb.trace_page import ABSENT, NO_ACCESS, SPARE, page_data, trace_page
from strata_nb.trace_reader import read_trace

DEVICE = "host:2x16MiB@64KiB"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


@pytest.fixture
def trace_file(run: Console, tiny: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run <b>.jsonl"
    words = [
        "-m",
        str(tiny),
        "--device",
        DEVICE,
        "-c",
        "128",
        "-n",
        "5",
        "--temp",
        "0",
        "--ignore-eos",
    ]
    status, _, err = run("generate", *words, "--trace", str(path), "ab")
    assert status == 0, err
    return path


def damage(path: Path) -> int:
    """Take a retirement out of a trace; returns the number of the unmap behind it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = next(n for n, line in enumerate(lines) if line.get("kind") == "retire")
    del lines[at]
    lines[-1]["lines"] -= 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return next(n for n, line in enumerate(lines) if line.get("kind") == "unmap") + 1


def test_a_good_trace_is_summed_up_and_the_status_is_0(run: Console, trace_file: Path) -> None:
    status, out, err = run("inspect", str(trace_file))
    assert (status, err) == (0, "")
    words = [line.split()[0] for line in out.splitlines()]
    assert words == ["trace", "device", "device", "calls", "events", "K/V", "experts", "rules"]
    assert "none of 16 broken" in out
    assert re.search(r"host device 0, 16\.0 MiB: \d+ chunks of 64\.0 KiB created", out)
    assert "64 of 128 cells" in out
    assert re.search(r"experts +\d in 6 slots, [\d.]+% of \d+ choices were hits", out)


def test_a_broken_rule_is_named_with_its_line_and_the_status_is_1(
    run: Console, trace_file: Path, tmp_path: Path
) -> None:
    line = damage(trace_file)
    status, out, _ = run("inspect", str(trace_file), "--html", str(tmp_path / "out.html"))
    assert status == 1
    assert f"rule 7 (publish less, drain, unmap), line {line}: unmapped chunk" in out
    assert f"line {line}: unmapped" in (tmp_path / "out.html").read_text()


def test_a_trace_that_was_cut_off_is_said_to_be(run: Console, trace_file: Path) -> None:
    trace_file.write_bytes(trace_file.read_bytes()[:-3])
    status, out, _ = run("inspect", str(trace_file))
    assert status == 0
    assert "cut off" in out


def test_what_a_file_names_moves_no_cursor(run: Console, trace_file: Path) -> None:
    lines = [json.loads(line) for line in trace_file.read_text().splitlines()]
    lines[0]["device"] = lines[0]["devices"][0]["name"] = "\x1b[2J"
    lines[1:] = [{"t_us": 1, "kind": "\r", "outcome": "\x1b"}, {"t_us": 2, "kind": "\x07"}]
    trace_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, _ = run("inspect", str(trace_file))
    assert status == 0
    assert all(line.isprintable() for line in out.splitlines())
    assert r"\x1b[2J" in out


def test_files_that_cannot_be_used_are_refused(
    run: Console, trace_file: Path, tmp_path: Path, tiny: Path
) -> None:
    for words, message in (
        ([], "inspect needs one file"),
        ([str(tmp_path / "missing")], "No such file"),
        ([str(tiny)], "line 1 is not JSON"),
        ([str(trace_file), "--html", str(trace_file)], "names the same file"),
        ([str(trace_file), "--html", str(tmp_path / "none" / "x")], "cannot be written"),
    ):
        status, out, err = run("inspect", *words)
        assert (status, out) == (2, "")
        assert message in err


def test_the_page_is_one_file_that_loads_nothing_and_holds_the_trace(trace_file: Path) -> None:
    page = trace_page(read_trace(trace_file), trace_file.name)
    template = files("strata_nb").joinpath("trace_page.html").read_text()
    assert not re.search(r"https?:|\bsrc=|@import|url\(|fetch\(|<link", template)
    held = re.search(r'<script id="trace" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert held is not None
    data = json.loads(held[1])
    assert data["name"] == "run <b>.jsonl"
    assert "<b>" not in page
    assert len(data["lines"]["text"]) == len(read_trace(trace_file).lines)


def test_the_states_of_chunks_have_the_same_numbers_in_the_page() -> None:
    template = files("strata_nb").joinpath("trace_page.html").read_text()
    import strata_nb.trace_page as code

    found = re.search(r"const (ABSENT = \d.*?);", template)
    assert found is not None
    for name, number in re.findall(r"(\w+) = (\d)", found[1]):
        assert getattr(code, name) == int(number)


def test_going_through_the_steps_gives_what_the_trace_says_at_every_line(trace_file: Path) -> None:
    trace = read_trace(trace_file)
    data = json.loads(json.dumps(page_data(trace, "x")))
    steps, checker = data["steps"], Checker(trace)
    chunks: dict[tuple[int, int], dict[str, Any]] = {}
    at = 0
    for index, line in enumerate(trace.lines):
        checker.check(line)
        while at < len(steps["line"]) and steps["line"][at] <= index:
            step = {name: column[at] for name, column in steps.items()}
            chunks[step["device"], step["place"]] = step
            at += 1
        shown = {step["handle"]: step for step in chunks.values() if step["state"] != ABSENT}
        memory = checker.memory
        assert shown.keys() == memory.chunks.keys()
        for handle, chunk in memory.chunks.items():
            step = shown[handle]
            assert (step["state"] == SPARE) == (chunk.address is None)
            if chunk.address is not None:
                found = memory.reservation(chunk.address)
                assert found is not None
                assert data["lanes"][step["lane"]]["owner"] == found.owner
                assert found.address + step["position"] * chunk.size == chunk.address
                usable = bool(found.mappings[chunk.address].devices)
                assert (step["state"] == NO_ACCESS) == (not usable)
    assert at == len(steps["line"])


def test_numbers_at_the_end_are_those_of_an_empty_device(trace_file: Path) -> None:
    data = page_data(read_trace(trace_file), "x")
    for owner in ("kv", "experts", "spare", "weights", "buffers"):
        indices, values = data["series"][f"0.{owner}"]
        assert max(values) > 0
        assert values[-1] == 0
        assert indices == sorted(indices)
    assert data["groups"][-1] == len(data["lines"]["t"]) - 1
    kinds = [data["kinds"][kind] for kind in data["lines"]["kind"]]
    assert {n for n, kind in enumerate(kinds) if kind == "step"} <= set(data["groups"])
    assert [kinds[n] for n in data["groups"]].count("fill") <= kinds.count("step")
