"""The lines of `devices` about NVIDIA cards, on a table made of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from cuda_table_of_host import FailingTable, HostTable

from strata_nb.commands.devices import cards
from strata_nb.cuda_table import LibraryTable
from strata_nb.driver import CudaDriver
from strata_nb.errors import ConfigError, UnsupportedDevice


@pytest.fixture
def host() -> Iterator[HostTable]:
    made = HostTable(devices=2, budget_bytes=1024 << 20)
    yield made
    assert made.live() == {}
    made.close()


def test_every_card_says_its_memory_capability_and_driver(host: HostTable) -> None:
    assert cards(partial(CudaDriver, host)) == [
        f"cuda:{card}     NVIDIA Pretend {card}, 1.00 GiB of 1.00 GiB free, of which 68.0 MiB for "
        "weights, K/V and expert slots, compute capability 9.0, driver for CUDA 13.0"
        for card in (0, 1)
    ]


def test_one_card_can_be_asked_for(host: HostTable) -> None:
    (line,) = cards(partial(CudaDriver, host), "cuda:1")
    assert "Pretend 1" in line
    assert len(cards(partial(CudaDriver, host), "cuda")) == 2


def test_a_card_that_is_not_there_is_refused_with_those_that_are(host: HostTable) -> None:
    with pytest.raises(
        UnsupportedDevice, match="--device cuda:2: no card 2, there are 2"
    ) as refused:
        cards(partial(CudaDriver, host), "cuda:2")
    assert refused.value.hint == "cuda:0 to cuda:1"
    with pytest.raises(ConfigError, match="--device cuda:-1"):
        cards(partial(CudaDriver, host), "cuda:-1")


def test_a_card_that_cannot_be_used_says_why_and_hides_no_other(host: HostTable) -> None:
    table = FailingTable(host)
    table.plan("cuDevicePrimaryCtxRetain", status=46)
    first, second = cards(partial(CudaDriver, table))
    assert first.startswith("cuda:0     cannot be used: ")
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in first
    assert "Pretend 1" in second


def test_a_machine_without_a_card_says_why_in_one_line() -> None:
    def open_driver() -> CudaDriver:
        return CudaDriver(LibraryTable("libnone.so.1"))

    (line,) = cards(open_driver)
    assert line.startswith("cuda       none: no NVIDIA driver: libnone.so.1")
    with pytest.raises(UnsupportedDevice, match="--device cuda:0: no NVIDIA driver") as refused:
        cards(open_driver, "cuda:0")
    assert "install" in refused.value.hint
