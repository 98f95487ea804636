"""The GPU kernels over rows: norms, quantising, gates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_launches import Run, aligned
from host_launches import UNTOUCHED, normal, same_bits
from kernel_references import gated_add, quantised, rms_norm
from numpy.typing import NDArray
from test_host_rows import difficult_rows

from strata_nb.kernels import reference
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.reference import Floats

Bytes = NDArray[np.uint8]
MOST_ROWS = 3  # for which grids are made


def room(width: int) -> Floats:
    """Return an array for the rows of a grid, which nobody wrote yet."""
    return aligned(np.full((MOST_ROWS, width), UNTOUCHED))


def packed_room(width: int, times: int = 1) -> Bytes:
    return aligned(np.full((MOST_ROWS * times, row_bytes(width)), 99, np.uint8))


def written(room: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return so many rows of such an array; those behind them must be as they were."""
    assert np.all(room[rows:] == (UNTOUCHED if room.dtype == np.float32 else 99))
    return room[:rows]


def whole(x: Floats) -> Floats:
    """Return a buffer of as many rows as a grid has, the last of which nobody wrote."""
    buffer = np.full((max(MOST_ROWS, len(x)), x.shape[1]), np.float32(np.nan))
    buffer[: len(x)] = x
    return aligned(buffer)


def run(gpu: Run, kernel: str, rows: int, writes: list[str], **values: Any) -> None:
    """Launch a kernel on a grid for MOST_ROWS, with arrays that begin where a card's buffers do."""
    count = aligned(np.array([rows], np.int64))
    gpu(kernel, {"rows": count, **values}, writes, most_rows=MOST_ROWS)


# -- quantising ------------------------------------------------------------------------------------


def test_quantising_gives_the_bits_of_the_plain_form(gpu: Run) -> None:
    x = aligned(difficult_rows())
    packed = aligned(np.full((12, row_bytes(160)), 99, np.uint8))
    rows = aligned(np.array([6]))
    values = {"rows": rows, "x": x, "packed": packed, "times": 2, "values": 160}
    gpu("quantise", values, ["packed"], most_rows=6)
    assert same_bits(packed, quantised(x))


@pytest.mark.parametrize(("rows", "times", "width"), [(0, 1, 32), (1, 3, 288), (2, 1, 512)])
def test_quantising_leaves_rows_beyond_the_number_alone(
    gpu: Run, rows: int, times: int, width: int
) -> None:
    x = aligned(normal(MOST_ROWS * times, width))
    packed = packed_room(width, times)
    run(gpu, "quantise", rows, ["packed"], x=x, packed=packed, times=times, values=width)
    assert same_bits(written(packed, rows * times), quantised(x)[: rows * times])


# -- norms -----------------------------------------------------------------------------------------


def run_norm(gpu: Run, x: Floats, rows: int, parts: int = 1, **how: Any) -> None:
    width = x.shape[1] // parts
    rest: dict[str, Any] = {
        "index": 0,
        "out": 0,
        "packed": 0,
        "weight": aligned(normal(width, seed=9)),
        "eps": 1e-6,
        **how,
    }
    out = [name for name in ("out", "packed") if isinstance(rest[name], np.ndarray)]
    run(gpu, "rms_norm", rows, out, x=x, parts=parts, width=width, **rest)


def normed(gpu: Run, x: Floats, rows: int | None = None, parts: int = 1, **how: Any) -> Floats:
    """Run rms_norm on rows of x (rows, parts * width) and return float32 of the same width."""
    count, out = len(x) if rows is None else rows, room(x.shape[1])
    run_norm(gpu, whole(x), count, parts, out=out, **how)
    return written(out, count)


# Of each number of threads: less than a value for each, one, and several with a remainder.
WIDTHS = [1, 32, 100, 128, 160, 576, 1024, 1056, 2500]


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_those_of_the_reference(gpu: Run, width: int) -> None:
    x, weight = normal(2, width) * 3, normal(width, seed=9)
    np.testing.assert_allclose(normed(gpu, x), rms_norm(x, weight, 1e-6), rtol=6e-7, atol=0)


@pytest.mark.parametrize("width", [3, 100, 600])
def test_norms_round_as_the_reference_does(gpu: Run, width: int) -> None:
    # Sums of small whole numbers have no error, in whatever order: root and quotients remain.
    x = np.random.default_rng(width).integers(-9, 10, (3, width)).astype(np.float32)
    x[:, 0] = 9
    expected = rms_norm(x, normal(width, seed=9), 1e-6)
    assert same_bits(normed(gpu, x), expected)


def test_a_norm_of_parts_is_that_of_each_part(gpu: Run) -> None:
    x = normal(2, 3 * 80)
    parts = [normed(gpu, x[:, start : start + 80].copy()) for start in (0, 80, 160)]
    assert same_bits(normed(gpu, x, parts=3), np.concatenate(parts, axis=1))


def test_eps_is_added_to_the_mean_square(gpu: Run) -> None:
    x = np.full((1, 64), 1e-3, np.float32)
    found = normed(gpu, x, eps=3e-6, weight=aligned(np.ones(64, np.float32)))
    np.testing.assert_allclose(found, np.full((1, 64), 0.5), rtol=1e-6)


@pytest.mark.parametrize(("width", "parts"), [(160, 1), (64, 3), (1088, 1)])
def test_a_norm_may_overwrite_its_rows_and_be_quantised_at_once(
    gpu: Run, width: int, parts: int
) -> None:
    x = aligned(normal(MOST_ROWS, width * parts))
    expected = normed(gpu, x, 2, parts)
    packed, before = packed_room(width * parts), x.copy()
    weight = aligned(normal(width, seed=9))
    run_norm(gpu, x, 2, parts, weight=weight, out=x, packed=packed)
    assert same_bits(x[:2], expected)
    assert same_bits(x[2], before[2])
    assert same_bits(written(packed, 2), quantised(expected))


def test_a_norm_may_be_wanted_in_quantised_form_only(gpu: Run) -> None:
    x, packed = aligned(normal(2, 96)), packed_room(96)
    run_norm(gpu, whole(x), 2, packed=packed)
    assert same_bits(written(packed, 2), quantised(normed(gpu, x)))


def test_an_index_names_the_rows_that_are_normed(gpu: Run) -> None:
    x = normal(6, 40)
    found = normed(gpu, x, 3, index=aligned(np.array([4, 0, 4], np.int64)))
    apart = normed(gpu, x[[4, 0]])
    assert same_bits(found, apart[[0, 1, 0]])


def test_the_norm_of_a_row_does_not_depend_on_its_company(gpu: Run) -> None:
    x = normal(3, 300)
    together = normed(gpu, x)
    assert all(same_bits(normed(gpu, x[n : n + 1])[0], together[n]) for n in range(3))


def test_a_norm_shows_values_that_are_not_finite(gpu: Run) -> None:
    x = normal(3, 64)
    x[0, 5], x[1, 40] = np.nan, np.inf
    packed = packed_room(64)
    found = normed(gpu, x, packed=packed)
    assert np.isnan(found[0]).all()
    assert np.isnan(found[1, 40])
    assert np.isfinite(found[2]).all()
    scales = packed[:, 64:72].copy().view(np.float32)
    assert np.array_equal(np.isnan(scales), [[True, True], [False, True], [False, False]])


# -- gates -----------------------------------------------------------------------------------------


def gated(gpu: Run, gate: Floats, up: Floats, **how: Any) -> Floats:
    """Run silu_mul on all rows and return what it wrote."""
    rows, values = gate.shape
    out = room(values)
    rest = {"packed": 0, **how}
    names = ["out", *(name for name in how if name == "packed")]
    arrays = {"gate": aligned(gate), "up": aligned(up), "out": out}
    run(gpu, "silu_mul", rows, names, values=values, **arrays, **rest)
    return written(out, rows)


@pytest.mark.parametrize("values", [1, 24, 100, 320])
def test_silu_times_up_is_that_of_the_reference(gpu: Run, values: int) -> None:
    gate, up = normal(2, values) * 5, normal(2, values, seed=1)
    found = gated(gpu, gate, up)
    np.testing.assert_allclose(found, reference.silu_gate(gate, up), rtol=1e-6, atol=1e-30)
    assert same_bits(gated(gpu, gate[1:], up[1:]), found[1:])


def test_silu_of_extreme_gates_neither_overflows_nor_hides_a_fault(gpu: Run) -> None:
    gate = np.array([[-np.inf, np.inf, np.nan, -200, 200, 0, -0.0, 1e-40]], np.float32)
    found = gated(gpu, gate, np.ones_like(gate))[0]
    assert np.isnan(found[[0, 2]]).all()  # -inf times the zero of its sigmoid is no number
    assert found[[1, 3, 4, 5, 6]].tolist() == [np.inf, 0, 200, 0, 0]


def test_silu_times_up_may_be_quantised_at_once_or_only(gpu: Run) -> None:
    gate, up = normal(2, 320) * 3, normal(2, 320, seed=1)
    packed, only = packed_room(320), packed_room(320)
    found = gated(gpu, gate, up, packed=packed)
    assert same_bits(found, gated(gpu, gate, up))
    assert same_bits(written(packed, 2), quantised(found))
    arrays = {"gate": aligned(gate), "up": aligned(up), "out": 0, "packed": only}
    run(gpu, "silu_mul", 2, ["packed"], values=320, **arrays)
    assert same_bits(only, packed)


def test_silu_times_up_may_overwrite_the_gate(gpu: Run) -> None:
    gate, up = normal(2, 50), normal(2, 50, seed=1)
    rows = aligned(gate)
    arrays = {"gate": rows, "up": aligned(up), "out": rows, "packed": 0}
    run(gpu, "silu_mul", 2, ["gate", "out"], values=50, **arrays)
    assert same_bits(rows, gated(gpu, gate, up))


@pytest.mark.parametrize("width", [1, 50, 320])
def test_a_gated_row_is_added(gpu: Run, width: int) -> None:
    gate, x, y = normal(3, 1), normal(3, width, seed=1), normal(3, width, seed=2)
    out = aligned(y)
    run(gpu, "gated_add", 2, ["y"], gate=aligned(gate), x=aligned(x), y=out, width=width)
    np.testing.assert_allclose(out[:2], gated_add(gate, x, y)[:2], rtol=1e-6, atol=1e-6)
    assert same_bits(out[2], y[2])
