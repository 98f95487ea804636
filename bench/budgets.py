"""Run one model on small devices of different budgets: same tokens, hit rates, speed.

Usage:
  budgets.py MODEL [options]
  budgets.py --help

Options:
  --shares=LIST   shares of the experts that shall have a slot, in percent; "floor" is one slot a
                  layer [default: 100,50,10,floor]
  --tokens=N      tokens that are generated after each prompt [default: 256]
  --context=N     cells of the K/V [default: 1024]
  --name=NAME     the figures go to bench/results/budgets_NAME.json; default: the model's name

Three prompts are read and continued, at temperature 0 and with --deterministic, on the host, which
reads experts where they are, and on a device whose budget has room for each share. The logits of
every token must have the same bits everywhere. Then the host's copy of every resident expert is
overwritten with 0xFF, and the prompts are read and continued again: the logits must keep their
bits, for those experts are in slots. The routes of a random model have no locality, so its hit
rates say nothing about those of a trained one.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from docopt import docopt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools")]

from results import write_result  # noqa: E402 - tools/ is no package

from strata_nb import Engine, Options  # noqa: E402
from strata_nb.addresses import memory_view  # noqa: E402
from strata_nb.cache.experts import Tier  # noqa: E402

PROMPTS = (5, 40, 150)  # tokens of each


def main() -> None:
    """Measure what the command line asks for; print and store it."""
    arguments = docopt(str(__doc__))
    model, tokens = Path(arguments["MODEL"]), int(arguments["--tokens"])
    context = int(arguments["--context"])
    rows = {}
    expected: list[str] = []
    for share in ["host", *arguments["--shares"].split(",")]:
        device = "host" if share == "host" else f"host:1x{budget_mib(model, context, share)}MiB"
        # Who left could not come back from a copy that is overwritten.
        adapt = "insert" if share == "host" else "off"
        options = Options(
            model, device, ctx_size=context, deterministic=True, adapt=adapt, kv_grow=False
        )
        with Engine.open(options) as engine:
            start = time.perf_counter()
            found = list(digests(engine, tokens))
            seconds = time.perf_counter() - start
            expected = expected or found
            report = engine.describe()
            overwritten = overwrite_residents(engine)
            rows[share] = row = {
                "device": device,
                "slots": report.slots,
                "resident": report.resident,
                "hit_rate": report.hit_rate,
                "tokens_per_s": len(PROMPTS) * tokens / seconds,
                "same_bits": found == expected,
                "copies_overwritten": overwritten,
                "same_bits_without_the_copies": list(digests(engine, tokens)) == expected,
            }
            model_of = engine._on_device
            if model_of is not None:
                model_of.ledger.check_integrity()
        print(
            f"{share:6} {device:15} {row['slots']:6,} slots, {row['hit_rate'] or 0:6.1%} hits, "
            f"{row['tokens_per_s']:6.1f} tok/s, same bits: {row['same_bits']}, and with "
            f"{overwritten:,} copies overwritten: {row['same_bits_without_the_copies']}",
            flush=True,
        )
    write_result(
        f"budgets_{arguments['--name'] or model.stem}",
        "three prompts continued on devices with room for a share of the experts; hit_rate: of the "
        "choices of routers; tokens_per_s: generated, prompts and head included",
        " ".join(["python bench/budgets.py", model.name, *sys.argv[2:]]),
        {"model": model.name, "prompts": PROMPTS, "tokens": tokens, "rows": rows},
        ("numpy", "numba", "llvmlite"),
    )
    if not all(row["same_bits"] and row["same_bits_without_the_copies"] for row in rows.values()):
        raise SystemExit("the bits differ")


def digests(engine: Engine, tokens: int) -> Iterator[str]:
    """Yield for each prompt a digest of the logits of all tokens that follow it, greedily."""
    vocab = engine.description.vocab_size
    for number, length in enumerate(PROMPTS):
        ids = np.random.default_rng(number).integers(0, vocab, length).tolist()
        digest = hashlib.sha256()
        with engine.open_session() as session:
            session.extend(ids)
            for _ in range(tokens):
                logits = session.next_logits()
                digest.update(logits.tobytes())
                session.append(int(logits.argmax()))
        yield digest.hexdigest()


def budget_mib(model: Path, context: int, share: str) -> int:
    """Return the smallest budget, in MiB, with room for a share of the experts."""
    whole = Options(model, "host:1x1048576MiB", ctx_size=context, kv_grow=False)
    with Engine.open(whole) as engine:
        on_device = engine._on_device
        if on_device is None:
            raise AssertionError("a device has a model")
        owners = engine.describe().bytes_by_owner
        layout = on_device.arena.layout
        slots = layout.layers
        if share != "floor":
            slots = max(slots, -(-layout.full_slots * int(share) // 100))
        # A chunk more for the K/V and the arena each, which end within one.
        chunk = on_device.ledger.plan.chunk_bytes
        wanted = owners["dense"] + owners["kv"] + layout.bytes_of(slots) + 2 * chunk
        return -(-wanted // (1 << 20))


def overwrite_residents(engine: Engine) -> int:
    """Overwrite the host's copy of every expert that is in a slot; return how many there were."""
    model = engine._on_device
    if model is None:
        raise AssertionError("a device has a model")
    arena = model.arena
    residents = np.argwhere(arena.expert_tier == Tier.SLOT)
    for layer, expert in residents:
        place = int(arena._in_place[layer, expert])
        memory_view(place, arena.layout.blob_bytes[layer])[:] = 0xFF
    return len(residents)


if __name__ == "__main__":
    main()
