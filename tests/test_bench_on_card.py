"""`strata_nb bench` on a card that computes nothing and always draws the same token."""

from __future__ import annotations

import ctypes
import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from card_world import Simulated, failing_card
from console import Console
from cuda_table_of_host import FailingTable, HostTable, Launch
from device_world import TINY, make_tiny

from strata_nb import backend, card_backend
from strata_nb.card_backend import CardBackend
from strata_nb.commands import bench_report
from strata_nb.engine import Engine
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.options import Options

GIB = 1 << 30
DRAWN = 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    make_tiny(path)
    return str(path)


def runner(_: Simulated, kernel: GpuKernel, kinds: Sequence[str]) -> Callable[[Launch], None]:
    """Return what draws a token where a kernel of `sample` is launched, and does nothing else."""
    names = [*signature(kernel.function).parameters]
    layout = "@" + "".join("f" if kind == "float" else "q" for kind in kinds)

    def run(one: Launch) -> None:
        if kernel.name.startswith("sample"):
            words = dict(zip(names, struct.unpack(layout, one.arguments), strict=True))
            ctypes.c_int64.from_address(words["chosen"]).value = DRAWN

    return run


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingTable]:
    """Let `--device cuda` be a card that has memory, streams and graphs, and does not compute."""
    monkeypatch.setattr(Simulated, "_runner", runner)
    monkeypatch.setattr(bench_report, "device_name", lambda device: f"{device}: a card")
    monkeypatch.setattr(card_backend, "REPLAYS", 3)
    with failing_card(budget_bytes=GIB) as (open_card, table):

        def opened(text: str, threads: int, record: Any) -> CardBackend:
            return open_card()

        monkeypatch.setattr(backend, "open_card", opened)
        yield table


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


@pytest.mark.usefixtures("card")
def test_a_profile_of_each_test_that_writes_is_reported(run: Console, tiny: str) -> None:
    words = ["-m", tiny, "--device=cuda", "-p8", "-n4", "-d0,70", "-r1", "--profile", "-ojson"]
    status, out, err = run("bench", *words)
    assert status == 0, err
    found = json.loads(out)
    assert found["device"] == "cuda: a card"
    assert found["plain_read"]["size_bytes"] > GIB // 4
    of = {one["test"]: one for one in found["results"]}
    assert list(of) == ["pp8", "tg4", "pp8 @ d70", "tg4 @ d70"]
    assert of["pp8"]["profile"] is of["pp8 @ d70"]["profile"] is None
    near, far = (of[name]["profile"] for name in ("tg4", "tg4 @ d70"))
    lines = near["lines"]
    assert (lines[0]["launch"], lines[-1]["launch"]) == ("token_embd", "choice")
    assert {line["count"] for line in lines} == {1, TINY.layers}
    assert near["rows"] == 1
    assert near["whole_us"] > 0
    assert near["bytes"] == sum(line["bytes"] for line in near["lines"])
    with Engine.open(Options(tiny, device="host", ctx_size=64)) as engine:
        kv_bytes = {cells: engine.step_bytes(cells) - engine.step_bytes(0) for cells in (5, 75)}
    assert far["bytes"] - near["bytes"] == kv_bytes[75] - kv_bytes[5]
    attention = [line["bytes"] for line in near["lines"] if line["launch"] == "attention"]
    assert sum(attention) == kv_bytes[5]


@pytest.mark.usefixtures("card")
def test_the_launches_of_a_row_read_what_the_description_says(tiny: str) -> None:
    with GGUFFile.open(Path(tiny)) as file:
        vectors = sum(one.size_bytes for one in file.tensors.values() if len(one.shape) == 1)
    with Engine.open(Options(tiny, device="cuda", ctx_size=64)) as engine:
        programs = engine._device()._programs
        launches = [
            one
            for program in (programs.body, programs.head, programs.choice)
            for one in card_launches(program, 1)
        ]
        reads = sum(one.kernel.reads(one.arguments, 1) for one in launches)
        assert reads + vectors == engine.description.row_weight_bytes == engine.step_bytes(0)


@pytest.mark.usefixtures("card")
def test_a_table_of_a_window_follows_that_of_the_tests(run: Console, tiny: str) -> None:
    words = ["-m", tiny, "--device=cuda", "-p0", "-n2", "-r1", "--profile"]
    status, out, err = run("bench", *words)
    assert status == 0, err
    tests, lines, title, window = out.split("\n\n")
    assert re.search(r"\| +tg2 \|", tests)
    assert lines.startswith("plain read: ")
    assert title.startswith("tg2: where the time of a token goes")
    assert window.splitlines()[-1].startswith("| the whole graph ")


@pytest.mark.parametrize("overlap", [True, False])
def test_no_kernel_overlaps_another_where_that_is_asked_for(
    card: FailingTable, run: Console, tiny: str, overlap: bool
) -> None:
    words = ["-m", tiny, "--device=cuda", "-p0", "-n2", "-r1"]
    status, out, err = run("bench", *words, *([] if overlap else ["--no-overlap"]))
    assert status == 0, err
    assert isinstance(card._table, HostTable)
    assert bool(card._table.overlapping) is overlap
    assert ("kernels that overlap (--no-overlap)" in err) is not overlap
    assert "tg2" in out
