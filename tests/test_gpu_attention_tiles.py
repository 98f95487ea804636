"""Attention of a prompt batch, whose rows share what they read, against that of windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from attending import attend, rows_are_close
from gpu_launches import Run
from kv_store import Floats, Store, random_heads

from strata_nb.kernels.gpu import attention_launches
from strata_nb.kernels.gpu.attention_tiles import tiles_attention_kernel
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.runs import RUN_CELLS

HALVES = ("f16", "f16")


@pytest.fixture(params=[True, False], ids=["whole", "by runs"])
def few_warps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of 32 pairs, so that a few rows are several tiles, each with all runs or some."""

    def small(key_length: int, value_length: int, *, is_whole: bool) -> GpuKernel:
        assert is_whole == request.param
        return tiles_attention_kernel(key_length, value_length, warps=2, is_whole=is_whole)

    monkeypatch.setattr(attention_launches, "MANY_BLOCKS", 1 if request.param else 1 << 20)
    monkeypatch.setattr(attention_launches, "tiles_attention_kernel", small)
    monkeypatch.setattr(attention_launches, "takes", lambda *_: True)


def filled(kv_heads: int, lengths: tuple[int, int], cells: Sequence[int]) -> Store:
    kv = Store(HALVES, kv_heads, lengths, sequences=len(cells), cells=max(cells))
    for sequence, count in enumerate(cells):
        kv.fill(sequence, count, seed=sequence)
    return kv


def have_bits_of_windows(
    gpu: Run, kv: Store, q: Floats, sequences: Sequence[int], positions: Sequence[int]
) -> bool:
    """Return whether rows together have the bits that each has in a window."""
    assert len(q) > 8
    together = attend(gpu, kv, q, sequences, positions)
    assert rows_are_close(kv, together, q, sequences, positions)
    windows = [slice(at, at + 6) for at in range(0, len(q), 6)]
    alone = [attend(gpu, kv, q[rows], sequences[rows], positions[rows]) for rows in windows]
    return np.array_equal(together, np.concatenate(alone))


@pytest.mark.usefixtures("few_warps")
@pytest.mark.parametrize("few_warps", [True], ids=["whole"], indirect=True)
@pytest.mark.parametrize(("group", "kv_heads", "length"), [(1, 2, 64), (5, 1, 32), (8, 1, 32)])
def test_rows_have_the_bits_of_windows_whatever_heads_share(
    gpu: Run, group: int, kv_heads: int, length: int
) -> None:
    kv = filled(kv_heads, (length, 64), [150])
    q = random_heads(9, kv_heads * group, length)
    assert have_bits_of_windows(gpu, kv, q, [0] * 9, range(141, 150))


@pytest.mark.usefixtures("few_warps")
def test_rows_across_blocks_and_runs_have_the_bits_of_windows(gpu: Run) -> None:
    kv = filled(1, (32, 64), [RUN_CELLS + 24])
    q = random_heads(11, 2, 32) * np.float32(3)
    positions = [0, 7, 62, 63, 64, 65, 255, 500, RUN_CELLS - 1, RUN_CELLS, RUN_CELLS + 23]
    assert have_bits_of_windows(gpu, kv, q, [0] * 11, positions)


@pytest.mark.usefixtures("few_warps")
@pytest.mark.parametrize("few_warps", [True], ids=["whole"], indirect=True)
def test_values_that_are_no_numbers_leave_no_trace_in_rows_before_them(gpu: Run) -> None:
    clean, dirty = filled(1, (32, 64), [80]), filled(1, (32, 64), [80])
    dirty.write("v", 0, 70, np.full((1, 64), np.inf, np.float32))
    dirty.write("k", 0, 70, np.full((1, 32), np.nan, np.float32))
    q = random_heads(9, 4, 32)
    positions = [*range(64, 73)]  # eight rows in a tile, of which two see the cell
    found = attend(gpu, dirty, q, [0] * 9, positions)
    assert np.array_equal(found[:6], attend(gpu, clean, q, [0] * 9, positions)[:6])
    assert not np.any(np.isfinite(found[6:]))


@pytest.mark.usefixtures("few_warps")
def test_rows_of_several_sequences_in_a_tile_have_the_bits_of_windows(gpu: Run) -> None:
    kv = filled(1, (32, 64), [40, 17, 66])
    q = random_heads(10, 3, 32)
    sequences, positions = [1, 1, 0, 0, 0, 2, 2, 2, 1, 1], [3, 4, 37, 38, 39, 63, 64, 65, 15, 16]
    assert have_bits_of_windows(gpu, kv, q, sequences, positions)
