"""The host's kernels over rows: embedding, norms, quantising, gates, routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from host_launches import forced_case
from kernel_references import quantised
from numpy.typing import NDArray
from random_blocks import random_blocks

from strata_nb.formats import TensorType, block_layout, block_record, dequantise
from strata_nb.kernels import reference
from strata_nb.kernels.host.activations import quantise_kernel
from strata_nb.kernels.host.embedding import embed_kernel, work_bytes
from strata_nb.kernels.host.gating import gated_add_kernel, silu_mul_kernel
from strata_nb.kernels.host.normalising import rms_norm_kernel
from strata_nb.kernels.host.operations import HostKernel, Work
from strata_nb.kernels.host.routing import (
    expert_gather_kernel,
    expert_group_kernel,
    router_top_k_kernel,
)
from strata_nb.kernels.program import launch
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.packing import PACKED, UNPACKED, pack

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
THREADS = (1, 2, 3)
UNTOUCHED = np.float32(7e33)


def run(
    kernel: HostKernel,
    name: str,
    threads: int,
    rows: int,
    variant: Any = None,
    only: int | None = None,
    **values: Any,
) -> None:
    """Launch a kernel of the table on its threads, the last first, or on one of them only.

    Arrays go by address.
    """
    kept = {"rows": np.array([rows]), **values}
    words = {
        key: at(value) if isinstance(value, np.ndarray) else value for key, value in kept.items()
    }
    arguments = np.array([*launch(name, words, variant=variant).arguments, *kernel.extra], np.int64)
    for thread in reversed(range(threads)) if only is None else (only,):
        kernel.function(at(arguments), thread, threads)


def at(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def room(rows: int, width: int) -> Floats:
    """Return an array for some rows, and a row behind them that nobody may write."""
    return np.full((rows + 1, width), UNTOUCHED)


def written(out: Floats) -> Floats:
    """Return the rows of such an array."""
    assert np.all(out[-1] == UNTOUCHED)
    return out[:-1]


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- quantising ------------------------------------------------------------------------------------


def difficult_rows() -> Floats:
    """Return rows of many magnitudes, with ties, tiny values, zeros, NaN and infinities."""
    rng = np.random.default_rng(1)
    x = normal(12, 160) * np.float32(2) ** rng.integers(-90, 90, (12, 5, 1)).repeat(32, 2).reshape(
        12, 160
    ).astype(np.float32)
    x[0, :32] = np.arange(32) / 2  # halves: ties, with the scale 1
    x[0, 0] = -127
    x[1, 40:50] = [np.nan, 1, 2, 3, np.inf, 4, 5, 6, 7, 8]
    x[2, 159] = np.inf
    x[3, 0] = -np.inf
    x[4, 31] = -np.nan
    x[5, :96] = 0
    x[6, :32] = 2.0**-101
    x[6, 32:64] = -(2.0**-100)
    x[6, 64:96] = 1e-40
    x[7, :32] = np.finfo(np.float32).max
    return x.astype(np.float32)


@pytest.mark.parametrize("threads", THREADS)
def test_quantising_gives_the_bits_of_the_plain_form(threads: int) -> None:
    x = difficult_rows()
    packed = np.full((12, row_bytes(160)), 99, np.uint8)
    run(quantise_kernel(), "quantise", threads, 6, x=x, packed=packed, times=2, values=160)
    assert same_bits(packed, quantised(x))


def test_quantising_leaves_rows_beyond_the_number_alone() -> None:
    x = normal(3, 64)
    packed = np.full((3, row_bytes(64)), 99, np.uint8)
    run(quantise_kernel(), "quantise", 2, 2, x=x, packed=packed, times=1, values=64)
    assert same_bits(packed[:2], quantised(x[:2]))
    assert np.all(packed[2] == 99)


# -- norms -----------------------------------------------------------------------------------------


def normed(
    x: Floats, threads: int = 1, *, parts: int = 1, rows: int | None = None, **how: Any
) -> Floats:
    """Run rms_norm on x (rows, parts * width) and return float32 of the same width."""
    rows = len(x) if rows is None else rows
    out = room(rows, x.shape[1])
    run_norm(x, threads, rows, parts, out=out, **how)
    return written(out)


def run_norm(x: Floats, threads: int, rows: int, parts: int, **how: Any) -> None:
    width = x.shape[1] // parts
    rest = {"index": 0, "packed": 0, "weight": normal(width, seed=9), "eps": 1e-6, **how}
    run(rms_norm_kernel(), "rms_norm", threads, rows, x=x, parts=parts, width=width, **rest)


@pytest.mark.parametrize("width", [1, 5, 16, 31, 32, 33, 64, 100, 160, 2048])
def test_norms_are_those_of_the_reference(width: int) -> None:
    x, weight = normal(5, width) * 3, normal(width, seed=9)
    expected = reference.rms_norm(x, weight, 1e-6)
    np.testing.assert_allclose(normed(x), expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize("width", [3, 64, 100])
def test_norms_round_as_the_reference_does(width: int) -> None:
    # Sums of small whole numbers have no error, in whatever order: root and quotients remain.
    x = np.random.default_rng(width).integers(-9, 10, (50, width)).astype(np.float32)
    x[:, 0] = 9
    weight = normal(width, seed=9)
    assert same_bits(normed(x, weight=weight), reference.rms_norm(x, weight, 1e-6))


def test_a_norm_of_parts_is_that_of_each_part() -> None:
    x = normal(4, 3 * 80)
    apart = normed(x.reshape(12, 80)).reshape(4, 240)
    for threads in THREADS:
        assert same_bits(normed(x, threads, parts=3), apart)


def test_eps_is_added_to_the_mean_square() -> None:
    x = np.full((1, 64), 1e-3, np.float32)
    weight = np.ones(64, np.float32)
    found = normed(x, eps=3e-6, weight=weight)
    np.testing.assert_allclose(found, np.full((1, 64), 0.5), rtol=1e-6)


def test_a_norm_may_overwrite_its_rows_and_be_quantised_at_once() -> None:
    for width, parts in ((160, 1), (64, 3)):
        x = normal(5, width * parts)
        expected = normed(x, parts=parts)
        for threads in THREADS:
            rows = x.copy()
            packed = np.full((5, row_bytes(width * parts)), 99, np.uint8)
            run_norm(rows, threads, 5, parts, out=rows, packed=packed)
            assert same_bits(rows, expected)
            assert same_bits(packed, quantised(expected))


def test_a_norm_may_be_wanted_in_quantised_form_only() -> None:
    x = normal(3, 96)
    packed = np.full((3, row_bytes(96)), 99, np.uint8)
    before = x.copy()
    run_norm(x, 2, 3, 1, out=0, packed=packed)
    assert same_bits(packed, quantised(normed(x)))
    assert same_bits(x, before)


def test_an_index_names_the_rows_that_are_normed() -> None:
    x = normal(6, 40)
    index = np.array([4, 0, 4], np.int64)
    found = normed(x, 2, rows=3, index=index)
    assert same_bits(found, normed(x)[[4, 0, 4]])


def test_the_norm_of_a_row_does_not_depend_on_its_company() -> None:
    x = normal(7, 100)
    together = normed(x)
    for number in range(7):
        assert same_bits(normed(x[number : number + 1])[0], together[number])


def test_a_norm_shows_values_that_are_not_finite() -> None:
    x = normal(3, 64)
    x[0, 5], x[1, 40] = np.nan, np.inf
    packed = np.empty((3, row_bytes(64)), np.uint8)
    found = normed(x, packed=packed)
    assert np.isnan(found[0]).all()
    assert np.isnan(found[1, 40])
    assert np.isfinite(found[2]).all()
    scales = packed[:, 64:72].copy().view(np.float32)
    assert np.array_equal(np.isnan(scales), [[True, True], [False, True], [False, False]])


# -- gates -----------------------------------------------------------------------------------------


def gated(gate: Floats, up: Floats, threads: int = 1, packed: Any = 0) -> Floats:
    rows, values = gate.shape
    out = room(rows, values)
    kernel = silu_mul_kernel()
    run(kernel, "silu_mul", threads, rows, gate=gate, up=up, out=out, packed=packed, values=values)
    return written(out)


@pytest.mark.parametrize("values", [1, 7, 16, 24, 32, 100, 768])
def test_silu_times_up_is_that_of_the_reference(values: int) -> None:
    gate, up = normal(5, values) * 5, normal(5, values, seed=1)
    expected = reference.silu_gate(gate, up)
    found = gated(gate, up)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-30)
    for threads in THREADS:
        assert same_bits(gated(gate, up, threads), found)
    alone = np.concatenate([gated(gate[n : n + 1], up[n : n + 1]) for n in range(5)])
    assert same_bits(alone, found)


def test_silu_of_extreme_gates_neither_overflows_nor_hides_a_fault() -> None:
    gate = np.array([[-np.inf, np.inf, np.nan, -200, 200, 0, -0.0, 1e-40]], np.float32)
    found = gated(gate, np.ones_like(gate))[0]
    assert np.isnan(found[[0, 2]]).all()  # -inf times the zero of its sigmoid is no number
    assert found[[1, 3, 4, 5, 6]].tolist() == [np.inf, 0, 200, 0, 0]


def test_silu_times_up_may_be_quantised_at_once() -> None:
    gate, up = normal(3, 160) * 3, normal(3, 160, seed=1)
    expected = gated(gate, up)
    for threads in THREADS:
        packed = np.full((3, row_bytes(160)), 99, np.uint8)
        assert same_bits(gated(gate, up, threads, packed=packed), expected)
        assert same_bits(packed, quantised(expected))
        packed[:] = 99
        buffers = {"gate": gate, "up": up, "out": 0, "packed": packed}
        run(silu_mul_kernel(), "silu_mul", threads, 3, values=160, **buffers)
        assert same_bits(packed, quantised(expected))


def test_silu_times_up_may_overwrite_the_gate() -> None:
    gate, up = normal(3, 50), normal(3, 50, seed=1)
    expected = gated(gate, up)
    for threads in THREADS:
        rows = gate.copy()
        buffers = {"gate": rows, "up": up, "out": rows, "packed": 0}
        run(silu_mul_kernel(), "silu_mul", threads, 3, values=50, **buffers)
        assert same_bits(rows, expected)


@pytest.mark.parametrize("width", [1, 13, 16, 50, 256])
def test_a_gated_row_is_added(width: int) -> None:
    gate, x, y = normal(5, 1), normal(5, width, seed=1), normal(5, width, seed=2)
    expected = y + reference.sigmoid(gate) * x
    kernel = gated_add_kernel()
    first = None
    for threads in THREADS:
        out = y.copy()
        run(kernel, "gated_add", threads, 5, gate=gate, x=x, y=out, width=width)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
        first = out if first is None else first
        assert same_bits(out, first)


# -- embedding -------------------------------------------------------------------------------------


def embedded(
    kind: TensorType, weight: Bytes, tokens: list[int], vocabulary: int, width: int, threads: int
) -> Floats:
    stride = work_bytes(kind, width)
    space = np.empty(max(1, threads * stride), np.uint8)
    kernel = embed_kernel(kind, Work(at(space), stride))
    ids = np.array(tokens, np.int64)
    x = np.full((len(tokens), width), UNTOUCHED)
    run(
        kernel,
        "embed",
        threads,
        len(tokens),
        kind,
        tokens=ids,
        drawn=0,
        weight=weight,
        x=x,
        width=width,
        vocabulary=vocabulary,
    )
    return x


@pytest.mark.parametrize("kind", sorted(PACKED | UNPACKED), ids=lambda kind: kind.name)
def test_an_embedded_row_has_the_bits_of_the_file(kind: TensorType) -> None:
    rng = np.random.default_rng(int(kind))
    for vocabulary, blocks in ((16, 2), (21, 3), (3, 1)):
        width = blocks * (block_layout(kind).values if kind in PACKED else 25)
        count = vocabulary * width // block_layout(kind).values
        raw = random_blocks(kind, count, 0.02, rng)
        weight = pack(kind, raw, vocabulary, width) if kind in PACKED else raw
        expected = dequantise(kind, raw).reshape(vocabulary, width)
        tokens = [*range(vocabulary - 1, -1, -1), 0, 0]
        for threads in THREADS:
            found = embedded(kind, weight, tokens, vocabulary, width, threads)
            assert same_bits(found, expected[tokens]), (vocabulary, threads)


def test_a_scale_that_is_not_finite_shows_in_the_embedded_row() -> None:
    raw = random_blocks(TensorType.Q4_K, 8, 0.02, np.random.default_rng(0))
    raw.view(block_record(TensorType.Q4_K))["scale"][3] = np.inf
    weight = pack(TensorType.Q4_K, raw, 8, 256)
    found = embedded(TensorType.Q4_K, weight, [2, 3], 8, 256, 1)
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1]).any()


# -- the router ------------------------------------------------------------------------------------


def routed(
    logits: Floats,
    top_k: int,
    renormalise: bool,
    threads: int = 1,
    forced: NDArray[np.int16] | None = None,
    positions: Sequence[int] = (),
) -> tuple[NDArray[np.int64], Floats]:
    rows, experts = logits.shape
    chosen = np.full((rows, top_k), -5, np.int64)
    shares = np.full((rows, top_k), UNTOUCHED)
    run(
        router_top_k_kernel(),
        "router_top_k",
        threads,
        rows,
        logits=logits,
        positions=np.array(positions, np.int64),
        forced=0 if forced is None else forced,
        chosen=chosen,
        shares=shares,
        experts=experts,
        top_k=top_k,
        renormalise=int(renormalise),
    )
    return chosen, shares


SIZES = [(1, 1), (4, 2), (8, 8), (17, 3), (60, 4), (64, 8), (128, 8), (512, 64)]


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("renormalise", [False, True])
def test_the_router_chooses_as_the_reference(experts: int, top_k: int, renormalise: bool) -> None:
    logits = normal(9, experts) * 3
    logits[5:] = np.round(logits[5:])  # many equal ones
    chosen, shares = routed(logits, top_k, renormalise)
    expected, expected_shares = reference.router_top_k(logits, top_k, renormalise=renormalise)
    order = np.argsort(expected, axis=1)
    assert np.array_equal(chosen, np.take_along_axis(expected, order, axis=1))
    in_order = np.take_along_axis(expected_shares, order, axis=1)
    np.testing.assert_allclose(shares, in_order, rtol=2e-6, atol=1e-9)
    for threads in THREADS[1:]:
        again = routed(logits, top_k, renormalise, threads)
        assert all(map(same_bits, again, (chosen, shares)))
    alone = routed(logits[4:5].copy(), top_k, renormalise)
    assert all(map(same_bits, alone, (chosen[4:5], shares[4:5])))


@pytest.mark.parametrize("renormalise", [False, True])
def test_experts_that_are_forced_have_the_shares_that_the_router_gives_them(
    renormalise: bool,
) -> None:
    logits, forced, positions = forced_case(130, 8)
    found = routed(logits, 8, renormalise, 2, forced, positions)
    numbers = np.sort(forced[positions].astype(np.int64), axis=1)
    _, shares = reference.router_top_k(logits, 8, renormalise=renormalise, forced=numbers)
    assert np.array_equal(found[0], numbers)
    np.testing.assert_allclose(found[1], shares, rtol=2e-6, atol=1e-9)
    # What the router chooses by itself comes out to the bit, in whatever order it is forced.
    chosen = routed(logits, 8, renormalise)
    backwards = chosen[0][:, ::-1].astype(np.int16)
    same = routed(logits, 8, renormalise, 1, backwards, range(3))
    assert all(map(same_bits, same, chosen))


def test_equal_logits_are_chosen_by_lower_number() -> None:
    chosen, shares = routed(np.zeros((1, 40), np.float32), 3, True)
    assert chosen.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)
    logits = np.array([[1, 2, 2, 0, 2, 2]], np.float32)
    assert routed(logits, 3, True)[0].tolist() == [[1, 2, 4]]


def test_a_row_with_a_logit_that_is_no_number_shows_it_in_its_shares_alone() -> None:
    logits = normal(3, 20)
    logits[1, :4] = [np.nan, 9, -np.nan, 8]
    chosen, shares = routed(logits, 2, True)
    assert chosen[1].tolist() == [1, 3]
    assert np.isnan(shares[1]).all()
    assert np.isfinite(shares[[0, 2]]).all()
    logits[1] = np.nan
    chosen, shares = routed(logits, 2, False)
    assert chosen[1].tolist() == [0, 1]
    assert np.isnan(shares[1]).all()


def test_a_logit_of_minus_infinity_has_the_share_zero() -> None:
    logits = np.full((1, 5), -np.inf, np.float32)
    logits[0, 3] = 1
    chosen, shares = routed(logits, 2, True)
    assert chosen.tolist() == [[0, 3]]
    assert shares.tolist() == [[0, 1]]


# -- rows by expert --------------------------------------------------------------------------------


class Groups:
    """The buffers of expert_group, filled for random choices of some rows."""

    def __init__(self, rows: int, experts: int, top_k: int, threads: int) -> None:
        rng = np.random.default_rng(rows)
        picked = [np.sort(rng.permutation(experts)[:top_k]) for _ in range(rows)]
        self.chosen = np.array(picked, np.int64).reshape(rows, top_k)
        self.tier = rng.integers(0, 3, experts).astype(np.uint8)
        self.use = np.arange(experts, dtype=np.int64) * 10
        self.tally = np.array([100, 200], np.int64)
        self.starts = np.full(experts + 1, -7, np.int64)
        self.members = np.full(rows * top_k, -7, np.int64)
        self.places = np.full(rows * top_k, -7, np.int64)
        run(
            expert_group_kernel(),
            "expert_group",
            threads,
            rows,
            experts=experts,
            top_k=top_k,
            **dict.fromkeys(("homes", "seen", "plan"), 0),
            **vars(self),
        )


GROUPS = [(1, 8, 2), (5, 8, 2), (40, 64, 8), (3, 4, 4), (200, 60, 4)]


@pytest.mark.parametrize(("rows", "experts", "top_k"), GROUPS)
def test_choices_are_grouped_by_expert(rows: int, experts: int, top_k: int) -> None:
    for threads in THREADS:
        found = Groups(rows, experts, top_k, threads)
        flat = found.chosen.ravel()
        counts = np.bincount(flat, minlength=experts)
        assert np.array_equal(found.starts, np.concatenate([[0], np.cumsum(counts)]))
        assert np.array_equal(found.members, np.argsort(flat, kind="stable"))
        assert np.array_equal(found.members[found.places], np.arange(flat.size))
        assert np.array_equal(found.use, np.arange(experts) * 10 + counts)
        hits = int(counts[found.tier == 0].sum())
        assert found.tally.tolist() == [100 + hits, 200 + flat.size - hits]


@pytest.mark.parametrize("size", [4, 48, 64, 100, 240])
@pytest.mark.parametrize(("rows", "experts", "top_k"), GROUPS)
def test_rows_are_gathered_for_experts_with_more_than_one(
    rows: int, experts: int, top_k: int, size: int
) -> None:
    groups = Groups(rows, experts, top_k, 1)
    x = np.random.default_rng(0).integers(1, 256, (rows, size), np.uint8)
    counts = np.diff(groups.starts)
    alone = np.repeat(counts, counts) == 1
    expected = np.where(alone[:, None], np.uint8(0), x[groups.members // top_k])
    for threads in THREADS:
        times_written = np.zeros(rows * top_k, np.int64)
        for thread in range(threads):
            gathered = np.zeros((rows * top_k + 1, size), np.uint8)
            run(
                expert_gather_kernel(),
                "expert_gather",
                threads,
                rows,
                only=thread,
                x=x,
                starts=groups.starts,
                members=groups.members,
                gathered=gathered,
                experts=experts,
                top_k=top_k,
                row_bytes=size,
            )
            found = gathered[:-1]
            here = found.any(axis=1)
            assert np.array_equal(found[here], expected[here])
            assert not gathered[-1].any()
            times_written += here
        assert np.array_equal(times_written, ~alone)
