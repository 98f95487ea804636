"""Time other kernels for the products of a single row beside ours, in chains of whole layers.

Usage:
  try_faster_rows.py [options]
  try_faster_rows.py --help

Options:
  --device=TEXT   as --device has it [default: cuda:0]
  --only=LIST     of the trials, by parts of their names [default: all]
  --layers=N      of a chain [default: 24]

A layer has the products of Qwen3-30B-A3B: q, k and v; attn_output; gate and up, and down, of eight
experts; all of Q4_K, each layer's in memory of its own, so that they come from memory as they do
when text is written. In the place of attention the queries are quantised, in that of the router the
row is normed. A trial changes one of them, or two. The first line is of our kernels.

  layer   microseconds of a layer: the chain's time by its layers, and what it is less than ours
  share   of the plain read's rate, of a launch, and its microseconds: what a graph that ends with
          it takes longer than one that ends before it (`card_profile.py`), behind a whole chain
  bits    of the row and its norm after a chain, compared with ours: same, or how many differ
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from docopt import docopt
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]

from card_graphs import TimedGraph, failing_alone, whole_number  # noqa: E402
from faster_rows import (  # noqa: E402
    EXPERTS,
    KIND,
    NORMED,
    NORMED_KINDS,
    WAYS,
    Way,
    down_at_once,
    normed_kernel,
    one_row_way,
)
from random_blocks import random_blocks  # noqa: E402

from strata_nb import backend, cpu  # noqa: E402
from strata_nb.card_backend import CardBackend  # noqa: E402
from strata_nb.card_profile import profile_window  # noqa: E402
from strata_nb.errors import StrataError, UnsupportedDevice  # noqa: E402
from strata_nb.formats import block_layout, row_bytes  # noqa: E402
from strata_nb.kernels.gpu.card_launch import CardLaunch  # noqa: E402
from strata_nb.kernels.gpu.compile import cubin_of  # noqa: E402
from strata_nb.kernels.gpu.last_norm import with_last_norms  # noqa: E402
from strata_nb.kernels.gpu.launches import card_launches  # noqa: E402
from strata_nb.kernels.gpu.operations import GpuKernel  # noqa: E402
from strata_nb.kernels.gpu.routed import CARD_KERNELS  # noqa: E402
from strata_nb.kernels.program import Launch, launch  # noqa: E402
from strata_nb.kernels.quantised_rows import row_bytes as quantised_bytes  # noqa: E402
from strata_nb.packing import pack  # noqa: E402

SPREAD = 0.02  # of the weights: their standard deviation
EPS = 1e-6
REPLAYS = 9  # of each graph


class Shape(NamedTuple):
    """Say how large a layer is: values of the row, of the queries, of keys, and of an expert."""

    width: int = 2048
    queries: int = 4096
    keys: int = 512
    inner: int = 768

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Outputs and values of each matrix, of gate, up and down of one expert."""
        return {
            "q": (self.queries, self.width),
            "k": (self.keys, self.width),
            "v": (self.keys, self.width),
            "attn_output": (self.width, self.queries),
            "gate": (self.inner, self.width),
            "up": (self.inner, self.width),
            "down": (self.width, self.inner),
        }

    def bytes_of(self, part: str) -> int:
        outputs, values = self.parts[part]
        return outputs * row_bytes(KIND, values)


class Trial(NamedTuple):
    """Say what is in the place of our kernels; None: ours.

    groups      of a block of q, k and v that norms its row itself; 0: it is normed before
    norms_last  `expert_down` norms the row; otherwise nobody does, or blocks of q, k and v
    """

    name: str
    attn_output: Way | None = None
    qkv: Way | None = None
    down: GpuKernel | None = None
    groups: int = 0
    norms_last: bool = True


def trials(shape: Shape) -> list[Trial]:
    """Return all trials: ours first."""
    ways = {way.name: way for way in WAYS}
    at_once = down_at_once(shape.inner, False, 128)
    return [
        Trial("ours"),
        *(Trial(f"attn_output {way.name}", attn_output=way) for way in WAYS),
        Trial("qkv kept", qkv=ways["kept"]),
        Trial("qkv decoded", qkv=ways["decoded"]),
        Trial("down at once", down=at_once),
        Trial("down at once, asked", down=down_at_once(shape.inner, True, 128)),
        Trial("down at once, 80", down=down_at_once(shape.inner, False, 80)),
        Trial("normed by 4", groups=4, norms_last=False),
        Trial("normed by 5", groups=5, norms_last=False),
        Trial("normed by 2", groups=2, norms_last=False),
        Trial("together", attn_output=ways["before"], down=at_once, groups=5, norms_last=False),
        Trial("together, decoded", ways["decoded"], ways["decoded"], at_once, 5, False),
    ]


# -- a chain of layers -----------------------------------------------------------------------------

# Bytes of what all layers share, by name.
Places = Mapping[str, int]


def sizes_of(shape: Shape) -> dict[str, int]:
    """Return how many bytes each of the arrays has that all layers share."""
    return {
        "rows": 256,
        "x": 4 * shape.width,
        "norm": 4 * shape.width,
        "packed": quantised_bytes(shape.width),
        "queries": 4 * shape.queries,
        "keys": 4 * shape.keys,
        "values": 4 * shape.keys,
        "packed_queries": quantised_bytes(shape.queries),
        "inner": 4 * EXPERTS * shape.inner,
        "packed_inner": EXPERTS * quantised_bytes(shape.inner),
        "shares": 4 * EXPERTS,
        "sources": 8 * EXPERTS,
    }


def layer(shape: Shape, trial: Trial, number: int, at: Places, of: Places) -> list[CardLaunch]:
    """Return the launches of a layer.

    at   addresses of what all layers share
    of   of its weights, and of the table of its experts: "blobs"
    """
    label = f"blk.{number}."
    norm = _norm(shape, f"{label}norm", at)
    words = {"rows": at["rows"], "x": at["queries"], "packed": at["packed_queries"], "times": 1}
    quantise = launch("quantise", words | {"values": shape.queries}, label=f"{label}quantise")
    output = _product(shape, "attn_output", at["packed_queries"], at["x"], at, of, add=1)
    (attn_output,) = card_launches((output._replace(label=f"{label}attn_output"),), 1)
    if trial.attn_output is not None:
        kernel = one_row_way(shape.queries, 1, trial.attn_output)
        attn_output = attn_output._replace(kernel=kernel)
    experts = _experts(shape, trial, label, at, of)
    if trial.norms_last:
        experts = [*experts[:1], *_with_norm(experts[1], norm)]
    return [
        _qkv(shape, trial, label, at, of),
        *card_launches((quantise,), 1),
        attn_output,
        *card_launches((norm,), 1),
        *experts,
    ]


def chain_of(shape: Shape, trial: Trial, at: Places, weights: Sequence[Places]) -> list[CardLaunch]:
    """Return the launches of layers, and of what norms their first row."""
    layers = [layer(shape, trial, number, at, of) for number, of in enumerate(weights)]
    return [
        *card_launches((_norm(shape, "norm", at),), 1),
        *(one for some in layers for one in some),
    ]


def _norm(shape: Shape, label: str, at: Places) -> Launch:
    words: dict[str, int | float] = {"rows": at["rows"], "index": 0, "x": at["x"], "out": 0}
    words |= {"weight": at["norm"], "packed": at["packed"], "parts": 1, "width": shape.width}
    return launch("rms_norm", words | {"eps": EPS}, label=label)


def _with_norm(down: CardLaunch, norm: Launch) -> list[CardLaunch]:
    found = [one for one in with_last_norms([down, norm]) if isinstance(one, CardLaunch)]
    return [one._replace(label=down.label) for one in found]


def _product(
    shape: Shape, part: str, x: int, y: int, at: Places, of: Places, *, add: int = 0
) -> Launch:
    outputs, values = shape.parts[part]
    words = {"rows": at["rows"], "x": x, "weight": of[part], "bias": 0, "y": y}
    words |= {"values": values, "outputs": outputs, "add": add}
    return launch("linear", words, variant=KIND, label=part, waits=part not in {"k", "v"})


def _qkv(shape: Shape, trial: Trial, label: str, at: Places, of: Places) -> CardLaunch:
    targets = {"q": at["queries"], "k": at["keys"], "v": at["values"]}
    if trial.groups > 0:
        words = {"rows": at["rows"], "x": at["x"], "norm_weight": at["norm"]}
        words["norm_eps"] = int(np.float32(EPS).view(np.uint32))
        for part, suffix in zip("qkv", ("", "2", "3"), strict=True):
            words |= {f"weight{suffix}": of[part], f"y{suffix}": targets[part]}
            words[f"outputs{suffix}"] = shape.parts[part][0]
        words = {name: words[name] for name in NORMED.split()}
        kernel = normed_kernel(shape.width, trial.groups)
        return CardLaunch(kernel, f"{label}qkv", words, NORMED_KINDS)
    program = (_product(shape, part, at["packed"], y, at, of) for part, y in targets.items())
    (found,) = card_launches(tuple(program), 1)
    if trial.qkv is not None:
        found = found._replace(kernel=one_row_way(shape.width, 3, trial.qkv))
    return found._replace(label=f"{label}qkv")


def _experts(shape: Shape, trial: Trial, label: str, at: Places, of: Places) -> list[CardLaunch]:
    words = {name: at[name] for name in ("rows", "sources", "inner", "shares")}
    words |= {"blobs": of["blobs"], "x": at["packed"], "packed": at["packed_inner"]}
    words |= {"gate_offset": 0, "up_offset": shape.bytes_of("gate"), "top_k": EXPERTS}
    words |= {"values": shape.width, "outputs": shape.inner}
    words["row_bytes"] = quantised_bytes(shape.width)
    gate_up = CARD_KERNELS["expert_gate_up"].part(words, (KIND, KIND), f"{label}gate_up")
    words |= {"inner": at["packed_inner"], "y": at["x"], "values": shape.inner}
    words |= {"outputs": shape.width, "down_offset": 2 * shape.bytes_of("gate")}
    down = CARD_KERNELS["expert_down"].part(words, KIND, f"{label}down")
    return [gate_up, down if trial.down is None else down._replace(kernel=trial.down)]


def weights_of(shape: Shape, part: str) -> NDArray[np.uint8]:
    """Return random packed weights of a part."""
    outputs, values = shape.parts[part]
    blocks = outputs * values // block_layout(KIND).values
    rng = np.random.default_rng([*shape.parts].index(part))
    return pack(KIND, random_blocks(KIND, blocks, SPREAD, rng), outputs, values)


def contents(shape: Shape) -> dict[str, NDArray[Any]]:
    """Return what is in the arrays that all layers share, before a chain; of others nothing."""
    rng = np.random.default_rng(1)
    rows = np.zeros(sizes_of(shape)["rows"] // 8, np.int64)
    rows[0] = 1
    x = rng.standard_normal(shape.width).astype(np.float32)
    return {
        "rows": rows,
        "x": x,
        "norm": rng.uniform(0.5, 1.5, shape.width).astype(np.float32),
        "shares": np.full(EXPERTS, 1 / EXPERTS, np.float32),
        "sources": np.zeros(EXPERTS, np.int64),
    }


# -- on a card -------------------------------------------------------------------------------------


class Chain:
    """Hold the memory of a chain of layers on a card."""

    def __init__(self, card: CardBackend, shape: Shape, layers: int, made: ExitStack) -> None:
        self.card, self._shape = card, shape

        def allocated(size: int) -> int:
            address = card.driver.allocate(size, card.device)
            made.callback(card.driver.free, address)
            return address

        self._at = {name: allocated(size) for name, size in sizes_of(shape).items()}
        parts = {part: shape.bytes_of(part) for part in shape.parts}
        dense = [part for part in parts if part not in {"gate", "up", "down"}]
        blob = [part for part in parts if part not in dense]
        blob_bytes = sum(parts[part] for part in blob)
        of_layer = sum(parts[part] for part in dense) + EXPERTS * blob_bytes
        first = allocated(of_layer)
        self._of: list[dict[str, int]] = []
        for number in range(layers):
            place = first if number == 0 else allocated(of_layer)
            of = {}
            for part in dense:
                of[part], place = place, place + parts[part]
            blobs = place + blob_bytes * np.arange(EXPERTS)
            of["blobs"] = allocated(8 * EXPERTS)
            card.send(of["blobs"], blobs.astype(np.int64))
            if number == 0:
                for part in dense:
                    card.send(of[part], weights_of(shape, part))
                for part in blob:
                    card.send(place, weights_of(shape, part))
                    place += parts[part]
                for one in blobs.tolist()[1:]:
                    card._card.copy_async(one, blobs.tolist()[0], blob_bytes, card._stream)
            else:
                card._card.copy_async(of["q"], first, of_layer, card._stream)
            self._of.append(of)

    def launches(self, trial: Trial) -> list[CardLaunch]:
        return chain_of(self._shape, trial, self._at, self._of)

    def result(self, executable: int) -> NDArray[np.uint32]:
        """Return the words of the row and its queries after a chain that begins anew."""
        for name, array in contents(self._shape).items():
            self.card.send(self._at[name], array)
        self.card._card.graph_launch(executable, self.card._stream)
        found = []
        for name in ("x", "queries", "keys", "values"):
            array = np.empty(sizes_of(self._shape)[name] // 4, np.float32)
            self.card.fetch(self._at[name], array)
            found.append(array)
        together = np.concatenate(found)
        if not np.all(np.isfinite(together)) or not np.any(together):
            raise StrataError("a chain does not end with numbers")
        return together.view(np.uint32)


def compiled(card: CardBackend, launches: Sequence[CardLaunch]) -> None:
    """Make the kernels that are new. Those of trials are not kept: their sources are in no key."""
    wanted = {one.kernel.name: (one.kernel, one.kinds) for one in launches}
    for name, (kernel, kinds) in wanted.items():
        if name in card._machine:
            continue
        if name.startswith("try_"):
            card._machine[name] = cubin_of(kernel, kinds, card._compiler.target)  # type: ignore[attr-defined]
        else:
            card._machine.update(card._compiler([(kernel, kinds)], None, lambda _: None))


class Measured(NamedTuple):
    """Hold what a trial came to; `lines` has seconds of a launch and its bytes, by label."""

    layer_s: float
    lines: dict[str, tuple[float, int]]
    words: NDArray[np.uint32]


def measured(chain: Chain, trial: Trial, layers: int) -> Measured:
    card, launches = chain.card, chain.launches(trial)
    compiled(card, launches)
    with ExitStack() as owner:
        graph = TimedGraph(card, launches, 1, owner, REPLAYS)
        whole = card._executable(launches, 1, owner)
        start, end = card._timed_event(owner), card._timed_event(owner)
        words = chain.result(whole)

        def seconds(some: Sequence[CardLaunch]) -> float:
            with ExitStack() as part:
                executable = card._executable(some, 1, part)
                return median(card._replay(whole, executable, start, end) for _ in range(REPLAYS))

        profile = profile_window(launches, 1, 0, seconds)
        lines = {
            line.kind.label: (line.seconds / line.count, line.kind.reads) for line in profile.lines
        }
        return Measured(median(graph.seconds()) / layers, lines, words)


def main() -> None:
    """Measure what the command line asks for, and print it."""
    arguments = docopt(str(__doc__))
    layers, shape = whole_number(arguments, "--layers", least=8), Shape()
    asked = [] if arguments["--only"] == "all" else arguments["--only"].split(",")
    chosen = [one for one in trials(shape)[1:] if not asked or any(a in one.name for a in asked)]
    begun, failed = time.monotonic(), list[str]()
    with closing(backend.open_backend(arguments["--device"], cpu.physical_cores())) as card:
        if not isinstance(card, CardBackend):
            raise UnsupportedDevice(f"{card.name}: no card", hint="--device=cuda:0")
        rate = card.plain_read().bytes_per_s
        print(f"plain read {rate / 1e9:,.0f} GB/s; {layers} layers; us and share of that rate")
        with ExitStack() as made:
            chain = Chain(card, shape, layers, made)
            ours = measured(chain, trials(shape)[0], layers)
            _say("ours", ours, ours, rate, begun)
            for trial in chosen:
                with failing_alone(failed, trial.name):
                    _say(trial.name, measured(chain, trial, layers), ours, rate, begun)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(chosen)} trials failed")


def _say(name: str, found: Measured, ours: Measured, rate: float, begun: float) -> None:
    differing = int(np.count_nonzero(found.words != ours.words))
    parts = [
        f"{label} {seconds * 1e6:5.2f}" + (f" {read / seconds / rate:5.1%}" if read else "")
        for label, (seconds, read) in found.lines.items()
    ]
    print(
        f"{name:22} layer {found.layer_s * 1e6:6.2f} ({(ours.layer_s - found.layer_s) * 1e6:+5.2f})"
        f"  {'; '.join(parts)}  bits {f'{differing} differ' if differing else 'same'}"
        f"  {time.monotonic() - begun:.0f}s",
        flush=True,
    )


if __name__ == "__main__":
    main()
