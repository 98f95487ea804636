"""The host backend: the contract of every driver, and what only it does.

It names broken rules, counts what is live, fails on request and refuses after a fork. Its memory
is real: addresses without a chunk fault, released memory returns to the system.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from driver_contract import (
    DriverCase,
    ExecutionContract,
    MemoryContract,
    RangeContract,
    held_stream,
    read,
    stream_on,
    write,
)

from strata_nb.errors import (
    ConfigError,
    DeviceLost,
    DriverError,
    OutOfDeviceMemory,
    RuleViolation,
    UnsupportedDevice,
)
from strata_nb.host import (
    MAX_CHUNKS,
    OPERATIONS,
    HostDriver,
    parse_host_devices,
)
from strata_nb.host_memory import DeviceAccount, HostDevice

KIB, MIB = 1 << 10, 1 << 20
UNIT = 64 * KIB
PLAIN = HostDevice(4 * MIB, UNIT, UNIT)
# Like the cards whose smallest chunk is charged as a much larger one, and which refuse access to
# the end of a reservation.
COARSE = HostDevice(4 * MIB, 4 * KIB, UNIT, access_from_base_only=True)
PATHS = [(1, 0), (0, 1)]  # of three devices: the third stands alone


@pytest.fixture(params=[PLAIN, COARSE], ids=["plain", "coarse"])
def case(request: pytest.FixtureRequest) -> Iterator[DriverCase]:
    driver = HostDriver([request.param] * 3, paths=PATHS)
    yield DriverCase(driver, UNIT, (RuleViolation,), with_path=(1, 0), without_path=(2, 0))
    assert driver.live() == {}
    driver.close()


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = HostDriver([PLAIN, PLAIN], paths=[])
    yield made
    made.close()


class TestMemory(MemoryContract):
    pass


class TestExecution(ExecutionContract):
    pass


class TestRanges(RangeContract):
    pass


class Place:
    """A reservation of four chunks with `chunks` of them mapped, to break rules on."""

    def __init__(self, driver: HostDriver, chunks: int = 1, *, access: bool = True) -> None:
        driver.synchronize(0)
        self.driver = driver
        self.base = driver.reserve(4 * UNIT)
        self.handles = [driver.create(UNIT, 0) for _ in range(chunks)]
        for position, handle in enumerate(self.handles):
            driver.map(self.base + position * UNIT, UNIT, handle)
        if access:
            driver.set_access(self.base, chunks * UNIT, [0])


# Each breaks one rule of docs/vmm.md.


def free_a_part(driver: HostDriver) -> None:
    driver.address_free(driver.reserve(2 * UNIT), UNIT)


def free_under_a_chunk(driver: HostDriver) -> None:
    driver.address_free(Place(driver).base, 4 * UNIT)


def map_outside_a_reservation(driver: HostDriver) -> None:
    driver.map(Place(driver).base + 4 * UNIT, UNIT, driver.create(UNIT, 0))


def map_a_chunk_twice(driver: HostDriver) -> None:
    place = Place(driver)
    driver.map(place.base + UNIT, UNIT, place.handles[0])


def map_over_a_chunk(driver: HostDriver) -> None:
    driver.map(Place(driver).base, UNIT, driver.create(UNIT, 0))


def use_a_chunk_without_access(driver: HostDriver) -> None:
    with stream_on(driver) as stream:
        driver.fill_async(Place(driver, access=False).base, 0, 8, stream)


def set_access_where_nothing_is_mapped(driver: HostDriver) -> None:
    driver.set_access(Place(driver).base, 2 * UNIT, [0])


def use_memory_without_a_path(driver: HostDriver) -> None:
    address = driver.allocate(64, 0)
    with stream_on(driver, 1) as stream:
        driver.fill_async(address, 0, 64, stream)


def map_before_the_context_exists(driver: HostDriver) -> None:
    driver.map(driver.reserve(UNIT), UNIT, driver.create(UNIT, 1))


def unmap_before_older_work_ended(driver: HostDriver) -> None:
    place = Place(driver)
    with held_stream(driver, 1):
        driver.retire(place.base, UNIT)
        driver.unmap(place.base, UNIT)


def unmap_what_was_never_retired_while_work_runs(driver: HostDriver) -> None:
    place = Place(driver)
    with held_stream(driver):
        driver.unmap(place.base, UNIT)


def use_a_retired_chunk(driver: HostDriver) -> None:
    place = Place(driver)
    driver.retire(place.base, UNIT)
    with stream_on(driver) as stream:
        driver.fill_async(place.base, 0, 8, stream)


def release_a_mapped_chunk(driver: HostDriver) -> None:
    driver.release(Place(driver).handles[0])


def release_a_chunk_twice(driver: HostDriver) -> None:
    handle = driver.create(UNIT, 0)
    driver.release(handle)
    driver.release(handle)


def unmap_a_chunk_twice(driver: HostDriver) -> None:
    base = Place(driver).base
    driver.unmap(base, UNIT)
    driver.unmap(base, UNIT)


def free_plain_memory_twice(driver: HostDriver) -> None:
    address = driver.allocate(64, 0)
    driver.free(address)
    driver.free(address)


def free_host_memory_as_device_memory(driver: HostDriver) -> None:
    driver.free(driver.allocate_host(64))


def unregister_what_was_allocated(driver: HostDriver) -> None:
    driver.unregister_host(driver.allocate_host(64))


def use_a_stream_that_was_destroyed(driver: HostDriver) -> None:
    stream = driver.stream_create(0)
    driver.stream_destroy(stream)
    driver.launch_host(stream, print)


def create_half_a_unit(driver: HostDriver) -> None:
    driver.create(UNIT // 2, 0)


def map_a_part_of_a_chunk(driver: HostDriver) -> None:
    driver.map(Place(driver).base + UNIT, UNIT, driver.create(2 * UNIT, 0))


def map_between_units(driver: HostDriver) -> None:
    driver.map(Place(driver).base + UNIT + 4 * KIB, UNIT, driver.create(UNIT, 0))


def unmap_two_chunks_at_once(driver: HostDriver) -> None:
    driver.unmap(Place(driver, chunks=2).base, 2 * UNIT)


def set_access_up_to_the_middle_of_a_chunk(driver: HostDriver) -> None:
    driver.set_access(Place(driver).base, UNIT // 2, [0])


def copy_over_the_end_of_a_range(driver: HostDriver) -> None:
    with stream_on(driver) as stream:
        driver.fill_async(Place(driver, chunks=4).base, 0, 4 * UNIT + 1, stream)


def use_addresses_behind_the_last_chunk(driver: HostDriver) -> None:
    with stream_on(driver) as stream:
        driver.fill_async(Place(driver).base + UNIT - 8, 0, 16, stream)


def use_addresses_before_the_first_chunk(driver: HostDriver) -> None:
    place = Place(driver, chunks=2)
    driver.unmap(place.base, UNIT)
    with stream_on(driver) as stream:
        driver.fill_async(place.base, 0, 16, stream)


def use_memory_that_no_device_knows(driver: HostDriver) -> None:
    with stream_on(driver) as stream:
        driver.fill_async(0x1000, 0, 16, stream)


def use_freed_memory(driver: HostDriver) -> None:
    address = driver.allocate_host(64)
    driver.free_host(address)
    with stream_on(driver) as stream:
        driver.fill_async(address, 0, 16, stream)


def call_the_driver_from_a_stream(driver: HostDriver) -> None:
    with stream_on(driver) as stream:
        driver.launch_host(stream, lambda: driver.mem_info(0))


def use_a_closed_driver(driver: HostDriver) -> None:
    driver.close()
    driver.mem_info(0)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        (1, free_a_part),
        (1, free_under_a_chunk),
        (1, map_outside_a_reservation),
        (3, map_a_chunk_twice),
        (3, map_over_a_chunk),
        (4, use_a_chunk_without_access),
        (4, set_access_where_nothing_is_mapped),
        (5, use_memory_without_a_path),
        (6, map_before_the_context_exists),
        (7, unmap_before_older_work_ended),
        (7, unmap_what_was_never_retired_while_work_runs),
        (7, use_a_retired_chunk),
        (8, release_a_mapped_chunk),
        (9, release_a_chunk_twice),
        (9, unmap_a_chunk_twice),
        (9, free_plain_memory_twice),
        (9, free_host_memory_as_device_memory),
        (9, unregister_what_was_allocated),
        (9, use_a_stream_that_was_destroyed),
        (9, use_a_closed_driver),
        (10, create_half_a_unit),
        (10, map_a_part_of_a_chunk),
        (10, map_between_units),
        (11, unmap_two_chunks_at_once),
        (11, set_access_up_to_the_middle_of_a_chunk),
        (11, copy_over_the_end_of_a_range),
        (16, use_addresses_behind_the_last_chunk),
        (16, use_addresses_before_the_first_chunk),
        (16, use_memory_that_no_device_knows),
        (16, use_freed_memory),
        (17, call_the_driver_from_a_stream),
    ],
)
def test_a_broken_rule_is_named(
    driver: HostDriver, rule: int, broken: Callable[[HostDriver], None]
) -> None:
    with pytest.raises(RuleViolation) as caught:
        broken(driver)
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"rule {rule}: ")


def test_a_refused_call_changes_nothing(driver: HostDriver) -> None:
    place = Place(driver, chunks=2)
    before = driver.live(), driver.account(0), driver.mem_info(0)
    calls: list[Callable[[], object]] = [
        lambda: driver.address_free(place.base, 4 * UNIT),
        lambda: driver.map(place.base + 2 * UNIT, UNIT, place.handles[0]),
        lambda: driver.unmap(place.base, 2 * UNIT),
        lambda: driver.release(place.handles[1]),
        lambda: driver.set_access(place.base, UNIT, [0, 1]),
        lambda: driver.create(5 * MIB, 0),
        lambda: driver.allocate(5 * MIB, 0),
    ]
    for call in calls:
        with pytest.raises((RuleViolation, DriverError)):
            call()
        assert (driver.live(), driver.account(0), driver.mem_info(0)) == before
    write(driver, place.base + 2 * UNIT - 4, b"same")


def test_a_chunk_that_nobody_could_use_may_leave_while_work_runs(driver: HostDriver) -> None:
    place = Place(driver, access=False)
    with held_stream(driver):
        driver.unmap(place.base, UNIT)


def test_a_reinstated_chunk_can_be_used_and_must_be_retired_again(driver: HostDriver) -> None:
    place = Place(driver)
    driver.retire(place.base, UNIT)
    driver.reinstate(place.base, UNIT)
    write(driver, place.base, b"back")
    with held_stream(driver), pytest.raises(RuleViolation, match="rule 7"):
        driver.unmap(place.base, UNIT)


def test_memory_holds_garbage_at_every_hand_over(driver: HostDriver) -> None:
    place = Place(driver)
    assert read(driver, place.base, UNIT) == b"\xff" * UNIT
    write(driver, place.base, bytes(UNIT))
    driver.unmap(place.base, UNIT)
    driver.map(place.base + UNIT, UNIT, place.handles[0])
    driver.set_access(place.base + UNIT, UNIT, [0])
    assert read(driver, place.base + UNIT, UNIT) == b"\xff" * UNIT
    assert read(driver, driver.allocate(64, 0), 64) == b"\xff" * 64
    assert read(driver, driver.allocate_host(64), 64) == b"\xff" * 64


def test_the_smallest_chunk_of_a_coarse_device_is_charged_as_a_large_one() -> None:
    driver = HostDriver([HostDevice(8 * MIB, 4 * KIB, 2 * MIB)])
    assert driver.granularity(0, "minimum") == 4 * KIB
    assert driver.granularity(0, "recommended") == 2 * MIB
    for count in range(1, 5):
        driver.create(4 * KIB, 0)
        assert driver.account(0) == DeviceAccount(count, 0, count * 2 * MIB)
    with pytest.raises(OutOfDeviceMemory, match="charged 2,097,152, free 0, total 8,388,608"):
        driver.create(4 * KIB, 0)
    driver.close()


def test_chunks_and_plain_memory_share_one_budget(driver: HostDriver) -> None:
    driver.create(3 * MIB, 0)
    plain = driver.allocate(MIB, 0)
    for refused in (lambda: driver.create(UNIT, 0), lambda: driver.allocate(1, 0)):
        with pytest.raises(OutOfDeviceMemory):
            refused()
    driver.free(plain)
    driver.create(MIB, 0)
    assert driver.mem_info(0) == (0, 4 * MIB)
    assert driver.mem_info(1) == (4 * MIB, 4 * MIB)


def test_more_chunks_than_the_system_can_map_are_refused() -> None:
    driver = HostDriver([PLAIN, PLAIN], max_chunks=3)
    handles = [driver.create(UNIT, device) for device in (0, 1, 1)]
    with pytest.raises(OutOfDeviceMemory, match="chunks 3") as refused:
        driver.create(UNIT, 0)
    assert refused.value.hint == "use larger chunks"
    driver.release(handles[0])
    driver.create(UNIT, 1)
    driver.close()


def test_a_full_system_is_out_of_memory_and_nothing_is_charged(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfDeviceMemory, match="No space left"):
        driver.create(UNIT, 0)
    assert driver.account(0) == DeviceAccount(0, 0, 0)


# Device texts.


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("host:1x64MiB", [HostDevice(64 * MIB)]),
        ("host:2x64MiB", [HostDevice(64 * MIB)] * 2),
        ("host:2x64MiB@256KiB", [HostDevice(64 * MIB, 256 * KIB, 256 * KIB)] * 2),
        ("host:1x2GiB@1MiB", [HostDevice(2048 * MIB, MIB, MIB)]),
        ("host:16x64KiB", [HostDevice(64 * KIB)] * 16),
        ("host:3x100KiB@4KiB", [HostDevice(100 * KIB, 4 * KIB, 4 * KIB)] * 3),
    ],
)
def test_a_device_text_says_how_many_devices_of_which_size(
    text: str, devices: list[HostDevice]
) -> None:
    assert list(parse_host_devices(text)) == devices


def test_the_plain_host_device_has_the_memory_of_the_machine() -> None:
    (device,) = parse_host_devices("host")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < device.budget_bytes <= physical
    driver = HostDriver([device])
    assert driver.mem_info(0) == (device.budget_bytes, device.budget_bytes)
    driver.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:",
        "HOST",
        "host ",
        "host:2",
        "host:64MiB",
        "host:2x64",
        "host:2x64MB",
        "host:-1x64MiB",
        "host:1.5x64MiB",
        "host:0x64MiB",
        "host:17x64MiB",
        "host:2x0MiB",
        "host:2x32KiB",
        "host:2x64MiB@",
        "host:2x64MiB@0KiB",
        "host:2x64MiB@3KiB",
        "host:2x64MiB@48KiB",
        "host:2x64MiB@128MiB",
        "host:1x64GiB@256KiB",
        "host:2x64MiB@256KiB@256KiB",
        "host:²x64MiB",
    ],
)
def test_a_device_text_that_cannot_be_used_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_host_devices(text)
    assert f"--device {text}:" in refused.value.message
    assert "host:2x64MiB" in refused.value.hint


# Faults.


def test_every_operation_fails_when_it_is_told_to(driver: HostDriver) -> None:
    for operation in OPERATIONS:
        driver.faults.plan(operation)
    place = 1 << 40
    arguments: dict[str, tuple[object, ...]] = {
        "granularity": (0, "minimum"),
        "reserve": (UNIT,),
        "address_free": (place, UNIT),
        "create": (UNIT, 0),
        "release": (1,),
        "map": (place, UNIT, 1),
        "unmap": (place, UNIT),
        "set_access": (place, UNIT, [0]),
        "mem_info": (0,),
        "can_access": (0, 0),
        "synchronize": (0,),
        "device_facts": (0,),
        "allocate": (64, 0),
        "free": (place,),
        "allocate_host": (64,),
        "free_host": (place,),
        "register_host": (place, 64),
        "unregister_host": (place,),
        "stream_create": (0,),
        "stream_destroy": (1,),
        "stream_synchronize": (1,),
        "event_create": (0,),
        "event_destroy": (1,),
        "event_record": (1, 1),
        "event_wait": (1, 1),
        "event_query": (1,),
        "event_synchronize": (1,),
        "event_elapsed_s": (1, 1),
        "copy_async": (place, place, 64, 1),
        "fill_async": (place, 0, 64, 1),
        "launch_host": (1, print),
    }
    assert set(arguments) == OPERATIONS
    for operation, values in arguments.items():
        with pytest.raises(DriverError) as failed:
            getattr(driver, operation)(*values)
        assert failed.value.call == operation
        memory = operation in ("create", "allocate", "allocate_host")
        assert isinstance(failed.value, OutOfDeviceMemory) == memory
    assert driver.live() == {}


@pytest.mark.parametrize(("forever", "outcomes"), [(False, "..x..."), (True, "..xxxx")])
def test_the_nth_call_fails_once_or_from_then_on(
    driver: HostDriver, forever: bool, outcomes: str
) -> None:
    driver.mem_info(0)
    driver.faults.plan("mem_info", 3, forever=forever)
    seen = ""
    for _ in range(6):
        try:
            driver.mem_info(0)
        except DriverError:
            seen += "x"
        else:
            seen += "."
    assert seen == outcomes
    driver.faults.lift()
    driver.mem_info(0)
    assert driver.faults.calls["mem_info"] == 8


def test_a_lost_device_answers_nothing_any_more(driver: HostDriver) -> None:
    driver.faults.plan("synchronize", lost=True)
    with pytest.raises(DeviceLost):
        driver.synchronize(0)
    driver.faults.lift()
    for call in (lambda: driver.mem_info(0), lambda: driver.reserve(UNIT)):
        with pytest.raises(DeviceLost):
            call()


@pytest.mark.parametrize(("operation", "nth"), [("retire", 1), ("close", 1), ("map", 0)])
def test_a_fault_that_could_never_happen_is_refused(
    driver: HostDriver, operation: str, nth: int
) -> None:
    with pytest.raises(ValueError, match=operation):
        driver.faults.plan(operation, nth)


# Streams.


def fail() -> None:
    raise ZeroDivisionError("in a stream")


def test_an_error_of_a_stream_is_raised_once_where_it_is_waited_for(driver: HostDriver) -> None:
    stream = driver.stream_create(0)
    seen: list[int] = []
    waits = (lambda: driver.stream_synchronize(stream), lambda: driver.synchronize(0))
    for wait in waits:
        driver.launch_host(stream, fail)
        driver.launch_host(stream, lambda: seen.append(1))
        with pytest.raises(ZeroDivisionError):
            wait()
        wait()
    assert seen == [1, 1]
    driver.launch_host(stream, fail)
    with pytest.raises(ZeroDivisionError):
        driver.stream_destroy(stream)
    assert driver.live() == {}


def test_closing_raises_the_error_that_nobody_has_seen_and_frees_all_the_same() -> None:
    driver = HostDriver([PLAIN])
    driver.launch_host(driver.stream_create(0), fail)
    driver.allocate(64, 0)
    with pytest.raises(ZeroDivisionError):
        driver.close()
    assert driver.live() == {}
    driver.close()


def test_a_stream_of_little_urgency_runs_on_a_thread_that_gives_way(driver: HostDriver) -> None:
    nice: dict[int, int] = {}
    for priority in (-5, 0, 7, 100):

        def ask(priority: int = priority) -> None:
            nice[priority] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        stream = driver.stream_create(0, priority)
        driver.launch_host(stream, ask)
        driver.stream_destroy(stream)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert (nice[-5], nice[0]) == (own, own)
    least = driver.device_facts(0).least_priority
    assert (nice[7], nice[100]) == (7, least)


def test_freeing_waits_for_running_work(driver: HostDriver) -> None:
    device, pinned = driver.allocate(64, 0), driver.allocate_host(64)
    for free, address in ((driver.free, device), (driver.free_host, pinned)):
        seen: list[str] = []
        with held_stream(driver) as (stream, end):
            driver.fill_async(address, 1, 64, stream)
            driver.launch_host(stream, partial(seen.append, "work"))
            threading.Timer(0.02, end).start()
            free(address)
            assert seen == ["work"]


# What is real.

SCRIPT = """
import ctypes, os, sys
from strata_nb.errors import DeviceLost
from strata_nb.host import HostDriver
from strata_nb.host_memory import HostDevice
unit = 65536
driver = HostDriver([HostDevice(1 << 20)])
driver.synchronize(0)
base = driver.reserve(2 * unit)
handle = driver.create(unit, 0)
def use():
    ctypes.memset(base, 7, unit)
"""
FAULTS = {
    "reserved": "use()",
    "mapped without access": "driver.map(base, unit, handle); use()",
    "unmapped again": (
        "driver.map(base, unit, handle); driver.set_access(base, unit, [0]); use();"
        "driver.unmap(base, unit); use()"
    ),
    "behind the chunk": (
        "driver.map(base, unit, handle); driver.set_access(base, unit, [0]); base += unit; use()"
    ),
}


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + script], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("what", FAULTS)
def test_an_address_without_accessible_memory_really_faults(what: str) -> None:
    assert run(FAULTS[what]).returncode == -signal.SIGSEGV


def test_an_address_with_accessible_memory_does_not() -> None:
    done = run(
        "driver.map(base, unit, handle); driver.set_access(base, unit, [0]); use();"
        "print(ctypes.string_at(base + unit - 1, 1)); driver.close()"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'\\x07'\n", "")


def test_a_fork_can_neither_use_nor_destroy_the_memory_of_its_parent() -> None:
    done = run("""
driver.map(base, unit, handle); driver.set_access(base, unit, [0]); use()
stream = driver.stream_create(0)
child = os.fork()
if child == 0:
    for call in (lambda: driver.mem_info(0), lambda: driver.release(handle)):
        try:
            call()
        except DeviceLost as error:
            print(error.hint, flush=True)
    driver.close()
    print(ctypes.string_at(base, 2), flush=True)
    os._exit(0)
os.waitpid(child, 0)
driver.stream_synchronize(stream)
print(ctypes.string_at(base, 2), driver.live())
driver.close()
""")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["start the child with the spawn method"] * 2
    assert lines[2] == "b'\\x07\\x07'"
    assert lines[3].startswith("b'\\x07\\x07' {'chunks': 1, 'mappings': 1")
    assert (done.returncode, done.stderr) == (0, "")


def process_state() -> tuple[int, int, int]:
    """Return the mappings of host devices, the descriptors and the threads of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    inaccessible = sum(line.split()[1] == "---p" for line in maps)
    devices = sum("strata-device" in line for line in maps)
    return devices + inaccessible, len(os.listdir("/proc/self/fd")), threading.active_count()


def test_nothing_is_left_in_the_process_after_close_whatever_was_forgotten() -> None:
    HostDriver([PLAIN]).close()
    before = process_state()
    for _ in range(20):
        driver = HostDriver([PLAIN, COARSE])
        Place(driver, chunks=3)
        driver.map(Place(driver).base + UNIT, UNIT, driver.create(UNIT, 0))
        driver.allocate(MIB, 1)
        driver.allocate_host(MIB)
        driver.register_host(4096, 4096)
        stream = driver.stream_create(0)
        driver.event_record(driver.event_create(1), stream)
        driver.launch_host(driver.stream_create(1, 3), lambda: None)
        assert process_state() != before
        driver.close()
        driver.close()
        assert driver.live() == {}
    assert process_state() == before


def test_a_driver_that_nobody_closes_warns_and_frees() -> None:
    before = process_state()
    drivers = [HostDriver([PLAIN])]
    drivers[0].stream_create(0)
    Place(drivers[0])
    with pytest.warns(ResourceWarning, match="never closed"):
        drivers.clear()
    gc.collect()
    assert process_state() == before


def memory_of_devices() -> int:
    """Return how many bytes the files behind all host devices of this process really hold."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    files = [os.stat(link) for link in links if "strata-device" in str(link.resolve())]
    return sum(found.st_blocks * 512 for found in files)


def without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")


@pytest.mark.parametrize("prepare", [lambda _: None, without_memfd], ids=["memfd", "file"])
def test_memory_exists_from_create_to_release(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[pytest.MonkeyPatch], None]
) -> None:
    prepare(monkeypatch)
    driver = HostDriver([PLAIN])
    place = Place(driver, chunks=4)
    held = driver.create(UNIT, 0)
    assert memory_of_devices() == 5 * UNIT
    driver.unmap(place.base + UNIT, UNIT)
    assert memory_of_devices() == 5 * UNIT
    driver.release(place.handles[1])
    driver.release(held)
    assert memory_of_devices() == 3 * UNIT
    write(driver, place.base + 2 * UNIT, b"kept")
    assert read(driver, place.base + 2 * UNIT, 4) == b"kept"
    driver.close()
    assert memory_of_devices() == 0


def test_a_system_that_cannot_run_host_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "strata_nb.host_pages")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UnsupportedDevice, match="need Linux, this is win32"):
        importlib.import_module("strata_nb.host_pages")


def test_many_chunks_stay_usable() -> None:
    big = HostDriver([HostDevice(16 * MIB, 4 * KIB, 4 * KIB)])
    big.synchronize(0)
    base = big.reserve(16 * MIB)
    count = 16 * MIB // (4 * KIB)
    for position in range(count):
        big.map(base + position * 4 * KIB, 4 * KIB, big.create(4 * KIB, 0))
    big.set_access(base, 16 * MIB, [0])
    write(big, base, bytes(16 * MIB))
    assert count <= MAX_CHUNKS
    big.close()
