"""Which missed experts get slots: kernels that decide against the rule, and those that bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import Run, aligned
from host_launches import UNTOUCHED, normal, same_bits
from test_gpu_experts import Experts, GateUp, Routes, with_room

from strata_nb.cache.filling import (
    cpu_count,
    fill_layer,
    missed_in_order,
    new_plans,
    write_plans,
)
from strata_nb.fill_plans import MOST_LISTED, MOST_OFFERED, SHARE_UNITS
from strata_nb.formats import TensorType as T
from strata_nb.kernels.gpu.filling import (
    ADDRESS,
    BY_CPU,
    COMES,
    IN_HOST_MEMORY,
    NOT_POSTED,
    ROW_BY_CPU,
    ROW_COMES,
)
from strata_nb.kernels.gpu.routed import WITH_CPU
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.reference import Integers
from strata_nb.packing import UNPACKED

BEYOND = -5  # in integers that nobody may write
HOST, DEVICE = 0x7E0000000000, 0x7F0000000000


class Layer:
    """The tables of a layer, as a card has them, and a twin that the rule changes."""

    def __init__(
        self, experts: int, top_k: int, slots: int, held: int, seed: int, cpu_share: int = 0
    ) -> None:
        """`held` of the slots have experts."""
        self.rng = np.random.default_rng(seed)
        self.experts, self.top_k = experts, top_k
        self.slots = [DEVICE + 0x100 * slot for slot in self.rng.permutation(slots).tolist()]
        self.homes = aligned(HOST + 0x100 * self.rng.permutation(experts))
        self.addresses, self.seen = aligned(self.homes), aligned(np.zeros(experts, np.int64))
        self.addresses[self.rng.permutation(experts)[:held]] = self.slots[:held]
        self.plan = aligned(new_plans(1, experts))
        self.plan["cpu_share"] = cpu_share
        self.window = 0

    def make_plan(self) -> None:
        """Plan by what is true now; equal figures are frequent."""
        self.window += 1
        taken = set(self.addresses.tolist())
        free = [slot for slot in self.slots if slot not in taken]
        gain, heat = self.rng.integers(0, 6, (2, 1, self.experts)) / 4
        gain[self.rng.random(gain.shape) < 0.1] = -np.inf
        offered = free[: self.rng.integers(0, len(free) + 1)]
        resident = (self.addresses != self.homes)[None]
        write_plans(self.plan, self.window, [offered], resident, gain, heat)

    def run(self, gpu: Run, rows: int) -> None:
        """Run a window, and compare with the rule."""
        count = rows, self.top_k
        values: dict[str, Any] = {
            "rows": aligned(np.array([rows])),
            "logits": aligned(self.rng.normal(size=(rows, self.experts)).astype(np.float32)),
            "positions": aligned(np.zeros(rows, np.int64)),
            "forced": 0,
            "addresses": self.addresses,
            "homes": self.homes,
            "seen": self.seen,
            "plan": self.plan,
            "use": aligned(np.zeros(self.experts, np.int64)),
            "tally": aligned(np.zeros(2, np.int64)),
            "chosen": aligned(np.full(count, BEYOND)),
            "shares": aligned(np.zeros(count, np.float32)),
            "blobs": aligned(np.full(count, BEYOND)),
            "sources": aligned(np.full(count, BEYOND)),
            "experts": self.experts,
            "top_k": self.top_k,
            "renormalise": 1,
        }
        before, seen = self.addresses.copy(), self.seen.copy()
        written = ["addresses", "seen", "use", "tally", "chosen", "shares", "blobs", "sources"]
        variant = WITH_CPU if self.plan["cpu_share"] else rows == 1
        gpu("route", values, written, variant=variant, most_rows=rows)
        if rows > 1:
            for name in ("logits", "positions", "forced", "use", "tally", "shares", "renormalise"):
                del values[name]
            gpu("expert_fill", values, ["addresses", "blobs", "sources"], most_rows=rows)
        chosen = values["chosen"]
        after = before.copy()
        missed = missed_in_order(self.plan[0], chosen.ravel().tolist(), before, self.homes)
        count = cpu_count(int(self.plan["cpu_share"][0]), len(missed))
        by_cpu = np.isin(chosen, missed[len(missed) - count :])
        came = fill_layer(self.plan[0], chosen.ravel().tolist(), after, self.homes, seen)
        assert np.array_equal(self.addresses, after)
        assert np.array_equal(self.seen, seen)
        blobs = values["blobs"] - np.where(by_cpu, BY_CPU, 0) - ROW_BY_CPU * by_cpu.any()
        assert not np.any(blobs & (BY_CPU | ROW_BY_CPU))
        assert np.all(values["sources"][by_cpu] == NOT_POSTED)
        sources = np.where(by_cpu, BEYOND, values["sources"])
        self.check_words(chosen, came, before, after, blobs, sources)

    def check_words(
        self,
        chosen: Integers,
        came: Sequence[int],
        before: Integers,
        after: Integers,
        blobs: Integers,
        sources: Integers,
    ) -> None:
        """Look at what kernels are told of each choice: the first of an expert brings it."""
        left, comes = set(came), np.zeros(chosen.shape, bool)
        for place, expert in np.ndenumerate(chosen):
            comes[place] = expert in left
            left.discard(int(expert))
        in_place = np.where(before[chosen] == self.homes[chosen], IN_HOST_MEMORY, 0)
        words = np.where(comes, after[chosen] + COMES, before[chosen] + in_place)
        words += np.where(comes.any(axis=1), ROW_COMES, 0)[:, None]
        assert np.array_equal(blobs, words)
        assert np.array_equal(sources, np.where(comes, self.homes[chosen], BEYOND))


LAYERS = [(6, 2, 3, 1), (40, 4, 20, 12), (40, 4, 8, 8), (70, 8, 50, 50)]


@pytest.mark.parametrize(("experts", "top_k", "slots", "held"), LAYERS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_card_gives_slots_as_the_rule_says(
    gpu: Run, experts: int, top_k: int, slots: int, held: int, rows: int
) -> None:
    layer = Layer(experts, top_k, slots, held, seed=rows)
    for number in range(8):
        if number % 3 != 2:  # else the plan is as old as the window before
            layer.make_plan()
        else:
            layer.window += 1
            layer.plan["window"], layer.plan["offered"] = layer.window, 0
        layer.run(gpu, rows)


@pytest.mark.parametrize("cpu_share", [20_000, 60_000, SHARE_UNITS])
def test_who_comes_last_of_the_missed_goes_to_the_cpu_instead(gpu: Run, cpu_share: int) -> None:
    layer = Layer(40, 6, 20, 12, 3, cpu_share)
    for _ in range(5):
        layer.make_plan()
        layer.run(gpu, 1)


@pytest.mark.parametrize("rates", [(55, 65), (55, 20), (10, 60)])
def test_the_share_of_the_cpu_lets_card_and_cpu_end_as_soon_as_they_can(
    rates: tuple[int, int],
) -> None:
    link, cpu = rates
    share = SHARE_UNITS * cpu // (cpu + link)
    for missed in range(12):

        def ends(count: int, missed: int = missed) -> float:
            return max((missed - count) / link, count / cpu)

        best = min(map(ends, range(max(1, missed))))  # one crosses the link
        count = cpu_count(share, missed)
        assert count < max(1, missed)
        assert ends(count) < 1.001 * best + 1e-9
    assert [cpu_count(0, 8), cpu_count(SHARE_UNITS, 8), cpu_count(SHARE_UNITS, 0)] == [0, 8, 0]


def test_a_layer_may_offer_and_list_more_than_a_plan_has_room_for() -> None:
    experts = MOST_LISTED + 20
    plans, heat = new_plans(1, experts), np.arange(experts)[None] + 0.0
    free = [list(range(256, 256 * (MOST_OFFERED + 9), 256))]
    write_plans(plans, 1, free, np.ones((1, experts), bool), heat, heat)
    assert plans["offered"] == MOST_OFFERED
    assert plans["listed"] == MOST_LISTED
    assert np.sort(plans["order"][0])[:MOST_LISTED].tolist() == list(range(MOST_LISTED))
    write_plans(plans, 2, free, np.ones((1, experts), bool), heat, np.where(heat > 3, np.inf, heat))
    assert plans["listed"] == 4  # nobody else leaves: a plan that lists none is passed over


# -- bringing --------------------------------------------------------------------------------------


class Coming:
    """Choices of experts of which some come to slots."""

    def __init__(self, experts: Experts, routes: Routes) -> None:
        chosen = routes.chosen
        self.homes = experts.addresses[chosen]
        self.slots = aligned(np.full(experts.memory.shape, 0xEE, np.uint8))
        offsets = experts.addresses - experts.memory.ctypes.data
        # The first choice of every other expert comes.
        first = np.zeros(chosen.size, bool)
        first[np.unique(chosen, return_index=True)[1]] = True
        self.comes = first.reshape(chosen.shape) & (chosen % 2 == 0)
        self.words = aligned(
            np.where(
                self.comes,
                self.slots.ctypes.data + offsets[chosen] + COMES,
                self.homes + IN_HOST_MEMORY,
            )
            + np.where(self.comes.any(axis=1), ROW_COMES, 0)[:, None]
        )
        self.sources = aligned(np.where(self.comes, self.homes, BEYOND))
        self.places = (offsets // experts.memory.shape[1])[chosen[self.comes]]

    def check(self, experts: Experts, *parts: int) -> None:
        """Look for these parts, and nothing else, in the slots of those that came."""
        assert self.comes.any()
        expected = np.full(experts.memory.shape, 0xEE, np.uint8)
        for part in parts:
            size = experts.parts[part][0].data.size
            run = slice(experts.offsets[part], experts.offsets[part] + size)
            expected[self.places, run] = experts.memory[self.places, run]
        assert np.array_equal(self.slots, expected)


BROUGHT = [
    GateUp(T.Q4_K, T.Q6_K, 256, 40),
    GateUp(T.MXFP4, T.MXFP4, 96, 41),  # rows of an odd number of bytes
    GateUp(T.F32, T.F32, 77, 35),
    GateUp(T.F16, T.BF16, 264, 32),
]


@pytest.mark.parametrize("case", BROUGHT, ids=lambda case: f"{case.gate.name}-{case.up.name}")
def test_gate_and_up_of_who_comes_are_brought_and_the_result_is_the_same(
    gpu: Run, case: GateUp
) -> None:
    rows, number = 2, 5
    shape = case.outputs, case.values
    experts, routes = Experts(number, (case.gate, *shape), (case.up, *shape)), Routes.of(rows, 5)
    x = normal(rows, case.values, seed=1)
    read = x if case.gate in UNPACKED else plain.quantised(x)
    whole = case.outputs % 32 == 0
    choices = 2 * (rows + 1)

    def inner(blobs: Integers, coming: Coming | None) -> Any:
        packed = np.zeros((0, row_bytes(case.outputs)), np.uint8)
        values: dict[str, Any] = {
            "rows": aligned(np.array([rows])),
            "blobs": with_room(blobs.ravel(), choices, -1),
            "sources": aligned(coming.sources) if coming is not None else 0,
            "x": with_room(read, rows + 1, 0),
            "inner": aligned(np.full((choices, case.outputs), UNTOUCHED, np.float32)),
            "packed": with_room(packed, choices, 0xEE) if whole else 0,
            "gate_offset": experts.offsets[0],
            "up_offset": experts.offsets[1],
            "top_k": 2,
            "values": case.values,
            "outputs": case.outputs,
            "row_bytes": read.strides[0],
        }
        gpu(
            "expert_gate_up",
            values,
            ["inner", "packed"] if whole else ["inner"],
            variant=(case.gate, case.up),
            most_rows=rows + 1,
            tables=[experts.memory],
            written_tables=[coming.slots] if coming is not None else [],
        )
        return values["inner"]

    coming = Coming(experts, routes)
    expected = inner(coming.homes + IN_HOST_MEMORY, None)
    assert same_bits(inner(coming.words, coming), expected)
    coming.check(experts, 0, 1)


DOWNS = [(T.Q4_K, 256, 17), (T.MXFP4, 96, 13), (T.F16, 45, 9), (T.F32, 264, 8)]


@pytest.mark.parametrize(("kind", "values", "outputs"), DOWNS)
def test_down_of_who_comes_is_brought_and_the_result_is_the_same(
    gpu: Run, kind: T, values: int, outputs: int
) -> None:
    rows, top_k = 2, 2
    experts = Experts(5, (T.Q8_0, 8, 64), (kind, outputs, values))
    routes = Routes.of(rows, 5)
    before = normal(rows, outputs, seed=2)
    vectors = normal(rows * top_k, values, seed=1)
    read = vectors if kind in UNPACKED else plain.quantised(vectors)

    def y(blobs: Integers, coming: Coming | None) -> Any:
        given: dict[str, Any] = {
            "rows": aligned(np.array([rows])),
            "blobs": with_room(blobs.ravel(), (rows + 1) * top_k, -1),
            "sources": aligned(coming.sources) if coming is not None else 0,
            "inner": with_room(read, (rows + 1) * top_k, 0),
            "shares": aligned(routes.shares),
            "y": with_room(before, rows + 1, UNTOUCHED),
            "down_offset": experts.offsets[-1],
            "top_k": top_k,
            "values": values,
            "outputs": outputs,
        }
        gpu(
            "expert_down",
            given,
            ["y"],
            variant=kind,
            most_rows=rows + 1,
            tables=[experts.memory],
            written_tables=[coming.slots] if coming is not None else [],
        )
        return given["y"]

    coming = Coming(experts, routes)
    expected = y(coming.homes + IN_HOST_MEMORY, None)
    assert same_bits(y(coming.words, coming), expected)
    coming.check(experts, 1)
    assert np.all(coming.words & ADDRESS != 0)
