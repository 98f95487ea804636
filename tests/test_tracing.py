"""Recording: nothing changes but that lines are written, and a trace never ends a run."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from device_world import load, random_tokens, read, same_bits
from driver_contract import DriverCase, ExecutionContract, MemoryContract, RangeContract

from strata_nb import Engine, Options
from strata_nb.backend import HostBackend
from strata_nb.errors import ConfigError, DriverError, RuleViolation
from strata_nb.host import HostDriver, parse_host_devices
from strata_nb.host_memory import HostDevice
from strata_nb.tracing import FORMAT, VERSION, Recorder, RecordingDriver

KIB, MIB = 1 << 10, 1 << 20
UNIT = 64 * KIB
DEVICE = "host:1x16MiB@512KiB"
UNRECORDED = {"granularity", "device_facts"}  # facts, which the first line has


@pytest.fixture
def case(tmp_path: Path) -> Iterator[DriverCase]:
    host = HostDriver([HostDevice(4 * MIB, UNIT, UNIT)] * 3, paths=[(1, 0), (0, 1)])
    with closing(Recorder(tmp_path / "trace", say=print)) as recorder:
        driver = RecordingDriver(host, recorder)
        yield DriverCase(driver, UNIT, (RuleViolation,), with_path=(1, 0), without_path=(2, 0))
        assert host.live() == {}
        driver.close()


class TestMemory(MemoryContract):
    pass


class TestExecution(ExecutionContract):
    pass


class TestRanges(RangeContract):
    pass


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_call_of_a_model_is_a_line_and_its_results_are_the_same(
    tiny: Path, tmp_path: Path
) -> None:
    ids = random_tokens(9)
    with closing(HostBackend(DEVICE, 2)) as plain, closing(load(plain, tiny, ctx=64, rows=16)) as m:
        exact = read(m, m.open_sequence(), ids)
    with (
        closing(Recorder(tmp_path / "trace", say=print)) as recorder,
        closing(HostBackend(DEVICE, 2, recorder)) as backend,
    ):
        with closing(load(backend, tiny, ctx=64, rows=16)) as model:
            assert same_bits(read(model, model.open_sequence(), ids), exact)
        calls = Counter(backend.driver.driver.faults.calls)
    header, *lines = lines_of(tmp_path / "trace")
    assert (header["format"], header["version"]) == (FORMAT, VERSION)
    assert header["devices"][0]["memory_bytes"] == 16 * MIB
    recorded = Counter(line["kind"] for line in lines if "outcome" in line)
    notes = {"retire", "reinstate"}  # of which the driver keeps no count
    assert {kind: n for kind, n in recorded.items() if kind not in notes} == {
        kind: n for kind, n in calls.items() if kind not in UNRECORDED
    }
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["lines"] == len(lines) + 1


def test_an_error_of_the_driver_passes_and_stands_in_the_trace(tmp_path: Path) -> None:
    host = HostDriver(parse_host_devices(DEVICE))
    with closing(host), closing(Recorder(tmp_path / "trace", say=print)) as recorder:
        host.faults.plan("reserve")
        with pytest.raises(DriverError, match="on request") as refused:
            RecordingDriver(host, recorder).reserve(UNIT)
    line, _ = lines_of(tmp_path / "trace")
    assert line["outcome"] == "DriverError"
    assert line["message"] == str(refused.value)
    assert "result" not in line


@pytest.mark.parametrize("moment", ["in the call", "while its line is written"])
def test_a_call_that_ctrl_c_came_into_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    host = HostDriver(parse_host_devices(DEVICE))
    with closing(host), closing(Recorder(tmp_path / "trace", say=print)) as recorder:
        where, name = (host, "reserve") if moment == "in the call" else (recorder, "call")
        whole = getattr(where, name)

        @wraps(whole)
        def interrupted(*arguments: object) -> object:
            if where is recorder:
                signal.raise_signal(signal.SIGINT)
            result = whole(*arguments)
            signal.raise_signal(signal.SIGINT)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                RecordingDriver(host, recorder).reserve(UNIT)
        assert host.live() == {"reservations": 1}
        line, *_ = lines_of(tmp_path / "trace")
        assert (line["kind"], line["outcome"]) == ("reserve", "ok")
        RecordingDriver(host, recorder).address_free(line["result"], UNIT)


def test_a_line_says_whose_memory_it_is_about(tmp_path: Path) -> None:
    host = HostDriver(parse_host_devices("host:2x16MiB"))
    with closing(host), closing(Recorder(tmp_path / "trace", say=print)) as recorder:
        driver = RecordingDriver(host, recorder)
        driver.synchronize(1)
        base, handle = driver.reserve(2 * UNIT), driver.create(UNIT, 1)
        recorder.announce(
            {"kind": "range", "owner": "kv", "device": 1, "address": base, "size": 2 * UNIT}
        )
        driver.map(base + UNIT, UNIT, handle)
        driver.unmap(base + UNIT, UNIT)
        driver.release(handle)
        driver.address_free(base, 2 * UNIT)
    *_, mapped, unmapped, released, freed, _ = lines_of(tmp_path / "trace")
    for line in (mapped, unmapped, freed):
        assert (line["device"], line["owner"]) == (1, "kv")
    assert released["device"] == 1


def test_events_are_mappings_or_dataclasses_of_any_kind(tmp_path: Path) -> None:
    @dataclass
    class Growth:
        cells: int
        hits: np.int64

    with closing(Recorder(tmp_path / "trace", say=print)) as recorder:
        recorder.announce(Growth(64, np.int64(3)))
        recorder.announce({"kind": "anything", "text": "ü", "numbers": (1, 2)})
    first, second, _ = lines_of(tmp_path / "trace")
    assert (first["kind"], first["cells"], first["hits"]) == ("growth", 64, 3)
    assert (second["kind"], second["text"], second["numbers"]) == ("anything", "ü", [1, 2])


def test_a_full_disk_ends_the_trace_with_one_line_and_nothing_else(
    tiny: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    options = Options(tiny, device=DEVICE, ctx_size=64, trace="/dev/full")
    with Engine.open(options, say=said.append) as engine:
        assert len(list(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True))) == 3
    warnings = [line for line in said if "trace" in line]
    assert len(warnings) == 1
    assert "/dev/full ends behind line 0: No space left" in warnings[0]


@pytest.mark.parametrize("first", ["begin", "announce", "call", "close"])
def test_who_is_told_of_a_full_disk_may_announce_events(first: str) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        recorder.announce({"kind": "sequence", "sequence": 0, "state": "open"})

    recorder = Recorder("/dev/full", say=say)
    host = HostDriver([HostDevice(4 * MIB, UNIT, UNIT)])
    write = {
        "begin": lambda: recorder.begin(DEVICE, host),
        "announce": lambda: recorder.announce({"kind": "sequence"}),
        "call": lambda: recorder.call("synchronize", {"device": 0}, 0, {"outcome": "ok"}),
        "close": recorder.close,
    }
    thread = Thread(target=write[first], daemon=True)  # which a test can leave behind
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert len(said) == 1
    host.close()


def test_a_device_without_memory_of_its_own_is_not_recorded(tiny: Path, tmp_path: Path) -> None:
    for device in ("host", "auto", "reference"):
        with pytest.raises(ConfigError, match="--trace") as refused:
            Engine.open(Options(tiny, device=device, trace=tmp_path / "trace"))
        assert "host:1x512MiB" in refused.value.hint
    assert not (tmp_path / "trace").exists()


def test_a_trace_that_cannot_be_written_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace .*Is a directory"):
        Engine.open(Options(tiny, device=DEVICE, trace=tmp_path))


def test_without_a_trace_nothing_stands_before_the_driver() -> None:
    with closing(HostBackend(DEVICE, 1)) as backend:
        assert type(backend.driver) is HostDriver
