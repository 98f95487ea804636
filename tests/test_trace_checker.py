"""The checker of traces: a good one passes, and for every rule damaged ones do not."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from device_world import load, random_tokens, read

from strata_nb.backend import HostBackend
from strata_nb.cache.plan import Holdings
from strata_nb.errors import DeviceLost, DriverError, FileFormatError
from strata_nb.host import HostDriver, parse_host_devices
from strata_nb.trace_checker import MOST_SHOWN, TITLES, Checker, Violation, check_trace
from strata_nb.trace_memory import Memory
from strata_nb.trace_page import trace_page
from strata_nb.trace_reader import CALLS, EVENTS, read_trace
from strata_nb.tracing import Recorder, RecordingDriver
from strata_nb.vmm import ChunkPool

Lines = list[dict[str, Any]]
DEVICE = "host:2x16MiB@64KiB"
IDS = random_tokens(9)


def record(path: Path, model_path: Path, *, fail: tuple[str, int, bool] | None = None) -> None:
    """Record a model that opens, reads, and whose memory goes back and forth."""
    with (
        closing(Recorder(path, say=print)) as recorder,
        closing(HostBackend(DEVICE, 1, recorder)) as backend,
    ):
        faults = backend.driver.driver.faults
        with closing(
            load(backend, model_path, ctx=256, rows=16, announce=recorder.announce)
        ) as model:
            read(model, model.open_sequence(), IDS)
            ledger = model.ledger
            start = ledger.holdings()
            less = Holdings(experts=start.experts - 1, kv=start.kv)
            if fail is not None:
                operation, nth, forever = fail
                faults.plan(operation, nth, forever=forever)
            for wanted in (less, start, Holdings(less.experts, less.kv, spare=1), start):
                try:
                    ledger.carry_out(wanted)
                except DeviceLost:
                    raise
                except DriverError:
                    ledger.check_integrity()
            faults.lift()
            read(model, model.open_sequence(), IDS)


@pytest.fixture(scope="module")
def recorded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    path = tmp_path_factory.mktemp("traces") / "good.jsonl"
    record(path, tiny)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def good(recorded: Lines) -> Lines:
    return copy.deepcopy(recorded)


def write(path: Path, lines: Lines) -> Path:
    if lines[-1].get("kind") == "end":
        lines[-1]["lines"] = len(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(path: Path, lines: Lines) -> list[Violation]:
    return check_trace(read_trace(write(path / "trace.jsonl", lines)))


def test_a_good_trace_passes(good: Lines, tmp_path: Path) -> None:
    assert check(tmp_path, good) == []
    kinds = {line.get("kind") for line in good}
    for kind in ("reserve", "map", "retire", "release", "publish", "account", "fill", "evict"):
        assert kind in kinds


@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "operation", ["create", "map", "set_access", "unmap", "release", "synchronize", "copy_async"]
)
def test_calls_that_fail_break_no_rule(
    tiny: Path, tmp_path: Path, operation: str, nth: int, forever: bool
) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, tiny, fail=(operation, nth, forever))
    assert check_trace(read_trace(path)) == []


def test_a_range_may_grow_again_below_a_chunk_that_is_stuck(tmp_path: Path) -> None:
    path, size = tmp_path / "trace.jsonl", 64 << 10
    host = HostDriver(parse_host_devices(DEVICE))
    with closing(host), closing(Recorder(path, say=print)) as recorder:
        recorder.begin(DEVICE, host)
        driver = RecordingDriver(host, recorder)
        driver.synchronize(0)
        pool = ChunkPool(driver, 0, size, say=lambda line: None)
        grown = pool.open_range(8)
        place = {"device": 0, "owner": "kv", "address": grown.base, "size": 8 * size}
        recorder.announce({"kind": "range", **place, "chunk_bytes": size})
        grown.grow(6)
        grown.retire(4)
        host.faults.plan("unmap")
        assert grown.shrink() == 3
        grown.grow(2)
        pool.close()
    trace = read_trace(path)
    assert sum(line.outcome == "DriverError" for line in trace.lines) == 1
    assert check_trace(trace) == []


# Damages. Each changes a good trace and returns the line that is to be blamed.


def find(lines: Lines, kind: str, nth: int = 0, **fields: object) -> dict[str, Any]:
    matching = [
        line
        for line in lines
        if line.get("kind") == kind and all(line.get(k) == v for k, v in fields.items())
    ]
    return matching[nth]


def place(lines: Lines, wanted: dict[str, Any]) -> int:
    return next(n for n, line in enumerate(lines) if line is wanted)


def add(lines: Lines, behind: dict[str, Any], kind: str, **fields: object) -> dict[str, Any]:
    """Insert a call behind a line, as if it had worked."""
    line = {"t_us": behind["t_us"], "kind": kind, "outcome": "ok", **fields}
    lines.insert(place(lines, behind) + 1, line)
    return line


def drop(lines: Lines, *kinds: str) -> None:
    lines[:] = [line for line in lines if line.get("kind") not in kinds]


def last_fill(lines: Lines) -> dict[str, Any]:
    return find(lines, "fill", -1)


def unmap_of(lines: Lines, owner: str, nth: int = -1) -> dict[str, Any]:
    return find(lines, "unmap", nth, owner=owner)


def reserve_what_is_in_use(lines: Lines) -> Any:
    line = find(lines, "reserve", 1)
    line["result"] = find(lines, "reserve")["result"]
    return line


def free_a_part(lines: Lines) -> Any:
    line = find(lines, "address_free")
    line["size"] -= 4096
    return line


def free_twice(lines: Lines) -> Any:
    line = find(lines, "address_free")
    return add(lines, line, "address_free", address=line["address"], size=line["size"])


def free_under_a_chunk(lines: Lines) -> Any:
    line = find(lines, "address_free", owner="kv")
    lines.remove(line)
    lines.insert(place(lines, unmap_of(lines, "kv")), line)
    return line


def map_outside(lines: Lines) -> Any:
    line = find(lines, "map")
    line["address"] -= 1 << 40
    return line


def map_memory_of_another_device(lines: Lines) -> Any:
    made = find(lines, "create")
    add(lines, made, "synchronize", device=1)
    made["device"] = 1
    return find(lines, "map", handle=made["result"])


def map_twice(lines: Lines) -> Any:
    line = find(lines, "map", 1)
    line["handle"] = find(lines, "map")["handle"]
    return line


def map_over_another(lines: Lines) -> Any:
    line = find(lines, "map", 1)
    line["address"] = find(lines, "map")["address"]
    return line


def create_what_exists(lines: Lines) -> Any:
    line = find(lines, "create", 1)
    line["result"] = find(lines, "create")["result"]
    return line


def two_slots_for_an_expert(lines: Lines) -> Any:
    line = copy.copy(last_fill(lines))
    line["slot"] += 1
    lines.insert(place(lines, last_fill(lines)) + 1, line)
    return line


def two_experts_in_a_slot(lines: Lines) -> Any:
    first, second = find(lines, "fill"), find(lines, "fill", 1)
    second["slot"] = first["slot"]
    return second


def publish_without_access(lines: Lines) -> Any:
    lines.remove(find(lines, "set_access", owner="experts"))
    return next(
        line
        for line in lines
        if line.get("kind") == "publish" and line["owner"] == "experts" and line["size"]
    )


def access_to_nothing(lines: Lines) -> Any:
    line = find(lines, "set_access")
    line["size"] += 1 << 24
    return line


def copy_without_access(lines: Lines) -> Any:
    drop(lines, "publish")
    lines.remove(find(lines, "set_access", owner="experts"))
    return find(lines, "copy_async", owner="experts")


def access_without_the_owner(lines: Lines) -> Any:
    line = find(lines, "set_access")
    line["devices"] = [1]
    return line


def access_without_a_path(lines: Lines) -> Any:
    add(lines, find(lines, "reserve"), "can_access", device=1, of=0, result=False)
    line = find(lines, "set_access")
    line["devices"] = [0, 1]
    return line


def map_before_the_context(lines: Lines) -> Any:
    first = place(lines, find(lines, "map"))
    kept = [line for line in lines[1:first] if line["kind"] in ("reserve", "create", "range")]
    lines[1:first] = kept
    return find(lines, "map")


def unmap_what_is_published(lines: Lines) -> Any:
    lines.remove(find(lines, "publish", -1, owner="kv"))
    return find(lines, "retire", -1, owner="kv")


def unmap_without_retiring(lines: Lines) -> Any:
    lines.remove(find(lines, "retire", -1, owner="kv"))
    first = place(lines, find(lines, "publish", -1, owner="kv"))
    return next(
        line for line in lines[first:] if line.get("kind") == "unmap" and line.get("owner") == "kv"
    )


def unmap_before_work_has_ended(lines: Lines) -> Any:
    line = find(lines, "synchronize", -1)
    stream = find(lines, "stream_synchronize", -1)["stream"]
    line.update(kind="launch_host", stream=stream)
    lines.remove(line)
    closing = find(lines, "publish", -1)
    lines.insert(place(lines, closing), line)
    return next(line for line in lines[place(lines, closing) :] if line["kind"] == "unmap")


def copy_to_retired_memory(lines: Lines) -> Any:
    retired = find(lines, "retire", owner="experts")
    stream = find(lines, "stream_synchronize", -1)["stream"]
    source = find(lines, "copy_async", owner="experts")["source"]
    where = {"destination": retired["address"], "source": source}
    return add(lines, retired, "copy_async", **where, size=256, stream=stream)


def grow_over_retired_memory(lines: Lines) -> Any:
    line = find(lines, "map", 2, owner="kv")
    first = find(lines, "map", owner="kv")
    size = first["size"]
    add(lines, find(lines, "map", 1, owner="kv"), "retire", address=first["address"], size=size)
    return line


def name_an_expert_before_its_copy_has_ended(lines: Lines) -> Any:
    at = place(lines, find(lines, "fill"))
    kinds = ("stream_synchronize", "synchronize")
    lines[1:at] = [line for line in lines[1:at] if line.get("kind") not in kinds]
    return find(lines, "fill")


def release_what_is_mapped(lines: Lines) -> Any:
    unmapped = unmap_of(lines, "kv")
    line = find(lines, "release", -1)
    line["handle"] = find(lines, "map", -1, address=unmapped["address"])["handle"]
    lines.remove(line)
    lines.insert(place(lines, unmapped), line)
    return line


def keep_a_chunk(lines: Lines) -> Any:
    lines.remove(find(lines, "release", -1))
    return lines[-1]


def keep_a_stream(lines: Lines) -> Any:
    lines.remove(find(lines, "stream_destroy", -1))
    return lines[-1]


def an_account_that_does_not_add_up(lines: Lines) -> Any:
    line = find(lines, "account")
    line["spare"] += 1
    return line


def an_account_that_is_not_so(lines: Lines) -> Any:
    line = find(lines, "account")
    line["experts"] -= 1
    line["kv"] += 1
    return line


def more_free_than_can_be(lines: Lines) -> Any:
    line = find(lines, "mem_info", -1)
    add(lines, find(lines, "account"), **line | {"result": line["result"][1:] * 2})
    return lines[place(lines, find(lines, "account")) + 1]


def more_memory_than_there_is(lines: Lines) -> Any:
    lines[0]["devices"][0]["memory_bytes"] = find(lines, "create")["size"]
    return find(lines, "create")


def more_residents_than_fills(lines: Lines) -> Any:
    line = find(lines, "step", -1)
    line["resident"] += 1
    return line


def a_chunk_of_another_size(lines: Lines) -> Any:
    line = find(lines, "create", 1)
    line["size"] *= 2
    return line


def a_chunk_of_a_crooked_size(lines: Lines) -> Any:
    line = find(lines, "create")
    line["size"] = 3 << 16
    return line


def a_chunk_that_is_no_multiple(lines: Lines) -> Any:
    line = find(lines, "create")
    line["size"] = 4096
    return line


def unmap_two_chunks(lines: Lines) -> Any:
    line = find(lines, "unmap")
    line["size"] *= 2
    return line


def copy_over_the_end_of_a_range(lines: Lines) -> Any:
    line = find(lines, "copy_async", owner="experts")
    line["size"] = 1 << 30
    return line


def access_to_half_a_chunk(lines: Lines) -> Any:
    line = find(lines, "set_access")
    line["size"] -= 4096
    return line


def create_and_release_in_one_change(lines: Lines) -> Any:
    account = find(lines, "account", 1)
    before = lines[place(lines, account) - 1]
    size = find(lines, "create")["size"]
    add(lines, before, "create", device=0, size=size, result=9999)
    add(lines, find(lines, "create", result=9999), "release", handle=9999)
    return account


def a_slot_without_a_copy(lines: Lines) -> Any:
    drop(lines, "copy_async")
    return find(lines, "fill")


def half_a_copy(lines: Lines) -> Any:
    fill = find(lines, "fill")
    find(lines, "copy_async", destination=fill["address"])["size"] -= 256
    return fill


def call_a_lost_device(lines: Lines) -> Any:
    lost, later = find(lines, "map"), find(lines, "map", 1)
    lost.update(outcome="DeviceLost", message="gone")
    return later


def publish_more_than_is_mapped(lines: Lines) -> Any:
    line = next(line for line in lines if line.get("kind") == "publish" and line["size"])
    line["size"] += find(lines, "create")["size"]
    return line


def fill_behind_the_arena(lines: Lines) -> Any:
    line = find(lines, "fill")
    line["address"] += 1 << 30
    return line


def evict_from_another_slot(lines: Lines) -> Any:
    line = find(lines, "evict")
    line["slot"] += 1
    return line


def move_what_has_no_slot(lines: Lines) -> Any:
    line = find(lines, "fill")
    line["kind"] = "move"
    return line


def map_behind_the_prefix(lines: Lines) -> Any:
    line = find(lines, "map", 1)
    line["address"] += line["size"]
    return line


def unmap_from_the_middle(lines: Lines) -> Any:
    first = find(lines, "unmap", -2, owner="experts")
    last = find(lines, "unmap", -1, owner="experts")
    first["address"], last["address"] = last["address"], first["address"]
    return first


def free_what_is_published(lines: Lines) -> Any:
    at = place(lines, find(lines, "publish", -1, owner="kv"))
    drop_from = [line for line in lines[at:] if line.get("owner") == "kv"]
    for line in drop_from:
        if line["kind"] != "address_free":
            lines.remove(line)
    free = find(lines, "address_free", owner="kv")
    size = find(lines, "reserve")["size"]
    base = 1 << 46
    made = add(lines, lines[at - 1], "reserve", size=size, result=base)
    event = {"kind": "range", "device": 0, "owner": "other", "address": base, "size": size}
    lines.insert(place(lines, made) + 1, {"t_us": made["t_us"], **event, "chunk_bytes": 1 << 18})
    lines.insert(
        place(lines, made) + 2, {"t_us": made["t_us"], **event, "kind": "publish", "size": 1}
    )
    free.update(address=base, size=size)
    return lines[place(lines, made) + 2]


def weights_that_are_no_memory(lines: Lines) -> Any:
    line = find(lines, "block", owner="weights")
    line["address"] -= 1 << 40
    return line


def two_threads(lines: Lines) -> Any:
    first, second = find(lines, "map"), find(lines, "map", 1)
    first["us"] = 1 << 30
    second["thread"] = first["thread"] + 1
    return second


def what_the_driver_said(lines: Lines) -> Any:
    line = find(lines, "unmap")
    line.update(outcome="RuleViolation", message="rule 7: unmap while streams {1: 2} may use it")
    return line


DAMAGES: list[tuple[int, Callable[[Lines], Any], str]] = [
    (1, reserve_what_is_in_use, r"reserved [\d,]+ bytes at .* are in use"),
    (1, free_a_part, r"freed [\d,]+ of [\d,]+ bytes"),
    (1, free_twice, "where no reservation begins"),
    (1, free_under_a_chunk, r"with \d+ chunks mapped"),
    (1, map_outside, "outside every reservation"),
    (2, map_memory_of_another_device, r"chunk \d+ of device 1 into the \w+ of device 0"),
    (3, map_twice, r"mapped chunk \d+ at 0x\w+, it is mapped at 0x"),
    (3, map_over_another, r"over chunk \d+"),
    (3, create_what_exists, r"chunk \d+ was created, and exists"),
    (3, two_slots_for_an_expert, r"expert \d+\.\d+ came into slot \d+, it has slot \d+"),
    (3, two_experts_in_a_slot, r"in slot \d+, which holds \d+\.\d+"),
    (4, publish_without_access, r"[\d,]+ bytes of the experts of device 0: no access to chunk"),
    (4, access_to_nothing, "where not all is mapped"),
    (4, copy_without_access, "device 0 has no access to chunk"),
    (5, access_without_the_owner, r"devices \[1\] to memory of device 0"),
    (5, access_without_a_path, "device 1, which has no path to device 0"),
    (6, map_before_the_context, "device 0, which has no context yet"),
    (7, unmap_what_is_published, "while tables may name the kv up to"),
    (7, unmap_without_retiring, "which was not retired"),
    (7, unmap_before_work_has_ended, r"for 1 pieces of work of stream \d+, up to that of line"),
    (7, copy_to_retired_memory, r"chunk \d+ at .* was retired at line"),
    (7, grow_over_retired_memory, "the kv grew with retired chunks"),
    (7, name_an_expert_before_its_copy_has_ended, "nobody has waited for its copy of line"),
    (7, what_the_driver_said, r"the driver says: unmap while streams"),
    (8, release_what_is_mapped, r"released chunk \d+ while it is mapped at"),
    (9, keep_a_chunk, "left at the end: 1 chunks"),
    (9, keep_a_stream, "left at the end: 1 streams"),
    (9, an_account_that_does_not_add_up, r"experts \d+, kv \d+, .*: not \d+ chunks"),
    (9, an_account_that_is_not_so, r"\d+ mapped for experts and loan, the account says \d+"),
    (9, more_free_than_can_be, r"says that 0 of [\d,]+ bytes are taken, the trace holds [\d,]+"),
    (9, more_memory_than_there_is, r"device 0 of 65,536 bytes gave [\d,]+"),
    (9, more_residents_than_fills, r"\d+ experts are resident, the trace has \d+"),
    (10, a_chunk_of_another_size, "a chunk of 131,072 bytes on device 0, others have 65,536"),
    (10, a_chunk_of_a_crooked_size, "196,608 bytes: no power of two"),
    (10, a_chunk_that_is_no_multiple, "4,096 bytes on a device of units of 65,536"),
    (11, unmap_two_chunks, r"unmapped 131,072 of chunk \d+'s 65,536 bytes"),
    (11, copy_over_the_end_of_a_range, "the range ends at"),
    (11, access_to_half_a_chunk, "no whole chunks"),
    (12, create_and_release_in_one_change, r"created \d+ chunks and released \d+"),
    (14, a_slot_without_a_copy, r"its [\d,]+ bytes at \w+ were not copied"),
    (14, half_a_copy, r"its [\d,]+ bytes at \w+ were not copied"),
    (15, call_a_lost_device, r"map on device 0, which was lost at line \d+"),
    (16, publish_more_than_is_mapped, r"may name [\d,]+ bytes .*, [\d,]+ are mapped"),
    (16, fill_behind_the_arena, "0 bytes are usable"),
    (16, evict_from_another_slot, r"left slot \d+, it has slot \d+"),
    (16, move_what_has_no_slot, "it had none"),
    (16, map_behind_the_prefix, r"goes on at \w+ behind 1 chunks"),
    (16, unmap_from_the_middle, "what is mapped is a prefix"),
    (16, free_what_is_published, "may name 1 bytes"),
    (16, weights_that_are_no_memory, r"weights: [\d,]+ bytes at \w+ are no memory"),
    (17, two_threads, r"by thread 1 began at [\d,]+ us, while thread 0 was in the call of line"),
]


@pytest.mark.parametrize(
    ("rule", "damage", "message"), DAMAGES, ids=[damage.__name__ for _, damage, _ in DAMAGES]
)
def test_a_damaged_trace_is_refused_at_its_line_by_the_rule_that_it_breaks(
    good: Lines, tmp_path: Path, rule: int, damage: Callable[[Lines], Any], message: str
) -> None:
    blamed = damage(good)
    found = check(tmp_path, good)
    assert found, "nothing was found"
    first = found[0]
    assert (first.rule, first.line) == (rule, place(good, blamed) + 1), first
    assert re.search(message, first.message), first
    assert f"rule {rule} ({TITLES[rule]}), line {first.line:,}: " in str(first)


def test_every_rule_that_is_checked_has_a_damaged_trace() -> None:
    assert {rule for rule, _, _ in DAMAGES} == set(TITLES)


def test_a_trace_that_is_wrong_everywhere_gives_a_page_of_violations(
    good: Lines, tmp_path: Path
) -> None:
    for _ in range(2 * MOST_SHOWN):
        add(good, good[5], "release", handle=9999)
    assert len(check(tmp_path, good)) == MOST_SHOWN


# Files.


def test_a_trace_that_was_cut_off_is_checked_as_far_as_it_goes(good: Lines, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", good)
    path.write_bytes(path.read_bytes()[:-20])
    trace = read_trace(path)
    assert not trace.whole
    assert len(trace.lines) == len(good) - 2
    assert check_trace(trace) == []


def test_unknown_events_and_fields_are_passed_over(good: Lines, tmp_path: Path) -> None:
    good.insert(5, {"t_us": 3, "kind": "weather", "request": "grow_kv", "device": 7})
    find(good, "map")["colour"] = "blue"
    assert check(tmp_path, good) == []
    # Neither is a method of the checker a kind of line.
    for name in [*vars(Checker), *vars(Memory)]:
        kind = name.removeprefix("_check").removeprefix("_")
        if kind not in CALLS | EVENTS:
            good.insert(5, {"t_us": 3, "kind": kind, "handle": [], "address": []})
            good.insert(5, {"t_us": 3, "kind": kind, "handle": [], "outcome": "DeviceLost"})
    assert check(tmp_path, good) == []
    trace_page(read_trace(tmp_path / "trace.jsonl"), "name")


def edit(lines: Lines, nth: int, **changes: object) -> None:
    lines[nth].update(changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[0].pop("format"), "not a trace"),
        (lambda lines: edit(lines, 0, version=2), "version 2, known is 1"),
        (lambda lines: edit(lines, 0, devices=[]), "names no devices"),
        (lambda lines: edit(lines, 0, devices=[{"name": "x"}]), "without its sizes"),
        (lambda lines: find(lines, "map").pop("size"), "map with size 'missing'"),
        (lambda lines: find(lines, "map").update(address="0x7f"), "map with address '0x7f'"),
        (lambda lines: find(lines, "create").pop("result"), "create with result None"),
        (lambda lines: find(lines, "create").update(device=2), "device 2 of 2"),
        (lambda lines: lines[3].pop("t_us"), "line 4 has no t_us"),
        (lambda lines: lines.append(dict(lines[-2])), "is the end, and there are more"),
        (lambda lines: lines.insert(3, []), "line 4 is no JSON object"),
        (lambda lines: edit(lines, 0, device="\ud800"), "line 1 is not JSON"),
        (lambda lines: find(lines, "map").pop("outcome"), "map, a call without an outcome"),
        (lambda lines: find(lines, "account").update(outcome="ok"), "an event with an outcome"),
        (lambda lines: find(lines, "map").update(outcome=["ok"]), "map with outcome ['ok']"),
        (lambda lines: find(lines, "change").pop("request"), "change with request 'missing'"),
        (lambda lines: find(lines, "change").update(moved="2"), "change with moved '2'"),
        (lambda lines: find(lines, "change").update(after=[1, 2]), "change with after [1, 2]"),
        (lambda lines: find(lines, "change")["before"].pop("kv"), "change with before {"),
        (lambda lines: find(lines, "change").update(device=7), "device 7 of 2"),
    ],
)
def test_a_file_that_is_no_whole_trace_is_refused(
    good: Lines, tmp_path: Path, damage: Callable[[Lines], object], message: str
) -> None:
    damage(good)
    with pytest.raises(FileFormatError, match=re.escape(message)):
        read_trace(write(tmp_path / "trace.jsonl", good))


def test_lines_that_are_missing_are_noticed(good: Lines, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", good)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:4] + lines[5:]))
    with pytest.raises(FileFormatError, match=rf"{len(good) - 1} lines, there were {len(good)}"):
        read_trace(path)
    path.write_bytes(b"")
    with pytest.raises(FileFormatError, match="no first line"):
        read_trace(path)
    for content in (b"{\xff\n", b"[" * 100_000 + b"\n", b'{"a":' + b"9" * 5000 + b"}\n"):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="line 1 is not JSON"):
            read_trace(path)


def test_every_kind_of_line_is_described() -> None:
    text = (Path(__file__).parent.parent / "docs" / "trace.md").read_text()
    for kind in (*CALLS, *EVENTS):
        row = next(
            line for line in text.splitlines() if line.startswith("|") and f"`{kind}`" in line
        )
        for field in (*CALLS.get(kind, ()), *EVENTS.get(kind, ())):
            assert f"`{field}`" in row or "the same" in row, (kind, field)


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_with_random_failures_break_no_rule(
    tiny: Path, tmp_path: Path, seed: int
) -> None:
    random, path = Random(seed), tmp_path / "trace.jsonl"
    operations = ["create", "map", "set_access", "unmap", "release", "synchronize", "mem_info"]
    with (
        closing(Recorder(path, say=print)) as recorder,
        closing(HostBackend(DEVICE, 1, recorder)) as backend,
    ):
        faults = backend.driver.driver.faults
        with closing(load(backend, tiny, ctx=256, rows=16, announce=recorder.announce)) as model:
            ledger, start = model.ledger, model.ledger.holdings()
            for _ in range(30):
                operation = random.choice(operations)
                faults.plan(operation, random.randrange(1, 12), forever=random.random() < 0.3)
                if random.random() < 0.5:
                    faults.lift()
                experts, kv = random.randrange(start.experts), random.randrange(1, start.kv + 1)
                loan = random.randrange(start.experts - experts)
                spare = random.randrange(start.chunks - experts - kv - loan + 1)
                with suppress(DriverError):
                    ledger.carry_out(Holdings(experts, kv, loan, spare))
            faults.lift()
    trace = read_trace(path)
    assert any(line.outcome == "DriverError" for line in trace.lines)
    assert check_trace(trace) == []
