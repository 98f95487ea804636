"""Attention's launches on a card: fewer than the table's, with the same bits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import gpu_simulator
import numpy as np
import pytest
from gpu_launches import aligned, simulate
from kv_store import Store, random_heads
from numpy.typing import NDArray

from strata_nb.formats import CACHE_TYPES
from strata_nb.kernels.gpu import attention_halves, attention_launches, attention_ready
from strata_nb.kernels.gpu.attention_launches import with_runs
from strata_nb.kernels.gpu.card_launch import CardLaunch
from strata_nb.kernels.gpu.launches import card_launch, card_launches
from strata_nb.kernels.program import Launch, launch
from strata_nb.kernels.quantised_rows import row_bytes
from strata_nb.kernels.runs import work_floats
from strata_nb.kernels.table import ROWS_WORDS

MOST_ROWS, ROWS = 3, 2
HEADS, KV_HEADS = 4, 2
EPS = 1e-6
Words = dict[str, Any]


@dataclass
class Layer:
    """Hold what the attention of a layer reads and writes."""

    kv: Store
    named: dict[str, NDArray[Any]]
    sizes: dict[str, int]

    @classmethod
    def make(
        cls,
        kinds: tuple[str, str],
        lengths: tuple[int, int],
        planes: int,
        halves: int,
        *,
        cells: int = 70,
    ) -> Layer:
        kv = Store(kinds, KV_HEADS, lengths, sequences=2, cells=max(128, cells + 1))
        kv.fill(0, cells)
        kv.fill(1, 70, seed=1)
        rng = np.random.default_rng(3)
        floats = work_floats(kv.table.shape[1], lengths[1])
        named = {
            "rows": np.array([ROWS] + [0] * (ROWS_WORDS - 1)),
            "sequences": np.array([1, 0, 1 << 40]),
            "positions": np.array([70, 63, 1 << 40]),
            "table": rng.standard_normal((max(128, cells + 1), 2, planes)).astype(np.float32),
            "q": random_heads(MOST_ROWS, HEADS, lengths[0]),
            "k": random_heads(MOST_ROWS, KV_HEADS, lengths[0], seed=2),
            "v": random_heads(MOST_ROWS, KV_HEADS, lengths[1], seed=3),
            "q_weight": rng.standard_normal(lengths[0]).astype(np.float32),
            "k_weight": rng.standard_normal(lengths[0]).astype(np.float32),
            "out": np.zeros((MOST_ROWS, HEADS, lengths[1]), np.float32),
            "work": np.zeros((MOST_ROWS, HEADS, floats), np.float32),
            "packed": np.zeros((MOST_ROWS, row_bytes(HEADS * lengths[1])), np.uint8),
        }
        arrays = {name: aligned(array) for name, array in named.items()}
        return cls(kv, arrays, {"planes": planes, "halves": halves})

    @property
    def places(self) -> Words:
        return {name: int(array.ctypes.data) for name, array in self.named.items()}

    def norms(self) -> list[Launch]:
        places = self.places
        found = []
        for part, heads in (("q", HEADS), ("k", KV_HEADS)):
            words = {
                "rows": places["rows"],
                "index": 0,
                "x": places[part],
                "weight": places[f"{part}_weight"],
                "out": places[part],
                "packed": 0,
                "parts": heads,
                "width": self.kv.lengths[0],
                "eps": EPS,
            }
            found.append(launch("rms_norm", words))
        return found

    @property
    def _kv(self) -> Words:
        found = self.kv.arguments()
        return {**found, "blocks": int(found["blocks"].ctypes.data)}

    def storing(self) -> list[Launch]:
        places = self.places
        rotation = {name: places[name] for name in ("rows", "positions", "table")} | self.sizes
        rope = {**rotation, "x": places["q"], "heads": HEADS, "length": self.kv.lengths[0]}
        store = {**rotation, **self._kv, "heads": KV_HEADS}
        store |= {name: places[name] for name in ("sequences", "k", "v")}
        return [
            launch("rope", rope),
            launch("kv_append", store, variant=self.kv.kinds, label="blk.0.kv_append"),
        ]

    def attention(self) -> list[Launch]:
        names = ("rows", "sequences", "positions", "q", "out", "work")
        words = {name: self.places[name] for name in names}
        words |= {**self._kv, "heads": HEADS, "kv_heads": KV_HEADS, "scale": 0.25}
        return [launch("attention", words, variant=self.kv.kinds, label="blk.0.attention")]

    def quantise(self, **changed: int) -> list[Launch]:
        words = {"rows": self.places["rows"], "x": self.places["out"]}
        words |= {"packed": self.places["packed"], "times": 1}
        words["values"] = HEADS * self.kv.lengths[1]
        return [launch("quantise", {**words, **changed})]

    def run_alone(self, launches: Sequence[CardLaunch]) -> None:
        """Run launches of a single row."""
        read = {"sequences", "positions", "table", "q_weight", "k_weight"}
        written = [array for name, array in self.named.items() if name not in read]
        others = [self.named[name] for name in read]
        memory = gpu_simulator.Memory([*written, self.kv.memory], [*others, self.kv.table])
        for one in launches:
            simulate(one, 1, memory)

    def run(self, program: Sequence[Launch], *, fused: bool) -> None:
        """Run launches as a card does, or one by one."""
        read = {"rows", "sequences", "positions", "table", "q_weight", "k_weight"}
        written = [array for name, array in self.named.items() if name not in read]
        others = [self.named[name] for name in read]
        stored, table = self.kv.memory, self.kv.table
        reading = gpu_simulator.Memory(written, [*others, table, stored])
        storing = gpu_simulator.Memory([*written, stored], [*others, table])
        if fused:
            found = card_launches(tuple(program), MOST_ROWS)
        else:
            found = [made for one in program if (made := card_launch(one)) is not None]
        for one in found:
            stores = one.kernel.name.startswith(("prepare", "batch_prepare", "kv_append"))
            simulate(one, MOST_ROWS, storing if stores else reading)


def both(layer: Callable[[], Layer], program: Callable[[Layer], list[Launch]]) -> list[Layer]:
    """Return two layers after the same program: as a card runs it, and one by one."""
    made = []
    for fused in (True, False):
        made.append(layer())
        made[-1].run(program(made[-1]), fused=fused)
    return made


def names(program: Sequence[Launch]) -> list[str]:
    return [one.kernel.name.split("_")[0] for one in card_launches(tuple(program), 1)]


PAIRS = list(product(CACHE_TYPES, CACHE_TYPES))


@pytest.mark.parametrize("halves", [0, 1])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: "-".join(kinds))
def test_cells_are_prepared_in_one_launch_with_the_same_bits(
    kinds: tuple[str, str], normed: bool, halves: int
) -> None:
    def program(layer: Layer) -> list[Launch]:
        return (layer.norms() if normed else []) + layer.storing()

    fused, single = both(lambda: Layer.make(kinds, (20, 36), 7, halves), program)
    assert names(program(fused)) == ["prepare"]
    assert np.array_equal(fused.kv.memory, single.kv.memory)
    assert np.array_equal(fused.named["q"], single.named["q"])


@pytest.mark.parametrize(
    ("lengths", "planes"), [((128, 128), 64), ((64, 80), 32), ((100, 64), 40), ((128, 192), 20)]
)
def test_heads_of_the_usual_lengths_are_prepared_with_the_same_bits(
    lengths: tuple[int, int], planes: int
) -> None:
    fused, single = both(
        lambda: Layer.make(("f16", "f16"), lengths, planes, 1),
        lambda layer: layer.norms() + layer.storing(),
    )
    assert np.array_equal(fused.kv.memory, single.kv.memory)
    assert np.array_equal(fused.named["q"], single.named["q"])
    assert not np.array_equal(single.named["q"], random_heads(MOST_ROWS, HEADS, lengths[0]))


@pytest.mark.parametrize(
    ("kinds", "lengths", "planes", "halves"),
    [
        (("f16", "f16"), (128, 128), 64, 1),
        (("f16", "int8"), (64, 128), 32, 1),
        (("int8", "f32"), (128, 64), 32, 1),  # half of a head is rotated
        (("f32", "f16"), (64, 64), 32, 0),
        (("f16", "f16"), (128, 64), 16, 0),
    ],
    ids=str,
)
def test_cells_of_many_rows_are_prepared_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[str, str],
    lengths: tuple[int, int],
    planes: int,
    halves: int,
) -> None:
    monkeypatch.setattr(attention_launches, "PREPARED_ROWS", MOST_ROWS)
    for normed in (True, False):

        def program(layer: Layer, normed: bool = normed) -> list[Launch]:
            return (layer.norms() if normed else []) + layer.storing()

        fused, single = both(lambda: Layer.make(kinds, lengths, planes, halves), program)
        (launched,) = card_launches(tuple(program(fused)), MOST_ROWS)
        assert launched.kernel.name.startswith("batch_prepare")
        assert np.array_equal(fused.kv.memory, single.kv.memory)
        assert np.array_equal(fused.named["q"], single.named["q"])
        assert not np.array_equal(fused.named["q"], random_heads(MOST_ROWS, HEADS, lengths[0]))


@pytest.mark.parametrize(
    ("lengths", "planes", "halves"),
    [
        ((128, 80), 64, 1),
        ((96, 64), 32, 1),
        ((128, 64), 40, 1),
        ((64, 64), 24, 0),
        ((64, 64), 0, 1),
    ],
    ids=str,
)
def test_many_rows_of_other_heads_are_prepared_as_few(
    lengths: tuple[int, int], planes: int, halves: int
) -> None:
    layer = Layer.make(("f16", "f16"), lengths, planes, halves)
    found = [
        [one.kernel.name for one in card_launches(tuple(layer.norms() + layer.storing()), rows)]
        for rows in (attention_launches.PREPARED_ROWS - 1, attention_launches.PREPARED_ROWS)
    ]
    assert found[0] == found[1]


def test_norms_of_long_heads_stay_launches_of_their_own() -> None:
    layer = Layer.make(("f16", "f16"), (192, 64), 32, 1)
    program = layer.norms() + layer.storing()
    assert names(program) == ["rms", "rms", "prepare"]


def test_norms_of_whole_rows_stay_launches_of_their_own() -> None:
    layer = Layer.make(("f16", "f16"), (64, 64), 32, 1)
    whole = [
        one._replace(arguments=(*one.arguments[:6], 1, heads * 64, one.arguments[8]))
        for one, heads in zip(layer.norms(), (HEADS, KV_HEADS), strict=True)
    ]
    assert names(whole + layer.storing()) == ["rms", "rms", "prepare"]


@pytest.mark.parametrize("number", range(9))
def test_norms_of_anything_else_are_not_taken_in(number: int) -> None:
    layer = Layer.make(("f16", "f16"), (64, 64), 32, 1)
    first, second = layer.norms()
    words = list(second.arguments)
    words[number] += 8
    program = [first, second._replace(arguments=tuple(words)), *layer.storing()]
    weight = 3
    assert (names(program) == ["prepare"]) == (number == weight)


@pytest.mark.parametrize("kinds", [("f16", "f16"), ("int8", "f16")], ids="-".join)
def test_what_attention_gives_is_quantised_on_the_way(kinds: tuple[str, str]) -> None:
    def program(layer: Layer) -> list[Launch]:
        return layer.storing() + layer.attention() + layer.quantise()

    def with_quantise_apart(layer: Layer) -> None:
        layer.run(layer.storing() + layer.attention(), fused=True)
        layer.run(layer.quantise(), fused=False)

    fused, single = (Layer.make(kinds, (64, 64), 32, 1) for _ in range(2))
    fused.run(program(fused), fused=True)
    with_quantise_apart(single)
    assert [one.kernel.name.split("_")[0] for one in card_launches(tuple(program(fused)), 2)] == [
        "prepare",
        "attention",
        "combine",
    ]
    for name in ("out", "packed"):
        assert np.array_equal(fused.named[name], single.named[name])
        assert not np.any(fused.named[name][ROWS:])
        assert np.any(fused.named[name][:ROWS])


def test_rows_of_anything_else_are_quantised_apart() -> None:
    layer = Layer.make(("f16", "f16"), (64, 64), 32, 1)
    others = [{"x": layer.places["q"]}, {"rows": layer.places["positions"]}]
    others += [{"times": 2}, {"values": 64}]
    for changed in others:
        program = layer.attention() + layer.quantise(**changed)
        assert names(program) == ["attention", "combine", "quantise"], changed


def test_heads_that_end_inside_a_sub_block_are_quantised_apart() -> None:
    layer = Layer.make(("f16", "f16"), (64, 40), 32, 1)
    assert names(layer.attention() + layer.quantise()) == ["attention", "combine", "quantise"]


def test_a_result_that_nothing_quantises_is_combined_alone() -> None:
    layer = Layer.make(("f16", "f16"), (64, 64), 32, 1)
    layer.run(layer.storing() + layer.attention(), fused=True)
    assert names(layer.attention()) == ["attention", "combine"]
    assert not np.any(layer.named["packed"])


# -- a single row ----------------------------------------------------------------------------------


def row_alone(
    lengths: tuple[int, int], planes: int, halves: int, position: int
) -> tuple[Layer, list[Launch]]:
    """Return a layer with a row at a position of sequence 0, and the launches of its attention."""
    layer = Layer.make(("f16", "f16"), lengths, planes, halves, cells=position)
    for name, word in (("rows", 1), ("sequences", 0), ("positions", position)):
        layer.named[name][0] = word
    program = [*layer.norms(), *layer.storing(), *layer.attention(), *layer.quantise()]
    return layer, program


def attend_alone(layer: Layer, program: Sequence[Launch], kernels: Sequence[str]) -> None:
    """Run what a card launches for a single row, which must be these kernels."""
    launches = card_launches(tuple(program), 1)
    assert [one.kernel.name.split("_")[0] for one in launches] == kernels
    layer.run_alone(launches)


def attend_apart(layer: Layer, program: Sequence[Launch]) -> None:
    """Run the same as `prepare`, attention and what joins its runs."""
    found = [one for one in with_runs(program, 1) if isinstance(one, CardLaunch)]
    assert len(found) == 3
    layer.run_alone(found)


def have_the_same_results(one: Layer, other: Layer) -> bool:
    names = ("out", "packed", "rows")
    assert np.all(np.isfinite(one.named["out"][0]))
    assert np.any(one.named["packed"])
    same = all(np.array_equal(one.named[name], other.named[name]) for name in names)
    return same and np.array_equal(one.kv.memory, other.kv.memory)


@pytest.mark.parametrize(
    ("lengths", "planes", "halves", "position", "blocks"),
    [
        ((64, 64), 32, 1, 70, 128),
        ((32, 64), 10, 0, 0, 128),
        ((128, 128), 64, 1, 63, 128),
        ((32, 64), 16, 1, 1030, 4),
        ((32, 64), 16, 1, 520, 4),
    ],
    ids=["usual", "first", "long", "blocks for every other run", "for every run"],
)
def test_a_single_row_attends_in_one_launch_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, int],
    planes: int,
    halves: int,
    position: int,
    blocks: int,
) -> None:
    monkeypatch.setattr(attention_halves, "_BLOCKS", blocks)
    for normed in (True, False)[: 1 if position > 512 else 2]:
        (layer, program), (other, same) = (
            row_alone(lengths, planes, halves, position) for _ in range(2)
        )
        attend_alone(layer, program[0 if normed else 2 :], ["attention"])
        attend_apart(other, same[0 if normed else 2 :])
        assert have_the_same_results(layer, other)


def test_runs_of_a_long_context_are_joined_by_a_launch_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_ready, "_MOST_JOINED", 1)
    (layer, program), (other, same) = (row_alone((32, 64), 16, 1, 520) for _ in range(2))
    attend_alone(layer, program, ["attention", "combine"])
    attend_apart(other, same)
    assert have_the_same_results(layer, other)


def test_a_single_row_is_made_ready_by_all_blocks_that_share_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HEADS", 10 * KV_HEADS)  # a block takes 8
    (layer, program), (other, same) = (row_alone((32, 64), 16, 1, 70) for _ in range(2))
    (attention,) = card_launches(tuple(program), 1)
    assert attention.grid(1)[0] == 2 * KV_HEADS
    layer.run_alone([attention])
    attend_apart(other, same)
    assert have_the_same_results(layer, other)


def test_a_row_that_a_step_does_not_have_is_not_made_ready() -> None:
    layer, program = row_alone((64, 64), 32, 1, 70)
    layer.named["rows"][0] = 0
    before = layer.kv.memory.copy()
    layer.run_alone(card_launches(tuple(program), 1))
    assert np.array_equal(layer.kv.memory, before)
    assert not np.any(layer.named["out"])


@pytest.mark.parametrize("kinds", [("int8", "f16"), ("f16", "f32")], ids="-".join)
def test_a_single_row_of_other_types_is_made_ready_in_a_launch_of_its_own(
    kinds: tuple[str, str],
) -> None:
    layer = Layer.make(kinds, (64, 64), 32, 1)
    assert names(layer.storing() + layer.attention()) == ["prepare", "attention", "combine"]


def test_attention_of_another_layer_does_not_make_a_row_ready() -> None:
    one, other = (Layer.make(("f16", "f16"), (64, 64), 32, 1) for _ in range(2))
    assert names(one.storing() + other.attention()) == ["prepare", "attention", "combine"]
