"""Blocks of experts that choose by posted logits, before the launch that chooses has ended."""

from __future__ import annotations

import gpu_simulator
import numpy as np
import pytest
from gpu_launches import aligned, simulate
from host_launches import Matrix, normal, same_bits
from numpy.typing import NDArray

from strata_nb.cache.filling import new_plans
from strata_nb.formats import TensorType as T
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.early_choice import MOST_EXPERTS, early_choice
from strata_nb.kernels.gpu.early_gate_up import early_gate_up
from strata_nb.kernels.gpu.expert_gate_up import GATE_UP_THREADS
from strata_nb.kernels.gpu.intrinsics import block_x, i64, store_i64, thread_index
from strata_nb.kernels.gpu.launches import card_launches
from strata_nb.kernels.gpu.routed import CARD_KERNELS
from strata_nb.kernels.program import launch
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.reference import Floats, Integers, router_top_k

OUTPUTS, STAMP, EPS = 8, 3, 1e-6


def posted(logits: Floats) -> Integers:
    """Return words of logits, and one that nobody posts where their number is odd."""
    words = np.zeros(len(logits) + len(logits) % 2, np.int64)
    words[: len(logits)] = logits.view(np.uint32).astype(np.int64) | STAMP << 32
    return aligned(words)


class Case:
    """Experts, a row, and logits in which two are equal and one is no number."""

    def __init__(self, experts: int, top_k: int, values: int) -> None:
        data = [Matrix.random(T.Q4_K, OUTPUTS, values, seed=n).data for n in range(2 * experts)]
        weights = np.stack(data).reshape(experts, -1)
        logits = normal(experts, seed=4)
        logits[2] = logits[experts - 1] = logits.max() + 1
        logits[1] = np.nan
        ranked = np.where(np.isnan(logits), -np.inf, logits)
        self.chosen = np.sort(np.argsort(-ranked, kind="stable")[:top_k])
        self.arrays: dict[str, NDArray[np.generic]] = {
            "rows": aligned(np.array([1])),
            "weights": aligned(weights),
            "row": aligned(normal(1, values, seed=2)),
            "norm_weight": aligned(normal(values, seed=3)),
            "x": aligned(np.zeros((1, row_bytes(values)), np.uint8)),
            "posts": posted(logits),
            "plan": aligned(new_plans(1, experts)),
            "blobs": aligned(np.zeros(top_k, np.int64)),
            "inner": aligned(np.zeros((top_k, OUTPUTS), np.float32)),
        }
        self.addresses = self.at("weights") + weights.shape[1] * np.arange(experts)[::-1]
        self.arrays["addresses"] = aligned(self.addresses)
        self.sizes = {"gate_offset": 0, "up_offset": weights.shape[1] // 2, "top_k": top_k}
        self.sizes |= {"values": values, "outputs": OUTPUTS, "row_bytes": row_bytes(values)}
        self.experts = experts

    def at(self, name: str) -> int:
        return int(self.arrays[name].ctypes.data)

    def late(self) -> CardLaunch:
        words = {name: self.at(name) for name in ("rows", "blobs", "x", "inner")}
        words |= {"sources": 0, "packed": 0, **self.sizes}
        return CARD_KERNELS["expert_gate_up"].part(words, (T.Q4_K, T.Q4_K), "blk.0.gate_up")

    def early(self, **changed: int) -> CardLaunch:
        names = ("rows", "blobs", "norm_weight", "posts", "addresses", "plan")
        router = {name: self.at(name) for name in names}
        router |= {"x": self.at("row"), "packed": self.at("x"), "stamp": STAMP, "forced": 0}
        router |= {"eps": int(np.float32(EPS).view(np.uint32)), "experts": self.experts}
        found = early_gate_up(self.late(), {**router, "top_k": self.sizes["top_k"], **changed})
        assert found is not None
        return found

    def run(self, one: CardLaunch, blobs: Integers) -> Floats:
        """Return what a launch makes of the row, with blobs as a router leaves them."""
        self.arrays["blobs"][...] = blobs
        written = [self.arrays[name] for name in ("x", "inner")]
        read = [array for name, array in self.arrays.items() if name not in {"x", "inner"}]
        memory = gpu_simulator.Memory(written, read)
        words = {name: self.at(name) for name in ("rows", "norm_weight")}
        words |= {"index": 0, "x": self.at("row"), "weight": words.pop("norm_weight"), "out": 0}
        words |= {"packed": self.at("x"), "parts": 1, "width": self.sizes["values"]}
        (norm,) = card_launches([launch("rms_norm", {**words, "eps": EPS})], 1)
        for each in (norm, one):
            simulate(each, 1, memory)
        found: Floats = self.arrays["inner"].copy()
        self.arrays["inner"][...] = 0
        return found


@pytest.mark.parametrize(
    ("experts", "top_k", "values"),
    [(6, 2, 256), (8, 3, 2048), (130, 2, 256)],
    ids=["small", "two tiles a warp", "many"],
)
def test_experts_of_a_row_are_chosen_by_what_is_posted(
    experts: int, top_k: int, values: int
) -> None:
    case = Case(experts, top_k, values)
    expected = case.run(case.late(), case.addresses[case.chosen])
    assert np.all(expected != 0)
    nowhere = np.full(top_k, 16)
    assert same_bits(case.run(case.early(), nowhere), expected)


SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0, 1e-40)


@pytest.mark.parametrize(
    ("experts", "top_k", "values"),
    [(1, 1, SPECIAL), (20, 3, (0.0, -0.0)), (129, 3, SPECIAL), (256, 64, SPECIAL)],
)
def test_the_choice_is_that_of_the_table_whatever_the_logits_are(
    experts: int, top_k: int, values: tuple[float, ...]
) -> None:
    ask, find, size = early_choice(experts, top_k, 16)

    def choose(posts: int, addresses: int, found: int) -> None:
        thread, choice = i64(thread_index()), i64(block_x())
        address = find(posts, STAMP, ask(addresses, thread), thread, choice)
        if thread == 0:
            store_i64(found + 8 * choice, address)

    logits = np.random.default_rng(experts).choice(np.array(values, np.float32), experts)
    posts = posted(logits)
    addresses, found = aligned(256 * np.arange(1, experts + 1)), aligned(np.zeros(top_k, np.int64))
    arrays = posts, addresses, found
    memory = gpu_simulator.Memory([found], [posts, addresses])
    words = [int(one.ctypes.data) for one in arrays]
    seen = min(top_k, 3)
    gpu_simulator.run(choose, (seen, 1, 1), GATE_UP_THREADS, 16 + size, words, memory)
    (ids,), _ = router_top_k(logits[None], top_k, renormalise=False)
    assert (found[:seen] // 256 - 1).tolist() == np.sort(ids)[:seen].tolist()


def test_experts_of_logits_that_nobody_posts_are_found_where_they_are_written() -> None:
    case = Case(6, 2, 256)
    blobs = case.addresses[np.array([0, 3])]
    case.arrays["posts"][4] = 0
    assert same_bits(case.run(case.early(), blobs), case.run(case.late(), blobs))


@pytest.mark.parametrize("why", ["offered", "listed", "forced"])
def test_experts_that_do_not_follow_from_logits_are_found_where_they_are_written(why: str) -> None:
    case, others = Case(6, 2, 256), np.array([0, 3])
    assert not np.array_equal(case.chosen, others)
    blobs, changed = case.addresses[others], {"forced": 16} if why == "forced" else {}
    if not changed:
        case.arrays["plan"][why] = 1
    assert same_bits(case.run(case.early(**changed), blobs), case.run(case.late(), blobs))


def test_a_row_that_the_launch_in_front_still_writes_is_not_normed_by_blocks_that_choose() -> None:
    case = Case(6, 2, 256)
    words: dict[str, int | float] = {"rows": case.at("rows"), "index": 0, "packed": 0}
    words |= {"x": case.at("norm_weight"), "weight": case.at("norm_weight"), "out": case.at("row")}
    (norm,) = card_launches(
        [launch("rms_norm", {**words, "parts": 1, "width": 256, "eps": EPS})], 1
    )
    written = [case.arrays[name] for name in ("row", "inner")]
    read = [array for name, array in case.arrays.items() if name not in {"row", "inner"}]
    memory = gpu_simulator.Memory(written, read)
    simulate(norm, 1, memory)
    with pytest.raises(gpu_simulator.KernelFault, match="what the launch in front may write"):
        simulate(case.early(), 1, memory)
    memory.begin_launch()  # as the router, which is between
    simulate(case.early(), 1, memory)


def test_more_experts_than_a_warp_has_room_for_are_not_chosen_early() -> None:
    case = Case(6, 2, 256)
    router = {**case.early().arguments, "x": case.at("row"), "packed": case.at("x"), "top_k": 2}
    assert early_gate_up(case.late(), {**router, "experts": MOST_EXPERTS}) is not None
    assert early_gate_up(case.late(), {**router, "experts": MOST_EXPERTS + 1}) is None


@pytest.mark.parametrize("changed", ["rows", "blobs", "packed"])
def test_experts_of_another_row_or_router_are_not_chosen_early(changed: str) -> None:
    case = Case(6, 2, 256)
    router = {**case.early().arguments, "x": case.at("row"), "packed": case.at("x")}
    router |= {"experts": 6, changed: 4096}
    assert early_gate_up(case.late(), router) is None


def test_a_row_that_a_step_does_not_have_is_left_alone() -> None:
    case = Case(6, 2, 256)
    case.arrays["rows"][0] = 0
    assert not np.any(case.run(case.early(), case.addresses[case.chosen]))
