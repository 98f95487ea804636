"""Blocks of experts that choose by posted logits, before the launch that chooses has ended."""

from __future__ import annotations

from typing import Any

import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import Run, aligned
from host_launches import Matrix, normal, same_bits

from strata_nb.cache.filling import new_plans
from strata_nb.formats import TensorType as T
from strata_nb.kernels.reference import Floats, Integers

OUTPUTS, STAMP = 8, 3


class Case:
    """Experts, a row, and logits in which two are equal and one is no number."""

    def __init__(self, experts: int, top_k: int, values: int) -> None:
        self.experts, self.top_k, self.values = experts, top_k, values
        data = [Matrix.random(T.Q4_K, OUTPUTS, values, seed=n).data for n in range(2 * experts)]
        self.weights = aligned(np.stack(data).reshape(experts, -1))
        order = np.random.default_rng(1).permutation(experts)
        self.weights[...] = self.weights[order]
        self.addresses = aligned(self.weights.ctypes.data + self.weights.shape[1] * order)
        self.logits = normal(experts, seed=4)
        self.logits[2] = self.logits[experts - 1] = self.logits.max() + 1
        self.logits[1] = np.nan
        self.plan = aligned(new_plans(1, experts))
        self.x = aligned(plain.quantised(normal(1, values, seed=2)))

    @property
    def chosen(self) -> Integers:
        ranked = np.where(np.isnan(self.logits), -np.inf, self.logits)
        return np.sort(np.argsort(-ranked, kind="stable")[: self.top_k])

    @property
    def posts(self) -> Integers:
        return self.logits.view(np.uint32).astype(np.int64) | STAMP << 32

    def run(
        self, gpu: Run, kernel: str, blobs: Integers, posts: Integers, forced: int = 0
    ) -> Floats:
        inner = aligned(np.zeros((self.top_k, OUTPUTS), np.float32))
        values: dict[str, Any] = {
            "rows": aligned(np.array([1])),
            "blobs": aligned(blobs),
            "sources": 0,
            "x": self.x,
            "inner": inner,
            "packed": 0,
            "gate_offset": 0,
            "up_offset": self.weights.shape[1] // 2,
            "top_k": self.top_k,
            "values": self.values,
            "outputs": OUTPUTS,
            "row_bytes": self.x.strides[0],
        }
        if kernel == "choosing_gate_up":
            values |= {"posts": aligned(posts), "stamp": STAMP, "addresses": self.addresses}
            values |= {"plan": self.plan, "forced": forced, "experts": self.experts}
        gpu(kernel, values, ["inner"], variant=(T.Q4_K, T.Q4_K), most_rows=1, tables=[self.weights])
        return inner


@pytest.mark.parametrize(
    ("experts", "top_k", "values"),
    [(6, 2, 256), (8, 3, 2048), (130, 2, 256)],
    ids=["small", "two tiles a warp", "many"],
)
def test_experts_of_a_row_are_chosen_by_what_is_posted(
    gpu: Run, experts: int, top_k: int, values: int
) -> None:
    case = Case(experts, top_k, values)
    expected = case.run(gpu, "expert_gate_up", case.addresses[case.chosen], case.posts)
    nowhere = np.full(top_k, 16)
    assert same_bits(case.run(gpu, "choosing_gate_up", nowhere, case.posts), expected)
    assert np.all(expected != 0)


def test_experts_of_logits_that_nobody_posts_are_found_where_they_are_written(gpu: Run) -> None:
    case = Case(6, 2, 256)
    blobs, posts = case.addresses[np.array([0, 3])], case.posts
    posts[4] = 0
    expected = case.run(gpu, "expert_gate_up", blobs, posts)
    assert same_bits(case.run(gpu, "choosing_gate_up", blobs, posts), expected)


@pytest.mark.parametrize("why", ["offered", "listed", "forced"])
def test_experts_that_do_not_follow_from_logits_are_found_where_they_are_written(
    gpu: Run, why: str
) -> None:
    case, others = Case(6, 2, 256), np.array([0, 3])
    assert not np.array_equal(case.chosen, others)
    blobs, forced = case.addresses[others], 16 if why == "forced" else 0
    if not forced:
        case.plan[why] = 1
    expected = case.run(gpu, "expert_gate_up", blobs, case.posts)
    assert same_bits(case.run(gpu, "choosing_gate_up", blobs, case.posts, forced), expected)
