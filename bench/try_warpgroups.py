"""Time products of prompt batches by warpgroups beside those by bytes, and compare results."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]

from strata_nb.formats import TensorType as T  # noqa: E402

GIVEN = {"top_k": 8, "experts": 128, "values": 2048, "outputs": 768}
TILES = [int(one) for one in (sys.argv[1] if len(sys.argv) > 1 else "64,128,256").split(",")]
DENSE = [T[one] for one in (sys.argv[2] if len(sys.argv) > 2 else "Q4_K,Q6_K").split(",")]
PARTS = (sys.argv[3] if len(sys.argv) > 3 else "check,dense,experts").split(",")
T0 = time.time()
from strata_nb.kernels.gpu import warpgroup_tiles  # noqa: E402

warpgroup_tiles.LATE = os.environ.get("TRY_LATE") == "1"
SIZES = [int(one) for one in (sys.argv[4] if len(sys.argv) > 4 else "4096,512").split(",")]


def jobs() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for rows in TILES:
        found += [("warpgroup_linear", (kind, rows)) for kind in DENSE]
        found += [("warpgroup_gate_up", (T.Q4_K, rows)), ("warpgroup_expert", (T.Q6_K, rows))]
        found += [("warpgroup_group", rows), ("warpgroup_halves", None)][: 1 + (rows == TILES[0])]
    found += [("batch_linear", kind) for kind in DENSE]
    found += [("batch_expert", T.Q4_K), ("batch_expert", T.Q6_K), ("batch_up", T.Q4_K)]
    found += [("batch_count", None), ("batch_group", None), ("batch_sum", None), ("route", None)]
    return found


def compile_one(job: tuple[str, object]) -> float:
    from strata_nb.kernels.gpu.batches import OF_BATCHES
    from strata_nb.kernels.gpu.cubins import Cubins
    from strata_nb.kernels.gpu.routed import CARD_KERNELS

    begin = time.time()
    described = (CARD_KERNELS | OF_BATCHES)[job[0]]
    kernel = described.find(job[1], GIVEN)
    Cubins("sm_90")([(kernel, described.kinds)], None, lambda _: None)
    return time.time() - begin


def main() -> None:
    with ProcessPoolExecutor(14, get_context("fork")) as pool:
        spent = list(pool.map(compile_one, jobs()))
    print(f"compiled: {time.time() - T0:.1f} s, longest {max(spent):.1f} s", flush=True)
    import card_batches as cb
    from card_graphs import TimedGraph
    from cublas import Cublas

    from strata_nb import backend
    from strata_nb.kernels.gpu import batches
    from strata_nb.kernels.gpu.launches import card_launches
    from strata_nb.kernels.program import launch

    def run(card, launches, rows):
        cb.compiled(card, launches)
        with ExitStack() as made:
            TimedGraph(card, launches, rows, made, replays=1).seconds()

    def tiled(n):
        found = ExitStack()
        found.enter_context(mock.patch.object(batches, "rows_of_block", lambda *_: n))
        found.enter_context(mock.patch.object(batches, "rows_of_tile", lambda *_: n))
        return found

    def say(what, found, wanted):
        rms = float(np.sqrt(np.mean(np.square(wanted.astype(np.float64)))))
        off = np.abs(found.astype(np.float64) - wanted)
        print(
            f"  {what}: rms {rms:.4g}, rms off {np.sqrt(np.mean(off**2)) / rms:.2e}, "
            f"most {off.max() / rms:.2e}, finite {np.isfinite(found).all()}",
            flush=True,
        )
        if not off.max() < 0.05 * rms:
            print("   ", found.ravel()[:8], wanted.ravel()[:8], flush=True)

    with closing(backend.open_backend("cuda:0", 8)) as card:
        peer = Cublas(card)

        def dense(kind, outputs, values, rows, check):
            with ExitStack() as made:
                memory = cb.Memory(card, made)
                given = {
                    "rows": memory.copy(np.array([rows])),
                    "x": memory.copy(cb.quantised_rows(rows, values)),
                    "weight": memory.copy(cb.weights(kind, outputs, values)),
                    "bias": 0,
                    "y": memory.copy(np.zeros((rows, outputs), np.float32)),
                    "values": values,
                    "outputs": outputs,
                    "add": 0,
                }
                words = memory.words("linear", given)
                one = launch("linear", words, variant=kind, label="p")
                wanted = np.empty((rows, outputs), np.float32)
                found = wanted.copy()
                old = list(card_launches((one,), rows))
                run(card, old, rows)
                card.fetch(given["y"], wanted)
                if not check:
                    us = cb.timed(card, old, rows)["median"]
                    best = peer.tops([(rows, outputs, values)])
                    work = 2 * rows * outputs * values / 1e6
                    print(
                        f"{rows} {kind.name} {outputs}x{values} bytes {us:.1f} us "
                        f"{work / us:.0f} TOPS, cuBLAS {best:.0f}",
                        flush=True,
                    )
                for n in TILES:
                    with tiled(n):
                        new = list(card_launches((one,), rows, warpgroups=True))
                    assert new[1].kernel.name.startswith("warpgroup"), new[1].kernel.name
                    card.send(given["y"], np.zeros((rows, outputs), np.float32))
                    run(card, new, rows)
                    card.fetch(given["y"], found)
                    if check:
                        say(f"{kind.name} {rows} rows, {outputs}x{values}, {n}", found, wanted)
                    else:
                        us = cb.timed(card, new, rows)["median"]
                        alone = cb.timed(card, new[1:], rows)["median"]
                        print(
                            f"   {n}: {us:.1f} us with halves, {work / us / best:.1%} of cuBLAS; "
                            f"{alone:.1f} us alone, {work / alone:.0f} TOPS, "
                            f"{work / alone / best:.1%}",
                            flush=True,
                        )

        def experts(rows):
            kinds = [T.Q4_K, T.Q4_K, T.Q6_K]
            layer = cb.Layer(card, kinds, [128, 8, 2048, 768], rows)
            with ExitStack() as made:
                program = layer._program(cb.Memory(card, made))
                best = peer.tops(layer.products())
                size = min(rows, 512) * 8 * 2048
                results = []
                work = 2 * rows * 8 * 2048 * 768 / 1e6
                for n in (*([] if "quick" in PARTS else [0]), *TILES):
                    with tiled(n):
                        some = list(card_launches(program, rows, warpgroups=n > 0))
                    run(card, some, rows)
                    y = some[-2].arguments["y"]
                    found = np.empty(size, np.float32)
                    card.fetch(y, found)
                    results.append(found)
                    all_of = cb.timed(card, some, rows)["median"]
                    print(
                        f"{rows} layer {n or 'bytes'}: {all_of:.1f} us, "
                        f"{3 * work / all_of:.0f} TOPS, cuBLAS {best:.0f}",
                        flush=True,
                    )
                    said = []
                    for part in some:
                        name = part.kernel.name
                        if "expert" in name or "up_" in name or "halves" in name:
                            us = cb.timed(card, [part], rows)["median"]
                            tops = (2 if "gate_up" in name else 1) * work / us
                            said.append(f"{name} {us:.1f} us {tops:.0f} TOPS")
                    print("     ", "; ".join(said), flush=True)
                    if n == TILES[0] and "quick" not in PARTS:
                        say("products", found, results[0])

        if "check" in PARTS:
            dense(DENSE[0], 200, 512, 300, True)
            dense(DENSE[-1], 130, 768, 77, True)
        if "experts" in PARTS:
            for rows in SIZES:
                experts(rows)
                print(f"{time.time() - T0:.1f} s", flush=True)
        if "dense" in PARTS:
            for rows in SIZES[:3]:
                for shape in ((4096, 2048), (512, 2048), (2048, 4096)):
                    dense(DENSE[0], *shape, rows, False)
                print(f"{time.time() - T0:.1f} s", flush=True)


main()
