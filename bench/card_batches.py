"""Measure how fast a card multiplies the rows of a prompt batch: dense matrices, a layer's experts.

Usage:
  card_batches.py [options]
  card_batches.py --help

Options:
  --device=TEXT    as --device has it [default: cuda:0]
  --deterministic  multiply as under --deterministic, with the bits of windows
  --rows=LIST      of a batch [default: 512,4096]
  --types=LIST     of the dense matrices [default: Q4_K,Q6_K,Q8_0]
  --shapes=LIST    of the dense matrices, outputs x values [default: 4096x2048,512x2048,2048x4096]
  --experts=TEXT   types of gate, up and down [default: Q4_K,Q4_K,Q6_K]
  --layer=TEXT     experts, of which a row chooses, width, width of an expert
                   [default: 128,8,2048,768]
  --issues=NUMBER  instructions of warps that the card issues in a second, in 1e9: of an H200 132
                   multiprocessors, 4 each at 1.75 GHz [default: 924]
  -o FILE          write the figures here, not to bench/results/card_batches.json

Weights are random blocks. Routes are those of random logits. Of the products of dense matrices four
rows are compared with those of a window: bit by bit, or how far they are off, as a share of their
root mean square. Each time is the median of 21 replays of a
graph of one launch, or of all launches of the layer. TOPS count two operations for each weight and
row.

Beside them are shares: of cuBLAS in bfloat16 at the same total size, in the same run, where there
is the library; and of products of bytes, of what the card could issue if nothing but the inner loop
were there.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]

from card_graphs import REPLAYS, TimedGraph, spread, store, whole_numbers  # noqa: E402
from cublas import Cublas  # noqa: E402
from random_blocks import random_blocks  # noqa: E402

from strata_nb import backend, cpu  # noqa: E402
from strata_nb.cache.filling import new_plans  # noqa: E402
from strata_nb.card_backend import CardBackend  # noqa: E402
from strata_nb.errors import UnsupportedDevice  # noqa: E402
from strata_nb.formats import TensorType, block_layout  # noqa: E402
from strata_nb.kernels.gpu.card_launch import CardLaunch  # noqa: E402
from strata_nb.kernels.gpu.warpgroup_launches import BYTES_OF_HALVES  # noqa: E402
from strata_nb.kernels.groups import groups_at  # noqa: E402
from strata_nb.kernels.host import activations  # noqa: E402
from strata_nb.kernels.program import Launch, launch  # noqa: E402
from strata_nb.kernels.quantised_rows import row_bytes  # noqa: E402
from strata_nb.kernels.table import KERNELS  # noqa: E402
from strata_nb.packing import pack  # noqa: E402

SPREAD = 0.02  # of the weights: their standard deviation
DIFFERENT_ROWS = 64  # of activations; then they come again
DIFFERENT_EXPERTS = 4
COMPARED = 4  # rows
# Instructions of a warp for 64 values of 16 outputs and 8 rows (`kernels/gpu/batch_tiles.py`).
INSTRUCTIONS = {TensorType.Q4_K: 34, TensorType.Q5_K: 34, TensorType.Q6_K: 44}
# Kernels of experts' products, and how many matrices each multiplies with.
PRODUCTS = {"batch_expert_": 1, "batch_up_": 1, "warpgroup_expert_": 1, "warpgroup_gate_up_": 2}
OF_WARPGROUPS = "warpgroup_"
OPERATIONS = 2 * 64 * 16 * 8  # of the same


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    batches = whole_numbers(arguments, "--rows")
    figures: dict[str, Any] = {"dense": [], "experts": []}
    issues = float(arguments["--issues"]) * 1e9
    with closing(backend.open_backend(arguments["--device"], cpu.physical_cores())) as card:
        if not isinstance(card, CardBackend):
            raise UnsupportedDevice(f"{card.name}: no card", hint="--device=cuda:0")
        card.same_bits = bool(arguments["--deterministic"])
        peer = Cublas(card)
        for rows in batches:
            for name in arguments["--types"].split(","):
                for shape in arguments["--shapes"].split(","):
                    outputs, values = (int(word) for word in shape.split("x"))
                    one = dense(card, TensorType[name], outputs, values, rows)
                    if not one["kernel"].startswith(OF_WARPGROUPS):
                        one |= shares([TensorType[name]], one["tops"], issues)
                    one |= {"cublas_tops": peer.tops([(rows, outputs, values)])}
                    figures["dense"].append(one)
                    show(f"{rows:5} rows  {name} {shape}", one)
            kinds = [TensorType[name] for name in arguments["--experts"].split(",")]
            sizes = [int(word) for word in arguments["--layer"].split(",")]
            layer = Layer(card, kinds, sizes, rows)
            cublas = peer.tops(layer.products())
            for one in layer.measured():
                types = one.pop("types")
                if types:
                    one |= {"cublas_tops": cublas}
                if card.same_bits:
                    one |= shares(types, one["tops"], issues)
                figures["experts"].append(one)
                show(f"{rows:5} rows  {one['label']} {one['kernel']}", one)
    store(
        "card_batches",
        "rows of a prompt batch by packed weights: microseconds of a launch alone in a graph, "
        f"{REPLAYS} replays",
        arguments,
        figures,
    )


def shares(kinds: list[TensorType], tops: float, issues: float) -> dict[str, float]:
    """Return which share of the card's instructions products of these types reach, if counted."""
    if not tops or not kinds or not set(kinds) <= set(INSTRUCTIONS):
        return {}
    instructions = sum(INSTRUCTIONS[kind] for kind in kinds) / len(kinds)
    return {"share_of_issues": tops * 1e12 * instructions / OPERATIONS / issues}


def show(what: str, one: dict[str, Any]) -> None:
    tops = f"{one['tops']:8.1f} TOPS" if one["tops"] else ""
    if "share_of_issues" in one:
        tops += f" {one['share_of_issues']:6.1%} of what is issued"
    if one.get("cublas_tops"):
        tops += f" {one['tops'] / one['cublas_tops']:6.1%} of cuBLAS ({one['cublas_tops']:.0f})"
    print(f"{what:60} {one['us']['median']:10.1f} us {tops}", flush=True)


class Memory:
    """Allocate memory of a card, which ends with its owner."""

    def __init__(self, card: CardBackend, owner: ExitStack) -> None:
        self._card, self._owner = card, owner

    def room(self, size: int) -> int:
        address = self._card.driver.allocate(size, self._card.device)
        self._owner.callback(self._card.driver.free, address)
        return address

    def copy(self, array: NDArray[Any], times: int = 1) -> int:
        """Return the address of copies of an array, one behind the other."""
        address = self.room(times * array.nbytes)
        self._card.send(address, array)
        for number in range(1, times):
            place = address + number * array.nbytes
            self._card._card.copy_async(place, address, array.nbytes, self._card._stream)
        return address

    def words(self, kernel: str, given: dict[str, int]) -> dict[str, int]:
        """Return the arguments of a kernel of the table, of all that is given."""
        return {argument.name: given[argument.name] for argument in KERNELS[kernel].arguments}


def compiled(card: CardBackend, launches: list[CardLaunch]) -> None:
    wanted = {one.kernel.name: (one.kernel, one.kinds) for one in launches}
    card._machine.update(card._compiler([*wanted.values()], None, lambda _: None))


def timed(card: CardBackend, launches: list[CardLaunch], rows: int) -> dict[str, float]:
    with ExitStack() as made:
        return spread(TimedGraph(card, launches, rows, made).seconds(), 1e6)


def weights(kind: TensorType, outputs: int, values: int) -> NDArray[np.uint8]:
    blocks = outputs * values // block_layout(kind).values
    raw = random_blocks(kind, blocks, SPREAD, np.random.default_rng(kind.value))
    return pack(kind, raw, outputs, values)


def quantised_rows(rows: int, values: int) -> NDArray[np.uint8]:
    """Return quantised rows, with room for what becomes of them."""
    x = np.random.default_rng(1).standard_normal((DIFFERENT_ROWS, values)).astype(np.float32)
    packed = np.empty((DIFFERENT_ROWS, row_bytes(values)), np.uint8)
    activations.quantise_rows(x.ctypes.data, packed.ctypes.data, values, 0, DIFFERENT_ROWS)
    quantised = np.resize(packed, (rows, packed.shape[1]))
    return np.concatenate([quantised.ravel(), np.zeros(BYTES_OF_HALVES * values * rows, np.uint8)])


def dense(
    card: CardBackend, kind: TensorType, outputs: int, values: int, rows: int
) -> dict[str, Any]:
    """Return the time of a product with a dense matrix, whose first rows are compared."""
    with ExitStack() as made:
        memory = Memory(card, made)
        given = {
            "rows": memory.copy(np.array([rows])),
            "x": memory.copy(quantised_rows(rows, values)),
            "weight": memory.copy(weights(kind, outputs, values)),
            "bias": 0,
            "y": memory.room(4 * outputs * rows),
            "values": values,
            "outputs": outputs,
            "add": 0,
        }

        def product(count: int) -> list[CardLaunch]:
            one = launch("linear", memory.words("linear", given), variant=kind, label="product")
            return list(card.launches((one,), count))

        many, few = product(rows), product(COMPARED)
        compiled(card, [*many, *few])
        us = timed(card, many, rows)
        found, wanted = (np.empty((COMPARED, outputs), np.float32) for _ in range(2))
        card.fetch(given["y"], found)
        card.send(given["rows"], np.array([COMPARED]))
        timed(card, few, COMPARED)
        card.fetch(given["y"], wanted)
    if not np.all(np.isfinite(found)) or not np.any(found):
        raise SystemExit(f"{kind.name} {outputs} x {values}: the products are no numbers")
    off = float(np.abs(found - wanted).max() / np.sqrt(np.mean(wanted**2)))
    if off:
        print(f"off the products of a window by {off:.2e}")
    return {
        "rows": rows,
        "type": kind.name,
        "outputs": outputs,
        "values": values,
        "kernel": many[-1].kernel.name,
        "us": us,
        "tops": 2 * rows * outputs * values / us["median"] / 1e6,
        "off_a_window": off,
    }


def _types_of(kernel: str) -> list[TensorType]:
    """Return the types of a kernel of experts' products, of each matrix; none of other kernels."""
    prefix = next((one for one in PRODUCTS if kernel.startswith(one)), None)
    if prefix is None:
        return []
    name = kernel.removeprefix(prefix)
    if kernel.startswith(OF_WARPGROUPS):
        name = name.rpartition("_")[0]  # without the rows of a block
    return PRODUCTS[prefix] * [TensorType[name.upper()]]


class Layer:
    """A layer's routing and experts, in memory of a card."""

    def __init__(
        self, card: CardBackend, kinds: list[TensorType], sizes: list[int], rows: int
    ) -> None:
        self._card, self._kinds, self._rows = card, kinds, rows
        self.experts, self.top_k, self.width, self.inner = sizes

    def measured(self) -> list[dict[str, Any]]:
        """Return the time of each launch, and of all."""
        with ExitStack() as made:
            launches = list(
                self._card.launches(self._program(Memory(self._card, made)), self._rows)
            )
            compiled(self._card, launches)
            timed(self._card, launches, self._rows)  # so that each launch finds its arguments
            found = [self._figures([one]) for one in launches]
            return [*found, self._figures(launches)]

    def _figures(self, some: list[CardLaunch]) -> dict[str, Any]:
        us = timed(self._card, some, self._rows)
        alone = len(some) == 1
        types = [_types_of(one.kernel.name) for one in some]
        weights = sum(
            len(matrices) * one.arguments["outputs"] * one.arguments["values"]
            for one, matrices in zip(some, types, strict=True)
            if matrices
        )
        return {
            "rows": self._rows,
            "label": some[0].label if alone else "layer",
            "kernel": some[0].kernel.name if alone else f"{len(some)} launches",
            "us": us,
            "tops": 2 * self._rows * self.top_k * weights / us["median"] / 1e6,
            "types": [kind for matrices in types for kind in matrices],
        }

    def products(self) -> list[tuple[int, int, int]]:
        """Return rows, outputs and values of gate, up and down, as if they were dense."""
        choices = self._rows * self.top_k
        wide, narrow = (choices, self.inner, self.width), (choices, self.width, self.inner)
        return [wide, wide, narrow]

    def _program(self, memory: Memory) -> tuple[Launch, ...]:
        gate, up, down = self._kinds
        parts = [
            weights(gate, self.inner, self.width),
            weights(up, self.inner, self.width),
            weights(down, self.width, self.inner),
        ]
        blob = np.concatenate([np.resize(part, -(-part.size // 256) * 256) for part in parts])
        ends = np.cumsum([-(-part.size // 256) * 256 for part in parts]).tolist()
        blobs = memory.copy(np.tile(blob, DIFFERENT_EXPERTS), -(-self.experts // DIFFERENT_EXPERTS))
        rng, rows = np.random.default_rng(2), self._rows
        choices = rows * self.top_k
        given = {
            "rows": memory.copy(np.array([rows])),
            "logits": memory.copy(rng.standard_normal((rows, self.experts)).astype(np.float32)),
            "tier": memory.copy(np.zeros(self.experts, np.uint8)),
            "homes": memory.copy(np.zeros(self.experts, np.int64)),
            "seen": memory.copy(np.zeros(self.experts, np.int64)),
            "plan": memory.copy(new_plans(1, self.experts).view(np.uint8)),
            "use": memory.copy(np.zeros(self.experts, np.int64)),
            "tally": memory.copy(np.zeros(2, np.int64)),
            "addresses": memory.copy(blobs + blob.size * np.arange(self.experts)),
            "x": memory.copy(quantised_rows(rows, self.width)),
            "gathered": memory.room(groups_at(0, choices, self.experts).end),
            "starts": memory.room(8 * (self.experts + 1)),
            "inner": memory.room(4 * choices * self.inner),
            "other": memory.room(4 * choices * self.inner),
            "packed": memory.room(choices * row_bytes(self.inner)),
            "products": memory.room(4 * choices * self.width),
            "y": memory.copy(np.zeros((rows, self.width), np.float32)),
            **{name: memory.room(8 * choices) for name in ("chosen", "members", "places")},
            "shares": memory.room(4 * choices),
            "positions": 0,
            "forced": 0,
            "experts": self.experts,
            "top_k": self.top_k,
            "renormalise": 1,
            "row_bytes": row_bytes(self.width),
            **dict(zip(("gate_offset", "up_offset", "down_offset"), [0, *ends], strict=False)),
        }

        def part(kernel: str, variant: Any = None, **others: int) -> Launch:
            words = memory.words(kernel, given | others)
            return launch(kernel, words, variant=variant, label=kernel)

        wide = {"values": self.width, "outputs": self.inner}
        narrow = {"values": self.inner, "outputs": self.width, "inner": given["packed"]}
        return (
            part("router_top_k"),
            part("expert_group"),
            part("expert_gather"),
            part("expert_gate_up", (gate, up), **wide),
            part("expert_down", down, **narrow),
        )


if __name__ == "__main__":
    main()
