"""Attention of a prompt batch in an order of its own, against float64 and in other batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import gpu_launches
import numpy as np
import pytest
from attending import SCALE, attend
from gpu_card import Card
from gpu_launches import Run, shaped
from kv_store import Floats, Store, random_heads

from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.gpu import attention_launches
from strata_nb.kernels.gpu import compile as gpu_compile
from strata_nb.kernels.gpu.attention_batches import batch_attention_kernel
from strata_nb.kernels.gpu.attention_warpgroups import warpgroup_attention_kernel
from strata_nb.kernels.gpu.compile import cubin_of, ptx_code
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.machine_code import loses_words
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.table import KERNELS

HALVES = ("f16", "f16")
HALF = 2.0**-11  # the largest share by which a number differs from the half nearest to it


@pytest.fixture(
    params=[(False, 64), (True, 64), (True, 128)], ids=["warps", "warpgroups", "warpgroups-128"]
)
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, gpu: Run) -> int:
    """Let any batch have one of the kernels, that of warps in blocks of 64 pairs: a few rows are
    several tiles. Return the length of heads."""
    card = getattr(gpu, "__self__", None)
    warpgroups, length = request.param
    if warpgroups and isinstance(card, Card) and not card.has_warpgroups:
        pytest.skip("the card has no products of warpgroups")

    def small(key_length: int, value_length: int) -> GpuKernel:
        return batch_attention_kernel(key_length, value_length, warps=2)

    monkeypatch.setattr(attention_launches, "SOME_BLOCKS", 1)
    monkeypatch.setattr(attention_launches, "batch_attention_kernel", small)
    made = partial(card_launches, same_bits=False, warpgroups=warpgroups)
    monkeypatch.setattr(gpu_launches, "card_launches", made)
    return int(length)


def filled(kv_heads: int, cells: Sequence[int], length: int) -> Store:
    kv = Store(HALVES, kv_heads, (length, length), sequences=len(cells), cells=max(cells))
    for sequence, count in enumerate(cells):
        kv.fill(sequence, count, seed=sequence)
    return kv


def are_near(
    kv: Store, found: Floats, q: Floats, sequences: Sequence[int], positions: Sequence[int]
) -> bool:
    """Return whether results differ from float64's by no more than halves explain.

    A score moves by no more than a rounded query makes of its products. Weights move by that factor
    and are rounded; their sum and that of values moves at most as much.
    """
    group = q.shape[1] // kv.kv_heads
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        for head in range(q.shape[1]):
            keys = kv.read("k", sequence, position + 1)[head // group].astype(np.float64)
            values = kv.read("v", sequence, position + 1)[head // group].astype(np.float64)
            scores = SCALE * keys @ q[row, head]
            weights = np.exp(scores - scores.max())
            wanted = weights @ values / weights.sum()
            moved = SCALE * HALF * (np.abs(keys) @ np.abs(q[row, head])).max()
            most = 2 * (np.expm1(moved) + HALF) * np.abs(values).max()
            if not np.all(np.abs(found[row, head] - wanted) < most):
                return False
    return True


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 5), (1, 8)])
def test_rows_attend_as_nearly_as_halves_allow(
    gpu: Run, length: int, kv_heads: int, group: int
) -> None:
    kv = filled(kv_heads, [150], length)
    q = random_heads(9, kv_heads * group, length)
    positions = [0, 7, 15, 63, 64, 127, 128, 148, 149]
    assert are_near(kv, attend(gpu, kv, q, [0] * 9, positions), q, [0] * 9, positions)


def growing(length: int) -> Store:
    """Return keys whose scores become larger from block to block, by far."""
    kv = filled(1, [200], length)
    for cell in range(200):
        kv.write("k", 0, cell, kv.read_one("k", 0, cell) * np.float32(1 + 2 * (cell // 64)))
    return kv


def test_scores_that_grow_from_block_to_block_change_what_they_count_from(
    gpu: Run, length: int
) -> None:
    kv, q = growing(length), random_heads(9, 4, length) * np.float32(2)
    positions = range(191, 200)
    assert are_near(kv, attend(gpu, kv, q, [0] * 9, positions), q, [0] * 9, positions)


def test_a_row_has_the_same_bits_whoever_is_beside_it(gpu: Run, length: int) -> None:
    kv, q = filled(1, [200], length), random_heads(40, 4, length)
    q[::3] *= np.float32(6)  # these change what they count from, and others do not
    positions = list(range(160, 200))
    together = attend(gpu, kv, q, [0] * 40, positions)
    some = [*range(1, 40, 3)]
    alone = attend(gpu, kv, q[some], [0] * len(some), [positions[row] for row in some])
    assert np.array_equal(alone, together[some])


def test_values_that_are_no_numbers_leave_no_trace_in_rows_before_them(
    gpu: Run, length: int
) -> None:
    clean, dirty = filled(1, [140], length), filled(1, [140], length)
    dirty.write("v", 0, 70, np.full((1, length), np.inf, np.float32))
    dirty.write("v", 0, 71, np.full((1, length), np.nan, np.float32))
    q = random_heads(9, 16, length)  # of both warpgroups
    positions = [62, *range(66, 73), 130]
    found = attend(gpu, dirty, q, [0] * 9, positions)
    assert np.array_equal(found[:5], attend(gpu, clean, q, [0] * 9, positions)[:5])
    assert not np.any(np.isfinite(found[5:]))


def test_cells_that_nobody_wrote_leave_no_trace(gpu: Run, length: int) -> None:
    clean, dirty = filled(1, [128], length), Store(HALVES, 1, (length, length))
    dirty.fill(0, 75)  # the other cells are NaN
    q, positions = random_heads(9, 16, length), [*range(66, 75)]
    found = attend(gpu, dirty, q, [0] * 9, positions)
    assert np.array_equal(found, attend(gpu, clean, q, [0] * 9, positions))


def test_rows_of_several_sequences_in_a_tile_attend_to_their_own_cells(
    gpu: Run, length: int
) -> None:
    kv = filled(1, [40, 17, 66], length)
    q = random_heads(10, 16, length)  # of both warpgroups
    sequences, positions = [1, 1, 0, 0, 0, 2, 2, 2, 1, 1], [3, 4, 37, 38, 39, 63, 64, 65, 15, 16]
    assert are_near(kv, attend(gpu, kv, q, sequences, positions), q, sequences, positions)


@pytest.mark.parametrize(
    ("rows", "same_bits", "warpgroups", "kernel"),
    [
        (512, False, True, "attention_warpgroups_128_128"),
        (512, False, False, "attention_batch_128_128"),
        (512, True, False, "attention_tiles_128_128"),
        (64, False, True, "attention_tiles_by_runs_128_128"),
        (8, False, True, "attention_halves_128_128_8"),
    ],
)
def test_batches_that_keep_a_card_busy_have_an_order_of_their_own(
    rows: int, same_bits: bool, warpgroups: bool, kernel: str
) -> None:
    sizes = {"heads": 32, "kv_heads": 4, "key_length": 128, "value_length": 128}
    one = shaped("attention", HALVES, **sizes, table_width=64)
    found = card_launches((one,), rows, same_bits=same_bits, warpgroups=warpgroups)
    assert kernel in [each.kernel.name for each in found]


KINDS = [one.kind for one in KERNELS["attention"].arguments]


@pytest.mark.parametrize("values", [64, 128])
def test_attention_by_warpgroups_fits_its_registers(values: int) -> None:
    kernel = warpgroup_attention_kernel(values, values)
    made = cubin_of(kernel, KINDS, "sm_90")
    assert made.registers <= kernel.registers
    assert not made.spill_bytes


@pytest.mark.parametrize("values", [64, 128])
def test_queries_are_read_behind_the_loop_whose_products_read_them(values: int) -> None:
    code = ptx_code(warpgroup_attention_kernel(values, values), KINDS)
    products = re.findall(r"wgmma.mma_async.*?\}, \{(.*?)\}, b, adds, 1, 1, 0;", code)
    queries = {word for words in products for word in words.split(", ")}
    assert len(queries) == values // 4
    *_, behind = code.split("wgmma.wait_group")
    assert set(re.findall(r"xor\.b32 all, all, (.*?);", behind)) == queries


def test_code_that_overwrites_what_products_still_read_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = warpgroup_attention_kernel(64, 64)
    image = cubin_of(kernel, KINDS, "sm_90").image
    assert not loses_words(image, kernel.name)
    low = np.frombuffer(image, "<u8")[::2].copy()  # of each instruction
    products = low & np.uint64(0xFFF) == 0xDF0
    turned = low >> np.uint64(62) == 1
    of_keys, of_values = (np.flatnonzero(products & these) for these in (~turned, turned))
    assert len(of_keys) == len(of_values) == 4

    def loses_at(place: int, word: int) -> bool:
        overwriting = bytearray(image)
        overwriting[16 * place + 2] = word  # the register that it writes
        return loses_words(bytes(overwriting), kernel.name)

    queries = [int(low[one]) >> 24 & 0xFF for one in of_keys]
    for word in (first + number for first in queries for number in range(4)):
        assert loses_at(int(of_values[0]), word)
    # Lanes that are apart meet behind all loops, for some of which the code is part of this one.
    apart = np.flatnonzero(low & np.uint64(0xFFF) == 0x389).tolist()
    assert min(apart) > of_values[-1]
    seen = [loses_at(place, queries[0]) for place in apart]
    assert any(seen)
    assert not all(seen)
    straight = bytearray(image)
    for branch in np.flatnonzero(low & np.uint64(0xFFF) == 0x947):
        straight[16 * int(branch)] = 0x18  # something else in its place: no loop is left
    assert loses_words(bytes(straight), kernel.name)
    monkeypatch.setattr(gpu_compile, "loses_words", lambda *_: True)
    with pytest.raises(UnsupportedDevice, match="attention_warpgroups_64_64 for sm_90a overwrites"):
        cubin_of(kernel, KINDS, "sm_90")
