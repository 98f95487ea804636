"""Attention on a card over types of every kind, against the numpy reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from attending import attend, close, expected, rows_are_close
from gpu_launches import Run, shaped
from host_launches import same_bits
from kv_store import Store, random_heads

from strata_nb.errors import UnsupportedDevice
from strata_nb.formats import CACHE_TYPES
from strata_nb.kernels import runs
from strata_nb.kernels.gpu import attention
from strata_nb.kernels.gpu.attention import attention_kernel
from strata_nb.kernels.gpu.functions import gpu_kernel
from strata_nb.kernels.runs import RUN_CELLS

PAIRS = list(product(CACHE_TYPES, CACHE_TYPES))
pairs = pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: "-".join(kinds))


@pairs
def test_a_row_attends_as_the_reference_does(gpu: Run, kinds: tuple[str, str]) -> None:
    kv = Store(kinds, 1, (16, 16))
    kv.fill(0, 71)
    q = random_heads(1, 1, 16)
    assert close(attend(gpu, kv, q, [0], [70]), expected(kv, q, 0, [70]))


@pytest.mark.parametrize(
    ("kinds", "lengths"),
    [
        (("f16", "f16"), (128, 128)),
        (("int8", "int8"), (128, 128)),
        (("f32", "f32"), (64, 64)),
        (("f16", "int8"), (256, 192)),
        (("int8", "f16"), (192, 256)),
        (("f16", "f16"), (80, 96)),  # not all threads are needed for values
        (("int8", "int8"), (80, 80)),  # the last group of a scale is short
        (("int8", "int8"), (72, 8)),  # keys in loads of 8 bytes
        (("int8", "int8"), (20, 36)),  # of 4
        (("f16", "f16"), (20, 4)),
        (("f32", "f32"), (4, 12)),
    ],
)
def test_heads_of_any_length_attend(
    gpu: Run, kinds: tuple[str, str], lengths: tuple[int, int]
) -> None:
    kv = Store(kinds, 1, lengths, cells=64)
    kv.fill(0, 64)
    q = random_heads(1, 1, lengths[0])
    assert close(attend(gpu, kv, q, [0], [61]), expected(kv, q, 0, [61]))


def test_heads_of_a_group_read_the_same_keys_and_values(gpu: Run) -> None:
    kv = Store(("f16", "int8"), 2, (8, 8))
    kv.fill(0, 65)
    q = random_heads(2, 6, 8)
    assert close(attend(gpu, kv, q, [0, 0], [3, 64]), expected(kv, q, 0, [3, 64]))


def test_rows_of_several_sequences_attend_to_their_own_cells(gpu: Run) -> None:
    kv = Store(("f16", "f16"), 1, (16, 8), sequences=3)
    for sequence, cells in enumerate((128, 66, 5)):
        kv.fill(sequence, cells, seed=sequence)
    sequences, positions = [1, 0, 0, 2, 2, 1, 0], [65, 127, 64, 0, 4, 63, 3]
    q = random_heads(7, 2, 16)
    found = attend(gpu, kv, q, sequences, positions)
    assert rows_are_close(kv, found, q, sequences, positions)


def test_rows_of_a_batch_attend_a_slice_at_a_time(
    gpu: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SLICE_BYTES", 0)  # 8 rows: in 11 there are two slices
    kv = Store(("f16", "f16"), 1, (16, 8), sequences=2)
    for sequence, cells in enumerate((70, 40)):
        kv.fill(sequence, cells, seed=sequence)
    positions = [*range(58, 67), 3, 9]
    sequences = [0] * 9 + [1] * 2
    q = random_heads(11, 2, 16)
    found = attend(gpu, kv, q, sequences, positions)
    assert rows_are_close(kv, found, q, sequences, positions)
    assert same_bits(found[7:9], attend(gpu, kv, q[7:9], sequences[7:9], positions[7:9]))


def test_a_slice_is_counted_before_the_launch_in_front_of_attention(gpu: Run) -> None:
    kv = Store(("f16", "f16"), 1, (64, 64))
    kv.fill(0, 9)
    q = random_heads(9, 1, 64)  # attention by products of matrices: it reads ahead
    found = attend(gpu, kv, q, [0] * 9, range(9))
    assert rows_are_close(kv, found, q, [0] * 9, range(9))


def test_a_row_has_the_same_bits_alone_and_among_others(gpu: Run) -> None:
    kv = Store(("int8", "f16"), 1, (16, 8), sequences=2)
    kv.fill(0, 100)
    kv.fill(1, 100, seed=1)
    sequences, positions = [0, 1, 0], [99, 70, 2]
    q = random_heads(3, 2, 16)
    together = attend(gpu, kv, q, sequences, positions)
    for row in range(3):
        alone = attend(gpu, kv, q[row : row + 1], [sequences[row]], [positions[row]])
        assert np.array_equal(alone[0], together[row])


@pytest.mark.parametrize("blocks", [1, 512])
def test_a_row_attends_over_many_runs_whoever_computes_them(
    monkeypatch: pytest.MonkeyPatch, gpu: Run, blocks: int
) -> None:
    monkeypatch.setattr(attention, "_BLOCKS", blocks)
    kv = Store(("int8", "f16"), 1, (8, 8), cells=2 * RUN_CELLS + 64)
    kv.fill(0, 2 * RUN_CELLS + 10)
    q = random_heads(3, 1, 8) * np.float32(4)
    positions = [RUN_CELLS - 1, RUN_CELLS, 2 * RUN_CELLS + 9]
    found = attend(gpu, kv, q, [0] * 3, positions)
    assert rows_are_close(kv, found, q, [0] * 3, positions)


def test_a_row_attends_over_many_blocks(gpu: Run) -> None:
    kv = Store(("f16", "f16"), 1, (8, 8), cells=320)
    kv.fill(0, 310)
    for cell in range(310):  # the maximum grows from block to block
        kv.write("k", 0, cell, kv.read("k", 0, cell + 1)[:, -1] * np.float32(1 + cell // 64))
    q = random_heads(1, 1, 8)
    assert close(attend(gpu, kv, q, [0], [309]), expected(kv, q, 0, [309]))


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_cells_behind_a_row_leave_no_trace(gpu: Run, kind: str) -> None:
    clean, dirty = (Store((kind, kind), 1, (16, 16)) for _ in range(2))
    positions = [61, 63, 64]
    for kv in (clean, dirty):
        kv.fill(0, 65)  # the other cells are NaN
    clean.fill(0, 128)
    q = random_heads(3, 1, 16)
    found = attend(gpu, dirty, q, [0] * 3, positions)
    assert np.all(np.isfinite(found))
    assert np.array_equal(found, attend(gpu, clean, q, [0] * 3, positions))


def test_scores_that_are_not_numbers_give_results_that_are_none(gpu: Run) -> None:
    kv = Store(("f32", "f32"), 1, (8, 8))
    kv.fill(0, 100)
    kv.write("k", 0, 70, np.full((1, 8), np.nan, np.float32))
    found = attend(gpu, kv, random_heads(2, 1, 8), [0, 0], [69, 70])
    assert np.all(np.isfinite(found[0]))
    assert np.all(np.isnan(found[1]))


def test_infinite_scores_do_what_the_softmax_says(gpu: Run) -> None:
    kv = Store(("f32", "f32"), 1, (8, 8))
    kv.fill(0, 100)
    for cell in range(64):  # nothing counts among the first 64 cells, then numbers do
        kv.write("k", 0, cell, np.full((1, 8), -np.inf, np.float32))
    q = np.abs(random_heads(2, 1, 8))
    found = attend(gpu, kv, q, [0, 0], [63, 99])
    assert np.all(np.isnan(found[0]))
    assert close(found[1:], expected(kv, q[1:], 0, [99]))
    kv.write("k", 0, 80, np.full((1, 8), np.inf, np.float32))
    assert np.all(np.isnan(attend(gpu, kv, q[:1], [0], [99])))


def test_large_scores_neither_overflow_nor_vanish(gpu: Run) -> None:
    kv = Store(("f32", "f32"), 1, (16, 8))
    kv.fill(0, 100)
    q = random_heads(1, 1, 16) * np.float32(1e4)
    assert close(attend(gpu, kv, q, [0], [99]), expected(kv, q, 0, [99]))


@pytest.mark.parametrize("length", [7, 260])
def test_heads_that_a_card_cannot_read_are_refused(length: int) -> None:
    with pytest.raises(UnsupportedDevice, match=f"heads of {length} values"):
        attention_kernel("f16", "f16", 64, length, 1)
    with pytest.raises(UnsupportedDevice, match=f"heads of {length} values"):
        attention_kernel("f16", "f16", length, 64, 1)


def test_types_that_no_cache_has_are_refused() -> None:
    one = shaped("attention", ("f16", "q4_0"), heads=1, kv_heads=1, key_length=8, value_length=8)
    with pytest.raises(ValueError, match=r"no variant .*q4_0"):
        gpu_kernel(one)
