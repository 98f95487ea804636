"""Prove that one device can use another's memory, by using it.

What a driver says of a path is not enough: with some settings of a machine (an IOMMU that is in the
way) every call succeeds and writes are dropped, which would be wrong answers without an error. So
a pattern goes both ways over the path before anything else does, once, when a path is first wanted.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from strata_nb.addresses import memory_view
from strata_nb.errors import DeviceLost, DriverError
from strata_nb.execution import Driver
from strata_nb.vmm import ChunkPool

PROBE_BYTES = 4096


def fault_of_path(driver: Driver, device: int, owner: int, chunk_bytes: int) -> str | None:
    """Return why `device` cannot use memory of `owner`, None where it can [5].

    Takes one chunk of `owner` meanwhile. Raises DriverError where the owner itself fails; nothing
    stays behind then either, unless undoing fails as well.
    """
    said: list[str] = []
    with ExitStack() as undo:
        pool = ChunkPool(driver, owner, chunk_bytes, say=said.append)
        undo.callback(pool.close)
        shared = pool.open_range(1, also_for=[device])
        shared.grow(1)
        if device not in shared.devices:
            return said[0]
        size = min(PROBE_BYTES, chunk_bytes)
        staging = driver.allocate_host(2 * size)
        undo.callback(driver.free_host, staging)
        sent, received = memory_view(staging, size), memory_view(staging + size, size)
        streams = []
        for one in (owner, device):
            streams.append(driver.stream_create(one))
            undo.callback(driver.stream_destroy, streams[-1])
        home, over = streams
        for number, (writer, reader, what) in enumerate(
            ((home, over, "read"), (over, home, "written"))
        ):
            sent[:] = np.arange(size) % 251 + number  # never 0xFF, which new memory may hold
            received[:] = 0xFF
            try:
                driver.copy_async(shared.base, staging, size, writer)
                driver.stream_synchronize(writer)
                driver.copy_async(staging + size, shared.base, size, reader)
                driver.stream_synchronize(reader)
            except DeviceLost:
                raise
            except DriverError as error:
                return f"device {device} cannot use memory of device {owner}: {error.message}"
            wrong = int(np.count_nonzero(sent != received))
            if wrong:
                return (
                    f"device {device} has a path to device {owner} that loses data: {wrong:,} of "
                    f"{size:,} bytes {what} over it were wrong"
                )
    return None
