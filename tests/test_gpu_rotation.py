"""Rotating and storing on a card, against the numpy reference: the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from gpu_launches import Run, aligned
from kv_store import Floats, Store, random_heads

from strata_nb.formats import CACHE_TYPES
from strata_nb.kernels import reference

STYLES: list[tuple[int, reference.RopeStyle]] = [(0, "pairs"), (1, "halves")]
styles = pytest.mark.parametrize("style", STYLES, ids=lambda style: style[1])
PAIRS = list(product(CACHE_TYPES, CACHE_TYPES))
pairs = pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: "-".join(kinds))
UNTOUCHED = np.float32(7e33)


def angles(positions: int, planes: int) -> Floats:
    """Return the table (positions, 2, planes) of cosines and sines."""
    frequencies = reference.rope_frequencies(2 * planes, 10000.0)
    return aligned(np.stack(reference.rope_table(np.arange(positions), frequencies), axis=1))


# -- rope ------------------------------------------------------------------------------------------


@styles
@pytest.mark.parametrize(("length", "planes"), [(128, 64), (192, 80), (80, 40), (20, 7), (8, 4)])
def test_heads_are_rotated_to_the_bit_as_the_reference_does(
    gpu: Run, style: tuple[int, reference.RopeStyle], length: int, planes: int
) -> None:
    halves, name = style
    table, positions = angles(100, planes), np.array([0, 99, 5, 5])
    x = random_heads(4, 3, length)
    wanted = reference.rope_rotate(x, table[positions, 0], table[positions, 1], name)
    found = aligned(np.concatenate([x, np.full((2, 3, length), UNTOUCHED)]))
    values = {
        "rows": aligned(np.array([4])),
        "positions": aligned(positions),
        "table": table,
        "x": found,
        "heads": 3,
        "length": length,
        "planes": planes,
        "halves": halves,
    }
    gpu("rope", values, ["x"], most_rows=6)
    assert np.array_equal(found[:4], wanted)
    assert np.all(found[4:] == UNTOUCHED)


# -- storing ---------------------------------------------------------------------------------------


def append(
    gpu: Run,
    kv: Store,
    rows: Sequence[tuple[int, int]],
    k: Floats,
    v: Floats,
    table: Floats,
    halves: int,
) -> None:
    """Store rows, each a sequence and a position; the grid has room for one row more."""
    values = {
        **kv.arguments(),
        "rows": aligned(np.array([len(rows)])),
        "sequences": aligned(np.array([sequence for sequence, _ in rows])),
        "positions": aligned(np.array([position for _, position in rows])),
        "table": table,
        "k": aligned(k),
        "v": aligned(v),
        "heads": kv.kv_heads,
        "planes": table.shape[2],
        "halves": halves,
    }
    most = len(rows) + 1
    gpu("kv_append", values, [], variant=kv.kinds, most_rows=most, written_tables=[kv.memory])


def check_storing(
    gpu: Run,
    kinds: tuple[str, str],
    lengths: tuple[int, int],
    planes: int,
    style: tuple[int, reference.RopeStyle],
) -> None:
    halves, name = style
    found, wanted = (Store(kinds, 2, lengths, sequences=2) for _ in range(2))
    rows = [(1, 0), (0, 63), (0, 64), (1, 100)]
    table = angles(128, planes)
    k, v = (random_heads(4, 2, length, seed) for seed, length in enumerate(lengths))
    # The scale is rounded down by so much that 127 times it is less than the largest value.
    v[1] *= np.float32(127 * 1.4 * 2**-24) / np.abs(v[1]).max()
    v[2] = 0
    v[3] *= np.float32(1e-6)  # scales that are subnormal, or zero
    append(gpu, found, rows, k, v, table, halves)
    for row, (sequence, position) in enumerate(rows):
        cosine, sine = table[[position], 0], table[[position], 1]
        rotated = reference.rope_rotate(k[row : row + 1], cosine, sine, name)[0]
        wanted.write("k", sequence, position, rotated)
        wanted.write("v", sequence, position, v[row])
    assert np.array_equal(found.memory, wanted.memory)  # and nothing else was written


@pairs
def test_cells_of_any_types_are_stored_as_the_reference_does(
    gpu: Run, kinds: tuple[str, str]
) -> None:
    check_storing(gpu, kinds, (20, 36), 10, STYLES[1])


@styles
@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize(("lengths", "planes"), [((80, 64), 40), ((20, 36), 7), ((128, 192), 32)])
def test_cells_are_stored_to_the_bit_as_the_reference_does(
    gpu: Run,
    kind: str,
    style: tuple[int, reference.RopeStyle],
    lengths: tuple[int, int],
    planes: int,
) -> None:
    check_storing(gpu, (kind, kind), lengths, planes, style)


@pytest.mark.parametrize("length", [64, 20])
def test_heads_of_int8_that_are_not_finite_show_it(gpu: Run, length: int) -> None:
    kv = Store(("int8", "int8"), 1, (length, length))
    v = random_heads(4, 1, length)
    v[0, 0, 3], v[1, 0, 5], v[2, 0, 7] = np.nan, np.inf, 1e8
    rows = [(0, cell) for cell in range(4)]
    append(gpu, kv, rows, v, v, np.zeros((4, 2, 0), np.float32), 0)
    for cell in range(3):
        values, scales = kv.planes("v", 0, cell)
        assert not np.any(np.isfinite(scales))
        assert not np.any(values)
    assert np.all(np.isnan(kv.read("v", 0, 3)))
    assert np.array_equal(kv.planes("v", 0, 3)[0], reference.quantise_kv(v[3])[0])
