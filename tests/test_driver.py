"""CUDA's driver: the contract of every driver, on a table made of host memory and on cards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_table_of_host import UNIT, HostTable
from driver_contract import DriverCase, ExecutionContract, MemoryContract, RangeContract

from strata_nb.driver import CudaDriver
from strata_nb.errors import DriverError, RuleViolation, UnsupportedDevice

REFUSAL = (RuleViolation, DriverError)


@pytest.fixture(
    params=[
        "table",
        pytest.param("card", marks=pytest.mark.gpu),
        pytest.param("two cards", marks=pytest.mark.two_gpus),
    ]
)
def case(request: pytest.FixtureRequest) -> Iterator[DriverCase]:
    if request.param == "table":
        table = HostTable()
        driver = CudaDriver(table)
        yield DriverCase(driver, UNIT, REFUSAL, with_path=(1, 0), without_path=(2, 0))
        assert driver.live() == {}
        driver.close()
        assert table.live() == {}
        table.close()
        return
    driver = card_driver()
    pair = None
    if request.param == "two cards":
        if driver.device_count < 2:
            driver.close()
            pytest.skip("needs two NVIDIA cards, there is one")
        pair = (1, 0)
    unit = driver.granularity(0, driver.chunk_granularity)
    reaches = pair is not None and driver.can_access(*pair)
    yield DriverCase(
        driver,
        unit,
        REFUSAL,
        with_path=pair if reaches else None,
        without_path=None if reaches else pair,
    )
    assert driver.live() == {}
    driver.close()


def card_driver() -> CudaDriver:
    try:
        return CudaDriver()
    except UnsupportedDevice as error:
        pytest.skip(error.message)


class TestMemory(MemoryContract):
    pass


class TestExecution(ExecutionContract):
    pass


class TestRanges(RangeContract):
    pass
