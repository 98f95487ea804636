"""What stands between CUDA's driver and its library: opening, contexts, statuses, lost devices."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda_table_of_host import FailingTable, HostTable
from driver_contract import read, write

from strata_nb import cuda_table as cuda
from strata_nb.cuda_memory import SMALLEST_CHUNK_BYTES
from strata_nb.cuda_table import PROTOTYPES, LibraryTable
from strata_nb.driver import CudaDriver
from strata_nb.errors import DeviceLost, DriverError, RuleViolation, UnsupportedDevice

C_LIBRARY = "libc.so.6"  # a library without any function of CUDA's


@pytest.fixture
def host() -> Iterator[HostTable]:
    made = HostTable()
    yield made
    made.close()


@pytest.fixture
def table(host: HostTable) -> FailingTable:
    return FailingTable(host)


@pytest.fixture
def driver(table: FailingTable) -> Iterator[CudaDriver]:
    made = CudaDriver(table)
    yield made
    table.lift()
    made.close()


# The table.


def test_a_library_that_is_not_there_is_no_driver() -> None:
    with pytest.raises(UnsupportedDevice, match=r"no NVIDIA driver: libnone\.so\.1") as refused:
        LibraryTable("libnone.so.1")
    assert "--device host" in refused.value.hint


def test_a_function_that_a_driver_lacks_is_named_when_it_is_called() -> None:
    table = LibraryTable(C_LIBRARY)
    with pytest.raises(
        UnsupportedDevice,
        match=r"no cuGraphInstantiateWithFlags: .*CUDA 11\.4, this one is for an unknown version",
    ):
        table.cuGraphInstantiateWithFlags()
    with pytest.raises(AttributeError):
        table.cuGraphInstantiate  # noqa: B018 - not in the table


def test_functions_of_a_library_are_found_by_their_versioned_name() -> None:
    assert PROTOTYPES["cuMemAlloc"].symbol == "cuMemAlloc_v2"
    assert PROTOTYPES["cuMemCreate"].symbol == "cuMemCreate"
    assert all(row.symbol.split("_v")[0] == name for name, row in PROTOTYPES.items())
    assert all(row.since <= cuda.OLDEST_VERSION for row in PROTOTYPES.values())


# Opening.


def test_a_driver_that_is_too_old_says_what_is_there_and_what_is_needed() -> None:
    host = HostTable(version=11080)
    with pytest.raises(UnsupportedDevice, match=r"for CUDA 11\.8, 13\.0 or later is needed"):
        CudaDriver(host)
    host.close()


def test_a_machine_without_a_card_is_refused_in_one_line() -> None:
    host = HostTable(devices=0)
    with pytest.raises(UnsupportedDevice, match="no card that this process may use") as refused:
        CudaDriver(host)
    assert "CUDA_VISIBLE_DEVICES" in refused.value.hint
    assert "\n" not in refused.value.message + refused.value.hint
    host.close()


@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        ("cuInit", 803, r"cannot be used: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH \(code 803\)"),
        ("cuInit", 100, "no card"),
        ("cuDeviceGetCount", 999, "cannot be used"),
        ("cuDriverGetVersion", 1, "does not say its version"),
        ("cuInit", 12345, "unknown error 12345"),
    ],
)
def test_a_driver_that_does_not_start_says_why(
    table: FailingTable, function: str, status: int, said: str
) -> None:
    table.plan(function, status=status)
    with pytest.raises(UnsupportedDevice, match=said):
        CudaDriver(table)


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        (cuda.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "move memory"),
        (cuda.UNIFIED_ADDRESSING, "host's addresses"),
    ],
)
def test_a_card_that_lacks_what_is_needed_is_refused_when_it_is_used(
    attribute: int, said: str
) -> None:
    host = HostTable(attributes={attribute: 0})
    driver = CudaDriver(host)
    with pytest.raises(UnsupportedDevice, match=said):
        driver.mem_info(0)
    driver.close()
    assert host.live() == {}
    host.close()


def test_memory_that_a_card_sees_at_another_address_is_refused() -> None:
    host = HostTable(host_offset=4096)
    driver = CudaDriver(host)
    with pytest.raises(UnsupportedDevice, match="sees the host's 0x10000 at 0x11000"):
        driver.register_host(0x10000, 4096)
    assert driver.live() == {}
    driver.close()
    host.close()


def test_who_may_not_register_memory_hears_of_the_way_around(
    driver: CudaDriver, table: FailingTable
) -> None:
    table.plan("cuMemHostRegister", status=801)
    with pytest.raises(DriverError, match="register_host") as caught:
        driver.register_host(0x10000, 4096)
    assert caught.value.hint.startswith("--no-pin ")


def test_chunks_are_no_smaller_than_what_cards_charge() -> None:
    host = HostTable(minimum_bytes=4096)
    driver = CudaDriver(host)
    assert host.host.granularity(0, "minimum") == 4096
    assert driver.granularity(0, "minimum") == SMALLEST_CHUNK_BYTES
    driver.close()
    host.close()


# Contexts.


def test_a_device_gets_its_context_when_it_is_first_used_and_gives_it_back(
    host: HostTable, driver: CudaDriver
) -> None:
    assert host.live() == {}
    driver.mem_info(2)
    driver.mem_info(2)
    assert host.live() == {"contexts": 1}
    driver.mem_info(0)
    assert host.live() == {"contexts": 2}
    driver.close()
    assert host.live() == {}


def test_every_thread_sets_the_context_and_again_only_for_another_device(
    table: FailingTable, driver: CudaDriver
) -> None:
    def work() -> None:
        for device in (0, 0, 1, 1, 0):
            address = driver.allocate(64, device)
            write(driver, address, b"by a thread", device)
            assert read(driver, address, 11, device) == b"by a thread"
            driver.free(address)
        before = table.calls["cuCtxSetCurrent"]
        for device in (0, 0, 1, 1, 1, 0):
            driver.mem_info(device)
        changes.append(table.calls["cuCtxSetCurrent"] - before)

    changes: list[int] = []
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert changes == [2, 2]


@pytest.mark.parametrize(
    "function", ["cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"]
)
def test_a_context_that_cannot_be_made_is_tried_again_with_the_next_call(
    table: FailingTable, driver: CudaDriver, function: str
) -> None:
    table.plan(function, status=46)
    with pytest.raises(DriverError, match=f"mem_info on device 1: {function}: .*UNAVAILABLE"):
        driver.mem_info(1)
    driver.mem_info(1)


def test_a_context_that_cannot_be_set_is_tried_again_with_the_next_call(
    table: FailingTable, driver: CudaDriver
) -> None:
    table.plan("cuCtxSetCurrent")
    with pytest.raises(DriverError, match="cuCtxSetCurrent"):
        driver.mem_info(1)
    assert driver.mem_info(1)[0] > 0


@pytest.mark.parametrize("device", [-1, 3])
def test_a_device_that_does_not_exist_is_refused_with_the_number_there_are(
    driver: CudaDriver, device: int
) -> None:
    with pytest.raises(DriverError, match=f"on device {device}: there are 3 devices"):
        driver.allocate(64, device)


def test_access_is_given_to_a_device_that_was_not_used_before(
    host: HostTable, driver: CudaDriver
) -> None:
    unit = SMALLEST_CHUNK_BYTES
    place, chunk = driver.reserve(unit), driver.create(unit, 0)
    driver.map(place, unit, chunk)
    driver.set_access(place, unit, [0, 1])
    assert host.live()["contexts"] == 2
    write(driver, place, b"from the other", device=1)
    assert read(driver, place, 14) == b"from the other"


def test_code_of_a_newer_cuda_is_refused_with_what_to_install(
    table: FailingTable, driver: CudaDriver
) -> None:
    table.plan("cuModuleLoadDataEx", status=cuda.INVALID_IMAGE)
    with pytest.raises(DriverError) as refused:
        driver.load_module(0, b"code")
    assert "install a newer NVIDIA driver" in refused.value.hint


@pytest.mark.parametrize("has_it", [True, False], ids=["after", "before"])
def test_an_interrupt_while_a_function_is_launched_loses_no_error(
    table: FailingTable, driver: CudaDriver, has_it: bool
) -> None:
    """The driver may have the function's address by then: it must stay alive."""

    def interrupted(*arguments: Any) -> int:
        if has_it:
            launch(*arguments)
        raise KeyboardInterrupt

    stream, launch = driver.stream_create(0), table.cuLaunchHostFunc
    table.cuLaunchHostFunc = interrupted  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        driver.launch_host(stream, lambda: 1 // (not has_it))
    table.cuLaunchHostFunc = launch  # type: ignore[attr-defined]
    driver.launch_host(stream, lambda: [][1])
    with pytest.raises(ZeroDivisionError if has_it else IndexError):
        driver.stream_synchronize(stream)


# Lost devices.


# Those after which, as cuda.h says, a process must be started again; and a shut down library (4), a
# destroyed context (709), an assertion of a kernel (710), which ends all its context's memory.
STICKY = (4, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)


def test_no_other_status_loses_a_device() -> None:
    assert frozenset(STICKY) == cuda.LOST


@pytest.mark.parametrize("status", STICKY)
def test_after_such_a_status_a_device_is_lost(
    host: HostTable, table: FailingTable, driver: CudaDriver, status: int
) -> None:
    driver.mem_info(0)
    table.plan("cuMemGetInfo", status=status)
    with pytest.raises(DeviceLost) as lost:
        driver.mem_info(0)
    assert (lost.value.call, lost.value.code, lost.value.device) == ("mem_info", status, 0)
    assert "start the program again" in lost.value.hint
    before = host.calls.copy()
    with pytest.raises(DeviceLost) as again:
        driver.synchronize(0)
    assert (again.value.call, again.value.code) == ("synchronize", status)
    assert host.calls == before


def test_a_lost_device_is_called_no_more_and_close_only_forgets_it(
    table: FailingTable, driver: CudaDriver
) -> None:
    unit = SMALLEST_CHUNK_BYTES
    things = {}
    for device in (0, 1):
        driver.mem_info(device)
        place, chunk = driver.reserve(unit), driver.create(unit, device)
        driver.map(place, unit, chunk)
        driver.set_access(place, unit, [device])
        stream, event = driver.stream_create(device), driver.event_create(device)
        things[device] = (place, chunk, driver.allocate(64, device), stream, event)
    pinned = driver.allocate_host(64)
    table.plan("cuEventQuery", status=700)
    with pytest.raises(DeviceLost):
        driver.event_query(things[0][4])
    before = table.calls.copy()
    place, chunk, block, stream, event = things[0]
    calls: list[Callable[[], object]] = [
        lambda: driver.create(unit, 0),
        lambda: driver.unmap(place, unit),
        lambda: driver.release(chunk),
        lambda: driver.free(block),
        lambda: driver.stream_destroy(stream),
        lambda: driver.launch_host(stream, print),
        lambda: driver.event_record(event, stream),
        lambda: driver.reserve(unit),  # of no device: the library's state is undefined
        lambda: driver.free_host(pinned),
    ]
    for call in calls:
        with pytest.raises(DeviceLost):
            call()
    assert table.calls == before
    write_and_read_on = things[1]
    driver.fill_async(write_and_read_on[2], 1, 64, write_and_read_on[3])
    driver.stream_synchronize(write_and_read_on[3])
    before = table.calls.copy()
    driver.close()
    assert driver.live() == {}
    assert (
        dict(table.calls - before)
        == {
            "cuCtxSynchronize": 2,  # one to end its work, one to free its memory
            "cuEventDestroy": 1,
            "cuStreamSynchronize": 1,
            "cuStreamDestroy": 1,
            "cuMemUnmap": 1,
            "cuMemRelease": 1,
            "cuMemFree": 1,
            "cuDevicePrimaryCtxRelease": 1,
            "cuCtxSetCurrent": table.calls["cuCtxSetCurrent"] - before["cuCtxSetCurrent"],
        }
        or table.calls["cuCtxSetCurrent"] == before["cuCtxSetCurrent"]
    )


def test_a_device_that_is_lost_while_closing_is_said_and_forgotten(
    table: FailingTable, driver: CudaDriver
) -> None:
    driver.allocate(64, 0)
    driver.stream_create(0)
    table.plan("cuStreamSynchronize", status=719)
    with pytest.raises(DeviceLost):
        driver.close()
    assert driver.live() == {}
    before = table.calls.copy()
    driver.close()
    assert table.calls == before


def test_an_error_that_concerns_no_device_loses_all(
    table: FailingTable, driver: CudaDriver
) -> None:
    driver.mem_info(0)
    table.plan("cuMemAddressReserve", status=719)
    with pytest.raises(DeviceLost):
        driver.reserve(SMALLEST_CHUNK_BYTES)
    for device in range(3):
        with pytest.raises(DeviceLost):
            driver.mem_info(device)


# The process.


def test_a_fork_can_neither_use_nor_destroy_what_its_parent_has(
    driver: CudaDriver, table: FailingTable
) -> None:
    address = driver.allocate(64, 0)
    before = table.calls.copy()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: driver.mem_info(0), lambda: driver.free(address)):
            try:
                call()
            except DeviceLost as error:
                refused += error.hint == "start the child with the spawn method"
        driver.close()
        os._exit(0 if (refused, table.calls) == (2, before) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    driver.free(address)


def test_a_driver_that_nobody_closes_warns_and_frees(host: HostTable) -> None:
    drivers = [CudaDriver(host)]
    drivers[0].allocate(64, 0)
    drivers[0].stream_create(1)
    with pytest.warns(ResourceWarning, match="never closed"):
        drivers.clear()
    gc.collect()
    assert host.live() == {}


def test_a_driver_that_could_not_be_opened_does_not_warn() -> None:
    with pytest.raises(UnsupportedDevice):
        CudaDriver(LibraryTable(C_LIBRARY))
    gc.collect()


def test_a_closed_driver_calls_nothing(table: FailingTable, driver: CudaDriver) -> None:
    driver.close()
    before = table.calls.copy()
    with pytest.raises(RuleViolation, match="closed"):
        driver.mem_info(0)
    driver.close()
    assert table.calls == before


@pytest.mark.parametrize(("name", "nth"), [("cuMemAlloc_v2", 1), ("cuMemAlloc", 0)])
def test_a_failure_that_could_never_happen_is_refused(
    table: FailingTable, name: str, nth: int
) -> None:
    with pytest.raises(ValueError, match="cuMemAlloc"):
        table.plan(name, nth)
