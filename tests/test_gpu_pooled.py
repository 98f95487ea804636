"""Experts of a row that the CPU computes: what a card posts, waits for and adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_simulator
import kernel_references as plain
import numpy as np
import pytest
from gpu_launches import OF_CARDS, aligned, of_card, simulate
from host_launches import UNTOUCHED, normal, same_bits
from numpy.typing import NDArray
from test_gpu_experts import Experts
from test_gpu_last_norm import norm_of

from strata_nb import formats
from strata_nb.formats import TensorType as T
from strata_nb.kernels import mailbox, pool_state
from strata_nb.kernels.gpu.card_launch import CardLaunch, card_launch
from strata_nb.kernels.gpu.filling import BY_CPU, IN_HOST_MEMORY, ROW_BY_CPU
from strata_nb.kernels.gpu.intrinsics import WARP, await_previous, i64, load_i64, thread_index
from strata_nb.kernels.gpu.last_norm import with_last_norms
from strata_nb.kernels.gpu.operations import GpuKernel
from strata_nb.kernels.gpu.pool_answers import with_answers
from strata_nb.kernels.gpu.pooled import POST_NS, answer_taker
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.packing import GROUP_ROWS

TOP_K, LAYER = 4, 7
CHOSEN = [0, 2, 3, 5]
GATE_UP, DOWN = ("expert_gate_up", "pool_gate_up"), ("expert_down", "pool_down")


class Row:
    """A row, the experts that it chose, and threads that answer what it posts."""

    def __init__(
        self,
        by_cpu: Sequence[int] = (),
        width: int = 64,
        inner: int = 32,
        *,
        answers: bool = True,
    ) -> None:
        """`by_cpu` are of the chosen; `answers`: somebody is there."""
        parts = ((T.Q8_0, inner, width), (T.Q8_0, inner, width), (T.Q8_0, width, inner))
        self.width, self.inner = width, inner
        self.experts, self.answers = Experts(6, *parts), answers
        marks = np.isin(CHOSEN, by_cpu) * (BY_CPU + IN_HOST_MEMORY) + bool(by_cpu) * ROW_BY_CPU
        self.box = aligned(np.zeros(mailbox.box_bytes(self.width), np.uint8), 4096)
        self.state = aligned(np.zeros(pool_state.WORDS, np.int64))
        self.x = aligned(plain.quantised(normal(1, self.width, seed=1)))
        self.arrays: dict[str, NDArray[Any]] = {
            "rows": aligned(np.array([1, 0])),
            "blobs": aligned(self.experts.addresses[CHOSEN] + marks),
            "sources": aligned(np.zeros(TOP_K, np.int64)),
            "inner": aligned(np.full((TOP_K, self.inner), UNTOUCHED)),
            "packed": aligned(np.full((TOP_K, row_bytes(self.inner)), 0x7F, np.uint8)),
            "chosen": aligned(np.array(CHOSEN)),
            "shares": aligned(np.array([0.4, 0.3, 0.2, 0.1], np.float32)),
            "y": aligned(normal(1, self.width, seed=2)),
            "idle": aligned(np.zeros(GROUP_ROWS * formats.row_bytes(T.Q8_0, self.inner), np.uint8)),
            "norm": aligned(normal(self.width, seed=3)),
            "out": aligned(np.full((1, self.width), UNTOUCHED)),
        }
        self.before = self.arrays["y"].copy()
        written = ("rows", "inner", "packed", "y", "out", "sources")
        self.memory = gpu_simulator.Memory(
            [*(self.arrays[name] for name in written), self.box, self.state],
            [self.x, self.experts.memory]
            + [array for name, array in self.arrays.items() if name not in written],
        )
        self.memory.others = self.answer

    def words(self, place: int, count: int = 1) -> NDArray[np.int64]:
        return self.box[place : place + 8 * count].view(np.int64)

    def launches(self, *, pooled: bool, normed: bool = False) -> list[CardLaunch]:
        """Return what a card launches for the experts; `normed`: and for the norm behind them."""
        at = {name: int(array.ctypes.data) for name, array in self.arrays.items()}
        gate_offset, up_offset, down_offset = self.experts.offsets
        shared = {"box": int(self.box.ctypes.data), "state": int(self.state.ctypes.data)}
        words = {
            **at,
            "x": int(self.x.ctypes.data),
            "gate_offset": gate_offset,
            "up_offset": up_offset,
            "down_offset": down_offset,
            "top_k": TOP_K,
            "values": self.width,
            "outputs": self.inner,
            "row_bytes": row_bytes(self.width),
        }
        more = {**shared, "layer": LAYER, "chosen": at["chosen"], "shares": at["shares"]}
        first = _part(GATE_UP[pooled], words | more, (T.Q8_0, T.Q8_0))
        words |= {"inner": at["packed"], "values": self.inner, "outputs": self.width, **shared}
        found: list[Any] = [first, _part(DOWN[pooled], words, T.Q8_0)]
        if normed:
            found.append(norm_of({**self.arrays, "packed": self.box}, self.width, packed=0))
        if pooled:
            found = list(with_answers(list(with_last_norms(found))))
        return [one if isinstance(one, CardLaunch) else card_launch(one) for one in found]

    def run(self, launches: Sequence[CardLaunch]) -> None:
        for one in launches:
            simulate(one, 1, self.memory)

    def answer(self) -> None:
        """Do what is posted, as threads of the host would."""
        posted, answered = self.words(mailbox.POSTED), self.words(mailbox.ANSWERED)
        if not self.answers or answered[0] == posted[0]:
            return
        assert self.words(mailbox.LAYER)[0] == LAYER
        count = int(self.words(mailbox.COUNT)[0])
        choices = self.words(mailbox.CHOICES, 2 * count).reshape(count, 2)
        row = self.box[mailbox.ROW : mailbox.ROW + row_bytes(self.width)]
        total = np.zeros(self.width)
        shares = choices[:, 1].copy().view(np.float32)[::2]
        for expert, share in zip(choices[:, 0], shares, strict=True):
            total += share * self.product(expert, row)
        place = mailbox.answer_offset(self.width)
        self.box[place : place + 4 * self.width].view(np.float32)[:] = total
        answered[0] = posted[0]

    def product(self, expert: int, row: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return what an expert makes of a quantised row."""
        x = plain.values_of(row[None], self.width)[0].astype(np.float64)
        gate, up, down = (self.experts.weights(part)[expert] for part in range(3))
        inner = gate @ x
        inner = inner / (1 + np.exp(-inner)) * (up @ x)
        packed = plain.quantised(inner[None].astype(np.float32))
        found: NDArray[np.float64] = down @ plain.values_of(packed, self.inner)[0]
        return found

    def expected(self) -> NDArray[np.float64]:
        """Return y behind the layer."""
        shares = self.arrays["shares"]
        products = (self.product(one, self.x[0]) for one in CHOSEN)
        return self.before + sum(s * one for s, one in zip(shares, products, strict=True))


def _part(kernel: str, words: dict[str, int], variant: Any) -> CardLaunch:
    given: dict[str, int | float] = {name: words[name] for name in OF_CARDS[kernel].arguments}
    (found,) = of_card(kernel, given, variant, 1)
    return found


@pytest.mark.parametrize(
    ("by_cpu", "width", "inner", "normed"),
    [([3], 64, 288, False), (CHOSEN, 64, 32, False), ([0, 2, 5], 256, 32, True)],
    ids=["one, of two parts", "all", "normed"],
)
def test_a_row_is_what_card_and_cpu_make_of_it_together(
    by_cpu: list[int], width: int, inner: int, normed: bool
) -> None:
    row = Row(by_cpu, width, inner)
    row.run(row.launches(pooled=True, normed=normed))
    np.testing.assert_allclose(row.arrays["y"], row.expected(), rtol=2e-5, atol=2e-5)
    assert row.words(mailbox.POSTED)[0] == row.state[pool_state.POSTS // 8] == 1
    assert row.state[pool_state.CHOICES // 8] == len(by_cpu)
    assert row.state[pool_state.BESIDE // 8] == 0
    assert row.state[pool_state.ERROR // 8] == 0
    box = int(row.box.ctypes.data)
    assert box + mailbox.POSTED in row.memory.released
    assert box + mailbox.ANSWERED in row.memory.acquired
    untouched = np.all(row.arrays["inner"] == UNTOUCHED, axis=1)
    assert np.array_equal(untouched, np.isin(CHOSEN, by_cpu))
    if normed:
        expected = plain.rms_norm(row.arrays["y"], row.arrays["norm"], 1e-6)
        np.testing.assert_allclose(row.arrays["out"], expected, rtol=2e-6)


def test_a_row_of_which_nothing_goes_to_the_cpu_has_the_bits_of_a_card_alone() -> None:
    alone, shared = Row(width=256), Row(width=256, answers=False)
    alone.run(alone.launches(pooled=False, normed=True))
    shared.run(shared.launches(pooled=True, normed=True))
    for name in ("y", "out", "inner", "packed"):
        assert same_bits(alone.arrays[name], shared.arrays[name]), name
    assert not shared.state.any()
    assert not shared.box.any()


@pytest.mark.parametrize("is_aborted", [False, True], ids=["late", "aborted"])
def test_a_card_does_not_wait_for_ever(is_aborted: bool) -> None:
    row = Row([3], answers=False)
    row.memory.tick_ns = 10**8
    if is_aborted:
        row.words(mailbox.ABORT)[0] = 1
    launches = row.launches(pooled=True)
    row.run(launches)
    waited = row.state[pool_state.WAITED_NS // 8]
    assert row.state[pool_state.ERROR // 8] == (2 if is_aborted else 1)
    assert row.words(mailbox.ABORT)[0] == 1
    assert int(row.box.ctypes.data) + mailbox.ABORT in row.memory.acquired & row.memory.released
    assert waited < 10**9 if is_aborted else 2 * 10**9 < waited < 3 * 10**9
    row.run(launches)  # the next layer neither posts nor waits
    assert row.state[pool_state.WAITED_NS // 8] == waited
    assert row.words(mailbox.POSTED)[0] == 1


def test_a_card_says_how_long_it_waited_and_adds_nothing_before() -> None:
    row = Row([3], 256, 32)  # so that several warps add the answer
    answer, tick_ns = row.answer, row.memory.tick_ns
    seen_ns: list[int] = []

    def slowly() -> None:
        if row.words(mailbox.POSTED)[0] == 1:
            seen_ns.append(row.memory.clock_ns)
        if seen_ns and row.memory.clock_ns > seen_ns[0] + 100 * tick_ns:
            answer()

    row.memory.others = slowly
    row.run(row.launches(pooled=True))
    alone, waited = (row.state[place // 8] for place in (pool_state.ALONE_NS, pool_state.WAITED_NS))
    assert alone > 0
    assert waited > 50 * tick_ns
    assert 100 * tick_ns < alone + waited < 105 * tick_ns
    np.testing.assert_allclose(row.arrays["y"], row.expected(), rtol=2e-5, atol=2e-5)


def test_a_window_of_no_rows_posts_nothing_and_adds_nothing() -> None:
    row = Row([3])
    row.arrays["rows"][0] = 0
    answer = mailbox.answer_offset(row.width)
    row.box[answer : answer + 4 * row.width].view(np.float32)[:] = 1  # of an older post
    row.run(row.launches(pooled=True))
    assert row.words(mailbox.POSTED)[0] == 0
    assert same_bits(row.arrays["y"], row.before)


@pytest.mark.parametrize("width", [32, 256, 384, 416])
def test_an_answer_is_added_to_all_of_a_row_and_to_nothing_else(width: int) -> None:
    """A warp adds 256 values at a time; the last of them may be fewer."""
    take = answer_taker(width, WARP, 0)

    def add(blobs: int, y: int, box: int, state: int) -> None:
        await_previous()
        take(load_i64(blobs), y, box, state, i64(thread_index()))

    blobs, state = aligned(np.array([ROW_BY_CPU])), aligned(np.zeros(pool_state.WORDS, np.int64))
    y, box = aligned(normal(width, seed=1)), aligned(np.zeros(mailbox.box_bytes(width), np.uint8))
    answer, before = normal(width, seed=2), y.copy()
    start = mailbox.answer_offset(width)
    box[start : start + 4 * width].view(np.float32)[:] = answer
    arrays = {"blobs": blobs, "y": y, "box": box, "state": state}
    words = {name: int(array.ctypes.data) for name, array in arrays.items()}
    kernel = GpuKernel("add_answer", add, WARP, lambda _, __: (1, 1, 1), lambda _: 16)
    memory = gpu_simulator.Memory([y, state], [blobs, box])
    simulate(CardLaunch(kernel, "", words, ("address",) * 4), 1, memory)
    assert same_bits(y, before + answer)


def test_who_reads_over_the_link_waits_until_the_message_is_on_its_way() -> None:
    row = Row([3])  # choice 2; blocks of the others come before and behind it
    row.arrays["blobs"][[0, 3]] |= IN_HOST_MEMORY
    gate_up, _ = row.launches(pooled=True)
    before = row.memory.clock_ns
    row.run([gate_up])
    passed = row.memory.clock_ns - before
    assert row.state[[pool_state.CHOICES // 8, pool_state.BESIDE // 8]].tolist() == [1, 2]
    assert row.arrays["sources"].tolist() == [0, 0, 1, 0]
    assert POST_NS < passed < 2 * POST_NS  # choice 0 in vain: blocks run one behind the other here
