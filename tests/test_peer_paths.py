"""Paths between devices: believed only after bytes went both ways over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from strata_nb.errors import DeviceLost, DriverError
from strata_nb.host import OPERATIONS, HostDriver
from strata_nb.host_memory import DeviceAccount, HostDevice
from strata_nb.peer_paths import fault_of_path

UNIT = 64 << 10


def driver_of(**facts: bool) -> HostDriver:
    """Two devices; the second has a path to the first, which is what `facts` say."""
    return HostDriver([HostDevice(4 * UNIT, **facts), HostDevice(4 * UNIT)], paths=[(1, 0)])


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = driver_of()
    yield made
    assert nothing_is_left(made)
    made.close()


def nothing_is_left(driver: HostDriver) -> bool:
    accounts = [driver.account(device) for device in range(driver.device_count)]
    return driver.live() == {} and accounts == [DeviceAccount(0, 0, 0)] * len(accounts)


def test_a_path_that_works_is_proved(driver: HostDriver) -> None:
    assert fault_of_path(driver, 1, 0, UNIT) is None


def test_a_path_that_is_not_there_has_that_fault(driver: HostDriver) -> None:
    fault = fault_of_path(driver, 0, 1, UNIT)
    assert fault == "device 0 has no path to device 1: not given access"


def test_a_path_that_is_promised_and_refused_has_that_fault() -> None:
    driver = driver_of(refuses_peers=True)
    fault = fault_of_path(driver, 1, 0, UNIT)
    assert fault is not None
    assert fault.startswith("device 1: no access to device 0: set_access")
    assert nothing_is_left(driver)
    driver.close()


def test_a_path_on_which_writes_are_lost_is_found_out() -> None:
    driver = driver_of(drops_peer_writes=True)
    fault = fault_of_path(driver, 1, 0, UNIT)
    assert fault is not None
    assert "has a path to device 0 that loses data: 4,096 of 4,096 bytes written" in fault
    assert nothing_is_left(driver)
    driver.close()


def test_an_owner_without_memory_is_an_error_and_no_fault_of_the_path(driver: HostDriver) -> None:
    taken = driver.allocate(4 * UNIT, 0)
    with pytest.raises(DriverError, match="create"):
        fault_of_path(driver, 1, 0, UNIT)
    driver.free(taken)


@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_whatever_call_fails_a_path_is_not_taken_for_good_and_nothing_is_left(
    operation: str, forever: bool
) -> None:
    for nth in itertools.count(1):
        driver = driver_of()
        driver.faults.plan(operation, nth, forever=forever)
        try:
            fault = fault_of_path(driver, 1, 0, UNIT)
        except DriverError:
            fault = "an error"
        reached = driver.faults.calls[operation] >= nth
        tried_again = operation == "unmap" and not forever
        assert (fault is None) == (not reached or tried_again), nth
        driver.faults.lift()
        if operation not in ("unmap", "release", "address_free", "free_host", "stream_destroy"):
            assert nothing_is_left(driver)
        driver.close()
        if not reached:
            break


def test_a_device_that_is_lost_meanwhile_is_an_error() -> None:
    driver = driver_of()
    driver.faults.plan("copy_async", 2, lost=True)
    with pytest.raises(DeviceLost):
        fault_of_path(driver, 1, 0, UNIT)
    driver.close()
