"""One CUDA driver to test, over host memory or a card, with a table that fails calls on request."""

from __future__ import annotations

import atexit
import ctypes
import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from cuda_table_of_host import UNIT, FailingTable, HostTable, Launch

from strata_nb.cuda_table import LibraryTable
from strata_nb.driver import CudaDriver
from strata_nb.errors import UnsupportedDevice

# For parametrized fixtures: without a card, with one, with two.
WORLDS = [
    "table",
    pytest.param("card", marks=pytest.mark.gpu),
    pytest.param("two cards", marks=pytest.mark.two_gpus),
]

# Adds `value` to `count` floats from `address` on, one a thread.
ADD_PTX = b"""
.version 6.3
.target sm_75
.address_size 64

.visible .entry add(.param .u64 address, .param .u64 count, .param .f32 value)
{
    .reg .pred %outside;
    .reg .b32 %r<4>;
    .reg .b64 %rd<5>;
    .reg .f32 %f<3>;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.s32 %r3, %r0, %r1, %r2;
    cvt.u64.u32 %rd0, %r3;
    ld.param.u64 %rd1, [address];
    ld.param.u64 %rd2, [count];
    ld.param.f32 %f0, [value];
    setp.ge.u64 %outside, %rd0, %rd2;
    @%outside bra done;
    shl.b64 %rd3, %rd0, 2;
    add.u64 %rd4, %rd1, %rd3;
    ld.global.f32 %f1, [%rd4];
    add.f32 %f2, %f1, %f0;
    st.global.f32 [%rd4], %f2;
done:
    ret;
}
"""


def add(launch: Launch) -> None:
    """Do what ADD_PTX does."""
    address, count, value = struct.unpack("@qqf", launch.arguments)
    threads = launch.grid[0] * launch.block[0]
    floats = (ctypes.c_float * min(count, threads)).from_address(address)
    for place in range(len(floats)):
        floats[place] += value


KERNELS = {ADD_PTX: {"add": add}}


@dataclass(frozen=True)
class CudaWorld:
    """A driver and the table it calls.

    host      the table behind `table`, where that is not the library
    is_pair   whether it is about two cards
    """

    driver: CudaDriver
    table: FailingTable
    unit: int
    host: HostTable | None
    is_pair: bool


@contextmanager
def cuda_world(kind: str) -> Iterator[CudaWorld]:
    """Yield a world of one of `WORLDS`; everything must be freed at its end, the driver or not."""
    host = HostTable(kernels=KERNELS) if kind == "table" else None
    try:
        if host is None:
            _keep_contexts()
        table = FailingTable(LibraryTable() if host is None else host)
        driver = CudaDriver(table)
    except UnsupportedDevice as error:
        pytest.skip(error.message)
    if kind == "two cards" and driver.device_count < 2:
        driver.close()
        pytest.skip("needs two NVIDIA cards, there is one")
    yield CudaWorld(driver, table, UNIT, host, kind == "two cards")
    table.lift()
    driver.close()
    assert driver.live() == {}
    if host is not None:
        assert host.live() == {}
        host.close()


@functools.cache
def _keep_contexts() -> None:
    """Let every card have its context until this process ends, and all that it takes when used.

    A context takes memory for its first streams, copies and kernels and keeps it, which would show
    in tests that compare free memory; and making one for each test takes long.
    """
    keeper = CudaDriver()
    atexit.register(keeper.close)
    for device in range(keeper.device_count):
        address, pinned = keeper.allocate(64, device), keeper.allocate_host(64)
        stream, module = keeper.stream_create(device), keeper.load_module(device, ADD_PTX)
        keeper.copy_async(address, pinned, 64, stream)
        keeper.fill_async(address, 0, 64, stream)
        arguments = struct.pack("@qqf", address, 16, 1.0)
        kernel = keeper.function(module, "add")
        keeper.launch(kernel, (1, 1, 1), (32, 1, 1), 0, stream, arguments)
        keeper.launch_host(stream, lambda: None)
        keeper.stream_destroy(stream)
        keeper.unload_module(module)
        keeper.free(address)
        keeper.free_host(pinned)
