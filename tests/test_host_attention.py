"""The host's rotation, storing and attention, against the numpy reference."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray
from test_host_paths import runnable

from strata_nb.cache.kv_layout import BLOCK_CELLS, HeadPlane, KVLayout, Part
from strata_nb.kernels import reference
from strata_nb.kernels.host import instructions, vectors
from strata_nb.kernels.host.attention import attention_kernel, attention_work_bytes
from strata_nb.kernels.host.capability import Path
from strata_nb.kernels.host.operations import HostKernel, Work
from strata_nb.kernels.host.rotation import kv_append_kernel, rope_kernel
from strata_nb.kernels.program import launch
from strata_nb.raw_memory import store

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
NAN_BYTE = 0xFF  # a float, a float16 and a scale of such bytes are all NaN

TYPES = [("f32", "f32"), ("f16", "f16"), ("int8", "int8"), ("int8", "f16"), ("f16", "int8")]
LENGTHS = (64, 36)  # of most tests, because every pair of lengths is a kernel to compile
types = pytest.mark.parametrize("kinds", TYPES, ids=lambda kinds: "-".join(kinds))


def run(
    kernel: str, host: HostKernel, values: Mapping[str, Any], variant: Any = None, threads: int = 1
) -> None:
    """Run a kernel on arrays, one thread after the other."""
    plain = {
        name: value.ctypes.data if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    words = launch(kernel, plain, variant=variant).arguments
    arguments = np.array(words + host.extra, np.int64)
    for thread in range(threads):
        host.function(arguments.ctypes.data, thread, threads)


# -- a K/V in plain arrays -------------------------------------------------------------------------


@dataclass
class Store:
    """Hold the second of two layers of some sequences, in blocks that lie anywhere."""

    kinds: tuple[str, str]
    kv_heads: int
    lengths: tuple[int, int]
    sequences: int = 1
    cells: int = 256
    layout: KVLayout = field(init=False)
    memory: NDArray[np.uint8] = field(init=False)
    table: Integers = field(init=False)

    def __post_init__(self) -> None:
        key, value = (HeadPlane(*pair) for pair in zip(self.kinds, self.lengths, strict=True))
        self.layout = KVLayout(2, self.kv_heads, key, value)
        width = -(-self.cells // BLOCK_CELLS)
        count = self.sequences * width
        self.memory = np.full(count * self.layout.block_bytes, NAN_BYTE, np.uint8)
        order = np.random.default_rng(7).permutation(count).reshape(self.sequences, width)
        self.table = self.memory.ctypes.data + order.astype(np.int64) * self.layout.block_bytes

    def planes(self, part: Part, sequence: int, cell: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return views of a cell: values (heads, length), scales (heads, groups)."""
        plane = self.layout.plane(part)
        place = int(self.table[sequence, cell // BLOCK_CELLS]) - self.memory.ctypes.data
        place += self.layout.part_offset(1, part)
        heads = self.memory[place : place + self.kv_heads * plane.size_bytes]
        heads = heads.reshape(self.kv_heads, plane.size_bytes)
        values = heads[:, : plane.scales_offset].view(plane.value_type)
        values = values.reshape(self.kv_heads, BLOCK_CELLS, plane.length)[:, cell % BLOCK_CELLS]
        scales = heads[:, plane.scales_offset :].view(plane.scale_type)
        scales = scales.reshape(self.kv_heads, BLOCK_CELLS, plane.groups)[:, cell % BLOCK_CELLS]
        return values, scales

    def write(self, part: Part, sequence: int, cell: int, x: Floats) -> None:
        values, scales = self.planes(part, sequence, cell)
        if self.layout.plane(part).groups:
            values[:], scales[:] = reference.quantise_kv(x)
        else:
            values[:] = x

    def read(self, part: Part, sequence: int, cells: int) -> Floats:
        """Return the first cells of a sequence as (heads, cells, length)."""
        found = []
        for cell in range(cells):
            values, scales = self.planes(part, sequence, cell)
            if self.layout.plane(part).groups:
                found.append(reference.dequantise_kv(values, scales))
            else:
                found.append(values.astype(np.float32))
        return np.stack(found, axis=1)

    def fill(self, sequence: int, cells: int, rng: np.random.Generator) -> None:
        for cell in range(cells):
            for part, length in zip(("k", "v"), self.lengths, strict=True):
                x = rng.standard_normal((self.kv_heads, length)).astype(np.float32)
                self.write(part, sequence, cell, x)  # type: ignore[arg-type]

    def attend(
        self,
        q: Floats,
        sequences: Sequence[int],
        positions: Sequence[int],
        threads: int = 1,
        scale: float = 0.25,
    ) -> Floats:
        rows, heads, _ = q.shape
        key_length, value_length = self.lengths
        stride = attention_work_bytes(value_length)
        work = np.full(threads * stride, NAN_BYTE, np.uint8)
        out = np.full((rows, heads, value_length), np.float32(7e33))
        guard = np.full(16, np.float32(7e33))  # behind the result: nothing may touch it
        both = np.concatenate([out.reshape(-1), guard])
        host = attention_kernel(
            *self.kinds, key_length, value_length, Work(work.ctypes.data, stride)
        )
        arguments = {
            "rows": np.array([rows]),
            "sequences": np.array(sequences, np.int64),
            "positions": np.array(positions, np.int64),
            "q": q,
            "blocks": self.table,
            "out": both,
            "work": np.zeros(0, np.float32),
            "table_width": self.table.shape[1],
            "k_offset": self.layout.part_offset(1, "k"),
            "v_offset": self.layout.part_offset(1, "v"),
            "heads": heads,
            "kv_heads": self.kv_heads,
            "key_length": key_length,
            "value_length": value_length,
            "scale": scale,
        }
        run("attention", host, arguments, self.kinds, threads)
        assert np.all(both[-16:] == np.float32(7e33))
        return both[:-16].reshape(out.shape)

    def expected(self, q: Floats, sequence: int, positions: Sequence[int]) -> Floats:
        """Return what the reference makes of rows of one sequence; positions ascend."""
        cells = max(positions) + 1
        keys, values = self.read("k", sequence, cells), self.read("v", sequence, cells)
        return reference.attention(q, keys, values, np.array(positions), 0.25)


def random_queries(rows: int, heads: int, length: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, heads, length)).astype(np.float32)


def close(found: Floats, expected: Floats) -> bool:
    return np.allclose(found, expected, rtol=2e-5, atol=5e-6)


# -- attention -------------------------------------------------------------------------------------


@types
def test_rows_attend_as_the_reference_does(kinds: tuple[str, str]) -> None:
    kv = Store(kinds, 2, LENGTHS)
    kv.fill(0, 201, np.random.default_rng(0))
    positions = [0, 63, 64, 65, 200]
    q = random_queries(5, 6, LENGTHS[0])
    assert close(kv.attend(q, [0] * 5, positions), kv.expected(q, 0, positions))


@pytest.mark.parametrize("lengths", [(16, 16), (80, 128), (20, 96), (7, 1)])
def test_heads_of_any_length_attend(lengths: tuple[int, int]) -> None:
    kv = Store(("f16", "int8"), 1, lengths)
    kv.fill(0, 70, np.random.default_rng(0))
    q = random_queries(9, 4, lengths[0])
    positions = list(range(60, 69))
    assert close(kv.attend(q, [0] * 9, positions), kv.expected(q, 0, positions))


@types
def test_a_row_has_the_same_bits_alone_and_in_a_prompt(kinds: tuple[str, str]) -> None:
    kv = Store(kinds, 2, LENGTHS, cells=320)
    kv.fill(0, 300, np.random.default_rng(0))
    positions = list(range(210, 210 + 75))
    q = random_queries(75, 6, 64)
    together = kv.attend(q, [0] * 75, positions)
    for row, position in enumerate(positions):
        alone = kv.attend(q[row : row + 1], [0], [position])
        assert np.array_equal(alone[0], together[row])


@pytest.mark.parametrize("rows", [1, 3, 80])
def test_the_number_of_threads_changes_no_bit(rows: int) -> None:
    kv = Store(("f16", "f16"), 3, LENGTHS)
    kv.fill(0, 170, np.random.default_rng(0))
    positions = list(range(90, 90 + rows))
    q = random_queries(rows, 9, 64)
    one = kv.attend(q, [0] * rows, positions)
    for threads in (2, 3, 16):
        assert np.array_equal(kv.attend(q, [0] * rows, positions, threads), one)


def test_rows_of_several_sequences_attend_to_their_own_cells() -> None:
    kv = Store(("f16", "f16"), 2, LENGTHS, sequences=3)
    rng = np.random.default_rng(0)
    for sequence, cells in enumerate((130, 66, 5)):
        kv.fill(sequence, cells, rng)
    # In any order, and with positions that jump within a run of one sequence.
    sequences = [1, 0, 0, 0, 0, 2, 2, 1, 1, 0]
    positions = [65, 3, 128, 64, 129, 0, 4, 63, 10, 63]
    q = random_queries(10, 4, 64)
    found = kv.attend(q, sequences, positions, threads=2)
    for row in range(10):
        one = q[row : row + 1]
        assert close(found[row : row + 1], kv.expected(one, sequences[row], [positions[row]]))
        alone = kv.attend(one, [sequences[row]], [positions[row]])
        assert np.array_equal(found[row], alone[0])


@types
def test_cells_behind_a_row_leave_no_trace(kinds: tuple[str, str]) -> None:
    clean, dirty = Store(kinds, 1, LENGTHS), Store(kinds, 1, LENGTHS)
    positions = [61, 62, 63, 64, 65]
    for kv in (clean, dirty):
        kv.fill(0, 66, np.random.default_rng(0))  # the other cells are NaN
    clean.fill(0, 256, np.random.default_rng(0))
    q = random_queries(5, 2, 64)
    found = dirty.attend(q, [0] * 5, positions)
    assert np.all(np.isfinite(found))
    assert np.array_equal(found, clean.attend(q, [0] * 5, positions))


def test_int8_and_float16_cells_are_worth_what_they_read_as() -> None:
    q = random_queries(3, 2, 64)
    for kind in ("int8", "f16"):
        kv, wide = Store((kind, kind), 1, LENGTHS), Store(("f32", "f32"), 1, LENGTHS)
        kv.fill(0, 90, np.random.default_rng(0))
        for part in ("k", "v"):
            cells = kv.read(part, 0, 90)  # type: ignore[arg-type]
            for cell in range(90):
                wide.write(part, 0, cell, cells[:, cell])  # type: ignore[arg-type]
        rows = ([0] * 3, [5, 70, 89])
        assert np.array_equal(kv.attend(q, *rows), wide.attend(q, *rows))


def test_scores_that_are_not_numbers_give_results_that_are_none() -> None:
    kv = Store(("f32", "f32"), 1, LENGTHS)
    kv.fill(0, 100, np.random.default_rng(0))
    kv.write("k", 0, 70, np.full((1, 64), np.nan, np.float32))
    found = kv.attend(random_queries(2, 4, 64), [0, 0], [69, 70])
    assert np.all(np.isfinite(found[0]))
    assert np.all(np.isnan(found[1]))


def test_infinite_scores_do_what_the_softmax_says() -> None:
    kv = Store(("f32", "f32"), 1, LENGTHS)
    kv.fill(0, 100, np.random.default_rng(0))
    # Nothing counts among the first 64 cells, then numbers do.
    for cell in range(64):
        kv.write("k", 0, cell, np.full((1, 64), -np.inf, np.float32))
    q = np.abs(random_queries(1, 1, 64))
    assert np.all(np.isnan(kv.attend(q, [0], [63])))
    assert close(kv.attend(q, [0], [99]), kv.expected(q, 0, [99]))
    kv.write("k", 0, 80, np.full((1, 64), np.inf, np.float32))
    assert np.all(np.isnan(kv.attend(q, [0], [99])))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    kv = Store(("f32", "f32"), 1, LENGTHS)
    kv.fill(0, 130, np.random.default_rng(0))
    q = random_queries(1, 1, 64) * np.float32(1e4)
    assert close(kv.attend(q, [0], [129]), kv.expected(q, 0, [129]))


# -- rotation --------------------------------------------------------------------------------------

STYLES: list[tuple[int, reference.RopeStyle]] = [(0, "pairs"), (1, "halves")]
styles = pytest.mark.parametrize("style", STYLES, ids=lambda style: style[1])


def angles(positions: int, planes: int) -> Floats:
    """Return the table (positions, 2, planes) of cosines and sines."""
    frequencies = reference.rope_frequencies(2 * planes, 10000.0)
    return np.stack(reference.rope_table(np.arange(positions), frequencies), axis=1)


@styles
@pytest.mark.parametrize(("length", "planes"), [(64, 32), (128, 32), (80, 40), (20, 7), (24, 12)])
@pytest.mark.parametrize("threads", [1, 3])
def test_heads_are_rotated_to_the_bit_as_the_reference_does(
    style: tuple[int, reference.RopeStyle], length: int, planes: int, threads: int
) -> None:
    halves, name = style
    table, positions = angles(300, planes), np.array([0, 299, 5, 5, 17])
    x = random_queries(5, 3, length)
    cosine, sine = table[positions, 0], table[positions, 1]
    expected = reference.rope_rotate(x, cosine, sine, name)
    arguments = {
        "rows": np.array([5]),
        "positions": positions,
        "table": table,
        "x": x,
        "heads": 3,
        "length": length,
        "planes": planes,
        "halves": halves,
    }
    run("rope", rope_kernel(), arguments, threads=threads)
    assert np.array_equal(x, expected)


# -- storing ---------------------------------------------------------------------------------------


def append(
    kv: Store,
    rows: Sequence[tuple[int, int]],
    k: Floats,
    v: Floats,
    table: Floats,
    halves: int,
    threads: int,
) -> None:
    """Store rows, each a sequence and a position, through the kernel."""
    arguments = {
        "rows": np.array([len(rows)]),
        "sequences": np.array([sequence for sequence, _ in rows]),
        "positions": np.array([position for _, position in rows]),
        "table": table,
        "k": k,
        "v": v,
        "blocks": kv.table,
        "table_width": kv.table.shape[1],
        "k_offset": kv.layout.part_offset(1, "k"),
        "v_offset": kv.layout.part_offset(1, "v"),
        "heads": kv.kv_heads,
        "key_length": kv.lengths[0],
        "value_length": kv.lengths[1],
        "planes": table.shape[2],
        "halves": halves,
    }
    run("kv_append", kv_append_kernel(*kv.kinds), arguments, kv.kinds, threads)


@types
@styles
@pytest.mark.parametrize(
    ("lengths", "planes"), [((64, 64), 32), ((128, 80), 32), ((20, 36), 7), ((72, 7), 36)]
)
def test_cells_are_stored_to_the_bit_as_the_reference_does(
    kinds: tuple[str, str],
    style: tuple[int, reference.RopeStyle],
    lengths: tuple[int, int],
    planes: int,
) -> None:
    halves, name = style
    found, expected = (Store(kinds, 3, lengths, sequences=2) for _ in range(2))
    rows = [(1, 0), (0, 63), (0, 64), (1, 200)]
    table = angles(256, planes)
    k, v = (random_queries(4, 3, length, seed) for seed, length in enumerate(lengths))
    v[2] = 0
    v[3] *= np.float32(1e-6)  # scales that are subnormal, or zero
    before = k.copy()
    append(found, rows, k, v, table, halves, threads=2)
    assert np.array_equal(k, before)
    for row, (sequence, position) in enumerate(rows):
        cosine, sine = table[[position], 0], table[[position], 1]
        rotated = reference.rope_rotate(k[row : row + 1], cosine, sine, name)[0]
        expected.write("k", sequence, position, rotated)
        expected.write("v", sequence, position, v[row])
    offsets = [found.table - found.memory.ctypes.data, expected.table - expected.memory.ctypes.data]
    assert np.array_equal(*offsets)
    assert np.array_equal(found.memory, expected.memory)  # and nothing else was written


@pytest.mark.parametrize("length", [64, 20])
def test_heads_of_int8_that_are_not_finite_show_it(length: int) -> None:
    kv = Store(("int8", "int8"), 1, (length, length))
    v = random_queries(4, 1, length)
    v[0, 0, 3], v[1, 0, 5], v[2, 0, 7] = np.nan, np.inf, 1e8
    rows = [(0, cell) for cell in range(4)]
    append(kv, rows, v, v, np.zeros((4, 2, 0), np.float32), 0, threads=1)
    for cell in range(3):
        values, scales = kv.planes("v", 0, cell)
        assert not np.any(np.isfinite(scales))
        assert not np.any(values)
    assert np.all(np.isnan(kv.read("v", 0, 3)))
    assert np.array_equal(kv.planes("v", 0, 3)[0], reference.quantise_kv(v[3])[0])


paths = pytest.mark.parametrize("path", runnable(), ids=lambda path: path.value)


@paths
def test_numbers_are_rounded_to_float16_as_numpy_does_on_every_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instructions, "PATH", path)
    load, narrow = vectors.load_floats, instructions.halves_of_floats

    @numba.njit
    def narrow_all(floats, out, count):  # type: ignore[no-untyped-def]
        for number in range(0, count, 16):
            store(out + 2 * number, narrow(load(floats + 4 * number)))

    # Every float16, what lies halfway to the next, and the neighbours of both.
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)
    bits = every[np.isfinite(every)].astype(np.float32).view(np.uint32)
    exact = np.concatenate([bits, bits + 0x1000, np.arange(2**16, dtype=np.uint32) << 16])
    halfway = (every[:0x400].astype(np.float64) + 2.0**-25).astype(np.float32).view(np.uint32)
    exact = np.concatenate([exact, halfway, halfway | np.uint32(1 << 31)])
    floats = np.concatenate([exact - 1, exact, exact + 1]).view(np.float32)
    floats = np.resize(floats, -(-floats.size // 16) * 16)
    out = np.zeros(floats.size, np.float16)
    narrow_all(floats.ctypes.data, out.ctypes.data, floats.size)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = floats.astype(np.float16)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(out), ~numbers)
    assert np.array_equal(out.view(np.uint16)[numbers], expected.view(np.uint16)[numbers])


# -- the same bits on every path, each in a program of its own -------------------------------------

PROGRAM = """
import sys
import numpy as np
from test_host_attention import LENGTHS, Store, angles, append, random_queries
with open(sys.argv[1], "wb") as file:
    kv = Store(("int8", "f16"), 2, LENGTHS)
    rows = [(0, cell) for cell in range(70)]
    k, v = random_queries(70, 2, 64), random_queries(70, 2, 36)
    append(kv, rows, k, v, angles(70, 32), 1, 1)
    file.write(kv.memory.tobytes())
    file.write(kv.attend(random_queries(70, 6, 64), [0] * 70, range(70)).tobytes())
"""


def test_the_portable_path_gives_the_bits_of_the_fastest(tmp_path: FilePath) -> None:
    tests = FilePath(__file__).parent
    places = os.pathsep.join(str(place) for place in (tests.parent, tests.parent / "tools", tests))
    outs = []
    for path in (runnable()[0], Path.GENERIC):
        out = tmp_path / path.value
        environment = {**os.environ, "PYTHONPATH": places, "STRATA_NB_CPU_PATH": path.value}
        subprocess.run([sys.executable, "-c", PROGRAM, str(out)], env=environment, check=True)
        outs.append(out.read_bytes())
    assert len(outs[0]) > 70 * 6 * 36 * 4
    assert outs[0] == outs[1]
