"""Measure what the host does for a token on a card, with a card that does nothing.

Usage:
  token_overhead.py [--tokens=N] [--runs=N] [--save]
  token_overhead.py --help

Options:
  --tokens=N   of a generation [default: 400]
  --runs=N     generations, of which each gives its median [default: 5]
  --save       write bench/results/token_overhead.json

The driver is the real one over a table whose functions for copies, graphs and events are a C
function that returns at once; so what is measured is all of Python, and of ctypes, between two
tokens: on a card this runs while the card computes. The model has 48 layers of 128 experts, once
all in slots and once half of them, where a policy chooses.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from cuda_table_of_host import HostTable  # noqa: E402 - tools/ and tests/ are no packages
from make_model import make_model  # noqa: E402
from model_shapes import ModelShape  # noqa: E402
from results import write_result  # noqa: E402

from strata_nb import Engine, Options, Sampling, backend  # noqa: E402
from strata_nb.addresses import memory_view  # noqa: E402
from strata_nb.card_backend import STAGING_BYTES, CardBackend  # noqa: E402
from strata_nb.card_flights import CardFlights  # noqa: E402
from strata_nb.cuda_table import PROTOTYPES  # noqa: E402
from strata_nb.device_model import DeviceModel  # noqa: E402
from strata_nb.driver import CudaDriver  # noqa: E402
from strata_nb.formats import TensorType  # noqa: E402
from strata_nb.kernels.gpu.operations import GpuKernel  # noqa: E402

SHAPE = ModelShape("qwen3moe", layers=48, experts=128, top_k=8, dim=64, ff=32, head_dim=32)
INSTANT = (
    "cuMemcpyAsync",
    "cuGraphLaunch",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamSynchronize",
)
IMAGE = b"idle"
TOKEN = 65  # that every window draws


class Entry(NamedTuple):
    """A kernel's machine code, which is only its name."""

    entry: str
    image: bytes = IMAGE


class InstantTable:
    """Answer what a token needs with a C function that does nothing, the rest as a host device."""

    def __init__(self, table: HostTable) -> None:
        self._table = table
        nothing = ctypes.CDLL(None).pthread_mutexattr_destroy
        self._address = ctypes.cast(nothing, ctypes.c_void_p).value or 0
        self.is_instant = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not self.is_instant or name not in INSTANT:
            return getattr(self._table, name)  # type: ignore[no-any-return]
        made = ctypes.CFUNCTYPE(ctypes.c_int, *PROTOTYPES[name].arguments)(self._address)
        setattr(self, name, made)
        return made


class Idle:
    """Compile kernels into ones that do nothing."""

    def __init__(self) -> None:
        self.kernels: dict[str, Callable[[object], None]] = {}

    def __call__(
        self, wanted: Sequence[tuple[GpuKernel, Sequence[str]]], progress: Any, say: Any
    ) -> Mapping[str, Entry]:
        for kernel, _ in wanted:
            self.kernels[kernel.name] = lambda launch: None
        return {kernel.name: Entry(kernel.name) for kernel, _ in wanted}


def main() -> None:
    arguments = docopt(str(__doc__))
    tokens, runs = int(arguments["--tokens"]), int(arguments["--runs"])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        make_model(path, SHAPE, rules=[("*", TensorType.Q4_0)])
        for name, cache in (("all in slots", "100%"), ("half in slots", "50%")):
            medians = measure(path, cache, tokens, runs)
            row = {
                "experts": name,
                "runs": runs,
                "tokens": tokens,
                "us_median": round(statistics.median(medians), 1),
                "us_least": round(min(medians), 1),
                "us_most": round(max(medians), 1),
            }
            rows.append(row)
            print(row)
    if arguments["--save"]:
        write_result(
            "token_overhead",
            "microseconds of the host from one token to the next, on a card that does nothing: the "
            "median of each run; of these the median, the least and the most",
            "python bench/token_overhead.py --save",
            {"rows": rows},
            ("numpy",),
        )


def measure(path: Path, cache: str, tokens: int, runs: int) -> list[float]:
    """Return the median microseconds from one token to the next, of each run."""
    idle = Idle()
    cards = HostTable(1, kernels={IMAGE: idle.kernels}, budget_bytes=2 << 30)
    table = InstantTable(cards)

    def open_card(*_: Any) -> CardBackend:
        return CardBackend("cuda", CudaDriver(table), 0, idle, 1)

    options = Options(
        path, device="cuda", ctx_size=1024, expert_cache=cache, threads=1, cpu_pool=False
    )
    with (
        closing(cards),
        mock.patch.object(backend, "open_backend", open_card),
        Engine.open(options) as engine,
    ):
        arena = engine._device().arena
        arena.fill([divmod(number, SHAPE.experts) for number in range(arena.use.size)])
        table.is_instant = True
        draw_always(engine._device())
        return [generation(engine, tokens) for _ in range(runs)]


def draw_always(model: DeviceModel) -> None:
    """Let every window bring the same token, and nothing else."""
    windows, card = model._steps.windows, model._backend
    if windows is None or not isinstance(card, CardBackend):
        raise AssertionError("a card draws tokens")
    memory_view(card._staging._address + STAGING_BYTES, STAGING_BYTES)[:] = 0
    flights = windows._flights
    if isinstance(flights, CardFlights):
        for flight in (flights._next, flights._other):
            flight.fetched[:] = 0
            flight.fetched[0] = TOKEN


def generation(engine: Engine, tokens: int) -> float:
    with engine.open_session() as session:
        session.append(1)  # and nothing is read but windows: logits would be any bytes
        draw_always(engine._device())
        writing = session.generate(
            max_tokens=tokens, sampling=Sampling(seed=1), stop=["no such text"], ignore_eos=True
        )
        next(writing)
        times = [time.perf_counter()]
        for _ in writing:
            times.append(time.perf_counter())
    return float(np.median(np.diff(times)) * 1e6)


if __name__ == "__main__":
    main()
