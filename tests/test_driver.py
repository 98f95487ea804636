"""CUDA's driver: the contract of every driver, and every call that can fail, n-th by n-th.

Everything here runs on a table made of host memory, and with `-m gpu` on a card.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
from cuda_world import ADD_PTX, WORLDS, CudaWorld, cuda_world
from driver_contract import (
    DriverCase,
    ExecutionContract,
    MemoryContract,
    RangeContract,
    held_stream,
    mark,
    marked,
    stream_on,
)

from strata_nb.driver import CudaDriver
from strata_nb.errors import DriverError, OutOfDeviceMemory, RuleViolation
from strata_nb.vmm import Account, ChunkPool, Range

REFUSAL = (RuleViolation, DriverError)
UNKNOWN = 999
PAGE_BYTES = 4096
CARD_CHUNK_BYTES = 32 << 20  # thousands fill a card, not tens of thousands
KEPT_OF_TWO_BYTES = 2 << 20  # of each of two cards that reach each other; of one card nothing


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[CudaWorld]:
    with cuda_world(request.param) as made:
        yield made


@pytest.fixture
def case(request: pytest.FixtureRequest, world: CudaWorld) -> Iterator[DriverCase]:
    made = case_of(world)
    yield made
    assert world.driver.live() == {}


def case_of(world: CudaWorld) -> DriverCase:
    driver = world.driver
    if world.host is not None:
        return DriverCase(driver, world.unit, REFUSAL, with_path=(1, 0), without_path=(2, 0))
    pair = (1, 0) if world.is_pair else None
    reaches = pair is not None and driver.can_access(*pair)
    return DriverCase(
        driver,
        CARD_CHUNK_BYTES,
        REFUSAL,
        with_path=pair if reaches else None,
        without_path=None if reaches else pair,
        kept_bytes=KEPT_OF_TWO_BYTES if world.is_pair else 0,
    )


class TestMemory(MemoryContract):
    pass


class TestExecution(ExecutionContract):
    def test_streams_run_beside_each_other(self, case: DriverCase) -> None:
        # CUDA may run the functions of all streams one after another: what runs beside one that
        # waits is the card's work.
        driver = case.driver
        address = driver.allocate(64, 0)
        with stream_on(driver) as free, held_stream(driver) as (_, end):
            driver.fill_async(address, 1, 64, free)
            driver.stream_synchronize(free)
            end()
        driver.free(address)


class TestRanges(RangeContract):
    pass


# Every function that moves memory or is asked on the way.
MEMORY_FUNCTIONS = (
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetInfo",
    "cuDeviceCanAccessPeer",
    "cuCtxSynchronize",
)


def has_pair(case: DriverCase) -> bool:
    return case.with_path is not None or case.without_path is not None


class Life:
    """Two ranges of one device that exchange memory, checked after each step."""

    def __init__(self, world: CudaWorld) -> None:
        self.driver = world.driver
        self.case = case_of(world)
        self.said: list[str] = []
        self.pools: list[ChunkPool] = []
        self.ranges: list[Range] = []

    def steps(self) -> Iterator[Callable[[], object]]:
        pool = ChunkPool(self.driver, 0, self.case.chunk_bytes, say=self.said.append)
        self.pools.append(pool)
        peers = [1] if has_pair(self.case) else []
        a, b = pool.open_range(6, also_for=peers), pool.open_range(6)
        self.ranges += [a, b]
        yield lambda: a.grow(4)
        yield lambda: pool.prepare(2)
        yield lambda: self.move(a, b, 2)
        yield lambda: a.grow(1)
        yield lambda: pool.give_back(2)
        yield lambda: self.move(b, a, 1)
        yield pool.open_range(2).close
        yield lambda: self.move(a, b, 3)
        yield lambda: b.grow(1)

    def move(self, source: Range, target: Range, count: int) -> None:
        source.retire(min(count, source.mapped_chunks))
        try:
            self.driver.synchronize(0)
        except DriverError:
            source.reinstate()
            raise
        target.grow(source.shrink())

    def live_through(self) -> int:
        """Take every step, whatever became of those before; returns how many failed."""
        failures = 0
        try:
            for step in self.steps():
                try:
                    step()
                except DriverError:
                    failures += 1
                self.check()
        except DriverError:  # a pool or a range could not be opened
            failures += 1
        return failures

    def check(self) -> None:
        """Compare the manager's books with the driver's."""
        live = self.driver.live()
        accounts = [pool.account() for pool in self.pools]
        for pool in self.pools:
            pool.check_integrity()
        stuck = sum(range_.stuck_chunks for pool in self.pools for range_ in pool.ranges)
        assert live.get("chunks", 0) == sum(account.capacity for account in accounts)
        assert live.get("mappings", 0) == sum(account.mapped for account in accounts) + stuck

    def use(self) -> None:
        """Write to all that is mapped, and read it back."""
        for range_ in self.ranges:
            for position in range(range_.mapped_chunks):
                mark(self.case, range_, position)
            found = [marked(self.case, range_, place) for place in range(range_.mapped_chunks)]
            assert found == list(range(range_.mapped_chunks))

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("function", MEMORY_FUNCTIONS)
def test_whatever_call_fails_ranges_stay_usable_and_nothing_is_left(
    world: CudaWorld, function: str, forever: bool
) -> None:
    driver, table = world.driver, world.table
    free = driver.mem_info(0)
    for nth in itertools.count(1):
        life = Life(world)
        first = table.calls[function]
        table.plan(function, nth, forever=forever)
        failures = life.live_through()
        reached = table.calls[function] >= first + nth
        table.lift()
        life.use()
        table.plan(function, nth, forever=forever)
        try:
            life.close()
        except DriverError:
            life.check()
        table.lift()
        life.close()
        assert driver.live() == {}
        assert [pool.account() for pool in life.pools] == [Account(0, 0, 0, 0)] * len(life.pools)
        assert driver.mem_info(0) == free
        if not reached:
            assert failures == 0
            break
    is_called = function != "cuDeviceCanAccessPeer" or has_pair(case_of(world))
    assert (nth > 1) == is_called


class Things:
    """One of everything that a driver makes."""

    def __init__(self, world: CudaWorld) -> None:
        driver, unit = world.driver, world.unit
        driver.mem_info(0)
        self.driver = driver
        self.unit = unit
        self.reserved = driver.reserve(2 * unit)
        self.mapped, self.unmapped = driver.create(unit, 0), driver.create(unit, 0)
        driver.map(self.reserved, unit, self.mapped)
        driver.set_access(self.reserved, unit, [0])
        self.empty = driver.reserve(unit)
        self.block = driver.allocate(64, 0)
        self.host_block = driver.allocate_host(4096)
        self.owned = ctypes.create_string_buffer(3 * PAGE_BYTES)  # somebody else's memory
        self.page = -(-ctypes.addressof(self.owned) // PAGE_BYTES) * PAGE_BYTES
        driver.register_host(self.page, PAGE_BYTES)
        self.stream, self.event = driver.stream_create(0), driver.event_create(0, timed=True)
        driver.event_record(self.event, self.stream)
        driver.event_synchronize(self.event)
        self.module = driver.load_module(0, ADD_PTX)
        self.kernel = driver.function(self.module, "add")
        driver.capture_begin(self.stream)
        driver.fill_async(self.block, 0, 64, self.stream)
        self.graph = driver.capture_end(self.stream)
        self.executable = driver.graph_instantiate(self.graph, 0)


# operation -> the function that fails, and the call; the operation is what the error names.
OPERATIONS: dict[str, tuple[str, Callable[[Things], object]]] = {
    "granularity": (
        "cuMemGetAllocationGranularity",
        lambda t: t.driver.granularity(0, "recommended"),
    ),
    "reserve": ("cuMemAddressReserve", lambda t: t.driver.reserve(t.unit)),
    "address_free": ("cuMemAddressFree", lambda t: t.driver.address_free(t.empty, t.unit)),
    "create": ("cuMemCreate", lambda t: t.driver.create(t.unit, 0)),
    "release": ("cuMemRelease", lambda t: t.driver.release(t.unmapped)),
    "map": ("cuMemMap", lambda t: t.driver.map(t.reserved + t.unit, t.unit, t.unmapped)),
    "unmap": ("cuMemUnmap", lambda t: t.driver.unmap(t.reserved, t.unit)),
    "set_access": ("cuMemSetAccess", lambda t: t.driver.set_access(t.reserved, t.unit, [0])),
    "mem_info": ("cuMemGetInfo", lambda t: t.driver.mem_info(0)),
    "synchronize": ("cuCtxSynchronize", lambda t: t.driver.synchronize(0)),
    "device_facts": ("cuDeviceGetName", lambda t: t.driver.device_facts(0)),
    "card_facts": ("cuDeviceGetAttribute", lambda t: t.driver.card_facts(0)),
    "allocate": ("cuMemAlloc", lambda t: t.driver.allocate(64, 0)),
    "free": ("cuMemFree", lambda t: t.driver.free(t.block)),
    "allocate_host": ("cuMemHostAlloc", lambda t: t.driver.allocate_host(64)),
    "free_host": ("cuMemFreeHost", lambda t: t.driver.free_host(t.host_block)),
    "register_host": (
        "cuMemHostRegister",
        lambda t: t.driver.register_host(t.page + PAGE_BYTES, PAGE_BYTES),
    ),
    "unregister_host": ("cuMemHostUnregister", lambda t: t.driver.unregister_host(t.page)),
    "stream_create": ("cuStreamCreateWithPriority", lambda t: t.driver.stream_create(0)),
    "stream_destroy": ("cuStreamDestroy", lambda t: t.driver.stream_destroy(t.stream)),
    "stream_synchronize": (
        "cuStreamSynchronize",
        lambda t: t.driver.stream_synchronize(t.stream),
    ),
    "event_create": ("cuEventCreate", lambda t: t.driver.event_create(0)),
    "event_destroy": ("cuEventDestroy", lambda t: t.driver.event_destroy(t.event)),
    "event_record": ("cuEventRecord", lambda t: t.driver.event_record(t.event, t.stream)),
    "event_wait": ("cuStreamWaitEvent", lambda t: t.driver.event_wait(t.stream, t.event)),
    "event_query": ("cuEventQuery", lambda t: t.driver.event_query(t.event)),
    "event_synchronize": ("cuEventSynchronize", lambda t: t.driver.event_synchronize(t.event)),
    "event_elapsed_s": ("cuEventElapsedTime", lambda t: t.driver.event_elapsed_s(t.event, t.event)),
    "copy_async": (
        "cuMemcpyAsync",
        lambda t: t.driver.copy_async(t.block, t.host_block, 64, t.stream),
    ),
    "fill_async": ("cuMemsetD8Async", lambda t: t.driver.fill_async(t.block, 0, 64, t.stream)),
    "launch_host": ("cuLaunchHostFunc", lambda t: t.driver.launch_host(t.stream, lambda: None)),
    "load_module": ("cuModuleLoadDataEx", lambda t: t.driver.load_module(0, ADD_PTX)),
    "unload_module": ("cuModuleUnload", lambda t: t.driver.unload_module(t.module)),
    "function": ("cuModuleGetFunction", lambda t: t.driver.function(t.module, "add")),
    "function_facts": ("cuFuncGetAttribute", lambda t: t.driver.function_facts(t.kernel)),
    "set_dynamic_shared_bytes": (
        "cuFuncSetAttribute",
        lambda t: t.driver.set_dynamic_shared_bytes(t.kernel, 1024),
    ),
    "launch": (
        "cuLaunchKernelEx",
        lambda t: t.driver.launch(t.kernel, (1, 1, 1), (1, 1, 1), 0, t.stream, bytes(20)),
    ),
    "capture_begin": ("cuStreamBeginCapture", lambda t: t.driver.capture_begin(t.stream)),
    "graph_instantiate": (
        "cuGraphInstantiateWithFlags",
        lambda t: t.driver.graph_instantiate(t.graph, 0),
    ),
    "graph_launch": ("cuGraphLaunch", lambda t: t.driver.graph_launch(t.executable, t.stream)),
    "graph_destroy": ("cuGraphDestroy", lambda t: t.driver.graph_destroy(t.graph)),
    "executable_destroy": (
        "cuGraphExecDestroy",
        lambda t: t.driver.executable_destroy(t.executable),
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_that_fails_says_which_and_changes_nothing(world: CudaWorld, operation: str) -> None:
    things = Things(world)
    function, call = OPERATIONS[operation]
    before = world.driver.live()
    world.table.plan(function)
    with pytest.raises(DriverError) as failed:
        call(things)
    assert (failed.value.call, failed.value.code) == (operation, UNKNOWN)
    assert failed.value.name == f"{function}: CUDA_ERROR_UNKNOWN"
    assert failed.value.device == (None if operation in ("reserve", "address_free") else 0)
    assert world.driver.live() == before
    call(things)
    if operation == "capture_begin":
        world.driver.capture_end(things.stream)


def test_memory_that_cards_would_see_elsewhere_is_not_left_registered(world: CudaWorld) -> None:
    things = Things(world)
    before = world.driver.live()
    world.table.plan("cuMemHostGetDevicePointer")
    with pytest.raises(DriverError, match="cuMemHostGetDevicePointer"):
        things.driver.register_host(things.page + PAGE_BYTES, PAGE_BYTES)
    assert world.driver.live() == before
    things.driver.register_host(things.page + PAGE_BYTES, PAGE_BYTES)


@pytest.mark.parametrize("operation", ["create", "allocate"])
def test_a_device_without_memory_says_how_much_was_wanted_and_free(
    world: CudaWorld, operation: str
) -> None:
    things = Things(world)
    function, call = OPERATIONS[operation]
    free, total = world.driver.mem_info(0)
    world.table.plan(function, status=2)
    with pytest.raises(OutOfDeviceMemory, match="CUDA_ERROR_OUT_OF_MEMORY") as failed:
        call(things)
    size = world.unit if operation == "create" else 64
    assert failed.value.numbers == {"size": size, "free": free, "total": total}
    assert "--ctx-size" in failed.value.hint


FREEING = (
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuModuleUnload",
    "cuEventDestroy",
    "cuStreamSynchronize",
    "cuStreamDestroy",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuCtxSynchronize",
    "cuDevicePrimaryCtxRelease",
)


def test_close_frees_what_was_forgotten_and_may_be_called_twice(world: CudaWorld) -> None:
    Things(world)
    assert len(world.driver.live()) == 11
    world.driver.close()
    world.driver.close()
    assert world.driver.live() == {}
    if world.host is not None:
        assert world.host.refused == []
        assert world.host.live() == {}


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("function", FREEING)
def test_a_close_that_fails_frees_the_rest_and_the_next_close_does_it(
    world: CudaWorld, function: str, nth: int
) -> None:
    Things(world)
    reached = world.table.calls[function] + nth
    world.table.plan(function, nth)
    fails = pytest.raises(DriverError, match=function)
    happens = nth == 1 or function in ("cuMemRelease", "cuMemAddressFree", "cuCtxSynchronize")
    with fails if happens else nullcontext():
        world.driver.close()
    assert (world.table.calls[function] >= reached) == happens
    assert len(world.driver.live()) <= 3  # the thing itself and what it lies in
    world.driver.close()
    assert world.driver.live() == {}


def test_a_driver_that_is_closed_refuses_everything(world: CudaWorld) -> None:
    world.driver.close()
    for call in (lambda: world.driver.mem_info(0), lambda: world.driver.reserve(world.unit)):
        with pytest.raises(RuleViolation, match="closed"):
            call()


@pytest.mark.parametrize(
    "broken",
    [
        lambda t: t.driver.release(12345),
        lambda t: t.driver.map(t.empty, t.unit, 12345),
        lambda t: t.driver.unmap(t.empty, t.unit),
        lambda t: t.driver.unmap(t.reserved, 2 * t.unit),
        lambda t: t.driver.set_access(t.empty, t.unit, [0]),
        lambda t: t.driver.address_free(t.reserved, t.unit),
        lambda t: t.driver.free(t.host_block),
        lambda t: t.driver.free_host(t.block),
        lambda t: t.driver.unregister_host(t.host_block),
        lambda t: t.driver.stream_destroy(12345),
        lambda t: t.driver.event_record(12345, t.stream),
        lambda t: t.driver.event_record(t.event, 12345),
        lambda t: t.driver.event_elapsed_s(t.event, 12345),
        lambda t: t.driver.event_elapsed_s(12345, t.event),
        lambda t: t.driver.function(12345, "add"),
        lambda t: t.driver.function_facts(12345),
        lambda t: t.driver.graph_launch(12345, t.stream),
        lambda t: t.driver.graph_instantiate(12345, 0),
    ],
)
def test_what_was_never_made_is_refused_before_the_driver_sees_it(
    world: CudaWorld, broken: Callable[[Things], object]
) -> None:
    things = Things(world)
    before = world.table.calls.copy()
    with pytest.raises(RuleViolation):
        broken(things)
    assert world.table.calls == before


# Functions of Python in a stream's order.


def fail() -> None:
    raise ZeroDivisionError("in a stream")


def test_an_error_of_a_stream_is_raised_once_where_it_is_waited_for(world: CudaWorld) -> None:
    driver = world.driver
    stream = driver.stream_create(0)
    seen: list[int] = []
    for wait in (partial(driver.stream_synchronize, stream), partial(driver.synchronize, 0)):
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


def test_closing_raises_the_error_that_nobody_has_seen_and_frees_all_the_same(
    world: CudaWorld,
) -> None:
    Things(world)
    world.driver.launch_host(world.driver.stream_create(0), fail)
    with pytest.raises(ZeroDivisionError):
        world.driver.close()
    assert world.driver.live() == {}


def test_a_function_that_the_driver_refused_does_not_hide_what_later_ones_raise(
    world: CudaWorld,
) -> None:
    driver = world.driver
    stream = driver.stream_create(0)
    world.table.plan("cuLaunchHostFunc")
    with pytest.raises(DriverError):
        driver.launch_host(stream, lambda: None)
    driver.launch_host(stream, fail)
    with pytest.raises(ZeroDivisionError):
        driver.stream_synchronize(stream)


def test_functions_that_have_run_are_not_kept(world: CudaWorld) -> None:
    driver = world.driver
    stream = driver.stream_create(0)
    for _ in range(100):
        driver.launch_host(stream, lambda: None)
        driver.event_synchronize(recorded(driver, stream))
    assert len(driver._streams[stream].works) <= 2


def recorded(driver: CudaDriver, stream: int) -> int:
    event = driver.event_create(0)
    driver.event_record(event, stream)
    return event


def test_freeing_waits_for_running_work(world: CudaWorld) -> None:
    driver = world.driver
    device, pinned = driver.allocate(64, 0), driver.allocate_host(64)
    for free, address in ((driver.free, device), (driver.free_host, pinned)):
        seen: list[str] = []
        with stream_on(driver) as stream:
            driver.launch_host(stream, partial(pause_then, seen))
            driver.fill_async(address, 1, 64, stream)
            free(address)
            assert seen == ["work"]


def pause_then(seen: list[str]) -> None:
    time.sleep(0.02)
    seen.append("work")
