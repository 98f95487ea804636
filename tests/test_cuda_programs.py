"""Kernels and graphs of CUDA's driver, on a table made of host memory and on a card."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_world import ADD_PTX, WORLDS, CudaWorld, cuda_world
from driver_contract import read, write

from strata_nb.driver import CudaDriver
from strata_nb.errors import DriverError, RuleViolation, UnsupportedDevice

COUNT = 100


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[CudaWorld]:
    with cuda_world(request.param) as made:
        yield made


class Numbers:
    """Floats on a mapped chunk of a device, and a kernel that adds to them."""

    def __init__(self, world: CudaWorld, device: int = 0) -> None:
        driver = world.driver
        driver.synchronize(device)
        self.driver, self.device = driver, device
        self.address = driver.reserve(world.unit)
        driver.map(self.address, world.unit, driver.create(world.unit, device))
        driver.set_access(self.address, world.unit, [device])
        write(driver, self.address, np.arange(COUNT, dtype=np.float32).tobytes(), device)
        self.stream = driver.stream_create(device)
        self.module = driver.load_module(device, ADD_PTX)
        self.kernel = driver.function(self.module, "add")

    def add(self, value: float, count: int = COUNT) -> None:
        arguments = struct.pack("@qqf", self.address, count, value)
        self.driver.launch(self.kernel, (2, 1, 1), (64, 1, 1), 0, self.stream, arguments)

    def values(self) -> np.ndarray:
        self.driver.stream_synchronize(self.stream)
        data = read(self.driver, self.address, 4 * COUNT, self.device)
        return np.frombuffer(data, np.float32)


def test_a_kernel_writes_what_the_driver_mapped_and_the_driver_reads_it_back(
    world: CudaWorld,
) -> None:
    for device in range(world.driver.device_count):
        numbers = Numbers(world, device)
        numbers.add(0.5)
        numbers.add(2, count=10)
        wanted = np.arange(COUNT, dtype=np.float32) + 0.5
        wanted[:10] += 2
        assert np.array_equal(numbers.values(), wanted)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer])
def test_arguments_are_copied_from_any_buffer_before_launch_returns(
    world: CudaWorld, kind: type[bytes]
) -> None:
    numbers = Numbers(world)
    packed = bytearray(struct.pack("@qqf", numbers.address, COUNT, 1.0))
    arguments = np.frombuffer(packed, np.uint8) if kind is np.frombuffer else kind(packed)
    launch = ((2, 1, 1), (64, 1, 1), 0, numbers.stream, arguments)
    world.driver.launch(numbers.kernel, *launch)
    packed[:] = bytes(len(packed))
    assert np.array_equal(numbers.values(), np.arange(COUNT) + 1)


def test_captured_work_runs_as_often_as_its_graph_is_launched(world: CudaWorld) -> None:
    numbers, driver = Numbers(world), world.driver
    driver.capture_begin(numbers.stream)
    numbers.add(1)
    numbers.add(2)
    driver.fill_async(numbers.address, 0, 40, numbers.stream)
    graph = driver.capture_end(numbers.stream)
    assert np.array_equal(numbers.values(), np.arange(COUNT))
    executable = driver.graph_instantiate(graph, 0)
    driver.graph_destroy(graph)
    for _ in range(3):
        driver.graph_launch(executable, numbers.stream)
    wanted = np.arange(COUNT, dtype=np.float32) + 9
    wanted[:10] = 0
    assert np.array_equal(numbers.values(), wanted)
    driver.executable_destroy(executable)


def test_a_graph_cannot_hold_functions_of_python(world: CudaWorld) -> None:
    driver = world.driver
    stream = driver.stream_create(0)
    driver.capture_begin(stream)
    with pytest.raises(DriverError, match="functions of Python"):
        driver.launch_host(stream, lambda: None)
    driver.capture_end(stream)
    seen: list[int] = []
    driver.launch_host(stream, lambda: seen.append(1))
    driver.stream_synchronize(stream)
    assert seen == [1]


def test_a_capture_that_was_left_open_does_not_keep_the_driver_from_closing(
    world: CudaWorld,
) -> None:
    numbers = Numbers(world)
    world.driver.capture_begin(numbers.stream)
    numbers.add(1)
    world.driver.close()
    assert world.driver.live() == {}


def test_the_compilers_facts_of_a_kernel_are_told(world: CudaWorld) -> None:
    numbers = Numbers(world)
    facts = world.driver.function_facts(numbers.kernel)
    assert 0 < facts.registers <= 255
    assert facts.local_bytes == 0
    assert 0 <= facts.shared_bytes <= 1024


def test_a_kernel_may_be_allowed_as_much_shared_memory_as_the_card_has(world: CudaWorld) -> None:
    numbers, driver = Numbers(world), world.driver
    most = driver.card_facts(0).shared_block_bytes
    driver.set_dynamic_shared_bytes(numbers.kernel, most)
    with pytest.raises(DriverError, match=f"size {most + 1024:,}"):
        driver.set_dynamic_shared_bytes(numbers.kernel, most + 1024)


def test_an_image_that_is_no_code_is_refused_with_the_compilers_words(world: CudaWorld) -> None:
    with pytest.raises(DriverError, match="load_module on device 0: cuModuleLoadDataEx") as failed:
        world.driver.load_module(0, b".version 6.3\n.target sm_75\nwhat is that?\n")
    assert "ptxas" in failed.value.__notes__[0]


def test_a_kernel_that_a_module_lacks_is_named(world: CudaWorld) -> None:
    module = world.driver.load_module(0, ADD_PTX)
    with pytest.raises(DriverError, match="cuModuleGetFunction") as failed:
        world.driver.function(module, "subtract")
    assert failed.value.__notes__ == ["the kernel is subtract"]


def test_a_kernel_ends_with_its_module(world: CudaWorld) -> None:
    numbers = Numbers(world)
    world.driver.unload_module(numbers.module)
    with pytest.raises(RuleViolation, match="no function"):
        world.driver.function_facts(numbers.kernel)


def test_a_card_says_what_code_for_it_must_know(world: CudaWorld) -> None:
    for device in range(world.driver.device_count):
        facts = world.driver.card_facts(device)
        assert facts.index == device
        assert facts.name == world.driver.device_facts(device).name
        assert facts.capability >= (7, 5)
        assert facts.warp_size == 32
        assert facts.multiprocessors > 0
        assert facts.shared_block_bytes >= 48 << 10
        assert facts.memory_bytes >= world.driver.mem_info(device)[0]
        assert len(facts.bus_id.split(":")) == 3
        assert facts.is_integrated in (False, True)
    assert world.driver.version >= 12000


LOSE_A_CARD = """
import os
import struct
from cuda_world import ADD_PTX
from strata_nb.driver import CudaDriver
from strata_nb.errors import DeviceLost
driver = CudaDriver()
stream, block = driver.stream_create(0), driver.allocate(4096, 0)
kernel = driver.function(driver.load_module(0, ADD_PTX), "add")
driver.launch(kernel, (1, 1, 1), (1, 1, 1), 0, stream, struct.pack("@qqf", 64, 1, 1.0))
for call in (lambda: driver.stream_synchronize(stream), lambda: driver.mem_info(0)):
    try:
        call()
    except DeviceLost as error:
        print(error.code, error.call)
driver.close()
print(driver.live())
"""


@pytest.mark.gpu
def test_a_kernel_that_writes_where_nothing_is_loses_a_real_card_and_close_still_ends() -> None:
    try:
        CudaDriver().close()
    except UnsupportedDevice as error:
        pytest.skip(error.message)
    done = subprocess.run(
        [sys.executable, "-c", LOSE_A_CARD],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parent.parent}"},
    )
    assert done.stdout.splitlines() == ["700 stream_synchronize", "700 mem_info", "{}"], done.stderr
