"""The GPU kernel that chooses experts, and what a card launches in place of the table's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import gpu_launches
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import Run, aligned
from host_launches import UNTOUCHED, forced_case, normal, same_bits
from numpy.typing import NDArray

from strata_nb.cache.filling import new_plans
from strata_nb.errors import UnsupportedDevice
from strata_nb.formats import TensorType as T
from strata_nb.kernels.gpu.filling import IN_HOST_MEMORY
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.routed import FUSED
from strata_nb.kernels.program import Launch
from strata_nb.kernels.reference import Floats, Integers
from strata_nb.kernels.table import KERNELS

BEYOND = -5  # in integers that nobody may write


class Routed(NamedTuple):
    """What `route` writes for rows, and what it adds to the counts of use."""

    chosen: Integers
    shares: Floats
    blobs: Integers
    use: Integers
    tally: Integers


def homes_of(experts: int) -> Integers:
    return 0x7F0000000000 + 0x100 * np.random.default_rng(experts).permutation(experts)


def addresses_of(experts: int, resident: NDArray[np.bool_] | None = None) -> Integers:
    return homes_of(experts) + np.where(resident is None or resident, 0x1000000, 0)


def routed(
    gpu: Run,
    logits: Floats,
    top_k: int,
    *,
    renormalise: bool,
    beyond: int = 1,
    resident: NDArray[np.bool_] | None = None,
    forced: NDArray[np.int16] | None = None,
    positions: Sequence[int] = (),
) -> Routed:
    """Route rows on a grid for `beyond` more, whose results must stay as they were.

    resident   experts that have slots; None: all
    """
    rows, experts = logits.shape
    shape = rows + beyond, top_k
    before = Routed(
        chosen=aligned(np.full(shape, BEYOND)),
        shares=aligned(np.full(shape, UNTOUCHED)),
        blobs=aligned(np.full(shape, BEYOND)),
        use=aligned(np.arange(experts) * 10),
        tally=aligned(np.array([100, 200])),
    )
    values = {
        "rows": aligned(np.array([rows])),
        "logits": aligned(logits),
        "positions": aligned(np.array([*positions, *[10**9] * beyond], np.int64)),
        "forced": 0 if forced is None else aligned(forced),
        "addresses": aligned(addresses_of(experts, resident)),
        "homes": aligned(homes_of(experts)),
        "seen": aligned(np.zeros(experts, np.int64)),
        "plan": aligned(new_plans(1, experts)),
        "sources": 0,
        "experts": experts,
        "top_k": top_k,
        "renormalise": int(renormalise),
        **before._asdict(),
    }
    written = [*Routed._fields, "seen"]
    gpu("route", values, written, variant=rows + beyond == 1, most_rows=rows + beyond)
    assert np.all(before.chosen[rows:] == BEYOND)
    assert np.all(before.blobs[rows:] == BEYOND)
    assert np.all(before.shares[rows:] == UNTOUCHED)
    return Routed(
        before.chosen[:rows],
        before.shares[:rows],
        before.blobs[:rows],
        before.use - np.arange(experts) * 10,
        before.tally - [100, 200],
    )


# Less than a warp, groups of experts that are full and not, and with fewer experts than are chosen.
SIZES = [(1, 1), (4, 2), (8, 8), (17, 16), (60, 4), (64, 8), (65, 4), (70, 60), (130, 8), (300, 10)]


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_the_router_chooses_as_the_reference(gpu: Run, experts: int, top_k: int) -> None:
    logits = normal(3, experts, seed=experts) * 3
    logits[1:] = np.round(logits[1:])  # many equal ones
    for renormalise in (False, True):
        found = routed(gpu, logits, top_k, renormalise=renormalise)
        expected, expected_shares = plain.router_top_k(logits, top_k, renormalise=renormalise)
        assert np.array_equal(found.chosen, expected)
        np.testing.assert_allclose(found.shares, expected_shares, rtol=2e-6, atol=1e-9)
    alone = routed(gpu, logits[1:2], top_k, renormalise=True, beyond=0)
    assert all(map(same_bits, alone[:3], [part[1:2] for part in found[:3]]))


def test_equal_logits_are_chosen_by_lower_number(gpu: Run) -> None:
    chosen, shares = routed(gpu, np.zeros((1, 140), np.float32), 3, renormalise=True)[:2]
    assert chosen.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)
    logits = np.zeros((1, 140), np.float32)
    logits[0, [1, 2, 66, 130, 131]] = 2  # in three groups
    logits[0, [0, 139]] = [-0.0, 1]
    assert routed(gpu, logits, 4, renormalise=True).chosen.tolist() == [[1, 2, 66, 130]]
    seven = routed(gpu, logits, 7, renormalise=True).chosen
    assert seven.tolist() == [[0, 1, 2, 66, 130, 131, 139]]


def test_a_row_with_a_logit_that_is_no_number_shows_it_in_its_shares_alone(gpu: Run) -> None:
    logits = normal(3, 20)
    logits[1, :4] = [np.nan, 9, -np.nan, 8]
    chosen, shares = routed(gpu, logits, 2, renormalise=True)[:2]
    assert chosen[1].tolist() == [1, 3]
    assert np.isnan(shares[1]).all()
    assert np.isfinite(shares[[0, 2]]).all()
    for renormalise in (False, True):
        only = np.full((1, 70), np.nan, np.float32)
        chosen, shares = routed(gpu, only, 3, renormalise=renormalise)[:2]
        assert chosen.tolist() == [[0, 1, 2]]
        assert np.isnan(shares).all()


def test_a_logit_of_minus_infinity_has_the_share_zero(gpu: Run) -> None:
    logits = np.full((1, 66), -np.inf, np.float32)
    logits[0, 65] = 1
    chosen, shares = routed(gpu, logits, 3, renormalise=True)[:2]
    assert chosen.tolist() == [[0, 1, 65]]
    assert shares.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(("experts", "top_k"), [(8, 8), (65, 4), (130, 8)])
def test_experts_that_are_forced_have_the_shares_that_the_router_gives_them(
    gpu: Run, experts: int, top_k: int
) -> None:
    logits, forced, positions = forced_case(experts, top_k)
    plain_rows = routed(gpu, logits, top_k, renormalise=True, positions=positions)
    for renormalise in (False, True):
        given = {"renormalise": renormalise, "forced": forced, "positions": positions}
        found = routed(gpu, logits, top_k, **given)
        expected, shares = plain.router_top_k(
            logits, top_k, renormalise=renormalise, forced=forced[positions].astype(np.int64)
        )
        assert np.array_equal(found.chosen, expected)
        np.testing.assert_allclose(found.shares, shares, rtol=2e-6, atol=1e-9)
        assert np.array_equal(found.use, np.bincount(expected.ravel(), minlength=experts))
        assert np.array_equal(found.blobs, addresses_of(experts)[expected])
    # What the router chooses by itself comes out to the bit, in whatever order it is forced.
    same = routed(
        gpu,
        logits,
        top_k,
        renormalise=True,
        forced=plain_rows.chosen[:, ::-1].astype(np.int16),
        positions=range(len(logits)),
    )
    assert all(map(same_bits, same, plain_rows))


def test_a_row_of_no_numbers_takes_the_experts_that_are_forced(gpu: Run) -> None:
    logits = normal(2, 20)
    logits[0, 3] = np.nan
    given = {"forced": np.array([[9, 2]], np.int16), "positions": [0, 0]}
    chosen, shares = routed(gpu, logits, 2, renormalise=True, **given)[:2]
    assert chosen.tolist() == [[2, 9], [2, 9]]
    assert np.isnan(shares[0]).all()
    assert np.isfinite(shares[1]).all()


def test_a_router_of_more_experts_than_threads_is_refused() -> None:
    gpu_launches.shaped_for_card("route", experts=1024, top_k=64)
    for experts, top_k in ((1025, 8), (1024, 65)):
        with pytest.raises(UnsupportedDevice, match=f"{top_k} of {experts:,}"):
            gpu_launches.shaped_for_card("route", experts=experts, top_k=top_k)


def test_choices_are_counted_and_found_by_where_their_experts_are(gpu: Run) -> None:
    for rows, experts, top_k in ((1, 8, 2), (5, 8, 2), (3, 4, 4), (8, 130, 8)):
        rng = np.random.default_rng(rows)
        resident = rng.random(experts) < 0.5
        found = routed(gpu, normal(rows, experts), top_k, renormalise=True, resident=resident)
        counts = np.bincount(found.chosen.ravel(), minlength=experts)
        assert np.array_equal(found.use, counts)
        hits = int(counts[resident].sum())
        assert found.tally.tolist() == [hits, rows * top_k - hits]
        words = addresses_of(experts, resident) + np.where(resident, 0, IN_HOST_MEMORY)
        assert np.array_equal(found.blobs, words[found.chosen])


# -- in place of the table's kernels ---------------------------------------------------------------


def of_a_layer() -> list[Launch]:
    """Return the launches of a layer's experts as a model emits them: an address is its name."""
    sizes = {"experts": 8, "top_k": 2, "values": 64, "outputs": 32, "row_bytes": 96}
    variants = {"expert_gate_up": (T.Q8_0, T.Q8_0), "expert_down": T.Q8_0}
    return [
        gpu_launches.shaped(
            name,
            variants.get(name),
            **{
                one.name: sizes.get(one.name, sum(map(ord, one.name)))
                for one in KERNELS[name].arguments
            },
        )
        for name in FUSED
    ]


def test_a_card_launches_kernels_of_its_own_for_a_layers_experts() -> None:
    norm = gpu_launches.shaped("rms_norm", width=64)
    route, gate_up, down, last = card_launches((*of_a_layer(), norm), 1)
    assert [one.kernel.name for one in (route, gate_up, down, last)] == [
        "route_8_2_alone",
        "expert_gate_up_q8_0_q8_0_64",
        "expert_down_q8_0_2x_64",
        card_launches((norm,), 1)[0].kernel.name,
    ]
    more = card_launches((*of_a_layer(), norm), 8)
    assert [one.kernel.name for one in more[:2]] == ["route_8_2", "expert_fill_32"]
    assert more[2:] == [gate_up, down, last]
    in_place_of = {"blobs": "members", "sources": "places"}
    for one in (route, gate_up, down, *more[:2]):
        for name, word in one.arguments.items():
            if one.kinds[list(one.arguments).index(name)] == "address":
                assert word == sum(map(ord, in_place_of.get(name, name))), name


def test_a_part_of_a_layers_experts_alone_is_refused() -> None:
    layer = of_a_layer()
    for part in (layer[:1], layer[1:], layer[:4], [layer[0], *layer]):
        with pytest.raises(ValueError, match="together"):
            card_launches(tuple(part), 1)
