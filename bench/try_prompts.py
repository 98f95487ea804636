"""Read prompts on a card, with kernels compiled in many processes at once."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from strata_nb import Engine, Options
from strata_nb.kernels.gpu.cubins import Cubins

ONE = Cubins.__call__
T0 = time.time()
WORKERS = 15


def in_processes(self, wanted, progress, say):
    wanted = list(wanted)
    children = []
    for number in range(WORKERS):
        child = os.fork()
        if not child:
            code = 1
            try:
                ONE(self, wanted[number::WORKERS], None, lambda _: None)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    print(
        f"{time.time() - T0:.1f} s: {len(wanted)} kernels, {sum(map(bool, codes))} failed",
        flush=True,
    )
    return ONE(self, wanted, progress, say)


Cubins.__call__ = in_processes


def main() -> None:
    path = sys.argv[1]
    options = Options(path, "cuda", ctx_size=8192, deterministic="d" in sys.argv[2:])
    with Engine.open(options) as engine:
        print(f"{time.time() - T0:.1f} s: open", flush=True)
        rng = np.random.default_rng(1)
        ids = rng.integers(1000, 100_000, 4096).tolist()
        for rows in (512, 4096):
            spent = []
            for _ in range(4):
                with engine.open_session() as session:
                    begin = time.time()
                    session.extend(ids[:rows])
                    spent.append(time.time() - begin)
            rates = " ".join(f"{rows / one:,.0f}" for one in spent)
            print(f"{rows} rows: {rates} tok/s", flush=True)
        logits = engine.logits(ids[:300])
        print("finite", np.isfinite(logits).all(), "spread", float(logits.std()), flush=True)
        np.save(
            os.environ.get("TRY_LOGITS", "/tmp/try_logits.npy"), logits[::20].astype(np.float32)
        )


main()
