"""The GPU kernels that choose experts and sort rows by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import gpu_launches
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import Run, aligned
from host_launches import UNTOUCHED, normal, same_bits
from numpy.typing import NDArray

from strata_nb.errors import UnsupportedDevice
from strata_nb.kernels.gpu.functions import gpu_kernel
from strata_nb.kernels.reference import Floats, Integers

BEYOND = -5  # in integers that nobody may write


def routed(
    gpu: Run, logits: Floats, top_k: int, *, renormalise: bool, beyond: int = 1
) -> tuple[Integers, Floats]:
    """Route rows on a grid for `beyond` more, whose results must stay as they were."""
    rows, experts = logits.shape
    chosen = aligned(np.full((rows + beyond, top_k), BEYOND))
    shares = aligned(np.full((rows + beyond, top_k), UNTOUCHED))
    values = {
        "rows": aligned(np.array([rows])),
        "logits": aligned(logits),
        "chosen": chosen,
        "shares": shares,
        "experts": experts,
        "top_k": top_k,
        "renormalise": int(renormalise),
    }
    gpu("router_top_k", values, ["chosen", "shares"], most_rows=rows + beyond)
    assert np.all(chosen[rows:] == BEYOND)
    assert np.all(shares[rows:] == UNTOUCHED)
    return chosen[:rows], shares[:rows]


# Less than a warp, groups of experts that are full and not, and with fewer experts than are chosen.
SIZES = [(1, 1), (4, 2), (8, 8), (17, 16), (60, 4), (64, 8), (65, 4), (70, 60), (130, 8), (512, 10)]


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_the_router_chooses_as_the_reference(gpu: Run, experts: int, top_k: int) -> None:
    logits = normal(3, experts, seed=experts) * 3
    logits[1:] = np.round(logits[1:])  # many equal ones
    for renormalise in (False, True):
        chosen, shares = routed(gpu, logits, top_k, renormalise=renormalise)
        expected, expected_shares = plain.router_top_k(logits, top_k, renormalise=renormalise)
        assert np.array_equal(chosen, expected)
        np.testing.assert_allclose(shares, expected_shares, rtol=2e-6, atol=1e-9)
    alone = routed(gpu, logits[1:2], top_k, renormalise=True, beyond=0)
    assert all(map(same_bits, alone, (chosen[1:2], shares[1:2])))


def test_equal_logits_are_chosen_by_lower_number(gpu: Run) -> None:
    chosen, shares = routed(gpu, np.zeros((1, 140), np.float32), 3, renormalise=True)
    assert chosen.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)
    logits = np.zeros((1, 140), np.float32)
    logits[0, [1, 2, 66, 130, 131]] = 2  # in three groups
    logits[0, [0, 139]] = [-0.0, 1]
    assert routed(gpu, logits, 4, renormalise=True)[0].tolist() == [[1, 2, 66, 130]]
    assert routed(gpu, logits, 7, renormalise=True)[0].tolist() == [[0, 1, 2, 66, 130, 131, 139]]


def test_a_row_with_a_logit_that_is_no_number_shows_it_in_its_shares_alone(gpu: Run) -> None:
    logits = normal(3, 20)
    logits[1, :4] = [np.nan, 9, -np.nan, 8]
    chosen, shares = routed(gpu, logits, 2, renormalise=True)
    assert chosen[1].tolist() == [1, 3]
    assert np.isnan(shares[1]).all()
    assert np.isfinite(shares[[0, 2]]).all()
    for renormalise in (False, True):
        only = np.full((1, 70), np.nan, np.float32)
        chosen, shares = routed(gpu, only, 3, renormalise=renormalise)
        assert chosen.tolist() == [[0, 1, 2]]
        assert np.isnan(shares).all()


def test_a_logit_of_minus_infinity_has_the_share_zero(gpu: Run) -> None:
    logits = np.full((1, 66), -np.inf, np.float32)
    logits[0, 65] = 1
    chosen, shares = routed(gpu, logits, 3, renormalise=True)
    assert chosen.tolist() == [[0, 1, 65]]
    assert shares.tolist() == [[0, 0, 1]]


def test_a_router_of_more_experts_than_threads_is_refused() -> None:
    gpu_kernel(gpu_launches.shaped("router_top_k", experts=1024, top_k=64))
    for experts, top_k in ((1025, 8), (1024, 65)):
        with pytest.raises(UnsupportedDevice, match=f"{top_k} of {experts:,}"):
            gpu_kernel(gpu_launches.shaped("router_top_k", experts=experts, top_k=top_k))


# -- rows by expert --------------------------------------------------------------------------------


class Groups(NamedTuple):
    """The buffers that expert_group writes."""

    use: Integers
    tally: Integers
    starts: Integers
    members: Integers
    places: Integers


def grouped(gpu: Run, chosen: Integers, tier: NDArray[np.uint8], rows: int) -> Groups:
    """Group the choices of the first rows of chosen."""
    experts = len(tier)
    buffers = Groups(
        use=aligned(np.arange(experts) * 10),
        tally=aligned(np.array([100, 200])),
        starts=aligned(np.full(experts + 1, BEYOND)),
        members=aligned(np.full(chosen.size, BEYOND)),
        places=aligned(np.full(chosen.size, BEYOND)),
    )
    values: dict[str, Any] = {
        "rows": aligned(np.array([rows])),
        "chosen": aligned(chosen),
        "tier": aligned(tier),
        "experts": experts,
        "top_k": chosen.shape[1],
        **buffers._asdict(),
    }
    gpu("expert_group", values, list(Groups._fields), most_rows=len(chosen))
    return buffers


@pytest.mark.parametrize(
    ("rows", "experts", "top_k"),
    [(0, 8, 2), (1, 8, 2), (5, 8, 2), (3, 4, 4), (8, 130, 8), (70, 60, 4), (2, 300, 16)],
)
def test_choices_are_grouped_by_expert(gpu: Run, rows: int, experts: int, top_k: int) -> None:
    rng = np.random.default_rng(rows)
    picked = [np.sort(rng.permutation(experts)[:top_k]) for _ in range(rows + 1)]
    chosen, tier = np.array(picked), rng.integers(0, 3, experts).astype(np.uint8)
    found = grouped(gpu, chosen, tier, rows)
    flat = chosen[:rows].ravel()
    counts = np.bincount(flat, minlength=experts)
    starts, members, places = plain.expert_group(chosen[:rows], experts)
    assert np.array_equal(found.starts, starts)
    assert np.array_equal(found.members[: flat.size], members)
    assert np.array_equal(found.places[: flat.size], places)
    assert np.all(found.members[flat.size :] == BEYOND)
    assert np.all(found.places[flat.size :] == BEYOND)
    assert np.array_equal(found.use, np.arange(experts) * 10 + counts)
    hits = int(counts[tier == 0].sum())
    assert found.tally.tolist() == [100 + hits, 200 + flat.size - hits]


# -- as machine code -------------------------------------------------------------------------------


def test_kernels_of_routing_compile_without_doubles() -> None:
    gpu_launches.check_code("router_top_k", experts=128, top_k=8)
    gpu_launches.check_code("expert_group")
