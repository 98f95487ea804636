"""Open, use and close a model again and again while calls fail at random: nothing is left."""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from device_world import load, opened, random_tokens, read, same_bits
from streaming_backend import StreamingBackend

from strata_nb.backend import HostBackend
from strata_nb.device_model import DeviceModel
from strata_nb.errors import DriverError
from strata_nb.host import OPERATIONS
from strata_nb.kernels.reference import Floats

IDS = random_tokens(40)
DEVICE = "host:1x4MiB@16KiB"


def load_tiny(backend: HostBackend, path: Path, expert_cache: str = "auto") -> DeviceModel:
    sizes = {"ctx": 512, "rows": 64, "kv_grow_init": 64, "kv_grow_step": 64}
    return load(backend, path, vram_elastic=True, expert_cache=expert_cache, **sizes)


def use(model: DeviceModel, rng: random.Random, expected: Floats) -> None:
    """Do a dozen things in any order; what is read must have the right bits."""
    sequences: list[int] = []
    for _ in range(12):
        action = rng.randrange(5)
        with suppress(DriverError):
            if action == 0 and len(sequences) < 4:
                sequences.append(model.open_sequence())
            elif action == 1 and sequences:
                sequence = rng.choice(sequences)
                model.rewind(sequence, 0)
                model.make_room(sequence, len(IDS), prompt=True)
                assert same_bits(read(model, sequence, IDS), expected)
            elif action == 2 and sequences:
                sequence = rng.choice(sequences)
                read(model, sequence, IDS)
                model.rewind(sequence, model.length(sequence) - rng.randrange(len(IDS)))
            elif action == 3:
                model.set_reserve(rng.choice([None, 0, 1 << 18, 1 << 20, 4 << 20]))
            elif action == 4 and sequences:
                model.forget_sequence(sequences.pop())
        model.ledger.check_integrity()


def live(path: Path, rng: random.Random, expected: Floats, *, streams: bool) -> None:
    backend = StreamingBackend(DEVICE) if streams else HostBackend(DEVICE, 1)
    faults = backend.driver.faults
    own, cache = backend.driver.live(), rng.choice(["auto", "2", "0"]) if streams else "auto"
    try:
        for _ in range(rng.randrange(4)):
            nth = rng.randrange(1, 400 if streams else 40)
            faults.plan(rng.choice(sorted(OPERATIONS)), nth, forever=rng.random() < 0.2)
        with suppress(DriverError):
            model = load_tiny(backend, path, cache)
            try:
                use(model, rng, expected)
            finally:
                with suppress(DriverError):
                    model.close()
                faults.lift()
                model.close()
        faults.lift()
        if backend.driver.live() == own:
            with_nothing_wrong(backend, path, expected)
    finally:
        faults.lift()
        backend.close()
    assert backend.driver.live() == {}


def with_nothing_wrong(backend: HostBackend, path: Path, expected: Floats) -> None:
    own = backend.driver.live()
    model = load_tiny(backend, path)
    assert same_bits(read(model, model.open_sequence(), IDS), expected)
    model.close()
    assert backend.driver.live() == own
    assert backend.driver.account(0).charged_bytes == 0


def counts() -> dict[str, int]:
    """Return what the process has of everything that could be left behind."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "chunks mapped": sum("memfd:" in line for line in maps),
    }


def lives(path: Path, count: int, *, streams: bool = False) -> None:
    with opened(path, ctx=512) as model:
        expected = read(model, model.open_sequence(), IDS)
    live(path, random.Random(-1), expected, streams=streams)  # what is made once for the process
    before = counts()
    for seed in range(count):
        live(path, random.Random(seed), expected, streams=streams)
        assert counts() == before, seed


def test_lives_in_which_calls_fail_leave_nothing_behind(tiny: Path) -> None:
    lives(tiny, 30)


def test_lives_in_which_experts_come_for_batches_leave_nothing_behind(tiny: Path) -> None:
    lives(tiny, 12, streams=True)


@pytest.mark.slow
def test_a_thousand_lives_in_which_calls_fail_leave_nothing_behind(tiny: Path) -> None:
    lives(tiny, 1000)
