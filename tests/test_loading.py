"""Loading: packed bytes are where they are said to be, and a load that fails leaves nothing."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf_bytes as raw
import numpy as np
import numpy.typing as npt
import pytest
from device_world import load, opened
from gguf_bytes import Tensor, build, put, scalar
from make_model import make_model
from model_shapes import ModelShape

from strata_nb import device_sizes, host_pages, loading, loading_pieces
from strata_nb.addresses import memory_view
from strata_nb.backend import HostBackend
from strata_nb.cache.experts import Filling
from strata_nb.cache.profile import rank_by_use, save_profile
from strata_nb.errors import (
    ConfigError,
    DriverError,
    FileFormatError,
    OutOfDeviceMemory,
    StrataError,
)
from strata_nb.formats import TensorType, dequantise, tensor_bytes
from strata_nb.gguf import GGUFFile
from strata_nb.host import HostDriver
from strata_nb.host_memory import HostDevice
from strata_nb.loading import (
    DenseWeights,
    HostExperts,
    begin_experts,
    cache_fits,
    check_memory,
    load_dense,
    load_experts,
)
from strata_nb.loading_layout import dense_layout, expert_layout
from strata_nb.loading_pieces import LoadProgress
from strata_nb.packing import unpack
from strata_nb.progress import Progress

Bytes = npt.NDArray[np.uint8]

# Parts of a blob whose bytes are no multiple of 256, and an embedding that ends in a short group.
SHAPE = ModelShape(
    "qwen3moe", layers=3, experts=5, dim=64, ff=32, heads=2, kv_heads=1, head_dim=32, vocab=515
)
RULES = [
    ("*gate_exps*", TensorType.Q4_0),
    ("*up_exps*", TensorType.Q8_0),
    ("blk.1.ffn_down_exps*", TensorType.F16),
    ("*down_exps*", TensorType.Q5_1),
    ("token_embd*", TensorType.Q4_1),
    ("output.weight", TensorType.BF16),
    ("*", TensorType.IQ4_NL),
]
LAYERS: list[Mapping[str, str]] = [
    {part: f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    for layer in range(SHAPE.layers)
]
BLOCK_BYTES = 20_000  # of the arena: two or three blobs
PIECE_BYTES = 600  # a group of rows or two
STAGING_BYTES = 4_000


class World:
    """A file, a driver, and loads with the settings of the test."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.driver = HostDriver([HostDevice(64 << 20)])
        self.dense_names = [name for name in file.tensors if "_exps" not in name]
        self.layout = expert_layout(file, LAYERS, block_bytes=BLOCK_BYTES)

    def load(
        self,
        what: str,
        *,
        threads: int = 2,
        keep_cached: bool = True,
        report: Progress | None = None,
    ) -> DenseWeights | HostExperts:
        file, driver, progress = self.file, self.driver, LoadProgress(self.file.size_bytes, report)
        if what == "dense":
            return load_dense(
                file,
                self.dense_names,
                driver,
                0,
                threads=threads,
                keep_cached=keep_cached,
                progress=progress,
            )
        return load_experts(
            file,
            LAYERS,
            self.layout,
            driver,
            threads=threads,
            keep_cached=keep_cached,
            progress=progress,
        )

    def dense(self) -> DenseWeights:
        loaded = self.load("dense")
        assert isinstance(loaded, DenseWeights)
        return loaded

    def experts(self) -> HostExperts:
        loaded = self.load("experts")
        assert isinstance(loaded, HostExperts)
        return loaded

    def names(self, what: str) -> list[str]:
        if what == "dense":
            return self.dense_names
        return [name for layer in LAYERS for name in layer.values()]


BOTH = pytest.mark.parametrize("what", ["dense", "experts"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loading") / "model.gguf"
    make_model(path, SHAPE, rules=RULES)
    return path


@pytest.fixture
def world(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(loading_pieces, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(loading, "STAGING_BYTES", STAGING_BYTES)
    with GGUFFile.open(model) as file:
        world = World(file)
        yield world
        world.driver.faults.lift()
        world.driver.close()


def unpacked(address: int, kind: TensorType, shape: tuple[int, ...]) -> Bytes:
    """Return the bytes that the file must have for what is packed at an address."""
    return unpack(kind, memory_view(address, tensor_bytes(kind, shape)), shape[0], shape[1])


def contents(loaded: DenseWeights | HostExperts) -> bytes:
    """Return all bytes that a load is to have written."""
    if isinstance(loaded, HostExperts):
        arena, blobs = loaded.arena, np.ndenumerate(loaded.arena.offsets)
        places = [(arena.address + at, loaded.layout.blob_bytes[layer]) for (layer, _), at in blobs]
    else:
        places = [
            (tensor.address, tensor_bytes(tensor.kind, tensor.shape))
            for tensor in loaded.tensors.values()
        ]
    return b"".join(memory_view(int(address), size).tobytes() for address, size in places)


class Mapped:
    """What the loads of a test map, in pages, and whether they ever did."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.ever = False


def assert_nothing_is_left(world: World, mapped: Mapped) -> None:
    assert world.driver.live() == {}
    assert mapped.sizes == {}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loading")]


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Mapped:
    found = Mapped()
    allocate, give_back = host_pages.allocate, host_pages.give_back

    def note(size: int) -> int:
        address = allocate(size)
        found.sizes[address], found.ever = size, True
        return address

    def forget(address: int, size: int) -> None:
        give_back(address, size)
        assert found.sizes.pop(address, size) == size  # or a reservation

    monkeypatch.setattr(host_pages, "allocate", note)
    monkeypatch.setattr(host_pages, "give_back", forget)
    return found


class System:
    """Functions of the C library that compiled threads call, each of which a test may replace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._replaced: dict[str, Any] = {}
        self._real = host_pages.function_address
        monkeypatch.setattr(host_pages, "function_address", self._address)

    def _address(self, name: str) -> int:
        if name not in self._replaced:
            return self._real(name)
        address = ctypes.cast(self._replaced[name], ctypes.c_void_p).value
        assert address
        return address

    def replace(self, name: str, function: Callable[[int, int, int, int], int]) -> None:
        self._replaced[name] = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(function)


def pread(descriptor: int, address: int, size: int, position: int) -> int:
    """Do what the system does."""
    return os.preadv(descriptor, [memory_view(address, size).data], position)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


# --- what is where


def test_dense_matrices_unpack_to_the_bytes_of_the_file(world: World) -> None:
    with world.dense() as weights:
        assert list(weights.tensors) == world.dense_names
        for name, tensor in weights.tensors.items():
            assert tensor.address % 256 == 0
            assert tensor.shape == world.file.tensors[name].shape
            if len(tensor.shape) == 2:
                assert tensor.kind is world.file.tensors[name].type
                found = unpacked(tensor.address, tensor.kind, tensor.shape)
                np.testing.assert_array_equal(found, world.file.raw(name), err_msg=name)


def test_the_bytes_on_the_device_are_known_before_anything_is_loaded(world: World) -> None:
    _, wanted = dense_layout(world.file, world.dense_names)
    before = world.driver.account(0).charged_bytes
    with world.dense() as weights:
        assert weights.size_bytes == wanted
        pages_bytes = -(-wanted // host_pages.PAGE_BYTES) * host_pages.PAGE_BYTES
        assert world.driver.account(0).charged_bytes - before == pages_bytes
        end = max(
            tensor.address + tensor_bytes(tensor.kind, tensor.shape)
            for tensor in weights.tensors.values()
        )
        first = min(tensor.address for tensor in weights.tensors.values())
        assert wanted - 256 < end - first <= wanted


def test_every_part_of_every_expert_unpacks_to_the_bytes_of_the_file(world: World) -> None:
    with world.experts() as experts:
        layout, arena = experts.layout, experts.arena
        assert arena.address % host_pages.LARGE_PAGE_BYTES == 0
        assert arena.offsets.shape == (SHAPE.layers, SHAPE.experts)
        for (layer, expert), offset in np.ndenumerate(arena.offsets):
            for part, (inside, kind, shape) in layout.parts[layer].items():
                name = LAYERS[layer][part]
                assert world.file.tensors[name].shape == (SHAPE.experts, *shape)
                whole = world.file.raw(name).reshape(SHAPE.experts, -1)
                found = unpacked(arena.address + int(offset) + inside, kind, shape)
                np.testing.assert_array_equal(found, whole[expert], err_msg=f"{name} {expert}")


def test_parts_and_blobs_are_aligned_and_do_not_overlap(world: World) -> None:
    layout = world.layout
    assert len(set(layout.blob_bytes)) == 2  # the layers differ
    for size, parts in zip(layout.blob_bytes, layout.parts, strict=True):
        ends = [0]
        for part in parts.values():
            assert part.offset % 256 == 0
            assert part.offset - ends[-1] in range(256)
            ends.append(part.offset + tensor_bytes(part.kind, part.shape))
        assert size % 256 == 0
        assert size - ends[-1] in range(256)
    end = 0
    for (layer, _), offset in np.ndenumerate(layout.offsets):
        assert offset % 256 == 0
        assert offset >= end
        end = offset + layout.blob_bytes[layer]
    assert end == layout.size_bytes


def test_a_block_holds_whole_blobs_and_shares_no_page_with_another(world: World) -> None:
    layout = world.layout
    assert len(layout.blocks) > 3
    assert all(start % host_pages.PAGE_BYTES == 0 for start, _ in layout.blocks)
    assert all(size <= BLOCK_BYTES for _, size in layout.blocks)
    for (layer, _), offset in np.ndenumerate(layout.offsets):
        size = layout.blob_bytes[layer]
        holders = [
            start
            for start, length in layout.blocks
            if start <= offset and offset + size <= start + length
        ]
        assert len(holders) == 1
    tiny = expert_layout(world.file, LAYERS, block_bytes=1)
    assert len(tiny.blocks) == SHAPE.layers * SHAPE.experts


def test_a_device_may_read_every_blob(world: World) -> None:
    stream = world.driver.stream_create(0)
    with world.experts() as experts:
        size = max(experts.layout.blob_bytes)
        target = world.driver.allocate(size, 0)
        for (layer, _), offset in np.ndenumerate(experts.arena.offsets):
            blob = experts.arena.address + int(offset)
            size = experts.layout.blob_bytes[layer]
            world.driver.copy_async(target, blob, size, stream)  # else RuleViolation
            world.driver.stream_synchronize(stream)
            np.testing.assert_array_equal(memory_view(target, size), memory_view(blob, size))
        world.driver.free(target)
    world.driver.stream_destroy(stream)


@BOTH
def test_the_number_of_threads_does_not_change_a_byte(world: World, what: str) -> None:
    with world.load(what, threads=1) as one, world.load(what, threads=3) as three:
        assert contents(one) == contents(three)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (TensorType.F32, (6,)),
        (TensorType.F16, (7,)),
        (TensorType.BF16, (9,)),
        (TensorType.F16, (1, 5)),
        (TensorType.F16, (1, 1, 5)),
        (TensorType.Q4_0, (64,)),
        (TensorType.F16, ()),
    ],
)
def test_a_vector_of_any_type_becomes_float32(
    tmp_path: Path, kind: TensorType, shape: tuple[int, ...]
) -> None:
    data = bytes(number * 7 % 251 for number in range(tensor_bytes(kind, shape or (1,))))
    tensors = [Tensor("before", (3,)), Tensor("v", shape, int(kind), data)]
    path = put(tmp_path, build({}, tensors))
    driver = HostDriver([HostDevice(1 << 20)])
    with GGUFFile.open(path) as file:
        wanted = dequantise(kind, file.raw("v"))
        with load_dense(
            file, ["before", "v"], driver, 0, threads=1, keep_cached=True, progress=LoadProgress(0)
        ) as weights:
            address, found, length = weights.tensors["v"]
            assert (found, length) == (TensorType.F32, wanted.shape)
            assert weights.size_bytes == 512
            assert memory_view(address, wanted.nbytes).tobytes() == wanted.tobytes()
    assert driver.live() == {}
    driver.close()


def test_tensors_come_from_every_shard_of_a_split_model(tmp_path: Path) -> None:
    for number in range(3):
        keys = {
            "split.no": scalar(raw.UINT16, number),
            "split.count": scalar(raw.UINT16, 3),
            "split.tensors.count": scalar(raw.INT32, 3),
        }
        name = f"m-{number + 1:05d}-of-00003.gguf"
        put(tmp_path, build(keys, [Tensor(f"t{number}", (24 - number, 32), 2)]), name)
    driver = HostDriver([HostDevice(1 << 20)])
    with GGUFFile.open(tmp_path / "m-00002-of-00003.gguf") as file:
        names = ["t2", "t0", "t1"]
        with load_dense(
            file, names, driver, 0, threads=2, keep_cached=True, progress=LoadProgress(0)
        ) as weights:
            for name, tensor in weights.tensors.items():
                found = unpacked(tensor.address, tensor.kind, tensor.shape)
                np.testing.assert_array_equal(found, file.raw(name))
    driver.close()


def test_a_stack_of_one_expert_with_one_row_stays_a_matrix(tmp_path: Path) -> None:
    names = {"gate": "g", "down": "d"}
    tensors = [Tensor("g", (1, 1, 64), 2), Tensor("d", (1, 64, 32), 2)]
    driver = HostDriver([HostDevice(1 << 20)])
    with GGUFFile.open(put(tmp_path, build({}, tensors))) as file:
        layout = expert_layout(file, [names])
        with load_experts(
            file, [names], layout, driver, threads=1, keep_cached=True, progress=LoadProgress(0)
        ) as experts:
            assert layout.blob_bytes == (256 + 64 * 18 + 128,)
            for part, (inside, kind, shape) in layout.parts[0].items():
                found = unpacked(experts.arena.address + inside, kind, shape)
                np.testing.assert_array_equal(found, file.raw(names[part]))
            gap = memory_view(experts.arena.address + 36, 256 - 36)
            assert not gap.any()
    driver.close()


# --- how it goes


@BOTH
def test_progress_counts_every_byte_of_the_file_once_on_the_calling_thread(
    world: World, what: str, system: System
) -> None:
    def slowly(*given: int) -> int:
        time.sleep(0.001)
        return pread(*given)

    system.replace("pread", slowly)
    said: list[tuple[int, int, threading.Thread]] = []
    world.load(
        what, report=lambda done, total: said.append((done, total, threading.current_thread()))
    ).close()
    size = sum(world.file.tensors[name].size_bytes for name in world.names(what))
    assert len(said) > 5  # as it goes
    assert [done for done, _, _ in said] == sorted({done for done, _, _ in said})
    assert said[-1][0] == size
    assert {total for _, total, _ in said} == {world.file.size_bytes}
    assert {thread for _, _, thread in said} == {threading.current_thread()}


def test_one_progress_counts_several_loads(world: World) -> None:
    progress = LoadProgress(world.file.size_bytes)
    for _ in range(2):
        load_dense(
            world.file,
            ["output_norm.weight"],
            world.driver,
            0,
            threads=1,
            keep_cached=True,
            progress=progress,
        ).close()
    assert progress.done_bytes == 2 * 4 * SHAPE.dim


@BOTH
@pytest.mark.parametrize("keep_cached", [True, False])
def test_the_cache_is_let_go_behind_the_readers_only_where_it_is_wanted(
    world: World, what: str, keep_cached: bool, system: System
) -> None:
    forgotten: list[tuple[int, int]] = []

    def forget(descriptor: int, position: int, size: int, advice: int) -> int:
        assert advice == os.POSIX_FADV_DONTNEED
        forgotten.append((position, size))
        return 0

    system.replace("posix_fadvise", forget)
    world.load(what, keep_cached=keep_cached).close()
    found: list[tuple[int, int]] = []
    for position, size in sorted(forgotten):
        if found and sum(found[-1]) == position:
            position, size = found[-1][0], found.pop()[1] + size
        found.append((position, size))
    wanted = sorted(
        (tensor.offset, tensor.size_bytes)
        for tensor in (world.file.tensors[name] for name in world.names(what))
    )
    if not keep_cached:
        starts = {start for start, _ in wanted}
        assert {start for start, _ in found} <= starts  # tensors without a gap are one
        assert sum(size for _, size in found) == sum(size for _, size in wanted)
    else:
        assert found == []


# --- overlap


def test_a_block_is_registered_and_told_of_while_later_ones_are_not_read_yet(
    world: World, system: System
) -> None:
    told = threading.Event()
    late: list[int] = []  # pieces that waited in vain
    last = max(world.file.tensors[name].offset for layer in LAYERS[-1:] for name in layer.values())

    def read(descriptor: int, address: int, size: int, position: int) -> int:
        if position >= last and not late and not told.wait(20):
            late.append(position)
        return pread(descriptor, address, size, position)

    system.replace("pread", read)
    seen: list[tuple[int, int]] = []

    def ready(address: int, size: int) -> None:
        world.driver.unregister_host(address)  # else RuleViolation: it is registered
        world.driver.register_host(address, size)
        seen.append((address, size))
        if len(seen) == 2:
            told.set()

    with begin_experts(
        world.file,
        LAYERS,
        world.layout,
        world.driver,
        threads=2,
        keep_cached=True,
        progress=LoadProgress(0),
    ) as experts:
        experts.finish(ready)
        assert not late
        start = experts.arena.address
        assert seen == [(start + offset, size) for offset, size in world.layout.blocks]
        found = contents(experts)
    with world.experts() as whole:
        assert found == contents(whole)


def test_dense_weights_are_read_while_earlier_ones_are_copied_and_no_staging_is_written_early(
    world: World, monkeypatch: pytest.MonkeyPatch, system: System
) -> None:
    with world.dense() as weights:
        wanted = contents(weights)
    read_bytes = itertools.accumulate(itertools.repeat(1))
    reads = [0]
    begun: list[int] = []

    def read(*given: int) -> int:
        reads[0] = next(read_bytes)
        return pread(*given)

    copy_async = HostDriver.copy_async

    def copy(driver: HostDriver, *given: int) -> None:
        time.sleep(0.003)  # time enough to fill every other staging
        begun.append(reads[0])
        copy_async(driver, *given)

    system.replace("pread", read)
    monkeypatch.setattr(HostDriver, "copy_async", copy)
    with world.dense() as weights:
        assert contents(weights) == wanted
    assert len(begun) > 2 * loading.STAGINGS
    pieces = reads[0]
    assert begun[0] > pieces / len(begun)  # more than what is copied was read
    assert begun[0] < pieces  # and not all


@pytest.fixture
def profile(model: Path, tmp_path: Path) -> Path:
    """A profile that ranks every expert."""
    path = tmp_path / "whole.profile"
    save_profile(path, rank_by_use(np.zeros((SHAPE.layers, SHAPE.experts), np.int64)))
    return path


def test_a_model_is_laid_out_and_its_slots_are_filled_while_experts_are_read(
    model: Path, profile: Path, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        device_sizes, "expert_layout", functools.partial(expert_layout, block_bytes=BLOCK_BYTES)
    )
    events: list[str] = []
    prepared, copied = threading.Event(), threading.Event()
    with GGUFFile.open(model) as file:
        stacks = [file.tensors[name] for layer in LAYERS for name in layer.values()]
    last = max(tensor.offset for tensor in stacks)
    late: list[int] = []  # pieces that waited in vain

    def read(descriptor: int, address: int, size: int, position: int) -> int:
        of_experts = any(
            tensor.offset <= position < tensor.offset + tensor.size_bytes for tensor in stacks
        )
        if of_experts and not late and not (copied if position >= last else prepared).wait(20):
            late.append(position)
        return pread(descriptor, address, size, position)

    prepare, copy = HostBackend.prepare, Filling.copy

    def note_programs(backend: HostBackend, *given: Any) -> Any:
        programs = prepare(backend, *given)
        events.append("programs")
        prepared.set()
        return programs

    def note_copies(filling: Filling, *given: int) -> None:
        copy(filling, *given)
        events.append("copies")
        if events.count("copies") == 2:
            copied.set()

    system.replace("pread", read)
    monkeypatch.setattr(HostBackend, "prepare", note_programs)
    monkeypatch.setattr(Filling, "copy", note_copies)
    with opened(model, "host:1x4MiB@16KiB", expert_profile=profile) as made:
        assert not late
        assert events[0] == "programs"
        assert made.report().devices[0].resident == SHAPE.layers * SHAPE.experts


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_an_opening_while_experts_are_read_leaves_nothing(
    model: Path,
    system: System,
    monkeypatch: pytest.MonkeyPatch,
    mapped: Mapped,
    error: type[BaseException],
) -> None:
    def read(*given: int) -> int:
        time.sleep(0.001)
        return pread(*given)

    def refuse(*_: object) -> None:
        raise error

    system.replace("pread", read)
    monkeypatch.setattr(HostBackend, "prepare", refuse)
    backend = HostBackend("host:1x4MiB@16KiB", 2)
    try:
        with pytest.raises(error):
            load(backend, model, ctx=256, rows=64)
        assert backend.driver.live() == {}
        assert mapped.ever
        assert mapped.sizes == {}
        assert not [one for one in threading.enumerate() if one.name.startswith("loading")]
    finally:
        backend.close()


def test_experts_that_nobody_waits_for_leave_nothing(world: World, mapped: Mapped) -> None:
    begin_experts(
        world.file,
        LAYERS,
        world.layout,
        world.driver,
        threads=2,
        keep_cached=True,
        progress=LoadProgress(0),
    ).close()
    assert mapped.ever
    assert_nothing_is_left(world, mapped)


# --- what fails


@BOTH
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_load_that_is_interrupted_leaves_nothing(
    world: World, what: str, error: type[BaseException], mapped: Mapped
) -> None:
    def interrupt(done: int, _: int) -> None:
        if done > 3 * PIECE_BYTES:
            raise error

    with pytest.raises(error):
        world.load(what, report=interrupt)
    assert mapped.ever
    assert_nothing_is_left(world, mapped)


@BOTH
def test_ctrl_c_ends_a_load_within_a_piece_of_each_worker(
    world: World, what: str, mapped: Mapped, system: System
) -> None:
    calls = itertools.count()

    def read(*given: int) -> int:
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)  # raises in the main thread, which waits
        time.sleep(0.005)
        return pread(*given)

    system.replace("pread", read)
    with pytest.raises(KeyboardInterrupt):
        world.load(what)
    assert next(calls) < 20  # there are more than a hundred pieces
    assert_nothing_is_left(world, mapped)


def test_an_interrupt_while_the_workers_end_waits_for_them(
    world: World, mapped: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown = loading_pieces.ThreadPoolExecutor.shutdown
    interrupts = iter([KeyboardInterrupt, KeyboardInterrupt])

    def interrupted(pool: loading_pieces.ThreadPoolExecutor) -> None:
        for interrupt in interrupts:
            raise interrupt
        shutdown(pool)

    monkeypatch.setattr(loading_pieces.ThreadPoolExecutor, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.load("experts")
    assert_nothing_is_left(world, mapped)


@BOTH
def test_an_error_of_one_worker_stops_the_others_soon(
    world: World, what: str, mapped: Mapped, monkeypatch: pytest.MonkeyPatch, system: System
) -> None:
    calls = itertools.count()

    def read(*given: int) -> int:
        if next(calls) == 3:
            return -1
        time.sleep(0.005)
        return pread(*given)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "on request")

    system.replace("pread", read)
    monkeypatch.setattr(GGUFFile, "read_into", refuse)
    with pytest.raises(OSError, match="on request"):
        world.load(what, threads=3)
    assert next(calls) < 20  # there are more than a hundred pieces
    assert_nothing_is_left(world, mapped)


@BOTH
def test_a_read_that_comes_short_goes_on_and_one_that_fails_once_is_tried_again(
    world: World, what: str, system: System
) -> None:
    calls = itertools.count()

    def read(descriptor: int, address: int, size: int, position: int) -> int:
        call = next(calls)
        if call % 7 == 3:
            return -1
        return pread(descriptor, address, size if call % 3 else -(-size // 2), position)

    with world.load(what) as loaded:
        wanted = contents(loaded)
    system.replace("pread", read)
    with world.load(what) as loaded:
        assert contents(loaded) == wanted
    assert next(calls) > 100


@BOTH
def test_a_file_that_the_system_cannot_read_is_named_with_the_byte(
    world: World, what: str, tmp_path: Path, mapped: Mapped
) -> None:
    path = tmp_path / "unreadable.gguf"
    path.write_bytes(world.file.path.read_bytes())
    folder = os.open(tmp_path, os.O_RDONLY)

    with GGUFFile.open(path) as file:
        world.file = file
        os.dup2(folder, file.descriptor(world.names(what)[0]))
        with pytest.raises(FileFormatError, match="cannot be read: Is a directory") as caught:
            world.load(what)
        assert caught.value.offset is not None
    os.close(folder)
    assert_nothing_is_left(world, mapped)


@BOTH
def test_memory_that_a_worker_does_not_get_ends_the_load(
    world: World, what: str, mapped: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = np.empty
    left = iter([True])

    def refuses_once(*given: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and next(left, False):
            raise MemoryError("no buffer")
        return empty(*given, **named)

    monkeypatch.setattr(np, "empty", refuses_once)
    with pytest.raises(MemoryError, match="no buffer"):
        world.load(what)
    monkeypatch.undo()
    assert_nothing_is_left(world, mapped)


@pytest.mark.parametrize("started", [0, 1])
def test_a_load_goes_on_with_the_threads_that_can_be_started(
    world: World, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = loading_pieces.ThreadPoolExecutor.submit
    left = iter([True] * started)

    def limited(pool: Any, *given: Any) -> Any:
        if next(left, False):
            return submit(pool, *given)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(loading_pieces.ThreadPoolExecutor, "submit", limited)
    if started:
        with world.load("experts", threads=3) as loaded:
            found = contents(loaded)
        monkeypatch.undo()
        with world.experts() as loaded:
            assert found == contents(loaded)
    else:
        with pytest.raises(StrataError, match="no thread can be started") as caught:
            world.load("experts", threads=3)
        assert "ulimit -u" in caught.value.hint


@BOTH
def test_a_file_that_is_cut_while_it_is_loaded_is_named_with_the_byte(
    world: World, what: str, tmp_path: Path, mapped: Mapped
) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(world.file.path.read_bytes())
    first, last = (world.file.tensors[world.names(what)[at]] for at in (0, -1))
    cut = (first.offset + last.offset) // 2
    with GGUFFile.open(path) as file:
        world.file = file
        world.layout = expert_layout(file, LAYERS)  # one block, which is read from end to end
        os.truncate(path, cut)
        with pytest.raises(FileFormatError, match="ends within tensor") as caught:
            world.load(what, threads=1)
    assert caught.value.offset == cut
    assert_nothing_is_left(world, mapped)


@BOTH
@pytest.mark.parametrize(
    "operation",
    [
        "allocate",
        "allocate_host",
        "stream_create",
        "copy_async",
        "stream_synchronize",
        "register_host",
    ],
)
def test_whichever_call_of_the_driver_fails_nothing_is_left(
    world: World, what: str, operation: str, mapped: Mapped
) -> None:
    failures = 0
    for nth in itertools.count(1):
        if nth > 4 and operation in ("copy_async", "stream_synchronize"):
            break  # one for each staging
        world.driver.faults.plan(operation, nth)
        try:
            world.load(what).close()
        except DriverError:
            failures += 1
            assert_nothing_is_left(world, mapped)
        else:
            break
    used = {"register_host"} if what == "experts" else {"allocate", "allocate_host"}
    used |= {"stream_create", "copy_async", "stream_synchronize"} if what == "dense" else set()
    assert (failures > 0) == (operation in used)
    if operation == "register_host" and what == "experts":
        assert failures == len(world.layout.blocks)


def test_a_refusal_of_the_system_says_how_much_was_wanted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise host_pages.PagesError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(host_pages, "allocate", refuse)
    with pytest.raises(OutOfDeviceMemory) as caught:
        world.load("experts")
    assert caught.value.code == errno.ENOMEM
    assert caught.value.numbers["bytes"] == world.layout.size_bytes + (2 << 20)
    assert caught.value.hint


@BOTH
def test_close_frees_everything_and_may_be_repeated(
    world: World, what: str, mapped: Mapped
) -> None:
    loaded = world.load(what)
    assert set(world.driver.live()) == {"blocks"}
    loaded.close()
    loaded.close()
    assert_nothing_is_left(world, mapped)


@BOTH
def test_weights_that_nobody_closed_are_freed_with_a_warning(
    world: World, what: str, mapped: Mapped
) -> None:
    world.load(what).close()  # what was closed says nothing
    loaded = [world.load(what)]
    with pytest.warns(ResourceWarning, match="never closed"):
        loaded.clear()
    assert_nothing_is_left(world, mapped)


# --- memory


def test_what_cannot_fit_is_refused_with_the_whole_sum() -> None:
    needs = {"experts": 9_000, "dense weights": 1_500, "K/V": 0}
    with pytest.raises(ConfigError) as caught:
        check_memory(needs, limit_bytes=10_499, available_bytes=10_000)
    words = caught.value.message.replace("\n", " ").split()
    numbers = [word for word in words if word[0].isdigit()]
    assert numbers == ["9,000", "1,500", "10,500", "10,499", "1"]
    assert "K/V" not in words
    assert caught.value.hint


def test_what_does_not_fit_now_is_only_warned_about() -> None:
    (warning,) = check_memory({"experts": 1_500}, limit_bytes=1_500, available_bytes=1_499)
    assert "1,500" in warning
    assert "1,499" in warning
    assert check_memory({"experts": 1_500}, limit_bytes=1_500, available_bytes=1_500) == []


def test_the_figures_are_those_of_this_machine_unless_given() -> None:
    assert check_memory({"experts": 1}) == []
    with pytest.raises(ConfigError):
        check_memory({"experts": 1 << 62})


def test_the_file_stays_cached_where_it_fits_beside_what_is_loaded(world: World) -> None:
    whole = 1_000 + world.file.size_bytes
    assert cache_fits(world.file, 1_000, available_bytes=whole)
    assert not cache_fits(world.file, 1_000, available_bytes=whole - 1)
    assert cache_fits(world.file, 0)
