"""Attention on a card over halves by products of matrices, against the numpy reference."""

from __future__ import annotations

import numpy as np
import pytest
from attending import attend, close, expected, rows_are_close
from gpu_launches import Run, shaped
from kv_store import Floats, Store, random_heads

from strata_nb.kernels.gpu import attention_halves
from strata_nb.kernels.gpu.functions import gpu_kernel
from strata_nb.kernels.gpu.runs import grid_of
from strata_nb.kernels.runs import RUN_CELLS

HALVES = ("f16", "f16")


def filled(
    kv_heads: int, lengths: tuple[int, int], cells: int, *, sequences: int = 1, seed: int = 0
) -> Store:
    kv = Store(HALVES, kv_heads, lengths, sequences=sequences, cells=cells)
    for sequence in range(sequences):
        kv.fill(sequence, cells, seed=seed + sequence)
    return kv


def is_of_products(lengths: tuple[int, int]) -> bool:
    sizes = {"heads": 1, "kv_heads": 1, "key_length": lengths[0], "value_length": lengths[1]}
    kernel = gpu_kernel(shaped("attention", HALVES, **sizes))
    return kernel is not None and kernel.name.startswith("attention_halves")


@pytest.mark.parametrize("lengths", [(32, 64), (64, 64), (96, 128), (128, 64), (128, 128)])
def test_heads_of_the_usual_lengths_attend(gpu: Run, lengths: tuple[int, int]) -> None:
    assert is_of_products(lengths)
    kv = filled(2, lengths, 64)
    q = random_heads(1, 6, lengths[0])
    assert close(attend(gpu, kv, q, [0], [59]), expected(kv, q, 0, [59]))


@pytest.mark.parametrize("lengths", [(16, 64), (80, 80), (128, 96), (256, 256)])
def test_other_lengths_have_the_other_kernel(lengths: tuple[int, int]) -> None:
    assert not is_of_products(lengths)


@pytest.mark.parametrize("group", [1, 5, 8, 9, 16])
def test_groups_of_any_size_attend(gpu: Run, group: int) -> None:
    kv = filled(2, (32, 64), 64)
    q = random_heads(1, 2 * group, 32)
    assert close(attend(gpu, kv, q, [0], [40]), expected(kv, q, 0, [40]))


def test_rows_end_anywhere_in_a_chunk_a_block_and_a_run(gpu: Run) -> None:
    kv = filled(1, (32, 64), 576)
    positions = [0, 7, 8, 17, 63, 128, 511, 512]
    q = random_heads(8, 2, 32) * np.float32(3)
    found = attend(gpu, kv, q, [0] * 8, positions)
    assert rows_are_close(kv, found, q, [0] * 8, positions)


def test_rows_of_several_sequences_attend_to_their_own_cells(gpu: Run) -> None:
    kv = filled(1, (32, 64), 128, sequences=3)
    sequences, positions = [1, 0, 2, 1, 0], [65, 127, 0, 63, 3]
    q = random_heads(5, 2, 32)
    found = attend(gpu, kv, q, sequences, positions)
    assert rows_are_close(kv, found, q, sequences, positions)


@pytest.mark.parametrize("blocks", [1, 2])
def test_runs_have_the_same_bits_whoever_computes_them(
    monkeypatch: pytest.MonkeyPatch, gpu: Run, blocks: int
) -> None:
    cells = 2 * RUN_CELLS + 64
    kv = filled(1, (32, 64), cells)
    for cell in range(cells):  # the largest score grows from run to run
        kv.write("k", 0, cell, kv.read_one("k", 0, cell) * np.float32(1 + cell // RUN_CELLS))
    q = random_heads(1, 4, 32)
    position = cells - 20
    usual = attend(gpu, kv, q, [0], [position])
    monkeypatch.setattr(attention_halves, "_BLOCKS", blocks)
    assert np.array_equal(attend(gpu, kv, q, [0], [position]), usual)
    assert close(usual, expected(kv, q, 0, [position]))


def test_a_row_has_the_same_bits_alone_and_among_others(gpu: Run) -> None:
    kv = filled(1, (32, 64), 128, sequences=2)
    sequences, positions = [0, 1, 0], [99, 70, 2]
    q = random_heads(3, 4, 32)
    together = attend(gpu, kv, q, sequences, positions)
    for row in range(3):
        alone = attend(gpu, kv, q[row : row + 1], [sequences[row]], [positions[row]])
        assert np.array_equal(alone[0], together[row])


def test_cells_behind_a_row_leave_no_trace(gpu: Run) -> None:
    clean, dirty = filled(1, (64, 64), 128), Store(HALVES, 1, (64, 64))
    dirty.fill(0, 65)  # the other cells are NaN
    positions, q = [61, 63, 64], random_heads(3, 1, 64)
    found = attend(gpu, dirty, q, [0] * 3, positions)
    assert np.all(np.isfinite(found))
    assert np.array_equal(found, attend(gpu, clean, q, [0] * 3, positions))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e7])
def test_queries_of_any_size_are_as_exact(gpu: Run, size: float) -> None:
    kv = filled(1, (64, 64), 64)
    q = random_heads(1, 2, 64) * np.float32(size)
    assert close(attend(gpu, kv, q, [0], [50]), expected(kv, q, 0, [50]))


def test_heads_whose_queries_differ_in_size_are_as_exact(gpu: Run) -> None:
    kv = filled(1, (32, 64), 64)
    q = random_heads(1, 4, 32) * np.array([1e-4, 10, 1, 1e3], np.float32)[:, None]
    assert close(attend(gpu, kv, q, [0], [50]), expected(kv, q, 0, [50]))


def test_values_of_any_size_are_as_exact(gpu: Run) -> None:
    kv = filled(1, (32, 64), 64)
    for cell in range(64):
        kv.write("v", 0, cell, kv.read_one("v", 0, cell) * np.float32(2.0 ** (cell % 16 - 14)))
    q = random_heads(1, 2, 32) * np.float32(3)
    assert close(attend(gpu, kv, q, [0], [63]), expected(kv, q, 0, [63]))


def test_scores_that_are_not_numbers_give_results_that_are_none(gpu: Run) -> None:
    kv = filled(1, (32, 64), 128)
    kv.write("k", 0, 70, np.full((1, 32), np.nan, np.float32))
    found = attend(gpu, kv, random_heads(2, 1, 32), [0, 0], [69, 70])
    assert np.all(np.isfinite(found[0]))
    assert np.all(np.isnan(found[1]))


def test_infinite_scores_do_what_the_softmax_says(gpu: Run) -> None:
    kv = filled(1, (32, 64), 128)
    for cell in range(64):  # nothing counts among the first 64 cells, then numbers do
        kv.write("k", 0, cell, np.full((1, 32), -np.inf, np.float32))
    q: Floats = np.abs(random_heads(2, 1, 32))
    found = attend(gpu, kv, q, [0, 0], [63, 99])
    assert np.all(np.isnan(found[0]))
    assert close(found[1:], expected(kv, q[1:], 0, [99]))
    kv.write("k", 0, 80, np.full((1, 32), np.inf, np.float32))
    assert np.all(np.isnan(attend(gpu, kv, q[:1], [0], [99])))


def test_the_grid_fills_a_card_and_has_no_more_blocks_than_runs() -> None:
    def blocks(tiles: int, rows: int, cells: int) -> int:
        return grid_of(tiles, {"table_width": cells // 64}, rows, 128)[2]

    assert blocks(4, 1, 32_768) == 32
    assert blocks(4, 8, 32_768) == 4
    assert blocks(4, 1, 512) == 1
    assert blocks(4, 1, 576) == 2
    assert blocks(512, 8, 32_768) == 1
