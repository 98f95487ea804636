"""Measure how long opening a model takes, and which stage takes how much of it.

Usage:
  load.py MODEL [options]
  load.py --help

Options:
  --device=TEXT     as --device has it [default: cuda:0]
  --repeats=N       openings, of which the medians count [default: 5]
  --threads=N       as --threads has it
  --ctx-size=N      cells of the K/V [default: 4096]
  --name=NAME       the figures go to bench/results/load_NAME.json; default: the name of the model
  -o FILE           write them to this file instead

Every opening is a process of its own, after one that is not counted and may compile. The file is
read before each, so that it comes from memory: `cached_share` is what the system has of it then,
and `keeps_cached` whether the opening lets the system keep it.
A profile ranks every expert, so that slots are filled as long as there are any.

Stages overlap: while threads read, the process lays out memory, makes programs, and registers and
copies what is there. So they do not add up to the whole.

  process_s    from the start of the process until the engine is open
  open_s       of that, Engine.open
  dense_s      read, pack and copy what is no expert
  ledger_s     take the device's memory
  programs_s   make what runs: on a card, capture the graphs
  read_s       the threads read and pack the experts
  waited_s     the process waited for a block of experts
  register_s   register the blocks with the driver
  fill_s       begin the copies to slots, and wait for them at the end
  close_s      Engine.close

The rates are those of one thread, and of as many as load, in GB/s: read from the system's copy of
the file; pack (by type, from and to a core's cache); touch memory for the first time.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb import cpu, host_pages, loading  # noqa: E402
from strata_nb.backend import HostBackend  # noqa: E402
from strata_nb.cache.capacity import Ledger  # noqa: E402
from strata_nb.cache.experts import Filling  # noqa: E402
from strata_nb.cache.profile import rank_by_use, save_profile  # noqa: E402
from strata_nb.card_backend import CardBackend  # noqa: E402
from strata_nb.commands.provenance import device_name  # noqa: E402
from strata_nb.driver import CudaDriver  # noqa: E402
from strata_nb.engine import Engine  # noqa: E402
from strata_nb.formats import TensorType, row_bytes  # noqa: E402
from strata_nb.gguf import GGUFFile  # noqa: E402
from strata_nb.host import HostDriver  # noqa: E402
from strata_nb.loading_pieces import PIECE_BYTES  # noqa: E402
from strata_nb.models import describe  # noqa: E402
from strata_nb.options import Options  # noqa: E402
from strata_nb.packing import GROUP_ROWS, PACKED, pack  # noqa: E402

CHILD = "--child"
READ_BYTES = 2 << 30  # of the file, for the rate of one thread
TOUCHED_BYTES = 1 << 30  # by each thread, and four of them at most


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    if sys.argv[1:2] == [CHILD]:
        print(json.dumps(_opening(json.loads(sys.argv[2]))))
        return
    arguments = docopt(str(__doc__))
    model, repeats = Path(arguments["MODEL"]), int(arguments["--repeats"])
    threads = int(arguments["--threads"] or cpu.physical_cores())
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "model": str(model),
            "device": arguments["--device"],
            "threads": threads,
            "ctx_size": int(arguments["--ctx-size"]),
            "profile": _whole_profile(model, Path(folder)),
        }
        _measured(request)
        openings = []
        for _ in range(repeats):
            available = cpu.available_memory_bytes()
            share = _warm(model, threads)
            keeps = available >= 2 * model.stat().st_size  # as `cache_fits` has it
            openings.append(
                {"cached_share": share, "available_bytes": available, "keeps_cached": keeps}
            )
            openings[-1] |= _measured(request)
            print(_line(openings[-1]), flush=True)
    medians = {
        key: statistics.median(one[key] for one in openings)
        for key in openings[0]
        if key.endswith("_s")
    }
    print("median:", _line(medians))
    rates = _rates(model, threads)
    for what, rate in rates.items():
        print(f"{what:28} {rate:8.2f} GB/s")
    path = write_result(
        f"load_{arguments['--name'] or model.stem}",
        "seconds of each stage of an opening, which overlap; rates in GB/s",
        " ".join(["python bench/load.py", model.name, *sys.argv[2:]]),
        {
            "model": model.name,
            "device": device_name(request["device"]),
            "file_bytes": model.stat().st_size,
            "threads": threads,
            "physical_cores": cpu.physical_cores(),
            "processors": os.cpu_count(),
            "large_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
            "median": medians,
            "openings": openings,
            "rates": rates,
        },
        ("numpy", "numba", "llvmlite"),
    )
    if arguments["-o"]:
        shutil.move(path, arguments["-o"])


def _line(figures: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.2f}" for key, value in figures.items() if key[-2:] == "_s")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


# -- one opening, in a process of its own ----------------------------------------------------------


def _measured(request: dict[str, Any]) -> dict[str, float]:
    """Open the model in a fresh process; return what it says, and `process_s`."""
    command = [sys.executable, __file__, CHILD, json.dumps(request)]
    start = time.monotonic()
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        raise SystemExit(f"an opening ended with {ended.returncode}")
    figures: dict[str, float] = json.loads(ended.stdout)
    return {"process_s": figures.pop("opened_at") - start, **figures}


def _opening(request: dict[str, Any]) -> dict[str, float]:
    """Open the model and close it; return the seconds of the stages, and when it was open."""
    options = Options(
        model=request["model"],
        device=request["device"],
        threads=request["threads"],
        ctx_size=request["ctx_size"],
        expert_profile=request["profile"],
    )
    took: dict[str, float] = {}
    with _timed(took):
        start = time.perf_counter()
        engine = Engine.open(options)
        took["open_s"] = time.perf_counter() - start
        opened_at = time.monotonic()
    report = engine.describe()
    start = time.perf_counter()
    engine.close()
    took["close_s"] = time.perf_counter() - start
    return {"opened_at": opened_at, "slots": report.slots, "resident": report.resident, **took}


@contextmanager
def _timed(took: dict[str, float]) -> Iterator[None]:
    """Add up in `took` the seconds that calls of the stages take in this thread."""
    stages: list[tuple[Any, str, str]] = [
        (loading, "load_dense", "dense_s"),
        (Ledger, "open", "ledger_s"),
        (HostBackend, "prepare", "programs_s"),
        (CardBackend, "prepare", "programs_s"),
        (HostDriver, "register_host", "register_s"),
        (CudaDriver, "register_host", "register_s"),
        (Filling, "copy", "fill_s"),
        (Filling, "finish", "fill_s"),
    ]
    took |= {name: 0.0 for _, _, name in stages} | {"waited_s": 0.0, "read_s": 0.0}
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in stages]
    finish = loading.HostExperts.finish

    @functools.wraps(finish)
    def finish_timed(experts: loading.HostExperts, *given: Any) -> None:
        before = time.perf_counter() - took["register_s"] - took["fill_s"]
        finish(experts, *given)
        took["waited_s"] = time.perf_counter() - took["register_s"] - took["fill_s"] - before
        took["read_s"] = experts.read_s

    replaced = [
        (owner, name, _adding(getattr(owner, name), stage, took)) for owner, name, stage in stages
    ]
    replaced.append((loading.HostExperts, "finish", finish_timed))
    kept.append((loading.HostExperts, "finish", finish))
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def _adding(function: Callable[..., Any], stage: str, took: dict[str, float]) -> Any:
    @functools.wraps(function)
    def timed(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            took[stage] += time.perf_counter() - start

    return timed


def _whole_profile(model: Path, folder: Path) -> str | None:
    """Write a profile that ranks every expert of the model; None where it has none."""
    with GGUFFile.open(model) as file:
        description = describe(file)
    if not description.experts:
        return None
    path = folder / "whole.profile"
    save_profile(path, rank_by_use(np.zeros((description.layers, description.experts), np.int64)))
    return str(path)


# -- the file in the system's memory ---------------------------------------------------------------


def _warm(path: Path, threads: int) -> float:
    """Read a file from end to end; return the share of it that the system has in memory then."""
    _read_rate(path, threads, path.stat().st_size)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as whole:
        pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        libc = ctypes.CDLL(None, use_errno=True)
        status = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        if status:
            raise SystemExit(f"mincore: {os.strerror(ctypes.get_errno())}")
    return float(np.count_nonzero(pages & 1) / len(pages))


# -- rates -----------------------------------------------------------------------------------------


def _rates(model: Path, threads: int) -> dict[str, float]:
    size = model.stat().st_size
    with GGUFFile.open(model) as file:
        kinds = sorted({tensor.type for tensor in file.tensors.values()} & PACKED)
    return {
        "read, one thread": _read_rate(model, 1, min(size, READ_BYTES)),
        f"read, {threads} threads": _read_rate(model, threads, size),
        "touch, one thread": _touch_rate(1),
        f"touch, {threads} threads": _touch_rate(threads),
        **{f"pack {kind.name}, one thread": _pack_rate(kind) for kind in kinds},
    }


def _read_rate(path: Path, threads: int, size: int) -> float:
    pieces = iter(range(0, size, 16 * PIECE_BYTES))

    def read(_: int) -> int:
        buffer = bytearray(PIECE_BYTES)
        got = 0
        for start in pieces:
            for place in range(start, min(start + 16 * PIECE_BYTES, size), PIECE_BYTES):
                got += os.preadv(descriptor, [buffer], place)
        return got

    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _rate(read, threads)
    finally:
        os.close(descriptor)


def _touch_rate(threads: int) -> float:
    size = TOUCHED_BYTES * min(threads, 4)
    large = host_pages.LARGE_PAGE_BYTES
    mapped = host_pages.allocate(size + large)
    start = -(-mapped // large) * large
    share = size // threads // large * large

    def touch(number: int) -> int:
        host_pages.fill(start + number * share, 1, share)
        return share

    try:
        host_pages.advise_large(start, size)
        return _rate(touch, threads)
    finally:
        host_pages.give_back(mapped, size + large)


def _pack_rate(kind: TensorType, values: int = 2048) -> float:
    row = row_bytes(kind, values)
    rows = PIECE_BYTES // (row * GROUP_ROWS) * GROUP_ROWS
    raw = np.random.default_rng(0).integers(0, 256, rows * row, dtype=np.uint8)
    out = np.empty_like(raw)
    pack(kind, raw, rows, values, out)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        pack(kind, raw, rows, values, out)
        seconds.append(time.perf_counter() - start)
    return raw.size / statistics.median(seconds) / 1e9


def _rate(work: Callable[[int], int], threads: int) -> float:
    """Return the GB/s of what threads do, each of which is given its number and returns bytes."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        done = sum(pool.map(work, range(threads)))
        return done / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    main()
