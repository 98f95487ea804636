"""How fast a device copies from pinned memory: what the speed of misses is measured against."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

from strata_nb.errors import StrataError
from strata_nb.execution import PLAIN_UNIT_BYTES, Driver
from strata_nb.plain_read import PlainRead

MOST_BYTES = 64 << 20  # of a copy, or half of what is free
LEAST_BYTES = 1 << 20  # which takes several times what a copy costs to begin
PASSES = 10


def link_rate(driver: Driver, device: int) -> PlainRead:
    """Copy a buffer again and again; StrataError where the device has no memory for one."""
    free_bytes, _ = driver.mem_info(device)
    size = min(MOST_BYTES, free_bytes // 2) // PLAIN_UNIT_BYTES * PLAIN_UNIT_BYTES
    if size < LEAST_BYTES:
        raise StrataError(
            f"{free_bytes:,} bytes of device {device} are free, and {2 * LEAST_BYTES:,} are needed "
            "to measure it",
            hint="a larger --vram-reserve-mib leaves more",
        )
    with ExitStack() as made:
        stream = driver.stream_create(device)
        made.callback(driver.stream_destroy, stream)
        pinned = driver.allocate_host(size)
        made.callback(driver.free_host, pinned)
        target = driver.allocate(size, device)
        made.callback(driver.free, target)
        events = []
        for _ in range(PASSES + 1):
            events.append(driver.event_create(device, timed=True))
            made.callback(driver.event_destroy, events[-1])
        driver.copy_async(target, pinned, size, stream)  # the first finds pages that are new
        driver.event_record(events[0], stream)
        for event in events[1:]:
            driver.copy_async(target, pinned, size, stream)
            driver.event_record(event, stream)
        driver.stream_synchronize(stream)
        return PlainRead(size, tuple(driver.event_elapsed_s(*pair) for pair in pairwise(events)))
